"""Control flow: gradients of If, Scan and Loop, which hold graphs of their own.

A nested graph reads values of the graphs around it without naming them as inputs: these "captured" values get gradients
too, so the rules here answer with a gradient per value. What a nested graph computes is not visible outside: each
backward graph computes the nested graph once more, from the same inputs, and then goes back through it. For Scan and
Loop these inputs are the states before each iteration: the forward node gets one more scan output for each of them.
"""

import onnx_ir as ir

from onward.build import Builder
from onward.errors import UnsupportedError
from onward.model.walk import nested_graphs, read_by
from onward.rules.registry import gradient
from onward.transform.types import value_types

_RANDOM = {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}


@gradient("If")
def if_(op, dys, cond, *, node, then_branch, else_branch, active, pull_back):
    """If(cond, gradient of then_branch, gradient of else_branch); zero for what the branch taken does not read."""
    wanted = _captured_and_active(node, active)
    if not wanted:
        return {}

    def back(branch):
        def body(inner):
            nodes, outputs = _recomputed(inner, branch, [])
            grads = pull_back(inner, nodes, _seeds(inner, outputs, dys), wanted)
            return [grads[value] if value in grads else inner.filled_like(value, 0) for value in wanted]

        return _tidy(op.subgraph(body, name="gradient"))

    grads = _several(op.If(cond, outputs=len(wanted), then_branch=back(then_branch), else_branch=back(else_branch)))
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
    """A Scan from the last iteration to the first: the gradients of states and captured values are its states."""
    count = len(inputs) - num_scan_inputs
    states, sequences = node.inputs[:count], node.inputs[count:]
    in_axes = list(scan_input_axes or [0] * len(sequences))
    in_directions = list(scan_input_directions or [0] * len(sequences))
    outputs = len(dys) - count
    out_axes = list(scan_output_axes or [0] * outputs)
    out_directions = list(scan_output_directions or [0] * outputs)

    back = _Back(op, node, states, body.inputs[:count], active, pull_back)
    wanted = [i for i, sequence in enumerate(sequences) if sequence in active]
    if not back.size and not wanted:
        return {}
    saved = _saving(op, node, body, body.inputs[:count], states)
    given = [i for i in range(outputs) if dys[count + i] is not None]

    def step(inner, *values):
        carried, values = values[: back.size], values[back.size :]
        before, items, seeds = values[:count], values[count : len(inputs)], values[len(inputs) :]
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
        )

    entries = [
        *back.carried(),
        *(_like(state) for state in back.types),
        *(_item(sequence, axis) for sequence, axis in zip(sequences, in_axes, strict=True)),
        *(_item(dys[count + i].value, out_axes[i]) for i in given),
    ]
    results = op.Scan(
        *back.start(dys[:count]),
        *saved,
        *sequences,
        *(dys[count + i] for i in given),
        outputs=back.size + len(wanted),
        body=_tidy(op.subgraph(step, entries, name="gradient")),
        num_scan_inputs=len(inputs) + len(given),
        scan_input_axes=[*([0] * count), *in_axes, *(out_axes[i] for i in given)],
        scan_input_directions=[
            *([1] * count),
            *(1 - direction for direction in in_directions),
            *(1 - out_directions[i] for i in given),
        ],
        scan_output_axes=[in_axes[i] for i in wanted] or None,
        scan_output_directions=[1 - in_directions[i] for i in wanted] or None,
    )
    results = _several(results)
    return back.gradients(results[: back.size], zip([sequences[i] for i in wanted], results[back.size :], strict=True))


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
    numbers, *saved = _saving(
        op, node, body, [body.inputs[0], *body.inputs[2:]], [_declared(number, body.inputs[0]), *states]
    )
    trips = op.Squeeze(op.Shape(numbers, start=0, end=1), [0])

    def step(inner, done, go_on, *carried):
        current = inner(trips.value) - 1 - done
        before = [
            inner.Gather(stack, current, axis=0).like(state) for stack, state in zip(saved, back.types, strict=True)
        ]
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
        body=_tidy(op.subgraph(step, entries, name="gradient")),
    )
    return back.gradients(_several(results), ())


class _Back:
    """What the ways back through Scan and Loop share: the gradients that they carry from iteration to iteration."""

    def __init__(self, op, node, states, inner_states, active, pull_back):
        self.op, self.node, self.states, self.pull_back = op, node, states, pull_back
        _refuse_random(node)
        self.types = [_declared(inner, state) for inner, state in zip(inner_states, states, strict=True)]
        self.floats = [i for i, state in enumerate(self.types) if _is_float(state)]
        self.captured = _captured_and_active(node, active)
        self.size = len(self.floats) + len(self.captured)

    def carried(self):
        return [
            *(_like(self.types[i], "gradient") for i in self.floats),
            *(_like(v, "gradient") for v in self.captured),
        ]

    def start(self, dys):
        """The gradients after the last iteration."""
        last = [dys[i] if dys[i] is not None else self.op.filled_like(self.states[i], 0) for i in self.floats]
        return [*last, *(self.op.filled_like(value, 0) for value in self.captured)]

    def step(self, op, body, given, before, carried, *, first_state, item_dys, items):
        """The gradients before an iteration from those after it, and those of `items`.

        The states are among the outputs of the body from `first_state` on, before what is stacked.
        """
        nodes, outputs = _recomputed(op, body, given)
        after = dict(zip(self.floats, carried, strict=False))
        results = outputs[first_state:]
        for state, result in zip(self.types, results, strict=False):
            _refuse_other_shape(self.node, state, result)
        seeds = _seeds(op, results, [*(after.get(i) for i in range(len(before))), *item_dys])
        inputs = [before[i] for i in self.floats]
        wrt = [*(expr.value for expr in (*inputs, *items)), *self.captured]
        grads = self.pull_back(op, nodes, seeds, wrt)

        def found(value):
            return grads[value] if value in grads else op.filled_like(value, 0)

        sums = carried[len(self.floats) :]
        return [
            *(found(expr.value) for expr in inputs),
            *(total + grads[v] if v in grads else total for v, total in zip(self.captured, sums, strict=True)),
            *(found(expr.value) for expr in items),
        ]

    def gradients(self, carried, others):
        """Per value; one that is an input twice, or captured as well, has the sum."""
        found = {}
        values = [*(self.states[i] for i in self.floats), *self.captured]
        for value, dx in (*zip(values, carried, strict=True), *others):
            found[value] = found[value] + dx.like(value) if value in found else dx.like(value)
        return found


# ---- nested graphs ---------------------------------------------------------------------------------------------------


def _captured(nodes):
    """The values that nodes, or graphs nested in them, read and that none of them defines; each once, in order."""
    inside = {value for node in nodes for value in node.outputs}
    for graph in (graph for node in nodes for outer in nested_graphs(node) for graph in (outer, *outer.subgraphs())):
        inside.update(graph.inputs, graph.initializers.values(), *(node.outputs for node in graph))
    return [v for v in dict.fromkeys(v for node in nodes for v in read_by(node)) if v not in inside]


def _captured_and_active(node, active):
    _refuse_random(node)
    inner = [inner for graph in nested_graphs(node) for inner in graph]
    return [value for value in _captured(inner) if value in active and value.graph not in tuple(nested_graphs(node))]


def _saving(op, node, body, values, types):
    """Have a Scan or Loop put out inputs of its body, stacked over the iterations; the stacks."""
    inner = Builder(body, opset=op.opset, names=op.names, functions=op.functions, imports=op.imports)
    first = len(body.outputs) - (node.op_type == "Loop")  # whose body puts out a condition as well
    node.resize_outputs(first + len(values))
    for output in node.outputs[:first]:  # ONNX Runtime takes none that is left out before another
        output.name = output.name or op.names.fresh(f"{node.name or node.op_type}/unused")
    for value, kind, output in zip(values, types, node.outputs[first:], strict=True):
        body.outputs.append(inner.Identity(value).like(_declared(value, kind)).value)
        output.name = op.names.fresh(f"{node.name or node.op_type}/{value.name}")
        output.type = kind.type
        output.shape = ir.Shape([None, *kind.shape]) if kind.shape is not None else None
    for name in ("scan_output_axes", "scan_output_directions"):
        if name in node.attributes:
            node.attributes[name] = ir.AttrInt64s(name, [*node.attributes[name].as_ints(), *([0] * len(values))])
    return list(node.outputs[first:])


def _recomputed(op, graph, given):
    """The nodes of a nested graph once more, reading `given` for its inputs, in the graph of `op`; and its outputs."""
    copy = graph.clone(allow_outer_scope_values=True)
    for inner in (copy, *copy.subgraphs()):
        for value in (*inner.inputs, *inner.initializers.values(), *(v for node in inner for v in node.outputs)):
            if value.name:
                value.name = op.names.fresh(value.name)
        for node in inner:
            node.name = op.names.fresh(node.name or node.op_type)
    new = {old: expr.value for old, expr in zip(copy.inputs, given, strict=True)}
    for value in copy.initializers.values():
        new[value] = op.constant(value.const_value.numpy(), value.const_value.dtype).value
    outputs = [new.get(value, value) for value in copy.outputs]
    copy.outputs.clear()
    for old, value in new.items():
        old.replace_all_uses_with(value)
    nodes = list(copy)
    copy.remove(nodes)
    op.graph.extend(nodes)
    _fill_in_types(op, nodes)
    return nodes, outputs


def _fill_in_types(op, nodes):
    """Types and shapes of what the nodes compute, as far as they follow from what they read."""
    read = [value for value in _captured(nodes) if value.type is not None]
    # Declared symbols may be of the nested graph alone, so only numbers are certain.
    untyped = {v.name: v for node in nodes for v in node.outputs if v.name and not (v.type and _is_static(v.shape))}
    if not untyped:
        return
    declared = {name: value.shape for name, value in untyped.items()}
    for value in untyped.values():
        value.shape = None
    view = ir.GraphView(read, [], nodes=nodes, opset_imports={**op.imports, "": op.opset}, name="nodes")
    functions = list(op.functions.values())
    types = value_types(ir.serde.serialize_model(ir.Model(view, ir_version=10, functions=functions)))
    symbols = {str(d.value) for v in read if v.shape is not None for d in v.shape if isinstance(d, ir.SymbolicDim)}
    for name, value in untyped.items():
        if name in types:
            for dim in types[name].type.tensor_type.shape.dim:
                if dim.dim_param not in symbols:  # made up by inference: it may mean something else in another graph
                    dim.ClearField("dim_param")
            ir.serde.deserialize_value_info_proto(types[name], value)
        if value.shape is None:
            value.shape = declared[name]


def _tidy(graph):
    """Without the nodes that nothing reads: of what was computed again, not all is needed."""
    for node in reversed(list(graph)):
        if not any(output.uses() or output.is_graph_output() for output in node.outputs):
            graph.remove(node, safe=True)
    return graph


def _seeds(op, outputs, dys):
    """The gradients of the outputs of a nested graph, one value of which may be several of them."""
    seeds = {}
    for value, dy in zip(outputs, dys, strict=False):  # a body may put out more: its inputs, to be saved
        if dy is not None and _is_float(value):
            seeds[value] = seeds[value] + op(dy.value) if value in seeds else op(dy.value)
    return seeds


def _refuse_random(node):
    for inner in (inner for graph in nested_graphs(node) for inner in graph.all_nodes()):
        drops = inner.op_type == "Dropout" and len(inner.inputs) > 2 and inner.inputs[2] is not None
        if inner.op_type in _RANDOM or drops:
            raise UnsupportedError(
                f"`{inner.op_type}` (node `{inner.name}`) inside `{node.op_type}` (node `{node.name}`) draws random "
                "numbers: its gradient, which computes the nested graph again, would draw others",
                hint="draw them before the node, for all iterations at once",
            )


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


def _is_static(shape):
    return shape is not None and all(isinstance(size, int) for size in shape)


def _is_float(value):
    return value.dtype is not None and value.dtype.is_floating_point()


def _like(value, name=None):
    return ir.Value(name=name or value.name, type=value.type, shape=value.shape)


def _declared(value, outer):
    """A value with the type and shape of `outer`; where that is not known, what `value` itself declares."""
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


def _several(results):
    return results if isinstance(results, tuple) else (results,)
