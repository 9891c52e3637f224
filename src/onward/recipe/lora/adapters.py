"""Low-rank adapters of a model: find, merge, remove and add them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Annotated

import numpy as np
import onnx_ir as ir

from onward.arguments import Range, Seed, checked
from onward.build import Builder, Expr, Names
from onward.constants import add_initializer
from onward.errors import RecipeError, UnknownNameError, UnsupportedError, list_names, warn
from onward.model import Model, Source, load
from onward.model.checks import check_signatures
from onward.model.state import PARAMETER_KEY, SLOT_KEY, with_tags
from onward.recipe.constants import expose
from onward.recipe.fixed_transforms import fixed_transform
from onward.recipe.head import LINEAR, refuse_training
from onward.recipe.initialize import Drawn, draw_initial_values
from onward.recipe.layers import Layer, layers, listing
from onward.recipe.trainable import ADAPTERS, matching
from onward.standard import METADATA_IR
from onward.transform.bodies import lift_from_bodies, return_to_bodies
from onward.transform.opset import of_one_opset

A, B = ADAPTERS
SCALE = "lora_scale"
MODULE_KEY = "train.module"


@dataclasses.dataclass(frozen=True, eq=False)
class Adapter:
    """The tensors of the adapter of one weight."""

    weight: str
    module: str
    """The module of the weight, as the framework named it."""
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
    """Return the adaptable layers by the name of their weight, without the adapters themselves."""
    layers_of: dict[str, list[Layer]] = {}
    for layer in layers(model.graph):
        if layer.weight.name and _tag(layer.weight, SLOT_KEY) not in ADAPTERS:
            layers_of.setdefault(layer.weight.name, []).append(layer)
    return layers_of


def adapters(model: Model) -> list[Adapter]:
    """Return the adapters of a model, by the tags of its tensors."""
    slots: dict[str, dict[str, ir.Value]] = {}
    for value in model.graph.initializers.values():
        if (slot := _tag(value, SLOT_KEY)) in (*ADAPTERS, SCALE):
            slots.setdefault(_tag(value, PARAMETER_KEY), {})[slot] = value
    complete = {weight: own for weight, own in slots.items() if len(own) == 3}
    return [Adapter(weight, _tag(s[A], MODULE_KEY) or weight, s[A], s[B], s[SCALE]) for weight, s in complete.items()]


def _tag(value: ir.Value, key: str) -> str:
    return value.const_value.metadata_props.get(key, "") if value.const_value is not None else ""


def _shape(value: ir.Value) -> tuple[int, ...]:
    assert value.const_value is not None
    return tuple(value.const_value.shape.numpy())


def array(value: ir.Value) -> np.ndarray:
    assert value.const_value is not None
    return value.const_value.numpy()


def delta(adapter: Adapter, layer: Layer, dtype: type = np.float64) -> np.ndarray:
    """Compute (alpha / rank) A B, in the layout of the weight."""
    tensors: list[np.ndarray] = [array(value).astype(dtype) for value in (adapter.a, adapter.b, adapter.scale)]
    a, b, scale = tensors
    if not layer.is_convolution:
        product = a @ b * scale
        return product.T if layer.units_first else product
    groups, rank = layer.node.attributes.get_int("group", 1), adapter.rank
    inner = a.reshape(groups, rank, math.prod(a.shape[1:]))
    outer = b.reshape(groups, b.shape[0] // groups, rank)
    return (outer @ inner * scale).reshape(layer.shape)


# ---- merging and removing adapters -----------------------------------------------------------------------------------


@checked()
def merge(model: Source) -> Model:
    """Return a copy with adapters merged into their weights: W + (alpha / rank) A B.

        merged = onward.lora.merge(trained)

    - `model`: an inference model with adapters

    A weight with other readers keeps its value; the layer gets a copy, `<weight>/merged`.
    """
    source = load(model)
    refuse_training(source, "merge its adapters")
    merged = source.copy()
    lift_from_bodies(merged)
    adapters_of = adapters(merged)
    if not adapters_of:
        raise UnknownNameError("the model has no adapters to merge", hint="add some: `onward.lora.add`")
    adapted = {adapter.weight: detach(merged, adapter) for adapter in adapters_of}
    names = merged.names()
    for adapter in adapters_of:
        _fold(merged, names, adapter, adapted[adapter.weight])
    return_to_bodies(merged)
    return merged


@checked()
def as_inputs(model: Source) -> Model:
    """Return a copy whose adapters are optional inputs, for adapters that are switched at run time.

        onward.lora.as_inputs(trained).save("base.onnx")

    - `model`: an inference model with adapters

    Without values the model computes what it did before adapters were added. ONNX Runtime takes the
    values from `.onnx_adapter` files, whose ranks may differ.
    """
    source = load(model)
    refuse_training(source, "make its adapters inputs")
    changed = source.copy()
    adapters_of = adapters(changed)
    if not adapters_of:
        raise UnknownNameError("the model has no adapters", hint="add some: `onward.lora.add`")
    layers_of = by_weight(changed)
    for adapter in adapters_of:
        layer = layers_of[adapter.weight][0]
        smallest = 1 if layer.is_convolution else 0  # a convolution has at least one channel; zeros have no effect
        for value, shape, next_shape in zip(
            (adapter.a, adapter.b), _shapes(layer, smallest), _shapes(layer, smallest + 1), strict=True
        ):
            sizes = zip(shape, next_shape, strict=True)
            value.shape = ir.Shape([size if size == other else f"{value.name}/rank" for size, other in sizes])
            value.const_value = _with_array(value, np.zeros(shape))
        adapter.scale.const_value = _with_array(adapter.scale, np.ones(()))  # files hold B times the scale
        changed.graph.inputs.extend((adapter.a, adapter.b))
    changed.ir.ir_version = max(changed.ir.ir_version or 0, _OPTIONAL_INPUTS_IR)
    return changed


_OPTIONAL_INPUTS_IR = 4
"""First version in which an input may have a default value."""


def _with_array(value: ir.Value, array: np.ndarray) -> ir.Tensor:
    """Return the tensor of an initializer with other numbers."""
    old = value.const_value
    assert old is not None
    new = array.astype(old.dtype.numpy())
    return ir.Tensor(new, dtype=old.dtype, name=old.name, metadata_props=dict(old.metadata_props))


def detach(model: Model, adapter: Adapter) -> list[Layer]:
    """Remove an adapter with its tensors, in place; return its layers."""
    adapted = set()
    for reader in list(adapter.a.consumers()):
        total = reader
        while total.op_type != "Add":
            readers = list(total.outputs[0].consumers())
            if len(readers) != 1 or total.op_type not in ("MatMul", "Conv", "Mul"):
                raise UnsupportedError(
                    f"another tool has changed the adapter around `{total.name}`", hint="add the adapters again"
                )
            total = readers[0]
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


def _remove_branch(last: ir.Node) -> None:
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
    if layer.is_quantized:
        raise UnsupportedError(
            f"the adapter of `{adapter.weight}` cannot be merged: the weight is quantized",
            hint="save it with `onward.lora.save`, and merge it into the model before quantization",
        )
    weight = layer.weight
    old = weight.const_value
    assert old is not None
    entries = {(other.path[0], 0) if other.path else (other.node, 1) for other in adapted}
    alone = {tuple(use) for use in weight.uses()} == entries and not weight.is_graph_output()
    name = adapter.weight if alone else names.fresh(f"{adapter.weight}/merged")

    def merged() -> ir.Tensor:
        wide = np.float64 if old.dtype == ir.DataType.DOUBLE else np.float32
        new = old.numpy().astype(wide) + delta(adapter, layer, wide)
        return ir.Tensor(new.astype(old.dtype.numpy()), dtype=old.dtype, name=old.name)

    tensor = ir.LazyTensor(
        merged,
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


# ---- adding adapters -------------------------------------------------------------------------------------------------


_OLDEST_OPSET = 13
"""First operator set where Dropout has a ratio input (12) and all types (13)."""
_WINDOW = {"kernel_shape", "strides", "pads", "dilations", "auto_pad"}


@checked()
def add(
    model: Source,
    rank: Annotated[int, Range(least=1, most=65536)] = 8,
    alpha: float = 16.0,
    targets: str | Sequence[str] | None = None,
    dropout: Annotated[float, Range(least=0, below=1)] = 0.0,
    seed: Seed = 0,
) -> Model:
    """Return a copy with low-rank adapters on the weights that match `targets`.

        adapted = onward.lora.add("bert.onnx", rank=8, targets="*attention*")

    Before training it computes what the model computes, as B is zero. By default, a recipe trains
    only the adapters.

    - `model`: an inference model
    - `rank`, `alpha`: y = x W becomes y = x W + (alpha / rank) (x A) B, where A has `rank` columns
    - `targets`: patterns of MatMul, Gemm or Conv weights, or of the modules that owned them (default:
      those of attention; without attention, all that are larger than their adapters)
    - `dropout`: ratio for the input of A in training
    - `seed`: seed of A
    """
    changed = adaptable(model)
    candidates = by_weight(changed)
    if targets is None:
        chosen = _usual_targets(candidates, rank)
    else:
        patterns = [targets] if isinstance(targets, str) else list(targets)
        chosen = _matching_targets(candidates, patterns)
        if not chosen:
            hint = listing(sharing[0] for sharing in candidates.values())
            raise UnknownNameError(f"{list_names(patterns, 6)} matches no weight of a layer", hint=hint)
    taken = changed.names()
    initial_values = draw_initial_values([_initial(sharing[0], rank) for sharing in chosen], seed)
    for sharing, a in zip(chosen, initial_values, strict=True):
        dtype = sharing[0].dtype
        b = ir.Tensor(np.zeros(_shapes(sharing[0], rank)[1], dtype.numpy()), dtype=dtype)
        attach(changed, taken, sharing, a, b, alpha / rank, dropout)
    return_to_bodies(changed)
    return changed


_ATTENTION = ("*attn*", "*attention*")


def _matching_targets(candidates: Mapping[str, list[Layer]], patterns: Sequence[str]) -> list[list[Layer]]:
    """Return the layers of each weight that matches a pattern."""
    by_names = (
        (sharing, [name for layer in sharing for name in layer.weight_names]) for sharing in candidates.values()
    )
    return [sharing for sharing, names in by_names if matching(patterns, names)]


def _usual_targets(candidates: Mapping[str, list[Layer]], rank: int) -> list[list[Layer]]:
    """Return the layers to adapt by default; say which if they are not those of attention."""
    if chosen := _matching_targets(candidates, _ATTENTION):
        return chosen
    fitting = [sharing for sharing in candidates.values() if _has_one_layout(sharing) and not _is_fixed(sharing[0])]
    if not fitting:
        raise UnknownNameError("the model has no weight that adapters fit", hint=listing([]))
    larger = [s for s in fitting if sum(map(math.prod, _shapes(s[0], rank))) < math.prod(s[0].shape)]
    chosen = larger or fitting
    names = list_names([sharing[0].module for sharing in chosen], 3)
    warn(f"no layer is named after attention: adapters are on {names}; to choose, write `targets=PATTERN`")
    return chosen


def _is_fixed(layer: Layer) -> bool:
    return not layer.path and fixed_transform(layer.weight, [(layer.node, 1)]) is not None


def _has_one_layout(sharing: Sequence[Layer]) -> bool:
    return len({(layer.units_first, layer.is_convolution) for layer in sharing}) == 1


def adaptable(model: Source) -> Model:
    """Return a copy to which adapters can be added, with the weights of bodies in the main graph."""
    source = check_signatures(load(model))
    refuse_training(source, "add adapters")
    changed = of_one_opset(source, _OLDEST_OPSET).copy()
    changed.ir.ir_version = max(changed.ir.ir_version or 0, METADATA_IR)
    lift_from_bodies(changed)
    return changed


def _initial(layer: Layer, rank: int) -> Drawn:
    """Draw A as torch.nn.Linear does, like the LoRA authors and PEFT; B is zero."""
    init = LINEAR + ("" if layer.is_convolution else ",layout=keras")
    return Drawn(f"{layer.weight.name}/{A}", layer.dtype, _shapes(layer, rank)[0], init)


def _shapes(layer: Layer, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    inputs, *kernel = layer.shape[1:] if layer.units_first else layer.shape[:-1]
    if not layer.is_convolution:
        return (inputs, rank), (rank, layer.units)
    groups = layer.node.attributes.get_int("group", 1)
    return (groups * rank, inputs, *kernel), (layer.units, rank, *(1 for _ in kernel))


def attach(
    model: Model, names: Names, of: Sequence[Layer], a: ir.Tensor, b: ir.Tensor, scale: float, dropout: float
) -> None:
    """Add an adapter with these values to the layers that share a weight, in place."""
    weight = of[0].weight
    if any(adapter.weight == weight.name for adapter in adapters(model)):
        raise RecipeError(f"`{weight.name}` already has an adapter", hint="merge it first: `onward.lora.merge`")
    if not _has_one_layout(of):
        raise UnsupportedError(f"no adapter fits `{weight.name}`: only some of its layers read it transposed")
    if weight.producer() is not None:
        expose(model.graph, weight)
        of = by_weight(model)[weight.name or ""]
    number = ir.Tensor(np.asarray(scale, a.dtype.numpy()), dtype=a.dtype)
    values = []
    for slot, tensor in {A: a, B: b, SCALE: number}.items():
        tensor.name = names.fresh(f"{of[0].weight.name}/{slot}")
        role = "hyper" if slot == SCALE else "parameter"
        tagged = with_tags(tensor, role=role, param=of[0].weight.name, slot=slot, module=of[0].module)
        values.append(add_initializer(model.graph, tensor.name, tagged))
    for layer in of:
        _insert(model, names, layer, values, dropout)


def _insert(model: Model, names: Names, layer: Layer, values: Sequence[ir.Value], dropout: float) -> None:
    """Add the branch behind a layer. Its sum takes the name of the layer's output."""
    branch = ir.Graph([], [], nodes=[], name="adapter")
    op = Builder(branch, opset=model.opset, names=names, scope=f"{layer.weight.name}/lora")
    y = layer.output
    a, b, scale = (op(value) for value in values)
    total = op(y) + _change(op, layer, a, b, scale, dropout)
    nodes = list(branch)
    branch.remove(nodes)
    layer.node.append(nodes)
    total.like(y)
    y.replace_all_uses_with(total.value, replace_graph_outputs=True)
    nodes[-1].replace_input_with(0, y)
    name = y.name or ""
    y.name = names.fresh(f"{name}/base")
    total.value.name = name


def _change(op: Builder, layer: Layer, a: Expr, b: Expr, scale: Expr, dropout: float) -> Expr:
    node, x = layer.node, op(layer.node.inputs[0])  # type: ignore[arg-type]
    if dropout:
        x = op.Dropout(x, op.constant(np.float32(dropout)))
    if layer.is_convolution:
        settings = {name: attribute.value for name, attribute in node.attributes.items() if name in _WINDOW}
        groups = node.attributes.get_int("group", 1)
        inner = op.Conv(x, a, group=groups, **settings)
        return op(op.Conv(inner * scale, b, group=groups).value)
    if node.attributes.get_int("transA", 0):
        x = op.Transpose(x, perm=[1, 0])
    factor = node.attributes.get_float("alpha", 1.0)  # of a Gemm, which multiplies all that goes through the weight
    inner = op.MatMul(x, a) * scale
    return op.MatMul(inner * factor if factor != 1 else inner, b)
