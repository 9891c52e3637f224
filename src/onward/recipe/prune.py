"""Pruning: the smallest weights of layers become zero, and stay zero while the others are trained.

Masks are constants of the step. Gradients and new weights are masked, so that any optimizer keeps
the zeros.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.arguments import Range
from onward.build import Expr
from onward.errors import RecipeError, UnknownNameError
from onward.model import Model
from onward.model.state import with_metadata
from onward.recipe.layers import Layer, layers, listing
from onward.recipe.spec import check_options, checked_number, parse
from onward.recipe.step_builder import StepBuilder, register
from onward.recipe.trainable import matching

_SOME_OF = re.compile(r"(\d+)of(\d+)")
_OPTIONS: Mapping[str, Any] = {"sparsity": 0.5, "targets": "*", "keep": ()}

Masks = dict[ir.Value, np.ndarray]
"""Weights -> the mask of their remaining numbers."""


def prune(model: Model, parameters: Sequence[ir.Value], settings: str | Mapping[str, Any]) -> Masks:
    """Set the smallest trained weights to zero, in place.

    `magnitude:sparsity=0.5` removes that share of each weight. `2of4` leaves the two largest of
    every four consecutive numbers along the axis that is summed.
    """
    spec = parse(settings)
    match = _SOME_OF.fullmatch(spec.name)
    if not match and spec.name != "magnitude":
        raise UnknownNameError(f"unknown pruning `{spec.name}`", hint="there are `magnitude` and `2of4`")
    defaults = {name: value for name, value in _OPTIONS.items() if name != "sparsity" or not match}
    check_options(f"`prune={spec.name}`", spec.options, defaults)
    options = {**defaults, **spec.options}
    chosen = _chosen(model, parameters, options["targets"], options["keep"])
    left = (int(match[1]), int(match[2])) if match else None
    if left is not None and not 0 < left[0] < left[1]:
        raise RecipeError(f"`prune={spec.name}` must leave at least one number and remove one", hint="write `2of4`")
    sparsity = checked_number("`sparsity` of `prune`", options.get("sparsity", 0.5), Range(above=0, below=1))
    masks = {}
    for layer in chosen:
        old = layer.weight.const_value
        assert old is not None
        array = old.numpy()
        mask = masks[layer.weight] = _largest(array, sparsity) if left is None else _some_of(layer, array, *left)
        layer.weight.const_value = with_metadata(ir.Tensor(array * mask), dict(old.metadata_props), like=old)
    return masks


def _chosen(model: Model, parameters: Sequence[ir.Value], targets: Any, keep: Any) -> list[Layer]:
    candidates = list({layer.weight: layer for layer in layers(model.graph) if layer.weight in parameters}.values())
    words = keep.split("+") if isinstance(keep, str) else list(keep)
    ends = {"first": candidates[:1], "last": candidates[-1:]}
    selected = [
        layer
        for word in words
        for layer in ends.get(word, [candidate for candidate in candidates if matching([word], candidate.names)])
    ]
    patterns = targets.split("+") if isinstance(targets, str) else list(targets)
    chosen = [layer for layer in candidates if matching(patterns, layer.names) and layer not in selected]
    if not chosen:
        raise UnknownNameError("nothing is left to prune", hint=listing(candidates))
    return chosen


def _largest(array: np.ndarray, sparsity: float) -> np.ndarray:
    """Return a mask without the share `sparsity` of the smallest; ties drop the first."""
    order = np.argsort(np.abs(array), axis=None, kind="stable")
    mask = np.ones(array.size, bool)
    mask[order[: round(sparsity * array.size)]] = False
    return mask.reshape(array.shape)


def _some_of(layer: Layer, array: np.ndarray, left: int, size: int) -> np.ndarray:
    """Return a mask of the `left` largest of every `size` numbers along the summed axis."""
    axis = 1 if layer.units_first else 0
    if array.shape[axis] % size:
        raise RecipeError(
            f"`{layer.names[0]}` sums up {array.shape[axis]} numbers, not a multiple of {size}",
            hint=f"do not prune it: `keep={layer.names[0]}`",
        )
    moved = np.moveaxis(array, axis, -1)
    parts = np.abs(moved).reshape(*moved.shape[:-1], -1, size)
    ranks = np.argsort(np.argsort(-parts, -1, kind="stable"), -1)
    return np.moveaxis((ranks < left).reshape(moved.shape), -1, axis)


def mask_gradients(builder: StepBuilder, gradients: Mapping[ir.Value, Expr], masks: Masks) -> dict[ir.Value, Expr]:
    """Set gradients of zero weights to zero."""
    return {value: _masked(builder, value, g, masks).like(value) for value, g in gradients.items()}


def mask_updates(builder: StepBuilder, masks: Masks) -> None:
    """Apply the masks to new weights and to averages of weights."""
    for value in masks:
        for name in (value.name or "", f"ema/{value.name}"):
            if name in builder.step.update:
                builder.amend(name, lambda new, value=value: _masked(builder, value, new, masks))  # type: ignore[misc]


def _masked(builder: StepBuilder, value: ir.Value, expr: Expr, masks: Masks) -> Expr:
    if value not in masks:
        return expr
    name = f"{value.name}/mask"
    if name not in builder.values:
        builder.values[name] = register(builder.op, name, ir.Tensor(masks[value]))
    return builder.op.Where(builder.op(builder.values[name]), builder.op(expr.value), 0.0)
