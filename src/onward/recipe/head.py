"""A new last layer for another number of classes.

    model = onward.replace_head("resnet.onnx", classes=5)

Weight and bias of the layer that computes the logits are drawn anew, under their old names. Layers
before it do not change; shapes behind it get the new number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import onnx_ir as ir

from onward.arguments import Range, Seed, checked
from onward.constants import add_initializer, constant_ints, constant_tensor
from onward.errors import RecipeError, UnsupportedError
from onward.model import Model, Source, load
from onward.model.checks import check_signatures
from onward.model.state import with_tags
from onward.recipe.constants import expose
from onward.recipe.initialize import INITIALIZERS, Drawn, draw_initial_values
from onward.recipe.layers import Layer, downstream, find_head
from onward.recipe.spec import Spec, parse
from onward.recipe.trainable import HEAD
from onward.standard import METADATA_IR
from onward.transform.types import fill_in_types

LINEAR = "kaiming_uniform:a=2.23606797749979"
"""Initializer of torch.nn.Linear and torch.nn.Conv2d: uniform within 1 / sqrt(fan_in)."""

_Init = str | Mapping[str, Any] | Spec


@checked()
def replace_head(
    model: Source,
    classes: Annotated[int, Range(least=1, most=2**31 - 1)],
    *,
    layer: str | None = None,
    init: _Init = LINEAR,
    bias_init: _Init = "zeros",
    seed: Seed = 0,
) -> Model:
    """Return a copy whose last layer gives `classes` logits, from fresh weights.

        flowers = onward.replace_head("resnet18.onnx", 5)

    - `model`: an inference model
    - `classes`: the new number of classes
    - `layer`: the name of its weight, node or output (default: found from the outputs)
    - `init`, `bias_init`: initializers, such as `"normal:std=0.02"`
    - `seed`: seed of the initializers
    """
    source = check_signatures(load(model))
    refuse_training(source, "replace its head")
    changed = source.copy()
    head = find_head(changed, layer)
    bias = head.bias()
    _check_alone(changed, head)
    old = head.units
    after = [] if classes == old else list(downstream(head.output))
    if any(node.graph is not changed.graph for node in after):
        raise UnsupportedError(f"the logits of `{head.names[0]}` are read in a nested graph")
    _check_readers(after, old, bias[1] if bias else None)
    weight_shape, axis = list(head.shape), 0 if head.units_first else 1
    weight_shape[axis] = classes
    _redraw(changed, head.weight, weight_shape, _with_layout(init, head), seed)
    if bias and (tensor := constant_tensor(bias[0])) is not None and tensor.size == old:
        shape = [classes if size == old else size for size in tensor.shape.numpy()]
        _redraw(changed, bias[0], shape, bias_init, seed)
    _update_shapes(changed, head, after, old, classes)
    changed.ir.ir_version = max(changed.ir.ir_version or 0, METADATA_IR)
    return changed


def refuse_training(model: Model, purpose: str) -> None:
    """Refuse a model with training steps: a change of its layers would break them."""
    if model.steps:
        raise RecipeError(
            f"cannot {purpose}: the model carries its training",
            hint="strip it first (`onward strip`), and prepare the changed model",
        )


# ---- may it be changed? ----------------------------------------------------------------------------------------------


def _check_alone(model: Model, head: Layer) -> None:
    """Refuse a head whose weights are shared, quantized or grouped."""
    if head.is_quantized:
        raise UnsupportedError(
            f"the weight `{head.weight.name}` of the head is quantized", hint="replace the head before quantization"
        )
    if head.node.graph is not model.graph:
        raise UnsupportedError(f"the head `{head.names[0]}` is inside a nested graph")
    if head.node.attributes.get_int("group", 1) != 1:
        raise UnsupportedError(f"the head `{head.names[0]}` is a convolution with groups")
    own, values = {head.node, *head.path}, [head.weight, *(node.outputs[0] for node in head.path)]
    if bias := head.bias():
        own.add(bias[1])
        values.append(bias[0])
    for value in values:
        others = [node for node in value.consumers() if node not in own]
        if others or value.is_graph_output():
            reader = f"{others[0].op_type} `{others[0].name}`" if others else "the outputs"
            raise UnsupportedError(
                f"the weight `{value.name}` of the head is tied: {reader} also reads it",
                hint="name another layer with `layer`, or untie the weights before the export",
            )


_SIZES = {"Reshape": 1, "Resize": 3, "Expand": 1}
"""Operators that take a shape, and its index; the old number of classes in it is replaced."""


def _check_readers(after: list[ir.Node], old: int, bias_node: ir.Node | None) -> None:
    for node in after:
        for i, value in enumerate(node.inputs):
            tensor = constant_tensor(value)
            if value is None or tensor is None or node is bias_node or old == 1 or i == _SIZES.get(node.op_type):
                continue
            if old in tensor.shape.numpy():
                raise UnsupportedError(
                    f"`{value.name}`, which {node.op_type} `{node.name}` reads after the head, is for {old} classes",
                    hint="cut it off first: `onward extract`",
                )


# ---- changing it -----------------------------------------------------------------------------------------------------


def _with_layout(init: _Init, head: Layer) -> Spec:
    spec = parse(init)
    options = INITIALIZERS[spec.name].options if spec.name in INITIALIZERS else {}
    if "layout" not in options or "layout" in spec.options:
        return spec
    return Spec(spec.name, {**spec.options, "layout": "torch" if head.units_first else "keras"})


def _redraw(model: Model, value: ir.Value, shape: Sequence[int], init: _Init, seed: int) -> None:
    stored = expose(model.graph, value)
    assert stored.const_value is not None and stored.name is not None
    (tensor,) = draw_initial_values([Drawn(stored.name, stored.const_value.dtype, tuple(shape), init)], seed)
    stored.const_value = with_tags(tensor, role="parameter", slot=HEAD)
    stored.shape = ir.Shape(shape)


def _update_shapes(model: Model, head: Layer, after: list[ir.Node], old: int, new: int) -> None:
    """Replace the old number of classes in shapes; unknown dimensions keep their names."""
    if not after and old == new:
        return
    for node in after:
        if (index := _SIZES.get(node.op_type)) is not None and index < len(node.inputs):
            _tell_size(model, node, index, old, new)
    values = [v for node in (*head.path, head.node, *after) for v in node.outputs if v.name]
    before = {value: value.shape for value in values}
    for value in values:
        value.shape = None
    fill_in_types(model, values)
    for value, shape in before.items():
        if shape is None:  # it was not stated, and need not be
            value.shape = None
        elif value.shape is None or len(value.shape) == len(shape):
            inferred = value.shape or ir.Shape([None] * len(shape))
            dims = zip(shape, inferred, strict=True)
            value.shape = ir.Shape([d if isinstance(d, int) else None if was == old else was for was, d in dims])


def _tell_size(model: Model, node: ir.Node, position: int, old: int, new: int) -> None:
    """Replace the one size in the shape that a node takes, which may be a Concat of parts."""
    value = node.inputs[position]
    reader, indices = node, [position]
    if value is not None and (concat := value.producer()) is not None and concat.op_type == "Concat":
        reader, indices = concat, list(range(len(concat.inputs)))
    integers = {index: constant_ints(reader.inputs[index]) or () for index in indices}
    matches = [index for index, sizes in integers.items() for size in sizes if size == old]
    if not matches:
        return
    shape = node.inputs[0].shape if node.inputs[0] is not None else None
    if len(matches) > 1 or (shape is not None and list(shape).count(old) > 1):
        raise UnsupportedError(f"several sizes of {node.op_type} `{node.name}` are {old}, as the number of classes")
    value = reader.inputs[matches[0]]
    assert value is not None
    resized = np.asarray([new if size == old else size for size in integers[matches[0]]], np.int64)
    changed = add_initializer(model.graph, model.names().fresh(f"{value.name}/resized"), resized)
    reader.replace_input_with(matches[0], changed)
    if value.uses() or value.is_graph_output():
        return
    if (producer := value.producer()) is not None:
        model.graph.remove(producer, safe=True)
    elif value.name is not None and value.is_initializer() and not value.is_graph_input():
        del model.graph.initializers[value.name]
