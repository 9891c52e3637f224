"""What each way to make steps faster is worth: `python benchmarks/passes.py`, or `... lenet resnet`.

A step is lowered as it is, and again without one of them at a time; all run in turns, in one process, on one thread,
and what counts is the least processor time of a step. So other work on the machine disturbs little. There are three
tables: of the plain graph; with `--kernels`, of native kernels, also in models that people fine-tune; and with
`--layers`, of native kernels for layers that all these do not have, in small models. Columns are kept in results.json,
and all that are there are written into docs/benchmarks.md.
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
from common import fill_in, keep, kept
from lowered import LoweredStep
from workloads import LARGE, LAYERS, SMALL, WORKLOADS, Workload

from onward.kernels import channels_last, rules
from onward.shapes import Dims, dims

HERE = Path(__file__).parent
ROUNDS = 15
VARIED = ["mlp_adam", "lenet", "resnet", "gpt", "resnet18", "mobilenet", "vit", "distilbert", "gru", "lora"]
"""What each kernel is looked for in."""
ALL = WORKLOADS | LAYERS
TOLERANCE = 1e-3


def _never(*_: Any) -> bool:
    return False


def _nothing(*_: Any) -> None:
    return None


Switch = Callable[[], AbstractContextManager[Any]]
"""What turns something off as long as it lasts."""


def _off(name: str, replacement: Any = _nothing) -> Switch:
    return lambda: mock.patch(name, replacement)


def _no_rules(*operators: str) -> Switch:
    """Derivatives of some operators as the plain graph has them."""
    others = {key: rule for key, rule in rules._RULES.items() if key[1] not in operators}
    return lambda: mock.patch.object(rules, "_RULES", others)


def _no_conversions(*operators: str) -> Switch:
    """Some operators in the order of channels that the model has."""
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
"""What is switched off, in which workloads, and whether there are native kernels."""
ALL_KERNELS = "any of them"


def measured(workload: Workload, folder: Path, rounds: int, ways: dict[str, Switch], kernels: bool) -> dict[str, float]:
    """The seconds of a step: `""` as it is, the others without one way, except those that change nothing for it."""
    subprocess.run([sys.executable, "-m", "workloads.on_torch.export", workload.name, folder], cwd=HERE, check=True)
    steps = {"": _step(workload, folder, kernels)}
    for title, off in ways.items():
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
            step()  # finds what others left in the caches
            least[title] = min(least[title], *(_processor_time(step) for _ in range(3)))
    return least


def _step(workload: Workload, folder: Path, kernels: bool) -> LoweredStep:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return LoweredStep(workload, folder, options, kernels=kernels)


def _compare(steps: dict[str, LoweredStep]) -> None:
    """All must do the same work."""
    for _ in range(5):
        expected, *others = (step() for step in steps.values())
        assert all(abs(loss - expected) <= TOLERANCE * abs(expected) for loss in others), (expected, others)


def _processor_time(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def table(results: dict[str, dict[str, float]], ways: Iterable[str]) -> str:
    """By how much a step would be slower without."""
    titles = [ALL[name].title.split(", ") for name in results]
    kinds = [", LoRA" if ALL[name].adapters else "" for name in results]
    named = (f"{model}{kind}, {optimizer}" for (model, *_, optimizer), kind in zip(titles, kinds, strict=True))
    lines = [
        f"| slower without | {' | '.join(named)} |",
        "|---" * (len(results) + 1) + "|",
    ]
    for title in ways:
        cells = [_slower(times[title], times[""]) if title in times else "" for times in results.values()]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _slower(without: float, as_it_is: float) -> str:
    return f"{without / as_it_is - 1:+.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument(
        "workloads", nargs="*", metavar="WORKLOAD", help=f"some of {', '.join(ALL)}; else the usual ones"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="with fewer it only prints")
    parser.add_argument("--kernels", action="store_true", help="what native kernels are worth")
    parser.add_argument("--layers", action="store_true", help="what those for rarer layers are worth")
    given = parser.parse_args()
    name = "layers" if given.layers else "kernels" if given.kernels else "passes"
    ways, usual, kernels = TABLES[name]
    rows = [*ways, *[ALL_KERNELS] * kernels]
    for workload in given.workloads or usual:
        with tempfile.TemporaryDirectory() as folder:
            rounds = min(given.rounds, 3) if workload in LARGE else given.rounds
            result = {workload: measured(ALL[workload], Path(folder), rounds, ways, kernels)}
        print(table(result, rows), end="\n\n", flush=True)
        if given.rounds >= ROUNDS:
            keep({name: kept(name) | result})
    if given.rounds >= ROUNDS:
        known = kept(name)
        fill_in(name, table({workload: known[workload] for workload in usual if workload in known}, rows))


if __name__ == "__main__":
    main()
