"""What one step does: its loss, its optimizer and all that is around it, and how far it has come."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import onnx_ir as ir

from onward.build import DOMAIN
from onward.inspect.optimizer import groups, is_statistics, trained_parameters, wanted_name
from onward.inspect.summary_fields import (
    Accumulation,
    Amount,
    Average,
    Clip,
    Loss,
    LossScale,
    LossTerm,
    Progress,
    ScheduleSection,
    Setting,
    StateAmount,
    Training,
    Weight,
)
from onward.inspect.values import (
    computing_node,
    number,
    plain,
    port,
    records,
    setting,
    text_attribute,
    texts,
)
from onward.model import Model, Step
from onward.model.core import values
from onward.model.state import STEP, State, hyperparameters, states
from onward.model.walk import ancestors, graphs_in, read_by
from onward.recipe.optimizers.clip import clip_to_value, scale_to_norm, scale_to_norm_optax
from onward.recipe.schedules import SCHEDULES
from onward.standard import operator_name


def describe_step(model: Model, index: int, weights: Iterable[Weight]) -> Training:
    step = model.step(index)
    schedule = _schedule(step)
    variables = states(model, index)
    progress = _progress(step, schedule, variables)
    parameters = {value.name for value in trained_parameters(model, step)}
    bound = set(step.update.values())
    return Training(
        name=step.algorithm.name or f"step {index}",
        inputs=tuple(port(v) for v in step.algorithm.inputs if v.name not in step.algorithm.initializers),
        metrics=tuple(port(v) for v in step.algorithm.outputs if v.name not in bound),
        loss=_loss(model, step),
        groups=groups(model, step, schedule, progress.step),
        trained=Amount.of(weight for weight in weights if weight.name in parameters),
        schedule=schedule,
        clip=_clip(step),
        accumulation=_accumulation(step),
        average=_average(step),
        loss_scale=_loss_scale(step),
        progress=progress,
        state=_state_amounts(variables),
        hyperparameters=plain(hyperparameters(model, index)),
        nodes=sum(1 for _ in step.algorithm.all_nodes()),
        initialization=all(name in step.reset for name in step.update),
    )


def current(step: Step, name: str) -> Setting:
    """The number of an initializer by its name, or by that name made unique."""
    known = step.algorithm.initializers
    if name in known:
        return number(known[name])
    alike = (value for other, value in known.items() if other.startswith(name) and wanted_name(other) == name)
    return number(next(alike, None))


# ---- loss ------------------------------------------------------------------------------------------------------------


def _loss(model: Model, step: Step) -> Loss:
    terms = tuple(_term(fact) for fact in records(step.fact("train.loss")) if "name" in fact)
    targets = differentiated_values(model, step)
    producers = [computing_node(value) for value in targets.values()]
    return Loss(
        differentiated=tuple(targets),
        operators=tuple(operator_name(found[0]) if found else "" for found in producers),
        outputs=tuple(dict.fromkeys(t.output for t in terms)) or _outputs_below(model, targets.values()),
        terms=terms,
    )


def differentiated_values(model: Model, step: Step) -> dict[str, ir.Value | None]:
    """The `y` of each Gradient, by name; None where there is no such value."""
    graphs = [model.graph, *graphs_in(step.algorithm)]
    known = {value.name: value for graph in graphs for value in values(graph)}
    names = [text_attribute(node, "y") for node in step.gradients()]
    return {name: known.get(name) for name in names if name is not None}


def _term(fact: dict[str, Any]) -> LossTerm:
    options, scale = fact.get("options"), fact.get("scale")
    return LossTerm(
        name=str(fact["name"]),
        output=str(fact.get("output", "")),
        inputs=texts(fact.get("inputs")),
        options=plain(options) if isinstance(options, dict) else {},
        scale=float(scale) if isinstance(scale, int | float) else 1.0,
    )


def _outputs_below(model: Model, targets: Iterable[ir.Value | None]) -> tuple[str, ...]:
    """The outputs of the model that a loss depends on."""
    found = [value for value in targets if value is not None]
    read = {value for node in ancestors(found)[0] if node.graph is not model.graph for value in read_by(node)}
    return tuple(value.name or "" for value in model.outputs if value in read or value in found)


# ---- what is done with gradients -------------------------------------------------------------------------------------


def _schedule(step: Step) -> tuple[ScheduleSection, ...]:
    facts = [fact for fact in records(step.fact("train.lr_scheduler")) if "name" in fact]
    places = ["schedule"] if len(facts) == 1 else [f"schedule/{i}" for i in range(len(facts))]
    return tuple(_section(step, fact, place) for fact, place in zip(facts, places, strict=True))


def _section(step: Step, fact: dict[str, Any], place: str) -> ScheduleSection:
    """A schedule as it is recorded, with the numbers that are in the graph now."""
    given = {key: plain(value) for key, value in fact.items() if key != "name"}
    kind = SCHEDULES.get(str(fact["name"]))
    choices = {key: value for key, value in given.items() if kind is not None and key in kind.choices}
    known = [*given, *(kind.options if kind is not None else ())]
    now = {key: current(step, f"{place}/{key}") for key in dict.fromkeys(known) if key not in choices}
    numbers = {key: given.get(key) if value is None else value for key, value in now.items()}
    if not numbers.get("warmup"):  # none, and so the graph has none
        numbers = {key: value for key, value in numbers.items() if not key.startswith("warmup")}
    return ScheduleSection(str(fact["name"]), {k: v for k, v in numbers.items() if v is not None}, choices)


def _clip(step: Step) -> Clip | None:
    """How gradients are kept short. All are scaled by one norm, or each by its own."""
    calls = [node for node in step.algorithm.all_nodes() if node.domain == DOMAIN]
    by_value = [node for node in calls if node.op_type == clip_to_value.name]
    by_norm = [node for node in calls if node.op_type in (scale_to_norm.name, scale_to_norm_optax.name)]
    found = by_value or by_norm
    if not found:
        return None
    kind: Literal["norm", "tensor_norm", "value"] = "value"
    if by_norm:
        kind = "norm" if len({node.inputs[1] for node in by_norm}) == 1 else "tensor_norm"
    return Clip(kind, setting(found[0].inputs[-1]), operator_name(found[0]))


def _accumulation(step: Step) -> Accumulation | None:
    batches = current(step, "accumulate")
    return None if batches is None else Accumulation(batches, current(step, "micro_step"))


def _average(step: Step) -> Average | None:
    decay = current(step, "ema/decay")
    return None if decay is None else Average(decay, current(step, "ema/n_averaged"))


def _loss_scale(step: Step) -> LossScale | None:
    dynamic = current(step, "scaler/scale")
    if dynamic is not None:
        numbers = ("growth_factor", "backoff_factor", "growth_interval", "hysteresis", "min_scale", "cooldown")
        trackers = ("growth_tracker", "hysteresis_tracker")
        settings = {name: current(step, f"scaler/{name}") for name in (*numbers, *trackers)}
        return LossScale(dynamic, True, {name: value for name, value in settings.items() if value is not None})
    static = current(step, "loss_scale")
    return None if static is None else LossScale(static, False, {})


# ---- progress and state ----------------------------------------------------------------------------------------------


def _progress(step: Step, schedule: Sequence[ScheduleSection], variables: Sequence[State]) -> Progress:
    counters = {wanted_name(state.name): state for state in variables if state.role == "counter"}
    counter = counters.get(STEP) or (next(iter(counters.values())) if len(counters) == 1 else None)
    count = number(counter.value) if counter is not None else None
    fact = step.fact("train.progress")
    recorded = plain(fact) if isinstance(fact, dict) else {}
    return Progress(
        step=int(count) if isinstance(count, int | float) else None,
        steps=_end(schedule),
        recorded={key: value for key, value in recorded.items() if key != "step"},
    )


def _end(schedule: Sequence[ScheduleSection]) -> int | None:
    """The update at which the last schedule ends, which begins where the one before it says `until`."""
    if not schedule:
        return None
    last = schedule[-1].numbers
    start = schedule[-2].numbers.get("until") if len(schedule) > 1 else 0
    numbers = [number for number in (start, last.get("steps"), last.get("every", 1)) if isinstance(number, int | float)]
    if len(numbers) < 3:
        return None
    begin, length, every = numbers
    return int(begin + length * every)


def _state_amounts(variables: Iterable[State]) -> tuple[StateAmount, ...]:
    by_role: dict[str, list[State]] = {}
    for state in variables:
        role = "statistics" if state.role == "state" and is_statistics(state.value) else state.role
        by_role.setdefault(role, []).append(state)
    return tuple(StateAmount(role, len(found), sum(s.nbytes for s in found)) for role, found in by_role.items())
