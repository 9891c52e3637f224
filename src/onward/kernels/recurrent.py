"""Recurrent layers: a kernel goes through the steps of one direction, in the place of a Scan.

What is around it is that of the plain graph: products of the inputs with weights, for all steps at once, are before it,
and those of its gradient, for all steps at once, are behind that.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onward.build import Builder, Expr
from onward.kernels.library import DOMAIN
from onward.kernels.rewriting import with_gradient
from onward.model.walk import attributes
from onward.rules.recurrent import FUNCTIONS, Direction, both_biases, gru_biases, layer
from onward.shapes import dims
from onward.standard import is_standard
from onward.transform.context import Context

_X, _R, _LENGTHS, _PEEPHOLES = 0, 2, 4, 7
_INPUTS = {"RNN": 6, "GRU": 6, "LSTM": 8}


def use_recurrent(context: Context) -> None:
    """Let kernels compute the recurrent layers in the outermost graph that a gradient goes through, in place."""
    trained = with_gradient(context.graph)
    for node in list(context.graph):
        is_layer = is_standard(node) and node.op_type in FUNCTIONS and any(value in trained for value in node.inputs)
        if is_layer and _is_usual(node, attributes(node, context.model.opset)):
            _replace(context, node)


def _is_usual(node: ir.Node, settings: dict[str, Any]) -> bool:
    """Whether the kernels compute what a layer does, and its sizes are known as far as they must be."""
    inputs = _inputs(node)
    others = [value for i, value in enumerate(inputs) if value is not None and i != _LENGTHS]
    usual = FUNCTIONS[node.op_type]
    functions = list(settings["activations"] or usual)
    peepholes = inputs[_PEEPHOLES] if node.op_type == "LSTM" else None
    units = settings["hidden_size"] or (dims(inputs[_R]) or (None,))[-1]
    return (
        functions in (usual, usual * 2)
        and settings["clip"] is None
        and not settings.get("input_forget")
        and peepholes is None
        and all(value.dtype == ir.DataType.FLOAT for value in others)
        and len(dims(inputs[_X]) or ()) == 3
        and isinstance(units, int)
    )


def _inputs(node: ir.Node) -> list[ir.Value | None]:
    return [*node.inputs, *[None] * (_INPUTS[node.op_type] - len(node.inputs))]


def _replace(context: Context, node: ir.Node) -> None:
    with context.before(node) as op:
        x, w, r, b, lengths, *states = (None if value is None else op(value) for value in _inputs(node))
        ends = None if lengths is None else op.Cast(lengths, to=ir.DataType.INT64)
        peepholes = states.pop() if node.op_type == "LSTM" else None
        made = layer(op, node, lambda given: _run(op, node, given, ends), x, w, r, b, peepholes, lengths, *states)
        for output, result in zip(node.outputs, made, strict=False):
            if result is not None and output.name:
                context.replace(output, result)


def _run(op: Builder, node: ir.Node, given: Direction, lengths: Expr | None) -> list[Expr | None]:
    """Go through all steps: the hidden states after each, or None if they are not wanted; and the last states."""
    kernel, bias, further = _kernel(op, node, given)
    sizes, count = given.sizes, len(given.states)
    results = op.node(
        DOMAIN,
        kernel,
        *(sizes.items(given.w, bias), given.r, *given.states, *further, lengths),
        backwards=int(given.backwards),
        outputs=2 * count + (kernel != "RNN"),
    )
    for result in results:
        result.value.type = ir.TensorType(ir.DataType.FLOAT)
    every = [sizes.of_states(states) for states in results[:count]]
    last = [sizes.of_state(state) for state in results[count : 2 * count]]
    return [every[0] if node.outputs[0].name else None, *last]


def _kernel(op: Builder, node: ir.Node, given: Direction) -> tuple[str, Expr | None, list[Expr | None]]:
    """The kernel of a layer, the bias of its items, and what it takes besides items and states."""
    linear = node.attributes.get_int("linear_before_reset", 0)
    if node.op_type != "GRU" or not linear:
        return node.op_type, both_biases(op, given.b), []
    if given.b is None:
        return "LinearGRU", None, [None]
    gates, candidate, inner = gru_biases(op, given)
    return "LinearGRU", op.Concat(gates, candidate, axis=0), [inner]
