"""Script that loads a Keras file with its program and saves its results. It imports nothing of Onward.

python trial_script.py PROGRAM FILE INPUTS RESULTS [BATCH]
"""

from __future__ import annotations

import importlib.util
import json
import sys
from typing import Any

import keras
import numpy as np


def make_steps(model: Any, batch: str) -> list[float]:
    """Train on a batch, operator by operator: compiling takes longer than a few steps."""
    with np.load(batch) as arrays:
        settings = json.loads(str(arrays["settings"]))
        by_name = {name: arrays[str(i)] for i, name in enumerate(settings["names"])}
    x, y = ([by_name[name] for name in settings[names]] for names in ("inputs", "targets"))
    model.run_eagerly = True
    losses = []
    for _ in range(settings["steps"]):
        model.reset_metrics()
        arguments = (arrays[0] if len(arrays) == 1 else arrays or None for arrays in (x, y))
        metrics = model.train_on_batch(*arguments, return_dict=True)
        losses.append(float(metrics["loss"]))
    return losses


def main(program: str, file: str, inputs: str, results: str, batch: str = "") -> None:
    spec = importlib.util.spec_from_file_location("written", program)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = keras.models.load_model(file)
    with np.load(inputs) as arrays:
        examples = [arrays[str(i)] for i in range(len(arrays))]
    outputs: list[np.ndarray] = []
    if examples:
        result = model(examples[0] if len(examples) == 1 else examples, training=False)
        outputs = [keras.ops.convert_to_numpy(x) for x in (result if isinstance(result, list) else [result])]
    losses = make_steps(model, batch) if batch else []
    np.savez(results, losses=losses, **{str(i): array for i, array in enumerate(outputs)})  # type: ignore[arg-type]


if __name__ == "__main__":
    main(*sys.argv[1:])
