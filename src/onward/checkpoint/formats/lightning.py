"""Checkpoints of Lightning: files of `torch.save` with the state of loops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from onward.checkpoint.format import Checkpoint, Format
from onward.checkpoint.pytorch.archive import is_torch_file, mentions, read_torch_file, write_torch_file
from onward.checkpoint.pytorch.contents import averages_made, checkpoint_of, mapping, progress_of
from onward.checkpoint.pytorch.pickle_objects import Object
from onward.checkpoint.pytorch.state_dicts import module_state, optimizer_state, up_to_date
from onward.errors import Error, InvalidModelError

_VERSION = "pytorch-lightning_version"
_WRITTEN = "2.6.6"
"""Version whose layout is written."""
_STEPS = "epoch_loop.automatic_optimization.optim_progress"


def matches(path: Path) -> bool:
    if not is_torch_file(path) or not mentions(path, _VERSION):
        return False
    try:
        tree = read_torch_file(path)
    except Error:  # the reader for PyTorch reports the damage
        return False
    return isinstance(tree, Mapping) and _VERSION in tree


def read(path: Path) -> Checkpoint:
    tree: Mapping[str, Any] = read_torch_file(path)
    hyper_parameters = plain(tree.get("hyper_parameters"))
    facts: dict[str, Any] = {"tensors": mapping(tree.get("state_dict")), "averages": {}}
    remarks = []
    if "current_model_state" in tree:
        facts["averages"], facts["tensors"] = facts["tensors"], mapping(tree["current_model_state"])
        facts["average_updates"] = averages_made(mapping(tree.get("averaging_state")))
        remarks.append("`state_dict` holds averaged weights; `current_model_state` holds the trained ones")
    if "loops" not in tree:
        remarks.append("it has no state of loops: Lightning would count from 0")
    checkpoint = checkpoint_of(
        path,
        FORMAT.name,
        f"Lightning {tree[_VERSION]}",
        {path.name: tree},
        progress=progress_of(tree),
        keeps_order=True,
        arguments=mapping(hyper_parameters.state if isinstance(hyper_parameters, Object) else hyper_parameters),
        remarks=remarks,
        **facts,
    )
    counts = counts_of(tree)
    if counts is None:
        return checkpoint
    schedules = (replace(schedule, every=counts.updates_for(schedule.position)) for schedule in checkpoint.schedules)
    return replace(checkpoint, schedules=tuple(schedules), accumulate=counts.accumulate, waiting=counts.waiting)


class Counts(NamedTuple):
    """Progress of the loops of Lightning."""

    updates: int
    """Updates of all epochs."""
    epochs: int
    """Complete epochs."""
    per_epoch: int | None
    """Updates of an epoch; None before the first is complete."""
    accumulate: int | None
    """Batches for each update. None: unknown. 0: several, and their number is unknown."""
    waiting: int
    """Batches since the last update."""

    def updates_for(self, position: int | None) -> int | None:
        """Return the updates for each step of a scheduler that made `position` steps; None if
        unknown.

        Lightning steps schedulers once in `frequency` updates or epochs. Neither is stored, and the
        usual frequency of 1 is preferred.
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
    """Return the counters of the loops; None if they are missing, or of manual optimization."""
    try:
        loop = tree["loops"]["fit_loop"]
        batches, steps = loop["epoch_loop.batch_progress"], loop[_STEPS]["optimizer"]["step"]
        seen, seen_now = int(batches["total"]["processed"]), int(batches["current"]["processed"])
        updates, updates_now = int(steps["total"]["completed"]), int(steps["current"]["completed"])
        epochs_begun, at_end = int(loop["epoch_progress"]["total"]["ready"]), bool(batches["is_last_batch"])
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    if not (
        0 < updates <= seen and 0 <= updates_now <= seen_now <= seen and updates_now <= updates and epochs_begun > 0
    ):
        return None
    epochs = epochs_begun if at_end else epochs_begun - 1
    complete_counts = (seen, updates) if at_end else (seen - seen_now, updates - updates_now)
    per_epoch = complete_counts[1] // epochs if epochs and not complete_counts[1] % epochs else None
    batches_per_epoch = complete_counts[0] // epochs if epochs and not complete_counts[0] % epochs else None
    if seen == updates:  # an epoch of one batch has one update, whatever is accumulated
        return Counts(updates, epochs, per_epoch, None if batches_per_epoch == 1 else 1, 0)
    # An epoch of B batches has ceil(B / N) updates, and b batches of an unfinished one b // N.
    least, most = 2, seen
    if per_epoch and batches_per_epoch:
        least = max(least, -(-batches_per_epoch // per_epoch))
        most = min(most, (batches_per_epoch - 1) // (per_epoch - 1)) if per_epoch > 1 else most
    if not at_end:
        least = max(least, seen_now // (updates_now + 1) + 1)
        most = min(most, seen_now // updates_now) if updates_now else most
    accumulate = least if least == most else 0
    return Counts(updates, epochs, per_epoch, accumulate, 0 if at_end or not accumulate else seen_now % accumulate)


def write(checkpoint: Checkpoint, path: Path) -> None:
    """Write the original file with current numbers, or a new one with the loops' counters."""
    if checkpoint.format == FORMAT.name and checkpoint.trees:
        (tree,) = up_to_date(checkpoint.trees, checkpoint).values()
        before = _updates(tree)
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


def _updates(tree: Mapping[str, Any]) -> int | None:
    try:
        return int(tree["loops"]["fit_loop"][_STEPS]["optimizer"]["step"]["total"]["completed"])
    except (KeyError, TypeError):
        return None


def advance_loops(tree: Any, by: int, inside: bool = False) -> Any:
    """Return the state of loops after `by` more updates of one batch each."""
    if isinstance(tree, Mapping):
        advanced = {}
        for key, value in tree.items():
            counts = inside or any(word in str(key) for word in ("batch_progress", "optim_progress", "batches_that"))
            advanced[key] = value if "val_loop" in str(key) else advance_loops(value, by, counts)
        return advanced
    is_count = inside and isinstance(tree, int) and not isinstance(tree, bool)
    return tree + by if is_count else tree


def _loops(step: int, epoch: int) -> dict[str, Any]:
    """Return the state of fitting loops at the start of an epoch."""
    steps = {"total": {"ready": step, "completed": step}, "current": {"ready": 0, "completed": 0}}
    started = {key: {**counts, "started": counts["ready"]} for key, counts in steps.items()}
    batches = {key: {**counts, "processed": counts["completed"]} for key, counts in started.items()}
    epochs = {"ready": epoch, "completed": epoch, "started": epoch, "processed": epoch}
    return {
        "state_dict": {},
        "epoch_loop.state_dict": {"_batches_that_stepped": step},
        "epoch_loop.batch_progress": {**batches, "is_last_batch": False},
        "epoch_loop.scheduler_progress": steps,
        "epoch_loop.automatic_optimization.state_dict": {},
        "epoch_loop.automatic_optimization.optim_progress": {"optimizer": {"step": steps, "zero_grad": started}},
        "epoch_loop.manual_optimization.state_dict": {},
        "epoch_loop.manual_optimization.optim_step_progress": steps,
        "epoch_loop.val_loop.state_dict": {},
        "epoch_progress": {"total": epochs, "current": epochs},
    }


FORMAT = Format("lightning", "Lightning", matches, read, write, is_folder=False, ending=".ckpt", needs_names=False)


# ---- configurations of OmegaConf -------------------------------------------------------------------------------------


def plain(tree: Any, seen: dict[int, Any] | None = None, depth: int = 100) -> Any:
    """Return a tree without OmegaConf's wrappers. Each object is visited once."""
    seen = {} if seen is None else seen
    if not depth:
        raise InvalidModelError("the configuration in the checkpoint is nested too deeply")
    if isinstance(tree, Object) and tree.of.module.startswith("omegaconf.") and isinstance(tree.state, Mapping):
        return plain(tree.state.get("_content", tree.state.get("_val")), seen, depth - 1)
    if not isinstance(tree, dict | list):
        return tree
    if id(tree) not in seen:
        unwrapped: Any = {} if isinstance(tree, dict) else []
        seen[id(tree)] = unwrapped
        if isinstance(tree, dict):
            unwrapped.update({key: plain(value, seen, depth - 1) for key, value in tree.items()})
        else:
            unwrapped += [plain(item, seen, depth - 1) for item in tree]
    return seen[id(tree)]
