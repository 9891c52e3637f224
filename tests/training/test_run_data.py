"""Runs of models whose tensors are outside the file: once begun, a run needs nothing but its folder."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from models import digits_mlp
from runs import QUIET, RECIPE, Arrays, digits, state

import onward
from onward.errors import ExternalDataError, WriteError
from onward.training.api import resume, train
from onward.training.run import Run

FROZEN: dict[str, Any] = {**RECIPE, **QUIET, "freeze": "fc1.*", "save_every": 0}


def exported(path: str = "net.onnx", *, scale: float = 1.0) -> onnx.ModelProto:
    """A model with its weights in a file beside it, written over what was there, as exporters do."""
    proto = digits_mlp(64)
    for tensor in proto.graph.initializer:
        tensor.CopyFrom(onnx.numpy_helper.from_array(scale * onnx.numpy_helper.to_array(tensor), tensor.name))
    whole = onnx.ModelProto.FromString(proto.SerializeToString())
    Path(f"{path}.data").unlink(missing_ok=True)  # `onnx` would add to it
    onnx.save(proto, path, save_as_external_data=True, location=f"{path}.data", size_threshold=0)
    return whole


def batches(then: Any = lambda: None) -> Iterator[Arrays]:
    data = digits()
    for start in range(0, 96, 16):
        if start == 16:
            then()
        yield {name: array[start : start + 16] for name, array in data.items()}


def frozen(model: onward.Model) -> Arrays:
    return {name: model.array(name).copy() for name in ("fc1.weight", "fc1.bias")}


def assert_equal(a: Arrays, b: Arrays) -> None:
    assert a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def data_files(run: Run) -> set[str]:
    return {path.name for path in run.path.iterdir() if path.suffix in (".data", ".safetensors")}


@pytest.mark.parametrize("freeze", ["fc1.*", "fc2.*"])
def test_resumed_runs_save_often(freeze: str, folder: Path) -> None:
    settings = {**FROZEN, "freeze": freeze}
    whole = train(exported(), digits(), run="whole", epochs=3, **settings)
    run = train("net.onnx", digits(), run="run", epochs=1, **settings)
    for epochs in (2, 3):
        resume(run, digits(), epochs=epochs, quiet=True)
    assert_equal(state(run), state(whole))
    assert_equal(frozen(run.model), frozen(whole.model))
    assert_equal(frozen(run.load_last()), frozen(whole.load_last()))


@pytest.mark.slow("numpy-removed", "onnxruntime-overwritten", "onnxruntime-replaced")
@pytest.mark.parametrize("happening", ["removed", "replaced", "overwritten"])
@pytest.mark.parametrize("engine", ["onnxruntime", "numpy"])
def test_what_happens_to_the_users_files_has_no_part_in_a_run(happening: str, engine: str, folder: Path) -> None:
    before = exported()

    def happens() -> None:
        if happening != "overwritten":
            Path("net.onnx.data").unlink()
        if happening == "replaced":
            exported(scale=2)
        elif happening == "overwritten":
            size = Path("net.onnx.data").stat().st_size
            Path("net.onnx.data").write_bytes(b"\1" * size)

    settings = {**FROZEN, "engine": engine, "threads": 1 if engine == "onnxruntime" else None}
    run = train("net.onnx", lambda: batches(happens), run="run", **settings)
    resume(run, batches, epochs=2, quiet=True)
    whole = train(before, batches, run="whole", epochs=2, **settings)
    assert_equal(state(run), state(whole))
    assert_equal(frozen(run.model), frozen(whole.model))
    assert_equal(frozen(run.load_best()), frozen(whole.load_best()))


def test_frozen_weights_are_written_once(folder: Path) -> None:
    """All models of a run share them; what is trained is in files of its own, of which at most two remain."""
    exported()
    run = train("net.onnx", digits(), run="run", validation=0.2, epochs=3, **FROZEN)
    shared = (run.path / "original.data").stat()
    assert shared.st_size >= 64 * 64 * 4
    names = data_files(run)
    assert sum(name.startswith("training.") for name in names) == 2
    for name in names - {"original.data"}:
        assert (run.path / name).stat().st_size < 64 * 64 * 4
    resume(run, digits(), epochs=4, quiet=True)
    after = (run.path / "original.data").stat()
    assert (after.st_ino, after.st_mtime_ns) == (shared.st_ino, shared.st_mtime_ns)


def test_a_run_of_a_version_that_kept_all_in_one_data_file(folder: Path) -> None:
    """It goes on as others do: what is frozen moves to where no save removes it."""
    exported()
    settings = {**FROZEN, "freeze": "fc2.*"}
    whole = train("net.onnx", digits(), run="whole", epochs=3, **settings)
    run = train("net.onnx", digits(), run="run", **settings)
    run.model.save("training.onnx", data="data")
    for name in data_files(run) - {"original.data"}:
        (run.path / name).unlink()
    for name in ("training.onnx", "training.data"):
        Path(name).rename(run.path / name)
    for epochs in (2, 3):
        resume(run, digits(), epochs=epochs, quiet=True)
    assert_equal(state(run), state(whole))
    names = ("fc2.weight", "fc2.bias")
    assert_equal(*({name: model.array(name) for name in names} for model in (run.load_last(), whole.load_last())))
    assert "training.data" not in data_files(run)


def test_a_teacher_beside_its_file(folder: Path) -> None:
    """Frozen weights that are not of the model that was given are kept by the run as well."""
    exported("teacher.onnx", scale=2)
    onnx.save(digits_mlp(16), "student.onnx")

    def happens() -> None:
        Path("teacher.onnx.data").unlink(missing_ok=True)

    run = train("student.onnx", lambda: batches(happens), run="run", teacher="teacher.onnx", **{**RECIPE, **QUIET})
    resume(run, batches, epochs=2, quiet=True)
    assert run.read_progress()["epoch"] == 2


READER = """
    import sys
    import numpy as np
    import onward

    print("reads", flush=True)
    expected = np.load("expected.npy")
    times = 0
    while not times or not sys.stdin.closed and times < 150:
        model = onward.load("run/training.onnx")
        values = {value.name: value.const_value.numpy().copy() for value in model.initializers()}
        assert np.array_equal(values["fc1.weight"], expected), "another file"
        times += 1
    print(times)
"""


def test_reading_a_run_while_it_saves(folder: Path) -> None:
    model = exported()
    np.save("expected.npy", onnx.numpy_helper.to_array(model.graph.initializer[0]))
    run = train("net.onnx", digits(), run="run", epochs=1, **FROZEN)
    arguments = [sys.executable, "-c", textwrap.dedent(READER)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None and reader.stdout.readline() == "reads\n"
        epochs = 1
        while reader.poll() is None:
            epochs += 20
            resume(run, digits(), epochs=epochs, quiet=True)
        out, err = reader.communicate()
    assert reader.returncode == 0, err
    assert int(out) == 150 and epochs > 1


# ---- the same without a run ------------------------------------------------------------------------------------------


def test_copies_outlive_the_files_that_a_save_removes(folder: Path) -> None:
    onward.load(digits_mlp(64)).save("m.onnx", data="data")
    first = onward.load("m.onnx")
    training = onward.prepare(first, loss="cross_entropy")
    values = {name: first.array(name).copy() for name in ("fc1.weight", "fc2.weight")}
    other = first.copy()
    for number in range(3):
        for name, array in values.items():
            other.set(name, array + number + 1)
        other.save("m.onnx")
    assert not Path("m.data").exists()
    assert_equal({name: first.array(name) for name in values}, values)
    training.save("t.onnx")
    assert_equal({name: onward.load("t.onnx").array(name) for name in values}, values)


@pytest.mark.parametrize("how", ["replaced", "overwritten"])
def test_data_that_change_after_reading_are_not_taken_for_what_was_read(how: str, folder: Path) -> None:
    """Those of another file under the name are not; those that were overwritten are gone, which is said."""
    exported()
    model = onward.load("net.onnx")
    weight = model.array("fc1.weight").copy()
    if how == "replaced":
        exported(scale=2)
        model.save("net.onnx")
        assert np.array_equal(onward.load("net.onnx").array("fc1.weight"), weight)
        return
    content = Path("net.onnx.data").read_bytes()
    Path("net.onnx.data").write_bytes(content[::-1])
    os.utime("net.onnx.data", ns=(1, 1))  # clocks of file systems are coarse
    with pytest.raises(ExternalDataError, match="has changed since the model was read"):
        model.array("fc1.weight")
    for target in ("net.onnx", "elsewhere.onnx"):
        with pytest.raises(WriteError, match=r"`.*net\.onnx\.data` has changed since the model was read"):
            model.save(target)


def test_more_tensors_outside_than_files_may_be_open(folder: Path) -> None:
    import resource

    exported()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    models = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 20, limits[1]))
    try:
        models = [onward.load("net.onnx") for _ in range(15)]
        assert all(np.isfinite(model.array(name)).all() for model in models for name in model.graph.initializers)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_data_files_of_one_name_in_two_folders(folder: Path) -> None:
    """ONNX Runtime finds them by their names in one folder; each tensor must be that of its own model all the same."""
    for name, scale in (("student", 1), ("teacher", 2)):
        (folder / name).mkdir()
        os.chdir(folder / name)
        exported("net.onnx", scale=scale)
    os.chdir(folder)
    model = onward.prepare(
        "student/net.onnx", loss="cross_entropy", teacher="teacher/net.onnx", freeze="fc1.*", optimizer="sgd:lr=0.1"
    )
    batch = {name: array[:16] for name, array in digits().items()}
    losses = []
    for engine in ("onnxruntime", "numpy"):
        with onward.engines.start(model, engine=engine) as loaded:
            losses.append([float(loaded.step(batch)["loss"]) for _ in range(2)])
    np.testing.assert_allclose(*losses, rtol=1e-5)
