"""Checkpoints of other frameworks as training models, with graphs that their frameworks capture."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from onward.checkpoint.embedded import FACT, embed, rounded_types
from onward.checkpoint.exporting import checkpoint_of_model, weights_of
from onward.checkpoint.format import Captured, Checkpoint
from onward.checkpoint.formats import open_checkpoint
from onward.checkpoint.name_matching import Match, match, with_names, with_own_names
from onward.checkpoint.pytorch.contents import ADAPTER, of_module
from onward.checkpoint.pytree.train_states import LEAVES, with_names_of
from onward.checkpoint.summary import plain, settings
from onward.errors import ArgumentError, UnsupportedError, first_line, list_names, warn
from onward.importing.capture import capture_model, has_model, of_adapters, orders_of_configuration
from onward.importing.groups import (
    own_constants,
    refuse_unmatched,
    run_groups,
    with_module,
    with_optimizer_names,
    with_slot_names,
)
from onward.importing.recipes import (
    averages_of,
    check_smoothing,
    scaling_of,
    settled_options,
    trained_groups,
    type_of,
    updates_made,
    weights_and_slots,
    widened,
)
from onward.importing.schedules import schedule_by_updates
from onward.importing.structure import by_shape, by_structure
from onward.inspect import describe
from onward.model import Model, load
from onward.options import MissingOptions, with_options
from onward.recipe.exporter_notes import restore
from onward.recipe.spec import Spec, parse
from onward.run_state.problems import Problems
from onward.run_state.state import ParameterGroup, RunState
from onward.run_state.tensors import Tensor, as_initializer, as_tensor
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
    match: Literal["names", "structure"] = "names"


@with_options(_Arguments)
def from_checkpoint(
    path: str | os.PathLike[str] | Checkpoint, like: Model | str | os.PathLike[str] | None = None, **options: Any
) -> Model:
    """Make a training model that continues a checkpoint of another framework. Nothing in it is
    executed.

        training = onward.from_checkpoint("checkpoint-500", "bert.onnx", loss="cross_entropy",
        clip=1.0)

    Facts that the checkpoint lacks come from options, or from `like` if that is a training model.
    Facts that it has must agree with these. A warning names each assumption, such as no gradient
    clipping.

    - `path`: the file or folder, or a result of `open_checkpoint`
    - `like`: the ONNX model of the checkpoint. Optional if the checkpoint has its graph or a
      configuration of transformers, or with `module`
    - `module`: in place of `like`, the nn.Module or LightningModule that was trained, with any
      values; or its class or `"package.module:Class"`, called with the hyper-parameters that
      Lightning stores. A name without a colon is one of several modules in the checkpoint:
      `"generator"`
    - `example_inputs`: inputs of the module, as for `from_torch`; a batch if `training_step` is the
      loss
    - `probe`: compare loss and gradients of `module` and its graph in one step (default: yes). This
      needs memory for several copies of the weights
    - `match`: `"structure"` if names do not fit: weights are matched by what they compute in the
      graph of the checkpoint (another .onnx file, a `.keras` file, a configuration, or `module`)
      and in `like`, and outputs are compared. Without optimizer, the result is an inference model
    """
    planned = plan_import(path, like, **options)
    training = apply_plan(planned)
    for assumption in planned.assumptions:
        warn(assumption)
    return training


def plan_import(
    path: str | os.PathLike[str] | Checkpoint, like: Model | str | os.PathLike[str] | None = None, **options: Any
) -> ImportPlan:
    """Return the plan of `from_checkpoint`, without executing it."""
    arguments = _Arguments(path, like, **options)
    if arguments.match == "structure":
        return _plan_by_structure(arguments)
    checkpoint = path if isinstance(path, Checkpoint) else open_checkpoint(path)
    name = arguments.module if isinstance(arguments.module, str) and ":" not in arguments.module else None
    if name is not None:
        checkpoint, arguments = of_module(checkpoint, name), dataclasses.replace(arguments, module=None)
    if like is None:
        captured = capture_model(checkpoint, arguments.module, arguments.example_inputs, arguments.loss)
        return plan(checkpoint, captured if arguments.probe else captured._replace(probe=None), arguments)
    if arguments.module is not None:
        raise ArgumentError("both `like` and `module` are given", hint="omit one of them")
    model = _restored(like)
    captured = of_adapters(checkpoint, model) if ADAPTER in checkpoint.trees else Captured(model, None)
    return plan(checkpoint, captured, arguments)


def _restored(source: Model | str | os.PathLike[str]) -> Model:
    """Return a model with the parameters of its module, which exporters may have folded."""
    model = load(source)
    if not model.steps:
        model = model.copy()
        restore(model, unfold=True)
    return model


def _plan_by_structure(arguments: _Arguments) -> ImportPlan:
    """Return the plan of an import from a graph to another one that computes the same under other names."""
    if arguments.like is None:
        raise ArgumentError("`match` has no effect without `like`", hint="give the model: `--like model.onnx`")
    like, path = _restored(arguments.like), arguments.path
    if not isinstance(path, Checkpoint) and os.fspath(path).endswith(".onnx"):
        source = _restored(path).copy()
        for step in source.steps:
            step.algorithm.metadata_props.pop(FACT, None)  # which has other names
        checkpoint = checkpoint_of_model(source) if source.steps else weights_of(source)
        loss = from_training_model(source).loss if source.steps else None
    else:
        checkpoint = path if isinstance(path, Checkpoint) else open_checkpoint(path)
        if arguments.module is None and not has_model(checkpoint):
            names = by_shape(checkpoint.tensors, without_steps(like))
            note = f"{len(names)} tensors are matched by shapes that occur once; outputs could not be compared"
            checkpoint = dataclasses.replace(checkpoint, remarks=(*checkpoint.remarks, note))
            return _plan(checkpoint, like, dataclasses.replace(arguments, names=names))
        captured = capture_model(checkpoint, arguments.module, arguments.example_inputs, arguments.loss or "mse")
        named = _named(checkpoint, captured, arguments, weights_only=not checkpoint.optimizers)
        source, checkpoint = captured.model, _in_graph_names(named)
        loss = named.base.loss if named.base else None
    checkpoint = dataclasses.replace(checkpoint, loss=checkpoint.loss or loss)
    checkpoint = by_structure(checkpoint, without_steps(source), without_steps(like))
    return _plan(checkpoint, like, dataclasses.replace(arguments, names=None))


def _plan(checkpoint: Checkpoint, like: Model, options: MissingOptions) -> ImportPlan:
    """Return the plan of an import, of weights alone if nothing has an optimizer."""
    in_nodes = {weight.name for weight in describe(like).weights if weight.name not in like.graph.initializers}
    captured = Captured(like, None, frozen=frozenset(in_nodes))
    if checkpoint.optimizers or like.steps or options.optimizer is not None:
        return plan(checkpoint, captured, options)
    named = _named(checkpoint, captured, options, weights_only=True)
    tensors = _in_graph_names(named).tensors
    notes = tuple(checkpoint.remarks)
    return ImportPlan(checkpoint, named.match, RunState(like, None, ()), {}, tensors, notes, assumptions=notes)


def with_weights(
    model: Model | str | os.PathLike[str], path: str | os.PathLike[str], names: Any = None
) -> tuple[Model, list[str]]:
    """Return an inference model with the weights of a checkpoint or file, and the rules that matched their names."""
    model, checkpoint = load(model).copy(), open_checkpoint(path)
    if model.steps:
        raise ArgumentError("the model already carries its training", hint="strip it first: `onward strip`")
    restore(model, unfold=True)
    checkpoint = with_names_of(checkpoint, weights_of(model)) if checkpoint.format == LEAVES else checkpoint
    checkpoint = with_module(checkpoint, model)
    matched = match(checkpoint.tensors, model, names if isinstance(names, Mapping) else None, checkpoint.tied)
    refuse_unmatched(checkpoint, matched, model, set())
    for theirs, ours in matched.names.items():
        value, tensor = model.graph.initializers[ours], matched.orient(theirs, checkpoint.tensors[theirs])
        assert value.const_value is not None
        dtype = value.const_value.dtype.numpy()
        if tensor.dtype != dtype:
            tensor = as_tensor(_widen(ours, tensor, dtype))
        value.const_value = as_initializer(tensor, ours, value.const_value.metadata_props)
    return model, [f"weights of {len(matched.names)} tensors are from {checkpoint.path}", *matched.rules]


def _widen(name: str, tensor: Tensor, dtype: np.dtype) -> np.ndarray:
    """Return the values in another type, if it holds all of them exactly."""
    array = tensor.array()
    widened = array.astype(dtype)
    if not np.array_equal(widened.astype(array.dtype), array, equal_nan=True):
        raise UnsupportedError(
            f"`{name}` is {tensor.dtype}, which {dtype} cannot hold exactly",
            hint=f"export the model in {tensor.dtype}",
        )
    return widened


def with_parameter_names(source: Path | Checkpoint, like: Path | None) -> Checkpoint:
    """Return a checkpoint whose optimizers know their parameters by name.

    Their order comes from the model `like`, or from the configuration of the checkpoint.
    """
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    if checkpoint.has_names:
        return checkpoint
    if like is not None:
        whole = load(like)
        model, base = without_steps(whole), from_training_model(whole) if whole.steps else None
        if base is None:
            restore(model, unfold=True)
        matched = match(checkpoint.tensors, model, None, checkpoint.tied)
        return with_optimizer_names(checkpoint, matched, model, base, {}, MissingOptions())[0]
    orders = orders_of_configuration(checkpoint)
    shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
    optimizers = [with_names(optimizer, orders, shapes)[0] for optimizer in checkpoint.optimizers] if orders else ()
    return dataclasses.replace(checkpoint, optimizers=tuple(optimizers)) if orders else with_own_names(checkpoint)


class TrainingModelWriter:
    """Writer of training models beside checkpoints. The graph is captured once.

    - `strict`: True if a training model that cannot be written ends the training, instead of a
      warning
    - `options`: of `from_checkpoint`, for facts that checkpoints lack: `loss`, `optimizer`,
      `schedule` ...
    """

    def __init__(self, strict: bool, options: dict[str, Any]):
        self._strict, self._options = strict, MissingOptions(**options)
        self._captured: Captured | None = None
        self._written: dict[Path, Path] = {}

    def write(self, checkpoint: Path, target: Path, module: Any, example: Any, **loop_options: Any) -> None:
        """Write the training model of a checkpoint.

        `example` is an input of the module. Options of the training loop apply unless the user set
        them.
        """
        try:
            self._write(checkpoint, target, module, example, loop_options)
        except Exception as error:  # any: hours of training are worth more than this file
            if self._strict:
                raise
            warn(f"`{target}` was not written: {first_line(error)}")

    def _write(self, checkpoint: Path, target: Path, module: Any, example: Any, loop_options: dict[str, Any]) -> None:
        opened = open_checkpoint(checkpoint)
        if self._captured is None:
            captured = capture_model(opened, module, example, self._options.loss)
            self._captured = captured._replace(probe=None)  # it takes memory that the training may need
        if self._options.schedule is not None:
            loop_options.pop("updates_per_epoch", None)
        unset = {k: v for k, v in loop_options.items() if getattr(self._options, k) is None}
        options = dataclasses.replace(self._options, **unset)
        apply_plan(plan(opened, self._captured, options)).save(target)
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
class ImportPlan:
    """Plan of an import."""

    checkpoint: Checkpoint
    """Checkpoint with names for its optimizer state."""
    match: Match
    run: RunState
    """Run without optimizer state."""
    slots: Mapping[str, Tensor]
    """Optimizer state, by names of a training model."""
    weights: Mapping[str, Tensor]
    """Weights, by names of the graph."""
    notes: tuple[str, ...]
    assumptions: tuple[str, ...]
    """Notes on assumptions, which change numbers if they are wrong."""
    probe: Callable[[Model, Any], None] | None = None
    """Compares the graph and these weights with the module that it was captured from."""


@dataclasses.dataclass(frozen=True)
class _Named:
    """A checkpoint with names for its optimizer state, and its match with a graph."""

    checkpoint: Checkpoint
    match: Match
    model: Model
    base: RunState | None
    groups: list[ParameterGroup]
    notes: dict[str, bool]


def _in_graph_names(named: _Named) -> Checkpoint:
    """Return a checkpoint with the names and orientations of its graph."""
    checkpoint, names, orient = named.checkpoint, named.match.names, named.match.orient

    def oriented(tensors: Mapping[Any, Any]) -> dict[str, Any]:
        return {names[n]: orient(n, x) if isinstance(x, Tensor) else x for n, x in tensors.items() if n in names}

    optimizers = []
    for optimizer in checkpoint.optimizers:
        groups = tuple(
            dataclasses.replace(group, parameters=tuple(names[name] for name in group.parameters if name in names))
            for group in optimizer.groups
        )
        slots: dict[str | int, dict[str, Any]] = {
            names[str(name)]: {slot: orient(name, x) if isinstance(x, Tensor) else x for slot, x in values.items()}
            for name, values in optimizer.slots.items()
            if name in names
        }
        optimizers.append(dataclasses.replace(optimizer, groups=groups, slots=slots))
    return dataclasses.replace(
        checkpoint,
        tensors=oriented(checkpoint.tensors),
        averages=oriented(checkpoint.averages),
        optimizers=tuple(optimizers),
        remarks=(*checkpoint.remarks, *named.notes),
    )


def _named(
    checkpoint: Checkpoint, captured: Captured, options: MissingOptions, *, weights_only: bool = False
) -> _Named:
    """Match a checkpoint with a graph by names, and name its optimizer state."""
    checkpoint = dataclasses.replace(checkpoint, tied={**checkpoint.tied, **captured.tied})
    source = captured.model
    if checkpoint.format == LEAVES:
        checkpoint = with_names_of(checkpoint, checkpoint_of_model(source) if source.steps else weights_of(source))
    checkpoint = checkpoint if checkpoint.module else with_module(checkpoint, source)
    base = from_training_model(source) if source.steps else None
    model = without_steps(source)
    pairs = options.names if isinstance(options.names, Mapping) else None
    matched = match(checkpoint.tensors, model, pairs, checkpoint.tied, captured.stored)
    constants = own_constants(matched, model, base) | captured.frozen
    try:
        checkpoint, notes = with_optimizer_names(checkpoint, matched, model, base, captured.orders, options)
    except UnsupportedError:
        refuse_unmatched(checkpoint, matched, model, constants, is_numbered=True)
        raise
    refuse_unmatched(checkpoint, matched, model, constants)
    optimizer = parse(options.optimizer) if options.optimizer is not None else None
    groups = [] if weights_only else run_groups(checkpoint, matched, optimizer, base)
    return _Named(with_slot_names(checkpoint, matched, groups), matched, model, base, groups, notes)


def plan(checkpoint: Checkpoint, captured: Captured, options: MissingOptions) -> ImportPlan:
    """Return the plan of an import, without executing it."""
    named = _named(checkpoint, captured, options)
    checkpoint, matched, model, base, groups = named.checkpoint, named.match, named.model, named.base, named.groups
    notes, source = named.notes, captured.model
    losses = (options.loss, captured.loss, base.loss if base else None, checkpoint.loss)
    loss = next((loss for loss in losses if loss is not None), None)
    if loss is None:
        raise UnsupportedError(
            f"neither `{checkpoint.path}` nor the model names the loss",
            hint="set `--loss cross_entropy` (`loss=...`), or give a training model",
        )
    check_smoothing(checkpoint, loss)
    groups, frozen = trained_groups(checkpoint, matched, groups, source, base, loss, options)
    if checkpoint.waiting:
        raise UnsupportedError(
            f"gradients of {checkpoint.waiting} batches wait for an update in `{checkpoint.path}`",
            hint="save it after an update: they would be lost",
        )
    recipe, clip, remarks = settled_options(checkpoint, base, groups, options)
    counted = updates_made(checkpoint, matched, groups, options.updates)
    scheduled = schedule_by_updates(checkpoint, matched, groups, base, counted, options)
    groups, step = list(scheduled.groups), scheduled.step
    weights, slots, has_masters = weights_and_slots(checkpoint, matched, model, groups)
    if has_masters is not None:
        recipe["master_weights"] = has_masters
    scaling = scaling_of(checkpoint.scaler)
    is_float16 = any(type_of(model, name) == ir.DataType.FLOAT16 for group in groups for name in group.parameters)
    if scaling is not None and ("loss_scale" in recipe or is_float16):  # other types have enough exponent bits
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
    if rounded := rounded_types(checkpoint, {theirs: weights[ours].dtype for theirs, ours in matched.names.items()}):
        notes[f"its weights are {rounded}, and continue in the type of the model"] = True
    notes |= frozen | dict(scheduled.notes) | dict.fromkeys([*remarks, *checkpoint.remarks], True)
    assumptions = tuple(note for note, is_assumed in notes.items() if is_assumed)
    return ImportPlan(checkpoint, matched, run, slots, weights, tuple(notes), assumptions, captured.probe)


def apply_plan(plan: ImportPlan) -> Model:
    """Return the training model of a plan."""
    for name, tensor in plan.weights.items():
        value = plan.run.model.graph.initializers[name]
        assert value.const_value is not None
        value.const_value = as_initializer(tensor, name, value.const_value.metadata_props)
    if plan.probe is not None:
        plan.probe(plan.run.model, plan.run.loss)
    if plan.run.loss is None:
        return plan.run.model
    training = to_training_model(plan.run)
    problems = Problems("the state of the optimizer")
    for name, tensor in plan.slots.items():
        _set_state(training, name, tensor, problems)
    problems.refuse()
    embed(training, plan.checkpoint, plan.match)
    metadata, epoch = training.step().algorithm.metadata_props, plan.checkpoint.progress.get("epoch")
    progress = {"step": plan.run.step, **({"epoch": epoch} if epoch is not None else {})}
    metadata["train.progress"] = json.dumps({**json.loads(metadata["train.progress"]), **progress})
    return training


def _set_state(model: Model, name: str, tensor: Tensor, problems: Problems) -> None:
    """Set state of a model. Tensors stay on disk, single numbers do not."""
    state = model.step().algorithm.initializers.get(name)
    if state is None or state.const_value is None:
        problems.add(f"the optimizer of the training model has no `{name}`", "set `optimizer=...`")
        return
    initial = state.const_value
    if tuple(initial.shape.numpy()) != tensor.shape:
        problem = f"`{name}` is {list(tensor.shape)}, not {list(initial.shape.numpy())}"
        problems.add(problem, "give the model of the checkpoint")
    elif tensor.shape or initial.dtype.numpy() == tensor.dtype:
        state.const_value = as_initializer(widened(name, tensor, initial.dtype.numpy()), name, initial.metadata_props)
    else:
        model.set(name, tensor.array())


def _is_of_pytorch(checkpoint: Checkpoint, groups: Sequence[ParameterGroup]) -> bool:
    """True if BatchNormalization stores the sample variance, as in PyTorch."""
    specs = [group.optimizer for group in groups if isinstance(group.optimizer, Spec)]
    variants = {spec.options.get("variant") for spec in specs}  # PyTorch users take Lion from optax
    return all(optimizer.variant == "torch" for optimizer in checkpoint.optimizers) and variants <= {
        "torch",
        "optax",
        "transformers",
    }


_MOST = 6


def plan_lines(plan: ImportPlan) -> list[tuple[str, str]]:
    """Return a plan as labels and texts."""
    checkpoint, matched, run = plan.checkpoint, plan.match, plan.run
    rows = [
        ("checkpoint", f"{checkpoint.path}, {checkpoint.title}"),
        ("names", f"{len(matched.names)} of {len(checkpoint.tensors)} tensors are in the model"),
        *(("", rule) for rule in matched.rules),
        ("left out", f"{list_names(matched.left, _MOST)}: not in the model" if matched.left else ""),
        *(("" if i else "optimizer", f"{group.optimizer}") for i, group in enumerate(run.groups)),
        ("", f"keeps {len(plan.slots)} tensors of {len(run.parameters)} parameters" * bool(run.groups)),
        ("schedule", ", then ".join(map(str, run.schedule)) or "the rate stays" * bool(run.groups)),
        ("step", f"{run.step}" * bool(run.groups)),
        ("loss", "" if run.loss is None else _loss_text(run.loss)),
        ("clipping", settings(run.clip or {})),
        ("further", settings(run.recipe)),
        ("kept", "; ".join(_kept_lines(plan))),
        *(("note", note) for note in plan.notes),
    ]
    return [(label, text) for label, text in rows if text]


def plan_json(plan: ImportPlan) -> dict[str, Any]:
    """Return a plan as JSON."""
    matched, run = plan.match, plan.run
    return {
        "checkpoint": str(plan.checkpoint.path),
        "format": plan.checkpoint.format,
        "names": dict(matched.names),
        "turned": sorted(matched.transposed),
        "rules": list(matched.rules),
        "left": list(matched.left),
        "groups": [{"optimizer": str(group.optimizer), "parameters": list(group.parameters)} for group in run.groups],
        "slots": sorted(plan.slots),
        "schedule": [str(spec) for spec in run.schedule],
        "step": run.step,
        "loss": _loss_text(run.loss),
        "clip": plain(run.clip),
        "recipe": plain(run.recipe),
        "kept": _kept_lines(plan),
        "notes": list(plan.notes),
    }


def _loss_text(loss: Any) -> str:
    if isinstance(loss, Mapping):
        return " + ".join(f"{output}={_loss_text(term)}" for output, term in loss.items())
    return " + ".join(map(_loss_text, loss)) if isinstance(loss, list | tuple) else str(loss)


def _kept_lines(plan: ImportPlan) -> list[str]:
    """Return the parts of a checkpoint that a training model stores without use."""
    checkpoint = plan.checkpoint
    parts = {
        "states of random numbers": checkpoint.randomness,
        "the position in its data": checkpoint.data,
        "the scale of the loss": checkpoint.scaler and "loss_scale" not in plan.run.recipe,
        "averages": checkpoint.averages,
        "the configuration": checkpoint.configuration,
        "arguments": checkpoint.arguments,
    }
    return [label for label, is_stored in parts.items() if is_stored]
