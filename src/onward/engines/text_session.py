"""What looks like a session of ONNX Runtime, and is two: text goes to the first, which makes numbers of it.

Text cannot be bound to memory beside the state, as the rest of a step is. So it is handed to a session of its own, and
what comes out of that is bound like any other input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort

from onward.model import Model
from onward.runtime.sessions import open_session


def is_text(array: np.ndarray) -> bool:
    return array.dtype.kind in "UO"


class TextSession:
    def __init__(self, first: Model, rest: Model, open_rest: Callable[[Model], Any]):
        self._texts = [value.name or "" for value in first.inputs]
        self._made = [value.name or "" for value in first.outputs]
        self._first, self._rest = open_session(first, threads=1), open_rest(rest)

    def get_inputs(self) -> list[Any]:
        return [*self._first.get_inputs(), *(one for one in self._rest.get_inputs() if one.name not in self._made)]

    def get_outputs(self) -> list[Any]:
        outputs: list[Any] = self._rest.get_outputs()
        return outputs

    def io_binding(self) -> _Binding:
        return _Binding(self._rest.io_binding(), self._texts)

    def run_with_iobinding(self, binding: _Binding, options: ort.RunOptions | None = None) -> None:
        for name, array in self._numbers(binding.texts, options).items():
            binding.bind_cpu_input(name, array)
        self._rest.run_with_iobinding(binding.rest, options)

    def run_with_ort_values(
        self, outputs: Sequence[str], feeds: Mapping[str, Any], options: ort.RunOptions | None = None
    ) -> list[ort.OrtValue]:
        numbers = self._numbers({name: feeds[name] for name in self._texts}, options)
        given = {name: value for name, value in feeds.items() if name not in self._texts}
        made = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in numbers.items()}
        results: list[ort.OrtValue] = self._rest.run_with_ort_values(outputs, given | made, options)
        return results

    def _numbers(self, texts: Mapping[str, np.ndarray], options: ort.RunOptions | None) -> dict[str, np.ndarray]:
        given = {name: array.astype(object) for name, array in texts.items()}
        return dict(zip(self._made, self._first.run(self._made, given, options), strict=True))


class _Binding:
    """Where the rest finds its inputs and leaves its outputs, and the texts for the next run."""

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
