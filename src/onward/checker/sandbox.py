"""A process for onnx.checker and shape inference, with a time limit.

Both are C++ code that trusts its input: a hostile file can overflow the stack or run for years. The
process starts once and stays; then a model costs about a millisecond.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from onward.checker import worker

SECONDS, SECONDS_PER_MEGABYTE = 20.0, 5.0


@dataclass(frozen=True, slots=True)
class Verdict:
    invalid: str | None = None
    """Reason why onnx.checker refuses the model."""
    contradiction: str | None = None
    """Reason why strict type and shape inference refuses it."""
    died: str | None = None
    """Reason for a missing verdict."""
    loads: bool = False
    """True if ONNX Runtime loads a model that onnx refuses."""
    inferred: bytes = b""
    """Model with inferred types; empty if inference failed."""


class Unavailable(Exception):
    """Raised if no process can be started."""


class Sandbox:
    """One worker process, started on demand, and again after a crash."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def examine(self, model: bytes, folder: Path | None, seconds: float) -> Verdict:
        path = str(folder.resolve()) if folder and folder.is_dir() else ""
        with self._lock:
            return self._ask(self._start(), model, path, seconds)

    def _ask(self, process: subprocess.Popen[bytes], model: bytes, folder: str, seconds: float) -> Verdict:
        assert process.stdin is not None and process.stdout is not None
        late = threading.Event()

        def stop() -> None:
            late.set()
            process.kill()

        clock = threading.Timer(seconds, stop)
        clock.start()
        try:
            worker.write_frame(process.stdin, os.fsencode(folder))
            worker.write_frame(process.stdin, model)
            process.stdin.flush()
            report, inferred = json.loads(worker.read_frame(process.stdout)), worker.read_frame(process.stdout)
        except BaseException as error:  # also an interrupt: the pending answer must not reach the next request
            self.close()
            if not isinstance(error, EOFError | OSError):
                raise
            how = f"did not finish within {seconds:.0f} s" if late.is_set() else f"crashed (exit {process.returncode})"
            return Verdict(died=how)
        finally:
            clock.cancel()
        return _verdict(report, inferred)

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._owner == os.getpid():  # after a fork, the pipes belong to the parent
            return self._process
        if not sys.executable or getattr(sys, "frozen", False):  # an embedded interpreter or a frozen application
            raise Unavailable
        try:
            # -P: the folder of worker.py must not become a source of modules.
            self._process = subprocess.Popen(
                [sys.executable, "-P", worker.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            self._owner = os.getpid()
            worker.read_frame(self._process.stdout)  # type: ignore[arg-type]
        except (EOFError, OSError) as error:
            self.close()
            raise Unavailable from error
        return self._process

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # unwritten data has no reader
                    pipe.close()


def _verdict(report: worker.Report, inferred: bytes) -> Verdict:
    return Verdict(**report, inferred=inferred)


_SANDBOX = Sandbox()
atexit.register(_SANDBOX.close)


def examine(model: bytes, folder: Path | None = None, seconds: float | None = None) -> Verdict:
    """Return the verdict of onnx; in this process if no other can start, as in a browser."""
    limit = SECONDS + SECONDS_PER_MEGABYTE * len(model) / 1e6 if seconds is None else seconds
    try:
        return _SANDBOX.examine(model, folder, limit)
    except Unavailable:
        return _verdict(*worker.examine(model))
