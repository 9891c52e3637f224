"""From gradients to new state: scaling, accumulation, clipping, optimizers, schedules, averages.

`_new_state` computes one update. If not every run updates (accumulated gradients, overflows), it is
one branch of an `If`, and the other branch keeps the old state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.arguments import is_empty
from onward.build import Builder, Expr
from onward.constants import HALVES
from onward.errors import RecipeError, default_hint
from onward.model.state import STEP
from onward.recipe.optimizers.clip import clip_by_global_norm, clip_by_norm, clip_by_value
from onward.recipe.optimizers.groups import OptimizerGroup, declare_state, like_target
from onward.recipe.schedules import SchedulePart, schedule, sequence
from onward.recipe.spec import OF_UPDATES, Spec, check_options, checked_number, parse, parse_options
from onward.recipe.step_builder import StepBuilder, fill, full_tensor, moving_average

_SCALER = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000.0}
_OF_SOME_SCALERS = {"hysteresis": 1.0, "min_scale": 0.0, "cooldown": 0.0}
"""Options of DeepSpeed's and Megatron's scalers: overflows until the scale shrinks, its minimum,
and good updates that do not count at first and after an overflow."""
_INITIAL_SCALE = 65536.0
_CLIPS = ("norm", "tensor_norm", "value")


class UpdateBuilder:
    """Builder of the optimizer state and updates in the algorithm."""

    def __init__(
        self,
        builder: StepBuilder,
        groups: Sequence[OptimizerGroup],
        *,
        schedule: Any = None,
        clip: Any = None,
        accumulate: int = 1,
        ema: float | None = None,
        loss_scale: float | str | None = None,
        master_weights: bool | None = None,
    ):
        self.builder = builder
        self.groups = groups
        self.parameters = [value for group in groups for value in group.parameters]
        self.clip = parse_clip(clip)
        self.accumulate = accumulate
        self.dynamic_scale = isinstance(loss_scale, str) and loss_scale.partition(":")[0] == "dynamic"
        self._scale = self._declare_scale(loss_scale)
        self._masters = self._declare_masters(master_weights)
        targets = {value: self._target(value) for value in self.parameters}
        self._appended = {group.name: declare_state(builder, group, targets) for group in groups}
        self._step = self._counter(STEP)
        self._rates = self._learning_rates(None if is_empty(schedule) else schedule)
        self._ema = self._declare_ema(ema)

    # ---- state -------------------------------------------------------------------------------------------------------

    def _counter(self, name: str) -> Expr:
        zero = np.asarray(0, np.int64)
        return self.builder.state(name, ir.Tensor(zero), lambda op: op.Identity(zero), role="counter")

    def _declare_scale(self, loss_scale: float | str | None) -> Expr | None:
        if loss_scale is None:
            return None
        if not self.dynamic_scale:
            with default_hint("write `dynamic`, or a number"):
                number = checked_number("`loss_scale`", loss_scale, OF_UPDATES["loss_scale"])
            return self.builder.hyper("loss_scale", number)
        numbers = _scaler_numbers(str(loss_scale))
        scale = np.asarray(numbers.pop("initial"), np.float32)
        for name, value in numbers.items():
            self.builder.hyper(f"scaler/{name}", value)
        tracker = np.asarray(-numbers.get("cooldown", 0), np.int64)
        state = self.builder.state
        if "hysteresis" in numbers:
            left = np.asarray(numbers["hysteresis"], np.int64)
            state("scaler/hysteresis_tracker", ir.Tensor(left), lambda op: op.Identity(left), role="scaler")
        state("scaler/growth_tracker", ir.Tensor(tracker), lambda op: op.Identity(tracker), role="scaler")
        return state("scaler/scale", ir.Tensor(scale), lambda op: op.Identity(scale), role="scaler")

    def _declare_masters(self, enabled: bool | None) -> dict[ir.Value, Expr]:
        """Add float32 copies of low-precision parameters, which the optimizer updates."""
        halves = [value for value in self.parameters if value.dtype in HALVES and enabled is not False]
        return {value: self._master(value) for value in halves}

    def _master(self, value: ir.Value) -> Expr:
        tensor = ir.LazyTensor(
            lambda: ir.Tensor(value.const_value.numpy().astype(np.float32)),  # type: ignore[union-attr]
            dtype=ir.DataType.FLOAT,
            shape=value.shape,  # type: ignore[arg-type]
            name=f"{value.name}/master",
        )
        initial = self.builder.initial_value(value)
        return self.builder.state(
            f"{value.name}/master",
            tensor,
            lambda op: op.Cast(initial, to=ir.DataType.FLOAT),
            role="master",
            param=value.name,
            slot="master",
        )

    def _declare_ema(self, decay: float | None) -> Expr | None:
        if decay is None:
            return None
        self._counter("ema/n_averaged")
        for value in self.parameters:
            target = self._target(value)
            initial = self.builder.initial_value(value)
            self.builder.state(
                f"ema/{value.name}",
                target.const_value,  # type: ignore[arg-type]
                lambda op, initial=initial, dtype=target.dtype: op.Cast(initial, to=dtype),  # type: ignore[misc]
                role="ema",
                param=value.name,
            )
        return self.builder.hyper("ema/decay", decay)

    def _target(self, value: ir.Value) -> ir.Value:
        return self._masters[value].value if value in self._masters else value

    def _learning_rates(self, specs: Any) -> dict[str, ir.Value]:
        op = self.builder.op.scoped("schedule")
        items = list(specs) if isinstance(specs, Sequence) and not isinstance(specs, str) else [specs]
        schedules = [] if specs is None else [parse(item) for item in items]
        rates = {}
        for group in self.groups:
            base = self.builder.hyper(f"{group.name}/lr", group.optimizer.values["lr"], group.name)
            rates[group.name] = (self._apply_schedule(op, base, schedules) if schedules else base).value
        if schedules:
            facts = [spec.without("factors") for spec in schedules]  # which may be thousands, and are in the graph
            self.builder.fact("lr_scheduler", [{"name": spec.name, **spec.options} for spec in facts])
        for i, (name, value) in enumerate(rates.items()):
            self.builder.metric("lr" if i == 0 else f"{name}/lr/now", op.Identity(value))
        return rates

    def _apply_schedule(self, op: Builder, base: Expr, items: Sequence[Spec]) -> Expr:
        parts = []
        for i, item in enumerate(items):
            prefix = "schedule" if len(items) == 1 else f"schedule/{i}"
            until = item.options.get("until")
            definition = schedule(item.name)
            numbers, choices = definition.resolve(item.without("until").options)
            exprs = {name: op(self.builder.hyper(f"{prefix}/{name}", value).value) for name, value in numbers.items()}
            if (until is None) != (i == len(items) - 1):
                raise RecipeError(
                    "all schedules but the last need `until`, and the last has none",
                    hint="write `linear:steps=50,until=50` before `cosine:steps=1000`",
                )
            end = None
            if until is not None:
                last_step = definition.number("until", until)
                end = op(self.builder.hyper(f"{prefix}/until", last_step).value)
            parts.append(SchedulePart(definition, exprs, choices, end))
        return sequence(op, op(base.value), op(self._step.value), parts)

    # ---- what a run computes -----------------------------------------------------------------------------------------

    def scale_loss(self, loss: Expr) -> Expr:
        """Return the value to differentiate."""
        if self._scale is None:
            return loss
        return (loss * loss.op.CastLike(self._scale, loss)).named("scaled_loss")

    def apply(self, by_parameter: Mapping[ir.Value, Expr]) -> None:
        """Append the updates, from the gradient of `scale_loss` by each parameter."""
        op = self.builder.op
        gradients = [like_target(op, by_parameter[value], self._target(value)) for value in self.parameters]
        if self._scale is not None:
            gradients = [g / op.CastLike(self._scale, g) for g in gradients]
        happens = due = None
        if self.accumulate > 1:
            gradients, due = self._accumulate(op, gradients)
            happens = due
        if self.dynamic_scale:
            # Infinity or NaN times zero is NaN, which is not equal to zero.
            zeros = [op.ReduceSum(op.Cast(g, to=ir.DataType.FLOAT) * 0.0, keepdims=0) for g in gradients]
            total = zeros[0] if len(zeros) == 1 else op.Sum(*zeros)
            finite = op.Equal(total, np.float32(0))
            self._rescale(op, finite, due)
            happens = finite if due is None else op.And(due, finite)
        for name, expr in self._perhaps(op, happens, gradients).items():
            self.builder.update(name, expr)

    def _accumulate(self, op: Builder, gradients: Sequence[Expr]) -> tuple[list[Expr], Expr]:
        """Return the mean gradient of the batches so far, and if this batch completes an update."""
        count = self._counter("micro_step")
        every = self.builder.hyper("accumulate", float(self.accumulate))
        seen = count + 1
        due = op.GreaterOrEqual(op.Cast(seen, to=ir.DataType.DOUBLE), every)
        means = []
        for value, g in zip(self.parameters, gradients, strict=True):
            assert g.dtype is not None and value.shape is not None
            dtype, shape = g.dtype, tuple(value.shape.numpy())
            name = f"accum/{value.name}"
            total = g + self.builder.state(
                name,
                full_tensor(0.0, dtype, shape),
                lambda op, dtype=dtype, shape=shape: fill(op, 0.0, dtype, shape),  # type: ignore[misc]
                role="accum",
                param=value.name,
            )
            means.append(total / op.CastLike(every, g))
            self.builder.update(name, op.Where(due, 0.0, total))
        self.builder.update("micro_step", op.Where(due, 0, seen))
        return means, due

    def _rescale(self, op: Builder, finite: Expr, due: Expr | None) -> None:
        """Grow the scale after many good updates, shrink it on overflow, as torch.amp.GradScaler."""
        assert self._scale is not None
        names = {f"scaler/{name}": name for name in (*_SCALER, *_OF_SOME_SCALERS)}
        number = {name: op(self.builder.values[key]) for key, name in names.items() if key in self.builder.values}
        tracker = op(self.builder.values["scaler/growth_tracker"])
        good = tracker + 1
        grows = op.GreaterOrEqual(op.Cast(good, to=ir.DataType.DOUBLE), number["growth_interval"])
        bigger = self._scale * op.CastLike(number["growth_factor"], self._scale)
        smaller = self._scale * op.CastLike(number["backoff_factor"], self._scale)
        if "min_scale" in number:
            smaller = op.Max(smaller, op.CastLike(number["min_scale"], self._scale))
        if "hysteresis" in number:
            smaller = self._patient(op, smaller, number["hysteresis"], finite, grows, due)
        scale = op.Where(finite, op.Where(grows, bigger, self._scale), smaller)
        count = op.Where(op.And(finite, op.Not(grows)), good, 0)
        if "cooldown" in number:
            count = op.Where(finite, count, -op.CastLike(number["cooldown"], tracker))
        if due is not None:
            scale, count = op.Where(due, scale, self._scale), op.Where(due, count, tracker)
        self.builder.update("scaler/scale", scale)
        self.builder.update("scaler/growth_tracker", count)

    def _patient(
        self, op: Builder, smaller: Expr, hysteresis: Expr, finite: Expr, grows: Expr, due: Expr | None
    ) -> Expr:
        """Return the scale after an overflow; the first `hysteresis` - 1 overflows do not change it."""
        assert self._scale is not None
        left = op(self.builder.values["scaler/hysteresis_tracker"])
        good = op.Where(grows, op.CastLike(hysteresis, left), left)
        after = op.Where(finite, good, op.Max(left - 1, op.scalar(1, left)))
        self.builder.update("scaler/hysteresis_tracker", after if due is None else op.Where(due, after, left))
        return op.Where(op.LessOrEqual(left, op.scalar(1, left)), smaller, self._scale)

    def _perhaps(self, op: Builder, happens: Expr | None, gradients: Sequence[Expr]) -> dict[str, Expr]:
        """Return the new state, or the old one if nothing is updated."""
        values = [g.value for g in gradients]
        if happens is None:
            return self._new_state(op, values, report=True)
        names: list[str] = []

        def update(inner: Builder) -> tuple[Expr, ...]:
            new = self._new_state(inner, values, report=False)
            names.extend(new)
            return tuple(new.values())

        then = op.subgraph(update, name="update")
        keep = op.subgraph(lambda inner: tuple(inner(self.builder.values[n]) for n in names), name="keep")
        for graph in (then, keep):
            for name, output in zip(names, graph.outputs, strict=True):
                output.type, output.shape = self.builder.values[name].type, self.builder.values[name].shape
        results = op.If(happens, outputs=len(names), then_branch=then, else_branch=keep)
        return dict(zip(names, results if isinstance(results, tuple) else (results,), strict=True))

    def _new_state(self, op: Builder, gradients: Sequence[ir.Value], report: bool) -> dict[str, Expr]:
        t = op(self._step.value) + 1
        new = {STEP: t}
        clipped = self._clip_gradients(op, [op(g) for g in gradients], report)
        by_parameter = dict(zip(self.parameters, clipped, strict=True))
        for name, group in self._appended.items():
            new |= group.new_state(op, by_parameter, op(self._rates[name]), t)
        if self._ema is not None:
            new |= self._new_averages(op, new)
        return new

    def _clip_gradients(self, op: Builder, gradients: list[Expr], report: bool) -> list[Expr]:
        if self.clip is None:
            return gradients
        op = op.scoped("clip")
        method, limit = self.clip.name, op(self.builder.hyper("clip/limit", self.clip.options["limit"]).value)
        if method == "value":
            return clip_by_value(op, gradients, limit)
        variant = self.clip.options.get("variant", "torch")
        if method == "tensor_norm":
            return clip_by_norm(op, gradients, limit, variant)
        clipped, norm = clip_by_global_norm(op, gradients, limit, variant)
        if report:
            self.builder.metric("grad_norm", norm)
        return clipped

    def _new_averages(self, op: Builder, new: Mapping[str, Expr]) -> dict[str, Expr]:
        assert self._ema is not None
        decay = op(self._ema.value)
        averages = {"ema/n_averaged": op(self.builder.values["ema/n_averaged"]) + 1}
        for value in self.parameters:
            current = new.get(f"{value.name}/master", new[value.name or ""])
            old = op(self.builder.values[f"ema/{value.name}"])
            averages[f"ema/{value.name}"] = op.call(moving_average, old, current, decay)
        return averages


def _scaler_numbers(text: str) -> dict[str, float]:
    """Return the numbers of `dynamic:growth_interval=1000,hysteresis=2`, without neutral ones."""
    defaults = {**_SCALER, **_OF_SOME_SCALERS, "initial": _INITIAL_SCALE}
    options = parse_options(text.partition(":")[2], text)
    check_options("the loss scale `dynamic`", options, defaults)
    numbers: dict[str, float] = {}
    for name, value in {**defaults, **options}.items():
        within = OF_UPDATES["scaler/scale" if name == "initial" else f"scaler/{name}"]
        numbers[name] = checked_number(f"`{name}` of the loss scale", value, within)
    return {name: number for name, number in numbers.items() if _OF_SOME_SCALERS.get(name) != number}


def parse_clip(clip: Any) -> Spec | None:
    """Parse `1.0`, `norm:1`, `value:0.5`, `tensor_norm:1,variant=optax` or `{"norm": 1}`."""
    if clip is None:
        return None
    if isinstance(clip, int | float) and not isinstance(clip, bool):
        clip = {"norm": clip}
    if isinstance(clip, Mapping):
        options = dict(clip)
        method = next((name for name in _CLIPS if name in options), "")
        limit: Any = options.pop(method, None)
    else:
        method, _, rest = str(clip).partition(":")
        limit, _, rest = rest.partition(",")
        options = parse_options(rest, str(clip))
    if method not in _CLIPS:
        raise RecipeError(f"unknown gradient clipping `{clip}`", hint="write `norm:1`, `tensor_norm:1` or `value:0.5`")
    with default_hint(f"write `{method}:1`"):
        limit = checked_number(f"the limit of `clip={method}`", limit, OF_UPDATES["clip/limit"])
    return Spec(method, {"limit": limit, **options})
