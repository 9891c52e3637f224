"""Verify a written checkpoint: read it back and compare it with its source before it replaces anything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from onward.checkpoint.format import Checkpoint, Format
from onward.checkpoint.matching import by_name
from onward.errors import Error, UnsupportedError, list_names
from onward.run_state.state import COUNT, MASTER
from onward.run_state.tensors import Tensor, as_tensor

_MOST_TENSORS, _MOST_BYTES = 64, 16 << 20
"""Tensors whose elements are compared, and bytes of each. Names and shapes are compared for all."""

Pairs = Iterable[tuple[str, Tensor, Tensor | None]]
"""Tensors by name: as they were, and as they were read back."""


def verify_written(checkpoint: Checkpoint, path: Path, format: Format) -> tuple[str, ...]:
    """Raise an UnsupportedError for a tensor, slot or step that does not survive; return other parts that do not."""
    try:
        again = format.read(path)
    except Error as error:
        raise UnsupportedError(f"`{format.name}` could not be read back: {error.message}", hint=error.hint) from error
    names = _paired_names(checkpoint, again)
    _compare(format, "tensor", _tensors(checkpoint, again, names))
    if "optimizers" in format.keeps or not format.keeps:
        _compare(format, "optimizer state", _slots(checkpoint, again, names))
    if checkpoint.step and again.step and again.step != checkpoint.step:
        raise UnsupportedError(f"`{format.name}` would hold step {again.step} in place of {checkpoint.step}")
    survives = {
        "optimizer": bool(again.optimizers or not checkpoint.optimizers),
        "schedule": not any(each.words for each in checkpoint.schedules) or any(each.words for each in again.schedules),
        "averages": bool(again.averages or not checkpoint.averages),
        "loss scale": bool(again.scaler or not checkpoint.scaler),
        "clipping": bool(again.clip or not checkpoint.clip),
        "random states": bool(again.randomness or not checkpoint.randomness),
    }
    return tuple(part for part, is_there in survives.items() if not is_there)


def _compare(format: Format, part: str, pairs: Pairs) -> None:
    pairs = list(pairs)
    if lost := [name for name, _, other in pairs if other is None]:
        raise UnsupportedError(f"`{format.name}` would lose the {part} {list_names(lost, 3)}")
    both = [(name, one, other) for name, one, other in pairs if other is not None]
    small = [pair for pair in both if max(pair[1].nbytes, pair[2].nbytes) <= _MOST_BYTES]
    sample = {name for name, _, _ in small[:: -(-len(small) // _MOST_TENSORS) or 1]}
    for name, one, other in both:
        is_transposed = one.shape != other.shape
        if is_transposed and one.shape != other.shape[::-1]:
            raise UnsupportedError(f"`{format.name}` would give the {part} `{name}` another shape")
        if name in sample and not _equal(one.array().T if is_transposed else one.array(), other.array()):
            raise UnsupportedError(f"`{format.name}` would change the {part} `{name}`")


def _equal(one: np.ndarray, other: np.ndarray) -> bool:
    return one.astype(other.dtype, copy=False).tobytes() == other.tobytes()


def _paired_names(checkpoint: Checkpoint, again: Checkpoint) -> dict[str, str]:
    """Names of tensors, and what they are called where they were read back."""
    theirs = {*again.tensors}
    names = by_name([*checkpoint.tensors], theirs, theirs, [])
    for alias, name in (*checkpoint.tied.items(), *((name, alias) for alias, name in again.tied.items())):
        if name in checkpoint.tensors and name not in names and alias in theirs:
            names[name] = alias
    return names


def _tensors(checkpoint: Checkpoint, again: Checkpoint, names: Mapping[str, str]) -> Iterator[tuple[Any, ...]]:
    """Weights; the float32 copy of one where the format has it in place of a narrower one."""
    slots_of = {name: slots for each in checkpoint.optimizers for name, slots in each.slots.items()}
    for name, tensor in checkpoint.tensors.items():
        other = again.tensors.get(names.get(name, ""))
        if other is None and tensor.dtype.kind in "iu" and not tensor.shape:
            continue  # a counter, which some formats have elsewhere or do not count
        is_same = other is None or other.dtype == tensor.dtype
        yield name, tensor if is_same else slots_of.get(name, {}).get(MASTER, tensor), other


def _slots(checkpoint: Checkpoint, again: Checkpoint, names: Mapping[str, str]) -> Iterator[tuple[Any, ...]]:
    """What optimizers keep. A format without names has numbers, in the order of the groups."""
    for at, optimizer in enumerate(checkpoint.optimizers):
        other = again.optimizers[at] if at < len(again.optimizers) else None
        numbers = {name: n for n, name in enumerate(name for group in optimizer.groups for name in group.parameters)}
        for name, slots in optimizer.slots.items():
            kept = _without_copies(slots)
            keys = (name, names.get(str(name), name), numbers.get(name, name))
            held = next((_without_copies(other.slots[key]) for key in keys if other and key in other.slots), {})
            if other and len(other.families) != 1:  # slots may have the names of another optimizer, or of the format
                rest = [value for slot, value in held.items() if slot not in kept]
                held |= dict(zip((slot for slot in kept if slot not in held), rest, strict=False))
            for slot, value in kept.items():
                yield f"{name}/{slot}", value, held.get(slot)


def _without_copies(slots: Mapping[str, Any]) -> dict[str, Tensor]:
    """Slots without the step and the float32 copy of a weight, which formats have in other places."""
    return {
        slot: as_tensor(value) for slot, value in slots.items() if slot not in (COUNT, MASTER) and value is not None
    }
