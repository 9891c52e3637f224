"""Makes the checkpoints in `ort` with onnxruntime-training 1.19, which needs an environment of its own.

`python make_ort.py` trains five steps, saves, and goes on for five more: the losses of those are in `losses.json`.
`python make_ort.py resume FOLDER...` prints the losses of five steps from each folder, as JSON.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnxruntime.training import artifacts, onnxblock
from onnxruntime.training.api import CheckpointState, Module, Optimizer

HERE = Path(__file__).parent / "ort"
GRAPHS = ("training_model.onnx", "eval_model.onnx", "optimizer_model.onnx")
STEPS = 5
RATE = 0.05


def perceptron(name: str) -> onnx.ModelProto:
    """Two layers and what lies between them; `scale` is there to be frozen.

    `normed` has what becomes an operator of its own in training, with a Dropout that drops nothing.
    """
    rng = np.random.default_rng(0)
    tensors = {
        "first.weight": rng.normal(size=(4, 5)), "first.bias": rng.normal(size=5), "scale": rng.uniform(1, 2, 5),
        "second.weight": rng.normal(size=(5, 3)), "second.bias": np.zeros(3),
    }  # fmt: skip
    node = onnx.helper.make_node
    nodes = [
        node("Gemm", ["x", "first.weight", "first.bias"], ["a"]),
        node("Relu", ["a"], ["b"]),
        node("Mul", ["b", "scale"], ["c"]),
        node("Gemm", ["c", "second.weight", "second.bias"], ["y"]),
    ]
    if name == "normed":
        tensors |= {"mean": np.zeros(5), "variance": np.ones(5), "ratio": np.zeros(())}
        nodes[1:3] = [
            node(
                "BatchNormalization", ["a", "scale", "first.bias", "mean", "variance"], ["n", "m", "v"], training_mode=1
            ),
            node("Dropout", ["n", "ratio", "training"], ["b", "mask"]),
            node("Concat", ["b"], ["c"], axis=1),
        ]
    arrays = {key: value.astype(np.float32) for key, value in tensors.items()}
    if name == "normed":
        arrays["training"] = np.array(True)
    graph = onnx.helper.make_graph(
        nodes,
        "perceptron",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["batch", 4])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["batch", 3])],
        [onnx.numpy_helper.from_array(array, key) for key, array in arrays.items()],
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)


def batch(name: str, step: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(step)
    x = rng.normal(scale=0.2 if name == "binary" else 1, size=(6, 4)).astype(np.float32)
    if name in ("entropy", "normed"):
        return x, rng.integers(0, 3, 6)
    return x, rng.uniform(size=(6, 3)).astype(np.float32)


def settings(name: str) -> dict[str, Any]:
    optim, loss = onnxblock.optim, onnxblock.loss
    return {
        "entropy": {
            "loss": loss.CrossEntropyLoss(ignore_index=2),
            "optimizer": optim.AdamW(weight_decay=0.1, eps=1e-3, clip_grad=optim.ClipGradNorm(0.5)),
        },
        "normed": {"loss": artifacts.LossType.CrossEntropyLoss, "optimizer": artifacts.OptimType.AdamW},
        "squares": {"loss": artifacts.LossType.MSELoss, "optimizer": artifacts.OptimType.SGD},
        "binary": {"loss": artifacts.LossType.BCEWithLogitsLoss, "optimizer": artifacts.OptimType.AdamW},
        "absolute": {"loss": onnxblock.loss.L1Loss(reduction="sum"), "optimizer": artifacts.OptimType.AdamW},
    }[name]


def train(folder: Path, first: int, last: int, save: int | None = None) -> list[float]:
    """Losses of steps from a folder; a checkpoint is saved there before the step `save`."""
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / GRAPHS[0], state)
    optimizer = Optimizer(folder / GRAPHS[2], module)
    optimizer.set_learning_rate(RATE)
    losses = []
    for step in range(first, last):
        if step == save:
            state.properties["epoch"], state.properties["best"], state.properties["note"] = 3, 0.25, "of a phone"
            CheckpointState.save_checkpoint(state, folder / "checkpoint", include_optimizer_state=True)
        losses.append(float(module(*batch(folder.name, step))))
        optimizer.step()
        module.lazy_reset_grad()
    return losses


def make(name: str) -> list[float]:
    """Artifacts with a checkpoint after five steps; the losses of five more."""
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    frozen = ["mean", "variance"] if name == "normed" else ["scale"]
    model = perceptron(name)
    trained = [each.name for each in model.graph.initializer if each.name not in (*frozen, "ratio", "training")]
    artifacts.generate_artifacts(
        model, requires_grad=trained, frozen_params=frozen, artifact_directory=folder, **settings(name)
    )
    return train(folder, 0, 2 * STEPS, save=STEPS)[STEPS:]


if __name__ == "__main__":
    if sys.argv[1:2] == ["resume"]:
        print(json.dumps([train(Path(folder), STEPS, 2 * STEPS) for folder in sys.argv[2:]]))
    else:
        HERE.mkdir(exist_ok=True)
        losses = {name: make(name) for name in ("entropy", "squares", "binary", "absolute", "normed")}
        (HERE / "losses.json").write_text(json.dumps(losses, indent=1) + "\n")
