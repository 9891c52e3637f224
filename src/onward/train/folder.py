"""A run as a folder: everything that is needed to look at it, to use what came out of it, and to go on.

| file | what it is |
|---|---|
| `training.onnx` | the training model with its full state; where the run stands is in its metadata |
| `best.onnx`, `last.onnx` | inference models |
| `original.onnx` | the model as it was given, where training needed another form of it |
| `config.json` | how the run was started |
| `log.jsonl` | what happened |
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from onward.errors import DataError, InvalidModelError
from onward.model import Model, read
from onward.train.log import read_log
from onward.transform.training import strip

TRAINING, BEST, LAST, ORIGINAL = "training.onnx", "best.onnx", "last.onnx", "original.onnx"
CONFIG, LOG = "config.json", "log.jsonl"


class Run:
    """A run on disk. `run.best` and `run.last` are the models that came out of it."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)

    @classmethod
    def start(cls, path: str | os.PathLike[str], model: Model, original: Model, config: dict[str, Any]) -> Run:
        """Make the folder of a new run."""
        run = cls(path)
        if (run.path / TRAINING).exists():
            raise DataError(
                f"`{run.path}` holds a run already",
                hint=f"go on with it (`onward train --resume {run.path}`), or name another folder",
            )
        run.path.mkdir(parents=True, exist_ok=True)
        if not _has_same_graph(strip(model), original):
            original.save(run.path / ORIGINAL)
        write_atomically(run.path / CONFIG, json.dumps(config, indent=1) + "\n")
        return run

    @property
    def model(self) -> Model:
        """The training model as it was last saved."""
        if not (self.path / TRAINING).exists():
            raise DataError(f"`{self.path}` holds no run: there is no {TRAINING}", hint="start one with `onward train`")
        return read(self.path / TRAINING)

    @property
    def best(self) -> Model:
        return read(self.path / (BEST if (self.path / BEST).exists() else LAST))

    @property
    def last(self) -> Model:
        return read(self.path / LAST)

    @property
    def config(self) -> dict[str, Any]:
        try:
            config: dict[str, Any] = json.loads((self.path / CONFIG).read_text())
        except (OSError, ValueError) as error:
            raise DataError(f"`{self.path / CONFIG}` cannot be read: {error}") from error
        return config

    @property
    def progress(self) -> dict[str, Any]:
        """Where the run stands: `step`, `epoch`, `batch` in the epoch, `samples`."""
        return {"step": 0, "epoch": 0, "batch": 0, "samples": 0} | (self.model.step().fact("train.progress") or {})

    @property
    def log(self) -> list[dict[str, Any]]:
        """What happened, in order."""
        return list(read_log(self.path / LOG))

    def save(self, model: Model, progress: dict[str, Any]) -> None:
        """Keep the training model, and where the run stands, all at once."""
        model.step().metadata["train.progress"] = json.dumps(progress)
        model.save(self.path / TRAINING)

    def export(self, model: Model, name: str) -> Path:
        """Write the inference model with the weights as they are now."""
        original = self.path / ORIGINAL
        return (with_weights_of(read(original), model) if original.exists() else strip(model)).save(self.path / name)

    def __repr__(self) -> str:
        return f"<onward.Run {self.path}>"


def with_weights_of(original: Model, trained: Model) -> Model:
    """A copy of a model with the weights that another has under the same names."""
    result = original.copy()
    changed = trained.step().update if trained.steps else trained.graph.initializers
    for name, value in result.graph.initializers.items():
        if name not in changed or name not in trained.graph.initializers:
            continue
        tensor = trained.graph.initializers[name].const_value
        assert tensor is not None and value.const_value is not None
        if tensor.shape.numpy() != value.const_value.shape.numpy():
            raise InvalidModelError(f"`{name}` has another shape in training than in the model")
        result.set(name, tensor.numpy())
    return result


def _has_same_graph(a: Model, b: Model) -> bool:
    """Whether two models differ in nothing but their weights."""
    same_nodes = [n.op_identifier() for n in a.graph] == [n.op_identifier() for n in b.graph]
    return a.opset == b.opset and same_nodes and set(a.graph.initializers) == set(b.graph.initializers)


def write_atomically(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)
