"""How a run was started, as it is kept in its folder."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from onward import engines
from onward.arguments import Count, Range, Seed, Threads
from onward.differentiate.recompute import Choice
from onward.engines import Engine
from onward.errors import DataError, listed
from onward.model import Model
from onward.training.schema import Natural, checked

Last = Literal["keep", "drop", "pad"]
Paths = str | Sequence[str] | Mapping[str, str]

_SOURCES = ("data", "validation")

_OBJECT = "<object>"
"""What stands for data that were no files."""

_BEFORE: Mapping[str, Any] = {
    "stratify": False,
    "classes": None,
    "compile": True,
    "precision": None,
    "deterministic": False,
    "reset": False,
    "steps": None,
    "noise": {},
    "statistics": True,
}
"""Settings that were not there once, and what they would have been."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How a run was started: enough to go on with it. The types are those of what is stored."""

    model: str
    data: Paths
    batch_size: Annotated[int, Range(least=1, most=2**31 - 1)]
    epochs: Natural = 1
    validation: Annotated[float, Range(above=0, below=1)] | Paths | None = None
    columns: Mapping[str, str | Sequence[str]] = dataclasses.field(default_factory=dict)
    shuffle: bool = True
    last: Last = "keep"
    seed: Seed = 0
    metrics: Sequence[str] = ()
    monitor: str | None = None
    patience: Count | None = None
    save_every: Annotated[float, Range(least=0)] = 60.0
    tensorboard: bool = False
    statistics: bool = True
    """Whether norms of gradients and histograms of weights are in the log."""
    engine: str = "onnxruntime"
    device: str = "cpu"
    threads: Threads | None = None
    recompute: Choice = None
    compile: bool = True
    precision: str | None = None
    deterministic: bool = False
    stratify: bool | None = None
    steps: str | Mapping[str, Count] | None = None
    noise: Mapping[str, str] = dataclasses.field(default_factory=dict)
    classes: Sequence[str] | None = None
    """What the numbers of labels stand for."""
    reset: bool = False
    """Whether it started from the initialization of the model, and not from its state."""

    def start_engine(self, training: Model) -> Engine:
        """The engine that the run is on. What is not asked for is not mentioned: not every engine has it."""
        wanted: dict[str, Any] = {
            "device": None if self.device == "cpu" else self.device,
            "threads": self.threads,
            "recompute": self.recompute,
            "compile": None if self.compile else False,
            "precision": self.precision,
            "deterministic": self.deterministic or None,
        }
        options = {name: value for name, value in wanted.items() if value is not None}
        return engines.start(training, self.steps, engine=self.engine, **options)

    def moved(self, engine: str, device: str) -> Config:
        """The same on another engine or device. What is the engine's own business stays behind with it."""
        if engine == self.engine:
            return dataclasses.replace(self, device=device)
        return dataclasses.replace(
            self, engine=engine, device=device, threads=None, recompute=None, precision=None, deterministic=False
        )

    def to_json(self) -> dict[str, Any]:
        """What JSON can hold of it. Paths become absolute, so that the run can go on from anywhere."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        places = {name: _stored(fields[name]) for name in _SOURCES}
        return {**fields, **places, "metrics": list(self.metrics)}

    @classmethod
    def stored(cls, file: Path) -> dict[str, Any]:
        """What a file holds, all of it and no more, each setting as it may be."""
        settings = {**_BEFORE, **checked(file.read_bytes(), cls, f"`{file}`")}
        known = {field.name for field in dataclasses.fields(cls)}
        if settings.keys() != known:
            names = listed(sorted(settings.keys() ^ known), 5)
            raise DataError(
                f"`{file.parent}` was started by another version of Onward: its configuration differs in {names}",
                hint=f"go on with that version, or start a new run from `{file.with_name('training.onnx')}`",
            )
        return settings

    @classmethod
    def from_json(cls, stored: Mapping[str, Any], **given: Any) -> Config:
        """What was stored, or was given anew; data that were objects must be."""
        settings = {**stored, **{name: value for name, value in given.items() if value is not None}}
        for name in _SOURCES:
            if isinstance(settings.get(name), str) and settings[name] == _OBJECT:
                raise DataError(
                    f"the {name} of this run came from Python", hint=f"give it again: `onward.resume(run, {name}=...)`"
                )
            if given.get(name) is None and (gone := _gone(settings.get(name))):
                raise DataError(
                    f"the {name} of this run is no longer at `{gone}`",
                    hint=f"say where it is: `--{name} NEW` (`onward.resume(run, {name}=...)`)",
                )
        return cls(**{**settings, "metrics": tuple(settings["metrics"])})


def _stored(source: Any) -> Any:
    if source is None or isinstance(source, float):
        return source
    if isinstance(source, str | os.PathLike):
        return _absolute(os.fspath(source))
    if isinstance(source, list) and source and all(isinstance(item, str | os.PathLike) for item in source):
        return [_absolute(os.fspath(item)) for item in source]
    if isinstance(source, Mapping) and all(isinstance(item, str | os.PathLike) for item in source.values()):
        return {str(name): os.path.abspath(item) for name, item in source.items()}
    return _OBJECT


def _absolute(path: str) -> str:
    """Also of the path in `name=path`."""
    name, path = _parts(path)
    return name + os.path.abspath(path)


def _parts(path: str) -> tuple[str, str]:
    """`name=` and the path in `name=path`; nothing and the path where that is all there is."""
    name = re.match(r"[^=/\\]+=", path)
    return ("", path) if name is None or os.path.exists(path) else (name[0], path[name.end() :])


def _gone(stored: Any) -> str | None:
    """A path that leads nowhere, of those that were stored; `file:column` is one, too."""
    paths = [stored] if isinstance(stored, str) else stored.values() if isinstance(stored, Mapping) else stored
    for path in paths if isinstance(paths, Iterable) else ():
        file = _parts(path)[1]
        if not os.path.exists(file) and not os.path.exists(file.rpartition(":")[0]):
            return file
    return None
