"""Pages for tests: data, a runtime that need not run, and what `onward train` does with the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from models import digits_mlp, small_cnn, small_transformer
from sklearn.datasets import load_digits

import onward

FILES = (
    "ort.wasm.bundle.min.mjs",
    "ort-wasm-simd-threaded.wasm",
    "ort.bundle.min.mjs",
    "ort-wasm-simd-threaded.jsep.wasm",
)


def digits(shape: tuple[int, ...] = (64,)) -> dict[str, np.ndarray]:
    """Handwritten digits, as fractions of 16."""
    found = load_digits()
    images = (found.data / 16).astype(np.float32).reshape(-1, *shape)
    return {"image": images, "labels": found.target.astype(np.int64)}


def placeholder_runtime(folder: Path) -> Path:
    """What a page is written with where nobody opens it."""
    folder.mkdir()
    for name in FILES:
        (folder / name).write_bytes(b"nothing")
    return folder


def fixed(model: onnx.ModelProto, size: int) -> onnx.ModelProto:
    """The same for batches of one size."""
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = size
    return model


CASES: dict[str, dict[str, Any]] = {
    "mlp": {
        "model": digits_mlp(),
        "data": digits(),
        "loss": "cross_entropy",
        "optimizer": "adam:lr=3e-3",
        "validation": 0.1,
        "batch_size": 64,
    },
    "cnn": {
        "model": small_cnn(4),
        "data": {name: array[:320] for name, array in digits((1, 8, 8)).items()},
        "loss": "cross_entropy",
        "optimizer": "sgd:lr=0.05,momentum=0.9",
        "schedule": "cosine:steps=200,warmup=5",
        "ema": 0.9,
        "clip": 1.0,
        "validation": 0.2,
        "batch_size": 24,
        "seed": 7,
        "last": "pad",
    },
    "fixed": {
        "model": fixed(digits_mlp(), 24),
        "data": {name: array[:500] for name, array in digits().items()},
        "loss": "cross_entropy",
        "optimizer": "lion:lr=1e-3",
        "validation": 0.1,
    },
    "bytes": {
        "model": small_cnn(4),
        "data": {"image": (digits((8, 8))["image"] * 255).astype(np.uint8)[:480], "labels": digits()["labels"][:480]},
        "loss": "cross_entropy",
        "optimizer": "sgd:lr=0.05,momentum=0.9",
        "preprocess": "scale channels_first",
        "augment": "flip crop:padding=1",
        "validation": 0.1,
    },
    "tokens": {
        "model": small_transformer(1),
        "data": {name: np.random.default_rng(0).integers(0, 32, (200, 6)) for name in ("tokens", "labels")},
        "loss": "value:loss",
        "optimizer": "adam:lr=1e-3",
        "accumulate": 2,
        "validation": 0.25,
    },
    "layers": {  # a state with samples on axis 1, and an input that is the same for all samples
        "model": onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 13]>
            g (float[N, 3] x, float[2, N, 3] state, int64 rate) => (float[N, 2] y, float[2, N, 3] stateN)
            <float[3, 2] w = {0.1, 0.2, 0.3, 0.4, 0.5, 0.7}, int64[1] axis = {0}> {
                stateN = Tanh(state)
                sum = ReduceSum<keepdims = 0>(stateN, axis)
                factor = Cast<to = 1>(rate)
                scaled = Mul(sum, factor)
                both = Add(x, scaled)
                y = MatMul(both, w)
            }"""),
        "data": {
            name: np.random.default_rng(4).normal(size=(200, *shape)).astype(np.float32)
            for name, shape in {"x": (3,), "state": (2, 3), "target": (2,)}.items()
        },
        "loss": "y=mse",
        "optimizer": "sgd:lr=0.01",
        "batch_axis": {"state": 1},
        "constants": {"rate": 3},
        "validation": 0.25,
    },
}
"""What pages train."""


def trained(case: dict[str, Any], epochs: int, folder: Path) -> onward.Run:
    """What `onward train` makes of the same."""
    return onward.train(**case, epochs=epochs, run=folder, quiet=True)


def losses_of(run: onward.Run) -> list[float]:
    return [event["loss"] for event in run.read_log() if event["event"] == "step"]


def validations_of(run: onward.Run) -> list[tuple[float, float]]:
    return [(event["loss"], event.get("accuracy", 0)) for event in run.read_log() if event["event"] == "validation"]
