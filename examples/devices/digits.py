"""Write the files that loops on devices train with, and read the trained state.

python digits.py write      # writes lowered/: a training model as plain ONNX, samples as raw numbers
python digits.py read       # writes digits-trained.onnx, with the weights in lowered/trained.safetensors
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
"""Number of test samples."""


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    training = onward.prepare(classifier(32), loss="cross_entropy", optimizer="adam:lr=3e-3")
    training.save(folder / "training.onnx")
    for name in ("step", "state"):
        lowered = onward.lower(training, part=name)
        lowered.save(folder / f"{name}.onnx")
        (folder / f"{name}.json").write_text(json.dumps(contract_of(lowered).to_json(), indent=2))
    images, labels = samples()
    (folder / "image.bin").write_bytes(images[TEST:].tobytes())
    (folder / "labels.bin").write_bytes(labels[TEST:].tobytes())


def read(folder: Path) -> float:
    """Put the trained state into the training model, and return the accuracy on test samples."""
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
