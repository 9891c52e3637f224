"""Layers in TensorFlow: functions of variables by their names in PyTorch, with channels last."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from workloads.architectures import LORA

Variables = dict[str, tf.Variable]


def linear(w: Variables, name: str, x: tf.Tensor) -> tf.Tensor:
    y = tf.nn.bias_add(x @ w[f"{name}.weight"], w[f"{name}.bias"])
    if f"{name}.lora_A.weight" in w:
        y += x @ w[f"{name}.lora_A.weight"] @ w[f"{name}.lora_B.weight"] * LORA.scale
    return y


def conv(w: Variables, name: str, x: tf.Tensor, stride: int = 1, padding: int = 0) -> tf.Tensor:
    return tf.nn.conv2d(x, w[f"{name}.weight"], stride, _around(padding))


def depthwise(w: Variables, name: str, x: tf.Tensor, stride: int, padding: int) -> tf.Tensor:
    kernels = tf.transpose(w[f"{name}.weight"], [0, 1, 3, 2])
    return tf.nn.depthwise_conv2d(x, kernels, [1, stride, stride, 1], _around(padding))


def max_pool(x: tf.Tensor) -> tf.Tensor:
    """Return the maximum of 3 x 3 pixels, none of them negative, with stride 2."""
    return tf.nn.max_pool2d(tf.pad(x, _around(1)), 3, 2, "VALID")


def _around(padding: int) -> list[list[int]]:
    return [[0, 0], [padding, padding], [padding, padding], [0, 0]]


def batch_norm(w: Variables, name: str, x: tf.Tensor, momentum: float = 0.1, epsilon: float = 1e-5) -> tf.Tensor:
    scale, bias = w[f"{name}.weight"], w[f"{name}.bias"]
    running = [w[f"{name}.running_{statistic}"] for statistic in ("mean", "var")]
    if not scale.trainable:
        return tf.nn.batch_normalization(x, *running, bias, scale, epsilon)
    y, *of_batch = tf.compat.v1.nn.fused_batch_norm(x, scale, bias, epsilon=epsilon)  # unbiased variance
    for average, new in zip(running, of_batch, strict=True):
        average.assign_add(momentum * (new - average))
    return y


def layer_norm(w: Variables, name: str, x: tf.Tensor) -> tf.Tensor:
    mean, variance = tf.nn.moments(x, -1, keepdims=True)
    return tf.nn.batch_normalization(x, mean, variance, w[f"{name}.bias"], w[f"{name}.weight"], 1e-5)


def attend(q: tf.Tensor, k: tf.Tensor, v: tf.Tensor, heads: int, is_causal: bool = False) -> tf.Tensor:
    n, length, width = q.shape
    q, k, v = (tf.transpose(tf.reshape(x, [n, length, heads, -1]), [0, 2, 1, 3]) for x in (q, k, v))
    scores = tf.matmul(q, k, transpose_b=True) / np.sqrt(width / heads).astype(np.float32)
    if is_causal:
        scores += np.triu(np.full([length, length], -1e9, np.float32), 1)
    mixed = tf.nn.softmax(scores) @ v
    return tf.reshape(tf.transpose(mixed, [0, 2, 1, 3]), [n, length, width])
