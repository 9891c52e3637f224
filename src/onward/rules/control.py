"""Gradients of If, Scan and Loop, which have nested graphs.

The rules here return a gradient per value, since captured values get gradients too. Each backward graph computes its
nested graph again from the same inputs, and then goes back through it. For Scan and Loop these inputs are the states
before each iteration: the forward node gets one more scan output for each. Sequences as states cannot be stacked. Most
bodies only append to them, and the backward pass takes the appended elements from the end; if it needs the content of a
sequence, it runs the Loop again up to that iteration.
"""

from types import MappingProxyType

import onnx_ir as ir

from onward.build import Builder
from onward.errors import UnsupportedError
from onward.model.walk import source_of
from onward.rules.indexing import along, join_shape
from onward.rules.nested import (
    captured_and_active,
    copy_graph,
    gradients_or_zeros,
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
    """If(cond, gradient of then_branch, gradient of else_branch); zeros for values that the branch does not read."""
    sources = captured_and_active(node, active)
    if not sources:
        return {}

    def back(branch):
        def body(inner):
            nodes, outputs = recompute(inner, branch, [])
            return gradients_or_zeros(inner, pull_back, nodes, seeds_of(inner, outputs, dys), sources)

        return remove_unused(op.subgraph(body, name="gradient"))

    grads = several(op.If(cond, outputs=len(sources), then_branch=back(then_branch), else_branch=back(else_branch)))
    return {value: grad.like(value) for value, grad in zip(sources, grads, strict=True)}


@gradient("Scan")
def scan(
    op, dys, *inputs, node, body, active, pull_back, num_scan_inputs,
    scan_input_axes, scan_input_directions, scan_output_axes, scan_output_directions,
):  # fmt: skip
    """Scan from the last iteration to the first, with the gradients of states and captured values as states.

    Matmuls of the body are saved, not recomputed. Gradients that are sums of matmuls are computed after the Scan.
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
    sources = [i for i, sequence in enumerate(sequences) if sequence in active]
    if not back.size and not sources:
        return {}
    saved = _saving(op, node, body, body.inputs[:count], states)
    products = _products(node, body)
    saved_products = _saving(op, node, body, products, products)
    with_gradient = [i for i in range(outputs) if dys[count + i] is not None]

    def step(inner, *values):
        carried, values = values[: back.size], values[back.size :]
        before, items, rest = values[:count], values[count : len(inputs)], values[len(inputs) :]
        seeds, computed = rest[: len(with_gradient)], rest[len(with_gradient) :]
        dy_of = dict(zip(with_gradient, seeds, strict=True))
        return back.step(
            inner,
            body,
            [*before, *items],
            before,
            carried,
            first_state=0,
            item_dys=[dy_of.get(i) for i in range(outputs)],
            items=[items[i] for i in sources],
            computed=zip(products, computed, strict=True),
        )

    entries = [
        *back.carried(),
        *(_like(state) for state in back.types),
        *(
            _declare_like(inner, _item(sequence, axis))
            for inner, sequence, axis in zip(body.inputs[count:], sequences, in_axes, strict=True)
        ),
        *(_item(dys[count + i].value, out_axes[i]) for i in with_gradient),
        *(_like(product) for product in products),
    ]
    backward = op.subgraph(step, entries, name="gradient")
    # Stacks of states are in the order of the iterations, as are gradients of sequences that are read in that order.
    stacks = dict(zip(backward.inputs[back.size :], map(op, saved), strict=False))
    slices = dict(zip(sources, backward.outputs[back.size :], strict=True))
    in_order = {value for i, value in slices.items() if in_axes[i] == in_directions[i] == 0}
    sums, more = defer(op, backward, range(len(back.floats), back.size), {*stacks, *in_order})
    states_left = {i: start for i, start in enumerate(back.start(dys[:count])) if i not in sums}
    results = several(
        op.Scan(
            *states_left.values(),
            *saved,
            *sequences,
            *(dys[count + i] for i in with_gradient),
            *saved_products,
            outputs=len(states_left) + len(sources) + len(more),
            body=backward,
            num_scan_inputs=len(inputs) + len(with_gradient) + len(products),
            scan_input_axes=[*([0] * count), *in_axes, *(out_axes[i] for i in with_gradient), *(0 for _ in products)],
            scan_input_directions=[
                *([1] * count),
                *(1 - direction for direction in in_directions),
                *(1 - out_directions[i] for i in with_gradient),
                *(1 for _ in products),
            ],
            scan_output_axes=[*(in_axes[i] for i in sources), *(0 for _ in more)] or None,
            scan_output_directions=[*(1 - in_directions[i] for i in sources), *(1 for _ in more)] or None,
        )
    )
    stacks |= zip((*slices.values(), *more), results[len(states_left) :], strict=True)
    carried = dict(zip(states_left, results, strict=False))
    carried |= {i: sum_of_products(op, pairs, stacks) for i, pairs in sums.items()}
    return back.gradients(
        [carried[i] for i in range(back.size)],
        zip([sequences[i] for i in sources], results[len(states_left) :], strict=False),
    )


@gradient("Loop")
def loop(op, dys, trip_count, cond, *inputs, node, body, active, pull_back):
    """Loop from the last iteration to the first, as many times as the Loop itself iterated."""
    count = len(inputs)
    states = node.inputs[2:]
    inside = [
        (before, source_of(after, ("Identity",)))
        for before, after in zip(body.inputs[2:], body.outputs[1:], strict=False)
    ]
    unread = {i for i, (before, _) in enumerate(inside) if not before.uses() and not before.is_graph_output()}
    fixed = {i for i, (before, after) in enumerate(inside) if before is after}
    back = _Back(op, node, states, body.inputs[2:], active, pull_back, {i: body.outputs[1 + i] for i in unread})
    if not back.size:
        return {}
    number = ir.Value(name="iteration", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([]))
    truth = ir.Value(name="condition", type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([]))
    tensors = {i for i, state in enumerate(back.types) if isinstance(state.type, ir.TensorType)}
    changing = sorted(tensors - unread - fixed)
    numbers, *saved = _saving(
        op,
        node,
        body,
        [body.inputs[0], *(body.inputs[2 + i] for i in changing)],
        [_declare_like(number, body.inputs[0]), *(states[i] for i in changing)],
    )
    trips = op.Squeeze(op.Shape(numbers, start=0, end=1), [0])
    trips.value.shape = ir.Shape([])  # so that the value of an iteration has a shape
    back.trips = trips

    def step(inner, done, go_on, *carried):
        current = inner(trips.value) - 1 - done
        before = _after(inner, node, body, current, back.types) if len(tensors) < count else [None] * count
        for i in fixed & tensors:
            before[i] = inner.Identity(states[i]).like(back.types[i])
        for i, stack in zip(changing, saved, strict=True):
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
    """Gradients that the backward passes of Scan and Loop carry from iteration to iteration."""

    def __init__(self, op, node, states, inner_states, active, pull_back, unread=MappingProxyType({})):
        """`unread` are the results of states that the body does not read: they may start with any shape."""
        self.op, self.node, self.states, self.pull_back = op, node, states, pull_back
        self.active, self.unread = active, unread
        refuse_random(node)
        self.types = [_declare_like(inner, state) for inner, state in zip(inner_states, states, strict=True)]
        for i, after in unread.items():
            self.types[i] = _like(after) if after.type is not None else self.types[i]
        self.floats = [i for i, state in enumerate(self.types) if is_float(state)]
        self.captured = captured_and_active(node, active)
        self.size = len(self.floats) + len(self.captured)
        # ONNX Runtime needs the ranks of what a Scan carries: gradients of unknown rank are carried as vectors.
        self.flat = {value for value in self.captured if node.op_type == "Scan" and value.shape is None}

    def carried(self):
        gradients = [_gradient_of(value) for value in (*(self.types[i] for i in self.floats), *self.captured)]
        for gradient_, value in zip(gradients[len(self.floats) :], self.captured, strict=True):
            if value in self.flat:
                gradient_.shape = ir.Shape([None])
        return gradients

    def _flatten(self, value, grad):
        if value not in self.flat:
            return grad
        vector = grad.op.Reshape(grad, [-1])
        vector.value.shape = ir.Shape([None])
        return vector

    def _unflatten(self, op, value, grad):
        return op.Reshape(grad, op.Shape(value)) if value in self.flat else grad

    def start(self, dys):
        """Return the gradients after the last iteration."""
        last = [dys[i] if dys[i] is not None else self.op.filled_like(self._last(i), 0) for i in self.floats]
        return [*last, *(self._flatten(value, self.op.filled_like(value, 0)) for value in self.captured)]

    def _last(self, i):
        """Return a value with the type and shape of a state after the last iteration; tensors do not change theirs."""
        if isinstance(self.types[i].type, ir.TensorType) and i not in self.unread:
            return self.states[i]
        last = self.node.outputs[i]
        last.type = self.types[i].type if last.type is None else last.type
        return last

    def step(self, op, body, inputs, before, carried, *, first_state, item_dys, items, computed=()):
        """Return the gradients before an iteration from those after it, and those of `items`.

        Outputs of the body are states from `first_state` on, followed by scan outputs. `computed` has pairs of a value
        of the body and its saved result in this iteration.
        """
        nodes, outputs = recompute(op, body, inputs)
        after = dict(zip(self.floats, carried, strict=False))
        results = outputs[first_state:]
        for state, result, value in zip(self.types, results, before, strict=False):
            _refuse_other_shape(self.node, state, result)
            _refuse_growing(self.node, state, result, value)
        seeds = seeds_of(op, results, [*(after.get(i) for i in range(len(before))), *item_dys])
        for value, total in zip(self.captured, carried[len(self.floats) :], strict=True):
            seeds[value] = self._unflatten(op, value, total)  # the iteration adds to it
        read = [i for i in self.floats if i not in self.unread]
        wrt = [*(before[i].value for i in read), *self.captured, *(expr.value for expr in items)]
        grads = gradients_or_zeros(op, self.pull_back, nodes, seeds, wrt)
        for position, i in enumerate(self.floats):
            if i in self.unread:  # what an iteration does not read gets no gradient from it
                wrt.insert(position, carried[position].value)
                grads.insert(position, op.filled_like(carried[position].value, 0))
        again = {old.outputs[0]: new.outputs[0] for old, new in zip(body, nodes, strict=True)}
        for value, saved in computed:  # after `pull_back`, which goes through the nodes
            again[value].replace_all_uses_with(saved.value)
        # An input of the graph keeps its declaration, but ONNX Runtime needs declared outputs of a Scan.
        own = [
            (grad if grad.value.producer() is not None and grad.value.graph is op.graph else op.Identity(grad)).like(
                value
            )
            for value, grad in zip(wrt, grads, strict=True)
        ]
        return [self._flatten(value, grad) for value, grad in zip(wrt, own, strict=True)]

    def gradients(self, carried, others):
        """Return value -> gradient; a value may be an input twice, or captured as well."""
        values = [*(self.states[i] for i in self.floats), *self.captured]
        carried = list(carried)
        for position, i in enumerate(self.floats):
            if i in self.unread:
                carried[position] = self._of_unread(i, carried[position])
        carried = [self._unflatten(self.op, value, grad) for value, grad in zip(values, carried, strict=True)]
        return sum_by_value((*zip(values, carried, strict=True), *others))

    def _of_unread(self, i, grad):
        """Return the gradient of the start of a state that the body does not read: of a Loop without iterations."""
        if self.states[i] not in self.active:
            return self.op.filled_like(self.states[i], 0)
        ran = self.op.Greater(self.trips, 0)
        zeros = self.op.subgraph(lambda inner: inner.filled_like(self.states[i], 0))
        return self.op.If(ran, then_branch=zeros, else_branch=self.op.subgraph(lambda inner: inner.Identity(grad)))


# ---- states ----------------------------------------------------------------------------------------------------------


def _saving(op, node, body, values, types):
    """Add outputs to a Scan or Loop that stack values of its body over the iterations; return the stacks."""
    inner = Builder(body, opset=op.opset, names=op.names, functions=op.functions, imports=op.imports)
    first = len(body.outputs) - (node.op_type == "Loop")  # the body of a Loop also returns a condition
    node.resize_outputs(first + len(values))
    for output in node.outputs[:first]:  # ONNX Runtime refuses an omitted output before another one
        output.name = output.name or op.names.fresh(f"{node.name or node.op_type}/unused")
    for value, outer, output in zip(values, types, node.outputs[first:], strict=True):
        inner(inner.add_output(value)).like(_declare_like(value, outer))
        output.name = op.names.fresh(f"{node.name or node.op_type}/{value.name}")
        output.type = outer.type
        output.shape = ir.Shape([None, *outer.shape]) if outer.shape is not None else None
    for name in ("scan_output_axes", "scan_output_directions"):
        if name in node.attributes:
            node.attributes[name] = ir.AttrInt64s(name, [*node.attributes[name].as_ints(), *([0] * len(values))])
    return list(node.outputs[first:])


def _products(node, body):
    """Return the matmuls of a body with a shape common to all iterations: saving is faster than recomputing."""
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
    """Run a Loop again for at most as many iterations as before; return its states."""
    again = copy_graph(op, body)
    del again.outputs[1 + len(types) :]
    _, cond, *states = node.inputs
    results = several(op.Loop(trips, cond, *states, outputs=len(types), body=remove_unused(again)))
    return [result.like(state) for result, state in zip(results, types, strict=True)]


def _refuse_other_shape(node, before, after):
    if before.shape is None or after.shape is None:
        return
    sizes = zip(before.shape, after.shape, strict=False)
    differ = any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in sizes)
    if len(before.shape) != len(after.shape) or differ:
        raise UnsupportedError(
            f"the state `{before.name}` of `{node.op_type}` (node `{node.name}`) changes its shape from {before.shape} "
            f"to {after.shape}, which has no gradient",
            hint="start with a tensor of the final shape and fill it with `ScatterElements`",
        )


def _refuse_growing(node, state, result, before):
    """Refuse a state to which each iteration appends, as to a cache of keys: its values cannot be stacked."""
    producer = result.producer()
    if producer is not None and producer.op_type == "Concat" and before.value in producer.inputs:
        raise UnsupportedError(
            f"the state `{state.name}` of `{node.op_type}` (node `{node.name}`) grows in each iteration",
            hint="train the body with whole sequences, as in teacher forcing: export the module without its loop",
        )


# ---- values ----------------------------------------------------------------------------------------------------------


def _like(value, name=None):
    return ir.Value(name=name or value.name, type=value.type, shape=value.shape)


def _gradient_of(value):
    return ir.Value(name="gradient", type=content_type(value), shape=value.shape)


def _declare_like(value, outer):
    """Return a value with the type and shape of `outer`, or those of `value` if they are not known."""
    if is_sequence(outer):  # its elements may change their shapes
        return ir.Value(name=value.name, type=outer.type)
    return ir.Value(
        name=value.name,
        type=outer.type if outer.type is not None else value.type,
        shape=outer.shape if outer.shape is not None else value.shape,
    )


def _item(value, axis):
    """Return a value for one slice of a tensor along an axis."""
    shape = None
    if value.shape is not None:
        axis = axis % len(value.shape)
        shape = ir.Shape([size for i, size in enumerate(value.shape) if i != axis])
    return ir.Value(name=value.name, type=value.type, shape=shape)


def _with_rank_of(op, scalar, value):
    """Return a scalar in the declared rank: some graphs have the iteration or condition as a tensor of one element."""
    return op.Reshape(scalar, [1]) if value.shape is not None and value.shape.rank() == 1 else scalar


# ---- sums of matmuls over a Scan -------------------------------------------------------------------------------------


# The gradient of a matrix that every iteration multiplies by is the sum of A' B over the iterations. The Scan does not
# carry that sum, which is as large as the matrix. It returns A and B, and one matmul after the Scan multiplies the rows
# of all A by those of all B.


def defer(op, body, positions, stacked):
    """Remove the states from a body that are sums of matmuls; return position -> factors, and new outputs of the body.

    The new outputs are the factors that are not among `stacked`, values that have a stack already.
    """
    sums = {i: pairs for i in positions if (pairs := _factor_pairs(body.inputs[i], body.outputs[i]))}
    factors = dict.fromkeys(value for pairs in sums.values() for pair in pairs for value in pair)
    more = [value for value in factors if value not in stacked]
    inner = Builder(body, opset=op.opset, names=op.names, functions=op.functions, imports=op.imports)
    for value in more:
        inner.add_output(value)
    for i in sorted(sums, reverse=True):
        body.outputs.pop(i)
    remove_unused(body)
    for i in sorted(sums, reverse=True):
        body.inputs.pop(i)
    return sums, more


def sum_of_products(op, pairs, stacks):
    """Return the sum of A' B over all iterations from the stacks of A and B."""

    def all_rows(value):
        stack = stacks[value]
        stack.value.shape = ir.Shape([None, *value.shape])
        return op.Reshape(stack, join_shape(op, [-1], along(op, stack, -1)))

    products = [op.Gemm(all_rows(a), all_rows(b), transA=1) for a, b in pairs]
    return products[0] if len(products) == 1 else op.Sum(*products)


def _factor_pairs(before, after):
    """Return the factors of the terms of a sum, if all are matmuls."""
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
    """Return the matrices A and B, if the value is A' B."""
    node = value.producer()
    if node is None:
        return None
    attributes = node.attributes
    plain = not attributes.get_int("transB", 0) and attributes.get_float("alpha", 1.0) == 1 and len(node.inputs) == 2
    if node.op_type == "Gemm" and attributes.get_int("transA", 0) and plain:
        pair = tuple(node.inputs)
    elif node.op_type == "MatMul" and (first := node.inputs[0].producer()) and first.op_type == "Transpose":
        pair = first.inputs[0], node.inputs[1]
    else:
        return None
    return pair if all(factor.shape is not None and factor.shape.rank() == 2 for factor in pair) else None
