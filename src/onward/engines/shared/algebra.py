"""Reductions and Fourier transforms."""

from __future__ import annotations

import numpy as np

from onward.engines.framework import Operators
from onward.engines.shared.arrays import xp

operators = Operators()


def reduction(function):
    """Return the operator of a function of a tensor, `axis` (None: all) and `keepdims`."""

    def reduce(x, axes=None, *, keepdims, noop_with_empty_axes):
        over = () if noop_with_empty_axes else None
        if axes is not None and axes.size:
            over = tuple(axes.tolist())
        return function(x, axis=over, keepdims=bool(keepdims)).astype(x.dtype)

    return reduce


def total(x, **options):
    return xp.sum(x, dtype=x.dtype, **options)


operators(
    ReduceSum=reduction(total),
    ReduceMean=reduction(xp.mean),
    ReduceProd=reduction(lambda x, **options: xp.prod(x, dtype=x.dtype, **options)),
    ReduceL1=reduction(lambda x, **options: total(x * xp.sign(x), **options)),  # JAX's abs has the slope 1 at 0
    ReduceL2=reduction(lambda x, **options: root(total(x * x, **options))),
    ReduceLogSum=reduction(lambda x, **options: xp.log(total(x, **options))),
    ReduceSumSquare=reduction(lambda x, **options: total(x * x, **options)),
)


def root(squares):
    """Return the square root, with the slope 0 at 0."""
    return xp.where(squares == 0, 0, xp.sqrt(xp.where(squares == 0, 1, squares)))


def index_of(function):
    """Return the operator of a function that returns the first index along an axis."""

    def find(x, *, axis, keepdims, select_last_index):
        if select_last_index:
            return x.shape[axis] - 1 - function(xp.flip(x, (axis,)), axis, keepdims=bool(keepdims))
        return function(x, axis, keepdims=bool(keepdims))

    return find


operators(ArgMax=index_of(xp.argmax), ArgMin=index_of(xp.argmin))


def running(function, neutral):
    """Return the operator of a cumulative function."""

    def run(x, axis, *, exclusive, reverse):
        rank = len(x.shape)
        axis = axis.item() % rank
        if exclusive:
            added, inside = ((0, 1), slice(1, None)) if reverse else ((1, 0), slice(0, -1))
            padded = xp.pad(x, [added if i == axis else (0, 0) for i in range(rank)], constant_values=neutral)
            x = padded[tuple(inside if i == axis else slice(None) for i in range(rank))]
        return function(x, axis, reverse=bool(reverse))

    return run


def both_ways(function):
    """Add `reverse` to a cumulative function."""

    def accumulate(x, axis, reverse):
        y = function(xp.flip(x, (axis,)) if reverse else x, axis, dtype=x.dtype)
        return xp.flip(y, (axis,)) if reverse else y

    return accumulate


operators(CumSum=running(both_ways(xp.cumsum), 0), CumProd=running(both_ways(xp.cumprod), 1))


# ---- Fourier transforms: a complex number is two real ones, on a last axis -------------------------------------------


@operators.define("DFT")
def dft(x, length=None, axis=None, *, inverse, onesided):
    axis_index = (-2 if axis is None else axis.item()) % x.ndim
    count = None if length is None else length.item()
    exact = x.astype(np.promote_types(x.dtype, np.float32))
    values = exact[..., 0] if x.shape[-1] == 1 else exact[..., 0] + 1j * exact[..., 1]
    if inverse and onesided:
        return xp.fft.irfft(values, count, axis_index)[..., None].astype(x.dtype)
    y = (xp.fft.ifft if inverse else xp.fft.rfft if onesided else xp.fft.fft)(values, count, axis_index)
    return xp.stack([y.real, y.imag], -1).astype(x.dtype)
