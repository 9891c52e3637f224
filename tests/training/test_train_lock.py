"""One process at a time trains into a folder; one that is gone, however it went, is in nobody's way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from runs import QUIET, RECIPE, Arrays, digits

from onward.errors import DataError, WriteError
from onward.training.api import resume, train
from onward.training.folder import LOCK, lock_folder
from onward.training.run import Run

HOLDER = """
    import os, sys, time
    import numpy as np
    from onward.training.api import train

    def batches():
        with np.load("digits.npz") as data:
            for _ in range(2):
                yield {name: data[name][:16] for name in data}
        if sys.argv[1] == "fork" and not os.fork():
            time.sleep(60)
        print("waits", flush=True)
        time.sleep(60)

    train("digits.onnx", batches, run="run", loss="cross_entropy", save_every=0, threads=1, quiet=True)
"""


@contextmanager
def holder(kind: str = "") -> Iterator[subprocess.Popen[str]]:
    """Another process, in the middle of a run."""
    arguments = [sys.executable, "-c", textwrap.dedent(HOLDER), kind]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "waits\n"
            while [e["event"] for e in Run("run").read_log()][-2:] != ["step", "save"] or Run("run").read_progress()[
                "step"
            ] < 2:
                time.sleep(0.01)  # batches are read ahead
            yield process
        finally:
            with suppress(ProcessLookupError):  # a test has killed it already
                os.killpg(process.pid, signal.SIGKILL)


def batches() -> Iterator[Arrays]:
    data = digits()
    return ({name: array[start : start + 16] for name, array in data.items()} for start in (0, 16, 32))


@pytest.mark.parametrize("kind", ["", pytest.param("fork", marks=pytest.mark.skipif(os.name == "nt", reason="forks"))])
def test_a_folder_in_which_another_process_trains(kind: str, folder: Path) -> None:
    """Also one that leaves a child behind, as a loader of data may do."""
    with holder(kind) as process:
        before = {path.name: path.read_bytes() for path in Path("run").iterdir()}
        with pytest.raises(DataError, match=rf"process {process.pid} on .* is training in `.*run`") as error:
            resume("run", batches, quiet=True)
        assert "wait" in (error.value.hint or "")
        (folder / "run" / "training.onnx").rename("saved.onnx")  # as before the first save
        with pytest.raises(DataError, match=f"process {process.pid} on"):
            train("digits.onnx", "digits.npz", run="run", **RECIPE, **QUIET)
        (folder / "saved.onnx").rename("run/training.onnx")
        assert {path.name: path.read_bytes() for path in Path("run").iterdir()} == before
        process.kill()
        process.wait()
        assert resume("run", batches, quiet=True).progress["step"] == 3


def test_threads_of_one_process(folder: Path) -> None:
    with lock_folder(folder), ThreadPoolExecutor(1) as other:
        with pytest.raises(DataError, match="this process is training in"):
            other.submit(lambda: lock_folder(folder).__enter__()).result()
        with pytest.raises(DataError, match="this process is training in"), lock_folder(folder / "." / "run" / ".."):
            pass
    with lock_folder(folder):  # and is free again
        pass


def test_a_run_that_failed_leaves_no_lock(folder: Path) -> None:
    def damaged() -> Iterator[Arrays]:
        yield next(batches())
        raise DataError("the file is gone")

    with pytest.raises(DataError, match="is gone"):
        train("digits.onnx", damaged, run="run", **RECIPE, **QUIET)
    assert resume("run", batches, quiet=True).progress["step"] == 3


def test_a_folder_with_only_a_lock_is_empty(folder: Path) -> None:
    """What a process leaves that was killed at the very beginning."""
    Path("run").mkdir()
    with lock_folder(Path("run")):
        pass
    assert [path.name for path in Path("run").iterdir()] == [LOCK]
    assert train("digits.onnx", "digits.npz", run="run", **RECIPE, **QUIET).progress["step"] == 3


def test_runs_without_a_name_that_start_in_the_same_second(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.strftime", lambda form: "now")
    names = [train("digits.onnx", "digits.npz", **RECIPE, **QUIET).path.name for _ in range(3)]
    assert names == ["digits-now", "digits-now-2", "digits-now-3"]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_run_in_a_folder_that_is_read_only(folder: Path) -> None:
    run = train("digits.onnx", "digits.npz", run="run", **RECIPE, **QUIET)
    (run.path / LOCK).unlink()
    run.path.chmod(0o500)
    try:
        with pytest.raises(WriteError, match=r"could not write to `.*run`: Permission denied"):
            resume(Run("run"), quiet=True)
    finally:
        run.path.chmod(0o700)
