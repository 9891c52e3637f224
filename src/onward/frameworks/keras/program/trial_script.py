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
    """Train on a batch, operator by operator: to compile a step takes longer than to make a few."""
    with np.load(batch) as arrays:
        settings = json.loads(str(arrays["settings"]))
        given = {name: arrays[str(i)] for i, name in enumerate(settings["names"])}
    x, y = ([given[name] for name in settings[part]] for part in ("inputs", "targets"))
    model.run_eagerly = True
    losses = []
    for _ in range(settings["steps"]):
        model.reset_metrics()
        made = model.train_on_batch(*(part[0] if len(part) == 1 else part or None for part in (x, y)), return_dict=True)
        losses.append(float(made["loss"]))
    return losses


def main(program: str, file: str, inputs: str, results: str, batch: str = "") -> None:
    spec = importlib.util.spec_from_file_location("written", program)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = keras.models.load_model(file)
    with np.load(inputs) as arrays:
        given = [arrays[str(i)] for i in range(len(arrays))]
    found: list[np.ndarray] = []
    if given:
        made = model(given[0] if len(given) == 1 else given, training=False)
        found = [keras.ops.convert_to_numpy(x) for x in (made if isinstance(made, list) else [made])]
    losses = make_steps(model, batch) if batch else []
    np.savez(results, losses=losses, **{str(i): array for i, array in enumerate(found)})  # type: ignore[arg-type]


if __name__ == "__main__":
    main(*sys.argv[1:])
