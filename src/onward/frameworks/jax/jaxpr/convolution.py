"""Convolutions, reductions of sliding windows, matmuls and Fourier transforms.

A complex tensor is real, with a last axis (real, imaginary).
"""

from __future__ import annotations

import itertools
import math
import string

import jax
import numpy as np
import onnx_ir as ir

from onward.engines.framework import Operators
from onward.errors import UnsupportedError
from onward.frameworks.formulas.graph_building import as_pads, cast, constant_of, inverse, permute
from onward.frameworks.formulas.reduction import widely
from onward.frameworks.jax.jaxpr.builder import add_last_axes, extreme, fill, reshape_to
from onward.frameworks.jax.jaxpr.movement import pad, pad_axes, spread_elements

primitives = Operators()


@primitives.define("conv_general_dilated")
def convolution(
    op, x, kernel, *, window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers, feature_group_count,
    batch_group_count, ins, outs,
):  # fmt: skip
    """Write a Conv with transposed axes, and zeros between elements for dilated inputs."""
    x, kernel = (cast(op, tensor, outs[0].dtype) for tensor in (x, kernel))
    order_x, order_kernel, order_y = dimension_numbers
    x, kernel = permute(op, x, order_x), permute(op, kernel, order_kernel)
    zero = op.constant(np.zeros((), outs[0].dtype))
    shape = [ins[0].shape[axis] for axis in order_x]
    x, sizes = spread_elements(op, x, zero, shape, [0, 0, *(apart - 1 for apart in lhs_dilation)])
    if batch_group_count > 1:  # groups of examples, with kernels of their own, become groups of features
        (count, features, *rest), groups = sizes, batch_group_count
        apart = reshape_to(op, x, [groups, count // groups, features, *rest])
        swapped = op.Transpose(apart, perm=[1, 0, *range(2, 3 + len(rest))])
        x = reshape_to(op, swapped, [count // groups, groups * features, *rest])
    around = [(0, 0), (0, 0), *padding]
    if any(min(pair) < 0 for pair in padding):
        x, around = pad_axes(op, x, zero, around), [(0, 0)] * len(around)
    y = op.Conv(
        x,
        kernel,
        kernel_shape=[ins[1].shape[axis] for axis in order_kernel[2:]],
        strides=list(window_strides),
        pads=as_pads(around[2:]),
        dilations=list(rhs_dilation),
        group=feature_group_count * batch_group_count,
    )
    return permute(op, y, inverse(order_y))


class Pool:
    """Sliding window in the form of ONNX: two axes that do not slide, then those that do."""

    def __init__(self, shape, window, strides, padding, dilation=None):
        dilation = dilation or [1] * len(shape)
        settings = list(zip(window, strides, padding, dilation, strict=True))
        self.sliding = [i for i, (size, step, pads, _) in enumerate(settings) if (size, step, pads) != (1, 1, (0, 0))]
        self.sliding = self.sliding or [len(shape) - 1]
        self.resting = [axis for axis in range(len(shape)) if axis not in self.sliding]
        self.shape, self.order = shape, [*self.resting, *self.sliding]
        chosen = [settings[axis] for axis in self.sliding]
        self.attributes = {
            "kernel_shape": [size for size, _, _, _ in chosen],
            "strides": [step for _, step, _, _ in chosen],
            "pads": as_pads(pads for _, _, pads, _ in chosen),
            "dilations": [apart for _, _, _, apart in chosen],
        }

    def enter(self, op, x):
        x = permute(op, x, self.order)
        if len(self.resting) == 2:
            return x
        return op.Reshape(x, op.shape([1, -1, *(self.shape[axis] for axis in self.sliding)]))

    def leave(self, op, y, shape):
        if len(self.resting) != 2:
            y = reshape_to(op, y, [shape[axis] for axis in self.order])
        return permute(op, y, inverse(self.order))


def _window_rule(slide, start):
    """Return the row of a reduction `slide(op, x, pool)`, with padding `start(dtype)`."""

    def windowed(
        op, x, *, window_dimensions, window_strides, padding, base_dilation, window_dilation, ins, outs
    ):  # fmt: skip
        around, nothing = list(padding), op.constant(np.asarray(start(ins[0].dtype), ins[0].dtype))
        x, sizes = spread_elements(op, x, nothing, ins[0].shape, [apart - 1 for apart in base_dilation])
        if any(min(pads) < 0 or max(pads) >= size for pads, size in zip(around, window_dimensions, strict=True)):
            x = pad_axes(op, x, nothing, around)
            sizes = [size + low + high for size, (low, high) in zip(sizes, around, strict=True)]
            around = [(0, 0)] * len(sizes)
        pool = Pool(sizes, window_dimensions, window_strides, around, window_dilation)
        x = x if x.dtype.is_floating_point() else cast(op, x, np.float64)  # float64 holds all integers of 32 bits
        y = slide(op, pool.enter(op, x), pool)
        return cast(op, pool.leave(op, y, outs[0].shape), outs[0].dtype)

    return windowed


def _sum(op, x, pool):
    """Return an average times its count. ONNX Runtime lacks it for float64: slices are summed."""
    if x.dtype is not ir.DataType.DOUBLE:
        return op.AveragePool(x, count_include_pad=1, **pool.attributes) * math.prod(pool.attributes["kernel_shape"])
    kernel, steps, pads, apart = pool.attributes.values()
    rank = len(kernel)
    x = pad_axes(op, x, op.scalar(0, x), [(0, 0), (0, 0), *zip(pads[:rank], pads[rank:], strict=True)])
    full = [pool.shape[axis] + pads[i] + pads[rank + i] for i, axis in enumerate(pool.sliding)]
    last = [size - gap * (count - 1) for size, gap, count in zip(full, apart, kernel, strict=True)]
    shifted = []
    for offsets in itertools.product(*map(range, kernel)):
        starts = [i * gap for i, gap in zip(offsets, apart, strict=True)]
        ends = [start + end for start, end in zip(starts, last, strict=True)]
        shifted.append(op.Slice(x, starts, op.shape(ends), list(range(2, 2 + rank)), steps))
    return op.Sum(*shifted)


primitives(
    reduce_window_max=_window_rule(
        lambda op, x, pool: op.MaxPool(x, **pool.attributes), lambda dtype: extreme(dtype, largest=False)
    ),
    reduce_window_min=_window_rule(
        lambda op, x, pool: -op.MaxPool(-x, **pool.attributes), lambda dtype: extreme(dtype, largest=True)
    ),
    reduce_window_sum=_window_rule(_sum, lambda dtype: 0),
)


def _chosen_indices(op, x, pool, select_prim):
    """Return the flat index of the largest (`ge`) or smallest element of each window."""
    entered = pool.enter(op, x)
    return op.MaxPool(entered if select_prim.name == "ge" else -entered, outputs=2, **pool.attributes)[1]


@primitives.define("select_and_scatter_add")
def select_and_scatter_add(op, source, x, *, select_prim, window_dimensions, window_strides, padding, ins):
    """Compute the derivative of MaxPool: add each gradient at the chosen element of its window."""
    shape = ins[1].shape
    pool = Pool(shape, window_dimensions, window_strides, padding)
    indices = op.Reshape(_chosen_indices(op, x, pool, select_prim), [-1])
    gradients = op.Reshape(permute(op, source, pool.order), [-1])
    empty = fill(op, [math.prod(shape)], 0, ins[0].dtype)
    sums = op.ScatterElements(empty, indices, gradients, axis=0, reduction="add")
    entered = op.shape([shape[axis] for axis in pool.order])
    return permute(op, op.Reshape(sums, entered), inverse(pool.order))


@primitives.define("select_and_gather_add")
def select_and_gather_add(
    op, source, x, *, select_prim, window_dimensions, window_strides, padding, window_dilation, ins, outs
):  # fmt: skip
    """Return the element of `source` at the chosen element of each window."""
    pool = Pool(ins[1].shape, window_dimensions, window_strides, padding, window_dilation)
    flat = op.Reshape(permute(op, source, pool.order), [-1])
    return pool.leave(op, op.Gather(flat, _chosen_indices(op, x, pool, select_prim), axis=0), outs[0].shape)


@primitives.define("dot_general")
def dot_general(op, a, b, *, dimension_numbers, ins, outs):
    """Write a Gemm, MatMul or Einsum; a Gemm only if it saves a Transpose."""
    a, b = (cast(op, x, outs[0].dtype) for x in (a, b))
    return _product(op, a, b, dimension_numbers=dimension_numbers, ranks=(len(ins[0].shape), len(ins[1].shape)))


@widely
def _product(op, a, b, *, dimension_numbers, ranks):
    (summed_a, summed_b), (batch_a, batch_b) = dimension_numbers
    # No MatMul of vectors: ONNX Runtime computes it wrongly when it fuses a Transpose before it.
    if len(summed_a) != 1 or 1 in ranks or batch_a != tuple(range(len(batch_a))) or batch_b != batch_a:
        return _einsum(op, a, b, dimension_numbers, ranks)
    (k_a,), (k_b,), batch = summed_a, summed_b, len(batch_a)
    if ranks == (2, 2) and not batch and a.dtype.is_floating_point():
        flipped = k_a == 0, k_b == 1
        return op.Gemm(a, b, transA=int(flipped[0]), transB=int(flipped[1])) if any(flipped) else a @ b
    if ranks[1] == batch + 2 and (ranks[0] == batch + 2 or not batch):
        free_a = [axis for axis in range(ranks[0]) if axis != k_a]
        free_b = [axis for axis in range(ranks[1]) if axis != k_b]
        return permute(op, a, [*free_a, k_a]) @ permute(op, b, [*free_b[:batch], k_b, *free_b[batch:]])
    return _einsum(op, a, b, dimension_numbers, ranks)


def _einsum(op, a, b, dimension_numbers, ranks):
    (summed_a, summed_b), (batch_a, batch_b) = dimension_numbers
    letters = iter(string.ascii_letters)
    terms = [next(letters) for _ in range(ranks[0])], [next(letters) for _ in range(ranks[1])]
    for axis_a, axis_b in zip((*summed_a, *batch_a), (*summed_b, *batch_b), strict=True):
        terms[1][axis_b] = terms[0][axis_a]
    batch = [terms[0][axis] for axis in batch_a]
    free_a = [terms[0][axis] for axis in range(ranks[0]) if axis not in (*summed_a, *batch_a)]
    free_b = [terms[1][axis] for axis in range(ranks[1]) if axis not in (*summed_b, *batch_b)]
    equation = f"{''.join(terms[0])},{''.join(terms[1])}->{''.join([*batch, *free_a, *free_b])}"
    return op.Einsum(a, b, equation=equation)


complex_primitives = Operators()

OF_ANY_PARTS = (
    "add", "add_any", "sub", "neg", "broadcast_in_dim", "concatenate", "copy", "jit", "reduce_sum", "reshape", "rev",
    "slice", "split", "squeeze", "transpose",
)  # fmt: skip
"""Primitives whose rows compute the same for a tensor with one more axis at the end."""


def _parts(op, z):
    return tuple(op.Gather(z, op.constant(np.int64(i)), axis=-1) for i in (0, 1))


def _pair(op, real, imaginary):
    return op.Concat(op.Unsqueeze(real, [-1]), op.Unsqueeze(imaginary, [-1]), axis=-1)


def _of_real(op, x, dtype):
    if (number := constant_of(x)) is not None:
        return op.constant(np.stack([number, np.zeros_like(number)], -1).astype(dtype))
    x = cast(op, x, dtype)
    return _pair(op, x, op.filled_like(x.value, 0))


def _multiply(op, x, y):
    (a, b), (c, d) = _parts(op, x), _parts(op, y)
    return _pair(op, a * c - b * d, a * d + b * c)


def _divide(op, x, y):
    (a, b), (c, d) = _parts(op, x), _parts(op, y)
    size = c * c + d * d
    return _pair(op, (a * c + b * d) / size, (b * c - a * d) / size)


def _exponential(op, z):
    real, angle = _parts(op, z)
    return op.Unsqueeze(op.Exp(real), [-1]) * _pair(op, op.Cos(angle), op.Sin(angle))


def _conjugate(op, z, *, eqn):
    z = z if eqn.invars[0].aval.dtype.kind == "c" else _of_real(op, z, z.dtype.numpy())
    return z * op.constant(np.array([1, -1], z.dtype.numpy()))


def _convert(op, x, *, eqn, outs):
    is_complex = eqn.invars[0].aval.dtype.kind == "c"
    return cast(op, x, outs[0].dtype) if is_complex else _of_real(op, x, outs[0].dtype)


def _select(op, which, *cases, ins):
    if len(cases) != 2:
        raise UnsupportedError("it selects among more than two complex tensors")
    return op.Where(add_last_axes(op, which, len(ins[1].shape), len(ins[0].shape)), cases[1], cases[0])


def _pad(op, z, value, *, padding_config, ins):
    if (number := constant_of(value)) is None or np.any(number):
        raise UnsupportedError("it pads complex numbers with others than 0")
    return pad(op, z, op.constant(np.zeros((), ins[0].dtype)), padding_config=(*padding_config, (0, 0, 0)), ins=ins)


def _dot_general(op, x, y, *, dimension_numbers, ins, outs):
    """Compute a matmul as those of the real and imaginary parts."""
    shapes = [jax.ShapeDtypeStruct(stored.shape[:-1], stored.dtype) for stored in (*ins, *outs)]

    def product(a, b):
        return dot_general(op, a, b, dimension_numbers=dimension_numbers, ins=shapes[:2], outs=shapes[2:])

    (a, b), (c, d) = _parts(op, x), _parts(op, y)
    return _pair(op, product(a, c) - product(b, d), product(a, d) + product(b, c))


complex_primitives(
    mul=_multiply,
    div=_divide,
    exp=_exponential,
    conj=_conjugate,
    complex=_pair,
    real=lambda op, z: _parts(op, z)[0],
    imag=lambda op, z: _parts(op, z)[1],
    convert_element_type=_convert,
    select_n=_select,
    pad=_pad,
    dot_general=_dot_general,
)


@complex_primitives.define("fft")
def transform(op, x, *, fft_type, fft_lengths, eqn):
    """Write a DFT for each axis. The inverse of a one-sided transform first completes the frequencies."""
    kind, rank = fft_type.name, len(eqn.invars[0].aval.shape)
    *others, last = range(rank - len(fft_lengths), rank)

    def along(x, axis, **options):
        return op.DFT(x, op.constant(np.int64(fft_lengths[axis - rank])), op.constant(np.int64(axis)), **options)

    if kind == "RFFT":
        x = along(op.Unsqueeze(x, [-1]), last, onesided=1)
    for axis in others if kind in ("RFFT", "IRFFT") else (*others, last):
        x = along(x, axis, inverse=int(kind in ("IFFT", "IRFFT")))
    if kind != "IRFFT":
        return x
    mirrored = op.Gather(x, op.constant(np.arange((fft_lengths[-1] - 1) // 2, 0, -1)), axis=last)
    x = op.Concat(x, mirrored * op.constant(np.array([1, -1], x.dtype.numpy())), axis=last)
    return _parts(op, along(x, last, inverse=1))[0]
