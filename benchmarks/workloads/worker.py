"""Run one contender of the training benchmark in a separate process.

    python -m workloads.worker WORKLOAD CONTENDER FOLDER THREADS

It trains one step, and then waits for its turn: each line of its input is a number of steps. Each
answer is a line of JSON.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import sys
import time
from pathlib import Path

from workloads import WORKLOADS, channels_last
from workloads.contenders import ALL


def main(name: str, contender: str, folder: str, threads: int) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep what frameworks print out of the answers
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    workload, form = WORKLOADS[name], ALL[contender]
    batches = workload.batches()
    if form.channels_last:
        batches = [channels_last.to_channels_last(batch) for batch in batches]
    step = importlib.import_module(f"workloads.{form.module}").load(workload, Path(folder), threads, **form.variant)
    endless = itertools.cycle(batches)
    for steps in itertools.chain(["1"], sys.stdin):
        losses, seconds = [], []
        for _ in range(int(steps)):
            x, labels = next(endless)
            start = time.perf_counter()
            losses.append(step(x, labels))
            seconds.append(time.perf_counter() - start)
        print(json.dumps({"losses": losses, "seconds": seconds, "memory": peak_memory()}), file=answers, flush=True)


def peak_memory() -> int:
    """Return the peak memory of this process without its children, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]))
