"""Inlining of model-local functions, in the inference graph and in training."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any

import onnx_ir as ir
from onnx import AttributeProto, ModelProto, defs, inliner

from onward.arguments import checked
from onward.build import Names
from onward.errors import InvalidModelError, UnknownNameError, suggest_or_list
from onward.model import Model, Source, load
from onward.model.checks import check_expansion
from onward.model.core import all_names, link_function_gradients, link_gradients, unlink_gradients, values
from onward.model.protos import all_nodes
from onward.model.serde import from_proto, stamp, to_proto, with_data, without_data
from onward.standard import IR_VERSION, STANDARD, schema_domain
from onward.transform.opset import of_one_opset
from onward.transform.training import drop_unused_definitions
from onward.transform.types import value_types


@checked()
def inline(model: Source, names: Iterable[str] = ("*",)) -> Model:
    """Return a copy in which calls of functions are replaced by their bodies.

        plain = onward.transform.inline("training.onnx", ["onward.Adam*"])

    - `model`: any model
    - `names`: patterns of the functions, as `domain.Name` (default: all)
    """
    model, patterns = of_one_opset(load(model)).copy(), list(names)
    functions = [f"{function.domain}.{function.name}" for function in model.functions.values()]
    for pattern in patterns:
        if pattern != "*" and not any(_matches(name, pattern) for name in functions):
            hint = suggest_or_list(pattern.strip("*"), functions)
            raise UnknownNameError(f"`{pattern}` matches no function of the model", hint=hint)
    inline_calls(model, patterns)
    return stamp(model)


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or fnmatchcase(name, pattern)  # a name may contain wildcards


def inline_calls(model: Model, names: Iterable[str] = ("*",), names_in_use: Names | None = None) -> None:
    """Inline functions in place. `names_in_use` are the names of the model, if known."""
    check_expansion(model)
    patterns = list(names)

    def is_selected(function: ir.Function) -> bool:
        return any(_matches(f"{function.domain}.{function.name}", pattern) for pattern in patterns)

    if any(map(is_selected, model.functions.values())):
        _inline(model, is_selected, names_in_use or model.names())
    drop_unused_definitions(model)


def _inline(model: Model, is_selected: Callable[[ir.Function], bool], names_in_use: Names) -> None:
    from onnx_ir.passes.common import InlinePass  # slow to import, and rarely needed

    graphs = [model.graph, *(graph for step in model.steps for graph in (step.algorithm, step.initialization) if graph)]
    functions = [function.clone() for function in model.functions.values()]
    for function in functions:
        link_function_gradients(function)
    for graph in graphs:
        link_gradients(graph, () if graph is model.graph else (model.graph,))
        before = set(values(graph))
        graph.opset_imports.update(model.ir.opset_imports)
        holder = ir.Model(graph, ir_version=model.ir.ir_version or IR_VERSION, functions=[f.clone() for f in functions])
        try:
            InlinePass(criteria=is_selected)(holder)
        except (ir.passes.PassError, ValueError) as error:
            cause = error.__cause__ or error
            raise InvalidModelError(f"the functions cannot be inlined: {cause}") from error
        for value in values(graph):  # unique in their own graph; the combined graph needs them unique in both
            if value not in before and not value.is_graph_output():
                value.name = names_in_use.fresh(value.name or "value")
        names_in_use.take(all_names(graph))  # also names in nested graphs
        unlink_gradients(graph)
    for function in functions:
        if is_selected(function):
            model.functions.pop(function.identifier(), None)


def inline_operators(model: Model, operators: Iterable[tuple[str, str]]) -> Model:
    """Return a copy in which nodes of these operators, as (domain, name), are replaced by their bodies.

    They may be functions of the model or operators that the standard defines as functions.
    """
    check_expansion(model)
    model = of_one_opset(model)
    with without_data(model) as tensors:
        proto = to_proto(model)
    stated = {value.name for value in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info)}
    proto.graph.value_info.extend(info for name, info in value_types(proto).items() if name not in stated)
    operators = list(operators)
    _state_defaults(proto, operators, model.opset)
    expanded = inliner.inline_selected_functions(proto, operators, inline_schema_functions=True)
    result = with_data(from_proto(expanded), tensors)
    result.path = model.path
    return result


def has_body(operator: str, opset: int, domain: str = "") -> bool:
    """True if the standard defines an operator as a function of others."""
    try:
        schema: Any = defs.get_schema(operator, opset, schema_domain(domain))
    except defs.SchemaError:
        return False
    return bool(schema.has_function or schema.has_context_dependent_function)


def _state_defaults(proto: ModelProto, operators: Iterable[tuple[str, str]], opset: int) -> None:
    """Write defaults of attributes into calls, since the inliner ignores them."""
    defaults: dict[tuple[str, str, str], Iterable[AttributeProto]] = {
        (f.domain, f.name, f.overload): f.attribute_proto for f in proto.functions if f.attribute_proto
    }
    for domain, name in operators:
        if domain in STANDARD and has_body(name, opset):
            possible = (attribute.default_value for attribute in defs.get_schema(name, opset).attributes.values())
            defaults[domain, name, ""] = [default for default in possible if default.name]
    for node in all_nodes([*proto.graph.node, *(node for f in proto.functions for node in f.node)]) if defaults else ():
        stated = {attribute.name for attribute in node.attribute}
        missing = (a for a in defaults.get((node.domain, node.op_type, node.overload), ()) if a.name not in stated)
        node.attribute.extend(missing)
