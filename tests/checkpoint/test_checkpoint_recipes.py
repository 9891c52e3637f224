"""What a loop does beside its optimizer, through checkpoints: clipping, accumulation, averages, freezing, epochs.

Each of these, in each format, trains in the framework, continues here, and must have the losses of the framework's own
continuation; or is refused with an error that names the option.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from checkpoint_runs import close, data, exported, net, steps_of_onward

import onward
from onward.importing.recipes import settled_options
from onward.options import MissingOptions

torch = pytest.importorskip("torch")
from paths import CHECKPOINTS  # noqa: E402
from torch.optim import lr_scheduler as rates  # noqa: E402

RECORDED = CHECKPOINTS / "lightning_loops"
BEFORE, AFTER = range(6), range(6, 12)
DECAY = 0.8


class Loop(NamedTuple):
    """A training loop of PyTorch, what a checkpoint of it does not hold, and what is said without that."""

    optimizer: Callable[[Any], Any] = lambda parameters: torch.optim.AdamW(parameters, lr=0.02)
    scheduler: Callable[[Any], Any] | None = None
    per_epoch: int = 1
    """Updates for each step of the scheduler."""
    clip: float | None = None
    accumulate: int = 1
    averages: bool = False
    frozen: str | None = None
    said: dict[str, Any] = {}  # noqa: RUF012
    refused: str = ""
    """The error without `said`."""
    listed: str = ""
    """What `show` lists as not in the checkpoint."""
    without: tuple[str, ...] = ()
    """What of its state is not saved."""


def _sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1)


def _halving(optimizer: Any) -> Any:
    return rates.StepLR(optimizer, 1, 0.5)


LOOPS = {
    "clipped": Loop(clip=0.05, said={"clip": 0.05}, listed="gradient clipping"),
    "accumulated": Loop(accumulate=2, said={"accumulate": 2}, listed="gradient accumulation"),
    "clipped and accumulated": Loop(clip=0.05, accumulate=3, said={"clip": "norm:0.05", "accumulate": 3}),
    "averaged": Loop(averages=True, said={"ema": DECAY}, listed="decay of the averages"),
    "frozen": Loop(frozen="0."),
    "frozen, without state": Loop(_sgd, frozen="0.", said={"freeze": "0.*"}),
    "a rate without its scheduler": Loop(scheduler=_halving, per_epoch=3, without=("scheduler",)),
    "epochs": Loop(
        scheduler=_halving, per_epoch=4, said={"updates_per_epoch": 4}, refused="1 step in 6 updates",
        listed="updates for each step of the schedule",
    ),
    "epochs, not counted": Loop(
        _sgd, _halving, 4, said={"updates_per_epoch": 4, "step": 6}, refused="does not count updates", listed="progress"
    ),
    "updates, not counted": Loop(
        _sgd, lambda optimizer: rates.CosineAnnealingLR(optimizer, 20), said={"updates_per_epoch": 1},
        refused="does not count updates",
    ),
    "a schedule of functions": Loop(
        scheduler=lambda optimizer: rates.LambdaLR(optimizer, lambda step: 0.5**step), per_epoch=4,
        said={"schedule": "exponential:gamma=0.5,every=4"}, refused="shape of its schedule",
        listed="shape of the schedule",
    ),
}  # fmt: skip


class Run:
    """A loop at work."""

    def __init__(self, loop: Loop):
        self.module, self.loop, self.updates = net(), loop, 0
        self.batches = 0
        for name, parameter in self.module.named_parameters():
            parameter.requires_grad_(loop.frozen is None or not name.startswith(loop.frozen))
        self.optimizer = loop.optimizer(self.module.parameters())
        self.scheduler = loop.scheduler(self.optimizer) if loop.scheduler else None
        average = torch.optim.swa_utils.get_ema_multi_avg_fn(DECAY)
        self.averages = torch.optim.swa_utils.AveragedModel(self.module, multi_avg_fn=average)

    def losses(self, span: range) -> list[float]:
        inputs, labels = (torch.from_numpy(array) for array in data())
        found = []
        for i in span:
            loss = torch.nn.functional.cross_entropy(self.module(inputs[i]), labels[i])
            (loss / self.loop.accumulate).backward()
            found.append(loss.item())
            self.batches += 1
            if self.batches % self.loop.accumulate == 0:
                self._update()
        return found

    def _update(self) -> None:
        if self.loop.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.loop.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.updates += 1
        self.averages.update_parameters(self.module)
        if self.scheduler is not None and self.updates % self.loop.per_epoch == 0:
            self.scheduler.step()

    @property
    def state(self) -> dict[str, Any]:
        kept = {
            "model": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            **({"scheduler": self.scheduler.state_dict()} if self.scheduler else {}),
            **({"average": self.averages.state_dict()} if self.loop.averages else {}),
        }
        return {name: part for name, part in kept.items() if name not in self.loop.without}


def _save_torch(run: Run, path: Path) -> Path:
    torch.save(run.state, path / "run.pt")
    return path / "run.pt"


def _save_dcp(run: Run, path: Path) -> Path:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, kept = get_state_dict(run.module, run.optimizer)
    dcp.save({**run.state, "model": weights, "optimizer": kept}, checkpoint_id=path / "dcp", no_dist=True)
    return path / "dcp"


def _save_accelerate(run: Run, path: Path) -> Path:
    """As `accelerator.save_state` does."""
    accelerate = pytest.importorskip("accelerate")
    place = accelerate.Accelerator(cpu=True)
    place.prepare(run.module, run.optimizer, *([run.scheduler] if run.scheduler else []))
    place.save_state(path / "accelerate")
    return path / "accelerate"


SAVERS: dict[str, Callable[[Run, Path], Path]] = {
    "torch": _save_torch, "dcp": _save_dcp, "accelerate": _save_accelerate,
}  # fmt: skip


def _cells() -> list[Any]:
    found = []
    for format in SAVERS:
        for name, loop in LOOPS.items():
            if format == "accelerate" and (loop.without or loop.averages):
                continue  # it saves the scheduler that it has, and no averages
            quick = format == "torch" or (format == "dcp" and name in ("epochs", "a rate without its scheduler"))
            found.append(pytest.param(format, name, marks=[] if quick else [pytest.mark.slow]))
    return found


@pytest.fixture(scope="module")
def like(tmp_path_factory: pytest.TempPathFactory) -> onward.Model:
    return exported(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(("format", "name"), _cells())
def test_a_loop_continues(format: str, name: str, like: onward.Model, tmp_path: Path) -> None:
    loop = LOOPS[name]
    run = Run(loop)
    run.losses(BEFORE)
    path = SAVERS[format](run, tmp_path)
    run.scheduler = None if "scheduler" in loop.without else run.scheduler
    expected = run.losses(AFTER)
    checkpoint = onward.open_checkpoint(path)
    if loop.listed:
        assert loop.listed in checkpoint.missing
    if loop.refused:
        with pytest.raises(onward.Error, match=loop.refused) as caught:
            onward.from_checkpoint(path, like, loss="cross_entropy")
        assert any(f"--{option.replace('_', '-')}" in str(caught.value.hint) for option in loop.said)
    model = onward.from_checkpoint(path, like, loss="cross_entropy", **loop.said)
    losses, later = steps_of_onward(model, AFTER)
    close(losses, expected)
    if loop.averages:
        averages = dict(run.averages.module.named_parameters())
        del averages["0.bias"]  # before a BatchNorm its gradient is a rounding error, which AdamW makes large
        for parameter, average in averages.items():
            np.testing.assert_allclose(later.array(f"ema/{parameter}"), average.detach().numpy(), atol=1e-6)


@pytest.mark.parametrize("name", ["clipped and accumulated", "averaged", "frozen, without state"])
def test_a_model_says_it_too(name: str, like: onward.Model, tmp_path: Path) -> None:
    """What `like` was prepared with counts as if it was said."""
    run = Run(LOOPS[name])
    run.losses(BEFORE)
    path, expected = _save_torch(run, tmp_path), run.losses(AFTER)
    prepared = onward.prepare(like, loss="cross_entropy", **LOOPS[name].said)
    losses, later = steps_of_onward(onward.from_checkpoint(path, prepared), AFTER)
    close(losses, expected)
    variance = run.module[1].running_var.numpy()  # PyTorch keeps that of samples, and `prepare` that of the batch
    np.testing.assert_allclose(later.array("1.running_var"), variance, rtol=1e-5)


def test_a_schedule_of_the_model(like: onward.Model, tmp_path: Path) -> None:
    """Where the scheduler was not saved, the schedule of `like` counts, if it gives the stored rate."""
    run = Run(LOOPS["a rate without its scheduler"])
    run.losses(BEFORE)
    path, expected = _save_torch(run, tmp_path), run.losses(AFTER)
    halving = "step:size=1,gamma=0.5,every=3"
    for optimizer in ("adamw:lr=0.02", "sgd:lr=1"):  # the class, its numbers and the first rate are stored
        prepared = onward.prepare(like, loss="cross_entropy", optimizer=optimizer, schedule=halving)
        close(steps_of_onward(onward.from_checkpoint(path, prepared), AFTER)[0], expected)
    prepared = onward.prepare(like, loss="cross_entropy", schedule="cosine:steps=50")
    with pytest.raises(onward.Error, match="by its schedule after 6 updates"):
        onward.from_checkpoint(path, prepared)


def test_gradients_that_wait_are_not_lost(like: onward.Model, tmp_path: Path) -> None:
    model = onward.prepare(like, loss="cross_entropy", accumulate=2)
    for batches in (1, 2):
        _, later = steps_of_onward(model, range(batches))
        if batches == 1:
            with pytest.raises(onward.Error, match="1 of 2 batches wait for an update") as caught:
                onward.to_checkpoint(later, tmp_path / "x.pt", format="torch")
            assert "a multiple of 2 batches" in str(caught.value.hint)
        else:
            onward.to_checkpoint(later, tmp_path / "x.pt", format="torch")


def test_steps_of_a_scheduler_are_no_updates(tmp_path: Path) -> None:
    """A format that counts updates itself gets none from a file that does not."""
    run = Run(LOOPS["updates, not counted"])
    run.losses(BEFORE)
    with pytest.warns(UserWarning, match="does not count its updates"):
        onward.to_checkpoint(_save_torch(run, tmp_path), tmp_path / "x.ckpt", format="lightning")
    assert torch.load(tmp_path / "x.ckpt", weights_only=False)["global_step"] == 0


def test_what_contradicts_a_checkpoint_is_refused(like: onward.Model, tmp_path: Path) -> None:
    run = Run(LOOPS["epochs"])
    run.losses(BEFORE)
    path = _save_torch(run, tmp_path)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"updates_per_epoch": 3}, "which is not one in 3"),
        ({"updates_per_epoch": 4, "step": 5}, "counted 6"),
        ({"schedule": "step:size=1,gamma=0.5,every=7"}, "learning rate is 0.01, and 0.02 by its schedule"),
        ({"schedule": "step:size=1,gamma=0.5", "updates_per_epoch": 4}, "`updates_per_epoch` has no effect"),
        ({"updates_per_epoch": 4, "trainable": "1.*", "freeze": "1.*"}, "nothing is left to train"),
    ]
    for said, words in refused:
        with pytest.raises(onward.Error, match=words) as caught:
            onward.from_checkpoint(path, like, loss="cross_entropy", **said)
        assert caught.value.hint


def test_the_learning_rate_of_each_group(like: onward.Model, tmp_path: Path) -> None:
    """Without a scheduler, the rate of each group stays; written again, the file is as it was."""
    module = net()
    others = [*module.parameters()]
    optimizer = torch.optim.AdamW([{"params": others[:2], "lr": 0.03}, {"params": others[2:], "lr": 0.01}])
    scheduler = _halving(optimizer)
    run = Run(Loop(lambda _: optimizer))
    run.module = module
    run.losses(BEFORE)
    scheduler.step()
    path, expected = _save_torch(run, tmp_path), run.losses(AFTER)
    model = onward.from_checkpoint(path, like, loss="cross_entropy")
    assert [group.lr_now for group in onward.describe(model).steps[0].groups] == [0.015, 0.005]
    close(steps_of_onward(model, AFTER)[0], expected)
    onward.to_checkpoint(model, tmp_path / "again.pt", format="torch")
    groups = torch.load(tmp_path / "again.pt")["optimizer"]["param_groups"]
    assert [(group["lr"], group["initial_lr"]) for group in groups] == [(0.015, 0.03), (0.005, 0.01)]


def test_averages_that_begin_with_a_copy(like: onward.Model, tmp_path: Path) -> None:
    """The first update of an `AveragedModel` copies; a later one has the decay that is said."""
    run = Run(LOOPS["averaged"])
    fresh = torch.optim.swa_utils.AveragedModel(run.module, multi_avg_fn=run.averages.multi_avg_fn)
    run.losses(BEFORE)
    told = {"loss": "cross_entropy", "ema": DECAY, "clip": float("inf"), "accumulate": 1}
    torch.save({**run.state, "average": fresh.state_dict()}, tmp_path / "fresh.pt")
    with pytest.raises(onward.Error, match="had no update") as caught:
        onward.from_checkpoint(tmp_path / "fresh.pt", like, **told)
    assert "`--ema`" in str(caught.value.hint)
    run.averages = fresh
    run.losses(AFTER[:1])
    torch.save(run.state, tmp_path / "begun.pt")
    with pytest.warns(UserWarning, match="had 1 update in 7 steps"):
        model = onward.from_checkpoint(tmp_path / "begun.pt", like, **told)
    after = steps_of_onward(model, AFTER[1:])[1]
    run.losses(AFTER[1:])
    averages = dict(run.averages.module.named_parameters())
    averages.pop("0.bias")  # in front of BatchNorm: its gradient is a rounding error, which Adam makes large
    for name, average in averages.items():
        np.testing.assert_allclose(after.array(f"ema/{name}"), average.detach().numpy(), rtol=1e-4, atol=1e-6)


# ---- Lightning, whose loops count ------------------------------------------------------------------------------------

LOSSES: dict[str, list[float]] = json.loads((RECORDED / "losses.json").read_text())
LIGHTNING: dict[str, tuple[dict[str, Any], str]] = {
    "epochs": ({}, ""),
    "updates": ({}, ""),
    "accumulated": ({}, ""),
    "clipped": ({"clip": 0.1}, ""),
    "every-second-epoch": ({"updates_per_epoch": 8}, "made 0 steps in 6 updates"),
    "accumulated-epochs": ({"accumulate": 2}, "of an unknown number of batches"),
}
"""What must be said, and the error without it."""


@pytest.mark.parametrize("name", LIGHTNING)
def test_lightning_counts(name: str, like: onward.Model) -> None:
    """A recorded run of Lightning, which has seen 6 or 8 batches in epochs of 4, continues as it did there."""
    said, refused = LIGHTNING[name]
    path = RECORDED / f"{name}.ckpt"
    if refused:
        with pytest.raises(onward.Error, match=refused) as caught:
            onward.from_checkpoint(path, like, loss="cross_entropy")
        assert f"--{next(iter(said)).replace('_', '-')}" in str(caught.value.hint)
    model = onward.from_checkpoint(path, like, loss="cross_entropy", **said)
    first = 8 if name == "accumulated-epochs" else 6
    close(steps_of_onward(model, range(first, first + 6))[0], LOSSES[name])


def test_loops_that_make_no_sense(tmp_path: Path) -> None:
    """Counters of a file are anybody's: what they say is not taken where it cannot be."""
    tree = torch.load(RECORDED / "epochs.ckpt", weights_only=False)
    loop = tree["loops"]["fit_loop"]
    for number in (0, -1, 2**70, float("nan"), "x", None):
        loop["epoch_loop.batch_progress"]["total"]["processed"] = number
        torch.save(tree, tmp_path / "x.ckpt")
        assert onward.open_checkpoint(tmp_path / "x.ckpt").schedules[0].every in (None, 4)


# ---- formats that tell -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [{"clip": 2.0}, {"accumulate": 4}])
def test_a_checkpoint_that_tells_must_agree(given: dict[str, Any]) -> None:
    """The Trainer of transformers stores its arguments: gradients clipped to a norm of 1, no accumulation."""
    checkpoint = onward.open_checkpoint(RECORDED.parent / "trainer")
    assert checkpoint.clip == {"norm": 1.0, "variant": "torch"} and checkpoint.accumulate == 1
    same = MissingOptions(clip="norm:1", accumulate=1)
    assert settled_options(checkpoint, None, [], same)[:2] == ({}, checkpoint.clip)
    with pytest.raises(onward.Error, match=r"in the checkpoint\n") as caught:
        settled_options(checkpoint, None, [], MissingOptions(**given))
    assert "omit" in str(caught.value.hint)


def test_a_scale_of_the_loss_must_agree() -> None:
    checkpoint = onward.open_checkpoint(RECORDED.parent / "plain.pt")  # with the state of a GradScaler
    found, _, _ = settled_options(checkpoint, None, [], MissingOptions(loss_scale="dynamic"))
    assert found == {"loss_scale": "dynamic"}
    with pytest.raises(onward.Error, match=r"`loss_scale` is 128\.0, and dynamic:"):
        settled_options(checkpoint, None, [], MissingOptions(loss_scale=128.0))
