"""Script that makes steps of a written program, or applies its model. It imports nothing of Onward.

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
    program = Path(folder, "model.py")
    program = program if program.exists() else Path(folder, "run.py")
    spec = importlib.util.spec_from_file_location("written", program)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with np.load(batch) as arrays:
        settings = json.loads(str(arrays["settings"]))
        batch_arrays = {name: arrays[str(i)] for i, name in enumerate(settings["names"])}
    if program.name == "model.py":
        outputs = jax.jit(module.apply)(module.load(), batch_arrays)
        arrays = {str(i): np.asarray(x) for i, x in enumerate(outputs.values())}
        return np.savez(results, settings=np.array(json.dumps({"names": list(outputs)})), **arrays)
    step, state, losses = jax.jit(module.step), module.load(), []
    for _ in range(settings["steps"]):
        state, metrics = step(state, batch_arrays)
        losses.append(float(metrics["loss"]))
    np.savez(results, losses=losses)


if __name__ == "__main__":
    main(*sys.argv[1:])
