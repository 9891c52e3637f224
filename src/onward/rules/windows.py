"""Sliding windows over an image, as in convolutions and pools.

`columns` puts the elements of each window side by side. Its transpose,
`spread_windows`, adds windows up over the image.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from onward.build import Expr
from onward.errors import UnsupportedError
from onward.rules.common import identity
from onward.rules.indexing import END, along, extent, join_shape, reshape_to

LARGEST_CONSTANT = 64
"""Largest identity matrix that is stored in the graph."""
WIDE = 16
"""Least number of channels for which a convolution is faster than a transposed one on CPUs."""
LARGEST_KERNELS = 1 << 18
"""Largest number of elements of one-hot kernels, for all channels, that are stored in the graph."""


class Window(NamedTuple):
    """Sliding windows. Numbers are per spatial axis: numpy arrays, or tensors if one is not known."""

    strides: list[int]
    dilations: list[int]
    kernel: Any
    sizes: Any
    """Spatial sizes of the image."""
    count: Any
    """Number of windows."""
    begin: Any
    """Padding before the image: the first window begins so far before it."""
    extent: Any
    """Extent of a window."""
    covered: Any
    """Extent of all windows together."""

    @property
    def rank(self):
        return len(self.strides)

    @property
    def static(self):
        return isinstance(self.sizes, np.ndarray)

    @property
    def is_image(self):
        """True if the windows are certainly the elements of the image, one each."""
        return self.static and all(n == 1 for n in (*self.kernel, *self.strides)) and not any(self.padding)

    @property
    def padding(self):
        """Padding before and after the image; 0 where windows do not reach the end."""
        after = self.covered - self.begin - self.sizes
        return [*self.begin.tolist(), *np.maximum(after, 0).tolist()]

    def as_shape(self, numbers):
        return numbers.tolist() if self.static else numbers

    def number(self, op, values):
        """Return numbers per spatial axis that combine with those of the window."""
        return np.asarray(values, np.int64) if self.static else op.constant(np.asarray(values, np.int64))


def sliding(op, image, windows, kernel, *, auto_pad, dilations, pads, strides):
    """Return the window of an operator whose output `windows` has one element per window."""
    rank = _spatial_rank([kernel, strides, dilations], pads, image, windows)
    window = _window(op, rank, kernel, extent(op, image, 2), extent(op, windows, 2), dilations, pads, strides)
    if auto_pad == "VALID":
        return window._replace(begin=window.number(op, [0] * rank))
    if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        return window._replace(begin=half_of_padding(op, window.covered - window.sizes, auto_pad))
    return window


def tiling(op, sizes, kernel, *, dilations, pads, strides):
    """Return the window that slides over as much of an image of these sizes as it can."""
    rank = _spatial_rank([sizes, kernel, strides, dilations], pads, sizes, kernel, axis=0)
    window = _window(op, rank, kernel, sizes, [1] * rank, dilations, pads, strides)
    more = window.number(op, list(pads or [0] * 2 * rank)[rank:])
    room, strides = window.sizes + window.begin + more - window.extent, window.number(op, window.strides)
    count = (room / strides if isinstance(room, Expr) else room // strides) + 1
    return window._replace(count=count, covered=(count - 1) * strides + window.extent)


def _window(op, rank, kernel, sizes, count, dilations, pads, strides):
    strides, dilations = list(strides or [1] * rank), list(dilations or [1] * rank)
    numbers = [kernel, strides, dilations, sizes, count, list(pads or [0] * rank)[:rank]]
    is_static = not any(isinstance(n, Expr) for n in numbers)
    k, s, d, sizes, count, begin = (
        n if isinstance(n, Expr) else np.asarray(n, np.int64) if is_static else op.constant(np.asarray(n, np.int64))
        for n in numbers
    )
    reach = (k - 1) * d + 1
    return Window(strides, dilations, k, sizes, count, begin, reach, covered=(count - 1) * s + reach)


def spread_windows(op, windows, weight, window, group=1):
    """Multiply `weight` by each element of `windows`, and add the products up over the image."""
    slide = {"dilations": window.dilations, "strides": window.strides, "group": group}
    if not window.static:
        return _crop(op, op.ConvTranspose(windows, weight, **slide), window.begin, window.sizes, window.rank)
    if group == 1 and all(stride == 1 for stride in window.strides) and _is_wide(weight):
        return _spread_by_convolution(op, windows, weight, window)
    missing = np.maximum(window.begin + window.sizes - window.covered, 0).tolist()
    slide["output_padding"] = missing if any(missing) else None
    return op.ConvTranspose(windows, weight, **slide, pads=window.padding)


def _is_wide(weight):
    channels = None if weight.value.shape is None else weight.value.shape[1]
    return isinstance(channels, int) and channels >= WIDE


def _spread_by_convolution(op, windows, weight, window):
    """Spread windows for strides of 1: a convolution with flipped kernels."""
    axes = list(range(2, window.rank + 2))
    flipped = op.Slice(weight, [-1] * window.rank, [-END] * window.rank, axes, [-1] * window.rank)
    begin = window.extent - 1 - window.begin
    end = window.sizes - window.count + window.extent - 1 - begin
    image = windows
    if (begin < 0).any() or (end < 0).any():  # windows entirely in the padding
        starts, ends = np.maximum(-begin, 0), window.count - np.maximum(-end, 0)
        image = op.Slice(windows, starts.tolist(), ends.tolist(), axes)
    padding = [*np.maximum(begin, 0).tolist(), *np.maximum(end, 0).tolist()]
    kernels = op.Transpose(flipped, perm=[1, 0, *axes])
    return op.Conv(image, kernels, dilations=window.dilations, pads=padding)


def columns(op, image, kernel, **slide):
    """Return the elements of each window, channel by channel: a convolution with one-hot kernels.

    If the number of channels is known, each is a group: [N, C K, windows...]; else an image: [N C, K, windows...].
    """
    size = None if isinstance(kernel, Expr) else math.prod(kernel)
    channels = None if image.value.shape is None else image.value.shape[1]
    small = size is not None and size <= LARGEST_CONSTANT and image.dtype is not None
    if small and isinstance(channels, int) and channels * size * size <= LARGEST_KERNELS:
        kernels = np.tile(_one_hot(kernel), (channels, *[1] * (len(kernel) + 1)))
        return op.Conv(image, op.constant(kernels, image.dtype), group=channels, **slide)
    return op.Conv(planes(op, image), one_hot_kernels(op, kernel, image)[1], **slide)


def planes(op, x):
    """Make each channel of each sample an image of one channel."""
    return op.Reshape(x, join_shape(op, [-1, 1], extent(op, x, 2)))


def one_hot_kernels(op, kernel, like):
    """Return the size of a window, as a shape of one axis, and kernels that pick one element: [size, 1, *kernel]."""
    if not isinstance(kernel, Expr) and math.prod(kernel) <= LARGEST_CONSTANT and like.dtype is not None:
        return [math.prod(kernel)], op.constant(_one_hot(kernel), like.dtype)
    shape = kernel if isinstance(kernel, Expr) else op.constant(np.asarray(kernel, np.int64))
    size = op.ReduceProd(shape, keepdims=1)
    ones = identity(op, op.Concat(size, size, axis=0), like)
    return size, op.Reshape(ones, op.Concat([-1, 1], shape, axis=0))


def _one_hot(kernel):
    return np.eye(math.prod(kernel)).reshape(-1, 1, *kernel)


def exactly_covered(op, image, window):
    """Return the image without the elements behind the last window, and the padding of windows that reach beyond it."""
    if not window.static:
        shifted = op.Pad(image, op.Concat([0, 0], window.begin, [0] * (window.rank + 2), axis=0))
        return _crop(op, shifted, [0] * window.rank, window.covered, window.rank), None
    after = window.covered - window.begin - window.sizes
    if (after < 0).any():
        ends = (window.sizes + np.minimum(after, 0)).tolist()
        image = op.Slice(image, [0] * window.rank, ends, list(range(2, window.rank + 2)))
    return image, window.padding if any(window.padding) else None


def _crop(op, image, begin, sizes, rank):
    """Crop an image of dynamic size from `begin` on, and pad it with zeros to `sizes`."""
    cropped = op.Slice(image, begin, op.Add(sizes, begin), list(range(2, rank + 2)))
    missing = sizes - op.Shape(cropped, start=2)
    return op.Pad(cropped, op.Concat([0] * (rank + 4), missing, axis=0))


def half_of_padding(op: Any, total: Any, auto_pad: str) -> Any:
    """Return the padding before the image: with SAME_UPPER the smaller half of the total, else the larger."""
    is_tensor = isinstance(total, Expr)
    total = op.Max(total, [0]) if is_tensor else np.maximum(total, 0)
    half = total / 2 if is_tensor else total // 2
    return half if auto_pad == "SAME_UPPER" else total - half


def _spatial_rank(attributes, pads, *tensors, axis=None):
    """Return the number of spatial axes; tensors are images, or vectors of sizes along `axis`."""
    for numbers in attributes:
        if numbers and not isinstance(numbers, Expr):
            return len(numbers)
    if pads:
        return len(pads) // 2
    for shape in (tensor.value.shape for tensor in tensors if tensor.value.shape is not None):
        if axis is None or isinstance(shape[axis], int):
            return shape.rank() - 2 if axis is None else shape[axis]
    raise UnsupportedError("the number of spatial axes is not known", hint="give the model's inputs shapes")


def size_of(op, x, axis):
    """Return the size of an axis: a number, or a tensor of one element."""
    size = along(op, x, axis)
    return size[0] if isinstance(size, list) else size


def known_product(x, start):
    """Return the product of the sizes of axes from `start` on; None if one is not known."""
    sizes = None if x.value.shape is None else x.value.shape[start:]
    return math.prod(sizes) if sizes is not None and all(isinstance(n, int) for n in sizes) else None


def reshape(op, x, *sizes):
    """Reshape to sizes that are numbers or tensors of one element."""
    unknown = [n for n in sizes if isinstance(n, Expr)]
    if len(unknown) <= 1 and 0 not in [n for n in sizes if not isinstance(n, Expr)]:
        return op.Reshape(x, [-1 if isinstance(n, Expr) else n for n in sizes])
    return reshape_to(op, x, join_shape(op, *(n if isinstance(n, Expr) else [n] for n in sizes)))
