"""Losses, where the node tests of `onnx` do not go."""

import numpy as np
from onnx import parser

_LABELS = np.array([[0, 3, 1], [3, 2, 0]])
_WITH_IGNORED = np.array([[0, -100, 1], [3, -100, -100]])
_WEIGHTS = np.array([0.5, 1.5, 2.0, 0.7], np.float32)


def _loss(operator, attributes, labels=_LABELS, *, weighted=True, log_prob=False):
    """Scores [2, 4, 3] of four classes."""
    scores = np.random.default_rng(5).standard_normal((2, 4, 3)).astype(np.float32)
    given = {"scores": scores, "labels": labels} | ({"w": _WEIGHTS} if weighted else {})
    typed = f"float[2, 4, 3] scores, {'int32' if labels.dtype == np.int32 else 'int64'}[2, 3] labels"
    typed += ", float[4] w" if weighted else ""
    results = "float[2, 3] y" if '"none"' in attributes else "float y"
    results += ", float[2, 4, 3] p" if log_prob else ""
    text = f"{'y, p' if log_prob else 'y'} = {operator}<{attributes}>({', '.join(given)})".replace("<>", "")
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> g ({typed}) => ({results}) {{ {text} }}')
    return model, given


def _all(operator, short):
    cases = {}
    for reduction in ("none", "sum", "mean"):
        attribute = f'reduction = "{reduction}"'
        ignoring = f"{attribute}, ignore_index = -100"
        cases[f"{short}_{reduction}"] = _loss(operator, attribute, weighted=False)
        cases[f"{short}_{reduction}_weighted"] = _loss(operator, attribute)
        cases[f"{short}_{reduction}_ignoring"] = _loss(operator, ignoring, _WITH_IGNORED, weighted=False)
        cases[f"{short}_{reduction}_weighted_ignoring"] = _loss(operator, ignoring, _WITH_IGNORED)
    cases[f"{short}_labels_int32"] = _loss(operator, "ignore_index = -100", _WITH_IGNORED.astype(np.int32))
    return cases


CASES = {
    **_all("SoftmaxCrossEntropyLoss", "cross_entropy"),
    **_all("NegativeLogLikelihoodLoss", "likelihood"),
    "cross_entropy_with_log_prob": _loss("SoftmaxCrossEntropyLoss", "", log_prob=True),
    "cross_entropy_with_log_prob_unweighted": _loss(
        "SoftmaxCrossEntropyLoss", 'reduction = "sum"', weighted=False, log_prob=True
    ),
}

EDGES = {
    "cross_entropy_of_nothing": (
        *_loss("SoftmaxCrossEntropyLoss", "ignore_index = -100", np.full((2, 3), -100)),
        np.array(1.0),
        {"scores": np.zeros((2, 4, 3)), "w": np.zeros(4)},
    ),
    "likelihood_of_nothing": (
        *_loss("NegativeLogLikelihoodLoss", "ignore_index = -100", np.full((2, 3), -100)),
        np.array(1.0),
        {"scores": np.zeros((2, 4, 3)), "w": np.zeros(4)},
    ),
}
