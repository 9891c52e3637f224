"""A checkpoint in a few lines, and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from onward.checkpoint.embedded import RECORDS
from onward.checkpoint.format import Checkpoint
from onward.checkpoint.pytorch.contents import UPDATES, states_of
from onward.errors import list_names
from onward.inspect.formatting import quantity, size
from onward.run_state.state import OptimizerState, ParameterGroup, RandomState, SchedulerState
from onward.run_state.tensors import ScatteredTensor, StoredTensor, Tensor

_MOST_NAMES, _MOST_SETTINGS = 6, 12


def lines(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    """Return a checkpoint as labels and texts."""
    model = checkpoint.configuration.get("architectures") or [checkpoint.configuration.get("model_type")]
    batches, code = checkpoint.accumulate or 1, list_names(checkpoint.executes, _MOST_NAMES)
    # The count of the optimizer, if the training loop stored none.
    counted = {} if checkpoint.step is None or checkpoint.progress.keys() & {*UPDATES} else {"step": checkpoint.step}
    rows = [
        ("format", checkpoint.title),
        ("parameters", _amount(checkpoint.tensors.values())),
        ("modules", list_names(others, _MOST_NAMES) if len(others := states_of(checkpoint)) > 1 else ""),
        ("model", ", ".join(str(name) for name in model if name)),
        *(row for optimizer in checkpoint.optimizers for row in _optimizer(optimizer)),
        *(("schedule", _schedule(schedule)) for schedule in checkpoint.schedules),
        ("progress", settings(counted | dict(checkpoint.progress))),
        ("random", "; ".join(dict.fromkeys(generator.kind for generator in checkpoint.randomness))),
        ("data", settings(checkpoint.data)),
        ("loss scale", settings(checkpoint.scaler)),
        ("averages", _amount(checkpoint.averages.values())),
        ("clipping", settings(checkpoint.clip or {})),
        ("accumulation", f"{batches} batches for each update" if batches > 1 else ""),
        ("layout", settings(checkpoint.layout)),
        ("arguments", settings(checkpoint.arguments)),
        ("other files", list_names(checkpoint.files, _MOST_NAMES)),
        *(("note", remark) for remark in checkpoint.remarks),
        ("not in it", "; ".join(checkpoint.missing)),
        ("names code", f"{code}, and none of it ran" if code else ""),
    ]
    return [(label, text) for label, text in rows if text]


def tensor_lines(checkpoint: Checkpoint) -> list[str]:
    """Return a line for each tensor of the model, of averages, and of optimizers."""
    named = [
        *checkpoint.tensors.items(),
        *((f"{name} (average)", tensor) for name, tensor in checkpoint.averages.items()),
        *((f"{name}/{slot}", value) for name, slot, value in checkpoint.stored_slots if isinstance(value, Tensor)),
    ]
    return [f"{name}  {list(tensor.shape)}  {tensor.dtype}  {size(tensor.nbytes)}" for name, tensor in named]


def to_json(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return all facts of a checkpoint but `trees`, for JSON."""
    fields = {name: plain(getattr(checkpoint, name)) for name in RECORDS[Checkpoint][1]}
    return {
        **fields,
        "path": str(checkpoint.path),
        "trees": list(checkpoint.trees),
        "missing": list(checkpoint.missing),
    }


def _amount(tensors: Iterable[Tensor]) -> str:
    listed = list(tensors)
    if not listed:
        return ""
    types = ", ".join(sorted({str(tensor.dtype) for tensor in listed}))
    numbers, nbytes = sum(math.prod(tensor.shape) for tensor in listed), sum(tensor.nbytes for tensor in listed)
    return f"{len(listed):,} tensors of {types}, {numbers:,} numbers, {size(nbytes)}"


def _optimizer(optimizer: OptimizerState) -> Iterator[tuple[str, str]]:
    yield "optimizer", f"{optimizer.title}, keeps {_amount(optimizer.tensors) or 'nothing'}"
    for group in optimizer.groups:
        text = settings(group.settings) or str(group.optimizer or "settings are not stored")
        yield "", f"{quantity(len(group.parameters), 'parameter')}: {text}"


def _schedule(schedule: SchedulerState) -> str:
    if schedule.words is None:
        state = settings(schedule.state)
        return f"a function that is not stored, or of an unknown kind{f': {state}' if state else ''}"
    shape = ", then ".join(map(str, schedule.words)) or "constant"
    return f"{shape}; after {quantity(schedule.position or 0, 'step')}"


def settings(options: Mapping[str, Any]) -> str:
    """Return numbers and strings that have an effect, in a line."""
    shown = [
        f"{key} {f'{value:.6g}' if isinstance(value, float) else value}"
        for key, value in options.items()
        if isinstance(value, bool | int | float | str | tuple) and value is not False and value not in ("", ())
        if not key.startswith("_") and len(str(value)) < 40
    ]
    more = f" and {len(shown) - _MOST_SETTINGS} more" if len(shown) > _MOST_SETTINGS else ""
    return ", ".join(shown[:_MOST_SETTINGS]) + more


def plain(tree: Any, depth: int = 12) -> Any:
    """Return a tree as JSON; other objects as text."""
    if isinstance(tree, Tensor):
        location: dict[str, Any] = {}
        if isinstance(tree, StoredTensor):
            location = {"file": tree.path.name, "offset": tree.offset}
        elif isinstance(tree, ScatteredTensor):
            location = {"pieces": len(tree.pieces)}
        return {"dtype": str(tree.dtype), "shape": list(tree.shape), **location}
    if isinstance(tree, OptimizerState | ParameterGroup | SchedulerState):
        return {name: plain(getattr(tree, name), depth - 1) for name in RECORDS[type(tree)][1]}
    if isinstance(tree, RandomState):
        return {"kind": tree.kind, "rank": tree.rank}
    if depth and isinstance(tree, Mapping):
        return {str(key): plain(value, depth - 1) for key, value in tree.items()}
    if depth and isinstance(tree, list | tuple):
        return [plain(item, depth - 1) for item in tree]
    if isinstance(tree, float):
        return tree if math.isfinite(tree) else str(tree)
    return tree if isinstance(tree, bool | int | str | None) else str(tree)[:200]
