"""Layers with their own kernels: activations, cross entropy, recurrent layers.

Exporters write activations as several nodes; a kernel computes them in one pass:

x * 0.5 * (1 + Erf(x / sqrt(2)))                                       Gelu
x * 0.5 * (1 + Tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3)))           Gelu, approximated
x * Sigmoid(x)                                                         Swish, or SiLU
"""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir

from onward.build import Builder, Expr
from onward.kernels.library import DOMAIN
from onward.kernels.patterns import Constants, differentiable_values, producer_of, sole_producer
from onward.model.walk import attributes
from onward.rules.recurrent import FUNCTIONS, Direction, both_biases, gru_biases, layer
from onward.shapes import dims
from onward.standard import is_standard
from onward.transform.context import Context


def use_activations(context: Context) -> None:
    """Let kernels compute the activations in the outermost graph, in place."""
    search = _Search()
    for node in list(context.graph):
        if not is_standard(node) or node.op_type != "Mul" or node.outputs[0].dtype != ir.DataType.FLOAT:
            continue
        if (match := search.activation(node)) is not None:
            name, x = match
            with context.before(node) as op:
                context.replace(node.outputs[0], op.node(DOMAIN, name, x))


class _Search:
    def __init__(self) -> None:
        self._constants = Constants()

    def activation(self, last: ir.Node) -> tuple[str, ir.Value] | None:
        """Return the kernel for the activation that this Mul ends, and its input."""
        number, factors = self._product(last.outputs[0], last)
        if len(factors) != 2:
            return None
        for x, gate in (factors, factors[::-1]):
            name = self._gate_kernel(x, gate, number)
            if name is not None:
                return name, x
        return None

    def _gate_kernel(self, x: ir.Value, gate: ir.Value, number: float) -> str | None:
        sigmoid = sole_producer(gate, "Sigmoid")
        if sigmoid is not None:
            return "Swish" if sigmoid.inputs[0] is x and number == 1 else None
        added = sole_producer(gate, "Add")
        if added is None or not math.isclose(number, 0.5):
            return None
        not_one = [value for value in added.inputs if self._constants.number(value) != 1]
        inner = sole_producer(not_one[0], "Erf", "Tanh") if len(not_one) == 1 else None
        if inner is None:
            return None
        if inner.op_type == "Erf":
            return "Gelu" if self._is(inner.inputs[0], math.sqrt(0.5), x) else None
        scale, factors = self._product(inner.inputs[0])
        cubic = sole_producer(factors[0], "Add") if len(factors) == 1 else None
        if cubic is None or not _is_near(scale, math.sqrt(2 / math.pi)) or x not in cubic.inputs:
            return None
        cube = next((value for value in cubic.inputs if value is not x), None)
        return "GeluOfTanh" if self._is(cube, 0.044715, x, x, x) else None

    def _is(self, value: ir.Value | None, number: float, *factors: ir.Value) -> bool:
        """True if a value is `number` times the product of `factors`."""
        actual, others = self._product(value)
        return _is_near(actual, number) and others == list(factors)

    def _product(self, value: ir.Value | None, last: ir.Node | None = None) -> tuple[float, list[ir.Value]]:
        """Return a value as a number and factors, through Mul, Div and Pow that nothing else reads."""
        node = last or sole_producer(value, "Mul", "Div", "Pow") or producer_of(value, "Pow")
        if (number := self._constants.number(value)) is not None:
            return number, []
        if node is None:
            return 1.0, [value] if value is not None else []
        a, b = node.inputs
        if node.op_type == "Mul":
            (left, more), (right, others) = self._product(a), self._product(b)
            return left * right, more + others
        exponent = self._constants.number(b)
        if not exponent or (node.op_type == "Pow" and exponent not in (2, 3)):
            return 1.0, [value] if value is not None else []
        before, factors = self._product(a)
        if node.op_type == "Div":
            return before / exponent, factors
        return before**exponent, factors * int(exponent)


def _is_near(number: float, expected: float) -> bool:
    return math.isclose(number, expected, rel_tol=1e-5)


# ---- cross entropy of rows of scores ---------------------------------------------------------------------------------
#
# The kernel needs no matrix of probabilities.


_INTEGERS = (ir.DataType.INT64, ir.DataType.INT32)


def use_cross_entropy(context: Context) -> None:
    """Let kernels compute the cross entropy in the outermost graph, in place."""
    graph = context.graph
    trained = differentiable_values(graph)
    for node in list(graph):
        if producer_of(node.outputs[0], "SoftmaxCrossEntropyLoss") is None:
            continue
        scores, labels, weights = (*node.inputs, None)[:3]
        settings = attributes(node, context.model.opset)
        alone = all(not output.uses() and not output.is_graph_output() for output in node.outputs[1:])
        is_plain = alone and settings["reduction"] in ("mean", "sum") and weights not in trained
        if not is_plain or not _are_rows(scores, labels) or scores is None or labels is None:
            continue
        with context.before(node) as op:
            loss, logarithms = op.node(
                DOMAIN,
                "CrossEntropy",
                scores,
                labels if labels.dtype == ir.DataType.INT64 else op.Cast(labels, to=ir.DataType.INT64),
                weights,
                mean=int(settings["reduction"] == "mean"),
                ignores=int(settings["ignore_index"] is not None),
                ignore_index=settings["ignore_index"],
                outputs=2,
            )
            logarithms.value.type = ir.TensorType(ir.DataType.FLOAT)
            context.replace(node.outputs[0], loss)
        graph.remove(node, safe=True)


def _are_rows(scores: ir.Value | None, labels: ir.Value | None) -> bool:
    """True if scores are a matrix of floats, and each row has a label."""
    if scores is None or labels is None or scores.shape is None or labels.shape is None:
        return False
    fit = scores.shape.rank() == 2 and labels.shape.rank() == 1
    return fit and scores.dtype == ir.DataType.FLOAT and labels.dtype in _INTEGERS


# ---- recurrent layers ------------------------------------------------------------------------------------------------
#
# A kernel runs the steps of one direction, in place of a Scan. Matmuls of inputs and weights stay in the plain graph:
# for all steps at once before the kernel, and for all steps at once behind its gradient.


_X, _R, _LENGTHS, _PEEPHOLES = 0, 2, 4, 7
_INPUTS = {"RNN": 6, "GRU": 6, "LSTM": 8}


def use_recurrent(context: Context) -> None:
    """Let kernels compute recurrent layers on the path of a gradient, in place."""
    trained = differentiable_values(context.graph)
    for node in list(context.graph):
        is_layer = is_standard(node) and node.op_type in FUNCTIONS and any(value in trained for value in node.inputs)
        if is_layer and _is_supported(node, attributes(node, context.model.opset)):
            _replace(context, node)


def _is_supported(node: ir.Node, settings: dict[str, Any]) -> bool:
    """True if the kernels compute a layer, and its sizes are known."""
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
        results = layer(
            op, node, lambda direction: _run(op, node, direction, ends), x, w, r, b, peepholes, lengths, *states
        )
        for output, result in zip(node.outputs, results, strict=False):
            if result is not None and output.name:
                context.replace(output, result)


def _run(op: Builder, node: ir.Node, direction: Direction, lengths: Expr | None) -> list[Expr | None]:
    """Return the hidden states after each step, or None if unused, and the last states."""
    kernel, bias, further = _kernel(op, node, direction)
    sizes, count = direction.sizes, len(direction.states)
    results = op.node(
        DOMAIN,
        kernel,
        *(sizes.items(direction.w, bias), direction.r, *direction.states, *further, lengths),
        backwards=int(direction.backwards),
        outputs=2 * count + (kernel != "RNN"),
    )
    for result in results:
        result.value.type = ir.TensorType(ir.DataType.FLOAT)
    all_states = [sizes.of_states(states) for states in results[:count]]
    last = [sizes.of_state(state) for state in results[count : 2 * count]]
    return [all_states[0] if node.outputs[0].name else None, *last]


def _kernel(op: Builder, node: ir.Node, direction: Direction) -> tuple[str, Expr | None, list[Expr | None]]:
    """Return the kernel of a layer, the bias of its items, and its other inputs."""
    linear = node.attributes.get_int("linear_before_reset", 0)
    if node.op_type != "GRU" or not linear:
        return node.op_type, both_biases(op, direction.b), []
    if direction.b is None:
        return "LinearGRU", None, [None]
    gates, candidate, inner = gru_biases(op, direction)
    return "LinearGRU", op.Concat(gates, candidate, axis=0), [inner]
