"""JAX: operators one by one, or a whole step compiled by XLA."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from onward.run.framework import Framework, Function, Operators
from onward.run.jax import (
    activation,
    attention,
    classical,
    control,
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
from onward.run.jax.values import known
from onward.run.shared import sequence

_TABLE = (
    elementwise, activation, reduction, movement, indexing, matrix, convolution, pooling, grids, normalization,
    attention, loss, quantization, spectral, sampling, classical, control, sequence,
)  # fmt: skip


class Jax(Framework):
    """ONNX has numbers of 64 bits, which JAX has only where it is told so.

    The switch is part of JAX's thread-local context, and of the key under which it keeps compiled code: it is on while
    this engine runs (`active`), and the rest of the process does not notice.
    """

    name = "jax"
    operators = Operators({name: function for part in _TABLE for name, function in part.operators.items()})

    def __init__(self, device: str = "cpu"):
        self._device = jax.devices(device)[0]

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        with jax.enable_x64(True), jax.default_device(self._device):
            yield

    def supports(self, dtype: np.dtype) -> bool:
        return dtype.kind not in "OSU"

    def tensor(self, array: np.ndarray) -> jax.Array:
        with self.active(), jax.ensure_compile_time_eval():
            return jax.device_put(array, self._device)

    def array(self, tensor: jax.Array) -> np.ndarray:
        return known(tensor)

    def compile(self, function: Function) -> Function:
        compiled = jax.jit(function)

        def run(*tensors: Any) -> Any:
            with self.active():
                return compiled(*tensors)

        return run

    def derivative(
        self, function: Callable[[Sequence[Any]], tuple[Any, list[Any]]], xs: Sequence[Any]
    ) -> tuple[Any, list[Any], Callable[[], Sequence[Any]]]:
        y, pull_back, more = jax.vjp(function, list(xs), has_aux=True)
        return y, more, lambda: pull_back(jnp.ones_like(y))[0]
