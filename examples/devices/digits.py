"""What loops on devices begin with, and what becomes of what they trained.

python digits.py write      # lowered/: a training model as plain ONNX, and samples as plain numbers
python digits.py read       # digits-trained.onnx: with the weights in lowered/trained.safetensors
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort
from safetensors.numpy import load_file
from sklearn.datasets import load_digits

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from demo import classifier

import onward
from onward.lowering.contract import contract_of

TEST = 300
"""Samples that are not trained on."""


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    training = onward.prepare(classifier(32), loss="cross_entropy", optimizer="adam:lr=3e-3")
    training.save(folder / "training.onnx")
    for part in ("step", "state"):
        made = onward.lower(training, part=part)
        made.save(folder / f"{part}.onnx")
        (folder / f"{part}.json").write_text(json.dumps(contract_of(made).to_json(), indent=2))
    images, labels = samples()
    (folder / "image.bin").write_bytes(images[TEST:].tobytes())
    (folder / "labels.bin").write_bytes(labels[TEST:].tobytes())


def read(folder: Path) -> float:
    """Put the state back into the training model; how many of the samples that were left out are known."""
    model = onward.load(folder / "training.onnx")
    for name, array in load_file(folder / "trained.safetensors").items():
        model.set(name, array)
    trained = onward.transform.strip(model).save(folder / "digits-trained.onnx")
    images, labels = samples()
    logits = ort.InferenceSession(trained).run(None, {"image": images[:TEST]})[0]
    return float((logits.argmax(1) == labels[:TEST]).mean())


def samples() -> tuple[np.ndarray, np.ndarray]:
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    return (digits.data[order] / 16).astype(np.float32), digits.target[order].astype(np.int64)


if __name__ == "__main__":
    if sys.argv[1:] == ["write"]:
        write(Path("lowered"))
    elif sys.argv[1:] == ["read"]:
        print(f"accuracy {read(Path('lowered')):.1%}")
    else:
        sys.exit(__doc__)
