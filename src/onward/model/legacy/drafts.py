"""The drafts of 2019 and early 2020, which kept `training_info` in field 21 of the model and functions in field 9.

No release of onnx has them, so that it sees unknown fields. What is in field 21 tells the drafts apart:

- May 2019: a loss node, an optimizer node, and names for the gradients between them;
- July 2019: a function, whose bindings lead from its outputs to initializers;
- January 2020: graphs, as today.
"""

from __future__ import annotations

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
from onward.errors import UnsupportedError
from onward.model.legacy import calls, operators
from onward.model.legacy.names import rename, rename_node, set_nodes
from onward.model.protos import all_nodes, names_within, replace_entries
from onward.model.storage import walk_tensors

_FUNCTION, _TRAINING = 9, 21
_MAY, _JULY, _JANUARY = "the draft of May 2019", "the draft of July 2019", "the drafts of early 2020"
_HINT = "make it again from its inference graph with `onward prepare`"
_Kind = TypeVar("_Kind", bound=Message)
_Fields = dict[int, list[Any]]


def has_training(proto: ModelProto) -> bool:
    return _TRAINING in _unknown(proto)


def convert(proto: ModelProto) -> list[str]:
    fields = _unknown(proto)
    if _TRAINING not in fields:
        return []
    functions = _all(FunctionProto, fields, _FUNCTION)
    entries = [_entry(_unknown(_parse(Empty, data)), proto.graph) for data in fields[_TRAINING]]
    added = ModelProto(training_info=[info for _, info in entries], functions=functions)
    if any(tensor.data_location == TensorProto.EXTERNAL for tensor in walk_tensors(added)):
        raise _unclear("a tensor in it refers to data in another file")
    known = ModelProto(**{field.name: value for field, value in proto.ListFields()})
    proto.CopyFrom(known)  # without the unknown fields
    proto.MergeFrom(added)
    notes = [f"training information of {draft} in field {_TRAINING} of the model" for draft, _ in entries]
    if functions:
        notes.append(f"{len(functions)} function{'s' * (len(functions) > 1)} in field {_FUNCTION} of the model")
    others = sorted(fields.keys() - {_FUNCTION, _TRAINING})
    notes += [f"field {number} of the model, which no draft has, is left out" for number in others]
    notes += operators.convert(proto, [function.name for function in functions])
    for (draft, _), info in zip(entries, proto.training_info, strict=True):
        _join(proto.graph, info, by_name=draft != _JANUARY)
    return notes


def _entry(fields: _Fields, graph: GraphProto) -> tuple[str, TrainingInfoProto]:
    if fields.keys() & {5, 6}:
        draft, info, pairs = _MAY, *_of_nodes(fields)
    elif 7 in fields:
        draft, info, pairs = _JULY, *_of_function(fields)
    else:
        draft, info, pairs = _JANUARY, *_of_graphs(fields)
    _bind(info, graph, pairs, draft)
    return draft, info


def _of_nodes(fields: _Fields) -> tuple[TrainingInfoProto, list[tuple[str, str]]]:
    info = TrainingInfoProto(algorithm=_interface(fields, "algorithm"))
    loss, optimizer = _one(NodeProto, fields, 4), _one(NodeProto, fields, 6)
    gradients = _pairs(fields, 5)
    if not loss.output or not gradients:
        raise _unclear(f"{_MAY} has no loss, or no gradient of it")
    xs, results = zip(*gradients, strict=True)
    gradient = helper.make_node("Gradient", xs, results, xs=xs, y=loss.output[0])
    operators.group(optimizer, set(results))
    info.algorithm.node.extend([loss, gradient, optimizer])
    return info, [(new, old) for old, new in _pairs(fields, 7)]


def _of_function(fields: _Fields) -> tuple[TrainingInfoProto, list[tuple[str, str]]]:
    function = _one(FunctionProto, fields, 4)
    info = TrainingInfoProto(algorithm=_interface(fields, function.name or "algorithm"))
    info.algorithm.node.extend(function.node)
    return info, _pairs(fields, 7)


def _interface(fields: _Fields, name: str) -> GraphProto:
    return GraphProto(
        name=name,
        initializer=_all(TensorProto, fields, 1),
        input=_all(ValueInfoProto, fields, 2),
        output=_all(ValueInfoProto, fields, 3),
    )


def _of_graphs(fields: _Fields) -> tuple[TrainingInfoProto, list[tuple[str, str]]]:
    info = TrainingInfoProto(algorithm=_one(GraphProto, fields, 2))
    if 1 in fields:
        info.initialization.CopyFrom(_one(GraphProto, fields, 1))
    return info, _pairs(fields, 3) + _pairs(fields, 4)


def _bind(info: TrainingInfoProto, graph: GraphProto, pairs: list[tuple[str, str]], draft: str) -> None:
    """Write bindings, whose direction the drafts changed: one side is an initializer, the other an output."""
    tensors = [*graph.initializer, *info.algorithm.initializer]
    state = {tensor.name: tensor for tensor in tensors}
    if len(state) != len(tensors):
        raise _unclear(f"{draft} has an initializer that is one of the inference graph's as well")
    computed = {name for node in info.algorithm.node for name in node.output}
    initial = {value.name for value in info.initialization.output}
    for pair in pairs:
        found = [
            (key, value)
            for value, key in (pair, pair[::-1])
            if key in state and (value in computed or value in initial)
        ]
        if len(found) != 1:
            raise _unclear(f"{draft} binds `{pair[0]}` and `{pair[1]}`: one is to be an initializer, one an output")
        key, value = found[0]
        if value in initial:
            info.initialization_binding.add(key=key, value=value)
            continue
        info.update_binding.add(key=key, value=value)
        if value not in {output.name for output in info.algorithm.output}:
            new = helper.make_tensor_value_info(value, state[key].data_type, list(state[key].dims))
            info.algorithm.output.append(new)


def _join(graph: GraphProto, info: TrainingInfoProto, *, by_name: bool) -> None:
    """Make the algorithm a part of the combined graph, where one name means one value.

    by_name: inputs of the same name are the same, as in the drafts without a call of the graph, and what both compute
    is computed once.
    """
    algorithm, taken = info.algorithm, names_within(graph)
    if any(calls.is_call(node) for node in all_nodes(algorithm.node)):
        return  # calls.py joins them
    shared = {value.name for value in graph.input} if by_name else set()
    names = Names(taken | names_within(algorithm))
    own = {value.name for value in algorithm.input} | {tensor.name for tensor in algorithm.initializer}
    renames = {name: names.fresh(name) for name in sorted((own - shared) & taken)}
    known = {_computation(node): node for node in graph.node} if by_name else {}
    nodes = []
    for node in algorithm.node:
        rename_node(node, renames)
        if twin := known.get(_computation(node)):
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
    """What a node computes, whatever its results are called."""
    attributes = sorted(attribute.SerializeToString(deterministic=True) for attribute in node.attribute)
    return node.domain, node.op_type, tuple(node.input), *attributes


# ---- fields ----------------------------------------------------------------------------------------------------------


def _unknown(message: Message) -> _Fields:
    """The fields that the schema does not know, by number."""
    unknown, fields = UnknownFieldSet(message), _Fields()
    for i in range(len(unknown)):
        fields.setdefault(unknown[i].field_number, []).append(unknown[i].data)
    return fields


def _all(kind: type[_Kind], fields: _Fields, number: int) -> list[_Kind]:
    return [_parse(kind, data) for data in fields.get(number, [])]


def _one(kind: type[_Kind], fields: _Fields, number: int) -> _Kind:
    """A field that is not repeated; the last one counts, as in protobuf."""
    if number not in fields:
        raise _unclear(f"field {_TRAINING} of the model has no {kind.DESCRIPTOR.name} in its field {number}")
    return _parse(kind, fields[number][-1])


def _pairs(fields: _Fields, number: int) -> list[tuple[str, str]]:
    return [(entry.key, entry.value) for entry in _all(StringStringEntryProto, fields, number)]


def _parse(kind: type[_Kind], data: Any) -> _Kind:
    try:
        return kind.FromString(data)
    except (DecodeError, TypeError):
        raise _unclear(f"field {_TRAINING} of the model has no valid {kind.DESCRIPTOR.name}") from None


def _unclear(what: str) -> UnsupportedError:
    message = f"the file has training information as drafts of 2019 and 2020 had it, and its meaning is unclear: {what}"
    return UnsupportedError(message, hint=_HINT)
