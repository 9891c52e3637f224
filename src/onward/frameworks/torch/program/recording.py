"""Recorder of a forward pass as calls of PyTorch's own functions, on tensors without data.

Sizes that vary are symbols, so that the recorder sees formulas of sizes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves

from onward.engines.torch.types import from_array
from onward.errors import UnsupportedError
from onward.frameworks.program.calls import ProgramStep, Value, map_argument
from onward.frameworks.torch.module import LIVE

TRAINING = object()
"""Argument that stands for `self.training`."""


class WhileTraining(NamedTuple):
    """Argument that is zero in inference."""

    value: float


@contextlib.contextmanager
def without_recording() -> Iterator[None]:
    """Compute with real numbers, without recording the calls."""
    with torch.utils._python_dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
        yield


class Recorder(TorchFunctionMode):  # type: ignore[misc]
    """Recorder of each call that computes tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = ShapeEnv()
        self.fake = FakeTensorMode(shape_env=self.sizes, allow_non_fake_inputs=True)
        self.steps: list[ProgramStep] = []
        self.known: dict[int, Value] = {}

    # ---- tensors from outside ----------------------------------------------------------------------------------------

    def add(self, value: Value) -> torch.Tensor:
        self.known[id(value.tensor)] = value
        return value.tensor

    def stand_in(self, example: torch.Tensor, varies: list[bool]) -> torch.Tensor:
        """Return a tensor without data. Varying axes of equal size share a symbol."""
        dynamic = [DimDynamic.DYNAMIC if varying else DimDynamic.STATIC for varying in varies]
        with torch._C.DisableTorchFunction():
            return self.fake.from_tensor(example, symbolic_context=StatelessSymbolicContext(dynamic_sizes=dynamic))

    def constant(self, array: np.ndarray) -> torch.Tensor:
        """Return a tensor whose elements are constant."""
        with without_recording():
            tensor = from_array(array)
        return self.add(Value(self.stand_in(tensor, [False] * tensor.ndim), array=array))

    # ---- calls -------------------------------------------------------------------------------------------------------

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        tensors = result if isinstance(result, tuple | list) else (result,)
        if not any(isinstance(x, FakeTensor) for x in tensors) or isinstance(function, torch._ops.OpOverload):
            return result
        if not all(id(x) in self.known for x in tensors):  # else it returned what it was given
            self.record(resolve_name(function), args, kwargs or {}, result, function)
        return result

    def imagine(
        self, function: str, args: Any, named: Mapping[str, Any], result: Any, call: Callable[..., Any] | None = None
    ) -> Any:
        """Record a call that was not made. Its result requires a gradient if an argument does."""
        with torch._C.DisableTorchFunction():
            learns = any(isinstance(x, torch.Tensor) and x.requires_grad for x in tree_leaves((args, dict(named))))
            for tensor in result if isinstance(result, tuple | list) else [result]:
                tensor.requires_grad_(learns and tensor.is_floating_point())
        return self.record(function, args, named, result, call)

    def record(
        self, function: str, args: Any, named: Mapping[str, Any], result: Any, call: Callable[..., Any] | None = None
    ) -> Any:
        """Record a call, and return its result."""
        arguments, keywords = map_argument(
            (list(args), dict(named)), lambda x: self.value(x) if isinstance(x, torch.Tensor) else x
        )
        step = ProgramStep(function, arguments, keywords, call=call)
        step.is_tuple = isinstance(result, tuple | list)
        step.results = [Value(x, step=step) for x in (result if step.is_tuple else [result])]
        for value in step.results:
            self.add(value)
        self.steps.append(step)
        return result

    def value(self, tensor: torch.Tensor) -> Value:
        if id(tensor) not in self.known:
            if isinstance(tensor, FakeTensor):
                raise UnsupportedError("a tensor has no source", hint=LIVE)
            self.add(Value(tensor, array=tensor.detach().numpy()))
        return self.known[id(tensor)]


# ---- computing -------------------------------------------------------------------------------------------------------


def sources(value: Value) -> set[Value]:
    """Return the inputs and stored tensors that a value is computed from."""
    if value.step is None:
        return set() if value.array is not None else {value}
    return {source for operand in value.step.values() for source in sources(operand)}


def compute(value: Value, known_tensors: Mapping[Value, torch.Tensor]) -> torch.Tensor:
    """Return a value in real numbers, computed from others with the sizes of the recording."""
    if value in known_tensors:
        return known_tensors[value]
    if value.array is not None:
        return from_array(value.array)
    if value.step is None or value.step.call is None:
        raise LookupError("a value has no function")
    arguments, named = map_argument(
        (value.step.arguments, value.step.named),
        lambda x: compute(x, known_tensors) if isinstance(x, Value) else hint(x),
    )
    result = value.step.call(*arguments, **named)
    return result[value.step.results.index(value)] if value.step.is_tuple else result


def is_always_zero(value: Value) -> bool:
    """True if a value is zero for all inputs."""
    try:
        with without_recording():
            return not sources(value) and not bool(compute(value, {}).any())
    except LookupError:
        return False


def hint(size: Any) -> Any:
    """Return the number that a symbol stands for during recording."""
    return size.node.hint if isinstance(size, torch.SymInt | torch.SymFloat) else size


def numbered_tensor(shape: Iterable[Any], start: int = 0) -> torch.Tensor:
    """Return a tensor of consecutive numbers, to track where elements move."""
    sizes = [hint(size) for size in shape]
    return torch.arange(start, start + math.prod(sizes)).reshape(sizes)
