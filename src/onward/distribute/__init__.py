"""Starting several processes that train together."""

from __future__ import annotations

from pathlib import Path

from onward.errors import Error
from onward.training.run import TRAINING, Run


def way_on(run: Path | None, since: float) -> str:
    """Return what to do with a run of which a process has died: without a name, the one that was saved since then."""
    if run is None:
        saved = [file for file in Path("runs").glob(f"*/{TRAINING}") if file.stat().st_mtime >= since]
        run = saved[0].parent if len(saved) == 1 else None
    if run is not None and (run / TRAINING).exists():
        try:
            return f"to resume from step {Run(run).read_progress()['step']:,}: onward train --resume {run}"
        except Error:  # which resuming would say
            pass
    return "start again: nothing was saved"
