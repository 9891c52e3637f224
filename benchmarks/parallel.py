"""Measure steps in several processes against DDP and FSDP2 code written by hand.

    python benchmarks/parallel.py                # two processes; writes the table in docs/benchmarks.md
    python benchmarks/parallel.py --quick        # prints only

Each process has half of each batch and one thread. The hand-written code follows the documentation
of PyTorch: eager, with a fused optimizer. BatchNormalization uses the statistics of its process on
both sides. Contenders take turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import fill_in, write_results
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from workloads import WORKLOADS, Workload, on_onward, on_torch
from workloads.on_torch.export import export
from workloads.on_torch.images import Block
from workloads.on_torch.sequences import Layer

import onward

PROCESSES, ROUNDS = 2, 9
NAMES = ("resnet", "gpt")
TOLERANCE = 1e-3

Step = Callable[[], float]


def share(workload: Workload) -> Workload:
    """Return a workload with the batch size of one process."""
    return dataclasses.replace(workload, batch=workload.batch // PROCESSES)


def by_hand(workload: Workload, folder: Path, strategy: str) -> Callable[[Any, Any], float]:
    module = on_torch.trainable_module(workload, folder)
    if strategy == "fsdp":
        blocks = [block for block in module.modules() if isinstance(block, (Layer, Block))]
        for block in blocks:
            fully_shard(block)
        wrapped: Any = fully_shard(module)
    else:
        wrapped = DistributedDataParallel(module)
    fused = strategy == "ddp" or workload.optimizer == "adamw"  # with FSDP, of the fused optimizers only AdamW works
    optimizer = on_torch.OPTIMIZERS[workload.optimizer](wrapped.parameters(), fused=fused or None, **workload.rates)

    def step(x: Any, labels: Any) -> float:
        optimizer.zero_grad()
        logits = wrapped(torch.from_numpy(x))
        loss = F.cross_entropy(logits.flatten(0, -2), torch.from_numpy(labels).flatten())
        loss.backward()
        optimizer.step()
        total = loss.detach()
        dist.all_reduce(total)  # a training loop logs the loss of all processes
        return total.item() / PROCESSES

    return step


def by_onward(workload: Workload, folder: Path, **options: Any) -> Callable[[Any, Any], float]:
    engine = onward.engines.start(on_onward.training_model(workload, folder), sync_batch_norm=False, **options)
    return lambda x, labels: float(engine.step({"x": x, "labels": labels})["loss"])


CONTENDERS: dict[str, Callable[[Workload, Path], Callable[[Any, Any], float]]] = {
    "DDP by hand": lambda workload, folder: by_hand(workload, folder, "ddp"),
    "onward, ddp": lambda workload, folder: by_onward(workload, folder, engine="torch", strategy="ddp"),
    "FSDP2 by hand": lambda workload, folder: by_hand(workload, folder, "fsdp"),
    "onward, fsdp": lambda workload, folder: by_onward(workload, folder, engine="torch", strategy="fsdp"),
    "onward on ONNX Runtime": lambda workload, folder: by_onward(workload, folder, strategy="ddp"),
}


def work(folder: Path) -> None:
    """Measure all workloads in one process of a group."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    results = {name: time_all(WORKLOADS[name], folder / name) for name in NAMES}
    if dist.get_rank() == 0:
        (folder / "results.json").write_text(json.dumps(results))
    dist.barrier()
    os._exit(0)  # threads of gloo outlive the interpreter


def time_all(workload: Workload, folder: Path) -> dict[str, float]:
    rank, size = dist.get_rank(), share(workload).batch
    batches = [(x[rank * size : (rank + 1) * size], y[rank * size : (rank + 1) * size]) for x, y in workload.batches()]
    steps = {name: make(workload, folder) for name, make in CONTENDERS.items()}
    losses = {name: [step(*batch) for batch in batches] for name, step in steps.items()}
    first = next(iter(losses.values()))
    for name, values in losses.items():
        assert all(abs(a - b) <= TOLERANCE * abs(b) for a, b in zip(values, first, strict=True)), (name, values, first)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            for i in range(max(workload.steps // 2, 2)):
                step(*batches[i % len(batches)])
            times[name].append((time.perf_counter() - start) / max(workload.steps // 2, 2))
    return {name: statistics.median(measured) for name, measured in times.items()}


def table(results: dict[str, dict[str, float]]) -> str:
    lines = ["| | " + " | ".join(WORKLOADS[name].title for name in results) + " |", "|---" * (len(results) + 1) + "|"]
    for contender in CONTENDERS:
        cells = []
        for times in results.values():
            peer = times["FSDP2 by hand" if "fsdp" in contender.lower() else "DDP by hand"]
            cells.append(f"{1e3 * times[contender]:.1f} ms ({times[contender] / peer:.2f})")
        lines.append(f"| {contender} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="print the table; write no results")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        work(options.worker)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in NAMES:
            (folder / name).mkdir()
            export(share(WORKLOADS[name]), folder / name)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES}"]
        subprocess.run(
            [*command, __file__, "--worker", temporary], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        results = json.loads((folder / "results.json").read_text())
    print(table(results))
    if not options.quick:
        write_results({"parallel": results})
        fill_in("parallel", table(results))


if __name__ == "__main__":
    main()
