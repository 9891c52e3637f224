"""Learning-rate schedules inside the graph, computed from the step counter in float64.

Each is a function `(lr, step, *numbers) -> rate` in the domain `onward`. `step` counts updates from
0. The numbers are float64 tensors that can be changed in the file without touching a node.

    cosine = schedule("cosine")
    numbers, choices = cosine.resolve({"steps": 1000, "warmup": 50})
    rate = cosine.build(op, lr, step, {name: op.constant(np.float64(n)) for name, n in numbers.items()}, **choices)

Every schedule takes `warmup=N`: during the first N updates the rate rises linearly from lr *
warmup_start to lr, then the schedule begins. Its `steps` still count from the first update.

Every schedule takes `every=N`: it counts groups of N updates, such as epochs, in all its numbers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import onnx_ir as ir

from onward.build import Builder, Expr, Function, function
from onward.errors import RecipeError
from onward.recipe.spec import ANY, OF_SCHEDULES, check_options, checked_number, lookup, one_of

DOUBLE = ir.DataType.DOUBLE
EXAMPLE_LENGTH = 100
"""Length of a schedule in hints, which `train` replaces by the updates of its run."""
Numbers = dict[str, Any]  # float, or list[float] for `LISTS`
LISTS = ("milestones", "factors")
Choices = dict[str, str | bool]

# ---- the functions ---------------------------------------------------------------------------------------------------


@function("rate")
def constant_schedule(op: Builder, lr: Expr, step: Expr) -> Expr:
    """rate = lr"""
    return op.Identity(lr)


@function("rate")
def step_schedule(op: Builder, lr: Expr, step: Expr, size: Expr, gamma: Expr) -> Expr:
    """rate = lr * gamma^floor(step / size)"""
    return lr * gamma ** op.Floor(_double(op, step) / size)


@function("rate")
def multi_step_schedule(op: Builder, lr: Expr, step: Expr, milestones: Expr, gamma: Expr) -> Expr:
    """rate = lr * gamma^(number of milestones <= step)"""
    passed = op.Cast(milestones <= _double(op, step), to=DOUBLE)
    return lr * gamma ** op.ReduceSum(passed, keepdims=0)


@function("rate")
def exponential_schedule(op: Builder, lr: Expr, step: Expr, gamma: Expr) -> Expr:
    """rate = lr * gamma^step"""
    return lr * gamma ** _double(op, step)


@function("rate")
def linear_schedule(op: Builder, lr: Expr, step: Expr, steps: Expr, start_factor: Expr, end_factor: Expr) -> Expr:
    """rate = lr * (start_factor + (end_factor - start_factor) * min(step / steps, 1))"""
    return lr * _line(op, start_factor, end_factor, _progress(op, step, steps))


@function("rate")
def polynomial_schedule(op: Builder, lr: Expr, step: Expr, steps: Expr, power: Expr, end: Expr) -> Expr:
    """rate = end + (lr - end) * (1 - min(step / steps, 1))^power"""
    return end + (lr - end) * (1.0 - _progress(op, step, steps)) ** power


@function("rate")
def cosine_schedule(op: Builder, lr: Expr, step: Expr, steps: Expr, min: Expr) -> Expr:
    """rate = min + (lr - min) * (1 + cos(pi * p)) / 2 with p = min(step / steps, 1)"""
    return _cosine(op, lr, min, _progress(op, step, steps))


@function("rate")
def cosine_wave_schedule(op: Builder, lr: Expr, step: Expr, steps: Expr, min: Expr) -> Expr:
    """rate = min + (lr - min) * (1 + cos(pi * step / steps)) / 2, up again and down again after `steps`"""
    return _cosine(op, lr, min, _double(op, step) / steps)


@function("rate")
def cosine_restarts_schedule(op: Builder, lr: Expr, step: Expr, period: Expr, mult: Expr, min: Expr) -> Expr:
    """rate = min + (lr - min) * (1 + cos(pi * p)) / 2 with p the part done of the current cycle; the first cycle takes
    `period` steps, each further one `mult` times as many: cycle n begins at period * (mult^n - 1) / (mult - 1)."""
    t = _double(op, step) / period
    grows = mult > 1.0
    factor = op.Where(grows, mult, 2.0)
    # Where a cycle begins, the logarithm is a whole number; 1e-9 makes up for its rounding.
    length = factor ** op.Floor(op.Log(t * (factor - 1.0) + 1.0) / op.Log(factor) + 1e-9)
    p = (t - (length - 1.0) / (factor - 1.0)) / length
    return _cosine(op, lr, min, op.Where(grows, p, t - op.Floor(t)))


@function("rate")
def inverse_sqrt_schedule(op: Builder, lr: Expr, step: Expr, timescale: Expr) -> Expr:
    """rate = lr / sqrt(1 + step / timescale)"""
    return lr / op.Sqrt(_double(op, step) / timescale + 1.0)


@function("rate")
def warmup_schedule(op: Builder, lr: Expr, step: Expr, steps: Expr, start_factor: Expr) -> Expr:
    """rate = lr * (start_factor + (1 - start_factor) * min(step / steps, 1))"""
    p = _progress(op, step, steps)
    return lr * (start_factor * (1.0 - p) + p)


@function("rate")
def table_schedule(op: Builder, lr: Expr, step: Expr, factors: Expr) -> Expr:
    """rate = lr * factors[min(step, length - 1)]"""
    last = op.Shape(factors) - 1
    return lr * op.Squeeze(op.Gather(factors, op.Min(op.Cast(_double(op, step), to=ir.DataType.INT64), last)))


@function("rate")
def cycle_schedule(op: Builder, lr: Expr, step: Expr, factors: Expr) -> Expr:
    """rate = lr * factors[step modulo length]"""
    position = op.Mod(op.Cast(_double(op, step), to=ir.DataType.INT64), op.Shape(factors))
    return lr * op.Squeeze(op.Gather(factors, position))


@functools.cache
def _one_cycle(anneal: str, three_phase: bool) -> Function:
    def one_cycle(
        op: Builder, lr: Expr, step: Expr, steps: Expr, pct_start: Expr, div_factor: Expr, final_div_factor: Expr
    ) -> Expr:
        t = _double(op, step)
        low, peak = lr / div_factor, pct_start * steps - 1.0
        rate = lowest = low / final_div_factor
        back = [(peak + peak, low)] if three_phase else []
        knots = [(t * 0.0, low), (peak, lr), *back, (steps - 1.0, lowest)]
        for (start, start_rate), (end, end_rate) in reversed(list(pairwise(knots))):
            p = (t - start) / op.Max(end - start, 1e-300)  # a phase may have no length
            rate = op.Where(t <= end, between(op, start_rate, end_rate, p), rate)
        return rate

    between, shape = (_cosine, "half cosines") if anneal == "cos" else (_line, "straight lines")
    down = "as fast down to lr / div_factor, and on" if three_phase else "and down"
    one_cycle.__doc__ = f"""In {shape} from lr / div_factor up to lr at step pct_start * steps - 1, {down} to
    lr / div_factor / final_div_factor at step steps - 1."""
    name = f"{'' if anneal == 'cos' else 'Linear'}OneCycle{'ThreePhase' if three_phase else ''}Schedule"
    return function("rate", name=name)(one_cycle)


@function("since")
def steps_since(op: Builder, step: Expr, start: Expr) -> Expr:
    """since = max(step - start, 0)"""
    return op.Max(_double(op, step) - start, 0.0)


@function("count")
def groups_of_steps(op: Builder, step: Expr, every: Expr) -> Expr:
    """count = floor(step / every)"""
    return op.Floor(_double(op, step) / every)


@function("rate")
def schedule_switch(op: Builder, step: Expr, until: Expr, before: Expr, after: Expr) -> Expr:
    """rate = before while step < until, then after"""
    return op.Where(_double(op, step) < until, before, after)


def _double(op: Builder, step: Expr) -> Expr:
    return op.Cast(step, to=DOUBLE)


def _progress(op: Builder, step: Expr, steps: Expr) -> Expr:
    return op.Min(_double(op, step) / steps, 1.0)


def _line(op: Builder, start: Expr, end: Expr, p: Expr) -> Expr:
    return start + (end - start) * p


def _cosine(op: Builder, start: Expr, end: Expr, p: Expr) -> Expr:
    return end + (start - end) * ((op.Cos(p * math.pi) + 1.0) * 0.5)


# ---- the table -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Schedule:
    """A schedule with its options and defaults (None: required); `choices` select its function."""

    name: str
    summary: str
    function: Callable[..., Function]
    options: Mapping[str, Any]
    choices: Mapping[str, tuple[str | bool, ...]]

    def resolve(self, options: Mapping[str, Any]) -> tuple[Numbers, Choices]:
        """Return the numbers and choices of `options`, with defaults, checked."""
        check_options(f"schedule `{self.name}`", options, self.options)
        settings = {**self.options, **options}
        if not settings["warmup"]:
            if "warmup_start" in options:
                raise RecipeError(f"schedule `{self.name}` has `warmup_start` but no `warmup`", hint="write warmup=N")
            del settings["warmup"], settings["warmup_start"]
        if settings["every"] == 1:
            del settings["every"]
        if settings.get("timescale", ...) is None:
            settings["timescale"] = settings.get("warmup")
        choices = {
            name: one_of(f"`{name}` of schedule `{self.name}`", settings.pop(name), *allowed)
            for name, allowed in self.choices.items()
        }
        numbers: Numbers = {name: self.number(name, value) for name, value in settings.items()}
        if numbers.get("warmup", 0) >= numbers.get("steps", math.inf):
            message = f"the warm-up of schedule `{self.name}` is not shorter than its {numbers['steps']:g} steps"
            raise RecipeError(message, hint="raise `steps`, which counts all updates, also those of the warm-up")
        return numbers, choices

    def build(self, op: Builder, lr: Expr, step: Expr, numbers: Mapping[str, Expr], **choices: str | bool) -> Expr:
        """Return the learning rate at `step`; `numbers` are float64 scalars or vectors."""
        if "every" in numbers:
            step = op.call(groups_of_steps, step, numbers["every"])
        if "warmup" not in numbers:
            return self._rate(op, lr, step, numbers, choices)
        warmup = numbers["warmup"]
        after = {name: number - warmup if name == "steps" else number for name, number in numbers.items()}
        rising = op.call(warmup_schedule, lr, step, warmup, numbers["warmup_start"])
        rate = self._rate(op, lr, op.call(steps_since, step, warmup), after, choices)
        return op.call(schedule_switch, step, warmup, rising, rate)

    def _rate(
        self, op: Builder, lr: Expr, step: Expr, numbers: Mapping[str, Expr], choices: Mapping[str, str | bool]
    ) -> Expr:
        function = self.function(**choices)
        return op.call(function, lr, step, *(numbers[name] for name in function.inputs[2:]))

    def number(self, name: str, value: Any) -> float | list[float]:
        """Convert an option to a number or a list of numbers."""
        if value is None:
            raise RecipeError(
                f"schedule `{self.name}` needs `{name}`", hint=f"write `{self.name}:{name}={EXAMPLE_LENGTH}`"
            )
        if name in LISTS:
            return [self._scalar(name, item) for item in (value if isinstance(value, Sequence) else [value])]
        return self._scalar(name, value)

    def _scalar(self, name: str, value: Any) -> float:
        what = f"`{name}` of schedule `{self.name}`"
        number = checked_number(what, value, OF_SCHEDULES.get(name, ANY))
        if name == "every" and not number.is_integer():
            raise RecipeError(f"{what} is {number:g}, but must be an integer")
        return number


SCHEDULES: dict[str, Schedule] = {}


def schedule(name: str) -> Schedule:
    """Return the schedule named `name`."""
    return lookup("schedule", name, SCHEDULES)


def _add(name: str, summary: str, function: Callable[..., Function], **options: Any) -> None:
    """Add a schedule to the table. An option is a default, None if required, or choices."""
    choices = {key: value for key, value in options.items() if isinstance(value, tuple)}
    defaults = {key: value[0] if key in choices else value for key, value in options.items()}
    common = {"warmup": 0.0, "warmup_start": 0.0, "every": 1.0}
    SCHEDULES[name] = Schedule(name, summary, function, {**defaults, **common}, choices)


_add("constant", "lr", lambda: constant_schedule)
_add("step", "lr, times gamma every `size` steps", lambda: step_schedule, size=None, gamma=0.1)
_add("multistep", "lr, times gamma at each milestone", lambda: multi_step_schedule, milestones=None, gamma=0.1)
_add("exponential", "lr, times gamma at each step", lambda: exponential_schedule, gamma=None)
_add(
    "linear",
    "a straight line from lr * start_factor to lr * end_factor",
    lambda: linear_schedule,
    steps=None,
    start_factor=1.0,
    end_factor=0.0,
)
_add(
    "polynomial",
    "a power of a straight line from lr to `end`",
    lambda: polynomial_schedule,
    steps=None,
    power=1.0,
    end=0.0,
)
_add(
    "cosine",
    "half a cosine from lr down to `min`; then it stays there (`floor`), or goes up and down again (`torch`)",
    lambda after: cosine_schedule if after == "floor" else cosine_wave_schedule,
    steps=None,
    min=0.0,
    after=("floor", "torch"),
)
_add(
    "cosine_restarts",
    "half cosines from lr down to `min`; the first takes `period` steps, each other `mult` times as many as the last",
    lambda: cosine_restarts_schedule,
    period=None,
    mult=1.0,
    min=0.0,
)
_add(
    "one_cycle",
    "from lr / div_factor up to lr, then down to lr / div_factor / final_div_factor",
    _one_cycle,
    steps=None,
    pct_start=0.3,
    div_factor=25.0,
    final_div_factor=1e4,
    anneal=("cos", "linear"),
    three_phase=(False, True),
)
_add(
    "inverse_sqrt",
    "lr / sqrt(1 + step / timescale) (default timescale: `warmup`)",
    lambda: inverse_sqrt_schedule,
    timescale=None,
)
_add(
    "table",
    "lr, times a factor of each step; then the last factor stays, or they `repeat`",
    lambda after: table_schedule if after == "stay" else cycle_schedule,
    factors=None,
    after=("stay", "repeat"),
)
_add("warmup", "a straight line from lr * start_factor up to lr", lambda: warmup_schedule, steps=None, start_factor=0.0)


# ---- sequences -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SchedulePart:
    """A schedule of a sequence, with its arguments and the step at which the next one begins."""

    schedule: Schedule
    numbers: Mapping[str, Expr]
    choices: Mapping[str, str | bool]
    until: Expr | None = None


def sequence(op: Builder, lr: Expr, step: Expr, parts: Sequence[SchedulePart]) -> Expr:
    """Return the learning rate at `step` of schedules in sequence; each counts from its own start.

    All but the last have an `until`, in ascending order.
    """
    first = parts[0]
    rate = first.schedule.build(op, lr, step, first.numbers, **first.choices)
    for previous, following in pairwise(parts):
        since = op.call(steps_since, step, previous.until)
        next_rate = following.schedule.build(op, lr, since, following.numbers, **following.choices)
        rate = op.call(schedule_switch, step, previous.until, rate, next_rate)
    return rate
