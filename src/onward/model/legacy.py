"""Training information of older schemas: recognised, converted where the meaning is clear, else refused with a reason.

- onnx 1.7 had no combined graph: an algorithm called the inference graph with a `GraphCall` node, under its own names.
- The 2019 prototype stored `training_info` in field 21 of `ModelProto`, with the two sides of a binding swapped, and
  functions in field 9. The present schema sees both as unknown fields.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TrainingInfoProto

from onward.build import Names
from onward.errors import InvalidModelError, UnsupportedError

_PROTOTYPE_TRAINING, _PROTOTYPE_FUNCTION = 21, 9
_REBUILD = "make it again from its inference graph with `onward prepare`"


def convert(proto: ModelProto) -> None:
    """Bring the training information of an older schema into the present one, in place."""
    _convert_prototype(proto)
    for i, info in enumerate(proto.training_info):
        calls = [node for node in info.algorithm.node if node.op_type == "GraphCall"]
        if calls:
            _convert_calls(proto.graph, info, calls, f"training_info[{i}].algorithm")


def _convert_prototype(proto: ModelProto) -> None:
    unknown = UnknownFieldSet(proto)
    fields = [(unknown[i].field_number, unknown[i].data) for i in range(len(unknown))]
    entries = [data for number, data in fields if number == _PROTOTYPE_TRAINING]
    if not entries:
        return
    converted = [_prototype_entry(data, proto.graph) for data in entries]
    if any(number == _PROTOTYPE_FUNCTION for number, _ in fields):
        raise UnsupportedError(
            "the file was written by the 2019 prototype of ONNX training and defines functions in a form that was "
            "never standardised (field 9 of ModelProto)",
            hint=_REBUILD,
        )
    proto.DiscardUnknownFields()
    proto.training_info.extend(converted)


def _prototype_entry(data: Any, graph: GraphProto) -> TrainingInfoProto:
    """An entry of the prototype; its bindings map an output to the initializer that it replaces."""
    info = TrainingInfoProto()
    try:
        info.MergeFromString(data)
    except (DecodeError, TypeError) as error:
        raise UnsupportedError(
            "the file has a field 21, as the 2019 prototype of ONNX training wrote it, but no training in it",
            hint=_REBUILD,
        ) from error
    initializers = {tensor.name for g in (graph, info.algorithm) for tensor in g.initializer}
    for bindings in (info.initialization_binding, info.update_binding):
        if any(entry.value not in initializers for entry in bindings):
            raise UnsupportedError(
                "the file was written by the 2019 prototype of ONNX training, but its bindings name no initializers",
                hint=_REBUILD,
            )
        for entry in bindings:
            entry.key, entry.value = entry.value, entry.key
    return info


def _convert_calls(graph: GraphProto, info: TrainingInfoProto, calls: list[NodeProto], place: str) -> None:
    algorithm = info.algorithm
    for node in calls:
        _check_call(node, graph, place)
    names = Names(_defined(graph) | _defined(algorithm))
    renames = _clashes(graph, algorithm, names)
    if len(calls) == 1 and (aliases := _aliases(calls[0], algorithm)) is not None:
        # The call feeds the inference graph with the algorithm's own inputs: they are the same inputs.
        renames |= aliases
        kept = [value for value in algorithm.input if value.name not in aliases]
        del algorithm.input[:]
        algorithm.input.extend(kept)
        algorithm.node.remove(calls[0])
        _rename(algorithm, renames)
    else:
        _rename(algorithm, renames)
        _expand_calls(graph, algorithm, names)
    for entry in info.update_binding:
        entry.value = renames.get(entry.value, entry.value)


def _check_call(node: NodeProto, graph: GraphProto, place: str) -> None:
    inputs, outputs = _strings(node, "input_names"), _strings(node, "output_names")
    known_inputs = {value.name for value in graph.input}
    known_outputs = {value.name for value in graph.output}
    required = known_inputs - {tensor.name for tensor in graph.initializer}
    problems = []
    if len(inputs) != len(node.input) or len(outputs) != len(node.output):
        problems.append("its names and its values differ in number")
    problems += [f"`{name}` is no input of the inference graph" for name in inputs if name not in known_inputs]
    problems += [f"`{name}` is no output of the inference graph" for name in outputs if name not in known_outputs]
    problems += [f"it gives no value for `{name}`" for name in sorted(required - set(inputs))]
    if problems:
        raise InvalidModelError(f"the GraphCall in {place} (onnx 1.7) is wrong: " + "; ".join(problems), hint=_REBUILD)


def _aliases(call: NodeProto, algorithm: GraphProto) -> dict[str, str] | None:
    """Algorithm name -> inference name, if the call only passes inputs of the algorithm; else None."""
    own_inputs = {value.name for value in algorithm.input}
    formal = _strings(call, "input_names")
    same = all(actual in own_inputs or actual == name for actual, name in zip(call.input, formal, strict=True))
    if not same or len(set(call.input)) != len(call.input):
        return None
    return dict(zip(call.input, formal, strict=True)) | dict(
        zip(call.output, _strings(call, "output_names"), strict=True)
    )


def _expand_calls(graph: GraphProto, algorithm: GraphProto, names: Names) -> None:
    """Replace each call by a copy of the inference nodes; weights are shared by name."""
    nodes: list[NodeProto] = []
    for node in algorithm.node:
        if node.op_type != "GraphCall":
            nodes.append(node)
            continue
        bound = dict(zip(_strings(node, "input_names"), node.input, strict=True))
        results = dict(zip(_strings(node, "output_names"), node.output, strict=True))
        made = {name for inner in graph.node for name in inner.output if name}
        renames = {name: results.get(name) or names.fresh(name) for name in made} | bound
        copy = GraphProto(node=graph.node)
        _rename(copy, renames)
        nodes.extend(copy.node)
    nodes = [NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del algorithm.node[:]
    algorithm.node.extend(nodes)


def _clashes(graph: GraphProto, algorithm: GraphProto, names: Names) -> dict[str, str]:
    """Fresh names for what the algorithm defines under a name of the inference graph, legal before they were joined."""
    taken = _defined(graph)
    return {name: names.fresh(name) for name in sorted(_defined(algorithm) & taken)}


def _defined(graph: GraphProto) -> set[str]:
    names = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    return names | {name for node in graph.node for name in node.output if name}


def _rename(graph: GraphProto, renames: dict[str, str]) -> None:
    def new(name: str) -> str:
        return renames.get(name, name)

    for values in (graph.input, graph.output, graph.value_info):
        for value in values:
            value.name = new(value.name)
    for tensor in graph.initializer:
        tensor.name = new(tensor.name)
    for node in graph.node:
        _rename_node(node, new)
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                shadowed = _defined(attribute.g)
                _rename(attribute.g, {old: n for old, n in renames.items() if old not in shadowed})


def _rename_node(node: NodeProto, new: Callable[[str], str]) -> None:
    node.input[:] = [new(name) for name in node.input]
    node.output[:] = [new(name) for name in node.output]
    if node.op_type == "Gradient":
        for attribute in node.attribute:
            attribute.strings[:] = [new(name.decode()).encode() for name in attribute.strings]
            if attribute.name == "y":
                attribute.s = new(attribute.s.decode()).encode()


def _strings(node: NodeProto, name: str) -> list[str]:
    return [text.decode() for attribute in node.attribute if attribute.name == name for text in attribute.strings]
