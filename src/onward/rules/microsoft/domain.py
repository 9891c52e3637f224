"""Decorators and refusals for operators of ONNX Runtime; those like standard ones, and those without a gradient."""

import functools

import onnx_ir as ir

from onward.errors import UnsupportedError
from onward.rules import registry
from onward.rules.common import iota

DOMAIN = "com.microsoft"

rewrite = functools.partial(registry.rewrite, domain=DOMAIN)
no_gradient = functools.partial(registry.no_gradient, domain=DOMAIN)


def refuse(node, what):
    raise UnsupportedError(
        f"no gradient of `{node.op_type}` (node `{node.name}`) with {what}",
        hint="differentiate the model before ONNX Runtime optimized it",
    )


def as_length(op, x):
    """Cast numbers of elements to int64, the type of shapes."""
    return op.Cast(x, to=ir.DataType.INT64)


def count_up_to(op, length):
    """Return the integers below `length`, a vector of one element."""
    return iota(op, op.Squeeze(length, [0]))


rewrite("Trilu")(lambda op, x, k, *, upper=1: op.Trilu(x, k, upper=upper))
rewrite("ExpandDims")(lambda op, x, axis: op.Unsqueeze(x, op.Reshape(as_length(op, axis), [1])))
rewrite("GatherND")(lambda op, x, indices: op.GatherND(x, as_length(op, indices)))


@rewrite("Pad")
def pad(op, x, pads, value, *, mode="constant"):
    value = None if value is None else op.Reshape(value, [])
    return op.Pad(x, op.Reshape(pads, [-1]), value, mode=mode)


no_gradient("the result is text, or a number made from it", "Tokenizer", "MurmurHash3")
no_gradient("the result is a sequence of numbers, whose length depends on the inputs", "Range")
no_gradient("the result depends on which elements are equal, not smoothly on their values", "Unique")
no_gradient("the result is a sequence of words", "BeamSearch", "GreedySearch", "Sampling", "WhisperBeamSearch")
no_gradient("the result is an index in text", "BifurcationDetector")
no_gradient("the result is a path through a matrix", "DynamicTimeWarping")
no_gradient("the result is made of integers", "MatMulInteger16", "MulInteger", "ReduceSumInteger")


@registry.rewrite(
    "AveragePool", "Conv", "GlobalAveragePool", "GlobalMaxPool", "MaxPool", "ReorderInput", "ReorderOutput",
    "Upsample", domain="com.microsoft.nchwc",
)  # fmt: skip
def refuse_gradient(op, *inputs, node):
    raise UnsupportedError(
        f"`{node.op_type}` (node `{node.name}`) was optimized by ONNX Runtime for one type of processor",
        hint="differentiate the original model, or optimize it with `ORT_ENABLE_EXTENDED` at most",
    )
