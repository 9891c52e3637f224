"""Convolutions, and the two operations behind every sliding window: taking windows apart and adding them up.

A `Window` says how a window slides over an image. `columns` puts the elements of each window side by side; its
transpose, `spread`, adds windows up again where they came from.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from onward.build import Expr
from onward.errors import UnsupportedError
from onward.rules.common import identity
from onward.rules.indexing import joined, reshaped
from onward.rules.registry import gradient, rewrite
from onward.shapes import constant_ints

LARGEST_CONSTANT = 64
"""Identity matrices up to this size are written out."""
WIDE = 16
LARGEST_KERNELS = 1 << 18
"""Elements of the kernels that pick the elements of windows, for all channels, up to which they are written out."""
END = np.iinfo(np.int64).max


@gradient("Conv")
def conv(op, dy, x, w, b, *, y, auto_pad, dilations, group, kernel_shape, pads, strides):
    """Y = X * W: dX is the transposed convolution of dY, dW the product of the windows of X and dY, summed over N."""
    kernel = spatial(op, w) if kernel_shape is None else list(kernel_shape)
    window = sliding(op, x, y, kernel, auto_pad=auto_pad, dilations=dilations, pads=pads, strides=strides)
    dx = spread(op, dy, w, window, group=group)
    if _is_pointwise(window) and window.covers_exactly:
        windows = x
    else:
        windows = columns(op, x, kernel, auto_pad=auto_pad, dilations=dilations, pads=pads, strides=strides)
    return dx, _weight_gradient(op, windows, dy, w, group), _bias_gradient(op, dy, window)


@gradient("ConvTranspose")
def conv_transpose(
    op, dy, x, w, b, *, y, auto_pad, dilations, group, kernel_shape, output_padding, output_shape, pads, strides
):
    """Y = X *' W: dX is the convolution of dY, dW the product of the windows of dY and X, summed over N."""
    kernel = spatial(op, w) if kernel_shape is None else list(kernel_shape)
    fixed = auto_pad in ("SAME_UPPER", "SAME_LOWER") or bool(output_shape)
    given = "NOTSET" if fixed else auto_pad
    window = sliding(op, y, x, kernel, auto_pad=given, dilations=dilations, pads=pads, strides=strides)
    if fixed:
        extra = window.number(op, output_padding or [0] * window.rank)
        window = window._replace(begin=_half(op, window.covered + extra - window.sizes, auto_pad))
    image, padding = _exactly_covered(op, dy, window)
    slide = {"dilations": window.dilations, "strides": window.strides, "pads": padding}
    dx = op.Conv(image, w, group=group, **slide)
    windows = image if _is_pointwise(window) and padding is None else columns(op, image, kernel, **slide)
    return dx, _weight_gradient(op, windows, x, w, group), _bias_gradient(op, dy, window)


@rewrite("CausalConvWithState")
def causal_conv_with_state(op, x, w, b, past, *, activation):
    """Each channel by its own kernel, over what was before and what is now; the last of that is the new state."""
    length, width = op.Shape(x, start=2), op.Shape(w, start=2)
    if past is None:
        past = op.CastLike(op.ConstantOfShape(op.Concat(op.Shape(x, end=2), width - 1, axis=0)), x)
    whole = op.Concat(past, x, axis=2)
    channels = size_of(op, x, 1)
    if isinstance(channels, int):
        y = op.Conv(whole, w, b, group=channels)
    else:
        y = _by_channel(op, whole, w, b, length, width)
    return (y if activation == "none" else y * op.Sigmoid(y)), op.Slice(whole, length, [END], [2])


def _by_channel(op, x, w, b, length, width):
    """Where it is not known how many channels there are: the windows, times the kernels."""
    first, place = (op.Range(np.int64(0), op.Squeeze(n, [0]), np.int64(1)) for n in (length, width))
    windows = op.Gather(x, op.Unsqueeze(first, [1]) + place, axis=2)
    y = op.Squeeze(op.MatMul(windows, op.Transpose(w, perm=[0, 2, 1])), [3])
    return y if b is None else y + op.Unsqueeze(b, [1])


def _bias_gradient(op, dy, window):
    return op.ReduceSum(dy, [0, *range(2, window.rank + 2)], keepdims=0)


def _weight_gradient(op, windows, outputs, w, group):
    """The sum over N of windows [N, C K, P] times outputs [N, O, P], group by group, in the shape of W [O, C K].

    The large factor comes first, the small result is transposed: the fastest order on CPUs.
    """
    count = size_of(op, outputs, 0)
    places = known_product(outputs, 2)
    if places is None:
        places = op.ReduceProd(op.Shape(outputs, start=2), keepdims=1)
    elements = known_product(w, 1)
    if elements is None:
        elements = op.ReduceProd(op.Shape(w, start=1), keepdims=1)
    groups = [group] if group > 1 else []
    channels = size_of(op, outputs, 1)
    if group > 1:
        channels = channels // group if isinstance(channels, int) else channels / group
    left = reshape(op, windows, count, *groups, elements, places)
    right = reshape(op, outputs, count, *groups, channels, places)
    axes = len(groups) + 3
    swap = [*range(axes - 2), axes - 1, axes - 2]
    total = op.ReduceSum(op.MatMul(left, op.Transpose(right, perm=swap)), [0], keepdims=0)
    turned = op.Transpose(total, perm=[*range(axes - 3), axes - 2, axes - 3])
    return reshape_like(op, turned, w)


# ---- windows ---------------------------------------------------------------------------------------------------------


class Window(NamedTuple):
    """A window that slides over an image. Numbers per spatial axis: numpy arrays, or tensors if one is not known."""

    strides: list[int]
    dilations: list[int]
    kernel: Any
    sizes: Any
    """The spatial sizes of the image."""
    count: Any
    """How many windows there are."""
    begin: Any
    """How far before the image the first window begins."""
    extent: Any
    """How far a window reaches."""
    covered: Any
    """How far all windows reach together."""

    @property
    def rank(self):
        return len(self.strides)

    @property
    def static(self):
        return isinstance(self.sizes, np.ndarray)

    @property
    def covers_exactly(self):
        """Whether it is certain that windows begin and end with the image."""
        return self.static and not self.begin.any() and bool((self.covered == self.sizes).all())

    def number(self, op, values):
        """Numbers per spatial axis, to compute with those of the window."""
        return np.asarray(values, np.int64) if self.static else op.constant(np.asarray(values, np.int64))


def sliding(op, image, windows, kernel, *, auto_pad, dilations, pads, strides):
    """The window of an operator that takes an image apart to as many places as `windows` has."""
    rank = _spatial_rank(kernel, strides, dilations, pads, image, windows)
    strides, dilations = list(strides or [1] * rank), list(dilations or [1] * rank)
    numbers = [kernel, strides, dilations, spatial(op, image), spatial(op, windows), list(pads or [0] * rank)[:rank]]
    known = not any(isinstance(n, Expr) for n in numbers)
    if known:
        k, s, d, sizes, count, begin = (np.asarray(n, np.int64) for n in numbers)
    else:
        k, s, d, sizes, count, begin = (
            n if isinstance(n, Expr) else op.constant(np.asarray(n, np.int64)) for n in numbers
        )
    extent = (k - 1) * d + 1
    covered = (count - 1) * s + extent
    window = Window(strides, dilations, k, sizes, count, begin, extent, covered)
    if auto_pad == "VALID":
        return window._replace(begin=window.number(op, [0] * rank))
    if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        return window._replace(begin=_half(op, covered - sizes, auto_pad))
    return window


def spread(op, windows, weight, window, group=1):
    """Multiply `weight` by each element of `windows` and add up, over the image, what falls on the same place."""
    slide = {"dilations": window.dilations, "strides": window.strides, "group": group}
    if not window.static:
        return _part(op, op.ConvTranspose(windows, weight, **slide), window.begin, window.sizes, window.rank)
    if group == 1 and all(stride == 1 for stride in window.strides) and _is_wide(weight):
        return _spread_by_convolution(op, windows, weight, window)
    after = window.covered - window.begin - window.sizes
    padding = [*window.begin.tolist(), *np.maximum(after, 0).tolist()]
    missing = np.maximum(-after, 0).tolist() if (after < 0).any() else None
    return op.ConvTranspose(windows, weight, **slide, pads=padding, output_padding=missing)


def _is_wide(weight):
    """Whether there are so many channels that a convolution is faster than a transposed one, on CPUs."""
    channels = None if weight.value.shape is None else weight.value.shape[1]
    return isinstance(channels, int) and channels >= WIDE


def _spread_by_convolution(op, windows, weight, window):
    """The same for strides of 1: a convolution with the kernels turned round, from as far away as windows reach."""
    axes = list(range(2, window.rank + 2))
    turned = op.Slice(weight, [-1] * window.rank, [-END] * window.rank, axes, [-1] * window.rank)
    begin = window.extent - 1 - window.begin
    end = window.sizes - window.count + window.extent - 1 - begin
    image = windows
    if (begin < 0).any() or (end < 0).any():  # windows that lie wholly in the padding
        starts, ends = np.maximum(-begin, 0), window.count - np.maximum(-end, 0)
        image = op.Slice(windows, starts.tolist(), ends.tolist(), axes)
    padding = [*np.maximum(begin, 0).tolist(), *np.maximum(end, 0).tolist()]
    kernels = op.Transpose(turned, perm=[1, 0, *axes])
    return op.Conv(image, kernels, dilations=window.dilations, pads=padding)


def columns(op, image, kernel, **slide):
    """The elements of each window, channel by channel: a convolution with one kernel for each element of a window.

    Where the number of channels is known, each is a group: [N, C K, places...]; else an image: [N C, K, places...].
    """
    size = None if isinstance(kernel, Expr) else math.prod(kernel)
    channels = None if image.value.shape is None else image.value.shape[1]
    if size is not None and size <= LARGEST_CONSTANT and image.dtype is not None:
        one_hot = np.eye(size).reshape(size, 1, *kernel)
        if isinstance(channels, int) and channels * size * size <= LARGEST_KERNELS:
            return op.Conv(
                image,
                op.constant(np.tile(one_hot, (channels, *[1] * (one_hot.ndim - 1))), image.dtype),
                group=channels,
                **slide,
            )
        kernels = op.constant(one_hot, image.dtype)
    else:
        shape = kernel if isinstance(kernel, Expr) else op.constant(np.asarray(kernel, np.int64))
        elements = op.ReduceProd(shape, keepdims=1)
        kernels = op.Reshape(
            identity(op, op.Concat(elements, elements, axis=0), image), op.Concat([-1, 1], shape, axis=0)
        )
    sizes = spatial(op, image)
    planes = op.Reshape(image, op.Concat([-1, 1], sizes, axis=0) if isinstance(sizes, Expr) else [-1, 1, *sizes])
    return op.Conv(planes, kernels, **slide)


def _is_pointwise(window):
    return window.static and all(n == 1 for n in (*window.kernel, *window.strides))


def _exactly_covered(op, image, window):
    """The image without what no window reaches, and the padding for what windows reach beyond it."""
    if not window.static:
        rank = window.rank
        shifted = op.Pad(image, op.Concat([0, 0], window.begin, [0] * (rank + 2), axis=0))
        return _part(op, shifted, [0] * rank, window.covered, rank), None
    after = window.covered - window.begin - window.sizes
    if (after < 0).any():
        ends = (window.sizes + np.minimum(after, 0)).tolist()
        image = op.Slice(image, [0] * window.rank, ends, list(range(2, window.rank + 2)))
    padding = [*window.begin.tolist(), *np.maximum(after, 0).tolist()]
    return image, padding if any(padding) else None


def _part(op, image, begin, sizes, rank):
    """The part of an image of dynamic size that begins at `begin`, with zeros where the image has come to its end."""
    part = op.Slice(image, begin, op.Add(sizes, begin), list(range(2, rank + 2)))
    missing = sizes - op.Shape(part, start=2)
    return op.Pad(part, op.Concat([0] * (rank + 4), missing, axis=0))


def _half(op, total, auto_pad):
    """The part of a padding that comes first: with SAME_UPPER the smaller half, else the larger."""
    if isinstance(total, Expr):
        total = op.Max(total, [0])
        half = total / 2
    else:
        total = np.maximum(total, 0)
        half = total // 2
    return half if auto_pad == "SAME_UPPER" else total - half


# ---- shapes ----------------------------------------------------------------------------------------------------------


def spatial(op, x):
    """The sizes of the spatial axes: a list, or a tensor if one is not known."""
    shape = x.value.shape
    if shape is None or not all(isinstance(n, int) for n in shape[2:]):
        return op.Shape(x, start=2)
    return list(shape[2:])


def _spatial_rank(kernel, strides, dilations, pads, *tensors):
    for numbers in (kernel, strides, dilations):
        if numbers is not None and not isinstance(numbers, Expr):
            return len(numbers)
    if pads:
        return len(pads) // 2
    for tensor in tensors:
        if tensor.value.shape is not None:
            return tensor.value.shape.rank() - 2
    raise UnsupportedError("the number of spatial axes is not known", hint="give the model's inputs shapes")


def size_of(op, x, axis):
    """The size of one axis: a number, or a tensor of one element."""
    shape = x.value.shape
    known = shape is not None and isinstance(shape[axis], int)
    return shape[axis] if known else op.Shape(x, start=axis, end=axis + 1)


def known_product(x, start):
    """The product of the sizes from `start` on, None if one is not known."""
    shape = x.value.shape
    if shape is None or not all(isinstance(n, int) for n in shape[start:]):
        return None
    return math.prod(shape[start:])


def reshape(op, x, *sizes):
    """Reshape to sizes that are numbers or tensors of one element."""
    unknown = [n for n in sizes if isinstance(n, Expr)]
    if len(unknown) <= 1 and 0 not in [n for n in sizes if not isinstance(n, Expr)]:
        return op.Reshape(x, [-1 if isinstance(n, Expr) else n for n in sizes])
    return reshaped(op, x, joined(op, *(n if isinstance(n, Expr) else [n] for n in sizes)))


def reshape_like(op, x, like):
    shape = like.value.shape
    known = shape is not None and all(isinstance(n, int) and n > 0 for n in shape)
    return reshaped(op, x, list(shape) if known else op.Shape(like))


@gradient("Col2Im")
def col2im(op, dy, x, image_shape, block_shape, *, dilations, pads, strides):
    """Windows added up: dX is the windows of dY."""
    kernel = constant_ints(block_shape.value)
    block = block_shape if kernel is None else list(kernel)
    return reshaped(op, columns(op, dy, block, dilations=dilations, pads=pads, strides=strides), op.Shape(x))
