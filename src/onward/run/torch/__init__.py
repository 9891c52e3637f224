"""PyTorch: eager, or compiled as a whole."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from onward.run.framework import Framework, Function, Operators
from onward.run.shared import control, sequence
from onward.run.torch import (
    activation,
    attention,
    classical,
    convolution,
    elementwise,
    grids,
    indexing,
    loss,
    matrix,
    movement,
    normalization,
    pooling,
    quantization,
    reduction,
    sampling,
    spectral,
)
from onward.run.torch.compilation import Compiled, seed
from onward.run.torch.types import from_array, has_type, to_array

_FAMILIES = (
    elementwise,
    activation,
    reduction,
    movement,
    indexing,
    matrix,
    convolution,
    pooling,
    grids,
    normalization,
    attention,
    loss,
    quantization,
    spectral,
    sampling,
    classical,
    control,
    sequence,
)
_MAKE_TENSORS = ("ConstantOfShape", "Range", "RandomNormal", "RandomUniform")
"""Operators without a tensor among their inputs, so that they have to be told where it should be."""


class Torch(Framework):
    name = "torch"
    operators = Operators({name: function for part in _FAMILIES for name, function in part.operators.items()})

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

    def __init__(self, device: str = "cpu", *, on_compile: Callable[[str], None] | None = None):
        self._device = torch.device(device)
        self._on_compile = on_compile
        self.operators = Operators(self.operators)
        for name in _MAKE_TENSORS:
            self.operators[name] = functools.partial(self.operators[name], device=self._device)

    def supports(self, dtype: np.dtype) -> bool:
        return has_type(dtype)

    def tensor(self, array: np.ndarray) -> torch.Tensor:
        with _disable_current_modes():  # also while a step is traced, what is known is a constant of it
            return from_array(array).to(self._device)

    def array(self, tensor: torch.Tensor) -> np.ndarray:
        return to_array(tensor)

    def compile(self, function: Function) -> Function:
        return Compiled(function, self._on_compile)

    def is_tracing(self) -> bool:
        return bool(_get_current_dispatch_mode_stack())

    def active(self) -> contextlib.AbstractContextManager[None]:
        return torch.no_grad()

    def derivative(
        self, function: Callable[[Sequence[Any]], tuple[Any, list[Any]]], xs: Sequence[Any]
    ) -> tuple[Any, list[Any], Callable[[], Sequence[Any]]]:
        nested = torch.is_grad_enabled()  # within another derivative
        with torch.enable_grad():
            variables = [x.view_as(x) if x.requires_grad else x.detach().requires_grad_() for x in xs]
            y, more = function(variables)

        def gradients() -> list[torch.Tensor]:
            found = torch.autograd.grad(
                y,
                variables,
                torch.ones_like(y) if nested else seed(y),
                create_graph=nested,
                retain_graph=nested,
                materialize_grads=True,
            )
            return list(found)

        return (y, more, gradients) if nested else (y.detach(), [tensor.detach() for tensor in more], gradients)
