"""`onward.predict`: classes, probabilities or numbers for each row of data, batch by batch."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from onward.errors import ArgumentError
from onward.options import PredictOptions, with_options
from onward.recipe.metrics import measures_for, probabilities
from onward.training.inference import KEPT, Inference, open_inference
from onward.training.prediction_files import write_predictions


class Predictions:
    """Predictions of a model on data: the return value of `onward.predict`.

        for batch in onward.predict("digits.onnx", "new.npz", loss="cross_entropy"):
            print(batch["row"], batch["prediction"], batch["probability"])

    Nothing is computed before it is asked for, and only one batch is in memory. A batch is a dict of
    arrays: `row` (or `file`), kept columns, and

    - `prediction`: the class by name, or by number without names; a number or numbers for regression
    - `probability`: that of the predicted class; for a binary output that of yes
    - `probabilities`: of all classes
    - for `raw`, and if the task is unknown: the outputs of the model by name; single numbers are left out
    """

    def __init__(self, inference: Inference, raw: bool = False):
        self._inference, self._raw = inference, raw
        self.classes = inference.classes
        self.notes = inference.notes

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        objective = self._inference.objective
        names = None if self._is_raw or objective is None else [objective.output or ""]
        for first, batch, outputs in self._inference.results(names):
            kept = {n.removeprefix(KEPT): array for n, array in batch.items() if n.startswith(KEPT)}
            count = len(next(iter(batch.values())))
            rows = self._inference.ids(np.arange(first, first + count))
            yield {self.id: rows, **kept, **(outputs if self._is_raw else self._read(outputs))}

    @property
    def id(self) -> str:
        """Name of the column that identifies a row: `file` or `row`."""
        return "file" if self._inference.has_files else "row"

    @property
    def _is_raw(self) -> bool:
        inference = self._inference
        return self._raw or inference.task is None or (inference.scores is None and inference.task != "regression")

    @property
    def widths(self) -> dict[str, list[str] | None]:
        """Names of the columns of each array of a file; None for one column, whose cells may be lists."""
        if not self._is_raw and self._inference.task in ("classification", "multi-label"):
            count = self._inference.count
            return {"probabilities": [f"p_{self._inference.name(i)}" for i in range(count)] if count else None}
        shapes = {name: value.shape for name, value in self._inference.outputs.items()}
        objective = self._inference.objective
        if not self._is_raw:
            shapes = {"prediction": shapes[objective.output if objective and objective.output else ""]}
        vectors = {name: shape[1] for name, shape in shapes.items() if shape is not None and len(shape) == 2}
        return {
            name: [f"{name}_{i}" for i in range(size)] if size != 1 else [name]
            for name, size in vectors.items()
            if isinstance(size, int)
        }

    def arrays(self) -> dict[str, np.ndarray]:
        """Return all predictions in memory."""
        batches = list(self)
        return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the predictions to a .csv, .jsonl, .parquet or .npz file while they are made.

        - `path`: the file; `-` for CSV on standard output
        """
        write_predictions(self, path, self.widths)

    def _read(self, outputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the meaning of the output of the task."""
        inference = self._inference
        objective, task = inference.objective, inference.task
        assert objective is not None and objective.output is not None
        output = outputs[objective.output]
        if task == "regression":
            return {"prediction": output[:, 0] if output.ndim == 2 and output.shape[1] == 1 else output}
        output = output if output.dtype in (np.float32, np.float64) else output.astype(np.float32)
        threshold = measures_for(objective, (), "loss", scores=inference.scores).threshold
        if threshold is not None:
            return self._decide(output, threshold)
        scores = np.moveaxis(output, objective.axis, -1)
        p = probabilities(scores, inference.scores)
        chosen = scores.argmax(-1)
        result = {
            "prediction": chosen if task == "segmentation" else self._named(chosen),
            "probability": np.take_along_axis(p, chosen[..., None], -1)[..., 0],
        }
        return result | ({"probabilities": p} if task == "classification" else {})

    def _decide(self, output: np.ndarray, threshold: float) -> dict[str, np.ndarray]:
        """Return decisions: names for several of a row; yes and no, or the second of two names, for one."""
        p, yes = probabilities(output, self._inference.scores, True), output > threshold
        if self._inference.task == "binary":
            chosen = yes.reshape(len(yes)).astype(np.int64)
            return {"prediction": self._named(chosen), "probability": p.reshape(len(p))}
        if self._inference.task == "segmentation":
            return {"prediction": yes, "probability": p}
        names = np.empty(len(yes), object)
        names[:] = [[self._inference.name(i) for i in np.flatnonzero(row).tolist()] for row in yes]
        return {"prediction": names, "probabilities": p}

    def _named(self, chosen: np.ndarray) -> np.ndarray:
        if self.classes is None:
            return chosen
        names = [self._inference.name(number) for number in range(max(self._inference.count or 0, len(self.classes)))]
        return np.asarray(names)[chosen]

    def __repr__(self) -> str:
        return f"<onward.Predictions of {self._inference.title}>"


@dataclasses.dataclass(frozen=True)
class _Arguments(PredictOptions):
    _: dataclasses.KW_ONLY
    quiet: bool = False


@with_options(_Arguments)
def predict(raw: bool = False, keep: Sequence[str] | str = (), quiet: bool = False, **settings: Any) -> Predictions:
    """Predict with a model or a run on data, which need no labels.

        onward.predict("runs/digits", "new.npz").save("predictions.csv")

    Task, class names, columns and preprocessing come from the file if `onward.train` wrote it.

    - `model`: an inference model, a training model, an `onward.Run` or the folder of a run
    - `quiet`: hide the progress
    """
    if missing := [name for name in ("model", "data") if settings.get(name) is None]:
        raise ArgumentError(f"`predict` needs `{missing[0]}`", hint="see `help(onward.predict)`")
    kept = [keep] if isinstance(keep, str) else keep
    return Predictions(open_inference(settings, labeled=False, keep=kept, quiet=quiet, raw=raw), raw)
