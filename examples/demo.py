"""Train a small model, report on the run, and use the trained model.

    make demo

Trains a classifier on scikit-learn's 8x8 digits, with the `onnxruntime` wheel alone. Outputs are in
examples/out/.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper
from sklearn.datasets import load_digits

import onward

OUT = Path(__file__).parent / "out"


def main() -> None:
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    model, data, test = OUT / "digits.onnx", OUT / "digits.npz", OUT / "test.npz"
    trained, run = OUT / "digits-trained.onnx", OUT / "run"

    step("write an untrained model and data")
    onnx.save(classifier(), model)
    write_data(data, test)
    before = accuracy(model, test)
    say(f"accuracy on {shown(test)} before training: {before:.1%}")

    step(
        "train it",
        f"onward train {shown(model)} --data {shown(data)} --validation 0.1 --loss cross_entropy \\",
        f"    --optimizer adam:lr=3e-3 --epochs 15 --run {shown(run)} -o {shown(trained)}",
    )
    result = onward.train(
        model,
        data,
        validation=0.1,
        loss="cross_entropy",
        optimizer="adam:lr=3e-3",
        epochs=15,
        run=run,
    )
    result.load_best().save(trained)

    step("report on the run", f"onward report {shown(run)}")
    page = onward.report(run)
    say(f"wrote {shown(Path(page))}")

    step("run the trained model in plain ONNX Runtime")
    after = accuracy(trained, test)
    validation = max(event["accuracy"] for event in result.read_log() if event["event"] == "validation")
    say(f"accuracy on {shown(test)} after training: {after:.1%} (on validation data: {validation:.1%})")
    nodes = [[node.op_type for node in onnx.load(file).graph.node] for file in (model, trained)]
    say(f"same operators in the graph: {nodes[0] == nodes[1]}")
    if after < 0.9 or nodes[0] != nodes[1]:
        sys.exit(1)


def classifier(hidden: int = 64) -> onnx.ModelProto:
    """Return an untrained model: image [N, 64] -> fc1 -> Relu -> fc2 -> logits [N, 10]."""
    rng = np.random.default_rng(0)
    weights = {
        "fc1.weight": rng.normal(0, np.sqrt(2 / 64), (hidden, 64)),
        "fc1.bias": np.zeros(hidden),
        "fc2.weight": rng.normal(0, np.sqrt(2 / hidden), (10, hidden)),
        "fc2.bias": np.zeros(10),
    }
    graph = helper.make_graph(
        [
            helper.make_node("Gemm", ["image", "fc1.weight", "fc1.bias"], ["hidden"], name="fc1", transB=1),
            helper.make_node("Relu", ["hidden"], ["active"], name="relu"),
            helper.make_node("Gemm", ["active", "fc2.weight", "fc2.bias"], ["logits"], name="fc2", transB=1),
        ],
        "digits",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["N", 64])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 10])],
        [numpy_helper.from_array(weight.astype(np.float32), name) for name, weight in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def write_data(data: Path, test: Path) -> None:
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images, labels = (digits.data[order] / 16).astype(np.float32), digits.target[order]
    np.savez(data, image=images[300:], labels=labels[300:])
    np.savez(test, image=images[:300], labels=labels[:300])
    say(f"{shown(data)}: {len(labels) - 300:,} digits; {shown(test)}: 300 other digits")


def accuracy(model: Path, data: Path) -> float:
    samples = np.load(data)
    logits = ort.InferenceSession(model).run(["logits"], {"image": samples["image"]})[0]
    return float((logits.argmax(1) == samples["labels"]).mean())


def step(title: str, *commands: str) -> None:
    print(f"\n# {title}", flush=True)
    for command in commands:
        print(f"{'$ ' if command is commands[0] else '  '}{command}", flush=True)


def say(text: str) -> None:
    print(f"  {text}", flush=True)


def shown(path: Path) -> str:
    return path.relative_to(OUT.parent.parent).as_posix()


if __name__ == "__main__":
    main()
