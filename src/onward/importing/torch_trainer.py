"""Callback of the Trainer of transformers."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onward.frameworks.torch.architecture import remember_example
from onward.importing import TrainingModelWriter

_Base: Any = object if TYPE_CHECKING else importlib.import_module("transformers").TrainerCallback


class TrainerCallback(_Base):  # type: ignore[misc]
    """Writes `checkpoint-500/training.onnx` beside each checkpoint of the Trainer of transformers.

        trainer = transformers.Trainer(model, args, callbacks=[onward.TrainerCallback()])

    The training is unaffected: no random numbers are drawn, and the model does not change.

    - `name`: name of the file
    - `strict`: True if a training model that cannot be written ends the training, instead of a
      warning
    - `options`: of `from_checkpoint`, for facts that checkpoints lack: `loss`, `optimizer` ...
    """

    def __init__(self, name: str = "training.onnx", *, strict: bool = False, **options: Any):
        self._name, self._writer = name, TrainingModelWriter(strict, options)
        self._example: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Wait for the first batch, which tells the inputs of the model."""

        def remember(_: Any, inputs: Any, named: dict[str, Any]) -> None:
            handle.remove()
            is_tensor = {key: hasattr(value, "shape") for key, value in named.items()}
            self._example = remember_example(
                {k: v for k, v in named.items() if is_tensor[k] and k != "num_items_in_batch"}
            )

        handle = model.register_forward_pre_hook(remember, with_kwargs=True)

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.is_world_process_zero:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            self._writer.write(folder, folder / self._name, model, self._example)
