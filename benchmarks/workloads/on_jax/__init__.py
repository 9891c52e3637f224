"""The workloads in JAX, with optax: pure functions of weights, and one compiled step with donated buffers."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from workloads import Step, Workload, channels_last
from workloads.on_jax import images, sequences

MODELS = {**images.MODELS, **sequences.MODELS}


def load(workload: Workload, folder: Path, threads: int) -> Step:
    """Return the step. `threads` has no effect: JAX uses all cores of the process."""
    model, optimizer = MODELS[workload.model], _optimizer(workload)

    @partial(jax.jit, donate_argnums=0)
    def update(state, frozen, x, labels):
        weights, stats, slots = state

        def loss_of(weights):
            logits, new = model(weights | frozen, stats, x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), new

        (loss, stats), gradients = jax.value_and_grad(loss_of, has_aux=True)(weights)
        changes, slots = optimizer.update(gradients, slots, weights)
        return (optax.apply_updates(weights, changes), stats, slots), loss

    arrays = {name: jnp.asarray(array) for name, array in channels_last.weights(folder).items()}
    trained = {name: arrays.pop(name) for name in list(arrays) if workload.trains(name)}
    stats = {name: trained.pop(name) for name in list(trained) if "running" in name}
    state = (trained, stats, optimizer.init(trained))

    def step(x: np.ndarray, labels: np.ndarray) -> float:
        nonlocal state
        state, loss = update(state, arrays, x, labels)
        return float(loss)

    return step


def _optimizer(workload: Workload) -> optax.GradientTransformation:
    rates = dict(workload.rates)
    make = {"sgd": optax.sgd, "momentum": optax.sgd, "adam": optax.adam, "adamw": optax.adamw}[workload.optimizer]
    return make(rates.pop("lr"), **rates)
