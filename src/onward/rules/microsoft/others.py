"""What the standard has too, and what has no gradient."""

from onward.errors import UnsupportedError
from onward.rules import registry
from onward.rules.microsoft.domain import as_length, no_gradient, rewrite


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
