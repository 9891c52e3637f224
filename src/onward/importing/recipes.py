"""Options of a training loop: a checkpoint, a training model and the user must agree."""

from __future__ import annotations

import dataclasses
import glob
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from onward.checkpoint.format import Checkpoint
from onward.checkpoint.name_matching import TRAINER, Match
from onward.errors import ArgumentError, UnsupportedError, list_names
from onward.importing.groups import tells_optimizers, with_state
from onward.inspect import describe
from onward.inspect.formatting import quantity
from onward.model import Model
from onward.options import MissingOptions
from onward.recipe.objective import terms
from onward.recipe.prepare import prepare
from onward.recipe.update import parse_clip
from onward.run_state.state import COUNT, MASTER, ParameterGroup, RunState
from onward.run_state.tensors import ArrayTensor, Tensor, as_tensor, convert_dtype, count_of
from onward.transform.training import without_steps


def trained_groups(
    checkpoint: Checkpoint,
    matched: Match,
    groups: Sequence[ParameterGroup],
    source: Model,
    base: RunState | None,
    loss: Any,
    options: MissingOptions,
) -> tuple[list[ParameterGroup], dict[str, bool]]:
    """Return the groups without frozen parameters, and notes on these, with True for an assumption.

    The user or the recipe of `source`, whose run is `base`, freezes parameters. Parameters that
    never had an update are also frozen.
    """
    notes: dict[str, bool] = {}

    def keep(
        groups: Sequence[ParameterGroup], names: set[str], reason: str, is_assumed: bool = False
    ) -> list[ParameterGroup]:
        trained = [[name for name in group.parameters if name in names] for group in groups]
        if frozen := [name for group in groups for name in group.parameters if name not in names]:
            notes[f"not trained, {reason}: {list_names(frozen, 6)}"] = is_assumed
        pairs = zip(groups, trained, strict=True)
        return [dataclasses.replace(group, parameters=parameters) for group, parameters in pairs if parameters]

    recipe = (source.step().fact("train.recipe") or {}) if base else {}
    if options.freeze is not None or options.trainable is not None:
        own = [name for group in groups for name in group.parameters]
        trainable = options.trainable if options.trainable is not None else [glob.escape(name) for name in own]
        chosen = prepare(without_steps(source), loss=loss, trainable=trainable, freeze=options.freeze or ())
        names = {name for group in describe(chosen).steps[0].groups for name in group.parameters}
        if others := sorted(names - {*own}):
            raise UnsupportedError(
                f"the checkpoint's optimizer does not train {list_names(others, 3)}",
                hint="leave them out of `trainable`; a new run with `onward.prepare` can train them",
            )
        groups = keep(groups, names, "as set in the options")
    elif base and (recipe.get("freeze") or recipe.get("trainable")):
        groups = keep(groups, {*base.parameters}, "as in the training model")
    groups = keep(groups, with_state(checkpoint, matched, groups), "without optimizer state", True)
    if not groups:
        raise UnsupportedError("no parameter is left to train", hint="freeze less: `--freeze`, `--trainable`")
    return groups, notes


def settled_options(
    checkpoint: Checkpoint, base: RunState | None, groups: Sequence[ParameterGroup], options: MissingOptions
) -> tuple[dict[str, Any], Mapping[str, Any] | None, list[str]]:
    """Return the options of a recipe, clipping, and notes on facts that the checkpoint lacks.

    Raises:
        ArgumentError: the user or the model contradicts the checkpoint.
    """
    recipe = dict(base.recipe) if base else {}
    unknown: dict[str, str] = {}

    clip = _settle("clip", _clip(options.clip, checkpoint), base.clip if base else None, checkpoint.clip)
    if clip is None:
        unknown["--clip"] = "gradient clipping"

    own = recipe.pop("accumulate", None)
    accumulate = _settle("accumulate", options.accumulate, own, checkpoint.accumulate or None)
    if checkpoint.accumulate == 0 and accumulate in (None, 1):
        raise UnsupportedError(
            f"`{checkpoint.path}` accumulates gradients of an unknown number of batches",
            hint="set `--accumulate 4` (`accumulate=4`)",
        )
    if accumulate is None:
        unknown["--accumulate"] = "gradient accumulation"
    elif accumulate > 1:
        recipe["accumulate"] = accumulate

    decay = _settle("ema", options.ema, recipe.pop("ema", None), checkpoint.average_decay)
    if decay is not None:
        recipe["ema"] = decay
    scale = recipe.get("loss_scale") if options.loss_scale is None else options.loss_scale
    if scale is not None:
        stored = scaling_of(checkpoint.scaler)
        if stored is not None and not _same_scale(scale, stored.words):
            raise _contradiction("loss_scale", scale, stored.words)
        recipe["loss_scale"] = scale

    notes = []
    if unknown:
        listed = ", ".join(unknown.values())
        notes.append(f"not in the checkpoint, and taken as none: {listed} (`{'`, `'.join(unknown)}`)")
    count = checkpoint.average_updates
    if checkpoint.averages and decay is None:
        notes.append("its averages do not continue: their decay is unknown (`--ema`)")
    if decay is not None and count is not None and checkpoint.step not in (None, count):
        updates = quantity(count, "update")
        notes.append(f"its averages had {updates} in {checkpoint.step} steps; from now on, one in each step")
    if decay is not None and not checkpoint.averages:
        notes.append("averages begin with the weights of the checkpoint, which has none")
    if base and tells_optimizers(checkpoint) and options.optimizer is None:
        names, others = ({group.optimizer_name for group in side} for side in (groups, base.groups))
        if names != others:
            model_optimizers = " and ".join(sorted(others))
            notes.append(f"the optimizer is that of the checkpoint, and not {model_optimizers} of the model")
    return recipe, clip or None, notes


def check_smoothing(checkpoint: Checkpoint, loss: Any) -> None:
    """Raise an Error if the Trainer of transformers smooths labels and the loss does not."""
    smoothing = checkpoint.arguments.get("label_smoothing_factor") if checkpoint.format == TRAINER else None
    if not smoothing:
        return
    if not any(math.isclose(term.spec.options.get("label_smoothing", 0), smoothing) for term in terms(loss)):
        raise UnsupportedError(
            f"the Trainer smooths labels by {smoothing:g}, and the loss does not",
            hint=f"set the loss of the logits: `--loss logits=cross_entropy:label_smoothing={smoothing:g}`, "
            "or `loss=...`; or give a training model that has it: `--like training.onnx`",
        )


def _settle(name: str, stated: Any, own: Any, stored: Any) -> Any:
    """Return an option of the user or else the model, if the checkpoint does not contradict it."""
    chosen = own if stated is None else stated
    if chosen is None or stored is None:
        return stored if chosen is None else chosen
    if not _agree(chosen, stored):
        raise _contradiction(name, chosen, stored)
    return stored


def _agree(chosen: Any, stored: Any) -> bool:
    if not isinstance(chosen, Mapping):
        return bool(chosen == stored)
    return {k: v for k, v in chosen.items() if k != "variant"} == {k: v for k, v in stored.items() if k != "variant"}


def _contradiction(name: str, chosen: Any, stored: Any) -> ArgumentError:
    return ArgumentError(
        f"`{name}` is {_text(chosen)}, and {_text(stored)} in the checkpoint",
        hint=f"omit `{name}` here and in the model: the checkpoint has it",
    )


def _text(value: Any) -> str:
    if not isinstance(value, Mapping):
        return str(value)
    return ",".join(f"{key}:{number:g}" for key, number in value.items() if key != "variant") or "none"


def _clip(clip: Any, checkpoint: Checkpoint) -> dict[str, Any] | None:
    """Return clipping of a recipe, computed as the framework of the checkpoint does."""
    spec = parse_clip(clip)
    if spec is None:
        return None
    variants = {optimizer.variant for optimizer in checkpoint.optimizers} & {"optax", "keras"}
    variant = {"variant": variants.pop()} if variants and spec.name != "value" else {}
    return {spec.name: spec.options["limit"], **variant, **spec.without("limit").options}


def _same_scale(chosen: Any, stored: str | float) -> bool:
    is_dynamic = str(chosen).startswith("dynamic")
    return str(stored).startswith("dynamic") if is_dynamic else str(chosen) == str(stored) or chosen == stored


# ---- weights and state -----------------------------------------------------------------------------------------------


_NARROW = (ir.DataType.BFLOAT16, ir.DataType.FLOAT16)


def weights_and_slots(
    checkpoint: Checkpoint, matched: Match, model: Model, groups: Sequence[ParameterGroup]
) -> tuple[dict[str, Tensor], dict[str, Tensor], bool | None]:
    """Return weights and slots by name, and whether narrow weights have masters."""
    weights = {ours: matched.orient(theirs, checkpoint.tensors[theirs]) for theirs, ours in matched.names.items()}
    slots: dict[str, Tensor] = {}
    masters: dict[str, Tensor] = {}
    trained = {name for group in groups for name in group.parameters}
    for theirs, slot, value in checkpoint.stored_slots:
        ours = matched.names.get(str(theirs))
        if ours is None or ours not in trained or slot == COUNT or value is None:
            continue
        tensor = matched.orient(theirs, as_tensor(value))
        (masters if slot == MASTER else slots)[ours if slot == MASTER else f"{ours}/{slot}"] = tensor
    wide = [name for name in masters if type_of(model, name) == ir.DataType.FLOAT]
    weights |= {name: masters.pop(name) for name in wide}
    weights = {name: widened(name, tensor, type_of(model, name).numpy()) for name, tensor in weights.items()}
    slots |= {f"{name}/{MASTER}": tensor for name, tensor in masters.items()}
    narrow = any(type_of(model, name) in _NARROW for name in trained)
    return weights, slots, bool(masters) if narrow else None


def widened(name: str, tensor: Tensor, dtype: np.dtype) -> Tensor:
    """Return a tensor in the type of a model, if it holds all values of the stored type."""
    if tensor.dtype == dtype:
        return tensor
    if dtype.kind != "f" or tensor.dtype.kind in "biu" or np.result_type(tensor.dtype, dtype) != dtype:
        raise UnsupportedError(
            f"`{name}` is {tensor.dtype}, and {dtype} in the model", hint="give a model with the dtype of its weights"
        )
    return convert_dtype(tensor, dtype)


def updates_made(
    checkpoint: Checkpoint, matched: Match, groups: Sequence[ParameterGroup], stated: int | None
) -> int | None:
    """Return the updates made, by the optimizer, `stated` or the checkpoint; None if unknown.

    Raises:
        UnsupportedError: trained parameters had different numbers of updates, or another than
            `stated`.
    """
    trained = {name for group in groups for name in group.parameters}
    counts = {
        str(name): count_of(value)
        for name, slot, value in checkpoint.stored_slots
        if slot == COUNT and matched.names.get(str(name)) in trained
    }
    if not counts:
        return checkpoint.step if stated is None else stated
    most = max(counts.values())
    behind = [name for name, count in counts.items() if count != most]
    if behind:
        raise UnsupportedError(
            f"{list_names(behind, 5)} had fewer updates than others; training models count once",
            hint="freeze them: `--freeze NAME` (`freeze=[...]`)",
        )
    if stated not in (None, most):
        raise UnsupportedError(f"`updates` is {stated}, and the optimizer counted {most}", hint="omit `--updates`")
    return most


def averages_of(
    checkpoint: Checkpoint, matched: Match, groups: Sequence[ParameterGroup], step: int
) -> dict[str, Tensor]:
    """Return averages of trainable parameters, as state of the training model.

    Raises:
        UnsupportedError: the averages had no update. The first one of PyTorch copies the weights.
    """
    if checkpoint.average_updates == 0:
        raise UnsupportedError(
            f"the averages in `{checkpoint.path}` had no update",
            hint="save it after the first update, which copies the weights; or omit `--ema`",
        )
    trained = {name for group in groups for name in group.parameters}
    averages = {
        f"ema/{matched.names[theirs]}": matched.orient(theirs, tensor)
        for theirs, tensor in checkpoint.averages.items()
        if matched.names.get(theirs) in trained
    }
    count = step if checkpoint.average_updates is None else checkpoint.average_updates
    return {**averages, "ema/n_averaged": as_tensor(np.int64(count))} if averages else {}


def type_of(model: Model, name: str) -> ir.DataType:
    tensor = model.graph.initializers[name].const_value
    assert tensor is not None
    return tensor.dtype


# ---- scales of the loss ----------------------------------------------------------------------------------------------


class Scaling(NamedTuple):
    """Loss scaling of a training model."""

    words: str | float
    """Value for `loss_scale` of `prepare`."""
    state: Mapping[str, ArrayTensor]


_OF_PYTORCH = ("growth_factor", "backoff_factor", "growth_interval")
_OF_DEEPSPEED = ("scale_factor", "scale_window", "delayed_shift", "min_scale", "cur_hysteresis", "cur_iter")


def scaling_of(scaler: Mapping[str, Any]) -> Scaling | None:
    """Return the loss scaling of a scaler; None if it is incomplete or not in recipes."""
    if _are_numbers(scaler, ("scale", *_OF_PYTORCH, "_growth_tracker")):
        words = ",".join(f"{name}={scaler[name]:g}" for name in _OF_PYTORCH)
        return Scaling(f"dynamic:{words}", _state(scaler["scale"], scaler["_growth_tracker"]))
    if not _are_numbers(scaler, ("cur_scale",)):
        return None
    if not scaler.get("dynamic"):
        return Scaling(float(scaler["cur_scale"]), {})
    if not _are_numbers(scaler, (*_OF_DEEPSPEED, "last_overflow_iter")) or scaler.get("consecutive_hysteresis"):
        return None
    factor, window = scaler["scale_factor"], scaler["scale_window"]
    words = f"growth_factor={factor:g},backoff_factor={1 / factor!r},growth_interval={window:g}"
    words += f",hysteresis={scaler['delayed_shift']:g},min_scale={scaler['min_scale']!r},cooldown=1"
    # Updates since the overflow, of which the first does not count.
    good = scaler["cur_iter"] - 1 - scaler["last_overflow_iter"]
    state = _state(scaler["cur_scale"], -1 if good == 0 else (good - 1) % window)
    if scaler["delayed_shift"] > 1:
        state["scaler/hysteresis_tracker"] = ArrayTensor(np.asarray(scaler["cur_hysteresis"], np.int64))
    return Scaling(f"dynamic:{words}", state)


def _are_numbers(scaler: Mapping[str, Any], names: tuple[str, ...]) -> bool:
    return all(isinstance(scaler.get(name), int | float) and not isinstance(scaler[name], bool) for name in names)


def _state(scale: float, tracker: float) -> dict[str, ArrayTensor]:
    return {
        "scaler/scale": ArrayTensor(np.asarray(scale, np.float32)),
        "scaler/growth_tracker": ArrayTensor(np.asarray(tracker, np.int64)),
    }
