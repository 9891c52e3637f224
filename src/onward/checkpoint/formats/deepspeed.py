"""Checkpoints of DeepSpeed: all stages of ZeRO, and universal checkpoints."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from onward.checkpoint.format import Checkpoint, Format
from onward.checkpoint.formats import transformers_trainer as trainer
from onward.checkpoint.pytorch.archive import read_torch_file
from onward.checkpoint.pytorch.contents import contents_of, executed_names, mapping, progress_of
from onward.checkpoint.pytorch.pickle_objects import Attributed, Object
from onward.checkpoint.pytorch.state_dicts import optimizer_of, without_copies
from onward.checkpoint.zero import (
    COMMON,
    Line,
    Shapes,
    ZeroState,
    across,
    named_groups,
    partitioned_groups,
    partitioned_parameters,
    read_universal,
    read_unpartitioned,
    scheduler_of,
    write_universal,
)
from onward.errors import UnsupportedError
from onward.model.storage.files import SENSELESS, blame_file, is_plain_name
from onward.recipe.spec import Spec
from onward.run_state.state import MASTER, OptimizerState, ParameterGroup
from onward.run_state.tensors import Tensor, convert_dtype

_MODEL = re.compile(r"(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<slice>\d+)_model_states\.pt")
_PART = re.compile(r"(?:[a-z0-9]+_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<slice>\d+)_optim_states\.pt")
_LATEST = ("latest", "latest_universal")
_LONGEST_TAG = 1000


def matches(path: Path) -> bool:
    return _newest_folder(path) is not None


def _newest_folder(folder: Path) -> Path | None:
    """Return the folder that a file names as the newest checkpoint, or the folder itself."""
    if _has_model(folder):
        return folder
    for name in _LATEST:
        if (folder / name).is_file():
            with open(folder / name, encoding="utf-8", errors="replace") as file:
                tag = file.read(_LONGEST_TAG).strip()
            if is_plain_name(tag) and _has_model(folder / tag):
                return folder / tag
    return None


def _has_model(folder: Path) -> bool:
    return folder.is_dir() and any(_MODEL.fullmatch(path.name) for path in folder.iterdir())


def read(path: Path) -> Checkpoint:
    folder = _newest_folder(path)
    assert folder is not None
    saved = _read_saved(folder)
    with blame_file(f"`{folder}` is not a whole checkpoint of DeepSpeed", *SENSELESS):
        checkpoint = _checkpoint(path, saved)
    return _with_trainer(checkpoint) if (path / trainer.STATE).exists() else checkpoint


class _Saved(NamedTuple):
    """Files of a checkpoint."""

    folder: Path
    models: list[Mapping[str, Any]]
    """State of the model of each process in stage 3, else of one."""
    parts: list[Mapping[str, Any]]
    """State of the optimizer of each process."""
    trees: dict[str, Any]
    is_universal: bool


def _read_saved(folder: Path) -> _Saved:
    names = sorted(path.name for path in folder.iterdir() if path.suffix == ".pt")
    if split := [name for name in names if name.startswith(("layer_", "expert_"))]:
        raise UnsupportedError(
            f"`{folder}` splits a pipeline or experts into files such as `{split[0]}`",
            hint="make a universal checkpoint of it with `ds_to_universal.py` of DeepSpeed",
        )
    models, parts = _by_rank(names, _MODEL), _by_rank(names, _PART)
    if is_universal := (folder / COMMON).is_file():
        models, parts = models[:1], []
    elif any(int(match["slice"]) for match in (*models, *parts)):
        raise UnsupportedError(
            f"the tensors of `{folder}` are cut for tensor parallelism",
            hint="make a universal checkpoint of it with `ds_to_universal.py` of DeepSpeed",
        )
    trees = {match.string: read_torch_file(folder / match.string) for match in (*models, *parts)}
    states = [mapping(mapping(trees[match.string]).get("optimizer_state_dict")) for match in parts]
    return _Saved(folder, [mapping(trees[match.string]) for match in models], states, trees, is_universal)


def _by_rank(names: Sequence[str], pattern: re.Pattern[str]) -> list[re.Match[str]]:
    matches = [match for name in names if (match := pattern.fullmatch(name))]
    return sorted(matches, key=lambda match: (int(match["slice"]), int(match["rank"] or 0)))


def _checkpoint(path: Path, saved: _Saved) -> Checkpoint:
    model = saved.models[0]
    config = mapping(model.get("ds_config"))
    state = _read_state(saved)
    tensors = _tensors(saved, state.slots)
    settings = mapping(config.get("optimizer"))
    rate = mapping(settings.get("params")).get("lr")
    scheduler = scheduler_of(model.get("lr_scheduler"), config.get("scheduler") or {}, rate, state.groups)
    optimizer = _optimizer(state, tensors, settings, scheduler.base)
    clip = state.clip if state.clip is not None else config.get("gradient_clipping")
    counters = {name: model[name] for name in ("global_samples", "skipped_steps") if isinstance(model.get(name), int)}
    sizes = {name: model[name] for name in ("dp_world_size", "mp_world_size") if isinstance(model.get(name), int)}
    scaler = mapping(state.scaler.state) if isinstance(state.scaler, Object) else {}
    steps = model.get("global_steps")
    return Checkpoint(
        path=path,
        format=FORMAT.name,
        title=f"DeepSpeed {model.get('ds_version') or ''}".strip() + (", universal" if saved.is_universal else ""),
        tensors=tensors,
        optimizers=(optimizer,) if optimizer else (),
        schedules=(scheduler.schedule,),
        step=steps - counters.get("skipped_steps", 0) if isinstance(steps, int) else None,
        progress={**progress_of(model), **counters},
        randomness=tuple(contents_of({k: v for k, v in model.items() if k not in _OWN})["randomness"].values()),
        data=mapping(model.get("data_sampler")),
        scaler=dict(scaler) if scaler.get("dynamic") or scaler.get("cur_scale", 1) != 1 else {},
        clip={"norm": float(clip), "variant": "torch"} if clip else {},
        accumulate=_batches_for_update(config, model.get("dp_world_size")),
        tied=_tied_names(model),
        keeps_order=True,
        arguments=config,
        layout={
            "zero_stage": mapping(config.get("zero_optimization")).get("stage", 0),
            **sizes,
            **mapping(model.get("checkpoint_parallel_dimensions")),
        },
        trees=_without_partitions(saved.trees),
        executes=executed_names(saved.trees),
        remarks=() if optimizer else ("the optimizer state has no parameter names",),
    )


def _batches_for_update(config: Mapping[str, Any], processes: Any) -> int | None:
    """Return the gradient accumulation steps (default: derived from batch sizes)."""
    if (steps := config.get("gradient_accumulation_steps")) is not None:
        return steps if type(steps) is int and steps > 0 else None
    sizes = (config.get("train_batch_size"), config.get("train_micro_batch_size_per_gpu"), processes)
    if None in sizes[:2]:
        return 1
    if not all(type(size) is int and size > 0 for size in sizes):
        return None
    batch_size, micro, count = sizes
    return max(1, int(batch_size // (micro * count)))


def _without_partitions(trees: Mapping[str, Any]) -> dict[str, Any]:
    """Return the files of the first process without tensors."""
    remaining: dict[str, Any] = {}
    for name, tree in trees.items():
        match = _MODEL.fullmatch(name) or _PART.fullmatch(name)
        if match is None or not int(match["rank"] or 0):
            remaining[name] = _without_tensors({key: v for key, v in mapping(tree).items() if key not in _LARGE})
    return remaining


def _without_tensors(tree: Any) -> Any:
    if isinstance(tree, dict) and "state" in tree and "param_groups" in tree:
        return {key: value for key, value in tree.items() if key != "state"}
    if isinstance(tree, dict) and not isinstance(tree, Attributed):
        return {key: _without_tensors(value) for key, value in tree.items() if key not in _FLAT}
    return tree


_LARGE = ("module", "optimizer", "frozen_param_fragments")
_FLAT = ("single_partition_of_fp32_groups", "fp32_flat_groups", "fp32_groups")
_OWN = (*_LARGE, "ds_config", "lr_scheduler")
"""Entries of the state of a model that DeepSpeed owns; others may be of the program."""


def _read_state(saved: _Saved) -> ZeroState:
    shapes = _shapes(saved.models[0].get("param_shapes"))
    if saved.is_universal:
        common, universal = read_universal(saved.folder, shapes)
        saved.trees[str(COMMON)] = common
        return universal
    if not saved.parts:
        return read_unpartitioned(saved.models[0])
    first = saved.parts[0]
    count = first.get("partition_count")
    if (max(count) if isinstance(count, list) else count) != len(saved.parts):
        raise ValueError(f"the optimizer has {len(saved.parts)} parts, and was saved by {count} processes")
    if "fp32_flat_groups" in first:
        state, slots = first["optimizer_state_dict"], partitioned_parameters(shapes, saved.parts)
    else:
        state = first["base_optimizer_state"]
        if not isinstance(state, Mapping):
            raise UnsupportedError(
                "an elastic checkpoint does not store the hyper-parameters of the optimizer",
                hint='load it in DeepSpeed and save it with `"elastic_checkpoint": false`',
            )
        slots = partitioned_groups(shapes, saved.parts, first.get("param_alignment_paddings"))
    groups = named_groups(state["param_groups"], shapes)
    return ZeroState(groups, slots, first.get("clip_grad"), first.get("loss_scaler"))


def _shapes(groups: Any) -> list[Shapes]:
    shapes = [dict(group) for group in groups or ()]
    sizes = (size for group in shapes for shape in group.values() for size in shape)
    if not all(type(size) is int and 0 <= size < 2**40 for size in sizes):
        raise ValueError("a parameter has an invalid shape")
    return [{str(name): tuple(shape) for name, shape in group.items()} for group in shapes]


def _tied_names(model: Mapping[str, Any]) -> Mapping[str, str]:
    """Return further names of parameters, which stage 0 does not list."""
    if isinstance(listed := model.get("shared_params"), Mapping):
        return listed
    first: dict[Any, str] = {}
    module = mapping(model.get("module"))
    return {name: other for name, tensor in module.items() if (other := first.setdefault(tensor, name)) != name}


def _tensors(saved: _Saved, slots: Mapping[Any, Mapping[str, Any]]) -> dict[str, Tensor]:
    """Return the tensors of the model in the model's dtype."""
    model = saved.models[0]
    tied, frozen = _tied_names(model), _shapes([model.get("frozen_param_shapes") or {}])[0]
    tensors: dict[str, Tensor] = {}
    for name, stored in mapping(model.get("module")).items():
        if name in tied or not isinstance(stored, Tensor):
            continue
        if name in slots and stored.shape != slots[name][MASTER].shape:
            tensors[name] = convert_dtype(slots[name][MASTER], stored.dtype)
        elif name in frozen and stored.shape != frozen[name]:
            lines = [Line([state["frozen_param_fragments"][name]]) for state in saved.models]
            tensors[name] = across(lines, 0, frozen[name])
        else:
            tensors[name] = stored
    return tensors


def _optimizer(
    state: ZeroState, tensors: Mapping[str, Tensor], settings: Mapping[str, Any], base: float | None
) -> OptimizerState | None:
    if not state.groups:
        return None
    class_name, family = str(settings.get("type", "")).lower(), None
    if class_name in ("adam", "adamw"):  # `adam` decouples weight decay by default
        is_decoupled = class_name == "adamw" or mapping(settings.get("params")).get("adam_w_mode", True)
        family = "adamw" if is_decoupled else "adam"
    slots = {name: {slot: v for slot, v in values.items() if slot != MASTER} for name, values in state.slots.items()}
    optimizer = optimizer_of({"param_groups": state.groups, "state": slots}, family)
    is_known = not class_name or class_name in _PLAIN
    return OptimizerState(
        optimizer.families if is_known else (class_name,),
        tuple(_with_rate(group, base, is_known) for group in optimizer.groups),
        {name: without_copies(slots, tensors.get(name)) for name, slots in state.slots.items()},
    )


def _with_rate(group: ParameterGroup, base: float | None, is_known: bool) -> ParameterGroup:
    """Return a group whose rate is the one that a scheduler of DeepSpeed multiplies."""
    if not is_known or group.optimizer is None or group.settings.get("bias_correction", True) is not True:
        return dataclasses.replace(group, optimizer=None)
    rate = {} if base is None else {"lr": base}
    return dataclasses.replace(group, optimizer=Spec(group.spec.name, {**group.spec.options, **rate}))


_PLAIN = ("adam", "adamw", "sgd", "lion", "adamax", "rmsprop", "adadelta", "nadam", "radam")
"""Names in a configuration that are optimizers of recipes."""


def _with_trainer(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint with what the Trainer stores: progress, arguments, random states."""
    stored = trainer.read(checkpoint.path)
    has_schedule = checkpoint.schedules[0].words or not stored.schedules
    return dataclasses.replace(
        checkpoint,
        title=f"{stored.title}, {checkpoint.title}",
        schedules=checkpoint.schedules if has_schedule else stored.schedules,
        progress={**checkpoint.progress, **stored.progress},
        randomness=(*checkpoint.randomness, *stored.randomness),
        configuration=stored.configuration,
        arguments={**checkpoint.arguments, **stored.arguments},
        files=tuple(name for name in stored.files if name not in _LATEST),
        trees={**checkpoint.trees, **stored.trees},
        executes=tuple(sorted({*checkpoint.executes, *stored.executes})),
        remarks=(*checkpoint.remarks, *stored.remarks),
    )


FORMAT = Format(
    "deepspeed", "DeepSpeed", matches, read, write_universal,
    keeps=(
        "tensors", "optimizers", "schedules", "step", "progress", "data", "scaler", "clip", "tied", "arguments",
        "layout",
    ),
)  # fmt: skip
