"""Nodes as calls of functions: in the form of the newest version, and in operators that a table has."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.errors import UnsupportedError
from onward.lowering.expand import replace_unknown
from onward.model import TRAINING_DOMAIN, Model
from onward.model.walk import attributes
from onward.standard import NEWEST_INTERPRETED, operator_name


@dataclasses.dataclass
class CallForm:
    """What a function is called with. An input that used to be an attribute is an array."""

    operator: str
    inputs: list[ir.Value | np.ndarray | None]
    attributes: dict[str, Any]


def newest_form(node: ir.Node, opset: int) -> CallForm:
    """A node of version `opset`, brought to the newest one."""
    given = {name: _plain(value) for name, value in attributes(node, opset).items()}
    form = CallForm(operator_name(node), list(node.inputs), given)
    if opset < NEWEST_INTERPRETED:
        form.attributes = {name: _plain(value) for name, value in attributes(node, NEWEST_INTERPRETED).items()} | given
        for below, change in _CHANGES.get(form.operator, ()):
            if opset < below:
                change(form)
    if form.operator == "CastLike":
        _name_the_type(form)
    return form


def has_other_meaning(node: ir.Node, opset: int) -> bool:
    """Whether rows of tables cannot say what this node means, so that its own body is needed."""
    match operator_name(node):
        case "GroupNormalization":
            return opset < 21  # one scale per group, not per channel
        case "Attention":
            more = (*node.inputs[4:], *(value for value in node.outputs[1:] if value.name))
            return any(value is not None for value in more) or any(
                name in node.attributes and node.attributes[name].value != usual for name, usual in _UNUSUAL.items()
            )
    return False


_UNUSUAL = {"left_window_size": -1, "right_window_size": -1, "softcap": 0.0, "softmax_precision": None}
"""What `Attention` may also be told, with defaults; tables have no more of it than is trained every day."""


def _plain(value: Any) -> Any:
    if isinstance(value, ir.TensorProtocol):
        return array_of(value)
    return list(value) if isinstance(value, tuple) else value


def array_of(tensor: ir.TensorProtocol) -> np.ndarray:
    """The numbers of a tensor, or its text, which files hold as bytes."""
    if tensor.dtype != ir.DataType.STRING:
        return tensor.numpy()
    return np.array([text.decode() for text in tensor.numpy().ravel()], object).reshape(tensor.numpy().shape)


# ---- what changed since ----------------------------------------------------------------------------------------------


def _axes_were_an_attribute(form: CallForm) -> None:
    axes = form.attributes.pop("axes", None)
    if axes is not None:
        form.inputs = [form.inputs[0], np.array(axes, np.int64)]


def _axis_was_an_attribute(form: CallForm) -> None:
    axis = form.attributes.pop("axis")
    form.inputs = [*form.inputs, None, None][:2] + [np.array(axis, np.int64)]


def _modes_had_other_names(form: CallForm) -> None:
    names = {"bilinear": "linear", "bicubic": "cubic"}
    form.attributes["mode"] = names.get(form.attributes["mode"], form.attributes["mode"])


def _name_the_type(form: CallForm) -> None:
    """A cast to a type that is known needs no other tensor, and so may stay on the host."""
    like = form.inputs[1]
    if isinstance(like, ir.Value) and like.dtype is not None:
        form.operator, form.inputs = "Cast", form.inputs[:1]
        form.attributes["to"] = like.dtype.value


_Change = tuple[int, Callable[[CallForm], None]]
_REDUCTIONS = ["L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare"]
_CHANGES: dict[str, list[_Change]] = {
    **{f"Reduce{name}": [(18, _axes_were_an_attribute)] for name in _REDUCTIONS},
    "DFT": [(20, _axis_was_an_attribute)],
    "GridSample": [(20, _modes_had_other_names)],
}
"""Operator -> (below this version, what to change)."""


# ---- operators that a table lacks, expressed by those that it has ----------------------------------------------------

_ALWAYS = {"Constant", f"{TRAINING_DOMAIN}.Gradient"}
"""What the interpreter itself does."""


def express(model: Model, operators: Container[str], cannot: Mapping[str, str], engine: str) -> Model:
    """The model in operators of the table: others are replaced by their function bodies or by rewrites."""
    return replace_unknown(
        model, lambda model: _unknown(model, operators), lambda unknown: _refusal(unknown, cannot, engine)
    )


def _unknown(model: Model, operators: Container[str]) -> list[ir.Node]:
    def is_known(node: ir.Node) -> bool:
        name = operator_name(node)
        return name in _ALWAYS or (name in operators and not has_other_meaning(node, model.opset))

    return [node for node in model.graph.all_nodes() if not is_known(node)]


_NO_TENSORS = {
    "ai.onnx.ml.ZipMap": "a list of maps is no tensor; cut it off, such as by `onward extract MODEL --to probabilities`"
}


def _refusal(unknown: list[ir.Node], cannot: Mapping[str, str], engine: str) -> UnsupportedError:
    names = dict.fromkeys(map(operator_name, unknown))
    reasons = {**_NO_TENSORS, **cannot}
    lines = [f"- `{name}`: {reasons.get(name, 'there is no such operator in the table')}" for name in names]
    return UnsupportedError(
        f"the engine `{engine}` lacks operators of this model:\n" + "\n".join(lines),
        hint="`onward engines` says what each engine covers",
    )
