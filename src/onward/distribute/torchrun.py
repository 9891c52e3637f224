"""Processes on this machine, started and watched over by PyTorch's torchrun."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence

from onward.errors import UnsupportedError


def launch(arguments: Sequence[str], processes: int, restarts: int = 0) -> int:
    """Run the command line in so many processes, and all of them again after a failure; the exit status."""
    if importlib.util.find_spec("torch") is None:
        raise UnsupportedError(
            "several processes are started by torchrun, and PyTorch is not installed",
            hint="pip install 'onward[torch]'",
        )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += [f"--max-restarts={restarts}", "-m", "--", "onward", *arguments]
    threads = max((os.cpu_count() or 1) // processes, 1)
    with subprocess.Popen(command, env={"OMP_NUM_THREADS": str(threads), **os.environ}) as started:
        while True:
            try:
                return started.wait()
            except KeyboardInterrupt:  # which all processes have heard: they finish their step and save
                continue
