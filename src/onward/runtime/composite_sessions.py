"""Sessions made of several sessions, with the interface of ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import onnxruntime as ort

from onward.model import Model
from onward.runtime.sessions import open_session


class Exchange(NamedTuple):
    """A value that processes sum between two segments, by its name before and after."""

    local: str
    common: str
    mean: bool


class Processes(Protocol):
    """The processes that exchange values."""

    size: int
    copies: int

    def sum(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]: ...


class _Named(NamedTuple):
    name: str


class SegmentedSession:
    """A session that runs a graph in segments and all-reduces between them."""

    def __init__(
        self,
        sessions: Sequence[ort.InferenceSession | None],
        exchanged: Sequence[Sequence[Exchange]],
        inputs: Sequence[str],
        outputs: Sequence[str],
        group: Processes,
    ):
        self.group, self.sessions, self.exchanged = group, sessions, exchanged
        self._inputs, self._outputs = [_Named(name) for name in inputs], [_Named(name) for name in outputs]

    def get_inputs(self) -> list[_Named]:
        return self._inputs

    def get_outputs(self) -> list[_Named]:
        return self._outputs

    def io_binding(self) -> _SegmentedBinding:
        return _SegmentedBinding(self)

    def run_with_iobinding(self, binding: _SegmentedBinding, options: ort.RunOptions | None = None) -> None:
        binding.run(options)

    def run_with_ort_values(
        self, outputs: Sequence[str], feeds: Mapping[str, ort.OrtValue], options: ort.RunOptions | None = None
    ) -> list[ort.OrtValue]:
        binding = self.io_binding()
        for name, value in feeds.items():
            binding.bind_ortvalue_input(name, value)
        for name in outputs:
            binding.bind_output(name, "cpu")
        binding.run(options)
        return binding.get_outputs()


class _SegmentedBinding:
    """Inputs and outputs of all segments."""

    def __init__(self, session: SegmentedSession):
        self._group, self._exchanged = session.group, session.exchanged
        self._segments = [None if segment is None else _Segment(segment) for segment in session.sessions]
        self._outputs: list[str] = []
        self._values: dict[str, ort.OrtValue] = {}

    def bind_cpu_input(self, name: str, array: np.ndarray) -> None:
        self.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))

    def bind_ortvalue_input(self, name: str, value: ort.OrtValue) -> None:
        for segment in filter(None, self._segments):
            segment.read(name, value)

    def bind_output(self, name: str, device: str) -> None:
        self._outputs.append(name)

    def bind_ortvalue_output(self, name: str, value: ort.OrtValue) -> None:
        self._outputs.append(name)
        for segment in filter(None, self._segments):
            segment.write(name, value)

    def get_outputs(self) -> list[ort.OrtValue]:
        return [self._values[name] for name in self._outputs]

    def run(self, options: ort.RunOptions | None) -> None:
        for segment, exchanged in zip(self._segments, self._exchanged, strict=True):
            if segment is not None:
                self._pass_on(segment.run(options))
            if exchanged:
                sums = self._group.sum([self._values[exchange.local].numpy() for exchange in exchanged])
                pairs = zip(exchanged, sums, strict=True)
                self._pass_on({exchange.common: self._value(exchange, total) for exchange, total in pairs})

    def _value(self, exchange: Exchange, total: np.ndarray) -> ort.OrtValue:
        divisor = self._group.size if exchange.mean else self._group.copies
        array = np.asarray(total if divisor == 1 else total / total.dtype.type(divisor))
        value = ort.OrtValue.ortvalue_from_numpy(array)
        if exchange.common not in self._outputs:
            return value
        own = ort.OrtValue.ortvalue_from_shape_and_type(list(array.shape), value.element_type(), "cpu")
        own.update_inplace(array)  # an output must outlive the array
        return own

    def _pass_on(self, values: dict[str, ort.OrtValue]) -> None:
        self._values.update(values)
        for name, value in values.items():
            self.bind_ortvalue_input(name, value)


class _Segment:
    def __init__(self, session: ort.InferenceSession):
        self._session, self._binding = session, session.io_binding()
        self._inputs = {value.name for value in session.get_inputs()}
        self._outputs: dict[str, ort.OrtValue | None] = {value.name: None for value in session.get_outputs()}
        """Outputs, and the memory for them: passed by the caller, or new."""

    def read(self, name: str, value: ort.OrtValue) -> None:
        if name in self._inputs:
            self._binding.bind_ortvalue_input(name, value)

    def write(self, name: str, value: ort.OrtValue) -> None:
        if name in self._outputs:
            self._outputs[name] = value

    def run(self, options: ort.RunOptions | None) -> dict[str, ort.OrtValue]:
        self._binding.clear_binding_outputs()  # the caller may still hold the outputs of the last run
        for name, value in self._outputs.items():
            if value is None:
                self._binding.bind_output(name, "cpu")
            else:
                self._binding.bind_ortvalue_output(name, value)
        self._session.run_with_iobinding(self._binding, options)
        return dict(zip(self._outputs, self._binding.get_outputs(), strict=True))


class TextSession:
    """Two sessions: the first converts text to numbers for the second.

    Text cannot be bound to memory beside the state. So a first session reads it, and its results
    are bound like any other input.
    """

    def __init__(self, first: Model, rest: Model, open_rest: Callable[[Model], Any]):
        self._texts = [value.name or "" for value in first.inputs]
        self._converted = [value.name or "" for value in first.outputs]
        self._first, self._rest = open_session(first, threads=1), open_rest(rest)

    def get_inputs(self) -> list[Any]:
        others = [value for value in self._rest.get_inputs() if value.name not in self._converted]
        return [*self._first.get_inputs(), *others]

    def get_outputs(self) -> list[Any]:
        outputs: list[Any] = self._rest.get_outputs()
        return outputs

    def io_binding(self) -> _TextBinding:
        return _TextBinding(self._rest.io_binding(), self._texts)

    def run_with_iobinding(self, binding: _TextBinding, options: ort.RunOptions | None = None) -> None:
        for name, array in self._numbers(binding.texts, options).items():
            binding.bind_cpu_input(name, array)
        self._rest.run_with_iobinding(binding.rest, options)

    def run_with_ort_values(
        self, outputs: Sequence[str], feeds: Mapping[str, Any], options: ort.RunOptions | None = None
    ) -> list[ort.OrtValue]:
        numbers = self._numbers({name: feeds[name] for name in self._texts}, options)
        fed = {name: value for name, value in feeds.items() if name not in self._texts}
        converted = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in numbers.items()}
        results: list[ort.OrtValue] = self._rest.run_with_ort_values(outputs, fed | converted, options)
        return results

    def _numbers(self, texts: Mapping[str, np.ndarray], options: ort.RunOptions | None) -> dict[str, np.ndarray]:
        strings = {name: array.astype(object) for name, array in texts.items()}
        return dict(zip(self._converted, self._first.run(self._converted, strings, options), strict=True))


class _TextBinding:
    """Inputs and outputs of the second session, and the texts of the next run."""

    def __init__(self, rest: Any, names: Sequence[str]):
        self.rest, self.texts = rest, dict[str, np.ndarray]()
        self._names = names

    def bind_cpu_input(self, name: str, array: np.ndarray) -> None:
        if name in self._names:
            self.texts[name] = array
        else:
            self.rest.bind_cpu_input(name, array)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rest, name)
