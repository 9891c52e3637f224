"""Runs of JAX: a loss of parameters and a batch, an optimizer of optax and a batch."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import onward
from onward.frameworks.jax.closures import named_leaves
from onward.frameworks.jax.jaxpr.builder import data_of
from onward.model.state import states
from zoo import NUDGES, STEPS, Run, nudged


@dataclasses.dataclass
class Objects:
    """What a training loop of JAX has."""

    loss: Callable[..., Any]
    """(params, batch) -> scalar; with `statistics`, (params, statistics, batch) -> (scalar, new statistics)."""
    params: Any
    batch: Mapping[str, np.ndarray]
    optimizer: optax.GradientTransformation = dataclasses.field(default_factory=lambda: optax.adamw(1e-2, eps=1e-3))
    statistics: Any = None


@dataclasses.dataclass
class NNX:
    """A module of Flax NNX and a loss that may change it."""

    loss: Callable[..., Any]
    """(module, batch) -> scalar"""
    module: Any
    batch: Mapping[str, np.ndarray]
    optimizer: optax.GradientTransformation = dataclasses.field(default_factory=lambda: optax.adamw(1e-2, eps=1e-3))
    wrt: Any = None


def run(objects: Objects | NNX) -> Run:
    if isinstance(objects, NNX):
        training, steps = _captured_module(objects), _module_steps
    else:
        training = onward.from_jax(
            objects.loss, objects.params, objects.batch, optimizer=objects.optimizer, statistics=objects.statistics
        )
        steps = _steps
    types = {value.name: value.dtype.numpy() for value in training.inputs}
    batch = {name: np.asarray(x).astype(types[name]) for name, x in objects.batch.items() if name in types}
    advance = steps(objects)
    losses, weights = advance(0)
    moved = [advance(seed) for seed in range(1, 1 + NUDGES)]
    changed = {state.name for state in states(training)}
    return Run(training, batch, losses, {name: x for name, x in weights.items() if name in changed}, moved)


Advance = Callable[[int], tuple[list[float], dict[str, np.ndarray]]]
"""Function of a seed: losses and weights of steps. With one that is not 0, from weights with other last digits."""


def _steps(objects: Objects) -> Advance:
    is_weight = lambda leaf: jnp.issubdtype(getattr(leaf, "dtype", bool), jnp.floating)
    start = jax.tree.map(lambda leaf: leaf if is_weight(leaf) else None, objects.params)

    def loss(weights: Any, statistics: Any, batch: Any) -> Any:
        params = jax.tree.map(lambda old, new: old if new is None else new, objects.params, weights)
        if statistics is None:
            return objects.loss(params, batch), None
        return objects.loss(params, jax.tree.map(lambda leaf: leaf, statistics), batch)

    @jax.jit
    def step(weights: Any, statistics: Any, state: Any, batch: Any) -> Any:
        (value, new), gradients = jax.value_and_grad(loss, has_aux=True)(weights, statistics, batch)
        updates, state = objects.optimizer.update(gradients, state, weights)
        return value, optax.apply_updates(weights, updates), new, state

    def advance(seed: int) -> tuple[list[float], dict[str, np.ndarray]]:
        weights = _nudged_tree(start, seed)
        statistics, state, losses = objects.statistics, objects.optimizer.init(weights), []
        for _ in range(STEPS):
            value, weights, statistics, state = step(weights, statistics, state, dict(objects.batch))
            losses.append(float(value))
        return losses, _arrays(weights) | _arrays(statistics)

    return advance


def _nudged_tree(tree: Any, seed: int) -> Any:
    arrays = nudged(_arrays(tree), seed) if seed else _arrays(tree)
    return jax.tree.unflatten(jax.tree.structure(tree), list(map(jnp.asarray, arrays.values())))


def _captured_module(objects: NNX) -> Any:
    from flax import nnx

    module = copy.deepcopy(objects.module)
    optimizer = nnx.Optimizer(module, objects.optimizer, wrt=objects.wrt or nnx.Param)
    return onward.from_jax(objects.loss, module, objects.batch, optimizer=optimizer)


def _module_steps(objects: NNX) -> Advance:
    from flax import nnx

    wrt = objects.wrt or nnx.Param

    @nnx.jit
    def step(module: Any, optimizer: Any, batch: Any) -> Any:
        value, gradients = nnx.value_and_grad(objects.loss, argnums=nnx.DiffState(0, wrt))(module, batch)
        optimizer.update(module, gradients)
        return value

    def advance(seed: int) -> tuple[list[float], dict[str, np.ndarray]]:
        module = copy.deepcopy(objects.module)
        nnx.update(module, _nudged_tree(nnx.state(module, wrt), seed))
        optimizer = nnx.Optimizer(module, objects.optimizer, wrt=wrt)
        losses = [float(step(module, optimizer, dict(objects.batch))) for _ in range(STEPS)]
        return losses, _arrays(nnx.state(module))

    return advance


def _arrays(tree: Any) -> dict[str, np.ndarray]:
    """Return the floating-point arrays of a tree by name."""
    arrays = {name: leaf for name, leaf in named_leaves(tree).items() if hasattr(leaf, "dtype")}
    return {name: data_of(leaf) for name, leaf in arrays.items() if jnp.issubdtype(leaf.dtype, jnp.floating)}
