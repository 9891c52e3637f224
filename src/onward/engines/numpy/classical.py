"""The operator of classical machine learning that is not expressed by those of the standard."""

from __future__ import annotations

import math

import numpy as np

from onward.engines.framework import Operators

operators = Operators()


@operators.define("ai.onnx.ml.LabelEncoder")
def label_encoder(
    x, *,
    default_float, default_int64, default_string, default_tensor, keys_floats, keys_int64s, keys_strings, keys_tensor,
    values_floats, values_int64s, values_strings, values_tensor,
):  # fmt: skip
    keys = next(_items(found) for found in (keys_tensor, keys_strings, keys_int64s, keys_floats) if found is not None)
    choices = [
        (values_tensor, default_tensor, None if values_tensor is None else values_tensor.dtype),
        (values_strings, default_string, np.dtype(object)),
        (values_int64s, default_int64, np.dtype(np.int64)),
        (values_floats, default_float, np.dtype(np.float32)),
    ]
    values, default, kind = next(choice for choice in choices if choice[0] is not None)
    default = _items(default)[0] if isinstance(default, np.ndarray) else default
    table = {_key(key): value for key, value in zip(keys, _items(values), strict=True)}
    return np.array([table.get(_key(key), default) for key in _items(x)], kind).reshape(x.shape)


def _key(key):
    """One NaN is not equal to another, but is to be found by it."""
    return "nan" if isinstance(key, float) and math.isnan(key) else key


def _items(values):
    return np.asarray(values).ravel().tolist()
