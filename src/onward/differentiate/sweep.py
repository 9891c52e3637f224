"""The reverse sweep: from the derivative of a result to the derivatives of what it was computed from.

Works on one graph and appends to it. Rules give the mathematics of single operators; everything that all of them would
otherwise repeat is here: what is needed, summing over broadcast axes, types, shapes and accumulation.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onward.build import Builder, Expr
from onward.differentiate.recompute import Recomputation
from onward.errors import UnsupportedError
from onward.model.walk import between, nested_graphs, read_by
from onward.rules import NoGradient, Rewrite, Rule
from onward.rules.quantization import MOVING, ROUNDED
from onward.rules.registry import apply, lookup
from onward.shapes import Dims, content_type, dims
from onward.standard import is_standard


def pull_back(
    op: Builder,
    nodes: Sequence[ir.Node],
    seeds: Mapping[ir.Value, Expr],
    wrt: Iterable[ir.Value],
    cut: Container[ir.Value] = (),
    recomputation: Recomputation | None = None,
    find: Find = lookup,
) -> dict[ir.Value, Expr]:
    """The derivatives of what `seeds` belong to with respect to `wrt`, which is computed by `nodes`, in their order.

    A seed is the derivative of the final result with respect to that value. Values in `cut` count as independent of
    what they are computed from. A value on which no seed depends has no entry in the result: its derivative is zero.
    """
    wanted = list(wrt)
    active = _depends_on(nodes, wanted)
    found: dict[ir.Value, Expr] = dict(seeds)
    for node in reversed(nodes):
        dys = [found.get(output) if output not in cut else None for output in node.outputs]
        if all(dy is None for dy in dys) or not any(output in active for output in node.outputs):
            continue
        here = op.scoped(f"grad/{node.name or node.op_type}")
        seen, inputs = recomputation.seen(op, node, dys) if recomputation is not None else (node, node.inputs)
        for value, dx in _derivatives(here, node, seen, inputs, dys, active, find):
            if value in active:
                found[value] = _accumulated(found.get(value), dx)
    return {value: found[value] for value in wanted if value in found}


Contribution = Expr | Callable[[Expr | None], Expr]
"""What is to be added to a derivative; or a function of the derivative so far, if any, that gives the sum."""


def _accumulated(total: Expr | None, dx: Contribution) -> Expr:
    if not isinstance(dx, Expr):
        return dx(total)
    return dx if total is None else total + dx


def _depends_on(nodes: Iterable[ir.Node], values: Iterable[ir.Value]) -> set[ir.Value]:
    """The values that depend on `values`, which are among them, and through which gradients flow."""
    active = set(values)
    for node in nodes:
        if any(value in active for value in read_by(node)):
            integers = _stand_for_floats(node, active)
            active.update(output for output in node.outputs if integers or _may_be_float(output))
    return active


_FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def _may_be_float(value: ir.Value) -> bool:
    return value.dtype is None or value.dtype in _FLOATS


def _stand_for_floats(node: ir.Node, active: Container[ir.Value]) -> bool:
    """Whether the integers that a node makes have a gradient: they were rounded, or come from such as were."""
    if node.op_type in ROUNDED:
        return True
    rounded = [value for value in node.inputs if value is not None and value in active and not _may_be_float(value)]
    if rounded and node.op_type not in MOVING and isinstance(lookup(node), Rule) and not _may_be_float(node.outputs[0]):
        raise UnsupportedError(
            f"`{node.op_type}` (node `{node.name}`) works on `{rounded[0].name}`, the integers of a quantised tensor: "
            "there is no gradient through that",
            hint="dequantise before it, and quantise after it: ONNX Runtime's quantiser does so with the format QDQ",
        )
    return bool(rounded) and node.op_type in MOVING


def _derivatives(
    op: Builder,
    node: ir.Node,
    seen: ir.Node,
    inputs: Sequence[ir.Value | None],
    dys: list[Expr | None],
    active: Container[ir.Value],
    find: Find,
) -> list[tuple[ir.Value, Contribution]]:
    """What one node contributes to the derivatives of its inputs, and of what graphs nested in it read.

    The rule looks at the node that is `seen`, the node itself or a copy of it, and at these inputs.
    """
    rule = find(node)
    if isinstance(rule, NoGradient):
        return []
    assert isinstance(rule, Rule), node.op_type
    available = {
        "active": active,
        "wanted": [i for i, value in enumerate(node.inputs) if value is not None and value in active],
        "pull_back": functools.partial(pull_back, find=find),
    }
    results = _call(op, rule, seen, inputs, dys, **available)
    if isinstance(results, dict):
        return [(value, _fitted(op, dx, value, broadcasts=False)) for value, dx in results.items()]
    return [
        (value, _fitted(op, dx, given, rule.broadcasts_input(i)))
        for i, (value, given, dx) in enumerate(zip(node.inputs, inputs, results, strict=False))
        if value is not None and given is not None and dx is not None and value in active
    ]


def _call(
    op: Builder,
    rule: Rule,
    node: ir.Node,
    inputs: Sequence[ir.Value | None],
    dys: list[Expr | None],
    **available: object,
) -> Sequence[Contribution | None] | dict[ir.Value, Expr]:
    """The derivatives by input; by value, where a rule of an operator with nested graphs gives them so.

    Such a rule may ask for `active`, the values that need a derivative, and for `pull_back`, to go through its graphs;
    and any rule for `wanted`, the positions of the inputs that need one.
    """
    if not rule.many and dys[0] is None:
        return ()
    ys = [op(y) for y in node.outputs]
    given = dys if rule.many else dys[0]
    result = apply(rule, op, node, given, inputs=inputs, y=ys[0], ys=ys, **available)
    return result if isinstance(result, tuple | list | dict) else (result,)


# ---- the shape and type of a derivative ------------------------------------------------------------------------------


def _fitted(op: Builder, dx: Contribution, value: ir.Value, broadcasts: bool) -> Contribution:
    if isinstance(dx, Expr):
        return _fitted_to(op, dx, value, broadcasts)
    added_to = dx
    return lambda total: added_to(total).like(value)


def _fitted_to(op: Builder, dx: Expr, value: ir.Value, broadcasts: bool) -> Expr:
    """A derivative with the type and the shape of its value; that of a quantized value stays a float."""
    if broadcasts:
        dx = sum_to(op, dx, op(value))
    if not _may_be_float(value):
        return dx
    if value.dtype is not None and dx.dtype is not None and dx.dtype != value.dtype:
        dx = op.Cast(dx, to=value.dtype)
    if dx.value.graph is op.graph and dx.value.producer() is not None:
        # What comes from outside, as dY may, has its own type: in a branch that is not taken it may differ.
        dx.value.type = content_type(value) if value.type is not None else dx.value.type
        dx.value.shape = value.shape if dx.value.shape is None else dx.value.shape
    return dx


def sum_to(op: Builder, dx: Expr, x: Expr) -> Expr:
    """Sum over the axes along which `x` was broadcast to the shape of `dx`."""
    shape, wide = dims(x.value), dims(dx.value)
    if shape == ():
        return op.ReduceSum(dx, keepdims=0) if wide != () else dx
    if shape is None or wide is None or not _aligned(shape, wide):
        return _sum_to_at_run_time(op, dx, x)
    lead = len(wide) - len(shape)
    axes = [*range(lead), *(lead + i for i, n in enumerate(shape) if n == 1 and wide[lead + i] != 1)]
    if not axes:
        return dx
    if len(axes) == lead:
        return op.ReduceSum(dx, axes, keepdims=0)
    total = op.ReduceSum(dx, axes, keepdims=1)
    return op.Squeeze(total, list(range(lead))) if lead else total


def _aligned(shape: Dims, wide: Dims) -> bool:
    """Whether it is certain which axes were broadcast: each is 1, or the same in both."""
    return len(wide) >= len(shape) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(wide), strict=False))


def _sum_to_at_run_time(op: Builder, dx: Expr, x: Expr) -> Expr:
    """The same where shapes are known only when the graph runs."""
    shape = op.Shape(x)
    missing = op.Shape(op.Shape(dx)) - op.Shape(shape)
    ones = op.ConstantOfShape(missing, value=ir.Tensor(np.array([1], np.int64)))
    padded = op.Concat(ones, shape, axis=0)
    axes = op.Squeeze(op.NonZero(op.Equal(padded, np.int64(1))), [0])
    return op.Reshape(op.ReduceSum(dx, axes, keepdims=1, noop_with_empty_axes=1), shape, allowzero=1)


# ---- the way from a result to what it is differentiated by -----------------------------------------------------------


Find = Callable[[ir.Node], Rule | Rewrite | NoGradient | None]
"""How rules are found: `lookup` in the table, or what knows more of them."""


def way(y: ir.Value, xs: Iterable[ir.Value], find: Find = lookup, scope: Sequence[ir.Graph] = ()) -> list[ir.Node]:
    """The same, all of them with a rule; else an error that names the first without one, and where it stands."""
    sources = list(xs)
    nodes = between(y, sources, scope)
    reached = {*sources, *(output for node in nodes for output in node.outputs)}
    for node in reversed(nodes):
        for inner in (node, *_nested_nodes(node, reached)):
            if find(inner) is None:
                raise _explain_missing_rule(inner, node, y, sources, scope)
    return nodes


def _nested_nodes(node: ir.Node, reached: Iterable[ir.Value]) -> Iterator[ir.Node]:
    """The nodes on the ways to the outputs of graphs nested in a node, from their inputs and from `reached`."""
    for graph in nested_graphs(node):
        sources = {
            *reached,
            *(value for value in graph.inputs if value.dtype is None or value.dtype.is_floating_point()),
        }
        for inner in dict.fromkeys(inner for output in graph.outputs for inner in between(output, sources)):
            yield inner
            yield from _nested_nodes(inner, {*sources, *(output for known in graph for output in known.outputs)})


def _explain_missing_rule(
    node: ir.Node, outermost: ir.Node, y: ir.Value, xs: Iterable[ir.Value], scope: Sequence[ir.Graph]
) -> UnsupportedError:
    """`node` is `outermost`, or stands in a graph nested in it."""
    x = next(x for x in xs if outermost in between(y, [x], scope))
    way = [*_way_back(y, outermost), *([node] if node is not outermost else [])]
    steps = " <- ".join([y.name or "", *(n.name or n.op_type for n in way)])
    domain = f', domain="{node.domain}"' if not is_standard(node) else ""
    return UnsupportedError(
        f"no gradient rule for `{node.op_type}` (node `{node.name}`)\n"
        f"on the way from `{y.name}` to `{x.name}`: {steps}",
        hint=f'write one with `@gradient("{node.op_type}"{domain})`, or do without the gradient of `{x.name}`',
    )


def _way_back(y: ir.Value, node: ir.Node) -> list[ir.Node]:
    """A shortest way from `y` to `node`, against the direction of the data."""
    start = y.producer()
    if start is None:
        return [node]
    before: dict[ir.Node, ir.Node | None] = {start: None}
    pending = deque([start])
    while pending:
        current = pending.popleft()
        if current is node:
            break
        for value in read_by(current):
            producer = value.producer()
            if producer is not None and producer not in before:
                before[producer] = current
                pending.append(producer)
    steps: list[ir.Node] = []
    step: ir.Node | None = node
    while step is not None:
        steps.append(step)
        step = before.get(step)
    return steps[::-1]
