"""Checkpoints of Megatron: `torch_dist`, a distributed one of PyTorch, and older ones."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onward.checkpoint.format import Checkpoint, Format
from onward.checkpoint.formats.dcp import METADATA, read_tree, write_values
from onward.checkpoint.pytorch.archive import read_torch_file, write_torch_file
from onward.checkpoint.pytorch.contents import contents_of, executed_names, mapping
from onward.checkpoint.pytorch.pickle_objects import Object
from onward.checkpoint.pytorch.state_dicts import (
    optimizer_of,
    refuse_unknown_class,
    settings_now,
    spec_of,
    without_copies,
)
from onward.checkpoint.safetensors_files import read_json, write_json
from onward.checkpoint.zero import numbered_slots
from onward.errors import Error, UnsupportedError, list_names
from onward.model.storage.files import SENSELESS, blame_file
from onward.recipe.spec import Spec
from onward.run_state.state import COUNT, MASTER, OptimizerState, ParameterGroup, RandomState, SchedulerState
from onward.run_state.tensors import ArrayTensor, Tensor, as_tensor, count_of
from onward.vocabulary.megatron import advance_state, schedule_words

_LATEST = "latest_checkpointed_iteration.txt"
_COMMON, _BACKEND = "common.pt", "metadata.json"
_OLD = "model_optim_rng.pt"
_KEPT = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?P<slot>[^.]+)\.(?P<name>.+)")
_RANDOM = re.compile(r"rng_state/shard_(?P<index>[\d.]+)_(?P<sizes>[\d.]+)")
"""Random state of a process, by its indices in a grid of given sizes."""
_MASTER = "fp32_param"


def matches(path: Path) -> bool:
    return _newest(path) is not None


def _newest(folder: Path) -> Path | None:
    """Return the folder that a file names as the newest checkpoint, or the folder itself."""
    if _is_checkpoint(folder):
        return folder
    if not (folder / _LATEST).is_file():
        return None
    with open(folder / _LATEST, encoding="utf-8", errors="replace") as file:
        tag = file.read(100).strip()
    is_number = tag.isascii() and tag.isdigit()
    newest = folder / (f"iter_{int(tag):07d}" if is_number else "release")
    return newest if (is_number or tag == "release") and _is_checkpoint(newest) else None


def _is_checkpoint(folder: Path) -> bool:
    if (folder / METADATA).is_file() and (folder / _COMMON).is_file() and (folder / _BACKEND).is_file():
        try:
            return "sharded_backend" in read_json(folder / _BACKEND)
        except Error:  # of another program
            return False
    return bool(_old_files(folder))


def _old_files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"mp_rank_*/{_OLD}")) if folder.is_dir() else []


def read(path: Path) -> Checkpoint:
    folder = _newest(path)
    assert folder is not None
    with blame_file(f"`{folder}` is not a whole checkpoint of Megatron", *SENSELESS):
        return _read_distributed(path, folder) if (folder / METADATA).is_file() else _read_old(path, folder)


def _read_distributed(path: Path, folder: Path) -> Checkpoint:
    backend = read_json(folder / _BACKEND)
    if backend["sharded_backend"] != "torch_dist":
        raise UnsupportedError(
            f"`{folder}` is of Megatron's `{backend['sharded_backend']}`, which cannot be read",
            hint="load it in Megatron and save it with `--ckpt-format torch_dist`",
        )
    values, common = read_tree(folder), mapping(read_torch_file(folder / _COMMON))
    slots: dict[str | int, dict[str, Any]] = {}
    tensors: dict[str, Tensor] = {}
    for key, value in values.items():
        if match := _KEPT.fullmatch(key):
            slot = MASTER if match["slot"] == _MASTER else match["slot"]
            slots.setdefault(match["name"], {})[slot] = value
        elif isinstance(value, Tensor) and not key.startswith(("optimizer.", "chained_", "rng_state")):
            tensors[key] = value
    objects = {key: value for key, value in values.items() if not isinstance(value, Tensor)}
    return _checkpoint(path, common, tensors, slots, _random(objects), {_COMMON: common, METADATA: objects})


def _random(objects: Mapping[str, Any]) -> tuple[RandomState, ...]:
    states = []
    for key, value in objects.items():
        if match := _RANDOM.fullmatch(key):
            index, sizes = ([int(number) for number in match[key].split(".")] for key in ("index", "sizes"))
            rank = int(np.ravel_multi_index(index, sizes))
            randomness = contents_of([value])["randomness"].values()
            states += [RandomState(generator.kind, generator.state, rank) for generator in randomness]
    return tuple(states)


def _read_old(path: Path, folder: Path) -> Checkpoint:
    """Read a checkpoint of an older version, if it is of one process."""
    first, *others = _old_files(folder)
    if others:
        raise UnsupportedError(
            f"`{folder}` splits its tensors over {len(others) + 1} processes in an unknown way",
            hint="load it in Megatron and save it with `--ckpt-format torch_dist`",
        )
    tree = mapping(read_torch_file(first))
    tensors = dict(_flat(mapping(tree.get("model"))))
    slots: dict[str | int, dict[str, Any]] = {}
    for inner in _inner_states(tree):
        slots |= numbered_slots(inner, mapping(tree.get("optimizer")).get("fp32_from_fp16_params") or None)
    trees = {first.name: {key: value for key, value in tree.items() if key != "model"}}
    randomness = tuple(contents_of(tree.get("rng_state") or [])["randomness"].values())
    return _checkpoint(path, tree, tensors, slots, randomness, trees)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of nested dicts."""
    for key, value in tree.items():
        if isinstance(value, Tensor):
            yield f"{prefix}{key}", value
        elif isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")


def _checkpoint(
    path: Path,
    common: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    slots: Mapping[str | int, Mapping[str, Any]],
    randomness: tuple[RandomState, ...],
    trees: Mapping[str, Any],
) -> Checkpoint:
    stored = common.get("args")
    arguments = mapping(stored.state if isinstance(stored, Object) else stored)
    iteration = common.get("iteration")
    state, first_rate = common.get("opt_param_scheduler"), float(arguments.get("lr_warmup_init") or 0.0)
    schedule = SchedulerState({})
    if isinstance(state, Mapping):
        schedule = SchedulerState(state, schedule_words(state, first_rate, iteration), iteration, every=1)
    optimizer, remarks = _optimizer(common, arguments, slots, tensors)
    clip = {"norm": float(limit), "variant": "torch"} if (limit := arguments.get("clip_grad")) else {}
    optimizer_tree = mapping(common.get("optimizer"))
    samples = arguments.get("consumed_train_samples")
    return Checkpoint(
        path=path,
        format=FORMAT.name,
        title=FORMAT.title,
        tensors=tensors,
        optimizers=(optimizer,) if optimizer else (),
        schedules=(schedule,),
        step=iteration if isinstance(iteration, int) else None,
        progress={"iteration": iteration, **({"consumed_train_samples": samples} if isinstance(samples, int) else {})},
        randomness=randomness,
        scaler=mapping(optimizer_tree.get("grad_scaler")),
        clip=clip if "clip_grad" in arguments else None,
        accumulate=_batches_for_update(arguments),
        keeps_order=any(isinstance(name, int) for name in slots),
        arguments=arguments,
        layout={key: value for key, value in arguments.items() if key.endswith("_parallel_size")},
        trees=trees,
        executes=executed_names(trees),
        remarks=remarks,
    )


def _batches_for_update(arguments: Mapping[str, Any]) -> int | None:
    """Return the micro-batches of each process in an update, if all sizes are stored."""
    sizes: list[Any] = [arguments.get(name) for name in ("global_batch_size", "micro_batch_size", "data_parallel_size")]
    if arguments.get("rampup_batch_size") or not all(type(size) is int and size > 0 for size in sizes):
        return None
    batch_size, micro, processes = sizes
    count, rest = divmod(batch_size, micro * processes)
    return None if rest else int(count)


def _inner_states(common: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return states of optimizers: a plain one, one with float32 copies, or a chain."""
    stored = mapping(common.get("optimizer"))
    chained = [mapping(stored[key]) for key in stored if isinstance(key, int)] or [stored]
    states = [mapping(optimizer.get("optimizer", optimizer)) for optimizer in chained]
    return [state for state in states if isinstance(state.get("param_groups"), list)]


def _optimizer(
    common: Mapping[str, Any],
    arguments: Mapping[str, Any],
    slots: Mapping[str | int, Mapping[str, Any]],
    tensors: Mapping[str, Tensor],
) -> tuple[OptimizerState | None, tuple[str, ...]]:
    states = _inner_states(common)
    stored = [mapping(group) for state in states for group in state["param_groups"]]
    if not stored:
        return None, ()
    if not slots:
        return None, ("the optimizer state is in buckets without names",)
    members, remarks = _members(stored, slots, tensors)
    if members is None:
        return None, remarks
    counts = [mapping(state.get("state")).get("common_step") for state in states]
    step = next((count_of(count) for count in counts if count is not None), None)
    counted = {} if step is None else {COUNT: step}
    counted_slots = {name: counted | without_copies(slots[name], tensors.get(str(name))) for name in slots}
    is_adam = all({"exp_avg", "exp_avg_sq"} <= values.keys() for values in counted_slots.values())
    if not is_adam:  # its slots tell its class, as in PyTorch
        groups = [{**group, "params": list(names)} for group, names in zip(stored, members, strict=True)]
        return optimizer_of({"state": counted_slots, "param_groups": groups}), remarks
    is_known = arguments.get("optimizer", "adam") == "adam"
    adams = []
    for group, names in zip(stored, members, strict=True):
        settings = {key: value for key, value in group.items() if key != "params"}
        adams += [ParameterGroup(_spec(group, common) if is_known else None, tuple(names), settings)] if names else []
    return OptimizerState(("adamw",) if is_known else (), tuple(adams), counted_slots), remarks


def _spec(group: Mapping[str, Any], common: Mapping[str, Any]) -> Spec | None:
    """Return Megatron's Adam with decoupled weight decay and the highest rate of the schedule."""
    schedule = mapping(common.get("opt_param_scheduler"))
    changes = schedule.get("start_wd") != schedule.get("end_wd")
    is_coupled = group.get("decoupled_weight_decay") is False and group.get("weight_decay")
    if changes or is_coupled or group.get("bias_correction", True) is not True:
        return None
    highest = group.get("max_lr", schedule.get("max_lr", group.get("lr")))
    return spec_of("adamw", {**group, "max_lr": highest * group.get("lr_mult", 1.0)})


def _members(
    groups: Sequence[Mapping[str, Any]], slots: Mapping[str | int, Any], tensors: Mapping[str, Tensor]
) -> tuple[list[list[str | int]] | None, tuple[str, ...]]:
    """Return the parameters of each group, by Megatron's default rule if they are not stored."""
    if all(isinstance(group.get("params"), list) for group in groups):
        return [list(group["params"]) for group in groups], ()
    if len(groups) == 1:
        return [list(slots)], ()
    factors = [group.get("wd_mult", group.get("pre_wd_mult")) for group in groups]  # the latter is NeMo's
    if sorted(map(str, factors)) != ["0.0", "1.0"]:
        return None, (f"it does not assign parameters to its {len(groups)} groups",)
    undecayed = [name for name in slots if _is_plain(str(name), tensors)]
    decayed = [name for name in slots if name not in undecayed]
    remark = "it does not say which parameters decay; by Megatron's rule, all but biases and vectors do"
    return [decayed if factor else undecayed for factor in factors], (remark,)


def _is_plain(name: str, tensors: Mapping[str, Tensor]) -> bool:
    """True for a bias or a vector; equal layers may be stacked along a first axis."""
    is_stacked = ".layers." in name and re.search(r"\.layers\.\d", name) is None
    return name.endswith(".bias") or (name in tensors and len(tensors[name].shape) - is_stacked == 1)


def write(checkpoint: Checkpoint, path: Path) -> None:
    """Write a `torch_dist` checkpoint, which Megatron loads for any parallel sizes."""
    if len(checkpoint.optimizers) > 1:
        raise UnsupportedError("a checkpoint of Megatron has one optimizer", hint="write it with `--to torch`")
    for optimizer in checkpoint.optimizers:
        refuse_unknown_class(optimizer)
        if any(g.optimizer_name == "adam" and g.spec.options.get("weight_decay") for g in optimizer.groups):
            raise UnsupportedError(
                "Megatron's Adam decouples weight decay, and that of the checkpoint does not",
                hint="write it with `--to dcp`",
            )
    step = checkpoint.step or 0
    folder = path / f"iter_{step:07d}"
    folder.mkdir(parents=True)
    (path / _LATEST).write_text(str(step))
    slots = checkpoint.optimizers[0].slots if checkpoint.optimizers else {}
    if unnamed := [name for name in slots if isinstance(name, int)]:
        raise UnsupportedError(f"Megatron needs names for the parameters {list_names(list(map(str, unnamed)), 3)}")
    values: dict[str, Any] = {**checkpoint.tensors}
    for name, tensors in slots.items():
        for slot, value in tensors.items():
            if slot != COUNT:
                values[f"optimizer.state.{_MASTER if slot == MASTER else slot}.{name}"] = as_tensor(value)
    values |= mapping(checkpoint.trees.get(METADATA)) if checkpoint.format == FORMAT.name else {}
    write_values((((key,), value) for key, value in values.items()), folder)
    write_torch_file(folder / _COMMON, _common(checkpoint, step))
    backends = {"sharded_backend": "torch_dist", "common_backend": "torch"}
    write_json(folder / _BACKEND, {**backends, **{f"{key}_version": 1 for key in backends}})


def _common(checkpoint: Checkpoint, step: int) -> dict[str, Any]:
    stored = mapping(checkpoint.trees.get(_COMMON)) if checkpoint.format == FORMAT.name else {}
    tree: dict[str, Any] = {"checkpoint_version": 3.0, **stored, "iteration": step}
    if isinstance(stored.get("opt_param_scheduler"), Mapping):
        tree["opt_param_scheduler"] = advance_state(stored["opt_param_scheduler"], stored.get("iteration"), step)
    if not checkpoint.optimizers:
        return tree
    (optimizer,) = checkpoint.optimizers
    count = step if optimizer.count is None else optimizer.count
    state = {
        "state": {"common_step": ArrayTensor(np.array(count, np.float32))},
        "param_groups": [_with_factors(settings_now(group)) for group in optimizer.groups],
    }
    stored_optimizer = mapping(stored.get("optimizer"))
    is_nested = "optimizer" in stored_optimizer or any(MASTER in slots for slots in optimizer.slots.values())
    tree["optimizer"] = {**stored_optimizer, "optimizer": state} if is_nested else state
    return tree


def _with_factors(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with those by which Megatron distinguishes groups."""
    decays = bool(settings.get("weight_decay"))
    factors = {"wd_mult": float(decays), "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
    return {**{key: value for key, value in factors.items() if f"pre_{key}" not in settings}, **settings}


FORMAT = Format(
    "megatron", "Megatron", matches, read, write,
    keeps=(
        "tensors", "optimizers", "schedules", "step", "progress", "randomness", "scaler", "clip", "arguments", "layout",
    ),
)  # fmt: skip
