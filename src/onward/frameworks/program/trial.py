"""Steps of a program that was written, in a process of its own, compared with those of the training model."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.agreement.steps import LOSS, epsilon_in, steps_with_other_last_digits, types_in
from onward.agreement.tolerance import Comparison, Tolerance
from onward.agreement.verification import batches_made_up
from onward.engines import start
from onward.errors import Error, MismatchError, UnsupportedError
from onward.model import Model
from onward.model.state import states

_SECONDS = 600.0


def can_try() -> bool:
    """True if there is an interpreter to run programs with: an embedded one, or an application of its own, is not."""
    return bool(sys.executable) and not getattr(sys, "frozen", False)


def try_out(script: str, *files: Path, environment: Mapping[str, str] | None = None) -> bool:
    """Run a file of ours with the names of others; whether there was a way to. It needs the framework only."""
    if not can_try():
        return False
    # -P: the folder of the script must not become a source of modules. -B: nothing is written beside the program.
    command = [sys.executable, "-P", "-B", script, *map(str, files)]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise _refusal(f"it did not end within {_SECONDS:.0f} s") from error
    if done.returncode:
        raise _refusal((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    return True


def _refusal(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"the program that was made of the model does not run: {what}",
        hint="please report the model; its live form needs no program: `onward.to_torch`, `onward.to_keras`",
    )


# ---- trial -----------------------------------------------------------------------------------------------------------

_STEPS = 3
"""A forward pass, an update that shows in the second loss, and one with what the optimizer remembers."""
_LAST_DIGITS = 10
"""How many times as far apart losses may be as they are with weights that differ by 1e-6."""


@dataclasses.dataclass(frozen=True)
class StepTrial:
    """Steps of a training model on a batch that is made up, for a program to repeat."""

    model: Model
    index: int
    """Of the step."""
    options: Mapping[str, Any]
    """Of the engine."""
    batch: dict[str, np.ndarray]
    losses: list[float]

    @property
    def draws(self) -> bool:
        """True if training draws random numbers."""
        return any(state.role == "rng" for state in states(self.model, self.index))

    def save(self, folder: Path, **settings: Any) -> Path:
        """Write what a child reads: the batch by its place, and the names in that order with other settings."""
        path = folder / "batch.npz"
        arrays = {str(i): array for i, array in enumerate(self.batch.values())}
        text = json.dumps({"names": list(self.batch), "steps": len(self.losses), **settings})
        np.savez(path, settings=np.array(text), **arrays)  # type: ignore[arg-type]
        return path

    def compare(self, found: Sequence[float], *, same_random_numbers: bool) -> None:
        """Raise an error if the losses of a program are others, by more than rounding errors that have grown."""
        if self.draws and not same_random_numbers:
            return
        hint = "please report the model; the training model itself is right: `onward.engines.start(model, engine=...)`"
        compare = Comparison(
            "that of the training model", hint, Tolerance(epsilon=epsilon_in(types_in(self.model))), "{}".format
        )
        for i, (ours, theirs) in enumerate(zip(found, self.losses, strict=True)):
            try:
                compare({LOSS: np.asarray(ours)}, {LOSS: np.asarray(theirs)}, when=f"in step {i + 1} of the program ")
            except MismatchError:
                options = {"step": self.index, **self.options}
                others = steps_with_other_last_digits(self.model, options, [self.batch] * (i + 1))
                if not i or abs(ours - theirs) > _LAST_DIGITS * max(abs(float(x[LOSS]) - theirs) for x in others):
                    raise


def step_trial(model: Model, index: int = 0) -> StepTrial | None:
    """Make the first steps of a training model; None if it runs on nothing that is made up, or nothing can be tried."""
    if not can_try():
        return None
    options: dict[str, Any] = {"threads": 1}
    if ir.DataType.BFLOAT16 in types_in(model):  # of which ONNX Runtime has few kernels
        options = {"engine": "numpy"}
    try:
        with start(model, index, **options) as engine:
            (made,) = batches_made_up(model, index, engine, {}, 1, 0)
            batch = {name: np.asarray(made[name]) for name in engine.inputs}
            losses = [float(engine.step(batch)[engine.loss]) for _ in range(_STEPS)]
    except Error:
        return None
    if not np.isfinite(losses).all() or any(array.dtype.kind not in "biuf" for array in batch.values()):
        return None
    return StepTrial(model, index, options, batch, losses)
