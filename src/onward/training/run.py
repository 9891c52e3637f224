"""A run on disk: the contents of its folder, to read and use. `folder.py` writes it.

| file | content |
|---|---|
| `training.onnx` | the training model with its full state; its metadata hold the position of the run |
| `best.onnx`, `last.onnx` | inference models |
| `original.onnx` | the original model, which gets the trained weights back |
| `original.data` | tensors of a model with external data, shared by the other models |
| `config.yaml` | the options of the run; `onward train --config` starts another run with them |
| `log.jsonl` | the log |
| `.lock` | the process that trains here, while it does |
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from onward.checker import Finding, check
from onward.checker.codes import make_finding, worst_first
from onward.constants import constant_tensor
from onward.errors import DataError, Error, UnsupportedError
from onward.model import Model, load
from onward.model.serde import tensor_sites
from onward.model.state import all_states, with_metadata, without_tags
from onward.model.storage import goes_outside, is_external
from onward.model.storage.files import reason, regular
from onward.model.storage.tensor_sites import inside
from onward.recipe import lora
from onward.recipe.description import copy_description
from onward.recipe.exporter_notes import Restored
from onward.recipe.lora.adapters import adapters
from onward.training.config import EDITED, Natural, parse_json_as, read_settings
from onward.training.log import read_log
from onward.transform.bodies import lift_from_bodies, places_of, stored_in_bodies
from onward.transform.padding import write_padding
from onward.transform.quantized import stored_biases, stored_weights
from onward.transform.training import strip


def in_form_of(original: Model, training: Model) -> Model:
    """Return the original inference model with the trained weights, or their moving averages.

    If `original` has no place for one of the weights, return the graph that was trained.
    """
    trained = strip(with_averages(training))
    if any(Restored.from_fact(step.fact("train.exporter")).joined for step in training.steps):
        return trained  # the original graph has copies of trained tensors
    if any((step.fact("train.recipe") or {}).get("dequantize") for step in training.steps):
        return trained
    stored = stored_weights(training)
    updated = dict.fromkeys(name for step in training.steps for name in step.update)
    biases = stored_biases(training)
    names = [stored.get(name, name) for name in updated if name in training.graph.initializers and name not in biases]
    names += [name for pair in biases.values() for name in pair]
    if (added := adapters(trained)) and not adapters(original):
        names = [name for name in names if name in original.graph.initializers] + [adapter.weight for adapter in added]
        try:
            trained = lora.merge(trained)
        except UnsupportedError:  # adapters of quantized weights cannot be merged
            return trained
        if any(f"{adapter.weight}/merged" in trained.graph.initializers for adapter in added):
            return trained  # a tied weight was merged into a copy
    result, lifted = original.copy(), trained.copy()
    write_padding(result)  # as in the training model
    lift_from_bodies(lifted)
    return result if all(_put(result.graph, lifted.graph.initializers.get(name)) for name in names) else trained


def with_averages(training: Model) -> Model:
    """Return a training model with the moving averages of its parameters in their place, if it keeps them."""
    averages = {s.parameter: s.value for s in all_states(training) if s.role == "ema" and s.parameter}
    if not averages:
        return training
    result = training.copy()
    for name, value in averages.items():
        assert value.const_value is not None
        result.set(name, value.const_value.numpy())
    return result


def _put(graph: ir.Graph, trained: ir.Value | None) -> bool:
    """Replace the tensor of that name, or those at its places in bodies. Return False if the graph lacks one."""
    tensor = trained.const_value if trained is not None else None
    if tensor is None:
        return False
    if places := places_of(tensor):
        in_bodies, tensor = dict(stored_in_bodies(graph)), without_tags(tensor)
        return all(_replace(in_bodies.get(place), tensor) for place in places)
    stored = graph.initializers.get(tensor.name or "")
    if stored is None or stored.const_value is None:
        stored = next((node.outputs[0] for node in graph if node.outputs[0].name == tensor.name), None)
    return _replace(stored, tensor)


def _replace(stored: ir.Value | None, tensor: ir.TensorProtocol) -> bool:
    old = constant_tensor(stored)
    if stored is None or old is None or old.dtype != tensor.dtype or old.shape.numpy() != tensor.shape.numpy():
        return False
    new = with_metadata(
        tensor, dict(old.metadata_props), like=old
    )  # the numbers, under name and metadata of the old tensor
    if (node := stored.producer()) is None:
        stored.const_value = new
    else:
        node.attributes.clear()  # the constant may be in `value_floats` or similar
        node.attributes["value"] = ir.AttrTensor("value", new)
    return True


TRAINING, BEST, LAST, ORIGINAL = "training.onnx", "best.onnx", "last.onnx", "original.onnx"
CONFIG, LOG = "config.yaml", "log.jsonl"
_RESTORE = "restore it from a copy of the run"
_WHEN = ("event", "step", "epoch")
_FORMER = {
    "model": "load_training",
    "best": "load_best",
    "last": "load_last",
    "config": "read_config",
    "progress": "read_progress",
    "log": "read_log",
    "results": "read_results",
}
"""Former attributes of a run -> methods. They work until the next release."""


@dataclasses.dataclass
class Position:
    """Position of a run, saved with its state: all that resuming needs."""

    step: Natural = 0
    epoch: Natural = 0
    batch: Natural = 0
    """Number of finished batches in the epoch."""
    samples: Natural = 0
    best: float | None = None
    since_best: Natural = 0
    """Epochs since the best result."""
    log: Natural = 0
    """Length of the log in bytes. Steps logged after it are repeated."""
    board: Natural = 0
    """Length of the TensorBoard event file in bytes."""
    losses: float = 0.0
    """Sum of the losses of the samples in the epoch so far."""
    counted: Natural = 0
    """Number of these samples."""
    data: Mapping[str, Any] | None = None
    """Facts by which resuming recognizes the data."""

    @classmethod
    def of(cls, model: Model) -> Position:
        """Return the position saved in a training model."""
        text = model.step().metadata.get("train.progress", "{}")
        fact = parse_json_as(text, cls, f"the progress in `{model.path}`")
        if missing := [name for name in ("step", "epoch", "batch", "log") if name not in fact]:
            raise DataError(
                f"`{model.path}` lacks the position of the run: no `{missing[0]}`",
                hint=f"restore the saved file, or start a new run: onward train {model.path} --data DATA",
            )
        return cls(**{field.name: fact[field.name] for field in dataclasses.fields(cls) if field.name in fact})

    @property
    def loss(self) -> float:
        """Return the mean loss over the samples of the epoch so far."""
        return self.losses / self.counted if self.counted else math.nan


class Run:
    """A run on disk: the return value of `train` and `resume`, or `onward.Run("runs/digits")`.

        run = onward.Run("runs/digits")
        run.load_best().save("digits-trained.onnx")

    - `path`: its folder
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)

    def load_training(self) -> Model:
        """Load the training model of the last save."""
        self.refuse_if_empty()
        return load(self.path / TRAINING)

    def load_best(self) -> Model:
        """Load the model with the best validation result; without validation data, the last one."""
        return load(self.path / BEST) if (self.path / BEST).exists() else self.load_last()

    def load_last(self) -> Model:
        """Load the inference model of the last save."""
        return self._inference(self.load_training(), self._last_results())

    def read_config(self) -> dict[str, Any]:
        """Read the options of the run."""
        with _reading(self.path / CONFIG) as path:
            return read_settings(path, EDITED)

    def read_progress(self) -> dict[str, Any]:
        """Read the position of the run: `step`, `epoch`, `batch` in the epoch, `samples`."""
        position = dataclasses.asdict(Position.of(self.load_training()))
        return {name: value for name, value in position.items() if name != "data"}

    def read_log(self) -> list[dict[str, Any]]:
        """Read the events of the run, in order."""
        with _reading(self.path / LOG) as path:
            return list(read_log(path))

    def read_results(self) -> dict[str, float]:
        """Read the latest validation results: `loss` and metrics."""
        measured = [event for event in self.read_log() if event.get("event") == "validation"]
        return {name: value for name, value in measured[-1].items() if name not in _WHEN} if measured else {}

    def _last_results(self) -> dict[str, float]:
        with contextlib.suppress(DataError):
            return self.read_results()
        return {}

    def check(self, *, target: str | None = None) -> list[Finding]:
        """Check the files of the run: models as `onward.check` does, checksums, progress and log.

        - `target`: also check that a runtime loads the models, such as `"onnxruntime"`
        """
        self.refuse_if_empty()
        findings = []
        for name in (TRAINING, ORIGINAL, BEST, LAST):
            path = self.path / name
            if path.exists():
                found_here = _findings_in(path, target)
                findings += [dataclasses.replace(f, place=f"{name}: {f.place}") for f in found_here]
            elif name == ORIGINAL:
                findings.append(make_finding("OW801", name, "the run cannot be resumed without it", _RESTORE))
        for name, read in ((TRAINING, self.read_progress), (CONFIG, self.read_config), (LOG, self.read_log)):
            try:
                read()
            except Error as error:
                code = "OW802" if (self.path / name).exists() else "OW801"
                findings.append(make_finding(code, name, error.message, error.hint))
        return worst_first(findings)

    def refuse_if_empty(self) -> None:
        """Raise DataError if the folder holds no run."""
        if not (self.path / TRAINING).exists():
            raise DataError(f"`{self.path}` holds no run: no {TRAINING}", hint="start one with `onward train`")

    def _inference(self, model: Model, results: Mapping[str, float]) -> Model:
        """Return the original model with the trained weights, as a single file if it was one.

        It says what it is, with the validation results of these weights.
        """
        original = load(self.path / ORIGINAL)
        result = in_form_of(original, model)
        copy_description(model, result, results)
        if not goes_outside(tensor_sites(original)):
            for site in tensor_sites(result):
                if (tensor := site.tensor) is not None and is_external(tensor):
                    site.tensor = inside(tensor)
        return result

    if not TYPE_CHECKING:  # type checkers see the current names only

        def __getattr__(self, name: str) -> Any:
            if name not in _FORMER:
                raise AttributeError(f"a run has no `{name}`")
            return getattr(self, _FORMER[name])()

    def __repr__(self) -> str:
        return f"<onward.Run {self.path}>"


def _findings_in(path: Path, target: str | None) -> list[Finding]:
    try:
        findings = check(path, target=target)
    except Error as error:
        return [make_finding("OW802", "file", error.message, error.hint)]
    return [make_finding("OW803", f.place, f.message, f.hint) if f.code == "OW116" else f for f in findings]


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[Path]:
    try:
        regular(path)
        yield path
    except OSError as error:
        raise DataError(f"cannot read `{path}`: {reason(error)}", hint="pass the folder of a run") from error
