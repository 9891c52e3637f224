"""Training models beside the checkpoints that a training loop of another framework writes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from onward.checkpoint.architecture import capture_model
from onward.checkpoint.format import Captured
from onward.checkpoint.importing import apply_plan, plan
from onward.checkpoint.opening import open_checkpoint
from onward.errors import first_line, warn
from onward.options import UntoldOptions


class Beside:
    """Writes them. The graph is captured once; each checkpoint gives the rest, in which tensors stay where they are.

    - `strict`: a training model that cannot be written ends the training; otherwise it is a warning
    - `options`: of `from_checkpoint`, where checkpoints do not tell all: `loss`, `optimizer`, `schedule`, `clip` ...
    """

    def __init__(self, strict: bool, options: dict[str, Any]):
        self._strict, self._said = strict, UntoldOptions(**options)
        self._captured: Captured | None = None
        self._written: dict[Path, Path] = {}

    def write(self, checkpoint: Path, target: Path, module: Any, example: Any, **known: Any) -> None:
        """Write what a checkpoint is, trained by a module that was called with this example.

        Options that are `known` of the training loop count where the user has not given them.
        """
        try:
            self._write(checkpoint, target, module, example, known)
        except Exception as error:  # of any kind: hours of training are worth more than this file
            if self._strict:
                raise
            warn(f"`{target}` was not written: {first_line(error)}")

    def _write(self, checkpoint: Path, target: Path, module: Any, example: Any, known: dict[str, Any]) -> None:
        opened = open_checkpoint(checkpoint)
        if self._captured is None:
            captured = capture_model(opened, module, example, self._said.loss)
            self._captured = captured._replace(probe=None)  # which takes memory that the training may need
        if self._said.schedule is not None:
            known.pop("updates_per_epoch", None)
        said = dataclasses.replace(self._said, **{k: v for k, v in known.items() if getattr(self._said, k) is None})
        apply_plan(plan(opened, None, said, captured=self._captured)).save(target)
        self._written[target] = checkpoint

    def clear(self) -> None:
        """Remove training models whose checkpoints were removed."""
        for target, checkpoint in list(self._written.items()):
            if not checkpoint.exists():
                target.unlink(missing_ok=True)
                target.with_suffix(".data").unlink(missing_ok=True)
                del self._written[target]
