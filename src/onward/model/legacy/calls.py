"""`GraphCall` of onnx 1.7, which had no combined graph: an algorithm called the inference graph, under its own names.

Its schema, of the domain ai.onnx.preview.training, binds values by position: an input that has an initializer may be
left out or be empty, as may every output. A draft of February 2020 gave names in `input_names` and `output_names`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from onnx import GraphProto, ModelProto, NodeProto, TrainingInfoProto, helper

from onward.build import Names
from onward.errors import InvalidModelError
from onward.model.legacy.names import (
    rename,
    set_nodes,
    string,
    strings,
)
from onward.model.protos import all_nodes, bodies, definitions, names_within, replace_entries

OPERATOR = "GraphCall"
DOMAINS = ("ai.onnx.preview.training", "ai.onnx.training", "ai.onnx", "")
"""Where it belongs, where drafts had it, and where it stands when no domain is given."""
_HINT = "make it again from its inference graph with `onward prepare`"


def has_calls(proto: ModelProto) -> bool:
    algorithms = [step.algorithm.node for step in proto.training_info]
    return bool(algorithms) and any(any(_calls(nodes)) for nodes in (*algorithms, *_others(proto)))


def _others(proto: ModelProto) -> Iterator[Iterable[NodeProto]]:
    yield proto.graph.node
    yield from (step.initialization.node for step in proto.training_info)
    yield from (function.node for function in proto.functions)


def convert(proto: ModelProto) -> list[str]:
    if not has_calls(proto):
        return []
    if any(any(_calls(nodes)) for nodes in _others(proto)):
        raise InvalidModelError(
            "a GraphCall (onnx 1.7) stands outside of an algorithm: the inference graph, which it calls, must not call "
            "itself, and neither an initialization nor a function can call it",
            hint=_HINT,
        )
    notes = []
    for i, info in enumerate(proto.training_info):
        if count := len(found := list(_calls(info.algorithm.node))):
            for call in found:
                _check(call, proto.graph, f"training_info[{i}].algorithm")
            _join(proto.graph, info)
            times = "a call" if count == 1 else f"{count} calls"
            notes.append(f"{times} of the inference graph by GraphCall (onnx 1.7) in training_info[{i}]")
    return notes


def _calls(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    return (node for node in all_nodes(nodes) if is_call(node))


def is_call(node: NodeProto) -> bool:
    return node.op_type == OPERATOR and node.domain in DOMAINS


# ---- what a call binds -----------------------------------------------------------------------------------------------


def _check(call: NodeProto, graph: GraphProto, place: str) -> None:
    problems = []
    called, by_name = string(call, "graph_name"), bool(strings(call, "input_names") or strings(call, "output_names"))
    if called is None and not by_name:
        problems.append("it does not say which graph it calls")
    elif called is not None and called != graph.name:
        problems.append(f"it calls `{called}`, and only the inference graph, `{graph.name}`, can be called")
    defaults = {tensor.name for tensor in graph.initializer}
    for kind, actual, values in (("input", call.input, graph.input), ("output", call.output, graph.output)):
        known, formal = [value.name for value in values], strings(call, f"{kind}_names")
        if by_name and len(formal) != len(actual):
            problems.append(f"it has {len(actual)} {kind}s, and {len(formal)} names for them")
        elif len(actual) > len(known):
            problems.append(f"it has {len(actual)} {kind}s, and the inference graph has {len(known)}")
        problems += [f"`{name}` is no {kind} of the inference graph" for name in formal if name not in known]
    given = {formal for formal, _ in _inputs(call, graph)}
    missing = [value.name for value in graph.input if value.name not in given | defaults]
    problems += [f"it gives no value for `{name}`" for name in missing]
    if problems:
        raise InvalidModelError(f"the GraphCall in {place} (onnx 1.7) is wrong: " + "; ".join(problems), hint=_HINT)


def _inputs(call: NodeProto, graph: GraphProto) -> list[tuple[str, str]]:
    """Names in the inference graph, and the values that the call gives for them."""
    return _bind_inputs(strings(call, "input_names") or [value.name for value in graph.input], call.input)


def _outputs(call: NodeProto, graph: GraphProto) -> list[tuple[str, str]]:
    return _bind_inputs(strings(call, "output_names") or [value.name for value in graph.output], call.output)


def _bind_inputs(formal: Sequence[str], actual: Iterable[str]) -> list[tuple[str, str]]:
    return [(name, value) for name, value in zip(formal, actual, strict=False) if value]


# ---- the combined graph ----------------------------------------------------------------------------------------------


def _join(graph: GraphProto, info: TrainingInfoProto) -> None:
    """Let the algorithm read the inference graph's values if a call passes its own inputs on; else copy the graph."""
    algorithm = info.algorithm
    names = Names(names_within(graph) | names_within(algorithm))
    # What the algorithm defines under a name of the inference graph was legal before they were joined.
    renames = {name: names.fresh(name) for name in sorted(set(definitions(algorithm)) & names_within(graph))}
    own = [node for node in algorithm.node if is_call(node)]
    call, aliases = next(((node, found) for node in own if (found := _aliases(node, graph, algorithm))), (None, {}))
    if call is not None:
        given = {value for _, value in _inputs(call, graph)}
        replace_entries(algorithm.input, (value for value in algorithm.input if value.name not in given))
        algorithm.node.remove(call)
    renames |= aliases
    rename(algorithm, renames)
    _expand(graph, algorithm, names)
    for entry in info.update_binding:
        entry.value = renames.get(entry.value, entry.value)


def _aliases(call: NodeProto, graph: GraphProto, algorithm: GraphProto) -> dict[str, str]:
    """Algorithm name -> inference name, if the call passes nothing but inputs of the algorithm and shared weights."""
    defaults = {tensor.name for tensor in (*graph.initializer, *algorithm.initializer)}
    own, inputs = set(definitions(algorithm)), {value.name for value in algorithm.input} - defaults
    passed = _inputs(call, graph)
    for formal, actual in passed:
        shared = actual == formal and actual not in own
        if not shared and (actual not in inputs or formal in defaults):
            return {}
    if len({actual for _, actual in passed}) != len(passed):
        return {}
    return {actual: formal for formal, actual in (*passed, *_outputs(call, graph))}


def _expand(graph: GraphProto, body: GraphProto, names: Names) -> None:
    """Replace each call by a copy of the inference nodes; weights are shared by name."""
    nodes: list[NodeProto] = []
    for node in body.node:
        nodes += _copy(graph, node, names) if is_call(node) else [node]
        for inner in bodies(node):
            _expand(graph, inner, names)
    set_nodes(body, nodes)


def _copy(graph: GraphProto, call: NodeProto, names: Names) -> list[NodeProto]:
    given, wanted = dict(_inputs(call, graph)), dict(_outputs(call, graph))
    made = sorted({name for node in graph.node for name in node.output if name})
    copy = GraphProto(node=graph.node)
    rename(copy, {name: wanted.get(name) or names.fresh(name) for name in made} | given)
    passed_on = [name for name in wanted if name not in made]  # outputs that are inputs or weights of the graph
    return [*copy.node, *(helper.make_node("Identity", [given.get(n, n)], [wanted[n]]) for n in passed_on)]
