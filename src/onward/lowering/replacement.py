"""Expressing operators that someone lacks by others: by lowerings, rewrites and function bodies."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from onward.differentiate.expand import replace_node
from onward.errors import Error
from onward.lowering.expand import LOWERINGS, expand
from onward.model import Model
from onward.model.core import values
from onward.rules.registry import lookup_body
from onward.transform.inline import has_body, inline_operators
from onward.transform.types import fill_in_types


def replace_unknown(
    model: Model, unknown_in: Callable[[Model], list[ir.Node]], refusal: Callable[[list[ir.Node]], Error]
) -> Model:
    """The model without unknown nodes. What cannot be expressed is named all at once."""
    while unknown := unknown_in(model):
        for replaced in (_by_lowerings, _by_rewrites, _by_functions):
            if (result := replaced(model, unknown)) is not None:
                model = result
                break
        else:
            raise refusal(unknown)
    return model


def _by_lowerings(model: Model, unknown: list[ir.Node]) -> Model | None:
    found = {key: LOWERINGS[key] for node in unknown if (key := (node.domain, node.op_type)) in LOWERINGS}
    if not found:
        return None
    expand(model.ir, found)
    return model


def _by_rewrites(model: Model, unknown: list[ir.Node]) -> Model | None:
    found = {node: body for node in unknown if (body := lookup_body(node)) is not None}
    if not found:
        return None
    fill_in_types(model, values(model.graph))
    names = model.names()
    replaced = [replace_node(model, node, rule, names) for node, rule in found.items()]
    return model if any(replaced) else None


def _by_functions(model: Model, unknown: list[ir.Node]) -> Model | None:
    """As the standard, or the model, defines them."""
    imports = {**model.graph.opset_imports, "": model.opset, "ai.onnx": model.opset}
    bodies = (node for node in unknown if has_body(node.op_type, imports.get(node.domain, 1), node.domain))
    calls = {(node.domain, node.op_type) for node in bodies}
    if not calls:
        return None
    result = inline_operators(model, calls)
    left = {(node.domain, node.op_type) for node in result.graph.all_nodes()}
    return None if calls <= left else result  # some bodies are for newer versions of the standard than the model's
