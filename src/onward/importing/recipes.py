"""What a training loop does beside its optimizer: of a checkpoint, a training model and a user, who must agree."""

from __future__ import annotations

import dataclasses
import glob
import math
from collections.abc import Mapping, Sequence
from typing import Any

from onward.checkpoint.format import Checkpoint
from onward.checkpoint.matching import TRAINER, Match
from onward.errors import ArgumentError, UnsupportedError, list_names
from onward.importing.names import tells_optimizers, with_state
from onward.importing.state import scaling_of
from onward.inspect import describe
from onward.inspect.formatting import quantity
from onward.model import Model
from onward.options import UntoldOptions
from onward.recipe import prepare
from onward.recipe.objective import terms
from onward.recipe.update import parse_clip
from onward.run_state.state import Group, RunState
from onward.transform.training import without_steps


def trained_groups(
    checkpoint: Checkpoint,
    matched: Match,
    groups: Sequence[Group],
    given: Model,
    base: RunState | None,
    loss: Any,
    said: UntoldOptions,
) -> tuple[list[Group], dict[str, bool]]:
    """Return the groups without parameters that are frozen, and notes on these, with True for an assumption.

    Frozen are those that the user says, or else the recipe of the model `given`, whose run is `base`; and those that
    never had an update.
    """
    notes: dict[str, bool] = {}

    def keep(groups: Sequence[Group], names: set[str], why: str, is_assumed: bool = False) -> list[Group]:
        kept = [dataclasses.replace(each, parameters=[n for n in each.parameters if n in names]) for each in groups]
        if frozen := [name for each in groups for name in each.parameters if name not in names]:
            notes[f"not trained, {why}: {list_names(frozen, 6)}"] = is_assumed
        return [each for each in kept if each.parameters]

    recipe = (given.step().fact("train.recipe") or {}) if base else {}
    if said.freeze is not None or said.trainable is not None:
        own = [name for each in groups for name in each.parameters]
        trainable = said.trainable if said.trainable is not None else [glob.escape(name) for name in own]
        chosen = prepare(without_steps(given), loss=loss, trainable=trainable, freeze=said.freeze or ())
        names = {name for group in describe(chosen).steps[0].groups for name in group.parameters}
        if others := sorted(names - {*own}):
            raise UnsupportedError(
                f"the checkpoint's optimizer does not train {list_names(others, 3)}",
                hint="leave them out of `trainable`; a new run with `onward.prepare` can train them",
            )
        groups = keep(groups, names, "as you said")
    elif base and (recipe.get("freeze") or recipe.get("trainable")):
        groups = keep(groups, {*base.parameters}, "as in the model that was given")
    groups = keep(groups, with_state(checkpoint, matched, groups), "as the optimizer keeps no state of them", True)
    if not groups:
        raise UnsupportedError("no parameter is left to train", hint="freeze less: `--freeze`, `--trainable`")
    return groups, notes


def settled_options(
    checkpoint: Checkpoint, base: RunState | None, groups: Sequence[Group], said: UntoldOptions
) -> tuple[dict[str, Any], Mapping[str, Any] | None, list[str]]:
    """Return the options of a recipe, clipping, and notes on what the checkpoint does not tell.

    Raises:
        ArgumentError: the user or the model says something else than the checkpoint.
    """
    recipe = dict(base.recipe) if base else {}
    unknown: dict[str, str] = {}

    clip = _settle("clip", _clip(said.clip, checkpoint), base.clip if base else None, checkpoint.clip)
    if clip is None:
        unknown["--clip"] = "gradient clipping"

    own = recipe.pop("accumulate", None)
    accumulate = _settle("accumulate", said.accumulate, own, checkpoint.accumulate or None)
    if checkpoint.accumulate == 0 and accumulate in (None, 1):
        raise UnsupportedError(
            f"`{checkpoint.path}` accumulates gradients, and does not tell of how many batches",
            hint="say it: `--accumulate 4`, or `accumulate=4`",
        )
    if accumulate is None:
        unknown["--accumulate"] = "gradient accumulation"
    elif accumulate > 1:
        recipe["accumulate"] = accumulate

    decay = _settle("ema", said.ema, recipe.pop("ema", None), checkpoint.average_decay)
    if decay is not None:
        recipe["ema"] = decay
    scale = recipe.get("loss_scale") if said.loss_scale is None else said.loss_scale
    if scale is not None:
        stored = scaling_of(checkpoint.scaler)
        if stored is not None and not _same_scale(scale, stored.words):
            raise _contradiction("loss_scale", scale, stored.words)
        recipe["loss_scale"] = scale

    notes = []
    if unknown:
        notes.append(
            f"not in the checkpoint, and taken as none: {', '.join(unknown.values())} (`{'`, `'.join(unknown)}`)"
        )
    if checkpoint.averages and decay is None:
        notes.append("its averages do not go on, as their decay is not known (`--ema`)")
    count = checkpoint.average_updates
    if decay is not None and count is not None and checkpoint.step not in (None, count):
        notes.append(
            f"its averages had {quantity(count, 'update')} in {checkpoint.step} steps; from now on, one in each step"
        )
    if decay is not None and not checkpoint.averages:
        notes.append("averages begin with the weights of the checkpoint, which has none")
    if base and tells_optimizers(checkpoint) and said.optimizer is None:
        names, others = ({each.optimizer_name for each in side} for side in (groups, base.groups))
        if names != others:
            notes.append(
                f"the optimizer is that of the checkpoint, and not {' and '.join(sorted(others))} of the model"
            )
    return recipe, clip or None, notes


def check_smoothing(checkpoint: Checkpoint, loss: Any) -> None:
    """Raise an Error if the Trainer of transformers smooths labels, outside of the model, and a loss does not."""
    smoothing = checkpoint.arguments.get("label_smoothing_factor") if checkpoint.format == TRAINER else None
    if not smoothing:
        return
    if not any(math.isclose(term.spec.options.get("label_smoothing", 0), smoothing) for term in terms(loss)):
        raise UnsupportedError(
            f"the Trainer smooths labels by {smoothing:g}, and the loss does not",
            hint=f"say the loss of the logits: `--loss logits=cross_entropy:label_smoothing={smoothing:g}`, "
            "or `loss=...`; or give a training model that has it: `--like training.onnx`",
        )


def _settle(name: str, said: Any, own: Any, stored: Any) -> Any:
    """Return what the user says, or else the model has, if the checkpoint does not tell something else."""
    wanted = own if said is None else said
    if wanted is None or stored is None:
        return stored if wanted is None else wanted
    if not _agree(wanted, stored):
        raise _contradiction(name, wanted, stored)
    return stored


def _agree(wanted: Any, stored: Any) -> bool:
    if not isinstance(wanted, Mapping):
        return bool(wanted == stored)
    return {k: v for k, v in wanted.items() if k != "variant"} == {k: v for k, v in stored.items() if k != "variant"}


def _contradiction(name: str, wanted: Any, stored: Any) -> ArgumentError:
    wanted, stored = (_text(each) for each in (wanted, stored))
    return ArgumentError(
        f"`{name}` is {wanted}, and {stored} in the checkpoint",
        hint=f"leave `{name}` out, also where the model was prepared; the checkpoint tells it",
    )


def _text(value: Any) -> str:
    if not isinstance(value, Mapping):
        return str(value)
    return ",".join(f"{key}:{number:g}" for key, number in value.items() if key != "variant") or "none"


def _clip(given: Any, checkpoint: Checkpoint) -> dict[str, Any] | None:
    """Return clipping in words of a recipe, computed as the framework of the checkpoint does."""
    spec = parse_clip(given)
    if spec is None:
        return None
    variants = {each.variant for each in checkpoint.optimizers} & {"optax", "keras"}
    variant = {"variant": variants.pop()} if variants and spec.name != "value" else {}
    return {spec.name: spec.options["limit"], **variant, **spec.without("limit").options}


def _same_scale(wanted: Any, stored: str | float) -> bool:
    is_dynamic = str(wanted).startswith("dynamic")
    return str(stored).startswith("dynamic") if is_dynamic else str(wanted) == str(stored) or wanted == stored
