"""Time, start and memory of training, against PyTorch, JAX and TensorFlow, all doing the same work.

    python benchmarks/training.py                # all, as `make bench` does; the tables go to docs/benchmarks.md
    python benchmarks/training.py --quick --only mlp_adam,gpt --contenders onward,torch      # only prints

Each contender is a process of its own that waits for its turn, so that no thread of one disturbs another. All start
from the same weights and see the same batches, and before anything is timed their first losses must be the same.
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

from common import fill_in, keep
from workloads import THREADS, WORKLOADS, Workload
from workloads.contenders import ALL, CONTENDERS

HERE = Path(__file__).parent
ROUNDS = 9
STARTS = 2
"""The last counts: by then files are in memory, and torch.compile finds what it has compiled before."""
COMPARED = 5
"""Steps whose losses must agree."""
TOLERANCE = 1e-3
BASE = "torch"


class Worker:
    """A contender that has done its first step."""

    def __init__(self, workload: Workload, contender: str, folder: Path):
        self.name = contender
        self._errors = folder / f"{contender}.log"
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(THREADS),
            "CUDA_VISIBLE_DEVICES": "",
            "JAX_PLATFORMS": "cpu",
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled"),
            "PYTHONDONTWRITEBYTECODE": "",  # Onward runs from its sources, all others as installed, which compiles
        }
        command = [sys.executable, "-m", "workloads.worker", workload.name, contender, folder]
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


def measured(
    workload: Workload, contenders: list[str], folder: Path, rounds: int, starts: int, base: str = BASE
) -> dict[str, Any]:
    """What each contender needs for a workload: seconds a step, seconds until the first is done, bytes."""
    _exported(workload, folder)
    earlier = {name: [_started_once(workload, name, folder) for _ in range(starts - 1)] for name in contenders}
    workers = [Worker(workload, name, folder) for name in contenders]
    try:
        for worker in workers:
            worker.train(COMPARED - 1)
        _compare(workload, workers)
        for _ in range(rounds):
            for worker in workers:
                seconds = worker.train(workload.steps + 1)
                worker.rounds.append(statistics.median(seconds[1:]))  # the first finds what others left in the caches
                worker.fastest = min(worker.fastest, *seconds)
    finally:
        for worker in workers:
            worker.close()
    peer = next((worker for worker in workers if worker.name == base), None)
    return {
        worker.name: {
            "step": statistics.median(worker.rounds),
            "ratio": _ratio(worker, peer) if peer else None,
            "fastest": worker.fastest,
            "start": worker.start,
            "earlier_starts": earlier[worker.name],
            "memory": worker.memory,
        }
        for worker in workers
    }


def _exported(workload: Workload, folder: Path) -> None:
    subprocess.run([sys.executable, "-m", "workloads.on_torch", workload.name, folder], cwd=HERE, check=True)


def _started_once(workload: Workload, contender: str, folder: Path) -> float:
    worker = Worker(workload, contender, folder)
    worker.close()
    return worker.start


def _compare(workload: Workload, workers: list[Worker]) -> None:
    expected = workers[0].losses
    for worker in workers[1:]:
        for i, (a, b) in enumerate(zip(worker.losses, expected, strict=True)):
            if not abs(a - b) <= TOLERANCE * abs(b):
                raise SystemExit(
                    f"{workload.name}: loss {i} of {worker.name} is {a:.6g}, of {workers[0].name} {b:.6g}: other work"
                )


def _ratio(worker: Worker, base: Worker) -> float:
    """Turn by turn, so that what the machine does meanwhile counts for both."""
    return statistics.median(a / b for a, b in zip(worker.rounds, base.rounds, strict=True))


def table(results: dict[str, Any], what: str, shown: Any) -> str:
    names = list(next(iter(results.values())))
    titles = [ALL[name].title for name in names]
    lines = [f"| {what} | " + " | ".join(titles) + " |", "|---" * (len(names) + 1) + "|"]
    for workload, row in results.items():
        lines.append(f"| {WORKLOADS[workload].title} | " + " | ".join(shown(row[name]) for name in names) + " |")
    return "\n".join(lines)


def tables(results: dict[str, Any]) -> str:
    def step(row: dict[str, Any]) -> str:
        ratio = f" ({row['ratio']:.2f})" if row["ratio"] is not None else ""
        return f"{row['step'] * 1e3:.2f}{ratio}"

    return "\n\n".join(
        [
            table(results, f"ms a step (ratio to {CONTENDERS[BASE].title})", step),
            table(results, "s to the end of the first step", lambda row: f"{row['start']:.2f}"),
            table(results, "MB at most", lambda row: f"{row['memory'] / 1e6:.0f}"),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds, and one start")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(WORKLOADS), metavar="WORKLOAD,...")
    parser.add_argument(
        "--contenders", type=lambda text: text.split(","), default=list(CONTENDERS), metavar="CONTENDER,..."
    )
    given = parser.parse_args()
    results = {}
    for name in given.only:
        with tempfile.TemporaryDirectory() as folder:
            rounds, starts = (2, 1) if given.quick else (ROUNDS, STARTS)
            results[name] = measured(WORKLOADS[name], given.contenders, Path(folder), rounds, starts)
        print(tables({name: results[name]}), end="\n\n", flush=True)
    if not given.quick and set(results) == set(WORKLOADS) and given.contenders == list(CONTENDERS):
        keep({"training": results})
        fill_in("training", tables(results))


if __name__ == "__main__":
    main()
