"""Matmuls, reductions and Fourier transforms."""

from __future__ import annotations

import functools

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


operators(Einsum=lambda *inputs, equation: torch.einsum(equation, *inputs), Det=torch.linalg.det)
operators.define("onward.Linear")(lambda x, weight, bias: F.linear(x, weight.T, bias))


# ---- reductions ------------------------------------------------------------------------------------------------------


def _reduction(function):
    """Return the operator of a function of a tensor and axes that keeps dimensions."""

    @in_int64
    def reduce(x, axes=None, *, keepdims, noop_with_empty_axes):
        axes = [] if axes is None else axes.tolist()
        if not axes and noop_with_empty_axes:
            return function(x[None], (0,))[0]
        axes = tuple(axis % x.ndim for axis in axes) or tuple(range(x.ndim))
        y = function(x, axes) if axes else function(x[None], (0,))[0]
        return y if keepdims else y.squeeze(axes)

    return reduce


def _extreme(function, sign):
    """Return `amax` or `amin` with a result for empty axes, too."""

    def reduce(x, axes):
        if all(x.shape[axis] for axis in axes):
            return function(x, axes, keepdim=True)
        if x.is_floating_point():
            worst = -sign * torch.inf
        elif x.dtype == torch.bool:
            worst = sign < 0
        else:
            worst = torch.iinfo(x.dtype).min if sign > 0 else torch.iinfo(x.dtype).max
        return x.new_full([1 if i in axes else size for i, size in enumerate(x.shape)], worst)

    return reduce


def _floating(function):
    """Compute integers in float64."""

    @functools.wraps(function)
    def reduce(x, axes):
        return function(x, axes) if x.is_floating_point() else function(x.double(), axes).to(x.dtype)

    return reduce


def _sum(x, axes):
    return x.sum(axes, keepdim=True, dtype=x.dtype)


def _prod(x, axes):
    return functools.reduce(lambda y, axis: y.prod(axis, keepdim=True, dtype=x.dtype), axes, x)


operators(
    ReduceSum=_reduction(_sum),
    ReduceMean=_reduction(_floating(lambda x, axes: x.mean(axes, keepdim=True))),
    ReduceMax=_reduction(_extreme(torch.amax, 1)),
    ReduceMin=_reduction(_extreme(torch.amin, -1)),
    ReduceProd=_reduction(_prod),
    ReduceL1=_reduction(lambda x, axes: _sum(x.abs(), axes)),
    ReduceL2=_reduction(_floating(lambda x, axes: torch.linalg.vector_norm(x, 2, axes, keepdim=True))),
    ReduceLogSum=_reduction(_floating(lambda x, axes: _sum(x, axes).log())),
    ReduceLogSumExp=_reduction(_floating(lambda x, axes: torch.logsumexp(x, axes, keepdim=True))),
    ReduceSumSquare=_reduction(lambda x, axes: _sum(x * x, axes)),
)


@operators.define("TopK")
def top_k(x, k, *, axis, largest, sorted):
    """Return the first of equal elements, as a stable sort does and `torch.topk` does not."""
    values, indices = x.sort(dim=axis, descending=bool(largest), stable=True)
    return values.narrow(axis, 0, k.item()), indices.narrow(axis, 0, k.item())


# ---- Fourier transforms: a complex number is two real ones, along the last axis --------------------------------------


@operators.define("DFT")
def dft(x, length=None, axis=None, *, inverse, onesided):
    axis = (-2 if axis is None else axis.item()) % x.ndim
    length = None if length is None else length.item()
    is_real = x.shape[-1] == 1
    if inverse and onesided:
        return torch.fft.irfft(torch.view_as_complex(x.contiguous()), length, axis).unsqueeze(-1)
    values = x.squeeze(-1) if is_real else torch.view_as_complex(x.contiguous())
    if onesided:
        return torch.view_as_real(torch.fft.rfft(values, length, axis))
    return torch.view_as_real((torch.fft.ifft if inverse else torch.fft.fft)(values, length, axis))
