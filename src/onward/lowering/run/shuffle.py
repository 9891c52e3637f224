"""The order of samples, computed in a graph: the one that `onward train` takes them in, to the last row.

It is `Order` of training/data/views.py in operators of the standard: a Feistel network, whose keys are drawn from the
seed and the epoch. Products and sums are of int64, which wraps around as uint64 does, since not all runtimes have
those of uint64; remainders and shifts are of uint64, where the two differ.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onward.build import Builder, Expr

_KEYS = 10
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""The constants of SplitMix64."""


def shuffled_rows(op: Builder, count: Expr, seed: Expr, epoch: Expr) -> Expr:
    """The rows 0 to `count` - 1 in the order that they have in an epoch; `seed` and `epoch` are tensors of one."""
    rows = op.Range(0, count, 1)
    low = op.Max(op.Cast(op.Floor(op.Sqrt(op.Cast(count, to=ir.DataType.DOUBLE))), to=ir.DataType.INT64), 1)
    high = (count + low - 1) / low
    keys = _draw_keys(op, seed, epoch)

    def walk(op: Builder, _: Expr, __: Expr, rows: Expr, waiting: Expr) -> list[Expr]:
        """Follow those that are outside once more; at first all are."""
        moved = _permute(op, op.Gather(rows, waiting), low, high, keys)
        waiting_now = op.Compress(waiting, moved >= count, axis=0)
        goes_on = op.Size(waiting_now) > 0
        return [goes_on, op.ScatterElements(rows, waiting, moved), waiting_now]

    body = op.subgraph(walk, [*loop_inputs(), row_numbers("rows"), row_numbers("waiting")], "walk")
    walked, _ = op.Loop(None, count > 0, rows, rows, body=body, outputs=2)
    walked.value.type, walked.value.shape = ir.TensorType(ir.DataType.INT64), ir.Shape([None])
    return Expr(op, walked.value)


def row_numbers(name: str) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([None]))


def loop_inputs() -> list[ir.Value]:
    """What each iteration of a Loop is told: its number, and that it goes on."""
    kinds = {"iteration": ir.DataType.INT64, "goes_on": ir.DataType.BOOL}
    return [ir.Value(name=name, type=ir.TensorType(kind), shape=ir.Shape([])) for name, kind in kinds.items()]


def _draw_keys(op: Builder, seed: Expr, epoch: Expr) -> Expr:
    """The keys of all rounds, one in each row."""

    def draw(op: Builder, _: Expr, goes_on: Expr, key: Expr) -> list[Expr]:
        following = _mix(op, key)
        return [goes_on, following, following]

    first = _mix(op, op.BitwiseXor(_mix(op, seed), epoch))
    given = ir.Value(name="key", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([1]))
    body = op.subgraph(draw, [*loop_inputs(), given], "draw")
    _, keys = op.Loop(np.int64(_KEYS), op.constant(True), first, body=body, outputs=2)
    return Expr(op, keys.value)


def _permute(op: Builder, positions: Expr, low: Expr, high: Expr, keys: Expr) -> Expr:
    """Where positions on the grid are sent."""

    def shift(op: Builder, number: Expr, goes_on: Expr, above: Expr, below: Expr) -> list[Expr]:
        above = _shifted(op, above, op.BitwiseXor(below, op.Gather(keys, number * 2)), high)
        below = _shifted(op, below, op.BitwiseXor(above, op.Gather(keys, number * 2 + 1)), low)
        return [goes_on, above, below]

    body = op.subgraph(shift, [*loop_inputs(), row_numbers("above"), row_numbers("below")], "shift")
    start = (positions / low, op.Mod(positions, low))
    above, below = op.Loop(np.int64(_KEYS // 2), op.constant(True), *start, body=body, outputs=2)
    result: Expr = op.Add(op.Mul(above, low), below)
    return result


def _shifted(op: Builder, coordinate: Expr, hashed: Expr, size: Expr) -> Expr:
    unsigned = [op.Cast(value, to=ir.DataType.UINT64) for value in (_hash(op, hashed), size)]
    result: Expr = op.Mod(coordinate + op.Cast(op.Mod(*unsigned), to=ir.DataType.INT64), size)
    return result


def _mix(op: Builder, number: Expr) -> Expr:
    return _hash(op, number + _signed(_GOLDEN))


def _hash(op: Builder, number: Expr) -> Expr:
    number = op.BitwiseXor(number, _right(op, number, 30)) * _signed(_FIRST)
    number = op.BitwiseXor(number, _right(op, number, 27)) * _signed(_SECOND)
    result: Expr = op.BitwiseXor(number, _right(op, number, 31))
    return result


def _right(op: Builder, number: Expr, bits: int) -> Expr:
    """Shifted to the right, with zeros from the left."""
    unsigned = op.Cast(number, to=ir.DataType.UINT64)
    result: Expr = op.Cast(op.BitShift(unsigned, np.uint64(bits), direction="RIGHT"), to=ir.DataType.INT64)
    return result


def _signed(number: int) -> np.ndarray:
    return np.array([number], np.uint64).view(np.int64)
