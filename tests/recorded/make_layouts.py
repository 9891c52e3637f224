"""Files of projects that the tests do not install, and the losses of the ten steps that follow in each.

To make them again, install the projects apart and run this with them and `tests/support` on the path:

    pip install --no-deps --target packages peft skorch pytorch-ignite mmengine addict yapf paddlepaddle ...
    PYTHONPATH=packages:src:tests/support python tests/recorded/make_layouts.py
"""

from __future__ import annotations

import copy
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from checkpoint_layouts import STEPS, Language, Vision, batches, milestones, momentum, train
from torch import nn

FOLDER = Path(__file__).parent / "layouts"


def skorch(path: Path) -> list[float]:
    from skorch import NeuralNetClassifier

    def net() -> Any:
        options = {"optimizer": torch.optim.SGD, "optimizer__momentum": 0.9, "lr": 0.05, "verbose": 0}
        return NeuralNetClassifier(Vision, criterion=nn.CrossEntropyLoss, **options).initialize()

    path.mkdir()
    files = {f"f_{part}": path / f"{part}.pt" for part in ("params", "optimizer", "criterion")}
    train((trained := net()).module_, trained.optimizer_, 1)
    trained.save_params(**files, f_history=path / "history.json")
    (resumed := net()).load_params(**files, f_history=path / "history.json")
    return train(resumed.module_, resumed.optimizer_, 2)


def ignite(path: Path) -> list[float]:
    from ignite.engine import Engine, Events
    from ignite.handlers import Checkpoint, DiskSaver

    def objects() -> dict[str, Any]:
        module = Vision()
        optimizer = momentum(module)
        scheduler = milestones(optimizer)

        def update(engine: Any, batch: Any) -> float:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(module(batch[0]), batch[1])
            loss.backward()
            optimizer.step()
            scheduler.step()
            return float(loss.detach())

        return {"trainer": Engine(update), "model": module, "optimizer": optimizer, "lr_scheduler": scheduler}

    first, again = objects(), objects()
    saver = Checkpoint(
        first, DiskSaver(str(path.parent), create_dir=False, require_empty=False), filename_pattern=path.name
    )
    first["trainer"].add_event_handler(Events.ITERATION_COMPLETED(every=STEPS), saver)
    first["trainer"].run([*batches(first["model"], 1)])
    Checkpoint.load_objects(again, torch.load(path, weights_only=False))
    losses: list[float] = []
    again["trainer"].add_event_handler(Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.output))
    again["trainer"].run([*batches(again["model"], 2)], max_epochs=2)
    return losses


def mmengine(path: Path) -> list[float]:
    from mmengine.optim import MultiStepLR, OptimWrapper
    from mmengine.runner import load_checkpoint, save_checkpoint, weights_to_cpu

    def objects() -> tuple[Any, Any, Any]:
        module = Vision()
        optimizer = OptimWrapper(momentum(module))
        return module, optimizer, MultiStepLR(optimizer, milestones=[STEPS + 3, STEPS + 6], by_epoch=False)

    module, optimizer, scheduler = objects()
    train(module, optimizer.optimizer, 1, scheduler)
    meta = {"cfg": "", "seed": 0, "experiment_name": "vision", "epoch": 1, "iter": STEPS}
    parts = {"optimizer": optimizer.state_dict(), "param_schedulers": [scheduler.state_dict()]}
    save_checkpoint({"meta": meta, "state_dict": weights_to_cpu(module.state_dict()), **parts}, str(path))
    module, optimizer, scheduler = objects()
    stored = load_checkpoint(module, str(path))
    optimizer.load_state_dict(copy.deepcopy(stored["optimizer"]))
    scheduler.load_state_dict(stored["param_schedulers"][0])
    return train(module, optimizer.optimizer, 2, scheduler)


def peft(path: Path) -> list[float]:
    import peft

    config = {"r": 2, "lora_alpha": 4, "target_modules": ["attn", "out"], "lora_dropout": 0.0}

    def optimizer_of(module: Any) -> tuple[Any, Any]:
        trained = [p for p in module.parameters() if p.requires_grad]
        groups = [{"params": trained, "weight_decay": 0.01}, {"params": [], "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)
        return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 40)

    module = peft.get_peft_model(Language(), peft.LoraConfig(**config))
    optimizer, scheduler = optimizer_of(module)
    torch.manual_seed(1)
    train(module.base_model.model, optimizer, 1, scheduler)
    module.save_pretrained(path)
    (path / "README.md").unlink(missing_ok=True)
    torch.save(optimizer.state_dict(), path / "optimizer.pt")
    torch.save(scheduler.state_dict(), path / "scheduler.pt")
    state = {"global_step": STEPS, "epoch": 1.0, "max_steps": 100, "num_train_epochs": 1, "log_history": []}
    (path / "trainer_state.json").write_text(json.dumps(state))
    again = peft.PeftModel.from_pretrained(Language(), path, is_trainable=True)
    optimizer, scheduler = optimizer_of(again)
    optimizer.load_state_dict(torch.load(path / "optimizer.pt"))
    scheduler.load_state_dict(torch.load(path / "scheduler.pt"))
    return train(again.base_model.model, optimizer, 2, scheduler)


def baselines(path: Path) -> list[float]:
    from stable_baselines3.common.save_util import save_to_zip_file

    module = Vision()
    train(module, optimizer := torch.optim.Adam(module.parameters(), 1e-2), 1)
    states = {"policy": module.state_dict(), "policy.optimizer": optimizer.state_dict()}
    save_to_zip_file(path, data={"num_timesteps": STEPS}, params=states)
    return []


def paddle(path: Path) -> list[float]:
    import paddle

    layers = [paddle.nn.Linear(8, 6), paddle.nn.ReLU(), paddle.nn.Linear(6, 3)]
    net = paddle.nn.Sequential(*layers)
    paddle.save(net.state_dict(), str(path))
    return [*map(float, net(paddle.linspace(-1, 1, 8)))]  # outputs, in place of losses


ROWS: dict[str, tuple[Callable[[Path], list[float]], str]] = {
    "skorch": (skorch, "skorch"),
    "pytorch-ignite": (ignite, "checkpoint_10.pt"),
    "MMEngine": (mmengine, "iter_10.pth"),
    "PEFT": (peft, "checkpoint-10"),
    "stable-baselines3": (baselines, "model.zip"),
    "PaddlePaddle": (paddle, "model.pdparams"),
}

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    table = FOLDER / "losses.json"
    rows = json.loads(table.read_text()) if table.exists() else {}
    for name in sys.argv[1:] or ROWS:
        make, file = ROWS[name]
        target = FOLDER / file
        shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
        rows[name] = {"file": file, "losses": make(target)}
        table.write_text(json.dumps(rows, indent=1) + "\n")
