"""What each way to make lowered steps faster is worth: `python benchmarks/passes.py`, or `... lenet resnet`.

A step is lowered as it is, and again without one of them at a time; all run in turns, in one process, on one thread,
and what counts is the least processor time of a step. So other work on the machine disturbs little.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import onnxruntime as ort
from common import fill_in, keep
from workloads import SMALL, WORKLOADS, Workload

from lowered import LoweredStep

HERE = Path(__file__).parent
ROUNDS = 15
TOLERANCE = 1e-3


def _never(*_: Any) -> bool:
    return False


def _nothing(*_: Any) -> None:
    return None


PASSES: dict[str, tuple[str, Any]] = {
    "weights of convolutions row by row": ("onward.rules.convolution._pays_by_row", _never),
    "weights of convolutions in pieces of the batch": ("onward.rules.convolution.MOST_PIECES", 1),
    "factors of channels go to weights": ("onward.rules.convolution._without_factor", lambda op, dy, w: (dy, None)),
    "inputs of convolutions by convolution": ("onward.rules.windows._is_wide", _never),
    "pools that tile by MaxUnpool": ("onward.rules.pooling._tiles", _never),
    "casts settled": ("onward.lowering.optimize.settle_casts", _nothing),
    "equal nodes shared": ("onward.lowering.optimize.share_equal_nodes", _nothing),
    "results last": ("onward.lowering.step.put_results_last", _nothing),
}
"""Each with what switches it off: a name in Onward, and what stands in for it."""


def measured(workload: Workload, folder: Path, rounds: int) -> dict[str, float]:
    """The seconds of a step: `""` as it is, the others without one pass, except those that change nothing for it."""
    subprocess.run([sys.executable, "-m", "workloads.on_torch.export", workload.name, folder], cwd=HERE, check=True)
    steps = {"": _step(workload, folder)}
    for title, (name, replacement) in PASSES.items():
        with mock.patch(name, replacement):
            step = _step(workload, folder)
        if step.content != steps[""].content:
            steps[title] = step
    _compare(steps)
    least = dict.fromkeys(steps, float("inf"))
    for _ in range(rounds):
        for title, step in steps.items():
            step()  # finds what others left in the caches
            least[title] = min(least[title], *(_processor_time(step) for _ in range(3)))
    return least


def _step(workload: Workload, folder: Path) -> LoweredStep:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return LoweredStep(workload, folder, options)


def _compare(steps: dict[str, LoweredStep]) -> None:
    """All must do the same work."""
    for _ in range(5):
        expected, *others = (step() for step in steps.values())
        assert all(abs(loss - expected) <= TOLERANCE * abs(expected) for loss in others), (expected, others)


def _processor_time(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def table(results: dict[str, dict[str, float]]) -> str:
    """By how much a step would be slower without."""
    titles = [WORKLOADS[name].title.split(", ") for name in results]
    lines = [
        "| slower without | " + " | ".join(f"{model}, {optimizer}" for model, *_, optimizer in titles) + " |",
        "|---" * (len(results) + 1) + "|",
    ]
    for title in PASSES:
        cells = [_slower(times[title], times[""]) if title in times else "" for times in results.values()]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _slower(without: float, as_it_is: float) -> str:
    return f"{without / as_it_is - 1:+.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument(
        "workloads", nargs="*", metavar="WORKLOAD", help=f"some of {', '.join(WORKLOADS)}; else the small ones"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    results = {}
    for name in given.workloads or SMALL:
        with tempfile.TemporaryDirectory() as folder:
            results[name] = measured(WORKLOADS[name], Path(folder), given.rounds)
        print(table({name: results[name]}), end="\n\n", flush=True)
    if set(results) == set(SMALL):
        keep({"passes": results})
        fill_in("passes", table(results))


if __name__ == "__main__":
    main()
