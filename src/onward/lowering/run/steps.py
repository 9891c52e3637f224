"""The steps of an epoch, and an evaluation, within a graph: Loops over batches of data that are inputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onward.build import Builder, Expr
from onward.errors import UnsupportedError
from onward.lowering.contract import contract_of
from onward.lowering.rounds import input_of_run
from onward.lowering.run.data import Columns, Embedding, loop_inputs, scalar, shuffled_rows
from onward.lowering.run.metrics import graph_metrics, perplexity
from onward.model import Model
from onward.options import WholeRunOptions
from onward.recipe.metrics import OF_LOSS, Measures

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


# ---- evaluation ------------------------------------------------------------------------------------------------------
#
# It is what training/feed.py does, batch by batch and sum by sum. A model for one size of batch gets copies of
# the last sample in the place of those that are missing; one more batch of them alone tells what these add to the loss.


_INT, _DOUBLE = ir.DataType.INT64, ir.DataType.DOUBLE


class Validation:
    """What is measured after every epoch, and how it is judged."""

    def __init__(self, evaluation: Model, measures: Measures, averages: Mapping[str, str]):
        self._model, self._said = evaluation, contract_of(evaluation)
        self._measures = measures
        self._metrics = graph_metrics(measures, {v.name or "": v for v in evaluation.graph.outputs})
        self._averages = averages
        if self._said.loss is None:
            raise UnsupportedError(
                "the loss of this model cannot be computed without training: it depends on random numbers or gradients",
                hint="lower it without validation data",
            )
        inputs = {value.name or "": value for value in evaluation.graph.inputs}
        self._wanted = {name: inputs[name] for name in self._said.batch}
        self.inputs = {name: inputs[name] for name in self._said.state}
        """The state that a model has for those who use it."""

    def take_data(self, graph: ir.Graph, op: Builder, noise: Collection[str], size: int, *, is_fixed: bool) -> None:
        """Add inputs for the data, which come in batches of a size; that may be the only one that there can be."""
        self._is_fixed = is_fixed
        self.data = Columns(graph, op, self._wanted, noise, size, "validation/")

    @property
    def names(self) -> tuple[str, ...]:
        """What is measured."""
        return ("loss", *self._measures.names)

    @property
    def monitor(self) -> str:
        return self._measures.monitor

    def worst(self, op: Builder) -> Expr:
        """What anything is better than."""
        worst = -np.inf if self._measures.higher_is_better else np.inf
        return op.constant(np.float64(worst))

    def is_better(self, op: Builder, value: Expr, best: Expr, is_first: Expr) -> Expr:
        finite = op.Not(op.Or(op.IsNaN(value), op.IsInf(value)))
        is_ahead = value > best if self._measures.higher_is_better else value < best
        return op.And(finite, op.Or(is_first, is_ahead))

    def measure(
        self, op: Builder, embed: Embedding, is_wanted: Expr, state: Mapping[str, Expr]
    ) -> tuple[dict[str, Expr], dict[str, Expr]]:
        """The state as it is evaluated, with averages where training keeps such, and the results if they are wanted."""
        seen = {name: self._averaged(op, name, state) for name in self.inputs}
        rows = self.data.rows(op)
        batches = self.data.batches(op)
        trips = batches
        if self._is_fixed:
            trips = trips + op.Cast(op.Not(op.Equal(batches * self.data.size, rows)), to=_INT)
        trips = op.Where(is_wanted, trips, op.scalar(0, trips))

        def add(op: Builder, number: Expr, goes_on: Expr, total: Expr, latest: Expr, *sums: Expr) -> list[Expr]:
            batch, samples = self._batch(op, rows, batches, number)
            known = {name: value.like(self._wanted[name]) for name, value in batch.items()} | seen
            results = embed(op, self._model, "evaluation", known)
            mean = op.Reshape(results[self._said.loss or ""], op.constant(np.array([], np.int64)))
            loss = op.Cast(mean, to=_DOUBLE)
            return [goes_on, *self._sums(op, loss, total, latest, rows, batches, number, samples),
                    *self._count(op, results, batch, samples, sums)]  # fmt: skip

        zero = np.zeros(())
        start = [zero, zero, *(each for metric in self._metrics.values() for each in metric.start())]
        carried = [ir.Value(name="sum", type=_type(each), shape=ir.Shape(each.shape)) for each in start]
        body = op.subgraph(add, [*loop_inputs(), *carried], "evaluation")
        total, latest, *sums = op.Loop(trips, op.constant(True), *start, body=body, outputs=len(start))
        loss = (total + latest) / op.Cast(rows, to=_DOUBLE)
        rest = iter(sums)
        found = {"loss": loss} | {
            name: metric.result(op, *(next(rest) for _ in metric.start())) for name, metric in self._metrics.items()
        }
        if OF_LOSS in self.names:
            found[OF_LOSS] = perplexity(op, loss)
        return seen, {name: found[name] for name in self.names}

    def _averaged(self, op: Builder, name: str, state: Mapping[str, Expr]) -> Expr:
        value = state[name]
        if name not in self._averages:
            return value
        return op.Cast(state[self._averages[name]], to=value.dtype).like(value.value)

    def _batch(self, op: Builder, rows: Expr, batches: Expr, number: Expr) -> tuple[dict[str, Expr], Expr]:
        """A batch, and how many of its samples count."""
        begin, end = number * self.data.size, (number + 1) * self.data.size
        samples = op.Max(op.Min(op.Sub(rows, begin), np.int64(self.data.size)), np.int64(0))
        if not self._is_fixed:
            taken = op.Range(begin, op.Min(end, rows), 1)
        else:
            taken = op.Min(op.Range(begin, end, 1), op.Sub(rows, 1))
        at = op.Min(number, op.Sub(batches, 1))
        return self.data.take(op, taken, at, taken - at * self.data.size), samples

    def _sums(
        self, op: Builder, loss: Expr, total: Expr, latest: Expr, rows: Expr, batches: Expr, number: Expr, samples: Expr
    ) -> tuple[Expr, Expr]:
        """The sum of the losses but for the latest batch, and that of the latest."""
        if not self._is_fixed:
            return total + latest, loss * op.Cast(samples, to=_DOUBLE)
        of_copies = op.Not(number < batches)
        missing = op.Cast(op.Mul(batches, self.data.size) - rows, to=_DOUBLE)
        without = latest - loss * missing
        return op.Where(of_copies, total, total + latest), op.Where(of_copies, without, loss * float(self.data.size))

    def _count(
        self, op: Builder, results: Mapping[str, Expr], batch: Mapping[str, Expr], samples: Expr, sums: tuple[Expr, ...]
    ) -> list[Expr]:
        if not self._metrics:
            return []
        output, target = self._measures.output, self._measures.target
        assert output is not None and target is not None
        if target not in batch:
            raise UnsupportedError(f"`{target}` is no input of the evaluation, so that nothing can be compared with it")
        predictions, targets = results[output], batch[target]
        if self._is_fixed:
            end = op.Unsqueeze(samples, [0])
            shapes = [value.value.shape for value in (predictions, targets)]
            predictions, targets = (op.Slice(value, [0], end, [0]) for value in (predictions, targets))
            for value, shape in zip((predictions, targets), shapes, strict=True):
                value.value.shape = None if shape is None else ir.Shape([None, *list(shape)[1:]])
        added = [part for metric in self._metrics.values() for part in metric.parts(op, predictions, targets)]
        return [old + new for old, new in zip(sums, added, strict=True)]


def _type(array: np.ndarray) -> ir.TensorType:
    return ir.TensorType(ir.DataType.from_numpy(array.dtype))
