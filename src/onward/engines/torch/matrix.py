"""Products of matrices, and determinants."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from onward.engines.framework import Operators
from onward.engines.torch.types import in_int64

operators = Operators()
operators(MatMul=in_int64(torch.matmul))


@operators.define("Gemm")
@in_int64
def gemm(a, b, c=None, *, alpha, beta, transA, transB):
    a, b = (a.T if transA else a), (b.T if transB else b)
    if not a.is_floating_point():
        alpha, beta = int(alpha), int(beta)
    if c is None:
        return a @ b if alpha == 1 else alpha * (a @ b)
    return torch.addmm(c, a, b, alpha=alpha, beta=beta)


operators(
    Einsum=lambda *inputs, equation: torch.einsum(equation, *inputs),
    Det=torch.linalg.det,
)
operators.define("onward.Linear")(lambda x, weight, bias: F.linear(x, weight.T, bias))
