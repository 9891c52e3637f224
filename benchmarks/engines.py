"""Onward's engines on PyTorch, JAX and TensorFlow, each beside the same model written by hand for that framework.

    python benchmarks/engines.py                 # all, as `make bench` does; the table goes to docs/benchmarks.md
    python benchmarks/engines.py --quick --only mlp_adam         # only prints

The peers are those of training.py, compiled; the two of a framework take turns.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from common import fill_in, keep
from training_tables import milliseconds, ratio
from workloads import SMALL, WORKLOADS, cores
from workloads.contenders import ALL

from training import measured, prepare

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
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(SMALL), metavar="WORKLOAD,...")
    given = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    for name in given.only:
        results[name] = {}
        for peer, ours in PAIRS.items():
            with tempfile.TemporaryDirectory() as place:
                prepare(WORKLOADS[name], [], cores(), Path(place))
                rounds = 2 if given.quick else None
                results[name] |= measured(WORKLOADS[name], [peer, ours], cores(), Path(place), rounds=rounds)
        print(table({name: results[name]}), end="\n\n", flush=True)
    if not given.quick and set(results) == set(SMALL):
        keep({"engines": results})
        fill_in("engines", table(results))


if __name__ == "__main__":
    main()
