"""Data inside a graph: batches taken from inputs, the order of samples, and lowered models as parts
of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onward.build import Builder, Expr
from onward.errors import UnknownNameError, UnsupportedError, suggest
from onward.model import Model
from onward.model.core import values
from onward.model.walk import graphs_in


def scalar(name: str, dtype: ir.DataType) -> ir.Value:
    """Return a scalar input."""
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape([]))


class BatchInputs:
    """Data as inputs of a graph: all samples of each input of a batch, or noise for each batch.

    Their names are those of the inputs of a batch, after `scope`.
    """

    def __init__(
        self,
        graph: ir.Graph,
        op: Builder,
        batch_inputs: Mapping[str, ir.Value],
        noise: Collection[str],
        size: int,
        scope: str,
    ):
        self.size = size
        self.inputs: dict[str, str] = {}
        """Input of a batch -> input of the graph with its data."""
        self._columns: dict[str, ir.Value] = {}
        self._noise: dict[str, ir.Value] = {}
        for name, value in batch_inputs.items():
            input_ = ir.Value(name=op.names.fresh(scope + name) if scope else name, type=value.type)
            sample_shape = _sample_shape(value)
            if name in noise:
                input_.shape = None if sample_shape is None else ir.Shape([f"{scope}batches", size, *sample_shape])
                self._noise[name] = input_
            else:
                input_.shape = None if sample_shape is None else ir.Shape([f"{scope}rows", *sample_shape])
                self._columns[name] = input_
            graph.inputs.append(input_)
            self.inputs[name] = input_.name or ""
        if not self._columns:
            raise UnsupportedError("the step has no input that takes data")

    @property
    def noise(self) -> list[str]:
        return [value.name or "" for value in self._noise.values()]

    def rows(self, op: Builder) -> Expr:
        """Return the number of samples."""
        first = next(iter(self._columns.values()))
        return op.Squeeze(op.Shape(first, start=0, end=1), [0])

    def batches(self, op: Builder, *, drop: bool = False) -> Expr:
        """Return the number of batches."""
        rows = self.rows(op)
        return rows / self.size if drop else (rows + (self.size - 1)) / self.size

    def take(self, op: Builder, rows: Expr, number: Expr, within: Expr) -> dict[str, Expr]:
        """Return a batch: these rows, and for noise the elements `within` of batch `number`."""
        taken = {name: op.Gather(value, rows, axis=0) for name, value in self._columns.items()}
        for name, value in self._noise.items():
            taken[name] = op.Gather(op.Gather(value, number, axis=0), within, axis=0)
        return taken


def check_noise(noise: Collection[str], inputs: Collection[str]) -> None:
    for name in noise:
        if name not in inputs:
            raise UnknownNameError(f"the step has no input `{name}` for noise", hint=suggest(name, inputs))


def _sample_shape(value: ir.Value) -> Sequence[int | ir.SymbolicDim] | None:
    if value.shape is None:
        return None
    if not len(value.shape):
        raise UnsupportedError(
            f"the input `{value.name}` is a scalar, which has no rows", hint="make it a constant of the model"
        )
    return list(value.shape)[1:]


# ---- the order of samples --------------------------------------------------------------------------------------------
#
# The order of `onward train`, exactly: `Order` of training/data/views.py in operators of the
# standard, a Feistel network whose keys are drawn from the seed and the epoch. Products and sums use int64,
# which wraps around as uint64 does, since not all runtimes have those of uint64; remainders and shifts use uint64,
# where the two differ.

_KEYS = 10
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""The constants of SplitMix64."""


def shuffled_rows(op: Builder, count: Expr, seed: Expr, epoch: Expr) -> Expr:
    """Return the rows 0 to `count` - 1 in the order of an epoch; all inputs have one element."""
    rows = op.Range(0, count, 1)
    low = op.Max(op.Cast(op.Floor(op.Sqrt(op.Cast(count, to=ir.DataType.DOUBLE))), to=ir.DataType.INT64), 1)
    high = (count + low - 1) / low
    keys = _draw_keys(op, seed, epoch)

    def walk(op: Builder, _: Expr, __: Expr, rows: Expr, waiting: Expr) -> list[Expr]:
        """Permute the rows that are still outside once more; at first all are."""
        moved = _permute(op, op.Gather(rows, waiting), low, high, keys)
        waiting_now = op.Compress(waiting, moved >= count, axis=0)
        continues = op.Size(waiting_now) > 0
        return [continues, op.ScatterElements(rows, waiting, moved), waiting_now]

    body = op.subgraph(walk, [*loop_inputs(), row_numbers("rows"), row_numbers("waiting")], "walk")
    walked, _ = op.Loop(None, count > 0, rows, rows, body=body, outputs=2)
    walked.value.type, walked.value.shape = ir.TensorType(ir.DataType.INT64), ir.Shape([None])
    return Expr(op, walked.value)


def row_numbers(name: str) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([None]))


def loop_inputs() -> list[ir.Value]:
    """Return the first inputs of the body of a Loop: the iteration and the condition."""
    return [scalar("iteration", ir.DataType.INT64), scalar("goes_on", ir.DataType.BOOL)]


def _draw_keys(op: Builder, seed: Expr, epoch: Expr) -> Expr:
    """Return the keys of all Feistel rounds, one per row."""

    def draw(op: Builder, _: Expr, goes_on: Expr, key: Expr) -> list[Expr]:
        following = _mix(op, key)
        return [goes_on, following, following]

    first = _mix(op, op.BitwiseXor(_mix(op, seed), epoch))
    key_input = ir.Value(name="key", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([1]))
    body = op.subgraph(draw, [*loop_inputs(), key_input], "draw")
    _, keys = op.Loop(np.int64(_KEYS), op.constant(True), first, body=body, outputs=2)
    return Expr(op, keys.value)


def _permute(op: Builder, positions: Expr, low: Expr, high: Expr, keys: Expr) -> Expr:
    """Return the permuted positions on the grid."""

    def shift(op: Builder, number: Expr, goes_on: Expr, above: Expr, below: Expr) -> list[Expr]:
        above = _shifted(op, above, op.BitwiseXor(below, op.Gather(keys, number * 2)), high)
        below = _shifted(op, below, op.BitwiseXor(above, op.Gather(keys, number * 2 + 1)), low)
        return [goes_on, above, below]

    body = op.subgraph(shift, [*loop_inputs(), row_numbers("above"), row_numbers("below")], "shift")
    start = (positions / low, op.Mod(positions, low))
    above, below = op.Loop(np.int64(_KEYS // 2), op.constant(True), *start, body=body, outputs=2)
    return op.Add(op.Mul(above, low), below)


def _shifted(op: Builder, coordinate: Expr, hashed: Expr, size: Expr) -> Expr:
    unsigned = [op.Cast(value, to=ir.DataType.UINT64) for value in (_hash(op, hashed), size)]
    return op.Mod(coordinate + op.Cast(op.Mod(*unsigned), to=ir.DataType.INT64), size)


def _mix(op: Builder, number: Expr) -> Expr:
    return _hash(op, number + _signed(_GOLDEN))


def _hash(op: Builder, number: Expr) -> Expr:
    number = op.BitwiseXor(number, _right(op, number, 30)) * _signed(_FIRST)
    number = op.BitwiseXor(number, _right(op, number, 27)) * _signed(_SECOND)
    return op.BitwiseXor(number, _right(op, number, 31))


def _right(op: Builder, number: Expr, bits: int) -> Expr:
    """Return the number shifted right, with zeros from the left."""
    unsigned = op.Cast(number, to=ir.DataType.UINT64)
    return op.Cast(op.BitShift(unsigned, np.uint64(bits), direction="RIGHT"), to=ir.DataType.INT64)


def _signed(number: int) -> np.ndarray:
    return np.array([number], np.uint64).view(np.int64)


# ---- a lowered model as a part of a larger graph ---------------------------------------------------------------------


class Embedding:
    """Inserts lowered models into nested graphs; constants go to the outermost graph, once."""

    def __init__(self, outermost: ir.Graph):
        self._outermost = outermost
        self._constants: dict[int, ir.Value] = {}
        """Identity of a tensor -> its initializer."""

    def __call__(self, op: Builder, model: Model, scope: str, inputs: Mapping[str, Expr]) -> dict[str, Expr]:
        """Move the nodes of a model into the graph of `op`; return its outputs by name."""
        graph = model.graph
        names = [value.name or "" for value in graph.outputs]
        for value in graph.inputs:
            value.replace_all_uses_with(inputs[value.name or ""].value, replace_graph_outputs=True)
        self._keep_constants(op, graph, scope)
        outputs = dict(zip(names, graph.outputs, strict=True))
        graph.outputs.clear()
        for inner in graphs_in(graph):
            for value in values(inner):
                value.name = op.names.fresh(f"{scope}/{value.name}") if value.name else value.name
            for node in inner:
                node.name = op.names.fresh(f"{scope}/{node.name or node.op_type}")
        nodes = list(graph)
        graph.remove(nodes)
        op.graph.extend(nodes)
        return {name: op(value) for name, value in outputs.items()}

    def _keep_constants(self, op: Builder, graph: ir.Graph, scope: str) -> None:
        for value in list(graph.initializers.values()):
            tensor = value.const_value
            first = self._constants.setdefault(id(tensor), value)
            graph.initializers.pop(value.name or "")
            if first is value:
                value.name = op.names.fresh(f"{scope}/{value.name}")
                self._outermost.register_initializer(value)
            else:
                value.replace_all_uses_with(first, replace_graph_outputs=True)
