"""Types and shapes of results: of standard operators, sequences and Optional."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from onward.constants import constant_ints
from onward.standard import is_standard


def is_optional(value: ir.Value) -> bool:
    return isinstance(value.type, ir.OptionalType)


def is_sequence(value: ir.Value) -> bool:
    """True if a value is a sequence of tensors, or an Optional that may hold one."""
    return isinstance(content_type(value), ir.SequenceType)


def content_type(value: ir.Value) -> ir.TypeProtocol | None:
    """Return the type of a value, or of the content of an Optional."""
    return None if value.type is None else _content_type(value.type)


def _content_type(value_type: ir.TypeProtocol) -> ir.TypeProtocol:
    return value_type.elem_type if isinstance(value_type, ir.OptionalType) else value_type


def element_of(sequence: ir.Value) -> ir.Value:
    """Return a value that could be an element of a sequence."""
    assert sequence.dtype is not None, sequence.name
    return ir.Value(name="element", type=ir.TensorType(sequence.dtype), shape=sequence.shape)


def result_type(node: ir.Node) -> ir.TypeProtocol | None:
    """Return the result type of an operator on sequences or Optional; None for other nodes."""
    rule = _RESULT_TYPES.get(node.op_type) if is_standard(node) else None
    if rule is None or not node.inputs or (first := node.inputs[0]) is None or first.type is None:
        return None
    return rule(first.type)


def _element_type(container: ir.TypeProtocol) -> ir.TypeProtocol:
    return ir.TensorType(container.dtype)


def _sequence_type(content: ir.TypeProtocol) -> ir.TypeProtocol:
    return ir.SequenceType(ir.TensorType(content.dtype))


_RESULT_TYPES: dict[str, Callable[[ir.TypeProtocol], ir.TypeProtocol]] = {
    "ConcatFromSequence": _element_type,
    "Optional": ir.OptionalType,
    "OptionalGetElement": _content_type,
    "SequenceAt": _element_type,
    "SequenceConstruct": _sequence_type,
    "SequenceErase": _sequence_type,
    "SequenceInsert": _sequence_type,
    "SplitToSequence": _sequence_type,
}


# ---- shapes of results -----------------------------------------------------------------------------------------------


Dims = tuple[int | ir.SymbolicDim, ...]
"""Dimensions of a shape. Two that are the same symbol are equal."""


def output_shape(node: ir.Node, index: int = 0) -> ir.Shape | None:
    """Return the shape of a node's first output, or of any output of Split; None if unknown."""
    rule = _SHAPES.get(node.op_type) if is_standard(node) else None
    if rule is None or (index > 0 and node.op_type != "Split"):
        return None
    shape = _split(node, index) if node.op_type == "Split" else rule(node)
    return None if shape is None else ir.Shape(shape)


def dims(value: ir.Value | None) -> Dims | None:
    """Return the dimensions of a value; None if a dimension has no number or name."""
    if value is None or value.shape is None:
        return None
    shape = tuple(value.shape)
    return shape if all(isinstance(d, int) or d.value is not None for d in shape) else None


def broadcast(shapes: Sequence[Dims | None]) -> Dims | None:
    """Return the common shape by numpy's rule; None if it is unknown."""
    if any(shape is None for shape in shapes):
        return None
    inputs = [shape for shape in shapes if shape is not None]
    rank = max((len(shape) for shape in inputs), default=0)
    result: list[int | ir.SymbolicDim] = []
    for axis in range(rank):
        column = [shape[axis - rank] for shape in inputs if axis - rank >= -len(shape)]
        wide = {d for d in column if d != 1}
        if len(wide) > 1:
            return None
        result.append(next(iter(wide), 1))
    return tuple(result)


def _reduced(node: ir.Node) -> Dims | None:
    shape = dims(node.inputs[0])
    keep = node.attributes.get_int("keepdims", 1)
    axes_input = node.inputs[1] if len(node.inputs) > 1 else None
    axes = constant_ints(axes_input)
    if shape is None or (axes_input is not None and axes is None):
        return None
    if not axes:
        if node.attributes.get_int("noop_with_empty_axes", 0):
            return shape
        axes = tuple(range(len(shape)))
    gone = {axis % len(shape) for axis in axes} if shape else set()
    if keep:
        return tuple(1 if i in gone else d for i, d in enumerate(shape))
    return tuple(d for i, d in enumerate(shape) if i not in gone)


def _matmul(node: ir.Node) -> Dims | None:
    a, b = dims(node.inputs[0]), dims(node.inputs[1])
    if a is None or b is None or len(a) < 2 or len(b) < 2:
        return None
    batch = broadcast([a[:-2], b[:-2]])
    return None if batch is None else (*batch, a[-2], b[-1])


def _gemm(node: ir.Node) -> Dims | None:
    a, b = dims(node.inputs[0]), dims(node.inputs[1])
    if a is None or b is None:
        return None
    return a[node.attributes.get_int("transA", 0)], b[1 - node.attributes.get_int("transB", 0)]


def _transpose(node: ir.Node) -> Dims | None:
    shape = dims(node.inputs[0])
    if shape is None:
        return None
    order = node.attributes.get_ints("perm", tuple(reversed(range(len(shape)))))
    return tuple(shape[i] for i in order)


def _reshape(node: ir.Node) -> Dims | None:
    target = constant_ints(node.inputs[1])
    return target if target is not None and all(d > 0 for d in target) else None


def _unsqueeze(node: ir.Node) -> Dims | None:
    shape, axes = dims(node.inputs[0]), constant_ints(node.inputs[1])
    if shape is None or axes is None:
        return None
    rank = len(shape) + len(axes)
    new, old = {axis % rank for axis in axes}, iter(shape)
    return tuple(1 if i in new else next(old) for i in range(rank))


def _squeeze(node: ir.Node) -> Dims | None:
    shape, axes = dims(node.inputs[0]), constant_ints(node.inputs[1] if len(node.inputs) > 1 else None)
    if shape is None or axes is None:
        return None
    gone = {axis % len(shape) for axis in axes}
    return tuple(d for i, d in enumerate(shape) if i not in gone)


def _split(node: ir.Node, index: int = 0) -> Dims | None:
    shape, sizes = dims(node.inputs[0]), constant_ints(node.inputs[1] if len(node.inputs) > 1 else None)
    if shape is None:
        return None
    axis = node.attributes.get_int("axis", 0) % len(shape)
    whole, count = shape[axis], len(node.outputs)
    if sizes is None and len(node.inputs) < 2 and isinstance(whole, int):
        size = -(-whole // count)  # the last one gets what is left
        sizes = (*[size] * (count - 1), whole - size * (count - 1))
    return None if sizes is None else (*shape[:axis], sizes[index], *shape[axis + 1 :])


def _constant(node: ir.Node) -> Dims | None:
    attributes = node.attributes
    if "value" in attributes:
        return tuple(attributes["value"].as_tensor().shape.numpy())
    lists = [name for name in ("value_ints", "value_floats", "value_strings") if name in attributes]
    if lists:
        return (len(attributes[lists[0]].value),)
    return None if "sparse_value" in attributes else ()


def _shape(node: ir.Node) -> Dims | None:
    shape = node.inputs[0].shape if node.inputs[0] is not None else None
    return None if shape is None or node.attributes else (len(shape),)


_SAME = (
    "Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "BitwiseNot", "Cast", "CastLike", "Ceil", "Celu", "Clip",
    "Cos", "Cosh", "CumSum", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish", "Identity", "IsInf",
    "IsNaN", "LeakyRelu", "Log", "LogSoftmax", "Mish", "Neg", "Not", "Reciprocal", "Relu", "Round", "ScatterElements",
    "ScatterND", "Selu", "Shrink", "Sigmoid", "Sign", "Sin", "Sinh", "Softmax", "Softplus", "Softsign", "Sqrt", "Tan",
    "Tanh", "ThresholdedRelu", "Trilu",
)  # fmt: skip
_BROADCAST = (
    "Add", "And", "BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Div", "Equal", "Greater", "GreaterOrEqual",
    "Less", "LessOrEqual", "Max", "Mean", "Min", "Mod", "Mul", "Or", "PRelu", "Pow", "Sub", "Sum", "Where", "Xor",
)  # fmt: skip
_REDUCE = (
    "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd",
    "ReduceSum", "ReduceSumSquare",
)  # fmt: skip
_SHAPES: dict[str, Callable[[ir.Node], Dims | None]] = {
    **dict.fromkeys(_SAME, lambda node: dims(node.inputs[0])),
    **dict.fromkeys(_BROADCAST, lambda node: broadcast([dims(value) for value in node.inputs])),
    **dict.fromkeys(_REDUCE, _reduced),
    "Constant": _constant,
    "Gemm": _gemm,
    "MatMul": _matmul,
    "Reshape": _reshape,
    "Shape": _shape,
    "Size": lambda node: (),
    "Split": _split,
    "Squeeze": _squeeze,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
"""Rules, which return None where they are not certain."""
