"""Recurrent operators as PyTorch's own, whose gates are in another order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from onward.errors import UnsupportedError
from onward.frameworks.program.calls import Value
from onward.frameworks.program.sizes import with_attributes
from onward.frameworks.torch.program.recording import Recorder, compute, numbered_tensor, sources, without_recording

Tensors = Sequence[torch.Tensor]

GATES = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2), "RNN": (0,)}
"""Which gate of ONNX is where PyTorch has its first, second, ..."""
_ACTIVATIONS = {
    "LSTM": [["Sigmoid", "Tanh", "Tanh"]],
    "GRU": [["Sigmoid", "Tanh"]],
    "RNN": [["Tanh"], ["Relu"]],
}
_PYTORCH: dict[str, Callable[..., Any]] = {"LSTM": torch.lstm, "GRU": torch.gru, "RNN": torch.rnn_tanh}


class Recurrent:
    """One of the operators."""

    def __init__(self, operator: str, recorder: Recorder):
        self._operator = operator
        self._recorder = recorder
        self._gates = GATES[operator]

    def run(self, x: Any, w: Any, r: Any, b: Any, states: list[Any], settings: dict[str, Any]) -> tuple[Any, ...]:
        """Y, and the last states. `settings` are attributes, and inputs that PyTorch has nothing for."""
        function = self._function(settings)
        directions = w.shape[0]
        if settings["layout"]:
            x, states = x.transpose(0, 1), [None if s is None else s.transpose(0, 1) for s in states]
        if settings["direction"] == "reverse":
            x = x.flip([0])
        size = (directions, x.shape[1], r.shape[2])
        started = [torch.zeros(size, dtype=x.dtype, device=x.device) if s is None else s for s in states]
        weights = [tensor for d in range(directions) for tensor in self._weights(w, r, b, d)]
        first = tuple(started) if self._operator == "LSTM" else started[0]
        with torch._C.DisableTorchFunction():  # PyTorch needs to know sizes to compute it
            results = x.new_empty(*x.shape[:2], directions * r.shape[2]), *(x.new_empty(size) for _ in states)
        arguments = [x, first, weights, b is not None, 1, 0.0, False, directions == 2, False]
        y, *last = self._recorder.imagine(f"torch.{function.__name__}", arguments, {}, results, function)
        y = y.unflatten(2, (directions, r.shape[2])).permute(0, 2, 1, 3)
        y = y.flip([0]) if settings["direction"] == "reverse" else y
        if settings["layout"]:
            return (y.permute(2, 0, 1, 3), *(state.transpose(0, 1) for state in last))
        return (y, *last)

    def _function(self, settings: dict[str, Any]) -> Callable[..., Any]:
        chosen = settings["activations"]
        count = 2 if settings["direction"] == "bidirectional" else 1
        known = _ACTIVATIONS[self._operator]
        other = chosen is not None and all(chosen != names * count for names in known)
        odd = ("lengths", "peepholes", "clip", "input_forget")
        linear = self._operator != "GRU" or settings["linear_before_reset"]
        if other or not linear or any(settings.get(name) not in (None, 0) for name in odd):
            raise UnsupportedError(f"PyTorch has no {self._operator} with these settings")
        return torch.rnn_relu if chosen is not None and chosen[0] == "Relu" else _PYTORCH[self._operator]

    def _weights(self, w: Any, r: Any, b: Any, direction: int) -> list[torch.Tensor]:
        """The weights and biases of a direction, as PyTorch has them."""
        found = [self._ordered(w, direction), self._ordered(r, direction)]
        if b is not None:
            half = b.shape[1] // 2
            found += [self._ordered(b, direction, slice(0, half)), self._ordered(b, direction, slice(half, None))]
        return found

    def _ordered(self, tensor: torch.Tensor, direction: int, part: slice = slice(None)) -> torch.Tensor:
        """The gates in PyTorch's order: a parameter, if the graph had brought one into the order of ONNX."""
        with without_recording():
            found = self._parameter(self._recorder.value(tensor), direction, part)
        if found is not None:
            return found
        return self._reordered(tensor[direction] if part == slice(None) else tensor[direction, part])

    def _parameter(self, value: Value, direction: int, part: slice) -> torch.Tensor | None:
        """The one of which these are the gates, by where its elements go."""
        held = sorted((s for s in sources(value) if s.path), key=lambda s: s.path)
        marks, start = {}, 1
        for source in held:
            marks[source] = numbered_tensor(source.tensor.shape, start)
            start += marks[source].numel()
        if held and not any(s.name for s in sources(value)):
            numbers = self._reordered(compute(value, marks)[direction][part])
            for source, mark in marks.items():
                if mark.shape == numbers.shape and torch.equal(mark, numbers):
                    return source.tensor
        return None

    def _reordered(self, gates: torch.Tensor) -> torch.Tensor:
        if len(self._gates) == 1:
            return gates
        chunks = gates.chunk(len(self._gates))
        return torch.cat([chunks[i] for i in self._gates])


_ASKED = ("activations", "clip", "direction", "input_forget", "layout", "linear_before_reset")


def rows(recorder: Recorder) -> dict[str, Callable[..., Any]]:
    """The rows of a table."""
    return {name: with_attributes(_row(Recurrent(name, recorder), name), _ASKED) for name in GATES}


def _row(kind: Recurrent, operator: str) -> Callable[..., Any]:
    def call(x: Any, w: Any, r: Any, b: Any = None, *others: Any, **attributes: Any) -> tuple[Any, ...]:
        lengths, h, c, peepholes = (*others, None, None, None, None)[:4]
        states = [h, c] if operator == "LSTM" else [h]
        return kind.run(x, w, r, b, states, {**attributes, "lengths": lengths, "peepholes": peepholes})

    return call
