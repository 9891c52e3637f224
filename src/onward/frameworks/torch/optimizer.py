"""Optimizers of PyTorch: read into the groups and slots of a run, and made from them; and how they clip gradients."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import Optimizer

from onward.engines.torch.types import from_array, to_array
from onward.errors import UnsupportedError, list_names
from onward.frameworks.torch.exact import ExactOptimizer, MasterWeights, Together, float32_copies, scale_to_norm
from onward.frameworks.torch.formulas import EXACT
from onward.frameworks.torch.schedule import ReadSchedule
from onward.frameworks.torch.traced.graph_optimizer import GraphOptimizer
from onward.frameworks.torch.traced.groups import trace_groups
from onward.frameworks.torch.traced.optimizer_state import parameters_of
from onward.recipe.optimizers import ConfiguredOptimizer, FunctionOptimizer, configure
from onward.recipe.optimizers.definition import SCALAR_SLOTS
from onward.recipe.spec import Spec
from onward.run_state.problems import Problems
from onward.run_state.state import ParameterGroup, RunState
from onward.vocabulary.optimizers import TORCH_ROWS
from onward.vocabulary.rows import TorchOptimizer
from onward.vocabulary.torch import REFUSED_OPTIMIZERS

_Settings = Mapping[str, Any]


class Clip:
    """Clips the gradients of an optimizer before it steps: for `register_step_pre_hook`.

    It refuses to, if it is told how many numbers the optimizer has, and there are others: those who divide parameters
    among processes behind PyTorch's back, as DeepSpeed does, leave a part of each, whose norm is not that of all.
    """

    def __init__(self, settings: _Settings, size: int | None = None):
        self.settings, self.size = settings, size

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        parameters = parameters_of(optimizer)
        if self.size is not None and sum(parameter.numel() for parameter in parameters) != self.size:
            raise UnsupportedError(
                "the optimizer has parts of parameters, of whose gradients it cannot tell the norm, and it clips",
                hint="let DeepSpeed clip: `gradient_clipping` in its configuration; and train without `clip`",
            )
        clip_gradients(parameters, self.settings)


def clip_gradients(parameters: Sequence[torch.Tensor], settings: _Settings) -> None:
    """Clip as a recipe says, such as `{"norm": 1.0, "variant": "torch"}`."""
    given = [parameter for parameter in parameters if parameter.grad is not None]
    to_norm = scale_to_norm if settings.get("variant") == "optax" else clip_grad_norm_
    if "value" in settings:
        clip_grad_value_(given, settings["value"])
    elif "norm" in settings:
        to_norm(given, settings["norm"])
    else:
        for parameter in given:
            to_norm([parameter], settings["tensor_norm"])


def clipping_part(optimizer: Optimizer) -> Optimizer:
    """The optimizer whose gradients are clipped: those of copies in float32, where there are such."""
    return optimizer.inner if isinstance(optimizer, MasterWeights) else optimizer


def clip_of(optimizer: Optimizer, given: float | _Settings | None) -> dict[str, Any] | None:
    """What is done to gradients before a step, by the caller's loop or by hooks of ours; other hooks are refused."""
    part = clipping_part(optimizer)
    if part is not optimizer and given is not None:
        raise UnsupportedError(
            "gradients are clipped in the loop, in 16 bits, and the optimizer works on copies in float32",
            hint=f"clip those: `optimizer.inner.register_step_pre_hook({Clip.__module__}.Clip({{'norm': 1.0}}))`",
        )
    hooks = [hook for each in {optimizer, part} for hook in each._optimizer_step_pre_hooks.values()]
    ours = [hook.settings for hook in part._optimizer_step_pre_hooks.values() if isinstance(hook, Clip)]
    if len(ours) < len(hooks) or optimizer._optimizer_step_post_hooks or part._optimizer_step_post_hooks:
        raise UnsupportedError(
            "the optimizer has hooks around its steps, which could do anything",
            hint="remove them, and say what they clip: `clip=1.0`",
        )
    if ours:
        return dict(ours[0])
    if given is None or isinstance(given, Mapping):
        return None if given is None else {**given, **({} if "value" in given else {"variant": "torch"})}
    return {"norm": float(given), "variant": "torch"}


HALVES = (torch.float16, torch.bfloat16)

_FOREACH_AS_ONE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax)
"""Classes whose implementation for many tensors rounds bfloat16 where that for one does."""


def in_16_bits(parameter: Parameter) -> str:
    return str(parameter.dtype).removeprefix("torch.")


def is_known_in_half(configured: ConfiguredOptimizer) -> bool:
    """Whether the update of a recipe rounds as an optimizer of torch.optim does."""
    update = configured.kind.choose(configured.settings, None).update
    is_native = configured.options["variant"] == "torch" and configured.kind.name != "sgdw"
    return is_native and configured.options.get("fused", False) in update.in_16_bits


def objection(
    part: Optimizer, settings: Mapping[str, Any], configured: ConfiguredOptimizer, dtype: torch.dtype
) -> tuple[str, str] | None:
    """Why an update of 16 bits cannot be carried over exactly, and what to do."""
    kind = type(part).__name__
    if settings.get("fused") and "fused" not in configured.options:
        return f"the fused kernel of {kind} rounds in its own way", "say `fused=False`"
    if isinstance(part, ExactOptimizer) or not is_known_in_half(configured):
        return f"{kind} rounds in its own way", "let it work on copies in float32, or take AdamW or SGD"
    if settings.get("foreach") and (dtype != torch.bfloat16 or not isinstance(part, _FOREACH_AS_ONE)):
        return f"{kind} rounds otherwise with `foreach=True`", "say `foreach=False`"
    for setting in ("capturable", "differentiable"):
        if settings.get(setting):
            return f"{kind} rounds otherwise with `{setting}=True`", f"say `{setting}=False`"
    return None


def class_of(row: TorchOptimizer) -> type[Optimizer]:
    """Return the class of a row."""
    return getattr(torch.optim, row.name) if row.is_native else EXACT[row.name]


CLASSES = {class_of(row): row for row in reversed(TORCH_ROWS)}
"""The first row of each class."""
_NO_STEPS = tuple(kind for kind, row in CLASSES.items() if not row.counts)


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
    parts = optimizer.optimizers if isinstance(optimizer, Together) else [optimizer]
    for kind in map(type, parts):
        if kind is getattr(torch.optim, kind.__name__, None) and kind.__name__ in REFUSED_OPTIMIZERS:
            problems.add(*REFUSED_OPTIMIZERS[kind.__name__])
    hooks = [hook for part in {optimizer, *parts} for hook in _hooks(part)]
    if any(not isinstance(hook, Clip) for hook in hooks):
        problems.add("it has hooks, which could do anything", "remove the hooks")
    problems.refuse()
    settings = [group for part in parts for group in part.param_groups]
    rates = iter(schedule.base_rates if schedule else [float(group["lr"]) for group in settings])
    reading = _Reading(names, problems)
    for part in parts:
        of_part = [next(rates) for _ in part.param_groups]
        if type(part) in CLASSES:
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


def _hooks(part: Optimizer) -> list[Any]:
    return [*part._optimizer_step_pre_hooks.values(), *part._optimizer_step_post_hooks.values()]


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
        configured = configure(spec)
        is_constant = configured.kind.name == "adagrad" and not configured.values["lr_decay"]
        minds = not is_constant and "t" in configured.kind.choose(configured.settings, None).function.inputs
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
            for slot, value in slots.items():
                array = to_array(value)
                self.slots[f"{name}/{slot}"] = array.astype(np.float64) if slot in SCALAR_SLOTS else array.copy()

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


def _spec(kind: type[Optimizer], settings: Mapping[str, Any], rate: float, example: Parameter | None) -> Spec:
    """The words of a recipe for a group."""
    row = CLASSES[kind]
    name, variant = row.read(settings)
    is_half = example is not None and example.dtype in HALVES
    given: dict[str, Any] = {"fused": is_half and bool(settings.get("fused"))}  # with more bits it computes the same
    if isinstance(eps := settings.get("eps"), tuple) and eps[0] is None:
        given["eps1"] = torch.finfo(example.dtype if example is not None else torch.float32).eps
    return row.words(name, settings, lr=rate, variant=variant, **given)


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
    problems = Problems("the optimizer")
    for group in run.groups:
        halves = [name for name in group.parameters if parameters[name].dtype in HALVES]
        if halves and isinstance(group.optimizer, Spec) and not is_known_in_half(configure(group.optimizer)):
            what = f"`{group.optimizer.name}` rounds {list_names(halves, 5)} in another way than any class of PyTorch"
            problems.add(what, "make the training model with master weights, or of float32 weights")
    problems.refuse()
    settings: dict[type[Optimizer], list[dict[str, Any]]] = {}
    made: list[Optimizer] = []
    for i, group in enumerate(run.groups):
        if isinstance(group.optimizer, FunctionOptimizer):
            function = group.optimizer
            names = [value.name or "" for value in function.state]
            held = {name: run.state.get(name if function.owner_of(name) else f"group{i}/{name}") for name in names}
            present = {name: array for name, array in held.items() if array is not None}
            function = dataclasses.replace(function, initial={**function.initial, **present})
            made.append(GraphOptimizer(function, parameters, run.step))
        else:
            configured = configure(group.spec)
            row = next(row for row in TORCH_ROWS if row.fits(configured))
            kind, options = class_of(row), row.settings_for(configured)
            if row.is_native:  # AdamW has a setting that its class does not take
                options = {key: options[key] for key in inspect.signature(kind).parameters if key in options}
            own = [parameters[name] for name in group.parameters]
            settings.setdefault(kind, []).append({"params": own, **options})
    for kind, groups in settings.items():
        part = kind(groups, **{key: value for key, value in groups[0].items() if key != "params"})
        _fill(part, run, {id(parameter): name for name, parameter in parameters.items()})
        made.append(part)
    return made[0] if len(made) == 1 else Together(made)


def _fill(made: Optimizer, run: RunState, names: Mapping[int, str]) -> None:
    """Give an optimizer the state that a run has; one that has not begun makes its own."""
    if not run.step:
        return
    for group in made.param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            state = {} if isinstance(made, _NO_STEPS) else {"step": torch.tensor(float(run.step))}
            for key, value in run.state.items():
                owner, _, slot = key.rpartition("/")
                if owner == name:  # PyTorch itself makes scalars on the CPU
                    is_scalar = slot in SCALAR_SLOTS
                    state[slot] = torch.tensor(float(value)) if is_scalar else from_array(value).to(parameter.device)
            made.state[parameter] = state
