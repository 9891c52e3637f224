"""A training step compiled as a whole by XLA, once for each set of batch shapes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax

from onward.errors import UnsupportedError
from onward.run.framework import Function

Report = Callable[[str], None]


class Compiled:
    """A step that is compiled when it is first called with a batch of some shapes, or executed as it is if it must."""

    def __init__(
        self, step: Function, place: Function, report: Report | None, options: Mapping[str, Any], *, in_place: bool
    ):
        """With `in_place` new state is written over the old one, all of which is returned."""
        self._step = step
        self._place = place
        self._report = report or (lambda text: None)
        self._compiled = jax.jit(step, donate_argnums=0 if in_place else (), compiler_options=dict(options) or None)
        self._seen: set[Any] = set()
        self._refused: set[Any] = set()

    def __call__(self, state: Any, constants: Any, batch: Mapping[str, Any]) -> Any:
        shapes = tuple(tensor.shape for tensor in batch.values())
        if shapes not in self._seen:
            self._seen.add(shapes)
            return self._first(shapes, state, constants, batch)
        if shapes in self._refused:
            return self._step(state, constants, {name: self._place(value) for name, value in batch.items()})
        return self._compiled(state, constants, batch)

    def _first(self, shapes: Any, state: Any, constants: Any, batch: Mapping[str, Any]) -> Any:
        shown = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in batch.items())
        self._report(f"jax compiles the step for {shown}" if shown else "jax compiles the step")
        try:
            return self._compiled(state, constants, batch)
        except UnsupportedError as error:
            warnings.warn(f"the step is not compiled: {error}", stacklevel=3)
            self._refused.add(shapes)
            return self(state, constants, batch)
