"""Activation functions."""

from __future__ import annotations

from onward.engines.framework import Operators

operators = Operators()

operators(
    Relu=lambda op, x: op.Relu(x),
    Relu6=lambda op, x: op.Min(op.Relu(x), 6),
    LeakyRelu=lambda op, x, *, alpha: op.LeakyRelu(x, alpha=alpha),
    Elu=lambda op, x: op.Elu(x),
    Selu=lambda op, x: op.Selu(x),
    Sigmoid=lambda op, x: op.Sigmoid(x),
    Tanh=lambda op, x: op.Tanh(x),
    Softplus=lambda op, x: op.Softplus(x),
    Softsign=lambda op, x: op.Softsign(x),
    Softmax=lambda op, x: op.Softmax(x, axis=-1),
    LogSoftmax=lambda op, x: op.LogSoftmax(x, axis=-1),
)
