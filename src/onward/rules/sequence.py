"""Sequences of tensors, and Optional, which holds a tensor or a sequence or nothing.

The gradient of a sequence is a sequence of the same length, whose elements have the shapes of its elements. The
gradient of an Optional is that of what it holds, so it has no Optional around it.

What exporters write for a tensor that is split, or for a list of tensors, has the same elements in every run: there an
element that is taken from a sequence is the tensor that was put into it, and no sequence is left to be differentiated.
"""

import onnx_ir as ir

from onward.constants import constant_ints
from onward.model.walk import captured_values, nested_graphs
from onward.rules.common import fixed_number
from onward.rules.nested import (
    captured_and_active,
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


# ---- elements --------------------------------------------------------------------------------------------------------


@gradient("SequenceConstruct")
def sequence_construct(op, dy, *inputs):
    """Each input has the element of dY at its place."""
    return [op.SequenceAt(dy, _position(op, i)) for i in range(len(inputs))]


@gradient("SequenceAt")
def sequence_at(op, dy, sequence, position):
    """dY at the position, zeros elsewhere: in a loop over the elements, one of them changes at a time."""

    def added_to(total):
        element = dy if total is None else op.SequenceAt(total, position) + dy
        total = op.filled_like(sequence.value, 0) if total is None else total
        place = _from_front(op, position, op.SequenceLength(total))
        # The new one comes in before the old one goes: onnx's reference evaluator takes a place at the end for 0.
        return op.SequenceErase(op.SequenceInsert(total, element, place), _after(op, place))

    return added_to


@gradient("SequenceInsert")
def sequence_insert(op, dy, sequence, tensor, position):
    """dY without the element that was inserted; that element."""
    if position is None:
        return op.SequenceErase(dy), op.SequenceAt(dy, _position(op, -1))
    place = _from_front(op, position, op.SequenceLength(dy) - 1)
    return op.SequenceErase(dy, place), op.SequenceAt(dy, place)


@gradient("SequenceErase")
def sequence_erase(op, dy, sequence, position):
    """dY, with zeros where the erased element was."""
    erased = op.SequenceAt(sequence, _position(op, -1) if position is None else position)
    zeros = op.filled_like(erased.value, 0)
    longer = op.SequenceInsert(dy, zeros)
    if position is None:
        return longer
    place = _from_front(op, position, op.SequenceLength(sequence))
    return op.SequenceErase(op.SequenceInsert(longer, zeros, place))


def _position(op, number):
    return op.constant(number, INT64)


def _after(op, place):
    """The next position."""
    number = fixed_number(place)
    return place + 1 if number is None else _position(op, int(number) + 1)


def _from_front(op, position, length):
    """A position as one that is not negative: those are counted from the end of a sequence of this length."""
    number = fixed_number(position)
    if number is not None and number >= 0:
        return position
    position = op.Cast(position, to=INT64)
    return op.Where(position < 0, position + length, position)


# ---- tensors in parts ------------------------------------------------------------------------------------------------


@gradient("SplitToSequence")
def split_to_sequence(op, dy, x, split, *, axis, keepdims):
    """The elements of dY, one behind the other again."""
    return op.ConcatFromSequence(dy, axis=axis, new_axis=int(split is None and not keepdims))


@gradient("ConcatFromSequence")
def concat_from_sequence(op, dy, sequence, *, axis, new_axis):
    """dY split into parts that have the sizes of the elements."""
    if new_axis:
        return op.SplitToSequence(dy, axis=axis, keepdims=0)
    end = None if axis == -1 else axis + 1
    sizes = op.each(lambda inner, x: inner.Shape(x, start=axis, end=end), sequence)
    return op.SplitToSequence(dy, op.ConcatFromSequence(sizes, axis=0), axis=axis)


# ---- Optional --------------------------------------------------------------------------------------------------------


@gradient("Optional", "OptionalGetElement")
def optional(op, dy, x):
    """dY."""
    return dy


# ---- SequenceMap -----------------------------------------------------------------------------------------------------


@gradient("SequenceMap")
def sequence_map(op, dys, *inputs, node, body, active, pull_back):
    """The gradient of the body for each element; what is the same for all elements has the sum of its gradients."""
    captured = captured_and_active(node, active)
    refuse_sequences(node, captured)
    wanted = [i for i, value in enumerate(node.inputs) if value in active]
    given = [i for i, dy in enumerate(dys) if dy is not None]

    def back(inner, *values):
        known, items = dict(zip(given, values, strict=False)), values[len(given) :]
        nodes, outputs = recompute(inner, body, items)
        sources = [*(items[i].value for i in wanted), *captured]
        seeds = seeds_of(inner, outputs, [known.get(i) for i in range(len(dys))])
        grads = pull_back(inner, nodes, seeds, sources)
        return [grads[value] if value in grads else inner.filled_like(value, 0) for value in sources]

    entries = [*(dys[i].value for i in given), *node.inputs]  # of which the first has to be a sequence
    graph = remove_unused(op.subgraph(back, [_entry(value) for value in entries], name="gradient"))
    needed = [i for i, value in enumerate(graph.inputs) if i == 0 or value.uses()]
    graph.inputs[:] = [graph.inputs[i] for i in needed]
    results = op.SequenceMap(*(entries[i] for i in needed), outputs=len(wanted) + len(captured), body=graph)
    sources = [*(node.inputs[i] for i in wanted), *captured]
    return sum_by_value(
        (value, grads if is_sequence(value) else _total(op, grads, value))
        for value, grads in zip(sources, several(results), strict=True)
    )


def _entry(value):
    """What the body of a SequenceMap gets of an input: an element of a sequence, or a tensor itself."""
    return element_of(value) if is_sequence(value) else ir.Value(name=value.name, type=value.type, shape=value.shape)


def _total(op, grads, value):
    """The sum of the tensors in a sequence, each of the shape of `value`; the sequence may be empty."""
    grads.value.type = ir.SequenceType(ir.TensorType(value.dtype))
    stacked = op.ConcatFromSequence(op.SequenceInsert(grads, op.filled_like(value, 0)), axis=0, new_axis=1)
    return op.ReduceSum(stacked, [0], keepdims=0)


@simplification("SequenceMap")
def map_as_loop(op, *inputs, node, body):
    """A Loop that appends, where a body captures sequences, whose gradients only a Loop can carry, or nests graphs.

    ONNX Runtime does not load every SequenceMap in a graph that is nested in another one, as gradients would have it.
    """
    outside = [value for value in captured_values(body) if value not in body.inputs]
    plain = all(isinstance(value.type, ir.TensorType) for value in outside)
    dtypes = [outer.dtype or made.dtype for outer, made in zip(node.outputs, body.outputs, strict=True)]
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
    known, place = _elements(sequence.value, xs), _number(position.value)
    if known is None or place is None or not -len(known) <= place < len(known):
        return NotImplemented
    return op(known[place])


@simplification("ConcatFromSequence")
def concat(op, sequence, *, axis, new_axis, xs):
    known = _elements(sequence.value, xs)
    if not known:
        return NotImplemented
    parts = [op.Unsqueeze(value, [axis]) for value in known] if new_axis else known
    return op.Concat(*parts, axis=axis)


@simplification("SplitToSequence")
def split(op, x, split, *, axis, keepdims):
    sizes = _sizes(x, split, axis)
    if not sizes:
        return NotImplemented
    parts = several(op.Split(x, sizes, axis=axis, outputs=len(sizes)))
    if split is None and not keepdims:
        parts = [op.Squeeze(part, [axis]) for part in parts]
    return op.SequenceConstruct(*parts)


def _elements(sequence, xs):
    """The tensors in a sequence that is put together in the graph, at positions that are known; else None."""
    steps, node = [], sequence.producer()
    while node is not None and node.op_type in ("SequenceInsert", "SequenceErase", "Identity"):
        steps.append(node)
        node = node.inputs[0].producer()
    if node is None or node.op_type not in ("SequenceConstruct", "SequenceEmpty"):
        return None
    if any(step.outputs[0].name in xs for step in (node, *steps)):
        return None
    known = list(node.inputs)
    for step in reversed(steps):
        if not _step(known, step):
            return None
    return known


def _step(known, node):
    """Do with the list what a node does with the sequence; whether its position is known."""
    if node.op_type == "Identity":
        return True
    inserts = node.op_type == "SequenceInsert"
    given = node.inputs[2 if inserts else 1 :]
    place = _number(given[0]) if given and given[0] is not None else len(known) - (not inserts)
    if place is None or not -len(known) <= place < len(known) + inserts:
        return False
    if inserts:
        known.insert(place, node.inputs[1])
    else:
        del known[place]
    return True


def _number(position):
    """A position, if it is the same in every run."""
    found = constant_ints(position)
    return found[0] if found else None


def _sizes(x, split, axis):
    """The sizes of the parts that SplitToSequence makes, if they are known."""
    given = (1,) if split is None else constant_ints(split.value)
    rank = 0 if split is None else _rank(split.value)
    if given is None or rank is None or rank == 1:
        return given if rank == 1 else None
    shape = dims(x.value)
    if shape is None or not isinstance(shape[axis], int):
        return None
    (size,) = given
    return [min(size, shape[axis] - start) for start in range(0, shape[axis], size)]


def _rank(value):
    """How many axes a constant has; the values of nested graphs are not declared."""
    shape = value.shape
    if shape is None and value.producer() is not None:
        shape = output_shape(value.producer())
    return None if shape is None else shape.rank()
