"""Partitions of ZeRO as whole tensors, and universal checkpoints of DeepSpeed.

Stages 1 and 2 concatenate the parameters of a group and cut the result into one part per process.
Stage 3 cuts each parameter into one part per process and concatenates the parts of a process.
Tensors here are locations in these files: nothing is read.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from onward.checkpoint.format import Checkpoint
from onward.checkpoint.pytorch.archive import read_torch_file, write_torch_file
from onward.checkpoint.pytorch.contents import mapping
from onward.checkpoint.pytorch.pickle_objects import Attributed, Name, Object
from onward.checkpoint.pytorch.state_dicts import (
    is_optimizer_state,
    is_schedule_state,
    module_state,
    schedule_of,
    settings_now,
    state_of,
)
from onward.errors import UnsupportedError, list_names
from onward.model.storage.files import is_plain_name
from onward.run_state.state import COUNT, MASTER, ParameterGroup, SchedulerState
from onward.run_state.tensors import (
    ArrayTensor,
    JoinedTensor,
    StoredTensor,
    Tensor,
    contiguous_strides,
    convert_dtype,
    count_of,
)
from onward.vocabulary.deepspeed import schedule_words

Shapes = Mapping[str, tuple[int, ...]]
Slots = dict[Any, dict[str, Any]]
"""By parameter, which stage 0 may number."""


class ZeroState(NamedTuple):
    """State of an optimizer, in whole tensors."""

    groups: list[dict[str, Any]]
    """Groups of PyTorch: settings, and `params`, which are names or numbers."""
    slots: Slots
    clip: float | None = None
    scaler: Any = None


def named_groups(groups: Sequence[Mapping[str, Any]], shapes: Sequence[Shapes]) -> list[dict[str, Any]]:
    """Return groups with names as `params`, in place of numbers of lines."""
    return [{**group, "params": [name for line in group["params"] for name in shapes[line]]} for group in groups]


class Line:
    """Flat tensors, concatenated."""

    def __init__(self, tensors: Sequence[Any]):
        if not all(isinstance(item, StoredTensor) and len(item.shape) == 1 and item.is_contiguous for item in tensors):
            raise ValueError("a partition is not a flat tensor")
        if len({tensor.dtype for tensor in tensors}) > 1:
            raise ValueError("its partitions are of several types")
        self._tensors: list[StoredTensor] = list(tensors)
        self._starts = [0, *itertools.accumulate(tensor.shape[0] for tensor in self._tensors)]

    def cut(self, start: int, count: int) -> list[StoredTensor]:
        """Return the pieces that hold `count` elements from `start` on."""
        if start + count > self._starts[-1]:
            raise ValueError("its partitions are shorter than the parameters that they hold")
        pieces, at = [], max(bisect_right(self._starts, start) - 1, 0)
        while count:
            piece, begin = self._tensors[at], start - self._starts[at]
            taken = min(piece.shape[0] - begin, count)
            if taken:
                offset = piece.offset + begin * piece.dtype.itemsize
                pieces.append(dataclasses.replace(piece, offset=offset, shape=(taken,), strides=(1,)))
            start, count, at = start + taken, count - taken, at + 1
        return pieces


def join_pieces(pieces: Sequence[StoredTensor], shape: tuple[int, ...]) -> Tensor:
    """Return pieces as one tensor. One piece stays a location in its file."""
    if sum(piece.shape[0] for piece in pieces) != math.prod(shape) or not pieces:
        raise ValueError("pieces of a parameter are missing")
    if len(pieces) == 1:
        return dataclasses.replace(pieces[0], shape=shape, strides=contiguous_strides(shape))
    return JoinedTensor(pieces[0].dtype, shape, tuple(pieces))


def partitioned_groups(
    shapes: Sequence[Shapes], parts: Sequence[Mapping[str, Any]], paddings: Sequence[Sequence[int]] | None
) -> Slots:
    """Return slots by parameter in stages 1 and 2 from the parts of processes."""
    slots: Slots = {}
    for number, group in enumerate(shapes):
        partitions = _partitions(parts, number, "base_optimizer_state", "single_partition_of_fp32_groups")
        lines = {slot: Line(pieces) for slot, pieces in partitions.items() if slot != COUNT}
        gaps = paddings[number] if paddings else [0] * len(group)
        at = 0
        for (name, shape), gap in zip(group.items(), gaps, strict=True):
            slots[name] = {slot: join_pieces(line.cut(at, math.prod(shape)), shape) for slot, line in lines.items()}
            slots[name] |= with_count(partitions, COUNT)
            at += math.prod(shape) + gap
    return slots


def partitioned_parameters(shapes: Sequence[Shapes], parts: Sequence[Mapping[str, Any]]) -> Slots:
    """Return the slots of each parameter in stage 3, where groups may be cut into smaller ones."""
    slots: Slots = {}
    for number, group in enumerate(shapes):
        partitions = _partitions(parts, number, "optimizer_state_dict", "fp32_flat_groups")
        lines = {slot: [Line([piece]) for piece in pieces] for slot, pieces in partitions.items() if slot != COUNT}
        at = 0
        for name, shape in group.items():
            slots[name] = {slot: across(process_lines, at, shape) for slot, process_lines in lines.items()}
            slots[name] |= with_count(partitions, COUNT)
            at += _share(shape, len(parts))
    return slots


def across(lines: Sequence[Line], at: int, shape: tuple[int, ...]) -> Tensor:
    """Return a parameter of which each process has an equal share at `at`; the last is padded."""
    share, left = _share(shape, len(lines)), math.prod(shape)
    pieces: list[StoredTensor] = []
    for line in lines:
        pieces += line.cut(at, min(share, left))
        left -= min(share, left)
    return join_pieces(pieces, shape)


def with_count(slots: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return slots, or only `names`, with the count of updates as a number."""
    chosen = {slot: value for slot, value in slots.items() if not names or slot in names}
    count = chosen.get(COUNT)
    if isinstance(count, Tensor) and not count.shape:
        chosen[COUNT] = count_of(count)
    return chosen


def _share(shape: tuple[int, ...], processes: int) -> int:
    return -(-math.prod(shape) // processes)


def _partitions(parts: Sequence[Mapping[str, Any]], number: int, optimizer: str, masters: str) -> dict[str, Any]:
    """Return the state of a group by slot: a list of partitions, or one count of updates.

    `optimizer` and `masters` are the keys of the optimizer and of the float32 copies.
    """
    states = [process_state[optimizer]["state"].get(number, {}) for process_state in parts]
    first = states[0]
    if any(state.keys() != first.keys() for state in states):
        raise ValueError("its processes store different slots")
    flat = [slot for slot, value in first.items() if isinstance(value, Tensor) and len(value.shape) == 1]
    count = {COUNT: first[COUNT]} if COUNT in first else {}
    return {
        **count,
        **{slot: [state[slot] for state in states] for slot in flat},
        MASTER: [process_state[masters][number] for process_state in parts],
    }


def read_unpartitioned(model: Mapping[str, Any]) -> ZeroState:
    """Return the state of stage 0: PyTorch's, by number, with float32 copies of weights."""
    stored = mapping(model.get("optimizer"))
    state = stored if is_optimizer_state(stored) else mapping(stored.get("optimizer_state_dict"))
    masters = stored.get("fp32_groups")
    if not is_optimizer_state(state) or (state is not stored and not isinstance(masters, list)):
        return ZeroState([], {})
    slots = numbered_slots(state, masters if state is not stored else None)
    return ZeroState([dict(group) for group in state["param_groups"]], slots)


def numbered_slots(state: Mapping[str, Any], masters: Iterable[Iterable[Any]] | None) -> Slots:
    """Return slots of PyTorch's own state by number, with float32 copies in the same order."""
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    slots = {number: with_count(mapping(mapping(state.get("state")).get(number))) for number in numbers}
    if masters is not None:
        for number, copy in zip(numbers, itertools.chain.from_iterable(masters), strict=True):
            slots[number][MASTER] = copy
    return slots


FOLDER = "zero"
COMMON = Path(FOLDER) / "optimizer_state.pt"
"""File beside the folders of the parameters."""
LATEST = "latest_universal"
_WEIGHT = "fp32"
_MODEL, _MODEL_OF_STAGE_3 = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"
_VERSION = "0.19.8"
"""Version of DeepSpeed whose files are written."""


def read_universal(folder: Path, shapes: list[Shapes]) -> tuple[Mapping[str, Any], ZeroState]:
    """Return the file that all parameters share, and the state of the optimizer."""
    common = mapping(read_torch_file(folder / COMMON))
    inner = mapping(common.get("optimizer_state_dict"))
    first: Mapping[Any, Any] = mapping(inner.get("state"))
    common_count = mapping(first.get(0)).get(COUNT)
    slots: Slots = {}
    for group in shapes:
        for name, shape in group.items():
            if not is_plain_name(name):
                raise ValueError(f"it leads out of its folder, to `{name}`")
            trees = {path.stem: read_torch_file(path) for path in sorted((folder / FOLDER / name).glob("*.pt"))}
            count = trees.pop(COUNT, common_count)
            slots[name] = {MASTER if slot == _WEIGHT else slot: _whole(tree, shape) for slot, tree in trees.items()}
            slots[name] |= with_count({COUNT: count}) if count is not None else {}
    groups = common.get("param_groups") or inner["param_groups"]
    return common, ZeroState(named_groups(groups, shapes), slots, common.get("clip_grad"), common.get("loss_scaler"))


def _whole(tree: Any, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor, which stage 3 stores flat unless tensor parallelism cut it."""
    tensor = tree["param"] if isinstance(tree, Mapping) else tree
    if not isinstance(tensor, StoredTensor):
        raise ValueError("a file of a parameter has no tensor")
    if isinstance(tree, Mapping) and len(tensor.shape) == len(shape):
        return tensor
    return join_pieces(Line([tensor]).cut(0, tensor.shape[0]), shape)


# ---- writing ---------------------------------------------------------------------------------------------------------


def write_universal(checkpoint: Checkpoint, path: Path) -> None:
    groups = _groups(checkpoint)
    step = checkpoint.step or 0
    folder = path / f"global_step{step}"
    (folder / FOLDER).mkdir(parents=True)
    (path / LATEST).write_text(folder.name)
    slots = checkpoint.optimizers[0].slots
    for name in (name for group in groups for name in group.parameters):
        _write_parameter(folder / FOLDER / str(name), checkpoint.tensors[str(name)], slots.get(name, {}), step)
    write_torch_file(folder / COMMON, _common(checkpoint, groups, step))
    model = _model(checkpoint, groups, step)
    write_torch_file(folder / _MODEL, model)
    trained = {name for group in groups for name in group.parameters}
    module = {  # stage 3 reads trained weights from their folders
        name: ArrayTensor(np.zeros(0, tensor.dtype)) if name in trained else tensor
        for name, tensor in model["module"].items()
    }
    write_torch_file(folder / _MODEL_OF_STAGE_3, {**model, "module": Attributed(module)})


def _groups(checkpoint: Checkpoint) -> tuple[ParameterGroup, ...]:
    """Return the groups of the optimizer, if all can be written."""
    if len(checkpoint.optimizers) != 1:
        raise UnsupportedError(
            f"DeepSpeed needs one optimizer; the checkpoint has {len(checkpoint.optimizers) or 'none'}",
            hint="write it with `--to torch`, or `--to safetensors` for the model alone",
        )
    groups = checkpoint.optimizers[0].groups
    if not checkpoint.optimizers[0].has_names:
        raise UnsupportedError(
            "the optimizer state has no parameter names, which DeepSpeed needs",
            hint="make a training model of it first: `onward convert checkpoint --like model.onnx -o run.onnx`",
        )
    names = [str(name) for group in groups for name in group.parameters]
    if missing := [name for name in names if name not in checkpoint.tensors]:
        raise UnsupportedError(f"the checkpoint has no weights of {list_names(missing, 3)}, which the optimizer trains")
    if odd := [name for name in names if not is_plain_name(name)]:
        raise UnsupportedError(
            f"DeepSpeed names a folder by each parameter, which {list_names(odd, 3)} does not allow",
            hint="rename it: `onward rename model.onnx`",
        )
    return groups


def _write_parameter(folder: Path, weight: Tensor, slots: Mapping[str, Any], step: int) -> None:
    folder.mkdir()
    files = {_WEIGHT: slots.get(MASTER, weight)}
    files |= {slot: value for slot, value in slots.items() if slot not in (MASTER, COUNT) and isinstance(value, Tensor)}
    for slot, tensor in files.items():
        write_torch_file(folder / f"{slot}.pt", {"cat_dim": 0, "param": convert_dtype(tensor, np.dtype(np.float32))})
    write_torch_file(folder / f"{COUNT}.pt", _count(slots.get(COUNT, step)))


def _count(count: Any) -> Tensor:
    return ArrayTensor(np.array(count_of(count), np.float32))


def _common(checkpoint: Checkpoint, groups: tuple[ParameterGroup, ...], step: int) -> dict[str, Any]:
    settings = [settings_now(group) for group in groups]
    # In stage 3, DeepSpeed gives the settings of the first group to all: it gets the common ones.
    shared = {key: value for key, value in settings[0].items() if all(other.get(key) == value for other in settings)}
    count = checkpoint.optimizers[0].count
    tree: dict[str, Any] = {
        "param_groups": [{**group_settings, "params": [number]} for number, group_settings in enumerate(settings)],
        "optimizer_state_dict": {
            "state": {0: {COUNT: _count(step if count is None else count)}},
            "param_groups": [{**shared, "params": [number]} for number in range(len(settings))],
        },
        "overflow": False,
        "ds_version": _VERSION,
    }
    if checkpoint.clip and "norm" in checkpoint.clip:
        tree["clip_grad"] = checkpoint.clip["norm"]
    for stored in map(mapping, checkpoint.trees.values()):  # of DeepSpeed, with a scaler
        scaler = stored.get("loss_scaler", mapping(stored.get("optimizer_state_dict")).get("loss_scaler"))
        if isinstance(scaler, Object) and checkpoint.scaler:
            return {**tree, "loss_scaler": scaler, "dynamic_loss_scale": bool(checkpoint.scaler.get("dynamic"))}
    return tree


def _model(checkpoint: Checkpoint, groups: tuple[ParameterGroup, ...], step: int) -> dict[str, Any]:
    """Return the state of a model: the one that DeepSpeed wrote, updated, or a new one."""
    stored = next((mapping(tree) for name, tree in checkpoint.trees.items() if name.endswith("model_states.pt")), {})
    trained = [str(name) for group in groups for name in group.parameters]
    skipped = checkpoint.progress.get("skipped_steps", 0)
    if stored.get("global_steps") != step + skipped:
        stored = {key: value for key, value in stored.items() if key != "global_samples"}  # DeepSpeed counts them anew
    frozen = [name for name in mapping(stored.get("frozen_param_shapes")) if name in checkpoint.tensors]
    return {
        **stored,
        "module": module_state(checkpoint),
        "buffer_names": [name for name in checkpoint.tensors if name not in trained and name not in frozen],
        "optimizer": None,
        "param_shapes": [_shapes(checkpoint, map(str, group.parameters)) for group in groups],
        "frozen_param_shapes": _shapes(checkpoint, frozen) if frozen else None,
        "frozen_param_fragments": Attributed({name: checkpoint.tensors[name] for name in frozen}) if frozen else None,
        "shared_params": dict(checkpoint.tied),
        "lr_scheduler": _scheduler(checkpoint, groups, step),
        "data_sampler": stored.get("data_sampler"),
        "skipped_steps": skipped,
        "global_steps": step + skipped,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": stored.get("ds_config", {}),
        "ds_version": _VERSION,
    }


def _shapes(checkpoint: Checkpoint, names: Any) -> Attributed:
    size = partial(Object, Name("torch", "Size"))
    return Attributed({name: size((checkpoint.tensors[name].shape,)) for name in names})


def _scheduler(checkpoint: Checkpoint, groups: tuple[ParameterGroup, ...], step: int) -> dict[str, Any]:
    """Return the state of a scheduler: DeepSpeed's counter and PyTorch's attributes."""
    schedule = next(iter(checkpoint.schedules), SchedulerState({}, ()))
    position = step if schedule.position is None else schedule.position
    bases = [group.spec.options.get("lr", 0.0) if group.optimizer else 0.0 for group in groups]
    rates = [settings_now(group).get("lr", base) for group, base in zip(groups, bases, strict=True)]
    torch_state = dict(schedule.state) or state_of(schedule.words or (), bases, rates, position)
    return {**torch_state, "last_batch_iteration": position - 1}


# ---- schedulers ------------------------------------------------------------------------------------------------------


class ScheduleOfRate(NamedTuple):
    """Schedule and the rate that it multiplies."""

    schedule: SchedulerState
    base: float | None
    """Rate that the schedule multiplies; None: the rate of the optimizer."""


def scheduler_of(
    state: Any, config: Mapping[str, Any], rate: float | None, groups: Sequence[Any] = ()
) -> ScheduleOfRate:
    """Return the schedule of a state and a configuration, whose optimizer has a rate.

    DeepSpeed does not store a scheduler that the program made. One of PyTorch leaves `initial_lr`
    in `groups`.
    """
    if state is None:
        has_scheduler = any("initial_lr" in group for group in groups)
        return ScheduleOfRate(SchedulerState({}, None if has_scheduler else ()), None)
    if is_schedule_state(state):  # DeepSpeed's engine steps it with every update
        return ScheduleOfRate(dataclasses.replace(schedule_of(state), every=1), None)
    if not isinstance(state, Mapping) or type(state.get("last_batch_iteration")) is not int:
        return ScheduleOfRate(SchedulerState(state if isinstance(state, Mapping) else {}), None)
    position = state["last_batch_iteration"] + 1
    words, base = schedule_words(config, rate, position)
    return ScheduleOfRate(SchedulerState(state, words, position, every=1), base)
