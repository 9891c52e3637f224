"""Elementwise operators."""

from __future__ import annotations

import torch

from onward.run.framework import Operators

operators = Operators()
operators(
    Add=torch.add,
    Mul=torch.multiply,
    Sub=torch.subtract,
    Relu=torch.relu,
    Identity=lambda x: x,
    Reshape=lambda x, s, *, allowzero: x.reshape(s.tolist()),
    MatMul=torch.matmul,
    Div=torch.divide,
    Pow=torch.pow,
    Sqrt=torch.sqrt,
    ReduceMean=lambda x, a=None, *, keepdims: x.mean(),
    ReduceSum=lambda x, a=None, *, keepdims: x.sum() if a is None else x.sum(tuple(a.tolist()), keepdim=bool(keepdims)),
    Gemm=lambda a, b, c=None, *, alpha, beta, transA, transB: (a.T if transA else a) @ (b.T if transB else b) + c,
    SoftmaxCrossEntropyLoss=lambda x, l: torch.nn.functional.cross_entropy(x, l),
    Cast=lambda x, *, to: x.to({1: torch.float32, 7: torch.int64, 11: torch.float64}[to]),
    ReduceProd=lambda x, a=None, *, keepdims: x.prod(),
    Shape=lambda x: __import__("numpy").array(x.shape),
)
