"""TensorFlow: eager, or a `tf.function` of the whole step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from onward.engines.tensorflow.quiet import tensorflow as tf  # isort: skip  (other imports of it are not quiet)

from onward.engines.framework import Framework, Function, table
from onward.engines.shared.compilation import Compiled, Report, with_products_in
from onward.engines.tensorflow.types import TYPES, Functions, to_numpy
from onward.errors import DataError

_DEVICES = {"cpu": "CPU", "cuda": "GPU"}
_PRECISIONS = {"float32": tf.float32, "bfloat16": tf.bfloat16, "float16": tf.float16}


_DLPACK_CPU = 1
"""DLPack device type of the CPU."""


class TensorFlow(Framework):
    name = "tensorflow"
    operators = table(__name__, Functions(), [tf.Tensor])

    takes_numbers: ClassVar[Mapping[str, Sequence[int]]] = {"BitShift": (1,), "Pow": (1,)}

    def __init__(
        self,
        device: str = "cpu",
        *,
        precision: str = "float32",
        deterministic: bool = False,
        on_compile: Report | None = None,
    ):
        """Create the framework. `deterministic` cannot be undone in this process."""
        self.check_device(device, "TensorFlow")
        self.operators = with_products_in(precision, self.operators, _PRECISIONS, _cast, promotes=False)
        self._device = f"/{_DEVICES[device]}:0"
        self._on_compile = on_compile
        if deterministic:
            tf.config.experimental.enable_op_determinism()

    @classmethod
    def devices(cls) -> list[str]:
        return [name for name, type_ in _DEVICES.items() if tf.config.list_physical_devices(type_)]

    def active(self) -> contextlib.AbstractContextManager[None]:
        return tf.device(self._device)

    def supports(self, dtype: np.dtype) -> bool:
        return dtype in TYPES

    def tensor(self, array: np.ndarray) -> tf.Tensor:
        with self.active():
            return tf.constant(array)

    def array(self, tensor: tf.Tensor) -> np.ndarray:
        return to_numpy(tensor)

    def adopt(self, value: Any) -> Any:
        """Return a copy: TensorFlow aborts the process if memory is not aligned as it requires."""
        if isinstance(value, np.ndarray | tf.Tensor):
            return super().adopt(value)
        if value.__dlpack_device__()[0] == _DLPACK_CPU:
            return self.tensor(np.from_dlpack(value))
        with self.active():
            return tf.raw_ops.DeepCopy(x=tf.experimental.dlpack.from_dlpack(value.__dlpack__()))

    def compile(self, function: Function) -> Function:
        graph = tf.function(function, autograph=False)

        def run(state: Any, constants: Any, batch: Any) -> Any:
            try:
                return graph(state, constants, batch)
            except tf.errors.InvalidArgumentError as error:  # such as an index or label out of range
                reason = error.message.rpartition("\n\n")[2].partition("\n")[0]
                raise DataError(f"tensorflow fails: {reason}", hint="`compile=False` names the node") from error

        return Compiled(self, function, run, self._on_compile)

    def derivative(
        self, function: Callable[[Sequence[Any]], tuple[Any, list[Any]]], xs: Sequence[Any]
    ) -> tuple[Any, list[Any], Callable[[], Sequence[Any]]]:
        with tf.GradientTape() as tape:
            variables = [tf.identity(x) for x in xs]  # other nodes may read the same tensor
            tape.watch(variables)
            y, more = function(variables)

        def gradients() -> list[tf.Tensor]:
            results = tape.gradient(y, variables, unconnected_gradients=tf.UnconnectedGradients.ZERO)
            return [tf.convert_to_tensor(gradient) for gradient in results]  # gradients of Gather are sparse

        return y, more, gradients

    def is_tracing(self) -> bool:
        return not tf.executing_eagerly()


def _cast(tensors: Any, old: tf.DType, new: tf.DType) -> Any:
    return tf.nest.map_structure(lambda x: tf.cast(x, new) if tf.is_tensor(x) and x.dtype == old else x, tensors)
