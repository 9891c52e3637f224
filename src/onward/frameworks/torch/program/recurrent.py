"""Recurrent operators as PyTorch's own, which have the gates in another order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from onward.errors import UnsupportedError
from onward.frameworks.program.calls import Value
from onward.frameworks.program.sizes import with_attributes
from onward.frameworks.torch.program.recording import Recorder, compute, numbered_tensor, sources, without_recording

_GATES = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2), "RNN": (0,)}
"""Indices of ONNX's gates in the order of PyTorch."""
_FUNCTIONS: dict[str, dict[tuple[str, ...], Callable[..., Any]]] = {
    "LSTM": {("Sigmoid", "Tanh", "Tanh"): torch.lstm},
    "GRU": {("Sigmoid", "Tanh"): torch.gru},
    "RNN": {("Tanh",): torch.rnn_tanh, ("Relu",): torch.rnn_relu},
}
"""Functions by their activations, the default first."""
_ATTRIBUTES = ("activations", "clip", "direction", "input_forget", "layout", "linear_before_reset")


def rows(recorder: Recorder) -> dict[str, Callable[..., Any]]:
    """Return operator -> function that records a call of PyTorch."""
    return {name: with_attributes(_Recurrent(name, recorder), _ATTRIBUTES) for name in _GATES}


class _Recurrent:
    def __init__(self, operator: str, recorder: Recorder):
        self._operator = operator
        self._recorder = recorder

    def __call__(self, x: Any, w: Any, r: Any, b: Any = None, *others: Any, **attributes: Any) -> tuple[Any, ...]:
        """Return all outputs of the operator: Y and the last states."""
        lengths, h, c, peepholes = (*others, None, None, None, None)[:4]
        function = self._function({**attributes, "lengths": lengths, "peepholes": peepholes})
        states = [h, c] if self._operator == "LSTM" else [h]
        directions = w.shape[0]
        if attributes["layout"]:
            x, states = x.transpose(0, 1), [None if s is None else s.transpose(0, 1) for s in states]
        if attributes["direction"] == "reverse":
            x = x.flip([0])
        size = (directions, x.shape[1], r.shape[2])
        states = [torch.zeros(size, dtype=x.dtype, device=x.device) if s is None else s for s in states]
        weights = [tensor for d in range(directions) for tensor in self._weights(w, r, b, d)]
        first = tuple(states) if self._operator == "LSTM" else states[0]
        with torch._C.DisableTorchFunction():  # the function itself fails on symbols
            results = x.new_empty(*x.shape[:2], directions * r.shape[2]), *(x.new_empty(size) for _ in states)
        arguments = [x, first, weights, b is not None, 1, 0.0, False, directions == 2, False]
        y, *last = self._recorder.imagine(f"torch.{function.__name__}", arguments, {}, results, function)
        y = y.unflatten(2, (directions, r.shape[2])).permute(0, 2, 1, 3)
        y = y.flip([0]) if attributes["direction"] == "reverse" else y
        if attributes["layout"]:
            return (y.permute(2, 0, 1, 3), *(state.transpose(0, 1) for state in last))
        return (y, *last)

    def _function(self, settings: dict[str, Any]) -> Callable[..., Any]:
        functions = _FUNCTIONS[self._operator]
        count = 2 if settings["direction"] == "bidirectional" else 1
        activations = next(iter(functions)) * count if settings["activations"] is None else settings["activations"]
        function = next((f for names, f in functions.items() if names * count == tuple(activations)), None)
        linear = self._operator != "GRU" or settings["linear_before_reset"]
        others = (settings.get(name) for name in ("lengths", "peepholes", "clip", "input_forget"))
        if function is None or not linear or any(value not in (None, 0) for value in others):
            raise UnsupportedError(f"PyTorch has no {self._operator} with these settings")
        return function

    def _weights(self, w: Any, r: Any, b: Any, direction: int) -> list[torch.Tensor]:
        """Return the weights and biases of a direction in PyTorch's form."""
        tensors = [self._ordered(w, direction), self._ordered(r, direction)]
        if b is not None:
            half = b.shape[1] // 2
            tensors += [self._ordered(b, direction, slice(0, half)), self._ordered(b, direction, slice(half, None))]
        return tensors

    def _ordered(self, tensor: torch.Tensor, direction: int, rows: slice = slice(None)) -> torch.Tensor:
        """Return gates in PyTorch's order: the parameter that the graph reordered, or a new tensor."""
        with without_recording():
            parameter = self._parameter(self._recorder.value(tensor), direction, rows)
        if parameter is not None:
            return parameter
        return self._reordered(tensor[direction] if rows == slice(None) else tensor[direction, rows])

    def _parameter(self, value: Value, direction: int, rows: slice) -> torch.Tensor | None:
        """Return the parameter with these gates in PyTorch's order, found by numbering its elements."""
        parameters = sorted((s for s in sources(value) if s.path), key=lambda s: s.path)
        numbered, start = {}, 1
        for source in parameters:
            numbered[source] = numbered_tensor(source.tensor.shape, start)
            start += numbered[source].numel()
        if parameters and not any(s.name for s in sources(value)):
            gates = self._reordered(compute(value, numbered)[direction][rows])
            for source, numbers in numbered.items():
                if numbers.shape == gates.shape and torch.equal(numbers, gates):
                    return source.tensor
        return None

    def _reordered(self, gates: torch.Tensor) -> torch.Tensor:
        order = _GATES[self._operator]
        if len(order) == 1:
            return gates
        chunks = gates.chunk(len(order))
        return torch.cat([chunks[i] for i in order])
