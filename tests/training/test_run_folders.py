"""Folders of runs: what is refused in them, what is left behind in them, and what is not written over."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from models import digits_mlp
from runs import QUIET, RECIPE, filled
from typer.testing import CliRunner

import onward
from onward.cli.commands import app
from onward.errors import DataError, Error, TrainingError, WriteError
from onward.model.storage import data_files_of
from onward.training.api import resume, train
from onward.training.folder import Folder
from onward.training.log import Log
from onward.training.run import Run

SETTINGS: dict[str, Any] = {**RECIPE, **QUIET}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = filled(tmp_path_factory.mktemp("made"))
    train(str(place / "digits.onnx"), str(place / "digits.npz"), run=place / "run", **SETTINGS)
    return place


def said(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stderr


# ---- what is in them -------------------------------------------------------------------------------------------------

CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"epochs": -1}, "`epochs` is -1, but must be at least 0"),
    ({"epochs": 1.5}, "`epochs` is `1.5`, but must be an integer"),
    ({"epochs": True}, "`epochs` is"),
    ({"batch_size": 0}, "`batch_size` is 0, but must be at least 1"),
    ({"batch_size": 10**30}, "`batch_size` is 1000"),
    ({"data": 7}, "`data` is `7`, but must be"),
    ({"columns": ["x"]}, "`columns` is"),
    ({"last": "some"}, "`last` is `'some'`, but must be `keep`, `drop` or `pad`"),
    ({"seed": -3}, "`seed` is -3"),
    ({"metrics": [1]}, "`metrics` is `[1]`, but must be a string or a list of strings"),
    ({"save_every": float("nan")}, "`save_every` is nan"),
    ({"threads": 10**20}, "`threads` is 1000"),
    ({"validation": 2.0}, "`validation` is 2"),
    ({"engine": 7, "shuffle": 0}, "`shuffle` is `0`, but must be `True` or `False`; `engine` is `7`"),
]


@pytest.mark.parametrize(("change", "problem"), CONFIGS, ids=lambda value: str(value)[:30])
def test_a_configuration_that_cannot_be(change: dict[str, Any], problem: str, made: Path, tmp_path: Path) -> None:
    run = Run(shutil.copytree(made / "run", tmp_path / "run"))
    Folder(run.path).configure({**run.read_config(), **change})
    with pytest.raises(DataError, match=re.escape(f"`{run.path / 'config.yaml'}` cannot be used: ")) as error:
        resume(run, epochs=2)
    assert problem in str(error.value) and error.value.hint


def test_a_configuration_that_lacks_something(made: Path, tmp_path: Path) -> None:
    run = Run(shutil.copytree(made / "run", tmp_path / "run"))
    Folder(run.path).configure({name: value for name, value in run.read_config().items() if name != "batch_size"})
    code, err = said("train", "--resume", str(run.path), "-o", str(tmp_path / "out.onnx"))
    assert code == 1 and "the configuration of this run lacks `batch_size`" in err


@pytest.mark.parametrize("text", ["", "[]", "nothing", "[" * 100_000, '{"epochs": ' + "9" * 5000 + "}"])
def test_a_configuration_that_is_none(text: str, made: Path, tmp_path: Path) -> None:
    run = Run(shutil.copytree(made / "run", tmp_path / "run"))
    (run.path / "config.yaml").write_text(text)
    with pytest.raises(DataError, match=r"config\.yaml` (is|holds)"):
        resume(run)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"epoch": -1}, "`epoch` is -1, but must be at least 0"),
        ({"step": "1"}, "`step` is `'1'`"),
        ({"best": "good"}, "`best` is `'good'`, but must be a number"),
        ({"log": 1e300}, "`log` is `1e+300`"),
        ({"losses": None, "counted": -1}, "`counted` is -1"),
        ([], "is not a JSON object"),
        ("{", "is not valid JSON"),
    ],
    ids=str,
)
def test_progress_that_cannot_be(change: Any, problem: str, made: Path, tmp_path: Path) -> None:
    run = Run(shutil.copytree(made / "run", tmp_path / "run"))
    model = run.model
    progress = {**run.read_progress(), **change} if isinstance(change, dict) else change
    model.step().metadata["train.progress"] = progress if isinstance(progress, str) else json.dumps(progress)
    model.save(run.path / "training.onnx")
    with pytest.raises(DataError, match=r"the progress in `.*training\.onnx` ") as error:
        resume(run, epochs=2)
    assert problem in str(error.value)


# ---- what is left behind ---------------------------------------------------------------------------------------------


def unsound() -> onnx.ModelProto:
    proto = digits_mlp()
    weight = onnx.numpy_helper.to_array(proto.graph.initializer[0]) * np.float32(1e38)
    proto.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(weight, proto.graph.initializer[0].name))
    return proto


@pytest.mark.parametrize(
    ("model", "settings", "error"),
    [
        ("digits.onnx", {"data": "model.onnx"}, DataError),
        ("digits.onnx", {"loss": "no_such_loss"}, Error),
        ("digits.onnx", {"device": "abacus"}, Error),
        ("digits.onnx", {"engine": "numpy", "precision": "bfloat16", "threads": None}, Error),
        ("digits.onnx", {"data": lambda: iter([{"image": np.zeros((2, 3), np.float32)}])}, DataError),
        (unsound(), {}, TrainingError),
    ],
    ids=["data", "loss", "device", "precision", "batch", "first step"],
)
@pytest.mark.parametrize("run", ["run", None])
def test_a_start_that_fails_leaves_nothing(
    model: Any, settings: dict[str, Any], error: type[Exception], run: str | None, folder: Path
) -> None:
    given = {"data": "digits.npz", **SETTINGS, **settings}
    with pytest.raises(error):
        train(model, given.pop("data"), run=run, **given)
    assert not Path("run").exists() and not list(folder.glob("runs/*"))
    assert train("digits.onnx", "digits.npz", run=run, **SETTINGS).progress["step"] == 3


def test_a_disk_that_is_full_before_the_first_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hint and the folder agree on whether there is something to go on with."""
    write = Log.write

    def full(self: Log, event: str, /, **values: Any) -> None:
        if event == "save":  # after the first one
            raise OSError(28, "No space left on device")
        write(self, event, **values)

    with monkeypatch.context() as patch, pytest.raises(WriteError, match="No space left") as error:
        patch.setattr(Log, "write", full)
        train("digits.onnx", "digits.npz", run="run", **SETTINGS)
    assert "start again" in (error.value.hint or "") and not Path("run").exists()
    assert train("digits.onnx", "digits.npz", run="run", **SETTINGS).progress["step"] == 3


def test_a_folder_that_was_there_stays(folder: Path) -> None:
    Path("run").mkdir()
    with pytest.raises(Error):
        train("digits.onnx", "digits.npz", run="run", **{**SETTINGS, "device": "abacus"})
    assert [path.name for path in Path("run").iterdir()] in ([], [".lock"])


def test_what_a_kill_at_the_start_leaves_behind_is_removed(folder: Path) -> None:
    """By the next start in the folder, and by a run that goes on; files of others stay."""
    left = [".original.onnx.0a1b2c3d.tmp", ".config.yaml.0a1b2c3d.tmp", "original.3.data", "training.7.safetensors"]
    Path("run").mkdir()
    for name in (*left, "config.yaml"):
        Path("run", name).write_bytes(b"half of it")
    run = train("digits.onnx", "digits.npz", run="run", **SETTINGS)
    assert not [name for name in left if (run.path / name).exists()]
    others = [".other.onnx.0a1b2c3d.tmp", "mine.data", ".training.onnx.mine.tmp"]
    for name in (*left, *others):
        (run.path / name).write_bytes(b"half of it")
    resume(run, epochs=2, quiet=True)
    assert [name for name in (*left, *others) if (run.path / name).exists()] == others


# ---- what is not written over ----------------------------------------------------------------------------------------


def test_a_report_replaces_reports_alone(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(made / "run", tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    before = {path.name: path.read_bytes() for path in Path("run").iterdir()}
    for name in before:
        for force in ([], ["--force"]):
            code, err = said("report", "run", "-o", f"run/{name}", *force)
            assert code == 1 and "is a file of the run" in err
    Path("mine.html").write_text("<!DOCTYPE html> mine")
    assert said("report", "run", "-o", "mine.html")[0] == 1
    assert said("report", "run", "-o", "mine.html", "--force")[0] == 0
    assert said("report", "run", "-o", "mine.html")[0] == 0  # now it is one
    assert all((Path("run") / name).read_bytes() == content for name, content in before.items())


@pytest.mark.parametrize("arguments", ["show training.onnx --graph out.svg", "lower training.onnx -o out.onnx"])
def test_what_commands_write_is_written_as_a_whole(
    arguments: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    onward.prepare("digits.onnx", loss="cross_entropy").save("training.onnx")
    names = ("out.svg", "out.json")
    for name in names:
        Path(name).write_text("before")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: full() if str(b).endswith(names) else replace(a, b))
    code, err = said(*arguments.split(), "--force")
    assert code == 1 and "No space left" in err
    assert [Path(name).read_text() for name in names] == ["before", "before"]
    assert not [path for path in folder.iterdir() if path.suffix == ".tmp"]


# ---- where things are ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", ["digits.npz", ["image=digits.npz:image", "labels=digits.npz:labels"]])
def test_data_that_moved(data: Any, folder: Path) -> None:
    run = train("digits.onnx", data, run="run", **SETTINGS)
    shutil.move("digits.npz", "elsewhere.npz")
    code, err = said("train", "--resume", "run", "--epochs", "2")
    assert code == 1 and re.search(r"the data of this run is no longer at `.*digits\.npz", err)
    assert "`--data NEW`" in err
    assert said("train", "--resume", "run", "--epochs", "2", "--data", "elsewhere.npz", "-q")[0] == 0
    resume(run, epochs=3, quiet=True)  # which knows it now
    assert run.read_progress()["epoch"] == 3


@pytest.mark.parametrize("form", ["none", "data", "safetensors"])
@pytest.mark.parametrize("validation", [[], ["--validation", "0.2"]])
def test_the_place_of_tensors_is_kept(form: Any, validation: list[str], folder: Path) -> None:
    """Also if all of them are trained, so that nothing is where it was."""
    onward.load(digits_mlp(64)).save("net.onnx", data=form)
    code, err = said(
        *("train", "net.onnx", "--data", "digits.npz", "--loss", "ce", "--run", "run", "-o", "out.onnx", "-q"),
        *validation,
    )
    assert code == 0, err
    beside = {path.suffix[1:] for path in folder.glob("out.*")} - {"onnx"}
    assert beside == ({form} - {"none"})
    told = rf" and out\.{form} \([\d.]+ KiB\)" if beside else ""
    assert re.search(rf"^wrote out\.onnx \([\d.]+ (KiB|B)\){told}$", err, re.MULTILINE)
    assert np.isfinite(onward.load("out.onnx").array("fc1.weight")).all()


def test_models_over_their_own_data(folder: Path) -> None:
    """Commands that read a model with data beside it and write to the same path, again and again."""
    onward.load(digits_mlp(64)).save("net.onnx", data="data")
    weight = onward.load("net.onnx").array("fc1.weight").copy()
    for arguments in (
        "prepare net.onnx --loss ce -o net.onnx --force",
        "set net.onnx group0/lr=0.5",
        "data net.onnx --to safetensors -o net.onnx --force",
        "data net.onnx --to data -o net.onnx --force",
        "strip net.onnx -o net.onnx --force",
        "prepare net.onnx --loss ce --freeze fc1.* -o net.onnx --force",
        "opset net.onnx 20 -o net.onnx --force",
    ):
        code, err = said(*arguments.split())
        assert code == 0, err
        assert np.array_equal(onward.load("net.onnx").array("fc1.weight"), weight), arguments
    assert {path for path in folder.glob("net.*") if path.suffix != ".onnx"} == set(data_files_of("net.onnx"))
