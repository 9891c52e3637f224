"""Normalization, attention, recurrent layers and random numbers."""

from __future__ import annotations

import math

import keras
import numpy as np
from keras import ops

from onward.build import DOMAIN
from onward.engines.framework import Operators
from onward.engines.keras.elementwise import elu, hard_sigmoid, leaky_relu, thresholded_relu
from onward.engines.keras.movement import product_of
from onward.engines.keras.types import available, constant, dtype_of

operators = Operators()


def channels(parameter, x):
    return ops.reshape(parameter, (-1, *[1] * (len(x.shape) - 2)))


@operators.define("BatchNormalization")
def batch_normalization(x, scale, bias, mean, variance, *, epsilon=1e-5, momentum=0.9, training_mode=0):
    """Normalize, and update the statistics in training. Channels come last if that is faster."""
    last = keras.backend.backend() == "tensorflow"
    x = ops.moveaxis(x, 1, -1) if last else x
    channel = len(x.shape) - 1 if last else 1
    over = [axis for axis in range(len(x.shape)) if axis != channel]

    def spread(parameter):
        return parameter if last else channels(parameter, x)

    here, there = mean, variance
    if training_mode:
        here = ops.mean(x, over)
        there = ops.mean(ops.square(x - spread(here)), over)
    slope = scale * ops.rsqrt(there + epsilon)
    y = ops.cast(x * spread(slope) + spread(bias - here * slope), dtype_of(x))
    y = ops.moveaxis(y, -1, 1) if last else y
    if not training_mode:
        return y
    return y, mean * momentum + here * (1 - momentum), variance * momentum + there * (1 - momentum)


def last_axes(x, axis):
    return tuple(range(axis % len(x.shape), len(x.shape)))


@operators.define("LayerNormalization")
def layer_normalization(x, scale, bias=None, *, axis=-1, epsilon=1e-5, stash_type="float32"):
    """Return y, the mean, and the inverse of the deviation."""
    exact = ops.cast(x, available(stash_type))
    mean = ops.mean(exact, last_axes(x, axis), keepdims=True)
    deviation = exact - mean
    inverse = ops.rsqrt(ops.mean(ops.square(deviation), last_axes(x, axis), keepdims=True) + epsilon)
    y = ops.cast(deviation * inverse, dtype_of(x)) * scale
    return y if bias is None else y + bias, mean, inverse


@operators.define("RMSNormalization")
def rms_normalization(x, scale, *, axis=-1, epsilon=1e-5, stash_type="float32"):
    exact = ops.cast(x, available(stash_type))
    inverse = ops.rsqrt(ops.mean(ops.square(exact), last_axes(x, axis), keepdims=True) + epsilon)
    return ops.cast(exact * inverse, dtype_of(scale)) * scale


def standardize(x, over, epsilon):
    deviation = x - ops.mean(x, over, keepdims=True)
    return deviation * ops.rsqrt(ops.mean(ops.square(deviation), over, keepdims=True) + epsilon)


@operators.define("GroupNormalization")
def group_normalization(x, scale, bias, *, epsilon=1e-5, num_groups, stash_type="float32"):
    size = math.prod(x.shape[1:]) // num_groups
    groups = ops.reshape(ops.cast(x, available(stash_type)), (-1, num_groups, size))
    normal = ops.cast(ops.reshape(standardize(groups, 2, epsilon), (-1, *x.shape[1:])), dtype_of(x))
    return normal * channels(scale, x) + channels(bias, x)


@operators.define("InstanceNormalization")
def instance_normalization(x, scale, bias, *, epsilon=1e-5):
    return standardize(x, tuple(range(2, len(x.shape))), epsilon) * channels(scale, x) + channels(bias, x)


# ---- attention -------------------------------------------------------------------------------------------------------


@operators.define("Attention")
def attention(q, k, v, mask=None, *, is_causal=0, kv_num_heads=None, q_num_heads=None, scale=None):
    packed = len(q.shape) == 3
    if packed:
        q, k, v = heads(q, q_num_heads), heads(k, kv_num_heads), heads(v, kv_num_heads)
    if q.shape[1] != k.shape[1]:
        k, v = (ops.repeat(x, q.shape[1] // x.shape[1], 1) for x in (k, v))
    root = math.sqrt(1 / math.sqrt(q.shape[3]) if scale is None else scale)
    scores = ops.matmul(q * root, ops.swapaxes(k * root, 2, 3))
    if mask is not None:
        scores = apply_mask(scores, mask)
    if is_causal:
        keys, queries = (ops.arange(ops.shape(x)[2], dtype="int32") for x in (k, q))
        scores = ops.where(keys <= queries[:, None], scores, -np.inf)
    weights = ops.softmax(scores, -1)
    if mask is not None:  # a query that attends to no key gets zeros
        empty = ops.max(scores, -1, keepdims=True) == -np.inf
        some = ops.softmax(ops.where(empty, ops.zeros_like(scores), scores), -1)
        weights = ops.where(empty, ops.zeros_like(weights), some)
    y = ops.matmul(weights, v)
    if packed:
        y = ops.swapaxes(y, 1, 2)
        y = ops.reshape(y, (-1, ops.shape(y)[1], y.shape[2] * y.shape[3]))
    return y


def heads(x, count):
    """Convert (batch, length, heads * size) to (batch, heads, length, size)."""
    return ops.swapaxes(ops.reshape(x, (-1, ops.shape(x)[1], count, x.shape[2] // count)), 1, 2)


def apply_mask(scores, mask):
    """Apply a mask. Keys beyond its end are masked, too."""
    is_bool, missing = dtype_of(mask) == "bool", (scores.shape[-1] or 0) - (mask.shape[-1] or 0)
    if missing > 0:
        around = [(0, 0)] * (len(mask.shape) - 1) + [(0, missing)]
        mask = ops.pad(mask, around, constant_values=False if is_bool else -np.inf)
    return ops.where(mask, scores, -np.inf) if is_bool else scores + mask


# ---- recurrent -------------------------------------------------------------------------------------------------------


@operators.define("RNN")
def rnn(
    x, w, r, b=None, lengths=None, h=None, *, activation_alpha=None, activation_beta=None, activations=None,
    clip=None, direction="forward", layout=0,
):  # fmt: skip
    functions = activations_of(activations or ["Tanh"] * w.shape[0], activation_alpha, activation_beta, clip)

    def step(f, projected, r, b, more, states):
        return [f[0](projected + ops.matmul(states[0], ops.transpose(r)) + b[1])]

    return layer(step, functions, x, w, r, b, lengths, [h], direction, layout)


@operators.define("GRU")
def gru(
    x, w, r, b=None, lengths=None, h=None, *, activation_alpha=None, activation_beta=None, activations=None,
    clip=None, direction="forward", layout=0, linear_before_reset=0,
):  # fmt: skip
    names = activations or ["Sigmoid", "Tanh"] * w.shape[0]
    functions = activations_of(names, activation_alpha, activation_beta, clip)

    def step(f, projected, r, b, more, states):
        h = states[0]
        update, reset, new = ops.split(projected, 3, 1)
        r_update, r_reset, r_new = (ops.transpose(matrix) for matrix in ops.split(r, 3, 0))
        b_update, b_reset, b_new = ops.split(b[1], 3, 0)
        update = f[0](update + ops.matmul(h, r_update) + b_update)
        reset = f[0](reset + ops.matmul(h, r_reset) + b_reset)
        if linear_before_reset:
            before = reset * (ops.matmul(h, r_new) + b_new)
        else:
            before = ops.matmul(reset * h, r_new) + b_new
        return [(1 - update) * f[1](new + before) + update * h]

    return layer(step, functions, x, w, r, b, lengths, [h], direction, layout)


@operators.define("LSTM")
def lstm(
    x, w, r, b=None, lengths=None, h=None, c=None, peepholes=None, *, activation_alpha=None, activation_beta=None,
    activations=None, clip=None, direction="forward", input_forget=0, layout=0,
):  # fmt: skip
    names = activations or ["Sigmoid", "Tanh", "Tanh"] * w.shape[0]
    functions = activations_of(names, activation_alpha, activation_beta, clip)

    def step(f, projected, r, b, more, states):
        h, c = states
        i, o, forget, new = ops.split(projected + ops.matmul(h, ops.transpose(r)) + b[1], 4, 1)
        p_i, p_o, p_forget = (0, 0, 0) if more is None else ops.split(more, 3, 0)
        i = f[0](i + p_i * c)
        forget = 1 - i if input_forget else f[0](forget + p_forget * c)
        c = forget * c + i * f[1](new)
        return [f[0](o + p_o * c) * f[2](c), c]

    return layer(step, functions, x, w, r, b, lengths, [h, c], direction, layout, peepholes)


def layer(step, functions, x, w, r, b, lengths, initial, direction, layout, more=None):
    """Return all outputs and the last states. An ended sample keeps its state and outputs 0."""
    if layout:
        x, initial = ops.swapaxes(x, 0, 1), [None if s is None else ops.swapaxes(s, 0, 1) for s in initial]
    directions, rows, hidden = r.shape
    zero = ops.zeros_like(x[0, :, :1]) * ops.zeros((1, hidden), dtype_of(x))
    outputs, last = [], []
    for d in range(directions):
        f = functions[d * len(functions) // directions :]
        biases = ops.zeros((2, rows), dtype_of(x)) if b is None else ops.reshape(b[d], (2, rows))
        projected = ops.matmul(x, ops.transpose(w[d])) + biases[0]
        times, size = ops.arange(ops.shape(x)[0], dtype="int32"), None if more is None else more[d]

        def advance(states, now, f=f, d=d, biases=biases, size=size):
            new = step(f, now[0], r[d], biases, size, states)
            if lengths is None:
                return new, new  # TensorFlow collects what has the structure of the states
            lives = (now[1] < ops.cast(lengths, "int32"))[:, None]
            new = [ops.where(lives, after, before) for after, before in zip(new, states, strict=True)]
            return new, [ops.where(lives, state, ops.zeros_like(state)) for state in new]

        states = [zero if s is None else s[d] for s in initial]
        states, results = ops.scan(advance, states, [projected, times], reverse=direction == "reverse" or d == 1)
        outputs.append(results[0])
        last.append(states)
    results, finals = ops.stack(outputs, 1), [ops.stack(states) for states in zip(*last, strict=True)]
    if layout:
        return (ops.transpose(results, (2, 0, 1, 3)), *(ops.swapaxes(state, 0, 1) for state in finals))
    return (results, *finals)


def affine(x, *, alpha=1.0, beta=0.0):
    return alpha * x + beta


def scaled_tanh(x, *, alpha=1.0, beta=1.0):
    return alpha * ops.tanh(beta * x)


def activations_of(names, alphas, betas, clip):
    """Return the activations of all directions. Each takes the next alpha and beta it needs."""
    plain = {
        "Relu": ops.relu,
        "Tanh": ops.tanh,
        "Sigmoid": ops.sigmoid,
        "Softsign": ops.softsign,
        "Softplus": ops.softplus,
    }
    with_numbers = {
        "Affine": (affine, ["alpha", "beta"]),
        "LeakyRelu": (leaky_relu, ["alpha"]),
        "ThresholdedRelu": (thresholded_relu, ["alpha"]),
        "ScaledTanh": (scaled_tanh, ["alpha", "beta"]),
        "HardSigmoid": (hard_sigmoid, ["alpha", "beta"]),
        "Elu": (elu, ["alpha"]),
    }
    remaining, functions = {"alpha": iter(alphas or ()), "beta": iter(betas or ())}, []
    for name in names:
        function, numbers = (plain[name], []) if name in plain else with_numbers[name]
        chosen = {number: value for number in numbers if (value := next(remaining[number], None)) is not None}
        functions.append(activation(function, chosen, clip))
    return functions


def activation(function, numbers, clip):
    return lambda x: function(x if clip is None else ops.clip(x, -clip, clip), **numbers)


# ---- sampling --------------------------------------------------------------------------------------------------------

functions = Operators()
"""Random functions of training models. These rows are faster than the function bodies."""


@operators.define("Dropout")
def dropout(x, ratio=None, training_mode=None, *, outputs=1):
    """Return x: inference only. Prepared training models draw the mask by graph nodes."""
    if training_mode and ratio != 0:
        raise NotImplementedError("training with Dropout needs a generator in the graph: `onward.prepare` adds it")
    return x if outputs == 1 else (x, ops.ones_like(x, "bool"))


def lower_bits(x):
    return ops.bitwise_and(x, constant(0xFFFFFFFF, "uint32")) if keras.backend.backend() == "torch" else x


def rotate(word, distance):
    left, right = constant(distance, "uint32"), constant(32 - distance, "uint32")
    return ops.bitwise_or(lower_bits(ops.left_shift(word, left)), ops.right_shift(word, right))


def threefry2x32(key, word0, word1):
    """Encrypt a pair of words with a key: Threefry-2x32 with 20 rounds."""
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
    """Return a new key: the pair (0, data) encrypted with the key."""
    data = ops.reshape(ops.cast(data, "uint32"), (1,))
    return ops.concatenate(threefry2x32(key, ops.zeros_like(data), data))


@functions.define(f"{DOMAIN}.RandomBits")
def random_bits(key, shape):
    """Return random uint32. Element i is the xor of the two words of the encrypted pair (0, i)."""
    indices = counters(0, product_of(shape))
    return ops.reshape(ops.bitwise_xor(*threefry2x32(key, ops.zeros_like(indices), indices)), shape)


@functions.define(f"{DOMAIN}.PairedRandomBits")
def paired_random_bits(key, shape):
    """Return random uint32. Elements i and i + half are one encrypted pair (i, i + half)."""
    size = product_of(shape)
    half = (size + 1) // 2
    second = ops.concatenate([counters(half, size), ops.zeros((2 * half - size,), "uint32")])
    words = threefry2x32(key, counters(0, half), second)
    return ops.reshape(ops.concatenate(words)[:size], shape)
