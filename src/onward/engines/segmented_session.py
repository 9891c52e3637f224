"""What looks like a session of ONNX Runtime, and is several, between which processes exchange what they have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnxruntime as ort

from onward.engines.distributed import ProcessGroup
from onward.lowering.segments import Exchange, cut
from onward.model import Model


class SegmentedSession:
    """A graph with AllReduces, which ONNX Runtime itself does not have. As far as it goes, it is used as a session."""

    def __init__(self, model: Model, open_session: Callable[[Model], ort.InferenceSession], group: ProcessGroup):
        inputs, outputs = ([value.name or "" for value in values] for values in (model.inputs, model.outputs))
        segments = cut(model)
        self.group = group
        self.exchanged = [segment.exchanged for segment in segments]
        self.sessions = [open_session(s.model) if s.model.graph.outputs else None for s in segments]
        self._inputs, self._outputs = [_Named(name) for name in inputs], [_Named(name) for name in outputs]

    def get_inputs(self) -> list[_Named]:
        return self._inputs

    def get_outputs(self) -> list[_Named]:
        return self._outputs

    def io_binding(self) -> _Binding:
        return _Binding(self)

    def run_with_iobinding(self, binding: _Binding, options: ort.RunOptions | None = None) -> None:
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


class _Named:
    """An input or output."""

    def __init__(self, name: str):
        self.name = name


class _Binding:
    """Where all segments find their inputs and leave their outputs."""

    def __init__(self, session: SegmentedSession):
        self._group, self._exchanged = session.group, session.exchanged
        self._segments = [None if one is None else _Segment(one) for one in session.sessions]
        self._wanted: list[str] = []
        self._found: dict[str, ort.OrtValue] = {}

    def bind_cpu_input(self, name: str, array: np.ndarray) -> None:
        self.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))

    def bind_ortvalue_input(self, name: str, value: ort.OrtValue) -> None:
        for segment in filter(None, self._segments):
            segment.read(name, value)

    def bind_output(self, name: str, device: str) -> None:
        self._wanted.append(name)

    def bind_ortvalue_output(self, name: str, value: ort.OrtValue) -> None:
        self._wanted.append(name)
        for segment in filter(None, self._segments):
            segment.write(name, value)

    def get_outputs(self) -> list[ort.OrtValue]:
        return [self._found[name] for name in self._wanted]

    def run(self, options: ort.RunOptions | None) -> None:
        for segment, exchanged in zip(self._segments, self._exchanged, strict=True):
            if segment is not None:
                self._hand_on(segment.run(options))
            if exchanged:
                sums = self._group.sum([self._found[one.local].numpy() for one in exchanged])
                self._hand_on({one.common: self._value(one, total) for one, total in zip(exchanged, sums, strict=True)})

    def _value(self, one: Exchange, total: np.ndarray) -> ort.OrtValue:
        divisor = self._group.size if one.mean else self._group.copies
        array = np.asarray(total if divisor == 1 else total / total.dtype.type(divisor))
        value = ort.OrtValue.ortvalue_from_numpy(array)
        if one.common not in self._wanted:
            return value
        own = ort.OrtValue.ortvalue_from_shape_and_type(list(array.shape), value.element_type(), "cpu")
        own.update_inplace(array)  # what is handed out must not go with the array
        return own

    def _hand_on(self, values: dict[str, ort.OrtValue]) -> None:
        self._found.update(values)
        for name, value in values.items():
            self.bind_ortvalue_input(name, value)


class _Segment:
    def __init__(self, session: ort.InferenceSession):
        self._session, self._binding = session, session.io_binding()
        self._inputs = {value.name for value in session.get_inputs()}
        self._outputs: dict[str, ort.OrtValue | None] = {value.name: None for value in session.get_outputs()}
        """What it makes, and where that goes: into memory that is given, or its own."""

    def read(self, name: str, value: ort.OrtValue) -> None:
        if name in self._inputs:
            self._binding.bind_ortvalue_input(name, value)

    def write(self, name: str, value: ort.OrtValue) -> None:
        if name in self._outputs:
            self._outputs[name] = value

    def run(self, options: ort.RunOptions | None) -> dict[str, ort.OrtValue]:
        self._binding.clear_binding_outputs()  # what was made before may still be in somebody's hands
        for name, value in self._outputs.items():
            if value is None:
                self._binding.bind_output(name, "cpu")
            else:
                self._binding.bind_ortvalue_output(name, value)
        self._session.run_with_iobinding(self._binding, options)
        return dict(zip(self._outputs, self._binding.get_outputs(), strict=True))
