"""Profile a training step on ONNX Runtime: `python benchmarks/hotspots.py gpt`.

Prints the time by operator, then by node. A node has the name of its first output and the shapes of
its inputs.
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
WARM_UP = 2
"""Steps that are not counted."""


def profiled(workload: Workload, folder: Path, steps: int, threads: int, kernels: bool) -> list[dict[str, Any]]:
    """Return the profiling events of a number of steps, without those of the warm-up."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "profile")
    step = LoweredStep(workload, folder, options, kernels=kernels)
    for _ in range(WARM_UP + steps):
        step()
    events = json.loads(Path(step.session.end_profiling()).read_text())
    runs = [event for event in events if event["name"] == "model_run"]
    start = sorted(event["ts"] for event in runs)[WARM_UP]
    return [event for event in events if event["ts"] >= start]


def report(events: list[dict[str, Any]], rows: int) -> None:
    """Print medians over the steps, which other load on the machine changes little."""
    by_node: dict[tuple[str, str], list[int]] = collections.defaultdict(list)
    for event in events:
        if event["cat"] == "Node" and event["name"].endswith("_kernel_time"):
            by_node[event["args"]["op_name"], _title(event)].append(event["dur"])
    nodes = {node: statistics.median(durations) for node, durations in by_node.items()}
    total = sum(nodes.values())
    step = statistics.median(event["dur"] for event in events if event["name"] == "model_run")
    by_operator: collections.Counter[str] = collections.Counter()
    for (operator, _), duration in nodes.items():
        by_operator[operator] += duration
    count = collections.Counter(operator for operator, _ in nodes)
    print(f"{step / 1e3:.2f} ms per step, {len(nodes)} nodes that take {total / 1e3:.2f} ms\n")
    for operator, duration in by_operator.most_common(rows):
        print(f"{duration / total:6.1%} {duration / 1e3:8.3f} ms {count[operator]:4} x {operator}")
    print()
    for (_, title), duration in sorted(nodes.items(), key=lambda item: -item[1])[:rows]:
        print(f"{duration / total:6.1%} {duration / 1e3:8.3f} ms   {title}")


def _title(event: dict[str, Any]) -> str:
    shapes = [shape for types in event["args"].get("input_type_shape", []) for shape in types.values()]
    return f"{event['args']['op_name']} {event['name'].removesuffix('_kernel_time')} {shapes}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--rows", type=int, default=20, help="rows of each table (default: 20)")
    parser.add_argument("--steps", type=int, help="steps to profile (default: 30, or 5 for large models)")
    parser.add_argument("--threads", type=int, default=cores(), help="threads of ONNX Runtime (default: all cores)")
    parser.add_argument(
        "--no-kernels", dest="kernels", action="store_false", help="profile the plain graph, without native kernels"
    )
    args = parser.parse_args()
    steps = args.steps or (30 if args.workload in SMALL else 5)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "workloads.on_torch.export", args.workload, folder], cwd=HERE, check=True)
        events = profiled(WORKLOADS[args.workload], Path(folder), steps, args.threads, args.kernels)
        report(events, args.rows)


if __name__ == "__main__":
    main()
