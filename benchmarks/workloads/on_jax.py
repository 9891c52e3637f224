"""The workloads in JAX, with optax: pure functions of weights, and one compiled step that gives its memory on."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from workloads import HEADS, LAYERS, WIDTH, Step, Workload, channels_last

Arrays = dict[str, jax.Array]


def mlp(w: Arrays, stats: Arrays, x: jax.Array) -> tuple[jax.Array, Arrays]:
    x = jax.nn.relu(_linear(w, "fc1", x))
    x = jax.nn.relu(_linear(w, "fc2", x))
    return _linear(w, "fc3", x), stats


def lenet(w: Arrays, stats: Arrays, x: jax.Array) -> tuple[jax.Array, Arrays]:
    x = _halved(jax.nn.relu(_conv(w, "conv1", x, padding=2) + w["conv1.bias"]))
    x = _halved(jax.nn.relu(_conv(w, "conv2", x) + w["conv2.bias"]))
    return mlp(w, stats, x.reshape(x.shape[0], -1))


def resnet(w: Arrays, stats: Arrays, x: jax.Array) -> tuple[jax.Array, Arrays]:
    stats = dict(stats)
    x = jax.nn.relu(_norm(w, stats, "norm", _conv(w, "conv", x, padding=1)))
    for block, stride in (("block1", 1), ("block2", 2), ("block3", 2)):
        y = jax.nn.relu(_norm(w, stats, f"{block}.norm1", _conv(w, f"{block}.conv1", x, stride, 1)))
        y = _norm(w, stats, f"{block}.norm2", _conv(w, f"{block}.conv2", y, padding=1))
        if stride > 1:
            x = _norm(w, stats, f"{block}.norm3", _conv(w, f"{block}.conv3", x, stride))
        x = jax.nn.relu(y + x)
    return _linear(w, "head", x.mean((1, 2))), stats


def gpt(w: Arrays, stats: Arrays, tokens: jax.Array) -> tuple[jax.Array, Arrays]:
    x = w["tokens.weight"][tokens] + w["positions"]
    for i in range(LAYERS):
        at = f"layers.{i}"
        x = x + _linear(w, f"{at}.project", _attend(_linear(w, f"{at}.qkv", _layer_norm(w, f"{at}.norm1", x))))
        hidden = jax.nn.gelu(_linear(w, f"{at}.up", _layer_norm(w, f"{at}.norm2", x)), approximate=False)
        x = x + _linear(w, f"{at}.down", hidden)
    return _layer_norm(w, "norm", x) @ w["head.weight"], stats


def _linear(w: Arrays, name: str, x: jax.Array) -> jax.Array:
    return x @ w[f"{name}.weight"] + w[f"{name}.bias"]


def _conv(w: Arrays, name: str, x: jax.Array, stride: int = 1, padding: int = 0) -> jax.Array:
    return lax.conv_general_dilated(
        x, w[f"{name}.weight"], (stride, stride), [(padding, padding)] * 2, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _halved(x: jax.Array) -> jax.Array:
    """The maximum of 2 x 2 pixels."""
    n, height, width, channels = x.shape
    return x.reshape(n, height // 2, 2, width // 2, 2, channels).max((2, 4))


def _norm(w: Arrays, stats: Arrays, name: str, x: jax.Array) -> jax.Array:
    mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
    samples = x.size // x.shape[-1]
    for kind, value in (("mean", mean), ("var", variance * samples / (samples - 1))):
        stats[f"{name}.running_{kind}"] = 0.9 * stats[f"{name}.running_{kind}"] + 0.1 * value
    return (x - mean) * lax.rsqrt(variance + 1e-5) * w[f"{name}.weight"] + w[f"{name}.bias"]


def _layer_norm(w: Arrays, name: str, x: jax.Array) -> jax.Array:
    return jax.nn.standardize(x, epsilon=1e-5) * w[f"{name}.weight"] + w[f"{name}.bias"]


def _attend(qkv: jax.Array) -> jax.Array:
    n, length, _ = qkv.shape
    q, k, v = (part.reshape(n, length, HEADS, -1) for part in jnp.split(qkv, 3, -1))
    return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(n, length, WIDTH)


MODELS = {"mlp": mlp, "lenet": lenet, "resnet": resnet, "gpt": gpt}


def _optimizer(workload: Workload) -> optax.GradientTransformation:
    rates = dict(workload.rates)
    make = {"sgd": optax.sgd, "momentum": optax.sgd, "adam": optax.adam, "adamw": optax.adamw}[workload.optimizer]
    return make(rates.pop("lr"), **rates)


def load(workload: Workload, folder: Path) -> Step:
    model, optimizer = MODELS[workload.model], _optimizer(workload)

    @partial(jax.jit, donate_argnums=0)
    def update(state, x, labels):
        weights, stats, slots = state

        def loss_of(weights):
            logits, new = model(weights, stats, x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), new

        (loss, stats), gradients = jax.value_and_grad(loss_of, has_aux=True)(weights)
        changes, slots = optimizer.update(gradients, slots, weights)
        return (optax.apply_updates(weights, changes), stats, slots), loss

    arrays = {name: jnp.asarray(array) for name, array in channels_last.weights(folder).items()}
    stats = {name: arrays.pop(name) for name in list(arrays) if "running" in name}
    state = (arrays, stats, optimizer.init(arrays))

    def step(x: np.ndarray, labels: np.ndarray) -> float:
        nonlocal state
        state, loss = update(state, x, labels)
        return float(loss)

    return step
