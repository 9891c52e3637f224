"""What the operators of ONNX Runtime share."""

import functools

import numpy as np
import onnx_ir as ir

from onward.errors import UnsupportedError
from onward.rules import registry

DOMAIN = "com.microsoft"

rewrite = functools.partial(registry.rewrite, domain=DOMAIN)
no_gradient = functools.partial(registry.no_gradient, domain=DOMAIN)


def rank(x):
    return None if x.value.shape is None else x.value.shape.rank()


def refuse(node, what):
    """Give up on a node for a reason that its user can do something about."""
    raise UnsupportedError(
        f"no gradient of `{node.op_type}` (node `{node.name}`) with {what}",
        hint="differentiate the model as it was before it was optimised",
    )


def as_length(op, x):
    """A number of elements, or several, as the integers that shapes are made of."""
    return op.Cast(x, to=ir.DataType.INT64)


def count_up_to(op, length):
    """0, 1, ... up to a length that is a vector with one element."""
    return op.Range(np.int64(0), op.Squeeze(length, [0]), np.int64(1))
