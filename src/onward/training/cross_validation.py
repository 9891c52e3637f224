"""Cross-validation: as many runs as there are folds, each validated with the fold that it has not seen."""

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
from onward.recipe import Recipe
from onward.training.api import CrossValidationArguments, new_folder, resume, train
from onward.training.callbacks import Callback
from onward.training.config import Config, read_settings, refuse_placeholders, settings_from, write_settings
from onward.training.run import CONFIG, TRAINING, Run

_USUAL = 5
_DONE = ("finished", "early_stopping", "not_finite", "stopped")
"""Why a run ends that is not gone on with."""


class CrossValidation:
    """Runs on folds of the same data, on disk: what `cross_validate` returns.

        found = onward.CrossValidation("runs/digits")
        found.mean["accuracy"], found.deviation["accuracy"]

    - `path`: its folder, in which each fold has a folder of its own
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)

    @property
    def is_there(self) -> bool:
        """Whether the folder is that of a cross-validation."""
        config = self.path / CONFIG
        return config.is_file() and not (self.path / TRAINING).exists() and "folds" in read_settings(config)

    @property
    def folds(self) -> int:
        """How many there are."""
        if not self.is_there:
            raise DataError(f"`{self.path}` holds no cross-validation", hint="`onward train --folds 5` makes one")
        return int(read_settings(self.path / CONFIG)["folds"])

    @property
    def runs(self) -> list[Run]:
        """The runs that were begun, in the order of folds."""
        places = [self.place(fold) for fold in range(1, self.folds + 1)]
        return [Run(place) for place in places if (place / TRAINING).exists()]

    @property
    def is_finished(self) -> bool:
        """Whether each fold has a run that has ended."""
        return len(self.runs) == self.folds and all(map(_is_done, self.runs))

    @property
    def results(self) -> list[dict[str, float]]:
        """What each run that has ended gives on its fold, as its last epoch left it."""
        return [run.read_results() for run in self.runs if _is_done(run)]

    @property
    def mean(self) -> dict[str, float]:
        """The mean over folds of the loss and of each metric."""
        return {name: statistics.fmean(values) for name, values in self._columns().items()}

    @property
    def deviation(self) -> dict[str, float]:
        """Their standard deviation, that of a sample; of one fold there is none."""
        return {name: statistics.stdev(values) for name, values in self._columns().items() if len(values) > 1}

    def rows(self) -> list[list[str]]:
        """A table for people."""
        names = list(self._columns())
        rows = [["fold", *names]]
        rows += [[str(at), *(f"{one[name]:.4g}" for name in names)] for at, one in enumerate(self.results, start=1)]
        for title, values in (("mean", self.mean), ("deviation", self.deviation)):
            rows += [[title, *(f"{values[name]:.4g}" for name in names)]] if values else []
        return rows

    def to_json(self) -> dict[str, Any]:
        """The same for programs."""
        runs = [run for run in self.runs if _is_done(run)]
        folds = [{"run": str(run.path), **run.read_results()} for run in runs]
        return {"run": str(self.path), "folds": folds, "mean": self.mean, "deviation": self.deviation}

    def go_on(
        self, data: Data = None, *, data_changed: bool = False, callbacks: Sequence[Callback] = (), quiet: bool = False
    ) -> CrossValidation:
        """Train what is missing, as if nothing had happened.

        - `data`: given again where they came from Python
        - `data_changed`: as for `onward.resume`
        - `callbacks`, `quiet`: as for `onward.train`
        """
        return self._train_missing({} if data is None else {"data": data}, data_changed, callbacks, quiet)

    def _train_missing(
        self, given: dict[str, Any], data_changed: bool, callbacks: Sequence[Callback], quiet: bool
    ) -> CrossValidation:
        for fold in range(1, self.folds + 1):
            run = Run(self.place(fold))
            if not (run.path / TRAINING).exists():
                settings = {**read_settings(self.path / CONFIG), **given}
                refuse_placeholders(settings)
                run = train(**settings, fold=fold, run=run.path, callbacks=callbacks, quiet=quiet)
            elif not _is_done(run):
                run = resume(run, given.get("data"), data_changed=data_changed, callbacks=callbacks, quiet=quiet)
            if not _is_done(run):
                break
        return self

    def place(self, fold: int) -> Path:
        """The folder of a fold, counted from 1."""
        return self.path / f"fold-{fold}"

    def _columns(self) -> dict[str, list[float]]:
        results = self.results
        return {name: [one[name] for one in results] for name in (results[0] if results else ())}

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
    **given: Any,
) -> CrossValidation:
    """Train as often as there are folds, each time without one of them, which says how good the result is.

        found = onward.cross_validate("digits.onnx", "digits.npz", loss="cross_entropy", epochs=10, folds=5)
        found.mean["accuracy"], found.deviation["accuracy"]

    Folds depend on `seed` alone; where labels are classes, each has its share of every class. Each is a run of its own
    below `run`. Ctrl-C finishes a step, saves and returns; `found.go_on()` trains what is missing.

    - `model`, `recipe`, `config`, `callbacks`, `quiet`: as for `onward.train`
    """
    asked = settings_from("cross_validate", given, recipe, config)
    asked.setdefault("folds", _USUAL)
    run = asked.pop("run", None)
    if asked.get("fold") is not None:
        raise DataError("one fold is no cross-validation", hint="`onward.train(..., folds=5, fold=1)` trains it")
    wanted = Config.from_arguments("cross_validate", asked)
    if join_group(wanted.device, wanted.engine).size > 1:
        raise UnsupportedError(
            "several processes do not cross-validate together", hint="train each fold: `--folds 5 --fold 1`"
        )
    found = CrossValidation(run if run is not None else new_folder(load(wanted.model)).path)
    if found.path.is_dir() and any(found.path.iterdir()):
        raise DataError(
            f"`{found.path}` is not empty",
            hint=f"go on with what is there (`onward train --resume {found.path}`), or name another folder",
        )
    found.path.mkdir(parents=True, exist_ok=True)
    settings = {name: value for name, value in wanted.to_json().items() if name in asked}
    write_file(found.path / CONFIG, write_settings(settings))
    try:
        return found._train_missing(asked, False, callbacks, quiet)
    except BaseException:
        if not found.runs:  # nothing was trained, so that nothing can be gone on with
            (found.path / CONFIG).unlink()
            with contextlib.suppress(OSError):
                found.path.rmdir()
        raise
