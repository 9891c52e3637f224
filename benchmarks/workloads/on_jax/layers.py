"""Layers in JAX: functions of weights by their names in PyTorch, with channels last."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from workloads.architectures import LORA

Arrays = dict[str, jax.Array]


def linear(w: Arrays, name: str, x: jax.Array) -> jax.Array:
    y = x @ w[f"{name}.weight"] + w[f"{name}.bias"]
    if f"{name}.lora_A.weight" in w:
        y += x @ w[f"{name}.lora_A.weight"] @ w[f"{name}.lora_B.weight"] * LORA.scale
    return y


def conv(w: Arrays, name: str, x: jax.Array, stride: int = 1, padding: int = 0, groups: int = 1) -> jax.Array:
    return lax.conv_general_dilated(
        x,
        w[f"{name}.weight"],
        (stride, stride),
        [(padding, padding)] * 2,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


def max_pool(x: jax.Array) -> jax.Array:
    """Return the maximum of 3 x 3 pixels, with stride 2."""
    around = [(0, 0), (1, 1), (1, 1), (0, 0)]
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), around)


def halved(x: jax.Array) -> jax.Array:
    """Return the maximum of 2 x 2 pixels."""
    n, height, width, channels = x.shape
    return x.reshape(n, height // 2, 2, width // 2, 2, channels).max((2, 4))


def batch_norm(
    w: Arrays, stats: Arrays, name: str, x: jax.Array, momentum: float = 0.1, epsilon: float = 1e-5
) -> jax.Array:
    """Normalize. Running statistics are in `stats`, which changes, or in `w` if the layer is frozen."""
    if f"{name}.running_mean" in stats:
        mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
        samples = x.size // x.shape[-1]
        for statistic, value in (("mean", mean), ("var", variance * samples / (samples - 1))):
            stats[f"{name}.running_{statistic}"] += momentum * (value - stats[f"{name}.running_{statistic}"])
    else:
        mean, variance = w[f"{name}.running_mean"], w[f"{name}.running_var"]
    return (x - mean) * lax.rsqrt(variance + epsilon) * w[f"{name}.weight"] + w[f"{name}.bias"]


def layer_norm(w: Arrays, name: str, x: jax.Array) -> jax.Array:
    return jax.nn.standardize(x, epsilon=1e-5) * w[f"{name}.weight"] + w[f"{name}.bias"]


def attend(q: jax.Array, k: jax.Array, v: jax.Array, heads: int, is_causal: bool = False) -> jax.Array:
    n, length, width = q.shape
    q, k, v = (x.reshape(n, length, heads, -1) for x in (q, k, v))
    return jax.nn.dot_product_attention(q, k, v, is_causal=is_causal).reshape(n, length, width)
