"""Values that are not tensors but hold some: sequences, and Optional, which holds a tensor or sequence, or nothing.

The shape of such a value, as `onnx_ir` keeps it, is that of the tensors in it.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from onward.standard import is_standard


def is_optional(value: ir.Value) -> bool:
    return isinstance(value.type, ir.OptionalType)


def is_sequence(value: ir.Value) -> bool:
    """Whether a value is a sequence of tensors, or an Optional that may hold one."""
    return isinstance(content_type(value), ir.SequenceType)


def content_type(value: ir.Value) -> ir.TypeProtocol | None:
    """The type of a value; of an Optional, that of what it holds."""
    return None if value.type is None else _content_type(value.type)


def _content_type(given: ir.TypeProtocol) -> ir.TypeProtocol:
    return given.elem_type if isinstance(given, ir.OptionalType) else given


def element_of(sequence: ir.Value) -> ir.Value:
    """A value that could be an element of a sequence."""
    assert sequence.dtype is not None, sequence.name
    return ir.Value(name="element", type=ir.TensorType(sequence.dtype), shape=sequence.shape)


def result_type(node: ir.Node) -> ir.TypeProtocol | None:
    """The type of what a node makes that puts a tensor into a sequence or Optional, or takes it out; else None."""
    known = _RESULT_TYPES.get(node.op_type) if is_standard(node) else None
    first = node.inputs[0] if known is not None and node.inputs else None
    if known is None or first is None or first.type is None:
        return None
    return known(first.type)


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
