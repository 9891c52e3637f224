"""Types of tensors on all backends of Keras."""

from __future__ import annotations

import functools

import keras
import numpy as np
from keras import ops

_NARROW = {"float64": "float32", "int64": "int32", "uint64": "uint32"}


@functools.cache
def available(dtype):
    """Return the type, or its 32-bit form if the backend has no 64 bits (JAX by default)."""
    is_wide = dtype_of(ops.convert_to_tensor(np.zeros(()))) == "float64"
    return dtype if is_wide else _NARROW.get(dtype, dtype)


def dtype_of(x):
    return keras.backend.standardize_dtype(x.dtype)


def is_float(x):
    return "float" in dtype_of(x)


def constant(array, dtype):
    return ops.convert_to_tensor(np.asarray(array), available(dtype))


def plain_name(name):
    """Return a variable name that every backend accepts."""
    return "".join(sign if sign.isascii() and sign.isalnum() else "_" for sign in name).strip("_") or "variable"


# ---- inputs and targets of a model------------------------------------------------------------------------------------


def as_single(inputs):
    return inputs[0] if isinstance(inputs, list | tuple) else inputs


def fit_target(target, dtype, rank):
    """Cast a target, and add or remove a last axis of size 1, to fit the loss."""
    target = ops.cast(target, available(dtype))
    if rank is not None and len(target.shape) == rank + 1:
        return ops.squeeze(target, -1)
    return ops.expand_dims(target, -1) if rank is not None and len(target.shape) == rank - 1 else target
