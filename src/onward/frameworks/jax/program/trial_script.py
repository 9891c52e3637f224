"""Script that makes steps of a written program. It imports nothing of Onward.

python trial_script.py FOLDER BATCH RESULTS
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import jax
import numpy as np


def main(folder: str, batch: str, results: str) -> None:
    spec = importlib.util.spec_from_file_location("written", Path(folder, "run.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with np.load(batch) as arrays:
        settings = json.loads(str(arrays["settings"]))
        batch_arrays = {name: arrays[str(i)] for i, name in enumerate(settings["names"])}
    step, state, losses = jax.jit(module.step), module.load(), []
    for _ in range(settings["steps"]):
        state, metrics = step(state, batch_arrays)
        losses.append(float(metrics["loss"]))
    np.savez(results, losses=losses)


if __name__ == "__main__":
    main(*sys.argv[1:])
