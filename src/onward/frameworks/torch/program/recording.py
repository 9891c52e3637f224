"""What a forward pass does, as calls of PyTorch's own functions: recorded while operators run on tensors without data.

Sizes that vary are symbols meanwhile, so that what is computed from them is known as a formula.
"""

from __future__ import annotations

import contextlib
import inspect
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
from onward.frameworks.program.calls import ProgramStep, Value
from onward.frameworks.torch.forward import LIVE

TRAINING = object()
"""An argument that is whether the module is in training."""


class WhileTraining(NamedTuple):
    """An argument that is zero in inference."""

    value: float


@contextlib.contextmanager
def without_recording() -> Iterator[None]:
    """Compute with real numbers, also where calls are written down."""
    with torch.utils._python_dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
        yield


class Recorder(TorchFunctionMode):  # type: ignore[misc]
    """Writes down each call that makes tensors."""

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
        """A tensor without data; axes that vary, and have the same size in the examples, are the same symbol."""
        dynamic = [DimDynamic.DYNAMIC if varying else DimDynamic.STATIC for varying in varies]
        with torch._C.DisableTorchFunction():
            return self.fake.from_tensor(example, symbolic_context=StatelessSymbolicContext(dynamic_sizes=dynamic))

    def constant(self, array: np.ndarray) -> torch.Tensor:
        """A tensor whose elements are known."""
        with without_recording():
            made = from_array(array)
        return self.add(Value(self.stand_in(made, [False] * made.ndim), array=array))

    # ---- calls -------------------------------------------------------------------------------------------------------

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        made = result if isinstance(result, tuple | list) else (result,)
        if not any(isinstance(x, FakeTensor) for x in made) or isinstance(function, torch._ops.OpOverload):
            return result
        if not all(id(x) in self.known for x in made):  # else it returned what it was given
            self.record(resolve_name(function), args, kwargs or {}, result, function)
        return result

    def imagine(
        self, function: str, args: Any, named: Mapping[str, Any], result: Any, call: Callable[..., Any] | None = None
    ) -> Any:
        """Write a call down that was not made: its result, of the right shape, has derivatives if an argument has."""
        with torch._C.DisableTorchFunction():
            learns = any(isinstance(x, torch.Tensor) and x.requires_grad for x in tree_leaves((args, dict(named))))
            for tensor in result if isinstance(result, tuple | list) else [result]:
                tensor.requires_grad_(learns and tensor.is_floating_point())
        return self.record(function, args, named, result, call)

    def record(
        self, function: str, args: Any, named: Mapping[str, Any], result: Any, call: Callable[..., Any] | None = None
    ) -> Any:
        """Write a call down; its result."""
        step = ProgramStep(function, self._valued(list(args)), self._valued(dict(named)), call=call)
        step.is_tuple = isinstance(result, tuple | list)
        step.results = [Value(x, step=step) for x in (result if step.is_tuple else [result])]
        for value in step.results:
            self.add(value)
        self.steps.append(step)
        return result

    def value(self, tensor: torch.Tensor) -> Value:
        if id(tensor) not in self.known:
            if isinstance(tensor, FakeTensor):
                raise UnsupportedError("a tensor comes from nowhere", hint=LIVE)
            self.add(Value(tensor, array=tensor.detach().numpy()))
        return self.known[id(tensor)]

    def _valued(self, argument: Any) -> Any:
        if isinstance(argument, torch.Tensor):
            return self.value(argument)
        if isinstance(argument, dict):
            return {key: self._valued(item) for key, item in argument.items()}
        if isinstance(argument, list | tuple):
            items = [self._valued(item) for item in argument]
            return items if isinstance(argument, list) else tuple(items)
        return argument


def defaults_of(call: Callable[..., Any] | None) -> dict[str, Any]:
    """What the arguments of a function are unless they are given."""
    try:
        parameters = inspect.signature(call).parameters.values() if call is not None else ()
    except (TypeError, ValueError):  # written in C
        return {}
    return {p.name: p.default for p in parameters if p.default is not p.empty}


# ---- trying it -------------------------------------------------------------------------------------------------------


def sources(value: Value) -> set[Value]:
    """What a value is computed from: inputs, and what the module holds."""
    if value.step is None:
        return set() if value.array is not None else {value}
    return {source for operand in value.step.values() for source in sources(operand)}


def compute(value: Value, given: Mapping[Value, torch.Tensor]) -> torch.Tensor:
    """A value as real numbers, from others; sizes that vary are as they were when it was recorded."""
    if value in given:
        return given[value]
    if value.array is not None:
        return from_array(value.array)
    if value.step is None or value.step.call is None:
        raise LookupError("it is not known how this is computed")
    arguments, named = (_real(part, given) for part in (value.step.arguments, value.step.named))
    result = value.step.call(*arguments, **named)
    return result[value.step.results.index(value)] if value.step.is_tuple else result


def _real(argument: Any, given: Mapping[Value, torch.Tensor]) -> Any:
    if isinstance(argument, Value):
        return compute(argument, given)
    if isinstance(argument, dict):
        return {key: _real(item, given) for key, item in argument.items()}
    if isinstance(argument, list | tuple):
        return type(argument)(_real(item, given) for item in argument)
    return hint(argument)


def is_zero(value: Value) -> bool:
    """Whether a value is zero, whatever the inputs are."""
    try:
        with without_recording():
            return not sources(value) and not bool(compute(value, {}).any())
    except LookupError:
        return False


def hint(size: Any) -> Any:
    """The number that a symbol stands for while a program is recorded."""
    return size.node.hint if isinstance(size, torch.SymInt | torch.SymFloat) else size


def numbered_tensor(shape: Iterable[Any], start: int = 0) -> torch.Tensor:
    """A tensor of different numbers, to see where they go."""
    sizes = [hint(size) for size in shape]
    return torch.arange(start, start + math.prod(sizes)).reshape(sizes)
