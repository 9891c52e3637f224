"""Batches of data that are inputs of a graph: rows are taken by their numbers, and noise by the number of the batch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import onnx_ir as ir

from onward.build import Builder, Expr
from onward.errors import UnknownNameError, UnsupportedError, near


def scalar(name: str, dtype: ir.DataType) -> ir.Value:
    """A single number, as an input."""
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape([]))


class Columns:
    """Data as inputs of a graph: of each input of a batch all samples, or noise for each of the batches.

    They are called as the inputs of a batch are, after a `scope` if there is one.
    """

    def __init__(
        self,
        graph: ir.Graph,
        op: Builder,
        wanted: Mapping[str, ir.Value],
        noise: Collection[str],
        size: int,
        scope: str,
    ):
        self.size = size
        self.inputs: dict[str, str] = {}
        """Input of a batch -> the input of the graph that it is taken from."""
        self._columns: dict[str, ir.Value] = {}
        self._noise: dict[str, ir.Value] = {}
        for name, value in wanted.items():
            given = ir.Value(name=op.names.fresh(scope + name) if scope else name, type=value.type)
            kept = _sample_shape(value)
            if name in noise:
                given.shape = None if kept is None else ir.Shape([f"{scope}batches", size, *kept])
                self._noise[name] = given
            else:
                given.shape = None if kept is None else ir.Shape([f"{scope}rows", *kept])
                self._columns[name] = given
            graph.inputs.append(given)
            self.inputs[name] = given.name or ""
        if not self._columns:
            raise UnsupportedError("no input of the step takes data, so that there are no rows to go through")

    @property
    def noise(self) -> list[str]:
        return [value.name or "" for value in self._noise.values()]

    def rows(self, op: Builder) -> Expr:
        """How many samples there are."""
        first = next(iter(self._columns.values()))
        result: Expr = op.Squeeze(op.Shape(first, start=0, end=1), [0])
        return result

    def batches(self, op: Builder, *, drop: bool = False) -> Expr:
        """How many batches they make."""
        rows = self.rows(op)
        return rows / self.size if drop else (rows + (self.size - 1)) / self.size

    def take(self, op: Builder, rows: Expr, number: Expr, within: Expr) -> dict[str, Expr]:
        """A batch: these rows, and `within` the noise of batch `number` the same ones of that."""
        taken = {name: op.Gather(value, rows, axis=0) for name, value in self._columns.items()}
        for name, value in self._noise.items():
            taken[name] = op.Gather(op.Gather(value, number, axis=0), within, axis=0)
        return taken


def check_noise(noise: Collection[str], inputs: Collection[str]) -> None:
    for name in noise:
        if name not in inputs:
            raise UnknownNameError(f"there is no input `{name}` that could be noise", hint=near(name, inputs))


def _sample_shape(value: ir.Value) -> Sequence[int | ir.SymbolicDim] | None:
    if value.shape is None:
        return None
    if not len(value.shape):
        raise UnsupportedError(
            f"the input `{value.name}` is a single number, and no row of it is a sample",
            hint="make it a constant of the model",
        )
    return list(value.shape)[1:]
