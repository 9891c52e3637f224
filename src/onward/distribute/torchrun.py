"""Processes on this machine, started and supervised by the launcher of torchrun."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from onward.distribute import resumption
from onward.errors import TrainingError, UnsupportedError


def launch(arguments: Sequence[str], processes: int, restarts: int = 0, run: Path | None = None) -> int:
    """Run the command line in processes, restarted together after a failure. Return the exit status.

    `run` is the folder of the run, if the command line names one.

    Raises:
        TrainingError: if a process was killed, so that it could not report an error itself.
    """
    if importlib.util.find_spec("torch") is None:
        raise UnsupportedError(
            "`--nproc` needs PyTorch, which is not installed",
            hint="pip install 'onward[torch]'",
        )
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable(logging.CRITICAL)  # processes print their own errors
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // processes, 1)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=restarts,
        monitor_interval=0.1,
    )
    began = time.time()
    try:
        elastic_launch(config, sys.executable)("-m", "onward", *arguments)
    except ChildFailedError as error:
        killed = [(rank, failure) for rank, failure in error.failures.items() if failure.exitcode < 0]
        if killed:
            rank, failure = min(killed, key=lambda item: item[1].timestamp)
            raise TrainingError(
                f"process {rank} of {processes} was killed ({failure.signal_name()})", hint=resumption(run, began)
            ) from None
        return max((failure.exitcode for failure in error.failures.values()), default=1) or 1
    except SignalException:  # Ctrl-C was forwarded: the processes finished their step and saved
        return 130
    return 0
