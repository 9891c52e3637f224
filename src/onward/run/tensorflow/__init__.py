"""TensorFlow: eager, or a `tf.function` of the whole step."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before the import: what it has to say is not about the model

import tensorflow as tf

from onward.run.framework import Framework, Function, Operators
from onward.run.shared import sequence
from onward.run.tensorflow import (
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
from onward.run.tensorflow.tensors import TYPES, fetched

_TABLES = (
    elementwise, activation, reduction, movement, indexing, matrix, convolution, pooling, grids, normalization,
    attention, loss, quantization, spectral, sampling, classical, control, sequence,
)  # fmt: skip


class TensorFlow(Framework):
    name = "tensorflow"
    operators = Operators({name: function for table in _TABLES for name, function in table.operators.items()})

    takes_numbers: ClassVar[Mapping[str, Sequence[int]]] = {"BitShift": (1,), "Pow": (1,)}

    def __init__(self, on_compile: Callable[[str], None] | None = None):
        self._on_compile = on_compile

    def supports(self, dtype: np.dtype) -> bool:
        return dtype in TYPES

    def tensor(self, array: np.ndarray) -> tf.Tensor:
        return tf.constant(array)

    def array(self, tensor: tf.Tensor) -> np.ndarray:
        return fetched(tensor)

    def derivative(
        self, function: Callable[[Sequence[Any]], tuple[Any, list[Any]]], xs: Sequence[Any]
    ) -> tuple[Any, list[Any], Callable[[], Sequence[Any]]]:
        with tf.GradientTape() as tape:
            variables = [tf.identity(x) for x in xs]  # others may read the same tensor under another name
            tape.watch(variables)
            y, more = function(variables)

        def gradients() -> list[tf.Tensor]:
            found = tape.gradient(y, variables, unconnected_gradients=tf.UnconnectedGradients.ZERO)
            return [tf.convert_to_tensor(gradient) for gradient in found]  # those of Gather are sparse

        return y, more, gradients

    def compile(self, function: Function) -> Function:
        """One graph for each set of shapes."""

        def traced(state: Any, constants: Any, batch: Any) -> Any:
            if self._on_compile is not None:
                self._on_compile(", ".join(f"{name} {list(tensor.shape)}" for name, tensor in batch.items()))
            return function(state, constants, batch)

        return tf.function(traced, autograph=False)

    def is_tracing(self) -> bool:
        return not tf.executing_eagerly()
