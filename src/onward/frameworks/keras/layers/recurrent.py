"""LSTM, GRU and SimpleRNN. The graph reorders the gates of the variables to ONNX's order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from onward.build import Expr
from onward.frameworks.formulas.graph_building import reverse
from onward.frameworks.keras.layers import Call, LayerTensor, row

_FUNCTIONS = {"tanh": "Tanh", "sigmoid": "Sigmoid", "relu": "Relu", "softsign": "Softsign", "softplus": "Softplus"}
# Indices in Keras (input, forget, cell, output) of the gates in ONNX's order (input, output, forget, cell).
_LSTM_GATES = (0, 3, 1, 2)
_ACTIVATIONS = {  # attributes of a layer, in ONNX's order
    "LSTM": ("recurrent_activation", "activation", "activation"),
    "GRU": ("recurrent_activation", "activation"),
    "SimpleRNN": ("activation",),
}


class _Outcome(NamedTuple):
    sequence: Expr  # outputs, at the time of their input
    states: list[Expr]  # after the last step


@row("LSTM", "GRU", "SimpleRNN")
def recurrent(c: Call, x: LayerTensor, initial_state: Any = None) -> Any:
    layer = c.layer
    outcome = _run(c, x, initial_state)
    y = outcome.states[0]
    if layer.return_sequences:
        y = reverse(c.op, outcome.sequence, [1]) if layer.go_backwards else outcome.sequence
    return [y, *outcome.states] if layer.return_state else y


@row("Bidirectional")
def bidirectional(c: Call, x: LayerTensor) -> Any:
    layer = c.layer
    c.refuse_unless(not layer.return_state, "returns its states")
    outcomes = [_run(c.of(inner), x, None) for inner in (layer.forward_layer, layer.backward_layer)]
    forward, backward = (o.sequence if layer.return_sequences else o.states[0] for o in outcomes)
    if layer.merge_mode == "concat":
        return c.op.Concat(forward, backward, axis=-1)
    if layer.merge_mode == "sum":
        return forward + backward
    if layer.merge_mode == "ave":
        return (forward + backward) * 0.5
    return forward * backward if layer.merge_mode == "mul" else [forward, backward]


def _run(c: Call, x: LayerTensor, initial_state: Any) -> _Outcome:
    layer, op, name = c.layer, c.op, type(c.layer).__name__
    c.refuse_unless(name in ("LSTM", "GRU", "SimpleRNN"), f"runs {name}")
    c.refuse_unless(not layer.stateful, "is stateful")
    c.refuse_unless(not layer.dropout and not layer.recurrent_dropout, "has dropout inside")
    states = [initial_state] if isinstance(initial_state, LayerTensor) else list(initial_state or [])
    hidden = [op.Unsqueeze(state.plain, [0]) for state in states] or [None]
    sequence, *last = op.node(
        "",
        "RNN" if name == "SimpleRNN" else name,
        op.Transpose(x.plain, perm=[1, 0, 2]),
        *_weights(c, name),
        None,
        *hidden,
        outputs=3 if name == "LSTM" else 2,
        hidden_size=int(layer.units),
        direction="reverse" if layer.go_backwards else "forward",
        activations=_activations(c, name),
        linear_before_reset=int(layer.reset_after) if name == "GRU" else None,
    )
    return _Outcome(op.Transpose(op.Squeeze(sequence, [1]), perm=[1, 0, 2]), [op.Squeeze(h, [0]) for h in last])


def _activations(c: Call, layer_name: str) -> list[str]:
    names = [getattr(getattr(c.layer, attribute), "__name__", "?") for attribute in _ACTIVATIONS[layer_name]]
    for name in names:
        c.refuse_unless(name in _FUNCTIONS, f"has the activation `{name}`")
    return [_FUNCTIONS[name] for name in names]


def _weights(c: Call, layer_name: str) -> list[Expr | None]:
    cell, op = c.layer.cell, c.op
    order = {"LSTM": _LSTM_GATES, "GRU": (0, 1, 2)}.get(layer_name, (0,))
    kernel = _gates(op.Transpose(c.weight(cell.kernel), perm=[1, 0]), order)
    recurrence = _gates(op.Transpose(c.weight(cell.recurrent_kernel), perm=[1, 0]), order)
    bias = _bias(c, order) if cell.use_bias else None
    return [op.Unsqueeze(kernel, [0]), op.Unsqueeze(recurrence, [0]), bias]


def _bias(c: Call, order: Sequence[int]) -> Expr:
    """Return the bias of the input and that of the state, which only a GRU of Keras has."""
    variable, op = c.layer.cell.bias, c.op
    if len(variable.shape) == 2:
        return op.Reshape(c.weight(variable), [1, -1])
    state_bias = np.zeros(variable.shape, np.float32)
    return op.Unsqueeze(op.Concat(_gates(c.weight(variable), order), state_bias, axis=0), [0])


def _gates(stacked: Expr, order: Sequence[int]) -> Expr:
    """Reorder the gates along the first axis."""
    if list(order) == sorted(order):
        return stacked
    parts = stacked.op.Split(stacked, outputs=len(order), axis=0, num_outputs=len(order))
    return stacked.op.Concat(*(parts[i] for i in order), axis=0)
