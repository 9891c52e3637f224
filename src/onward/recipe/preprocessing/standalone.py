"""Pipelines that stand alone: models from data as they are to what a model takes, made, and taken out again."""

from __future__ import annotations

import json
from typing import Any

import onnx_ir as ir

from onward.arguments import checked
from onward.build import Builder
from onward.errors import RecipeError
from onward.model import Model, Source, load
from onward.model.core import string, strings, values
from onward.model.serde import stamp
from onward.model.walk import ancestors
from onward.recipe.preprocessing.join import RAW, with_preprocessing
from onward.recipe.preprocessing.picture import Form, Picture
from onward.recipe.preprocessing.pipeline import FILE, Pipeline, Raw, by_input, fitted
from onward.recipe.preprocessing.text_inputs import text_pipeline
from onward.standard import COMMON_OPSET, IR_VERSION
from onward.transform.extract import extract
from onward.transform.names import rename
from onward.transform.training import strip

_JOINED = "/preprocessed"
_ANY_PICTURE = (None, None, 3)
"""What a picture is unless it is said: of any size, red, green and blue last."""


def make_pipeline(operations: Any, target: Model | None = None) -> Model:
    """A model of its own from data as they are to what comes next, which may be a model without training."""
    if target is None:
        pipe = Pipeline.of(operations)
        return stamp(text_pipeline(pipe) if pipe.is_text else _pictures(pipe, None))
    named = by_input(target, operations)
    if len(named) == 1:
        (name, given), *_ = named.items()
        pipe = Pipeline.of(given)
        if not pipe.is_text and pipe.specs and pipe.specs[0].name == FILE:
            return stamp(_pictures(pipe, next(value for value in target.inputs if value.name == name)))
    return detach_pipeline(with_preprocessing(target, operations))[0]


def _pictures(pipe: Pipeline, target: ir.Value | None) -> Model:
    """From the bytes of a file, or from pictures of any size, as far as operations alone say it."""
    is_file = bool(pipe.specs) and pipe.specs[0].name == FILE
    given = Raw(ir.DataType.UINT8, _ANY_PICTURE) if pipe.raw is None else pipe.raw
    dims = given.dims or _ANY_PICTURE
    shape = ["bytes"] if is_file else ["N", *(dim or f"image_{axis}" for axis, dim in enumerate(dims, start=1))]
    raw = ir.Value(name="file" if is_file else f"image{RAW}", type=ir.TensorType(given.dtype), shape=ir.Shape(shape))
    graph = ir.Graph([raw], [], nodes=[], name="pipeline", opset_imports={"": COMMON_OPSET})
    op = Builder(graph, opset=COMMON_OPSET)
    op.names.fresh(raw.name or "")
    start = Picture(op(raw), Form((None,), 0)) if is_file else pipe.start(op, raw, dims, Form.of(dims))
    picture, _ = pipe.through(start)
    made = fitted(picture, target, str(pipe)) if target is not None else picture.x
    made = (op.Identity(made) if made.value is raw else made).named((target and target.name) or "image")
    made.value.shape = ir.Shape([1 if is_file else "N", *picture.form.dims])
    graph.outputs.append(made.value)
    return Model(ir.Model(graph, ir_version=IR_VERSION))


@checked()
def join_pipeline(pipeline: Source, model: Source) -> Model:
    """A copy of a model, its training included, that takes data as they are.

    - `pipeline`: what happens to them, as `onward.pipeline` makes it
    - `model`: a model that takes what comes out of that
    """
    joined = with_preprocessing(load(model), load(pipeline))
    _hold_inputs(joined)
    return joined


@checked()
def detach_pipeline(model: Source) -> tuple[Model, Model]:
    """What happens to data before a model, and the model without it, its training included.

    - `model`: a model with preprocessing: one that `onward.prepare` or `onward.train` made with `preprocess`
    """
    model = load(model)
    ends = {v.name: v for v in values(model.graph) if v.name and v.name.endswith(_JOINED) and v.producer() is not None}
    if not ends:
        raise RecipeError(
            "the model has no preprocessing that could be taken out",
            hint="it has some if it was made with `preprocess` (`--preprocess`)",
        )
    _, read = ancestors(ends.values())
    raw = [value.name or "" for value in model.inputs if value in read]
    names = {end: end.removesuffix(_JOINED) for end in ends}
    first = extract(strip(model), raw, list(ends))
    first = rename(first, {name: f"{name}{RAW}" for name in raw if name in names.values()})
    others = [value.name or "" for value in model.inputs if value not in read]
    rest = extract(model, [*ends, *others], [value.name or "" for value in model.outputs])
    if kept := [v.name for step in rest.steps for v in step.algorithm.inputs if v.name in raw]:
        raise RecipeError(
            f"augmentation changes `{kept[0]}` in the middle of its preprocessing, so that they cannot be taken apart",
            hint="strip the training first (`onward strip`), or prepare it without `augment`",
        )
    rest = rename(rest, names)
    _hold_inputs(rest)
    _forget(rest)
    return stamp(rename(first, names)), rest


def _hold_inputs(model: Model) -> None:
    """Name in the `zs` of each Gradient the inputs that its `y` depends on, now that these are others."""
    for step in model.steps:
        known = {value.name: value for graph in (model.graph, step.algorithm) for value in values(graph)}
        inputs = [*model.inputs, *step.algorithm.inputs]
        for node in step.gradients():
            xs, (_, reached) = strings(node, "xs"), ancestors([known[string(node, "y")]])
            held = [value for value in node.inputs[len(xs) :] if value is not None and value.producer() is None]
            held += [value for value in inputs if value in reached and value not in node.inputs]
            wanted = [*node.inputs[: len(xs)], *held]
            node.resize_inputs(len(wanted))
            for i, value in enumerate(wanted):
                node.replace_input_with(i, value)
            node.attributes["zs"] = ir.AttrStrings("zs", [value.name or "" for value in held])


def _forget(model: Model) -> None:
    """Leave preprocessing out of what a training model says about itself."""
    for step in model.steps:
        recipe = step.fact("train.recipe")
        if isinstance(recipe, dict) and recipe.pop("preprocess", None) is not None:
            step.metadata["train.recipe"] = json.dumps(recipe)


def takes_files(model: Model) -> bool:
    """Whether a pipeline takes the bytes of one image file at a time."""
    return any(node.op_type == "ImageDecoder" for node in model.graph)
