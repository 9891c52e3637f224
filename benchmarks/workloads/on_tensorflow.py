"""The workloads in TensorFlow: functions over variables, an optimizer of Keras, the step as one `tf.function`."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from workloads import HEADS, LAYERS, LENGTH, THREADS, WIDTH, Step, Workload, channels_last

Variables = dict[str, tf.Variable]


def mlp(w: Variables, x: tf.Tensor) -> tf.Tensor:
    x = tf.nn.relu(_linear(w, "fc1", x))
    x = tf.nn.relu(_linear(w, "fc2", x))
    return _linear(w, "fc3", x)


def lenet(w: Variables, x: tf.Tensor) -> tf.Tensor:
    x = tf.nn.relu(tf.nn.bias_add(_conv(w, "conv1", x, padding=2), w["conv1.bias"]))
    x = tf.nn.max_pool2d(x, 2, 2, "VALID")
    x = tf.nn.relu(tf.nn.bias_add(_conv(w, "conv2", x), w["conv2.bias"]))
    x = tf.nn.max_pool2d(x, 2, 2, "VALID")
    return mlp(w, tf.reshape(x, [x.shape[0], -1]))


def resnet(w: Variables, x: tf.Tensor) -> tf.Tensor:
    x = tf.nn.relu(_norm(w, "norm", _conv(w, "conv", x, padding=1)))
    for block, stride in (("block1", 1), ("block2", 2), ("block3", 2)):
        y = tf.nn.relu(_norm(w, f"{block}.norm1", _conv(w, f"{block}.conv1", x, stride, 1)))
        y = _norm(w, f"{block}.norm2", _conv(w, f"{block}.conv2", y, padding=1))
        if stride > 1:
            x = _norm(w, f"{block}.norm3", _conv(w, f"{block}.conv3", x, stride))
        x = tf.nn.relu(y + x)
    return _linear(w, "head", tf.reduce_mean(x, (1, 2)))


def gpt(w: Variables, tokens: tf.Tensor) -> tf.Tensor:
    x = tf.gather(w["tokens.weight"], tokens) + w["positions"]
    for i in range(LAYERS):
        at = f"layers.{i}"
        x = x + _linear(w, f"{at}.project", _attend(_linear(w, f"{at}.qkv", _layer_norm(w, f"{at}.norm1", x))))
        hidden = tf.nn.gelu(_linear(w, f"{at}.up", _layer_norm(w, f"{at}.norm2", x)))
        x = x + _linear(w, f"{at}.down", hidden)
    return _layer_norm(w, "norm", x) @ w["head.weight"]


def _linear(w: Variables, name: str, x: tf.Tensor) -> tf.Tensor:
    return tf.nn.bias_add(x @ w[f"{name}.weight"], w[f"{name}.bias"])


def _conv(w: Variables, name: str, x: tf.Tensor, stride: int = 1, padding: int = 0) -> tf.Tensor:
    around = [[0, 0], [padding, padding], [padding, padding], [0, 0]]
    return tf.nn.conv2d(x, w[f"{name}.weight"], stride, around)


def _norm(w: Variables, name: str, x: tf.Tensor) -> tf.Tensor:
    """The variance that it returns is that of a sample."""
    y, mean, variance = tf.compat.v1.nn.fused_batch_norm(x, w[f"{name}.weight"], w[f"{name}.bias"], epsilon=1e-5)
    for kind, value in (("mean", mean), ("var", variance)):
        running = w[f"{name}.running_{kind}"]
        running.assign(0.9 * running + 0.1 * value)
    return y


def _layer_norm(w: Variables, name: str, x: tf.Tensor) -> tf.Tensor:
    mean, variance = tf.nn.moments(x, -1, keepdims=True)
    return tf.nn.batch_normalization(x, mean, variance, w[f"{name}.bias"], w[f"{name}.weight"], 1e-5)


def _attend(qkv: tf.Tensor) -> tf.Tensor:
    n, length, _ = qkv.shape
    q, k, v = (
        tf.transpose(tf.reshape(part, [n, length, HEADS, -1]), [0, 2, 1, 3]) for part in tf.split(qkv, 3, axis=-1)
    )
    scores = tf.matmul(q, k, transpose_b=True) / np.sqrt(WIDTH / HEADS).astype(np.float32)
    scores += np.triu(np.full([LENGTH, LENGTH], -1e9, np.float32), 1)
    mixed = tf.nn.softmax(scores) @ v
    return tf.reshape(tf.transpose(mixed, [0, 2, 1, 3]), [n, length, WIDTH])


MODELS = {"mlp": mlp, "lenet": lenet, "resnet": resnet, "gpt": gpt}


def _optimizer(workload: Workload) -> keras.optimizers.Optimizer:
    rates = dict(workload.rates)
    rate = rates.pop("lr")
    if workload.optimizer in ("sgd", "momentum"):
        return keras.optimizers.SGD(rate, **rates)
    return {"adam": keras.optimizers.Adam, "adamw": keras.optimizers.AdamW}[workload.optimizer](
        rate, epsilon=1e-8, **rates
    )


def load(workload: Workload, folder: Path) -> Step:
    tf.config.threading.set_intra_op_parallelism_threads(THREADS)
    tf.config.threading.set_inter_op_parallelism_threads(THREADS)
    model, optimizer = MODELS[workload.model], _optimizer(workload)
    variables = {
        name: tf.Variable(array, trainable="running" not in name)
        for name, array in channels_last.weights(folder).items()
    }
    trained = [variable for variable in variables.values() if variable.trainable]
    optimizer.build(trained)

    @tf.function
    def update(x, labels):
        with tf.GradientTape() as tape:
            logits = model(variables, x)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        optimizer.apply(tape.gradient(loss, trained), trained)
        return loss

    return lambda x, labels: float(update(tf.constant(x), tf.constant(labels)))
