"""Whether a file of Keras with its program is the live model over again: a process of its own loads them."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import keras
import numpy as np

from onward.agreement.inputs import example_inputs
from onward.agreement.steps import epsilon_in, types_in
from onward.agreement.tolerance import Comparison, Tolerance
from onward.engines.framework_engine import array_function
from onward.errors import Error
from onward.frameworks.keras.live import TrainingModel
from onward.frameworks.keras.source import child
from onward.frameworks.program.child import try_out
from onward.frameworks.program.trial import StepTrial, step_trial
from onward.inspect import describe
from onward.transform import strip


def try_files(program: Path, file: Path, live: TrainingModel) -> None:
    """Compare what both compute of inputs that are made up, and the losses of steps."""
    inputs, expected = _example(live)
    trial = _step_trial(live)
    with tempfile.TemporaryDirectory() as folder:
        given, results = Path(folder, "given.npz"), Path(folder, "results.npz")
        np.savez(given, **{str(i): array for i, array in enumerate(inputs)})  # type: ignore[arg-type]
        environment = {"KERAS_BACKEND": keras.backend.backend()}
        batch = [] if trial is None else [trial.save(Path(folder), inputs=live.input_names, targets=_targets(live))]
        if not try_out(child.__file__, program, file, given, results, *batch, environment=environment):
            return
        with np.load(results) as arrays:
            found, losses = [arrays[str(i)] for i in range(len(arrays) - 1)], arrays["losses"]
    names = [value.name or "" for value in live.source.outputs]
    tolerance = Tolerance(epsilon=epsilon_in(types_in(live.source)), least=0.0, equal_nan=True)
    hint = "please report the model; the live model is `onward.to_keras(training)`"
    compare = Comparison("that of the live model", hint, tolerance, "`{}` of the program".format)
    compare(dict(zip(names, found, strict=bool(inputs))), dict(zip(names, expected, strict=bool(inputs))))
    if trial is not None:
        trial.compare(losses, same_random_numbers=False)


def _step_trial(live: TrainingModel) -> StepTrial | None:
    """Steps to repeat, if what they are fed is all that a model takes."""
    trial = step_trial(live.source)
    return trial if trial is not None and {*live.input_names, *_targets(live)} <= trial.batch.keys() else None


def _targets(live: TrainingModel) -> list[str]:
    """Return the targets in the order in which Keras takes them: losses of its own are in that of outputs."""
    terms = list(describe(live.source).steps[0].loss.terms)
    if live.losses_given:
        outputs = [value.name for value in live.source.outputs]
        terms.sort(key=lambda term: outputs.index(term.output))
    return [name for term in terms for name in term.inputs]


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
