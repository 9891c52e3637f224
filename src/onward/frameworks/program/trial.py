"""Trial of a written program: its steps, in a separate process, compared with the training model."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.agreement.steps import LOSS, epsilon_in, steps_with_other_last_digits, types_in
from onward.agreement.tolerance import Sides, Tolerance
from onward.agreement.verification import batches_made_up
from onward.engines import start
from onward.errors import Error, MismatchError
from onward.frameworks.program.audit import program_error
from onward.model import Model
from onward.model.state import states

_SECONDS = 600.0


def can_try() -> bool:
    """True if there is a Python interpreter to run programs with, not a frozen application."""
    return bool(sys.executable) and not getattr(sys, "frozen", False)


def try_out(script: str, *files: Path, environment: Mapping[str, str] | None = None) -> bool:
    """Run one of our scripts on these files. Return False without an interpreter."""
    if not can_try():
        return False
    # -P: the folder of the script must not become a source of modules. -B: nothing is written beside the program.
    command = [sys.executable, "-P", "-B", script, *map(str, files)]
    try:
        process = subprocess.run(
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
        raise program_error(f"does not end within {_SECONDS:.0f} s") from error
    if process.returncode:
        last_line = (process.stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        raise program_error(f"does not run: {last_line}")
    return True


def save_by_position(path: Path, arrays: Mapping[str, np.ndarray], **settings: Any) -> Path:
    """Write arrays by position, with the names in that order and other settings."""
    text = json.dumps({"names": list(arrays), **settings})
    np.savez(path, settings=np.array(text), **{str(i): x for i, x in enumerate(arrays.values())})  # type: ignore[arg-type]
    return path


def outputs_of_program(script: str, program: Path, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the outputs of a written program, or nothing without an interpreter."""
    with tempfile.TemporaryDirectory() as directory:
        batch, results = save_by_position(Path(directory, "batch.npz"), inputs), Path(directory, "results.npz")
        if not try_out(script, program, batch, results):
            return {}
        with np.load(results) as arrays:
            names = json.loads(str(arrays["settings"]))["names"]
            return {name: arrays[str(i)] for i, name in enumerate(names)}


# ---- trial -----------------------------------------------------------------------------------------------------------

_STEPS = 3
"""A forward pass, an update visible in the second loss, and one that uses optimizer state."""
_LAST_DIGITS = 10
"""Allowed difference of losses, relative to that of weights that differ by 1e-6."""


@dataclasses.dataclass(frozen=True)
class StepTrial:
    """Steps of a training model on a generated batch, for a program to repeat."""

    model: Model
    index: int
    """Index of the step."""
    options: Mapping[str, Any]
    """Options of the engine."""
    batch: dict[str, np.ndarray]
    losses: list[float]

    def save(self, folder: Path, **settings: Any) -> Path:
        """Write the batch by position, with the names in that order and other settings."""
        return save_by_position(folder / "batch.npz", self.batch, steps=len(self.losses), **settings)

    def run(self, script: str, folder: Path) -> None:
        """Let a script repeat the steps with the program in a folder, and compare the losses."""
        with tempfile.TemporaryDirectory() as directory:
            batch, results = self.save(Path(directory)), Path(directory, "results.npz")
            if try_out(script, folder, batch, results):
                with np.load(results) as arrays:
                    self.compare(arrays["losses"], same_random_numbers=True)

    def compare(self, losses: Sequence[float], *, same_random_numbers: bool) -> None:
        """Raise an error if the losses of a program differ by more than rounding errors."""
        draws = any(state.role == "rng" for state in states(self.model, self.index))
        if draws and not same_random_numbers:
            return
        hint = "report the model; run the training model itself: `onward.engines.start(model, engine=...)`"
        compare = Sides(
            "that of the training model", hint, Tolerance(epsilon=epsilon_in(types_in(self.model))), "{}".format
        )
        for i, (ours, theirs) in enumerate(zip(losses, self.losses, strict=True)):
            try:
                compare({LOSS: np.asarray(ours)}, {LOSS: np.asarray(theirs)}, when=f"in step {i + 1} of the program ")
            except MismatchError:
                options = {"step": self.index, **self.options}
                others = steps_with_other_last_digits(self.model, options, [self.batch] * (i + 1))
                if not i or abs(ours - theirs) > _LAST_DIGITS * max(abs(float(x[LOSS]) - theirs) for x in others):
                    raise


def step_trial(model: Model, index: int = 0) -> StepTrial | None:
    """Return the first steps of a training model, or None if it cannot be run on generated inputs."""
    if not can_try():
        return None
    has_bfloat16 = ir.DataType.BFLOAT16 in types_in(model)  # few kernels of ONNX Runtime take it
    options: dict[str, Any] = {"engine": "numpy"} if has_bfloat16 else {"threads": 1}
    try:
        with start(model, index, **options) as engine:
            (arrays,) = batches_made_up(model, index, engine, {}, 1, 0)
            batch = {name: np.asarray(arrays[name]) for name in engine.inputs}
            losses = [float(engine.step(batch)[engine.loss]) for _ in range(_STEPS)]
    except Error:
        return None
    if not np.isfinite(losses).all() or any(array.dtype.kind not in "biuf" for array in batch.values()):
        return None
    return StepTrial(model, index, options, batch, losses)
