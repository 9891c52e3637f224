"""Rules about names and order, on which all others depend (OW120 to OW128, OW303, OW702)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter

from onward.checker.codes import REFRESH, Finding, bare, listing, make_finding, quote
from onward.checker.graphs import GraphIndex, NodeView
from onward.checker.scope import Scope
from onward.model.protos import definitions


def defined_once(scope: Scope) -> Iterator[Finding]:
    graph = scope.own
    times = Counter(definitions(graph.proto))
    times.update(  # an initializer may repeat an input, but not another initializer
        name for name, n in Counter(tensor.name for tensor in graph.proto.initializer).items() if n > 1
    )
    for name, number in times.items():
        if number > 1:
            hint = "every input, initializer and node output needs a name of its own"
            yield make_finding("OW120", graph.place, f"{quote(name)} is defined {number} times", hint)


def new_names_only(scope: Scope) -> Iterator[Finding]:
    """Report names that an algorithm declares again: the combined graph is one graph."""
    if scope.outer is None:
        return
    for name in scope.own.names():
        if scope.outer.defines(name):
            message = f"{quote(name)} is also declared in the inference graph ({_kind(scope.outer, name)})"
            hint = "the algorithm reads inference values by name: remove the declaration, or choose another name"
            yield make_finding("OW121", f"{scope.own.place}{_declaration(scope.own, name)}", message, hint)


def _declaration(graph: GraphIndex, name: str) -> str:
    if producer := graph.producers.get(name):
        return producer[0].place.removeprefix(graph.place)
    return f'.{_kind(graph, name).replace(" ", "_")}["{bare(name)}"]'


def _kind(graph: GraphIndex, name: str) -> str:
    if name in graph.producers:
        return f"node output, {graph.producers[name][0].place}"
    if name in graph.initializers:
        return "initializer"
    return "sparse initializer" if name in graph.sparse else "input"


def reads_are_defined(scope: Scope) -> Iterator[Finding]:
    for node in scope.own.nodes:
        for name in node.reads:
            if not scope.defines(name):
                yield _undefined_name(scope, node, name)


def _undefined_name(scope: Scope, node: NodeView, name: str) -> Finding:
    subject, hint = scope.subject, scope.suggest(name)
    home = subject.homes.get(name)
    of_step = f", which belongs to training_info[{home}].algorithm"
    if scope is subject.inference and home is not None:
        why, hint = of_step, "inference must run without the training: move the value to the inference graph"
        code = "OW122"
    elif scope.outer is not None and home is not None:
        why, hint = of_step, "steps share nothing but the inference graph: keep shared state in `graph.initializer`"
        code = "OW128"
    elif scope.outer is not None:
        code, why = "OW702", ", which neither the algorithm nor the inference graph defines"
        hint = hint or REFRESH
    elif scope is not subject.inference and (home is not None or subject.inference.defines(name)):
        code, why = "OW303", " of another graph; an initialization graph sees only its own values"
        hint = "compute the value in the initialization graph itself"
    else:
        code, why = "OW123", ", which nothing defines"
    return make_finding(code, node.place, f"reads {quote(name)}{why}", hint)


def order(scope: Scope) -> Iterator[Finding]:
    """Report nodes before those that they read; distinguish cycles from a wrong order."""
    late = [(node, name) for node in scope.own.nodes for name in node.reads if _is_computed_later(scope, node, name)]
    if not late:
        return
    if circle := _cycle(scope.own):
        steps = " -> ".join(quote(node.outputs[0] if node.outputs else node.op, 40) for node in circle[:6])
        message = f"the node depends on itself: {steps}{' ...' if len(circle) > 6 else ''}"
        yield make_finding("OW124", circle[0].place, message)
        return
    node, name = late[0]
    more = f" ({len(late) - 1} more like this)" if len(late) > 1 else ""
    message = f"reads {quote(name)} before {scope.own.producers[name][0].place} computes it{more}"
    yield make_finding("OW125", node.place, message, "sort the nodes topologically")


def _is_computed_later(scope: Scope, node: NodeView, name: str) -> bool:
    producer = scope.own.producers.get(name)
    if producer is None or producer[0].index < node.index:
        return False
    return not any(name in graph.inputs or graph.is_initializer(name) for graph in scope.graphs)


def _cycle(graph: GraphIndex) -> list[NodeView]:
    """Return nodes that read each other in a cycle; empty if there is none."""
    producers = graph.producers
    sources = {
        node.index: {producers[name][0].index for name in node.reads if name in producers} for node in graph.nodes
    }
    try:
        TopologicalSorter(sources).prepare()
    except CycleError as error:
        first, *others, _ = error.args[1]  # each is read by the next
        return [graph.nodes[index] for index in (first, *reversed(others))]
    return []


def outputs_are_computed(scope: Scope) -> Iterator[Finding]:
    for name in dict.fromkeys(scope.own.outputs):
        if scope is scope.subject.inference and name in scope.subject.homes and not scope.defines(name):
            home = f"training_info[{scope.subject.homes[name]}].algorithm"
            yield make_finding("OW122", f'graph.output["{bare(name)}"]', f"this output is computed by {home}")
        elif not scope.defines(name):
            hint = scope.suggest(name)
            message = "nothing computes this output"
            yield make_finding("OW126", f'{scope.own.place}.output["{bare(name)}"]', message, hint)


def outputs_are_new(scope: Scope) -> Iterator[Finding]:
    if scope.outer is None:
        return
    theirs = set(scope.outer.outputs)
    if repeated := [name for name in dict.fromkeys(scope.own.outputs) if name in theirs]:
        yield make_finding(
            "OW127",
            f"{scope.own.place}.output",
            f"the combined graph has {listing(repeated)} twice among its outputs: the inference graph returns it too",
            "a step returns the outputs of inference anyway",
        )


SCOPE_RULES = (defined_once, new_names_only, reads_are_defined, order, outputs_are_computed, outputs_are_new)
