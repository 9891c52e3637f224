"""Whether a file of Keras with its program is the live model over again: a process of its own loads them."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from pathlib import Path

import keras
import numpy as np

from onward.convert.keras.live import TrainingModel
from onward.convert.keras.source import child
from onward.convert.program.child import try_out
from onward.engines.framework_engine import array_function
from onward.errors import Error, MismatchError
from onward.gradcheck.inputs import made_up
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
    for value, ours, theirs in zip(live.source.outputs, found, expected, strict=bool(inputs)):
        if not np.allclose(ours, theirs, 1e-3, 1e-4 * float(np.abs(theirs).max(initial=0)), equal_nan=True):
            raise MismatchError(
                f"`{value.name}` of the program is not that of the live model",
                hint="please report the model; the live model is `onward.to_keras(training)`",
            )


def _example(live: TrainingModel) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Inputs with which the live model runs, and its outputs; none if it takes none that are made up."""
    model = strip(live.source)
    runs = array_function("numpy", model.copy())
    types = {value.name or "": value.dtype.numpy() for value in model.inputs if value.dtype is not None}
    for arrays in itertools.islice(made_up(model, {}, seed=0), 4):
        inputs = [arrays[name].astype(types[name]) for name in live.input_names]
        with contextlib.suppress(Error):
            runs(dict(zip(live.input_names, inputs, strict=True)))
            made = live(inputs, training=False)
            return inputs, [keras.ops.convert_to_numpy(x) for x in (made if isinstance(made, list) else [made])]
    return [], []
