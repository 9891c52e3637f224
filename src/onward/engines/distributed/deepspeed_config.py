"""DeepSpeed's own configuration file: what it says about a run, held against what the training model says.

The training model has the optimizer, the schedule, clipping and accumulation, and the run has the batch. What the file
leaves open, or calls `auto`, is theirs; what it says otherwise is refused, since one of them would not be as written.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onward.errors import DataError, RecipeError, UnsupportedError, suggest
from onward.inspect import describe
from onward.model import Model
from onward.model.storage.files import reason, regular

Config = dict[str, Any]
AUTO = "auto"
_LARGEST = 1 << 20
"""Bytes, beyond which a file is no configuration."""

_CARRIED = {
    "zero_optimization", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "steps_per_print",
    "wall_clock_breakdown", "memory_breakdown", "dump_state", "comms_logger", "flops_profiler", "tensorboard", "wandb",
    "csv_monitor", "comet", "prescale_gradients", "gradient_predivide_factor", "disable_python_gc",
}  # fmt: skip
"""How DeepSpeed goes about it: numbers stay what they are."""
_OF_BATCHES = ("train_batch_size", "train_micro_batch_size_per_gpu")
_SETTLED = (*_OF_BATCHES, "gradient_accumulation_steps", "gradient_clipping")
_TYPES = "products are computed in 16 bits with `--precision bfloat16` (`precision=...`); else the model says its types"
_REFUSED = {
    "optimizer": "leave it out: the training model has its optimizer (`--optimizer`)",
    "scheduler": "leave it out: the training model has its schedule (`--schedule`)",
    **dict.fromkeys(("fp16", "bf16", "bfloat16", "amp", "torch_autocast", "data_types"), _TYPES),
    "communication_data_type": "leave it out: gradients are exchanged as they are",
    "activation_checkpointing": "leave it out: blocks are computed twice with `--recompute 1`",
    "tensor_parallel": "leave it out: DeepSpeed divides samples and state here, not products",
}
_PARTITIONS = "leave it out: state stays on the devices that compute with it, in the types that it has"
_ZERO_REFUSED = dict.fromkeys(
    (
        "offload_param", "offload_optimizer", "cpu_offload", "cpu_offload_param", "zenflow", "zero_quantized_weights",
        "zero_quantized_gradients", "zero_quantized_nontrainable_weights", "zero_hpz_partition_size", "mics_shard_size",
        "mics_hierarchical_params_gather",
    ),
    _PARTITIONS,
)  # fmt: skip


def read_deepspeed_config(given: str | os.PathLike[str] | Mapping[str, Any] | None) -> Config | None:
    """What a configuration file of DeepSpeed holds, if there is one; a mapping is that already."""
    if given is None or isinstance(given, Mapping):
        return None if given is None else dict(given)
    try:
        regular(given)
        with open(given, "rb") as file:
            found = json.loads(file.read(_LARGEST))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"`{given}` cannot be read: {reason(error)}", hint="give DeepSpeed's file, JSON") from error
    if not isinstance(found, dict):
        raise DataError(f"`{Path(given).name}` is no configuration of DeepSpeed", hint="it is a JSON object")
    return found


def without_batch_size(config: Mapping[str, Any]) -> Config:
    """The same for any number of processes."""
    return {key: value for key, value in config.items() if key not in _OF_BATCHES}


def with_batch_size(config: Mapping[str, Any], model: Model, batch_size: int, processes: int) -> Config:
    """The same for batches of that size, in all processes together: a batch that it says otherwise is refused."""
    each, odd = divmod(batch_size, processes)
    every = accumulated_batches(model)
    expected = {"train_micro_batch_size_per_gpu": each + bool(odd), "train_batch_size": batch_size * every}
    for key, number in expected.items():
        found = config.get(key, AUTO)
        if found != AUTO and (found != number or odd):
            batches = f" in {every} batches" if every > 1 else ""
            raise RecipeError(
                f"DeepSpeed's configuration has `{key}` {found}, and the run has batches of {batch_size} in "
                f"{processes} processes together, which is {number}",
                hint=f"call it `auto`, or say `--batch-size` so that it is {found}{batches}",
            )
    return {**config, "train_micro_batch_size_per_gpu": expected["train_micro_batch_size_per_gpu"]}


def settle(given: Mapping[str, Any], model: Model, processes: int) -> Config:
    """What DeepSpeed is told: ZeRO as it is configured; clipping and accumulation are the training model's."""
    config = {key: value for key, value in given.items() if not _is_unset(value)}
    _refuse(config, _REFUSED, _CARRIED | set(_SETTLED), "DeepSpeed's configuration")
    _check_recipe(config, model, processes)
    zero = {key: value for key, value in config.get("zero_optimization", {}).items() if not _is_unset(value)}
    _refuse(zero, _ZERO_REFUSED, None, "`zero_optimization` of DeepSpeed's configuration")
    if zero.get("stage", 0) not in (0, 1, 2, 3):
        raise DataError(f"ZeRO has no stage {zero['stage']}", hint="its stages are 0, 1, 2 and 3")
    if zero.get("stage", 0) in (1, 2):
        zero["compute_grad_norm"] = False  # the update does, where it clips
    elif zero.get("stage") == 3:
        zero.setdefault("sub_group_size", 2**53)
    carried = {key: value for key, value in config.items() if key in _CARRIED}
    return {
        **carried,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "train_micro_batch_size_per_gpu": config.get("train_micro_batch_size_per_gpu", 1),
        "gradient_accumulation_steps": 1,  # batch after batch goes into the update, which accumulates and clips
        "gradient_clipping": 0.0,
    }


def _is_unset(value: Any) -> bool:
    """Whether a setting is left to others, or says that something is not done."""
    if isinstance(value, Mapping):
        return "enabled" in value and value["enabled"] in (False, AUTO)
    return value is None or value is False or (isinstance(value, str) and value == AUTO)


def _refuse(config: Config, refused: Mapping[str, str], known: set[str] | None, where: str) -> None:
    for key in config:
        if key in refused:
            raise UnsupportedError(f"{where} has `{key}`, which would change the training", hint=refused[key])
        if known is not None and key not in known:
            raise UnsupportedError(
                f"{where} has `{key}`, and nobody knows whether numbers stay the same with it",
                hint=suggest(key, known) or "leave it out",
            )


def _check_recipe(config: Config, model: Model, processes: int) -> None:
    """Clipping and accumulation must be the training model's, if it says them, and the batch a product."""
    every, limit = accumulated_batches(model), _norm_limit(model)
    facts = [
        ("gradient_accumulation_steps", every, f"makes an update of {every}", "--accumulate {:g}"),
        ("gradient_clipping", limit, f"has {limit:g} as the limit of the norm of all gradients", "--clip norm:{:g}"),
    ]
    for key, number, what, option in facts:
        found = _number(config, key, number)
        if not math.isclose(found, number, rel_tol=1e-6):
            raise RecipeError(
                f"DeepSpeed's configuration has `{key}` {found:g}, and the training model {what}",
                hint=f"call it `auto`, or prepare the model with `{option.format(found)}`",
            )
    each = _number(config, "train_micro_batch_size_per_gpu", 1)
    whole = _number(config, "train_batch_size", each * every * processes)
    if "train_micro_batch_size_per_gpu" in config and whole != each * every * processes:
        raise RecipeError(
            f"DeepSpeed's configuration has `train_batch_size` {whole:g}, and {each:g} x {every} x {processes} "
            f"processes are {each * every * processes:g}",
            hint="call one of them `auto`",
        )


def _number(config: Config, key: str, usual: float) -> float:
    found = config.get(key, usual)
    if not isinstance(found, int | float):
        raise DataError(f"`{key}` of DeepSpeed's configuration is no number", hint="give one, or `auto`")
    return found


def accumulated_batches(model: Model, step: int = 0) -> int:
    """Return how many batches an update of a step is made of."""
    found = describe(model).steps[step].accumulation
    return int(found.batches) if found is not None and isinstance(found.batches, int | float) else 1


def _norm_limit(model: Model) -> float:
    """At which norm of all gradients together they are clipped; 0 if they are not, as DeepSpeed has it."""
    clip = describe(model).steps[0].clip
    return clip.limit if clip is not None and clip.kind == "norm" and isinstance(clip.limit, int | float) else 0.0
