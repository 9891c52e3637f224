"""Several steps in one run: each sees what the others have made of the state."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from marks import needs
from models import digits_mlp
from runs import QUIET, gan_example

import onward
from onward.engines import start
from onward.errors import DataError, RecipeError, UnknownNameError, UnsupportedError
from onward.training.api import resume, train
from onward.training.run import Run


@pytest.fixture(scope="module")
def gan() -> Any:
    return gan_example()


@pytest.fixture(scope="module")
def training(gan: Any) -> onward.Model:
    return gan.prepared(gan.exported())


@pytest.fixture(scope="module")
def batches(gan: Any) -> list[dict[str, np.ndarray]]:
    rng, pictures = np.random.default_rng(0), gan.digits()["digit"]
    return [
        {"z": rng.standard_normal((16, gan.LATENT), np.float32), "digit": pictures[rng.integers(0, len(pictures), 16)]}
        for _ in range(100)
    ]


@pytest.fixture(scope="module")
def by_hand(gan: Any, batches: list[dict[str, np.ndarray]]) -> np.ndarray:
    """The losses of both networks in 50 rounds, as one trains a GAN in PyTorch."""
    import torch
    from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

    torch.manual_seed(0)
    model = gan.Gan()
    parts = (model.discriminator, model.generator)
    discriminator, generator = (torch.optim.Adam(part.parameters(), 5e-4, betas=(0.5, 0.999)) for part in parts)

    def update(optimizer: Any, loss: Any) -> float:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses = []
    for first in range(0, 100, 2):
        told = []
        for batch in batches[first : first + 2]:
            _, made, real = model(torch.from_numpy(batch["z"]), torch.from_numpy(batch["digit"]))
            loss = cross_entropy(made, torch.zeros_like(made)) + cross_entropy(real, torch.ones_like(real))
            told.append(update(discriminator, loss))
        _, made, _ = model(*(torch.from_numpy(batches[first][name]) for name in ("z", "digit")))
        losses.append((np.mean(told), update(generator, cross_entropy(made, torch.ones_like(made)))))
    return np.array(losses)


@pytest.mark.slow("jax")
@pytest.mark.parametrize(
    "engine",
    ["onnxruntime", "numpy", pytest.param("torch", marks=needs("torch")), pytest.param("jax", marks=needs("jax"))],
)
def test_a_gan_trains_as_it_does_in_pytorch(
    engine: str, training: onward.Model, batches: list[dict[str, np.ndarray]], by_hand: np.ndarray
) -> None:
    options = {"compile": False} if engine == "torch" else {}
    with start(training, engine=engine, **options) as running:
        metrics = [running.step(batches[first : first + 2]) for first in range(0, 100, 2)]
        results = running.updated()
    losses = np.array([[float(m["discriminator/loss"]), float(m["generator/loss"])] for m in metrics])
    np.testing.assert_allclose(losses, by_hand, atol=1e-5, rtol=0)
    assert float(metrics[0]["loss"]) == pytest.approx(losses[0].sum())
    assert results.array("step") == 100 and results.array("step_1", 1) == 50
    assert len(results.steps) == 2 and not [finding for finding in onward.check(results) if finding.severity == "error"]


KILLED = """
import os, signal, sys
import onward
from onward.engines.onnxruntime import OnnxRuntime

made, step = [], OnnxRuntime.step

def last_of(self, batch):
    if len(made) == 9:
        os.kill(os.getpid(), signal.SIGKILL)
    made.append(1)
    return step(self, batch)

OnnxRuntime.step = last_of
onward.train("gan.onnx", "digits.npz", run="run", noise={"z": "normal"}, **eval(sys.argv[1]))
"""


@pytest.mark.slow
def test_a_run_goes_on_after_a_kill_as_if_nothing_had_happened(
    training: onward.Model, gan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    training.save("gan.onnx")
    np.savez("digits.npz", digit=gan.digits()["digit"][:230])
    settings = {"epochs": 2, "batch_size": 16, "save_every": 0.0, "threads": 1, "quiet": True}
    done = subprocess.run([sys.executable, "-c", KILLED, repr(settings)], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    run = resume("run", quiet=True)
    whole = train("gan.onnx", "digits.npz", run="whole", noise={"z": "normal"}, **settings)
    assert [e["event"] for e in run.read_log()].count("resume") == 1
    assert losses_of(run) == losses_of(whole) and len(losses_of(whole)) == 14  # 15 batches an epoch make 7 rounds
    for index in range(2):
        for name in training.step(index).update:
            np.testing.assert_array_equal(run.model.array(name, index), whole.model.array(name, index))
    assert gan.samples(run.load_last(), 3).tobytes() == gan.samples(whole.load_last(), 3).tobytes()


def losses_of(run: Run) -> list[tuple[float, float]]:
    return [(e["discriminator/loss"], e["generator/loss"]) for e in run.read_log() if e["event"] == "step"]


def test_a_round_is_what_its_steps_make_one_after_the_other() -> None:
    """Of models of others, too: with names that several steps use for something of their own, and without tags."""
    model = onward.prepare(digits_mlp(8), loss="cross_entropy", optimizer="sgd:lr=0.1", freeze="fc2.*")
    model = onward.prepare(model, loss="cross_entropy", optimizer="adam:lr=0.05", freeze="fc1.*", append=True)
    rename_own_state(model)
    rng = np.random.default_rng(0)
    batches = [
        {"image": rng.normal(size=(4, 64)).astype(np.float32), "labels": rng.integers(0, 10, 4)} for _ in range(3)
    ]
    with start(model, "1:3,0:2") as together, start(model, 0) as first, start(model, 1) as second:
        for _ in range(2):
            together.step(batches)
            for batch in batches:
                second.step(batch)
            first.load_state({name: a for name, a in second.state().items() if name in ("fc2.weight", "fc2.bias")})
            for batch in batches[:2]:
                first.step(batch)
            second.load_state({name: a for name, a in first.state().items() if name in ("fc1.weight", "fc1.bias")})
        results, apart = together.updated(), (first.updated(), second.updated())
    for index, alone in enumerate(apart):
        for name in model.step(index).update:
            np.testing.assert_allclose(results.array(name, index), alone.array(name, index), rtol=1e-5, atol=1e-8)


def rename_own_state(model: onward.Model) -> None:
    """Call the counters of both steps the same, as files may in which each step is a world of its own."""
    counter = model.step(1).algorithm.initializers.pop("step_1")
    counter.name = "step"
    model.step(1).algorithm.register_initializer(counter)
    for bindings in (model.step(1).update, model.step(1).reset):
        bindings["step"] = bindings.pop("step_1")


@pytest.mark.parametrize(
    ("steps", "error", "message"),
    [
        ("critic", UnknownNameError, "no step `critic`"),
        ("generator:0", RecipeError, "a count from 1"),
        ({"generator": 1, "1": 1}, RecipeError, "each step once"),
        (5, UnknownNameError, "no step 5"),
    ],
)
def test_what_is_no_round(steps: Any, error: type[Exception], message: str, training: onward.Model) -> None:
    with pytest.raises(error, match=message):
        onward.lower(training, steps)


def test_what_a_round_cannot_be(training: onward.Model, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="works with one step"):
        onward.lower(training, part="apply")
    with pytest.raises(RecipeError, match="no `constant`"):
        onward.prepare(digits_mlp(), loss="cross_entropy:constant=1")
    with pytest.raises(UnsupportedError, match="has 2 steps"):
        onward.to_checkpoint(training, tmp_path / "gan.pt", format="torch")
    few = {"digit": np.zeros((8, 64), np.float32)}
    with pytest.raises(DataError, match="make 1 batches"):
        train(training, few, run=tmp_path / "a", noise={"z": "normal"}, **QUIET)
    with pytest.raises(UnknownNameError, match="no input `zz`"):
        train(training, few, run=tmp_path / "b", noise={"zz": "normal"}, **QUIET)
    with pytest.raises(UnknownNameError, match="unknown kind of noise"):
        train(training, few, run=tmp_path / "c", noise={"z": "pink"}, **QUIET)
