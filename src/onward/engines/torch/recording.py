"""What a function does with tensors, recorded: the operators of PyTorch that it calls, without what decides on them.

The interpreter looks at every value to see where it is to be computed, and by what. For tensors of the same sizes that
comes to the same each time, so that a recording of one time, made above the derivative, does for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import make_fx

from onward.errors import UnsupportedError

Run = Callable[[Sequence[Any]], Sequence[Any]]
_MOST = 16
"""Recordings of a function: where sizes are always others, these are enough."""


class Recording:
    """A function of tensors and arrays as a graph of PyTorch's operators, which may be compiled.

    The arrays are a part of it, and so are those among its results.
    """

    def __init__(self, run: Run, values: Sequence[Any], compile: Callable[[fx.GraphModule], Any] = lambda graph: graph):
        self._known: dict[int, Any] = {}
        self._places = [i for i, value in enumerate(values) if torch.is_tensor(value)]

        def recorded(*tensors: torch.Tensor) -> list[torch.Tensor]:
            results = run(list({**dict(enumerate(values)), **dict(zip(self._places, tensors, strict=True))}.values()))
            if any(isinstance(result, list) for result in results):
                raise UnsupportedError("sequences of tensors are not recorded", hint="run without compiling")
            self._count = len(results)
            self._known = {i: result for i, result in enumerate(results) if not torch.is_tensor(result)}
            return [result for result in results if torch.is_tensor(result)]

        given = [values[i].detach().requires_grad_(values[i].requires_grad) for i in self._places]
        record = make_fx(recorded, tracing_mode="fake", pre_dispatch=True, _allow_non_fake_inputs=True)
        with saved_tensors_hooks(_same, _same):  # whoever counts what is kept for the derivative is not to count this
            self._call = compile(record(*given))

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        results = iter(self._call(*(values[i] for i in self._places)))
        return [self._known[i] if i in self._known else next(results) for i in range(self._count)]


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class Recorded:
    """A function that is recorded for each set of sizes, if it depends on no more than these."""

    def __init__(self, run: Run):
        self._run = run
        self._versions: dict[Any, Run] = {}

    def __call__(self, values: Sequence[Any]) -> Sequence[Any]:
        if not all(map(_is_plain, values)):
            return self._run(values)
        key = torch.is_grad_enabled(), *kinds_of(values)
        if key not in self._versions:
            if len(self._versions) == _MOST:
                return self._run(values)
            self._versions[key] = self._recorded(values)
        return self._versions[key](values)

    def _recorded(self, values: Sequence[Any]) -> Run:
        try:
            return Recording(self._run, values)
        except RuntimeError:  # it depends on values, too, or fails, which is better said by itself
            return self._run


def _is_plain(value: Any) -> bool:
    """Whether a value is no subclass of a tensor, no sequence, no array of texts, whose bytes are only addresses."""
    return type(value) in (torch.Tensor, torch.nn.Parameter, np.ndarray) and value.dtype != object


def kinds_of(values: Iterable[Any]) -> list[Any]:
    """What a recording is for: tensors of these sizes and types, and these arrays."""
    return [(x.shape, x.dtype, x.device) if torch.is_tensor(x) else (x.shape, x.dtype.str, x.tobytes()) for x in values]
