"""Folders of onnxruntime-training 1.19: training graphs and a `checkpoint`."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from onward.checkpoint.format import Captured, Checkpoint, Format
from onward.checkpoint.ort.files import checkpoints_in, is_ort_checkpoint, read_ort, write_ort
from onward.checkpoint.ort.graphs import (
    EVALUATION,
    OPTIMIZER,
    TRAINING,
    OrtRule,
    artifact,
    model_of,
    optimizer_of,
)
from onward.errors import InvalidModelError, UnsupportedError, list_names
from onward.model.storage.files import is_plain_name
from onward.recipe.optimizers import configure
from onward.recipe.spec import Spec
from onward.run_state.state import COUNT, OptimizerState, ParameterGroup
from onward.run_state.tensors import ComputedTensor, Tensor

NAME = "checkpoint"
_GROUP = "group0"
_RATE = 1e-3
"""Default learning rate of onnxruntime-training."""
_INITIAL_RATE_NOTE = "the learning rate is the initial one: later rates are not stored"


def matches(path: Path) -> bool:
    return bool(checkpoints_in(path)) if path.is_dir() else is_ort_checkpoint(path)


def checkpoint_file(path: Path) -> Path:
    """Return the checkpoint in a folder: the one with the usual name, or the only one."""
    if not path.is_dir():
        return path
    paths = checkpoints_in(path)
    named = [file for file in paths if file.name.endswith(NAME) and not file.name.endswith(f"nominal_{NAME}")]
    candidates = named or paths
    if len(candidates) != 1:
        raise InvalidModelError(
            f"`{path}` holds several checkpoints: {', '.join(f'`{file.name}`' for file in candidates[:6])}",
            hint=f"open one of them: `{candidates[-1]}`",
        )
    return candidates[0]


def read(path: Path) -> Checkpoint:
    location = checkpoint_file(path)
    tree = read_ort(location)
    module = tree["module_state"]
    trained, frozen = module.get("requires_grad_params", {}), module.get("frozen_params", {})
    if both := trained.keys() & frozen.keys():
        raise InvalidModelError(f"`{location}` has `{min(both)}` twice, trained and frozen")
    if module.get("is_nominal_state"):
        raise UnsupportedError(
            f"`{location}` is a nominal checkpoint, which has only the names of parameters",
            hint="open the complete checkpoint that was made with it",
        )
    graphs = {name: artifact(location, name) for name in (TRAINING, EVALUATION, OPTIMIZER)}
    rule = optimizer_of(rule_file) if (rule_file := graphs[OPTIMIZER]) else None
    optimizers = _optimizers(tree, trained, rule)
    step = max((group["step"] for group in tree["optimizer_groups"].values()), default=None)
    return Checkpoint(
        path=path,
        format=FORMAT.name,
        title=FORMAT.title,
        tensors={**trained, **frozen},
        optimizers=optimizers,
        step=step,
        progress={**({} if step is None else {"step": step}), **tree["properties"]},
        clip=rule.clip or {} if rule else None,
        files=tuple(file.name for file in graphs.values() if file),
        trees={location.name: tree},
        remarks=(_INITIAL_RATE_NOTE,) if optimizers else (),
    )


def _optimizers(
    tree: Mapping[str, Any], trained: Mapping[str, Tensor], rule: OrtRule | None
) -> tuple[OptimizerState, ...]:
    groups, slots = [], {}
    stored = tree["optimizer_groups"]
    if not stored and rule:  # before the first update
        states: dict[str, Any] = {name: {} for name in trained}
        stored = {_GROUP: {"step": 0, "initial_learning_rate": _RATE, "optimizer_states": states}}
    for group in stored.values():
        rate = group["initial_learning_rate"]
        spec = None if rule is None or rule.spec is None else Spec(rule.spec.name, {**rule.spec.options, "lr": rate})
        settings = {"initial_lr": rate, **(rule.settings if rule else {})}
        groups.append(ParameterGroup(spec, tuple(group["optimizer_states"]), settings))
        for name, momentums in group["optimizer_states"].items():
            if name not in trained or name in slots:
                raise InvalidModelError(f"the optimizer has state of `{name}`, which is frozen or repeated")
            slots[name] = {COUNT: group["step"], **_slots(name, momentums, trained[name], rule)}
    return (OptimizerState((rule.family,) if rule else (), tuple(groups), slots),) if groups else ()


def _slots(name: str, momentums: Mapping[str, Tensor], parameter: Tensor, rule: OrtRule | None) -> dict[str, Tensor]:
    for key, tensor in momentums.items():
        if (tensor.dtype, tensor.shape) != (parameter.dtype, parameter.shape):
            raise InvalidModelError(f"`{key}` of `{name}` differs in dtype or shape from the parameter")
    if rule is None:
        return dict(momentums)
    named = {f"momentum{number}": slot for number, slot in enumerate(rule.slots)}
    return {named[key]: tensor for key, tensor in momentums.items() if key in named}


def graph(path: Path) -> Captured:
    """Return the model and its loss."""
    location = checkpoint_file(path)
    module = read_ort(location)["module_state"]
    return model_of(location, module.get("requires_grad_params", {}), module.get("frozen_params", {}))


def write(checkpoint: Checkpoint, folder: Path) -> None:
    """Write a checkpoint with the graphs that it came with."""
    trained = {name for group in checkpoint.stored_groups for name in group.parameters}
    tensors, properties = checkpoint.tensors, checkpoint.progress
    tree = {
        "module_state": {
            "requires_grad_params": {name: tensor for name, tensor in tensors.items() if name in trained},
            "frozen_params": {name: tensor for name, tensor in tensors.items() if name not in trained},
        },
        "optimizer_groups": _groups(checkpoint),
        "properties": {k: v for k, v in properties.items() if type(v) in (int, float, str) and k != "step"},
    }
    folder.mkdir(exist_ok=True)
    write_ort(tree, folder / NAME)
    origin = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    for name in checkpoint.files if checkpoint.format == FORMAT.name else ():
        if is_plain_name(name) and (origin / name).is_file():
            if name.endswith(f"{OPTIMIZER}.onnx"):
                _refuse_another(origin / name, checkpoint)
            shutil.copyfile(origin / name, folder / name)


def _refuse_another(path: Path, checkpoint: Checkpoint) -> None:
    """Raise an UnsupportedError if the graph of an optimizer would compute other numbers."""
    rule = optimizer_of(path)
    groups = checkpoint.stored_groups
    if rule is None or rule.spec is None or not groups or groups[0].optimizer is None:
        return
    if _meaning_of(rule.spec) != _meaning_of(groups[0].spec):
        raise UnsupportedError(
            f"`{path.name}` computes `{rule.spec}`, and the checkpoint needs `{groups[0].spec.without('lr')}`",
            hint="make new graphs with onnxruntime-training, and write the checkpoint from a folder that has them",
        )


def _meaning_of(spec: Spec) -> Any:
    """Return what an optimizer computes without its rate, in float32 as in ONNX attributes."""
    configured = configure(spec.without("lr"))
    return spec.name, {key: np.float32(value) for key, value in configured.values.items()}, configured.options


def _groups(checkpoint: Checkpoint) -> dict[str, Any]:
    groups = [(optimizer, group) for optimizer in checkpoint.optimizers for group in optimizer.groups]
    if len(groups) > 1 and len({str(group.optimizer) for _, group in groups}) > 1:
        raise UnsupportedError(
            "onnxruntime-training has one group of parameters, and the checkpoint several that differ",
            hint="give all parameters the same settings, or write another format",
        )
    if not groups:
        return {}
    if unknown := [str(name) for _, group in groups for name in group.parameters if name not in checkpoint.tensors]:
        raise InvalidModelError(f"the optimizer updates {list_names(unknown, 6)}, which the checkpoint lacks")
    states: dict[str, Any] = {}
    for optimizer, group in groups:
        slots = _momentum_slots(group)
        for name in group.parameters:
            states[str(name)] = {
                f"momentum{number}": _momentum(checkpoint, str(name), optimizer.slots.get(name, {}).get(slot))
                for number, slot in enumerate(slots)
            }
    rate = groups[0][1].spec.options.get("lr", _RATE) if groups[0][1].optimizer else _RATE
    return {_GROUP: {"step": checkpoint.step or 0, "initial_learning_rate": rate, "optimizer_states": states}}


def _momentum_slots(group: ParameterGroup) -> tuple[str, ...]:
    """Return the slots that `momentum0` and so on stand for."""
    spec = None if group.optimizer is None else group.spec
    if spec is not None:
        configured = configure(spec)
        options = {**configured.values, **configured.options}
        if spec.name in ("adam", "adamw") and not options["amsgrad"]:
            decays_weights = spec.name == "adamw" and options["variant"] in ("torch", "optax", "transformers")
            if decays_weights or not options["weight_decay"]:
                return "exp_avg", "exp_avg_sq"
        if spec.name == "sgd" and not options["momentum"] and not options["weight_decay"]:
            return ("momentum_buffer",)  # stored, but not used
    raise UnsupportedError(
        f"onnxruntime-training has no optimizer equal to `{spec}`",
        hint="use `adamw` (of PyTorch or transformers), or `sgd` without momentum and decay",
    )


def _momentum(checkpoint: Checkpoint, name: str, slot: Any) -> Tensor:
    if isinstance(slot, Tensor):
        return slot
    like = checkpoint.tensors[name]
    return ComputedTensor(like.dtype, like.shape, lambda: np.zeros(like.shape, like.dtype))


FORMAT = Format(
    "ort", "onnxruntime-training", matches, read, write, graph=graph,
    keeps=("tensors", "optimizers", "step", "progress", "clip", "loss"),
)  # fmt: skip
