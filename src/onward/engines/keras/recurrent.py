"""Recurrent layers, as Keras's own loop over time."""

from __future__ import annotations

from keras import ops

from onward.engines.framework import Operators
from onward.engines.keras.activation import elu, hard_sigmoid, leaky_relu, thresholded_relu
from onward.engines.keras.values import dtype_of

operators = Operators()


@operators.define("RNN")
def rnn(
    x,
    w,
    r,
    b=None,
    lengths=None,
    h=None,
    *,
    activation_alpha=None,
    activation_beta=None,
    activations=None,
    clip=None,
    direction="forward",
    layout=0,
):
    functions = activations_of(activations or ["Tanh"] * w.shape[0], activation_alpha, activation_beta, clip)

    def step(f, given, r, b, more, states):
        return [f[0](given + ops.matmul(states[0], ops.transpose(r)) + b[1])]

    return layer(step, functions, x, w, r, b, lengths, [h], direction, layout)


@operators.define("GRU")
def gru(
    x,
    w,
    r,
    b=None,
    lengths=None,
    h=None,
    *,
    activation_alpha=None,
    activation_beta=None,
    activations=None,
    clip=None,
    direction="forward",
    layout=0,
    linear_before_reset=0,
):
    names = activations or ["Sigmoid", "Tanh"] * w.shape[0]
    functions = activations_of(names, activation_alpha, activation_beta, clip)

    def step(f, given, r, b, more, states):
        h = states[0]
        update, reset, new = ops.split(given, 3, 1)
        r_update, r_reset, r_new = (ops.transpose(part) for part in ops.split(r, 3, 0))
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
    x,
    w,
    r,
    b=None,
    lengths=None,
    h=None,
    c=None,
    peepholes=None,
    *,
    activation_alpha=None,
    activation_beta=None,
    activations=None,
    clip=None,
    direction="forward",
    input_forget=0,
    layout=0,
):
    names = activations or ["Sigmoid", "Tanh", "Tanh"] * w.shape[0]
    functions = activations_of(names, activation_alpha, activation_beta, clip)

    def step(f, given, r, b, more, states):
        h, c = states
        i, o, forget, new = ops.split(given + ops.matmul(h, ops.transpose(r)) + b[1], 4, 1)
        p_i, p_o, p_forget = (0, 0, 0) if more is None else ops.split(more, 3, 0)
        i = f[0](i + p_i * c)
        forget = 1 - i if input_forget else f[0](forget + p_forget * c)
        c = forget * c + i * f[1](new)
        return [f[0](o + p_o * c) * f[2](c), c]

    return layer(step, functions, x, w, r, b, lengths, [h, c], direction, layout, peepholes)


def layer(step, functions, x, w, r, b, lengths, initial, direction, layout, more=None):
    """All outputs, and the last of each state. Samples that have ended keep their state, and 0 is their output."""
    if layout:
        x, initial = ops.swapaxes(x, 0, 1), [None if s is None else ops.swapaxes(s, 0, 1) for s in initial]
    directions, rows, hidden = r.shape
    zero = ops.zeros_like(x[0, :, :1]) * ops.zeros((1, hidden), dtype_of(x))
    outputs, last = [], []
    for d in range(directions):
        f = functions[d * len(functions) // directions :]
        biases = ops.zeros((2, rows), dtype_of(x)) if b is None else ops.reshape(b[d], (2, rows))
        given = ops.matmul(x, ops.transpose(w[d])) + biases[0]
        times, size = ops.arange(ops.shape(x)[0], dtype="int32"), None if more is None else more[d]

        def advance(states, now, f=f, d=d, biases=biases, size=size):
            new = step(f, now[0], r[d], biases, size, states)
            if lengths is None:
                return new, new  # TensorFlow collects what has the structure of the states
            lives = (now[1] < ops.cast(lengths, "int32"))[:, None]
            new = [ops.where(lives, after, before) for after, before in zip(new, states, strict=True)]
            return new, [ops.where(lives, state, ops.zeros_like(state)) for state in new]

        states = [zero if s is None else s[d] for s in initial]
        states, results = ops.scan(advance, states, [given, times], reverse=direction == "reverse" or d == 1)
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
    """The activations of all directions. Each takes the next of the numbers given, if it has such a parameter."""
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
    given, found = {"alpha": iter(alphas or ()), "beta": iter(betas or ())}, []
    for name in names:
        function, numbers = (plain[name], []) if name in plain else with_numbers[name]
        chosen = {number: value for number in numbers if (value := next(given[number], None)) is not None}
        found.append(activation(function, chosen, clip))
    return found


def activation(function, numbers, clip):
    return lambda x: function(x if clip is None else ops.clip(x, -clip, clip), **numbers)
