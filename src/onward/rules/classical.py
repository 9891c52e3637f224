"""Classical machine learning, `ai.onnx.ml`, as standard operators.

The weights are attributes and have no gradient. To train a linear model, `recipe/training_mode.py` makes them
initializers. Results are float32, as these operators compute for any type of input.
"""

import functools
import itertools
import math

import numpy as np
import onnx_ir as ir

from onward.errors import UnsupportedError
from onward.rules import registry
from onward.rules.common import rank
from onward.standard import ML_DOMAIN

FLOAT = ir.DataType.FLOAT

rewrite = functools.partial(registry.rewrite, domain=ML_DOMAIN)
body = functools.partial(registry.body, domain=ML_DOMAIN)
no_gradient = functools.partial(registry.no_gradient, domain=ML_DOMAIN)


@rewrite("Scaler")
def scaler(op, x, *, offset, scale):
    """Return (X - offset) scale, with numbers per feature or for all."""
    x = op.Cast(x, to=FLOAT)
    x = x - _vector(offset) if offset else x
    return x * _vector(scale) if scale else x


@rewrite("Normalizer")
def normalizer(op, x, *, norm="MAX"):
    """Divide each row by its norm; a row of zeros stays. The norm MAX is the largest element, without Abs."""
    x = op.Cast(x, to=FLOAT)
    norms = {"L1": op.ReduceL1, "L2": op.ReduceL2, "MAX": op.ReduceMax}
    size = norms[norm](x, [-1], keepdims=1)
    return x / op.Where(op.Equal(size, 0), 1, size)


@rewrite("LinearRegressor")
def linear_regressor(op, x, *, coefficients, intercepts, targets=1, post_transform="NONE"):
    y = _rows(op, x) @ _matrix(coefficients, targets)
    return post_transform_scores(op, y + _vector(intercepts) if intercepts else y, post_transform)


@rewrite("LinearClassifier")
def linear_classifier(
    op, x, *, coefficients, intercepts, classlabels_ints, classlabels_strings, post_transform="NONE", node,
):  # fmt: skip
    """Return the best label and the scores of the classes; a single score is that of the second of two classes."""
    labels = classlabels_ints or classlabels_strings or ()
    scores = _rows(op, x) @ _matrix(coefficients, len(intercepts or labels))
    scores = scores + _vector(intercepts) if intercepts else scores
    return classify(op, scores, intercepts, labels, post_transform, node)


def classify(op, scores, intercepts, labels, post_transform, node):
    """Return the labels and probabilities of a LinearClassifier from its scores."""
    if intercepts and len(intercepts) == 1:
        winner = op.Cast(op.Squeeze(scores, [1]) > 0, to=ir.DataType.INT64)
        return _label(op, winner, labels), _of_two(op, scores, post_transform, node, 1 - scores)
    return _label(op, op.ArgMax(scores, axis=1, keepdims=0), labels), post_transform_scores(op, scores, post_transform)


@rewrite("SVMRegressor")
def svm_regressor(
    op, x, *, coefficients, rho, support_vectors, n_supports=0, kernel_type="LINEAR", kernel_params, one_class=0,
    post_transform="NONE",
):  # fmt: skip
    x = _rows(op, x)
    if n_supports:
        x = _kernel(op, x, _matrix(support_vectors, n_supports), kernel_type, kernel_params)
    y = x @ _matrix(coefficients, 1) + rho[0]
    if one_class:
        return op.Where(y > 0, 1, op.scalar(-1, y))
    return post_transform_scores(op, y, post_transform)


@rewrite("SVMClassifier")
def svm_classifier(
    op, x, *, coefficients, rho, support_vectors, vectors_per_class, prob_a, kernel_type="LINEAR", kernel_params,
    classlabels_ints, classlabels_strings, post_transform="NONE", node,
):  # fmt: skip
    """Score each pair of classes, which vote; without support vectors, score each class."""
    if prob_a:
        raise UnsupportedError(
            f"no gradient of `SVMClassifier` (node `{node.name}`) with probabilities, which an iteration computes",
            hint="save the classifier without `prob_a` and `prob_b`: its scores have a gradient",
        )
    x, labels = _rows(op, x), classlabels_ints or classlabels_strings
    if not vectors_per_class:
        scores = x @ _matrix(coefficients, len(labels)) + rho[0]
        return classify(op, scores, None, labels, post_transform, node)
    kernels = _kernel(op, x, _matrix(support_vectors, sum(vectors_per_class)), kernel_type, kernel_params)
    scores = kernels @ _pairs(coefficients, vectors_per_class) + _vector(rho)
    label = _label(op, op.ArgMax(_votes(op, scores, len(labels)), axis=1, keepdims=0), labels)
    if len(labels) == 2:
        first = -scores if post_transform == "NONE" else 1 - scores
        return label, _of_two(op, scores, post_transform, node, first)
    return label, post_transform_scores(op, scores, post_transform)


@rewrite("Imputer")
def imputer(
    op, x, *, imputed_value_floats, imputed_value_int64s, replaced_value_float=0.0, replaced_value_int64=0,
):  # fmt: skip
    """Replace missing elements by a value per feature, or one for all."""
    if not imputed_value_floats:
        return op.Where(op.Equal(x, np.int64(replaced_value_int64)), np.array(imputed_value_int64s, np.int64), x)
    missing = op.IsNaN(x) if math.isnan(replaced_value_float) else op.Equal(x, replaced_value_float)
    return op.Where(missing, op.CastLike(_vector(imputed_value_floats), x), x)


@rewrite("FeatureVectorizer")
def feature_vectorizer(op, *inputs, inputdimensions):
    """Concatenate features, with each input cropped or zero-padded to its width."""
    flat = [op.Reshape(op.Cast(x, to=FLOAT), op.Concat(op.Shape(x, end=1), [-1], axis=0)) for x in inputs]
    wide = [op.Pad(x, [0, 0, 0, width]) for x, width in zip(flat, inputdimensions, strict=True)]
    return op.Concat(*(op.Slice(w, [0], [n], [1]) for w, n in zip(wide, inputdimensions, strict=True)), axis=1)


@rewrite("ArrayFeatureExtractor")
def array_feature_extractor(op, x, indices):
    y = op.Gather(x, op.Reshape(indices, [-1]), axis=-1)
    return op.Unsqueeze(y, [0]) if rank(x) == 1 else y


no_gradient("the result is 0 or 1", "Binarizer")
no_gradient(
    "the result is a label, or is looked up by one", "CastMap", "CategoryMapper", "DictVectorizer", "LabelEncoder",
    "OneHotEncoder", "ZipMap",
)  # fmt: skip
no_gradient(
    "trees are piecewise constant: their derivative is zero almost everywhere", "TreeEnsemble",
    "TreeEnsembleClassifier", "TreeEnsembleRegressor",
)  # fmt: skip


# ---- elements and trees ----------------------------------------------------------------------------------------------


@body("Binarizer")
def binarizer(op, x, *, threshold=0.0):
    return op.CastLike(x > threshold, x)


@body("TreeEnsemble")
def tree_ensemble(
    op, x, *,
    aggregate_function=1, leaf_targetids, leaf_weights, membership_values, n_targets, nodes_falseleafs,
    nodes_falsenodeids, nodes_featureids, nodes_missing_value_tracks_true, nodes_modes, nodes_splits, nodes_trueleafs,
    nodes_truenodeids, post_transform=0, tree_roots,
):  # fmt: skip
    """Descend all trees at once, a node at a time, until all examples are at leaves, where they stay."""
    nodes, leaves = len(nodes_featureids), np.arange(len(leaf_targetids))
    branches = ((nodes_trueleafs, nodes_truenodeids), (nodes_falseleafs, nodes_falsenodeids))
    following = [np.append(np.where(is_leaf, nodes, 0) + ids, nodes + leaves) for is_leaf, ids in branches]

    def of_node(values):
        """Return a lookup of values per node; leaves, which come last, have zeros."""
        padded = np.append(values, np.zeros([len(leaves), *values.shape[1:]], values.dtype), axis=0)
        return lambda at: op.Gather(op.constant(padded), at)

    modes, splits = nodes_modes.numpy(), nodes_splits.numpy()
    feature, split, mode = of_node(np.array(nodes_featureids)), of_node(splits), of_node(modes)
    members = of_node(_members(modes, membership_values, splits.dtype))
    if_missing = of_node(np.array(nodes_missing_value_tracks_true or [0] * nodes, bool))

    def test(value, at, operator):
        if operator == _MEMBER:
            same = op.Equal(op.Unsqueeze(value, [2]), members(at))
            return op.Cast(op.ReduceMax(op.Cast(same, to=FLOAT), [2], keepdims=0), to=ir.DataType.BOOL)
        return _COMPARISONS[operator](op, value, split(at))

    at = op.Expand(np.array([tree_roots]), op.Concat(op.Shape(x, end=1), [len(tree_roots)], axis=0))
    for _ in range(_depth(tree_roots, following, nodes)):
        value = op.GatherElements(x, feature(at), axis=1)
        first, *others = np.unique(modes)
        is_true = test(value, at, first)
        for operator in others:
            is_true = op.Where(op.Equal(mode(at), operator), test(value, at, operator), is_true)
        is_true = op.Where(op.IsNaN(value), if_missing(at), is_true)
        at = op.Where(is_true, *(op.Gather(ids, at) for ids in map(op.constant, following)))
    leaf = at - nodes
    weights = op.Unsqueeze(op.Gather(op.constant(leaf_weights.numpy()), leaf), [2])
    targets = op.Unsqueeze(op.Gather(op.constant(np.array(leaf_targetids)), leaf), [2])
    scores = _aggregate(op, weights, op.Equal(targets, np.arange(n_targets)), aggregate_function, len(tree_roots))
    return post_transform_scores(op, scores, _TRANSFORMS[post_transform])


_COMPARISONS = [
    lambda op, a, b: a <= b,
    lambda op, a, b: a < b,
    lambda op, a, b: a >= b,
    lambda op, a, b: a > b,
    lambda op, a, b: op.Equal(a, b),
    lambda op, a, b: op.Not(op.Equal(a, b)),
]
_MEMBER = 6
_TRANSFORMS = ["NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT"]


def _members(modes, values, dtype):
    """Return the members of each node's set, padded with NaN, which also ends each set in `values`."""
    if values is None:
        return np.full((len(modes), 1), np.nan, dtype)
    values = values.numpy()
    members = np.full((len(modes), len(values)), np.nan, dtype)
    sets = np.split(values, np.flatnonzero(np.isnan(values)) + 1)
    for node, numbers in zip(np.flatnonzero(modes == _MEMBER), sets, strict=False):
        members[node, : len(numbers)] = numbers
    return members


def _depth(roots, following, nodes):
    """Return the largest number of nodes above a leaf."""
    depth, level = 0, set(roots)
    while level:
        depth += 1
        level = {ids[node] for node in level for ids in following if ids[node] < nodes}
    return depth


def _aggregate(op, weights, chosen, function, trees):
    """Return the mean, sum, minimum or maximum of the trees per target; 0 if no tree has it."""
    if function < 2:
        total = op.ReduceSum(op.Where(chosen, weights, 0), [1], keepdims=0)
        return total / trees if function == 0 else total
    reduce, without = (op.ReduceMin, np.inf) if function == 2 else (op.ReduceMax, -np.inf)
    extreme = reduce(op.Where(chosen, weights, without), [1], keepdims=0)
    return op.Where(op.Equal(extreme, without), 0, extreme)


# ---- weights ---------------------------------------------------------------------------------------------------------


def _vector(numbers):
    return np.array(numbers, np.float32)


def _matrix(numbers, rows):
    """Return the transpose of a matrix that is stored row by row."""
    return np.ascontiguousarray(_vector(numbers).reshape(rows, -1).T)


def _pairs(coefficients, counts):
    """Return the weights [vector, pair] of kernels in the scores of pairs; vectors are sorted by class."""
    rows = _vector(coefficients).reshape(len(counts) - 1, -1)
    starts = np.concatenate([[0], np.cumsum(counts)])
    columns = []
    for i, j in itertools.combinations(range(len(counts)), 2):
        column = np.zeros(starts[-1], np.float32)
        column[starts[i] : starts[i + 1]] = rows[j - 1, starts[i] : starts[i + 1]]
        column[starts[j] : starts[j + 1]] = rows[i, starts[j] : starts[j + 1]]
        columns.append(column)
    return np.stack(columns, axis=1)


def _kernel(op, x, vectors, name, parameters):
    """Return the kernel of each row of X and each support vector, a column of `vectors`."""
    gamma, offset, degree = parameters or (0.0, 0.0, 0.0)
    if name == "RBF":
        squares = op.ReduceSumSquare(x, [1], keepdims=1) + np.square(vectors).sum(axis=0)
        return op.Exp((squares - (x @ vectors) * 2) * -gamma)
    products = x @ vectors
    if name == "LINEAR":
        return products
    products = products * gamma + offset
    return op.Tanh(products) if name == "SIGMOID" else products**degree


def _votes(op, scores, classes):
    """Count the pairs that each class wins: a positive score is for the first of a pair."""
    first, second = (np.eye(classes, dtype=np.float32)[list(i)] for i in np.triu_indices(classes, 1))
    wins = op.Cast(scores > 0, to=FLOAT)
    return wins @ first + (1 - wins) @ second


# ---- scores ----------------------------------------------------------------------------------------------------------


def _rows(op, x):
    """Return examples in rows; a single example may be a vector."""
    x = op.Cast(x, to=FLOAT)
    return op.Unsqueeze(x, [0]) if rank(x) == 1 else x


def _label(op, winner, labels):
    if not labels:
        return winner
    name = "value_strings" if isinstance(labels[0], str | bytes) else "value_ints"
    return op.Gather(op.Constant(**{name: list(labels)}), winner)


def _of_two(op, score, post_transform, node, first):
    """Return the scores of two classes from that of the second."""
    if post_transform == "PROBIT":
        raise UnsupportedError(
            f"no gradient of `{node.op_type}` (node `{node.name}`) with PROBIT of two classes: runtimes differ",
            hint="save the classifier with the scores of both classes",
        )
    if post_transform == "LOGISTIC":
        return op.Concat(op.Sigmoid(-score), op.Sigmoid(score), axis=1)
    return op.Concat(first, score, axis=1)


def post_transform_scores(op, scores, how):
    if how == "SOFTMAX":
        return op.Softmax(scores, axis=-1)
    if how == "LOGISTIC":
        return op.Sigmoid(scores)
    if how == "SOFTMAX_ZERO":  # a score of zero has no share
        highest = op.ReduceMax(scores, [-1], keepdims=1)
        shares = op.Where(op.Abs(scores) > 1e-7, op.Exp(scores - highest), scores * op.Exp(-highest))
        return shares / op.ReduceSum(shares, [-1], keepdims=1)
    if how == "PROBIT":  # sqrt(2) erfinv(2 p - 1), with Winitzki's approximation of erfinv
        x = scores * 2 - 1
        log = op.Log((1 - x) * (1 + x))
        middle = log * 0.5 + 2 / (math.pi * _WINITZKI)
        return op.Sign(x) * op.Sqrt(op.Sqrt(middle * middle - log / _WINITZKI) - middle) * math.sqrt(2)
    return scores


_WINITZKI = 0.147
"""Constant of the approximation; runtimes use the same."""
