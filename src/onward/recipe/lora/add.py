"""Adding adapters to layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
import onnx_ir as ir

from onward.arguments import Count, Range, Seed, checked
from onward.build import Builder, Expr, Names
from onward.constants import add_initializer
from onward.errors import RecipeError, UnknownNameError, UnsupportedError
from onward.model import Model, Source, load
from onward.model.signature import check_signatures
from onward.model.state import with_tags
from onward.recipe.constants import expose
from onward.recipe.head import LINEAR, refuse_training
from onward.recipe.layers import Layer, listing
from onward.recipe.lora.adapters import SCALE, A, B, adapters, by_weight
from onward.recipe.reset import Drawn, draw_initial_values
from onward.recipe.trainable import matching
from onward.standard import METADATA_IR
from onward.transform.opset import of_one_opset

_OLDEST_OPSET = 13
"""Dropout takes its ratio as an input from 12 on, and knows all types from 13 on."""
_WINDOW = {"kernel_shape", "strides", "pads", "dilations", "auto_pad"}


@checked()
def add(
    model: Source,
    rank: Count = 8,
    alpha: float = 16.0,
    targets: str | Sequence[str] = "*attn*",
    dropout: Annotated[float, Range(least=0, below=1)] = 0.0,
    seed: Seed = 0,
) -> Model:
    """A copy with low-rank adapters beside the weights of MatMul, Gemm and Conv that match `targets`.

        adapted = onward.lora.add("bert.onnx", rank=8, targets="*attention*")

    It computes what the model computes until the adapters are trained, as B is zero. A recipe that does not say what is
    `trainable` trains them alone.

    - `model`: an inference model
    - `rank`, `alpha`: y = x W becomes y = x W + (alpha / rank) (x A) B, where A has `rank` columns
    - `targets`: patterns of weights, or of the modules that owned them
    - `dropout`: acts on what A reads, in training
    - `seed`: A is drawn from it
    """
    changed = adaptable(model)
    patterns = [targets] if isinstance(targets, str) else list(targets)
    known = by_weight(changed)
    called = {weight: [name for layer in found for name in layer.weight_names] for weight, found in known.items()}
    chosen = [weight for weight, names in called.items() if matching(patterns, names)]
    if not chosen:
        listed = ", ".join(f"`{pattern}`" for pattern in patterns)
        raise UnknownNameError(
            f"{listed} matches no weight of a layer", hint=listing(found[0] for found in known.values())
        )
    taken = changed.names()
    layers = [known[weight][0] for weight in chosen]
    for layer, a in zip(layers, draw_initial_values([_initial(layer, rank) for layer in layers], seed), strict=True):
        b = ir.Tensor(np.zeros(_shapes(layer, rank)[1], layer.dtype.numpy()), dtype=layer.dtype)
        attach(changed, taken, known[layer.weight.name or ""], a, b, alpha / rank, dropout)
    return changed


def adaptable(model: Source) -> Model:
    """A copy to which adapters can be added."""
    source = check_signatures(load(model))
    refuse_training(source, "add adapters")
    changed = of_one_opset(source, _OLDEST_OPSET).copy()
    changed.ir.ir_version = max(changed.ir.ir_version or 0, METADATA_IR)
    return changed


def _initial(layer: Layer, rank: int) -> Drawn:
    """A as torch.nn.Linear starts, as their authors and PEFT have it; B is zero."""
    init = LINEAR + ("" if layer.is_convolution else ",layout=keras")
    return Drawn(f"{layer.weight.name}/{A}", layer.dtype, _shapes(layer, rank)[0], init)


def _shapes(layer: Layer, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of A and B."""
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
        raise RecipeError(f"`{weight.name}` has an adapter already", hint="merge it first (`onward.lora.merge`)")
    if len({(layer.units_first, layer.is_convolution) for layer in of}) > 1:
        raise UnsupportedError(f"`{weight.name}` is used both as it is and transposed, so that no adapter fits both")
    if weight.producer() is not None:
        expose(model.graph, weight)
        of = by_weight(model)[weight.name or ""]
    number = ir.Tensor(np.asarray(scale, a.dtype.numpy()), dtype=a.dtype)
    parts = {A: a, B: b, SCALE: number}
    values = [_store(model, names, of[0], slot, tensor) for slot, tensor in parts.items()]
    for layer in of:
        _insert(model, names, layer, values, dropout)


def _store(model: Model, names: Names, layer: Layer, slot: str, tensor: ir.Tensor) -> ir.Value:
    tensor.name = names.fresh(f"{layer.weight.name}/{slot}")
    role = "hyper" if slot == SCALE else "parameter"
    tagged = with_tags(tensor, role=role, param=layer.weight.name, slot=slot, module=layer.module)
    return add_initializer(model.graph, tensor.name, tagged)


def _insert(model: Model, names: Names, layer: Layer, values: Sequence[ir.Value], dropout: float) -> None:
    """Add the branch behind a layer. Its sum has the name of the layer's output, which gets another one."""
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
    """What the adapter adds to the output of a layer."""
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
    changed: Expr = op.MatMul(inner * factor if factor != 1 else inner, b)
    return changed
