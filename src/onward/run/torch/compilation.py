"""A training step compiled as a whole: forward, derivative and update become one graph for TorchInductor.

The interpreter runs once for each set of batch shapes, with tensors that have only shapes, and what it does is
recorded. So there is one compilation per set of shapes. New state is written into tensors that held the state before
the last step, in turn: it is neither allocated anew nor does it overwrite what a step can be undone with.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch._inductor.compile_fx import compile_fx
from torch.fx.experimental.proxy_tensor import make_fx

from onward.errors import UnsupportedError

Tensors = dict[str, torch.Tensor]
Step = Callable[[Tensors, Tensors, Tensors], tuple[Tensors, dict[str, Any]]]
Report = Callable[[str], None]


class Compiled:
    """A step that is compiled when it is first called with tensors of some shapes."""

    def __init__(self, step: Step, report: Report | None):
        self._step = step
        self._report = report or (lambda text: None)
        self._versions: dict[Any, Step] = {}

    def __call__(self, state: Tensors, constants: Tensors, batch: Tensors) -> tuple[Tensors, dict[str, Any]]:
        shapes = tuple((name, tensor.shape) for name, tensor in batch.items())
        if shapes not in self._versions:
            self._versions[shapes] = self._compiled(state, constants, batch)
        return self._versions[shapes](state, constants, batch)

    def _compiled(self, state: Tensors, constants: Tensors, batch: Tensors) -> Step:
        shown = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in batch.items())
        self._report(f"torch compiles the step for {shown}" if shown else "torch compiles the step")
        try:
            traced = _Traced(self._step, state, constants, batch)
        except UnsupportedError as error:
            warnings.warn(f"the step is not compiled: {error}", stacklevel=3)
            return self._step
        return traced.compiled()


class _Traced:
    """What a step does, as a graph of PyTorch's operators."""

    def __init__(self, step: Step, state: Tensors, constants: Tensors, batch: Tensors):
        self._inputs = [*state.values(), *constants.values(), *batch.values()]
        self._known: dict[str, Any] = {}

        def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
            given = iter(tensors)
            parts = [dict(zip(part, given, strict=False)) for part in (state, constants, batch)]
            new, results = step(*parts)
            self._updated = [name for name in new if new[name] is not parts[0][name]]
            self._known = {name: value for name, value in results.items() if not torch.is_tensor(value)}
            self._results = [name for name in results if name not in self._known]
            return [*(new[name] for name in self._updated), *(results[name] for name in self._results)]

        self._graph = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(*self._inputs)

    def compiled(self) -> Step:
        call = compile_fx(self._graph, self._inputs)
        updated, names, known = self._updated, self._results, self._known

        def run(state: Tensors, constants: Tensors, batch: Tensors) -> tuple[Tensors, dict[str, Any]]:
            outputs = call(*state.values(), *constants.values(), *batch.values())
            new = dict(zip(updated, outputs, strict=False))
            return state | new, known | dict(zip(names, outputs[len(updated) :], strict=True))

        return run
