"""Functions of JAX to train, batches for them, and a step of optax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]


def digits(count: int, *shape: int) -> list[Arrays]:
    rng = np.random.default_rng(0)
    return [
        {"image": rng.normal(size=(16, *shape)).astype(np.float32), "labels": rng.integers(0, 10, 16)}
        for _ in range(count)
    ]


def sentences(count: int) -> list[Arrays]:
    rng = np.random.default_rng(0)
    return [{"tokens": rng.integers(0, 32, (4, 7)), "labels": rng.integers(0, 32, (4, 7))} for _ in range(count)]


def dense(rng: np.random.Generator, *shape: int) -> dict[str, Any]:
    import jax.numpy as jnp

    return {"kernel": jnp.asarray(rng.normal(size=shape) * 0.2, "float32"), "bias": jnp.zeros(shape[-1])}


def apply_dense(p: Any, x: Any) -> Any:
    return x @ p["kernel"] + p["bias"]


def cross_entropy(logits: Any, labels: Any) -> Any:
    import optax

    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def mlp(params: Any, x: Any) -> Any:
    import jax

    return apply_dense(params["fc2"], jax.nn.relu(apply_dense(params["fc1"], x)))


def trained(loss: Callable[..., Any], tx: Any) -> Callable[..., Any]:
    """A step of optax; with statistics, the loss returns them, too."""
    import jax
    import optax

    @jax.jit
    def step(params: Any, state: Any, statistics: Any, batch: Any) -> Any:
        def with_more(params: Any) -> Any:
            return (loss(params, batch), None) if statistics is None else loss(params, statistics, batch)

        (value, following), slopes = jax.value_and_grad(with_more, has_aux=True)(params)
        changes, state = tx.update(slopes, state, params)
        return optax.apply_updates(params, changes), state, following, value

    return step


def with_short_labels(batches: list[Arrays]) -> list[Arrays]:
    return [{name: a.astype(np.int32) if a.dtype.kind == "i" else a for name, a in batch.items()} for batch in batches]
