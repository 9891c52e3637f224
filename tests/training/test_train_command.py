"""`onward train`: what it does, says and returns, and how it fails."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from models import digits_mlp
from runs import QUIET, interrupted_after, state

import onward
from onward.training.api import train
from onward.training.run import Run


def command(*arguments: str, code: int = 0) -> tuple[str, str]:
    from typer.testing import CliRunner

    from onward.cli.commands import app

    result = CliRunner().invoke(app, ["train", *arguments])
    assert result.exit_code == code, f"{result.stdout}{result.stderr}"
    return result.stdout, result.stderr


TRAIN = ["digits.onnx", "--data", "digits.npz", "--loss", "cross_entropy", "--run", "run", "--threads", "1"]


def test_command(folder: Path) -> None:
    out, err = command(*TRAIN, "--epochs", "2", "--validation", "0.2", "-o", "trained.onnx")
    assert not out and all(text in err for text in ("finished after 6 steps: run", "wrote trained.onnx", "report run"))
    assert onnx.load("trained.onnx") == onward.load("run/best.onnx").to_proto()
    _, err = command("--resume", "run", "--epochs", "3", "-o", "more.onnx")
    assert "finished after 9 steps: run" in err and Path("more.onnx").exists()
    assert "the run has made 3 epochs; ask for more than 3: `--epochs 6`" in command("--resume", "run")[1]
    _, err = command("run/training.onnx", "--data", "digits.npz", "--run", "further")
    assert "finished after 3 steps, at step 12: further" in err


def test_command_prints_how_a_table_fits(folder: Path) -> None:
    onnx.save(digits_mlp(), "digits.onnx")
    rows = [",".join([*(f"{i + j}" for j in range(64)), ["cat", "dog", "owl"][i % 3]]) for i in range(9)]
    header = ",".join([*(f"pixel{j}" for j in range(64)), "animal"])
    Path("animals.csv").write_text("\n".join([header, *rows]))
    arguments = ["digits.onnx", "--data", "animals.csv", "--loss", "ce", "--epochs", "1", "--run", "table"]
    notes = ["columns of `image`: `pixel0`, `pixel1`, `pixel2`", "classes of `labels`: `cat`, `dog`, `owl`"]
    _, err = command(*arguments)
    logged = [event["text"] for event in Run("table").read_log() if event["event"] == "note"]
    assert all(note in err and any(note in text for text in logged) for note in notes)


def test_command_is_the_function_of_the_same_name(folder: Path) -> None:
    flags = ["--optimizer", "sgd:lr=0.1", "--batch-size", "8", "--no-shuffle", "--last", "drop", "--clip", "1"]
    out, err = command(*TRAIN, *flags, "--map", "image=image", "--ema", "0.5", "--seed", "3", "--json")
    told = json.loads(out)
    assert not err and told["reason"] == "finished" and told["step"] == 12 and told["output"] is None
    settings = {"loss": "cross_entropy", "optimizer": "sgd:lr=0.1", "clip": "norm:1", "ema": 0.5, "seed": 3}
    same = train("digits.onnx", "digits.npz", run="same", batch_size=8, shuffle=False, last="drop", **settings, **QUIET)
    assert all(np.array_equal(a, b) for a, b in zip(state(Run("run")).values(), state(same).values(), strict=True))


def test_command_preprocesses(folder: Path) -> None:
    scans = np.random.default_rng(0).integers(0, 256, (48, 16, 12), np.uint8)
    np.savez("scans.npz", image=scans, labels=np.arange(48) % 10)
    operations = ["--preprocess", "resize:size=8 scale", "--augment", "flip crop:padding=1", "--keep-preprocessing"]
    flags = ["--data", "scans.npz", "--loss", "ce", "--validation", "0.25", "--no-stratify", "--threads", "1"]
    command("model.onnx", *flags, *operations, "--run", "run", "-o", "out.onnx")
    settings = {"loss": "ce", "preprocess": ["resize:size=8", "scale"], "augment": ["flip", "crop:padding=1"]}
    same = train("model.onnx", "scans.npz", run="same", validation=0.25, stratify=False, **settings, **QUIET)
    assert all(np.array_equal(a, b) for a, b in zip(state(Run("run")).values(), state(same).values(), strict=True))
    assert ort.InferenceSession("out.onnx").run(None, {"image": scans})[0].shape == (48, 10)


def test_command_finds_a_learning_rate(folder: Path) -> None:
    out, _ = command(*TRAIN[:5], "--find-lr")
    assert out.startswith("lr=") and not Path("runs").exists()
    assert json.loads(command(*TRAIN[:5], "--find-lr", "--json")[0])["lr"] > 0


def test_command_that_is_interrupted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted_after(2, monkeypatch)
    _, err = command(*TRAIN, "-o", "trained.onnx", code=130)
    assert "finishing the step and saving; press Ctrl-C again to stop at once" in err
    assert "interrupted after 2 steps: run\nto resume: onward train --resume run\n" in err
    assert not Path("trained.onnx").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--launch", "ray"], "use either"),
        (["--workers", "2"], "use either"),
        (["--launch", "slurm", "--workers", "2"], "use either"),
        (["--launch", "ray", "--workers", "2", "--nproc", "2"], "use either"),
        (["--launch", "ray", "--workers", "2", "--engine", "jax"], "JAX connects processes itself"),
    ],
)
def test_what_starts_processes_is_one(folder: Path, arguments: list[str], words: str) -> None:
    assert words in command(*TRAIN, *arguments, code=2)[1]
