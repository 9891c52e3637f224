"""Recurrent layers, step by step."""

from __future__ import annotations

import functools

import numpy as np

from onward.engines.framework import Operators
from onward.engines.numpy import activation
from onward.engines.numpy.precision import in_float32

operators = Operators()


@operators.define("RNN")
@in_float32
def rnn(
    x, w, r, b=None, lengths=None, h=None, *, activation_alpha, activation_beta, activations, clip, direction, layout
):
    def step(f, x, w, r, b, h):
        return (f[0](x @ w.T + h @ r.T + b[0] + b[1]),)

    functions = _functions(activations or ["Tanh"] * len(w), activation_alpha, activation_beta, clip)
    return _layer(step, functions, x, w, r, b, lengths, [h], direction, layout)


@operators.define("GRU")
@in_float32
def gru(
    x, w, r, b=None, lengths=None, h=None, *,
    activation_alpha, activation_beta, activations, clip, direction, layout, linear_before_reset,
):  # fmt: skip
    def step(f, x, w, r, b, h):
        update, reset, new = np.split(x @ w.T + b[0], 3, 1)
        (r_update, r_reset, r_new), (b_update, b_reset, b_new) = np.split(r, 3), np.split(b[1], 3)
        update = f[0](update + h @ r_update.T + b_update)
        reset = f[0](reset + h @ r_reset.T + b_reset)
        before = reset * (h @ r_new.T + b_new) if linear_before_reset else (reset * h) @ r_new.T + b_new
        return ((1 - update) * f[1](new + before) + update * h,)

    functions = _functions(activations or ["Sigmoid", "Tanh"] * len(w), activation_alpha, activation_beta, clip)
    return _layer(step, functions, x, w, r, b, lengths, [h], direction, layout)


@operators.define("LSTM")
@in_float32
def lstm(
    x, w, r, b=None, lengths=None, h=None, c=None, peepholes=None, *,
    activation_alpha, activation_beta, activations, clip, direction, input_forget, layout,
):  # fmt: skip
    def step(f, x, w, r, b, p, h, c):
        i, o, forget, new = np.split(x @ w.T + h @ r.T + b[0] + b[1], 4, 1)
        p_i, p_o, p_forget = np.split(p, 3)
        i = f[0](i + p_i * c)
        forget = 1 - i if input_forget else f[0](forget + p_forget * c)
        c = forget * c + i * f[1](new)
        return f[0](o + p_o * c) * f[2](c), c

    names = activations or ["Sigmoid", "Tanh", "Tanh"] * len(w)
    peepholes = np.zeros((len(w), 3 * r.shape[2]), x.dtype) if peepholes is None else peepholes
    functions = _functions(names, activation_alpha, activation_beta, clip)
    return _layer(step, functions, x, w, r, b, lengths, [h, c], direction, layout, peepholes)


def _layer(step, functions, x, w, r, b, lengths, initial, direction, layout, *more):
    """All outputs, and the last of each state. Samples that have ended keep their state, and 0 is their output."""
    if layout:
        x, initial = x.swapaxes(0, 1), [None if state is None else state.swapaxes(0, 1) for state in initial]
    directions, rows, hidden = r.shape
    biases = np.zeros((directions, 2, rows), x.dtype) if b is None else b.reshape(directions, 2, rows)
    zeros = np.zeros((directions, x.shape[1], hidden), x.dtype)
    ends = np.full(x.shape[1], len(x)) if lengths is None else lengths
    results = np.zeros((len(x), *zeros.shape), x.dtype)
    last = []
    for d, mine in enumerate(np.split(np.array(functions, object), directions)):
        states = [(zeros if state is None else state)[d] for state in initial]
        times = range(len(x))
        for t in reversed(times) if direction == "reverse" or d == 1 else times:
            lives = (t < ends)[:, None]
            new = step(mine, x[t], w[d], r[d], biases[d], *(parameter[d] for parameter in more), *states)
            states = [np.where(lives, after, before) for after, before in zip(new, states, strict=True)]
            results[t, d] = np.where(lives, states[0], 0)
        last.append(states)
    finals = [np.stack(states) for states in zip(*last, strict=True)]
    if layout:
        return results.transpose(2, 0, 1, 3), *(state.swapaxes(0, 1) for state in finals)
    return results, *finals


_ACTIVATIONS = {
    "Relu": (lambda x: np.maximum(x, 0), {}),
    "Tanh": (np.tanh, {}),
    "Sigmoid": (activation.sigmoid, {}),
    "Softsign": (activation.softsign, {}),
    "Softplus": (activation.softplus, {}),
    "Affine": (lambda x, *, alpha, beta: alpha * x + beta, {"alpha": 1.0, "beta": 0.0}),
    "LeakyRelu": (activation.leaky_relu, {"alpha": 0.01}),
    "ThresholdedRelu": (activation.thresholded_relu, {"alpha": 1.0}),
    "ScaledTanh": (lambda x, *, alpha, beta: alpha * np.tanh(beta * x), {"alpha": 1.0, "beta": 1.0}),
    "HardSigmoid": (activation.hard_sigmoid, {"alpha": 0.2, "beta": 0.5}),
    "Elu": (activation.elu, {"alpha": 1.0}),
}


def _functions(names, alphas, betas, clip):
    """The activations of all directions. Each takes the next of the numbers given, if it has such a parameter."""
    given = {"alpha": iter(alphas or ()), "beta": iter(betas or ())}
    found = []
    for name in names:
        function, defaults = _ACTIVATIONS[name]
        chosen = functools.partial(function, **{key: next(given[key], value) for key, value in defaults.items()})
        found.append(chosen if clip is None else lambda x, chosen=chosen: chosen(np.clip(x, -clip, clip)))
    return found
