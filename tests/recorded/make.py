"""Makes the checkpoints in this folder with the frameworks themselves, which are small, and recorded.

`python make.py` needs torch, transformers, accelerate and pytorch-lightning; tests need none of the last two.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).parent


def trainer() -> None:
    """A checkpoint of the Trainer of transformers, in its third step: AdamW with two groups, a cosine with warm-up."""
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    config = BertConfig(
        vocab_size=8, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4,
        max_position_embeddings=4,
    )  # fmt: skip
    torch.manual_seed(0)
    data = [{"input_ids": torch.arange(4) + i % 4, "labels": i % 2} for i in range(12)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=2, max_steps=6, save_steps=3, lr_scheduler_type="cosine",
            warmup_steps=1, learning_rate=1e-2, weight_decay=0.1, report_to="none", use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        Trainer(BertForSequenceClassification(config), arguments, train_dataset=data).train()
        _keep(Path(folder) / "checkpoint-3", "trainer")


def accelerate() -> None:
    from accelerate import Accelerator

    with tempfile.TemporaryDirectory() as folder:
        place = Accelerator(cpu=True)
        module = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        module, optimizer, schedule = place.prepare(module, optimizer, schedule)
        place.backward(module(torch.ones(4, 3)).sum())
        optimizer.step()
        schedule.step()
        place.save_state(folder)
        _keep(Path(folder), "accelerate")


def lightning() -> None:
    import pytorch_lightning

    class Module(pytorch_lightning.LightningModule):
        def __init__(self, width: int = 2):
            super().__init__()
            self.save_hyperparameters()
            self.layer = torch.nn.Linear(3, width)

        def training_step(self, batch, index):
            return self.layer(batch).square().sum()

        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    with tempfile.TemporaryDirectory() as folder:
        trainer = pytorch_lightning.Trainer(
            max_epochs=2, accelerator="cpu", logger=False, default_root_dir=folder, enable_progress_bar=False,
            enable_checkpointing=False,
        )  # fmt: skip
        trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(4, 3), batch_size=2))
        trainer.save_checkpoint(HERE / "lightning.ckpt")


def plain() -> None:
    """A file of PyTorch with all that people put into one, and the same as a distributed checkpoint."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(module.named_parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    averaged = torch.optim.swa_utils.AveragedModel(module)
    for _ in range(3):
        optimizer.zero_grad()
        module(torch.rand(4, 3)).square().sum().backward()
        optimizer.step()
        schedule.step()
        averaged.update_parameters(module)
    scaler = {
        "scale": 1024.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "_growth_tracker": 3,
    }
    rest = {
        "scheduler": schedule.state_dict(),
        "scaler": scaler,
        "average": averaged.state_dict(),
        "generators": {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()},
        "loader": {"_num_yielded": 3, "_sampler_iter_yielded": 3, "_snapshot": {"_main_snapshot": None}},
        "step": 3,
        "epoch": 1,
    }
    torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict(), **rest}, HERE / "plain.pt")
    weights, kept = get_state_dict(module, optimizer)
    shutil.rmtree(HERE / "dcp", ignore_errors=True)
    dcp.save({"model": weights, "optim": kept, **rest}, checkpoint_id=HERE / "dcp", no_dist=True)


def _keep(made: Path, name: str) -> None:
    shutil.rmtree(HERE / name, ignore_errors=True)
    shutil.copytree(made, HERE / name)


if __name__ == "__main__":
    for make in (trainer, accelerate, lightning, plain):
        make()
