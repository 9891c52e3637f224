"""Nodes as calls of functions: in the form of the newest version, and in operators that a table has."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.errors import UnsupportedError
from onward.lowering.standard_operators import replace_unknown
from onward.model import TRAINING_DOMAIN, Model
from onward.model.walk import attributes
from onward.standard import NEWEST_INTERPRETED, operator_name

Inputs = list[ir.Value | np.ndarray | None]
_MODES = {"bilinear": "linear", "bicubic": "cubic"}
"""Modes of `GridSample` before version 20, as they are now."""


def newest_form(node: ir.Node, opset: int) -> tuple[str, Inputs, dict[str, Any]]:
    """Return operator, inputs and attributes of a node of version `opset`, as the newest version has them.

    An input that used to be an attribute is an array.
    """
    operator, inputs = operator_name(node), list[ir.Value | np.ndarray | None](node.inputs)
    given = {name: _plain(value) for name, value in attributes(node, opset).items()}
    if opset < NEWEST_INTERPRETED:
        given = {name: _plain(value) for name, value in attributes(node, NEWEST_INTERPRETED).items()} | given
    match operator:
        case "CastLike" if isinstance(like := inputs[1], ir.Value) and like.dtype is not None:
            # A type that is known needs no other tensor, and so may stay on the host.
            return "Cast", inputs[:1], given | {"to": like.dtype.value}
        case "DFT" if opset < 20:
            inputs = [*inputs, None, None][:2] + [np.array(given.pop("axis"), np.int64)]
        case "GridSample" if opset < 20:
            given["mode"] = _MODES.get(given["mode"], given["mode"])
        case _ if operator.startswith("Reduce") and opset < 18 and (axes := given.pop("axes", None)) is not None:
            inputs = [inputs[0], np.array(axes, np.int64)]
    return operator, inputs, given


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


# ---- operators that a table lacks, expressed by those that it has ----------------------------------------------------

_ALWAYS = {"Constant", f"{TRAINING_DOMAIN}.Gradient"}
"""What the interpreter itself does."""
_NO_TENSORS = {
    "ai.onnx.ml.ZipMap": "a list of maps is no tensor; cut it off, such as by `onward extract MODEL --to probabilities`"
}


def express(model: Model, operators: Container[str], cannot: Mapping[str, str], engine: str) -> Model:
    """The model in operators of the table: others are replaced by their function bodies or by rewrites."""

    def unknown_nodes(model: Model) -> list[ir.Node]:
        def is_known(node: ir.Node) -> bool:
            name = operator_name(node)
            return name in _ALWAYS or (name in operators and not has_other_meaning(node, model.opset))

        return [node for node in model.graph.all_nodes() if not is_known(node)]

    def refusal(unknown: list[ir.Node]) -> UnsupportedError:
        reasons = {**_NO_TENSORS, **cannot}
        names = dict.fromkeys(map(operator_name, unknown))
        lines = [f"- `{name}`: {reasons.get(name, 'there is no such operator in the table')}" for name in names]
        return UnsupportedError(
            f"the engine `{engine}` lacks operators of this model:\n" + "\n".join(lines),
            hint="`onward engines` says what each engine covers",
        )

    return replace_unknown(model, unknown_nodes, refusal)
