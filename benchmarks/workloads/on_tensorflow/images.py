"""Image models in TensorFlow."""

from __future__ import annotations

from functools import partial

import tensorflow as tf
from keras.activations import hard_sigmoid, hard_swish

from workloads.architectures import MOBILENET, RESNETS, STEM, Inverted
from workloads.on_tensorflow.layers import Variables, batch_norm, conv, depthwise, linear, max_pool


def mlp(w: Variables, x: tf.Tensor) -> tf.Tensor:
    x = tf.nn.relu(linear(w, "fc1", x))
    x = tf.nn.relu(linear(w, "fc2", x))
    return linear(w, "fc3", x)


def lenet(w: Variables, x: tf.Tensor) -> tf.Tensor:
    x = tf.nn.relu(tf.nn.bias_add(conv(w, "conv1", x, padding=2), w["conv1.bias"]))
    x = tf.nn.max_pool2d(x, 2, 2, "VALID")
    x = tf.nn.relu(tf.nn.bias_add(conv(w, "conv2", x), w["conv2.bias"]))
    x = tf.nn.max_pool2d(x, 2, 2, "VALID")
    return mlp(w, tf.reshape(x, [x.shape[0], -1]))


def resnet(name: str, w: Variables, x: tf.Tensor) -> tf.Tensor:
    kernel, stages = RESNETS[name]
    halves = kernel > 3
    x = tf.nn.relu(batch_norm(w, "norm", conv(w, "conv", x, 2 if halves else 1, kernel // 2)))
    if halves:
        x = max_pool(x)
    for stage, (_, blocks) in enumerate(stages):
        for block in range(blocks):
            x = _block(w, f"stages.{stage}.{block}", x, 2 if stage and not block else 1)
    return linear(w, "head", tf.reduce_mean(x, (1, 2)))


def _block(w: Variables, at: str, x: tf.Tensor, stride: int) -> tf.Tensor:
    y = tf.nn.relu(batch_norm(w, f"{at}.norm1", conv(w, f"{at}.conv1", x, stride, 1)))
    y = batch_norm(w, f"{at}.norm2", conv(w, f"{at}.conv2", y, padding=1))
    if stride > 1:
        x = batch_norm(w, f"{at}.norm3", conv(w, f"{at}.conv3", x, stride))
    return tf.nn.relu(y + x)


def mobilenet(w: Variables, x: tf.Tensor) -> tf.Tensor:
    x = hard_swish(_norm(w, "stem", conv(w, "stem.conv", x, 2, 1)))
    before = STEM
    for i, sizes in enumerate(MOBILENET):
        x = _inverted(w, f"blocks.{i}", x, before, sizes)
        before = sizes.after
    x = tf.reduce_mean(hard_swish(_norm(w, "last", conv(w, "last.conv", x))), (1, 2))
    return linear(w, "head", hard_swish(linear(w, "hidden", x)))


def _inverted(w: Variables, at: str, x: tf.Tensor, before: int, sizes: Inverted) -> tf.Tensor:
    active = hard_swish if sizes.hard_swish else tf.nn.relu
    y = active(_norm(w, f"{at}.expand", conv(w, f"{at}.expand.conv", x))) if sizes.wide != before else x
    y = depthwise(w, f"{at}.depthwise.conv", y, sizes.stride, sizes.kernel // 2)
    y = active(_norm(w, f"{at}.depthwise", y))
    if sizes.squeezes:
        y = y * _gate(w, f"{at}.gate", y)
    y = _norm(w, f"{at}.project", conv(w, f"{at}.project.conv", y))
    return x + y if before == sizes.after and sizes.stride == 1 else y


def _gate(w: Variables, at: str, x: tf.Tensor) -> tf.Tensor:
    means = tf.reduce_mean(x, (1, 2), keepdims=True)
    few = tf.nn.relu(conv(w, f"{at}.squeeze", means) + w[f"{at}.squeeze.bias"])
    return hard_sigmoid(conv(w, f"{at}.excite", few) + w[f"{at}.excite.bias"])


def _norm(w: Variables, at: str, x: tf.Tensor) -> tf.Tensor:
    return batch_norm(w, f"{at}.norm", x, momentum=0.01, epsilon=1e-3)


MODELS = {
    "mlp": mlp,
    "lenet": lenet,
    "resnet8": partial(resnet, "resnet8"),
    "resnet18": partial(resnet, "resnet18"),
    "mobilenet": mobilenet,
}
