"""Measure what each optimization of a step is worth: `python benchmarks/passes.py`, or `... lenet resnet`.

A step is lowered with all optimizations, and again without each one. All variants take turns in one
process, on one thread. The result is the least CPU time of a step, which other load changes little.
There are three tables: the plain graph; native kernels (`--kernels`), also in models that people
fine-tune; and native kernels for rarer layers, in small models (`--layers`). Columns are stored in
results.json, and all stored columns are written to docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import onnx_ir as ir
import onnxruntime as ort
from common import fill_in, read_results, write_results
from lowered import LoweredStep
from workloads import LARGE, LAYERS, SMALL, WORKLOADS, Workload

from onward.kernels import channels_last, rules
from onward.shapes import Dims, dims

HERE = Path(__file__).parent
ROUNDS = 15
VARIED = ["mlp_adam", "lenet", "resnet", "gpt", "resnet18", "mobilenet", "vit", "distilbert", "gru", "lora"]
"""Workloads in which each kernel is measured."""
ALL = WORKLOADS | LAYERS
TOLERANCE = 1e-3


def _never(*_: Any) -> bool:
    return False


def _nothing(*_: Any) -> None:
    return None


Switch = Callable[[], AbstractContextManager[Any]]
"""Maker of a context in which an optimization is off."""


def _off(name: str, replacement: Any = _nothing) -> Switch:
    return lambda: mock.patch(name, replacement)


def _no_rules(*operators: str) -> Switch:
    """Return a switch that makes the derivatives of some operators those of the plain graph."""
    others = {key: rule for key, rule in rules._RULES.items() if key[1] not in operators}
    return lambda: mock.patch.object(rules, "_RULES", others)


def _no_conversions(*operators: str) -> Switch:
    """Return a switch that leaves some operators in the layout of the model."""
    others = {name: convert for name, convert in channels_last._CONVERSIONS.items() if name not in operators}
    return lambda: mock.patch.object(channels_last, "_CONVERSIONS", others)


def _only_images(value: ir.Value | None) -> Dims | None:
    sizes = dims(value)
    return None if sizes is None or len(sizes) != channels_last.RANK else sizes


PASSES: dict[str, Switch] = {
    "weights of convolutions row by row": _off("onward.rules.convolution._pays_by_row", _never),
    "weights of convolutions in pieces of the batch": _off("onward.rules.convolution.MOST_PIECES", 1),
    "factors of channels go to weights": _off("onward.rules.convolution._without_factor", lambda op, dy, w: (dy, None)),
    "inputs of convolutions by convolution": _off("onward.rules.windows._is_wide", _never),
    "pools that tile by MaxUnpool": _off("onward.rules.pooling._tiles", _never),
    "casts settled": _off("onward.lowering.optimize.settle_casts"),
    "equal nodes shared": _off("onward.lowering.optimize.share_equal_nodes"),
    "results last": _off("onward.lowering.step.put_results_last"),
}
KERNELS: dict[str, Switch] = {
    "convolutions, BatchNormalization and pools, channels last": _off("onward.kernels.put_channels_last"),
    "attention without scores": _off("onward.kernels.use_attention"),
    "recurrent layers without a Scan": _off("onward.kernels.use_recurrent"),
    "activations in one pass": _off("onward.kernels.use_activations"),
    "gradients of activations": _no_rules(
        "Relu", "HardSigmoid", "HardSwish", "LeakyRelu", "Sigmoid", "Tanh", "Gelu", "GeluOfTanh", "Swish"
    ),
    "gradients of LayerNormalization": _no_rules("LayerNormalization"),
    "gradients of softmax": _no_rules("Softmax", "LogSoftmax"),
    "cross entropy": _off("onward.kernels.use_cross_entropy"),
    "gradients of embeddings": _no_rules("Gather"),
    "matmuls, and sums of rows": _off("onward.kernels.use_matmuls"),
    "updates in one pass": _off("onward.kernels.fuse_updates"),
}
IN_LAYERS: dict[str, Switch] = {
    "transposed convolutions": _no_conversions("ConvTranspose"),
    "images in other sizes": _no_conversions("Resize"),
    "averages of windows": _no_conversions("AveragePool"),
    "signals": _off("onward.kernels.channels_last._image_sizes", _only_images),
    "gradients of LeakyRelu and Tanh": _no_rules("LeakyRelu", "Tanh"),
    **{
        title: KERNELS[title]
        for title in ("activations in one pass", "gradients of softmax", "cross entropy", "gradients of embeddings")
    },
}
TABLES = {
    "passes": (PASSES, list(SMALL), False),
    "kernels": (KERNELS, VARIED, True),
    "layers": (IN_LAYERS, list(LAYERS), True),
}
"""Table -> what is switched off, the default workloads, and if native kernels are in use."""
ALL_KERNELS = "any of them"


def measure(
    workload: Workload, folder: Path, rounds: int, switches: dict[str, Switch], kernels: bool
) -> dict[str, float]:
    """Return the CPU seconds of a step: `""` with all optimizations, the others without one.

    Optimizations that do not change the graph of the workload are left out.
    """
    subprocess.run([sys.executable, "-m", "workloads.on_torch.export", workload.name, folder], cwd=HERE, check=True)
    steps = {"": _step(workload, folder, kernels)}
    for title, off in switches.items():
        with off():
            step = _step(workload, folder, kernels)
        if step.content != steps[""].content:
            steps[title] = step
    if kernels:
        steps[ALL_KERNELS] = _step(workload, folder, kernels=False)
    _compare(steps)
    least = dict.fromkeys(steps, float("inf"))
    for _ in range(rounds):
        for title, step in steps.items():
            step()  # the first step finds the caches of another contender
            least[title] = min(least[title], *(_processor_time(step) for _ in range(3)))
    return least


def _step(workload: Workload, folder: Path, kernels: bool) -> LoweredStep:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return LoweredStep(workload, folder, options, kernels=kernels)


def _compare(steps: dict[str, LoweredStep]) -> None:
    """Check that all steps do the same work: their losses agree."""
    for _ in range(5):
        expected, *others = (step() for step in steps.values())
        assert all(abs(loss - expected) <= TOLERANCE * abs(expected) for loss in others), (expected, others)


def _processor_time(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def table(results: dict[str, dict[str, float]], rows: Iterable[str]) -> str:
    """Return a table of how much slower a step is without each optimization."""
    titles = [ALL[name].title.split(", ") for name in results]
    suffixes = [", LoRA" if ALL[name].adapters else "" for name in results]
    columns = (f"{model}{suffix}, {optimizer}" for (model, *_, optimizer), suffix in zip(titles, suffixes, strict=True))
    lines = [
        f"| slower without | {' | '.join(columns)} |",
        "|---" * (len(results) + 1) + "|",
    ]
    for title in rows:
        cells = [_slower(times[title], times[""]) if title in times else "" for times in results.values()]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _slower(without: float, complete: float) -> str:
    return f"{without / complete - 1:+.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument(
        "workloads",
        nargs="*",
        metavar="WORKLOAD",
        help=f"workloads to measure, of {', '.join(ALL)} (default: those of the table)",
    )
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help=f"rounds to measure; fewer write no results (default: {ROUNDS})"
    )
    parser.add_argument("--kernels", action="store_true", help="measure native kernels")
    parser.add_argument("--layers", action="store_true", help="measure native kernels for rarer layers")
    args = parser.parse_args()
    name = "layers" if args.layers else "kernels" if args.kernels else "passes"
    switches, defaults, kernels = TABLES[name]
    rows = [*switches, *[ALL_KERNELS] * kernels]
    for workload in args.workloads or defaults:
        with tempfile.TemporaryDirectory() as folder:
            rounds = min(args.rounds, 3) if workload in LARGE else args.rounds
            result = {workload: measure(ALL[workload], Path(folder), rounds, switches, kernels)}
        print(table(result, rows), end="\n\n", flush=True)
        if args.rounds >= ROUNDS:
            write_results({name: read_results(name) | result})
    if args.rounds >= ROUNDS:
        stored = read_results(name)
        fill_in(name, table({workload: stored[workload] for workload in defaults if workload in stored}, rows))


if __name__ == "__main__":
    main()
