"""Conversion of a model, with its training, to another version of the standard operator set."""

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
"""First IR version in which an initializer need not be an input, as the converter assumes."""


@checked()
def convert_opset(model: Source, version: Count) -> Model:
    """Return the model in operator set `version`: inference graph, algorithms, initializations, functions.

        newer = onward.transform.convert_opset("training.onnx", 22)

    `onnx.version_converter` converts each graph. It knows neither training nor functions, and gets
    no weights.

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
    """Return the model in one version of each operator set, in a common one if it is older than `oldest`.

    Functions may import other versions than their model. Nothing is converted to an older one.
    """
    versions = [
        f.opset_imports[domain] for f in model.functions.values() for domain in STANDARD if domain in f.opset_imports
    ]
    newest = max(model.opset, *versions, 1)
    return convert_opset(model, max(newest, COMMON_OPSET) if newest < oldest else newest)


def _is_of_one_opset(model: Model) -> bool:
    """True if functions use the operator sets of the model, and its standard domain the short name."""
    shared = {"" if domain in STANDARD else domain: version for domain, version in model.ir.opset_imports.items()}
    imports = (pair for function in model.functions.values() for pair in function.opset_imports.items())
    return all(domain != "ai.onnx" and shared.setdefault(domain, version) == version for domain, version in imports)


# ---- functions -------------------------------------------------------------------------------------------------------


# Conversion of the functions of a model, which have their own operator sets, to the same version.
#
# A function has no types, and only its calls have its attributes. If its conversion depends on them, each kind of call
# gets its own function.

_AXES_AS_NUMPY = 13
"""Older operators depend on the shapes of their inputs."""
_OTHER_MEANING = {"GridSample", "GroupNormalization"}
"""Operators whose attributes keep their names and change their meaning."""

Key = tuple[str, str, str]
Types = Mapping[str, ValueInfoProto]


def convert_functions(proto: ModelProto, version: int) -> None:
    """Bring all functions to operator set `version`, in place."""
    # Let functions import the model's versions of other domains, if their operators are the same.
    shared = {opset.domain: opset.version for opset in proto.opset_import}
    defined = {(function.domain, function.name) for function in proto.functions}
    for function in proto.functions:
        for opset in function.opset_import:
            opset.domain = "" if opset.domain in STANDARD else opset.domain  # ONNX Runtime expects the short name
            if opset.domain in STANDARD or shared.setdefault(opset.domain, opset.version) == opset.version:
                continue
            nodes = all_nodes(function.node)
            for operator in {node.op_type for node in nodes if node.domain == opset.domain}:
                expected = shared[opset.domain]
                if (opset.domain, operator) not in defined and not is_same(
                    operator, opset.domain, opset.version, expected
                ):
                    raise UnsupportedError(
                        f"`{function.domain}.{function.name}` imports version {opset.version} of `{opset.domain}` for "
                        f"`{operator}`, the model version {expected}",
                        hint=f"import the same version of `{opset.domain}` everywhere: nothing converts its operators",
                    )
            opset.version = shared[opset.domain]
    for_calls = _FunctionsOfCalls(proto.functions, version)
    if not for_calls.needed:
        return
    graphs = {"": (proto.graph, value_types(proto))}
    for i, info in enumerate(proto.training_info):
        start = ModelProto(graph=info.initialization, opset_import=proto.opset_import, functions=proto.functions)
        graphs[f"{i}"] = info.algorithm, value_types(proto, info.algorithm)
        graphs[f"{i}/start"] = info.initialization, value_types(start)
    for graph, types in graphs.values():
        for_calls.redirect(graph, types)
    others = [function for function in proto.functions if _key(function) not in for_calls.needed]
    replace_entries(proto.functions, [*others, *for_calls.functions.values()])


def convert_function(function: FunctionProto, version: int) -> bool:
    """Convert a function in place; return False, without a change, if that depends on the call."""
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
    """True if all references to attributes of the function are unchanged."""
    new = {tuple(node.output): node for node in converted.node}
    outer, *nested = with_nested(GraphProto(node=nodes))
    return not any(map(_refers, (node for graph in nested for node in graph.node))) and all(
        node.op_type not in _OTHER_MEANING and _is_alike(node, new.get(tuple(node.output), NodeProto()))
        for node in outer.node
        if _refers(node)
    )


def _is_alike(node: NodeProto, other: NodeProto) -> bool:
    described = ((entry.op_type, *entry.input, *sorted(a.name for a in entry.attribute)) for entry in (node, other))
    return len(set(described)) == 1


def _refers(node: NodeProto) -> bool:
    return any(attribute.ref_attr_name for attribute in node.attribute)


def _key(function: FunctionProto) -> Key:
    return function.domain, function.name, function.overload


class _FunctionsOfCalls:
    """Functions made for kinds of calls."""

    def __init__(self, functions: Iterable[FunctionProto], version: int):
        self._known = {_key(function): function for function in functions}
        self._version = version
        self._names = Names(name for _, name, _ in self._known)
        self.needed = {key for key, function in self._known.items() if not convert_function(function, version)}
        """Functions that need a version per kind of call: they cannot be converted, or call such ones."""
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
        """Let the calls in a graph call the functions made for them."""
        for node in all_nodes(graph.node):
            if self._target(node) in self.needed:
                node.op_type, node.overload = self._converted(node, types).name, ""
                del node.attribute[:]

    def _converted(self, call: NodeProto, types: Types) -> FunctionProto:
        input_types = [
            types[name].type.SerializeToString(deterministic=True) if name in types else name for name in call.input
        ]
        attributes = sorted(attribute.SerializeToString(deterministic=True) for attribute in call.attribute)
        key = (self._target(call), *input_types, *attributes)
        if key not in self.functions:
            function = self._known[self._target(call)]
            graph = _body(function, call, types)
            shell = ModelProto(ir_version=IR_VERSION, graph=graph, opset_import=function.opset_import)
            shell.functions.extend(self._known.values())
            self.redirect(graph, value_types(shell))
            if function_version(function) not in (None, self._version):
                try:
                    convert_graph(graph, function.opset_import, self._version, Names(names_within(graph)))
                except UnsupportedError as error:
                    context = f"in the function `{function.domain}.{function.name}`"
                    raise UnsupportedError(f"{error.message}\n{context}", hint=error.hint) from error
            converted = FunctionProto()
            converted.CopyFrom(function)
            converted.name, converted.overload = self._names.fresh(f"{function.name}_{self._version}"), ""
            del converted.attribute[:], converted.attribute_proto[:], converted.value_info[:]
            _rewrite(converted, graph, self._version)
            self.functions[key] = converted
        return self.functions[key]


def _body(function: FunctionProto, call: NodeProto, types: Types) -> GraphProto:
    """Return a call as a graph, with its attributes and without its omitted inputs."""
    graph = GraphProto(name=function.name, node=function.node)
    graph.output.extend(ValueInfoProto(name=name) for name in function.output)
    inputs = {formal: name for formal, name in zip(function.input, call.input, strict=False) if name}
    for formal, name in inputs.items():
        graph.input.add(name=formal, type=types[name].type if name in types else None)
    missing = set(function.input) - inputs.keys()
    settings = {a.name: a for a in (*function.attribute_proto, *call.attribute)}
    for node in all_nodes(graph.node):
        node.input[:] = ["" if name in missing else name for name in node.input]
        attributes = list(node.attribute)
        del node.attribute[:]
        for attribute in attributes:
            if not attribute.ref_attr_name:
                node.attribute.append(attribute)
            elif attribute.ref_attr_name in settings:
                resolved = node.attribute.add()
                resolved.CopyFrom(settings[attribute.ref_attr_name])
                resolved.name = attribute.name
    return graph


# ---- other domains ---------------------------------------------------------------------------------------------------


def is_same(operator: str, domain: str, *versions: int) -> bool:
    """True if an operator is the same in all these versions of its domain."""
    if not (operator.isascii() and domain.isascii() and all(0 < version < 2**31 for version in versions)):
        return False  # not a possible name or version of the standard
    try:
        return len({defs.get_schema(operator, version, domain).since_version for version in versions}) == 1
    except defs.SchemaError:
        return False
