"""Measure time, start and memory of training against PyTorch, JAX and TensorFlow, all doing the same work.

    python benchmarks/training.py                # all workloads, as `make bench` does
    python benchmarks/training.py --only vit,lora --threads 4 --folder cache     # some, with a cache
    python benchmarks/training.py --quick --only mlp_adam,gpt --contenders onward,torch      # prints only

Each contender runs in a separate process and waits for its turn, so that no thread of one disturbs
another. All start from the same weights and see the same batches. Before anything is timed, their
first losses must agree. Rows are stored in results.json, and the tables of docs/benchmarks.md are
written from all stored rows.
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

from common import fill_in, machine, read_results, write_results
from training_tables import by_size, tables
from workloads import SMALL, WEIGHTS, WORKLOADS, Workload, cores
from workloads.contenders import ALL, CONTENDERS

HERE = Path(__file__).parent
ROUNDS = {True: 9, False: 5}
"""Turns of small models, and of large ones, whose longer steps vary less."""
STARTS, LONG_START = 3, 4.5
"""Starts of a contender, of which the median counts; one start if it takes longer than these seconds."""
COMPARED = 5
"""First steps, whose losses must agree."""
TOLERANCE = 1e-3


class Worker:
    """A process of a contender, which has made its first step."""

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
            "PYTHONDONTWRITEBYTECODE": "",  # caches Onward's bytecode, as installed packages have it
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
        """Median seconds of a step, for each turn."""
        self.fastest = float("inf")

    def train(self, steps: int) -> list[float]:
        """Train, and return the seconds of each step."""
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
    """Write model and weights, if they are missing, and warm up contenders whose first start is slower.

    A first start fills the page cache and the disk cache of torch.compile. For large models only the latter matters.
    """
    if (folder / WEIGHTS).exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-m", "workloads.on_torch.export", workload.name, folder], cwd=HERE, check=True)
    for name in contenders:
        if workload.name in SMALL or ALL[name].keeps_compiled:
            Worker(workload, name, folder, threads).close()


def start(workload: Workload, contender: str, folder: Path, threads: int) -> Worker:
    """Return a worker with the median time of its starts."""
    worker = Worker(workload, contender, folder, threads)
    starts = [worker.start]
    while len(starts) < STARTS and min(starts) < LONG_START:
        worker.close()
        worker = Worker(workload, contender, folder, threads)
        starts.append(worker.start)
    worker.start = statistics.median(starts)
    return worker


def measure(
    workload: Workload, contenders: list[str], threads: int, folder: Path, *, rounds: int | None = None
) -> dict[str, Any]:
    """Return for each contender the seconds per step of each turn, the seconds to the first step, and the memory."""
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
    """Train one turn. The first step is not counted if steps are short: it finds the caches of another contender."""
    seconds = worker.train(steps + warms_up)
    worker.rounds.append(statistics.median(seconds[warms_up:]))
    worker.fastest = min(worker.fastest, *seconds)


def _compare(workload: Workload, workers: list[Worker]) -> None:
    expected = workers[0].losses
    for worker in workers[1:]:
        for i, (a, b) in enumerate(zip(worker.losses, expected, strict=True)):
            if not abs(a - b) <= TOLERANCE * abs(b):
                raise SystemExit(
                    f"{workload.name}: loss {i} of {worker.name} is {a:.6g}, that of {workers[0].name} is {b:.6g}"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="measure fewer rounds; write no results")
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        default=list(WORKLOADS),
        metavar="WORKLOAD,...",
        help="workloads to measure (default: all)",
    )
    parser.add_argument(
        "--contenders",
        type=lambda text: text.split(","),
        default=list(CONTENDERS),
        metavar="CONTENDER,...",
        help="contenders to measure (default: all)",
    )
    parser.add_argument("--threads", type=int, default=cores(), help="threads of each contender (default: all cores)")
    parser.add_argument(
        "--folder", type=Path, help="folder that keeps exported models and compiled code for the next run"
    )
    args = parser.parse_args()
    for name in args.only:
        workload = WORKLOADS[name]
        contenders = [contender for contender in args.contenders if ALL[contender].takes(workload)]
        with tempfile.TemporaryDirectory() as temporary:
            folder = (args.folder or Path(temporary)).resolve() / name
            prepare(workload, contenders, args.threads, folder)
            row = measure(workload, contenders, args.threads, folder, rounds=2 if args.quick else None)
        result = {name: {"on": machine(args.threads), "contenders": row}}
        print(tables(result), end="\n\n", flush=True)
        if not args.quick:
            write_results({"training": read_results("training") | result})
    if not args.quick:
        for mark, results in by_size(read_results("training")).items():
            fill_in(mark, tables(results))


if __name__ == "__main__":
    main()
