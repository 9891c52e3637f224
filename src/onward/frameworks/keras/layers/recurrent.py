"""LSTM, GRU and SimpleRNN. Variables stay as Keras has them; the graph puts their gates in ONNX's order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from onward.build import Expr
from onward.frameworks.formulas.graph_building import reverse
from onward.frameworks.keras.layers import Call, Tensor, row

_FUNCTIONS = {"tanh": "Tanh", "sigmoid": "Sigmoid", "relu": "Relu", "softsign": "Softsign", "softplus": "Softplus"}
_LSTM_GATES = (0, 3, 1, 2)
"""Where the gates that ONNX has (input, output, forget, cell) are in Keras (input, forget, cell, output)."""


_WHICH = {
    "LSTM": ("recurrent_activation", "activation", "activation"),
    "GRU": ("recurrent_activation", "activation"),
    "SimpleRNN": ("activation",),
}
"""The functions in ONNX's order."""


class _Outcome(NamedTuple):
    """The outputs of all times, each at the time of its input, and the states after the last step."""

    sequence: Expr
    states: list[Expr]


@row("LSTM", "GRU", "SimpleRNN")
def recurrent(c: Call, x: Tensor, initial_state: Any = None) -> Any:
    layer = c.layer
    outcome = _run(c, x, initial_state)
    y = outcome.states[0]
    if layer.return_sequences:
        y = reverse(c.op, outcome.sequence, [1]) if layer.go_backwards else outcome.sequence
    return [y, *outcome.states] if layer.return_state else y


@row("Bidirectional")
def bidirectional(c: Call, x: Tensor) -> Any:
    layer = c.layer
    c.refuse_unless(not layer.return_state, "returns its states")
    outcomes = [_run(c.of(each), x, None) for each in (layer.forward_layer, layer.backward_layer)]
    forward, backward = (o.sequence if layer.return_sequences else o.states[0] for o in outcomes)
    if layer.merge_mode == "concat":
        return c.op.Concat(forward, backward, axis=-1)
    if layer.merge_mode == "sum":
        return forward + backward
    if layer.merge_mode == "ave":
        return (forward + backward) * 0.5
    return forward * backward if layer.merge_mode == "mul" else [forward, backward]


def _run(c: Call, x: Tensor, initial_state: Any) -> _Outcome:
    layer, op = c.layer, c.op
    _check(c)
    kind = type(layer).__name__
    units, operator = int(layer.units), {"SimpleRNN": "RNN"}.get(kind, kind)
    states = [initial_state] if isinstance(initial_state, Tensor) else list(initial_state or [])
    hidden = [op.Unsqueeze(state.plain, [0]) for state in states] or [None]
    results = op.node(
        "",
        operator,
        op.Transpose(x.plain, perm=[1, 0, 2]),
        *_weights(c, kind),
        None,
        *hidden,
        outputs=3 if kind == "LSTM" else 2,
        hidden_size=units,
        direction="reverse" if layer.go_backwards else "forward",
        activations=_activations(c, kind),
        linear_before_reset=int(layer.reset_after) if kind == "GRU" else None,
    )
    sequence, *last = results
    return _Outcome(op.Transpose(op.Squeeze(sequence, [1]), perm=[1, 0, 2]), [op.Squeeze(h, [0]) for h in last])


def _check(c: Call) -> None:
    layer = c.layer
    c.refuse_unless(type(layer).__name__ in ("LSTM", "GRU", "SimpleRNN"), f"runs {type(layer).__name__}")
    c.refuse_unless(not layer.stateful, "is stateful")
    c.refuse_unless(not layer.dropout and not layer.recurrent_dropout, "has dropout inside")


def _activations(c: Call, kind: str) -> list[str]:
    layer = c.layer
    names = [getattr(getattr(layer, which), "__name__", "?") for which in _WHICH[kind]]
    for name in names:
        c.refuse_unless(name in _FUNCTIONS, f"has the activation `{name}`")
    return [_FUNCTIONS[name] for name in names]


def _weights(c: Call, kind: str) -> list[Expr | None]:
    cell, op = c.layer.cell, c.op
    order = {"LSTM": _LSTM_GATES, "GRU": (0, 1, 2)}.get(kind, (0,))
    kernel = _gates(op.Transpose(c.weight(cell.kernel), perm=[1, 0]), order)
    recurrence = _gates(op.Transpose(c.weight(cell.recurrent_kernel), perm=[1, 0]), order)
    bias = _bias(c, order) if cell.use_bias else None
    return [op.Unsqueeze(kernel, [0]), op.Unsqueeze(recurrence, [0]), bias]


def _bias(c: Call, order: Sequence[int]) -> Expr:
    """One for the input and one for the state: Keras has both only in a GRU."""
    bias, op = c.weight(c.layer.cell.bias), c.op
    if len(c.layer.cell.bias.shape) == 2:
        return op.Reshape(bias, [1, -1])
    of_state = np.zeros(c.layer.cell.bias.shape, np.float32)
    return op.Unsqueeze(op.Concat(_gates(bias, order), of_state, axis=0), [0])


def _gates(stacked: Expr, order: Sequence[int]) -> Expr:
    """The gates along the first axis, in another order."""
    if list(order) == sorted(order):
        return stacked
    parts = stacked.op.Split(stacked, outputs=len(order), axis=0, num_outputs=len(order))
    return stacked.op.Concat(*(parts[i] for i in order), axis=0)
