"""Operators of `ai.onnx.ml`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from onward.engines.framework import Operators

operators = Operators()


@operators.define("ai.onnx.ml.ArrayFeatureExtractor")
def array_feature_extractor(x, places):
    return jnp.atleast_2d(jnp.take(x, places.reshape(-1), -1, mode="clip"))


@operators.define("ai.onnx.ml.Binarizer")
def binarizer(x, *, threshold):
    return (x > threshold).astype(x.dtype)


@operators.define("ai.onnx.ml.TreeEnsemble")
def tree_ensemble(
    x,
    *,
    aggregate_function,
    leaf_targetids,
    leaf_weights,
    membership_values=None,
    n_targets=1,
    nodes_falseleafs,
    nodes_falsenodeids,
    nodes_featureids,
    nodes_missing_value_tracks_true=None,
    nodes_modes,
    nodes_splits,
    nodes_trueleafs,
    nodes_truenodeids,
    post_transform,
    tree_roots,
):
    """All trees at once: each sample goes down by one node at a time, until all are at leaves."""
    count = len(nodes_featureids)
    following = [
        jnp.asarray(np.where(is_leaf, count, 0) + ids)
        for is_leaf, ids in ((nodes_trueleafs, nodes_truenodeids), (nodes_falseleafs, nodes_falsenodeids))
    ]
    features, splits, modes = map(jnp.asarray, (nodes_featureids, nodes_splits, nodes_modes))
    members = jnp.asarray(_members(nodes_modes, membership_values, x.dtype))
    lost = jnp.asarray(nodes_missing_value_tracks_true or [0] * count, bool)
    at = jnp.broadcast_to(jnp.asarray(tree_roots), (len(x), len(tree_roots)))
    for _ in range(_depth(tree_roots, nodes_trueleafs, nodes_truenodeids, nodes_falseleafs, nodes_falsenodeids)):
        node = jnp.minimum(at, count - 1)
        value, split = jnp.take_along_axis(x, features[node], 1), splits[node]
        tests = [value <= split, value < split, value >= split, value > split, value == split, value != split]
        tests.append((value[..., None] == members[node]).any(-1))
        is_true = jnp.select([modes[node] == mode for mode in range(len(tests))], tests)
        is_true |= jnp.isnan(value) & lost[node]
        at = jnp.where(at < count, jnp.where(is_true, following[0][node], following[1][node]), at)
    leaf = at - count
    weights, targets = jnp.asarray(leaf_weights)[leaf], jnp.asarray(leaf_targetids)[leaf]
    scores = _aggregated(weights, targets[..., None] == np.arange(n_targets), aggregate_function)
    return _TRANSFORMS[post_transform](scores).astype(leaf_weights.dtype)


def _members(modes, values, dtype):
    """For each node the numbers that it tests for, filled up with NaN."""
    members = np.full((len(modes), 1 if values is None else len(values)), np.nan, dtype)
    if values is not None:
        ends = np.flatnonzero(np.isnan(values))
        sets = np.split(values, ends + 1)
        for node, found in zip(np.flatnonzero(np.asarray(modes) == 6), sets, strict=False):
            members[node, : len(found)] = found
    return members


def _depth(roots, true_leafs, true_ids, false_leafs, false_ids):
    depth, level = 0, set(roots)
    while level:
        depth += 1
        ways = ((true_leafs, true_ids), (false_leafs, false_ids))
        level = {ids[node] for node in level for leafs, ids in ways if not leafs[node]}
    return depth


def _aggregated(weights, chosen, function):
    weights = weights[..., None]
    if function < 2:
        total = jnp.where(chosen, weights, 0).sum(1)
        return total / chosen.shape[1] if function == 0 else total
    return jnp.where(chosen, weights, np.inf).min(1) if function == 2 else jnp.where(chosen, weights, -np.inf).max(1)


def _softmax_of_others(scores):
    """A score of zero stays zero."""
    return jnp.where(scores == 0, 0, jax.nn.softmax(jnp.where(scores == 0, -np.inf, scores)))


_TRANSFORMS = [
    lambda scores: scores,
    jax.nn.softmax,
    jax.nn.sigmoid,
    _softmax_of_others,
    jax.scipy.stats.norm.ppf,
]
