"""PyTorch: eager, or compiled as a whole."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _disable_current_modes

from onward.engines.framework import Framework, Function, Operators, table
from onward.engines.torch.compilation import CompiledStep
from onward.engines.torch.types import TYPES, Functions, from_array, has_type, to_array
from onward.errors import UnknownNameError, suggest

PRECISIONS = {None: None, "float32": None, "tf32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Precision -> type of matmuls and convolutions; None: the type of the tensors."""
_MAKE_TENSORS = ("ConstantOfShape", "Range", "RandomNormal", "RandomUniform")
"""Operators without a tensor input, which take the device as an argument."""
_MOST_NODES_ON_CPU = 10_000
"""More than on GPUs, since repeated updates are compiled once."""


class Torch(Framework):
    name = "torch"
    operators = table(__name__, Functions(), [torch.Tensor])

    fuses = ("Attention", "onward.Linear")
    takes_numbers: ClassVar[Mapping[str, Sequence[int]]] = {
        **dict.fromkeys(
            ("Add", "Sub", "Mul", "Div", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"), (0, 1)
        ),
        "BitShift": (1,),
        "BitwiseXor": (0, 1),
        "Clip": (1, 2),
        "Gather": (1,),
        "Pad": (2,),
        "Pow": (1,),
    }

    can_be_recorded = True
    """True if the calls of PyTorch depend only on the sizes of the inputs."""

    def __init__(
        self,
        device: str = "cpu",
        *,
        precision: str | None = None,
        deterministic: bool = False,
        threads: int | None = None,
        on_compile: Callable[[str], None] | None = None,
    ):
        """Create the framework.

        Args:
            precision: Type of matmuls and convolutions in the forward and backward pass, by
                `torch.autocast`. The rest keeps the types of the model. float16 needs a
                `loss_scale`
        """
        if precision not in PRECISIONS:
            names = [name for name in PRECISIONS if name]
            raise UnknownNameError(
                f"unknown precision `{precision}`",
                hint=suggest(str(precision), names) or f"one of {', '.join(names)}",
            )
        self.check_device(device, "PyTorch")
        self._device = torch.device(device)
        self._tf32 = precision == "tf32"
        self._deterministic = deterministic
        self._on_compile = on_compile
        self._half = PRECISIONS[precision]
        if self._device.type == "cpu":
            self.most_nodes = _MOST_NODES_ON_CPU
        if threads is not None:
            torch.set_num_threads(threads)
        self.operators = Operators(self.operators)
        for name in _MAKE_TENSORS:
            self.operators[name] = functools.partial(self.operators[name], device=self._device)

    @classmethod
    def devices(cls) -> list[str]:
        cuda = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        return ["cpu", *(["cuda", *cuda] if cuda else []), *(["mps"] if torch.backends.mps.is_available() else [])]

    def supports(self, dtype: np.dtype) -> bool:
        return has_type(dtype)

    def tensor(self, array: np.ndarray) -> torch.Tensor:
        with _disable_current_modes():  # an array is a constant, also during tracing
            return from_array(array).to(self._device)

    def array(self, tensor: torch.Tensor) -> np.ndarray:
        return to_array(tensor)

    def owned(self, value: Any) -> np.ndarray:
        is_on_device = torch.is_tensor(value) and value.device.type != "cpu"  # so `array` copies it
        return self.array(value) if is_on_device else super().owned(value)

    def typed(self, tensor: torch.Tensor, dtype: ir.DataType | None) -> torch.Tensor:
        if self._half is None or dtype is None or not tensor.is_floating_point():
            return tensor
        return tensor.to(TYPES[dtype])

    def adopt(self, value: Any) -> Any:
        is_foreign = not isinstance(value, np.ndarray | torch.Tensor)
        return torch.from_dlpack(value).to(self._device) if is_foreign else super().adopt(value)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone(memory_format=torch.contiguous_format)

    def compile(self, function: Function) -> Function:
        compiled = CompiledStep(function, self._on_compile)

        def call(*arguments: Any) -> Any:
            with self.active():
                return compiled(*arguments)

        return call

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        half = torch.autocast(self._device.type, self._half, enabled=self._half is not None, cache_enabled=False)
        with torch.no_grad(), half, _tf32(self._tf32), _deterministic(self._deterministic):
            yield

    def derivative(
        self, function: Callable[[Sequence[Any]], tuple[Any, list[Any]]], xs: Sequence[Any]
    ) -> tuple[Any, list[Any], Callable[[], Sequence[Any]]]:
        nested = torch.is_grad_enabled()  # fused attention has no second derivative
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH) if nested else contextlib.nullcontext():
            variables = [x.view_as(x) if x.requires_grad else x.detach().requires_grad_() for x in xs]
            y, more = function(variables)

        def gradients() -> list[torch.Tensor]:
            if not y.requires_grad:  # independent of all variables
                return [torch.zeros_like(x) for x in xs]
            results = torch.autograd.grad(
                y, variables, torch.ones_like(y), create_graph=nested, retain_graph=nested, materialize_grads=True
            )
            if not nested:  # the update follows, in full precision
                torch.set_autocast_enabled(self._device.type, False)
            return list(results)

        return (y, more, gradients) if nested else (y.detach(), [tensor.detach() for tensor in more], gradients)


@contextlib.contextmanager
def _tf32(on: bool) -> Iterator[None]:
    """Let float32 matmuls and convolutions on a GPU round to 10 bits or not. PyTorch's default: convolutions only."""
    backends = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [backend.allow_tf32 for backend in backends]
    for backend in backends:
        backend.allow_tf32 = on
    try:
        yield
    finally:
        for backend, setting in zip(backends, before, strict=True):
            backend.allow_tf32 = setting


@contextlib.contextmanager
def _deterministic(on: bool) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(on or before)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
