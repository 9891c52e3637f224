"""Activation functions."""

from __future__ import annotations

from onward.engines.framework import Operators
from onward.frameworks.formulas.graph_building import same_operator

operators = Operators()
_SAME = ("Relu", "Elu", "Selu", "Sigmoid", "Tanh", "Softplus", "Softsign", "Softmax", "LogSoftmax")
operators(**{name: same_operator(name) for name in _SAME})
operators(
    Relu6=lambda op, x: op.Clip(x, op.scalar(0, x), op.scalar(6, x)),
    LeakyRelu=lambda op, x, *, alpha: op.LeakyRelu(x, alpha=alpha),
)
