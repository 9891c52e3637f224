"""Matmuls, Einsum, determinants and Fourier transforms."""

import string

import numpy as np
import onnx_ir as ir

from onward.constants import constant_ints
from onward.rules.common import cast_like, identity, iota, rank
from onward.rules.indexing import on_axis, pad_axes
from onward.rules.registry import body, gradient


@gradient("MatMul", broadcasts=True)
def matmul(op, dy, a, b):
    """Y = A B: dA = dY B', dB = A' dY; a vector is a matrix with one row (A) or one column (B)."""
    a_rank, b_rank = rank(a), rank(b)
    if a_rank is None or b_rank is None:
        return _matmul_of_anyrank(op, dy, a, b)
    if a_rank == 1:
        a, dy = op.Unsqueeze(a, [0]), op.Unsqueeze(dy, [-1 if b_rank == 1 else -2])
    if b_rank == 1:
        b_matrix, dy = op.Unsqueeze(b, [1]), op.Unsqueeze(dy, [-1])
        return op.MatMul(dy, op.Transpose(b_matrix)), op.Squeeze(op.MatMul(_swap_last(op, a), dy), [-1])
    da = op.MatMul(dy, _swap_last(op, b))
    if b_rank == 2 and a_rank > 2:  # one product, not one for each of the batch
        return da, op.Gemm(_rows(op, a), _rows(op, dy), transA=1).like(b.value)
    return da, op.MatMul(_swap_last(op, a), dy)


def _swap_last(op, x):
    last = rank(x) - 1
    return op.Transpose(x, perm=[*range(last - 1), last, last - 1])


def _rows(op, x):
    """Merge the rows of all matrices in `x` into one matrix."""
    width = x.value.shape[-1]
    if isinstance(width, int) and width > 0:
        return op.Reshape(x, [-1, width])
    count = op.ReduceProd(op.Shape(x, end=-1), keepdims=1)
    return op.Reshape(x, op.Concat(count, op.Shape(x, start=-1), axis=0), allowzero=1)


def _matmul_of_anyrank(op, dy, a, b):
    """Return the same if the ranks are known only at run time."""
    a_rank, b_rank = op.Shape(op.Shape(a)), op.Shape(op.Shape(b))
    a_shape = op.Concat(op.Expand([1], op.Max(2 - a_rank, [0])), op.Shape(a), axis=0)
    b_shape = op.Concat(op.Shape(b), op.Expand([1], op.Max(2 - b_rank, [0])), axis=0)
    batch_axes = op.Shape(op.Shape(dy)) - op.Min(a_rank - 1, [1]) - op.Min(b_rank - 1, [1])
    batch = op.Slice(op.Shape(dy), [0], batch_axes)
    dy = op.Reshape(
        dy, op.Concat(batch, op.Slice(a_shape, [-2], [-1]), op.Slice(b_shape, [-1], _END), axis=0), allowzero=1
    )
    da = op.MatMul(dy, _transpose_matrices(op, op.Reshape(b, b_shape, allowzero=1)))
    db = op.MatMul(_transpose_matrices(op, op.Reshape(a, a_shape, allowzero=1)), dy)
    # Drop the column added to a vector B; the driver sums over batch axes that B lacks.
    matrix_axes = op.Shape(op.Shape(db)) - op.Max(2 - b_rank, [0])
    return da, op.Reshape(db, op.Slice(op.Shape(db), [0], matrix_axes), allowzero=1)


def _transpose_matrices(op, x):
    """Transpose the matrices in a tensor of unknown rank. Einsum has no bfloat16 below opset 28."""
    if x.dtype is ir.DataType.BFLOAT16 and op.opset < 28:
        return cast_like(op, _transpose_matrices(op, op.Cast(x, to=ir.DataType.FLOAT)), x)
    return op.Einsum(x, equation="...ij->...ji")


_END = [2**31 - 1]


@gradient("Gemm", broadcasts=(2,))
def gemm(op, dy, a, b, c, *, alpha, beta, transA, transB):
    """Y = alpha A B + beta C."""
    scaled = dy if alpha == 1 else dy * alpha
    da = op.Gemm(b, scaled, transA=transB, transB=1) if transA else op.Gemm(scaled, b, transB=1 - transB)
    db = op.Gemm(scaled, a, transA=1, transB=transA) if transB else op.Gemm(a, scaled, transA=1 - transA)
    return da, db, dy if beta == 1 else dy * beta


@gradient("Einsum", broadcasts=True)
def einsum(op, dy, *operands, equation):
    """The derivative of an operand is the Einsum of dY and the other operands, with its labels as the result."""
    terms, result = _terms(equation, [rank(x) for x in operands])
    unused = (letter for letter in string.ascii_letters if letter not in equation and letter not in "".join(terms))
    return [_einsum_operand(op, dy, i, operands, terms, result, unused) for i in range(len(operands))]


def _einsum_operand(op, dy, index, operands, terms, result, unused):
    x, term = operands[index], terms[index]
    factors = [(other, terms[i]) for i, other in enumerate(operands) if i != index]
    if result:
        factors.append((dy, result))
    labels = ""
    for axis, label in enumerate(_labels(term)):
        # A label that occurs twice takes the diagonal: all else is zero.
        labels += next(unused) if label in labels and label != "..." else label
        if labels[-1] != label[-1]:
            size = _size_of_label(op, x, term, axis)
            factors.append((identity(op, op.Concat(size, size, axis=0), x), label + labels[-1]))
    for axis, label in enumerate(_labels(labels)):
        # A label that occurs nowhere else is summed over: the gradient is the same along it.
        if label != "..." and not any(label in _labels(other) for _, other in factors):
            factors.append((op.Expand(op.scalar(1, x), _size_of_label(op, x, labels, axis)), label))
    if not factors:  # of a scalar
        return dy
    equation = ",".join(other for _, other in factors) + "->" + labels
    dx = op.Einsum(*(factor for factor, _ in factors), equation=equation)
    if _no_broadcast(x, term, operands, terms):
        dx.like(x.value)
    if result:
        return dx
    scaled = dx * dy
    return scaled.like(x.value) if dx.value.shape is not None else scaled


def _terms(equation, ranks):
    """Return the labels of each operand and of the result; an ellipsis becomes new labels if all ranks are known."""
    left, arrow, result = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow:
        letters = left.replace("...", "").replace(",", "")
        result = ("..." if "..." in left else "") + "".join(sorted(x for x in letters if letters.count(x) == 1))
    if "..." not in left or None in ranks:
        return terms, result
    widths = [rank - len(term.replace("...", "")) for term, rank in zip(terms, ranks, strict=True) if "..." in term]
    unused = [letter for letter in string.ascii_letters if letter not in equation]
    axes = "".join(unused[: max(widths)])
    width = iter(widths)
    terms = [term.replace("...", axes[len(axes) - next(width) :]) if "..." in term else term for term in terms]
    return terms, result.replace("...", axes)


def _labels(term):
    """Return the labels of a term as a list, with an ellipsis as one of them."""
    head, dots, tail = term.partition("...")
    return [*head, *([dots] if dots else []), *tail]


def _size_of_label(op, x, term, position):
    """Return the size of a label's axis, counted from the end behind an ellipsis, whose length is not known."""
    labels = _labels(term)
    axis = position - len(labels) if "..." in labels[:position] else position
    return op.Shape(x, start=axis, end=axis + 1 or None)


def _no_broadcast(x, term, operands, terms):
    """True if certainly no axis of `x` is broadcast."""
    if x.value.shape is None or "..." in term:
        return False
    sizes = {}
    for other, labels in zip(operands, terms, strict=True):
        if other.value.shape is None or "..." in labels:
            return False
        for label, size in zip(labels, other.value.shape, strict=True):
            sizes.setdefault(label, []).append(size if isinstance(size, int) else size.value)
    return all(len(set(sizes[label])) == 1 and sizes[label][0] is not None for label in term)


@gradient("Det")
def det(op, dy, x):
    """dX = dY cof(X): the cofactor (i, j) is the determinant of X with row i replaced by the unit vector j."""
    size = op.Shape(x, start=-1)
    units = identity(op, op.Concat(size, size, axis=0), x)
    row, unit = op.Unsqueeze(op.Cast(units, to=ir.DataType.BOOL), [1, 3]), op.Unsqueeze(units, [0, 2])
    return op.Unsqueeze(dy, [-1, -2]) * op.Det(op.Where(row, unit, op.Unsqueeze(x, [-3, -4])))


# ---- Fourier transforms ----------------------------------------------------------------------------------------------


SCALAR = np.zeros(0, np.int64)


@gradient("DFT")
def dft(op, dy, x, dft_length, axis_input, *, y, axis, inverse, onesided):
    """Y = F X: dX = conj(F) dY = n IDFT(dY); for the inverse DFT(dY) / n.

    A one-sided transform omits frequencies, which get no gradient. A one-sided inverse reads each frequency twice,
    except the first, and the last for an even n. Elements that dft_length adds get no gradient; those that it cuts off
    get 0.
    """
    if axis is None:  # an input since operator set 20
        number = None if axis_input is None else constant_ints(axis_input.value)
        axis = -2 if axis_input is None else axis_input if number is None else number[0]
    length = _length(op, y if inverse else x, axis, dft_length)
    n = cast_like(op, op.Cast(length, to=ir.DataType.DOUBLE) if dy.dtype is None else length, dy)
    if not inverse:
        dx = _transform(op, dy, length, axis, inverse=1) * n
    else:
        dx = _transform(op, dy, length, axis, onesided=onesided or None) / n
        if onesided:
            dx = _twice_inside(op, dx, length, axis)
    if dft_length is not None or onesided:
        dx = _fit_length(op, dx, x, axis)
    pair = x.value.shape is not None and x.value.shape[-1] == 2
    return dx if pair else op.Slice(dx, [0], op.Shape(x, start=-1), [-1])


@body("STFT", gradient=(0, 2))
def stft(op, signal, frame_step, window, frame_length, *, onesided):
    """Transform frames of the signal, times the window."""
    step = op.Cast(op.Reshape(frame_step, SCALAR), to=ir.DataType.INT64)
    whole = _length(op, signal, 1, None)
    if frame_length is None:
        length = whole if window is None else _length(op, window, 0, None)
    else:
        length = _length(op, signal, 1, frame_length)
    begins = op.Range(np.int64(0), whole - length + 1, step)
    frames = op.Gather(signal, op.Unsqueeze(begins, [1]) + iota(op, length), axis=1)
    weighted = frames if window is None else frames * op.Unsqueeze(window, [1])
    return _transform(op, weighted, length, 2, onesided=onesided)


def _transform(op, x, length, axis, **attributes):
    """Transform `x`; the axis is an attribute below opset 20, then an input."""
    if op.opset < 20:
        return op.DFT(x, length, axis=axis, **attributes)
    return op.DFT(x, length, op.constant(np.int64(axis)) if isinstance(axis, int) else axis, **attributes)


def _length(op, x, axis, dft_length):
    """Return the length of the transform (default: the size of the axis)."""
    if dft_length is not None:
        return op.Cast(op.Reshape(dft_length, SCALAR), to=ir.DataType.INT64)
    if isinstance(axis, int):
        shape = x.value.shape
        if shape is not None and isinstance(shape[axis], int):
            return op.constant(np.int64(shape[axis]))
        axis = op.constant(np.int64(axis))
    return op.Gather(op.Shape(x), op.Reshape(axis, SCALAR))


def _fit_length(op, dx, x, axis):
    """Crop or zero-pad `dx` to the size of `x` along an axis."""
    axes = [axis] if isinstance(axis, int) else op.Reshape(axis, [1])
    size = op.Reshape(_length(op, x, axis, None), [1])
    cut = op.Slice(dx, [0], size, axes)
    missing = size - op.Reshape(_length(op, cut, axis, None), [1])
    return pad_axes(op, cut, op.Concat([0], missing, axis=0), axes)


def _twice_inside(op, dx, length, axis):
    """Multiply frequencies by 2, except 0 and n / 2."""
    frequencies = iota(op, _length(op, dx, axis, None))
    once = op.Or(op.Equal(frequencies, 0), op.Equal(frequencies * 2, length))
    weights = cast_like(op, op.Where(once, np.int64(1), np.int64(2)), dx)
    return dx * on_axis(op, weights, dx, axis)
