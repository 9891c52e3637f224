"""Time, start and memory of training, against PyTorch, JAX and TensorFlow, all doing the same work.

    python benchmarks/training.py                # all, as `make bench` does
    python benchmarks/training.py --only vit,lora --threads 4 --folder made      # these rows, and sooner the next time
    python benchmarks/training.py --quick --only mlp_adam,gpt --contenders onward,torch      # only prints

Each contender is a process of its own that waits for its turn, so that no thread of one disturbs another. All start
from the same weights and see the same batches, and before anything is timed their first losses must be the same.
Rows are kept in results.json, and the tables of docs/benchmarks.md are written from all that are there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import fill_in, keep, kept, machine
from training_tables import by_size, tables
from workloads import SMALL, WEIGHTS, WORKLOADS, Workload, cores
from workloads.contenders import ALL, CONTENDERS

HERE = Path(__file__).parent
ROUNDS = {True: 9, False: 5}
"""For small models, and for others, whose steps are long enough to be alike."""
STARTS, LONG_START = 3, 4.5
"""How often a contender is started, unless that takes longer than so many seconds: the median counts."""
COMPARED = 5
"""Steps whose losses must agree."""
TOLERANCE = 1e-3


class Worker:
    """A contender that has done its first step."""

    def __init__(self, workload: Workload, contender: str, folder: Path, threads: int):
        self.name = contender
        self._errors = folder / f"{contender}.log"
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "CUDA_VISIBLE_DEVICES": "",
            "JAX_PLATFORMS": "cpu",
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled"),
            "PYTHONDONTWRITEBYTECODE": "",  # Onward runs from its sources, all others as installed, which compiles
        }
        command = [sys.executable, "-m", "workloads.worker", workload.name, contender, folder, str(threads)]
        start = time.perf_counter()
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                cwd=HERE,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        first = self._answer()
        self.start = time.perf_counter() - start
        self.losses: list[float] = first["losses"]
        self.memory = 0
        self.rounds: list[float] = []
        """The median step of each turn."""
        self.fastest = float("inf")

    def train(self, steps: int) -> list[float]:
        """The seconds of each step."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        answer = self._answer()
        self.losses += answer["losses"]
        self.memory = answer["memory"]
        return answer["seconds"]

    def close(self) -> None:
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            raise SystemExit(f"{self.name} failed:\n{self._errors.read_text()[-4000:]}")
        return json.loads(line)


def prepare(workload: Workload, contenders: list[str], threads: int, folder: Path) -> None:
    """Write what all start from, unless that was done before, and start once those whose next start is not alike.

    Then files are in memory, and torch.compile finds what it has compiled. Where starts are long only that matters.
    """
    if (folder / WEIGHTS).exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-m", "workloads.on_torch.export", workload.name, folder], cwd=HERE, check=True)
    for name in contenders:
        if workload.name in SMALL or ALL[name].keeps_compiled:
            Worker(workload, name, folder, threads).close()


def start(workload: Workload, contender: str, folder: Path, threads: int) -> Worker:
    """A contender that knows how long it takes to start."""
    worker = Worker(workload, contender, folder, threads)
    starts = [worker.start]
    while len(starts) < STARTS and min(starts) < LONG_START:
        worker.close()
        worker = Worker(workload, contender, folder, threads)
        starts.append(worker.start)
    worker.start = statistics.median(starts)
    return worker


def measured(
    workload: Workload, contenders: list[str], threads: int, folder: Path, *, rounds: int | None = None
) -> dict[str, Any]:
    """What each contender needs: the seconds of a step in each turn, those until the first is done, and bytes."""
    workers = [start(workload, name, folder, threads) for name in contenders]
    try:
        for worker in workers:
            worker.train(COMPARED - 1)
        _compare(workload, workers)
        is_small = workload.name in SMALL
        for _ in range(rounds or ROUNDS[is_small]):
            for worker in workers:
                _take_turn(worker, workload.steps, warms_up=is_small)
    finally:
        for worker in workers:
            worker.close()
    return {
        worker.name: {
            "rounds": worker.rounds,
            "fastest": worker.fastest,
            "start": worker.start,
            "memory": worker.memory,
        }
        for worker in workers
    }


def _take_turn(worker: Worker, steps: int, *, warms_up: bool) -> None:
    """The first step finds what others left in the caches, which counts where steps are short."""
    seconds = worker.train(steps + warms_up)
    worker.rounds.append(statistics.median(seconds[warms_up:]))
    worker.fastest = min(worker.fastest, *seconds)


def _compare(workload: Workload, workers: list[Worker]) -> None:
    expected = workers[0].losses
    for worker in workers[1:]:
        for i, (a, b) in enumerate(zip(worker.losses, expected, strict=True)):
            if not abs(a - b) <= TOLERANCE * abs(b):
                raise SystemExit(
                    f"{workload.name}: loss {i} of {worker.name} is {a:.6g}, of {workers[0].name} {b:.6g}: other work"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds; prints, and writes nothing")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(WORKLOADS), metavar="WORKLOAD,...")
    parser.add_argument(
        "--contenders", type=lambda text: text.split(","), default=list(CONTENDERS), metavar="CONTENDER,..."
    )
    parser.add_argument("--threads", type=int, default=cores(), help="all cores unless given")
    parser.add_argument("--folder", type=Path, help="where exported and compiled models stay for the next time")
    given = parser.parse_args()
    for name in given.only:
        workload = WORKLOADS[name]
        contenders = [contender for contender in given.contenders if ALL[contender].takes(workload)]
        with tempfile.TemporaryDirectory() as place:
            folder = (given.folder or Path(place)).resolve() / name
            prepare(workload, contenders, given.threads, folder)
            row = measured(workload, contenders, given.threads, folder, rounds=2 if given.quick else None)
        result = {name: {"on": machine(given.threads), "contenders": row}}
        print(tables(result), end="\n\n", flush=True)
        if not given.quick:
            keep({"training": kept("training") | result})
    if not given.quick:
        for mark, results in by_size(kept("training")).items():
            fill_in(mark, tables(results))


if __name__ == "__main__":
    main()
