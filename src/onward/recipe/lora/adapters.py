"""Adapters that a model has, the layers that can have some, and taking them away."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onward.arguments import checked
from onward.build import Names
from onward.constants import add_initializer
from onward.errors import UnknownNameError, UnsupportedError
from onward.model import Model, Source, load
from onward.model.state import PARAMETER_KEY, SLOT_KEY
from onward.recipe.head import refuse_training
from onward.recipe.layers import Layer, layers
from onward.recipe.trainable import ADAPTERS

A, B = ADAPTERS
SCALE = "lora_scale"
MODULE_KEY = "train.module"


@dataclasses.dataclass(frozen=True, eq=False)
class Adapter:
    """What is added to one weight, as tensors of the file."""

    weight: str
    module: str
    """What owns the weight, as the framework called it."""
    a: ir.Value
    b: ir.Value
    scale: ir.Value

    @property
    def rank(self) -> int:
        shape = _shape(self.b)
        return shape[1] if self.is_convolution else shape[0]

    @property
    def alpha(self) -> float:
        return float(array(self.scale)) * self.rank

    @property
    def is_convolution(self) -> bool:
        return len(_shape(self.b)) > 2


def by_weight(model: Model) -> dict[str, list[Layer]]:
    """The layers that can be adapted, by the name of their weight; adapters themselves do not count."""
    found: dict[str, list[Layer]] = {}
    for layer in layers(model.graph):
        if layer.weight.name and _tag(layer.weight, SLOT_KEY) not in ADAPTERS:
            found.setdefault(layer.weight.name, []).append(layer)
    return found


def adapters(model: Model) -> list[Adapter]:
    """The adapters of a model, by the tags of its tensors."""
    parts: dict[str, dict[str, ir.Value]] = {}
    for value in model.graph.initializers.values():
        if (slot := _tag(value, SLOT_KEY)) in (*ADAPTERS, SCALE):
            parts.setdefault(_tag(value, PARAMETER_KEY), {})[slot] = value
    whole = {weight: slots for weight, slots in parts.items() if len(slots) == 3}
    return [Adapter(weight, _tag(p[A], MODULE_KEY) or weight, p[A], p[B], p[SCALE]) for weight, p in whole.items()]


def _tag(value: ir.Value, key: str) -> str:
    return value.const_value.metadata_props.get(key, "") if value.const_value is not None else ""


def _shape(value: ir.Value) -> tuple[int, ...]:
    assert value.const_value is not None
    return tuple(value.const_value.shape.numpy())


def array(value: ir.Value) -> np.ndarray:
    assert value.const_value is not None
    return value.const_value.numpy()


def delta(adapter: Adapter, layer: Layer, dtype: type = np.float64) -> np.ndarray:
    """(alpha / rank) A B, in the layout of the weight."""
    a: np.ndarray = array(adapter.a).astype(dtype)
    b: np.ndarray = array(adapter.b).astype(dtype)
    scale: np.ndarray = array(adapter.scale).astype(dtype)
    if not layer.is_convolution:
        product = a @ b * scale
        return product.T if layer.units_first else product
    groups, rank = layer.node.attributes.get_int("group", 1), adapter.rank
    inner = a.reshape(groups, rank, math.prod(a.shape[1:]))
    outer = b.reshape(groups, b.shape[0] // groups, rank)
    return (outer @ inner * scale).reshape(layer.shape)


# ---- taking adapters away: merged into the weights that they adapt, or not at all ------------------------------------


@checked()
def merge(model: Source) -> Model:
    """A copy in which adapters are added to the weights that they adapt: W + (alpha / rank) A B, and nothing remains.

        merged = onward.lora.merge(trained)

    - `model`: an inference model with adapters

    A weight that other places read as it is keeps its value there; the layer gets its own, `<weight>/merged`.
    """
    source = load(model)
    refuse_training(source, "merge its adapters")
    merged = source.copy()
    found = adapters(merged)
    if not found:
        raise UnknownNameError("the model has no adapters to merge", hint="`onward.lora.add` adds some")
    adapted = {adapter.weight: detach(merged, adapter) for adapter in found}
    names = merged.names()
    for adapter in found:
        _fold(merged, names, adapter, adapted[adapter.weight])
    return merged


def detach(model: Model, adapter: Adapter) -> list[Layer]:
    """Remove an adapter with its tensors, in place; the layers that had it."""
    adapted = set()
    for reader in list(adapter.a.consumers()):
        total = _sum_behind(reader)
        y, z = total.inputs[0], total.outputs[0]
        assert y is not None and y.producer() is not None
        adapted.add(y.producer())
        name, z.name = z.name, f"{z.name}:removed"
        z.replace_all_uses_with(y, replace_graph_outputs=True)
        y.name = name
        _remove_branch(total)
    for value in (adapter.a, adapter.b, adapter.scale):
        model.graph.initializers.pop(value.name or "")
    return [layer for layer in by_weight(model).get(adapter.weight, []) if layer.node in adapted]


def _sum_behind(node: ir.Node) -> ir.Node:
    """The Add where the branch that begins at a node joins the layer's output."""
    while node.op_type != "Add":
        readers = list(node.outputs[0].consumers())
        if len(readers) != 1 or node.op_type not in ("MatMul", "Conv", "Mul"):
            raise UnsupportedError(
                f"the adapter around `{node.name}` is not as Onward writes it", hint="another tool may have changed it"
            )
        node = readers[0]
    return node


def _remove_branch(last: ir.Node) -> None:
    """Remove a node, and what only it has read."""
    pending = [last]
    while pending:
        node = pending.pop()
        if node.graph is None or any(output.uses() or output.is_graph_output() for output in node.outputs):
            continue
        before = [producer for value in node.inputs if value is not None and (producer := value.producer())]
        node.graph.remove(node, safe=True)
        pending += before


def _fold(model: Model, names: Names, adapter: Adapter, adapted: Sequence[Layer]) -> None:
    layer = adapted[0]
    if layer.is_quantised:
        raise UnsupportedError(
            f"the adapter of `{adapter.weight}` cannot be merged: the weight is quantised",
            hint="save it alone (`onward.lora.save`), and merge it into the model before quantisation",
        )
    weight = layer.weight
    old = weight.const_value
    assert old is not None
    entries = {(one.path[0], 0) if one.path else (one.node, 1) for one in adapted}
    alone = {tuple(use) for use in weight.uses()} == entries and not weight.is_graph_output()
    name = adapter.weight if alone else names.fresh(f"{adapter.weight}/merged")
    tensor = ir.LazyTensor(
        lambda: _merge_weight(old, adapter, layer),
        dtype=old.dtype,
        shape=ir.Shape(old.shape.numpy()),
        name=name,
        doc_string=old.doc_string,
        metadata_props=dict(old.metadata_props),
    )
    if alone:
        weight.const_value = tensor
        return
    own = add_initializer(model.graph, name, tensor)
    for node, index in entries:
        node.replace_input_with(index, own)


def _merge_weight(old: ir.TensorProtocol, adapter: Adapter, layer: Layer) -> ir.Tensor:
    wide = np.float64 if old.dtype == ir.DataType.DOUBLE else np.float32
    change = delta(adapter, layer, wide)
    new = old.numpy().astype(wide) + change
    return ir.Tensor(new.astype(old.dtype.numpy()), dtype=old.dtype, name=old.name)
