"""Steps of an epoch and evaluation inside a graph: Loops over batches of data that are inputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import onnx_ir as ir

from onward.build import Builder, Expr
from onward.errors import UnsupportedError
from onward.lowering.contract import contract_of
from onward.lowering.rounds import input_of_run
from onward.lowering.run.data import BatchInputs, Embedding, loop_inputs, scalar, shuffled_rows
from onward.lowering.run.metrics import graph_metrics, perplexity
from onward.model import Model
from onward.options import WholeRunOptions
from onward.recipe.metrics import OF_LOSS, Measures

_INT, _DOUBLE, _BOOL = ir.DataType.INT64, ir.DataType.DOUBLE, ir.DataType.BOOL


class StepLoop:
    """Loop over steps that take `batches` batches each."""

    def __init__(self, step: Model, batches: int, options: WholeRunOptions):
        self._step, self._contract = step, contract_of(step)
        self.batches, self._options = batches, options
        if self._contract.loss is None:
            raise UnsupportedError("the step has no loss: no `Gradient` differentiates one of its outputs")
        self.loss = self._contract.loss
        self.inputs = {value.name or "": value for value in step.graph.inputs}
        self._batch_inputs = {name: self.inputs[name] for name in self._contract.batch}
        others = {input_of_run(name, number) for name in self._batch_inputs for number in range(1, batches)}
        self.of_a_batch = {name: value for name, value in self._batch_inputs.items() if name not in others}
        self.metrics = [name for name in self._contract.metrics if self._is_number(name)]
        self.state, self.update = self._contract.state, self._contract.update

    def _is_number(self, metric: str) -> bool:
        """True if a metric has one element; a run logs no others."""
        shape = next(value.shape for value in self._step.graph.outputs if value.name == metric)
        return shape is not None and all(size == 1 for size in shape)

    def make(
        self,
        op: Builder,
        embed: Embedding,
        data: BatchInputs,
        trips: Expr,
        at: Mapping[str, Expr],
        constants: Mapping[str, Expr],
        state: Mapping[str, Expr],
    ) -> tuple[dict[str, Expr], dict[str, Expr], Expr, dict[str, Expr]]:
        """Make `trips` steps from the progress `at`, which also has `seed`, and `start`: the first step of noise.

        `constants` are the values that all steps read, `state` those that they change. Return the new
        state, the sum of the losses of the samples in the epoch with their number, true if all losses
        are finite, and the value of each metric in each step.
        """
        order = self._order(op, data, at)

        def step(op: Builder, number: Expr, _: Expr, *carried: Expr) -> list[Expr]:
            values, (losses, counted, _) = carried[: len(state)], carried[len(state) :]
            batches, samples = self._batches(op, data, order, at, number)
            inputs = {**constants, **dict(zip(state, values, strict=True)), **batches}
            results = embed(op, self._step, "step", inputs)
            new = [results[self.update[name]].like(self.inputs[name]) for name in state]
            numbers = {name: op.Reshape(results[name], op.constant(np.array([], np.int64))) for name in self.metrics}
            loss = op.Cast(numbers[self.loss], to=_DOUBLE)
            is_finite = op.Not(op.Or(op.IsNaN(loss), op.IsInf(loss)))
            losses = losses + loss * op.Cast(samples, to=_DOUBLE)
            return [is_finite, *new, losses, counted + samples, is_finite, *numbers.values()]

        carried_inputs = [
            ir.Value(name=v.name, type=v.type, shape=v.shape) for v in (self.inputs[name] for name in state)
        ]
        sums = [scalar("losses", _DOUBLE), scalar("counted", _INT), scalar("is_finite", _BOOL)]
        body = op.subgraph(step, [*loop_inputs(), *carried_inputs, *sums], "step")
        start = [*state.values(), at["losses"], at["counted"], op.constant(True)]
        results = op.Loop(trips, op.constant(True), *start, body=body, outputs=len(start) + len(self.metrics))
        new, (losses, counted, is_finite) = results[: len(state)], results[len(state) : len(state) + 3]
        metrics = dict(zip(self.metrics, results[len(state) + 3 :], strict=True))
        return dict(zip(state, new, strict=True)), {"losses": losses, "counted": counted}, is_finite, metrics

    def _order(self, op: Builder, data: BatchInputs, at: Mapping[str, Expr]) -> Expr:
        """Return the rows of all batches of an epoch."""
        rows = data.rows(op)
        order: Expr = op.Range(0, rows, 1)
        if self._options.shuffle:
            order = shuffled_rows(op, rows, op.Unsqueeze(at["seed"], [0]), op.Unsqueeze(at["epoch"], [0]))
        if self._options.last == "pad":
            order = op.Gather(order, op.Mod(op.Range(0, data.batches(op) * data.size, 1), rows))
        return order

    def _batches(
        self, op: Builder, data: BatchInputs, order: Expr, at: Mapping[str, Expr], number: Expr
    ) -> tuple[dict[str, Expr], Expr]:
        """Return the inputs of the remaining step `number`, and its number of samples."""
        inputs: dict[str, Expr] = {}
        samples = op.constant(np.int64(0))
        first = (number + at["batch"]) * self.batches
        noise_batch = (number + at["step"] - at["start"]) * self.batches
        for run in range(self.batches):
            begin = op.Unsqueeze((first + run) * data.size, [0])
            rows = op.Slice(order, begin, begin + data.size, [0])
            within = op.Range(0, op.Size(rows), 1)
            for name, value in data.take(op, rows, noise_batch + run, within).items():
                if (input_name := input_of_run(name, run)) in self._batch_inputs:
                    inputs[input_name] = value.like(self._batch_inputs[input_name])
            samples = samples + op.Size(rows)
        return inputs, samples


# ---- evaluation ------------------------------------------------------------------------------------------------------
#
# The same sums in the same order as in training/feed.py. A model with a fixed batch size gets copies of the last sample
# in place of missing ones. An additional batch of copies gives their loss, which is subtracted.


class Validation:
    """Evaluation after every epoch, and the comparison of its results."""

    def __init__(self, evaluation: Model, measures: Measures, averages: Mapping[str, str]):
        self._model, self._contract = evaluation, contract_of(evaluation)
        self._measures = measures
        self._metrics = graph_metrics(measures, {v.name or "": v for v in evaluation.graph.outputs})
        self._averages = averages
        if self._contract.loss is None:
            raise UnsupportedError(
                "the loss cannot be evaluated: it depends on random numbers or gradients",
                hint="lower the run without `validation=True` (`--validation`)",
            )
        inputs = {value.name or "": value for value in evaluation.graph.inputs}
        self._batch_inputs = {name: inputs[name] for name in self._contract.batch}
        self.inputs = {name: inputs[name] for name in self._contract.state}
        """The state that inference reads."""

    def take_data(self, graph: ir.Graph, op: Builder, noise: Collection[str], size: int, *, is_fixed: bool) -> None:
        """Add inputs for data in batches of `size`; `is_fixed` if the model takes no other size."""
        self._is_fixed = is_fixed
        self.data = BatchInputs(graph, op, self._batch_inputs, noise, size, "validation/")

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the results."""
        return ("loss", *self._measures.names)

    @property
    def monitor(self) -> str:
        return self._measures.monitor

    def worst(self, op: Builder) -> Expr:
        """Return the initial best value: infinity, or minus infinity if higher is better."""
        worst = -np.inf if self._measures.higher_is_better else np.inf
        return op.constant(np.float64(worst))

    def is_better(self, op: Builder, value: Expr, best: Expr, is_first: Expr) -> Expr:
        finite = op.Not(op.Or(op.IsNaN(value), op.IsInf(value)))
        is_ahead = value > best if self._measures.higher_is_better else value < best
        return op.And(finite, op.Or(is_first, is_ahead))

    def measure(
        self, op: Builder, embed: Embedding, is_needed: Expr, state: Mapping[str, Expr]
    ) -> tuple[dict[str, Expr], dict[str, Expr]]:
        """Return the evaluated state, with averages if there are any, and results if `is_needed`."""
        evaluated = {name: self._averaged(op, name, state) for name in self.inputs}
        rows = self.data.rows(op)
        batches = self.data.batches(op)
        trips = batches
        if self._is_fixed:
            trips = trips + op.Cast(op.Not(op.Equal(batches * self.data.size, rows)), to=_INT)
        trips = op.Where(is_needed, trips, op.scalar(0, trips))

        def add(op: Builder, number: Expr, condition: Expr, total: Expr, latest: Expr, *sums: Expr) -> list[Expr]:
            batch, samples = self._batch(op, rows, batches, number)
            inputs = {name: value.like(self._batch_inputs[name]) for name, value in batch.items()} | evaluated
            results = embed(op, self._model, "evaluation", inputs)
            mean = op.Reshape(results[self._contract.loss or ""], op.constant(np.array([], np.int64)))
            loss = op.Cast(mean, to=_DOUBLE)
            return [condition, *self._sums(op, loss, total, latest, rows, batches, number, samples),
                    *self._count(op, results, batch, samples, sums)]  # fmt: skip

        zero = np.zeros(())
        start = [zero, zero, *(array for metric in self._metrics.values() for array in metric.start())]
        carried = [
            ir.Value(name="sum", type=ir.TensorType(ir.DataType.from_numpy(array.dtype)), shape=ir.Shape(array.shape))
            for array in start
        ]
        body = op.subgraph(add, [*loop_inputs(), *carried], "evaluation")
        total, latest, *sums = op.Loop(trips, op.constant(True), *start, body=body, outputs=len(start))
        loss = (total + latest) / op.Cast(rows, to=_DOUBLE)
        rest = iter(sums)
        results_by_name = {"loss": loss} | {
            name: metric.result(op, *(next(rest) for _ in metric.start())) for name, metric in self._metrics.items()
        }
        if OF_LOSS in self.names:
            results_by_name[OF_LOSS] = perplexity(op, loss)
        return evaluated, {name: results_by_name[name] for name in self.names}

    def _averaged(self, op: Builder, name: str, state: Mapping[str, Expr]) -> Expr:
        value = state[name]
        if name not in self._averages:
            return value
        return op.Cast(state[self._averages[name]], to=value.dtype).like(value.value)

    def _batch(self, op: Builder, rows: Expr, batches: Expr, number: Expr) -> tuple[dict[str, Expr], Expr]:
        """Return a batch, and the number of its samples that count."""
        begin, end = number * self.data.size, (number + 1) * self.data.size
        samples = op.Max(op.Min(op.Sub(rows, begin), np.int64(self.data.size)), np.int64(0))
        if not self._is_fixed:
            rows_taken = op.Range(begin, op.Min(end, rows), 1)
        else:
            rows_taken = op.Min(op.Range(begin, end, 1), op.Sub(rows, 1))
        at = op.Min(number, op.Sub(batches, 1))
        return self.data.take(op, rows_taken, at, rows_taken - at * self.data.size), samples

    def _sums(
        self, op: Builder, loss: Expr, total: Expr, latest: Expr, rows: Expr, batches: Expr, number: Expr, samples: Expr
    ) -> tuple[Expr, Expr]:
        """Return the sum of the losses before the latest batch, and that of the latest."""
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
            raise UnsupportedError(f"the metrics need the target `{target}`, which is not an input of the evaluation")
        predictions, targets = results[output], batch[target]
        if self._is_fixed:
            end = op.Unsqueeze(samples, [0])
            shapes = [value.value.shape for value in (predictions, targets)]
            predictions, targets = (op.Slice(value, [0], end, [0]) for value in (predictions, targets))
            for value, shape in zip((predictions, targets), shapes, strict=True):
                value.value.shape = None if shape is None else ir.Shape([None, *list(shape)[1:]])
        added = [term for metric in self._metrics.values() for term in metric.parts(op, predictions, targets)]
        return [old + new for old, new in zip(sums, added, strict=True)]
