"""Where the time of a training step goes on ONNX Runtime: `python benchmarks/hotspots.py gpt`.

By operator, then by node; a node has the name of its first output, with the shapes of what it reads.
"""

from __future__ import annotations

import argparse
import collections
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import onnxruntime as ort
from lowered import LoweredStep
from workloads import SMALL, WORKLOADS, Workload, cores

HERE = Path(__file__).parent
WARM = 2


def profiled(workload: Workload, folder: Path, steps: int, threads: int, kernels: bool) -> list[dict[str, Any]]:
    """The events of so many steps, after some that warm up."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "profile")
    step = LoweredStep(workload, folder, options, kernels=kernels)
    for _ in range(WARM + steps):
        step()
    events = json.loads(Path(step.session.end_profiling()).read_text())
    runs = [event for event in events if event["name"] == "model_run"]
    start = sorted(event["ts"] for event in runs)[WARM]
    return [event for event in events if event["ts"] >= start]


def report(events: list[dict[str, Any]], rows: int) -> None:
    """Medians over the steps: a moment in which the machine was busy counts for nothing."""
    by_node: dict[tuple[str, str], list[int]] = collections.defaultdict(list)
    for event in events:
        if event["cat"] == "Node" and event["name"].endswith("_kernel_time"):
            by_node[event["args"]["op_name"], _described(event)].append(event["dur"])
    nodes = {node: statistics.median(durations) for node, durations in by_node.items()}
    whole = sum(nodes.values())
    step = statistics.median(event["dur"] for event in events if event["name"] == "model_run")
    by_operator: collections.Counter[str] = collections.Counter()
    for (operator, _), spent in nodes.items():
        by_operator[operator] += spent
    count = collections.Counter(operator for operator, _ in nodes)
    print(f"{step / 1e3:.2f} ms a step, {len(nodes)} nodes that take {whole / 1e3:.2f} ms\n")
    for operator, spent in by_operator.most_common(rows):
        print(f"{spent / whole:6.1%} {spent / 1e3:8.3f} ms {count[operator]:4} x {operator}")
    print()
    for (_, described), spent in sorted(nodes.items(), key=lambda item: -item[1])[:rows]:
        print(f"{spent / whole:6.1%} {spent / 1e3:8.3f} ms   {described}")


def _described(event: dict[str, Any]) -> str:
    shapes = [shape for given in event["args"].get("input_type_shape", []) for shape in given.values()]
    return f"{event['args']['op_name']} {event['name'].removesuffix('_kernel_time')} {shapes}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--rows", type=int, default=20)
    parser.add_argument("--steps", type=int, help="30, or 5 of a model in its real size")
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument("--no-kernels", dest="kernels", action="store_false", help="of the plain graph")
    given = parser.parse_args()
    steps = given.steps or (30 if given.workload in SMALL else 5)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", "workloads.on_torch.export", given.workload, folder], cwd=HERE, check=True
        )
        events = profiled(WORKLOADS[given.workload], Path(folder), steps, given.threads, given.kernels)
        report(events, given.rows)


if __name__ == "__main__":
    main()
