"""A run that is on disk: what is in its folder, to look at and to use. `folder.py` writes it.

| file | what it is |
|---|---|
| `training.onnx` | the training model with its full state; where the run stands is in its metadata |
| `best.onnx`, `last.onnx` | inference models |
| `original.onnx` | the model as it was given: trained weights go back into it |
| `original.data` | beside a model that has its tensors outside: those that were given, which the others refer to, too |
| `config.yaml` | how the run was started; `onward train --config` takes it to start another like it |
| `log.jsonl` | what happened |
| `.lock` | who trains here, while somebody does |
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
from onward.constants import tensor_in
from onward.errors import DataError, Error, UnsupportedError
from onward.model import Model, load
from onward.model.serde import places_of
from onward.model.state import all_states, with_metadata
from onward.model.storage import goes_outside, is_external
from onward.model.storage.files import reason, regular
from onward.model.storage.tensor_places import inside
from onward.recipe import lora
from onward.recipe.exporter_notes import Restored
from onward.recipe.lora.adapters import adapters
from onward.training.config import EDITED, Natural, parse_json_as, read_settings
from onward.training.log import read_log
from onward.transform.padding import write_padding
from onward.transform.quantized import stored_as_integers, stored_biases
from onward.transform.training import strip


def in_form_of(original: Model, training: Model) -> Model:
    """The inference model with the weights of a training model: moving averages of them, where it keeps such.

    They are put into `original`, which stays as it was in all else. Where it has no place for one of them, the result
    is the graph that was trained.
    """
    trained = strip(_put_averages(training))
    if any(Restored.from_fact(step.fact("train.exporter")).joined for step in training.steps):
        return trained  # the graph that was given has copies of what is trained
    stored = stored_as_integers(training)
    updated = dict.fromkeys(name for step in training.steps for name in step.update)
    biases = stored_biases(training)
    names = [stored.get(name, name) for name in updated if name in training.graph.initializers and name not in biases]
    names += [name for both in biases.values() for name in both]
    if (added := adapters(trained)) and not adapters(original):
        names = [name for name in names if name in original.graph.initializers] + [adapter.weight for adapter in added]
        try:
            trained = lora.merge(trained)
        except UnsupportedError:  # adapters of quantised weights stay beside them
            return trained
        if any(f"{adapter.weight}/merged" in trained.graph.initializers for adapter in added):
            return trained  # a weight that is tied to another place was merged beside it
    result = original.copy()
    write_padding(result)  # as it was trained
    return result if all(_put(result.graph, trained.graph.initializers.get(name)) for name in names) else trained


def _put_averages(training: Model) -> Model:
    averages = {s.parameter: s.value for s in all_states(training) if s.role == "ema" and s.parameter}
    if not averages:
        return training
    result = training.copy()
    for name, value in averages.items():
        assert value.const_value is not None
        result.set(name, value.const_value.numpy())
    return result


def _put(graph: ir.Graph, trained: ir.Value | None) -> bool:
    """Give the tensor of that name, wherever the graph has it, the trained value; whether it has it."""
    tensor = trained.const_value if trained is not None else None
    if tensor is None:
        return False
    place = graph.initializers.get(tensor.name or "")
    if place is not None and place.const_value is not None:
        old = place.const_value
        if not _is_alike(old, tensor):
            return False
        place.const_value = _describe_as(old, tensor)
        return True
    for node in graph:
        if node.outputs[0].name == tensor.name and (constant := tensor_in(node)) is not None:
            if not _is_alike(constant, tensor):
                return False
            node.attributes.clear()  # numbers may be written out under another name
            node.attributes["value"] = ir.AttrTensor("value", _describe_as(constant, tensor))
            return True
    return False


def _is_alike(a: ir.TensorProtocol, b: ir.TensorProtocol) -> bool:
    return a.dtype == b.dtype and a.shape.numpy() == b.shape.numpy()


def _describe_as(old: ir.TensorProtocol, new: ir.TensorProtocol) -> ir.TensorProtocol:
    """The new numbers under the old name, with what was said about the old ones."""
    return with_metadata(new, dict(old.metadata_props), like=old)


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
"""Attributes of a run that are understood until the next release, and the methods in their place."""


@dataclasses.dataclass
class Place:
    """Where a run stands. It is saved with the state, and is all that is needed to go on."""

    step: Natural = 0
    epoch: Natural = 0
    batch: Natural = 0
    """Batches of the epoch that are done."""
    samples: Natural = 0
    best: float | None = None
    since_best: Natural = 0
    """Epochs since the best result."""
    log: Natural = 0
    """How much of the log belongs to it, in bytes. What follows are steps that will be made again."""
    board: Natural = 0
    """The same for the event file of TensorBoard."""
    losses: float = 0.0
    """The sum of the losses of the samples in the epoch so far,"""
    counted: Natural = 0
    """and their number."""
    data: Mapping[str, Any] | None = None
    """Facts by which the data are recognized when the run is resumed."""

    @classmethod
    def of(cls, model: Model) -> Place:
        """Where the run stood when this model was saved."""
        text = model.step().metadata.get("train.progress", "{}")
        fact = parse_json_as(text, cls, f"the progress in `{model.path}`")
        if missing := [name for name in ("step", "epoch", "batch", "log") if name not in fact]:
            raise DataError(
                f"`{model.path}` does not say how far the run is: no `{missing[0]}`",
                hint="restore the file that the run saved, or start a new run from this one: "
                f"onward train {model.path} --data DATA",
            )
        return cls(**{field.name: fact[field.name] for field in dataclasses.fields(cls) if field.name in fact})

    @property
    def loss(self) -> float:
        """The mean over the samples of the epoch so far."""
        return self.losses / self.counted if self.counted else math.nan


class Run:
    """A run on disk: what `train` and `resume` return, and `onward.Run("runs/digits")` opens.

        run = onward.Run("runs/digits")
        run.load_best().save("digits-trained.onnx")

    - `path`: its folder
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)

    def load_training(self) -> Model:
        """Load the training model as it was last saved."""
        self.refuse_if_empty()
        return load(self.path / TRAINING)

    def load_best(self) -> Model:
        """Load the model with the best result on validation data; without such data, the last one."""
        return load(self.path / BEST) if (self.path / BEST).exists() else self.load_last()

    def load_last(self) -> Model:
        """Load the model as it was last saved."""
        return self._inference(self.load_training())

    def read_config(self) -> dict[str, Any]:
        """Read how it was started."""
        with _reading(self.path / CONFIG) as path:
            return read_settings(path, EDITED)

    def read_progress(self) -> dict[str, Any]:
        """Read where the run stands: `step`, `epoch`, `batch` in the epoch, `samples`."""
        place = dataclasses.asdict(Place.of(self.load_training()))
        return {name: value for name, value in place.items() if name != "data"}

    def read_log(self) -> list[dict[str, Any]]:
        """Read what happened, in order."""
        with _reading(self.path / LOG) as path:
            return list(read_log(path))

    def read_results(self) -> dict[str, float]:
        """Read the latest results on validation data: `loss`, and the metrics."""
        measured = [event for event in self.read_log() if event.get("event") == "validation"]
        return {name: value for name, value in measured[-1].items() if name not in _WHEN} if measured else {}

    def check(self, *, target: str | None = None) -> list[Finding]:
        """Find what is wrong with the files of the run: `onward.check` of its models, checksums, progress, and the log.

        - `target`: also what would be in the way of a runtime that loads the models, such as `"onnxruntime"`
        """
        self.refuse_if_empty()
        findings = []
        for name in (TRAINING, ORIGINAL, BEST, LAST):
            path = self.path / name
            if path.exists():
                listed = _findings_in(path, target)
                findings += [dataclasses.replace(one, place=f"{name}: {one.place}") for one in listed]
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
        """Fail if there is no run in the folder."""
        if not (self.path / TRAINING).exists():
            raise DataError(f"`{self.path}` holds no run: there is no {TRAINING}", hint="start one with `onward train`")

    def _inference(self, model: Model) -> Model:
        """The model as it was given, with other weights; one that is one file stays so, wherever these are."""
        original = load(self.path / ORIGINAL)
        result = in_form_of(original, model)
        if not goes_outside(places_of(original)):
            for place in places_of(result):
                if (tensor := place.tensor) is not None and is_external(tensor):
                    place.tensor = inside(tensor)
        return result

    if not TYPE_CHECKING:  # which is told the new names alone

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
    return [make_finding("OW803", one.place, one.message, one.hint) if one.code == "OW116" else one for one in findings]


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[Path]:
    try:
        regular(path)
        yield path
    except OSError as error:
        raise DataError(f"`{path}` cannot be read: {reason(error)}", hint="name the folder of a run") from error
