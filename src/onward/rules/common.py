"""Limits of types, ranks, and constants of the graph, for rules of several families."""

import ml_dtypes
import numpy as np
import onnx_ir as ir

from onward.constants import constant_number, tensor_in


def cast_like(op, x, like):
    """Return `x` in the type of `like`."""
    if like.dtype is None:
        return op.CastLike(x, like)
    return x if x.dtype == like.dtype else op.Cast(x, to=like.dtype)


def identity(op, shape, like):
    """Return an identity matrix in the type of `like`; EyeLike itself has no bfloat16."""
    return cast_like(op, op.EyeLike(op.ConstantOfShape(shape)), like)


def iota(op, count):
    """Return the integers 0, 1 ... below `count`, a scalar."""
    return op.Range(np.int64(0), count, np.int64(1))


def rank(x) -> int | None:
    return None if x.value.shape is None else x.value.shape.rank()


def tiny(x) -> float:
    """Return the smallest normal number of the type of `x`."""
    return float(_limits(x).smallest_normal)


def largest(x) -> float:
    """Return the largest finite number of the type of `x`."""
    return float(_limits(x).max)


def least_root(x) -> float:
    """Return the smallest positive square root in the type of `x`."""
    return float(np.sqrt(np.float64(_limits(x).smallest_subnormal)))


def finite(op, x):
    """Return `x` with infinities replaced by the largest number, so that 0 times it is 0."""
    return op.Clip(x, -largest(x), largest(x))


def fixed_number(x) -> float | None:
    """Return the number of a Constant with one element, else None: an initializer may change between runs."""
    tensor = tensor_in(x.value.producer())
    return float(tensor.numpy().reshape(())) if tensor is not None and tensor.size == 1 else None


def never_zero(x) -> bool:
    """True if `x` is a single number in the file, and not 0."""
    number = constant_number(x.value)
    return number is not None and number != 0


def standard_attributes(node, *names):
    """Return the attributes of a node with these names, for a standard operator that also has them."""
    return {name: node.attributes[name].value for name in names if name in node.attributes}


def _limits(x):
    return ml_dtypes.finfo(np.float32 if x.dtype is None else x.dtype.numpy())


def further_output(op, node, index, dtype, shape):
    """Return an output of the forward node, which is added if the node omits it."""
    if len(node.outputs) <= index:
        node.resize_outputs(index + 1)
    value = node.outputs[index]
    for output in node.outputs:
        if output.name is None or (output is value and not output.name):
            output.name = op.names.fresh(f"{node.outputs[0].name}/{node.op_type}")
    value.type = value.type or ir.TensorType(dtype)
    value.shape = value.shape or shape
    return op(value)
