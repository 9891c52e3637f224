"""Expressing operators that a table lacks by those that it has."""

from __future__ import annotations

from collections.abc import Container, Mapping

import onnx_ir as ir

from onward.engines.calls import has_other_meaning
from onward.errors import UnsupportedError
from onward.lowering.standard_operators import replace_unknown
from onward.model import TRAINING_DOMAIN, Model
from onward.standard import operator_name

_ALWAYS = {"Constant", f"{TRAINING_DOMAIN}.Gradient"}
"""What the interpreter itself does."""


def express(model: Model, operators: Container[str], cannot: Mapping[str, str], engine: str) -> Model:
    """The model in operators of the table: others are replaced by their function bodies or by rewrites."""
    return replace_unknown(
        model, lambda model: _unknown(model, operators), lambda unknown: _refusal(unknown, cannot, engine)
    )


def _unknown(model: Model, operators: Container[str]) -> list[ir.Node]:
    def is_known(node: ir.Node) -> bool:
        name = operator_name(node)
        return name in _ALWAYS or (name in operators and not has_other_meaning(node, model.opset))

    return [node for node in model.graph.all_nodes() if not is_known(node)]


_NO_TENSORS = {
    "ai.onnx.ml.ZipMap": "a list of maps is no tensor; cut it off, such as by `onward extract MODEL --to probabilities`"
}


def _refusal(unknown: list[ir.Node], cannot: Mapping[str, str], engine: str) -> UnsupportedError:
    names = dict.fromkeys(map(operator_name, unknown))
    reasons = {**_NO_TENSORS, **cannot}
    lines = [f"- `{name}`: {reasons.get(name, 'there is no such operator in the table')}" for name in names]
    return UnsupportedError(
        f"the engine `{engine}` lacks operators of this model:\n" + "\n".join(lines),
        hint="`onward engines` says what each engine covers",
    )
