"""Start of several processes that train together."""

from __future__ import annotations

from pathlib import Path

from onward.errors import Error
from onward.training.run import TRAINING, Run


def resumption(run: Path | None, since: float) -> str:
    """Return how to continue after a process has died. Without `run`, the only run saved since then is meant."""
    if run is None:
        saved = [file for file in Path("runs").glob(f"*/{TRAINING}") if file.stat().st_mtime >= since]
        run = saved[0].parent if len(saved) == 1 else None
    if run is not None and (run / TRAINING).exists():
        try:
            return f"to resume from step {Run(run).read_progress()['step']:,}: onward train --resume {run}"
        except Error:  # resuming reports it
            pass
    return "start again: nothing was saved"
