"""Callback of Lightning."""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onward.frameworks.torch.architecture import remember_example
from onward.importing import TrainingModelWriter


def _lightning() -> Any:
    """Return the Lightning package that the program uses, or else the one that is installed."""
    names = ("pytorch_lightning", "lightning.pytorch")
    used = [name for name in names if name in sys.modules]
    installed = [name for name in names if importlib.util.find_spec(name.partition(".")[0]) is not None]
    return importlib.import_module([*used, *installed, names[0]][0])


_Base: Any = object if TYPE_CHECKING else _lightning().Callback


def _loop_of(trainer: Any) -> dict[str, Any]:
    """Return facts of a trainer that its checkpoints lack, as options of `from_checkpoint`."""
    accumulate = trainer.accumulate_grad_batches
    options: dict[str, Any] = {"accumulate": accumulate}
    if trainer.gradient_clip_val:
        algorithm = trainer.gradient_clip_algorithm
        options["clip"] = {str(getattr(algorithm, "value", algorithm) or "norm"): float(trainer.gradient_clip_val)}
    schedulers, batches = trainer.lr_scheduler_configs, trainer.num_training_batches
    if len(schedulers) == 1 and math.isfinite(batches):
        updates = 1 if schedulers[0].interval == "step" else math.ceil(batches / accumulate)
        options["updates_per_epoch"] = updates * schedulers[0].frequency
    return options


class LightningCallback(_Base):  # type: ignore[misc]
    """Writes `epoch=1-step=500.onnx` beside each checkpoint of Lightning.

        trainer = pl.Trainer(callbacks=[onward.LightningCallback()])

    The training is unaffected: no random numbers are drawn, and the module does not change.

    - `loss`: loss of the forward pass, as for `prepare` (default: the loss of `training_step`)
    - `strict`: True if a training model that cannot be written ends the training, instead of a
      warning
    - `options`: of `from_checkpoint`, for facts that checkpoints lack: `optimizer`, `schedule` ...
    """

    def __init__(self, *, loss: Any = None, strict: bool = False, **options: Any):
        self._has_loss, self._writer = loss is not None, TrainingModelWriter(strict, {"loss": loss, **options})
        self._example: Any = None
        self._save: Any = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Write a training model whenever the trainer saves a checkpoint."""
        save = self._save = trainer.save_checkpoint

        def save_both(filepath: Any, *args: Any, **named: Any) -> None:
            save(filepath, *args, **named)
            if trainer.is_global_zero:
                path = Path(filepath)
                self._writer.clear()
                self._writer.write(path, path.with_suffix(".onnx"), pl_module, self._example, **_loop_of(trainer))

        trainer.save_checkpoint = save_both
        if self._has_loss:
            self._wait_for_call(pl_module)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self._writer.clear()
        if self._save is not None:
            trainer.save_checkpoint = self._save

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.on_fit_end(trainer, pl_module)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._example is None and not self._has_loss:
            self._example = remember_example(batch)

    def _wait_for_call(self, module: Any) -> None:
        def remember(_: Any, inputs: Any, named: dict[str, Any]) -> None:
            handle.remove()
            self._example = remember_example(named or inputs)

        handle = module.register_forward_pre_hook(remember, with_kwargs=True)
