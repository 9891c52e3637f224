"""Control flow: gradients of If, Scan and Loop, which hold graphs of their own.

A nested graph reads values of the graphs around it without naming them as inputs: these "captured" values get gradients
too, so the rules here answer with a gradient per value. What a nested graph computes is not visible outside: each
backward graph computes the nested graph once more, from the same inputs, and then goes back through it. For Scan and
Loop these inputs are the states before each iteration: the forward node gets one more scan output for each of them.
States that are sequences cannot be stacked like that. Most bodies only append to them, and the way back takes from the
end what was appended; where it needs to know what was in a sequence, it runs the Loop again up to that iteration.
"""

import onnx_ir as ir

from onward.build import Builder
from onward.errors import UnsupportedError
from onward.rules.indexing import along, join_shape
from onward.rules.nested import (
    captured_and_active,
    copy_graph,
    is_float,
    recompute,
    refuse_random,
    refuse_sequences,
    seeds_of,
    several,
    sum_by_value,
)
from onward.rules.registry import gradient
from onward.shapes import content_type, is_sequence
from onward.transform.training import remove_unused


@gradient("If")
def if_(op, dys, cond, *, node, then_branch, else_branch, active, pull_back):
    """If(cond, gradient of then_branch, gradient of else_branch); zero for what the branch taken does not read."""
    wanted = captured_and_active(node, active)
    if not wanted:
        return {}

    def back(branch):
        def body(inner):
            nodes, outputs = recompute(inner, branch, [])
            grads = pull_back(inner, nodes, seeds_of(inner, outputs, dys), wanted)
            return [grads[value] if value in grads else inner.filled_like(value, 0) for value in wanted]

        return remove_unused(op.subgraph(body, name="gradient"))

    grads = several(op.If(cond, outputs=len(wanted), then_branch=back(then_branch), else_branch=back(else_branch)))
    return {value: grad.like(value) for value, grad in zip(wanted, grads, strict=True)}


@gradient("Scan")
def scan(
    op,
    dys,
    *inputs,
    node,
    body,
    active,
    pull_back,
    num_scan_inputs,
    scan_input_axes,
    scan_input_directions,
    scan_output_axes,
    scan_output_directions,
):
    """A Scan from the last iteration to the first: the gradients of states and captured values are its states.

    Products of the body are kept, not computed again. Gradients that are sums of products are computed after the Scan.
    """
    count = len(inputs) - num_scan_inputs
    states, sequences = node.inputs[:count], node.inputs[count:]
    in_axes = list(scan_input_axes or [0] * len(sequences))
    in_directions = list(scan_input_directions or [0] * len(sequences))
    outputs = len(dys) - count
    out_axes = list(scan_output_axes or [0] * outputs)
    out_directions = list(scan_output_directions or [0] * outputs)

    back = _Back(op, node, states, body.inputs[:count], active, pull_back)
    refuse_sequences(node, back.captured)
    wanted = [i for i, sequence in enumerate(sequences) if sequence in active]
    if not back.size and not wanted:
        return {}
    saved = _saving(op, node, body, body.inputs[:count], states)
    products = _products(node, body)
    saved_products = _saving(op, node, body, products, products)
    given = [i for i in range(outputs) if dys[count + i] is not None]

    def step(inner, *values):
        carried, values = values[: back.size], values[back.size :]
        before, items, rest = values[:count], values[count : len(inputs)], values[len(inputs) :]
        seeds, computed = rest[: len(given)], rest[len(given) :]
        known = dict(zip(given, seeds, strict=True))
        return back.step(
            inner,
            body,
            [*before, *items],
            before,
            carried,
            first_state=0,
            item_dys=[known.get(i) for i in range(outputs)],
            items=[items[i] for i in wanted],
            computed=zip(products, computed, strict=True),
        )

    entries = [
        *back.carried(),
        *(_like(state) for state in back.types),
        *(_item(sequence, axis) for sequence, axis in zip(sequences, in_axes, strict=True)),
        *(_item(dys[count + i].value, out_axes[i]) for i in given),
        *(_like(product) for product in products),
    ]
    backward = op.subgraph(step, entries, name="gradient")
    # In the order of the iterations there are stacks of states, and of gradients of sequences that are read in it.
    stacks = dict(zip(backward.inputs[back.size :], map(op, saved), strict=False))
    slices = dict(zip(wanted, backward.outputs[back.size :], strict=True))
    in_order = {value for i, value in slices.items() if in_axes[i] == in_directions[i] == 0}
    sums, more = defer(op, backward, range(len(back.floats), back.size), {*stacks, *in_order})
    kept = {i: start for i, start in enumerate(back.start(dys[:count])) if i not in sums}
    results = several(
        op.Scan(
            *kept.values(),
            *saved,
            *sequences,
            *(dys[count + i] for i in given),
            *saved_products,
            outputs=len(kept) + len(wanted) + len(more),
            body=backward,
            num_scan_inputs=len(inputs) + len(given) + len(products),
            scan_input_axes=[*([0] * count), *in_axes, *(out_axes[i] for i in given), *(0 for _ in products)],
            scan_input_directions=[
                *([1] * count),
                *(1 - direction for direction in in_directions),
                *(1 - out_directions[i] for i in given),
                *(1 for _ in products),
            ],
            scan_output_axes=[*(in_axes[i] for i in wanted), *(0 for _ in more)] or None,
            scan_output_directions=[*(1 - in_directions[i] for i in wanted), *(1 for _ in more)] or None,
        )
    )
    stacks |= zip((*slices.values(), *more), results[len(kept) :], strict=True)
    carried = dict(zip(kept, results, strict=False))
    carried |= {i: sum_of_products(op, pairs, stacks) for i, pairs in sums.items()}
    return back.gradients(
        [carried[i] for i in range(back.size)],
        zip([sequences[i] for i in wanted], results[len(kept) :], strict=False),
    )


@gradient("Loop")
def loop(op, dys, trip_count, cond, *inputs, node, body, active, pull_back):
    """A Loop from the last iteration to the first, as often as the Loop itself went round."""
    count = len(inputs)
    states = node.inputs[2:]
    back = _Back(op, node, states, body.inputs[2:], active, pull_back)
    if not back.size:
        return {}
    number = ir.Value(name="iteration", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([]))
    truth = ir.Value(name="condition", type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([]))
    tensors = [i for i, state in enumerate(back.types) if isinstance(state.type, ir.TensorType)]
    numbers, *saved = _saving(
        op,
        node,
        body,
        [body.inputs[0], *(body.inputs[2 + i] for i in tensors)],
        [_declare_like(number, body.inputs[0]), *(states[i] for i in tensors)],
    )
    trips = op.Squeeze(op.Shape(numbers, start=0, end=1), [0])
    trips.value.shape = ir.Shape([])  # so that what is read at an iteration's number has a shape

    def step(inner, done, go_on, *carried):
        current = inner(trips.value) - 1 - done
        before = _after(inner, node, body, current, back.types) if len(tensors) < count else [None] * count
        for i, stack in zip(tensors, saved, strict=True):
            before[i] = inner.Gather(stack, current, axis=0).like(back.types[i])
        items = [inner.Gather(dy.value, current, axis=0) if dy is not None else None for dy in dys[count:]]
        for dy, item in zip(dys[count:], items, strict=True):
            if item is not None:
                item.value.shape = _item(dy.value, 0).shape
        ends = [
            _with_rank_of(inner, current, body.inputs[0]),
            _with_rank_of(inner, inner.constant(True), body.inputs[1]),
        ]
        results = back.step(inner, body, [*ends, *before], before, carried, first_state=1, item_dys=items, items=[])
        return [inner.Identity(go_on), *results]

    entries = [_like(number, "iteration"), _like(truth, "condition"), *back.carried()]
    results = op.Loop(
        trips,
        True,
        *back.start(dys[:count]),
        outputs=back.size,
        body=remove_unused(op.subgraph(step, entries, name="gradient")),
    )
    return back.gradients(several(results), ())


class _Back:
    """What the ways back through Scan and Loop share: the gradients that they carry from iteration to iteration."""

    def __init__(self, op, node, states, inner_states, active, pull_back):
        self.op, self.node, self.states, self.pull_back = op, node, states, pull_back
        refuse_random(node)
        self.types = [_declare_like(inner, state) for inner, state in zip(inner_states, states, strict=True)]
        self.floats = [i for i, state in enumerate(self.types) if is_float(state)]
        self.captured = captured_and_active(node, active)
        self.size = len(self.floats) + len(self.captured)

    def carried(self):
        return [
            *(_gradient_of(self.types[i]) for i in self.floats),
            *(_gradient_of(value) for value in self.captured),
        ]

    def start(self, dys):
        """The gradients after the last iteration."""
        last = [dys[i] if dys[i] is not None else self.op.filled_like(self._last(i), 0) for i in self.floats]
        return [*last, *(self.op.filled_like(value, 0) for value in self.captured)]

    def _last(self, i):
        """What has the type and shape of a state after the last iteration: a tensor has them from the beginning."""
        if isinstance(self.types[i].type, ir.TensorType):
            return self.states[i]
        last = self.node.outputs[i]
        last.type = self.types[i].type if last.type is None else last.type
        return last

    def step(self, op, body, given, before, carried, *, first_state, item_dys, items, computed=()):
        """The gradients before an iteration from those after it, and those of `items`.

        The states are among the outputs of the body from `first_state` on, before what is stacked. Pairs of values of
        the body and what they were in this iteration, where that is known, are in `computed`.
        """
        nodes, outputs = recompute(op, body, given)
        after = dict(zip(self.floats, carried, strict=False))
        results = outputs[first_state:]
        for state, result in zip(self.types, results, strict=False):
            _refuse_other_shape(self.node, state, result)
        seeds = seeds_of(op, results, [*(after.get(i) for i in range(len(before))), *item_dys])
        seeds |= zip(self.captured, carried[len(self.floats) :], strict=True)  # sums, to which the iteration adds
        inputs = [before[i] for i in self.floats]
        wrt = [*(expr.value for expr in (*inputs, *items)), *self.captured]
        grads = self.pull_back(op, nodes, seeds, wrt)
        again = {old.outputs[0]: new.outputs[0] for old, new in zip(body, nodes, strict=True)}
        for value, known in computed:  # only now: the way back goes through the nodes
            again[value].replace_all_uses_with(known.value)

        def found(value):
            grad = grads[value] if value in grads else op.filled_like(value, 0)
            # An input of the graph must not be declared anew, and ONNX Runtime wants a Scan's outputs declared.
            made = grad if grad.value.producer() is not None and grad.value.graph is op.graph else op.Identity(grad)
            return made.like(value)

        return [found(value) for value in (*(expr.value for expr in inputs), *self.captured, *(e.value for e in items))]

    def gradients(self, carried, others):
        """Per value, which may be an input twice, or captured as well."""
        values = [*(self.states[i] for i in self.floats), *self.captured]
        return sum_by_value((*zip(values, carried, strict=True), *others))


# ---- states ----------------------------------------------------------------------------------------------------------


def _saving(op, node, body, values, types):
    """Have a Scan or Loop put out inputs of its body, stacked over the iterations; the stacks."""
    inner = Builder(body, opset=op.opset, names=op.names, functions=op.functions, imports=op.imports)
    first = len(body.outputs) - (node.op_type == "Loop")  # whose body puts out a condition as well
    node.resize_outputs(first + len(values))
    for output in node.outputs[:first]:  # ONNX Runtime takes none that is left out before another
        output.name = output.name or op.names.fresh(f"{node.name or node.op_type}/unused")
    for value, kind, output in zip(values, types, node.outputs[first:], strict=True):
        body.outputs.append(inner.Identity(value).like(_declare_like(value, kind)).value)
        output.name = op.names.fresh(f"{node.name or node.op_type}/{value.name}")
        output.type = kind.type
        output.shape = ir.Shape([None, *kind.shape]) if kind.shape is not None else None
    for name in ("scan_output_axes", "scan_output_directions"):
        if name in node.attributes:
            node.attributes[name] = ir.AttrInt64s(name, [*node.attributes[name].as_ints(), *([0] * len(values))])
    return list(node.outputs[first:])


def _products(node, body):
    """Products in a body, of a shape that all iterations share: they take longer to compute again than to keep."""
    outside = {size for value in node.inputs if value.shape is not None for size in value.shape}
    return [
        value
        for inner in body
        for value in inner.outputs
        if inner.op_type in ("Gemm", "MatMul")
        and value.type is not None
        and value.shape is not None
        and all(isinstance(size, int) or size in outside for size in value.shape)
    ]


def _after(op, node, body, trips, types):
    """The states of a Loop after so many iterations, no more than it went through: the Loop itself, once more."""
    again = copy_graph(op, body)
    del again.outputs[1 + len(types) :]
    _, cond, *states = node.inputs
    results = several(op.Loop(trips, cond, *states, outputs=len(types), body=remove_unused(again)))
    return [result.like(state) for result, state in zip(results, types, strict=True)]


def _refuse_other_shape(node, before, after):
    if before.shape is None or after.shape is None:
        return
    sizes = zip(before.shape, after.shape, strict=False)
    if len(before.shape) != len(after.shape) or any(
        isinstance(a, int) and isinstance(b, int) and a != b for a, b in sizes
    ):
        raise UnsupportedError(
            f"the state `{before.name}` of `{node.op_type}` (node `{node.name}`) changes its shape from {before.shape} "
            f"to {after.shape}: the gradient needs states of a constant shape",
            hint="start with a tensor of the final shape and fill it in place, for example with ScatterElements",
        )


# ---- values ----------------------------------------------------------------------------------------------------------


def _like(value, name=None):
    return ir.Value(name=name or value.name, type=value.type, shape=value.shape)


def _gradient_of(value):
    return ir.Value(name="gradient", type=content_type(value), shape=value.shape)


def _declare_like(value, outer):
    """A value with the type and shape of `outer`; where that is not known, what `value` itself declares."""
    if is_sequence(outer):  # whose elements may come to have other shapes
        return ir.Value(name=value.name, type=outer.type)
    return ir.Value(
        name=value.name,
        type=outer.type if outer.type is not None else value.type,
        shape=outer.shape if outer.shape is not None else value.shape,
    )


def _item(value, axis):
    """One slice of a tensor along an axis."""
    shape = None
    if value.shape is not None:
        axis = axis % len(value.shape)
        shape = ir.Shape([size for i, size in enumerate(value.shape) if i != axis])
    return ir.Value(name=value.name, type=value.type, shape=shape)


def _with_rank_of(op, scalar, value):
    """The number of the iteration, or the condition: some graphs declare them as tensors with one element."""
    return op.Reshape(scalar, [1]) if value.shape is not None and value.shape.rank() == 1 else scalar


# ---- products that a Scan sums ---------------------------------------------------------------------------------------


# Products that a Scan sums over its iterations, as one product after it.
#
# The gradient of a matrix by which every iteration multiplies is the sum of A' B over the iterations. Instead of
# carrying that sum, which is as large as the matrix, from iteration to iteration, the Scan puts out A and B, and the
# rows of all A are multiplied with those of all B.


def defer(op, body, positions, stacked):
    """Take states to which a body adds nothing but products out of it: the factors by position, and what it puts out.

    The body puts out the factors that are not among `stacked`, the values of which there is a stack anyway.
    """
    found = {i: _factor_pairs(body.inputs[i], body.outputs[i]) for i in positions}
    sums = {i: pairs for i, pairs in found.items() if pairs}
    factors = dict.fromkeys(value for pairs in sums.values() for pair in pairs for value in pair)
    more = [value for value in factors if value not in stacked]
    inner = Builder(body, opset=op.opset, names=op.names, functions=op.functions, imports=op.imports)
    body.outputs.extend(inner.Identity(value).value for value in more)
    for i in sorted(sums, reverse=True):
        body.outputs.pop(i)
    remove_unused(body)
    for i in sorted(sums, reverse=True):
        body.inputs.pop(i)
    return sums, more


def sum_of_products(op, pairs, stacks):
    """The sum of A' B over all iterations, whose A and B are in `stacks`."""

    def all_rows(value):
        stack = stacks[value]
        stack.value.shape = ir.Shape([None, *value.shape])
        return op.Reshape(stack, join_shape(op, [-1], along(op, stack, -1)))

    products = [op.Gemm(all_rows(a), all_rows(b), transA=1) for a, b in pairs]
    return products[0] if len(products) == 1 else op.Sum(*products)


def _factor_pairs(before, after):
    """The factors of all that is added to a state, if they are those of products."""
    pairs = []
    while after is not before:
        node = after.producer()
        pair = _factors(node.inputs[1]) if node is not None and node.op_type == "Add" else None
        if pair is None:
            return None
        pairs.append(pair)
        after = node.inputs[0]
    return pairs


def _factors(value):
    """A and B, matrices of known width, if the value is A' B."""
    node = value.producer()
    if node is None:
        return None
    attributes = node.attributes
    plain = not attributes.get_int("transB", 0) and attributes.get_float("alpha", 1.0) == 1 and len(node.inputs) == 2
    if node.op_type == "Gemm" and attributes.get_int("transA", 0) and plain:
        pair = tuple(node.inputs)
    elif node.op_type == "MatMul" and (turned := node.inputs[0].producer()) and turned.op_type == "Transpose":
        pair = turned.inputs[0], node.inputs[1]
    else:
        return None
    return pair if all(factor.shape is not None and factor.shape.rank() == 2 for factor in pair) else None
