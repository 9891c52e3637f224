"""Runs: what comes out of them, and that nothing that happens to them can be seen in it."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

import killed_runs
import onward
from conftest import needs
from models import digits_mlp, small_cnn
from onward.errors import DataError, RecipeError, TrainingError, UnknownNameError, UnsupportedError, WriteError
from onward.model.state import states
from onward.train.api import find_lr, resume, train
from onward.train.folder import Run
from onward.train.loop import Loop

Arrays = dict[str, np.ndarray]

RECIPE: dict[str, Any] = {"loss": "cross_entropy", "optimizer": "adamw:lr=1e-2"}
QUIET: dict[str, Any] = {"quiet": True, "threads": 1}


def digits(count: int = 96, *, flat: bool = True, seed: int = 0) -> Arrays:
    """Pictures whose class can be seen in their first pixels."""
    images = np.random.default_rng(seed).normal(size=(count, 64)).astype(np.float32)
    labels = images[:, :10].argmax(1)
    return {"image": images if flat else images.reshape(-1, 1, 8, 8), "labels": labels}


def filled(folder: Path) -> Path:
    onnx.save(small_cnn(), folder / "model.onnx")
    np.savez(folder / "data.npz", **digits(flat=False))
    onnx.save(digits_mlp(), folder / "digits.onnx")
    np.savez(folder / "digits.npz", **digits())
    return folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with two models, and data for each."""
    monkeypatch.chdir(filled(tmp_path))
    return tmp_path


def state(run: Run) -> Arrays:
    return {s.name: s.value.const_value.numpy() for s in states(run.model)}  # type: ignore[union-attr]


def history(run: Run) -> list[dict[str, Any]]:
    """The log, without times and without what says when it was saved, resumed and ended."""
    events = [{k: v for k, v in e.items() if k not in ("time", "seconds", "config", "model")} for e in run.log]
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


# ---- the main job ----------------------------------------------------------------------------------------------------


def outputs(model: onward.Model, images: np.ndarray) -> np.ndarray:
    return ort.InferenceSession(model.to_proto().SerializeToString()).run(None, {"image": images})[0]


def accuracy(model: onward.Model, data: Arrays) -> float:
    return float(np.mean(outputs(model, data["image"]).argmax(1) == data["labels"]))


def test_a_run_makes_a_better_model(folder: Path) -> None:
    data, held_out = digits(400), digits(100, seed=1)
    run = train(digits_mlp(), data, validation=held_out, epochs=8, run="run", **RECIPE, **QUIET)
    events = [e for e in run.log if e["event"] == "validation"]
    assert len(events) == 9 and events[0]["step"] == 0
    best = max(events, key=lambda e: e["accuracy"])
    assert best["accuracy"] > events[0]["accuracy"] + 0.2
    assert accuracy(run.best, held_out) == pytest.approx(best["accuracy"])
    assert accuracy(run.last, held_out) == pytest.approx(run.results["accuracy"])
    steps = [e for e in run.log if e["event"] == "step"]
    assert [e["step"] for e in steps] == list(range(1, 8 * 13 + 1)) and steps[-1]["samples"] == 8 * 400
    assert run.progress["epoch"] == 8 and run.log[-1]["reason"] == "finished"
    assert sorted(p.name for p in run.path.iterdir()) == [
        "best.onnx", "config.json", "last.onnx", "log.jsonl", "original.onnx", "training.onnx",
    ]  # fmt: skip


def test_the_loss_of_validation_is_that_of_onnx_runtime(folder: Path) -> None:
    data = digits(50)
    run = train(digits_mlp(), digits(), validation=data, run="run", **RECIPE, **QUIET)
    logits = outputs(run.last, data["image"]).astype(np.float64)
    log_sum = np.log(np.exp(logits).sum(1))
    assert run.results["loss"] == pytest.approx(np.mean(log_sum - logits[np.arange(50), data["labels"]]), rel=1e-5)


def test_without_validation_the_best_model_is_the_last(folder: Path) -> None:
    run = train("digits.onnx", "digits.npz", **RECIPE, **QUIET)
    assert run.path.parent == Path("runs") and run.path.name.startswith("digits-")
    assert run.best.to_proto() == run.last.to_proto() == onnx.load(run.path / "last.onnx")
    assert train("digits.onnx", "digits.npz", **RECIPE, **QUIET).path != run.path


def test_early_stopping(folder: Path) -> None:
    data = {"image": digits()["image"], "labels": np.zeros(96, np.int64)}
    other = {"image": digits()["image"], "labels": np.ones(96, np.int64)}
    settings = {"validation": other, "monitor": "loss", "patience": 2, **RECIPE, **QUIET}
    run = train(digits_mlp(), data, epochs=20, run="run", **settings)
    assert run.log[-1]["reason"] == "early_stopping" and run.progress["epoch"] == 2
    assert run.best.to_proto().graph == onward.read(digits_mlp()).to_proto().graph
    assert resume(run, data, validation=other, quiet=True).progress["epoch"] == 2


def test_a_new_run_of_a_training_model_begins_anew(folder: Path) -> None:
    first = train(digits_mlp(), digits(), epochs=2, run="first", **RECIPE, **QUIET)
    again = train("first/training.onnx", digits(), epochs=2, run="again", **QUIET)
    assert again.progress["epoch"] == 2 and again.progress["step"] == first.progress["step"] == 6
    assert state(again)["step"] == 12


def test_streams(folder: Path) -> None:
    data = digits()

    def batches(epoch: int) -> Iterator[Arrays]:
        for at in range(0, 90, 20 + 10 * epoch):
            yield {name: array[at : at + 20] for name, array in data.items()}

    run = train(digits_mlp(), batches, epochs=2, run="run", **RECIPE, **QUIET)
    assert run.progress["step"] == 5 + 3 and run.log[0]["steps_per_epoch"] is None
    with pytest.raises(DataError, match="came from Python"):
        resume(run)
    assert resume(run, batches, epochs=3, quiet=True).progress["epoch"] == 3
    assert run.config["epochs"] == 3


def test_a_torch_data_loader(folder: Path) -> None:
    torch = pytest.importorskip("torch")
    data = digits(40)
    rows = torch.utils.data.TensorDataset(torch.tensor(data["image"]), torch.tensor(data["labels"]))
    loader = torch.utils.data.DataLoader(rows, batch_size=16)
    run = train(digits_mlp(), loader, run="run", **RECIPE, **QUIET)
    plain = train(digits_mlp(), data, shuffle=False, batch_size=16, run="plain", **RECIPE, **QUIET)
    assert all(np.array_equal(a, b) for a, b in zip(state(run).values(), state(plain).values(), strict=True))


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
    assert int(done.stdout) >= min(kills, 5) and [e for e in run.log if e["event"] == "resume"]
    assert_same(run, whole)
    if kills > 5 and importlib.util.find_spec("tensorflow"):
        assert scalars(run) == scalars(whole)


def interrupted_after(steps: int, monkeypatch: pytest.MonkeyPatch, number: int = signal.SIGINT) -> None:
    """Let a Ctrl-C come in the middle of a step."""
    original = Loop._step

    def step(self: Loop, batch: Arrays) -> None:
        if self.at.step == steps - 1:
            signal.raise_signal(number)
        original(self, batch)

    monkeypatch.setattr(Loop, "_step", step)


@pytest.mark.parametrize(
    ("steps", "number"), [(1, signal.SIGINT), (5, signal.SIGINT), (7, signal.SIGTERM), (20, signal.SIGINT)]
)
def test_interrupt(steps: int, number: int, whole: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        interrupted_after(steps, patch, number)
        run = train("model.onnx", "data.npz", run="run", **{**killed_runs.SETTINGS, "save_every": 60})
    assert run.log[-1]["reason"] == "interrupted" and run.log[-1]["step"] == run.progress["step"] == steps
    assert signal.getsignal(number) is before
    resume(run, quiet=True)
    assert_same(run, whole)


def test_interrupt_twice(whole: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        interrupted_after(3, patch)
        interrupted_after(3, patch)  # two in one step
        with pytest.raises(KeyboardInterrupt):
            train("model.onnx", "data.npz", run="run", **{**killed_runs.SETTINGS, "save_every": 60})
    run = Run("run")
    assert run.progress["step"] == 0
    assert_same(resume(run, quiet=True), whole)


def test_interrupt_in_validation(whole: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from onward.run.onnxruntime import OnnxRuntime

    evaluate, calls = OnnxRuntime.evaluate, iter(range(100))

    def interrupted(self: OnnxRuntime, batch: Arrays) -> Arrays:
        if next(calls) == 5:
            signal.raise_signal(signal.SIGINT)
        return evaluate(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(OnnxRuntime, "evaluate", interrupted)
        run = train("model.onnx", "data.npz", run="run", **killed_runs.SETTINGS)
    assert run.log[-1]["reason"] == "interrupted" and run.progress["batch"] == 5
    assert_same(resume(run, quiet=True), whole)


@needs("tensorflow")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_shows_each_step_once(whole: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Loop, after: float = 0.0) -> None:
        if self.at.step == 8:
            raise KeyboardInterrupt
        if self.at.step not in (6, 7):  # which are lost
            save(self, after)

    save = Loop._save
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Loop, "_save", broken)
        train("model.onnx", "data.npz", run="run", **killed_runs.SETTINGS)
    run = Run("run")
    assert run.progress["step"] == 5
    assert_same(resume(run, quiet=True), whole)
    assert scalars(run) == scalars(whole) and len(scalars(run)) > 20


@pytest.mark.slow
def test_interrupt_often(whole: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    for number in range(100):
        run = None
        while run is None or run.log[-1]["reason"] == "interrupted":
            timer = threading.Timer(rng.uniform(0.2, 1), os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
            try:
                if run is None:
                    run = train("model.onnx", "data.npz", run=f"run{number}", **killed_runs.SETTINGS)
                else:
                    resume(run, quiet=True)
            except KeyboardInterrupt:  # before the run began
                run = None if run is None else run
            finally:
                timer.cancel()
        assert_same(run, whole)


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
    data["image"][60] = np.inf
    with pytest.raises(TrainingError, match="the loss of step 2 is nan: the state after step 1 was kept") as error:
        train(digits_mlp(), data, shuffle=False, run="run", **RECIPE, **QUIET)
    assert "learning rate" in (error.value.hint or "")
    run = Run("run")
    assert run.log[-1] | {"seconds": 0} == run.log[-1] | {"step": 1, "reason": "not_finite", "seconds": 0}
    assert np.isnan(run.log[-1]["loss"])
    assert run.progress["step"] == 1 and all(np.isfinite(array).all() for array in state(run).values())


def test_weights_that_are_not_finite(folder: Path) -> None:
    """A step that is too large makes weights infinite, but its own loss is that of the weights before."""
    text = "net (float[N,2] x) => (float[N,2] y) <float[2] w = {0.5, 0.5}> { y = Mul(x, w) }"
    graph, opset = onnx.parser.parse_graph(text), onnx.helper.make_opsetid("", 21)
    model = onnx.helper.make_model(graph, opset_imports=[opset], ir_version=10)
    data = (np.array([[0, 0], [0, 0], [0, 0], [1e3, 1]], np.float32), np.ones((4, 2), np.float32))
    with pytest.raises(TrainingError, match=r"`w` holds NaN or infinity after step 4: the state after step 3 was kept"):
        settings = {"shuffle": False, "batch_size": 1, "save_every": 0, "run": "run", **QUIET}
        train(model, data, loss="mse", optimizer="sgd:lr=1e38", **settings)
    assert np.isfinite(state(Run("run"))["w"]).all() and Run("run").progress["step"] == 3


def test_data_that_end_in_the_run(folder: Path) -> None:
    def batches() -> Iterator[Arrays]:
        yield {name: array[:16] for name, array in digits().items()}
        raise DataError("the file is gone")

    with pytest.raises(DataError, match="the file is gone"):
        train(digits_mlp(), batches, run="run", **RECIPE, **QUIET)
    run = Run("run")
    assert run.progress["step"] == 1 and run.log[-1]["reason"] == "failed"
    data = digits()
    steps = resume(run, lambda: ({n: a[i : i + 16] for n, a in data.items()} for i in (0, 16)), quiet=True)
    assert steps.progress["step"] == 2


def test_a_file_that_disappears_in_the_run(folder: Path) -> None:
    def batches() -> Iterator[Arrays]:
        yield {name: array[:16] for name, array in digits().items()}
        np.load("gone.npy")

    with pytest.raises(DataError, match=r"the data could not be read: .*gone\.npy"):
        train(digits_mlp(), batches, run="run", **RECIPE, **QUIET)
    assert Run("run").progress["step"] == 1


def full(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    from onward.model.storage.transaction import Transaction

    commit, calls = Transaction.commit, iter(range(1000))

    def fails(self: Transaction, payload: bytes) -> None:
        if next(calls) >= after:
            raise OSError(errno.ENOSPC, "No space left on device")
        commit(self, payload)

    monkeypatch.setattr(Transaction, "commit", fails)


def test_a_full_disk(whole: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        full(patch, after=9)
        with pytest.raises(WriteError, match=r"could not write `.*training.onnx`: No space left") as error:
            train("model.onnx", "data.npz", run="run", **killed_runs.SETTINGS)
    assert "make room" in error.value.hint
    run = Run("run")
    assert run.progress["step"] > 1
    assert_same(resume(run, quiet=True), whole)


def test_a_full_disk_while_the_log_is_written(whole: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from onward.train.log import Log

    def fails(self: Log, event: str, /, **values: Any) -> None:
        if event == "step" and values["step"] > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, event, **values)

    write = Log.write
    with monkeypatch.context() as patch:
        patch.setattr(Log, "write", fails)
        with pytest.raises(WriteError, match="could not write to `run`: No space left") as error:
            train("model.onnx", "data.npz", run="run", **killed_runs.SETTINGS)
    assert "saved at step" in error.value.hint
    assert_same(resume("run", quiet=True), whole)


def test_folders_that_cannot_be_used(folder: Path) -> None:
    train("digits.onnx", "digits.npz", run="run", **RECIPE, **QUIET)
    with pytest.raises(DataError, match="holds a run already"):
        train("digits.onnx", "digits.npz", run="run", **RECIPE, **QUIET)
    with pytest.raises(DataError, match="holds other files"):
        train("digits.onnx", "digits.npz", run=folder, **RECIPE, **QUIET)
    with pytest.raises(WriteError, match="could not make the folder"):
        train("digits.onnx", "digits.npz", run="digits.npz/run", **RECIPE, **QUIET)
    with pytest.raises(DataError, match="holds no run"):
        resume("nothing")
    with pytest.raises(DataError, match=r"there is no missing\.npz"):
        train("digits.onnx", "missing.npz", run="unmade", **RECIPE, **QUIET)
    assert not Path("unmade").exists()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_is_read_only(folder: Path) -> None:
    (folder / "locked").mkdir(mode=0o500)
    with pytest.raises(WriteError, match="Permission denied"):
        train("digits.onnx", "digits.npz", run="locked/run", **RECIPE, **QUIET)


def test_a_configuration_of_another_version(folder: Path) -> None:
    run = train("digits.onnx", "digits.npz", run="run", **RECIPE, **QUIET)
    run.configure({**run.config, "novelty": 1})
    with pytest.raises(DataError, match="another version of Onward: its configuration differs in `novelty`"):
        resume(run)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"metrics": "accuarcy"}, UnknownNameError, "no metric `accuarcy`"),
        ({"metrics": "top_k:n=3"}, RecipeError, "`top_k` has no option `n`"),
        ({"monitor": "f1"}, UnknownNameError, "no metric to monitor `f1`"),
        ({"patience": 3}, RecipeError, "there are none"),
        ({"epochs": -1}, RecipeError, "-1 epochs"),
        ({"loss": None}, RecipeError, "must know its loss"),
        ({"device": "abacus"}, UnknownNameError, "no device `abacus`"),
    ],
)
def test_settings_that_make_no_sense(settings: Any, error: type[Exception], message: str, folder: Path) -> None:
    with pytest.raises(error, match=message):
        train("digits.onnx", "digits.npz", run="run", **{**RECIPE, **QUIET, **settings})
    assert not Path("run").exists()


def test_models_with_several_steps(folder: Path) -> None:
    once = onward.prepare(digits_mlp(), loss="cross_entropy")
    twice = onward.prepare(once, loss="cross_entropy", append=True)
    with pytest.raises(UnsupportedError, match="2 training steps"):
        train(twice, digits(), **QUIET)


# ---- sizes of batches ------------------------------------------------------------------------------------------------


def fixed(size: int, *, through: str = "") -> onnx.ModelProto:
    """The classifier for batches of one size; `through` is what happens to its output."""
    model = digits_mlp()
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = size
    if through:
        model.graph.node[-1].output[0] = "raw"
        graph = onnx.parser.parse_graph(f"g (float[N,10] raw) => (float[N,10] logits) {{ {through} }}")
        model.graph.node.extend(graph.node)
    return model


RESHAPED = """s = Constant<value_ints: ints = [1, 2, 5]>() r = Reshape(raw, s)
              t = Constant<value_ints: ints = [1, -1]>() logits = Reshape(r, t)"""
MIXED = "m = ReduceMean<keepdims: int = 1>(raw) logits = Sub(raw, m)"


@pytest.mark.parametrize("through", ["", RESHAPED])
def test_a_model_for_one_sample_is_trained_with_many(through: str, folder: Path) -> None:
    original = fixed(1, through=through)
    run = train(original, digits(), validation=digits(50), run="run", **RECIPE, **QUIET)
    free = train(digits_mlp(), digits(), validation=digits(50), run="free", **RECIPE, **QUIET)
    assert run.progress["step"] == 3 and run.results == pytest.approx(free.results)
    assert [d.dim_value for d in run.best.to_proto().graph.input[0].type.tensor_type.shape.dim] == [1, 64]
    assert run.best.to_proto().graph.node == onward.read(original).to_proto().graph.node


def test_a_model_that_cannot_take_more(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = train(fixed(1, through=MIXED), digits(12), run="run", threads=1, **RECIPE)
    assert run.progress["step"] == 12
    told = capfd.readouterr().err
    assert told.count("works for batches of 1 only: `logits` of a sample depends on the other samples") == 1
    with pytest.raises(UnsupportedError, match="batches of 1 only"):
        train(fixed(1, through=MIXED), digits(), batch_size=8, **RECIPE, **QUIET)


def test_a_last_batch_that_is_not_full(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model, data, held_out = fixed(32), digits(80), digits(50, seed=1)
    run = train(model, data, validation=held_out, epochs=2, run="run", threads=1, **RECIPE)
    assert run.progress["step"] == 4 and run.progress["samples"] == 128
    assert capfd.readouterr().err.count("16 rows of each epoch do not fill a batch of 32, and are left out") == 1
    best = max(e["accuracy"] for e in run.log if e["event"] == "validation")
    assert accuracy_in_batches(run.best, held_out, 32) == pytest.approx(best)
    assert train(model, data, last="pad", run="padded", **RECIPE, **QUIET).progress["step"] == 3
    with pytest.raises(DataError, match="takes batches of 32, not of 16"):
        train(onward.prepare(model, **RECIPE), data, batch_size=16, **QUIET)


def accuracy_in_batches(model: onward.Model, data: Arrays, size: int) -> float:
    rows = np.arange(-(-len(data["labels"]) // size) * size) % len(data["labels"])
    logits = [outputs(model, data["image"][part]) for part in rows.reshape(-1, size)]
    return float(np.mean(np.concatenate(logits)[: len(data["labels"])].argmax(1) == data["labels"]))


def test_accumulation_is_a_larger_batch(folder: Path) -> None:
    settings = {"shuffle": False, "loss": "cross_entropy", "optimizer": "sgd:lr=0.1", **QUIET}
    small = train(digits_mlp(), digits(), batch_size=8, accumulate=4, run="small", **settings)
    large = train(digits_mlp(), digits(), batch_size=32, run="large", **settings)
    for name, array in state(large).items():
        np.testing.assert_allclose(state(small)[name], array, rtol=1e-5, atol=1e-6)


# ---- the model that comes out ----------------------------------------------------------------------------------------


def without_weights(model: onnx.ModelProto, names: set[str]) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for tensor in copy.graph.initializer:
        if tensor.name in names:
            tensor.raw_data = b""
            tensor.ClearField("float_data")
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
    return copy


TRAINED = {f"{layer}.{kind}" for layer in ("conv", "bn", "fc") for kind in ("weight", "bias")}
TRAINED |= {"bn.running_mean", "bn.running_var"}


def test_only_weights_change(folder: Path) -> None:
    given = small_cnn()
    given.producer_name, given.doc_string, given.model_version = "somebody", "a model", 7
    given.metadata_props.add(key="license", value="free")
    given.graph.node[0].doc_string = "the first"
    onnx.save(given, "model.onnx")
    run = train("model.onnx", "data.npz", run="run", **RECIPE, **QUIET)
    made = onnx.load(run.path / "last.onnx")
    assert without_weights(made, TRAINED) == without_weights(given, TRAINED)
    new = {tensor.name: numpy_helper.to_array(tensor) for tensor in made.graph.initializer}
    for tensor in given.graph.initializer:
        assert np.array_equal(new[tensor.name], numpy_helper.to_array(tensor)) == (tensor.name not in TRAINED)
    assert all(np.array_equal(new[name], state(run)[name]) for name in TRAINED)


def test_old_models_stay_old(folder: Path) -> None:
    given = digits_mlp()
    given.opset_import[0].version = 11
    run = train(given, digits(), run="run", **RECIPE, **QUIET)
    assert run.model.opset > 11
    made, names = run.last.to_proto(), {tensor.name for tensor in given.graph.initializer}
    assert made.opset_import[0].version == 11
    assert without_weights(made, names) == without_weights(onward.read(given).to_proto(), names)


def test_weights_in_nodes(folder: Path) -> None:
    given = digits_mlp()
    tensors = {tensor.name: tensor for tensor in given.graph.initializer}
    given.graph.initializer.remove(tensors["fc2.weight"])
    node = onnx.helper.make_node("Constant", [], ["fc2.weight"], value=tensors["fc2.weight"])
    given.graph.node.insert(0, node)
    run = train(given, digits(), run="run", **RECIPE, **QUIET)
    made = run.last.to_proto().graph.node[0]
    assert made.op_type == "Constant"
    assert np.array_equal(numpy_helper.to_array(made.attribute[0].t), state(run)["fc2.weight"])


def test_weights_in_other_files(folder: Path) -> None:
    onnx.save(digits_mlp(256), "model.onnx", save_as_external_data=True, location="weights.bin", size_threshold=512)
    before = Path("weights.bin").read_bytes()
    settings = {"epochs": 2, "save_every": 0, "validation": 0.2, **RECIPE, **QUIET, "freeze": "fc1*"}
    run = train("model.onnx", digits(), run="run", **settings)
    assert Path("weights.bin").read_bytes() == before
    assert len(list(run.path.glob("*.data"))) <= 4  # one per model
    plain = train(digits_mlp(256), digits(), run="plain", **settings)
    names = {tensor.name for tensor in digits_mlp().graph.initializer}
    for name in ("best.onnx", "last.onnx"):
        made, wanted = onnx.load(run.path / name), onnx.load(plain.path / name)
        arrays = [{t.name: numpy_helper.to_array(t).tobytes() for t in m.graph.initializer} for m in (made, wanted)]
        assert arrays[0] == arrays[1] and arrays[0].keys() == names
    assert np.array_equal(state(resume(run, digits(), epochs=3, quiet=True))["step"], 9)


def test_averages_are_what_is_validated_and_exported(folder: Path) -> None:
    held_out = digits(50, seed=1)
    run = train(digits_mlp(), digits(), epochs=3, validation=held_out, run="run", ema=0.9, **RECIPE, **QUIET)
    made = {t.name: numpy_helper.to_array(t) for t in run.last.to_proto().graph.initializer}
    averages = state(run)
    assert all(np.array_equal(array, averages[f"ema/{name}"]) for name, array in made.items())
    assert not np.array_equal(made["fc1.weight"], averages["fc1.weight"])
    assert accuracy(run.last, held_out) == pytest.approx(run.results["accuracy"])
    plain = train(digits_mlp(), digits(), epochs=3, run="plain", **RECIPE, **QUIET)
    assert all(np.array_equal(averages[name], array) for name, array in state(plain).items())


def test_a_new_head(folder: Path) -> None:
    data = digits()
    data["labels"] %= 3
    run = train(digits_mlp(), data, run="run", new_head="classes=3", **RECIPE, **QUIET)
    assert outputs(run.best, data["image"]).shape == (96, 3)


def test_adapters_are_merged(folder: Path) -> None:
    run = train(digits_mlp(), digits(), run="run", lora="rank=2,targets=*", **RECIPE, **QUIET)
    given, made = onward.read(digits_mlp()).to_proto(), run.last.to_proto()
    names = {"fc1.weight", "fc2.weight"}
    assert without_weights(made, names) == without_weights(given, names)
    images = digits()["image"]
    np.testing.assert_allclose(
        outputs(run.last, images), outputs(onward.strip(run.model), images), rtol=1e-4, atol=1e-5
    )


# ---- learning rates --------------------------------------------------------------------------------------------------


def test_find_lr(folder: Path) -> None:
    model = onward.read(digits_mlp())
    before = model.to_proto()
    found = find_lr(model, digits(), loss="cross_entropy", optimizer="sgd", highest=10)
    assert model.to_proto() == before and not list(folder.glob("run*"))
    assert found.rates[0] == 1e-6 and len(found.rates) == len(found.losses) <= 100
    assert found.suggested == pytest.approx(found.rates[int(np.argmin(found.losses))] / 10) and found.suggested > 1e-3
    usual = train(model, digits(), run="usual", loss="cross_entropy", optimizer=f"sgd:lr={found.suggested}", **QUIET)
    timid = train(model, digits(), run="timid", loss="cross_entropy", optimizer="sgd:lr=1e-5", **QUIET)
    assert last_loss(usual) < last_loss(timid)


def last_loss(run: Run) -> float:
    return float([e["loss"] for e in run.log if e["event"] == "step"][-1])


# ---- the command -----------------------------------------------------------------------------------------------------


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
    assert onnx.load("trained.onnx") == onnx.load("run/best.onnx")
    _, err = command("--resume", "run", "--epochs", "3", "-o", "more.onnx")
    assert "finished after 9 steps" in err and Path("more.onnx").exists()


def test_command_is_the_function_of_the_same_name(folder: Path) -> None:
    flags = ["--optimizer", "sgd:lr=0.1", "--batch-size", "8", "--no-shuffle", "--last", "drop", "--clip-norm", "1"]
    out, err = command(*TRAIN, *flags, "--map", "image=image", "--ema", "0.5", "--seed", "3", "--json")
    told = json.loads(out)
    assert not err and told["reason"] == "finished" and told["step"] == 12 and told["output"] is None
    settings = {"loss": "cross_entropy", "optimizer": "sgd:lr=0.1", "clip": "norm:1", "ema": 0.5, "seed": 3}
    same = train("digits.onnx", "digits.npz", run="same", batch_size=8, shuffle=False, last="drop", **settings, **QUIET)
    assert all(np.array_equal(a, b) for a, b in zip(state(Run("run")).values(), state(same).values(), strict=True))


def test_command_finds_a_learning_rate(folder: Path) -> None:
    out, _ = command(*TRAIN[:5], "--find-lr")
    assert out.startswith("lr=") and not Path("runs").exists()
    assert json.loads(command(*TRAIN[:5], "--find-lr", "--json")[0])["lr"] > 0


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        ("--data digits.npz", 2, "error: missing argument `MODEL`\nhint:  see `onward train --help`; to go on"),
        ("digits.onnx", 2, "error: missing option `--data`\n"),
        ("digits.onnx --data digits.npz", 1, "error: to train a model one must know its loss\nhint:  for example"),
        ("digits.onnx --data no.npz --loss ce", 1, "error: there is no no.npz\nhint: "),
        (
            "digits.onnx --data digits.npz --loss ce --validation 3",
            2,
            "error: `--validation 3` is no share of the data\n",
        ),
        ("digits.onnx --data digits.npz --loss ce --map image", 2, "error: `--map image` is not INPUT=COLUMN\n"),
        ("digits.onnx --data digits.npz --loss ce -o digits.onnx", 1, "error: `digits.onnx` is the model itself\n"),
        ("--resume no", 1, "error: `no` holds no run: there is no training.onnx\n"),
        ("--resume no --seed 3", 2, "error: `--seed` has no effect with --resume\n"),
        ("training.onnx --data digits.npz --optimizer sgd", 2, "error: `--optimizer` has no effect with a model that"),
    ],
)
def test_command_that_fails(arguments: str, code: int, told: str, folder: Path) -> None:
    onward.prepare("digits.onnx", loss="cross_entropy").save("training.onnx")
    out, err = command(*arguments.split(), code=code)
    assert not out and err.startswith(told), err
    assert not Path("runs").exists()


def test_command_that_is_interrupted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted_after(2, monkeypatch)
    _, err = command(*TRAIN, "-o", "trained.onnx", code=130)
    assert "finishing the step, then saving; Ctrl-C again to stop at once" in err
    assert "interrupted after 2 steps: run\nto go on: onward train --resume run\n" in err
    assert not Path("trained.onnx").exists()
