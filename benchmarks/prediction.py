"""`evaluate` and `predict` against loops over ONNX Runtime written by hand, on the same batches.

    python benchmarks/prediction.py [--rows 200000] [--million]

The loops read the same file and compute what Onward computes: accuracy, loss and confusion matrix for
`evaluate --metric accuracy`, a CSV file of classes and probabilities for `predict`. Contenders take
turns; seconds are of CPU, since wall time on a busy machine says nothing.
`--million` writes predictions of a million rows and prints the peak memory.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from common import ROUNDS
from onnx import TensorProto, helper, numpy_helper

import onward

CLASSES, BATCH = 10, 256


def classifier(width: int, hidden: int) -> onnx.ModelProto:
    """Return a network of one hidden layer that gives logits."""
    rng = np.random.default_rng(0)
    shapes = {"w1": (width, hidden), "b1": (hidden,), "w2": (hidden, CLASSES), "b2": (CLASSES,)}
    weights = [
        numpy_helper.from_array((rng.normal(size=s) / np.sqrt(s[0])).astype(np.float32), n) for n, s in shapes.items()
    ]
    nodes = [
        helper.make_node("Gemm", ["x", "w1", "b1"], ["h"]),
        helper.make_node("Relu", ["h"], ["a"]),
        helper.make_node("Gemm", ["a", "w2", "b2"], ["y"]),
    ]
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", size]) for name, size in (("x", width), ("y", 10))
    ]
    graph = helper.make_graph(nodes, "classifier", ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def session(path: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def evaluate_by_hand(model: Path, data: Path) -> tuple[float, float, np.ndarray]:
    arrays, run, loss = np.load(data), session(model), 0.0
    images, labels = arrays["x"], arrays["labels"]
    confusion = np.zeros((CLASSES, CLASSES), np.int64)
    for start in range(0, len(images), BATCH):
        (logits,) = run.run(None, {"x": images[start : start + BATCH]})
        wanted = labels[start : start + BATCH]
        np.add.at(confusion, (wanted, logits.argmax(1)), 1)
        shifted = logits - logits.max(1, keepdims=True)
        loss -= float((shifted - np.log(np.exp(shifted).sum(1, keepdims=True)))[np.arange(len(wanted)), wanted].sum())
    return float(np.trace(confusion) / len(images)), loss / len(images), confusion


def predict_by_hand(model: Path, data: Path, output: Path) -> None:
    images, run = np.load(data)["x"], session(model)
    line = "%d,%d,%.9g," + ",".join(["%.9g"] * CLASSES) + "\n"
    with open(output, "w") as file:
        file.write("row,prediction,probability," + ",".join(f"p_{i}" for i in range(CLASSES)) + "\n")
        for start in range(0, len(images), BATCH):
            (logits,) = run.run(None, {"x": images[start : start + BATCH]})
            powers = np.exp(logits - logits.max(1, keepdims=True))
            p = powers / powers.sum(1, keepdims=True)
            chosen = p.argmax(1)
            for i, row in enumerate(p):
                file.write(line % (start + i, chosen[i], row[chosen[i]], *row))


def cpu_seconds(**contenders: Callable[[], object]) -> dict[str, float]:
    """Return the median CPU seconds of each contender, in turns."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, run in contenders.items():
            start = time.process_time()
            run()
            times[name].append(time.process_time() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def compare(folder: Path, width: int, hidden: int, rows: int, settings: dict[str, Any]) -> None:
    """Print the seconds of all contenders, and their ratio to the loop by hand."""
    model, data, output = folder / "model.onnx", folder / "data.npz", folder / "p.csv"
    onnx.save(classifier(width, hidden), model)
    rng = np.random.default_rng(0)
    np.savez(data, x=rng.normal(size=(rows, width)).astype(np.float32), labels=rng.integers(0, CLASSES, rows))
    seconds = cpu_seconds(
        evaluate_by_hand=lambda: evaluate_by_hand(model, data),
        evaluate_accuracy=lambda: onward.evaluate(model, data, metrics="accuracy", worst=0, **settings),
        evaluate_all=lambda: onward.evaluate(model, data, **settings),
        predict_by_hand=lambda: predict_by_hand(model, data, output),
        predict=lambda: onward.predict(model, data, **settings).save(output),
    )
    print(f"{rows:,} rows, {width} -> {hidden} -> {CLASSES}, batches of {BATCH}")
    for name, value in seconds.items():
        ratio = value / seconds["predict_by_hand" if name.startswith("predict") else "evaluate_by_hand"]
        print(f"  {name:20} {value:7.3f} s  {ratio:5.2f} of by hand")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--million", action="store_true")
    arguments = parser.parse_args()
    settings: dict[str, Any] = {"loss": "cross_entropy", "batch_size": BATCH, "threads": 1, "quiet": True}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rng = np.random.default_rng(0)
        if arguments.million:
            onnx.save(classifier(64, 32), folder / "model.onnx")
            rows = np.lib.format.open_memmap(folder / "x.npy", "w+", np.float32, (1_000_000, 64))
            for start in range(0, len(rows), 10_000):
                rows[start : start + 10_000] = rng.normal(size=(10_000, 64))
            rows.flush()
            del rows
            for ending in ("csv", "jsonl", "parquet", "npz"):
                if child := os.fork():
                    _, status, usage = os.wait4(child, 0)
                    size = (folder / f"p.{ending}").stat().st_size / 2**20
                    peak = usage.ru_maxrss / 2**10
                    text = f"{peak:,.0f} MiB peak, {usage.ru_utime + usage.ru_stime:.1f} s CPU, {size:,.0f} MiB written"
                    print(f".{ending}: {text}" if status == 0 else f".{ending}: failed")
                    continue
                onward.predict(folder / "model.onnx", folder / "x.npy", **settings).save(folder / f"p.{ending}")
                os._exit(0)
            print(f"before: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10:,.0f} MiB")
            return
        compare(folder, 64, 32, arguments.rows, settings)
        compare(folder, 784, 1024, arguments.rows // 10, settings)


if __name__ == "__main__":
    main()
