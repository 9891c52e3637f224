"""Shapes, and operations that move elements."""

from __future__ import annotations

import numpy as np

from onward.engines.framework import Operators
from onward.frameworks.formulas.graph_building import (
    END,
    as_pads,
    cast,
    permute,
    reverse,
    same_operator,
    stack,
    unstack,
)
from onward.frameworks.tensorflow.graph import RefusedOperation, as_int64, dtype_of

operators = Operators()


@operators.define("Shape")
def shape(op, x, *, out_type, node):
    return _sizes(op, x, node.operation.inputs[0].shape, out_type)


@operators.define("ShapeN")
def shapes(op, *xs, out_type, node):
    return [_sizes(op, x, y.shape, out_type) for x, y in zip(xs, node.operation.inputs, strict=True)]


def _sizes(op, x, shape, out_type):
    dtype = dtype_of(out_type)
    if shape.is_fully_defined():
        return op.constant(np.array(shape.as_list(), dtype.numpy()))
    return cast(op, op.Shape(x), dtype)


operators(
    Size=lambda op, x, *, out_type: cast(op, op.Size(x), dtype_of(out_type)),
    Rank=lambda op, x, *, node: op.constant(np.array(node.rank(0), np.int32)),
)


@operators.define("Reshape")
def reshape(op, x, shape, *, node):
    constant, result_shape = node.known(1), node.operation.outputs[0].shape
    if constant is not None:
        sizes = constant.reshape(-1).tolist()
    elif result_shape.rank is None or 0 in result_shape.as_list() or result_shape.as_list().count(None) > 1:
        return op.Reshape(x, as_int64(op, shape), allowzero=1)
    else:
        sizes = [-1 if size is None else size for size in result_shape.as_list()]
    return op.Reshape(x, sizes, allowzero=1 if 0 in sizes else None)


@operators.define("Squeeze")
def squeeze(op, x, *, squeeze_dims, node):
    axes = list(squeeze_dims) or [axis for axis, size in enumerate(node.shape(0)) if size == 1]
    return op.Squeeze(x, axes)


operators(
    Pack=lambda op, *xs, axis: stack(op, xs, axis),
    Unpack=lambda op, x, *, num, axis: unstack(op, x, num, axis),
    ExpandDims=lambda op, x, _, *, node: op.Unsqueeze(x, node.numbers(1)),
    Transpose=lambda op, x, _, *, node: permute(op, x, node.numbers(1)),
)


@operators.define("ConcatV2")
def concat(op, *xs, node):
    *parts, _ = xs
    return op.Concat(*parts, axis=node.number(len(parts))) if len(parts) > 1 else parts[0]


@operators.define("Split")
def split(op, _, x, *, num_split, node):
    if num_split == 1:
        return x
    return op.Split(x, axis=node.number(0), num_outputs=num_split, outputs=num_split)


@operators.define("SplitV")
def split_by_sizes(op, x, parts, _, *, num_split, node):
    if num_split == 1:
        return x
    axis = node.number(2)
    if node.known(1) is None:
        return op.Split(x, as_int64(op, parts), axis=axis, outputs=num_split)
    sizes = node.numbers(1)
    if -1 in sizes:
        sizes[sizes.index(-1)] = node.size(0, axis) - sum(size for size in sizes if size >= 0)
    return op.Split(x, sizes, axis=axis, outputs=num_split)


@operators.define("Slice")
def slice_(op, x, begin, size, *, node):
    begins, sizes = node.known(1), node.known(2)
    if begins is None or sizes is None:  # a computed size of -1 means the rest
        low, count = as_int64(op, begin), as_int64(op, size)
        return op.Slice(x, low, op.Where(count < 0, np.int64(END), low + count))
    ends = [END if size < 0 else low + size for low, size in zip(begins.tolist(), sizes.tolist(), strict=True)]
    return op.Slice(x, begins.tolist(), ends)


@operators.define("StridedSlice")
def strided_slice(
    op, x, begin, end, strides, *, node, begin_mask, end_mask, ellipsis_mask, new_axis_mask, shrink_axis_mask
):
    """Slice as `x[1:, ..., None, 3, ::-1]`: a slice per axis, with removed and new axes."""
    steps, rank = node.numbers(3), node.rank(0)
    begins, ends = _elements(op, begin, node.known(1), len(steps)), _elements(op, end, node.known(2), len(steps))
    sliced, removed, new, axis, result_axis = [], [], [], 0, 0
    for i, step in enumerate(steps):
        bit = 1 << i
        if ellipsis_mask & bit:
            consumed = sum(not (new_axis_mask >> j) & 1 for j in range(i + 1, len(steps)))
            result_axis += rank - axis - consumed
            axis = rank - consumed
        elif new_axis_mask & bit:
            new.append(result_axis)
            result_axis += 1
        elif shrink_axis_mask & bit:
            low = begins[i]
            sliced.append((axis, low, _after(op, low), 1))
            removed.append(axis)
            axis += 1
        else:
            low = (0 if step > 0 else END) if begin_mask & bit else begins[i]
            high = (END if step > 0 else -END) if end_mask & bit else ends[i]
            if not (begin_mask & bit and end_mask & bit and step == 1):
                sliced.append((axis, low, high, step))
            axis, result_axis = axis + 1, result_axis + 1
    if sliced:
        axes, lows, highs, by = zip(*sliced, strict=True)
        x = op.Slice(x, _vector(op, lows), _vector(op, highs), list(axes), list(by))
    x = op.Squeeze(x, removed) if removed else x
    return op.Unsqueeze(x, new) if new else x


def _elements(op, vector, constant, count):
    """Return the elements of a vector: numbers, or scalars that are computed."""
    if constant is not None:
        return constant.tolist()
    wide = as_int64(op, vector)
    return [op.Slice(wide, [i], [i + 1]) for i in range(count)]


def _after(op, index):
    """Return the end of a slice of one element. The end after index -1 is END, not 0."""
    if isinstance(index, int):
        return index + 1 if index != -1 else END
    return op.Where(op.Equal(index, np.int64(-1)), np.int64(END), index + np.int64(1))


def _vector(op, elements):
    if all(isinstance(element, int) for element in elements):
        return list(elements)
    parts = [np.array([element], np.int64) if isinstance(element, int) else element for element in elements]
    return op.Concat(*parts, axis=0) if len(parts) > 1 else parts[0]


operators(
    Pad=lambda op, x, _, *, node: op.Pad(x, as_pads(node.array(1).tolist())),
    PadV2=lambda op, x, _, value, *, node: op.Pad(x, as_pads(node.array(1).tolist()), value),
    Tile=lambda op, x, repeats: op.Tile(x, as_int64(op, repeats)),
    BroadcastTo=lambda op, x, shape: op.Expand(x, as_int64(op, shape)),
    Fill=lambda op, shape, value: op.Expand(value, as_int64(op, shape)),
    Range=same_operator("Range"),
    ReverseV2=lambda op, x, _, *, node: reverse(op, x, node.numbers(1)),
)


@operators.define("MirrorPad")
def mirror_pad(op, x, _, *, mode, node):
    if mode != "REFLECT":
        raise RefusedOperation("only the mode REFLECT has a counterpart in ONNX")
    return op.Pad(x, as_pads(node.array(1).tolist()), mode="reflect")


@operators.define("MatrixBandPart")
def band_part(op, x, below, above, *, node):
    """Keep the elements near the diagonal: the number of diagonals, or all if it is negative."""
    low, high = node.number(1), node.number(2)
    if low >= 0:
        x = op.Trilu(x, np.int64(-low), upper=1)
    return op.Trilu(x, np.int64(high), upper=0) if high >= 0 else x


@operators.define("MatrixDiagV3", "MatrixDiag")
def diagonal(op, x, *_, node):
    if any(node.number(i) != number for i, number in ((1, 0), (2, -1), (3, -1))[: len(node.operation.inputs) - 1]):
        raise RefusedOperation("it is not the main diagonal of a square")
    size = node.shape(0)[-1]
    if size is None:
        places = op.Range(np.int64(0), op.Squeeze(op.Shape(x, start=-1)), np.int64(1))
        is_diagonal = op.Equal(places, op.Unsqueeze(places, [-1]))
    else:
        is_diagonal = np.eye(size, dtype=bool)
    return op.Where(is_diagonal, op.Unsqueeze(x, [-1]), op.scalar(0, x))


@operators.define("Roll")
def roll(op, x, *_, node):
    for shift, axis in zip(node.numbers(1), node.numbers(2), strict=True):
        end, begin = op.Slice(x, [-shift], [END], [axis]), op.Slice(x, [0], [-shift], [axis])
        x = op.Concat(end, begin, axis=axis) if shift else x
    return x


def _block_rule(name):
    def rule(op, x, *, block_size, data_format):
        if data_format != "NHWC":
            return op.node("", name, x, blocksize=block_size)
        return permute(op, op.node("", name, permute(op, x, [0, 3, 1, 2]), blocksize=block_size), [0, 2, 3, 1])

    return rule


operators(DepthToSpace=_block_rule("DepthToSpace"), SpaceToDepth=_block_rule("SpaceToDepth"))
