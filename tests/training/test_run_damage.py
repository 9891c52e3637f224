"""Files of a run that have changed since they were saved are found, whichever bit it is; the rest is checked, too."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from commands import run
from models import digits_mlp, small_cnn
from runs import QUIET, digits

import onward
from onward.errors import DataError, InvalidModelError
from onward.model.storage import verify_checksums
from onward.training.run import Run

SETTINGS: dict[str, Any] = {**QUIET, "loss": "cross_entropy", "batch_size": 32, "validation": 0.25, "statistics": False}


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of a model with weights beside it, some of which are frozen."""
    folder = tmp_path_factory.mktemp("run")
    onward.load(small_cnn(channels=32)).save(folder / "model.onnx", data="data")
    np.savez(folder / "data.npz", **digits(flat=False))
    return onward.train(folder / "model.onnx", str(folder / "data.npz"), run=folder / "run", freeze="fc.*", **SETTINGS)


@pytest.fixture
def started(begun: Run, tmp_path: Path) -> Run:
    return Run(shutil.copytree(begun.path, tmp_path / "run"))


def flip(file: Path, at: int, bit: int = 6) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1 << bit
    file.write_bytes(content)


def test_every_flipped_bit_is_found(started: Run) -> None:
    training = started.path / "training.onnx"
    assert verify_checksums(training)
    used = [file for file in started.path.glob("*.data") if file.name.encode() in training.read_bytes()]
    assert used
    luck = random.Random(0)
    for file in (training, *(file for file in used if file.name != "original.data")):
        size = file.stat().st_size
        ends = [*range(min(size, 160))] if file == training else []
        for at in [*(size - 1 - end for end in ends), *(luck.randrange(size) for _ in range(100))]:
            bit = luck.randrange(8)
            flip(file, at, bit)
            with pytest.raises(InvalidModelError):
                verify_checksums(training)
            flip(file, at, bit)
    assert verify_checksums(training)


def test_other_readers_find_a_text_in_the_metadata(started: Run) -> None:
    onnxruntime.InferenceSession(started.path / "best.onnx")
    onnx.checker.check_model(str(started.path / "best.onnx"))
    assert "onward.checksums" in {entry.key for entry in onnx.load(started.path / "best.onnx").metadata_props}
    started.best.save(started.path / "other.onnx")  # which is no file of the run, and has none
    assert "onward.checksums" not in {entry.key for entry in onnx.load(started.path / "other.onnx").metadata_props}


@pytest.mark.parametrize("name", ["training.onnx", "training.*.data", "original.onnx", "original.data", "best.onnx"])
def test_damage_is_refused_and_found(started: Run, name: str) -> None:
    file = next(file for file in sorted(started.path.glob(name)) if file.stat().st_size)
    if file.suffix == ".data":
        at = 4 * 5 + 3  # the exponent of a weight
    else:
        at = file.read_bytes().index(b"ai.onnx.preview") if name == "training.onnx" else 12
    flip(file, at)
    with pytest.raises(DataError) as caught:
        onward.resume(started, epochs=2, quiet=True)
    assert file.name in str(caught.value) and "has changed since it was saved" in str(caught.value)
    hint = caught.value.hint or ""
    assert ("rm " if name == "best.onnx" else "best.onnx is intact") in hint
    assert {finding.code for finding in started.check()} & {"OW803", "OW802"}
    if name == "best.onnx":
        file.unlink()
        onward.resume(started, epochs=2, quiet=True)
        assert (started.path / "best.onnx").exists() and not started.check()


def test_a_new_run_from_the_model_that_is_intact(started: Run, tmp_path: Path) -> None:
    flip(started.path / "training.onnx", 200)
    with pytest.raises(DataError) as caught:
        onward.resume(started, quiet=True)
    command = (caught.value.hint or "").partition("onward train ")[2].split()
    run("train", *command, "--run", str(tmp_path / "new"), "--epochs", "1")
    assert Run(tmp_path / "new").read_progress()["epoch"] == 1


def test_check_of_a_run(started: Run) -> None:
    assert "no findings" in run("check", str(started.path)).stdout
    (started.path / "log.jsonl").unlink()
    (started.path / "config.yaml").write_text("epochs: many\n")
    (started.path / "original.onnx").unlink()
    found = json.loads(run("check", str(started.path), "--json", code=1).stdout)["findings"]
    assert {(one["code"], one["place"]) for one in found} == {
        ("OW801", "original.onnx"),
        ("OW801", "log.jsonl"),
        ("OW802", "config.yaml"),
    }


def test_a_run_without_its_progress_is_refused(tmp_path: Path) -> None:
    """It would start at epoch 1, with weights that are trained."""
    onnx.save(digits_mlp(), tmp_path / "digits.onnx")
    np.savez(tmp_path / "digits.npz", **digits())
    started = onward.train(tmp_path / "digits.onnx", str(tmp_path / "digits.npz"), run=tmp_path / "run", **SETTINGS)
    model = started.model
    del model.step().metadata["train.progress"]
    model.save(started.path / "training.onnx")
    with pytest.raises(DataError, match="lacks the position of the run"):
        onward.resume(started, epochs=2, quiet=True)
    assert [finding.code for finding in started.check()] == ["OW802"]
