"""What ZeRO spreads over processes, put together: parameters and the state of optimizers in flat partitions.

In stages 1 and 2 the parameters of a group stand one after the other in a line that is cut into as many parts as there
are processes. In stage 3 each parameter is cut into as many parts, and each process has its parts in a line. What is
found here are places in these lines: nothing is read.
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
from onward.checkpoint.pytorch.pickling import Attributed, Name, Object
from onward.checkpoint.pytorch.states import (
    is_optimizer_state,
    is_schedule_state,
    module_state,
    schedule_of,
    settings_now,
    state_of,
)
from onward.checkpoint.pytorch.trees import mapping
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
"""By parameter; those of stage 0 may be numbers."""


class Kept(NamedTuple):
    """What an optimizer keeps, in whole tensors."""

    groups: list[dict[str, Any]]
    """As PyTorch has them: settings, and `params`, which are names or numbers."""
    slots: Slots
    clip: float | None = None
    scaler: Any = None


def named_groups(groups: Sequence[Mapping[str, Any]], shapes: Sequence[Shapes]) -> list[dict[str, Any]]:
    """Groups whose `params` are names: those that there were are numbers of lines."""
    return [{**group, "params": [name for line in group["params"] for name in shapes[line]]} for group in groups]


class Line:
    """Flat tensors, one after the other, as one."""

    def __init__(self, tensors: Sequence[Any]):
        if not all(isinstance(each, StoredTensor) and len(each.shape) == 1 and each.is_contiguous for each in tensors):
            raise ValueError("a partition is no flat tensor")
        if len({each.dtype for each in tensors}) > 1:
            raise ValueError("its partitions are of several types")
        self._tensors: list[StoredTensor] = list(tensors)
        self._starts = [0, *itertools.accumulate(each.shape[0] for each in self._tensors)]

    def cut(self, start: int, count: int) -> list[StoredTensor]:
        """The pieces that hold so many elements from a place on."""
        if start + count > self._starts[-1]:
            raise ValueError("its partitions are shorter than the parameters that they hold")
        found, at = [], max(bisect_right(self._starts, start) - 1, 0)
        while count:
            piece, begin = self._tensors[at], start - self._starts[at]
            taken = min(piece.shape[0] - begin, count)
            if taken:
                offset = piece.offset + begin * piece.dtype.itemsize
                found.append(dataclasses.replace(piece, offset=offset, shape=(taken,), strides=(1,)))
            start, count, at = start + taken, count - taken, at + 1
        return found


def join_pieces(pieces: Sequence[StoredTensor], shape: tuple[int, ...]) -> Tensor:
    """Pieces as one tensor: a place in a file where that is all."""
    if sum(piece.shape[0] for piece in pieces) != math.prod(shape) or not pieces:
        raise ValueError("pieces of a parameter are missing")
    if len(pieces) == 1:
        return dataclasses.replace(pieces[0], shape=shape, strides=contiguous_strides(shape))
    return JoinedTensor(pieces[0].dtype, shape, tuple(pieces))


def partitioned_groups(
    shapes: Sequence[Shapes], parts: Sequence[Mapping[str, Any]], paddings: Sequence[Sequence[int]] | None
) -> Slots:
    """The slots of each parameter in stages 1 and 2. `parts` are of the processes; `paddings` follow parameters."""
    slots: Slots = {}
    for number, group in enumerate(shapes):
        kept = _partitions([part["base_optimizer_state"]["state"].get(number, {}) for part in parts])
        kept[MASTER] = [part["single_partition_of_fp32_groups"][number] for part in parts]
        lines = {slot: Line(held) for slot, held in kept.items() if slot != COUNT}
        gaps = paddings[number] if paddings else [0] * len(group)
        at = 0
        for (name, shape), gap in zip(group.items(), gaps, strict=True):
            slots[name] = {slot: join_pieces(line.cut(at, math.prod(shape)), shape) for slot, line in lines.items()}
            slots[name] |= with_count(kept, COUNT)
            at += math.prod(shape) + gap
    return slots


def partitioned_parameters(shapes: Sequence[Shapes], parts: Sequence[Mapping[str, Any]]) -> Slots:
    """The slots of each parameter in stage 3, where groups may be cut into smaller ones."""
    slots: Slots = {}
    for number, group in enumerate(shapes):
        kept = _partitions([part["optimizer_state_dict"]["state"].get(number, {}) for part in parts])
        kept[MASTER] = [part["fp32_flat_groups"][number] for part in parts]
        lines = {slot: [Line([each]) for each in held] for slot, held in kept.items() if slot != COUNT}
        at = 0
        for name, shape in group.items():
            slots[name] = {slot: across(held, at, shape) for slot, held in lines.items()}
            slots[name] |= with_count(kept, COUNT)
            at += _share(shape, len(parts))
    return slots


def across(lines: Sequence[Line], at: int, shape: tuple[int, ...]) -> Tensor:
    """A parameter of which each process has as many elements, from the same place on; the last ones are padded."""
    share, left = _share(shape, len(lines)), math.prod(shape)
    pieces: list[StoredTensor] = []
    for line in lines:
        pieces += line.cut(at, min(share, left))
        left -= min(share, left)
    return join_pieces(pieces, shape)


def with_count(slots: Mapping[str, Any], *wanted: str) -> dict[str, Any]:
    """Slots, or those that are wanted, with the count of updates as a number."""
    found = {slot: value for slot, value in slots.items() if not wanted or slot in wanted}
    count = found.get(COUNT)
    if isinstance(count, Tensor) and not count.shape:
        found[COUNT] = count_of(count)
    return found


def _share(shape: tuple[int, ...], processes: int) -> int:
    return -(-math.prod(shape) // processes)


def _partitions(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the processes keep for a group, by slot: a list of partitions; what counts updates is the same for all."""
    first = states[0]
    if any(state.keys() != first.keys() for state in states):
        raise ValueError("its processes keep different things")
    flat = {slot for slot, value in first.items() if isinstance(value, Tensor) and len(value.shape) == 1}
    return {
        slot: [state[slot] for state in states] if slot in flat else value
        for slot, value in first.items()
        if slot in flat or slot == COUNT
    }


# ---- stage 0 ---------------------------------------------------------------------------------------------------------


def read_unpartitioned(model: Mapping[str, Any]) -> Kept:
    """What stage 0 keeps, which is PyTorch's own state, by numbers, with copies of narrower weights beside it."""
    outer = mapping(model.get("optimizer"))
    state = outer if is_optimizer_state(outer) else mapping(outer.get("optimizer_state_dict"))
    masters = outer.get("fp32_groups")
    if not is_optimizer_state(state) or (state is not outer and not isinstance(masters, list)):
        return Kept([], {})
    slots = numbered_slots(state, masters if state is not outer else None)
    return Kept([dict(group) for group in state["param_groups"]], slots)


def numbered_slots(state: Mapping[str, Any], masters: Iterable[Iterable[Any]] | None) -> Slots:
    """What PyTorch's own state keeps, by number, with the copies of narrower weights, which are in the same order."""
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    slots = {number: with_count(mapping(mapping(state.get("state")).get(number))) for number in numbers}
    if masters is not None:
        for number, copy in zip(numbers, itertools.chain.from_iterable(masters), strict=True):
            slots[number][MASTER] = copy
    return slots


FOLDER = "zero"
COMMON = Path(FOLDER) / "optimizer_state.pt"
"""What there is beside a folder for each parameter."""
LATEST = "latest_universal"
_WEIGHT = "fp32"
_MODEL, _MODEL_OF_STAGE_3 = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"
_VERSION = "0.19.8"
"""The version of DeepSpeed whose files these are."""


def read_universal(folder: Path, shapes: list[Shapes]) -> tuple[Mapping[str, Any], Kept]:
    """What all parameters share, as it is stored, and what the optimizer keeps."""
    common = mapping(read_torch_file(folder / COMMON))
    inner = mapping(common.get("optimizer_state_dict"))
    first: Mapping[Any, Any] = mapping(inner.get("state"))
    of_all = mapping(first.get(0)).get(COUNT)
    slots: Slots = {}
    for group in shapes:
        for name, shape in group.items():
            if not is_plain_name(name):
                raise ValueError(f"it leads out of its folder, to `{name}`")
            read = {each.stem: read_torch_file(each) for each in sorted((folder / FOLDER / name).glob("*.pt"))}
            count = read.pop(COUNT, of_all)
            slots[name] = {MASTER if slot == _WEIGHT else slot: _whole(tree, shape) for slot, tree in read.items()}
            slots[name] |= with_count({COUNT: count}) if count is not None else {}
    groups = common.get("param_groups") or inner["param_groups"]
    return common, Kept(named_groups(groups, shapes), slots, common.get("clip_grad"), common.get("loss_scaler"))


def _whole(tree: Any, shape: tuple[int, ...]) -> Tensor:
    """A tensor, which stage 3 leaves flat. One that was cut for tensor parallelism has its own, whole shape."""
    found = tree["param"] if isinstance(tree, Mapping) else tree
    if not isinstance(found, StoredTensor):
        raise ValueError("a file of a parameter holds no tensor")
    if isinstance(tree, Mapping) and len(found.shape) == len(shape):
        return found
    return join_pieces(Line([found]).cut(0, found.shape[0]), shape)


# ---- writing ---------------------------------------------------------------------------------------------------------


def write_universal(checkpoint: Checkpoint, path: Path) -> None:
    groups = _groups(checkpoint)
    step = checkpoint.step or 0
    folder = path / f"global_step{step}"
    (folder / FOLDER).mkdir(parents=True)
    (path / LATEST).write_text(folder.name)
    kept = checkpoint.optimizers[0].slots
    for name in (name for group in groups for name in group.parameters):
        _write_parameter(folder / FOLDER / str(name), checkpoint.tensors[str(name)], kept.get(name, {}), step)
    write_torch_file(folder / COMMON, _common(checkpoint, groups, step))
    model = _model(checkpoint, groups, step)
    write_torch_file(folder / _MODEL, model)
    trained = {name for group in groups for name in group.parameters}
    nothing = {
        name: ArrayTensor(np.zeros(0, model["module"][name].dtype)) for name in model["module"] if name in trained
    }
    outside = {**model["module"], **nothing}
    write_torch_file(folder / _MODEL_OF_STAGE_3, {**model, "module": Attributed(outside)})


def _groups(checkpoint: Checkpoint) -> tuple[ParameterGroup, ...]:
    """The groups of the optimizer, if all can be written."""
    if len(checkpoint.optimizers) != 1:
        raise UnsupportedError(
            f"DeepSpeed trains with one optimizer, and here are {len(checkpoint.optimizers) or 'none'}",
            hint="write it with `--to torch`, or `--to safetensors` for the model alone",
        )
    groups = checkpoint.optimizers[0].groups
    if not checkpoint.optimizers[0].has_names:
        raise UnsupportedError(
            "the checkpoint does not say whose the state of its optimizer is, and DeepSpeed goes by names",
            hint="turn it into a training model first: `onward convert checkpoint --like model.onnx -o run.onnx`",
        )
    names = [str(name) for group in groups for name in group.parameters]
    if missing := [name for name in names if name not in checkpoint.tensors]:
        raise UnsupportedError(f"there are no weights of {list_names(missing, 3)}, which the optimizer trains")
    if odd := [name for name in names if not is_plain_name(name)]:
        raise UnsupportedError(
            f"DeepSpeed has a folder for each parameter, and {list_names(odd, 3)} cannot be the name of one",
            hint="rename it: `onward rename model.onnx`",
        )
    return groups


def _write_parameter(folder: Path, weight: Tensor, slots: Mapping[str, Any], step: int) -> None:
    folder.mkdir()
    held = {_WEIGHT: slots.get(MASTER, weight)}
    held |= {slot: value for slot, value in slots.items() if slot not in (MASTER, COUNT) and isinstance(value, Tensor)}
    for slot, tensor in held.items():
        write_torch_file(folder / f"{slot}.pt", {"cat_dim": 0, "param": convert_dtype(tensor, np.dtype(np.float32))})
    write_torch_file(folder / f"{COUNT}.pt", _count(slots.get(COUNT, step)))


def _count(count: Any) -> Tensor:
    return ArrayTensor(np.array(count_of(count), np.float32))


def _common(checkpoint: Checkpoint, groups: tuple[ParameterGroup, ...], step: int) -> dict[str, Any]:
    settings = [settings_now(group) for group in groups]
    # In stage 3, DeepSpeed gives the settings of the first group to all: it gets those that all have in common.
    shared = {key: value for key, value in settings[0].items() if all(each.get(key) == value for each in settings)}
    count = checkpoint.optimizers[0].count
    tree: dict[str, Any] = {
        "param_groups": [{**each, "params": [number]} for number, each in enumerate(settings)],
        "optimizer_state_dict": {
            "state": {0: {COUNT: _count(step if count is None else count)}},
            "param_groups": [{**shared, "params": [number]} for number in range(len(settings))],
        },
        "overflow": False,
        "ds_version": _VERSION,
    }
    if checkpoint.clip and "norm" in checkpoint.clip:
        tree["clip_grad"] = checkpoint.clip["norm"]
    for kept in map(mapping, checkpoint.trees.values()):  # of DeepSpeed, with a scaler
        scaler = kept.get("loss_scaler", mapping(kept.get("optimizer_state_dict")).get("loss_scaler"))
        if isinstance(scaler, Object) and checkpoint.scaler:
            return {**tree, "loss_scaler": scaler, "dynamic_loss_scale": bool(checkpoint.scaler.get("dynamic"))}
    return tree


def _model(checkpoint: Checkpoint, groups: tuple[ParameterGroup, ...], step: int) -> dict[str, Any]:
    """The state of a model: that of the checkpoint where DeepSpeed wrote it, with what users gave it to keep."""
    there = next((mapping(tree) for name, tree in checkpoint.trees.items() if name.endswith("model_states.pt")), {})
    trained = [str(name) for group in groups for name in group.parameters]
    skipped = checkpoint.progress.get("skipped_steps", 0)
    if there.get("global_steps") != step + skipped:
        there = {key: value for key, value in there.items() if key != "global_samples"}  # DeepSpeed counts them anew
    frozen = [name for name in mapping(there.get("frozen_param_shapes")) if name in checkpoint.tensors]
    return {
        **there,
        "module": module_state(checkpoint),
        "buffer_names": [name for name in checkpoint.tensors if name not in trained and name not in frozen],
        "optimizer": None,
        "param_shapes": [_shapes(checkpoint, map(str, group.parameters)) for group in groups],
        "frozen_param_shapes": _shapes(checkpoint, frozen) if frozen else None,
        "frozen_param_fragments": Attributed({name: checkpoint.tensors[name] for name in frozen}) if frozen else None,
        "shared_params": dict(checkpoint.tied),
        "lr_scheduler": _scheduler(checkpoint, groups, step),
        "data_sampler": there.get("data_sampler"),
        "skipped_steps": skipped,
        "global_steps": step + skipped,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": there.get("ds_config", {}),
        "ds_version": _VERSION,
    }


def _shapes(checkpoint: Checkpoint, names: Any) -> Attributed:
    size = partial(Object, Name("torch", "Size"))
    return Attributed({name: size((checkpoint.tensors[name].shape,)) for name in names})


def _scheduler(checkpoint: Checkpoint, groups: tuple[ParameterGroup, ...], step: int) -> dict[str, Any]:
    """The state of a scheduler: what those of DeepSpeed count, and what those of PyTorch keep."""
    schedule = next(iter(checkpoint.schedules), SchedulerState({}, ()))
    position = step if schedule.position is None else schedule.position
    bases = [group.spec.options.get("lr", 0.0) if group.optimizer else 0.0 for group in groups]
    rates = [settings_now(group).get("lr", base) for group, base in zip(groups, bases, strict=True)]
    of_torch = dict(schedule.state) or state_of(schedule.words or (), bases, rates, position)
    return {**of_torch, "last_batch_iteration": position - 1}


# ---- schedulers ------------------------------------------------------------------------------------------------------


class Found(NamedTuple):
    """A schedule, and the rate that it multiplies."""

    schedule: SchedulerState
    base: float | None
    """The rate that the words multiply; None where that is the one of the optimizer."""


def scheduler_of(state: Any, config: Mapping[str, Any], given: float | None, groups: Sequence[Any] = ()) -> Found:
    """What the state of a scheduler and the configuration say. `given` is the rate of the optimizer in the latter.

    A program may have a scheduler that DeepSpeed does not know of. Those of PyTorch leave a trace in `groups`.
    """
    if state is None:
        is_moved = any("initial_lr" in group for group in groups)
        return Found(SchedulerState({}, None if is_moved else ()), None)
    if is_schedule_state(state):
        return Found(dataclasses.replace(schedule_of(state), every=1), None)  # its engine steps it with every update
    if not isinstance(state, Mapping) or type(state.get("last_batch_iteration")) is not int:
        return Found(SchedulerState(state if isinstance(state, Mapping) else {}), None)
    position = state["last_batch_iteration"] + 1
    words, base = schedule_words(config, given, position)
    return Found(SchedulerState(state, words, position, every=1), base)
