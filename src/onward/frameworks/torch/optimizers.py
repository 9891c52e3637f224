"""Optimizers of PyTorch: read into the groups and slots of a run, and made from them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from onward.engines.torch.types import from_array, to_array
from onward.errors import list_names
from onward.frameworks.torch.clipping import Clip
from onward.frameworks.torch.counterparts import FROM_TORCH, REFUSED, counterpart
from onward.frameworks.torch.exact.masters import MasterWeights, float32_copies
from onward.frameworks.torch.exact.optimizer import ExactOptimizer, Together
from onward.frameworks.torch.schedules import ReadSchedule
from onward.frameworks.torch.sixteen_bit import HALVES, in_16_bits, is_known_in_half, objection
from onward.frameworks.torch.traced.groups import trace_groups
from onward.frameworks.torch.traced.optimizer import GraphOptimizer
from onward.recipe.optimizers import ConfiguredOptimizer, FunctionOptimizer, configure
from onward.recipe.optimizers.updates import SCALAR_SLOTS
from onward.recipe.spec import Spec
from onward.run_state.problems import Problems
from onward.run_state.state import ParameterGroup, RunState
from onward.vocabulary.torch import settings_in, words_of

_NO_STEPS = (torch.optim.SGD,)
"""Classes that do not count updates."""


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_optimizer(
    optimizer: Optimizer, names: Mapping[int, str], schedule: ReadSchedule | None = None
) -> tuple[list[ParameterGroup], dict[str, np.ndarray], int]:
    """The groups of an optimizer, its slots by the names of a training model, and the updates made so far.

    `names` has the parameters that the model uses, by `id`. Others are left out, unless the optimizer has state of
    them; so are frozen ones. With a `schedule`, learning rates are what it begins with, and where the optimizer itself
    does not count, the schedule's position says how many updates there were.
    """
    if isinstance(optimizer, MasterWeights):
        return _read_masters(optimizer, names, schedule)
    problems = Problems(f"the optimizer {type(optimizer).__name__}")
    parts = list(_parts(optimizer))
    for part in parts:
        _check_class(part, problems)
    if any(_other_hooks(part) for part in {optimizer, *parts}):
        problems.add("it has hooks, which could do anything", "remove the hooks")
    problems.refuse()
    settings = [group for part in parts for group in part.param_groups]
    rates = iter(schedule.base_rates if schedule else [float(group["lr"]) for group in settings])
    reading = _Reading(names, problems)
    for part in parts:
        of_part = [next(rates) for _ in part.param_groups]
        if type(part) in FROM_TORCH:
            for group, rate in zip(part.param_groups, of_part, strict=True):
                reading.add(part, group, rate)
        else:
            reading.add_function(part, of_part)
    step = reading.step(schedule)
    problems.refuse()
    return reading.groups, reading.slots, step


def _read_masters(
    given: MasterWeights, names: Mapping[int, str], schedule: ReadSchedule | None
) -> tuple[list[ParameterGroup], dict[str, np.ndarray], int]:
    """Of an optimizer of copies, in which parameters that are no copies are found, too."""
    given.settle()
    named = {x: names[id(x)] for x in given.copies if id(x) in names}
    groups, slots, step = read_optimizer(
        given.inner, {id(given.copies[x]): name for x, name in named.items()}, schedule
    )
    masters = {f"{name}/master": to_array(given.copies[x]).copy() for x, name in named.items() if x.dtype in HALVES}
    return groups, {**slots, **masters}, step


def _parts(given: Optimizer) -> Iterator[Optimizer]:
    if isinstance(given, Together):
        yield from given.optimizers
    else:
        yield given


def _check_class(part: Optimizer, problems: Problems) -> None:
    kind = type(part)
    if kind in REFUSED:
        problems.add(*REFUSED[kind])


def _other_hooks(part: Optimizer) -> bool:
    hooks = [*part._optimizer_step_pre_hooks.values(), *part._optimizer_step_post_hooks.values()]
    return any(not isinstance(hook, Clip) for hook in hooks)


class _Reading:
    """Groups and slots, as they are found."""

    def __init__(self, names: Mapping[int, str], problems: Problems) -> None:
        self.groups: list[ParameterGroup] = []
        self.slots: dict[str, np.ndarray] = {}
        self._names = names
        self._problems = problems
        self._counts: dict[str, int] = {}
        """Updates of parameters that mind how many there were."""
        self._begun: dict[str, bool] = {}
        """Whether there was an update, of parameters that mind only this."""
        self._most = 0
        """Updates of any parameter, at least."""

    def add(self, part: Optimizer, settings: Mapping[str, Any], rate: float) -> None:
        chosen = {self._names[id(p)]: p for p in settings["params"] if p.requires_grad and id(p) in self._names}
        spec = _spec(type(part), settings, rate, next(iter(chosen.values()), None))
        for name, parameter in chosen.items():
            if parameter.dtype in HALVES and (what := objection(part, settings, configure(spec), parameter.dtype)):
                self._problems.add(f"`{name}` is {in_16_bits(parameter)}, and {what[0]}", what[1])
        minds = _minds_step(configure(spec))
        for parameter in settings["params"]:
            self._check(parameter, part)
        for name, parameter in chosen.items():
            self._read(name, part, dict(part.state.get(parameter, {})), minds)
        if chosen:
            self.groups.append(ParameterGroup(spec, list(chosen)))

    def add_function(self, part: Optimizer, rates: Sequence[float]) -> None:
        """An optimizer of a class that is not in the table: a step is traced, unless it is a graph already."""
        for settings in part.param_groups:
            for parameter in settings["params"]:
                self._check(parameter, part)
                if parameter.dtype in HALVES and id(parameter) in self._names and not isinstance(part, GraphOptimizer):
                    what = f"`{self._names[id(parameter)]}` is {in_16_bits(parameter)}, and a trace does not round"
                    self._problems.add(what, "let it work on copies in float32, or take one of torch.optim")
        self._problems.refuse()
        if isinstance(part, GraphOptimizer):
            function = part.function(self._names, rates[0])
            groups, step = [ParameterGroup(function, function.parameters)], int(part.param_groups[0]["t"])
        else:
            groups, step = trace_groups(part, self._names, rates)
        self.groups += groups
        self._most = max(self._most, step)

    def _check(self, parameter: Parameter, part: Optimizer) -> None:
        name = self._names.get(id(parameter))
        if name is None:
            if parameter.requires_grad and _updates(part, part.state.get(parameter, {})):
                what = f"it has state of a parameter of shape {list(parameter.shape)} that the model does not use"
                self._problems.add(what, "give it the parameters of this model only")
            return
        if parameter.grad is not None and parameter.grad.is_sparse:
            self._problems.add(f"the gradient of `{name}` is sparse", "use `sparse=False` in the embedding")

    def _read(self, name: str, part: Optimizer, state: dict[str, Any], minds: bool) -> None:
        count = _updates(part, state)
        self._most = max(self._most, count)
        if minds and isinstance(part, _NO_STEPS):
            self._begun[name] = bool(count)
        elif minds:
            self._counts[name] = count
        if count:
            slots = {slot: value for slot, value in state.items() if slot != "step" and value is not None}
            self.slots |= {f"{name}/{slot}": _array(slot, value) for slot, value in slots.items()}

    def step(self, schedule: ReadSchedule | None) -> int:
        """How many updates there were, as far as it matters."""
        step = max(self._counts.values(), default=self._most)
        if schedule is not None and step // schedule.every != schedule.position:
            if self._counts:
                self._problems.add(
                    f"it made {step} updates, but its scheduler {schedule.position} steps, one in {schedule.every}",
                    "say how many updates there are for each step of the scheduler",
                )
            step = schedule.position * schedule.every
        behind = [name for name, count in self._counts.items() if count != step]
        behind += [name for name, begun in self._begun.items() if begun != (step > 0)]
        if behind and not self._problems.found:
            what = f"{list_names(behind, 5)} had fewer updates than other parameters"
            self._problems.add(what, "leave parameters without gradients out of the optimizer, or begin anew")
        return step


def _updates(part: Optimizer, state: Mapping[str, Any]) -> int:
    """How many updates there were of a parameter, or at least whether there was one."""
    if isinstance(part, _NO_STEPS):
        return int(any(value is not None for value in state.values()))
    return int(state.get("step", 0))


def _array(slot: str, value: torch.Tensor) -> np.ndarray:
    array = to_array(value)
    return array.astype(np.float64) if slot in SCALAR_SLOTS else array.copy()


def _minds_step(configured: ConfiguredOptimizer) -> bool:
    """Whether the update depends on how many there were before."""
    if configured.kind.name == "adagrad" and not configured.values["lr_decay"]:
        return False
    return "t" in configured.kind.choose(configured.settings, None).function.inputs


def _spec(kind: type[Optimizer], settings: Mapping[str, Any], rate: float, example: Parameter | None) -> Spec:
    """The words of a recipe for a group."""
    name, variant = FROM_TORCH[kind](settings)
    is_half = example is not None and example.dtype in HALVES
    given: dict[str, Any] = {"fused": is_half and bool(settings.get("fused"))}  # with more bits it computes the same
    if isinstance(eps := settings.get("eps"), tuple) and eps[0] is None:
        given["eps1"] = torch.finfo(example.dtype if example is not None else torch.float32).eps
    return words_of(name, settings, lr=rate, variant=variant, **given)


# ---- making ----------------------------------------------------------------------------------------------------------


def make_optimizer(run: RunState, parameters: Mapping[str, Parameter]) -> Optimizer:
    """The optimizer that goes on where a run is: PyTorch's own where that computes the same, else an exact one."""
    masters = {name: run.state[f"{name}/master"] for name in run.parameters if f"{name}/master" in run.state}
    if not masters:
        return _make_optimizer(run, parameters)
    copies = float32_copies({name: parameters[name] for name in run.parameters})
    for name, master in masters.items():
        copies[name].data = from_array(master).to(parameters[name].device)
    state = {key: value for key, value in run.state.items() if not key.endswith("/master")}
    return MasterWeights(_make_optimizer(dataclasses.replace(run, state=state), copies), parameters, copies)


def _make_optimizer(run: RunState, parameters: Mapping[str, Parameter]) -> Optimizer:
    _check_run(run, parameters)
    by_class: dict[type[Optimizer], list[ParameterGroup]] = {}
    made: list[Optimizer] = []
    for i, group in enumerate(run.groups):
        if isinstance(group.optimizer, FunctionOptimizer):
            made.append(GraphOptimizer(_at_present(group.optimizer, run, f"group{i}"), parameters, run.step))
        else:
            by_class.setdefault(counterpart(configure(group.spec)), []).append(group)
    for kind, groups in by_class.items():
        settings = [_arguments(kind, configure(group.spec)) for group in groups]
        chosen = [[parameters[name] for name in group.parameters] for group in groups]
        part = kind([{"params": own, **of} for own, of in zip(chosen, settings, strict=True)], **settings[0])
        _fill(part, run, {id(parameter): name for name, parameter in parameters.items()})
        made.append(part)
    return made[0] if len(made) == 1 else Together(made)


def _at_present(function: FunctionOptimizer, run: RunState, group: str) -> FunctionOptimizer:
    """A function whose state begins as it is in a run now."""
    names = [value.name or "" for value in function.state]
    held = {name: run.state.get(name if function.owner_of(name) else f"{group}/{name}") for name in names}
    present = {name: array for name, array in held.items() if array is not None}
    return dataclasses.replace(function, initial={**function.initial, **present})


def _check_run(run: RunState, parameters: Mapping[str, Parameter]) -> None:
    problems = Problems("the optimizer")
    for group in run.groups:
        halves = [name for name in group.parameters if parameters[name].dtype in HALVES]
        if halves and isinstance(group.optimizer, Spec) and not is_known_in_half(configure(group.optimizer)):
            what = f"`{group.optimizer.name}` rounds {list_names(halves, 5)} in another way than any class of PyTorch"
            problems.add(what, "make the training model with master weights, or of float32 weights")
    problems.refuse()


def _arguments(kind: type[Optimizer], configured: ConfiguredOptimizer) -> dict[str, Any]:
    """All settings of a class that mean what ours mean."""
    settings = settings_in(configured)
    return {key: settings[key] for key in _settings_of(kind) if key in settings}


def _settings_of(kind: type[Optimizer]) -> list[str]:
    if issubclass(kind, ExactOptimizer):
        return [*{**kind.COMMON, **kind.SETTINGS}]
    return [*inspect.signature(kind).parameters]


def _fill(made: Optimizer, run: RunState, names: Mapping[int, str]) -> None:
    """Give an optimizer the state that a run has; one that has not begun makes its own."""
    if not run.step:
        return
    for group in made.param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            slots = {key.removeprefix(f"{name}/"): value for key, value in run.state.items() if _is_slot(key, name)}
            state = {slot: _tensor(slot, value, parameter) for slot, value in slots.items()}
            if not isinstance(made, _NO_STEPS):
                state = {"step": torch.tensor(float(run.step)), **state}
            made.state[parameter] = state


def _tensor(slot: str, value: np.ndarray, parameter: Parameter) -> torch.Tensor:
    if slot in SCALAR_SLOTS:  # as PyTorch itself makes them
        return torch.tensor(float(value))
    return from_array(value).to(parameter.device)


def _is_slot(key: str, parameter: str) -> bool:
    return key.startswith(f"{parameter}/") and "/" not in key.removeprefix(f"{parameter}/")
