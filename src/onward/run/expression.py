"""Expressing operators that a table lacks by those that it has."""

from __future__ import annotations

from collections.abc import Container, Mapping

import onnx_ir as ir

from onward.differentiate.expand import replace_node
from onward.errors import UnsupportedError
from onward.lowering.expand import LOWERINGS, expand
from onward.model import TRAINING_DOMAIN, Model
from onward.model.core import values
from onward.rules import Rewrite
from onward.rules.registry import lookup
from onward.run.calls import has_other_meaning, qualified
from onward.transform.inline import has_body, inline_operators
from onward.transform.types import fill_in_types

_ALWAYS = {"Constant", f"{TRAINING_DOMAIN}.Gradient"}
"""What the interpreter itself does."""


def expressed(model: Model, operators: Container[str], cannot: Mapping[str, str], engine: str) -> Model:
    """The model in operators of the table: others are replaced by their function bodies or by rewrites.

    What cannot be expressed is named all at once.
    """
    while unknown := _unknown(model, operators):
        for replaced in (_by_lowerings, _by_bodies, _by_rewrites):
            if (result := replaced(model, unknown)) is not None:
                model = result
                break
        else:
            raise _refusal(unknown, cannot, engine)
    return model


def _unknown(model: Model, operators: Container[str]) -> list[ir.Node]:
    def is_known(node: ir.Node) -> bool:
        name = qualified(node)
        return name in _ALWAYS or (name in operators and not has_other_meaning(node, model.opset))

    return [node for node in model.graph.all_nodes() if not is_known(node)]


def _by_lowerings(model: Model, unknown: list[ir.Node]) -> Model | None:
    found = {key: LOWERINGS[key] for node in unknown if (key := (node.domain, node.op_type)) in LOWERINGS}
    if not found:
        return None
    expand(model.ir, found)
    return model


def _by_bodies(model: Model, unknown: list[ir.Node]) -> Model | None:
    imports = {**model.graph.opset_imports, "": model.opset, "ai.onnx": model.opset}
    bodies = (node for node in unknown if has_body(node.op_type, imports.get(node.domain, 1), node.domain))
    calls = {(node.domain, node.op_type) for node in bodies if not _stops_the_inliner(node)}
    if not calls:
        return None
    result = inline_operators(model, calls)
    left = {(node.domain, node.op_type) for node in result.graph.all_nodes()}
    return None if calls <= left else result  # some bodies are for newer versions of the standard than the model's


def _stops_the_inliner(node: ir.Node) -> bool:
    """It asks for the types of inputs that are left out; a rewrite does not."""
    return None in node.inputs and isinstance(lookup(node), Rewrite)


def _by_rewrites(model: Model, unknown: list[ir.Node]) -> Model | None:
    found = {node: rule for node in unknown if isinstance(rule := lookup(node), Rewrite)}
    if not found:
        return None
    fill_in_types(model, values(model.graph))
    names = model.names()
    replaced = [replace_node(model, node, rule, names) for node, rule in found.items()]
    return model if any(replaced) else None


_NO_TENSORS = {
    "ai.onnx.ml.ZipMap": "a list of maps is no tensor; cut it off, such as by `onward extract MODEL --to probabilities`"
}


def _refusal(unknown: list[ir.Node], cannot: Mapping[str, str], engine: str) -> UnsupportedError:
    names = dict.fromkeys(map(qualified, unknown))
    reasons = {**_NO_TENSORS, **cannot}
    lines = [f"- `{name}`: {reasons.get(name, 'there is no such operator in the table')}" for name in names]
    return UnsupportedError(
        f"the engine `{engine}` lacks operators of this model:\n" + "\n".join(lines),
        hint="`onward engines` says what each engine covers",
    )
