"""Folders of onnxruntime-training, which ended with version 1.19: graphs for training, and a `checkpoint`."""

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
    Rule,
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
"""At which onnxruntime-training begins unless told otherwise."""
_RATE_IS_NOT_KEPT = "the learning rate is that of the beginning: a program sets others, and they are not kept"


def matches(path: Path) -> bool:
    return bool(checkpoints_in(path)) if path.is_dir() else is_ort_checkpoint(path)


def checkpoint_file(path: Path) -> Path:
    """The checkpoint that is meant by a folder: the one with the usual name, or the only one."""
    if not path.is_dir():
        return path
    found = checkpoints_in(path)
    usual = [each for each in found if each.name.endswith(NAME) and not each.name.endswith(f"nominal_{NAME}")]
    chosen = usual if usual else found
    if len(chosen) != 1:
        raise InvalidModelError(
            f"there are several checkpoints in `{path}`: {', '.join(f'`{each.name}`' for each in chosen[:6])}",
            hint=f"say which: `{chosen[-1]}`",
        )
    return chosen[0]


# ---- reading ---------------------------------------------------------------------------------------------------------


def read(path: Path) -> Checkpoint:
    place = checkpoint_file(path)
    tree = read_ort(place)
    module = tree["module_state"]
    trained, frozen = module.get("requires_grad_params", {}), module.get("frozen_params", {})
    if both := trained.keys() & frozen.keys():
        raise InvalidModelError(f"`{place}` has `{min(both)}` twice, trained and frozen")
    if module.get("is_nominal_state"):
        raise UnsupportedError(
            f"`{place}` is a nominal checkpoint, which has only the names of parameters",
            hint="give the complete one that was made together with it",
        )
    rules = artifact(place, OPTIMIZER)
    rule = optimizer_of(rules) if rules else None
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
        files=tuple(each.name for kind in (TRAINING, EVALUATION, OPTIMIZER) if (each := artifact(place, kind))),
        trees={place.name: tree},
        remarks=(_RATE_IS_NOT_KEPT,) if optimizers else (),
    )


def _optimizers(
    tree: Mapping[str, Any], trained: Mapping[str, Tensor], rule: Rule | None
) -> tuple[OptimizerState, ...]:
    groups, slots = [], {}
    stored = tree["optimizer_groups"] or _fresh_group(trained, rule)
    for group in stored.values():
        rate = group["initial_learning_rate"]
        spec = None if rule is None or rule.spec is None else Spec(rule.spec.name, {**rule.spec.options, "lr": rate})
        settings = {"initial_lr": rate, **(rule.settings if rule else {})}
        groups.append(ParameterGroup(spec, tuple(group["optimizer_states"]), settings))
        for name, momentums in group["optimizer_states"].items():
            if name not in trained or name in slots:
                raise InvalidModelError(
                    f"the optimizer keeps something for `{name}`, which is not trained or was before"
                )
            slots[name] = {COUNT: group["step"], **_slots(name, momentums, trained[name], rule)}
    return (OptimizerState((rule.family,) if rule else (), tuple(groups), slots),) if groups else ()


def _fresh_group(trained: Mapping[str, Tensor], rule: Rule | None) -> dict[str, Any]:
    """The group of a checkpoint that was saved without the state of its optimizer, or before there was any."""
    if rule is None:
        return {}
    return {_GROUP: {"step": 0, "initial_learning_rate": _RATE, "optimizer_states": {name: {} for name in trained}}}


def _slots(name: str, momentums: Mapping[str, Tensor], parameter: Tensor, rule: Rule | None) -> dict[str, Tensor]:
    for key, tensor in momentums.items():
        if (tensor.dtype, tensor.shape) != (parameter.dtype, parameter.shape):
            raise InvalidModelError(f"`{key}` of `{name}` has not the type and shape of the parameter")
    if rule is None:
        return dict(momentums)
    named = {f"momentum{number}": slot for number, slot in enumerate(rule.slots)}
    return {named[key]: tensor for key, tensor in momentums.items() if key in named}


def graph(path: Path) -> Captured:
    """The model and its loss."""
    place = checkpoint_file(path)
    module = read_ort(place)["module_state"]
    return model_of(place, module.get("requires_grad_params", {}), module.get("frozen_params", {}))


# ---- writing ---------------------------------------------------------------------------------------------------------


def write(checkpoint: Checkpoint, folder: Path) -> None:
    """A checkpoint, with the graphs that the checkpoint has come with."""
    tree = {
        "module_state": _module(checkpoint),
        "optimizer_groups": _groups(checkpoint),
        "properties": {
            key: value
            for key, value in checkpoint.progress.items()
            if type(value) in (int, float, str) and key != "step"
        },
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
    """The graph of an optimizer that would go on with other numbers than the checkpoint has."""
    rule = optimizer_of(path)
    groups = [group for each in checkpoint.optimizers for group in each.groups]
    if rule is None or rule.spec is None or not groups or groups[0].optimizer is None:
        return
    if _meaning_of(rule.spec) != _meaning_of(groups[0].spec):
        raise UnsupportedError(
            f"`{path.name}` computes `{rule.spec}`, and the checkpoint goes on with `{groups[0].spec.without('lr')}`",
            hint="make new graphs with onnxruntime-training, and write the checkpoint from a folder that has them",
        )


def _meaning_of(spec: Spec) -> Any:
    """What an optimizer computes, but for its rate, with numbers as an attribute of ONNX has them."""
    configured = configure(spec.without("lr"))
    return spec.name, {key: np.float32(value) for key, value in configured.values.items()}, configured.options


def _module(checkpoint: Checkpoint) -> dict[str, Any]:
    trained = {name for each in checkpoint.optimizers for group in each.groups for name in group.parameters}
    return {
        "requires_grad_params": {name: t for name, t in checkpoint.tensors.items() if name in trained},
        "frozen_params": {name: t for name, t in checkpoint.tensors.items() if name not in trained},
    }


def _groups(checkpoint: Checkpoint) -> dict[str, Any]:
    groups = [(each, group) for each in checkpoint.optimizers for group in each.groups]
    if len(groups) > 1 and len({str(group.optimizer) for _, group in groups}) > 1:
        raise UnsupportedError(
            "onnxruntime-training has one group of parameters, and the checkpoint several that differ",
            hint="give all parameters the same settings, or write another format",
        )
    if not groups:
        return {}
    if unknown := [str(name) for _, group in groups for name in group.parameters if name not in checkpoint.tensors]:
        raise InvalidModelError(
            f"the optimizer updates {list_names(unknown, 6)}, and the checkpoint holds no such tensor"
        )
    states: dict[str, Any] = {}
    for kept, group in groups:
        slots = _slots_there(group)
        for name in group.parameters:
            states[str(name)] = {
                f"momentum{number}": _momentum(checkpoint, str(name), kept.slots.get(name, {}).get(slot))
                for number, slot in enumerate(slots)
            }
    rate = groups[0][1].spec.options.get("lr", _RATE) if groups[0][1].optimizer else _RATE
    return {_GROUP: {"step": checkpoint.step or 0, "initial_learning_rate": rate, "optimizer_states": states}}


def _slots_there(group: ParameterGroup) -> tuple[str, ...]:
    """The slots that `momentum0` and so on stand for."""
    spec = None if group.optimizer is None else group.spec
    if spec is not None:
        configured = configure(spec)
        options = {**configured.values, **configured.options}
        if spec.name in ("adam", "adamw") and _is_adam_of_theirs(spec, options):
            return "exp_avg", "exp_avg_sq"
        if spec.name == "sgd" and not options["momentum"] and not options["weight_decay"]:
            return ("momentum_buffer",)  # which it keeps, and does not use
    raise UnsupportedError(
        f"onnxruntime-training has no optimizer that computes what `{spec}` does",
        hint="it has `adamw` (of PyTorch, or of transformers) and `sgd` without momentum and decay",
    )


def _is_adam_of_theirs(spec: Spec, options: Mapping[str, Any]) -> bool:
    if options["amsgrad"]:
        return False
    if spec.name == "adamw":
        return options["variant"] in ("torch", "optax", "transformers") or not options["weight_decay"]
    return not options["weight_decay"]


def _momentum(checkpoint: Checkpoint, name: str, slot: Any) -> Tensor:
    if isinstance(slot, Tensor):
        return slot
    like = checkpoint.tensors[name]
    return ComputedTensor(like.dtype, like.shape, lambda: np.zeros(like.shape, like.dtype))


FORMAT = Format(
    "ort",
    "onnxruntime-training",
    matches,
    read,
    write,
    keeps=("tensors", "optimizers", "step", "progress", "clip", "loss"),
    graph=graph,
)
