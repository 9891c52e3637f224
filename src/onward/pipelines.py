"""Pipelines: models that convert raw data to model inputs. Make, run, join and detach them.

Images and text become arrays by standard operators. `onward.prepare` takes a pipeline as
`preprocess`:

    pictures = onward.pipelines.make("resize:8 scale normalize:0.5,std=0.25", "scans.onnx")
    arrays = onward.pipelines.run(pictures, "scans.npz")
    whole = onward.pipelines.join(pictures, "scans.onnx")
    first, rest = onward.pipelines.detach(whole)
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from onward import engines
from onward.arguments import checked
from onward.build import Builder
from onward.errors import DataError, RecipeError, UnsupportedError
from onward.model import Model, Source, load
from onward.model.core import string, strings, values
from onward.model.serde import stamp
from onward.model.walk import ancestors
from onward.options import Data, Preprocess
from onward.recipe.preprocessing.join import RAW, with_preprocessing
from onward.recipe.preprocessing.operations import ImageBatch, SampleShape
from onward.recipe.preprocessing.pipeline import FILE, Pipeline, Raw, by_input, fitted, form_of, text_pipeline
from onward.standard import COMMON_OPSET, IR_VERSION
from onward.training.data import Column, Stream, columns_of, match, open_data
from onward.training.data.files import files_in
from onward.training.data.images import SUFFIXES
from onward.training.preparation import is_open, with_vocabulary
from onward.transform.extract import extract
from onward.transform.merge import rename
from onward.transform.training import strip

__all__ = ["detach", "join", "make", "run"]


def __dir__() -> list[str]:
    return __all__


_ROWS = 256  # per batch
_JOINED = "/preprocessed"
_ANY_IMAGE = (None, None, 3)
"""Default shape of an image: any size, channels last, RGB."""


@checked()
def make(
    operations: Preprocess,
    model: Source | None = None,
    *,
    data: Data = None,
    columns: Mapping[str, str | Sequence[str]] | None = None,
) -> Model:
    """Make a pipeline: preprocessing as a separate model.

        onward.pipelines.make("decode | resize:256 | center_crop:224 | scale | normalize:imagenet | channels_first")
        onward.pipelines.make("tokenize:wordpiece,vocabulary=vocab.txt,length=128", "bert.onnx")

    - `operations`: as `preprocess` of `onward.prepare`, and `decode`, for the bytes of image files
    - `model`: the model that takes the result; it sets names, types and shapes
    - `data`, `columns`: text to count the words of a vocabulary: `tokenize:words,vocabulary=10000`

    `onward.prepare(model, preprocess=pipeline)` and `onward.pipelines.join` put it before a model.
    """
    target = strip(load(model)) if model is not None else None
    named = by_input(target, operations) if target is not None else {"": operations}
    pipes = {name: Pipeline.of(specs) for name, specs in named.items()}
    if data is not None and any(is_open(pipe) for pipe in pipes.values()):
        opened = open_data(data)
        pipes = {name: with_vocabulary(pipe, opened, columns or {}) for name, pipe in pipes.items()}
    specs = {name: pipe.all_specs for name, pipe in pipes.items()}
    return _model_of(specs if target is not None else specs[""], target)


@checked()
def run(
    pipeline: Source, data: Data, *, columns: Mapping[str, str | Sequence[str]] | None = None
) -> dict[str, np.ndarray]:
    """Run a pipeline on data. Return arrays by input name.

        arrays = onward.pipelines.run("pipeline.onnx", "texts.csv")

    - `pipeline`: a pipeline of `onward.pipelines.make`
    - `data`: any data of `onward.train`; for a pipeline that decodes, image files or a folder of
      them
    - `columns`: data column for an input (default: matched by name and shape)
    """
    model = load(pipeline)
    takes_files = any(node.op_type == "ImageDecoder" for node in model.graph)
    batches = _files(data, model) if takes_files else _rows(data, model, columns or {})
    # ONNX Runtime has no decoder of images; the engine `numpy` has that of `onnx` itself, which is Pillow.
    compute = engines.function(model, engine="numpy" if takes_files else "onnxruntime")
    results = [compute(batch) for batch in batches]
    return {name: np.concatenate([result[name] for result in results]) for name in results[0]}


@checked()
def join(pipeline: Source, model: Source) -> Model:
    """Return a copy of a model, training included, that takes raw data.

    - `pipeline`: a pipeline of `onward.pipelines.make`
    - `model`: a model that takes the pipeline's outputs
    """
    joined = with_preprocessing(load(model), load(pipeline))
    _hold_inputs(joined)
    return joined


@checked()
def detach(model: Source) -> tuple[Model, Model]:
    """Return the preprocessing of a model and the model without it, training included.

    - `model`: a model that `onward.prepare` or `onward.train` made with `preprocess`
    """
    model = load(model)
    ends = {v.name: v for v in values(model.graph) if v.name and v.name.endswith(_JOINED) and v.producer() is not None}
    if not ends:
        raise RecipeError(
            "the model has no preprocessing to detach",
            hint="prepare it with some: `preprocess=...` (`--preprocess`)",
        )
    _, read = ancestors(ends.values())
    raw = [value.name or "" for value in model.inputs if value in read]
    names = {end: end.removesuffix(_JOINED) for end in ends}
    first = extract(strip(model), raw, list(ends))
    first = rename(first, {name: f"{name}{RAW}" for name in raw if name in names.values()})
    others = [value.name or "" for value in model.inputs if value not in read]
    rest = extract(model, [*ends, *others], [value.name or "" for value in model.outputs])
    if augmented := [v.name for step in rest.steps for v in step.algorithm.inputs if v.name in raw]:
        raise RecipeError(
            f"cannot detach preprocessing: augmentation changes `{augmented[0]}` in the middle of it",
            hint="strip the training first (`onward strip`), or prepare it without `augment`",
        )
    rest = rename(rest, names)
    _hold_inputs(rest)
    _forget(rest)
    return stamp(rename(first, names)), rest


def _model_of(operations: Any, target: Model | None = None) -> Model:
    """Return a model from raw data to the inputs of `target`, a model without training."""
    if target is None:
        pipe = Pipeline.of(operations)
        return stamp(text_pipeline(pipe) if pipe.is_text else _image_pipeline(pipe, None))
    named = by_input(target, operations)
    if len(named) == 1:
        (name, specs), *_ = named.items()
        pipe = Pipeline.of(specs)
        if not pipe.is_text and pipe.specs and pipe.specs[0].name == FILE:
            return stamp(_image_pipeline(pipe, next(value for value in target.inputs if value.name == name)))
    return detach(with_preprocessing(target, operations))[0]


def _image_pipeline(pipe: Pipeline, target: ir.Value | None) -> Model:
    """Return a pipeline from the bytes of a file, or from images of any size."""
    is_file = bool(pipe.specs) and pipe.specs[0].name == FILE
    raw_type = Raw(ir.DataType.UINT8, _ANY_IMAGE) if pipe.raw is None else pipe.raw
    dims = raw_type.dims or _ANY_IMAGE
    shape = ["bytes"] if is_file else ["N", *(dim or f"image_{axis}" for axis, dim in enumerate(dims, start=1))]
    raw = ir.Value(name="file" if is_file else f"image{RAW}", type=ir.TensorType(raw_type.dtype), shape=ir.Shape(shape))
    graph = ir.Graph([raw], [], nodes=[], name="pipeline", opset_imports={"": COMMON_OPSET})
    op = Builder(graph, opset=COMMON_OPSET)
    op.names.fresh(raw.name or "")
    start = ImageBatch(op(raw), SampleShape((None,), 0)) if is_file else pipe.start(op, raw, dims, SampleShape.of(dims))
    image, _ = pipe.through(start)
    result = fitted(image, target, str(pipe)) if target is not None else image.x
    result = (op.Identity(result) if result.value is raw else result).named((target and target.name) or "image")
    result.value.shape = ir.Shape([1 if is_file else "N", *image.form.dims])
    graph.outputs.append(result.value)
    return Model(ir.Model(graph, ir_version=IR_VERSION))


def _hold_inputs(model: Model) -> None:
    """Set the `zs` of each Gradient to the new inputs that its `y` depends on."""
    for step in model.steps:
        values_by_name = {value.name: value for graph in (model.graph, step.algorithm) for value in values(graph)}
        inputs = [*model.inputs, *step.algorithm.inputs]
        for node in step.gradients():
            xs, (_, reached) = strings(node, "xs"), ancestors([values_by_name[string(node, "y")]])
            zs = [value for value in node.inputs[len(xs) :] if value is not None and value.producer() is None]
            zs += [value for value in inputs if value in reached and value not in node.inputs]
            inputs_of_node = [*node.inputs[: len(xs)], *zs]
            node.resize_inputs(len(inputs_of_node))
            for i, value in enumerate(inputs_of_node):
                node.replace_input_with(i, value)
            node.attributes["zs"] = ir.AttrStrings("zs", [value.name or "" for value in zs])


def _forget(model: Model) -> None:
    """Remove preprocessing from the recipe recorded in a training model."""
    for step in model.steps:
        recipe = step.fact("train.recipe")
        if isinstance(recipe, dict) and recipe.pop("preprocess", None) is not None:
            step.metadata["train.recipe"] = json.dumps(recipe)


def _rows(data: Any, model: Model, columns: Mapping[str, str | Sequence[str]]) -> Iterator[dict[str, np.ndarray]]:
    inputs = {value.name or "": value for value in model.inputs}
    source = open_data(data, inputs=inputs)
    if isinstance(source, Stream):
        raise UnsupportedError("cannot run a pipeline on a stream", hint="run it on each batch")
    same = {name: column for name in inputs if (column := name.removesuffix(RAW)) in source.columns}
    bindings = match(source.columns, _without_channels(inputs, source.columns, same), {**same, **columns})
    names = columns_of(bindings)
    for start in range(0, len(source), _ROWS):
        rows = source.take(np.arange(start, min(start + _ROWS, len(source))), names)
        yield {name: _with_channel(binding(rows), inputs[name]) for name, binding in bindings.items()}


def _without_channels(
    inputs: Mapping[str, ir.Value], columns: Mapping[str, Column], names: Mapping[str, str]
) -> dict[str, ir.Value]:
    """Return the inputs; drop the channel axis of grayscale image inputs whose data have none."""
    adapted = dict(inputs)
    for name, value in inputs.items():
        column = columns.get(names.get(name, ""))
        if value.shape is None or len(value.shape) != 4 or column is None or len(column.shape) != 2:
            continue
        if (form := form_of(value)).dims[form.channels] == 1:
            dims = [dim for axis, dim in enumerate(form.dims) if axis != form.channels]
            adapted[name] = ir.Value(name=name, type=value.type, shape=ir.Shape([None, *dims]))
    return adapted


def _with_channel(array: np.ndarray, value: ir.Value) -> np.ndarray:
    missing = value.shape is not None and len(value.shape) == array.ndim + 1
    return np.expand_dims(array, form_of(value).channels + 1) if missing else array


def _files(data: Any, model: Model) -> Iterator[dict[str, np.ndarray]]:
    """Yield the bytes of image files; files of a folder in the order of their names."""
    (name,) = [value.name or "" for value in model.inputs]
    paths = [data] if isinstance(data, str | os.PathLike) else list(data)
    if not paths or not all(isinstance(path, str | os.PathLike) for path in paths):
        raise DataError("a pipeline with `decode` needs image files", hint="pass image files or a folder of them")
    folders = [Path(path) for path in paths]
    files = [file for path in folders for file in (files_in(path) if path.is_dir() else [path])]
    images = [file for file in files if file in folders or file.suffix.lower() in SUFFIXES]
    if not images:
        raise DataError(f"there are no images in {paths[0]}")
    for file in images:
        try:
            yield {name: np.frombuffer(file.read_bytes(), np.uint8)}
        except OSError as error:
            raise DataError(f"cannot read {file}: {error.strerror or error}") from None
