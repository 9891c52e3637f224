"""Products of matrices, and Fourier transforms."""

import string

import numpy as np
import onnx_ir as ir

from onward.constants import constant_ints
from onward.rules.common import cast_like, identity
from onward.rules.indexing import on_axis, pad_axes
from onward.rules.registry import body, gradient


@gradient("MatMul", broadcasts=True)
def matmul(op, dy, a, b):
    """Y = A B: dA = dY B', dB = A' dY; a vector is a matrix with one row (A) or one column (B)."""
    a_rank, b_rank = _rank(a), _rank(b)
    if a_rank is None or b_rank is None:
        return _matmul_of_any_rank(op, dy, a, b)
    row, column = a_rank == 1, b_rank == 1
    if row:
        a, dy = op.Unsqueeze(a, [0]), op.Unsqueeze(dy, [-1 if column else -2])
    if column:
        b_matrix, dy = op.Unsqueeze(b, [1]), op.Unsqueeze(dy, [-1])
        return op.MatMul(dy, op.Transpose(b_matrix)), op.Squeeze(op.MatMul(_swap_last(op, a), dy), [-1])
    da = op.MatMul(dy, _swap_last(op, b))
    if b_rank == 2 and a_rank > 2:  # one product, not one for each of the batch
        return da, op.Gemm(_rows(op, a), _rows(op, dy), transA=1).like(b.value)
    return da, op.MatMul(_swap_last(op, a), dy)


def _rank(x):
    return None if x.value.shape is None else x.value.shape.rank()


def _swap_last(op, x):
    rank = _rank(x)
    return op.Transpose(x, perm=[*range(rank - 2), rank - 1, rank - 2])


def _rows(op, x):
    """The rows of all matrices in `x` as one matrix."""
    width = x.value.shape[-1]
    if isinstance(width, int) and width > 0:
        return op.Reshape(x, [-1, width])
    count = op.ReduceProd(op.Shape(x, end=-1), keepdims=1)
    return op.Reshape(x, op.Concat(count, op.Shape(x, start=-1), axis=0), allowzero=1)


def _matmul_of_any_rank(op, dy, a, b):
    """The same where it turns out only at run time which operand is a vector."""
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
    # Without the column that a vector B was given; batch axes that B lacks are summed by the driver.
    matrix_axes = op.Shape(op.Shape(db)) - op.Max(2 - b_rank, [0])
    return da, op.Reshape(db, op.Slice(op.Shape(db), [0], matrix_axes), allowzero=1)


def _transpose_matrices(op, x):
    """Matrices in a tensor of unknown rank with their axes swapped; only from opset 28 on Einsum knows bfloat16."""
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
    terms, result = _terms(equation, [_rank(x) for x in operands])
    unused = (letter for letter in string.ascii_letters if letter not in equation and letter not in "".join(terms))
    return [_einsum_operand(op, dy, i, operands, terms, result, unused) for i in range(len(operands))]


def _einsum_operand(op, dy, index, operands, terms, result, unused):
    x, term = operands[index], terms[index]
    factors = [(other, terms[i]) for i, other in enumerate(operands) if i != index]
    if result:
        factors.append((dy, result))
    wanted = ""
    for axis, label in enumerate(_labels(term)):
        # A label that occurs twice takes the diagonal: all else is zero.
        wanted += next(unused) if label in wanted and label != "..." else label
        if wanted[-1] != label[-1]:
            size = op.Shape(x, start=_axis_of_label(term, axis), end=_axis_of_label(term, axis) + 1 or None)
            factors.append((identity(op, op.Concat(size, size, axis=0), x), label + wanted[-1]))
    for axis, label in enumerate(_labels(wanted)):
        # A label that occurs nowhere else is summed over: the gradient is the same along it.
        if label != "..." and not any(label in _labels(given) for _, given in factors):
            size = op.Shape(x, start=_axis_of_label(wanted, axis), end=_axis_of_label(wanted, axis) + 1 or None)
            factors.append((_fill(op, size, 1, x), label))
    if not factors:  # of a scalar
        return dy
    equation = ",".join(given for _, given in factors) + "->" + wanted
    dx = op.Einsum(*(factor for factor, _ in factors), equation=equation)
    if _no_broadcast(x, term, operands, terms):
        dx.like(x.value)
    if result:
        return dx
    scaled = dx * dy
    return scaled.like(x.value) if dx.value.shape is not None else scaled


def _terms(equation, ranks):
    """The labels of each operand and of the result; an ellipsis becomes labels of its own where all ranks are known."""
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
    """The labels of a term one by one, an ellipsis counting as one."""
    head, dots, tail = term.partition("...")
    return [*head, *([dots] if dots else []), *tail]


def _axis_of_label(term, position):
    """The axis of a label: from the end if it comes after an ellipsis, whose length is not known."""
    labels = _labels(term)
    return position - len(labels) if "..." in labels[:position] else position


def _no_broadcast(x, term, operands, terms):
    """Whether it is certain that no axis of `x` is stretched."""
    if x.value.shape is None or "..." in term:
        return False
    sizes = {}
    for other, labels in zip(operands, terms, strict=True):
        if other.value.shape is None or "..." in labels:
            return False
        for label, size in zip(labels, other.value.shape, strict=True):
            sizes.setdefault(label, []).append(size if isinstance(size, int) else size.value)
    return all(len(set(sizes[label])) == 1 and sizes[label][0] is not None for label in term)


def _fill(op, shape, number, like):
    return op.Expand(op.scalar(number, like), shape)


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
