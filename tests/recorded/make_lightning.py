"""Record checkpoints of Lightning at moments that its loops count, and the losses of the run after them.

`python make_lightning.py` needs torch and pytorch-lightning; tests need torch only.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import pytorch_lightning as lightning  # noqa: E402
import torch  # noqa: E402
from checkpoint_runs import data, lightning_module  # noqa: E402
from pytorch_lightning.callbacks import ModelCheckpoint  # noqa: E402

FOLDER = HERE / "lightning_loops"
PER_EPOCH, AFTER, MORE = 4, 6, 6
"""Batches of an epoch, batches before a checkpoint, and batches after it whose losses are recorded."""

RUNS: dict[str, dict[str, Any]] = {
    "epochs": {"optimizer": "sgd", "interval": "epoch"},
    "every-second-epoch": {"optimizer": "adamw", "interval": "epoch", "frequency": 2},
    "updates": {"optimizer": "sgd", "interval": "step"},
    "accumulated": {"optimizer": "adamw", "interval": "step", "accumulate_grad_batches": 2},
    "accumulated-epochs": {"optimizer": "adamw", "interval": "epoch", "accumulate_grad_batches": 2, "after": 8},
    "clipped": {"optimizer": "adamw", "interval": "epoch", "gradient_clip_val": 0.1},
}


def configured(parameters: Any, optimizer: str, interval: str, frequency: int = 1) -> Any:
    kinds = {
        "sgd": lambda: torch.optim.SGD(parameters, lr=0.1),
        "adamw": lambda: torch.optim.AdamW(parameters, lr=0.02),
    }
    made = kinds[optimizer]()
    scheduler = torch.optim.lr_scheduler.StepLR(made, 1, 0.7)
    return [made], [{"scheduler": scheduler, "interval": interval, "frequency": frequency}]


def record(name: str, options: dict[str, Any]) -> list[float]:
    """Train, keep the checkpoint, and return the losses after it."""
    options = dict(options)
    after = options.pop("after", AFTER)
    settings = {key: options.pop(key) for key in ("accumulate_grad_batches", "gradient_clip_val") if key in options}
    module = lightning_module(lambda parameters: configured(parameters, **options))
    inputs, labels = (torch.from_numpy(array) for array in data())

    class Batches(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return PER_EPOCH

        def __getitem__(self, at: int) -> Any:
            return inputs[PER_EPOCH * trainer.current_epoch + at], labels[PER_EPOCH * trainer.current_epoch + at]

    with tempfile.TemporaryDirectory() as folder:
        accumulate = settings.get("accumulate_grad_batches", 1)
        saver = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=1, save_on_train_epoch_end=False)
        trainer = lightning.Trainer(
            max_epochs=4, limit_train_batches=PER_EPOCH, accelerator="cpu", logger=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=[saver], reload_dataloaders_every_n_epochs=1,
            max_steps=(after + MORE) // accumulate, **settings,
        )  # fmt: skip
        trainer.fit(module, torch.utils.data.DataLoader(Batches(), batch_size=None))
        shutil.copy(Path(folder) / f"step={after // accumulate}.ckpt", FOLDER / f"{name}.ckpt")
    return module.losses[after : after + MORE]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    FOLDER.mkdir(exist_ok=True)
    losses = {name: record(name, options) for name, options in RUNS.items()}
    (FOLDER / "losses.json").write_text(json.dumps(losses, indent=1) + "\n")
