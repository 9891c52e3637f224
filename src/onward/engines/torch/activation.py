"""Activation functions."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from onward.engines.framework import Operators

operators = Operators()
operators(
    Relu=torch.relu,
    LeakyRelu=lambda x, *, alpha: F.leaky_relu(x, alpha),
    PRelu=lambda x, slope: torch.where(x > 0, x, slope * x),
    Elu=lambda x, *, alpha: F.elu(x, alpha),
    Celu=lambda x, *, alpha: F.celu(x, alpha),
    Selu=lambda x, *, alpha, gamma: gamma * F.elu(x, alpha),
    Gelu=lambda x, *, approximate: F.gelu(x, approximate=approximate),
    Mish=F.mish,
)


@operators.define("Swish")
def swish(x, *, alpha):
    return F.silu(x) if alpha == 1 else x * torch.sigmoid(alpha * x)


operators(
    SwiGLU=lambda gate, x, *, alpha: swish(gate, alpha=alpha) * x,
    HardSigmoid=lambda x, *, alpha, beta: F.hardtanh(alpha * x + beta, 0, 1),
    HardSwish=lambda x: F.hardswish(x),
    Sigmoid=torch.sigmoid,
    Softplus=lambda x: F.softplus(x, threshold=40),
    Softsign=lambda x: F.softsign(x),
)


@operators.define("Shrink")
def shrink(x, *, bias, lambd):
    return torch.where(x < -lambd, x + bias, torch.where(x > lambd, x - bias, 0)).to(x.dtype)


operators(
    ThresholdedRelu=lambda x, *, alpha: torch.where(x > alpha, x, 0),
    Softmax=lambda x, *, axis: torch.softmax(x, axis),
    LogSoftmax=lambda x, *, axis: torch.log_softmax(x, axis),
    Hardmax=lambda x, *, axis: torch.zeros_like(x).scatter(axis, x.argmax(axis, keepdim=True), 1),
)
