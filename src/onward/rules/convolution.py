"""Derivatives of convolutions, and of Col2Im."""

import math

import onnx_ir as ir

from onward.constants import HALVES, constant_ints
from onward.rules.common import cast_like, iota
from onward.rules.indexing import END, extent, fill, join_shape, merge_axes, product, reshape_to, shaped_like
from onward.rules.registry import body, gradient, rewrite
from onward.rules.windows import (
    columns,
    exactly_covered,
    half_of_padding,
    known_product,
    one_hot_kernels,
    reshape,
    size_of,
    sliding,
    spread_windows,
    tiling,
)
from onward.shapes import dims

COPIES_OF_OUTPUTS = 0.5
MULTIPLICATIONS = 1 / 32
"""Time on CPUs, relative to copying an element of a window."""
CACHED = 1 << 20
"""Number of elements that stay in the caches of a CPU."""
MOST_PIECES = 8
"""Largest number of products that the batch is split into."""


@gradient("Conv")
def conv(op, dy, x, w, b, *, y, auto_pad, dilations, group, kernel_shape, pads, strides):
    """Y = X * W: dX is the transposed convolution of dY, dW the product of the windows of X and dY, summed over N."""
    kernel = extent(op, w, 2) if kernel_shape is None else list(kernel_shape)
    slide = {"auto_pad": auto_pad, "dilations": dilations, "pads": pads, "strides": strides}
    window = sliding(op, x, y, kernel, **slide)
    dy, factor = _without_factor(op, dy, w)
    dx = spread_windows(op, dy, w if factor is None else w * factor, window, group=group)
    dw, db = _weight_gradient(op, x, dy, w, window, kernel, group, **slide), _bias_gradient(op, dy, window)
    if factor is None:
        return dx, dw, db
    return dx, dw * factor, db * op.Reshape(factor, [-1])


def _without_factor(op, dy, w):
    """Split a factor per channel off `dy`: multiplying the smaller weights is cheaper."""
    node, sizes = dy.value.producer(), dims(w.value)
    if node is None or node.op_type != "Mul" or node.domain != "" or sizes is None:
        return dy, None
    (rest, numbers), rank = node.inputs, len(sizes)
    whole, shape = dims(rest), dims(numbers)
    if whole is None or len(whole) != rank or whole[1] != sizes[0] or shape != (sizes[0], *[1] * (rank - 2)):
        return dy, None
    return op(rest), op.Unsqueeze(op(numbers), [rank - 1])


@gradient("ConvTranspose")
def conv_transpose(
    op, dy, x, w, b, *, y, auto_pad, dilations, group, kernel_shape, output_padding, output_shape, pads, strides
):
    """Y = X *' W: dX is the convolution of dY, dW the product of the windows of dY and X, summed over N."""
    kernel = extent(op, w, 2) if kernel_shape is None else list(kernel_shape)
    has_output_shape = auto_pad in ("SAME_UPPER", "SAME_LOWER") or bool(output_shape)
    mode = "NOTSET" if has_output_shape else auto_pad
    window = sliding(op, y, x, kernel, auto_pad=mode, dilations=dilations, pads=pads, strides=strides)
    if has_output_shape:
        extra = window.number(op, output_padding or [0] * window.rank)
        window = window._replace(begin=half_of_padding(op, window.covered + extra - window.sizes, auto_pad))
    image, padding = exactly_covered(op, dy, window)
    slide = {"dilations": window.dilations, "strides": window.strides, "pads": padding}
    dx = op.Conv(image, w, group=group, **slide)
    return dx, _weight_gradient(op, image, x, w, window, kernel, group, **slide), _bias_gradient(op, dy, window)


@rewrite("CausalConvWithState")
def causal_conv_with_state(op, x, w, b, past, *, activation):
    """Y = (past, X) * W, channel by channel; the new state is the end of (past, X). Half precision in float32."""
    length, width = op.Shape(x, start=2), op.Shape(w, start=2)
    if past is None:
        past = op.CastLike(op.ConstantOfShape(op.Concat(op.Shape(x, end=2), width - 1, axis=0)), x)
    whole = op.Concat(past, x, axis=2)
    wide, w, b = (n if n is None or n.dtype not in HALVES else op.Cast(n, to=ir.DataType.FLOAT) for n in (whole, w, b))
    channels = size_of(op, x, 1)
    if isinstance(channels, int):
        y = op.Conv(wide, w, b, group=channels)
    else:  # Conv needs the number of groups: multiply the windows by the kernels
        first, offset = (iota(op, op.Squeeze(n, [0])) for n in (length, width))
        windows = op.Gather(wide, op.Unsqueeze(first, [1]) + offset, axis=2)
        y = op.Squeeze(op.MatMul(windows, op.Transpose(w, perm=[0, 2, 1])), [3])
        y = y if b is None else y + op.Unsqueeze(b, [1])
    return cast_like(op, y if activation == "none" else y * op.Sigmoid(y), x), op.Slice(whole, length, [END], [2])


def _bias_gradient(op, dy, window):
    return op.ReduceSum(dy, [0, *range(2, window.rank + 2)], keepdims=0)


def _weight_gradient(op, image, outputs, w, window, kernel, group, **slide):
    """Return the product of the windows of an image and of outputs, summed over N, in the shape of W."""
    if _pays_by_row(window, w, group):
        channels, inputs = dims(w.value)[:2]
        rows, *row = window.kernel.tolist()
        copied = (inputs * math.prod(row) + channels * rows) * math.prod(window.count.tolist())
        total = _by_pieces(op, lambda x, y: _products_by_row(op, x, y, w, window), image, outputs, copied)
        split, rank = op.Reshape(total, [inputs, *row, channels, rows]), window.rank
        return op.Transpose(split, perm=[rank, 0, rank + 1, *range(1, rank)])

    def products(image, outputs):
        windows = image if window.is_image else columns(op, image, kernel, **slide)
        return _products(op, windows, outputs, w, group)

    sizes = known_product(w, 1), known_product(outputs, 2)
    copied = 0 if window.is_image or None in sizes else math.prod((group, *sizes))
    total = _by_pieces(op, products, image, outputs, copied)
    axes = 3 if group > 1 else 2
    return shaped_like(op, op.Transpose(total, perm=[*range(axes - 2), axes - 1, axes - 2]), w)


def _by_pieces(op, products, image, outputs, copied):
    """Compute products of an image and outputs for a few samples at a time, so that the copies stay cached."""
    count, axes = size_of(op, outputs, 0), dims(image.value)
    pieces = 1
    if isinstance(count, int) and axes is not None and axes[0] == count:
        possible = [n for n in range(1, MOST_PIECES + 1) if count % n == 0]
        pieces = next((n for n in possible if count // n * copied <= CACHED), possible[-1])
    if pieces == 1:
        return products(image, outputs)
    sizes = [count // pieces] * pieces
    parts = (op.Split(value, sizes, axis=0, outputs=pieces) for value in (image, outputs))
    return op.Sum(*(products(x, y) for x, y in zip(*parts, strict=True)))


def _products(op, windows, outputs, w, group):
    """Sum windows [N, C K, P] times outputs [N, O, P] over N, group by group: [C K, O].

    On CPUs it is fastest to put the large factor first and transpose the small result.
    """
    count = size_of(op, outputs, 0)
    sizes = (product(op, extent(op, x, axis)) for x, axis in ((w, 1), (outputs, 2)))
    elements, positions = (n[0] if isinstance(n, list) else n for n in sizes)
    groups = [group] if group > 1 else []
    channels = size_of(op, outputs, 1)
    if group > 1:
        channels = channels // group if isinstance(channels, int) else channels / group
    left = reshape(op, windows, count, *groups, elements, positions)
    right = reshape(op, outputs, count, *groups, channels, positions)
    axes = len(groups) + 3
    swap = [*range(axes - 2), axes - 1, axes - 2]
    return op.ReduceSum(op.MatMul(left, op.Transpose(right, perm=swap)), [0], keepdims=0)


def _products_by_row(op, image, outputs, w, window):
    """Compute the same from windows of one row, [N, C K, R W], and K shifted copies of the outputs: [C K, O K].

    Row i of a window meets the outputs i rows further down, so the image is copied K times instead of K K times. The
    stride along the rows, the first axis of `window`, must be 1.
    """
    channels, inputs = dims(w.value)[:2]
    rows, *row = window.kernel.tolist()
    width = math.prod(window.count[1:].tolist())
    flat = merge_axes(op, outputs, 2)
    gap = fill(op, join_shape(op, extent(op, outputs, 0, 2), [rows * window.dilations[0] * width]), 0, outputs)
    shifted = op.Concat(flat, *[gap, flat] * (rows - 1), axis=2)
    windows = image
    if any(n != 1 for n in (*row, *window.strides)) or any(window.padding):
        slide = {"dilations": [1, *window.dilations[1:]], "strides": window.strides, "pads": window.padding}
        windows = columns(op, image, [1, *row], **slide)
    count, positions = size_of(op, outputs, 0), int(window.covered[0]) * width
    left = reshape(op, windows, count, inputs * math.prod(row), positions)
    right = reshape(op, shifted, count, channels * rows, positions)
    return op.ReduceSum(op.MatMul(left, op.Transpose(right, perm=[0, 2, 1])), [0], keepdims=0)


def _pays_by_row(window, w, group):
    """True if products by row are faster: they copy less of the image, but also outputs, and multiply their padding."""
    sizes = dims(w.value)
    if group > 1 or not window.static or window.strides[0] > 1 or sizes is None or not all(sizes):
        return False
    if not all(isinstance(n, int) for n in sizes) or not (window.count > 0).all():
        return False
    channels, inputs, rows, *row = sizes
    longer = window.covered[0] / window.count[0]
    whole = inputs * math.prod((rows, *row))
    copies = inputs * math.prod(row) + COPIES_OF_OUTPUTS * rows * channels
    return longer * copies + (longer - 1) * whole * channels * MULTIPLICATIONS < whole


@gradient("Col2Im")
def col2im_gradient(op, dy, x, image_shape, block_shape, *, dilations, pads, strides):
    """Y adds up windows: dX is the windows of dY."""
    kernel = constant_ints(block_shape.value)
    block = block_shape if kernel is None else list(kernel)
    return reshape_to(op, columns(op, dy, block, dilations=dilations, pads=pads, strides=strides), op.Shape(x))


@body("Col2Im")
def col2im(op, x, image_shape, block_shape, *, dilations, pads, strides):
    """Add up windows by a transposed convolution with one-hot kernels."""
    kernel, sizes = (list(constant_ints(n.value) or ()) or n for n in (block_shape, image_shape))
    window = tiling(op, sizes, kernel, dilations=dilations, pads=pads, strides=strides)
    elements, kernels = one_hot_kernels(op, kernel, x)
    planes = reshape_to(op, x, join_shape(op, [-1], elements, window.as_shape(window.count)))
    y = spread_windows(op, planes, kernels, window)
    return reshape_to(op, y, join_shape(op, extent(op, x, 0, 1), [-1], window.as_shape(window.sizes)))
