"""Activations, alone and together with what comes before them."""

import math

from onward.rules.microsoft.domain import rank, rewrite


@rewrite("Gelu")
def gelu(op, x):
    return exact_gelu(op, x)


@rewrite("BiasGelu")
def bias_gelu(op, x, bias):
    return exact_gelu(op, x + bias)


@rewrite("FastGelu")
def fast_gelu(op, x, bias):
    return tanh_gelu(op, x if bias is None else x + bias)


@rewrite("QuickGelu")
def quick_gelu(op, x, *, alpha=1.702):
    return x * op.Sigmoid(x * alpha)


@rewrite("BiasSplitGelu")
def bias_split_gelu(op, x, bias):
    left, right = op.Split(x + bias, outputs=2, axis=-1, num_outputs=2)
    return left * exact_gelu(op, right)


@rewrite("BiasAdd")
def bias_add(op, x, bias, skip):
    return x + bias + skip


@rewrite("GatedAdd")
def gated_add(op, x, y, gate):
    return x + y * gate


@rewrite("BiasSoftmax")
def bias_softmax(op, x, bias, *, axis=1):
    """Softmax over all axes from `axis` on."""
    scores = x + bias
    if axis == -1 or axis + 1 == rank(x):
        return op.Softmax(scores, axis=-1)
    return op.Reshape(op.Softmax(op.Flatten(scores, axis=axis), axis=-1), op.Shape(x))


@rewrite("BiasDropout")
def bias_dropout(op, x, bias, residual, ratio, training_mode, *, seed=None):
    y, mask = op.Dropout(x + bias, ratio, training_mode, outputs=2, seed=seed)
    return y if residual is None else y + residual, mask


# ---- what they share -------------------------------------------------------------------------------------------------


def exact_gelu(op, x):
    """x times the probability that a normal number is less than x."""
    if op.opset >= _GELU:
        return op.Gelu(x)
    return x * 0.5 * (op.Erf(x * math.sqrt(0.5)) + 1)


def tanh_gelu(op, x):
    """The usual approximation of it."""
    if op.opset >= _GELU:
        return op.Gelu(x, approximate="tanh")
    return x * 0.5 * (op.Tanh((x + x * x * x * 0.044715) * math.sqrt(2 / math.pi)) + 1)


_GELU = 20
"""The operator set from which on the standard has Gelu."""


def apply_activation(op, x, activation, alpha=None, beta=None, gamma=None):
    """An activation by its name, with the parameters that it has."""
    if not activation:
        return x
    if activation == "Clip":
        return op.Clip(x, alpha, beta)
    return op.node("", activation, x, alpha=alpha, beta=beta, gamma=gamma)
