"""Runs to which something happens: nothing of it can be seen in what comes out."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import full_disks
import killed_runs
import numpy as np
import onnx
import pytest
from full_disks import NAMESPACE, can_mount
from marks import needs
from models import digits_mlp, small_cnn
from runs import QUIET, RECIPE, Arrays, digits, filled, interrupted_after, outputs, state

import onward
from onward.errors import (
    ArgumentError,
    DataError,
    RecipeError,
    TrainingError,
    UnknownNameError,
    WriteError,
)
from onward.model.storage import data_files_of
from onward.training.api import resume, train
from onward.training.callbacks import Saver, Status
from onward.training.folder import Folder
from onward.training.run import Run


def history(run: Run) -> list[dict[str, Any]]:
    """The log, without times and without what says when it was saved, resumed and ended."""
    events = [{k: v for k, v in e.items() if k not in ("time", "seconds", "config", "model")} for e in run.read_log()]
    return [e for e in events if e["event"] not in ("resume", "end") and not (e["event"] == "save" and not e["best"])]


def scalars(run: Run) -> list[tuple[int, str, float]]:
    """What TensorBoard shows of it."""
    import tensorflow as tf

    (path,) = run.path.glob("events.out.tfevents.*")
    events = tf.compat.v1.train.summary_iterator(str(path))
    return [(e.step, v.tag, v.simple_value) for e in events for v in e.summary.value if v.HasField("simple_value")]


def assert_same(run: Run, whole: Run) -> None:
    """That two runs ended in the same state, with the same models, and with the same history."""
    a, b = state(run), state(whole)
    assert a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)
    for name in ("best.onnx", "last.onnx"):
        assert (run.path / name).read_bytes() == (whole.path / name).read_bytes()
    assert history(run) == history(whole)
    places = [{k: v for k, v in r.progress.items() if k not in ("log", "board")} for r in (run, whole)]
    assert places[0] == places[1]
    assert not [path.name for path in run.path.iterdir() if path.suffix == ".tmp"]


# ---- as if nothing had happened --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that nothing happens to: random numbers, statistics, moments, a schedule."""
    place = filled(tmp_path_factory.mktemp("whole"))
    return train(str(place / "model.onnx"), str(place / "data.npz"), run=place / "run", **killed_runs.SETTINGS)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forks")
@pytest.mark.parametrize("kills", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_kill(kills: int, whole: Run, folder: Path) -> None:
    arguments = [sys.executable, killed_runs.__file__, str(folder), str(kills), "0"]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    run = Run("run")
    assert int(done.stdout) >= 2 and [
        e for e in run.read_log() if e["event"] == "resume"
    ]  # a fast machine is done soon
    assert_same(run, whole)
    if kills > 5 and importlib.util.find_spec("tensorflow"):
        assert scalars(run) == scalars(whole)


def test_a_run_that_was_reset_is_not_reset_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its seeds a reset would draw the same again: it is the steps since then that would be lost."""
    model = onward.prepare("digits.onnx", loss="cross_entropy", init={"*.weight": "normal"})
    settings: dict[str, Any] = {**QUIET, "reset": True, "seed": 3, "epochs": 2, "batch_size": 16, "validation": 0.2}
    whole = train(model, "digits.npz", run="whole", **settings)
    with monkeypatch.context() as patched:
        interrupted_after(8, patched)
        run = train(model, "digits.npz", run="run", **settings)
    assert run.read_log()[-1]["step"] == 8 and run.read_config()["reset"]
    assert_same(resume(run, quiet=True), whole)


@pytest.mark.slow("5")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forks")
@pytest.mark.parametrize("kills", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_kill_with_weights_beside_the_model(kills: int, tmp_path: Path) -> None:
    """Frozen ones are in the folder once, whatever happens; of all others, there is nothing left that nobody needs."""
    onward.load(small_cnn(channels=32)).save(tmp_path / "model.onnx", data="data")
    np.savez(tmp_path / "data.npz", **digits(flat=False))
    (tmp_path / "settings.json").write_text(json.dumps({"freeze": "fc.*", "tensorboard": False, "epochs": 10}))
    model, data = str(tmp_path / "model.onnx"), str(tmp_path / "data.npz")
    whole, run = train(model, data, run=tmp_path / "whole", **killed_runs.settings_in(tmp_path)), Run(tmp_path / "run")
    arguments = [sys.executable, killed_runs.__file__, str(tmp_path), str(kills), "1"]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 2 and [e for e in run.read_log() if e["event"] == "resume"]
    assert history(run) == history(whole)
    for a, b in ((run.model, whole.model), (run.load_best(), whole.load_best()), (run.load_last(), whole.load_last())):
        names = {value.name for value in a.initializers()}
        assert names == {value.name for value in b.initializers()}
        assert all(np.array_equal(a.array(name), b.array(name)) for name in names)
    resume(run, epochs=11, quiet=True)  # sweeps
    left = {path.name for path in run.path.iterdir()}
    used = {path.name for name in left if name.endswith(".onnx") for path in data_files_of(run.path / name)}
    others = sorted(name for name in left - used if not re.fullmatch(r".*\.(onnx|jsonl|yaml)|\.lock", name))
    assert "original.data" in used and all(re.fullmatch(r"(training|best|last)(\.\d+)?\.data", o) for o in others)
    assert len(others) <= 3  # what each model had before it was last replaced


@pytest.mark.slow("1-2", "5-2", "7-15")
@pytest.mark.parametrize(
    ("steps", "number"), [(1, signal.SIGINT), (5, signal.SIGINT), (7, signal.SIGTERM), (20, signal.SIGINT)]
)
def test_interrupt(steps: int, number: int, whole: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        interrupted_after(steps, patch, number)
        run = train("model.onnx", "data.npz", run="run", **{**killed_runs.SETTINGS, "save_every": 60})
    assert (
        run.read_log()[-1]["reason"] == "interrupted"
        and run.read_log()[-1]["step"] == run.read_progress()["step"] == steps
    )
    assert signal.getsignal(number) is before
    resume(run, quiet=True)
    assert_same(run, whole)


def test_the_loss_of_an_epoch_is_the_mean_over_its_samples(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In the log, on the screen and for TensorBoard; also of an epoch that was interrupted, with a last batch of 6."""
    data = {name: array[:38] for name, array in digits().items()}
    settings = {**RECIPE, "threads": 1, "batch_size": 16, "epochs": 2, "tensorboard": True}
    with monkeypatch.context() as patch:
        interrupted_after(2, patch)
        run = train(digits_mlp(), data, run="run", **settings)
    resume(run, data)
    steps = [event for event in run.read_log() if event["event"] == "step"]
    means = [np.average([e["loss"] for e in steps[i : i + 3]], weights=[16, 16, 6]) for i in (0, 3)]
    epochs = [(event["step"], event["loss"]) for event in run.read_log() if event["event"] == "epoch"]
    np.testing.assert_allclose(epochs, list(zip((3, 6), means, strict=True)), rtol=1e-6)
    printed = re.findall(r"epoch \d/2  loss (\S+)", capfd.readouterr().err)
    assert printed == [f"{mean:.4g}" for mean in means]
    assert b"epoch/loss" in next(run.path.glob("events.*")).read_bytes()


@pytest.mark.slow
def test_interrupt_twice(whole: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        interrupted_after(3, patch)
        interrupted_after(3, patch)  # two in one step
        with pytest.raises(KeyboardInterrupt):
            train("model.onnx", "data.npz", run="run", **{**killed_runs.SETTINGS, "save_every": 60})
    run = Run("run")
    assert run.read_progress()["step"] == 0
    assert_same(resume(run, quiet=True), whole)


def test_an_interrupt_that_is_ignored_stays_so(whole: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a job in the background, which SIGTERM stops all the same."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with monkeypatch.context() as patch:
            interrupted_after(3, patch)
            interrupted_after(5, patch, signal.SIGTERM)
            run = train("model.onnx", "data.npz", run="run", **killed_runs.SETTINGS)
        assert run.read_log()[-1]["reason"] == "interrupted" and run.read_progress()["step"] == 5
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert_same(resume(run, quiet=True), whole)


def test_interrupt_in_validation(whole: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from onward.engines.onnxruntime import OnnxRuntime

    evaluate, calls = OnnxRuntime.evaluate, iter(range(100))

    def interrupted(self: OnnxRuntime, batch: Arrays) -> Arrays:
        if next(calls) == 5:
            signal.raise_signal(signal.SIGINT)
        return evaluate(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(OnnxRuntime, "evaluate", interrupted)
        run = train("model.onnx", "data.npz", run="run", **killed_runs.SETTINGS)
    assert run.read_log()[-1]["reason"] == "interrupted" and run.read_progress()["batch"] == 5
    assert_same(resume(run, quiet=True), whole)


@needs("tensorflow")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_shows_each_step_once(whole: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Saver, status: Status) -> None:
        if status.step == 8:
            raise KeyboardInterrupt
        if status.step not in (6, 7):  # which are lost
            save(self, status)

    save = Saver.save
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Saver, "save", broken)
        train("model.onnx", "data.npz", run="run", **killed_runs.SETTINGS)
    run = Run("run")
    assert run.read_progress()["step"] == 5
    assert_same(resume(run, quiet=True), whole)
    assert scalars(run) == scalars(whole) and len(scalars(run)) > 20


@pytest.mark.slow
def test_interrupt_often(whole: Run, folder: Path) -> None:
    rng = np.random.default_rng(0)
    for number in range(100):
        run, is_over = Run(f"run{number}"), False
        while not is_over:
            timer = threading.Timer(rng.uniform(0.2, 1), os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
            try:
                if (run.path / "training.onnx").exists():
                    resume(run, quiet=True)
                else:
                    train("model.onnx", "data.npz", run=run.path, **killed_runs.SETTINGS)
                is_over = run.read_log()[-1]["reason"] == "finished"
            except KeyboardInterrupt:  # it came before the run listened, or after it
                continue
            finally:
                timer.cancel()
        assert_same(run, whole)


def test_what_a_kill_leaves_behind_is_removed(folder: Path) -> None:
    onnx.save(digits_mlp(256), "large.onnx", save_as_external_data=True, location="large.bin", size_threshold=512)
    run = train("large.onnx", "digits.npz", run="run", **RECIPE, **QUIET)
    assert list(run.path.glob("training*.data"))
    for name in ("training.9.data", "best.data", ".training.onnx.0a1b2c3d.tmp", ".last.onnx.0a1b2c3d.tmp"):
        (run.path / name).write_bytes(b"half of it")
    (run.path / "notes.txt").write_text("mine")
    resume(run, epochs=2, quiet=True)
    left = {path.name for path in run.path.iterdir() if path.read_bytes() == b"half of it"}
    assert not left and (run.path / "notes.txt").exists()
    assert np.isfinite(outputs(onward.load(run.load_best().save("best.onnx", data="none")), digits()["image"])).all()


def test_a_run_goes_on_from_another_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = ["image=digits.npz:image", "labels=digits.npz:labels"]
    for data in ("digits.npz", columns):
        run = train("digits.onnx", data, run=f"run{len(data)}", **RECIPE, **QUIET)
        (folder / "elsewhere").mkdir(exist_ok=True)
        monkeypatch.chdir(folder / "elsewhere")
        assert resume(folder / run.path, epochs=2, quiet=True).progress["epoch"] == 2
        monkeypatch.chdir(folder)


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite(folder: Path) -> None:
    data = digits()
    data["image"][60] = -np.inf
    with pytest.raises(TrainingError, match="the loss of step 2 is nan: the state after step 1 is saved") as error:
        train(digits_mlp(), data, shuffle=False, run="run", **RECIPE, **QUIET)
    assert "learning rate" in (error.value.hint or "")
    run = Run("run")
    assert run.read_log()[-1] | {"seconds": 0} == run.read_log()[-1] | {"step": 1, "reason": "not_finite", "seconds": 0}
    assert np.isnan(run.read_log()[-1]["loss"])
    assert run.read_progress()["step"] == 1 and all(np.isfinite(array).all() for array in state(run).values())


def test_a_dynamic_loss_scale_skips_losses_that_are_not_finite(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = digits()
    data["image"][60] = -np.inf
    run = train(digits_mlp(), data, shuffle=False, run="run", loss_scale="dynamic:initial=64", **RECIPE, **QUIET)
    steps = [entry for entry in run.read_log() if entry["event"] == "step"]
    assert [np.isfinite(entry["loss"]) for entry in steps[:3]] == [True, False, True]
    assert np.isfinite(run.progress["losses"])
    assert state(run)["scaler/scale"] == 32 and state(run)["step"] == len(steps) - 1
    monkeypatch.setattr("onward.training.loop._MOST_OVERFLOWS", 0)  # as after so many in a row
    with pytest.raises(TrainingError, match="the loss of step 2 is nan"):
        train(digits_mlp(), data, shuffle=False, run="other", loss_scale="dynamic", **RECIPE, **QUIET)


def test_weights_that_are_not_finite(folder: Path) -> None:
    """A step that is too large makes weights infinite, but its own loss is that of the weights before."""
    text = "net (float[N,2] x) => (float[N,2] y) <float[2] w = {0.5, 0.5}> { y = Mul(x, w) }"
    graph, opset = onnx.parser.parse_graph(text), onnx.helper.make_opsetid("", 21)
    model = onnx.helper.make_model(graph, opset_imports=[opset], ir_version=10)
    data = (np.array([[0, 0], [0, 0], [0, 0], [1e3, 1]], np.float32), np.ones((4, 2), np.float32))
    with pytest.raises(TrainingError, match=r"`w` holds NaN or infinity after step 4: the state after step 3 is saved"):
        settings = {"shuffle": False, "batch_size": 1, "save_every": 0, "run": "run", **QUIET}
        train(model, data, loss="mse", optimizer="sgd:lr=1e38", **settings)
    assert np.isfinite(state(Run("run"))["w"]).all() and Run("run").read_progress()["step"] == 3


def test_data_that_end_in_the_run(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def batches() -> Iterator[Arrays]:
        yield {name: array[:16] for name, array in digits().items()}
        raise DataError("the file is gone")

    with pytest.raises(DataError, match="the file is gone"):
        train(digits_mlp(), batches, run="run", threads=1, **RECIPE)
    way_on = "saved after step 1; fix the cause, then continue with `onward.resume('run', data)`"
    assert way_on in capfd.readouterr().err
    run = Run("run")
    assert run.read_progress()["step"] == 1 and run.read_log()[-1]["reason"] == "failed"
    data = digits()
    steps = resume(run, lambda: ({n: a[i : i + 16] for n, a in data.items()} for i in (0, 16)), quiet=True)
    assert steps.progress["step"] == 2


@pytest.mark.parametrize(
    ("column", "value", "said", "hint"),
    [
        ("image", np.nan, "column `image` is NaN (not a number) in row 90 of bad.npz", "fill in missing values"),
        ("labels", -1, "label -1 in row 90 of bad.npz", "if -1 means no class: `cross_entropy:ignore_index=-1`"),
        (
            "labels",
            -100,
            "label -100 in row 90 of bad.npz",
            "if -100 means no class: `cross_entropy:ignore_index=-100`",
        ),
        ("labels", 255, "label 255 in row 90 of bad.npz", "if 255 means no class: `cross_entropy:ignore_index=255`"),
        ("labels", 10, "label 10 in row 90 of bad.npz", "or give the model more classes: `--new-head 11`"),
    ],
)
def test_a_bad_row_is_named_and_the_run_continues_without_it(
    folder: Path, capfd: pytest.CaptureFixture[str], column: str, value: float, said: str, hint: str
) -> None:
    data = digits(96)
    good = data[column][90].copy()
    data[column][90] = value
    np.savez("bad.npz", **data)
    with pytest.raises(DataError) as caught:
        train(digits_mlp(), "bad.npz", run="run", shuffle=False, **RECIPE)
    assert said in str(caught.value) and hint in str(caught.value.hint) and "begin at 1" not in str(caught.value.hint)
    said_last = capfd.readouterr().err
    assert "fix the cause, then continue with `onward train --resume run`" in said_last
    assert "if you changed the data, add `--data-changed`" in said_last
    with pytest.raises(DataError, match="row 90"):
        resume("run", quiet=True)
    data[column][90] = good
    np.savez("bad.npz", **data)
    assert resume("run", data_changed=True, quiet=True).progress["step"] == 2 + 3  # the epoch starts over


def test_labels_that_begin_at_1(folder: Path) -> None:
    data = digits(96)
    with pytest.raises(DataError) as caught:
        train(digits_mlp(), data | {"labels": data["labels"] + 1}, run="run", **RECIPE, **QUIET)
    assert "if they begin at 1, subtract 1" in str(caught.value.hint)


def test_a_file_that_disappears_in_the_run(folder: Path) -> None:
    def batches() -> Iterator[Arrays]:
        yield {name: array[:16] for name, array in digits().items()}
        np.load("gone.npy")

    with pytest.raises(DataError, match=r"the data could not be read: .*gone\.npy"):
        train(digits_mlp(), batches, run="run", **RECIPE, **QUIET)
    assert Run("run").read_progress()["step"] == 1


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Within it, the system writes no file that is larger: an error like that of a full disk, at any moment."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.slow("0.0-30000-could not write `.*training.onnx`")
@pytest.mark.skipif(os.name == "nt", reason="needs limits of POSIX")
@pytest.mark.parametrize(
    ("save_every", "size", "message"),
    [(0.0, 30_000, r"could not write `.*training.onnx`"), (60.0, 12_000, "could not write to `run`")],
)
def test_a_file_that_cannot_be_written(
    save_every: float, size: int, message: str, whole: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state, or the log before it; what was saved is intact."""
    with monkeypatch.context() as patch:
        interrupted_after(3, patch)
        run = train("model.onnx", "data.npz", run="run", **{**killed_runs.SETTINGS, "save_every": save_every})
    with files_of_at_most(size), pytest.raises(WriteError, match=f"{message}: File too large") as error:
        resume(run, quiet=True)
    assert "then continue from step 3 with `onward train --resume run`" in (error.value.hint or "")
    assert run.read_progress()["step"] == 3
    assert_same(resume(run, quiet=True), whole)


@pytest.mark.slow
@pytest.mark.skipif(not can_mount(), reason="needs namespaces of users, for disks that are small")
def test_a_full_disk(whole: Run, folder: Path) -> None:
    """At every stage of a run: its folder, its log, its first state, a later one."""
    stages = {4: "config", 20: "run", 60: "training", 150: "training"}
    arguments = [*NAMESPACE, sys.executable, full_disks.__file__, str(folder), *map(str, stages)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    said = {int(room): (text, hint) for room, text, hint in (line.split("|") for line in done.stdout.splitlines())}
    assert said.keys() == stages.keys()
    for room, (text, hint) in said.items():
        assert re.search(rf"could not write (to )?`.*{stages[room]}(\.\w+)?`: No space left", text)
        assert ("continue from step" in hint) == (room > 80) and (room < 20 or "free disk space" in hint)
        assert_same(Run(f"run{room}"), whole)


def test_folders_that_cannot_be_used(folder: Path) -> None:
    train("digits.onnx", "digits.npz", run="run", **RECIPE, **QUIET)
    with pytest.raises(DataError, match="already holds a run"):
        train("digits.onnx", "digits.npz", run="run", **RECIPE, **QUIET)
    with pytest.raises(DataError, match="holds other files"):
        train("digits.onnx", "digits.npz", run=folder, **RECIPE, **QUIET)
    with pytest.raises(WriteError, match="could not create the run folder"):
        train("digits.onnx", "digits.npz", run="digits.npz/run", **RECIPE, **QUIET)
    with pytest.raises(DataError, match="holds no run"):
        resume("nothing")
    with pytest.raises(DataError, match=r"`missing\.npz` does not exist"):
        train("digits.onnx", "missing.npz", run="unmade", **RECIPE, **QUIET)
    assert not Path("unmade").exists()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_is_read_only(folder: Path) -> None:
    (folder / "locked").mkdir(mode=0o500)
    with pytest.raises(WriteError, match="Permission denied"):
        train("digits.onnx", "digits.npz", run="locked/run", **RECIPE, **QUIET)


def test_a_configuration_of_another_version(folder: Path) -> None:
    run = train("digits.onnx", "digits.npz", run="run", **RECIPE, **QUIET)
    Folder(run.path).configure({**run.read_config(), "novelty": 1})
    with pytest.raises(DataError, match="has the unknown option `novelty`"):
        resume(run)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"metrics": "accuarcy"}, UnknownNameError, "unknown metric `accuarcy`"),
        ({"metrics": "top_k:n=3"}, RecipeError, "`top_k` has no option `n`"),
        ({"monitor": "f0"}, UnknownNameError, "unknown metric `f0`"),
        (
            {"metrics": ["accuracy", "mae"]},
            RecipeError,
            "`mae` compares amounts, but the targets are class indices",
        ),
        ({"monitor": "rmse"}, RecipeError, "`rmse` compares amounts"),
        ({"metrics": [max]}, ArgumentError, "`metrics` is .*max.*, but must be a string or a list of strings"),
        ({"metrics": max}, ArgumentError, "but must be a string or a list of strings"),
        ({"device": "abacus"}, UnknownNameError, "unknown device `abacus`"),
    ],
)
def test_settings_that_make_no_sense(settings: Any, error: type[Exception], message: str, folder: Path) -> None:
    with pytest.raises(error, match=message):
        train("digits.onnx", "digits.npz", run="run", **{**RECIPE, **QUIET, **settings})
    assert not Path("run").exists()
