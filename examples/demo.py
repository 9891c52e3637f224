"""The main job on a small model: make it trainable, look at it, and see that nothing was lost.

    make demo

A classifier of 8x8 digits becomes a training model: one file that holds the network, its loss, its optimizer and all
their state, and that plain ONNX Runtime still runs. Everything it writes is in examples/out/.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console

import onward
from onward.inspect import render

OUT = Path(__file__).parent / "out"


def main() -> None:
    OUT.mkdir(exist_ok=True)
    plain, training = OUT / "digits.onnx", OUT / "training.onnx"

    step("a network as an exporter writes it, without any training", f"onnx.save(..., {shown(plain)!r})")
    onnx.save(classifier(), plain)

    step(
        "what is added to train it: a loss, an optimizer, a schedule",
        f"onward prepare {shown(plain)} --loss cross_entropy --optimizer adamw:lr=1e-3,weight_decay=0.01 \\",
        "    --schedule cosine:steps=1000,warmup=50 --group '*.bias:weight_decay=0' --clip-norm 1 \\",
        f"    --data safetensors -o {shown(training)}",
    )
    model = onward.prepare(
        plain,
        loss="cross_entropy",
        optimizer="adamw:lr=1e-3,weight_decay=0.01",
        schedule="cosine:steps=1000,warmup=50",
        groups=["*.bias:weight_decay=0"],
        clip="norm:1",
    )
    model.save(training, data="safetensors")
    for file in sorted(OUT.glob("training*")):
        say(f"{shown(file)}: {file.stat().st_size:,} bytes")

    step("is it as the standard wants it?", f"onward check {shown(training)}")
    findings = onward.check(training)
    for finding in findings:
        say(str(finding))
    if any(finding.severity == "error" for finding in findings):
        sys.exit(1)
    say(f"{len(findings)} findings")

    step("what is in it?", f"onward show {shown(training)}")
    render(onward.describe(training), Console())

    step("does it still compute the same? Plain ONNX Runtime runs both files")
    images = np.random.default_rng(1).random((5, 64), np.float32)
    before, after = (run(file, images) for file in (plain, training))
    say(f"largest difference over {before.size} numbers: {np.abs(before - after).max():g}")
    if not np.array_equal(before, after):
        sys.exit(1)

    step("a setting is a number in the file", f"onward set {shown(training)} group0/lr=3e-4")
    model = onward.read(training)
    model.set("group0/lr", 3e-4)
    model.save(training)
    say(f"group0/lr is now {onward.read(training).initializer('group0/lr').const_value.numpy():g}")


def classifier(hidden: int = 32) -> onnx.ModelProto:
    """image [N, 64] -> fc1 -> Relu -> fc2 -> logits [N, 10]"""
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


def run(file: Path, images: np.ndarray) -> np.ndarray:
    return ort.InferenceSession(file).run(["logits"], {"image": images})[0]


def step(title: str, *commands: str) -> None:
    print(f"\n# {title}")
    for command in commands:
        print(f"{'$ ' if command is commands[0] else '  '}{command}")


def say(text: str) -> None:
    print(f"  {text}")


def shown(path: Path) -> str:
    return path.relative_to(OUT.parent.parent).as_posix()


if __name__ == "__main__":
    main()
