"""What a page trains: the lowered parts of a training model, its state, data, and a description of all of it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from onward import describe
from onward.engines import Engine
from onward.errors import DataError, UnsupportedError
from onward.inspect.render import step_rows
from onward.lowering import lower
from onward.lowering.contract import contract_of
from onward.model import Model
from onward.model.state import all_states
from onward.recipe.measures import Labels, labels_of, objectives
from onward.training.config import Config
from onward.training.data import Batch, Dataset, Stream
from onward.training.feed import open_feed
from onward.transform.rebatch import check_batch_axis
from onward.web.columns import Packer, all_rows
from onward.web.pictures import picture_of
from onward.web.places import File, averages, trained_file, training_file

_TYPES = {
    "float32",
    "float64",
    "float16",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "bool",
}
"""What onnxruntime-web takes."""

_PARTS = ("step", "evaluation", "gradients", "apply")

_ROWS = {"loss", "optimizer", "schedule", "clipping", "accumulate", "average", "loss scale"}
"""What of a step the page tells, of what `onward show` does."""

Files = dict[str, bytes]


class Content:
    """The files of a page, by name, and what `page.json` says about them."""

    def __init__(
        self,
        original: Model,
        training: Model,
        engine: Engine,
        config: Config,
        opened: Dataset | Stream | None = None,
        picture: str | None = None,
    ):
        if len(training.steps) != 1:
            raise UnsupportedError(
                "a page trains models with one step, and this one has several that take turns",
                hint="train it with `onward train`",
            )
        self.training, self.engine, self.config = training, engine, config
        self.files: Files = {}
        self.notes: list[str] = []
        self._classes: tuple[str, ...] | None = None
        rows = self._rows(opened)
        trained, whole = trained_file(original, training), training_file(training)
        self.files |= {"model.onnx": trained.data, "training.onnx": whole.data}
        labels = labels_of(training)
        self.description = {
            "format": 1,
            "about": self._about(),
            "order": self._order(),
            "parts": {name: self._part(name) for name in _PARTS},
            "state": self._state(whole),
            "trained": [{"state": name, "offset": begin} for name, (begin, _) in trained.places],
            "averages": averages(training),
            "data": self._pack(rows),
            "inputs": self._inputs(rows),
            "labels": self._labels(labels),
            "picture": self._picture(labels, rows[0], picture),
        }
        digest = hashlib.sha256(json.dumps(self.description["order"]).encode())
        for name, content in sorted(self.files.items()):
            digest.update(name.encode() + content)
        self.description["fingerprint"] = digest.hexdigest()[:32]

    # ---- the model ----

    def _part(self, name: str) -> dict[str, Any]:
        made = lower(self.training, part=name)
        if contract_of(made).loss is None and name in ("step", "evaluation"):
            raise UnsupportedError(
                "a page shows the loss, and that of this model is not known or cannot be computed without training",
                hint="train it with `onward train`",
            )
        self.files[f"{name}.onnx"] = made.to_proto().SerializeToString()
        return contract_of(made).to_json()

    def _state(self, file: File) -> list[dict[str, Any]]:
        where = dict(file.places)
        return [
            {
                "name": state.name,
                "type": _type(state.name, state.value.dtype),
                "shape": list(state.array.shape),
                "offset": where[state.name][0],
            }
            for state in all_states(self.training)
        ]

    def _about(self) -> dict[str, Any]:
        summary = describe(self.training)
        step = summary.steps[0]
        told = [(label, text if isinstance(text, str) else ", ".join(text)) for label, text in step_rows(summary, step)]
        rows = [[label, text.partition("; differentiated")[0]] for label, text in told if label in _ROWS]
        return {"parameters": step.trained.numbers, "rows": rows}

    # ---- data ----

    def _rows(self, opened: Dataset | Stream | None) -> tuple[Batch | None, Batch | None]:
        """All rows to train on, and to validate with."""
        if self.config.data is None:
            return None, None
        in_order = dataclasses.replace(self.config, shuffle=False, last="pad")
        feed = open_feed(self.engine, in_order, opened)
        self.notes += feed.notes
        self._classes = feed.classes
        if not feed.training.is_padded:
            raise DataError("a stream of batches cannot go into a page", hint="give data that have an end, as a file")
        held_out = feed.validation
        return all_rows(feed.training), all_rows(held_out) if held_out is not None else None

    def _pack(self, rows: Sequence[Batch | None]) -> dict[str, Any]:
        packer, told = Packer(), {}
        for part, found in zip(("training", "validation"), rows, strict=True):
            if found is not None:
                columns = [packer.add(name, values) for name, values in found.items()]
                told[part] = {"rows": len(next(iter(found.values()))), "columns": columns}
        self.files["data.bin"] = bytes(packer.data)
        return told

    def _order(self) -> dict[str, Any]:
        config = self.config
        fixed = check_batch_axis(self.engine.of_a_batch, self.engine.model.inputs)
        last = "drop" if fixed is not None and config.last == "keep" else config.last
        return {
            "seed": str(config.seed or 0),  # which JSON of other languages would round
            "batch_size": config.batch_size,
            "fixed": fixed is not None,
            "last": last,
            "shuffle": config.shuffle,
        }

    def _inputs(self, rows: Sequence[Batch | None]) -> list[dict[str, Any]]:
        """What a sample is, input by input; sizes that the model leaves open are those of the data."""
        told: list[dict[str, Any]] = []
        own = {value.name for value in self.training.inputs}
        for name, value in self.engine.of_a_batch.items():
            found = rows[0][name].shape[1:] if rows[0] is not None else _sizes(value)
            what = {"name": name, "type": _type(name, value.dtype), "shape": list(found)}
            told.append({**what, "is_target": name not in own})
        return told

    def _labels(self, labels: Labels | None) -> dict[str, Any] | None:
        """Which input is the number of a class, and which output tells classes apart."""
        if labels is None:
            return None
        loss = next(one for one in objectives(self.training) if one.target == labels.name)
        names = self._classes or tuple(self.config.classes or ()) or tuple(map(str, range(labels.count)))
        return {
            "input": labels.name,
            "output": loss.output,
            "axis": loss.axis,
            "count": labels.count,
            "ignored": labels.ignored,
            "names": [*names, *map(str, range(len(names), labels.count))],
        }

    def _picture(self, labels: Labels | None, rows: Batch | None, said: str | None) -> dict[str, Any] | None:
        """How the one input that is no label is a picture."""
        others = [
            (name, value)
            for name, value in self.engine.of_a_batch.items()
            if labels is not None and name != labels.name and value.dtype in (ir.DataType.FLOAT, ir.DataType.UINT8)
        ]
        if len(others) != 1:
            return None
        name, value = others[0]
        found = rows[name] if rows is not None else None
        return picture_of(found.shape[1:] if found is not None else _sizes(value), found, said)


def _sizes(value: ir.Value) -> tuple[int, ...]:
    sizes = [] if value.shape is None else [size for size in value.shape[1:] if isinstance(size, int)]
    if value.shape is None or len(sizes) != len(value.shape) - 1:
        raise UnsupportedError(
            f"how large a sample of `{value.name}` is, the model leaves open",
            hint="give data with `--data`, which say it",
        )
    return tuple(sizes)


def _type(name: str, dtype: ir.DataType | None) -> str:
    found = "" if dtype is None else dtype.name.lower()
    found = {"float": "float32", "double": "float64"}.get(found, found)
    if found not in _TYPES:
        raise UnsupportedError(
            f"`{name}` is {found or 'of an unknown type'}, which onnxruntime-web does not take",
            hint="export the model in float32",
        )
    return found
