"""Operators of classical machine learning; others of that domain are expressed by those of the standard."""

from __future__ import annotations

import collections
import math
import operator
import statistics

import numpy as np

from onward.engines.framework import Operators
from onward.engines.numpy.activation import sigmoid, softmax

operators = Operators(
    {
        "ai.onnx.ml.ArrayFeatureExtractor": lambda x, indices: np.take(np.atleast_2d(x), indices.ravel(), -1),
        "ai.onnx.ml.Binarizer": lambda x, *, threshold: (x > threshold).astype(x.dtype),
    }
)


@operators.define("ai.onnx.ml.LabelEncoder")
def label_encoder(
    x, *,
    default_float, default_int64, default_string, default_tensor, keys_floats, keys_int64s, keys_strings, keys_tensor,
    values_floats, values_int64s, values_strings, values_tensor,
):  # fmt: skip
    keys = next(_items(found) for found in (keys_tensor, keys_strings, keys_int64s, keys_floats) if found is not None)
    choices = [
        (values_tensor, default_tensor, None if values_tensor is None else values_tensor.dtype),
        (values_strings, default_string, np.dtype(object)),
        (values_int64s, default_int64, np.dtype(np.int64)),
        (values_floats, default_float, np.dtype(np.float32)),
    ]
    values, default, kind = next(choice for choice in choices if choice[0] is not None)
    default = _items(default)[0] if isinstance(default, np.ndarray) else default
    table = {_key(key): value for key, value in zip(keys, _items(values), strict=True)}
    return np.array([table.get(_key(key), default) for key in _items(x)], kind).reshape(x.shape)


def _key(key):
    """One NaN is not equal to another, but is to be found by it."""
    return "nan" if isinstance(key, float) and math.isnan(key) else key


def _items(values):
    return np.asarray(values).ravel().tolist()


@operators.define("ai.onnx.ml.TreeEnsemble")
def tree_ensemble(
    x, *,
    aggregate_function, leaf_targetids, leaf_weights, membership_values, n_targets, nodes_falseleafs,
    nodes_falsenodeids, nodes_featureids, nodes_missing_value_tracks_true, nodes_modes, nodes_splits, nodes_trueleafs,
    nodes_truenodeids, post_transform, tree_roots,
):  # fmt: skip
    members = iter(_sets(membership_values))
    tests = [
        (lambda value, found: value in found, next(members)) if mode == _MEMBER else (_COMPARISONS[mode], split)
        for mode, split in zip(nodes_modes.tolist(), nodes_splits.tolist(), strict=True)
    ]
    if_missing = nodes_missing_value_tracks_true or [0] * len(tests)

    def leaf(row, node):
        """The leaf that a row comes to."""
        at_leaf = False
        while not at_leaf:
            value, (test, operand) = row[nodes_featureids[node]], tests[node]
            if if_missing[node] if math.isnan(value) else test(value, operand):
                node, at_leaf = nodes_truenodeids[node], nodes_trueleafs[node]
            else:
                node, at_leaf = nodes_falsenodeids[node], nodes_falseleafs[node]
        return node

    scores = np.zeros((len(x), n_targets), x.dtype)
    for row, result in zip(x.tolist(), scores, strict=True):
        found = collections.defaultdict(list)
        for reached in (leaf(row, root) for root in tree_roots):
            found[leaf_targetids[reached]].append(leaf_weights[reached].item())
        for target, weights in found.items():
            result[target] = [lambda w: sum(w) / len(tree_roots), sum, min, max][aggregate_function](weights)
    return _TRANSFORMS[post_transform](scores).astype(x.dtype)


_COMPARISONS = [operator.le, operator.lt, operator.ge, operator.gt, operator.eq, operator.ne]
_MEMBER = 6


def _sets(values):
    """The members of each set; NaN stands between them."""
    found = [set()]
    for value in [] if values is None else values.tolist():
        if math.isnan(value):
            found.append(set())
        else:
            found[-1].add(value)
    return found


def _softmax_of_others(scores):
    """Zeros stay zeros."""
    powers = np.where(scores == 0, 0, np.exp(scores - scores.max(1, keepdims=True)))
    return powers / powers.sum(1, keepdims=True)


_TRANSFORMS = [
    lambda scores: scores,
    lambda scores: softmax(scores, axis=1),
    sigmoid,
    _softmax_of_others,
    np.vectorize(statistics.NormalDist().inv_cdf),
]
