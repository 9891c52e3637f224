"""Kills a run again and again, at random moments, and goes on with it: `python killed_runs.py FOLDER KILLS SEED`.

FOLDER holds `model.onnx` and `data.npz`, and `settings.json` if some are to be other ones. Everything is imported once;
each attempt is a fork, which has its own engine.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import onward.engines.onnxruntime  # noqa: F401 (slow to import, and so done once)
from onward.training.api import resume, train

SETTINGS: dict[str, Any] = {
    "epochs": 4,
    "batch_size": 16,
    "validation": 0.2,
    "metrics": ["accuracy"],
    "save_every": 0.0,
    "threads": 1,
    "tensorboard": True,
    "quiet": True,
    "loss": "cross_entropy",
    "optimizer": "adamw:lr=1e-2",
    "schedule": "cosine:steps=16",
}
LONGEST = 0.3
"""Seconds from the first save until a kill."""


def go(folder: Path) -> None:
    run = folder / "run"
    if (run / "training.onnx").exists():
        resume(run, quiet=True)
    else:
        train(str(folder / "model.onnx"), str(folder / "data.npz"), run=run, **settings_in(folder))


def settings_in(folder: Path) -> dict[str, Any]:
    others = folder / "settings.json"
    return SETTINGS | (json.loads(others.read_text()) if others.exists() else {})


def attempt(folder: Path, seconds: float | None, *, when_alive: bool = True) -> bool:
    """Whether the run came to its end before it was killed, so long after it saved first, or started."""
    before = _written(folder)
    process = os.fork()
    if not process:
        try:
            go(folder)
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
    if seconds is not None:
        while when_alive and _written(folder) == before and os.waitid(os.P_PID, process, _IS_OVER) is None:
            time.sleep(0.005)
        time.sleep(seconds)
        os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    if os.WIFSIGNALED(status):
        return False
    if os.WEXITSTATUS(status):
        sys.exit("an attempt failed by itself")
    return True


_IS_OVER = os.WEXITED | os.WNOHANG | os.WNOWAIT


def _written(folder: Path) -> float:
    state = folder / "run" / "training.onnx"
    return state.stat().st_mtime_ns if state.exists() else 0


def main(folder: Path, kills: int, seed: int) -> None:
    moments = random.Random(seed)
    done = 0
    for _ in range(kills):
        done += not attempt(folder, moments.uniform(0, LONGEST), when_alive=moments.random() < 0.8)
    attempt(folder, None)
    print(done)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
