"""Makes the files in `nemo/` with NeMo itself: a model, and the checkpoint that its Trainer writes after an epoch.

    make_nemo.py make FOLDER            trains, writes both there, and prints the losses of the second epoch
    make_nemo.py resume CHECKPOINT ...  the losses of the second epoch, from the checkpoint
    make_nemo.py restore MODEL ...      those of one more epoch of a model, from its weights alone

It needs an environment with `nemo-toolkit[core]`, and runs by itself.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from nemo.core import ModelPT
from nemo.core.classes import common
from omegaconf import DictConfig, OmegaConf

BATCHES, SIZE = 5, 8
CONFIGURATION = {
    "hidden": 4,
    "same": "${hidden}",
    "nothing": None,
    "optim": {
        "name": "adamw",
        "lr": 0.05,
        "betas": [0.9, 0.98],
        "weight_decay": 0.01,
        "sched": {"name": "CosineAnnealing", "warmup_steps": 3, "min_lr": 0.001, "max_steps": 12},
    },
}


class Tiny(ModelPT):
    def __init__(self, cfg: DictConfig, trainer: pl.Trainer | None = None):
        super().__init__(cfg=cfg, trainer=trainer)
        words = self.register_artifact("words", cfg.words)
        self.words = words and Path(words).read_text()
        self.first, self.second = torch.nn.Linear(3, cfg.hidden), torch.nn.Linear(cfg.hidden, 2)
        self.losses: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        inputs, labels = batch
        loss = torch.nn.functional.cross_entropy(self(inputs), labels)
        self.losses.append(loss.item())
        return loss

    def setup_training_data(self, train_data_config: DictConfig) -> None:
        pass

    def setup_validation_data(self, val_data_config: DictConfig) -> None:
        pass

    @classmethod
    def list_available_models(cls) -> None:
        return None


def losses_of(model: Tiny, epochs: int, *, resumed: Path | None = None, into: Path | None = None) -> list[float]:
    """Those of the epochs; in each, the same batches come in the same order."""
    torch.manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.rand(BATCHES * SIZE, 3), torch.randint(2, (BATCHES * SIZE,)))
    keeping = [ModelCheckpoint(into, filename="{epoch}", save_top_k=-1)] if into else []
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=epochs, callbacks=keeping, enable_checkpointing=bool(into), logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    model.set_trainer(trainer)
    trainer.fit(model, torch.utils.data.DataLoader(data, SIZE), ckpt_path=resumed)
    return model.losses


def make(folder: Path) -> list[float]:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as place:
        words = Path(place) / "words.txt"
        words.write_text("yes\nno\n")
        model = Tiny(OmegaConf.create({**CONFIGURATION, "words": str(words)}))
        losses = losses_of(model, 2, into=Path(place))
        Path(place, "epoch=0.ckpt").rename(folder / "run.ckpt")
        model.save_to(str(folder / "model.nemo"))
    return losses[BATCHES:]


def resume(checkpoint: Path) -> list[float]:
    """The configuration is in the checkpoint; the file that it names is only looked for where that is a model."""
    torch.manual_seed(2)
    return losses_of(Tiny(OmegaConf.create({**CONFIGURATION, "words": None})), 2, resumed=checkpoint)


def restore(file: Path) -> list[float]:
    common.ALLOWED_TARGET_PREFIXES.append(f"{Tiny.__module__}.")  # NeMo makes models of its own classes alone
    model = Tiny.restore_from(str(file), map_location="cpu")
    assert model.words == "yes\nno\n"
    return losses_of(model, 1)


if __name__ == "__main__":
    do = {"make": make, "resume": resume, "restore": restore}[sys.argv[1]]
    print(json.dumps([do(Path(each)) for each in sys.argv[2:]]))
