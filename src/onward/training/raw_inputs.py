"""What data are before they are preprocessed: the type and shape that the first operation gets, as the data have it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onward.errors import DataError
from onward.model import Model
from onward.recipe.preprocessing import Pipeline, Raw, shared_axes
from onward.recipe.preprocessing.pipeline import form_of
from onward.training.data import Binding, Column, match


def with_data(
    given: Mapping[str, Pipeline],
    inputs: Mapping[str, ir.Value],
    columns: Mapping[str, Column],
    mapping: Mapping[str, str | Sequence[str]],
) -> dict[str, Pipeline]:
    """The operations for each input, with what the data are. `inputs` are those of the training model without that."""
    open_ones = {name: _shapes(inputs[name]) for name, pipeline in given.items() if pipeline.raw is None}
    first_problem: DataError | None = None
    for shapes in itertools.product(*open_ones.values()):
        wanted = {**inputs, **{name: _number(name, dims) for name, dims in zip(open_ones, shapes, strict=True)}}
        try:
            way = match(columns, wanted, mapping)
        except DataError as problem:
            first_problem = first_problem or problem
            continue
        found = {
            name: dataclasses.replace(given[name], raw=_raw(way[name], columns, dims))
            for name, dims in zip(open_ones, shapes, strict=True)
        }
        return {**given, **found}
    assert first_problem is not None
    hint = f"{first_problem.hint}; or let preprocessing begin with `channels_first`, `to_rgb` or `resize`"
    raise DataError(first_problem.message, hint=hint)


def check_masks(
    given: Mapping[str, Pipeline],
    model: Model,
    inputs: Mapping[str, ir.Value],
    columns: Mapping[str, Column],
    mapping: Mapping[str, str | Sequence[str]],
) -> None:
    """Refuse masks that do not have the size that preprocessing gives the images of `model`."""
    images = {value.name or "": value for value in model.inputs}
    others = {name: value for name, value in inputs.items() if name not in given}
    for (image, pipeline), (name, value) in itertools.product(given.items(), others.items()):
        axes = shared_axes(value, images[image]) if pipeline.size is not None else None
        column = columns.get(str(mapping.get(name, name)))
        if axes is None or column is None or pipeline.size is None or len(column.shape) != len(value.shape or ()) - 1:
            continue
        size = tuple(column.shape[axis - 1] for axis in axes)
        if size != pipeline.size:
            found, wanted = (" x ".join(map(str, each)) for each in (size, pipeline.size))
            raise DataError(
                f"`{name}` is {found}, and preprocessing makes the images of `{image}` {wanted}",
                hint=f"it resizes images only: resize the masks in the data to {wanted}, by nearest neighbor",
            )


def _shapes(value: ir.Value) -> list[tuple[int | None, ...]]:
    """The shapes that a sample may have: grey pictures may be without an axis for their only channel."""
    form = form_of(value)
    grey = [dim for axis, dim in enumerate(form.dims) if axis != form.channels]
    is_grey = form.is_picture and form.dims[form.channels] in (None, 1)
    return [form.dims, *([tuple(grey)] if is_grey else [])]


def _number(name: str, dims: Sequence[int | None]) -> ir.Value:
    """An input that takes any number."""
    return ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([None, *dims]))


def _raw(binding: Binding, columns: Mapping[str, Column], dims: Sequence[int | None]) -> Raw:
    found = [columns[name] for name in binding.columns]
    are_bytes = all(column.dtype == np.uint8 for column in found)
    return Raw(ir.DataType.UINT8 if are_bytes else ir.DataType.FLOAT, tuple(dims), found[0].limit)


def single_pictures(training: Model) -> dict[str, Pipeline]:
    """The operations of a training model that take numbers, so that the first may be done with each picture alone."""
    inputs = {value.name or "": value for value in training.inputs}
    recipe = training.step().fact("train.recipe")
    given = recipe.get("preprocess") if isinstance(recipe, dict) else None
    if not isinstance(given, dict) or not all(isinstance(operations, list) for operations in given.values()):
        return {}
    floats = [name for name in given if name in inputs and inputs[name].dtype is ir.DataType.FLOAT]
    return {name: Pipeline.of(given[name]) for name in floats}


def as_bytes(pipeline: Pipeline) -> Pipeline:
    """The same for pictures as they are in files, of any size."""
    if pipeline.raw is None or pipeline.raw.limit is None:
        return pipeline
    return dataclasses.replace(pipeline, raw=Raw(ir.DataType.UINT8, pipeline.raw.dims))
