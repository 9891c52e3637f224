"""Reverse sweep: from the derivative of a result to the derivatives of its sources.

It appends to one graph. Rules have the mathematics of single operators. The common work is here: the choice of nodes,
sums over broadcast axes, types, shapes and accumulation.
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
    find: RuleLookup = lookup,
) -> dict[ir.Value, Expr]:
    """Return the derivatives with respect to `wrt`, from derivatives `seeds` of values that `nodes` compute.

    `nodes` are in order. Values in `cut` count as independent of the values they are computed from. A value on which no
    seed depends is missing in the result: its derivative is zero.
    """
    sources = list(wrt)
    active = _depends_on(nodes, sources)
    gradients: dict[ir.Value, Expr] = dict(seeds)
    for node in reversed(nodes):
        dys = [gradients.get(output) if output not in cut else None for output in node.outputs]
        if all(dy is None for dy in dys) or not any(output in active for output in node.outputs):
            continue
        scoped = op.scoped(f"grad/{node.name or node.op_type}")
        seen, inputs = recomputation.seen(op, node, dys) if recomputation is not None else (node, node.inputs)
        for value, dx in _derivatives(scoped, node, seen, inputs, dys, active, find):
            if value in active:
                total = gradients.get(value)
                if not isinstance(dx, Expr):
                    gradients[value] = dx(total)
                else:
                    gradients[value] = dx if total is None else total + dx
    return {value: gradients[value] for value in sources if value in gradients}


Contribution = Expr | Callable[[Expr | None], Expr]
"""Summand of a derivative; or a function from the derivative so far, or None, to the sum."""


def _depends_on(nodes: Iterable[ir.Node], values: Iterable[ir.Value]) -> set[ir.Value]:
    """Return `values` and the values that depend on them through which gradients flow."""
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
    """True if the integers that a node computes have a gradient: rounded, or moved after that."""
    if node.op_type in ROUNDED:
        return True
    rounded = [value for value in node.inputs if value is not None and value in active and not _may_be_float(value)]
    if rounded and node.op_type not in MOVING and isinstance(lookup(node), Rule) and not _may_be_float(node.outputs[0]):
        raise UnsupportedError(
            f"cannot differentiate `{node.op_type}` (node `{node.name}`): "
            f"`{rounded[0].name}` holds the integers of a quantized tensor",
            hint="quantize the model with `quant_format=QuantFormat.QDQ`, which dequantizes before each operator",
        )
    return bool(rounded) and node.op_type in MOVING


def _derivatives(
    op: Builder,
    node: ir.Node,
    seen: ir.Node,
    inputs: Sequence[ir.Value | None],
    dys: list[Expr | None],
    active: Container[ir.Value],
    find: RuleLookup,
) -> list[tuple[ir.Value, Contribution]]:
    """Return the contributions of a node to the derivatives of its inputs, and of values that its nested graphs read.

    The rule gets `seen`, the node itself or a copy of it, and `inputs`, those of the copy. Any rule may request
    `wanted`, the indices of the inputs that need a derivative. A rule for nested graphs may also request `active`, the
    values that need one, and `pull_back`.
    """
    rule = find(node)
    if isinstance(rule, NoGradient):
        return []
    assert isinstance(rule, Rule), node.op_type
    if not rule.many and dys[0] is None:
        return []
    available = {
        "active": active,
        "wanted": [i for i, value in enumerate(node.inputs) if value is not None and value in active],
        "pull_back": functools.partial(pull_back, find=find),
    }
    ys = [op(y) for y in seen.outputs]
    results = apply(rule, op, seen, dys if rule.many else dys[0], inputs=inputs, y=ys[0], ys=ys, **available)
    if isinstance(results, dict):
        return [(value, _fitted(op, dx, value, broadcasts=False)) for value, dx in results.items()]
    results = results if isinstance(results, tuple | list) else (results,)
    return [
        (value, _fitted(op, dx, read, rule.broadcasts_input(i)))
        for i, (value, read, dx) in enumerate(zip(node.inputs, inputs, results, strict=False))
        if value is not None and read is not None and dx is not None and value in active
    ]


# ---- the shape and type of a derivative ------------------------------------------------------------------------------


def _fitted(op: Builder, dx: Contribution, value: ir.Value, broadcasts: bool) -> Contribution:
    """Return a derivative with type and shape of its value; of quantized values it stays a float."""
    if not isinstance(dx, Expr):
        add_to = dx
        return lambda total: add_to(total).like(value)
    result: Expr = sum_to(op, dx, op(value)) if broadcasts else dx
    if not _may_be_float(value):
        return result
    if value.dtype is not None and result.dtype is not None and result.dtype != value.dtype:
        result = op.Cast(result, to=value.dtype)
    if result.value.graph is op.graph and result.value.producer() is not None:
        # A value of an outer graph keeps its type, which may differ in a branch that is not taken.
        result.value.type = content_type(value) if value.type is not None else result.value.type
        result.value.shape = value.shape if result.value.shape is None else result.value.shape
    return result


def sum_to(op: Builder, dx: Expr, x: Expr) -> Expr:
    """Sum `dx` over the axes along which `x` was broadcast to its shape."""
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
    """True if the broadcast axes are certain: each size is 1 or equal in both."""
    return len(wide) >= len(shape) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(wide), strict=False))


def _sum_to_at_run_time(op: Builder, dx: Expr, x: Expr) -> Expr:
    """Return the same sum for shapes that are known only at run time."""
    shape = op.Shape(x)
    missing = op.Shape(op.Shape(dx)) - op.Shape(shape)
    ones = op.ConstantOfShape(missing, value=ir.Tensor(np.array([1], np.int64)))
    padded = op.Concat(ones, shape, axis=0)
    axes = op.Squeeze(op.NonZero(op.Equal(padded, np.int64(1))), [0])
    return op.Reshape(op.ReduceSum(dx, axes, keepdims=1, noop_with_empty_axes=1), shape, allowzero=1)


# ---- the path from a result to the sources ---------------------------------------------------------------------------


RuleLookup = Callable[[ir.Node], Rule | Rewrite | NoGradient | None]
"""Lookup of rules: `lookup` in the table, or a function that knows more rules."""


def renamable(op: Builder, result: Expr, added: Container[ir.Node]) -> Expr:
    """Return a result of one of the nodes `added` that is not yet a graph output: itself, or a copy."""
    producer = result.value.producer()
    is_free = producer is not None and producer in added and not result.value.is_graph_output()
    return result if is_free else op.Identity(result)


def nodes_to_differentiate(
    y: ir.Value,
    xs: Iterable[ir.Value],
    find: RuleLookup = lookup,
    scope: Sequence[ir.Graph] = (),
    *,
    cut: Container[ir.Value] = (),
) -> list[ir.Node]:
    """Return the nodes between `xs` and `y`, on paths that avoid `cut`; raise with the path if one has no rule."""
    sources = list(xs)
    nodes = between(y, sources, scope, known=cut)
    reached = {*sources, *(output for node in nodes for output in node.outputs)}
    for node in reversed(nodes):
        for inner in (node, *_nested_nodes(node, reached)):
            if find(inner) is None:
                raise _explain_missing_rule(inner, node, y, sources, scope)
    return nodes


def _nested_nodes(node: ir.Node, reached: Iterable[ir.Value]) -> Iterator[ir.Node]:
    """Yield the nodes between the inputs of nested graphs, or `reached`, and their outputs."""
    for graph in nested_graphs(node):
        sources = {
            *reached,
            *(value for value in graph.inputs if value.dtype is None or value.dtype.is_floating_point()),
        }
        for inner in dict.fromkeys(inner for output in graph.outputs for inner in between(output, sources)):
            yield inner
            yield from _nested_nodes(inner, {*sources, *(output for other in graph for output in other.outputs)})


def _explain_missing_rule(
    node: ir.Node, outermost: ir.Node, y: ir.Value, xs: Iterable[ir.Value], scope: Sequence[ir.Graph]
) -> UnsupportedError:
    """Return the error for a node without a rule: `outermost`, or a node nested in it."""
    x = next(x for x in xs if outermost in between(y, [x], scope))
    path = [*_shortest_path(y, outermost), *([node] if node is not outermost else [])]
    steps = " <- ".join([y.name or "", *(n.name or n.op_type for n in path)])
    domain = f', domain="{node.domain}"' if not is_standard(node) else ""
    return UnsupportedError(
        f"no gradient rule for `{node.op_type}` (node `{node.name}`)\n"
        f"on the path from `{y.name}` to `{x.name}`: {steps}",
        hint=f'write one with `@gradient("{node.op_type}"{domain})`, or do without the gradient of `{x.name}`',
    )


def _shortest_path(y: ir.Value, node: ir.Node) -> list[ir.Node]:
    """Return a shortest path from `y` to `node`, against the direction of the data."""
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
