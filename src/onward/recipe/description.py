"""Description of an inference model in its metadata: task, classes, columns, preprocessing, metrics.

`train` writes it into `metadata_props`, `evaluate` and `predict` read it. The keys are in docs/how-to/predict.md.
Keys of exports of Ultralytics (`names`, `task`, `imgsz`) are read as well.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.errors import DataError
from onward.model import Model
from onward.model.core import values
from onward.recipe.losses import LOSSES
from onward.recipe.metrics import SCORES, Objective, labels_of, objectives
from onward.recipe.objective import is_of_scores, source_of_scores
from onward.recipe.spec import Spec, parse

PREFIX = "onward."
GRAPH = "graph"
"""Stands for preprocessing that is a model, which has no text."""

TASKS: Mapping[str, str] = {
    "classification": "cross_entropy",
    "binary": "bce_with_logits",
    "multi-label": "bce_with_logits",
    "token-classification": "cross_entropy:axis=-1",
    "segmentation": "cross_entropy",
    "regression": "mse",
}
"""Tasks, with the loss whose output and labels they have."""
_OTHER_NAMES = {
    **dict.fromkeys(
        ("classify", "image-classification", "text-classification", "audio-classification"), "classification"
    ),
    **dict.fromkeys(("image-segmentation", "semantic-segmentation"), "segmentation"),
}
"""Tasks of Ultralytics and of Hugging Face -> tasks."""
_AMOUNTS = ("mse", "l1", "huber", "smooth_l1")
_DECISIONS = ("bce_with_logits", "binary_cross_entropy", "hinge", "squared_hinge")
_MOST_COLUMNS = 1000


@dataclasses.dataclass(frozen=True)
class Description:
    """Description of a model in its metadata. Each field is a key of the metadata, in JSON unless it is text."""

    task: str | None = None
    loss: str | None = None
    """Losses of the training, such as `logits=cross_entropy`, with spaces between them."""
    classes: tuple[str, ...] | None = None
    columns: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    """Columns of the data of each input and target."""
    preprocess: Mapping[str, str] | str = dataclasses.field(default_factory=dict)
    """Operations that are not in the graph, by input or for the only suitable one; `graph` for what has no text."""
    batch_axis: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    constants: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Validation results of these weights."""

    @classmethod
    def of_training(
        cls,
        training: Model,
        classes: Sequence[str] | None,
        columns: Mapping[str, Sequence[str]],
        interface: Mapping[str, Any],
        keeps_preprocessing: bool = False,
    ) -> Description:
        """Return the description of the models that a run makes. `interface` holds `batch_axis` and `constants`."""
        losses = [o for o in objectives(training) if o.name in LOSSES and o.output and len(training.steps) == 1]
        outputs = {value.name: value for value in values(training.graph)}
        task = task_of(losses[0], outputs[losses[0].output]) if losses and losses[0].output in outputs else None
        named = {name: list(of_input) for name, of_input in columns.items()}
        fact = training.step().fact("train.recipe")
        recipe: Mapping[str, Any] = fact if isinstance(fact, dict) else {}
        labels, before = labels_of(training), cls.read(training).classes
        if classes is None and before and labels is not None and labels.count == len(before):
            classes = before if "new_head" not in recipe else None
        constants = interface.get("constants") or {}
        return cls(
            task,
            " ".join(f"{o.output}={Spec(o.name, o.options)}" for o in losses) or None,
            tuple(classes) if classes else None,
            named if sum(map(len, named.values())) <= _MOST_COLUMNS else {},
            {} if keeps_preprocessing else _as_text(recipe.get("preprocess")),
            interface.get("batch_axis") or {},
            {name: value.tolist() if hasattr(value, "tolist") else value for name, value in constants.items()},
        )

    @classmethod
    def read(cls, model: Model) -> Description:
        """Return the description in a model, empty if it has none."""
        values: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            text = model.metadata.get(PREFIX + field.name)
            if text is None:
                continue
            is_text = field.name in ("task", "loss") or (field.name == "preprocess" and text[:1] != "{")
            with contextlib.suppress(ValueError, RecursionError):
                values[field.name] = text if is_text else json.loads(text)
                if is_text or isinstance(values[field.name], list if field.name == "classes" else dict):
                    continue
            raise DataError(f"`{PREFIX}{field.name}` in the model is not what it should be", hint="remove it")
        if values.get("classes") is not None:
            values["classes"] = tuple(map(str, values["classes"]))
        else:
            values["classes"] = _names_of_ultralytics(model.metadata.get("names"))
        values.setdefault("task", _OTHER_NAMES.get(task := model.metadata.get("task", ""), task) or None)
        if "preprocess" not in values and "imgsz" in model.metadata:  # Ultralytics: RGB from 0 to 1
            values["preprocess"] = {
                value.name or "": _operations(model.metadata["imgsz"], value)
                for value in model.inputs
                if value.shape is not None and len(value.shape) == 4
            }
        return cls(**values)

    def write(self, model: Model) -> None:
        """Write the description into a model, in place."""
        for field in dataclasses.fields(self):
            value, key = getattr(self, field.name), PREFIX + field.name
            model.metadata.pop(key, None)
            if value:
                model.metadata[key] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if model.metadata.pop("names", None) is not None and self.classes is not None:
            model.metadata["names"] = str(dict(enumerate(self.classes)))


def copy_description(source: Model, target: Model, metrics: Mapping[str, float]) -> None:
    """Copy what a training model says to an inference model, with the metrics of its weights."""
    if any(key.startswith(PREFIX) for key in source.metadata):
        finite = {name: value for name, value in metrics.items() if np.isfinite(value)}
        dataclasses.replace(Description.read(source), metrics=finite).write(target)


def _as_text(preprocess: Any) -> Mapping[str, str] | str:
    """Return the recorded operations of a recipe, without the form of its data; `graph` for what has no text."""
    if preprocess is None:
        return {}
    if "<vocabulary>" in str(preprocess) or str(preprocess).startswith("<"):  # an object is recorded as `<Model>`
        return GRAPH
    if isinstance(preprocess, dict):
        return {name: str(_as_text(specs)) for name, specs in preprocess.items()}
    specs = [preprocess] if isinstance(preprocess, str) else [str(parse(spec)) for spec in preprocess]
    return " ".join(spec for spec in specs if not spec.startswith("input:"))


def _names_of_ultralytics(text: str | None) -> tuple[str, ...] | None:
    """Return class names from `{0: 'cat', 1: 'dog'}` or a list."""
    with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
        names = ast.literal_eval(text or "")
        if isinstance(names, dict) and sorted(names) == [*range(len(names))]:
            return tuple(str(names[number]) for number in range(len(names))) or None
        if isinstance(names, list):
            return tuple(map(str, names)) or None
    return None


def _operations(size: str, value: ir.Value) -> str:
    """Return the operations for `imgsz`, which the shape of the input may imply."""
    is_fixed = value.shape is not None and all(isinstance(dim, int) for dim in value.shape[1:])
    return "scale" if is_fixed else f"resize:size={size.replace(' ', '')} scale"


# ---- tasks -----------------------------------------------------------------------------------------------------------


def task_of(objective: Objective, output: ir.Value) -> str | None:
    """Return the task of a loss on an output, or None."""
    rank = 2 if output.shape is None else len(output.shape)
    if objective.name in _AMOUNTS:
        return "regression"
    if objective.name in _DECISIONS:
        is_one = rank < 2 or (rank == 2 and output.shape is not None and output.shape[1] == 1)
        return "binary" if is_one else "multi-label" if rank == 2 else "segmentation"
    if objective.name not in ("cross_entropy", "nll"):
        return None
    if rank == 2:
        return "classification"
    return "token-classification" if rank == 3 else "segmentation"


def kind_of_scores(value: ir.Value, objective: Objective | None) -> str | None:
    """Return what an output is: `logits`, `probabilities` or `log-probabilities`; None if unknown.

    The graph knows; else the loss does.
    """
    node = source_of_scores(value)[0]
    if node is not None and (node.op_type in ("Softmax", "Sigmoid", "HardSigmoid") or _is_classifier(node)):
        return "probabilities"
    if node is not None and node.op_type == "LogSoftmax":
        return "log-probabilities"
    if objective is None:
        return None
    return "logits" if objective.name == "nll" and is_of_scores(node) else SCORES.get(objective.name)


def _is_classifier(node: ir.Node) -> bool:
    """True if a classifier of scikit-learn, XGBoost and the like gives probabilities."""
    transform = node.attributes.get("post_transform")
    return node.op_type in ("TreeEnsembleClassifier", "SVMClassifier") or (
        node.op_type == "LinearClassifier" and transform is not None and transform.value != "NONE"
    )


def implied_task(value: ir.Value) -> str | None:
    """Return the task of an output that ends in probabilities, or None."""
    node = source_of_scores(value)[0]
    if node is None or value.shape is None or len(value.shape) > 2:
        return None
    if node.op_type in ("Softmax", "LogSoftmax") or _is_classifier(node):
        return "classification" if len(value.shape) == 2 else None
    if node.op_type == "Sigmoid":
        return "binary" if len(value.shape) < 2 or value.shape[1] == 1 else "multi-label"
    return None
