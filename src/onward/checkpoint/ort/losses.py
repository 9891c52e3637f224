"""Losses as onnxruntime-training appends them to a model, recognised."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onward.constants import constant_tensor
from onward.model import Model
from onward.recipe.losses import loss as named_loss
from onward.recipe.spec import Spec
from onward.transform.types import fill_in_types

_P, _T = "prediction", "target"
_PROBABILITY = ("Sigmoid", _P)
_LOSSES: dict[str, Any] = {
    "mse": ("Pow", ("Sub", _P, _T), 2.0),
    "l1": ("Abs", ("Sub", _P, _T)),
    "bce_with_logits": (
        "Neg",
        (
            "Add",
            ("Mul", ("Log", _PROBABILITY), _T),
            ("Mul", ("Log", ("Sub", 1.0, _PROBABILITY)), ("Sub", 1.0, _T)),
        ),
    ),
}
"""As `onnxblock` builds them, before they are reduced."""
_REDUCTIONS = {"ReduceMean": "mean", "ReduceSum": "sum"}


def loss_of(model: Model) -> tuple[Any, str | None]:
    """The loss in words of a recipe, and the value that it is about; `value:...` and None where it has no name."""
    value = model.outputs[0]
    found = _cross_entropy(value) or _elementwise(value)
    unnamed = f"value:{value.name}", None
    if found is None:
        return unnamed
    spec, bound = found
    prediction, target = bound[_P], bound[_T]
    if not target.is_graph_input() or prediction.producer() is None:
        return unnamed
    fill_in_types(model, [prediction])
    expected = named_loss(spec.name).targets(prediction, **spec.options)[0]
    if target.dtype != expected.dtype or target.shape != expected.shape:
        return unnamed
    return spec, prediction.name


def _cross_entropy(value: ir.Value) -> tuple[Spec, dict[str, ir.Value]] | None:
    node = value.producer()
    if node is None or node.op_type != "SoftmaxCrossEntropyLoss" or node.domain or len(node.inputs) != 2:
        return None
    scores, labels = node.inputs
    if scores is None or labels is None or any(each.uses() for each in node.outputs[1:]):
        return None
    names = ("reduction", "ignore_index")
    options = {name: node.attributes[name].value for name in names if name in node.attributes}
    return Spec("cross_entropy", options), {_P: scores, _T: labels}


def _elementwise(value: ir.Value) -> tuple[Spec, dict[str, ir.Value]] | None:
    node = value.producer()
    if (
        node is None
        or node.domain
        or node.op_type not in _REDUCTIONS
        or len(node.inputs) != 1
        or "axes" in node.attributes
    ):
        return None
    for name, pattern in _LOSSES.items():
        bound: dict[str, ir.Value] = {}
        if _matches(node.inputs[0], pattern, bound):
            return Spec(name, {"reduction": _REDUCTIONS[node.op_type]}), bound
    return None


def _matches(value: ir.Value | None, pattern: Any, bound: dict[str, ir.Value]) -> bool:
    if value is None:
        return False
    if isinstance(pattern, str):
        return bound.setdefault(pattern, value) is value
    if isinstance(pattern, float):
        constant = constant_tensor(value)
        return constant is not None and constant.size == 1 and float(constant.numpy().item()) == pattern
    node = value.producer()
    return (
        node is not None
        and not node.domain
        and node.op_type == pattern[0]
        and len(node.inputs) == len(pattern) - 1
        and all(_matches(each, part, bound) for each, part in zip(node.inputs, pattern[1:], strict=True))
    )
