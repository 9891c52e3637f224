"""A model on data without training: the loop that `evaluate` and `predict` share."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from onward import engines
from onward.build import Builder, Names
from onward.errors import DataError, Error, RecipeError, UnsupportedError, default_hint, list_names
from onward.model import Model, load
from onward.recipe.description import GRAPH, TASKS, Description, implied_task, kind_of_scores, task_of
from onward.recipe.interface import batch_axes, with_samples_first
from onward.recipe.losses import LOSSES, Target
from onward.recipe.losses import loss as named_loss
from onward.recipe.metrics import Objective, class_names
from onward.recipe.objective import predictions, terms
from onward.recipe.preprocessing.join import open_preprocessing, with_preprocessing
from onward.recipe.preprocessing.pipeline import Pipeline, pipelines
from onward.recipe.spec import words
from onward.standard import IR_VERSION
from onward.training.data import (
    Batch,
    Batches,
    Binding,
    Dataset,
    Stream,
    columns_of,
    format_for,
    match,
    open_data,
)
from onward.training.data.dataset import bytes_of_row
from onward.training.data.sources import parts_of
from onward.training.data.views import with_classes
from onward.training.feed import outputs_of, samples_in
from onward.training.preparation import in_classes, is_open, open_images, single_pictures
from onward.training.progress import showing_rows
from onward.training.run import Run, with_averages
from onward.transform.declare import check_batch_axis
from onward.transform.training import strip

_FEWEST, _MOST = 32, 1024
"""Rows of a batch by default: as many as have `_BYTES`, within these."""
_BYTES = 1 << 18
_TOGETHER, _READ = 16, 4 << 20
"""Batches that are read and checked together, and their bytes."""
KEPT = "keep/"
"""Prefix of columns that are only copied."""
_TASK_HINT = "say what it was trained with: `--loss logits=cross_entropy`, or `--task classification`"


@dataclasses.dataclass(frozen=True)
class Inference:
    """A model with its data, the meaning of its output, and how to compute it."""

    title: str
    says: Description
    task: str | None
    objective: Objective | None
    scores: str | None
    """What the output is: `logits`, `probabilities` or `log-probabilities`, if known."""
    classes: tuple[str, ...] | None
    count: int | None
    """The number of classes or decisions, if it is static."""
    data: Dataset | Stream
    outputs: Mapping[str, ir.Value]
    targets: tuple[str, ...]
    notes: list[str]
    quiet: bool
    _compute: Callable[[Batch], Mapping[str, np.ndarray]]
    _batches: Batches
    _size: int
    _fixed: int | None
    loss: Callable[[Mapping[str, np.ndarray], Batch, int], float] | None = None
    """The loss of some rows: outputs, batch, number of rows."""

    def results(self, names: Collection[str] | None = None) -> Iterator[tuple[int, Batch, Batch]]:
        """Yield the first row of each batch, its inputs and targets, and the named outputs that have rows."""
        total = len(self.data) if isinstance(self.data, Dataset) else None
        first = 0
        with showing_rows(total, self.quiet) as advance:
            for batch, outputs, samples in outputs_of(self._compute, self._cut(), self._fixed):
                kept = {
                    name: self._of_rows(name, np.asarray(array), max(samples, self._fixed or 0))[:samples]
                    for name, array in outputs.items()
                    if (names is None or name in names) and np.ndim(array)
                }
                yield first, {name: array[:samples] for name, array in batch.items()}, kept
                first += samples
                advance(first)

    def _cut(self) -> Iterator[tuple[Batch, int]]:
        """Yield batches: what is read together is several of them."""
        for batch in self._batches.epoch(0):
            count = samples_in(batch)
            for start in range(0, count, self._size):
                rows = slice(start, start + self._size)
                yield {name: array[rows] for name, array in batch.items()}, min(self._size, count - start)

    def _of_rows(self, name: str, array: np.ndarray, rows: int) -> np.ndarray:
        if len(array) != rows:
            raise DataError(
                f"`{name}` has {len(array)} rows for a batch of {rows}",
                hint=f"say where its samples are, such as `--batch-axis {name}=1`",
            )
        return array

    def ids(self, rows: np.ndarray) -> np.ndarray:
        """Return the files of rows, or their numbers."""
        files = self.data.files if isinstance(self.data, Dataset) else None
        return rows if files is None else np.asarray([files[row] for row in rows], object)

    @property
    def has_files(self) -> bool:
        return isinstance(self.data, Dataset) and self.data.files is not None

    def name(self, label: int) -> str:
        """Return the name of a class, or its number."""
        named = self.classes is not None and 0 <= label < len(self.classes)
        return self.classes[label] if named and self.classes is not None else str(label)


def open_inference(
    settings: Mapping[str, Any],
    *,
    labeled: bool,
    keep: Sequence[str] = (),
    quiet: bool = False,
    raw: bool = False,
    like: Description | None = None,
) -> Inference:
    """Open a model or a run, and data for it. A model that says nothing about itself is `like` another."""
    model, says, title, pictures = _load(settings["model"], settings.get("which", "best"))
    if like is not None and says == Description():
        says = like
    notes: list[str] = []
    says = _override(says, settings)
    axes, symbols = batch_axes(model, says.batch_axis, says.constants)
    notes += [f"samples of `{name}` are along axis {axes[name]}, named `{symbols[name]}`" for name in symbols]
    model = with_samples_first(model.copy(), axes, says.constants)
    task, objective, targets, value = _meaning(model, says, settings, labeled, raw, notes)
    count = _count(objective, value)
    classes = says.classes or class_names(model, count or 0) or None
    if classes is not None and count is not None and task != "binary" and len(classes) != count:
        raise DataError(
            f"{len(classes)} class names for the {count} classes of `{objective.output if objective else ''}`",
            hint="name all classes in order: `classes=[...]` (`--class NAME` for each)",
        )
    scores = kind_of_scores(value, objective) if value is not None else None
    if not labeled and scores is None and objective is not None and task != "regression":
        notes.append(f"the loss `{objective.name}` gives no probabilities: raw outputs")
    needed = {t.name: ir.Value(name=t.name, type=ir.TensorType(t.dtype), shape=t.shape) for t in targets}
    data, model = _open(model, settings, says, needed if labeled else {}, pictures, notes)
    inputs = {v.name or "": v for v in model.inputs}
    asked = settings.get("columns") or {}
    if objective is not None and labeled and classes is not None:  # a file may have some of the classes only
        named = asked.get(objective.target or "") or says.columns.get(objective.target or "") or objective.target
        label = named if isinstance(named, str) else next(iter(named or ()), "")
        if isinstance(data, Dataset) and label in data.columns and data.columns[label].classes is not None:
            data = with_classes(data, label, classes, title)
    bindings = _match(data, inputs, needed, asked, says, labeled)
    if objective is not None and labeled:
        data, classes = _same_classes(data, bindings[objective.target or ""], classes, count, title, notes)
        bindings = _match(data, inputs, needed, asked, says, labeled)
    notes += [binding.note for binding in bindings.values() if binding.note]
    for column in keep:
        if isinstance(data, Dataset):
            data.check_column(column)
        elif column not in data.columns:
            raise DataError(f"the stream has no column `{column}`", hint=f"it has {list_names(list(data.columns), 6)}")
        bindings[KEPT + column] = Binding((column,), texts=data.columns[column].classes, is_checked=False)
    fixed = check_batch_axis({**inputs, **(needed if labeled else {})}, model.inputs)
    size = settings.get("batch_size") or fixed or min(max(_BYTES // _row_bytes(data, bindings), _FEWEST), _MOST)
    if fixed is not None and size > fixed:
        raise DataError(f"the batch size of the model is fixed to {fixed}", hint="leave `batch_size` out")
    labels = objective.target if labeled and objective is not None and objective.by_number else None
    batches = Batches(
        data,
        bindings,
        size=size * max(min(_TOGETHER, _READ // (size * _row_bytes(data, bindings))), 1),
        shuffle=False,
        classes={labels: count} if labels is not None and count is not None else None,
        ignore=objective.ignored if objective else None,
    )
    usual = {"device": "cpu", "threads": None}
    options = {name: settings[name] for name in usual if settings.get(name) not in (None, usual[name])}
    function = engines.function(model, engine=settings.get("engine", "onnxruntime"), **options)
    return Inference(
        title,
        says,
        task,
        objective,
        scores,
        classes,
        count,
        data,
        {v.name or "": v for v in model.outputs},
        tuple(needed) if labeled else (),
        notes,
        quiet,
        lambda batch: function({name: batch[name] for name in inputs}),
        batches,
        size,
        fixed,
        _loss_function(objective, value, needed) if labeled and says.loss and objective and value is not None else None,
    )


def _load(source: Any, which: str) -> tuple[Model, Description, str, dict[str, Pipeline]]:
    """Return an inference model, what it says about itself, its name for messages, and the image operations in it."""
    if isinstance(source, Run) or (isinstance(source, str | os.PathLike) and os.path.isdir(source)):
        run = source if isinstance(source, Run) else Run(source)
        run.refuse_if_empty()
        model = run.load_best() if which == "best" else run.load_last()
        says, config = Description.read(model), run.read_config()
        if says == Description() and isinstance(config.get("loss"), str):  # of an older version
            names = ("loss", "columns", "batch_axis", "constants")
            says = Description(**{name: config[name] for name in names if config.get(name)})
            says = dataclasses.replace(says, classes=tuple(config["classes"]) if config.get("classes") else None)
        return model, says, str(run.path), {}
    model = load(source)
    path = source if isinstance(source, str | os.PathLike) else model.path
    title = str(path) if path else "the model"
    if not model.is_training_model:
        return model, Description.read(model), title, {}
    says = Description.read(model)
    if says == Description():
        says = Description.of_training(model, None, {}, {})
    says = dataclasses.replace(says, preprocess={})  # its graph has the operations
    return strip(with_averages(model)), says, title, single_pictures(model)


def _override(says: Description, settings: Mapping[str, Any]) -> Description:
    """Return the description with what the user says instead."""
    changes: dict[str, Any] = {name: settings[name] for name in ("batch_axis", "constants") if settings.get(name)}
    if settings.get("classes"):
        changes["classes"] = tuple(settings["classes"])
    if settings.get("task") and not settings.get("loss"):
        is_same = says.task == settings["task"]
        changes |= {"task": settings["task"], "loss": says.loss if is_same else None}
    if settings.get("loss"):
        changes |= {"loss": settings["loss"], "task": settings.get("task")}
    return dataclasses.replace(says, **changes)


# ---- what the output means -------------------------------------------------------------------------------------------


def _meaning(
    model: Model, says: Description, settings: Mapping[str, Any], labeled: bool, raw: bool, notes: list[str]
) -> tuple[str | None, Objective | None, Sequence[Target], ir.Value | None]:
    """Return the task, the loss, its targets, and the output; None if unknown, which only a prediction accepts."""
    specs = words(says.loss) if says.loss else [TASKS[says.task]] if says.task and says.task in TASKS else []
    asked = settings.get("loss") or settings.get("task")
    if raw and not asked:
        return None, None, (), None
    if says.task is not None and says.task not in TASKS and not specs:
        return _unknown(f"the task of the model is `{says.task}`, which has no metrics here", labeled, notes)
    if not specs:
        floats = [v for v in model.outputs if v.dtype is None or v.dtype.is_floating_point()]
        if (task := implied_task(floats[0]) if len(floats) == 1 else None) is None:
            return _unknown("the model does not say what its outputs are", labeled, notes)
        specs = [TASKS[task]]
    if len(specs) > 1:
        notes.append(f"the model has {len(specs)} losses; this is about `{specs[0]}`; for another: `--loss {specs[1]}`")
    (term, *_) = terms(specs[0])
    if settings.get("loss") and term.custom is None and term.spec.name != "value":
        named_loss(term.spec.name)  # raises if it is unknown
    if term.custom is not None or term.spec.name not in LOSSES:
        return _unknown(f"the loss `{term.spec.name}` does not say what the outputs are", labeled, notes)
    try:
        (value,) = predictions(model, [term])
    except Error as error:
        if labeled or asked:
            raise
        return _unknown(error.message, labeled, notes)
    if value.producer() is None:
        raise RecipeError(f"`{value.name}` is not computed by the model", hint=_TASK_HINT)
    if value not in model.graph.outputs:  # a value within the graph, such as the logits before a Softmax
        model.graph.outputs.append(value)
    loss = LOSSES[term.spec.name]
    options = dict(term.spec.options)
    taken = {v.name for v in model.inputs}
    targets = [
        dataclasses.replace(target, name=target.name if target.name not in taken else f"{value.name}_{target.name}")
        for target in loss.targets(value, **options)
    ]
    objective = Objective(loss.name, value.name, targets[0].name if targets else None, options)
    return task_of(objective, value), objective, targets, value


def _unknown(why: str, labeled: bool, notes: list[str]) -> tuple[None, None, tuple[Target, ...], None]:
    if labeled:
        raise RecipeError(f"cannot evaluate: {why}", hint=_TASK_HINT)
    notes.append(f"{why}: raw outputs; for classes and probabilities, {_TASK_HINT}")
    return None, None, (), None


def _count(objective: Objective | None, value: ir.Value | None) -> int | None:
    if objective is None or value is None or value.shape is None or len(value.shape) < 2:
        return None
    size = value.shape[objective.axis]
    return size if isinstance(size, int) else None


def _loss_function(
    objective: Objective, value: ir.Value, needed: Mapping[str, ir.Value]
) -> Callable[[Mapping[str, np.ndarray], Batch, int], float]:
    """Return the loss as a function of outputs and targets."""
    shapes = [v.shape and ir.Shape([None, *v.shape[1:]]) for v in (value, *needed.values())]  # rows of several batches
    inputs = [
        ir.Value(name=v.name, type=v.type, shape=shape)
        for v, shape in zip((value, *needed.values()), shapes, strict=True)
    ]
    graph = ir.Graph(inputs, [], nodes=[], name="loss", opset_imports={"": 21})
    op = Builder(graph, opset=21, names=Names(v.name or "" for v in inputs))
    result = LOSSES[objective.name].build(op, *map(op, inputs), **dict(objective.options)).named("loss").value
    result.type = ir.TensorType(value.dtype or ir.DataType.FLOAT)
    graph.outputs.append(result)
    model = Model(ir.Model(graph, ir_version=IR_VERSION, functions=list(op.functions.values())))
    compute = engines.function(model, engine="numpy")

    def loss(outputs: Mapping[str, np.ndarray], batch: Batch, rows: int) -> float:
        arrays = {name: batch[name][:rows] for name in needed}
        return float(compute({value.name or "": outputs[value.name or ""][:rows], **arrays})["loss"])

    return loss


# ---- data ------------------------------------------------------------------------------------------------------------


def _open(
    model: Model,
    settings: Mapping[str, Any],
    says: Description,
    needed: Mapping[str, ir.Value],
    pictures: Mapping[str, Pipeline],
    notes: list[str],
) -> tuple[Dataset | Stream, Model]:
    """Open the data. Return them with the model, which gets its preprocessing."""
    source, labeled = settings["data"], bool(needed)
    if isinstance(source, str | Path) and (parts := parts_of(Path(source))) and "test" in parts:
        notes.append(f"{source}: takes `{parts['test'][0].name}`")
        source = [str(path) for path in parts["test"]]
    preprocess = settings.get("preprocess")
    if preprocess is None and says.preprocess:
        if GRAPH in ([says.preprocess] if isinstance(says.preprocess, str) else says.preprocess.values()):
            raise UnsupportedError(
                "the model was trained with preprocessing that is not in the file",
                hint="take `training.onnx` of the run, which has it, or train with `--keep-preprocessing`",
            )
        preprocess = says.preprocess
        listed = [preprocess] if isinstance(preprocess, str) else [f"{n}={specs}" for n, specs in preprocess.items()]
        notes.append(f"preprocessing, as the file says: {' '.join(listed)}")
    inputs = {v.name or "": v for v in model.inputs} | dict(needed)
    if preprocess is None or preprocess in ("none", ["none"]):
        return open_data(source, images=format_for(inputs, pictures), labeled=labeled), model
    preprocess = open_preprocessing(preprocess)
    if isinstance(preprocess, Model):
        model = with_preprocessing(model, preprocess)
        return open_data(source, inputs={v.name or "": v for v in model.inputs}, labeled=labeled), model
    by_input = pipelines(model, preprocess)
    if any(is_open(pipeline) for pipeline in by_input.values()):
        raise RecipeError("the vocabulary is only a number of words", hint="pass that of the training, as a file")
    specs = {name: pipeline.all_specs for name, pipeline in by_input.items()}
    if all(pipeline.is_text for pipeline in by_input.values()):
        return open_data(source, labeled=labeled), with_preprocessing(model, specs)
    with default_hint("to use other operations: `--preprocess SPECS`, or `--preprocess none`"):
        asked = settings.get("columns") or {}
        inputs = {v.name or "": v for v in with_preprocessing(model, specs).inputs} | dict(needed)
        data, resolved = open_images(by_input, model, inputs, source, asked, labeled=labeled)
    return data, with_preprocessing(model, specs | {name: p.all_specs for name, p in resolved.items()})


def _match(
    data: Dataset | Stream,
    inputs: Mapping[str, ir.Value],
    needed: Mapping[str, ir.Value],
    asked: Mapping[str, str | Sequence[str]],
    says: Description,
    labeled: bool,
) -> dict[str, Binding]:
    """Return the columns of inputs, and of targets if `labeled`: as asked, else as in training if there."""
    everything = {**inputs, **needed}
    mapping = dict(asked) | {
        name: columns[0] if len(columns) == 1 else list(columns)
        for name, columns in says.columns.items()
        if name in everything and name not in asked and all(column in data.columns for column in columns)
    }
    own = {name: columns for name, columns in mapping.items() if name not in needed}
    origin = getattr(data, "origin", "the stream")
    are_numbers = not any(column.shape for column in data.columns.values())
    for name, columns in says.columns.items():  # other columns of the same types would fit
        absent = [column for column in columns if column not in data.columns]
        is_lost = len(columns) > 1 and (0 < len(absent) < len(columns) or (absent and are_numbers))
        if name in inputs and name not in asked and is_lost:
            raise DataError(
                f"{origin} has no column `{absent[0]}`, a part of `{name}` in training",
                hint=f"add it, or name all in the order of training: `--column {name}=A,B,...`",
            )
    if not labeled:
        if any(name not in own for name in inputs):
            with contextlib.suppress(DataError):  # labels, if there are some, are not features
                return {name: match(data.columns, everything, mapping)[name] for name in inputs}
        return match(data.columns, inputs, own)
    label = next(iter(needed))
    hint = f"name their column: `--column {label}=COLUMN`; `onward predict` needs none"
    if label not in mapping and label in says.columns and own.keys() == inputs.keys():
        raise DataError(f"{origin} has no column `{says.columns[label][0]}`, the labels in training", hint=hint)
    try:
        return match(data.columns, everything, mapping, targets=list(needed))
    except DataError as error:
        problem = error
        with contextlib.suppress(DataError):
            if {*columns_of(match(data.columns, inputs, own))} == data.columns.keys():
                problem = DataError(f"{origin} has no labels: no column for `{label}`", hint=hint)
        raise problem from None


def _same_classes(
    data: Dataset | Stream,
    binding: Binding,
    classes: tuple[str, ...] | None,
    count: int | None,
    title: str,
    notes: list[str],
) -> tuple[Dataset | Stream, tuple[str, ...] | None]:
    """Return data with the class numbers of the model, and the names of classes."""
    theirs = binding.classes
    if theirs is None:
        return data, classes
    if classes is not None:
        return in_classes(data, binding, classes, title), classes
    if count is not None and count > 1 and len(theirs) != count:
        raise DataError(
            f"the data have {len(theirs)} classes, the model {count}, and it does not name them",
            hint="name them in the order of the output: `classes=[...]` (`--class NAME` for each)",
        )
    notes.append(f"the model does not name its classes; taken in order: {list_names(theirs, 6)}")
    return data, theirs


def _row_bytes(data: Dataset | Stream, bindings: Mapping[str, Binding]) -> int:
    return max(bytes_of_row(data.columns, columns_of(bindings)), 1)
