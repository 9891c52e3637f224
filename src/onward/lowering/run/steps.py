"""The steps of an epoch within a graph: a Loop whose body is the lowered step, on batches of data that are inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onward.build import Builder, Expr
from onward.errors import UnsupportedError
from onward.lowering.contract import contract_of
from onward.lowering.rounds import input_of_run
from onward.lowering.run.columns import Columns, scalar
from onward.lowering.run.embed import Embedding
from onward.lowering.run.shuffle import loop_inputs, shuffled_rows
from onward.model import Model
from onward.options import WholeRunOptions

_INT, _DOUBLE, _BOOL = ir.DataType.INT64, ir.DataType.DOUBLE, ir.DataType.BOOL


class Made(NamedTuple):
    """What steps have made."""

    state: dict[str, Expr]
    sums: dict[str, Expr]
    """The sum of the losses of the samples in the epoch, and their number."""
    is_finite: Expr
    """Whether all losses are."""
    metrics: dict[str, Expr]
    """One number of each step."""


class StepLoop:
    """Steps that take so many `batches` each of the data."""

    def __init__(self, step: Model, batches: int, options: WholeRunOptions):
        self._step, self._said = step, contract_of(step)
        self.batches, self._options = batches, options
        if self._said.loss is None:
            raise UnsupportedError("nothing says what is minimised: the step has no `Gradient` that leads to a loss")
        self.loss = self._said.loss
        self.inputs = {value.name or "": value for value in step.graph.inputs}
        self._wanted = {name: self.inputs[name] for name in self._said.batch}
        others = {input_of_run(name, number) for name in self._wanted for number in range(1, batches)}
        self.of_a_batch = {name: value for name, value in self._wanted.items() if name not in others}
        self.metrics = [name for name in self._said.metrics if self._is_number(name)]
        self.state, self.update = self._said.state, self._said.update

    def _is_number(self, metric: str) -> bool:
        """Whether a metric is one number; others are not logged in a run, either."""
        shape = next(value.shape for value in self._step.graph.outputs if value.name == metric)
        return shape is not None and all(size == 1 for size in shape)

    def make(
        self,
        op: Builder,
        embed: Embedding,
        data: Columns,
        trips: Expr,
        at: Mapping[str, Expr],
        given: Mapping[str, Expr],
        state: Mapping[str, Expr],
    ) -> Made:
        """So many steps, from where the run stands: `given` is what they all read, `state` what they change.

        `at` says so, and has the seed, and the step that noise begins with, as `start`.
        """
        order = self._order(op, data, at)

        def step(op: Builder, number: Expr, _: Expr, *carried: Expr) -> list[Expr]:
            values, (losses, counted, _) = carried[: len(state)], carried[len(state) :]
            batches, samples = self._batches(op, data, order, at, number)
            known = {**given, **dict(zip(state, values, strict=True)), **batches}
            results = embed(op, self._step, "step", known)
            new = [results[self.update[name]].like(self.inputs[name]) for name in state]
            numbers = {name: op.Reshape(results[name], op.constant(np.array([], np.int64))) for name in self.metrics}
            loss = op.Cast(numbers[self.loss], to=_DOUBLE)
            is_finite = op.Not(op.Or(op.IsNaN(loss), op.IsInf(loss)))
            losses = losses + loss * op.Cast(samples, to=_DOUBLE)
            return [is_finite, *new, losses, counted + samples, is_finite, *numbers.values()]

        kept = [ir.Value(name=v.name, type=v.type, shape=v.shape) for v in (self.inputs[name] for name in state)]
        sums = [scalar("losses", _DOUBLE), scalar("counted", _INT), scalar("is_finite", _BOOL)]
        body = op.subgraph(step, [*loop_inputs(), *kept, *sums], "step")
        start = [*state.values(), at["losses"], at["counted"], op.constant(True)]
        results = op.Loop(trips, op.constant(True), *start, body=body, outputs=len(start) + len(self.metrics))
        return self._named(results, list(state))

    def _named(self, results: Sequence[Expr], state: Sequence[str]) -> Made:
        count = len(state)
        new, (losses, counted, is_finite) = results[:count], results[count : count + 3]
        metrics = dict(zip(self.metrics, results[count + 3 :], strict=True))
        sums = {"losses": losses, "counted": counted}
        return Made(dict(zip(state, new, strict=True)), sums, is_finite, metrics)

    def _order(self, op: Builder, data: Columns, at: Mapping[str, Expr]) -> Expr:
        """The rows of all batches of an epoch."""
        rows = data.rows(op)
        order: Expr = op.Range(0, rows, 1)
        if self._options.shuffle:
            order = shuffled_rows(op, rows, op.Unsqueeze(at["seed"], [0]), op.Unsqueeze(at["epoch"], [0]))
        if self._options.last == "pad":
            order = op.Gather(order, op.Mod(op.Range(0, data.batches(op) * data.size, 1), rows))
        return order

    def _batches(
        self, op: Builder, data: Columns, order: Expr, at: Mapping[str, Expr], number: Expr
    ) -> tuple[dict[str, Expr], Expr]:
        """What step `number` of those that are left takes, and how many samples that is."""
        found: dict[str, Expr] = {}
        samples = op.constant(np.int64(0))
        first = (number + at["batch"]) * self.batches
        made = (number + at["step"] - at["start"]) * self.batches
        for run in range(self.batches):
            begin = op.Unsqueeze((first + run) * data.size, [0])
            rows = op.Slice(order, begin, begin + data.size, [0])
            within = op.Range(0, op.Size(rows), 1)
            for name, value in data.take(op, rows, made + run, within).items():
                if (wanted := input_of_run(name, run)) in self._wanted:
                    found[wanted] = value.like(self._wanted[wanted])
            samples = samples + op.Size(rows)
        return found, samples
