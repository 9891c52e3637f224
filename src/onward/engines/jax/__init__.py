"""JAX: eager, or a whole step compiled by XLA.

ONNX needs 64-bit types, which JAX has only with `enable_x64`. The engine turns it on only while it
runs: the switch belongs to the thread's context and to the key of compiled code. Python numbers are
weakly typed: `x / 2` has the type of x.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import onnx_ir as ir

from onward.engines.framework import Framework, Function, Operators, table
from onward.engines.jax.layers import derivatives
from onward.engines.jax.types import concrete_array
from onward.engines.shared.compilation import Compiled, Report, with_products_in
from onward.errors import UnsupportedError

_PRECISIONS = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


class Jax(Framework):
    name = "jax"
    operators = table(__name__, jnp, [jax.Array, jax.core.Tracer])

    fuses: ClassVar[Sequence[str]] = ("Attention", "onward.Linear")
    compiles_operators = True

    def __init__(
        self,
        device: str = "cpu",
        *,
        precision: str = "float32",
        deterministic: bool = False,
        on_compile: Report | None = None,
    ):
        """Create the framework.

        Args:
            deterministic: Has an effect on compiled steps on GPUs; CPUs are always deterministic
            on_compile: Called before a step is compiled
        """
        self.check_device(device, "JAX")
        self._device = jax.local_devices(backend=device)[0]
        rows = Operators(self.operators)
        if device == "cuda":
            rows["Attention"] = functools.partial(rows["Attention"], fused=True)
            for product in ("MatMul", "Gemm", "onward.Linear"):
                rows[product] = functools.partial(rows[product], aligned=True)
        self.operators = with_products_in(precision, rows, _PRECISIONS, _cast, promotes=True)
        self._mixed = precision != "float32"
        self._on_compile = on_compile
        self._options = {"xla_gpu_deterministic_ops": True} if deterministic and device != "cpu" else {}
        if device == "cuda" and self._mixed:
            # XLA would use Triton kernels for some matmuls, with copies of their inputs; cuBLAS is
            # faster.
            self._options["xla_gpu_enable_triton_gemm"] = False

    @classmethod
    def devices(cls) -> list[str]:
        return sorted({"cuda" if device.platform == "gpu" else device.platform for device in jax.devices()} | {"cpu"})

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        exact = jax.default_matmul_precision("highest")  # GPUs would use 10 bits of a float32
        with jax.enable_x64(True), jax.default_device(self._device), exact:
            yield

    def supports(self, dtype: np.dtype) -> bool:
        return dtype.kind not in "OSU"

    def tensor(self, array: np.ndarray) -> jax.Array:
        with self.active(), jax.ensure_compile_time_eval():  # an array is a constant, also during tracing
            # JAX reads the array after `device_put` has returned, also with `may_alias=False` (0.10.2).
            return jax.device_put(np.array(array), self._device)

    def array(self, tensor: jax.Array) -> np.ndarray:
        return concrete_array(tensor)

    def typed(self, tensor: jax.Array, dtype: ir.DataType | None) -> jax.Array:
        if not self._mixed or dtype is None or not jnp.issubdtype(tensor.dtype, jnp.floating):
            return tensor
        return tensor.astype(dtype.numpy())

    def adopt(self, value: Any) -> Any:
        if isinstance(value, np.ndarray | jax.Array):
            return super().adopt(value)
        with self.active():
            return jax.device_put(jnp.from_dlpack(value), self._device)

    def feed(self, value: Any) -> Any:
        """Return a copy: compiled functions read the memory of an array even after they return."""
        return np.array(value) if isinstance(value, np.ndarray) else self.adopt(value)

    def copy(self, tensor: Any) -> Any:
        with self.active():
            return jnp.array(tensor)

    def compile(self, function: Function) -> Function:
        return self._compiled(function, in_place=False)

    def compile_step(self, function: Function) -> Function:
        def step(state: Any, constants: Any, batch: Any) -> Any:
            new, results = function(state, constants, batch)
            return state | new, results

        return self._compiled(step, in_place=True)

    def _compiled(self, function: Function, *, in_place: bool) -> Function:
        donated = 0 if in_place else ()
        jitted = jax.jit(function, donate_argnums=donated, compiler_options=self._options or None)
        compiled = Compiled(self, function, jitted, self._on_compile)

        def run(state: Any, constants: Any, batch: Any) -> Any:
            with self.active():
                return compiled(state, constants, batch)

        return run

    def derivative(
        self, function: Callable[[Sequence[Any]], tuple[Any, list[Any]]], xs: Sequence[Any]
    ) -> tuple[Any, list[Any], Callable[[], Sequence[Any]]]:
        before = derivatives.set(derivatives.get() + 1)
        try:
            y, pull_back, more = jax.vjp(function, list(xs), has_aux=True)
        finally:
            derivatives.reset(before)

        def gradients() -> Sequence[Any]:
            try:
                return pull_back(jnp.ones_like(y))[0]
            except ValueError as error:
                if "lax.while_loop" not in str(error):
                    raise
                raise UnsupportedError(
                    "JAX cannot differentiate a Loop without a limit of iterations",
                    hint="run without compiling: `compile=False` (`--no-compile`)",
                ) from error

        return y, more, gradients


def _cast(tensors: Any, old: Any, new: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(new) if x.dtype == old else x, tensors)
