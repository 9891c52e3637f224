"""Measure the engines on PyTorch, JAX and TensorFlow against the same models written by hand.

    python benchmarks/engines.py                 # all workloads; writes the table in docs/benchmarks.md
    python benchmarks/engines.py --quick --only mlp_adam         # prints only

The peers are the compiled ones of training.py. The two contenders of a framework take turns.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from common import fill_in, write_results
from training_tables import milliseconds, ratio
from workloads import SMALL, WORKLOADS, cores
from workloads.contenders import ALL

from training import measure, prepare

PAIRS = {"torch_compile": "onward_torch", "jax": "onward_jax", "tensorflow": "onward_tensorflow"}


def table(results: dict[str, dict[str, Any]]) -> str:
    titles = [f"{ALL[ours].title} (ratio to {ALL[peer].title})" for peer, ours in PAIRS.items()]
    lines = ["| ms a step | " + " | ".join(titles) + " |", "|---" * (len(PAIRS) + 1) + "|"]
    for name, row in results.items():
        cells = (f"{milliseconds(row[ours]):.2f} ({ratio(row[ours], row[peer]):.2f})" for peer, ours in PAIRS.items())
        lines.append(f"| {WORKLOADS[name].title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="measure fewer rounds; write no results")
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        default=list(SMALL),
        metavar="WORKLOAD,...",
        help="workloads to measure (default: all small ones)",
    )
    args = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    for name in args.only:
        results[name] = {}
        for peer, ours in PAIRS.items():
            with tempfile.TemporaryDirectory() as folder:
                prepare(WORKLOADS[name], [], cores(), Path(folder))
                rounds = 2 if args.quick else None
                results[name] |= measure(WORKLOADS[name], [peer, ours], cores(), Path(folder), rounds=rounds)
        print(table({name: results[name]}), end="\n\n", flush=True)
    if not args.quick and set(results) == set(SMALL):
        write_results({"engines": results})
        fill_in("engines", table(results))


if __name__ == "__main__":
    main()
