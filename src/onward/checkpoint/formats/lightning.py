"""Checkpoints of Lightning: a file of `torch.save` with the state of its loops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from onward.checkpoint.format import Checkpoint, Format
from onward.checkpoint.pytorch.archive import is_torch_file, mentions, read_torch_file, write_torch_file
from onward.checkpoint.pytorch.pickling import Object
from onward.checkpoint.pytorch.states import module_state, optimizer_state, up_to_date
from onward.checkpoint.pytorch.trees import averages_made, checkpoint_of, mapping, progress_of
from onward.errors import Error, InvalidModelError

_VERSION = "pytorch-lightning_version"
_WRITTEN = "2.6.6"
"""The version whose layout is written."""
_STEPS = "epoch_loop.automatic_optimization.optim_progress"


def matches(path: Path) -> bool:
    if not is_torch_file(path) or not mentions(path, _VERSION):
        return False
    try:
        tree = read_torch_file(path)
    except Error:  # whoever reads the file as one of PyTorch says what is wrong
        return False
    return isinstance(tree, Mapping) and _VERSION in tree


def read(path: Path) -> Checkpoint:
    tree: Mapping[str, Any] = read_torch_file(path)
    averaged = "current_model_state" in tree
    remarks = []
    if averaged:
        remarks.append("`state_dict` holds averaged weights; those that are trained are `current_model_state`")
    if "loops" not in tree:
        remarks.append("it does not say how far the loops are: Lightning would begin to count again")
    given = plain(tree.get("hyper_parameters"))
    counts = counts_of(tree)
    found = checkpoint_of(
        path,
        FORMAT.name,
        f"Lightning {tree[_VERSION]}",
        {path.name: tree},
        tensors=mapping(tree.get("current_model_state" if averaged else "state_dict")),
        averages=mapping(tree.get("state_dict")) if averaged else {},
        **({"average_updates": averages_made(mapping(tree.get("averaging_state")))} if averaged else {}),
        progress=progress_of(tree),
        keeps_order=True,
        arguments=mapping(given.state if isinstance(given, Object) else given),
        remarks=remarks,
        accumulate=counts.accumulate if counts else None,
        waiting=counts.waiting if counts else 0,
    )
    if counts is None:
        return found
    schedules = (replace(each, every=counts.updates_for(each.position)) for each in found.schedules)
    return replace(found, schedules=tuple(schedules))


class Counts(NamedTuple):
    """How far the loops of Lightning are."""

    updates: int
    """Of all epochs."""
    epochs: int
    """That are complete."""
    per_epoch: int | None
    """Updates of an epoch; None before the first is complete."""
    accumulate: int | None
    """Batches for each update; None where it is not known, 0: several, and the loops do not tell how many."""
    waiting: int
    """Batches since the last update."""

    def updates_for(self, position: int | None) -> int | None:
        """Return the updates for each step of a scheduler that made so many steps; None where it is not known.

        Lightning steps schedulers once in `frequency` updates or epochs. Neither of both is stored, and the usual
        frequency of 1 is preferred.
        """
        if not position:
            return None
        if position == self.updates:
            return 1
        if self.per_epoch is None or position > self.epochs:
            return None
        least, most = self.epochs // (position + 1) + 1, self.epochs // position
        return least * self.per_epoch if least == most else None


def counts_of(tree: Mapping[str, Any]) -> Counts | None:
    """Return what the loops count; None where they are not there, or of manual optimization."""
    try:
        loop = tree["loops"]["fit_loop"]
        batches, steps = loop["epoch_loop.batch_progress"], loop[_STEPS]["optimizer"]["step"]
        seen, seen_now = int(batches["total"]["processed"]), int(batches["current"]["processed"])
        updates, updates_now = int(steps["total"]["completed"]), int(steps["current"]["completed"])
        begun, at_end = int(loop["epoch_progress"]["total"]["ready"]), bool(batches["is_last_batch"])
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    if not (0 < updates <= seen and 0 <= updates_now <= seen_now <= seen and updates_now <= updates and begun > 0):
        return None
    epochs = begun if at_end else begun - 1
    whole = (seen, updates) if at_end else (seen - seen_now, updates - updates_now)
    per_epoch = whole[1] // epochs if epochs and not whole[1] % epochs else None
    length = whole[0] // epochs if epochs and not whole[0] % epochs else None
    if seen == updates:  # an epoch of one batch has one update, whatever is accumulated
        return Counts(updates, epochs, per_epoch, None if length == 1 else 1, 0)
    # An epoch of B batches has ceil(B / N) updates, and b batches of an unfinished one b // N.
    least, most = 2, seen
    if per_epoch and length:
        least = max(least, -(-length // per_epoch))
        most = min(most, (length - 1) // (per_epoch - 1)) if per_epoch > 1 else most
    if not at_end:
        least = max(least, seen_now // (updates_now + 1) + 1)
        most = min(most, seen_now // updates_now) if updates_now else most
    accumulate = least if least == most else 0
    return Counts(updates, epochs, per_epoch, accumulate, 0 if at_end or not accumulate else seen_now % accumulate)


def write(checkpoint: Checkpoint, path: Path) -> None:
    """The file as it was, up to date; or one with what Lightning needs to go on: without `loops` it counts anew."""
    if checkpoint.format == FORMAT.name and checkpoint.trees:
        (tree,) = up_to_date(checkpoint.trees, checkpoint).values()
        before = read_progress(tree)
        if checkpoint.step is not None and before is not None and before != checkpoint.step:
            tree = {**tree, "loops": advance_loops(tree.get("loops"), checkpoint.step - before)}
    else:
        step = checkpoint.step or 0
        epoch = int(checkpoint.progress.get("epoch") or 0)
        tree = {
            "epoch": epoch,
            "global_step": step,
            _VERSION: _WRITTEN,
            "state_dict": module_state(checkpoint),
            "loops": {"fit_loop": _loops(step, epoch)},
            "callbacks": {},
            "optimizer_states": [optimizer_state(optimizer) for optimizer in checkpoint.optimizers],
            "lr_schedulers": [dict(schedule.state) for schedule in checkpoint.schedules],
        }
    write_torch_file(path, tree)


def read_progress(tree: Mapping[str, Any]) -> int | None:
    """Updates by the loops."""
    try:
        loop = tree["loops"]["fit_loop"][_STEPS]
        return int(loop["optimizer"]["step"]["total"]["completed"])
    except (KeyError, TypeError):
        return None


def advance_loops(tree: Any, by: int, inside: bool = False) -> Any:
    """The state of loops after more updates, each of one batch: counters of batches and steps are larger by that."""
    if isinstance(tree, Mapping):
        moved = {}
        for key, value in tree.items():
            counts = inside or any(part in str(key) for part in ("batch_progress", "optim_progress", "batches_that"))
            moved[key] = value if "val_loop" in str(key) else advance_loops(value, by, counts)
        return moved
    is_count = inside and isinstance(tree, int) and not isinstance(tree, bool)
    return tree + by if is_count else tree


def _loops(step: int, epoch: int) -> dict[str, Any]:
    """How far the loops are that fit a model, in a new epoch."""
    steps = {"total": {"ready": step, "completed": step}, "current": {"ready": 0, "completed": 0}}
    every = {key: {**each, "started": each["ready"]} for key, each in steps.items()}
    batches = {key: {**each, "processed": each["completed"]} for key, each in every.items()}
    epochs = {"ready": epoch, "completed": epoch, "started": epoch, "processed": epoch}
    return {
        "state_dict": {},
        "epoch_loop.state_dict": {"_batches_that_stepped": step},
        "epoch_loop.batch_progress": {**batches, "is_last_batch": False},
        "epoch_loop.scheduler_progress": steps,
        "epoch_loop.automatic_optimization.state_dict": {},
        "epoch_loop.automatic_optimization.optim_progress": {"optimizer": {"step": steps, "zero_grad": every}},
        "epoch_loop.manual_optimization.state_dict": {},
        "epoch_loop.manual_optimization.optim_step_progress": steps,
        "epoch_loop.val_loop.state_dict": {},
        "epoch_progress": {"total": epochs, "current": epochs},
    }


FORMAT = Format("lightning", "Lightning", matches, read, write, is_folder=False, ending=".ckpt", needs_names=False)


# ---- configurations of OmegaConf -------------------------------------------------------------------------------------


def plain(tree: Any) -> Any:
    """A tree in which what OmegaConf wraps is itself. Each thing is looked at once, however often it is there."""
    return _plain(tree, {}, 100)


def _plain(tree: Any, seen: dict[int, Any], depth: int) -> Any:
    if not depth:
        raise InvalidModelError("the configuration in the checkpoint is nested deeper than any")
    if isinstance(tree, Object) and tree.of.module.startswith("omegaconf.") and isinstance(tree.state, Mapping):
        return _plain(tree.state.get("_content", tree.state.get("_val")), seen, depth - 1)
    if not isinstance(tree, dict | list):
        return tree
    if id(tree) not in seen:
        made: Any = {} if isinstance(tree, dict) else []
        seen[id(tree)] = made
        if isinstance(tree, dict):
            made.update({key: _plain(value, seen, depth - 1) for key, value in tree.items()})
        else:
            made += [_plain(item, seen, depth - 1) for item in tree]
    return seen[id(tree)]
