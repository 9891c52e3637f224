"""DeepSpeed's configuration file, compared with the training model.

The optimizer, the schedule, clipping and accumulation come from the training model, the batch size from the run. They
fill in what the file omits or sets to `auto`. Other values are refused, since one of the two would be ignored.
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
"""Bytes; a larger file cannot be a configuration."""

_CARRIED = {
    "zero_optimization", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "steps_per_print",
    "wall_clock_breakdown", "memory_breakdown", "dump_state", "comms_logger", "flops_profiler", "tensorboard", "wandb",
    "csv_monitor", "comet", "prescale_gradients", "gradient_predivide_factor", "disable_python_gc",
}  # fmt: skip
"""Keys that are passed on: they do not change the numbers."""
_OF_BATCHES = ("train_batch_size", "train_micro_batch_size_per_gpu")
_SETTLED = (*_OF_BATCHES, "gradient_accumulation_steps", "gradient_clipping")
_TYPES = "leave it out; for 16-bit matmuls use `--precision bfloat16`"
_REFUSED = {
    "optimizer": "leave it out: the training model has its optimizer (`--optimizer`)",
    "scheduler": "leave it out: the training model has its schedule (`--schedule`)",
    **dict.fromkeys(("fp16", "bf16", "bfloat16", "amp", "torch_autocast", "data_types"), _TYPES),
    "communication_data_type": "leave it out: gradients are reduced in their own type",
    "activation_checkpointing": "leave it out: recompute blocks with `--recompute 1`",
    "tensor_parallel": "leave it out: DeepSpeed shards samples and state here, not matmuls",
}
_ZERO_REFUSED = dict.fromkeys(
    (
        "offload_param", "offload_optimizer", "cpu_offload", "cpu_offload_param", "zenflow", "zero_quantized_weights",
        "zero_quantized_gradients", "zero_quantized_nontrainable_weights", "zero_hpz_partition_size", "mics_shard_size",
        "mics_hierarchical_params_gather",
    ),
    "leave it out: state stays on the devices that compute with it, in its own type",
)  # fmt: skip


def read_deepspeed_config(config: str | os.PathLike[str] | Mapping[str, Any] | None) -> Config | None:
    """Return the content of a configuration file, or of a mapping."""
    if config is None or isinstance(config, Mapping):
        return None if config is None else dict(config)
    try:
        regular(config)
        with open(config, "rb") as file:
            content = json.loads(file.read(_LARGEST))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"cannot read `{config}`: {reason(error)}", hint="pass DeepSpeed's JSON file") from error
    if not isinstance(content, dict):
        raise DataError(
            f"`{Path(config).name}` is not a DeepSpeed configuration",
            hint='pass a JSON object: `{"zero_optimization": {"stage": 2}}`',
        )
    return content


def without_batch_size(config: Mapping[str, Any]) -> Config:
    """Return the configuration without batch sizes, which holds for any number of processes."""
    return {key: value for key, value in config.items() if key not in _OF_BATCHES}


def with_batch_size(config: Mapping[str, Any], model: Model, batch_size: int, processes: int) -> Config:
    """Return the configuration for a global batch size; raise if it has another one."""
    per_process, rest = divmod(batch_size, processes)
    every = accumulated_batches(model)
    expected = {"train_micro_batch_size_per_gpu": per_process + bool(rest), "train_batch_size": batch_size * every}
    for key, number in expected.items():
        configured = config.get(key, AUTO)
        if configured != AUTO and (configured != number or rest):
            batches = f" in {every} batches" if every > 1 else ""
            raise RecipeError(
                f"`{key}` in DeepSpeed's configuration is {configured}, but a batch of {batch_size} on {processes} "
                f"processes is {number}",
                hint=f"set it to `auto`, or change `--batch-size` so that it is {configured}{batches}",
            )
    return {**config, "train_micro_batch_size_per_gpu": expected["train_micro_batch_size_per_gpu"]}


def settle(configured: Mapping[str, Any], model: Model, processes: int) -> Config:
    """Return the configuration for DeepSpeed: ZeRO as configured, and no clipping or accumulation."""
    config = {key: value for key, value in configured.items() if not _is_unset(value)}
    _refuse(config, _REFUSED, _CARRIED | set(_SETTLED), "DeepSpeed's configuration")
    _check_recipe(config, model, processes)
    zero = {key: value for key, value in config.get("zero_optimization", {}).items() if not _is_unset(value)}
    _refuse(zero, _ZERO_REFUSED, None, "`zero_optimization` of DeepSpeed's configuration")
    if zero.get("stage", 0) not in (0, 1, 2, 3):
        raise DataError(f"ZeRO has no stage {zero['stage']}", hint="use stage 0, 1, 2 or 3")
    if zero.get("stage", 0) in (1, 2):
        zero["compute_grad_norm"] = False  # the update computes it if it clips
    elif zero.get("stage") == 3:
        zero.setdefault("sub_group_size", 2**53)  # one group: the update runs on all parameters at once
    return {
        **{key: value for key, value in config.items() if key in _CARRIED},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "train_micro_batch_size_per_gpu": config.get("train_micro_batch_size_per_gpu", 1),
        "gradient_accumulation_steps": 1,  # the update accumulates and clips
        "gradient_clipping": 0.0,
    }


def _is_unset(value: Any) -> bool:
    """True if a setting is `auto` or disabled."""
    if isinstance(value, Mapping):
        return "enabled" in value and value["enabled"] in (False, AUTO)
    return value is None or value is False or (isinstance(value, str) and value == AUTO)


def _refuse(config: Config, refused: Mapping[str, str], allowed: set[str] | None, where: str) -> None:
    for key in config:
        if key in refused:
            raise UnsupportedError(f"{where} has `{key}`, which would change the training", hint=refused[key])
        if allowed is not None and key not in allowed:
            raise UnsupportedError(
                f"{where} has the unknown key `{key}`, which might change the numbers",
                hint=suggest(key, allowed) or "leave it out",
            )


def _check_recipe(config: Config, model: Model, processes: int) -> None:
    """Raise if clipping, accumulation or batch sizes differ from the training model's."""
    every, clip = accumulated_batches(model), describe(model).steps[0].clip
    limit = 0.0  # DeepSpeed's value for no clipping
    if clip is not None and clip.kind == "norm" and isinstance(clip.limit, int | float):
        limit = clip.limit
    facts = [
        ("gradient_accumulation_steps", every, f"accumulates {every}", "--accumulate {:g}"),
        ("gradient_clipping", limit, f"clips at {limit:g}", "--clip norm:{:g}"),
    ]
    for key, number, what, option in facts:
        configured = _number(config, key, number)
        if not math.isclose(configured, number, rel_tol=1e-6):
            raise RecipeError(
                f"`{key}` in DeepSpeed's configuration is {configured:g}, but the training model {what}",
                hint=f"set it to `auto`, or prepare the model with `{option.format(configured)}`",
            )
    per_process = _number(config, "train_micro_batch_size_per_gpu", 1)
    whole = _number(config, "train_batch_size", per_process * every * processes)
    if "train_micro_batch_size_per_gpu" in config and whole != per_process * every * processes:
        raise RecipeError(
            f"`train_batch_size` in DeepSpeed's configuration is {whole:g}, but {per_process:g} x {every} x "
            f"{processes} processes is {per_process * every * processes:g}",
            hint='set one of them to `"auto"`',
        )


def _number(config: Config, key: str, default: float) -> float:
    number = config.get(key, default)
    if not isinstance(number, int | float):
        raise DataError(f"`{key}` in DeepSpeed's configuration must be a number: {number!r}", hint='set it to `"auto"`')
    return number


def accumulated_batches(model: Model, step: int = 0) -> int:
    """Return the number of batches that an update of a step accumulates."""
    accumulation = describe(model).steps[step].accumulation
    return (
        int(accumulation.batches) if accumulation is not None and isinstance(accumulation.batches, int | float) else 1
    )
