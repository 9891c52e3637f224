"""Operators that run on the host only: text, files, window functions and label encoding."""

from __future__ import annotations

import math
import re

import numpy as np
import onnx_ir as ir
from onnx import defs

from onward.engines.framework import Function, Operators

operators = Operators()

# ---- operators of the reference implementation -----------------------------------------------------------------------


def from_reference(name: str) -> Function:
    """Return the function of an operator in `onnx.reference`."""

    def compute(*inputs, outputs, **attributes):
        from onnx.reference.ops import load_op

        present = {key: value for key, value in attributes.items() if value is not None}
        return load_op("", name).eval(*inputs, n_outputs=outputs, **present)

    compute.asks_for = [*defs.get_schema(name).attributes, "outputs"]  # type: ignore[attr-defined]
    return compute


# ---- windows, and weights of frequencies -----------------------------------------------------------------------------


def _window(*coefficients):
    """Return the operator of a sum of cosines. A periodic window has the period `size`, not `size - 1`."""

    def window(size, *, output_datatype, periodic):
        count = size.item()
        angle = 2 * np.pi * np.arange(count) / (count if periodic else count - 1)
        total = sum(c * np.cos(i * angle) for i, c in enumerate(coefficients))
        return np.asarray(total).astype(ir.DataType(output_datatype).numpy())

    return window


operators(
    MelWeightMatrix=from_reference("MelWeightMatrix"),
    HannWindow=_window(0.5, -0.5),
    HammingWindow=_window(25 / 46, -21 / 46),
    BlackmanWindow=_window(0.42, -0.5, 0.08),
)


# ---- text and files --------------------------------------------------------------------------------------------------

operators(
    StringConcat=lambda x, y: np.asarray(x.astype(object) + y.astype(object), object),
    StringNormalizer=from_reference("StringNormalizer"),
    StringSplit=from_reference("StringSplit"),
)


@operators.define("RegexFullMatch")
def regex_full_match(x, *, pattern):
    matches = [re.fullmatch(pattern, text) is not None for text in x.ravel()]
    return np.array(matches, bool).reshape(x.shape)


operators(TfIdfVectorizer=from_reference("TfIdfVectorizer"), ImageDecoder=from_reference("ImageDecoder"))


# ---- classical machine learning --------------------------------------------------------------------------------------


@operators.define("ai.onnx.ml.LabelEncoder")
def label_encoder(
    x, *,
    default_float, default_int64, default_string, default_tensor, keys_floats, keys_int64s, keys_strings, keys_tensor,
    values_floats, values_int64s, values_strings, values_tensor,
):  # fmt: skip
    keys = next(_items(keys) for keys in (keys_tensor, keys_strings, keys_int64s, keys_floats) if keys is not None)
    choices = [
        (values_tensor, default_tensor, None if values_tensor is None else values_tensor.dtype),
        (values_strings, default_string, np.dtype(object)),
        (values_int64s, default_int64, np.dtype(np.int64)),
        (values_floats, default_float, np.dtype(np.float32)),
    ]
    values, default, dtype = next(choice for choice in choices if choice[0] is not None)
    default = _items(default)[0] if isinstance(default, np.ndarray) else default
    table = {_key(key): value for key, value in zip(keys, _items(values), strict=True)}
    return np.array([table.get(_key(key), default) for key in _items(x)], dtype).reshape(x.shape)


def _key(key):
    """Return a dictionary key. NaN is not equal to itself, but must match."""
    return "nan" if isinstance(key, float) and math.isnan(key) else key


def _items(values):
    return np.asarray(values).ravel().tolist()
