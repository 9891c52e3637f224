"""Every main job once, on a small model and with no framework installed: `make smoke`, in seconds."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from commands import failed, run
from models import digits_mlp
from paths import CHECKPOINTS
from runs import accuracy, digits, state

import onward
from onward.engines import start
from onward.training.run import Run

CHECKPOINT = CHECKPOINTS / "lightning.ckpt"
RECIPE = ["--loss", "cross_entropy", "--optimizer", "adamw:lr=1e-2"]
TRAIN = ["train", "digits.onnx", "--data", "digits.npz", "--validation", "0.25", "--seed", "3", "--threads", "1"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a model without training, and data for it."""
    monkeypatch.chdir(tmp_path)
    onnx.save(digits_mlp(), "digits.onnx")
    np.savez("digits.npz", **digits(400))
    return tmp_path


def test_a_training_model_is_prepared_checked_and_shown(folder: Path) -> None:
    run("prepare", "digits.onnx", *RECIPE, "--schedule", "cosine:steps=9", "-o", "training.onnx")
    onnx.checker.check_model("training.onnx", full_check=True)
    run("check", "training.onnx", "--strict")
    assert "adamw" in run("show", "training.onnx").stdout
    run("set", "training.onnx", "group0/lr=0.5")
    assert onward.load("training.onnx").initializer("group0/lr").const_value.numpy() == 0.5
    run("strip", "training.onnx", "-o", "plain.onnx")
    assert not onnx.load("plain.onnx").training_info


def test_a_model_is_trained_and_the_run_goes_on(folder: Path) -> None:
    """What was begun and resumed is what was trained at once, bit for bit."""
    run(*TRAIN, *RECIPE, "--epochs", "4", "--run", "whole", "-o", "trained.onnx")
    run(*TRAIN, *RECIPE, "--epochs", "2", "--run", "parts")
    run("train", "--resume", "parts", "--epochs", "4")
    whole, parts = (state(Run(name)) for name in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    for name, array in whole.items():
        np.testing.assert_array_equal(parts[name], array, err_msg=name)
    data = digits(400)
    assert accuracy(onward.load("trained.onnx"), data) > 0.5 > accuracy(onward.load("digits.onnx"), data)
    run("report", "whole", "-o", "page.html")


def test_a_lowered_step_is_a_step_of_the_engine(folder: Path) -> None:
    model = onward.prepare("digits.onnx", loss="cross_entropy", optimizer="adamw:lr=1e-2")
    model.save("training.onnx")
    run("lower", "training.onnx", "-o", "step.onnx")
    batch = digits(16)
    with start(model, threads=1) as engine:
        feeds = {**batch, **engine.state()}
        loss = engine.step(batch)["loss"]
    session = ort.InferenceSession("step.onnx")
    found = session.run(["loss"], {value.name: feeds[value.name] for value in session.get_inputs()})
    np.testing.assert_allclose(found[0], loss, rtol=1e-6)


def test_gradients_are_those_of_differences(folder: Path) -> None:
    run("grad", "digits.onnx", "--of", "logits", "--wrt", "image", "-o", "saliency.onnx")
    assert "image/grad" in [value.name for value in ort.InferenceSession("saliency.onnx").get_outputs()]
    assert run("check-gradients", "digits.onnx", "--of", "logits", "--order", "2").stdout.count(" ok\n") > 4


def test_a_training_model_is_changed_and_keeps_training(folder: Path) -> None:
    run("prepare", "digits.onnx", *RECIPE, "-o", "training.onnx")
    run("opset", "training.onnx", "22", "-o", "newer.onnx")
    run("rename", "newer.onnx", "image=picture", "-o", "renamed.onnx")
    run("data", "renamed.onnx", "--to", "safetensors", "-o", "changed.onnx")
    run("check", "changed.onnx", "--strict")
    batch = digits(16)
    losses = []
    for file, name in (("training.onnx", "image"), ("changed.onnx", "picture")):
        with start(onward.load(file), threads=1) as engine:
            losses += [float(engine.step({name: batch["image"], "labels": batch["labels"]})["loss"]) for _ in range(2)]
    assert losses[:2] == pytest.approx(losses[2:], rel=1e-6) and losses[0] != losses[1]


def test_a_checkpoint_is_shown_and_a_missing_framework_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of PyTorch is read without PyTorch; to go on in it, it is needed."""
    for name in [name for name in sys.modules if name.startswith("onward.frameworks.torch")]:
        monkeypatch.delitem(sys.modules, name)  # another test may have imported it
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "exponential:gamma=0.9; after 2 steps" in run("show", str(CHECKPOINT)).stdout
    run("prepare", "digits.onnx", *RECIPE, "-o", "training.onnx")
    said, hint = failed("convert", "training.onnx", "--to", "torch")
    assert "needs `torch`" in said and "pip install 'onward[torch]'" in hint
