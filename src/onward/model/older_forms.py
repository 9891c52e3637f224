"""Conversion of older training information: drafts of 2019 and 2020, and GraphCall of onnx 1.7.

docs/older-forms.md lists the source of each form and the mapping of fields.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet
from onnx import (
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    StringStringEntryProto,
    TensorProto,
    TrainingInfoProto,
    ValueInfoProto,
    helper,
)

from onward.build import Names
from onward.errors import InvalidModelError, UnsupportedError
from onward.model.core import TRAINING_DOMAIN
from onward.model.protos import all_nodes, bodies, definitions, names_within, replace_entries
from onward.model.storage import walk_tensors
from onward.standard import FUNCTIONS_IR, TRAINING_IR


def is_older(proto: ModelProto) -> bool:
    return has_training(proto) or has_calls(proto)


def convert(proto: ModelProto) -> list[str]:
    """Convert training information to the present form, in place; return the converted parts."""
    return [*convert_drafts(proto), *convert_calls(proto)]


# ---- drafts of 2019 and 2020 -----------------------------------------------------------------------------------------

# The drafts of 2019 and early 2020 kept `training_info` in field 21 of the model and functions in field 9. To all
# releases of onnx, these are unknown fields. The content of field 21 tells the drafts apart:
#
# - May 2019: a loss node, an optimizer node, and names for the gradients between them;
# - July 2019: a function, whose bindings lead from its outputs to initializers;
# - January 2020: graphs, as today.

_FUNCTION, _TRAINING = 9, 21
_MAY, _JULY, _JANUARY = "the draft of May 2019", "the draft of July 2019", "the drafts of early 2020"
_Kind = TypeVar("_Kind", bound=Message)
_Fields = dict[int, list[Any]]


def has_training(proto: ModelProto) -> bool:
    return _TRAINING in _unknown(proto)


def convert_drafts(proto: ModelProto) -> list[str]:
    fields = _unknown(proto)
    if _TRAINING not in fields:
        return []
    functions = _all(FunctionProto, fields, _FUNCTION)
    entries = [_entry(_unknown(_parse(Empty, data)), proto.graph) for data in fields[_TRAINING]]
    added = ModelProto(training_info=[info for _, info in entries], functions=functions)
    if any(tensor.data_location == TensorProto.EXTERNAL for tensor in walk_tensors(added)):
        raise _unclear("a tensor in it refers to data in another file")
    parsed = ModelProto(**{field.name: value for field, value in proto.ListFields()})
    proto.CopyFrom(parsed)  # without the unknown fields
    proto.MergeFrom(added)
    notes = [f"training information of {draft} in field {_TRAINING} of the model" for draft, _ in entries]
    if functions:
        notes.append(f"{len(functions)} function{'s' * (len(functions) > 1)} in field {_FUNCTION} of the model")
    others = sorted(fields.keys() - {_FUNCTION, _TRAINING})
    notes += [f"field {number} of the model, which no draft has, is left out" for number in others]
    notes += convert_operators(proto, [function.name for function in functions])
    for (draft, _), info in zip(entries, proto.training_info, strict=True):
        _join(proto.graph, info, by_name=draft != _JANUARY)
    return notes


def _entry(fields: _Fields, graph: GraphProto) -> tuple[str, TrainingInfoProto]:
    if fields.keys() & {5, 6}:
        draft, info, pairs = _MAY, _of_nodes(fields), [(new, old) for old, new in _pairs(fields, 7)]
    elif 7 in fields:
        draft, info, pairs = _JULY, _of_function(fields), _pairs(fields, 7)
    else:
        draft, info, pairs = _JANUARY, _of_graphs(fields), _pairs(fields, 3) + _pairs(fields, 4)
    _bind(info, graph, pairs, draft)
    return draft, info


def _of_nodes(fields: _Fields) -> TrainingInfoProto:
    info = TrainingInfoProto(algorithm=_interface(fields, "algorithm"))
    loss, optimizer = _one(NodeProto, fields, 4), _one(NodeProto, fields, 6)
    gradients = _pairs(fields, 5)
    if not loss.output or not gradients:
        raise _unclear(f"{_MAY} has no loss, or no gradient of it")
    xs, results = zip(*gradients, strict=True)
    gradient = helper.make_node("Gradient", xs, results, xs=xs, y=loss.output[0])
    group_inputs(optimizer, set(results))
    info.algorithm.node.extend([loss, gradient, optimizer])
    return info


def _of_function(fields: _Fields) -> TrainingInfoProto:
    function = _one(FunctionProto, fields, 4)
    info = TrainingInfoProto(algorithm=_interface(fields, function.name or "algorithm"))
    info.algorithm.node.extend(function.node)
    return info


def _interface(fields: _Fields, name: str) -> GraphProto:
    return GraphProto(
        name=name,
        initializer=_all(TensorProto, fields, 1),
        input=_all(ValueInfoProto, fields, 2),
        output=_all(ValueInfoProto, fields, 3),
    )


def _of_graphs(fields: _Fields) -> TrainingInfoProto:
    info = TrainingInfoProto(algorithm=_one(GraphProto, fields, 2))
    if 1 in fields:
        info.initialization.CopyFrom(_one(GraphProto, fields, 1))
    return info


def _bind(info: TrainingInfoProto, graph: GraphProto, pairs: list[tuple[str, str]], draft: str) -> None:
    """Write bindings. The drafts had both directions: one side is an initializer."""
    tensors = [*graph.initializer, *info.algorithm.initializer]
    state = {tensor.name: tensor for tensor in tensors}
    if len(state) != len(tensors):
        raise _unclear(f"{draft} has an initializer that the inference graph has, too")
    computed = {name for node in info.algorithm.node for name in node.output}
    initial = {value.name for value in info.initialization.output}
    for pair in pairs:
        ordered = (pair, pair[::-1])
        matches = [(key, value) for value, key in ordered if key in state and value in computed | initial]
        if len(matches) != 1:
            raise _unclear(f"{draft} binds `{pair[0]}` and `{pair[1]}`: one is to be an initializer, one an output")
        key, value = matches[0]
        if value in initial:
            info.initialization_binding.add(key=key, value=value)
            continue
        info.update_binding.add(key=key, value=value)
        if value not in {output.name for output in info.algorithm.output}:
            new = helper.make_tensor_value_info(value, state[key].data_type, list(state[key].dims))
            info.algorithm.output.append(new)


def _join(graph: GraphProto, info: TrainingInfoProto, *, by_name: bool) -> None:
    """Merge the algorithm into the combined graph, where one name means one value.

    With `by_name`, inputs of the same name are the same, as in drafts without GraphCall, and equal
    nodes are computed once.
    """
    algorithm, taken = info.algorithm, names_within(graph)
    if any(is_call(node) for node in all_nodes(algorithm.node)):
        return  # _join_calls joins them
    shared = {value.name for value in graph.input} if by_name else set()
    names = Names(taken | names_within(algorithm))
    own = {value.name for value in algorithm.input} | {tensor.name for tensor in algorithm.initializer}
    renames = {name: names.fresh(name) for name in sorted((own - shared) & taken)}
    by_computation = {_computation(node): node for node in graph.node} if by_name else {}
    nodes = []
    for node in algorithm.node:
        rename_node(node, renames)
        if twin := by_computation.get(_computation(node)):
            renames |= dict(zip(node.output, twin.output, strict=False))
            continue
        renames |= {name: names.fresh(name) for name in node.output if name in taken}
        node.output[:] = [renames.get(name, name) for name in node.output]
        nodes.append(node)
    set_nodes(algorithm, nodes)
    replace_entries(algorithm.input, [value for value in algorithm.input if value.name not in shared])
    rename(algorithm, renames)
    replace_entries(algorithm.output, [value for value in algorithm.output if value.name not in taken])
    for entry in info.update_binding:
        entry.key, entry.value = renames.get(entry.key, entry.key), renames.get(entry.value, entry.value)


def _computation(node: NodeProto) -> tuple[object, ...]:
    """Return a key of the computation of a node, without the names of its results."""
    attributes = sorted(attribute.SerializeToString(deterministic=True) for attribute in node.attribute)
    return node.domain, node.op_type, tuple(node.input), *attributes


# ---- fields ----------------------------------------------------------------------------------------------------------


def _unknown(message: Message) -> _Fields:
    unknown, fields = UnknownFieldSet(message), _Fields()
    for i in range(len(unknown)):
        fields.setdefault(unknown[i].field_number, []).append(unknown[i].data)
    return fields


def _all(message_type: type[_Kind], fields: _Fields, number: int) -> list[_Kind]:
    return [_parse(message_type, data) for data in fields.get(number, [])]


def _one(message_type: type[_Kind], fields: _Fields, number: int) -> _Kind:
    """Return a field that is not repeated; the last one counts, as in protobuf."""
    if number not in fields:
        raise _unclear(f"field {_TRAINING} of the model has no {message_type.DESCRIPTOR.name} in its field {number}")
    return _parse(message_type, fields[number][-1])


def _pairs(fields: _Fields, number: int) -> list[tuple[str, str]]:
    return [(entry.key, entry.value) for entry in _all(StringStringEntryProto, fields, number)]


def _parse(message_type: type[_Kind], data: Any) -> _Kind:
    try:
        return message_type.FromString(data)
    except (DecodeError, TypeError):
        raise _unclear(f"field {_TRAINING} of the model has no valid {message_type.DESCRIPTOR.name}") from None


def _unclear(what: str) -> UnsupportedError:
    message = f"the training information is of a draft of 2019 or 2020, and unclear: {what}"
    return UnsupportedError(message, hint=_HINT)


# ---- operators of drafts ---------------------------------------------------------------------------------------------


_OPTIMIZERS = ("Adagrad", "Adam", "Momentum")
_LOSSES = ("MSE", "MeanSquaredError")
_LOCAL = "local"
"""The domain for functions of the drafts, which had none."""
_REDUCTIONS = {"mean": "ReduceMean", "sum": "ReduceSum"}


def convert_operators(proto: ModelProto, functions: Collection[str]) -> list[str]:
    graphs = [proto.graph, *(step.algorithm for step in proto.training_info)]
    names = Names(set().union(*(names_within(graph) for graph in graphs)))
    notes: dict[str, None] = {}
    holders: list[GraphProto | FunctionProto] = [*graphs, *proto.functions]
    for holder in holders:
        _convert_nodes(holder, functions, names, notes)
    imports = {entry.domain: entry.version for entry in proto.opset_import if entry.domain != "ai.onnx.training"}
    imports |= {TRAINING_DOMAIN: 1, **({_LOCAL: 1} if functions else {})}
    replace_entries(proto.opset_import, (helper.make_opsetid(*entry) for entry in imports.items()))
    for function in proto.functions:
        if function.name in functions:
            function.domain = _LOCAL
            function.DiscardUnknownFields()  # `since_version` and `status` of the drafts
            function.opset_import.extend(proto.opset_import)
    proto.ir_version = max(proto.ir_version, FUNCTIONS_IR if functions else TRAINING_IR)
    return list(notes)


def _convert_nodes(
    holder: GraphProto | FunctionProto, functions: Collection[str], names: Names, notes: dict[str, None]
) -> None:
    nodes: list[NodeProto] = []
    for node in holder.node:
        for body in bodies(node):
            _convert_nodes(body, functions, names, notes)
        if node.domain not in DOMAINS:
            nodes.append(node)
            continue
        if node.op_type in functions:
            node.domain = _LOCAL
        elif node.op_type == "Graph":  # its name is the graph's; later drafts said it in an attribute
            node.op_type, node.domain = OPERATOR, TRAINING_DOMAIN
            node.attribute.append(helper.make_attribute("graph_name", node.name))
        elif node.op_type in (*_OPTIMIZERS, "Gradient", OPERATOR):
            node.domain = TRAINING_DOMAIN
            if node.op_type == "Gradient":
                _complete(node)
        elif node.op_type in _LOSSES:
            reduction = string(node, "reduction") or "mean"
            nodes += _squared_error(node, reduction, names)
            notes[f"the loss `{node.op_type}` of the drafts, read as the {reduction} of squared differences"] = None
            continue
        nodes.append(node)
    set_nodes(holder, nodes)


def _complete(gradient: NodeProto) -> None:
    """Add the inputs beyond `xs` to `zs`: the demonstration of 2019 passed all graph inputs."""
    xs, inputs = strings(gradient, "xs"), list(gradient.input)
    if len(inputs) <= len(xs) or strings(gradient, "zs"):
        return
    if not set(xs) <= set(inputs):
        message = f"a Gradient of a draft of 2019 has {len(inputs)} inputs for {len(xs)} names in `xs`"
        raise UnsupportedError(f"{message}: it is unclear which input belongs to which name", hint=_HINT)
    zs = [name for name in inputs if name not in xs]
    gradient.input[:] = [*xs, *zs]
    gradient.attribute.append(helper.make_attribute("zs", zs))


def _squared_error(node: NodeProto, reduction: str, names: Names) -> list[NodeProto]:
    """Build `MeanSquaredError` of the 2019 proposal, and `MSE` of that year's demonstration."""
    if reduction not in _REDUCTIONS or not 2 <= len(node.input) <= 3 or len(node.output) != 1:
        raise UnsupportedError(
            f"the loss `{node.op_type}` of the drafts of 2019 is read with two inputs, or weights as a third one, and "
            f"with the reduction mean or sum: not with {len(node.input)} inputs and `{reduction}`",
            hint="write the loss with operators of the standard",
        )
    difference, squares = names.fresh("difference"), names.fresh("squares")
    nodes = [
        helper.make_node("Sub", node.input[:2], [difference]),
        helper.make_node("Mul", [difference, difference], [squares]),
    ]
    if len(node.input) == 3:
        weighted = names.fresh("weighted")
        nodes.append(helper.make_node("Mul", [node.input[2], squares], [weighted]))
        squares = weighted
    return [*nodes, helper.make_node(_REDUCTIONS[reduction], [squares], node.output, keepdims=0)]


def group_inputs(optimizer: NodeProto, gradients: Collection[str]) -> None:
    """Reorder inputs as operators have them: all tensors, then all gradients, then each state.

    The demonstration of 2019 grouped them by tensor; the position of the gradients tells.
    """
    count, states = len(gradients), list(optimizer.input[2:])
    width = len(states) // count
    if count > 1 and len(states) % count == 0 and set(states[1::width]) == set(gradients):
        results = list(optimizer.output)
        kinds = len(results) // count
        optimizer.input[2:] = [name for slot in range(width) for name in states[slot::width]]
        optimizer.output[:] = [name for slot in range(kinds) for name in results[slot::kinds]]


# ---- GraphCall of onnx 1.7 -------------------------------------------------------------------------------------------

# onnx 1.7 had no combined graph: an algorithm called the inference graph by `GraphCall`. Its schema, of the domain
# ai.onnx.preview.training, binds values by position: inputs with an initializer and all outputs are optional. A draft
# of February 2020 gave names in `input_names` and `output_names`.

OPERATOR = "GraphCall"
DOMAINS = (TRAINING_DOMAIN, "ai.onnx.training", "ai.onnx", "")
"""The present domain, those of the drafts, and the default."""
_HINT = "make the model again from its inference graph with `onward prepare`"


def has_calls(proto: ModelProto) -> bool:
    in_algorithms = any(any(_calls(step.algorithm.node)) for step in proto.training_info)
    return in_algorithms or (bool(proto.training_info) and _has_calls_elsewhere(proto))


def _has_calls_elsewhere(proto: ModelProto) -> bool:
    graphs = [proto.graph, *(step.initialization for step in proto.training_info)]
    containers: list[GraphProto | FunctionProto] = [*graphs, *proto.functions]
    return any(any(_calls(container.node)) for container in containers)


def convert_calls(proto: ModelProto) -> list[str]:
    if not has_calls(proto):
        return []
    if _has_calls_elsewhere(proto):
        message = "a GraphCall (onnx 1.7) outside of an algorithm: only an algorithm can call the inference graph"
        raise InvalidModelError(message, hint=_HINT)
    notes = []
    for i, info in enumerate(proto.training_info):
        if count := len(calls := list(_calls(info.algorithm.node))):
            for call in calls:
                _check(call, proto.graph, f"training_info[{i}].algorithm")
            _join_calls(proto.graph, info)
            times = "a call" if count == 1 else f"{count} calls"
            notes.append(f"{times} of the inference graph by GraphCall (onnx 1.7) in training_info[{i}]")
    return notes


def _calls(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    return (node for node in all_nodes(nodes) if is_call(node))


def is_call(node: NodeProto) -> bool:
    return node.op_type == OPERATOR and node.domain in DOMAINS


# ---- what a call binds -----------------------------------------------------------------------------------------------


def _check(call: NodeProto, graph: GraphProto, where: str) -> None:
    problems = []
    called, by_name = string(call, "graph_name"), bool(strings(call, "input_names") or strings(call, "output_names"))
    if called is None and not by_name:
        problems.append("it does not say which graph it calls")
    elif called is not None and called != graph.name:
        problems.append(f"it calls `{called}`, and only the inference graph, `{graph.name}`, can be called")
    defaults = {tensor.name for tensor in graph.initializer}
    for role, actual, values in (("input", call.input, graph.input), ("output", call.output, graph.output)):
        names, formal = [value.name for value in values], strings(call, f"{role}_names")
        if by_name and len(formal) != len(actual):
            problems.append(f"it has {len(actual)} {role}s, and {len(formal)} names for them")
        elif len(actual) > len(names):
            problems.append(f"it has {len(actual)} {role}s, and the inference graph has {len(names)}")
        problems += [f"`{name}` is not an {role} of the inference graph" for name in formal if name not in names]
    passed = {formal for formal, _ in _inputs(call, graph)}
    missing = [value.name for value in graph.input if value.name not in passed | defaults]
    problems += [f"it gives no value for `{name}`" for name in missing]
    if problems:
        raise InvalidModelError(f"the GraphCall in {where} (onnx 1.7) is wrong: " + "; ".join(problems), hint=_HINT)


def _inputs(call: NodeProto, graph: GraphProto) -> list[tuple[str, str]]:
    return _bound(strings(call, "input_names") or [value.name for value in graph.input], call.input)


def _outputs(call: NodeProto, graph: GraphProto) -> list[tuple[str, str]]:
    return _bound(strings(call, "output_names") or [value.name for value in graph.output], call.output)


def _bound(formal: Sequence[str], actual: Iterable[str]) -> list[tuple[str, str]]:
    return [(name, value) for name, value in zip(formal, actual, strict=False) if value]


# ---- the combined graph ----------------------------------------------------------------------------------------------


def _join_calls(graph: GraphProto, info: TrainingInfoProto) -> None:
    """Read the inference graph's values if a call passes its own inputs on; else copy the graph."""
    algorithm = info.algorithm
    names = Names(names_within(graph) | names_within(algorithm))
    # Names that both define were legal before the graphs were joined.
    renames = {name: names.fresh(name) for name in sorted(set(definitions(algorithm)) & names_within(graph))}
    for call in filter(is_call, algorithm.node):
        if aliases := _aliases(call, graph, algorithm):
            passed = {value for _, value in _inputs(call, graph)}
            replace_entries(algorithm.input, (value for value in algorithm.input if value.name not in passed))
            algorithm.node.remove(call)
            renames |= aliases
            break
    rename(algorithm, renames)
    _expand(graph, algorithm, names)
    for entry in info.update_binding:
        entry.value = renames.get(entry.value, entry.value)


def _aliases(call: NodeProto, graph: GraphProto, algorithm: GraphProto) -> dict[str, str]:
    """Return algorithm name -> inference name, if a call passes only inputs and weights."""
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
        nodes += _inline(graph, node, names) if is_call(node) else [node]
        for inner in bodies(node):
            _expand(graph, inner, names)
    set_nodes(body, nodes)


def _inline(graph: GraphProto, call: NodeProto, names: Names) -> list[NodeProto]:
    inputs, outputs = dict(_inputs(call, graph)), dict(_outputs(call, graph))
    computed = sorted({name for node in graph.node for name in node.output if name})
    copy = GraphProto(node=graph.node)
    rename(copy, {name: outputs.get(name) or names.fresh(name) for name in computed} | inputs)
    passed_on = [name for name in outputs if name not in computed]  # outputs that are inputs or weights of the graph
    return [*copy.node, *(helper.make_node("Identity", [inputs.get(n, n)], [outputs[n]]) for n in passed_on)]


# ---- names in a GraphProto -------------------------------------------------------------------------------------------


def rename(graph: GraphProto, renames: Mapping[str, str]) -> None:
    for values in (graph.input, graph.output, graph.value_info):
        for value in values:
            value.name = renames.get(value.name, value.name)
    for tensor in graph.initializer:
        tensor.name = renames.get(tensor.name, tensor.name)
    for node in graph.node:
        rename_node(node, renames)


def rename_node(node: NodeProto, renames: Mapping[str, str]) -> None:
    node.input[:] = [renames.get(name, name) for name in node.input]
    node.output[:] = [renames.get(name, name) for name in node.output]
    if node.op_type == "Gradient":
        for attribute in node.attribute:
            texts = [text.decode() for text in attribute.strings]
            attribute.strings[:] = [renames.get(name, name).encode() for name in texts]
            if attribute.name == "y":
                name = attribute.s.decode()
                attribute.s = renames.get(name, name).encode()
    for body in bodies(node):
        shadowed = set(definitions(body))
        rename(body, {old: new for old, new in renames.items() if old not in shadowed})


def strings(node: NodeProto, name: str) -> list[str]:
    return [text.decode() for attribute in node.attribute if attribute.name == name for text in attribute.strings]


def string(node: NodeProto, name: str) -> str | None:
    return next((attribute.s.decode() for attribute in node.attribute if attribute.name == name), None)


def set_nodes(graph: GraphProto | FunctionProto, nodes: Iterable[NodeProto]) -> None:
    copies = [NodeProto.FromString(node.SerializeToString()) for node in nodes]  # none may be lost with the list
    replace_entries(graph.node, copies)
