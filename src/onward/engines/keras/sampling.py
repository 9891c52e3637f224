"""Random numbers of training models, bit for bit: see `onward.recipe.random`.

PyTorch has no arithmetic with uint32, and Keras computes in int64 there: the lower 32 bits are kept.
"""

from __future__ import annotations

import keras
from keras import ops

from onward.build import DOMAIN
from onward.engines.framework import Operators
from onward.engines.keras.indexing import product_of
from onward.engines.keras.values import constant

operators = Operators()
functions = Operators()
"""Functions that training models draw with. Keras computes them faster than their bodies."""


@operators.define("Dropout")
def dropout(x, ratio=None, training_mode=None, *, outputs=1):
    """In inference. Where training drops something, a graph says by itself how."""
    if training_mode and ratio != 0:
        raise NotImplementedError("training with Dropout needs a generator in the graph, as `onward.prepare` puts it")
    return x if outputs == 1 else (x, ops.ones_like(x, "bool"))


def lower_bits(x):
    return ops.bitwise_and(x, constant(0xFFFFFFFF, "uint32")) if keras.backend.backend() == "torch" else x


def rotate(word, distance):
    left, right = constant(distance, "uint32"), constant(32 - distance, "uint32")
    return ops.bitwise_or(lower_bits(ops.left_shift(word, left)), ops.right_shift(word, right))


def threefry2x32(key, word0, word1):
    """A pair of words encrypted with a key: Threefry-2x32 with 20 rounds."""
    parity = constant(0x1BD11BDA, "uint32")
    keys = (key[0], key[1], ops.bitwise_xor(ops.bitwise_xor(key[0], key[1]), parity))
    word0, word1 = lower_bits(word0 + keys[0]), lower_bits(word1 + keys[1])
    for group in range(5):
        for distance in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            word0 = lower_bits(word0 + word1)
            word1 = ops.bitwise_xor(rotate(word1, distance), word0)
        word0 = lower_bits(word0 + keys[(group + 1) % 3])
        word1 = lower_bits(word1 + keys[(group + 2) % 3] + constant(group + 1, "uint32"))
    return word0, word1


def counters(start, limit):
    return ops.cast(ops.arange(start, limit, dtype="int32"), "uint32")


@functions.define(f"{DOMAIN}.FoldIn")
def fold_in(key, data):
    """A new key: the pair (0, data) encrypted with the key."""
    data = ops.reshape(ops.cast(data, "uint32"), (1,))
    return ops.concatenate(threefry2x32(key, ops.zeros_like(data), data))


@functions.define(f"{DOMAIN}.RandomBits")
def random_bits(key, shape):
    """Random uint32: element i is the xor of the two words that the pair (0, i) is encrypted to."""
    places = counters(0, product_of(shape))
    return ops.reshape(ops.bitwise_xor(*threefry2x32(key, ops.zeros_like(places), places)), shape)


@functions.define(f"{DOMAIN}.PairedRandomBits")
def paired_random_bits(key, shape):
    """Random uint32, two from each encryption: elements i and i + half are the words of the pair (i, i + half)."""
    size = product_of(shape)
    half = (size + 1) // 2
    second = ops.concatenate([counters(half, size), ops.zeros((2 * half - size,), "uint32")])
    words = threefry2x32(key, counters(0, half), second)
    return ops.reshape(ops.concatenate(words)[:size], shape)
