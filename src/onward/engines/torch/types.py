"""Types of ONNX and numpy in PyTorch, which lacks some and has few functions for others."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from onnx_ir import DataType
from torch.nn import functional as F

from onward.engines.framework import NotOnHost, keywords
from onward.engines.numpy import Numpy


class Functions:
    """Functions of PyTorch under the names of numpy."""

    expand_dims = staticmethod(torch.unsqueeze)
    repeat = staticmethod(torch.repeat_interleave)
    split = staticmethod(torch.tensor_split)
    transpose = staticmethod(lambda x, perm: x.permute(perm or tuple(range(x.ndim))[::-1]))

    @staticmethod
    def pad(x, widths, constant_values):
        return F.pad(x, [amount for width in reversed(widths) for amount in width], value=constant_values)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


TYPES = {
    DataType.BOOL: torch.bool,
    DataType.UINT8: torch.uint8,
    DataType.UINT16: torch.uint16,
    DataType.UINT32: torch.uint32,
    DataType.INT8: torch.int8,
    DataType.INT16: torch.int16,
    DataType.INT32: torch.int32,
    DataType.INT64: torch.int64,
    DataType.BFLOAT16: torch.bfloat16,
    DataType.FLOAT16: torch.float16,
    DataType.FLOAT: torch.float32,
    DataType.DOUBLE: torch.float64,
    DataType.FLOAT8E4M3FN: torch.float8_e4m3fn,
    DataType.FLOAT8E4M3FNUZ: torch.float8_e4m3fnuz,
    DataType.FLOAT8E5M2: torch.float8_e5m2,
    DataType.FLOAT8E5M2FNUZ: torch.float8_e5m2fnuz,
    DataType.COMPLEX64: torch.complex64,
    DataType.COMPLEX128: torch.complex128,
}
"""ONNX type -> type of PyTorch, which has too few functions for uint64."""

CODES = {dtype: code for code, dtype in TYPES.items()}
FLOAT8 = {torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz}

_OF_ARRAYS = {code.numpy(): dtype for code, dtype in TYPES.items()}
_WITHOUT_NUMPY = {dtype: CODES[dtype].numpy() for dtype in (torch.bfloat16, *FLOAT8)}
SAME_BITS = {torch.uint16: torch.int16, torch.uint32: torch.int32, **dict.fromkeys(FLOAT8, torch.int8)}
_MASKS = {torch.uint16: 0xFFFF, torch.uint32: 0xFFFFFFFF}


# ---- to and from numpy -----------------------------------------------------------------------------------------------


def has_type(dtype: np.dtype) -> bool:
    return dtype in _OF_ARRAYS


def from_array(array: np.ndarray) -> torch.Tensor:
    """Copy an array to a tensor, bit for bit."""
    dtype = _OF_ARRAYS[array.dtype]
    copy = np.array(array, order="C")
    if dtype in _WITHOUT_NUMPY:
        copy = copy.view(f"i{dtype.itemsize}")
    return torch.from_numpy(copy).view(dtype)


def to_array(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor as an array, which shares the memory of a CPU tensor."""
    if is_fake(tensor):
        raise NotOnHost
    tensor = tensor.detach().cpu()
    if tensor.dtype not in _WITHOUT_NUMPY:
        return tensor.numpy()
    integers = torch.int8 if tensor.dtype.itemsize == 1 else torch.int16
    return tensor.view(integers).numpy().view(_WITHOUT_NUMPY[tensor.dtype])


def is_fake(tensor: torch.Tensor) -> bool:
    """True if a tensor has only a shape, during tracing."""
    return torch._subclasses.fake_tensor.is_fake(tensor)


def on_numpy(name: str, *inputs: Any, **attributes: Any) -> Any:
    """Compute an operator with numpy: one without a derivative, or of a type that PyTorch lacks."""
    function = Numpy.operators[name]
    arrays = (to_array(x) if isinstance(x, torch.Tensor) else x for x in inputs)
    return function(*arrays, **{key: attributes[key] for key in keywords(function) if key in attributes})


# ---- types that PyTorch has few functions for ------------------------------------------------------------------------


def by_bits(function):
    """Wrap a function that ignores the sign of integers: pass uint32 as int32, and so on."""

    @functools.wraps(function)
    def call(*inputs, **attributes):
        dtype = next((x.dtype for x in inputs if isinstance(x, torch.Tensor) and x.dtype in SAME_BITS), None)
        if dtype is None:
            return function(*map(_number, inputs), **attributes)
        other = SAME_BITS[dtype]
        integers, unsigned = CODES[other].numpy(), CODES[dtype].numpy()
        views = (
            (x.view(other) if x.dtype == dtype else x)
            if isinstance(x, torch.Tensor)
            else _number(x.view(integers) if isinstance(x, np.ndarray) and x.dtype == unsigned else x)
            for x in inputs
        )
        result = function(*views, **attributes)
        if isinstance(result, tuple):
            return tuple(tensor.view(dtype) for tensor in result)
        return result.view(dtype) if result.dtype == other else result

    return call


def in_int64(function):
    """Wrap a function to compute uint16 and uint32 in int64 and keep the lower bits of the result."""

    @functools.wraps(function)
    def call(*inputs, **attributes):
        dtype = next((x.dtype for x in inputs if isinstance(x, torch.Tensor) and x.dtype in _MASKS), None)
        if dtype is None:
            return function(*map(_number, inputs), **attributes)
        result = function(*(widen(x) if isinstance(x, torch.Tensor) else _number(x) for x in inputs), **attributes)
        return narrow(result, dtype) if result.dtype == torch.int64 else result

    return call


def widen(x: torch.Tensor) -> torch.Tensor:
    """Convert uint16 and uint32 to int64."""
    return x.view(SAME_BITS[x.dtype]).long() & _MASKS[x.dtype] if x.dtype in _MASKS else x


def narrow(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert integers to uint16 or uint32 by their lower bits."""
    return x.to(SAME_BITS[dtype]).view(dtype)


def _number(value):
    """Return an array of rank 0 as a number, and other values unchanged."""
    return value.item() if isinstance(value, np.ndarray) and value.ndim == 0 else value
