"""Sequences of tensors, and Optional, which holds a tensor, a sequence or nothing.

The gradient of a sequence is a sequence of equal length, whose elements have the shapes of its elements. The gradient
of an Optional is the gradient of its content, without an Optional around it.

Exporters split tensors and make lists of tensors with the same elements in every run. Then simplifications replace an
element by the tensor that was put into the sequence, and no sequence is left to differentiate.
"""

import onnx_ir as ir

from onward.constants import constant_ints
from onward.model.walk import captured_values, nested_graphs
from onward.rules.common import fixed_number
from onward.rules.nested import (
    captured_and_active,
    gradients_or_zeros,
    recompute,
    refuse_sequences,
    seeds_of,
    several,
    sum_by_value,
)
from onward.rules.registry import gradient, no_gradient, simplification
from onward.shapes import dims, element_of, is_sequence, output_shape
from onward.transform.training import remove_unused

INT64 = ir.DataType.INT64

no_gradient("the result is empty", "SequenceEmpty")
no_gradient("the result is an integer", "SequenceLength")
no_gradient("the result is a truth value", "OptionalHasElement")


@gradient("SequenceConstruct")
def sequence_construct(op, dy, *inputs):
    """dX_i = element i of dY."""
    return [op.SequenceAt(dy, _position(op, i)) for i in range(len(inputs))]


@gradient("SequenceAt")
def sequence_at(op, dy, sequence, position):
    """dX = dY at the position, zeros elsewhere; adds to the sum so far, since loops read elements one at a time."""

    def added_to(total):
        element = dy if total is None else op.SequenceAt(total, position) + dy
        total = op.filled_like(sequence.value, 0) if total is None else total
        index = _from_front(op, position, op.SequenceLength(total))
        number = fixed_number(index)
        following = index + 1 if number is None else _position(op, int(number) + 1)
        # Insert before erasing: onnx's reference evaluator inserts at 0 if the index is the end of the sequence.
        return op.SequenceErase(op.SequenceInsert(total, element, index), following)

    return added_to


@gradient("SequenceInsert")
def sequence_insert(op, dy, sequence, tensor, position):
    """dX = dY without the inserted element, which is the gradient of the tensor."""
    if position is None:
        return op.SequenceErase(dy), op.SequenceAt(dy, _position(op, -1))
    index = _from_front(op, position, op.SequenceLength(dy) - 1)
    return op.SequenceErase(dy, index), op.SequenceAt(dy, index)


@gradient("SequenceErase")
def sequence_erase(op, dy, sequence, position):
    """dX = dY with zeros inserted for the erased element."""
    erased = op.SequenceAt(sequence, _position(op, -1) if position is None else position)
    zeros = op.filled_like(erased.value, 0)
    longer = op.SequenceInsert(dy, zeros)
    if position is None:
        return longer
    index = _from_front(op, position, op.SequenceLength(sequence))
    return op.SequenceErase(op.SequenceInsert(longer, zeros, index))


def _position(op, number):
    return op.constant(number, INT64)


def _from_front(op, position, length):
    """Return a position as a non-negative one; negative ones count from the end of a sequence of this length."""
    number = fixed_number(position)
    if number is not None and number >= 0:
        return position
    position = op.Cast(position, to=INT64)
    return op.Where(position < 0, position + length, position)


@gradient("SplitToSequence")
def split_to_sequence(op, dy, x, split, *, axis, keepdims):
    """dX = the concatenated elements of dY."""
    return op.ConcatFromSequence(dy, axis=axis, new_axis=int(split is None and not keepdims))


@gradient("ConcatFromSequence")
def concat_from_sequence(op, dy, sequence, *, axis, new_axis):
    """dX = dY split into the sizes of the elements."""
    if new_axis:
        return op.SplitToSequence(dy, axis=axis, keepdims=0)
    end = None if axis == -1 else axis + 1
    sizes = op.each(lambda inner, x: inner.Shape(x, start=axis, end=end), sequence)
    return op.SplitToSequence(dy, op.ConcatFromSequence(sizes, axis=0), axis=axis)


gradient("Optional", "OptionalGetElement")(lambda op, dy, x: dy)


@gradient("SequenceMap")
def sequence_map(op, dys, *inputs, node, body, active, pull_back):
    """Map the gradient of the body over the elements; inputs that all elements share get the sum."""
    captured = captured_and_active(node, active)
    refuse_sequences(node, captured)
    sources = [i for i, value in enumerate(node.inputs) if value in active]
    with_gradient = [i for i, dy in enumerate(dys) if dy is not None]

    def back(inner, *values):
        dy_of, items = dict(zip(with_gradient, values, strict=False)), values[len(with_gradient) :]
        nodes, outputs = recompute(inner, body, items)
        seeds = seeds_of(inner, outputs, [dy_of.get(i) for i in range(len(dys))])
        return gradients_or_zeros(inner, pull_back, nodes, seeds, [*(items[i].value for i in sources), *captured])

    entries = [*(dys[i].value for i in with_gradient), *node.inputs]  # the first must be a sequence
    graph = remove_unused(op.subgraph(back, [_entry(value) for value in entries], name="gradient"))
    needed = [i for i, value in enumerate(graph.inputs) if i == 0 or value.uses()]
    graph.inputs[:] = [graph.inputs[i] for i in needed]
    values = [*(node.inputs[i] for i in sources), *captured]
    results = op.SequenceMap(*(entries[i] for i in needed), outputs=len(values), body=graph)
    return sum_by_value(
        (value, grads if is_sequence(value) else _total(op, grads, value))
        for value, grads in zip(values, several(results), strict=True)
    )


def _entry(value):
    """Return the input of the body of a SequenceMap: an element of a sequence, or a tensor itself."""
    return element_of(value) if is_sequence(value) else ir.Value(name=value.name, type=value.type, shape=value.shape)


def _total(op, grads, value):
    """Return the sum of the tensors in a sequence, each of the shape of `value`; 0 for an empty one."""
    grads.value.type = ir.SequenceType(ir.TensorType(value.dtype))
    stacked = op.ConcatFromSequence(op.SequenceInsert(grads, op.filled_like(value, 0)), axis=0, new_axis=1)
    return op.ReduceSum(stacked, [0], keepdims=0)


@simplification("SequenceMap")
def map_as_loop(op, *inputs, node, body):
    """Replace a SequenceMap by a Loop if its body has graphs, or captures sequences, whose gradients a Loop can carry.

    ONNX Runtime does not load every SequenceMap in a nested graph, where gradients would need one.
    """
    outside = [value for value in captured_values(body) if value not in body.inputs]
    plain = all(isinstance(value.type, ir.TensorType) for value in outside)
    dtypes = [outer.dtype or inner.dtype for outer, inner in zip(node.outputs, body.outputs, strict=True)]
    if (plain and not any(any(nested_graphs(inner)) for inner in body)) or None in dtypes:
        return NotImplemented

    def step(inner, number, go_on, *lists):
        items = [inner.SequenceAt(x.value, number).like(_entry(x.value)) if is_sequence(x.value) else x for x in inputs]
        _, outputs = recompute(inner, body, items)
        longer = [inner.SequenceInsert(*pair) for pair in zip(lists, outputs, strict=True)]
        return [inner.Identity(go_on), *longer]

    entries = [
        ir.Value(name="iteration", type=ir.TensorType(INT64), shape=ir.Shape([])),
        ir.Value(name="condition", type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([])),
        *(ir.Value(name="list", type=ir.SequenceType(ir.TensorType(dtype))) for dtype in dtypes),
    ]
    return op.Loop(
        op.SequenceLength(inputs[0]),
        True,
        *(op.SequenceEmpty(dtype=dtype) for dtype in dtypes),
        outputs=len(node.outputs),
        body=op.subgraph(step, entries, name="map"),
    )


# ---- sequences whose elements are known ------------------------------------------------------------------------------


@simplification("SequenceAt")
def known_element(op, sequence, position, *, xs):
    elements, index = _elements(sequence.value, xs), _number(position.value)
    if elements is None or index is None or not -len(elements) <= index < len(elements):
        return NotImplemented
    return op(elements[index])


@simplification("ConcatFromSequence")
def concat(op, sequence, *, axis, new_axis, xs):
    elements = _elements(sequence.value, xs)
    if not elements:
        return NotImplemented
    return op.Concat(*([op.Unsqueeze(value, [axis]) for value in elements] if new_axis else elements), axis=axis)


@simplification("SplitToSequence")
def split(op, x, split, *, axis, keepdims):
    sizes = _sizes(x, split, axis)
    if not sizes:
        return NotImplemented
    tensors = several(op.Split(x, sizes, axis=axis, outputs=len(sizes)))
    if split is None and not keepdims:
        tensors = [op.Squeeze(x, [axis]) for x in tensors]
    return op.SequenceConstruct(*tensors)


def _elements(sequence, xs):
    """Return the tensors in a sequence that nodes build at constant positions; else None."""
    steps, node = [], sequence.producer()
    while node is not None and node.op_type in ("SequenceInsert", "SequenceErase", "Identity"):
        steps.append(node)
        node = node.inputs[0].producer()
    if node is None or node.op_type not in ("SequenceConstruct", "SequenceEmpty"):
        return None
    if any(step.outputs[0].name in xs for step in (node, *steps)):
        return None
    elements = list(node.inputs)
    return elements if all(_apply(step, elements) for step in reversed(steps)) else None


def _apply(node, elements):
    """Apply a node on a sequence to a list; return False if its position is not known."""
    if node.op_type == "Identity":
        return True
    inserts = node.op_type == "SequenceInsert"
    positions = node.inputs[2 if inserts else 1 :]
    index = _number(positions[0]) if positions and positions[0] is not None else len(elements) - (not inserts)
    if index is None or not -len(elements) <= index < len(elements) + inserts:
        return False
    if inserts:
        elements.insert(index, node.inputs[1])
    else:
        del elements[index]
    return True


def _number(position):
    """Return a position if it is constant, else None."""
    numbers = constant_ints(position)
    return numbers[0] if numbers else None


def _sizes(x, split, axis):
    """Return the sizes of the results of a SplitToSequence; None if they are not known."""
    numbers = (1,) if split is None else constant_ints(split.value)
    shape = None if split is None else split.value.shape
    if split is not None and shape is None and split.value.producer() is not None:
        shape = output_shape(split.value.producer())  # values of nested graphs are not declared
    rank = 0 if split is None else None if shape is None else shape.rank()
    if numbers is None or rank is None or rank == 1:
        return numbers if rank == 1 else None
    sizes = dims(x.value)
    if sizes is None or not isinstance(sizes[axis], int):
        return None
    (size,) = numbers
    return [min(size, sizes[axis] - start) for start in range(0, sizes[axis], size)]
