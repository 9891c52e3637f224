"""Fourier transforms: each is linear, and its derivative is the transform in the other direction."""

import numpy as np
import onnx_ir as ir

from onward.constants import constant_ints
from onward.rules.common import cast_like
from onward.rules.indexing import on_axis, pad_axes
from onward.rules.registry import body, gradient

SCALAR = np.zeros(0, np.int64)


@gradient("DFT")
def dft(op, dy, x, dft_length, axis_input, *, y, axis, inverse, onesided):
    """Y = F X: dX = conj(F) dY = n IDFT(dY); for the inverse DFT(dY) / n.

    A one-sided transform leaves out frequencies, which get no gradient; a one-sided inverse reads each frequency twice,
    but for the first, and for the last if n is even. What dft_length adds to X gets no gradient, what it cuts off 0.
    """
    if axis is None:  # an input since operator set 20
        axis = -2 if axis_input is None else _known_axis(axis_input)
    length = _length(op, y if inverse else x, axis, dft_length)
    n = cast_like(op, op.Cast(length, to=ir.DataType.DOUBLE) if dy.dtype is None else length, dy)
    if not inverse:
        dx = _transform(op, dy, length, axis, inverse=1) * n
    else:
        dx = _transform(op, dy, length, axis, onesided=onesided or None) / n
        if onesided:
            dx = _twice_inside(op, dx, length, axis)
    known = dft_length is None and not onesided
    dx = dx if known else _fit_length(op, dx, x, axis)
    pair = x.value.shape is not None and x.value.shape[-1] == 2
    return dx if pair else op.Slice(dx, [0], op.Shape(x, start=-1), [-1])


@body("STFT", gradient=(0, 2))
def stft(op, signal, frame_step, window, frame_length, *, onesided):
    """The transform of frames of the signal, times the window."""
    step = op.Cast(op.Reshape(frame_step, SCALAR), to=ir.DataType.INT64)
    whole = _length(op, signal, 1, None)
    if frame_length is None:
        length = whole if window is None else _length(op, window, 0, None)
    else:
        length = _length(op, signal, 1, frame_length)
    begins = op.Range(np.int64(0), whole - length + 1, step)
    places = op.Unsqueeze(begins, [1]) + op.Range(np.int64(0), length, np.int64(1))
    frames = op.Gather(signal, places, axis=1)
    weighted = frames if window is None else frames * op.Unsqueeze(window, [1])
    return _transform(op, weighted, length, 2, onesided=onesided)


def _transform(op, x, length, axis, **attributes):
    """The transform of `x`, by whichever way the operator set has to name the axis."""
    if op.opset < 20:
        return op.DFT(x, length, axis=axis, **attributes)
    return op.DFT(x, length, op.constant(np.int64(axis)) if isinstance(axis, int) else axis, **attributes)


def _length(op, x, axis, given):
    """The length of the transform: as given, or that of `x` along the axis."""
    if given is not None:
        return op.Cast(op.Reshape(given, SCALAR), to=ir.DataType.INT64)
    if isinstance(axis, int):
        shape = x.value.shape
        if shape is not None and isinstance(shape[axis], int):
            return op.constant(np.int64(shape[axis]))
        axis = op.constant(np.int64(axis))
    return op.Gather(op.Shape(x), op.Reshape(axis, SCALAR))


def _known_axis(axis):
    """The axis as a number, if it is one that is known."""
    number = constant_ints(axis.value)
    return axis if number is None else number[0]


def _fit_length(op, dx, x, axis):
    """`dx` cut, or filled up with zeros, to the length of `x` along the axis."""
    axes = [axis] if isinstance(axis, int) else op.Reshape(axis, [1])
    size = op.Reshape(_length(op, x, axis, None), [1])
    cut = op.Slice(dx, [0], size, axes)
    missing = size - op.Reshape(_length(op, cut, axis, None), [1])
    return pad_axes(op, cut, op.Concat([0], missing, axis=0), axes)


def _twice_inside(op, dx, length, axis):
    """Frequencies times 2, but for 0 and n / 2."""
    places = op.Range(np.int64(0), _length(op, dx, axis, None), np.int64(1))
    once = op.Or(op.Equal(places, 0), op.Equal(places * 2, length))
    weights = cast_like(op, op.Where(once, np.int64(1), np.int64(2)), dx)
    return dx * on_axis(op, weights, dx, axis)
