"""Preprocessing in front of a model.

Preprocessing becomes the first part of the inference graph. Its input has the name of the model's
and takes raw data. The model's own input is renamed to `NAME/preprocessed`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import onnx_ir as ir

from onward.build import Builder
from onward.errors import RecipeError, list_names
from onward.model import Model, load
from onward.model.serde import stamp
from onward.model.state import PREPROCESSING, ROLE_KEY, with_tags
from onward.recipe.preprocessing.operations import SampleShape, dims_of
from onward.recipe.preprocessing.pipeline import (
    Pipeline,
    Raw,
    by_input,
    form_of,
    mentions_text,
    pipelines,
    text_pipeline,
)
from onward.recipe.preprocessing.text import TEXT_OPSET
from onward.recipe.spec import is_graph
from onward.recipe.step_builder import take_apart
from onward.standard import METADATA_IR, ML_DOMAIN, OLDEST_OPSET
from onward.transform.inline import inline
from onward.transform.merge import add_prefix
from onward.transform.opset import convert_opset
from onward.transform.training import strip
from onward.transform.types import fill_in_types

_PREFIX = "preprocess/"
RAW = "/raw"
"""Suffix of a pipeline's input if its output has the same name."""


@dataclasses.dataclass(frozen=True)
class ModelInput:
    """The path of data into the model by one input."""

    value: ir.Value
    """The value that the model reads."""
    point: ir.Value
    """The value that augmentation changes: before values are normalized."""
    form: SampleShape
    limit: float | None = None
    resized_by: str | None = None
    """The operation after `point` that changes the height and width of images, if any."""


def with_preprocessing(source: Model, preprocess: Any) -> Model:
    """Return a copy of a model that takes raw data."""
    preprocess = open_preprocessing(preprocess)
    model = convert_opset(source, max(source.opset, opset_of(preprocess))).copy()
    put_before(model, preprocess)
    if preprocess is not None:
        model.metadata.pop("onward.preprocess", None)  # the graph has the operations
    model.ir.ir_version = max(model.ir.ir_version or 0, METADATA_IR)
    return stamp(model)


def open_preprocessing(preprocess: Any) -> Any:
    """Return preprocessing; read it if it is a file."""
    return strip(inline(load(preprocess))) if is_graph(preprocess) else preprocess


def opset_of(preprocess: Any) -> int:
    """Return the lowest operator set that preprocessing needs."""
    if isinstance(preprocess, Model):
        return preprocess.opset
    if preprocess is None:
        return 0
    return TEXT_OPSET if mentions_text(preprocess) else OLDEST_OPSET


def put_before(model: Model, preprocess: Any) -> dict[str, ModelInput]:
    """Put opened preprocessing before a model, in place; return the inputs."""
    if preprocess is None:
        return {}
    if isinstance(preprocess, Model):
        return _put_graph_before(model, preprocess)
    entries: dict[str, ModelInput] = {}
    for name, pipeline in pipelines(model, preprocess).items():
        if pipeline.is_text:
            entries |= _put_graph_before(model, text_pipeline(pipeline, model, name))
        else:
            entries[name] = _put_pipeline_before(model, name, pipeline)
    return entries


# ---- operations by name ----------------------------------------------------------------------------------------------


def _put_pipeline_before(model: Model, name: str, pipeline: Pipeline) -> ModelInput:
    value = next(value for value in model.inputs if value.name == name)
    batch = next(iter(value.shape or ()), None)
    dims = pipeline.dims(form_of(value))
    symbols = [f"{name}_{axis}" for axis in range(1, len(dims) + 1)]  # such as image_2, for what may be of any size
    raw = ir.Value(
        name=name,
        type=ir.TensorType((pipeline.raw or Raw()).dtype),
        shape=ir.Shape([batch, *(dim or symbol for dim, symbol in zip(dims, symbols, strict=True))]),
        doc_string=value.doc_string,
    )
    first = ir.Graph([], [], nodes=[], name="preprocessing", opset_imports={"": model.opset})
    op = Builder(first, opset=model.opset, names=model.names(), scope=_PREFIX.rstrip("/"))
    picture, result = pipeline.build(op, raw, value)
    if result.value is raw:
        result = op.Identity(result)
    value.name = op.names.fresh(f"{name}/preprocessed")
    result.value.type, result.value.shape, result.value.name = value.type, value.shape, value.name
    value.replace_all_uses_with(result.value, replace_graph_outputs=True)
    model.graph.inputs[model.graph.inputs.index(value)] = raw
    move_before(model.graph, first)
    return ModelInput(result.value, picture.x.value, picture.form, picture.limit, pipeline.resized_late_by)


def move_before(graph: ir.Graph, first: ir.Graph) -> None:
    """Put the nodes and constants of a graph before another; none of them is trained."""
    nodes, constants = take_apart(first)
    for node in nodes:
        if node.op_type == "Constant":
            node.metadata_props[ROLE_KEY] = PREPROCESSING
    for constant in constants:
        if constant.const_value is not None:
            constant.const_value = with_tags(constant.const_value, role=PREPROCESSING)
        graph.register_initializer(constant)
    graph.insert_before(graph[0], nodes)


# ---- a graph ---------------------------------------------------------------------------------------------------------


def _put_graph_before(model: Model, source: Model) -> dict[str, ModelInput]:
    first = add_prefix(convert_opset(source, model.opset), _PREFIX)
    fill_in_types(first, first.outputs)
    inputs = {value.name or "": value for value in model.inputs}
    joins = _joins(model, first)
    names = model.names()
    entries: dict[str, ModelInput] = {}
    raw = list(first.graph.inputs)
    own_inputs = [value for value in model.graph.inputs if value.name not in joins]
    for name, output in joins.items():
        value = inputs[name]
        _check_join(output, value)
        value.name = names.fresh(f"{name}/preprocessed")
        output.name, output.type, output.shape = value.name, value.type, value.shape
        value.replace_all_uses_with(output, replace_graph_outputs=True)
        entries[name] = ModelInput(output, output, form_of(value))
    for value in raw:  # they get their old names back; the name of a joined input is free again
        name = (value.name or "").removeprefix(_PREFIX)
        name = free if (free := name.removesuffix(RAW)) in joins else name
        value.name = name if name in joins else names.fresh(name)
    model.graph.inputs.clear()
    move_before(model.graph, first.graph)
    model.graph.inputs.extend([*raw, *own_inputs])
    for domain, version in first.ir.opset_imports.items():
        if model.ir.opset_imports.setdefault(domain, version) < version and domain == ML_DOMAIN:
            raise RecipeError(
                f"the model has version {model.ir.opset_imports[domain]} of {domain}, but its preprocessing {version}"
            )
    return entries


def _joins(model: Model, first: Model) -> dict[str, ir.Value]:
    """Return input -> output: by name; else in order, or the only output for the image."""
    inputs = [value.name or "" for value in model.inputs]
    outputs = {(value.name or "").removeprefix(_PREFIX): value for value in first.outputs}
    if idle := [name for name, output in outputs.items() if output.producer() is None]:
        raise RecipeError(f"the preprocessing does not change `{idle[0]}`", hint="leave it out")
    if same := [name for name in outputs if name in inputs]:
        return {name: outputs[name] for name in same}
    if len(outputs) == 1:
        return dict.fromkeys(by_input(model, ()), *outputs.values())
    if len(outputs) != len(inputs):
        raise RecipeError(
            f"the preprocessing gives {list_names(list(outputs), 6)}, and the model takes {list_names(inputs, 6)}",
            hint="give its outputs the names of the inputs (`onward rename`)",
        )
    return dict(zip(inputs, outputs.values(), strict=True))


def _check_join(output: ir.Value, value: ir.Value) -> None:
    name = (output.name or "").removeprefix(_PREFIX)
    if output.dtype is not None and value.dtype is not None and output.dtype != value.dtype:
        types = f"is {output.dtype.name.lower()}, but `{value.name}` of the model is {value.dtype.name.lower()}"
        raise RecipeError(f"`{name}` of the preprocessing {types}", hint="add a Cast at its end")
    if output.shape is not None and value.shape is not None:
        output_shape, input_shape = (SampleShape(dims_of(shape), 0) for shape in (output.shape, value.shape))
        if not input_shape.fits(output_shape.dims):
            shapes = f"has the shape {output_shape}, but `{value.name}` of the model has {input_shape}"
            raise RecipeError(f"`{name}` of the preprocessing {shapes}")
