"""Windows that slide over an image: taking them apart, and adding them up.

A `Window` says how a window slides over an image. `columns` puts the elements of each window side by side; its
transpose, `spread`, adds windows up again where they came from.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from onward.build import Expr
from onward.errors import UnsupportedError
from onward.rules.common import identity
from onward.rules.indexing import join_shape, reshape_to

LARGEST_CONSTANT = 64
"""Identity matrices up to this size are written out."""
WIDE = 16
LARGEST_KERNELS = 1 << 18
"""Elements of the kernels that pick the elements of windows, for all channels, up to which they are written out."""
END = np.iinfo(np.int64).max


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
    def is_image(self):
        """Whether it is certain that windows are the elements of the image, all that they cover and nothing else."""
        return self.static and all(n == 1 for n in (*self.kernel, *self.strides)) and not any(self.padding)

    @property
    def padding(self):
        """How far windows reach beyond the image, before and after it; what they do not reach counts as 0."""
        after = self.covered - self.begin - self.sizes
        return [*self.begin.tolist(), *np.maximum(after, 0).tolist()]

    def as_shape(self, numbers):
        """Numbers of the window as a part of a shape."""
        return numbers.tolist() if self.static else numbers

    def number(self, op, values):
        """Numbers per spatial axis, to compute with those of the window."""
        return np.asarray(values, np.int64) if self.static else op.constant(np.asarray(values, np.int64))


def sliding(op, image, windows, kernel, *, auto_pad, dilations, pads, strides):
    """The window of an operator that takes an image apart to as many places as `windows` has."""
    rank = _spatial_rank(kernel, strides, dilations, pads, image, windows)
    window = _window(op, rank, kernel, spatial(op, image), spatial(op, windows), dilations, pads, strides)
    if auto_pad == "VALID":
        return window._replace(begin=window.number(op, [0] * rank))
    if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        return window._replace(begin=half_of_padding(op, window.covered - window.sizes, auto_pad))
    return window


def tiling(op, sizes, kernel, *, dilations, pads, strides):
    """The window that slides over as much of an image of these sizes as it can."""
    known = [n for n in (sizes, kernel, strides, dilations) if n and not isinstance(n, Expr)]
    rank = len(known[0]) if known else len(pads) // 2 if pads else _length(sizes, kernel)
    window = _window(op, rank, kernel, sizes, [1] * rank, dilations, pads, strides)
    more = window.number(op, list(pads or [0] * 2 * rank)[rank:])
    room, strides = window.sizes + window.begin + more - window.extent, window.number(op, window.strides)
    count = (room / strides if isinstance(room, Expr) else room // strides) + 1
    return window._replace(count=count, covered=(count - 1) * strides + window.extent)


def _window(op, rank, kernel, sizes, count, dilations, pads, strides):
    strides, dilations = list(strides or [1] * rank), list(dilations or [1] * rank)
    numbers = [kernel, strides, dilations, sizes, count, list(pads or [0] * rank)[:rank]]
    known = not any(isinstance(n, Expr) for n in numbers)
    if known:
        k, s, d, sizes, count, begin = (np.asarray(n, np.int64) for n in numbers)
    else:
        k, s, d, sizes, count, begin = (
            n if isinstance(n, Expr) else op.constant(np.asarray(n, np.int64)) for n in numbers
        )
    extent = (k - 1) * d + 1
    return Window(strides, dilations, k, sizes, count, begin, extent, covered=(count - 1) * s + extent)


def spread_windows(op, windows, weight, window, group=1):
    """Multiply `weight` by each element of `windows` and add up, over the image, what falls on the same place."""
    slide = {"dilations": window.dilations, "strides": window.strides, "group": group}
    if not window.static:
        return _part(op, op.ConvTranspose(windows, weight, **slide), window.begin, window.sizes, window.rank)
    if group == 1 and all(stride == 1 for stride in window.strides) and _is_wide(weight):
        return _spread_by_convolution(op, windows, weight, window)
    missing = np.maximum(window.begin + window.sizes - window.covered, 0).tolist()
    return op.ConvTranspose(
        windows, weight, **slide, pads=window.padding, output_padding=missing if any(missing) else None
    )


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
    small = size is not None and size <= LARGEST_CONSTANT and image.dtype is not None
    if small and isinstance(channels, int) and channels * size * size <= LARGEST_KERNELS:
        each = np.tile(_one_hot(kernel), (channels, *[1] * (len(kernel) + 1)))
        return op.Conv(image, op.constant(each, image.dtype), group=channels, **slide)
    sizes = spatial(op, image)
    planes = op.Reshape(image, op.Concat([-1, 1], sizes, axis=0) if isinstance(sizes, Expr) else [-1, 1, *sizes])
    return op.Conv(planes, one_hot_kernels(op, kernel, image)[1], **slide)


def one_hot_kernels(op, kernel, like):
    """How many elements a window has, as a part of a shape, and kernels that pick one each: [elements, 1, *kernel]."""
    if not isinstance(kernel, Expr) and math.prod(kernel) <= LARGEST_CONSTANT and like.dtype is not None:
        return [math.prod(kernel)], op.constant(_one_hot(kernel), like.dtype)
    shape = kernel if isinstance(kernel, Expr) else op.constant(np.asarray(kernel, np.int64))
    elements = op.ReduceProd(shape, keepdims=1)
    ones = identity(op, op.Concat(elements, elements, axis=0), like)
    return elements, op.Reshape(ones, op.Concat([-1, 1], shape, axis=0))


def _one_hot(kernel):
    return np.eye(math.prod(kernel)).reshape(-1, 1, *kernel)


def exactly_covered(op, image, window):
    """The image without what no window reaches, and the padding for what windows reach beyond it."""
    if not window.static:
        rank = window.rank
        shifted = op.Pad(image, op.Concat([0, 0], window.begin, [0] * (rank + 2), axis=0))
        return _part(op, shifted, [0] * rank, window.covered, rank), None
    after = window.covered - window.begin - window.sizes
    if (after < 0).any():
        ends = (window.sizes + np.minimum(after, 0)).tolist()
        image = op.Slice(image, [0] * window.rank, ends, list(range(2, window.rank + 2)))
    return image, window.padding if any(window.padding) else None


def _part(op, image, begin, sizes, rank):
    """The part of an image of dynamic size that begins at `begin`, with zeros where the image has come to its end."""
    part = op.Slice(image, begin, op.Add(sizes, begin), list(range(2, rank + 2)))
    missing = sizes - op.Shape(part, start=2)
    return op.Pad(part, op.Concat([0] * (rank + 4), missing, axis=0))


def half_of_padding(op: Any, total: Any, auto_pad: str) -> Any:
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


def _length(*vectors):
    for vector in vectors:
        if vector.value.shape is not None and isinstance(vector.value.shape[0], int):
            return vector.value.shape[0]
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
    return reshape_to(op, x, join_shape(op, *(n if isinstance(n, Expr) else [n] for n in sizes)))


def reshape_like(op, x, like):
    shape = like.value.shape
    known = shape is not None and all(isinstance(n, int) and n > 0 for n in shape)
    return reshape_to(op, x, list(shape) if known else op.Shape(like))
