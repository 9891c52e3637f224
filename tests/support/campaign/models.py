"""ONNX models: those of others, training models, and models with data beside them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from models import digits_mlp, small_cnn

import onward
from campaign.kinds import Kind
from campaign.mutations import BYTES, changed_safetensors, rearranged
from campaign.mutations import KINDS as DAMAGES

PROTOBUF = (*DAMAGES.values(), *(rearranged,) * 12)


def _inference(folder: Path) -> None:
    onnx.save(small_cnn(channels=2), folder / "model.onnx")
    rng = np.random.default_rng(0)
    image = rng.random((8, *_sizes("model.onnx", folder)), np.float32)
    np.savez(folder / "data.npz", image=image, label=rng.integers(0, 10, 8))


def _sizes(name: str, folder: Path) -> list[int]:
    shape = onnx.load(folder / name).graph.input[0].type.tensor_type.shape
    return [dim.dim_value for dim in shape.dim[1:]]


def _training(folder: Path) -> None:
    onward.prepare(
        digits_mlp(hidden=4), loss="ce", optimizer="adamw:lr=1e-3", schedule="cosine:steps=9", clip="norm:1", ema=0.9
    ).save(folder / "training.onnx")


def _beside(folder: Path) -> None:
    onward.prepare(digits_mlp(hidden=4), loss="ce").save(folder / "training.onnx", data="safetensors")


OUT = ("--force", "-o", "out.onnx")
KINDS = {
    "models to train": Kind(
        _inference,
        {"*.onnx": PROTOBUF},
        (
            (
                "train",
                "model.onnx",
                "--data",
                "data.npz",
                "--loss",
                "ce",
                "--epochs",
                "1",
                "-b",
                "4",
                "--run",
                "run",
                *OUT,
            ),
        ),
    ),
    "training models": Kind(
        _training,
        {"*.onnx": PROTOBUF},
        (
            ("lower", "training.onnx", *OUT),
            ("set", "training.onnx", "group0/lr=0.5", *OUT),
            ("strip", "training.onnx", *OUT),
            ("verify", "training.onnx", "--engine", "onnxruntime", "--engine", "numpy", "--steps", "1"),
        ),
    ),
    "data beside models": Kind(
        _beside,
        {"*.onnx": PROTOBUF, "*.safetensors": (changed_safetensors, changed_safetensors, *BYTES)},
        (
            ("show", "training.onnx", "--params"),
            ("check", "training.onnx"),
            ("data", "training.onnx", "--to", "none", *OUT),
        ),
    ),
}
