"""Scales of weights, which follow the weights, and scales that are learned (LSQ)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.build import Builder, Expr
from onward.constants import constant_tensor
from onward.errors import UnsupportedError
from onward.model import Model
from onward.recipe.assembly import Assembly
from onward.recipe.optimizers.definition import ConfiguredOptimizer
from onward.recipe.optimizers.groups import Group
from onward.recipe.quantize.observe import BATCHES
from onward.recipe.quantize.ranges import LEAST_SCALE, Rounding, roundings
from onward.recipe.quantize.settings import levels, most_symmetric
from onward.recipe.reset import bind_initial_value

def learned_scales(model: Model, parameters: Sequence[ir.Value]) -> list[ir.Value]:
    """The scales that are parameters: those of activations, and of weights that are trained."""
    found = [one for one in roundings(model.graph) if one.is_learned]
    return [one.scale for one in found if not one.is_weight or one.x in parameters]


def bind_learned(assembly: Assembly, scales: Sequence[ir.Value], init: str | Mapping[str, Any]) -> None:
    """Make learned scales state, with what they are reset to."""
    for one in roundings(assembly.model.graph):
        if one.scale in scales and one.is_learned:
            _bind_initial_scale(assembly, one, init)


def groups_of_scales(scales: Sequence[ir.Value], model: Model, like: Group, start: int) -> list[Group]:
    """Groups for learned scales, one for each type: without decay, and at a rate that suits them.

    Optimizers that divide by the size of gradients move a scale as far as a weight, whatever its size. At the rate
    divided by the largest level, the end of the range, which is the scale times that, moves so far.
    """
    optimizer = like.optimizer
    if not isinstance(optimizer, ConfiguredOptimizer):
        raise UnsupportedError(
            "learned scales have settings of their own, and an optimizer that is a graph has none",
            hint="take `ranges=moving`, or an optimizer by name",
        )
    by_level: dict[float, list[ir.Value]] = {}
    for one in roundings(model.graph):
        if one.scale in scales:
            by_level.setdefault(levels(one.dtype)[1], []).append(one.scale)
    made = []
    for i, (level, members) in enumerate(by_level.items()):
        rate = optimizer.values["lr"] / (level if optimizer.kind.is_scale_free else 1)
        decay = {"weight_decay": 0.0} if "weight_decay" in optimizer.values else {}
        own = dataclasses.replace(optimizer, values={**optimizer.values, "lr": rate, **decay})
        made.append(Group(f"group{start + i}", own, members))
    return made


def scale_gradients(
    assembly: Assembly, gradients: dict[ir.Value, Expr], trained: Mapping[ir.Value, ir.Value]
) -> dict[ir.Value, Expr]:
    """Gradients of learned scales, over the root of how many numbers they are sums of, times the largest level."""
    changed = dict(gradients)
    for one in roundings(assembly.model.graph):
        if one.scale in changed and one.is_learned:
            op = assembly.op.scoped(f"{one.scale.name}/grad")
            numbers = op.Cast(op.Size(trained.get(one.x, one.x)), to=ir.DataType.FLOAT)
            factor = 1.0 / op.Sqrt(numbers * levels(one.dtype)[1])
            changed[one.scale] = (op(changed[one.scale].value) * factor).like(one.scale)
    return changed


def follow(assembly: Assembly, trained: Mapping[ir.Value, ir.Value], init: str | Mapping[str, Any]) -> None:
    """Bind the scales of weights to what the new weights need, and keep learned ones above nothing."""
    updated = assembly.step.update
    for one in list(roundings(assembly.model.graph)):
        if one.is_learned and one.scale.name in updated:
            _keep_positive(assembly, one, trained)
        elif one.is_weight and one.x.name in updated:
            by_name = {value.name: value for value in assembly.step.algorithm.outputs}
            new = assembly.op(by_name[updated[one.x.name or ""]])
            assembly.update(one.scale.name or "", _symmetric_scale(assembly.op.scoped(one.scale.name or ""), one, new))
            _bind_initial_scale(assembly, one, init)


def _bind_initial_scale(assembly: Assembly, one: Rounding, init: str | Mapping[str, Any]) -> None:
    """What the scale of a weight is reset to: that in the file, or what the weight needs where that is drawn anew."""
    if init == "file" or not one.is_weight:
        bind_initial_value(assembly, one.scale, "file")
    else:
        assembly.reset(one.scale, lambda op: _symmetric_scale(op, one, assembly.initial_value(one.x)))


def _keep_positive(assembly: Assembly, one: Rounding, trained: Mapping[ir.Value, ir.Value]) -> None:
    name = one.scale.name or ""
    op = assembly.op.scoped(name)

    def change(new: Expr) -> Expr:
        above: Expr = op.Max(op(new.value), LEAST_SCALE)
        if one.is_weight or one.scale not in trained:
            return above
        is_first = op.Equal(assembly.op(assembly.values[BATCHES]), np.int64(0))
        chosen: Expr = op.Where(is_first, op(trained[one.scale]), above)
        return chosen

    assembly.amend(name, change)


def _symmetric_scale(op: Builder, one: Rounding, weight: Expr) -> Expr:
    """As `symmetric_scale`, in a graph: the largest numbers, of all, of a channel or of a block."""
    weight, shape = op(weight.value), _static(one.x)
    axis, block = one.node.attributes.get_int("axis", 1), one.node.attributes.get_int("block_size", 0)
    size, kept = op.Abs(weight), _static(one.scale)
    if block:
        missing = -shape[axis] % block
        pads = [0] * (2 * len(shape))
        pads[len(shape) + axis] = missing
        whole = op.Pad(size, np.asarray(pads, np.int64)) if missing else size
        parts = [*shape[:axis], -1, block, *shape[axis + 1 :]]
        size, axes = op.Reshape(whole, np.asarray(parts, np.int64)), [axis + 1]
    else:
        own = axis % len(shape)
        axes = [i for i in range(len(shape)) if i != own] if kept == (shape[own],) else []
    largest = op.ReduceMax(size, np.asarray(axes, np.int64) if axes else None, keepdims=0)
    scale = op.Max(largest / most_symmetric(one.dtype), LEAST_SCALE)
    result: Expr = op.Reshape(scale, np.asarray(kept, np.int64)).like(one.scale)
    return result


def _static(value: ir.Value) -> tuple[int, ...]:
    tensor = constant_tensor(value)
    assert tensor is not None
    return tuple(tensor.shape.numpy())
