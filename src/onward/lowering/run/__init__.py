"""Whole training as one plain ONNX model: a Loop over epochs, with loops over steps and validation
data inside.

    (data, validation data, epochs, seed, state) -> (new state, best state, metrics of each step and of each epoch)

It trains as `onward train` does: the same batches in the same order, the same evaluation, the same
choice of the best state. Its progress goes in and out with the state, so that a run can be split.

A step whose loss is not finite must not change the state. To avoid a copy of the state per step, the
epoch is repeated from its start in this call, up to that step; then the run stops.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onward.build import Builder, Expr, Names
from onward.errors import RecipeError
from onward.lowering.contract import Contract
from onward.lowering.rounds import Steps, as_one_step
from onward.lowering.run.data import BatchInputs, Embedding, check_noise, loop_inputs, scalar
from onward.lowering.run.steps import StepLoop, Validation
from onward.lowering.step import RUN, LoweringOptions, lower_for_engine
from onward.model import Model
from onward.model.state import states
from onward.options import WholeRunOptions
from onward.recipe.metrics import chosen_metrics, measures_of
from onward.standard import IR_VERSION
from onward.transform.declare import USUAL_BATCH, check_batch_axis

_INT, _DOUBLE = ir.DataType.INT64, ir.DataType.DOUBLE
_OF_VALIDATION = ("patience", "metrics", "monitor")

SETTINGS = ("epochs", "steps", "seed")
"""Settings of a call: all epochs, the maximum number of steps (below 0: no limit), the seed."""
POSITION = {"epoch": _INT, "batch": _INT, "step": _INT, "losses": _DOUBLE, "counted": _INT}
"""Progress of a run, as `Position` of a run on disk has it."""
JUDGEMENT = {"best": _DOUBLE, "best_epoch": _INT, "since_best": _INT}
"""Progress of the search for the best state, with validation data."""
FINISHED, MORE, EARLY, NOT_FINITE = range(4)
"""Reasons for the end: all epochs done; the maximum of steps made; no improvement; loss not finite."""


def lower_run(model: Model, steps: Steps, lowering_options: LoweringOptions, options: WholeRunOptions) -> Model:
    """Lower the part `run`."""
    if not options.validate and (useless := [name for name in _OF_VALIDATION if getattr(options, name) is not None]):
        raise RecipeError(f"`{useless[0]}` needs validation data", hint="add `validation=True` (`--validation`)")
    step = lower_for_engine(model, steps, "step", lowering_options)
    one_step = as_one_step(model, steps)
    averages = {s.parameter: s.name for s in states(one_step.model, one_step.index) if s.role == "ema" and s.parameter}
    loop = StepLoop(step, one_step.batches, options)
    fixed = check_batch_axis(loop.of_a_batch, model.inputs, options.batch_size)
    if not options.validate:
        return _WholeRun(loop, options, step.opset, fixed).build()
    measures = measures_of(model, chosen_metrics(model, options.metrics, options.monitor), options.monitor)
    evaluation = lower_for_engine(model, steps, "evaluation", lowering_options)
    return _WholeRun(loop, options, step.opset, fixed, Validation(evaluation, measures, averages)).build()


class _Piece(NamedTuple):
    """Steps of an epoch in one iteration; none of them counts if a loss is not finite."""

    state: dict[str, Expr]
    sums: dict[str, Expr]
    """Sum of the losses of the samples in the epoch so far, and their number."""
    failed: Expr
    tried: Expr
    """Number of steps, including one that failed."""
    counted: Expr
    """Number of steps that count."""
    reached: Expr
    """Number of steps of the epoch that are done."""
    rows: list[Expr]
    """For each step of the epoch: true if it counts here, and its metrics."""


class _WholeRun:
    def __init__(
        self,
        steps: StepLoop,
        options: WholeRunOptions,
        opset: int,
        fixed: int | None,
        validation: Validation | None = None,
    ):
        self._steps, self._options, self._validation = steps, options, validation
        self._graph = ir.Graph([], [], nodes=[], opset_imports={"": opset}, name="training")
        self._op = Builder(self._graph, opset=opset, names=Names([*steps.inputs, *steps.metrics]))
        self._embed = Embedding(self._graph)
        self._fixed = fixed
        size = options.batch_size or fixed or USUAL_BATCH
        noise = (options.batch_inputs,) if isinstance(options.batch_inputs, str) else options.batch_inputs
        check_noise(noise, steps.of_a_batch)
        self._data = BatchInputs(self._graph, self._op, steps.of_a_batch, noise, size, "")
        if validation is not None:
            validation.take_data(self._graph, self._op, noise, size, is_fixed=self._fixed is not None)
        self._settings = {name: self._input(scalar(f"run/{name}", _INT)) for name in SETTINGS}
        evaluated = validation.inputs if validation is not None else {}
        inputs = {name: steps.inputs[name] for name in steps.state} | evaluated
        self._state = {name: self._input(value, name) for name, value in inputs.items()}
        progress = POSITION if validation is None else POSITION | JUDGEMENT
        self._position = {name: self._input(scalar(f"run/{name}", dtype)) for name, dtype in progress.items()}
        self._updated = {name: value for name, value in self._state.items() if name in steps.update}
        fresh = self._op.names.fresh
        self._best = {n: self._input(v, fresh(f"best/{n}")) for n, v in evaluated.items() if n in steps.update}

    def _input(self, value: ir.Value, name: str | None = None) -> ir.Value:
        """Add an input like a value, under its name or a fresh one."""
        input_ = ir.Value(name=name or self._op.names.fresh(value.name or ""), type=value.type, shape=value.shape)
        self._graph.inputs.append(input_)
        return input_

    def build(self) -> Model:
        op, at = self._op, {name: self._op(value) for name, value in self._position.items()}
        steps = op(self._settings["steps"])
        self._end = op.Where(steps < 0, op.scalar(np.iinfo(np.int64).max, steps), at["step"] + steps).value
        self._per_epoch = (self._data.batches(op, drop=self._drops) / self._steps.batches).value
        self._is_new = op.Equal(at["step"] + at["epoch"] + at["batch"], 0).value
        continues, stopped = self._more_to_do(op, at)
        if self._validation is not None:
            continues = op.Or(continues, self._is_new)
        carried = [*self._updated.values(), *self._best.values(), *at.values(), np.int64(-1), stopped]
        body = op.subgraph(self._epoch, [*loop_inputs(), *self._carried()], "epoch")
        count = 2 + len(self._steps.metrics) + len(self._of_epoch())
        results = op.Loop(None, continues, *carried, body=body, outputs=len(carried) + count)
        return self._finish(results[: len(carried)], results[len(carried) :])

    @property
    def _drops(self) -> bool:
        return self._options.last == "drop" or (self._options.last == "keep" and self._fixed is not None)

    def _of_epoch(self) -> list[str]:
        """Return the names of the results of each epoch."""
        measured = self._validation.names if self._validation is not None else ()
        return ["epoch", "loss", *(f"validation/{name}" for name in measured)]

    def _carried(self) -> list[ir.Value]:
        """Return the loop variables: state, best state, progress, limit of a second pass, reason."""
        values = [*self._updated.values(), *self._best.values(), *self._position.values()]
        copies = [ir.Value(name=value.name, type=value.type, shape=value.shape) for value in values]
        return [*copies, scalar("allowed", _INT), scalar("stopped", _INT)]

    def _more_to_do(self, op: Builder, at: Mapping[str, Expr]) -> tuple[Expr, Expr]:
        """Return true if there is more to do here, and the reason to stop."""
        is_done = at["epoch"] >= op(self._settings["epochs"])
        ends = op.Or(is_done, at["step"] >= self._end)
        reason = op.Where(is_done, np.int64(FINISHED), np.int64(MORE))
        if self._options.patience is not None and "since_best" in at:
            is_early = at["since_best"] >= self._options.patience
            ends, reason = op.Or(ends, is_early), op.Where(is_early, np.int64(EARLY), reason)
        return op.Not(ends), reason

    def _finish(self, after: Sequence[Expr], collected: Sequence[Expr]) -> Model:
        op = self._op
        inputs = [*self._updated.values(), *self._best.values(), *self._position.values()]
        rows, of_epochs = collected[: 1 + len(self._steps.metrics)], collected[1 + len(self._steps.metrics) :]
        op.names.release(self._steps.metrics)
        metrics = list(self._flattened(rows, self._steps.metrics, "made"))
        named = ["epoch/number" if name == "epoch" else f"epoch/{name}" for name in self._of_epoch()]
        epochs = dict(zip(self._of_epoch(), self._flattened(of_epochs, named, "measured"), strict=True))
        update = {}
        for input_, new in zip(inputs, after, strict=False):
            update[input_.name or ""] = self._output(new.like(input_), f"{input_.name}/new", input_.shape)
        stopped = self._output(after[-1], "run/stopped", ir.Shape([]))
        model = Model(ir.Model(self._graph, ir_version=IR_VERSION))
        validation = self._validation.data.inputs if self._validation is not None else {}
        noise = [*self._data.noise, *(self._validation.data.noise if self._validation is not None else ())]
        progress = {name: value.name or "" for name, value in self._position.items()}
        best = {value.name or "": name for name, value in self._best.items()}
        Contract(
            part=RUN,
            batch=[*self._data.inputs.values(), *validation.values()],
            validation={input_: name for name, input_ in validation.items()},
            noise=noise,
            settings={name: value.name or "" for name, value in self._settings.items()},
            state=[*(value.name or "" for value in self._state.values()), *progress.values(), *best],
            position=progress,
            best=best,
            update=update,
            metrics=metrics,
            loss=metrics[self._steps.metrics.index(self._steps.loss)],
            epochs=epochs,
            stopped=stopped,
        ).write_to(model)
        return model

    def _flattened(self, collected: Sequence[Expr], names: Sequence[str], axis: str) -> Iterator[str]:
        """Yield the collected results of all iterations, where the first of them is true."""
        mask, *values = collected
        flat_mask = self._op.Reshape(mask, [-1])
        for value, name in zip(values, names, strict=True):
            yield self._output(self._op.Compress(value, flat_mask), name, ir.Shape([axis]))

    def _output(self, result: Expr, name: str, shape: ir.Shape | None) -> str:
        result = result.named(name)
        result.value.shape = shape
        self._graph.outputs.append(result.value)
        return result.name

    # ---- an epoch ----------------------------------------------------------------------------------------------------

    def _epoch(self, op: Builder, iteration: Expr, _: Expr, *carried: Expr) -> list[Expr]:
        """Train the rest of an epoch, then evaluate; at the start of a new run, only evaluate."""
        values = iter(carried)
        state = {name: next(values) for name in self._updated}
        best = {name: next(values) for name in self._best}
        at = {name: next(values) for name in self._position}
        allowed = next(values)
        is_again = op.Not(allowed < 0)
        is_first = op.And(op.Equal(iteration, 0), self._is_new) if self._validation is not None else op.constant(False)
        piece = self._train(op, state, at, allowed, is_first)
        is_whole = op.And(piece.reached >= self._per_epoch, op.Not(is_first))
        ended = op.And(is_whole, op.Not(op.Or(piece.failed, is_again)))
        now = _advance(op, at | piece.sums, piece, ended)
        is_row, of_epoch = ended, [now["epoch"], piece.sums["losses"] / op.Cast(piece.sums["counted"], to=_DOUBLE)]
        if self._validation is not None:
            is_row = op.Or(ended, is_first)
            best, results = self._judge(op, self._validation, piece.state, best, now, is_row, is_first)
            of_epoch += results
        more, reason = self._more_to_do(op, now)
        is_over = op.And(is_again, op.Not(piece.failed))
        return [
            op.And(more, op.Not(is_over)),
            *piece.state.values(), *best.values(), *(now[name] for name in self._position),
            op.Where(piece.failed, piece.tried - 1, allowed), op.Where(is_over, np.int64(NOT_FINITE), reason),
            *piece.rows, is_row, *of_epoch,
        ]  # fmt: skip

    def _train(
        self, op: Builder, state: Mapping[str, Expr], at: Mapping[str, Expr], allowed: Expr, is_first: Expr
    ) -> _Piece:
        """Make the remaining steps of an epoch, within the limits."""
        remaining = op.Min(op(self._per_epoch) - at["batch"], op(self._end) - at["step"])
        remaining = op.Where(allowed < 0, remaining, op.Min(remaining, allowed))
        trips = op.Where(is_first, op.scalar(0, remaining), remaining)
        outside = {"seed": op(self._settings["seed"]), "start": op(self._position["step"])}
        read_state = {name: op(value) for name, value in self._state.items()}
        new, sums, is_finite, metrics = self._steps.make(
            op, self._embed, self._data, trips, {**at, **outside}, read_state, state
        )
        failed = op.Not(is_finite)
        tried = op.Squeeze(op.Shape(metrics[self._steps.loss]), [0])
        counted = op.Where(failed, op.scalar(0, tried), tried)
        reached = at["batch"] + counted
        indices = op.Range(0, self._per_epoch, 1)
        is_row = op.And(indices >= at["batch"], indices < reached)
        return _Piece(
            _select(op, failed, state, new),
            {name: op.Where(failed, at[name], value) for name, value in sums.items()},
            failed, tried, counted, reached,
            [is_row, *(self._row(op, value, at["batch"], tried) for value in metrics.values())],
        )  # fmt: skip

    def _judge(
        self,
        op: Builder,
        validation: Validation,
        state: Mapping[str, Expr],
        best: Mapping[str, Expr],
        now: dict[str, Expr],
        is_needed: Expr,
        is_first: Expr,
    ) -> tuple[dict[str, Expr], list[Expr]]:
        """Return the best state and the measured results; update the progress in `now`."""
        current_state = {name: op(value) for name, value in self._state.items()} | dict(state)
        evaluated, results = validation.measure(op, self._embed, is_needed, current_state)
        value = results[validation.monitor]
        is_better = op.And(is_needed, validation.is_better(op, value, now["best"], is_first))
        waited = op.Cast(op.And(is_needed, op.Not(is_first)), to=_INT)
        now["best"] = op.Where(is_better, value, op.Where(is_first, validation.worst(op), now["best"]))
        now["best_epoch"] = op.Where(is_better, now["epoch"], now["best_epoch"])
        now["since_best"] = op.Where(is_better, np.int64(0), now["since_best"] + waited)
        return _select(op, is_better, {name: evaluated[name] for name in best}, best), list(results.values())

    def _row(self, op: Builder, values: Expr, before: Expr, tried: Expr) -> Expr:
        """Return a row with an element per step of the epoch, filled for the steps of this iteration."""
        assert values.dtype is not None
        zero = ir.Tensor(np.zeros(1).astype(values.dtype.numpy()), dtype=values.dtype)
        sizes = (before, op(self._per_epoch) - before - tried)
        first, last = (op.ConstantOfShape(op.Unsqueeze(size, [0]), value=zero) for size in sizes)
        return op.Concat(first, values, last, axis=0)


def _advance(op: Builder, at: Mapping[str, Expr], piece: _Piece, ended: Expr) -> dict[str, Expr]:
    """Return the progress after a piece; at the start of the next epoch if this one ended."""
    reset = {"batch": piece.reached, "losses": at["losses"], "counted": at["counted"]}
    return {
        **at,
        **{name: op.Where(ended, op.scalar(0, value), value) for name, value in reset.items()},
        "epoch": at["epoch"] + op.Cast(ended, to=_INT),
        "step": at["step"] + piece.counted,
    }


def _select(op: Builder, condition: Expr, first: Mapping[str, Expr], second: Mapping[str, Expr]) -> dict[str, Expr]:
    """Return the first or the second values; only these are computed."""
    if not first:
        return {}
    branches = [
        op.subgraph(lambda _, values=values: list(values), name="branch")
        for values in (first.values(), second.values())
    ]
    results = op.If(condition, then_branch=branches[0], else_branch=branches[1], outputs=len(first))
    results = results if isinstance(results, tuple) else (results,)
    return {name: value.like(first[name].value) for name, value in zip(first, results, strict=True)}
