"""Models of Keras as tutorials have them."""

import keras
import numpy as np
from keras import layers
from side_keras import Objects

from zoo import Case

CROSS_ENTROPY = "sparse_categorical_crossentropy"


def floats(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def labels():
    return np.random.default_rng(1).integers(0, 4, 8)


def compiled(model, inputs, targets, loss=CROSS_ENTROPY):
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss=loss)
    return Objects(model, inputs, targets)


def mlp():
    stack = layers.Dense(16, "relu"), layers.BatchNormalization(), layers.Dropout(0.5), layers.Dense(4, "softmax")
    return compiled(keras.Sequential([keras.Input((12,)), *stack]), floats(8, 12), labels())


def several_inputs():
    a, b = keras.Input((6,), name="numbers"), keras.Input((4,), dtype="int32", name="words")
    words = layers.Flatten()(layers.Embedding(20, 3)(b))
    y = layers.Dense(4, activation="softmax")(layers.concatenate([layers.Dense(8, "relu")(a), words]))
    tokens = np.random.default_rng(0).integers(1, 20, (8, 4)).astype(np.int32)
    return compiled(keras.Model([a, b], y), [floats(8, 6), tokens], labels())


def several_outputs():
    x = keras.Input((6,))
    h = layers.Dense(8, "relu")(x)
    net = keras.Model(x, {"kind": layers.Dense(4, activation="softmax")(h), "size": layers.Dense(1)(h)})
    loss = {"kind": CROSS_ENTROPY, "size": "mse"}
    return compiled(net, floats(8, 6), {"kind": labels(), "size": floats(8, 1)}, loss)


CASES = [
    Case("layers", "mlp", "keras", mlp, quick=True),
    Case("functional models", "several inputs", "keras", several_inputs),
    Case("functional models", "several outputs", "keras", several_outputs),
]
