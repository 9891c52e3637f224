"""Which values a value is computed from."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable

from onward.checker.view.graphs import Node
from onward.checker.view.scope import Gradient, Scope

Inputs = Callable[[Node, int], Iterable[str]]


def all_inputs(node: Node, output: int) -> Iterable[str]:
    return node.behind(output)


def upstream(
    scope: Scope,
    starts: Iterable[str],
    *,
    stop: Collection[str] = (),
    inputs: Inputs = all_inputs,
    passes: Callable[[str], bool] = lambda name: True,
    until: Callable[[str], bool] = lambda name: False,
    through_time: bool = False,
) -> dict[str, None]:
    """The names from which `starts` are computed, themselves included, nearest first.

    stop: names that count as given. inputs: which inputs of a node to follow. passes: which values to follow.
    until: what ends the search. through_time: a variable is also computed from what replaced it in the last run.
    """
    seen = dict.fromkeys(starts)
    expanded: set[object] = set()
    todo = deque(seen)
    while todo:
        name = todo.popleft()
        if until(name):
            break
        if name in stop or not passes(name):
            continue
        reads: Iterable[str] = ()
        if producer := scope.producer(name):
            node, output = producer
            # The outputs of a node have the same inputs, except those of an optimizer.
            origin = node if node.tuples is None else producer
            if origin not in expanded:
                expanded.add(origin)
                reads = inputs(node, output)
                if node.is_training("Gradient"):  # which reads its y, though only by name
                    reads = (*reads, *filter(None, [Gradient.of(node).y]))
        elif through_time and name in scope.updates:
            reads = (scope.updates[name],)
        scope.budget.spend(1)
        for read in reads:
            if read not in seen:
                seen[read] = None
                todo.append(read)
    return seen


def leaves(scope: Scope, names: Iterable[str]) -> list[str]:
    """Those that no node computes: inputs, initializers, and names that are not there at all."""
    return [name for name in names if scope.producer(name) is None]
