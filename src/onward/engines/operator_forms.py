"""Nodes in the form of the newest operator version, and in terms of the operators of a table."""

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
"""Mode of `GridSample` before version 20 -> its present name."""


def newest_form(node: ir.Node, opset: int) -> tuple[str, Inputs, dict[str, Any]]:
    """Return operator, inputs and attributes of a node in their newest form; old attributes may be array inputs."""
    operator, inputs = operator_name(node), list[ir.Value | np.ndarray | None](node.inputs)
    options = {name: _plain(value) for name, value in attributes(node, opset).items()}
    if opset < NEWEST_INTERPRETED:
        options = {name: _plain(value) for name, value in attributes(node, NEWEST_INTERPRETED).items()} | options
    match operator:
        case "CastLike" if isinstance(like := inputs[1], ir.Value) and like.dtype is not None:
            # With a known type the second tensor is not read, so the node may stay on the host.
            return "Cast", inputs[:1], options | {"to": like.dtype.value}
        case "DFT" if opset < 20:
            inputs = [*inputs, None, None][:2] + [np.array(options.pop("axis"), np.int64)]
        case "GridSample" if opset < 20:
            options["mode"] = _MODES.get(options["mode"], options["mode"])
        case _ if operator.startswith("Reduce") and opset < 18 and (axes := options.pop("axes", None)) is not None:
            inputs = [inputs[0], np.array(axes, np.int64)]
    return operator, inputs, options


def needs_body(node: ir.Node, opset: int) -> bool:
    """True if table rows do not implement this form of an operator, so its function body is needed."""
    match operator_name(node):
        case "GroupNormalization":
            return opset < 21  # one scale per group, not per channel
        case "Attention":
            more = (*node.inputs[4:], *(value for value in node.outputs[1:] if value.name))
            return any(value is not None for value in more) or any(
                name in node.attributes and node.attributes[name].value != default
                for name, default in _RARE_ATTENTION.items()
            )
    return False


_RARE_ATTENTION = {"left_window_size": -1, "right_window_size": -1, "softcap": 0.0, "softmax_precision": None}
"""Attributes of `Attention` that table rows do not implement, with their defaults."""


def _plain(value: Any) -> Any:
    if isinstance(value, ir.TensorProtocol):
        return array_of(value)
    return list(value) if isinstance(value, tuple) else value


def array_of(tensor: ir.TensorProtocol) -> np.ndarray:
    """Return the content of a tensor as an array. Strings are stored as bytes and are decoded."""
    if tensor.dtype != ir.DataType.STRING:
        return tensor.numpy()
    return np.array([text.decode() for text in tensor.numpy().ravel()], object).reshape(tensor.numpy().shape)


# ---- missing operators, expressed by operators of a table -----------------------------------------------------------

_ALWAYS = {"Constant", f"{TRAINING_DOMAIN}.Gradient"}
"""Operators that the interpreter itself runs."""
_NO_TENSORS = {
    "ai.onnx.ml.ZipMap": "a list of maps is not a tensor; remove it: `onward extract MODEL --to probabilities`"
}
_DEQUANTIZE = (
    "make it a float model: `onward prepare MODEL --loss mse --dequantize -o training.onnx`, "
    "then `onward strip training.onnx -o float.onnx`"
)


def express(model: Model, operators: Container[str], cannot: Mapping[str, str], engine: str) -> Model:
    """Return the model in operators of the table. Function bodies or rewrites replace other operators."""

    def unknown_nodes(model: Model) -> list[ir.Node]:
        def is_known(node: ir.Node) -> bool:
            name = operator_name(node)
            return name in _ALWAYS or (name in operators and not needs_body(node, model.opset))

        return [node for node in model.graph.all_nodes() if not is_known(node)]

    def refusal(unknown: list[ir.Node]) -> UnsupportedError:
        reasons = {**_NO_TENSORS, **cannot}
        names = dict.fromkeys(map(operator_name, unknown))
        lines = [f"- `{name}`: {reasons.get(name, 'not in the table of operators')}" for name in names]
        is_quantized = any("Quant" in name or "Integer" in name for name in names)
        return UnsupportedError(
            f"the engine `{engine}` lacks operators of this model:\n" + "\n".join(lines),
            hint=_DEQUANTIZE if is_quantized else "`onward engines` lists the operators of each engine",
        )

    return replace_unknown(model, unknown_nodes, refusal)
