"""Folders of the Trainer of transformers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onward.checkpoint.format import Checkpoint, Format
from onward.checkpoint.pytorch.archive import write_torch_file
from onward.checkpoint.pytorch.contents import (
    contents_of,
    has,
    hugging_face_folder,
    mapping,
    progress_of,
    torch_files,
    write_again,
)
from onward.checkpoint.pytorch.pickle_objects import Object
from onward.checkpoint.pytorch.state_dicts import optimizer_of, optimizer_state, schedule_of
from onward.checkpoint.safetensors_files import MODEL, PYTORCH, read_json, write_json, write_safetensors
from onward.recipe.spec import Spec
from onward.vocabulary.rate_formulas import Factor, complete, in_words
from onward.vocabulary.transformers import READERS

STATE = "trainer_state.json"
_ARGUMENTS = "training_args.bin"
_RANDOM = {"Python": "python", "numpy": "numpy", "torch, CPU": "cpu"}
_FAMILIES = {
    **dict.fromkeys(["adamw_torch", "adamw_torch_fused", "adamw_hf"], "adamw"),
    **{name: name for name in ("sgd", "rmsprop", "adagrad")},
}
"""Names of optimizers in arguments -> names in recipes."""
_SCHEDULES = {
    "linear": "linear_schedule_with_warmup",
    "cosine": "cosine_schedule_with_warmup",
    "cosine_with_restarts": "cosine_with_hard_restarts_schedule_with_warmup",
    "cosine_with_min_lr": "cosine_schedule_with_warmup",
    "polynomial": "polynomial_decay_schedule_with_warmup",
    "constant": "constant_schedule",
    "constant_with_warmup": "constant_schedule_with_warmup",
    "inverse_sqrt": "inverse_sqrt_schedule",
}
"""Names of schedules in arguments -> functions of transformers."""


def read(folder: Path) -> Checkpoint:
    state = read_json(folder / STATE)
    trees = torch_files(folder)
    stored = trees.get(_ARGUMENTS)
    arguments = mapping(stored.state if isinstance(stored, Object) else None)
    facts: dict[str, Any] = {}
    if isinstance(tree := trees.get("optimizer.pt"), Mapping) and "param_groups" in tree:
        facts["optimizers"] = (optimizer_of(tree, _FAMILIES.get(_word(arguments.get("optim")))),)
    if isinstance(tree := trees.get("scheduler.pt"), Mapping):
        schedule = schedule_of(tree)  # its function is not stored: its numbers are in the arguments
        words = _words(tree, arguments, state) if schedule.words is None else schedule.words
        facts["schedules"] = (dataclasses.replace(schedule, words=words, every=1),)  # a step with every update
    if "max_grad_norm" in arguments:
        limit = arguments["max_grad_norm"]
        facts["clip"] = {"norm": float(limit), "variant": "torch"} if limit else {}
    if "gradient_accumulation_steps" in arguments:
        facts["accumulate"] = int(arguments["gradient_accumulation_steps"] or 1)
    facts |= {"progress": progress_of(state), "arguments": arguments, "remarks": _remarks(arguments)}
    return hugging_face_folder(folder, FORMAT.name, FORMAT.title, {STATE: state, **trees}, **facts)


def _remarks(arguments: Mapping[str, Any]) -> list[str]:
    """Return what the Trainer does and a training model does not."""
    remarks = []
    if narrow_type := next((dtype for dtype in ("bf16", "fp16") if arguments.get(dtype) is True), None):
        remarks.append(f"the Trainer computes in 16 bits ({narrow_type}=True), a training model in those of its graph")
    if arguments.get("neftune_noise_alpha"):
        remarks.append("the Trainer adds noise to embeddings (`neftune_noise_alpha`), and a training model does not")
    if int(arguments.get("gradient_accumulation_steps") or 1) > 1:
        remarks.append("the Trainer weights the batches of an update by their labels, and a training model does not")
    return remarks


def _word(value: Any) -> str:
    """Return the value of an enumeration member, which is stored by its arguments."""
    return str(value.arguments[0]) if isinstance(value, Object) and value.arguments else str(value)


def _words(tree: Mapping[str, Any], arguments: Mapping[str, Any], state: Mapping[str, Any]) -> tuple[Spec, ...] | None:
    name = _word(arguments.get("lr_scheduler_type"))
    max_steps, bases = state.get("max_steps"), tree.get("base_lrs")
    if name not in _SCHEDULES or not isinstance(max_steps, int) or not bases:
        return None
    warmup = arguments.get("warmup_steps") or 0
    if warmup < 1:
        warmup = math.ceil(max_steps * (warmup or arguments.get("warmup_ratio") or 0))
    numbers: dict[str, Any] = {"num_warmup_steps": int(warmup), "num_training_steps": max_steps}
    numbers |= {"polynomial": {"lr_end": 1e-7, "power": 1.0, "lr_init": bases[0]}}.get(name, {})
    numbers |= {"inverse_sqrt": {"timescale": int(warmup) or 10_000}}.get(name, {})
    numbers |= mapping(arguments.get("lr_scheduler_kwargs"))
    reader = READERS[_SCHEDULES[name]]
    accepted = reader.__code__.co_varnames[1 : reader.__code__.co_argcount]
    if "min_lr" in numbers:
        numbers["min_lr_rate"] = numbers.pop("min_lr") / bases[0]
    if not {*numbers} - {"num_training_steps", "num_warmup_steps"} <= {*accepted}:
        return None
    pieces = reader(bases[0], **{key: value for key, value in numbers.items() if key in accepted})
    parts = complete(pieces)
    rates = [Factor(base, parts).rate(tree.get("last_epoch", 0)) for base in bases]
    if not all(math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-12) for a, b in zip(rates, tree["_last_lr"], strict=True)):
        return None
    if [spec.name for spec, _ in pieces] == ["constant"] and not warmup:
        return ()
    return tuple(in_words(pieces))


def write(checkpoint: Checkpoint, folder: Path) -> None:
    """Write a folder that `trainer.train(resume_from_checkpoint=...)` resumes."""
    if checkpoint.format != FORMAT.name or not contents_of(checkpoint.trees)["modules"]:
        write_safetensors(folder / MODEL, checkpoint.tensors, PYTORCH)
    if checkpoint.format == FORMAT.name:
        write_again(checkpoint, folder)
        return
    if checkpoint.configuration:
        write_json(folder / "config.json", checkpoint.configuration)
    write_json(folder / STATE, _state(checkpoint))
    for optimizer in checkpoint.optimizers[:1]:
        write_torch_file(folder / "optimizer.pt", optimizer_state(optimizer))
    for schedule in checkpoint.schedules[:1]:
        write_torch_file(folder / "scheduler.pt", {**schedule.state})
    if states := {_RANDOM[item.kind]: item.state for item in checkpoint.randomness if item.kind in _RANDOM}:
        write_torch_file(folder / "rng_state.pth", states)


def _state(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the state that the Trainer reads to resume; it derives epochs from steps."""
    return {
        **{name: checkpoint.progress.get(name, 0) for name in ("epoch", "max_steps", "num_train_epochs")},
        "global_step": checkpoint.step or 0,
        **dict.fromkeys(["is_local_process_zero", "is_world_process_zero"], True),
        **dict.fromkeys(["logging_steps", "eval_steps", "save_steps"], 500),
        **dict.fromkeys(["train_batch_size", "trial_name", "trial_params"]),
        "log_history": [],
        "stateful_callbacks": {},
        "total_flos": 0.0,
    }


FORMAT = Format("hf", "Hugging Face Trainer", has(STATE), read, write, needs_names=False)
