"""A pipeline for text as a model of its own: from strings to what a model takes of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from onward.build import Builder, Expr
from onward.errors import RecipeError
from onward.model import Model
from onward.recipe.preprocessing.pipeline import ROLES, Pipeline
from onward.recipe.preprocessing.text import Tokens, checked_length, tokenize
from onward.recipe.preprocessing.word_pieces import ML, ML_OPSET
from onward.standard import COMMON_OPSET, IR_VERSION

TEXT_INPUT = "text"
"""What the input for text is called."""
_USUAL = {"input_ids": "ids", "attention_mask": "mask"}


def text_pipeline(pipeline: Pipeline, model: Model | None = None, name: str = "input_ids") -> Model:
    """From `text`, strings [N], to the inputs of a model: that of this `name`, and those with a mask or with zeros."""
    inputs = {value.name or "": value for value in model.inputs} if model is not None else {}
    options = dict(pipeline.specs[0].options)
    roles = dict(_USUAL)
    if model is not None:
        roles = {name: "ids", **{other: ROLES[other] for other in inputs if other in ROLES and other != name}}
        options.setdefault("length", _length(inputs[name]))
    raw = _raw(options)
    graph = ir.Graph([raw], [], nodes=[], name="pipeline", opset_imports={"": COMMON_OPSET, ML: ML_OPSET})
    op = Builder(graph, opset=COMMON_OPSET)
    op.names.fresh(TEXT_INPUT)
    tokens = tokenize(op(raw), **options)
    for output, role in roles.items():
        made = _as_input(_part(tokens, role), inputs.get(output)).named(output).value
        made.shape = ir.Shape(["N", options["length"]])
        graph.outputs.append(made)
    return Model(ir.Model(graph, ir_version=IR_VERSION))


def _raw(options: Mapping[str, Any]) -> ir.Value:
    """Strings; where bytes are wanted, these: what they are, no operator tells of a string."""
    if options.get("by") != "bytes":
        return ir.Value(name=TEXT_INPUT, type=ir.TensorType(ir.DataType.STRING), shape=ir.Shape(["N"]))
    shape = ir.Shape(["N", checked_length(options.get("length"))])
    return ir.Value(name=TEXT_INPUT, type=ir.TensorType(ir.DataType.UINT8), shape=shape)


def _part(tokens: Tokens, role: str) -> Expr:
    if role == "zeros":
        return tokens.ids.op.filled_like(tokens.ids.value, 0)
    return tokens.ids.op.Identity(tokens.ids if role == "ids" else tokens.mask)


def _as_input(x: Expr, wanted: ir.Value | None) -> Expr:
    if wanted is None or wanted.dtype in (None, ir.DataType.INT64):
        return x
    cast: Expr = x.op.Cast(x, to=wanted.dtype)
    return cast


def _length(value: ir.Value) -> int | None:
    """The length that an input has, or None."""
    if value.shape is None or len(value.shape) != 2:
        shape = "a shape that is not known" if value.shape is None else f"the shape {value.shape}"
        raise RecipeError(f"the numbers of text are a matrix, and `{value.name}` has {shape}")
    length = value.shape[1]
    return length if isinstance(length, int) else None
