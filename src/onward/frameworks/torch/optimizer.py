"""Optimizers of PyTorch: reading groups and slots, making optimizers from them, and clipping."""

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


class ClipHook:
    """Hook for `register_step_pre_hook` that clips gradients.

    With a `size`, it refuses optimizers with another number of elements. DeepSpeed and others leave
    slices of parameters in an optimizer, and their norm is not the global norm.
    """

    def __init__(self, settings: _Settings, size: int | None = None):
        self.settings, self.size = settings, size

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        parameters = parameters_of(optimizer)
        if self.size is not None and sum(parameter.numel() for parameter in parameters) != self.size:
            raise UnsupportedError(
                "the optimizer clips, but has slices of parameters without the global norm",
                hint="let DeepSpeed clip: `gradient_clipping` in its configuration; and train without `clip`",
            )
        clip_gradients(parameters, self.settings)


def clip_gradients(parameters: Sequence[torch.Tensor], settings: _Settings) -> None:
    """Clip as in a recipe, such as `{"norm": 1.0, "variant": "torch"}`."""
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    to_norm = scale_to_norm if settings.get("variant") == "optax" else clip_grad_norm_
    if "value" in settings:
        clip_grad_value_(trained, settings["value"])
    elif "norm" in settings:
        to_norm(trained, settings["norm"])
    else:
        for parameter in trained:
            to_norm([parameter], settings["tensor_norm"])


def clipped_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer whose gradients are clipped: the inner one of float32 copies."""
    return optimizer.inner if isinstance(optimizer, MasterWeights) else optimizer


def clips_of(optimizer: Optimizer) -> list[ClipHook]:
    return [hook for hook in optimizer._optimizer_step_pre_hooks.values() if isinstance(hook, ClipHook)]


def clip_of(optimizer: Optimizer, clip: float | _Settings | None) -> dict[str, Any] | None:
    """Return the clipping by the caller's loop or by hooks of Onward, and refuse other hooks."""
    inner = clipped_optimizer(optimizer)
    if inner is not optimizer and clip is not None:
        raise UnsupportedError(
            "the loop clips 16-bit gradients, but the optimizer works on float32 copies",
            hint=f"clip those: `optimizer.inner.register_step_pre_hook({ClipHook.__module__}.Clip({{'norm': 1.0}}))`",
        )
    ours = clips_of(inner)
    if len(ours) < sum(len(_hooks(owner)) for owner in {optimizer, inner}):
        raise UnsupportedError(
            "the optimizer has hooks around its steps, which could do anything",
            hint="remove them, and pass what they clip: `clip=1.0`",
        )
    if ours:
        return dict(ours[0].settings)
    if clip is None or isinstance(clip, Mapping):
        return None if clip is None else {**clip, **({} if "value" in clip else {"variant": "torch"})}
    return {"norm": float(clip), "variant": "torch"}


HALVES = (torch.float16, torch.bfloat16)

_FOREACH_ROUNDS_ALIKE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax)
"""Classes whose multi-tensor implementation rounds bfloat16 like the single-tensor one."""


def _dtype_name(parameter: torch.Tensor) -> str:
    return str(parameter.dtype).removeprefix("torch.")


def _rounds_like_torch(configured: ConfiguredOptimizer) -> bool:
    """True if the update of a recipe rounds as an optimizer of torch.optim does."""
    update = configured.definition.choose(configured.settings, None).update
    is_native = configured.options["variant"] == "torch" and configured.definition.name != "sgdw"
    return is_native and configured.options.get("fused", False) in update.in_16_bits


def _rounding_problem(
    member: Optimizer, settings: Mapping[str, Any], configured: ConfiguredOptimizer, dtype: torch.dtype
) -> tuple[str, str] | None:
    """Return why a 16-bit update cannot be converted exactly, and what to do."""
    class_name = type(member).__name__
    if settings.get("fused") and "fused" not in configured.options:
        return f"the fused kernel of {class_name} rounds differently", "set `fused=False`"
    if isinstance(member, ExactOptimizer) or not _rounds_like_torch(configured):
        return f"{class_name} rounds differently", "let it update float32 copies, or use AdamW or SGD"
    if settings.get("foreach") and (dtype != torch.bfloat16 or not isinstance(member, _FOREACH_ROUNDS_ALIKE)):
        return f"{class_name} rounds differently with `foreach=True`", "set `foreach=False`"
    for setting in ("capturable", "differentiable"):
        if settings.get(setting):
            return f"{class_name} rounds differently with `{setting}=True`", f"set `{setting}=False`"
    return None


def class_of(row: TorchOptimizer) -> type[Optimizer]:
    """Return the class of a row."""
    return getattr(torch.optim, row.name) if row.is_native else EXACT[row.name]


CLASSES = {class_of(row): row for row in reversed(TORCH_ROWS)}
"""First row of each class."""
_NO_STEPS = tuple(optimizer_class for optimizer_class, row in CLASSES.items() if not row.counts)


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_optimizer(
    optimizer: Optimizer, names: Mapping[int, str], schedule: ReadSchedule | None = None
) -> tuple[list[ParameterGroup], dict[str, np.ndarray], int]:
    """Return the groups of an optimizer, its slots by names of a training model, and the updates so far.

    `names` has the parameters that the model uses, by `id`. Others and frozen ones are skipped,
    unless the optimizer has state of them. With a `schedule`, learning rates are its initial ones,
    and its position counts the updates of an optimizer that does not.
    """
    if isinstance(optimizer, MasterWeights):
        return _read_masters(optimizer, names, schedule)
    problems = Problems(f"the optimizer {type(optimizer).__name__}")
    members = optimizer.optimizers if isinstance(optimizer, Together) else [optimizer]
    for member_class in map(type, members):
        name = member_class.__name__
        if name in REFUSED_OPTIMIZERS and member_class is getattr(torch.optim, name, None):
            problems.add(*REFUSED_OPTIMIZERS[name])
    hooks = [hook for member in {optimizer, *members} for hook in _hooks(member)]
    if any(not isinstance(hook, ClipHook) for hook in hooks):
        problems.add("it has hooks, which could do anything", "remove the hooks")
    problems.refuse()
    settings = [group for member in members for group in member.param_groups]
    rates = iter(schedule.base_rates if schedule else [float(group["lr"]) for group in settings])
    reading = _Reading(names, problems)
    for member in members:
        reading.check_parameters(member)
        member_rates = [next(rates) for _ in member.param_groups]
        if type(member) in CLASSES:
            for group, rate in zip(member.param_groups, member_rates, strict=True):
                reading.add(member, group, rate)
        else:
            reading.add_function(member, member_rates)
    step = reading.step(schedule)
    problems.refuse()
    return reading.groups, reading.slots, step


def _read_masters(
    optimizer: MasterWeights, names: Mapping[int, str], schedule: ReadSchedule | None
) -> tuple[list[ParameterGroup], dict[str, np.ndarray], int]:
    """Read an optimizer of float32 copies, which may include parameters that are not copies."""
    optimizer.settle()
    named = {x: names[id(x)] for x in optimizer.copies if id(x) in names}
    groups, slots, step = read_optimizer(
        optimizer.inner, {id(optimizer.copies[x]): name for x, name in named.items()}, schedule
    )
    masters = {f"{name}/master": to_array(optimizer.copies[x]).copy() for x, name in named.items() if x.dtype in HALVES}
    return groups, {**slots, **masters}, step


def _hooks(part: Optimizer) -> list[Any]:
    return [*part._optimizer_step_pre_hooks.values(), *part._optimizer_step_post_hooks.values()]


class _Reading:
    """Groups and slots of an optimizer while it is read."""

    def __init__(self, names: Mapping[int, str], problems: Problems) -> None:
        self.groups: list[ParameterGroup] = []
        self.slots: dict[str, np.ndarray] = {}
        self._names = names
        self._problems = problems
        self._counts: dict[str, int] = {}
        """Updates of parameters whose formula depends on the count."""
        self._begun: dict[str, bool] = {}
        """True for parameters with an update, where only this matters."""
        self._most = 0
        """Lower bound on the updates of any parameter."""

    def add(self, member: Optimizer, settings: Mapping[str, Any], rate: float) -> None:
        trained = {self._names[id(p)]: p for p in settings["params"] if p.requires_grad and id(p) in self._names}
        spec = _spec(type(member), settings, rate, next(iter(trained.values()), None))
        configured = configure(spec)
        definition = configured.definition
        is_constant = definition.name == "adagrad" and not configured.values["lr_decay"]
        depends_on_count = not is_constant and "t" in definition.choose(configured.settings, None).function.inputs
        for name, parameter in trained.items():
            is_half = parameter.dtype in HALVES
            if is_half and (reason := _rounding_problem(member, settings, configured, parameter.dtype)):
                self._problems.add(f"`{name}` is {_dtype_name(parameter)}, and {reason[0]}", reason[1])
            self._read(name, member, dict(member.state.get(parameter, {})), depends_on_count)
        if trained:
            self.groups.append(ParameterGroup(spec, list(trained)))

    def add_function(self, member: Optimizer, rates: Sequence[float]) -> None:
        """Add an optimizer of an unknown class by tracing a step, unless it is a graph already."""
        halves = [p for p in parameters_of(member) if p.dtype in HALVES and id(p) in self._names]
        for parameter in halves if not isinstance(member, GraphOptimizer) else ():
            problem = f"`{self._names[id(parameter)]}` is {_dtype_name(parameter)}, and a trace does not round"
            self._problems.add(problem, "let it update float32 copies, or use one of torch.optim")
        self._problems.refuse()
        if isinstance(member, GraphOptimizer):
            function = member.function(self._names, rates[0])
            groups, step = [ParameterGroup(function, function.parameters)], int(member.param_groups[0]["t"])
        else:
            groups, step = trace_groups(member, self._names, rates)
        self.groups += groups
        self._most = max(self._most, step)

    def check_parameters(self, member: Optimizer) -> None:
        """Note parameters that the model does not use, and sparse gradients."""
        for parameter in parameters_of(member):
            name = self._names.get(id(parameter))
            if name is not None and parameter.grad is not None and parameter.grad.is_sparse:
                self._problems.add(f"the gradient of `{name}` is sparse", "use `sparse=False` in the embedding")
            if name is None and parameter.requires_grad and _updates(member, member.state.get(parameter, {})):
                problem = f"it has state of a parameter of shape {list(parameter.shape)} that the model does not use"
                self._problems.add(problem, "create it with the parameters of this model only")

    def _read(self, name: str, member: Optimizer, state: dict[str, Any], depends_on_count: bool) -> None:
        count = _updates(member, state)
        self._most = max(self._most, count)
        if depends_on_count and isinstance(member, _NO_STEPS):
            self._begun[name] = bool(count)
        elif depends_on_count:
            self._counts[name] = count
        for slot, value in state.items() if count else ():
            if slot != "step" and value is not None:
                array = to_array(value)
                self.slots[f"{name}/{slot}"] = array.astype(np.float64) if slot in SCALAR_SLOTS else array.copy()

    def step(self, schedule: ReadSchedule | None) -> int:
        """Return the number of updates."""
        step = max(self._counts.values(), default=self._most)
        if schedule is not None and step // schedule.every != schedule.position:
            if self._counts:
                self._problems.add(
                    f"it made {step} updates, but its scheduler {schedule.position} steps, one in {schedule.every}",
                    "set `updates_per_epoch` to the updates per step of the scheduler",
                )
            step = schedule.position * schedule.every
        behind = [name for name, count in self._counts.items() if count != step]
        behind += [name for name, begun in self._begun.items() if begun != (step > 0)]
        if behind and not self._problems.problems:
            problem = f"{list_names(behind, 5)} had fewer updates than other parameters"
            self._problems.add(problem, "remove parameters without gradients from the optimizer, or start again")
        return step


def _updates(member: Optimizer, state: Mapping[str, Any]) -> int:
    """Return the number of updates of a parameter, or 1 if it had any and they are not counted."""
    if isinstance(member, _NO_STEPS):
        return int(any(value is not None for value in state.values()))
    return int(state.get("step", 0))


def _spec(
    optimizer_class: type[Optimizer], settings: Mapping[str, Any], rate: float, example: Parameter | None
) -> Spec:
    """Return the optimizer of a recipe for a group."""
    row = CLASSES[optimizer_class]
    name, variant = row.read(settings)
    is_half = example is not None and example.dtype in HALVES
    options: dict[str, Any] = {"fused": is_half and bool(settings.get("fused"))}  # with more bits it computes the same
    if isinstance(eps := settings.get("eps"), tuple) and eps[0] is None:
        options["eps1"] = torch.finfo(example.dtype if example is not None else torch.float32).eps
    return row.words(name, settings, lr=rate, variant=variant, **options)


# ---- making ----------------------------------------------------------------------------------------------------------


def make_optimizer(run: RunState, parameters: Mapping[str, Parameter]) -> Optimizer:
    """Return the optimizer that continues a run, of torch.optim if that computes the same."""
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
        if halves and isinstance(group.optimizer, Spec) and not _rounds_like_torch(configure(group.optimizer)):
            problem = f"`{group.optimizer.name}` rounds {list_names(halves, 5)} unlike any class of PyTorch"
            problems.add(problem, "prepare the training model with master weights, or of float32 weights")
    problems.refuse()
    settings: dict[type[Optimizer], list[dict[str, Any]]] = {}
    members: list[Optimizer] = []
    for i, group in enumerate(run.groups):
        if isinstance(group.optimizer, FunctionOptimizer):
            function = group.optimizer
            names = [value.name or "" for value in function.state]
            state = {name: run.state.get(name if function.owner_of(name) else f"group{i}/{name}") for name in names}
            present = {name: array for name, array in state.items() if array is not None}
            function = dataclasses.replace(function, initial={**function.initial, **present})
            members.append(GraphOptimizer(function, parameters, run.step))
        else:
            configured = configure(group.spec)
            row = next(row for row in TORCH_ROWS if row.fits(configured))
            optimizer_class, options = class_of(row), row.settings_for(configured)
            if row.is_native:  # AdamW has a setting that its class does not accept
                options = {key: options[key] for key in inspect.signature(optimizer_class).parameters if key in options}
            owned = [parameters[name] for name in group.parameters]
            settings.setdefault(optimizer_class, []).append({"params": owned, **options})
    for optimizer_class, groups in settings.items():
        member = optimizer_class(groups, **{key: value for key, value in groups[0].items() if key != "params"})
        _fill(member, run, {id(parameter): name for name, parameter in parameters.items()})
        members.append(member)
    return members[0] if len(members) == 1 else Together(members)


def _fill(optimizer: Optimizer, run: RunState, names: Mapping[int, str]) -> None:
    """Fill an optimizer with the state of a run that has begun."""
    if not run.step:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            state = {} if isinstance(optimizer, _NO_STEPS) else {"step": torch.tensor(float(run.step))}
            for key, value in run.state.items():
                owner, _, slot = key.rpartition("/")
                if owner == name:  # PyTorch itself keeps scalars on the CPU
                    is_scalar = slot in SCALAR_SLOTS
                    state[slot] = torch.tensor(float(value)) if is_scalar else from_array(value).to(parameter.device)
            optimizer.state[parameter] = state
