"""Universal checkpoints of DeepSpeed: a folder for each parameter, which any number of processes loads in any stage."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from onward.checkpoint.deepspeed.zero import Kept, Line, Shapes, Slots, join_pieces, named_groups, with_count
from onward.checkpoint.format import Checkpoint
from onward.checkpoint.pytorch.archive import read_torch_file, write_torch_file
from onward.checkpoint.pytorch.objects import Attributed, Name, Object
from onward.checkpoint.pytorch.schedules import state_of
from onward.checkpoint.pytorch.states import module_state, settings_now
from onward.checkpoint.pytorch.trees import mapping
from onward.errors import UnsupportedError, list_names
from onward.model.storage.files import is_plain_name
from onward.run_state.state import COUNT, MASTER, ParameterGroup, SchedulerState
from onward.run_state.tensors import ArrayTensor, StoredTensor, Tensor, convert_dtype, count_of

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
    outside = {name: _nothing(t) if name in trained else t for name, t in model["module"].items()}
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
    if (scaler := _own_scaler(checkpoint)) is not None:
        tree |= {"loss_scaler": scaler, "dynamic_loss_scale": bool(checkpoint.scaler.get("dynamic"))}
    return tree


def _own_scaler(checkpoint: Checkpoint) -> Any:
    """The scaler of a checkpoint of DeepSpeed, with what it has come to."""
    for tree in checkpoint.trees.values():
        outer = mapping(tree)
        stored = outer.get("loss_scaler", mapping(outer.get("optimizer_state_dict")).get("loss_scaler"))
        if isinstance(stored, Object) and checkpoint.scaler:
            return stored
    return None


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


def _nothing(tensor: Tensor) -> Tensor:
    return ArrayTensor(np.zeros(0, tensor.dtype))


def _scheduler(checkpoint: Checkpoint, groups: tuple[ParameterGroup, ...], step: int) -> dict[str, Any]:
    """The state of a scheduler: what those of DeepSpeed count, and what those of PyTorch keep."""
    schedule = next(iter(checkpoint.schedules), SchedulerState({}, ()))
    position = step if schedule.position is None else schedule.position
    bases = [group.spec.options.get("lr", 0.0) if group.optimizer else 0.0 for group in groups]
    rates = [settings_now(group).get("lr", base) for group, base in zip(groups, bases, strict=True)]
    of_torch = dict(schedule.state) or state_of(schedule.words or (), bases, rates, position)
    return {**of_torch, "last_batch_iteration": position - 1}
