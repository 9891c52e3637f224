"""The graph of a module whose training a checkpoint goes on with, and what only the module knows: which parameters are
tied, and in which order an optimizer was given them."""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from onward.errors import UnsupportedError
from onward.frameworks.torch.arguments import tensors_of
from onward.frameworks.torch.capture import captured_in_place, check_copyable, unwrap_module
from onward.frameworks.torch.native_run import probe_module
from onward.frameworks.torch.placeholder_parameters import hollow_copy
from onward.model import Model

Order = tuple[tuple[str, ...], ...]
"""Parameters, by groups of an optimizer."""

LOSS = "loss"


class Architecture(NamedTuple):
    model: Model
    loss: str | None
    """In words of a recipe, where the module computes it."""
    orders: Mapping[str, Order]
    """In which an optimizer can have been given the parameters, by what says so. Names are those of the graph."""
    aliases: tuple[tuple[str, ...], ...]
    """All names of each parameter that has several."""
    stored: Mapping[str, str] = {}
    """Names that files have for those of the graph, where they are others."""
    probe: Callable[[Model, Any], None] | None = None
    """Compares the model, with weights of any values, under a loss with the module."""


def from_configuration(
    configuration: Mapping[str, Any],
    types: Mapping[str, np.dtype],
    example_inputs: Any,
    *,
    computes_loss: bool,
    in_trainer: bool,
) -> Architecture:
    """The model of transformers that a configuration describes; `types` are those of its parameters, by name.

    `computes_loss` says that its own loss is trained, and `in_trainer` that the Trainer does it.
    """
    from onward.frameworks.torch.transformers_models import hollow_model

    return _of_transformers(hollow_model(configuration, types), example_inputs, computes_loss, in_trainer)


def _of_transformers(module: nn.Module, inputs: Any, computes_loss: bool, in_trainer: bool) -> Architecture:
    from onward.frameworks.torch.transformers_models import (
        as_the_trainer_calls,
        axes_of,
        decay_groups,
        example_of,
        stored_names,
    )

    if inputs is None:
        inputs, axes = example_of(module)
        if not computes_loss:
            inputs = {name: tensor for name, tensor in inputs.items() if name != "labels"}
        axes = {name: axes[name] for name in inputs}
    else:
        axes = axes_of(inputs)
    orders = {"the model, as the Trainer groups its parameters": decay_groups(module), **_order(module)}
    stored = {theirs: ours for ours, theirs in stored_names(module).items() if ours != theirs}
    if in_trainer:
        as_the_trainer_calls(module)
    return _architecture(module, inputs, axes, orders)._replace(stored=stored)


def from_module(module: nn.Module, example_inputs: Any, *, computes_loss: bool, in_trainer: bool) -> Architecture:
    """The model that a module is; what is given stays as it is.

    A module of Lightning whose loss is not said computes it in its `training_step`, and the example is a batch.
    """
    module = unwrap_module(module)
    check_copyable(module)
    module = hollow_copy(module)
    if hasattr(module, "config") and hasattr(module, "main_input_name"):
        return _of_transformers(module, example_inputs, computes_loss, in_trainer)
    has_step = computes_loss and hasattr(module, "training_step")
    if example_inputs is None and not has_step:
        example_inputs = getattr(module, "example_input_array", None)
    if example_inputs is None:
        raise UnsupportedError(
            f"what `{type(module).__name__}` takes is not known",
            hint="give it: `example_inputs=...`, " + ("a batch of its data" if has_step else "as for `from_torch`"),
        )
    if has_step:
        module, example_inputs = _training_step(module, example_inputs)
    return _architecture(module, example_inputs, None, _order(module))


def _order(module: nn.Module) -> dict[str, Order]:
    return {"the module": (tuple(name for name, _ in module.named_parameters()),)}


def remember_example(example: Any) -> Any:
    """An example that a training loop went by: a copy on the CPU, and of at least two samples."""

    def kept(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        tensor = tensor.detach().cpu().clone()
        return torch.cat([tensor, tensor]) if tensor.ndim and tensor.shape[0] == 1 else tensor

    return pytree.tree_map(kept, example)


def _training_step(module: Any, batch: Any) -> tuple[nn.Module, Any]:
    """A module of Lightning whose forward pass is the loss of a batch, and the batch as it takes it."""
    if not getattr(module, "automatic_optimization", True):
        raise UnsupportedError(
            f"`{type(module).__name__}` has a training loop of its own (`automatic_optimization = False`)",
            hint="say the loss of its forward pass: `loss=...`",
        )
    shell = copy.copy(module)  # holds the same tensors; a training step may call the forward pass of the module
    # A bound method, so that a copy of the shell calls a copy of the module.
    shell.forward = types.MethodType(_loss_by_name if isinstance(batch, Mapping) else _loss_of, module)
    return shell, dict(batch) if isinstance(batch, Mapping) else (batch,)


def _loss_of(module: Any, batch: Any) -> dict[str, torch.Tensor]:
    takes_index = len(inspect.signature(module.training_step).parameters) > 1
    made = module.training_step(*((batch, 0) if takes_index else (batch,)))
    return {LOSS: made[LOSS] if isinstance(made, Mapping) else made}


def _loss_by_name(module: Any, **batch: Any) -> dict[str, torch.Tensor]:
    return _loss_of(module, batch)


def _architecture(
    module: nn.Module, inputs: Any, axes: Mapping[str, Any] | None, orders: Mapping[str, Order]
) -> Architecture:
    model = captured_in_place(module, inputs, axes)
    names: dict[int, list[str]] = {}
    for name, tensor in tensors_of(module):
        names.setdefault(id(tensor), []).append(name)
    first = {name: same[0] for same in names.values() for name in same}
    loss = f"value:{LOSS}" if any(value.name == LOSS for value in model.outputs) else None
    return Architecture(
        model,
        loss,
        {origin: tuple(tuple(first[name] for name in group) for group in order) for origin, order in orders.items()},
        tuple(tuple(same) for same in names.values() if len(same) > 1),
        probe=functools.partial(probe_module, module, inputs),
    )
