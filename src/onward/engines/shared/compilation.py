"""A step that is compiled as a whole, once for each set of batch shapes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from onward.engines.framework import Framework, Function
from onward.errors import UnsupportedError

Report = Callable[[str], None]


class Compiled:
    """A step that is compiled when it is first called with a batch of some shapes, or executed as it is if it must."""

    def __init__(self, framework: Framework, step: Function, compiled: Function, report: Report | None):
        self._framework = framework
        self._step = step
        self._compiled = compiled
        self._report = report or (lambda text: None)
        self._seen: set[Any] = set()
        self._refused: set[Any] = set()

    def __call__(self, state: Any, constants: Any, batch: Mapping[str, Any]) -> Any:
        shapes = tuple(tuple(tensor.shape) for tensor in batch.values())
        if shapes not in self._seen:
            self._seen.add(shapes)
            return self._first(shapes, state, constants, batch)
        if shapes in self._refused:
            return self._step(state, constants, {name: self._framework.adopt(x) for name, x in batch.items()})
        return self._compiled(state, constants, batch)

    def _first(self, shapes: Any, state: Any, constants: Any, batch: Mapping[str, Any]) -> Any:
        shown = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in batch.items())
        name = self._framework.name
        self._report(f"{name} compiles the step for {shown}" if shown else f"{name} compiles the step")
        try:
            return self._compiled(state, constants, batch)
        except UnsupportedError as error:
            if self._framework.only_compiled:
                raise
            warnings.warn(f"the step is not compiled: {error.message}", stacklevel=4)
            self._refused.add(shapes)
            return self(state, constants, batch)
