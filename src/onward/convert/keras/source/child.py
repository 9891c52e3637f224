"""Loads a file of Keras with its program, and writes what it computes: `python child.py PROGRAM FILE INPUTS RESULTS`.

A process of its own runs this, with nothing of Onward in it.
"""

from __future__ import annotations

import importlib.util
import sys

import keras
import numpy as np


def main(program: str, file: str, inputs: str, results: str) -> None:
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
    np.savez(results, **{str(i): array for i, array in enumerate(found)})  # type: ignore[arg-type]


if __name__ == "__main__":
    main(*sys.argv[1:])
