"""What lies between a result and what it is differentiated by."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import onnx_ir as ir

from onward.errors import UnsupportedError
from onward.model.walk import between, nested_graphs, read_by
from onward.rules import NoGradient, Rewrite, Rule
from onward.rules.registry import lookup
from onward.standard import is_standard

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
    return UnsupportedError(
        f"no gradient rule for `{node.op_type}` (node `{node.name}`)\n"
        f"on the way from `{y.name}` to `{x.name}`: {steps}",
        hint=f"write one with `@gradient({_rule_name(node)})`, or do without the gradient of `{x.name}`",
    )


def _rule_name(node: ir.Node) -> str:
    """How an operator is named in a rule for it."""
    domain = f', domain="{node.domain}"' if not is_standard(node) else ""
    return f'"{node.op_type}"{domain}'


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
