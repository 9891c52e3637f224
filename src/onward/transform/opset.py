"""Convert a model to another version of the standard operator set, training included."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, ValueInfoProto, defs

from onward.arguments import Count, checked
from onward.build import Names
from onward.errors import UnsupportedError
from onward.model import Model, Source, load
from onward.model.checks import check_expansion
from onward.model.core import all_names
from onward.model.protos import all_nodes, captured_names, names_within, replace_entries, with_nested
from onward.model.serde import from_proto, stamp, to_proto, with_data, without_data
from onward.standard import COMMON_OPSET, IR_VERSION, STANDARD
from onward.transform.graph_opset import convert_graph
from onward.transform.types import value_types

_INITIALIZERS_APART = 4
"""From this IR version on an initializer need not be an input as well, which the converter relies on."""


@checked()
def convert_opset(model: Source, version: Count) -> Model:
    """The same model in operator set `version`: inference graph, algorithms, initializations and functions.

        newer = onward.transform.convert_opset("training.onnx", 22)

    The conversion itself is `onnx.version_converter`'s, which knows nothing of training and functions, so each graph is
    handed to it on its own, without the weights.

    - `model`: any model
    - `version`: the operator set
    """
    model = load(model)
    if model.opset == version and _is_of_one_opset(model):
        return model
    check_expansion(model)
    with without_data(model) as tensors:
        proto = to_proto(model)
    names = Names(name for step in model.steps for name in all_names(step.algorithm))
    names.take(all_names(model.graph))
    opsets = list(proto.opset_import)
    types = value_types(proto) if proto.training_info else {}
    convert_functions(proto, version)
    if any(opset.domain in STANDARD and opset.version != version for opset in opsets):
        convert_graph(proto.graph, opsets, version, names)
        for info in proto.training_info:
            read = [types.get(name) or ValueInfoProto(name=name) for name in captured_names(info.algorithm)]
            convert_graph(info.algorithm, opsets, version, names, read)
            if info.HasField("initialization"):
                convert_graph(info.initialization, opsets, version, names)
    for opset in proto.opset_import:
        if opset.domain in STANDARD:
            opset.version = version
    if not any(opset.domain in STANDARD for opset in opsets):
        proto.opset_import.add(domain="", version=version)
    proto.ir_version = max(proto.ir_version, _INITIALIZERS_APART)
    converted = with_data(from_proto(proto), tensors)
    converted.path = model.path
    return stamp(converted)


def of_one_opset(model: Model, oldest: int = 1) -> Model:
    """The model in one version of each operator set, functions included; in a common one if it is older than `oldest`.

    Functions may import other versions than the model that they are in. Nothing is converted to an older one.
    """
    versions = [
        f.opset_imports[domain] for f in model.functions.values() for domain in STANDARD if domain in f.opset_imports
    ]
    newest = max(model.opset, *versions, 1)
    return convert_opset(model, max(newest, COMMON_OPSET) if newest < oldest else newest)


def _is_of_one_opset(model: Model) -> bool:
    return is_of_one_opset(model.ir.opset_imports, (f.opset_imports for f in model.functions.values()))


# ---- functions -------------------------------------------------------------------------------------------------------


# Convert the functions of a model, each of which has operator sets of its own, to the same version.
#
# A function has no types, and attributes that only its calls know. Where what it means in another version depends on
# them, each kind of call gets a function of its own.

_AXES_AS_NUMPY = 13
"""Before it, what operators mean depends on the shapes of their inputs."""
_OTHER_MEANING = {"GridSample", "GroupNormalization"}
"""Operators whose attributes stay, and mean something else."""

Key = tuple[str, str, str]
Types = Mapping[str, ValueInfoProto]


def convert_functions(proto: ModelProto, version: int) -> None:
    """Bring all functions to operator set `version`, in place."""
    # Have functions import the model's versions of domains beside the standard's, if they mean the same there.
    shared = {opset.domain: opset.version for opset in proto.opset_import}
    defined = {(function.domain, function.name) for function in proto.functions}
    for function in proto.functions:
        for opset in function.opset_import:
            opset.domain = "" if opset.domain in STANDARD else opset.domain  # ONNX Runtime knows it as that
            if opset.domain in STANDARD or shared.setdefault(opset.domain, opset.version) == opset.version:
                continue
            nodes = all_nodes(function.node)
            for operator in {node.op_type for node in nodes if node.domain == opset.domain}:
                wanted = shared[opset.domain]
                if (opset.domain, operator) not in defined and not is_same(
                    operator, opset.domain, opset.version, wanted
                ):
                    raise UnsupportedError(
                        f"the function `{function.domain}.{function.name}` has `{opset.domain}.{operator}` of version "
                        f"{opset.version} of its domain, and others of the model have version {wanted}",
                        hint="write all with the same version: nothing converts operators of that domain",
                    )
            opset.version = shared[opset.domain]
    made = _ForCalls(proto.functions, version)
    if not made.needed:
        return
    graphs = {"": (proto.graph, value_types(proto))}
    for i, info in enumerate(proto.training_info):
        start = ModelProto(graph=info.initialization, opset_import=proto.opset_import, functions=proto.functions)
        graphs[f"{i}"] = info.algorithm, value_types(proto, info.algorithm)
        graphs[f"{i}/start"] = info.initialization, value_types(start)
    for graph, types in graphs.values():
        made.redirect(graph, types)
    kept = [function for function in proto.functions if _key(function) not in made.needed]
    replace_entries(proto.functions, [*kept, *made.functions.values()])


def is_of_one_opset(model_versions: Mapping[str, int], function_versions: Iterable[Mapping[str, int]]) -> bool:
    """Whether functions use the operator sets of their model, and the short name of the standard's."""
    shared = {"" if domain in STANDARD else domain: version for domain, version in model_versions.items()}
    imports = (pair for versions in function_versions for pair in versions.items())
    return all(domain != "ai.onnx" and shared.setdefault(domain, version) == version for domain, version in imports)


def convert_function(function: FunctionProto, version: int) -> bool:
    """Convert a function in place; false, and nothing done, where that depends on the call."""
    if function_version(function) in (None, version):
        return True
    graph = GraphProto(name=function.name, node=function.node)
    graph.input.extend(ValueInfoProto(name=name) for name in function.input)
    graph.output.extend(ValueInfoProto(name=name) for name in function.output)
    try:
        convert_graph(graph, function.opset_import, version, Names(names_within(graph)))
    except UnsupportedError:
        return False
    if min(version, function_version(function) or 1) < _AXES_AS_NUMPY or not _keeps_references(function.node, graph):
        return False
    _rewrite(function, graph, version)
    return True


def function_version(function: FunctionProto) -> int | None:
    return next((opset.version for opset in function.opset_import if opset.domain in STANDARD), None)


def _rewrite(function: FunctionProto, graph: GraphProto, version: int) -> None:
    constants = [onnx.helper.make_node("Constant", [], [tensor.name], value=tensor) for tensor in graph.initializer]
    replace_entries(function.node, [*constants, *graph.node])
    for opset in function.opset_import:
        if opset.domain in STANDARD:
            opset.version = version


def _keeps_references(nodes: Iterable[NodeProto], converted: GraphProto) -> bool:
    """Whether all that refers to attributes of the function does so as before."""
    new = {tuple(node.output): node for node in converted.node}
    outer, *nested = with_nested(GraphProto(node=nodes))
    return not any(map(_refers, (node for graph in nested for node in graph.node))) and all(
        node.op_type not in _OTHER_MEANING and _is_alike(node, new.get(tuple(node.output), NodeProto()))
        for node in outer.node
        if _refers(node)
    )


def _is_alike(node: NodeProto, other: NodeProto) -> bool:
    described = ((each.op_type, *each.input, *sorted(a.name for a in each.attribute)) for each in (node, other))
    return len(set(described)) == 1


def _refers(node: NodeProto) -> bool:
    return any(attribute.ref_attr_name for attribute in node.attribute)


def _key(function: FunctionProto) -> Key:
    return function.domain, function.name, function.overload


class _ForCalls:
    """Functions made for kinds of calls."""

    def __init__(self, functions: Iterable[FunctionProto], version: int):
        self._known = {_key(function): function for function in functions}
        self._version = version
        self._names = Names(name for _, name, _ in self._known)
        self.needed = {key for key, function in self._known.items() if not convert_function(function, version)}
        """Those that calls need functions of their own for: they cannot be converted, or call such."""
        while more := {key for key, function in self._known.items() if self._calls(function.node)} - self.needed:
            self.needed |= more
        self.functions: dict[tuple[object, ...], FunctionProto] = {}

    def _calls(self, nodes: Iterable[NodeProto]) -> list[NodeProto]:
        graph = GraphProto(node=nodes)
        return [node for node in all_nodes(graph.node) if self._target(node) in self.needed]

    @staticmethod
    def _target(node: NodeProto) -> Key:
        return node.domain, node.op_type, node.overload

    def redirect(self, graph: GraphProto, types: Types) -> None:
        """Let the calls in a graph call the functions that are made for them."""
        for node in all_nodes(graph.node):
            if self._target(node) in self.needed:
                node.op_type, node.overload = self._made(node, types).name, ""
                del node.attribute[:]

    def _made(self, call: NodeProto, types: Types) -> FunctionProto:
        given = [
            types[name].type.SerializeToString(deterministic=True) if name in types else name for name in call.input
        ]
        stated = sorted(attribute.SerializeToString(deterministic=True) for attribute in call.attribute)
        kind = (self._target(call), *given, *stated)
        if kind not in self.functions:
            function = self._known[self._target(call)]
            graph = _body(function, call, types)
            shell = ModelProto(ir_version=IR_VERSION, graph=graph, opset_import=function.opset_import)
            shell.functions.extend(self._known.values())
            self.redirect(graph, value_types(shell))
            if function_version(function) not in (None, self._version):
                try:
                    convert_graph(graph, function.opset_import, self._version, Names(names_within(graph)))
                except UnsupportedError as error:
                    where = f"in the function `{function.domain}.{function.name}`"
                    raise UnsupportedError(f"{error.message}\n{where}", hint=error.hint) from error
            made = FunctionProto()
            made.CopyFrom(function)
            made.name, made.overload = self._names.fresh(f"{function.name}_{self._version}"), ""
            del made.attribute[:], made.attribute_proto[:], made.value_info[:]
            _rewrite(made, graph, self._version)
            self.functions[kind] = made
        return self.functions[kind]


def _body(function: FunctionProto, call: NodeProto, types: Types) -> GraphProto:
    """What a call computes, as a graph: references are what the call says, and what it leaves out is left out."""
    graph = GraphProto(name=function.name, node=function.node)
    graph.output.extend(ValueInfoProto(name=name) for name in function.output)
    given = {formal: name for formal, name in zip(function.input, call.input, strict=False) if name}
    for formal, name in given.items():
        graph.input.add(name=formal, type=types[name].type if name in types else None)
    missing = set(function.input) - given.keys()
    settings = {a.name: a for a in (*function.attribute_proto, *call.attribute)}
    for node in all_nodes(graph.node):
        node.input[:] = ["" if name in missing else name for name in node.input]
        stated = list(node.attribute)
        del node.attribute[:]
        for attribute in stated:
            if not attribute.ref_attr_name:
                node.attribute.append(attribute)
            elif attribute.ref_attr_name in settings:
                resolved = node.attribute.add()
                resolved.CopyFrom(settings[attribute.ref_attr_name])
                resolved.name = attribute.name
    return graph


# ---- other domains ---------------------------------------------------------------------------------------------------


def is_same(operator: str, domain: str, *versions: int) -> bool:
    """Whether an operator is the same in all these versions of its domain."""
    if not (operator.isascii() and domain.isascii() and all(0 < version < 2**31 for version in versions)):
        return False  # nothing that the standard could be asked about
    try:
        return len({defs.get_schema(operator, version, domain).since_version for version in versions}) == 1
    except defs.SchemaError:
        return False
