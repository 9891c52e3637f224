"""Cross-validation: one run per fold, validated on the fold that it was not trained on."""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onward.engines.distributed import join_group
from onward.errors import DataError, UnsupportedError
from onward.model import load
from onward.model.storage import write_file
from onward.options import Data, TrainConfig, with_options
from onward.recipe.prepare import Recipe
from onward.training.api import CrossValidationArguments, new_folder, resume, train
from onward.training.callbacks import Callback
from onward.training.config import Config, read_settings, refuse_placeholders, settings_from, write_settings
from onward.training.run import CONFIG, TRAINING, Run

_FOLDS = 5
_DONE = ("finished", "early_stopping", "not_finite", "stopped")
"""Reasons for the end of a run that is not resumed."""


class CrossValidation:
    """Runs on folds of the same data, on disk: the return value of `cross_validate`.

        validation = onward.CrossValidation("runs/digits")
        validation.mean["accuracy"], validation.deviation["accuracy"]

    - `path`: its folder, with a subfolder per fold
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)

    @property
    def is_there(self) -> bool:
        """True if the folder is that of a cross-validation."""
        config = self.path / CONFIG
        return config.is_file() and not (self.path / TRAINING).exists() and "folds" in read_settings(config)

    @property
    def folds(self) -> int:
        """Return the number of folds."""
        if not self.is_there:
            raise DataError(f"`{self.path}` holds no cross-validation", hint="`onward train --folds 5` makes one")
        return int(read_settings(self.path / CONFIG)["folds"])

    @property
    def runs(self) -> list[Run]:
        """Return the runs that were started, in the order of folds."""
        folders = [self.place(fold) for fold in range(1, self.folds + 1)]
        return [Run(folder) for folder in folders if (folder / TRAINING).exists()]

    @property
    def is_finished(self) -> bool:
        """True if the runs of all folds have ended."""
        return len(self.runs) == self.folds and all(map(_is_done, self.runs))

    @property
    def results(self) -> list[dict[str, float]]:
        """Return the results of each finished run on its fold, after its last epoch."""
        return [run.read_results() for run in self.runs if _is_done(run)]

    @property
    def mean(self) -> dict[str, float]:
        """Return the mean over folds of the loss and each metric."""
        return {name: statistics.fmean(values) for name, values in self._columns().items()}

    @property
    def deviation(self) -> dict[str, float]:
        """Return the sample standard deviation over folds; nothing for one fold."""
        return {name: statistics.stdev(values) for name, values in self._columns().items() if len(values) > 1}

    def rows(self) -> list[list[str]]:
        """Return a table for people."""
        names = list(self._columns())
        rows = [["fold", *names]]
        rows += [[str(i), *(f"{result[name]:.4g}" for name in names)] for i, result in enumerate(self.results, start=1)]
        for title, values in (("mean", self.mean), ("deviation", self.deviation)):
            rows += [[title, *(f"{values[name]:.4g}" for name in names)]] if values else []
        return rows

    def to_json(self) -> dict[str, Any]:
        """Return the results for programs."""
        runs = [run for run in self.runs if _is_done(run)]
        folds = [{"run": str(run.path), **run.read_results()} for run in runs]
        return {"run": str(self.path), "folds": folds, "mean": self.mean, "deviation": self.deviation}

    def go_on(
        self, data: Data = None, *, data_changed: bool = False, callbacks: Sequence[Callback] = (), quiet: bool = False
    ) -> CrossValidation:
        """Train the folds that are missing, and resume interrupted runs.

        - `data`: the data, if they were Python objects
        - `data_changed`: as for `onward.resume`
        - `callbacks`, `quiet`: as for `onward.train`
        """
        return self._train_missing({} if data is None else {"data": data}, data_changed, callbacks, quiet)

    def _train_missing(
        self, changes: dict[str, Any], data_changed: bool, callbacks: Sequence[Callback], quiet: bool
    ) -> CrossValidation:
        for fold in range(1, self.folds + 1):
            run = Run(self.place(fold))
            if not (run.path / TRAINING).exists():
                settings = {**read_settings(self.path / CONFIG), **changes}
                refuse_placeholders(settings)
                run = train(**settings, fold=fold, run=run.path, callbacks=callbacks, quiet=quiet)
            elif not _is_done(run):
                run = resume(run, changes.get("data"), data_changed=data_changed, callbacks=callbacks, quiet=quiet)
            if not _is_done(run):
                break
        return self

    def place(self, fold: int) -> Path:
        """Return the folder of a fold, counted from 1."""
        return self.path / f"fold-{fold}"

    def _columns(self) -> dict[str, list[float]]:
        results = self.results
        return {name: [result[name] for result in results] for name in (results[0] if results else ())}

    def __repr__(self) -> str:
        return f"<onward.CrossValidation {self.path}>"


def _is_done(run: Run) -> bool:
    last = run.read_log()[-1]
    return last.get("event") == "end" and last.get("reason") in _DONE


@with_options(CrossValidationArguments)
def cross_validate(
    recipe: Recipe | None = None,
    config: str | os.PathLike[str] | TrainConfig | None = None,
    callbacks: Sequence[Callback] = (),
    quiet: bool = False,
    **arguments: Any,
) -> CrossValidation:
    """Train once per fold, validated on that fold. Return the runs and their mean results.

        validation = onward.cross_validate("digits.onnx", "digits.npz", loss="cross_entropy", epochs=10, folds=5)
        validation.mean["accuracy"], validation.deviation["accuracy"]

    Folds depend on `seed` only; labels that are classes are stratified. Each fold is a run in a
    subfolder of `run`. Ctrl-C finishes a step, saves and returns; `validation.go_on()` trains the
    rest.

    - `model`, `recipe`, `config`, `callbacks`, `quiet`: as for `onward.train`
    """
    options = settings_from("cross_validate", arguments, recipe, config)
    options.setdefault("folds", _FOLDS)
    run = options.pop("run", None)
    if options.get("fold") is not None:
        raise DataError("`cross_validate` trains all folds", hint="one fold: `onward.train(..., folds=5, fold=1)`")
    requested = Config.from_arguments("cross_validate", options)
    if join_group(requested.device, requested.engine).size > 1:
        raise UnsupportedError(
            "cross-validation runs in one process", hint="train every fold separately: `--folds 5 --fold 1`"
        )
    validation = CrossValidation(run if run is not None else new_folder(load(requested.model)).path)
    if validation.path.is_dir() and any(validation.path.iterdir()):
        raise DataError(
            f"`{validation.path}` is not empty",
            hint=f"resume it (`onward train --resume {validation.path}`), or name another folder",
        )
    validation.path.mkdir(parents=True, exist_ok=True)
    settings = {name: value for name, value in requested.to_json().items() if name in options}
    write_file(validation.path / CONFIG, write_settings(settings))
    try:
        return validation._train_missing(options, False, callbacks, quiet)
    except BaseException:
        if not validation.runs:  # nothing to resume
            (validation.path / CONFIG).unlink()
            with contextlib.suppress(OSError):
                validation.path.rmdir()
        raise
