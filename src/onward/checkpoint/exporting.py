"""Training models written as checkpoints, in the format that they came from or in another."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np

from onward.arguments import checked
from onward.checkpoint.embedded import embedded_checkpoint, rounded_types
from onward.checkpoint.format import Checkpoint, Format
from onward.checkpoint.formats import FORMATS, open_either, writable
from onward.checkpoint.name_matching import Match, pair_names, with_own_names
from onward.checkpoint.pytorch.contents import UPDATES, of_module, states_of
from onward.checkpoint.pytorch.contents import step_of as step_of_progress
from onward.checkpoint.pytorch.state_dicts import advance_counter, advance_state, state_of
from onward.errors import (
    ArgumentError,
    Error,
    UnknownNameError,
    UnsupportedError,
    default_hint,
    list_names,
    suggest,
    warn,
)
from onward.inspect import describe
from onward.model import Model
from onward.model.state import states
from onward.model.storage.files import announce
from onward.model.storage.transaction import replacing
from onward.recipe.spec import Spec
from onward.run_state.standard_steps import adopt
from onward.run_state.state import COUNT, MASTER, OptimizerState, ParameterGroup, RunState, SchedulerState
from onward.run_state.tensors import ModelTensor, Tensor, as_tensor, convert_dtype
from onward.run_state.training_models import from_training_model, step_of


@checked()
def to_checkpoint(
    training: Model | Checkpoint | str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    format: str,
    dtype: Literal["float32", "float16", "bfloat16"] | None = None,
) -> Path:
    """Write a checkpoint that a framework can resume; return its path.

    It is read back and compared before it replaces anything. If that fails, nothing is written.

        onward.to_checkpoint("training.onnx", "checkpoint-500", format="hf")

    - `training`: a training model, or a checkpoint of any format
    - `path`: the file or folder
    - `format`: such as `"hf"`, `"dcp"`, `"deepspeed"` or `"orbax"`; `"hf-model"` and
      `"safetensors"` hold weights alone
    - `dtype`: the type of floating-point weights, for a format that holds weights alone
    """
    chosen = format_named(format)
    source = open_either(training)
    checkpoint = source if isinstance(source, Checkpoint) else checkpoint_of_model(source)
    if isinstance(source, Model) and checkpoint.waiting:
        raise UnsupportedError(
            f"{checkpoint.waiting} of {checkpoint.accumulate} batches wait for an update, and would be lost",
            hint=f"train until a multiple of {checkpoint.accumulate} batches is done",
        )
    if checkpoint.format != chosen.name and (own := checkpoint.own_optimizers) != checkpoint.optimizers:
        warn(f"only `{checkpoint.module}` and its optimizer are written; `{checkpoint.path}` has other modules")
        checkpoint = dataclasses.replace(checkpoint, optimizers=own, schedules=checkpoint.own_schedules)
    if (
        isinstance(source, Checkpoint)
        and checkpoint.format != chosen.name
        and len(modules := states_of(checkpoint)) > 1
    ):
        if len(checkpoint.optimizers) > 1 and chosen.keeps_optimizers:
            raise UnsupportedError(
                f"`{checkpoint.path}` holds {len(modules)} modules and {len(checkpoint.optimizers)} optimizers",
                hint=f"make a training model of one: `--like model.onnx --module {modules[0]}`; or write weights "
                "alone: `--to safetensors`",
            )
        if not checkpoint.module:
            warn(f"only `{modules[0]}` is written, of {list_names(modules, 8)} (`--module`)")
    if dtype is not None:
        checkpoint = _in_type(checkpoint, dtype, chosen)
    if chosen.needs_names:
        checkpoint = with_own_names(checkpoint)
    if checkpoint.step is None and any(schedule.position for schedule in checkpoint.schedules) and format in _WITH_STEP:
        warn(f"`{checkpoint.path}` does not count its updates, and `{format}` gets step 0")
    if checkpoint.format != chosen.name:
        # PyTorch numbers parameters in the order of the module. Keras, TensorFlow and JAX go by
        # names, in any order.
        order = {name: at for at, name in enumerate(checkpoint.tensors)}
        optimizers = (
            optimizer if optimizer.variant == "torch" or not optimizer.has_names else _sorted(optimizer, order)
            for optimizer in checkpoint.optimizers
        )
        checkpoint = dataclasses.replace(checkpoint, optimizers=tuple(optimizers))
    target = Path(path)
    assert chosen.write is not None
    slots = [tensor for optimizer in checkpoint.optimizers for tensor in optimizer.tensors if chosen.keeps_optimizers]
    announce(sum(tensor.nbytes for tensor in (*checkpoint.tensors.values(), *slots)))
    advice = f"`{format}` cannot hold all of this checkpoint: write another format, such as `dcp`"
    with replacing(target if chosen.is_folder else target.parent, target) as folder, default_hint(advice):
        written = folder if chosen.is_folder else folder / target.name
        chosen.write(checkpoint, written)
        lost = verify_written(checkpoint, written, chosen)
    if lost:
        warn(f"`{chosen.name}` does not hold: {', '.join(lost)}")
    return target


def _in_type(checkpoint: Checkpoint, dtype: str, format: Format) -> Checkpoint:
    """Return a checkpoint with its floating-point weights in a type, which its configuration names."""
    if format.keeps_optimizers:
        raise ArgumentError(
            f"`dtype` is for weights alone, and `{format.name}` holds the optimizer, too",
            hint='write `"hf-model"` or `"safetensors"`: `--to hf-model --dtype bfloat16`',
        )
    target = np.dtype({"bfloat16": ml_dtypes.bfloat16}.get(dtype, dtype))
    tensors = {
        name: tensor if tensor.dtype.kind in "biu" else convert_dtype(tensor, target)
        for name, tensor in checkpoint.tensors.items()
    }
    keys = [key for key in ("dtype", "torch_dtype") if key in checkpoint.configuration] or ["dtype"]
    configuration = {**checkpoint.configuration, **dict.fromkeys(keys, dtype)} if checkpoint.configuration else {}
    return dataclasses.replace(checkpoint, tensors=tensors, configuration=configuration)


_WITH_STEP = ("hf", "lightning", "deepspeed", "megatron", "orbax", "flax", "tensorflow")
"""Formats with a counter of updates, from which a resumed run continues."""


def _sorted(optimizer: OptimizerState, order: Mapping[Any, int]) -> OptimizerState:
    """Return an optimizer whose groups list their parameters in an order; others come last."""
    groups = (
        dataclasses.replace(group, parameters=tuple(sorted(group.parameters, key=lambda n: order.get(n, len(order)))))
        for group in optimizer.groups
    )
    return dataclasses.replace(optimizer, groups=tuple(groups))


def format_named(name: str) -> Format:
    """Return the format with a name, if it can be written."""
    formats = writable()
    if name not in formats:
        hint = suggest(name, formats) or f"use one of {', '.join(formats)}"
        raise UnknownNameError(f"cannot write the format `{name}`", hint=hint)
    return formats[name]


def checkpoint_of_model(model: Model) -> Checkpoint:
    """Return a training model as a checkpoint, with the current numbers in what it was made of."""
    model = adopt(model)
    run = from_training_model(model, step_of(model))
    # Checkpoints have no words for an optimizer that is a function.
    named = [dataclasses.replace(group, optimizer=None) if group.is_function else group for group in run.groups]
    origin = embedded_checkpoint(model)
    if origin is None:
        families = tuple(dict.fromkeys(group.optimizer_name for group in named if group.optimizer))
        optimizer = OptimizerState(families, tuple(named), _slots(model, run.step, Match({})))
        order = {name: at for at, name in enumerate(model.graph.initializers)}
        checkpoint = dataclasses.replace(
            weights_of(model),
            title="ONNX training model",
            optimizers=(_sorted(optimizer, order),),
            schedules=_schedules(run, ()),
            progress={"step": run.step},
            averages={name: tensor for name, _, tensor in _state_tensors(model, Match({}), "ema")},
        )
    else:
        before, matched = origin
        types = {name: tensor.dtype for name, tensor in weights_of(model).tensors.items()}
        types = {theirs: types[ours] for theirs, ours in matched.names.items() if ours in types}
        if rounded := rounded_types(before, types):
            warn(f"weights are rounded to {rounded}, as `{before.path}` stores them")
        slots, since = _slots(model, run.step, matched), run.step - (before.step or 0)
        averages = {name: tensor for name, _, tensor in _state_tensors(model, matched, "ema")}
        checkpoint = dataclasses.replace(
            before,
            files=_remaining_files(before),
            optimizers=tuple(_continue_optimizer(optimizer, named, slots, matched) for optimizer in before.optimizers),
            schedules=_continue_schedules(run, before),
            tensors={name: advance_counter(name, tensor, since) for name, tensor in before.tensors.items()},
            averages=before.averages or averages,
            since=since,
            progress=_progress(before.progress, before.step, run.step),
        )
    return dataclasses.replace(
        checkpoint,
        step=run.step,
        clip=run.clip or {},
        accumulate=run.accumulate,
        waiting=run.waiting,
        average_decay=run.average_decay,
    )


def _remaining_files(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return files beside the checkpoint that a model says it was made of."""
    format = next((other for other in FORMATS if other.name == checkpoint.format), None)
    if not checkpoint.files or format is None or not format.matches(checkpoint.path):
        return ()
    stored_files = format.read(checkpoint.path).files
    return tuple(name for name in checkpoint.files if name in stored_files)


def weights_of(model: Model) -> Checkpoint:
    """Return the weights of a model without training."""
    weights = {weight.name for weight in describe(model).weights if weight.role != "constant"}
    tensors = {
        name: ModelTensor(initializer.const_value)
        for name, initializer in model.graph.initializers.items()
        if name in weights and initializer.const_value is not None
    }
    path = model.path or Path("model.onnx")
    return Checkpoint(path=path, format="onnx", title="ONNX model", tensors=tensors, keeps_order=True)


def _state_tensors(model: Model, matched: Match, *roles: str) -> Iterator[tuple[str, str | None, Tensor]]:
    """Return parameter, slot and tensor of the state with these roles."""
    for state in states(model):
        if state.role in roles and state.parameter and state.value.const_value is not None:
            name = matched.theirs.get(state.parameter, state.parameter)
            yield name, state.slot, matched.orient(name, ModelTensor(state.value.const_value))


def _slots(model: Model, step: int, matched: Match) -> dict[str | int, Mapping[str, Any]]:
    """Return optimizer state, by the names of the checkpoint."""
    slots: dict[str | int, dict[str, Any]] = {}
    for name, slot, tensor in _state_tensors(model, matched, "optimizer_state", "master"):
        if not slot:
            continue
        if not tensor.shape and tensor.dtype == np.float64:
            tensor = convert_dtype(tensor, np.dtype(np.float32))  # as frameworks keep single numbers
        slots.setdefault(name, {COUNT: step})[slot] = tensor
    return dict(slots) if step else {}


def _continue_optimizer(
    before: OptimizerState,
    groups_now: Sequence[ParameterGroup],
    slots: Mapping[str | int, Mapping[str, Any]],
    matched: Match,
) -> OptimizerState:
    """Return an optimizer of the checkpoint with current numbers."""
    now = {name: group for group in groups_now for name in group.parameters}
    groups = []
    for group in before.groups:
        graph_names = (matched.names.get(str(name), "") for name in group.parameters)
        graph_name = next((name for name in graph_names if name in now), "")  # others are frozen
        current = now.get(graph_name, group)
        groups.append(dataclasses.replace(group, optimizer=current.optimizer, rate=current.rate))
    parameters = {name for group in before.groups for name in group.parameters}
    new_slots = {name: {**before.slots.get(name, {}), **values} for name, values in slots.items() if name in parameters}
    return dataclasses.replace(before, groups=tuple(groups), slots={**before.slots, **new_slots})


def _continue_schedules(run: RunState, before: Checkpoint) -> tuple[SchedulerState, ...]:
    """Return the schedules of a checkpoint with those of its module at their present positions."""
    own = before.own_schedules
    if own == before.schedules:
        return _schedules(run, own)
    renewed = iter(_schedules(run, own))
    return tuple(next(renewed) if schedule in own else schedule for schedule in before.schedules)


def _schedules(run: RunState, before: Sequence[SchedulerState]) -> tuple[SchedulerState, ...]:
    """Return the schedule at its present position, with the stored state of earlier ones."""
    if not run.schedule and not before:
        return ()
    units = {int(spec.options.get("every", 1)) for spec in run.schedule}
    every = units.pop() if len(units) == 1 else 1
    position = run.step // every
    words = tuple(run.schedule)
    if every != 1:  # by steps of the scheduler, where they were by updates
        ends = [{"until": spec.options["until"] / every} if "until" in spec.options else {} for spec in words]
        words = tuple(
            Spec(spec.name, {**spec.without("every").options, **end}) for spec, end in zip(words, ends, strict=True)
        )
    bases = [group.lr for group in run.groups]
    present = [base if group.rate is None else group.rate for group, base in zip(run.groups, bases, strict=True)]
    schedules = []
    for schedule in before or (None,):
        if schedule is not None and (
            schedule.words is not None or "last_step" in schedule.state or "param_group_field" in schedule.state
        ):  # else the training model has another
            state = advance_state(schedule.state, present, position)
            schedules.append(SchedulerState(state, schedule.words, position, every))
        else:
            schedules.append(SchedulerState(state_of(words, bases, present, position), words, position, every))
    return tuple(schedules)


def _progress(progress: Mapping[str, Any], before: int | None, now: int) -> dict[str, Any]:
    """Return counters of updates at their new value, and epochs in proportion."""
    counters = dict(progress)
    for name in UPDATES:
        if isinstance(counters.get(name), int):  # it may count from another start than the optimizer
            counters[name] += now - (before or 0)
    if before and now != before and isinstance(counters.get("epoch"), float):
        counters["epoch"] *= now / before
    return counters


_MOST_TENSORS, _MOST_BYTES = 64, 16 << 20
"""Number of tensors whose elements are compared, and bytes of each; names and shapes of all are."""

Pairs = Iterable[tuple[str, Tensor, Tensor | None]]
"""Names, tensors to write, and tensors that were read back."""


def verify_written(checkpoint: Checkpoint, path: Path, format: Format) -> tuple[str, ...]:
    """Raise an UnsupportedError for a lost tensor, slot or step; return other lost parts."""
    try:
        reread = format.read(path)
        if checkpoint.module and checkpoint.format == format.name:
            reread = of_module(reread, checkpoint.module)
    except Error as error:
        raise UnsupportedError(f"`{format.name}` could not be read back: {error.message}", hint=error.hint) from error
    names = pair_names(checkpoint, reread, [], shared=True)
    _compare(format, "tensor", _tensor_pairs(checkpoint, reread, names))
    if format.keeps_optimizers:
        _compare(format, "optimizer state", _slot_pairs(checkpoint, reread, names))
    counts = (checkpoint.step, step_of_progress(checkpoint.progress, ()))  # Lightning counts steps of all optimizers
    if checkpoint.step and reread.step and reread.step not in counts:
        raise UnsupportedError(f"`{format.name}` would hold step {reread.step} in place of {checkpoint.step}")
    survives = {
        "optimizer": bool(reread.optimizers or not checkpoint.optimizers),
        "schedule": not any(schedule.words for schedule in checkpoint.schedules)
        or any(schedule.words for schedule in reread.schedules),
        "averages": bool(reread.averages or not checkpoint.averages),
        "loss scale": bool(reread.scaler or not checkpoint.scaler),
        "clipping": bool(reread.clip or not checkpoint.clip),
        "random states": bool(reread.randomness or not checkpoint.randomness),
    }
    return tuple(name for name, is_kept in survives.items() if not is_kept)


def _compare(format: Format, role: str, pairs: Pairs) -> None:
    pairs = list(pairs)
    if lost := [name for name, _, other in pairs if other is None]:
        raise UnsupportedError(f"`{format.name}` would lose the {role} {list_names(lost, 3)}")
    complete = [(name, tensor, other) for name, tensor, other in pairs if other is not None]
    small = [pair for pair in complete if max(pair[1].nbytes, pair[2].nbytes) <= _MOST_BYTES]
    sample = {name for name, _, _ in small[:: -(-len(small) // _MOST_TENSORS) or 1]}
    for name, tensor, other in complete:
        is_transposed = tensor.shape != other.shape
        if is_transposed and tensor.shape != other.shape[::-1]:
            raise UnsupportedError(f"`{format.name}` would give the {role} `{name}` another shape")
        if name in sample:
            array = tensor.array().T if is_transposed else tensor.array()
            if array.astype(other.dtype, copy=False).tobytes() != other.array().tobytes():
                raise UnsupportedError(f"`{format.name}` would change the {role} `{name}`")


def _tensor_pairs(checkpoint: Checkpoint, again: Checkpoint, names: Mapping[str, str]) -> Iterator[tuple[Any, ...]]:
    """Return pairs of weights. Some formats store the float32 copy of a weight in its place."""
    masters = {name: value for name, slot, value in checkpoint.stored_slots if slot == MASTER}
    for name, tensor in checkpoint.tensors.items():
        other = again.tensors.get(names.get(name, ""))
        if other is None and tensor.dtype.kind in "iu" and not tensor.shape:
            continue  # a counter, which some formats have elsewhere or do not count
        is_same = other is None or other.dtype == tensor.dtype
        yield name, tensor if is_same else masters.get(name, tensor), other


def _slot_pairs(checkpoint: Checkpoint, again: Checkpoint, names: Mapping[str, str]) -> Iterator[tuple[Any, ...]]:
    """Return pairs of optimizer state, by name or by number in the order of the groups."""
    for at, optimizer in enumerate(checkpoint.optimizers):
        other = again.optimizers[at] if at < len(again.optimizers) else None
        numbers = {name: n for n, name in enumerate(name for group in optimizer.groups for name in group.parameters)}
        for name, slots in optimizer.slots.items():
            tensors = _without_copies(slots)
            keys = (name, names.get(str(name), name), numbers.get(name, name))
            others = next((_without_copies(other.slots[key]) for key in keys if other and key in other.slots), {})
            if other and len(other.families) != 1:  # slots may have the names of another optimizer, or of the format
                rest = [value for slot, value in others.items() if slot not in tensors]
                others |= dict(zip((slot for slot in tensors if slot not in others), rest, strict=False))
            for slot, value in tensors.items():
                yield f"{name}/{slot}", value, others.get(slot)


def _without_copies(slots: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return slots without the step and the float32 copy, which formats store elsewhere."""
    return {
        slot: as_tensor(value) for slot, value in slots.items() if slot not in (COUNT, MASTER) and value is not None
    }
