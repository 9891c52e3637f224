"""A program on several processes of this machine, which talk to one another through `torch.distributed`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

LIMIT = 300
"""Seconds that they may take. Importing is most of it."""


def together(script: str, world: int, job: dict[str, Any]) -> None:
    """Run `python script job.json` as so many processes. A job gets `rank`, `world`, and `meeting`: where they meet."""
    with tempfile.TemporaryDirectory() as place:
        processes = []
        for rank in range(world):
            path = Path(place) / f"job{rank}.json"
            path.write_text(json.dumps({**job, "rank": rank, "world": world, "meeting": f"{place}/meeting"}))
            log = open(Path(place) / f"log{rank}", "w+")  # noqa: SIM115  # the process has it, and it is read below
            command = [sys.executable, script, str(path)]
            started = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=_environment(rank, world)
            )
            processes.append((started, log))
        try:
            for process, log in processes:
                if process.wait(LIMIT):
                    log.seek(0)
                    raise RuntimeError(f"a process failed:\n{log.read()[-3000:]}")
        finally:
            for process, log in processes:
                process.kill()
                process.wait()
                log.close()


def meet(job: dict[str, Any]) -> None:
    """Begin to talk to the others."""
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{job['meeting']}", rank=job["rank"], world_size=job["world"]
    )


def _environment(rank: int, world: int) -> dict[str, str]:
    return {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1"}  # fmt: skip
