"""`onward.evaluate`: metrics of a model on labeled data."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from onward.errors import ArgumentError, DataError, RecipeError
from onward.options import EvaluateOptions, with_options
from onward.recipe.metrics import (
    METRICS,
    OF_LOSS,
    Accuracy,
    Confusion,
    LogLoss,
    Measures,
    MedianError,
    Pair,
    Ranking,
    Sums,
    items,
    measures_for,
)
from onward.recipe.spec import parse
from onward.training.inference import Inference, open_inference
from onward.training.run import Run

_ROWS, _VALUES = 4096, 1 << 22
"""Rows, or values, that are measured together."""
_MOST_KEPT = 50_000_000
"""Values that a metric may keep in memory, such as the scores of AUC."""
_MOST_CLASSES = 2048
"""Classes of a confusion matrix, of 32 MB."""
_GROUPS, _CELLS, _DRAWS = 4096, 1 << 22, 1000
"""Groups of rows that the bootstrap draws, numbers that they keep, and draws."""

_OF_CONFUSION = ("balanced_accuracy", "precision", "recall", "f1", "mcc")
_USUAL: Mapping[str, tuple[str, ...]] = {
    "classification": ("accuracy", *_OF_CONFUSION, "auc", "pr_auc", "log_loss", "ece"),
    "token-classification": ("accuracy", *_OF_CONFUSION, "log_loss", "ece"),
    "binary": ("accuracy", *_OF_CONFUSION, "auc", "pr_auc", "log_loss", "ece"),
    "multi-label": ("accuracy", "exact_match", "precision", "recall", "f1", "auc", "pr_auc", "log_loss"),
    "segmentation": ("accuracy", "iou", "dice", "balanced_accuracy", "log_loss"),
    "regression": ("mse", "rmse", "mae", "r2", "mape", "median_error"),
}
"""The default metrics of a task."""


@dataclasses.dataclass(frozen=True)
class Change:
    """A metric of two models on the same data. `low` and `high` bound the change in 95 % of bootstrap draws."""

    before: float
    after: float
    low: float | None = None
    high: float | None = None

    @property
    def change(self) -> float:
        return self.after - self.before


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Metrics of a model on data: the return value of `onward.evaluate`.

        evaluation = onward.evaluate("best.onnx", "test.npz", loss="cross_entropy")
        evaluation.metrics["accuracy"]

    - `metrics`: each metric by name
    - `per_class`: precision, recall, F1 and support of each class
    - `confusion`: counts by label (rows) and chosen class; for several labels, [labels, 2, 2]
    - `worst`: the samples with the largest loss, worst first
    - `residuals`: mean, deviation and quartiles of predictions minus targets, for regression
    - `changes`: the change of each metric since the model `against`, with an interval
    """

    model: str
    task: str | None
    rows: int
    metrics: dict[str, float]
    classes: tuple[str, ...] | None = None
    per_class: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    confusion: np.ndarray | None = None
    worst: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    residuals: dict[str, float] = dataclasses.field(default_factory=dict)
    changes: dict[str, Change] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the evaluation as numbers, strings, lists and dicts; what is not finite becomes None."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        changes = {name: {**dataclasses.asdict(c), "change": c.change} for name, c in self.changes.items()}
        result: dict[str, Any] = _plain({**fields, "changes": changes})
        return result

    def __repr__(self) -> str:
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in self.metrics.items())
        return f"<onward.Evaluation of {self.model} on {self.rows:,} rows: {metrics}>"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


@dataclasses.dataclass(frozen=True)
class _Arguments(EvaluateOptions):
    _: dataclasses.KW_ONLY
    quiet: bool = False


@with_options(_Arguments)
def evaluate(
    metrics: Sequence[str] | str | None = None,
    against: str | os.PathLike[str] | Run | Any = None,
    worst: int = 10,
    quiet: bool = False,
    **settings: Any,
) -> Evaluation:
    """Evaluate a model or a run on labeled data.

        evaluation = onward.evaluate("runs/digits", "test.npz")
        print(evaluation.metrics["accuracy"], evaluation.confusion)

    Task, class names, columns and preprocessing come from the file if `onward.train` wrote it.

    - `model`: an inference model, a training model, an `onward.Run` or the folder of a run
    - `quiet`: hide the progress
    """
    if missing := [name for name in ("model", "data") if settings.get(name) is None]:
        raise ArgumentError(f"`evaluate` needs `{missing[0]}`", hint="see `help(onward.evaluate)`")
    if against is not None and isinstance(settings["data"], Iterator):
        raise DataError(
            "`against` reads the data twice, but they are a generator", hint="pass a function that makes it"
        )
    metrics = [metrics] if isinstance(metrics, str) else metrics
    inference = open_inference(settings, labeled=True, quiet=quiet)
    groups = None if against is None else _Groups(inference)
    evaluation = _measure(inference, metrics, worst, groups)
    if against is None or groups is None:
        return evaluation
    other = open_inference({**settings, "model": against}, labeled=True, quiet=quiet, like=inference.says)
    if other.task != inference.task:
        raise RecipeError(
            f"the models have different tasks: {inference.task} and {other.task}", hint="evaluate one after the other"
        )
    if other.classes != inference.classes or other.count != inference.count:
        raise RecipeError("the models have different classes", hint="evaluate one after the other")
    groups_before = _Groups(other)
    before = _measure(other, metrics, 0, groups_before)
    changes = _compare(before, evaluation, groups_before, groups)
    return dataclasses.replace(evaluation, changes=changes, notes=[*dict.fromkeys([*evaluation.notes, *before.notes])])


def _measure(inference: Inference, metrics: Sequence[str] | None, worst: int, groups: _Groups | None) -> Evaluation:
    objective, task, count = inference.objective, inference.task, inference.count or 0
    assert objective is not None
    chosen = [*(_USUAL.get(task or "", ()) if metrics is None else metrics)]
    notes = list(inference.notes)
    if metrics is None and inference.scores is None:  # margins, which are no probabilities
        chosen = [name for name in chosen if name not in ("log_loss", "ece")]
    if metrics is None and task in ("classification", "token-classification") and count > 5:
        chosen.insert(1, "top_k:k=5")
    if count > _MOST_CLASSES and (large := [name for name in chosen if _reads_confusion(name)]):
        chosen = [name for name in chosen if name not in large]
        notes.append(f"{count:,} classes are too many for a confusion matrix: no {', '.join(large)}")
    elif task is not None and task != "regression" and "f1" not in chosen:
        chosen = [*chosen, "f1"]  # for the table of classes
    wanted = measures_for(objective, chosen, "loss", objective.ignored, inference.scores)
    measured = _Measured(inference, wanted, worst, groups)
    for first, batch, outputs in inference.results([wanted.output or ""]):
        measured.add(first, outputs[wanted.output or ""], batch)
    measured.flush()
    results = measured.metrics.results()
    loss = {} if inference.loss is None else {"loss": measured.total / (measured.shares or 1)}
    if OF_LOSS in wanted.names:
        results[OF_LOSS] = float(np.exp(loss["loss"])) if loss else float("nan")
    if metrics is None and task == "segmentation":
        results.pop("f1", None)
    if dropped := measured.metrics.dropped:
        notes.append(f"left out {', '.join(dropped)}, which would keep more than {_MOST_KEPT:,} numbers")
    ranking = next((sums for sums in measured.metrics if isinstance(sums, Ranking)), None)
    if ranking and inference.scores and (best := ranking.best_threshold(inference.scores)) is not None:
        results |= {"best_threshold": best[0], "f1_at_best_threshold": best[1]}
    if metrics is not None:
        results = {name: results[name] for name in metrics if name in results}
    confusion = next((sums for sums in measured.metrics if isinstance(sums, Confusion)), None)
    residuals = next((sums for sums in measured.metrics if isinstance(sums, MedianError)), None)
    return Evaluation(
        inference.title,
        task,
        measured.rows,
        loss | results,
        inference.classes,
        _per_class(inference, confusion.tables, task) if confusion is not None else {},
        (confusion.tables if task == "multi-label" else confusion.tables.sum(0)) if confusion is not None else None,
        measured.worst(),
        residuals.summary() if residuals is not None else {},
        notes=notes,
    )


def _reads_confusion(metric: str) -> bool:
    return issubclass(METRICS.get(parse(metric).name, Accuracy), Confusion)


class _Measured:
    """Metrics, loss and worst rows of predictions, which are measured some thousand rows at a time."""

    def __init__(self, inference: Inference, measures: Measures, worst: int, groups: _Groups | None):
        self._inference, self._measures, self._most, self._groups = inference, measures, worst, groups
        self.metrics = measures.make(_MOST_KEPT)
        self.total, self.rows = 0.0, 0
        """The sum of the losses of rows, and the number of rows."""
        self.shares = 0.0
        """The sum of the shares of parts in the mean loss."""
        self._waiting: list[tuple[int, np.ndarray, dict[str, np.ndarray]]] = []
        self._worst: list[tuple[float, int, Any, Any]] = []

    def add(self, first: int, output: np.ndarray, batch: Mapping[str, np.ndarray]) -> None:
        self._waiting.append((first, output, {name: batch[name] for name in self._inference.targets}))
        self.rows += len(output)
        since = self._waiting[0][0]
        if self.rows - since >= _ROWS or (self.rows - since) * output[:1].size >= _VALUES:
            self.flush()

    def flush(self) -> None:
        name = self._measures.output or ""
        waiting, self._waiting = self._waiting, []
        vary = len({output.shape[1:] for _, output, _ in waiting}) > 1  # lengths that vary by batch
        for part in [[one] for one in waiting] if vary else filter(None, [waiting]):
            first = part[0][0]
            outputs = {name: np.concatenate([output for _, output, _ in part])}
            batch = {n: np.concatenate([targets[n] for _, _, targets in part]) for n in self._inference.targets}
            rows = len(outputs[name])
            if self._inference.loss is not None and (share := self._share(batch, rows)):
                self.total += self._inference.loss(outputs, batch, rows) * share
                self.shares += share
            pair = self._measures.pairs(outputs, batch, rows)
            self.metrics.add(*pair)
            if self._most or self._groups is not None:
                self._look(first, pair)

    def _share(self, batch: Mapping[str, np.ndarray], rows: int) -> float:
        """Return what a mean loss divides by: rows, or the weights of the labels that count."""
        objective = self._inference.objective
        weights = objective.options.get("weight") if objective is not None else None
        if (
            objective is None
            or not objective.by_number
            or (objective.ignored is None and not isinstance(weights, list))
        ):
            return rows
        labels = batch[objective.target or ""]
        labels = labels[labels != objective.ignored] if objective.ignored is not None else labels
        return float(np.asarray(weights)[labels].sum()) if isinstance(weights, list) else labels.size

    def _look(self, first: int, pair: Pair) -> None:
        """Remember the worst rows, and sums of the rows for the bootstrap."""
        predictions, targets = pair
        rows = np.arange(first, first + len(predictions))
        if self._inference.task == "regression":
            expected = targets.astype(np.float64).reshape(len(targets), -1)
            difference = predictions.astype(np.float64).reshape(expected.shape) - expected
            losses = np.abs(difference).mean(1)
            if self._groups is not None:
                self._groups.add_amounts(rows, difference, expected)
            shown = (expected[:, 0], expected[:, 0] + difference[:, 0]) if expected.shape[1] == 1 else None
        elif self._inference.task is not None:
            scores, labels, places = items(predictions, targets, self._measures.threshold)
            of_items = LogLoss(self._measures.threshold, self._measures.scores).losses(scores, labels)
            of_items = of_items.mean(tuple(range(1, of_items.ndim)))
            counts = np.maximum(np.bincount(places, minlength=len(rows)), 1)
            losses = np.bincount(places, of_items, minlength=len(rows)) / counts
            chosen = scores > (self._measures.threshold or 0) if labels.dtype == bool else scores.argmax(1)
            if self._groups is not None:
                self._groups.add_classes(rows[places], labels, chosen, of_items)
            is_single = len(places) == len(rows) and (labels.ndim == 1 or labels.shape[1] == 1)
            shown = (labels.reshape(-1).astype(int), chosen.reshape(-1).astype(int)) if is_single else None
        else:
            return
        losses = np.nan_to_num(losses, nan=np.inf, posinf=np.inf)
        for at in np.argsort(-losses)[: self._most].tolist():
            pair_shown = (None, None) if shown is None else (shown[0][at].item(), shown[1][at].item())
            self._worst.append((float(losses[at]), int(rows[at]), *pair_shown))
        self._worst = sorted(self._worst, key=lambda entry: (-entry[0], entry[1]))[: self._most]

    def worst(self) -> list[dict[str, Any]]:
        inference, entries = self._inference, []
        ids = inference.ids(np.array([row for _, row, _, _ in self._worst], np.int64)).tolist()
        for number, (loss, _, label, chosen) in zip(ids, self._worst, strict=True):
            entry = {"file" if inference.has_files else "row": number, "loss": loss}
            if label is not None and inference.task == "regression":
                entry |= {"label": label, "predicted": chosen}
            elif label is not None:
                entry |= {"label": inference.name(label), "predicted": inference.name(chosen)}
            entries.append(entry)
        return entries


def _per_class(inference: Inference, tables: np.ndarray, task: str | None) -> dict[str, dict[str, float]]:
    """Return precision, recall, F1 and support; for segmentation IoU and Dice, too."""
    if task == "multi-label":
        hits, chosen, present = tables[:, 1, 1], tables[:, :, 1].sum(1), tables[:, 1].sum(1)
    else:
        table = tables.sum(0)
        hits, chosen, present = np.diag(table), table.sum(0), table.sum(1)

    def share(parts: np.ndarray, wholes: np.ndarray) -> list[float]:
        return np.divide(parts, wholes, out=np.zeros(len(parts)), where=wholes > 0).tolist()

    columns = {"precision": share(hits, chosen), "recall": share(hits, present)}
    columns["f1"] = share(2 * hits, chosen + present)
    if task == "segmentation":
        columns |= {"iou": share(hits, chosen + present - hits), "dice": columns["f1"]}
    columns["support"] = present.tolist()
    rows = zip(*columns.values(), strict=True)
    return {inference.name(i): dict(zip(columns, row, strict=True)) for i, row in enumerate(rows)}


# ---- comparison of two models ----------------------------------------------------------------------------------------


class _Groups:
    """Sums of the rows in some thousand groups, which the bootstrap draws: row i is in group i modulo their number."""

    def __init__(self, inference: Inference):
        self._width = inference.count or 2
        if self._width > _MOST_CLASSES:  # right or wrong
            self._width = 1
        self.count = max(min(_GROUPS, _CELLS // (3 * self._width)), 100)
        self.sums: dict[str, np.ndarray] = {}
        self._shift: float | None = None

    def _add(self, name: str, rows: np.ndarray, values: np.ndarray, column: np.ndarray | None = None) -> None:
        """Add values to the sums of the groups of their rows: to the only one, or that of a class."""
        width = 1 if column is None else self._width
        total = self.sums.setdefault(name, np.zeros((self.count, width)))
        cells = rows % self.count * width + (0 if column is None else column)
        total += np.bincount(cells, values, minlength=total.size).reshape(total.shape)

    def add_classes(self, rows: np.ndarray, labels: np.ndarray, chosen: np.ndarray, losses: np.ndarray) -> None:
        self._add("loss", rows, losses)
        self._add("items", rows, np.ones(len(rows)))
        if labels.dtype == bool:
            self._width, rows = 2, np.repeat(rows, labels.shape[1])
            labels, chosen = labels.reshape(-1).astype(int), chosen.reshape(-1).astype(int)
            self.sums.setdefault("decisions", np.ones((self.count, 1)))
        hits = (labels == chosen).astype(np.float64)
        if self._width == 1:
            labels = chosen = np.zeros(len(rows), np.int64)
        self._add("hits", rows, hits, labels)
        self._add("chosen", rows, np.ones(len(rows)), chosen)
        self._add("present", rows, np.ones(len(rows)), labels)

    def add_amounts(self, rows: np.ndarray, difference: np.ndarray, expected: np.ndarray) -> None:
        columns = {"rows": np.ones(len(rows)), "absolute": np.abs(difference).mean(1)}
        columns["squared"] = np.square(difference).mean(1)
        for name, values in columns.items():
            self._add(name, rows, values)
        if expected.shape[1] == 1:
            self._shift = float(expected[0, 0]) if self._shift is None else self._shift  # against cancellation
            self._add("targets", rows, expected[:, 0] - self._shift)
            self._add("squares", rows, np.square(expected[:, 0] - self._shift))

    def values(self, weights: np.ndarray) -> dict[str, np.ndarray]:
        """Return metrics of groups that are drawn as often as `weights` [draws, groups] say."""
        sums = {name: weights @ total[: weights.shape[1]] for name, total in self.sums.items()}
        with np.errstate(invalid="ignore", divide="ignore"):
            if "rows" in sums:
                rows = sums["rows"][:, 0]
                values = {"mae": sums["absolute"][:, 0] / rows, "mse": sums["squared"][:, 0] / rows}
                values["rmse"] = np.sqrt(values["mse"])
                if "targets" in sums:
                    variation = sums["squares"][:, 0] - sums["targets"][:, 0] ** 2 / rows
                    values["r2"] = 1 - sums["squared"][:, 0] / variation
                return values
            classes = Sums(sums["hits"], sums["chosen"], sums["present"], "decisions" in sums)
            of = {name: cls.of(classes) for name, cls in METRICS.items() if "of" in vars(cls)}  # type: ignore[attr-defined]
            return {"log_loss": sums["loss"][:, 0] / sums["items"][:, 0], **of}


def _compare(before: Evaluation, after: Evaluation, old: _Groups, new: _Groups) -> dict[str, Change]:
    """Return the changes of all metrics, with intervals where sums over rows determine them."""
    count = min(old.count, after.rows)
    intervals: dict[str, tuple[float, float]] = {}
    if count > 1 and new.sums:
        weights = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), _DRAWS).astype(np.float64)
        values = old.values(weights), new.values(weights)
        for name in values[0].keys() & values[1].keys():
            change = values[1][name] - values[0][name]
            if np.isfinite(change).all():
                low, high = np.quantile(change, [0.025, 0.975]).tolist()
                intervals[name] = (low, high)
    return {
        name: Change(before.metrics[name], value, *intervals.get(name, (None, None)))
        for name, value in after.metrics.items()
        if name in before.metrics
    }
