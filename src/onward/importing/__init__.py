"""Checkpoints of other frameworks as training models, with graphs that their frameworks capture."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from onward.checkpoint.format import Captured, Checkpoint
from onward.checkpoint.opening import open_checkpoint
from onward.errors import ArgumentError, first_line, warn
from onward.importing.capture import capture_model
from onward.importing.plans import Plan, apply_plan, plan
from onward.model import Model, load
from onward.options import UntoldOptions, taking
from onward.recipe.exporter_notes import restore


@dataclasses.dataclass(frozen=True)
class _Arguments(UntoldOptions):
    path: str | os.PathLike[str] | Checkpoint
    like: Model | str | os.PathLike[str] | None = None
    _: dataclasses.KW_ONLY
    module: Any = None
    example_inputs: Any = None
    probe: bool = True


@taking(_Arguments)
def from_checkpoint(
    path: str | os.PathLike[str] | Checkpoint, like: Model | str | os.PathLike[str] | None = None, **given: Any
) -> Model:
    """Make a training model that continues where a checkpoint of another framework is. Nothing in it is executed.

        training = onward.from_checkpoint("checkpoint-500", "bert.onnx", loss="cross_entropy", clip=1.0)

    What a checkpoint does not tell is given here, or taken from `like` if that is a training model. What it does tell
    must agree with that. A warning names each assumption, such as no gradient clipping where nothing tells of it.

    - `path`: the file or folder, or what `open_checkpoint` returned
    - `like`: the ONNX model that computes what the checkpoint's model does. Not needed where the checkpoint has its
      graph, or a configuration of transformers, or `module` is given
    - `module`: in place of `like`, the nn.Module or LightningModule that was trained; its class, which is called with
      the hyper-parameters that Lightning stores; or where that is, `"package.module:Class"`. Its values do not matter
    - `example_inputs`: what the module takes, as for `from_torch`; a batch, where its `training_step` is the loss
    - `probe`: make a step with `module` and the graph of it, and compare loss and gradients (default: yes). It needs
      memory for the weights several times
    """
    planned = plan_import(path, like, **given)
    made = apply_plan(planned)
    for assumption in planned.assumptions:
        warn(assumption)
    return made


def plan_import(
    path: str | os.PathLike[str] | Checkpoint, like: Model | str | os.PathLike[str] | None = None, **given: Any
) -> Plan:
    """Return what `from_checkpoint` would do, without doing it."""
    said = _Arguments(path, like, **given)
    checkpoint = path if isinstance(path, Checkpoint) else open_checkpoint(path)
    if like is None:
        captured = capture_model(checkpoint, said.module, said.example_inputs, said.loss)
        return plan(checkpoint, captured if said.probe else captured._replace(probe=None), said)
    if said.module is not None:
        raise ArgumentError("both `like` and `module` are given", hint="leave one of them out")
    model = load(like)
    if not model.steps:
        model = model.copy()
        restore(model, unfold=True)
    return plan(checkpoint, Captured(model, None), said)


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
        apply_plan(plan(opened, self._captured, said)).save(target)
        self._written[target] = checkpoint

    def clear(self) -> None:
        """Remove training models whose checkpoints were removed."""
        for target, checkpoint in list(self._written.items()):
            if not checkpoint.exists():
                target.unlink(missing_ok=True)
                target.with_suffix(".data").unlink(missing_ok=True)
                del self._written[target]
