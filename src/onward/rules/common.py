"""What rules of several families share: limits of a type, and constants that are known when the graph is written."""

import ml_dtypes
import numpy as np
import onnx_ir as ir

from onward.constants import constant_number, tensor_in


def cast_like(op, x, like):
    """`x` in the type of `like`."""
    if like.dtype is None:
        return op.CastLike(x, like)
    return x if x.dtype == like.dtype else op.Cast(x, to=like.dtype)


def identity(op, shape, like):
    """A matrix with ones on its diagonal, in the type of `like`; EyeLike itself knows no bfloat16."""
    return cast_like(op, op.EyeLike(op.ConstantOfShape(shape)), like)


def tiny(x) -> float:
    """The smallest normal number of the type of `x`."""
    return float(_limits(x).smallest_normal)


def largest(x) -> float:
    """The largest finite number of the type of `x`."""
    return float(_limits(x).max)


def least_root(x) -> float:
    """The smallest square root other than 0, that of the smallest number of the type of `x`."""
    return float(np.sqrt(np.float64(_limits(x).smallest_subnormal)))


def finite(op, x):
    """`x` with the largest number in the place of infinity, so that 0 times it is 0."""
    return op.Clip(x, -largest(x), largest(x))


def fixed_number(x) -> float | None:
    """The number that `x` is in every run: a Constant with one element. An initializer may change, so it is none."""
    tensor = tensor_in(x.value.producer())
    return float(tensor.numpy().reshape(())) if tensor is not None and tensor.size == 1 else None


def never_zero(x) -> bool:
    """Whether `x` is a single number, given with the graph, other than 0."""
    number = constant_number(x.value)
    return number is not None and number != 0


def standard_attributes(node, *names):
    """Those of a node's attributes that a standard operator takes as they are."""
    return {name: node.attributes[name].value for name in names if name in node.attributes}


def _limits(x):
    return ml_dtypes.finfo(np.float32 if x.dtype is None else x.dtype.numpy())


def further_output(op, node, index, dtype, shape):
    """An output of the forward node, which gets it where it has none."""
    if len(node.outputs) <= index:
        node.resize_outputs(index + 1)
    value = node.outputs[index]
    for output in node.outputs:
        if output.name is None or (output is value and not output.name):
            output.name = op.names.fresh(f"{node.outputs[0].name}/{node.op_type}")
    value.type = value.type or ir.TensorType(dtype)
    value.shape = value.shape or shape
    return op(value)
