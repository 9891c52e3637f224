"""Checkpoints of frameworks around PyTorch, made and resumed by themselves. `make test-all` installs what they need."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoint_runs import close, data, exported, lightning_module, net, same_tree, steps, steps_of_onward
from paths import TESTS

import onward

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.slow
SUPPORT = TESTS / "support"


@pytest.fixture(scope="module")
def like(tmp_path_factory: pytest.TempPathFactory) -> onward.Model:
    return exported(tmp_path_factory.mktemp("model"))


# ---- FSDP ------------------------------------------------------------------------------------------------------------


def _without_norm() -> Any:
    module = net()
    module[1] = torch.nn.Identity()
    return module


def _processes(count: int, first: int, last: int, load: Path | None, save: Path | None, folder: Path) -> list[float]:
    result = folder / f"losses-{count}-{first}.json"
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={count}", "--master-port=0"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", str(SUPPORT / "fsdp_run.py")]
    command += [str(first), str(last), str(load or "-"), str(save or "-"), str(result)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(SUPPORT), *sys.path])}
    log = folder / "log"
    with open(log, "ab") as out:
        done = subprocess.run(
            command, timeout=300, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=environment, check=False
        )
    assert done.returncode == 0, log.read_text()[-5000:]
    losses: list[float] = json.loads(result.read_text())
    return losses


def test_fsdp_on_two_then_one_then_three_processes(tmp_path: Path) -> None:
    """Each time through a training model; the last piece of the way is trained by it."""
    model = exported(tmp_path, _without_norm)
    expected = _processes(1, 0, 15, None, None, tmp_path)
    close(_processes(2, 0, 5, None, tmp_path / "two", tmp_path), expected[:5])
    one = onward.from_checkpoint(tmp_path / "two", model, loss="cross_entropy")
    onward.to_checkpoint(one, tmp_path / "two-back", format="dcp")
    close(_processes(1, 5, 8, tmp_path / "two-back", tmp_path / "one", tmp_path), expected[5:8])
    again = onward.from_checkpoint(tmp_path / "one", model, loss="cross_entropy")
    onward.to_checkpoint(again, tmp_path / "one-back", format="dcp")
    close(_processes(3, 8, 11, tmp_path / "one-back", tmp_path / "three", tmp_path), expected[8:11])
    last = onward.from_checkpoint(tmp_path / "three", model, loss="cross_entropy")
    inputs, labels = (array[:, :12] for array in data())
    engine = onward.engines.start(last)
    names = [last.inputs[0].name or "", last.step().algorithm.inputs[0].name or ""]
    ours = [float(engine.step(dict(zip(names, (inputs[i], labels[i]), strict=True)))["loss"]) for i in range(11, 15)]
    close(ours, expected[11:])


# ---- Accelerate ------------------------------------------------------------------------------------------------------


def test_accelerate(like: onward.Model, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")

    def prepared() -> tuple[Any, ...]:
        module = net()
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return module, optimizer, scheduler

    place = accelerate.Accelerator(cpu=True)
    run = place.prepare(*prepared())
    steps(*run, range(5))
    place.save_state(tmp_path / "there")
    expected = steps(*run, range(5, 10))
    model = onward.from_checkpoint(tmp_path / "there", like, loss="cross_entropy")
    close(steps_of_onward(model, range(5, 10))[0], expected)
    onward.to_checkpoint(model, tmp_path / "back", format="accelerate")
    onward.to_checkpoint(steps_of_onward(model, range(5, 8))[1], tmp_path / "later", format="accelerate")
    for folder, first in (("back", 5), ("later", 8)):
        place = accelerate.Accelerator(cpu=True)
        run = place.prepare(*prepared())
        place.load_state(tmp_path / folder)
        losses = steps(*run, range(first, 10))
        assert losses == expected or folder == "later"
        close(losses, expected[first - 5 :])


# ---- Lightning -------------------------------------------------------------------------------------------------------


def _lightning() -> Any:
    def configured(parameters: Any) -> Any:
        optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    return pytest.importorskip("pytorch_lightning"), lightning_module(configured)


def _fit(span: tuple[int, int], path: Path | None = None, save: Path | None = None) -> list[float]:
    """Losses of an epoch, which has five batches; goes on from a file, and writes one."""
    lightning, module = _lightning()
    inputs, labels = (torch.from_numpy(array) for array in data())

    class Batches(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 5

        def __getitem__(self, at: int) -> Any:
            step = 5 * trainer.current_epoch + at
            return inputs[step], labels[step]

    trainer = lightning.Trainer(
        max_epochs=span[1], accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False,
        enable_model_summary=False, reload_dataloaders_every_n_epochs=1, barebones=False,
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(Batches(), batch_size=None)
    trainer.fit(module, loader, ckpt_path=path, **({"weights_only": False} if path else {}))
    if save is not None:
        trainer.save_checkpoint(save)
    return list(module.losses)


def test_lightning(like: onward.Model, tmp_path: Path) -> None:
    expected = _fit((0, 3))
    _fit((0, 1), save=tmp_path / "there.ckpt")
    model = onward.from_checkpoint(tmp_path / "there.ckpt", like, loss="cross_entropy")
    losses, later = steps_of_onward(model, range(5, 10))
    close(losses, expected[5:10])
    onward.to_checkpoint(model, tmp_path / "back.ckpt", format="lightning")
    same_tree(*(torch.load(tmp_path / name, weights_only=False) for name in ("back.ckpt", "there.ckpt")))
    assert _fit((1, 3), tmp_path / "back.ckpt") == expected[5:]

    onward.to_checkpoint(model, tmp_path / "plain.pt", format="torch")  # to plain PyTorch
    tree = torch.load(tmp_path / "plain.pt", weights_only=False)
    module = net()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    module.load_state_dict({name.removeprefix("model."): tensor for name, tensor in tree["model"].items()})
    optimizer.load_state_dict(tree["optimizer"])
    scheduler.load_state_dict(tree["scheduler"])
    assert steps(module, optimizer, scheduler, range(5, 15)) == expected[5:]

    plain = onward.from_checkpoint(
        tmp_path / "plain.pt", like, loss="cross_entropy"
    )  # and back, as no file of Lightning
    onward.to_checkpoint(plain, tmp_path / "fresh.ckpt", format="lightning")
    fresh = torch.load(tmp_path / "fresh.ckpt", weights_only=False)
    assert fresh["global_step"] == 5 and fresh["loops"]["fit_loop"]
    assert later.array("step") == 10
