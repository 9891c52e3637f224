"""Pipelines for data that are there: made of them, and run on them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from onward import engines
from onward.arguments import checked
from onward.errors import DataError, UnsupportedError
from onward.model import Model, Source, load
from onward.recipe.preprocessing.join import RAW
from onward.recipe.preprocessing.pipeline import Pipeline, by_input, form_of
from onward.recipe.preprocessing.standalone import make_pipeline, takes_files
from onward.training.data import Column, Stream, match, open_data
from onward.training.data.files import files_in
from onward.training.data.images import SUFFIXES
from onward.training.vocabularies import is_open, with_vocabulary
from onward.transform.training import strip

_ROWS = 256  # that are computed together


@checked()
def pipeline(
    operations: Any,
    model: Source | None = None,
    *,
    data: Any = None,
    columns: Mapping[str, str | Sequence[str]] | None = None,
) -> Model:
    """What happens to data before a model, as a model of its own.

        onward.pipeline("decode | resize:256 | center_crop:224 | scale | normalize:imagenet | channels_first")
        onward.pipeline("tokenize:wordpiece,vocabulary=vocab.txt,length=128", "bert.onnx")

    - `operations`: as in `preprocess` of `onward.prepare`; and `decode`, for the bytes of image files
    - `model`: what it is for, which says names, types and shapes
    - `data`, `columns`: texts whose most frequent words are the vocabulary: `tokenize:words,vocabulary=10000`

    `onward.prepare(model, preprocess=pipeline)` and `onward.join_pipeline` put it before a model.
    """
    target = strip(load(model)) if model is not None else None
    given = by_input(target, operations) if target is not None else {"": operations}
    pipes = {name: Pipeline.of(one) for name, one in given.items()}
    if data is not None and any(is_open(pipe) for pipe in pipes.values()):
        opened = open_data(data)
        pipes = {name: with_vocabulary(pipe, opened, columns or {}) for name, pipe in pipes.items()}
    specs = {name: pipe.all_specs for name, pipe in pipes.items()}
    return make_pipeline(specs if target is not None else specs[""], target)


@checked()
def run_pipeline(
    pipeline: Source, data: Any, *, columns: Mapping[str, str | Sequence[str]] | None = None
) -> dict[str, np.ndarray]:
    """What a pipeline makes of data: arrays by name, as a model takes them.

        arrays = onward.run_pipeline("pipeline.onnx", "texts.csv")

    - `pipeline`: as `onward.pipeline` makes it
    - `data`: whatever `onward.train` takes; image files, or a folder of them, for one that decodes
    - `columns`: which column an input takes, where names and shapes do not say it
    """
    model = load(pipeline)
    batches = _files(data, model) if takes_files(model) else _rows(data, model, columns or {})
    # ONNX Runtime has no decoder of images; the engine `numpy` has that of `onnx` itself, which is Pillow.
    compute = engines.function(model, engine="numpy" if takes_files(model) else "onnxruntime")
    made = [compute(batch) for batch in batches]
    return {name: np.concatenate([part[name] for part in made]) for name in made[0]}


def _rows(data: Any, model: Model, columns: Mapping[str, str | Sequence[str]]) -> Iterator[dict[str, np.ndarray]]:
    inputs = {value.name or "": value for value in model.inputs}
    source = open_data(data, inputs=inputs)
    if isinstance(source, Stream):
        raise UnsupportedError("a pipeline is not run on a stream", hint="call it with each batch")
    same = {name: column for name in inputs if (column := name.removesuffix(RAW)) in source.columns}
    way = match(source.columns, _without_channels(inputs, source.columns, same), {**same, **columns})
    names = list(dict.fromkeys(column for binding in way.values() for column in binding.columns))
    for start in range(0, len(source), _ROWS):
        rows = source.take(np.arange(start, min(start + _ROWS, len(source))), names)
        yield {name: _with_channel(binding(rows), inputs[name]) for name, binding in way.items()}


def _without_channels(
    inputs: Mapping[str, ir.Value], columns: Mapping[str, Column], names: Mapping[str, str]
) -> dict[str, ir.Value]:
    """Inputs, of which those for grey pictures have no axis for the only channel where the data have none."""
    found = dict(inputs)
    for name, value in inputs.items():
        column = columns.get(names.get(name, ""))
        if value.shape is None or len(value.shape) != 4 or column is None or len(column.shape) != 2:
            continue
        if (form := form_of(value)).dims[form.channels] == 1:
            dims = [dim for axis, dim in enumerate(form.dims) if axis != form.channels]
            found[name] = ir.Value(name=name, type=value.type, shape=ir.Shape([None, *dims]))
    return found


def _with_channel(array: np.ndarray, value: ir.Value) -> np.ndarray:
    missing = value.shape is not None and len(value.shape) == array.ndim + 1
    return np.expand_dims(array, form_of(value).channels + 1) if missing else array


def _files(data: Any, model: Model) -> Iterator[dict[str, np.ndarray]]:
    """The bytes of image files, in the order of their names where they are in a folder."""
    (name,) = [value.name or "" for value in model.inputs]
    paths = [data] if isinstance(data, str | os.PathLike) else list(data)
    if not paths or not all(isinstance(path, str | os.PathLike) for path in paths):
        raise DataError("a pipeline that decodes takes image files", hint="name them, or a folder of them")
    folders = [Path(path) for path in paths]
    files = [file for path in folders for file in (files_in(path) if path.is_dir() else [path])]
    found = [file for file in files if file in folders or file.suffix.lower() in SUFFIXES]
    if not found:
        raise DataError(f"there are no images in {paths[0]}")
    for file in found:
        try:
            yield {name: np.frombuffer(file.read_bytes(), np.uint8)}
        except OSError as error:
            raise DataError(f"cannot read {file}: {error.strerror or error}") from None
