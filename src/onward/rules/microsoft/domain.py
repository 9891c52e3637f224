"""What the operators of ONNX Runtime share, those that the standard has too, and those without a gradient."""

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


# ---- what the standard has too, and what has no gradient -------------------------------------------------------------


@rewrite("Trilu")
def trilu(op, x, k, *, upper=1):
    return op.Trilu(x, k, upper=upper)


@rewrite("Pad")
def pad(op, x, pads, value, *, mode="constant"):
    value = None if value is None else op.Reshape(value, _SCALAR)
    return op.Pad(x, op.Reshape(pads, [-1]), value, mode=mode)


_SCALAR: list[int] = []


@rewrite("ExpandDims")
def expand_dims(op, x, axis):
    return op.Unsqueeze(x, op.Reshape(as_length(op, axis), [1]))


@rewrite("GatherND")
def gather_nd(op, x, indices):
    return op.GatherND(x, as_length(op, indices))


no_gradient("the result is text, or a number made from it", "Tokenizer", "MurmurHash3")
no_gradient("the result is a sequence of numbers, whose length depends on the inputs", "Range")
no_gradient("the result depends on which elements are equal, not smoothly on their values", "Unique")
no_gradient(
    "the result is a sequence of words, which a search has found",
    "BeamSearch", "GreedySearch", "Sampling", "WhisperBeamSearch",
)  # fmt: skip
no_gradient("it finds where texts part", "BifurcationDetector")
no_gradient("the result is a path through a matrix", "DynamicTimeWarping")
no_gradient("the result is made of integers", "MatMulInteger16", "MulInteger", "ReduceSumInteger")


@registry.rewrite(
    "AveragePool", "Conv", "GlobalAveragePool", "GlobalMaxPool", "MaxPool", "ReorderInput", "ReorderOutput",
    "Upsample", domain="com.microsoft.nchwc",
)  # fmt: skip
def refuse_gradient(op, *inputs, node):
    raise UnsupportedError(
        f"`{node.op_type}` (node `{node.name}`) works on blocks of channels: ONNX Runtime optimised this file for one "
        "kind of processor",
        hint="differentiate the file as it was before, or save it again with at most the optimisations called extended",
    )
