"""Scales of the loss, as PyTorch's GradScaler and DeepSpeed keep them, in words of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from onward.run_state.tensors import ArrayTensor


class Scaling(NamedTuple):
    """How a training model scales its loss."""

    words: str | float
    """What `prepare` takes as `loss_scale`."""
    state: Mapping[str, ArrayTensor]


_OF_PYTORCH = ("growth_factor", "backoff_factor", "growth_interval")
_OF_DEEPSPEED = ("scale_factor", "scale_window", "delayed_shift", "min_scale", "cur_hysteresis", "cur_iter")


def scaling_of(scaler: Mapping[str, Any]) -> Scaling | None:
    """What a scaler does; None where it does not say enough, or nothing that a recipe has words for."""
    if _are_numbers(scaler, ("scale", *_OF_PYTORCH, "_growth_tracker")):
        words = ",".join(f"{name}={scaler[name]:g}" for name in _OF_PYTORCH)
        return Scaling(f"dynamic:{words}", _state(scaler["scale"], scaler["_growth_tracker"]))
    if not _are_numbers(scaler, ("cur_scale",)):
        return None
    if not scaler.get("dynamic"):
        return Scaling(float(scaler["cur_scale"]), {})
    if not _are_numbers(scaler, (*_OF_DEEPSPEED, "last_overflow_iter")) or scaler.get("consecutive_hysteresis"):
        return None
    factor, window = scaler["scale_factor"], scaler["scale_window"]
    words = f"growth_factor={factor:g},backoff_factor={1 / factor!r},growth_interval={window:g}"
    words += f",hysteresis={scaler['delayed_shift']:g},min_scale={scaler['min_scale']!r},cooldown=1"
    good = scaler["cur_iter"] - 1 - scaler["last_overflow_iter"]  # updates since, of which the first does not count
    state = _state(scaler["cur_scale"], -1 if good == 0 else (good - 1) % window)
    if scaler["delayed_shift"] > 1:
        state["scaler/hysteresis_tracker"] = ArrayTensor(np.asarray(scaler["cur_hysteresis"], np.int64))
    return Scaling(f"dynamic:{words}", state)


def _are_numbers(scaler: Mapping[str, Any], names: tuple[str, ...]) -> bool:
    return all(isinstance(scaler.get(name), int | float) and not isinstance(scaler[name], bool) for name in names)


def _state(scale: float, tracker: float) -> dict[str, ArrayTensor]:
    return {
        "scaler/scale": ArrayTensor(np.asarray(scale, np.float32)),
        "scaler/growth_tracker": ArrayTensor(np.asarray(tracker, np.int64)),
    }
