"""Shapes, moved elements, and reads and writes at computed indices.

JAX's gather and scatter move a window for each of many starts. Here the indexed axes of the operand
come first, and the indices of all elements of all windows are computed for GatherND or ScatterND.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from onward.build import Expr
from onward.engines.framework import Operators
from onward.errors import UnsupportedError
from onward.frameworks.formulas.graph_building import (
    END,
    as_pads,
    cast,
    constant_of,
    inverse,
    permute,
    reverse,
    stack,
    unstack,
)
from onward.frameworks.formulas.reduction import where
from onward.frameworks.jax.jaxpr.builder import add_last_axes, extreme, fill, reshape_to

primitives = Operators()


@primitives.define("reshape")
def reshape(op, x, *, dimensions, ins, outs):
    if dimensions is not None:
        x = permute(op, x, dimensions)
    return x if ins[0].shape == outs[0].shape else reshape_to(op, x, outs[0].shape)


@primitives.define("broadcast_in_dim")
def broadcast_in_dim(op, x, *sizes, broadcast_dimensions, ins, outs):
    """Insert axes of size 1, and expand to the shape."""
    shape, own = outs[0].shape, list(broadcast_dimensions)
    if not ins[0].shape and (number := constant_of(x)) is not None:
        return fill(op, shape, number, outs[0].dtype) if shape else x
    own += range(len(shape) - len(ins[0].shape) + len(own), len(shape))  # the two numbers of a random key stay last
    new = [axis for axis in range(len(shape)) if axis not in own]
    before = [ins[0].shape[own.index(axis)] if axis in own else 1 for axis in range(len(shape))]
    x = op.Unsqueeze(x, new) if new and own else x
    return x if tuple(before) == tuple(shape) and own else op.Expand(x, op.shape(shape))


primitives(
    transpose=lambda op, x, *, permutation, ins: permute(
        op, x, [*permutation, *range(len(permutation), len(ins[0].shape))]
    ),
    squeeze=lambda op, x, *, dimensions: op.Squeeze(x, list(dimensions)) if dimensions else x,
    concatenate=lambda op, *xs, dimension: op.Concat(*xs, axis=dimension),
    tile=lambda op, x, *, reps: op.Tile(x, op.shape(reps)),
    split=lambda op, x, *, sizes, axis: op.Split(x, op.shape(sizes), axis=axis, outputs=len(sizes)),
    stack=lambda op, *xs, axis: stack(op, xs, axis),
    unstack=lambda op, x, *, axis, outs: unstack(op, x, len(outs), axis),
    rev=lambda op, x, *, dimensions: reverse(op, x, dimensions),
    **dict.fromkeys(("empty", "empty2"), lambda op, *, outs: fill(op, outs[0].shape, 0, outs[0].dtype)),
    dim_as_value=lambda op, *, dim, outs: cast(op, op.size(dim), outs[0].dtype),
    dimension_size=lambda op, x, *, dimension, ins, outs: cast(op, op.size(ins[0].shape[dimension]), outs[0].dtype),
)


@primitives.define("slice")
def cut(op, x, *, start_indices, limit_indices, strides, ins):
    steps = strides or [1] * len(start_indices)
    parts = [
        (axis, start, limit, step)
        for axis, (start, limit, step) in enumerate(zip(start_indices, limit_indices, steps, strict=True))
        if (start, limit, step) != (0, ins[0].shape[axis], 1)
    ]
    if not parts:
        return x
    axes, starts, limits, steps = zip(*parts, strict=True)
    return op.Slice(x, op.shape(starts), op.shape(limits), list(axes), list(steps))


@primitives.define("pad")
def pad(op, x, value, *, padding_config, ins):
    """Insert values between elements, then around them; negative amounts remove elements."""
    x, _ = spread_elements(op, x, value, ins[0].shape, [between for _, _, between in padding_config])
    return pad_axes(op, x, value, [(low, high) for low, high, _ in padding_config])


def spread_elements(op, x, value, shape, between):
    """Insert `value` between elements along each axis; return the result and its shape."""
    sizes = list(shape)
    for axis, count in enumerate(between):
        if count:
            amounts = [(0, count * (i == axis + 1)) for i in range(len(sizes) + 1)]
            x = pad_axes(op, op.Unsqueeze(x, [axis + 1]), value, amounts)
            sizes[axis] *= count + 1
            x = op.Slice(reshape_to(op, x, sizes), [0], [-count], [axis])
            sizes[axis] -= count
    return x, sizes


def pad_axes(op, x, value, amounts):
    """Pad each axis with `value`; negative amounts remove elements."""
    cut_away = [(axis, -min(low, 0), -min(high, 0)) for axis, (low, high) in enumerate(amounts) if min(low, high) < 0]
    if cut_away:
        axes, starts, ends = (list(column) for column in zip(*cut_away, strict=True))
        x = op.Slice(x, starts, [-end or END for end in ends], axes)
    # Pads for all axes: ONNX Runtime ignores the `axes` of a Pad when it moves a Transpose past it.
    around = as_pads([(max(low, 0), max(high, 0)) for low, high in amounts])
    return op.Pad(x, op.shape(around), value, mode="constant") if any(around) else x


@primitives.define("iota")
def iota(op, *sizes, dtype, shape, dimension):
    if sizes:
        raise UnsupportedError("its size is known only at run time")
    numbers = cast(op, positions(op, shape[dimension]), dtype)
    if len(shape) == 1:
        return numbers
    column = op.Unsqueeze(numbers, [axis for axis in range(len(shape)) if axis != dimension])
    return op.Expand(column, op.shape(shape))


def positions(op, size):
    """Return the int64 numbers from 0 to a size."""
    if isinstance(size, int):
        return op.constant(np.arange(size))
    return op.Range(op.constant(np.int64(0)), op.size(size), op.constant(np.int64(1)))


@dataclasses.dataclass(frozen=True)
class GatherWindows:
    """Windows of `sizes` in an operand, one at each start."""

    operand: Sequence[Any]  # shape
    starts: Sequence[Any]  # shape, without the last axis, which has an index for each axis in `mapped`
    sizes: Sequence[Any]
    mapped: Sequence[int]
    paired: dict[int, int]  # batch axes: of the operand -> of the starts
    dropped: Sequence[int]  # axes of size 1 that are not in the result

    @property
    def indexed(self) -> list[int]:
        partial = [axis for axis, size in enumerate(self.sizes) if size != self.operand[axis]]
        return list(dict.fromkeys([*self.paired, *self.mapped, *partial]))

    @property
    def whole(self) -> list[int]:
        return [axis for axis in range(len(self.operand)) if axis not in self.indexed]

    @property
    def windowed(self) -> list[int]:
        return [axis for axis in self.indexed if axis not in self.dropped]

    @property
    def kept(self) -> list[int]:
        return [axis for axis in range(len(self.operand)) if axis not in self.dropped]

    def order(self, offsets: Sequence[int]) -> list[int]:
        """Return the axes of the result as indices into starts + windowed + whole."""
        count, inner = len(self.starts), [*self.windowed, *self.whole]
        outer = iter(range(count))
        own = {target: count + inner.index(axis) for target, axis in zip(offsets, self.kept, strict=True)}
        return [own[target] if target in own else next(outer) for target in range(count + len(inner))]


def _bound_starts(op, indices, windows, mode):
    """Return the int64 starts along each mapped axis, clipped to the operand, and a mask of those inside.

    The mask is None if all are inside.
    """
    wide = cast(op, indices, np.int64)
    columns = {axis: op.Gather(wide, op.constant(np.int64(i)), axis=-1) for i, axis in enumerate(windows.mapped)}
    name = getattr(mode, "name", str(mode))
    if name == "PROMISE_IN_BOUNDS":
        return columns, None
    bounded, inside = {}, None
    for axis, start in columns.items():
        last = op.size(windows.operand[axis] - windows.sizes[axis])
        bounded[axis] = op.Min(op.Max(start, 0), last)
        fits = op.Equal(bounded[axis], start)
        inside = fits if inside is None else op.And(inside, fits)
    return bounded, None if name == "CLIP" else inside


def _element_indices(op, columns, windows):
    """Return the indices of all elements of all windows, along the indexed axes."""
    windowed, count = windows.windowed, len(windows.starts)
    grid = [*windows.starts, *(windows.sizes[axis] for axis in windowed)]
    parts = []
    for axis in windows.indexed:
        index = _start(op, columns, windows, axis, len(grid))
        if axis in windowed and windows.sizes[axis] != 1:
            inside = positions(op, windows.sizes[axis])
            index = index + _along(op, inside, count + windowed.index(axis), len(grid))
        parts.append(op.Unsqueeze(op.Expand(index, op.shape(grid)), [len(grid)]))
    return parts[0] if len(parts) == 1 else op.Concat(*parts, axis=-1)


def _start(op, columns, windows, axis, rank):
    if axis in windows.paired:
        beside = windows.paired[axis]
        return _along(op, positions(op, windows.starts[beside]), beside, rank)
    if axis not in columns:
        return op.constant(np.zeros((1,) * rank, np.int64))
    return add_last_axes(op, columns[axis], rank, len(windows.starts))


def _along(op, vector, axis, rank):
    new = [other for other in range(rank) if other != axis]
    return op.Unsqueeze(vector, new) if new else vector


@primitives.define("gather")
def gather(op, x, indices, *, dimension_numbers, slice_sizes, mode, fill_value, ins, outs):
    numbers = dimension_numbers
    paired = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    dropped = [*numbers.collapsed_slice_dims, *numbers.operand_batching_dims]
    windows = GatherWindows(ins[0].shape, ins[1].shape[:-1], slice_sizes, numbers.start_index_map, paired, dropped)
    columns, inside = _bound_starts(op, indices, windows, mode)
    if windows.indexed == list(numbers.collapsed_slice_dims) and len(windows.indexed) == 1:
        elements = _take(op, x, columns, windows)
    else:
        ordered = permute(op, x, [*windows.indexed, *windows.whole])
        if windows.indexed:
            elements = op.GatherND(ordered, _element_indices(op, columns, windows))
        else:
            elements = op.Expand(x, op.shape([*windows.starts, *windows.operand]))
    if inside is not None:
        fill = op.constant(np.asarray(_fill(fill_value, outs[0].dtype), outs[0].dtype))
        elements = where(op, add_last_axes(op, inside, len(outs[0].shape), len(windows.starts)), elements, fill)
    return permute(op, elements, windows.order(numbers.offset_dims))


def _take(op, x, columns, windows):
    """Gather along one axis, and move the axes of the starts first, as after GatherND."""
    (axis,), count = windows.indexed, len(windows.starts)
    elements = op.Gather(x, columns[axis], axis=axis)
    rest = [other for other in range(count + len(windows.whole)) if not axis <= other < axis + count]
    return permute(op, elements, [*range(axis, axis + count), *rest])


def _fill(value, dtype):
    if value is not None:
        return value
    code = np.dtype(dtype).kind
    return extreme(dtype, largest=code in "bu") if code in "bui" else np.nan


def _scatter_rule(reduction, neutral):
    """Return the row of a scatter with a reduction; outside, it writes `neutral(dtype)`."""

    def scatter(op, x, indices, updates, *, dimension_numbers, mode, ins):
        windows, updates = _scatter_windows(op, updates, dimension_numbers, ins)
        columns, inside = _bound_starts(op, indices, windows, mode)
        if inside is not None:
            mask = add_last_axes(op, inside, len(ins[2].shape), len(windows.starts))
            nothing = op.constant(np.asarray(neutral(ins[0].dtype), ins[0].dtype))
            updates = where(op, mask, updates, nothing)
        return _scatter_updates(op, x, _element_indices(op, columns, windows), updates, windows, reduction)

    return scatter


primitives.update(
    {
        "scatter-add": _scatter_rule("add", lambda dtype: 0),
        "scatter-mul": _scatter_rule("mul", lambda dtype: 1),
        "scatter-min": _scatter_rule("min", lambda dtype: extreme(dtype, largest=True)),
        "scatter-max": _scatter_rule("max", lambda dtype: extreme(dtype, largest=False)),
    }
)


@primitives.define("scatter-sub")
def scatter_sub(op, x, indices, updates, *, dimension_numbers, mode, ins):
    add = primitives["scatter-add"]
    return add(op, x, indices, -updates, dimension_numbers=dimension_numbers, mode=mode, ins=ins)


@primitives.define("scatter")
def scatter_set(op, x, indices, updates, *, dimension_numbers, mode, ins):
    """Write values. Values outside of the operand go to an extra element, which is sliced off."""
    windows, updates = _scatter_windows(op, updates, dimension_numbers, ins)
    columns, inside = _bound_starts(op, indices, windows, mode)
    targets = _element_indices(op, columns, windows)
    if inside is None:
        return _scatter_updates(op, x, targets, updates, windows, None)
    first = windows.indexed[0]
    size = op.size(windows.operand[first])
    beyond = op.Concat(op.Unsqueeze(size, [0]), op.constant(np.zeros(len(windows.indexed) - 1, np.int64)), axis=0)
    mask = add_last_axes(op, inside, len(windows.starts) + len(windows.windowed) + 1, len(windows.starts))
    longer = pad_axes(op, x, None, [(0, int(axis == first)) for axis in range(len(windows.operand))])
    written = _scatter_updates(op, longer, op.Where(mask, targets, beyond), updates, windows, None)
    return op.Slice(written, [0], op.Unsqueeze(size, [0]), [first])


def _scatter_windows(op, updates, numbers, ins):
    """Return the windows of a scatter, and the updates with axes in the order of ScatterND."""
    paired = dict(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True))
    dropped = [*numbers.inserted_window_dims, *numbers.operand_batching_dims]
    own = iter(numbers.update_window_dims)
    sizes = [1 if axis in dropped else ins[2].shape[next(own)] for axis in range(len(ins[0].shape))]
    windows = GatherWindows(
        ins[0].shape, ins[1].shape[:-1], sizes, numbers.scatter_dims_to_operand_dims, paired, dropped
    )
    return windows, permute(op, updates, inverse(windows.order(numbers.update_window_dims)))


def _scatter_updates(op, x, indices, updates, windows, reduction):
    order = [*windows.indexed, *windows.whole]
    written = op.ScatterND(permute(op, x, order), indices, updates, reduction=reduction)
    return permute(op, written, inverse(order))


def _partial(op, starts, sizes, shape) -> list[tuple[int, Expr, Expr]]:
    """Return axis, start and end of each partial axis, with starts clipped to the operand."""
    parts = []
    for axis, (start, size) in enumerate(zip(starts, sizes, strict=False)):
        if size == shape[axis]:
            continue
        last = op.size(shape[axis] - size)
        begin = op.Unsqueeze(op.Min(op.Max(cast(op, start, np.int64), 0), last), [0])
        parts.append((axis, begin, begin + op.Unsqueeze(op.size(size), [0])))
    return parts


@primitives.define("dynamic_slice")
def dynamic_slice(op, x, *starts, slice_sizes, ins):
    parts = _partial(op, starts, slice_sizes, ins[0].shape)
    if not parts:
        return x
    axes, begins, ends = zip(*parts, strict=True)
    together = (bounds[0] if len(bounds) == 1 else op.Concat(*bounds, axis=0) for bounds in (begins, ends))
    return op.Slice(x, *together, list(axes))


primitives(
    dynamic_update_slice=lambda op, x, update, *starts, ins: _overwrite(
        op, x, update, _partial(op, starts, ins[1].shape, ins[0].shape)
    )
)


def _overwrite(op, x, update, parts):
    """Concatenate along the first axis: before, the recursively overwritten slice, and after."""
    if not parts:
        return update
    (axis, begin, end), *rest = parts
    within = op.Slice(x, begin, end, [axis]) if rest else x
    before, after = op.Slice(x, [0], begin, [axis]), op.Slice(x, end, [END], [axis])
    return op.Concat(before, _overwrite(op, within, update, rest), after, axis=axis)
