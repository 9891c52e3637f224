"""Entire training as one plain ONNX model: a Loop over epochs, in it one over steps, and one over validation data.

    (data, validation data, epochs, seed, state) -> (new state, best state, metrics of each step and of each epoch)

It does what `onward train` does: the same batches in the same order, the same evaluation, the same choice of the best
state. Where it stands goes in and out with the state, so that a run in pieces is the same as one.

A step whose loss is not finite must not count, and to keep the state before each step would mean to copy it. So the
epoch, from where it was begun, is made once more, up to that step; then it stops.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onward.build import Builder, Expr, Names
from onward.errors import DataError, RecipeError, UnsupportedError
from onward.lowering.contract import contract_of
from onward.lowering.embed import Embedding
from onward.lowering.fed_batches import Columns, check_noise, fixed_size
from onward.lowering.rounds import Steps, as_one_step, input_of_run
from onward.lowering.shuffle import loop_inputs, shuffled_rows
from onward.lowering.step import Manner, lower_for_engine
from onward.lowering.validation import Validation
from onward.model import Model
from onward.model.state import states
from onward.options import WholeRunOptions
from onward.recipe.measures import chosen_metrics, measures_of
from onward.standard import IR_VERSION

_INT, _DOUBLE, _BOOL = ir.DataType.INT64, ir.DataType.DOUBLE, ir.DataType.BOOL
_USUAL_BATCH = 32
_OF_VALIDATION = ("patience", "metrics", "monitor")

SETTINGS = ("epochs", "steps", "seed")
"""What each call is told: how many epochs there are in all, how many steps to make at most (below 0: any number)."""
POSITION = {"epoch": _INT, "batch": _INT, "step": _INT, "losses": _DOUBLE, "counted": _INT}
"""Where a run stands, as `Place` of a run on disk has it."""
JUDGEMENT = {"best": _DOUBLE, "best_epoch": _INT, "since_best": _INT}
"""And what is known of the best state, where there are validation data."""
FINISHED, MORE, EARLY, NOT_FINITE = range(4)
"""Why it stopped: all epochs are done; the steps are made; it gets no better; the loss is not finite."""


def lower_run(model: Model, steps: Steps, manner: Manner, options: WholeRunOptions) -> Model:
    """The part `run`."""
    if not options.validation and (useless := [name for name in _OF_VALIDATION if getattr(options, name) is not None]):
        raise RecipeError(
            f"`{useless[0]}` waits for better results on validation data, and there are none"
            if useless[0] == "patience"
            else f"`{useless[0]}` is measured on validation data, and there are none",
            hint="add `validation=True` (`--validation`)",
        )
    step = lower_for_engine(model, steps, "step", manner)
    evaluation = lower_for_engine(model, steps, "evaluation", manner) if options.validation else None
    one = as_one_step(model, steps)
    averages = {s.parameter: s.name for s in states(one.model, one.index) if s.role == "ema" and s.parameter}
    return _WholeRun(model, step, evaluation, one.batches, averages, options).build()


def _scalar(name: str, dtype: ir.DataType) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape([]))


class _WholeRun:
    def __init__(
        self,
        model: Model,
        step: Model,
        evaluation: Model | None,
        batches: int,
        averages: Mapping[str, str],
        options: WholeRunOptions,
    ):
        self._step, self._said, self._options = step, contract_of(step), options
        self._count = batches
        """How many batches a step takes."""
        self._graph = ir.Graph([], [], nodes=[], opset_imports={"": step.opset}, name="training")
        self._op = Builder(self._graph, opset=step.opset, names=Names())
        self._op.names.take(name for name in (*self._said.metrics,))
        self._embed = Embedding(self._graph)
        if self._said.loss is None:
            raise UnsupportedError("nothing says what is minimised: the step has no `Gradient` that leads to a loss")
        inputs = {value.name or "": value for value in step.graph.inputs}
        self._wanted = {name: inputs[name] for name in self._said.batch}
        others = {input_of_run(name, number) for name in self._wanted for number in range(1, batches)}
        of_a_batch = {name: value for name, value in self._wanted.items() if name not in others}
        self._fixed = fixed_size(list(of_a_batch.values()))
        self._size = self._batch_size()
        noise = (options.noise,) if isinstance(options.noise, str) else options.noise
        check_noise(noise, of_a_batch)
        self._data = Columns(self._graph, self._op, of_a_batch, noise, self._size, "")
        self._validation = None
        if evaluation is not None:
            metrics = chosen_metrics(model, options.metrics, options.monitor)
            self._validation = Validation(
                self._graph, self._op, evaluation, measures_of(model, metrics, options.monitor),
                noise, self._size, self._fixed is not None, averages,
            )  # fmt: skip
        self._settings = {name: self._input(f"run/{name}", _INT) for name in SETTINGS}
        self._state = {name: self._like(name, inputs[name]) for name in self._said.state}
        kept = POSITION if self._validation is None else POSITION | JUDGEMENT
        self._position = {name: self._input(f"run/{name}", kind) for name, kind in kept.items()}
        self._updated = {name: self._state[name] for name in self._state if name in self._said.update}
        best = self._validation.state if self._validation is not None else ()
        self._best = {name: self._like(f"best/{name}", inputs[name]) for name in best if name in self._updated}
        self._metrics = [name for name in self._said.metrics if self._is_number(name)]

    def _batch_size(self) -> int:
        wanted = self._options.batch_size
        if self._fixed is not None and wanted not in (None, self._fixed):
            raise DataError(
                f"the model takes batches of {self._fixed}, not of {wanted}",
                hint=f"use `batch_size={self._fixed}` (`--batch-size {self._fixed}`)",
            )
        return wanted or self._fixed or _USUAL_BATCH

    def _input(self, name: str, dtype: ir.DataType) -> ir.Value:
        return self._like(name, _scalar(name, dtype))

    def _like(self, name: str, value: ir.Value) -> ir.Value:
        made = ir.Value(name=self._op.names.fresh(name), type=value.type, shape=value.shape)
        self._graph.inputs.append(made)
        return made

    def _is_number(self, metric: str) -> bool:
        """Whether a metric is one number; others are not logged in a run, either."""
        shape = next(value.shape for value in self._step.graph.outputs if value.name == metric)
        return shape is not None and all(size == 1 for size in shape)

    # ---- the whole ---------------------------------------------------------------------------------------------------

    def build(self) -> Model:
        op, at = self._op, {name: self._op(value) for name, value in self._position.items()}
        steps = op(self._settings["steps"])
        self._start = self._position["step"]
        self._end = op.Where(steps < 0, op.scalar(np.iinfo(np.int64).max, steps), at["step"] + steps).value
        self._per_epoch = (self._data.batches(op, drop=self._drops) / self._count).value
        self._is_new = op.Equal(at["step"] + at["epoch"] + at["batch"], 0).value
        goes_on, stopped = self._outlook(op, at)
        if self._validation is not None:
            goes_on = op.Or(goes_on, self._is_new)
        carried = [*self._updated.values(), *self._best.values(), *at.values(), np.int64(-1), stopped]
        body = op.subgraph(self._epoch, [*loop_inputs(), *self._carried()], "epoch")
        count = 2 + len(self._metrics) + len(self._of_epoch())
        results = op.Loop(None, goes_on, *carried, body=body, outputs=len(carried) + count)
        return self._finish(results[: len(carried)], results[len(carried) :])

    @property
    def _drops(self) -> bool:
        return self._options.last == "drop" or (self._options.last == "keep" and self._fixed is not None)

    def _of_epoch(self) -> list[str]:
        """What is known of each epoch."""
        measured = self._validation.names if self._validation is not None else ()
        return ["epoch", "loss", *(f"validation/{name}" for name in measured)]

    def _carried(self) -> list[ir.Value]:
        """What goes from epoch to epoch: state, the best state, the position; up to which step an epoch may be made
        again, and why it stopped."""
        kept = [*self._updated.values(), *self._best.values(), *self._position.values()]
        again = [ir.Value(name=value.name, type=value.type, shape=value.shape) for value in kept]
        return [*again, _scalar("allowed", _INT), _scalar("stopped", _INT)]

    def _outlook(self, op: Builder, at: Mapping[str, Expr]) -> tuple[Expr, Expr]:
        """Whether there is more to do here, and why not if there is not."""
        is_done = at["epoch"] >= op(self._settings["epochs"])
        ends = op.Or(is_done, at["step"] >= self._end)
        reason = op.Where(is_done, np.int64(FINISHED), np.int64(MORE))
        if self._options.patience is not None and "since_best" in at:
            is_early = at["since_best"] >= self._options.patience
            ends, reason = op.Or(ends, is_early), op.Where(is_early, np.int64(EARLY), reason)
        return op.Not(ends), reason

    def _finish(self, after: Sequence[Expr], collected: Sequence[Expr]) -> Model:
        op, contract = self._op, self._said
        inputs = [*self._updated.values(), *self._best.values(), *self._position.values()]
        rows, of_epochs = collected[: 1 + len(self._metrics)], collected[1 + len(self._metrics) :]
        op.names.release(self._metrics)
        metrics = list(self._flattened(rows, self._metrics, "made"))
        named = ["epoch/number" if name == "epoch" else f"epoch/{name}" for name in self._of_epoch()]
        epochs = dict(zip(self._of_epoch(), self._flattened(of_epochs, named, "measured"), strict=True))
        update = {}
        for given, new in zip(inputs, after, strict=False):
            update[given.name or ""] = self._output(new.like(given), f"{given.name}/new", given.shape or ())
        stopped = self._output(after[-1], "run/stopped", [])
        made = Model(ir.Model(self._graph, ir_version=IR_VERSION))
        validation = self._validation.data.inputs if self._validation is not None else {}
        noise = [*self._data.noise, *(self._validation.data.noise if self._validation is not None else ())]
        place = {name: value.name or "" for name, value in self._position.items()}
        best = {value.name or "": name for name, value in self._best.items()}
        dataclasses.replace(
            contract,
            part="run",
            batch=[*self._data.inputs.values(), *validation.values()],
            validation={given: name for name, given in validation.items()},
            noise=noise,
            settings={name: value.name or "" for name, value in self._settings.items()},
            state=[*(value.name or "" for value in self._state.values()), *place.values(), *best],
            position=place,
            best=best,
            update=update,
            metrics=metrics,
            loss=metrics[self._metrics.index(contract.loss or "")],
            epochs=epochs,
            stopped=stopped,
        ).write_to(made)
        return made

    def _flattened(self, collected: Sequence[Expr], names: Sequence[str], axis: str) -> Iterator[str]:
        """Outputs of what iterations gave, one after the other: where the first of them is true."""
        is_there, *values = collected
        there = self._op.Reshape(is_there, [-1])
        for value, name in zip(values, names, strict=True):
            yield self._output(self._op.Compress(value, there), name, [axis])

    def _output(self, result: Expr, name: str, shape: Sequence[int | str | ir.SymbolicDim | None]) -> str:
        result = result.named(name)
        result.value.shape = ir.Shape(shape)
        self._graph.outputs.append(result.value)
        return result.name

    # ---- an epoch ----------------------------------------------------------------------------------------------------

    def _epoch(self, op: Builder, iteration: Expr, _: Expr, *carried: Expr) -> list[Expr]:
        """What is left of an epoch, then its evaluation; or that alone, of a run that is new."""
        given = iter(carried)
        state = {name: next(given) for name in self._updated}
        best = {name: next(given) for name in self._best}
        at = {name: next(given) for name in self._position}
        allowed = next(given)
        is_first = op.And(op.Equal(iteration, 0), self._is_new) if self._validation is not None else op.constant(False)

        left = op.Min(op(self._per_epoch) - at["batch"], op(self._end) - at["step"])
        left = op.Where(allowed < 0, left, op.Min(left, allowed))
        trips = op.Where(is_first, op.scalar(0, left), left)
        new, sums, finite, metrics = self._steps(op, trips, state, at)

        failed = op.Not(finite)
        found = op.Squeeze(op.Shape(metrics[self._said.loss or ""]), [0])
        made = op.Where(failed, op.scalar(0, found), found)
        state = _either(op, failed, state, new)
        at = at | {name: op.Where(failed, at[name], value) for name, value in sums.items()}
        batch = at["batch"] + made
        is_again = op.Not(allowed < 0)
        is_whole = op.Equal(batch, self._per_epoch)
        ended = op.And(op.And(is_whole, op.Not(is_first)), op.Not(op.Or(failed, is_again)))
        rows = [self._row(op, value, at["batch"], found) for value in metrics.values()]
        now = {
            "epoch": at["epoch"] + op.Cast(ended, to=_INT),
            "batch": op.Where(ended, op.scalar(0, batch), batch),
            "step": at["step"] + made,
            "losses": op.Where(ended, op.scalar(0, at["losses"]), at["losses"]),
            "counted": op.Where(ended, op.scalar(0, at["counted"]), at["counted"]),
        }
        of_epoch = [now["epoch"], at["losses"] / op.Cast(at["counted"], to=_DOUBLE)]
        is_row = ended
        if self._validation is not None:
            is_row = op.Or(ended, is_first)
            trained = {name: op(value) for name, value in self._state.items()} | state
            seen, results = self._validation.measure(op, self._embed, is_row, trained)
            of_epoch += results.values()
            value = results[self._validation.monitor]
            is_better = op.And(is_row, self._validation.is_better(op, value, at["best"], is_first))
            best = _either(op, is_better, {name: seen[name] for name in best}, best)
            now |= {
                "best": op.Where(is_better, value, op.Where(is_first, self._validation.worst(op), at["best"])),
                "best_epoch": op.Where(is_better, now["epoch"], at["best_epoch"]),
                "since_best": op.Where(is_better, np.int64(0), at["since_best"] + op.Cast(ended, to=_INT)),
            }
        more, reason = self._outlook(op, now)
        is_over = op.And(is_again, op.Not(failed))
        reason = op.Where(is_over, np.int64(NOT_FINITE), reason)
        allowed = op.Where(failed, found - 1, allowed)
        places = op.Range(0, self._per_epoch, 1)
        mask = op.And(places >= at["batch"], places < batch)
        return [
            op.And(more, op.Not(is_over)),
            *state.values(), *best.values(), *(now[name] for name in self._position), allowed, reason,
            mask, *rows, is_row, *of_epoch,
        ]  # fmt: skip

    def _row(self, op: Builder, values: Expr, before: Expr, found: Expr) -> Expr:
        """What steps of an epoch gave, in a row that has a place for each step of it."""
        assert values.dtype is not None
        zero = ir.Tensor(np.zeros(1).astype(values.dtype.numpy()), dtype=values.dtype)
        sizes = (before, op(self._per_epoch) - before - found)
        first, last = (op.ConstantOfShape(op.Unsqueeze(size, [0]), value=zero) for size in sizes)
        result: Expr = op.Concat(first, values, last, axis=0)
        return result

    # ---- its steps ---------------------------------------------------------------------------------------------------

    def _steps(
        self, op: Builder, trips: Expr, state: Mapping[str, Expr], at: Mapping[str, Expr]
    ) -> tuple[dict[str, Expr], dict[str, Expr], Expr, dict[str, Expr]]:
        """So many steps: the new state, the sums of losses and samples, whether all losses are finite, metrics."""
        order = self._order(op, at["epoch"])

        def step(op: Builder, number: Expr, _: Expr, *carried: Expr) -> list[Expr]:
            values, (losses, counted, _) = carried[: len(state)], carried[len(state) :]
            batches, samples = self._batches(op, order, at, number)
            known = {name: op(value) for name, value in self._state.items()}
            known |= dict(zip(state, values, strict=True)) | batches
            results = self._embed(op, self._step, "step", known)
            new = [results[self._said.update[name]].like(self._updated[name]) for name in state]
            numbers = {name: op.Reshape(results[name], op.constant(np.array([], np.int64))) for name in self._metrics}
            loss = op.Cast(numbers[self._said.loss or ""], to=_DOUBLE)
            finite = op.Not(op.Or(op.IsNaN(loss), op.IsInf(loss)))
            losses = losses + loss * op.Cast(samples, to=_DOUBLE)
            return [finite, *new, losses, counted + samples, finite, *numbers.values()]

        kept = [ir.Value(name=v.name, type=v.type, shape=v.shape) for v in self._updated.values()]
        sums = [_scalar("losses", _DOUBLE), _scalar("counted", _INT), _scalar("finite", _BOOL)]
        body = op.subgraph(step, [*loop_inputs(), *kept, *sums], "step")
        start = [*state.values(), at["losses"], at["counted"], op.constant(True)]
        results = op.Loop(trips, op.constant(True), *start, body=body, outputs=len(start) + len(self._metrics))
        new, (losses, counted, finite) = results[: len(state)], results[len(state) : len(start)]
        metrics = dict(zip(self._metrics, results[len(start) :], strict=True))
        return dict(zip(state, new, strict=True)), {"losses": losses, "counted": counted}, finite, metrics

    def _order(self, op: Builder, epoch: Expr) -> Expr:
        """The rows of all batches of an epoch."""
        rows = self._data.rows(op)
        seed = op(self._settings["seed"])
        order: Expr = op.Range(0, rows, 1)
        if self._options.shuffle:
            order = shuffled_rows(op, rows, op.Unsqueeze(seed, [0]), op.Unsqueeze(epoch, [0]))
        if self._options.last == "pad":
            every = op.Range(0, self._data.batches(op) * self._size, 1)
            order = op.Gather(order, op.Mod(every, rows))
        return order

    def _batches(self, op: Builder, order: Expr, at: Mapping[str, Expr], number: Expr) -> tuple[dict[str, Expr], Expr]:
        """What step `number` of those that are left takes, and how many samples that is."""
        found: dict[str, Expr] = {}
        samples = op.constant(np.int64(0))
        first = (number + at["batch"]) * self._count
        made = (number + at["step"] - self._start) * self._count
        for run in range(self._count):
            begin = op.Unsqueeze((first + run) * self._size, [0])
            rows = op.Slice(order, begin, begin + self._size, [0])
            within = op.Range(0, op.Size(rows), 1)
            for name, value in self._data.take(op, rows, made + run, within).items():
                if (wanted := input_of_run(name, run)) in self._wanted:
                    found[wanted] = value.like(self._wanted[wanted])
            samples = samples + op.Size(rows)
        return found, samples


def _either(op: Builder, condition: Expr, first: Mapping[str, Expr], second: Mapping[str, Expr]) -> dict[str, Expr]:
    """The one or the other, of which only that is computed."""
    if not first:
        return {}
    branches = [
        op.subgraph(lambda _, values=values: list(values), name="branch")
        for values in (first.values(), second.values())
    ]
    chosen = op.If(condition, then_branch=branches[0], else_branch=branches[1], outputs=len(first))
    chosen = chosen if isinstance(chosen, tuple) else (chosen,)
    return {name: value.like(first[name].value) for name, value in zip(first, chosen, strict=True)}
