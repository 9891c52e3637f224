"""Checkpoints of other frameworks as training models, with graphs that their frameworks capture."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from onward.checkpoint.format import Captured, Checkpoint
from onward.checkpoint.formats import open_checkpoint
from onward.checkpoint.matching import Match, match
from onward.checkpoint.source_checkpoint import keep
from onward.checkpoint.summary import plain, settings
from onward.errors import ArgumentError, UnsupportedError, first_line, list_names, warn
from onward.importing.capture import capture_model
from onward.importing.groups import own_constants, refuse_unmatched, run_groups, with_optimizer_names, with_slot_names
from onward.importing.recipes import (
    averages_of,
    check_smoothing,
    scaling_of,
    settled_options,
    trained_groups,
    type_of,
    updates_made,
    weights_and_slots,
)
from onward.importing.schedules import schedule_by_updates
from onward.model import Model, load
from onward.options import MissingOptions, with_options
from onward.recipe.exporter_notes import restore
from onward.recipe.spec import Spec, parse
from onward.run_state.problems import Problems
from onward.run_state.state import ParameterGroup, RunState
from onward.run_state.tensors import Tensor, as_initializer
from onward.run_state.training_models import from_training_model, to_training_model
from onward.transform.training import without_steps


@dataclasses.dataclass(frozen=True)
class _Arguments(MissingOptions):
    path: str | os.PathLike[str] | Checkpoint
    like: Model | str | os.PathLike[str] | None = None
    _: dataclasses.KW_ONLY
    module: Any = None
    example_inputs: Any = None
    probe: bool = True


@with_options(_Arguments)
def from_checkpoint(
    path: str | os.PathLike[str] | Checkpoint, like: Model | str | os.PathLike[str] | None = None, **given: Any
) -> Model:
    """Make a training model that continues where a checkpoint of another framework is. Nothing in it is executed.

        training = onward.from_checkpoint("checkpoint-500", "bert.onnx", loss="cross_entropy", clip=1.0)

    What a checkpoint does not tell is given here, or taken from `like` if that is a training model. What it does tell
    must agree with that. A warning names each assumption, such as no gradient clipping where nothing tells of it.

    - `path`: the file or folder, or what `open_checkpoint` returned
    - `like`: the ONNX model that computes what the checkpoint's model does. Not needed where the checkpoint has its
      graph, or a configuration of transformers, or `module` is given
    - `module`: in place of `like`, the nn.Module or LightningModule that was trained; its class, which is called with
      the hyper-parameters that Lightning stores; or where that is, `"package.module:Class"`. Its values do not matter
    - `example_inputs`: what the module takes, as for `from_torch`; a batch, where its `training_step` is the loss
    - `probe`: make a step with `module` and the graph of it, and compare loss and gradients (default: yes). It needs
      memory for the weights several times
    """
    planned = plan_import(path, like, **given)
    made = apply_plan(planned)
    for assumption in planned.assumptions:
        warn(assumption)
    return made


def plan_import(
    path: str | os.PathLike[str] | Checkpoint, like: Model | str | os.PathLike[str] | None = None, **given: Any
) -> Plan:
    """Return what `from_checkpoint` would do, without doing it."""
    said = _Arguments(path, like, **given)
    checkpoint = path if isinstance(path, Checkpoint) else open_checkpoint(path)
    if like is None:
        captured = capture_model(checkpoint, said.module, said.example_inputs, said.loss)
        return plan(checkpoint, captured if said.probe else captured._replace(probe=None), said)
    if said.module is not None:
        raise ArgumentError("both `like` and `module` are given", hint="leave one of them out")
    model = load(like)
    if not model.steps:
        model = model.copy()
        restore(model, unfold=True)
    return plan(checkpoint, Captured(model, None), said)


class Beside:
    """Writes them. The graph is captured once; each checkpoint gives the rest, in which tensors stay where they are.

    - `strict`: a training model that cannot be written ends the training; otherwise it is a warning
    - `options`: of `from_checkpoint`, where checkpoints do not tell all: `loss`, `optimizer`, `schedule`, `clip` ...
    """

    def __init__(self, strict: bool, options: dict[str, Any]):
        self._strict, self._said = strict, MissingOptions(**options)
        self._captured: Captured | None = None
        self._written: dict[Path, Path] = {}

    def write(self, checkpoint: Path, target: Path, module: Any, example: Any, **known: Any) -> None:
        """Write what a checkpoint is, trained by a module that was called with this example.

        Options that are `known` of the training loop count where the user has not given them.
        """
        try:
            self._write(checkpoint, target, module, example, known)
        except Exception as error:  # of any kind: hours of training are worth more than this file
            if self._strict:
                raise
            warn(f"`{target}` was not written: {first_line(error)}")

    def _write(self, checkpoint: Path, target: Path, module: Any, example: Any, known: dict[str, Any]) -> None:
        opened = open_checkpoint(checkpoint)
        if self._captured is None:
            captured = capture_model(opened, module, example, self._said.loss)
            self._captured = captured._replace(probe=None)  # which takes memory that the training may need
        if self._said.schedule is not None:
            known.pop("updates_per_epoch", None)
        said = dataclasses.replace(self._said, **{k: v for k, v in known.items() if getattr(self._said, k) is None})
        apply_plan(plan(opened, self._captured, said)).save(target)
        self._written[target] = checkpoint

    def clear(self) -> None:
        """Remove training models whose checkpoints were removed."""
        for target, checkpoint in list(self._written.items()):
            if not checkpoint.exists():
                target.unlink(missing_ok=True)
                target.with_suffix(".data").unlink(missing_ok=True)
                del self._written[target]


# ---- plans -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Plan:
    """What an import would do."""

    checkpoint: Checkpoint
    """With names for all that its optimizers keep."""
    match: Match
    run: RunState
    """But for the state of optimizers."""
    slots: Mapping[str, Tensor]
    """That state, by the names of a training model."""
    weights: Mapping[str, Tensor]
    """By the names of the graph."""
    notes: tuple[str, ...]
    """How names were found, and what else is not in the options."""
    assumptions: tuple[str, ...]
    """Those of the notes that change numbers where they are wrong."""
    probe: Callable[[Model, Any], None] | None = None
    """Compares the graph, with these weights, with the module that it was captured of."""


def plan(checkpoint: Checkpoint, captured: Captured, said: MissingOptions) -> Plan:
    """Return what an import would do, without doing it."""
    checkpoint = dataclasses.replace(checkpoint, tied={**checkpoint.tied, **captured.tied})
    given = captured.model
    base = from_training_model(given) if given.steps else None
    model = without_steps(given)
    known = said.names if isinstance(said.names, Mapping) else None
    matched = match(checkpoint.tensors, model, known, checkpoint.tied, captured.stored)
    listed_names = None if isinstance(said.names, Mapping) else said.names
    checkpoint, notes = with_optimizer_names(checkpoint, matched, model, base, listed_names, captured.orders)
    refuse_unmatched(checkpoint, matched, own_constants(matched, model, base))
    groups = run_groups(checkpoint, matched, parse(said.optimizer) if said.optimizer is not None else None, base)
    checkpoint = with_slot_names(checkpoint, matched, groups)
    losses = (said.loss, captured.loss, base.loss if base else None, checkpoint.loss)
    loss = next((known for known in losses if known is not None), None)
    if loss is None:
        raise UnsupportedError(
            f"neither `{checkpoint.path}` nor the model says which loss was trained",
            hint="say it: `--loss cross_entropy`, or `loss=...`; or give a training model",
        )
    check_smoothing(checkpoint, loss)
    groups, frozen = trained_groups(checkpoint, matched, groups, given, base, loss, said)
    if checkpoint.waiting:
        raise UnsupportedError(
            f"gradients of {checkpoint.waiting} batches wait for an update in `{checkpoint.path}`, and would be lost",
            hint="save it after an update, which makes use of them",
        )
    recipe, clip, remarks = settled_options(checkpoint, base, groups, said)
    counted = updates_made(checkpoint, matched, groups, said.updates)
    scheduled = schedule_by_updates(checkpoint, matched, groups, base, counted, said)
    groups, step = list(scheduled.groups), scheduled.step
    weights, slots, has_masters = weights_and_slots(checkpoint, matched, model, groups)
    if has_masters is not None:
        recipe["master_weights"] = has_masters
    scaling = scaling_of(checkpoint.scaler)
    is_float16 = any(type_of(model, name) == ir.DataType.FLOAT16 for group in groups for name in group.parameters)
    if scaling is not None and ("loss_scale" in recipe or is_float16):  # other types have exponents enough
        recipe["loss_scale"] = scaling.words
        slots |= scaling.state
    slots |= averages_of(checkpoint, matched, groups, step) if "ema" in recipe else {}
    run = RunState(
        model=model,
        loss=loss,
        groups=groups,
        step=step,
        schedule=scheduled.words,
        clip=clip,
        statistics="sample" if _is_of_pytorch(checkpoint, groups) else base.statistics if base else "population",
        recipe=recipe,
    )
    checkpoint = dataclasses.replace(checkpoint, step=step)
    notes |= frozen | dict(scheduled.notes) | dict.fromkeys([*remarks, *checkpoint.remarks], True)
    said_notes = (*matched.rules, *notes)
    assumptions = tuple(note for note, is_assumed in notes.items() if is_assumed)
    return Plan(checkpoint, matched, run, slots, weights, said_notes, assumptions, captured.probe)


def apply_plan(plan: Plan) -> Model:
    """The training model of a plan."""
    for name, tensor in plan.weights.items():
        value = plan.run.model.graph.initializers[name]
        assert value.const_value is not None
        value.const_value = as_initializer(tensor, name, value.const_value.metadata_props)
    if plan.probe is not None:
        plan.probe(plan.run.model, plan.run.loss)
    made = to_training_model(plan.run)
    problems = Problems("the state of the optimizer")
    for name, tensor in plan.slots.items():
        _fill(made, name, tensor, problems)
    problems.refuse()
    keep(made, plan.checkpoint, plan.match)
    metadata, epoch = made.step().algorithm.metadata_props, plan.checkpoint.progress.get("epoch")
    progress = {**json.loads(metadata["train.progress"]), "step": plan.run.step}
    metadata["train.progress"] = json.dumps({**progress, **({"epoch": epoch} if epoch is not None else {})})
    return made


def _fill(model: Model, name: str, tensor: Tensor, problems: Problems) -> None:
    """Give state of a model its value, which stays where it is unless it is a single number."""
    known = model.step().algorithm.initializers.get(name)
    if known is None or known.const_value is None:
        problems.add(f"the optimizer of a training model does not keep `{name}`", "say which optimizer it is")
        return
    held = known.const_value
    if tuple(held.shape.numpy()) != tensor.shape:
        what = f"`{name}` is {list(tensor.shape)}, not {list(held.shape.numpy())}"
        problems.add(what, "give the model that it is of")
    elif held.dtype.numpy() == tensor.dtype:
        known.const_value = as_initializer(tensor, name, held.metadata_props)
    elif not tensor.shape:
        model.set(name, tensor.array())
    else:
        problems.add(f"`{name}` is {tensor.dtype}, not {held.dtype.numpy()}", "give a model of the type of its weights")


def _is_of_pytorch(checkpoint: Checkpoint, groups: Sequence[ParameterGroup]) -> bool:
    """True if BatchNormalization keeps the variance of samples, whatever the training model `like` keeps."""
    specs = [group.optimizer for group in groups if isinstance(group.optimizer, Spec)]
    variants = {spec.options.get("variant") for spec in specs}  # Lion of PyTorch users is that of optax
    return all(each.variant == "torch" for each in checkpoint.optimizers) and variants <= {"torch", "optax"}


_MOST = 6


def plan_lines(plan: Plan) -> list[tuple[str, str]]:
    """Return what an import would do, as labels and texts."""
    checkpoint, matched, run = plan.checkpoint, plan.match, plan.run
    rows = [
        ("checkpoint", f"{checkpoint.path}, {checkpoint.title}"),
        ("names", f"{len(matched.names)} of {len(checkpoint.tensors)} tensors have their place in the model"),
        *(("", rule) for rule in matched.rules),
        (
            "left out",
            list_names(matched.left, _MOST) and f"{list_names(matched.left, _MOST)}: the model has no place for them",
        ),
        *(("optimizer", f"{group.optimizer}") for group in run.groups[:1]),
        *(("", f"{group.optimizer}") for group in run.groups[1:]),
        ("", f"keeps {len(plan.slots)} tensors of {len(run.parameters)} parameters"),
        ("schedule", ", then ".join(map(str, run.schedule)) or "the rate stays"),
        ("step", f"{run.step}"),
        ("loss", _loss_text(run.loss)),
        ("clipping", settings(run.clip or {})),
        ("further", settings(run.recipe)),
        ("kept", "; ".join(_kept_lines(plan))),
        *(("note", note) for note in plan.notes[len(matched.rules) :]),
    ]
    return [(label, text) for label, text in rows if text]


def plan_json(plan: Plan) -> dict[str, Any]:
    matched, run = plan.match, plan.run
    return {
        "checkpoint": str(plan.checkpoint.path),
        "format": plan.checkpoint.format,
        "names": dict(matched.names),
        "turned": sorted(matched.transposed),
        "rules": list(matched.rules),
        "left": list(matched.left),
        "groups": [{"optimizer": str(each.optimizer), "parameters": list(each.parameters)} for each in run.groups],
        "slots": sorted(plan.slots),
        "schedule": [str(spec) for spec in run.schedule],
        "step": run.step,
        "loss": _loss_text(run.loss),
        "clip": plain(run.clip),
        "recipe": plain(run.recipe),
        "kept": _kept_lines(plan),
        "notes": list(plan.notes[len(matched.rules) :]),
    }


def _loss_text(loss: Any) -> str:
    if isinstance(loss, Mapping):
        return " + ".join(f"{output}={_loss_text(each)}" for output, each in loss.items())
    return " + ".join(map(_loss_text, loss)) if isinstance(loss, list | tuple) else str(loss)


def _kept_lines(plan: Plan) -> list[str]:
    """Return what a training model has no use for, and keeps for a checkpoint of it."""
    checkpoint = plan.checkpoint
    parts = {
        "states of random numbers": checkpoint.randomness,
        "where in its data it is": checkpoint.data,
        "the scale of the loss": checkpoint.scaler and "loss_scale" not in plan.run.recipe,
        "averages": checkpoint.averages,
        "the configuration": checkpoint.configuration,
        "arguments": checkpoint.arguments,
    }
    return [what for what, is_there in parts.items() if is_there]
