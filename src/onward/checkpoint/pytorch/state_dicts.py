"""State dicts of modules, optimizers and schedulers of PyTorch, both ways.

State does not name a class: its slots tell which classes it can be of.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from onward.checkpoint.format import Checkpoint
from onward.checkpoint.pytorch.pickle_objects import Attributed, Name, Object
from onward.checkpoint.pytree.optax_states import reshape
from onward.errors import UnsupportedError, warn
from onward.recipe.optimizers import configure
from onward.recipe.spec import Spec
from onward.run_state.state import COUNT, MASTER, OptimizerState, ParameterGroup, SchedulerState
from onward.run_state.tensors import ArrayTensor, Tensor, as_tensor, count_of, number_of
from onward.vocabulary.optimizers import TORCH_ROWS
from onward.vocabulary.rate_formulas import FOREVER, complete, in_words
from onward.vocabulary.rows import row_for
from onward.vocabulary.torch import FLAGS, OF_ADAFACTOR, families_of, saved_words
from onward.vocabulary.torch_schedules import Attributes, class_of, read_saved, restart_position

# ---- optimizers ------------------------------------------------------------------------------------------------------

Settings = Mapping[str, Any]


def is_optimizer_state(tree: Any) -> bool:
    """True for the state of an optimizer of PyTorch."""
    if not isinstance(tree, Mapping) or not isinstance(tree.get("state"), Mapping):
        return False
    groups = tree.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        return False
    # Optimizers list parameters by number, in distributed checkpoints by name.
    listed = [group.get("params") for group in groups]
    return all(isinstance(params, list) and all(isinstance(x, int | str) for x in params) for params in listed)


def state_of_optimizer(tree: Any) -> Mapping[str, Any] | None:
    """Return the state dict of an optimizer, also of a pickled or a flattened one; None for anything else."""
    if is_optimizer_state(tree):
        return tree
    if _is_flat(tree):
        return _nested(tree)
    state = tree.state if isinstance(tree, Object) and isinstance(tree.state, Mapping) else {}
    if not state.keys() >= {"state", "param_groups", "defaults"}:
        return None
    numbers: dict[Any, int] = {}
    groups = []
    for group in state["param_groups"]:  # parameters are tensors, equal to those of a module
        numbers |= {parameter: len(numbers) + at for at, parameter in enumerate(group["params"])}
        params = [numbers[parameter] for parameter in group["params"]]
        groups.append({**group, "params": params, "param_names": list(group["params"])})
    return {"state": {numbers[key]: slots for key, slots in state["state"].items()}, "param_groups": groups}


_FLAT = ("state.", "param_groups.")


def _is_flat(tree: Any) -> bool:
    """True for the flattened state of an optimizer: `state.fc.weight.exp_avg`, `param_groups.fc.weight.lr`."""
    return (
        isinstance(tree, Mapping)
        and all(any(str(key).startswith(start) for key in tree) for start in _FLAT)
        and all(str(key).startswith(_FLAT) for key in tree)
    )


def _nested(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a flattened state as the optimizer has it, with a group for equal settings."""
    parts: dict[str, dict[str, dict[str, Any]]] = {start: {} for start in _FLAT}
    for key, value in tree.items():
        start = _FLAT[key.startswith(_FLAT[1])]
        name, _, last = key.removeprefix(start).rpartition(".")
        parts[start].setdefault(name, {})[last] = value
    groups: list[dict[str, Any]] = []
    for name, settings in parts["param_groups."].items():
        group = next((group for group in groups if {**settings, "params": group["params"]} == group), None)
        if group is None:
            groups.append(group := {**settings, "params": []})
        group["params"].append(name)
    return {"state": parts["state."], "param_groups": groups}


def _flattened(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **{f"state.{name}.{slot}": value for name, slots in tree["state"].items() for slot, value in slots.items()},
        **{
            f"param_groups.{name}.{key}": value
            for group in tree["param_groups"]
            for name in group["params"]
            for key, value in group.items()
            if key not in ("params", "param_names")
        },
    }


def optimizer_of(tree: Mapping[str, Any], family: str | None = None) -> OptimizerState:
    """Return the optimizer of a state. `family` is its name, if it is known otherwise."""
    groups: list[ParameterGroup] = []
    names: dict[Any, Any] = {}
    for group in tree["param_groups"]:
        numbers = group["params"]
        names_in_group = group.get("param_names")
        named = names_in_group if isinstance(names_in_group, list) and len(names_in_group) == len(numbers) else numbers
        names |= dict(zip(numbers, named, strict=True))
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        groups.append(ParameterGroup(None, tuple(named), settings))
    slots = {
        names.get(key, key): {slot: value for slot, value in values.items() if value is not None}
        for key, values in tree["state"].items()
        if isinstance(values, Mapping)
    }
    states = {frozenset(map(str, values)) - {COUNT, MASTER} for values in slots.values()}
    slots = {name: _factors(values) for name, values in slots.items()}
    families = (family,) if family else families_of(states, groups[0].settings if groups else {})
    if len(families) == 1:
        groups = [dataclasses.replace(group, optimizer=spec_of(families[0], group.settings)) for group in groups]
    return OptimizerState(families, tuple(groups), slots)


_FACTORS = {"exp_avg_sq_row": ("row_var", -1), "exp_avg_sq_col": ("col_var", -2)}
"""Slots of Adafactor of transformers -> slots of a recipe, and their axis of size 1."""


def _factors(slots: Mapping[str, Any]) -> dict[str, Any]:
    """Return slots with those of Adafactor of transformers as those of a recipe."""
    if "RMS" not in slots:
        return dict(slots)
    named = {"variance" if slot == "exp_avg_sq" else slot: x for slot, x in slots.items() if slot != "RMS"}
    for theirs, (ours, axis) in _FACTORS.items():
        if isinstance(tensor := named.pop(theirs, None), Tensor):
            at = len(tensor.shape) + 1 + axis
            named[ours] = reshape(tensor, (*tensor.shape[:at], 1, *tensor.shape[at:]))
    return named


def _without_factors(slots: Mapping[str, Any]) -> dict[str, Any]:
    """Return slots of a recipe as Adafactor of transformers stores them; it computes RMS before it is read."""
    named = {"exp_avg_sq" if slot == "variance" else slot: x for slot, x in slots.items()}
    named |= {"RMS": 0.0, COUNT: count_of(slots[COUNT])}
    for theirs, (ours, axis) in _FACTORS.items():
        if isinstance(tensor := named.pop(ours, None), Tensor):
            at = len(tensor.shape) + axis
            named[theirs] = reshape(tensor, tensor.shape[:at] + tensor.shape[at + 1 :])
    return named


def spec_of(family: str, settings: Settings) -> Spec | None:
    """Return the options of a recipe for a group of PyTorch; None if there are none."""
    return None if settings.get("lr", 0) is None else saved_words(family, settings, base_rate(settings), number_of)


def base_rate(settings: Settings) -> float:
    """Return the rate that a schedule multiplies: the initial one, or the top of one cycle."""
    rate = settings.get("max_lr", settings.get("initial_lr", settings.get("lr", 0.0)))
    return float(rate if isinstance(rate, int) else number_of(rate))


def settings_of(spec: Spec, rate: float) -> dict[str, Any]:
    """Return the settings of PyTorch's class for an optimizer of a recipe at a rate."""
    configured = configure(spec)
    row = row_for((row for row in TORCH_ROWS if row.is_native), configured)
    if row is None:
        raise UnsupportedError(
            f"PyTorch has no optimizer of its own equal to `{spec}`",
            hint="write a program: `onward convert training.onnx --to torch --program`, or train with `variant=torch`",
        )
    return {**{flag: FLAGS[flag] for flag in row.flags}, **row.settings_for(configured), "lr": rate}


# ---- schedulers ------------------------------------------------------------------------------------------------------


def is_schedule_state(tree: Any) -> bool:
    """True for the state of a scheduler of PyTorch, of mmengine or of timm."""
    if not isinstance(tree, Mapping):
        return False
    return ("_last_lr" in tree and ("last_epoch" in tree or "_schedulers" in tree)) or _is_foreign(tree)


def _is_foreign(tree: Mapping[str, Any]) -> bool:
    """True for the state of a scheduler of mmengine or timm, whose class is not stored."""
    return tree.keys() >= {"param_name", "base_values", "last_step"} or tree.keys() >= {"param_group_field", "metric"}


def schedule_of(state: Attributes, group: Attributes | None = None) -> SchedulerState:
    """Return the schedule of a state; the rates of one cycle are in a group of its optimizer."""
    pieces = read_saved(_plain(state), group or {})
    words = None if pieces is None else tuple(in_words(pieces))
    position = state.get("last_epoch", state.get("last_step"))
    if position is None and isinstance(inner := state.get("_schedulers"), list) and inner:
        position = inner[0].get("last_epoch") if isinstance(inner[0], Mapping) else None
    return SchedulerState(state, words, position if isinstance(position, int) else None)


def _plain(state: Attributes) -> Attributes:
    """Return a state with plain counters in place of objects."""
    state = dict(state)
    if isinstance(counts := state.get("milestones"), Object):
        state["milestones"] = counts.arguments[0]
    if isinstance(inner := state.get("_schedulers"), list):
        state["_schedulers"] = [_plain(item) if isinstance(item, Mapping) else item for item in inner]
    return state


def state_of(words: Sequence[Spec], bases: Sequence[float], rates: Sequence[float], position: int) -> dict[str, Any]:
    """Return the state of a scheduler at a position: of its own class, else of LambdaLR.

    `bases` are the rates of the groups before the schedule, `rates` those at the position. The
    factors of LambdaLR are not stored: the program that loads the state has the function.
    """
    common = {
        "base_lrs": list(bases),
        "last_epoch": position,
        "_step_count": position + 1,
        "_is_initial": False,
        "_get_lr_called_within_step": False,
        "_last_lr": list(rates),
    }
    single = [(spec, FOREVER) for spec in words if len(words) == 1 and "until" not in spec.options]
    scheduler = class_of(complete(single)[0]) if single else None
    if scheduler is None:
        return {**common, "lr_lambdas": [None] * len(bases)}
    state = scheduler[1]
    if "milestones" in state:
        counts = {step: state["milestones"].count(step) for step in state["milestones"]}
        state["milestones"] = Object(Name("collections", "Counter"), (counts,))
    if "T_0" in state:
        state |= restart_position(state["T_0"], state["T_mult"], position)
    return {**state, **common}


def advance_state(state: Mapping[str, Any], rates: Sequence[float], position: int) -> dict[str, Any]:
    """Return the state of a scheduler at another position with the rates of the groups there."""
    if state.get("last_epoch") == position:
        return dict(state)
    if _is_foreign(state):
        raise UnsupportedError(
            "schedulers of mmengine and timm cannot be advanced",
            hint="write weights and optimizer for another loop: `--to lightning`",
        )
    advanced = dict(state)
    if len(rates) == len(state.get("_last_lr", rates)):
        advanced["_last_lr"] = list(rates)
    if isinstance(inner := state.get("_schedulers"), list):
        advanced["_schedulers"] = [_inner(state, at, rates, position) for at in range(len(inner))]
    if "last_epoch" in state:
        advanced["last_epoch"] = position
    if "_step_count" in state:
        advanced["_step_count"] = position + 1
    if "T_cur" in state:
        advanced |= restart_position(state["T_0"], state["T_mult"], position)
    return advanced


def _inner(state: Mapping[str, Any], at: int, rates: Sequence[float], position: int) -> Any:
    """Return an inner scheduler at a position: each in turn with milestones, else together."""
    milestones = state.get("_milestones")
    inner = state["_schedulers"][at]
    if milestones is None:
        return advance_state(inner, rates, position)
    start = milestones[at - 1] if at else 0
    end = milestones[at] if at < len(milestones) else FOREVER
    return advance_state(inner, rates, position - start) if start <= position < end else inner


# ---- writing ---------------------------------------------------------------------------------------------------------


_COUNTERLESS = {name for row in TORCH_ROWS if not row.counts for name in row.optimizers}


def module_state(checkpoint: Checkpoint) -> Attributed:
    """Return `module.state_dict()`."""
    aliases = {alias: checkpoint.tensors[name] for alias, name in checkpoint.tied.items() if name in checkpoint.tensors}
    return Attributed({**checkpoint.tensors, **aliases})


def optimizer_state(optimizer: OptimizerState, *, by_name: bool = False) -> dict[str, Any]:
    """Return `optimizer.state_dict()`: by number in the order of the groups, or by name."""
    refuse_unknown_class(optimizer)
    numbers: dict[Any, Any] = {}
    for group in optimizer.groups:
        for name in group.parameters:
            numbers[name] = name if by_name else len(numbers)
    specs = {name: group.spec if group.optimizer else None for group in optimizer.groups for name in group.parameters}
    settings_of_name = {name: group.settings for group in optimizer.groups for name in group.parameters}
    state = {}
    for name, slots in optimizer.slots.items():
        if name not in numbers or not slots:
            continue
        spec = specs[name]
        if MASTER in slots:
            raise UnsupportedError(
                "PyTorch's optimizers cannot hold the float32 copies of weights of this checkpoint",
                hint="write `--to deepspeed` or `--to megatron`, or import it with a model in float32",
            )
        tensors = {slot: as_tensor(value) for slot, value in slots.items() if slot != COUNT}
        if (step := slots.get(COUNT)) is not None and (spec is None or spec.name not in _COUNTERLESS):
            count = as_tensor(step) if spec is None else ArrayTensor(np.asarray(count_of(step), np.float32))
            tensors = {COUNT: count, **tensors}
        is_adafactor = settings_of_name[name].keys() >= OF_ADAFACTOR.keys()
        state[numbers[name]] = _without_factors(tensors) if is_adafactor else tensors
    ordered = {number: state[number] for number in dict.fromkeys(numbers.values()) if number in state}
    groups = []
    for group in optimizer.groups:
        params = [numbers[name] for name in group.parameters]
        groups.append({**settings_now(group), "params": params, **({"param_names": params} if by_name else {})})
    return {"state": ordered, "param_groups": groups}


def refuse_unknown_class(optimizer: OptimizerState) -> None:
    """Raise an UnsupportedError for another framework's state without an optimizer name.

    PyTorch's `Adam.step()` needs settings and a step for each parameter, which it does not have.
    """
    if optimizer.variant != "torch" and any(group.optimizer is None for group in optimizer.groups):
        raise UnsupportedError(
            "the checkpoint does not name its optimizer, which PyTorch needs",
            hint="name it in a training model: `onward convert CHECKPOINT --like model.onnx --optimizer adamw:lr=1e-3 "
            "-o run.onnx`; to write weights alone: `--to safetensors`",
        )


_OF_PYTORCH = frozenset(
    {"maximize", "foreach", "betas", "dampening", "centered", "rho", "lr_decay", "etas", "lambd", "bias_correction"}
    | OF_ADAFACTOR.keys()
)
"""Settings of which each optimizer of PyTorch has one, and those of other frameworks none."""


def settings_now(group: ParameterGroup) -> dict[str, Any]:
    """Return the stored settings of a group with current numbers."""
    if group.optimizer is None:
        return dict(group.settings)
    rate = group.rate if group.rate is not None else group.settings.get("lr", group.spec.options["lr"])
    if _OF_PYTORCH.isdisjoint(group.settings):
        base = float(group.spec.options["lr"])
        return {**settings_of(group.spec, rate), **({"initial_lr": base} if rate != base else {})}
    if group.rate is None:
        return dict(group.settings)
    if group.settings.keys() >= OF_ADAFACTOR.keys():
        return {**group.settings, "lr": group.rate}
    changed = {k: v for k, v in settings_of(group.spec, rate).items() if k in group.settings and k not in FLAGS}
    base = float(group.spec.options["lr"])
    is_stored = base == group.settings.get("lr")  # constant without a schedule
    if "initial_lr" in group.settings and "max_lr" not in group.settings and not is_stored:
        changed["initial_lr"] = base
    # Equal numbers keep their stored type.
    return {key: changed[key] if changed.get(key, value) != value else value for key, value in group.settings.items()}


def without_copies(slots: Mapping[str, Any], weight: Tensor | None) -> dict[str, Any]:
    """Return slots without a float32 copy of a float32 weight."""
    is_copy = weight is not None and MASTER in slots and slots[MASTER].dtype == weight.dtype
    return {slot: value for slot, value in slots.items() if slot != MASTER or not is_copy}


LOOPS = ("trainer", "train_state", "trainer_state", "meta", "progress")
"""Keys of the counters of a training loop, if these are not at the top."""
_LEVELS = 4
"""Levels of a tree that `contents_of` searches; the entries of a module may be one level deeper."""


def name_of_state(path: Sequence[Any], files: int) -> str:
    """Return the keys that lead to a state, after its file if there are several: `generator`, `callbacks.ema`."""
    stem = [str(key).partition(".")[0] for key in path[:1] if len(path) == 1 or files > 1]
    return ".".join([*stem, *map(str, path[1:])])


def up_to_date(trees: Mapping[str, Any], checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the trees of a checkpoint with current optimizers, schedules and counters."""
    renewal = _Renewal(checkpoint, len(trees), iter(checkpoint.optimizers), iter(checkpoint.schedules), {})
    return {name: renewal.renew(tree, (name,)) for name, tree in trees.items()}


def advance_counter(name: Any, value: Any, by: int) -> Any:
    """Return the batch counter of a BatchNorm after `by` more batches; other values unchanged."""
    if not by or not isinstance(value, Tensor) or not str(name).endswith("num_batches_tracked"):
        return value
    return ArrayTensor(np.asarray(value.array() + by))


class _Renewal(NamedTuple):
    """Update of trees in the order in which `contents_of` lists their parts."""

    now: Checkpoint
    files: int
    optimizers: Iterator[OptimizerState]
    schedules: Iterator[Any]
    parameters: dict[int, Object]
    """Parameters of pickled modules, by the identity of their tensors."""

    def renew(self, tree: Any, path: tuple[Any, ...]) -> Any:
        if len(path) > _LEVELS:
            return tree
        if _is_flat(tree):
            flat = _flattened(optimizer_state(next(self.optimizers), by_name=True))
            return {key: flat.get(key, value) for key, value in tree.items()}
        if isinstance(tree, Object) and (before := state_of_optimizer(tree)) is not None:
            warn(f"the pickled optimizer `{tree.of}` is written as its `state_dict()`")
            groups = [{k: v for k, v in group.items() if k != "param_names"} for group in before["param_groups"]]
            tree = {**before, "param_groups": groups}
        if is_optimizer_state(tree):
            new_state = optimizer_state(next(self.optimizers))
            groups = [
                {key: before[key] if key in ("params", "param_names") else group[key] for key in before}
                for group, before in zip(new_state["param_groups"], tree["param_groups"], strict=True)
            ]
            numbers = [number for group in tree["param_groups"] for number in group["params"]]
            state = {numbers[at] if at < len(numbers) else at: slots for at, slots in new_state["state"].items()}
            return type(tree)({**tree, "state": state, "param_groups": groups})
        if is_schedule_state(tree):
            return dict(next(self.schedules).state)
        if isinstance(tree, Mapping):
            inside = {
                key: advance_counter(key, self.renew(value, (*path, key)), self._updates_of(path, key))
                for key, value in tree.items()
            }
            if len(path) == 1 or (len(path) == 2 and path[1] in LOOPS):
                inside |= {key: value for key, value in self.now.progress.items() if key in tree}
            if isinstance(tree, Attributed):
                inside = Attributed(inside)
                inside.attributes = tree.attributes
            return inside
        if isinstance(tree, list | tuple):
            return type(tree)([self.renew(item, (*path, at)) for at, item in enumerate(tree)])
        return _renew_module(tree, self._updates_of(path, ""), self.parameters) if isinstance(tree, Object) else tree

    def _updates_of(self, path: tuple[Any, ...], key: Any) -> int:
        """Return the updates that the module at a path made since; other modules made none."""
        module = self.now.module
        is_own = module in ("", name_of_state(path, self.files)) or f".{module}." in f".{key}"
        return self.now.since if is_own else 0


def _renew_module(tree: Object, by: int, parameters: dict[int, Object]) -> Object:
    """Return a pickled module with current counters and with parameters, which the reader has as tensors."""
    if not isinstance(tree.state, Mapping) or "_modules" not in tree.state:
        return tree
    inner = {
        name: _renew_module(child, by, parameters) if isinstance(child, Object) else child
        for name, child in tree.state["_modules"].items()
    }
    own = {name: _parameter(tensor, parameters) for name, tensor in tree.state["_parameters"].items()}
    state = {**tree.state, "_parameters": own, "_modules": inner}
    if isinstance(buffers := state.get("_buffers"), Mapping):
        state["_buffers"] = {name: advance_counter(name, buffer, by) for name, buffer in buffers.items()}
    return dataclasses.replace(tree, state=state)


def _parameter(tensor: Any, parameters: dict[int, Object]) -> Any:
    """Return the call that makes a parameter, one for a tensor of several names."""
    if not isinstance(tensor, Tensor):
        return tensor
    call = Object(Name("torch._utils", "_rebuild_parameter"), (tensor, True, Attributed()))
    return parameters.setdefault(id(tensor), call)
