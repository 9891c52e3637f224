"""Whether a file of Keras with its program is the live model over again: a process of its own loads them."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import keras
import numpy as np

from onward.agreement.data import example_inputs
from onward.agreement.steps import epsilon_in, types_in
from onward.agreement.tolerance import Comparison, Tolerance
from onward.convert.keras.live import TrainingModel
from onward.convert.keras.source import child
from onward.convert.program.child import try_out
from onward.engines.framework_engine import array_function
from onward.errors import Error
from onward.transform import strip


def try_files(program: Path, file: Path, live: TrainingModel) -> None:
    """Compare what both compute of inputs that are made up."""
    inputs, expected = _example(live)
    with tempfile.TemporaryDirectory() as folder:
        given, results = Path(folder, "given.npz"), Path(folder, "results.npz")
        np.savez(given, **{str(i): array for i, array in enumerate(inputs)})  # type: ignore[arg-type]
        environment = {"KERAS_BACKEND": keras.backend.backend()}
        if not try_out(child.__file__, program, file, given, results, environment=environment):
            return
        with np.load(results) as arrays:
            found = [arrays[str(i)] for i in range(len(arrays))]
    names = [value.name or "" for value in live.source.outputs]
    tolerance = Tolerance(epsilon=epsilon_in(types_in(live.source)), least=0.0, equal_nan=True)
    hint = "please report the model; the live model is `onward.to_keras(training)`"
    compare = Comparison("that of the live model", hint, tolerance, "`{}` of the program".format)
    compare(dict(zip(names, found, strict=bool(inputs))), dict(zip(names, expected, strict=bool(inputs))))


def _example(live: TrainingModel) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Inputs with which the live model runs, and its outputs; none if it takes none that are made up."""
    model = strip(live.source)
    runs = array_function("numpy", model.copy())
    for arrays in example_inputs(model):
        inputs = [arrays[name] for name in live.input_names]
        with contextlib.suppress(Error):
            runs(dict(zip(live.input_names, inputs, strict=True)))
            made = live(inputs, training=False)
            return inputs, [keras.ops.convert_to_numpy(x) for x in (made if isinstance(made, list) else [made])]
    return [], []
