"""Image models in JAX: functions (weights, running statistics, images) -> (logits, new statistics)."""

from __future__ import annotations

from functools import partial

import jax

from workloads.architectures import MOBILENET, RESNETS, STEM, Inverted
from workloads.on_jax.layers import Arrays, batch_norm, conv, halved, linear, max_pool


def mlp(w: Arrays, stats: Arrays, x: jax.Array) -> tuple[jax.Array, Arrays]:
    x = jax.nn.relu(linear(w, "fc1", x))
    x = jax.nn.relu(linear(w, "fc2", x))
    return linear(w, "fc3", x), stats


def lenet(w: Arrays, stats: Arrays, x: jax.Array) -> tuple[jax.Array, Arrays]:
    x = halved(jax.nn.relu(conv(w, "conv1", x, padding=2) + w["conv1.bias"]))
    x = halved(jax.nn.relu(conv(w, "conv2", x) + w["conv2.bias"]))
    return mlp(w, stats, x.reshape(x.shape[0], -1))


def resnet(name: str, w: Arrays, stats: Arrays, x: jax.Array) -> tuple[jax.Array, Arrays]:
    stats = dict(stats)
    kernel, stages = RESNETS[name]
    halves = kernel > 3
    x = jax.nn.relu(batch_norm(w, stats, "norm", conv(w, "conv", x, 2 if halves else 1, kernel // 2)))
    if halves:
        x = max_pool(x)
    for stage, (_, blocks) in enumerate(stages):
        for block in range(blocks):
            x = _block(w, stats, f"stages.{stage}.{block}", x, 2 if stage and not block else 1)
    return linear(w, "head", x.mean((1, 2))), stats


def _block(w: Arrays, stats: Arrays, at: str, x: jax.Array, stride: int) -> jax.Array:
    y = jax.nn.relu(batch_norm(w, stats, f"{at}.norm1", conv(w, f"{at}.conv1", x, stride, 1)))
    y = batch_norm(w, stats, f"{at}.norm2", conv(w, f"{at}.conv2", y, padding=1))
    if stride > 1:
        x = batch_norm(w, stats, f"{at}.norm3", conv(w, f"{at}.conv3", x, stride))
    return jax.nn.relu(y + x)


def mobilenet(w: Arrays, stats: Arrays, x: jax.Array) -> tuple[jax.Array, Arrays]:
    stats = dict(stats)
    x = jax.nn.hard_swish(_convolution(w, stats, "stem", x, 3, 2))
    before = STEM
    for i, sizes in enumerate(MOBILENET):
        x = _inverted(w, stats, f"blocks.{i}", x, before, sizes)
        before = sizes.after
    x = jax.nn.hard_swish(_convolution(w, stats, "last", x)).mean((1, 2))
    return linear(w, "head", jax.nn.hard_swish(linear(w, "hidden", x))), stats


def _inverted(w: Arrays, stats: Arrays, at: str, x: jax.Array, before: int, sizes: Inverted) -> jax.Array:
    active = jax.nn.hard_swish if sizes.hard_swish else jax.nn.relu
    y = active(_convolution(w, stats, f"{at}.expand", x)) if sizes.wide != before else x
    y = active(_convolution(w, stats, f"{at}.depthwise", y, sizes.kernel, sizes.stride, groups=sizes.wide))
    if sizes.squeezes:
        y = y * _gate(w, f"{at}.gate", y)
    y = _convolution(w, stats, f"{at}.project", y)
    return x + y if before == sizes.after and sizes.stride == 1 else y


def _gate(w: Arrays, at: str, x: jax.Array) -> jax.Array:
    means = x.mean((1, 2), keepdims=True)
    few = jax.nn.relu(conv(w, f"{at}.squeeze", means) + w[f"{at}.squeeze.bias"])
    return jax.nn.hard_sigmoid(conv(w, f"{at}.excite", few) + w[f"{at}.excite.bias"])


def _convolution(
    w: Arrays, stats: Arrays, at: str, x: jax.Array, kernel: int = 1, stride: int = 1, groups: int = 1
) -> jax.Array:
    x = conv(w, f"{at}.conv", x, stride, kernel // 2, groups)
    return batch_norm(w, stats, f"{at}.norm", x, momentum=0.01, epsilon=1e-3)


MODELS = {
    "mlp": mlp,
    "lenet": lenet,
    "resnet8": partial(resnet, "resnet8"),
    "resnet18": partial(resnet, "resnet18"),
    "mobilenet": mobilenet,
}
