"""Weights and state of optimizers by the names of the training model that they become."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from onward.checkpoint.format import Checkpoint
from onward.checkpoint.matching import Match
from onward.errors import UnsupportedError, list_names
from onward.model import Model
from onward.run_state.problems import Problems
from onward.run_state.state import COUNT, MASTER, Group
from onward.run_state.tensors import ArrayTensor, Tensor, as_tensor, count_of, transpose

_NARROW = (ir.DataType.BFLOAT16, ir.DataType.FLOAT16)


def weights_and_slots(
    checkpoint: Checkpoint, matched: Match, model: Model, groups: Sequence[Group]
) -> tuple[dict[str, Tensor], dict[str, Tensor], bool | None]:
    """Weights and slots by the names of the training model; whether narrow weights have masters, or None."""
    weights = {
        ours: _transpose_if(checkpoint.tensors[theirs], theirs in matched.turned)
        for theirs, ours in matched.names.items()
    }
    slots: dict[str, Tensor] = {}
    masters: dict[str, Tensor] = {}
    trained = {name for group in groups for name in group.parameters}
    for optimizer in checkpoint.optimizers:
        for theirs, kept in optimizer.slots.items():
            ours = matched.names.get(str(theirs))
            if ours is None or ours not in trained:
                continue
            for slot, value in kept.items():
                if slot == COUNT or value is None:
                    continue
                tensor = _transpose_if(as_tensor(value), str(theirs) in matched.turned)
                (masters if slot == MASTER else slots)[ours if slot == MASTER else f"{ours}/{slot}"] = tensor
    wide = [name for name in masters if type_of(model, name) == ir.DataType.FLOAT]
    weights |= {name: masters.pop(name) for name in wide}
    _check_types(weights, model)
    slots |= {f"{name}/{MASTER}": tensor for name, tensor in masters.items()}
    narrow = any(type_of(model, name) in _NARROW for name in trained)
    return weights, slots, bool(masters) if narrow else None


def _check_types(weights: Mapping[str, Tensor], model: Model) -> None:
    problems = Problems("the tensors of the checkpoint")
    for name, tensor in weights.items():
        if type_of(model, name).numpy() != tensor.dtype:
            what = f"`{name}` is {tensor.dtype}, and {type_of(model, name).name.lower()} in the model"
            problems.add(what, "give a model of the type of its weights")
    problems.refuse()


def _transpose_if(tensor: Tensor, is_turned: bool) -> Tensor:
    return transpose(tensor) if is_turned and len(tensor.shape) == 2 else tensor


def updates_made(checkpoint: Checkpoint, matched: Match, groups: Sequence[Group], said: int | None) -> int | None:
    """Return the updates made, as the optimizer, `said` or the checkpoint counts them; None where nothing does.

    Raises:
        UnsupportedError: some of the trained parameters had fewer updates than others, or fewer or more than `said`.
    """
    trained = {name for group in groups for name in group.parameters}
    counts: dict[str, int] = {}
    for optimizer in checkpoint.optimizers:
        for name, slots in optimizer.slots.items():
            if COUNT in slots and matched.names.get(str(name)) in trained:
                counts[str(name)] = count_of(slots[COUNT])
    if not counts:
        return checkpoint.step if said is None else said
    most = max(counts.values())
    behind = [name for name, count in counts.items() if count != most]
    if behind:
        raise UnsupportedError(
            f"{list_names(behind, 5)} had fewer updates than other parameters, and training models count once for all",
            hint="leave those out of training: `--freeze NAME`, or `freeze=[...]`",
        )
    if said not in (None, most):
        raise UnsupportedError(
            f"`step` is {said}, and the optimizer has counted {most} updates", hint="leave `--step` out"
        )
    return most


def averages_of(checkpoint: Checkpoint, matched: Match, groups: Sequence[Group], step: int) -> dict[str, Tensor]:
    """Return averages of trainable parameters, as state of the training model; none if the checkpoint has none.

    Raises:
        UnsupportedError: the first update of the averages is still to come. That of PyTorch copies the weights.
    """
    if checkpoint.average_updates == 0:
        raise UnsupportedError(
            f"the averages in `{checkpoint.path}` have had no update, and the first one copies the weights",
            hint="save it after that update; or leave `--ema` out, which continues without averages",
        )
    trained = {name for group in groups for name in group.parameters}
    found = {
        f"ema/{matched.names[theirs]}": _transpose_if(tensor, theirs in matched.turned)
        for theirs, tensor in checkpoint.averages.items()
        if matched.names.get(theirs) in trained
    }
    count = step if checkpoint.average_updates is None else checkpoint.average_updates
    return {**found, "ema/n_averaged": as_tensor(np.int64(count))} if found else {}


def type_of(model: Model, name: str) -> ir.DataType:
    tensor = model.graph.initializers[name].const_value
    assert tensor is not None
    return tensor.dtype


# ---- scales of the loss ----------------------------------------------------------------------------------------------


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
