"""`onward convert`: what it writes, says and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import models
import numpy as np
import onnx
import pytest
from commands import failed, run
from marks import needs

import onward
from onward.engines import start

BATCH = {
    "image": np.random.default_rng(0).standard_normal((8, 64)).astype("f"),
    "labels": np.random.default_rng(1).integers(0, 10, 8),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a training model that has made a few steps."""
    monkeypatch.chdir(tmp_path)
    onnx.save(models.digits_mlp(), "digits.onnx")
    with start(onward.prepare("digits.onnx", loss="cross_entropy", optimizer="adamw"), threads=1) as engine:
        for _ in range(3):
            engine.step(BATCH)
        engine.updated().save("training.onnx")
    return tmp_path


def same(a: str, b: str) -> bool:
    first, second = onward.load(a), onward.load(b)
    return all(np.array_equal(first.array(v.name or ""), second.array(v.name or "")) for v in first.initializers())


@needs("torch")
def test_to_torch_and_back(folder: Path) -> None:
    done = run("convert", "training.onnx", "--to", "torch", "-o", "run.pt", "--json")
    assert json.loads(done.stdout) == ["run.pt", "run.py"]
    assert done.stderr == "wrote run.pt and run.py\n"
    assert "nn.Linear(64, 32)" in Path("run.py").read_text()
    assert json.loads(run("convert", "run.pt", "--like", "training.onnx", "--json").stdout) == ["run.pt-restored.onnx"]
    assert same("training.onnx", "run.pt-restored.onnx")


@pytest.mark.usefixtures("untried")
@needs("torch")
def test_what_torch_trained_comes_back(folder: Path) -> None:
    import torch

    run("convert", "training.onnx", "--to", "torch")
    assert 'load("training.pt")' in Path("training.py").read_text()
    run("convert", "training.onnx", "--to", "torch", "-o", "run.pt")
    state = torch.load("run.pt", weights_only=True)
    state["module"]["fc1.bias"] += 1
    torch.save(state, "run.pt")
    run("convert", "run.pt", "--like", "training.onnx", "-o", "trained.onnx")
    before, after = onward.load("training.onnx"), onward.load("trained.onnx")
    np.testing.assert_array_equal(after.array("fc1.bias"), before.array("fc1.bias") + 1)
    np.testing.assert_array_equal(after.array("fc2.weight/exp_avg"), before.array("fc2.weight/exp_avg"))


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        ("training.onnx", "missing option `--to` for `training.onnx`", "--to torch"),
        (
            "training.onnx --like digits.onnx",
            "tensors of models are matched by structure",
            "digits.onnx --match structure",
        ),
        ("training.onnx --to caffe", "`caffe` is not one of `torch`", "convert --help"),
        ("training.onnx --to torch -o run", "ends with .pt, not `run`", "run.pt"),
        ("training.onnx --to torch --like digits.onnx", "`--like` has no effect with `--to`", "leave one"),
        ("digits.onnx.txt", "unknown format", "a .pt or .keras file"),
    ],
)
def test_misuse(folder: Path, arguments: str, message: str, hint: str) -> None:
    Path("digits.onnx.txt").touch()
    said, way_out = failed("convert", *arguments.split(), code=2)
    assert message in said and hint in way_out


@pytest.mark.usefixtures("untried")
@needs("torch")
def test_refusals(folder: Path) -> None:
    said, hint = failed("convert", "trainin.onnx", "--to", "torch")
    assert said == "the file `trainin.onnx` does not exist" and "`training.onnx`" in hint
    assert "--help" in failed("convert", "missing/x", "--to", "torch")[1]
    Path("run.py").touch()
    said, hint = failed("convert", "training.onnx", "--to", "torch", "-o", "run.pt")
    assert said == "`run.py` already exists" and "--force" in hint
    run("convert", "training.onnx", "--to", "torch", "-o", "run.pt", "--force")
    said, hint = failed("convert", "run.pt", "-o", "back.onnx")
    assert "holds the state" in said and "--like" in hint
    Path("bad.pt").write_bytes(b"nothing")
    assert "without executing it" in failed("convert", "bad.pt", "--like", "training.onnx")[0]


@pytest.mark.usefixtures("untried")
@needs("torch")
def test_a_loss_on_an_inner_value(folder: Path) -> None:
    """What is behind the value that a loss looks at is kept, and the program that is written trains by the value."""
    proto = models.digits_mlp()
    proto.graph.node.append(onnx.helper.make_node("Softmax", ["logits"], ["probabilities"]))
    proto.graph.output[0].name = "probabilities"
    onnx.save(proto, "softmax.onnx")
    run("prepare", "softmax.onnx", "--loss", "logits=cross_entropy", "--optimizer", "sgd:lr=0.1", "-o", "inner.onnx")
    run("convert", "inner.onnx", "--to", "torch", "-o", "inner.pt")
    assert 'loss(outputs["logits"], labels).backward()' in Path("inner.py").read_text()
    module, optimizer, _, loss = loaded(Path("inner.py"), "inner.pt")
    with start(onward.load("inner.onnx"), threads=1) as engine:
        for _ in range(3):
            found = loss(module(torch_of(BATCH["image"])), torch_of(BATCH["labels"]))
            np.testing.assert_allclose(found.item(), engine.step(BATCH)["loss"], rtol=1e-5)
            optimizer.zero_grad()
            found.backward()
            optimizer.step()


def torch_of(array: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(array)


def loaded(program: Path, file: str) -> Any:
    space: dict[str, Any] = {"__name__": "program"}
    exec(compile(program.read_text(), str(program), "exec"), space)
    return space["load"](file)


@pytest.mark.usefixtures("untried")
@needs("torch")
def test_an_inference_model(folder: Path) -> None:
    assert "wrote model.pt and model.py" in run("convert", "digits.onnx", "--to", "torch", "-o", "model.py").stderr
    run("convert", "model.pt", "--like", "digits.onnx", "-o", "back.onnx")
    stored = onward.load("digits.onnx").graph.initializers.items()
    assert all(np.array_equal(onward.load("back.onnx").array(name), x.const_value.numpy()) for name, x in stored)
    run("convert", "training.onnx", "--to", "torch", "-o", "run.pt")
    said, hint = failed("convert", "run.pt", "--like", "digits.onnx")
    assert "this is an inference model" in said and "--like" in hint


def test_other_files_of_a_run(folder: Path) -> None:
    """Errors name the training model of a run, which holds the optimizer state."""
    np.savez("digits.npz", **BATCH)
    run("train", "training.onnx", "--data", "digits.npz", "--epochs", "1", "--run", "run")
    for source in ("run", "run/last.onnx"):
        said, hint = failed("convert", source, "--to", "jax", code=2 if source == "run" else 1)
        assert f"`{source}` is " in said and "onward convert run/training.onnx --to jax" in hint


@pytest.mark.slow
@needs("tensorflow")
def test_to_tensorflow_and_back(folder: Path) -> None:
    run("convert", "training.onnx", "--to", "tensorflow", "-o", "saved")
    assert Path("saved/saved_model.pb").exists()
    run("convert", "saved", "-o", "back.onnx")
    assert same("training.onnx", "back.onnx")
