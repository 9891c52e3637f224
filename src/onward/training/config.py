"""Configuration of a run: a file for people that can resume the run or start another like it."""

from __future__ import annotations

import dataclasses
import glob
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, get_type_hints

import numpy as np

from onward import engines
from onward.arguments import Range, coerce, from_text, with_new_names
from onward.configuration import read_configuration, write_yaml
from onward.engines import Engine
from onward.engines.distributed import ProcessGroup, current_group
from onward.engines.distributed.deepspeed_config import read_deepspeed_config, with_batch_size, without_batch_size
from onward.errors import ArgumentError, DataError, RecipeError, first_line, suggest
from onward.model import Model
from onward.options import (
    ENGINE,
    ModelAndData,
    Parallel,
    RecipeOptions,
    TrainConfig,
    TrainOptions,
    field_types,
    former_names,
    options_of,
)
from onward.recipe.prepare import Recipe
from onward.recipe.spec import Spec

Natural = Annotated[int, Range(least=0, most=2**53)]
"""Integers up to this limit are exact in every language that reads JSON."""

EDITED = "the file was edited, or written by another version: undo that, or start a new run"


def parse_json_as(text: str | bytes, cls: type, name: str) -> dict[str, Any]:
    """Return a JSON object, with the values that are fields of the class converted to their types."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name} is not valid JSON: {first_line(error)}", hint=EDITED) from error
    if not isinstance(values, dict):
        raise DataError(f"{name} is not a JSON object", hint=EDITED)
    return check_values(values, get_type_hints(cls, include_extras=True), name, EDITED)


def check_values(values: dict[str, Any], hints: Mapping[str, Any], name: str, hint: str) -> dict[str, Any]:
    """Return the values converted to their types. Other keys are unchanged.

    Raises:
        DataError: for all values that do not fit, together.
    """
    problems = []
    for key, value_type in hints.items():
        try:
            if key in values:
                values |= {key: coerce(f"`{key}`", values[key], value_type)}
        except (ArgumentError, RecipeError) as error:
            problems.append(error)
    if problems:
        messages = "; ".join(problem.message for problem in problems)
        raise DataError(f"{name} cannot be used: {messages}", hint=problems[0].hint or hint)
    return values


_Paths = str | Sequence[str] | Mapping[str, str]

_SOURCES = ("data", "validation")
_RECIPE = {field.name for field in dataclasses.fields(RecipeOptions)} - {"seed"}

_RUN_OPTIONS = {field.name for field in dataclasses.fields(TrainOptions)}

_ENGINE_DEFAULTS = {o.name: o.default for o in options_of(TrainConfig) if o.panel == ENGINE and o.name != "engine"}
"""Options of the engine with their defaults."""

PLACEHOLDER = "<object>"
"""Stands for a Python object, which a file cannot hold."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Stored(TrainOptions):
    """Options with the types that a file can hold."""

    model: str | None = None
    data: _Paths | None = None
    validation: Annotated[float, Range(above=0, below=1)] | _Paths | None = None


def read_settings(path: str | os.PathLike[str], hint: str = "see `onward train --help`") -> dict[str, Any]:
    """Return the arguments of `onward.train` in a configuration file, checked."""
    settings = with_new_names(read_configuration(path), former_names(TrainOptions))
    hints = field_types(_Stored)
    if unknown := [key for key in settings if key not in hints]:
        raise DataError(f"`{path}` has the unknown option `{unknown[0]}`", hint=suggest(unknown[0], hints) or hint)
    typed = {
        name: from_text(value, hints[name]) if isinstance(value, str) else value for name, value in settings.items()
    }
    return check_values(typed, hints, f"`{path}`", hint)


def write_settings(settings: Mapping[str, Any]) -> str:
    """Return the text of a configuration file, without options that are None."""
    remark = "Options of this run. `onward train --config` starts another run with them; flags override them."
    return write_yaml({name: value for name, value in settings.items() if value not in (None, {})}, remark)


def select_recipe(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that belong to the recipe and are not None."""
    return {name: value for name, value in settings.items() if name in _RECIPE and value is not None}


def settings_from(
    function: str,
    arguments: Mapping[str, Any],
    recipe: Recipe | None = None,
    config: str | os.PathLike[str] | TrainConfig | None = None,
) -> dict[str, Any]:
    """Return the arguments of a training: from objects, keywords, and a file for the rest.

    Raises:
        ArgumentError: if a changed field of an object is also given as a keyword.
    """
    stored = read_settings(config) if isinstance(config, str | os.PathLike) else {}
    settings = dict(arguments)
    for source, fields in (("recipe", recipe), ("config", config)):
        for name, value in fields.changed().items() if isinstance(fields, Recipe | TrainConfig) else ():
            if name not in _RUN_OPTIONS:
                raise RecipeError(
                    f"`{name}` of a recipe has no effect in `{function}`",
                    hint="make the training model first: `recipe.apply(onward.load(model))`",
                )
            if name in settings:
                raise ArgumentError(f"`{function}` is given `{name}` twice, once in `{source}`", hint="pass it once")
            settings[name] = value
    return stored | settings


def refuse_placeholders(settings: Mapping[str, Any]) -> None:
    """Raise DataError if a file stands for a Python object, which it cannot hold."""
    for name, value in settings.items():
        if isinstance(value, str) and value == PLACEHOLDER:
            raise DataError(f"the {name} of this run came from Python", hint=f"pass it again: `{name}=...`")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(TrainConfig, ModelAndData):
    """Options of a run, resolved, and its recipe as it was given."""

    batch_size: int = 1
    metrics: Sequence[str] = ()
    recipe: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def start_engine(self, training: Model) -> Engine:
        """Start the engine of the run. Defaults are not passed: not every engine has every option."""
        options = {name: value for name, usual in _ENGINE_DEFAULTS.items() if (value := getattr(self, name)) != usual}
        if isinstance(self.deepspeed_config, Mapping):
            options["deepspeed_config"] = with_batch_size(
                self.deepspeed_config, training, self.batch_size, current_group().size
            )
        return engines.start(training, self.steps, engine=self.engine, **options)

    def on_engine(self, engine: str, device: str) -> Config:
        """Return the configuration for another engine or device, without options of the old one."""
        if engine == self.engine:
            return dataclasses.replace(self, device=device)
        defaults = {name: usual for name, usual in _ENGINE_DEFAULTS.items() if name != "compile"}
        return dataclasses.replace(self, **{**defaults, "engine": engine, "device": device})

    def shared_out(self, strategy: Parallel | None, mesh: str | None, deepspeed_config: Any) -> Config:
        """Return the configuration with these values, if any of them is not None."""
        if strategy in (None, self.strategy) and mesh is None and deepspeed_config is None:
            unchanged = self.deepspeed_config
            if isinstance(unchanged, Mapping):  # the number of processes may differ now
                unchanged = without_batch_size(unchanged)
            return dataclasses.replace(self, deepspeed_config=unchanged)
        previous = self.strategy if mesh is None else None
        return dataclasses.replace(self, strategy=strategy or previous, mesh=mesh, deepspeed_config=deepspeed_config)

    def spread_over(self, group: ProcessGroup) -> Config:
        """Return the configuration for a process group (default strategy: data parallel)."""
        content = read_deepspeed_config(self.deepspeed_config)  # not its path: a run needs only its folder
        config = dataclasses.replace(self, deepspeed_config=content)
        if group.size == 1:
            return config
        if self.engine == "jax":
            return dataclasses.replace(config, mesh=self.mesh or "data")
        return dataclasses.replace(config, strategy=self.strategy or ("ddp" if self.mesh is None else "tensor"))

    def to_json(self) -> dict[str, Any]:
        """Return the part that files can hold. Paths become absolute, to resume from any folder."""
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "recipe"}
        paths = {name: _to_stored(own[name]) for name in ("model", "checkpoint", "weights", *_SOURCES)}
        plain = {name: _plain(value, name) for name, value in {**own, **self.recipe}.items() if name not in paths}
        return {**paths, **plain}

    @classmethod
    def from_arguments(cls, function: str, arguments: Mapping[str, Any]) -> Config:
        """Return the configuration of a function call. None counts as not given."""
        if missing := [name for name in ("model", "data") if arguments.get(name) is None]:
            raise ArgumentError(f"`{function}` needs `{missing[0]}`", hint=f"see `help(onward.{function})`")
        recipe = select_recipe(arguments)
        own = {name: value for name, value in arguments.items() if name not in recipe and value is not None}
        return cls(**own, recipe=recipe)

    @property
    def title(self) -> str:
        """Return the path of the original model, or `model.onnx`."""
        path = self.model if isinstance(self.model, str | os.PathLike) else getattr(self.model, "path", None)
        return str(path) if path and path != PLACEHOLDER else "model.onnx"

    @classmethod
    def from_settings(cls, stored: Mapping[str, Any], **changes: Any) -> Config:
        """Return the stored configuration with changes. Data from Python must be passed again."""
        settings = {**stored, **{name: value for name, value in changes.items() if value is not None}}
        if missing := [name for name in ("data", "batch_size") if settings.get(name) is None]:
            raise DataError(f"the configuration of this run lacks `{missing[0]}`", hint=EDITED)
        for name in _SOURCES:
            if isinstance(settings.get(name), str) and settings[name] == PLACEHOLDER:
                raise DataError(
                    f"the {name} of this run came from Python", hint=f"pass it again: `onward.resume(run, {name}=...)`"
                )
            if changes.get(name) is None and (missing_path := _missing_path(settings.get(name))):
                raise DataError(
                    f"the {name} of this run is no longer at `{missing_path}`",
                    hint=f"pass the new path: `--{name} NEW` (`onward.resume(run, {name}=...)`)",
                )
        names = {field.name for field in dataclasses.fields(cls)}
        own = {name: value for name, value in settings.items() if name in names}
        return cls(**own, recipe=select_recipe(settings))


def _plain(value: Any, name: str = "") -> Any:
    """Return a setting as a file can hold it. Paths become absolute, also within a spec."""
    if isinstance(value, Spec):
        value = str(value)
    if isinstance(value, os.PathLike) or (isinstance(value, str) and value.endswith(".onnx")):
        return _absolute(os.fspath(value))
    if isinstance(value, str) and name in _PATHS and os.path.exists(value):
        return os.path.abspath(value)
    if isinstance(value, str):
        return _PATH_IN_SPEC.sub(lambda match: match[1] + _plain(match[2], "vocabulary"), value)
    if value is None or isinstance(value, int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray | np.generic):  # a constant input
        return value.tolist()
    return PLACEHOLDER


_PATHS = ("teacher", "vocabulary")
_PATH_IN_SPEC = re.compile(r"\b(vocabulary=)([^\s,|\[\]()]+)")


def _to_stored(source: Any) -> Any:
    if source is None or isinstance(source, float):
        return source
    if isinstance(source, str | os.PathLike):
        return _absolute(os.fspath(source))
    if isinstance(source, list) and source and all(isinstance(item, str | os.PathLike) for item in source):
        return [_absolute(os.fspath(item)) for item in source]
    if isinstance(source, Mapping) and all(isinstance(item, str | os.PathLike) for item in source.values()):
        return {str(name): os.path.abspath(item) for name, item in source.items()}
    return PLACEHOLDER


def _absolute(path: str) -> str:
    """Return an absolute path, also in `name=path`."""
    name, path = _split_name(path)
    return name + os.path.abspath(path)


def _split_name(path: str) -> tuple[str, str]:
    """Split `name=path` into `name=` and the path; the first is empty without a name."""
    name = re.match(r"[^=/\\]+=", path)
    return ("", path) if name is None or os.path.exists(path) else (name[0], path[name.end() :])


def _missing_path(stored: Any) -> str | None:
    """Return a stored path that does not exist; paths may be `file:column`."""
    paths = [stored] if isinstance(stored, str) else stored.values() if isinstance(stored, Mapping) else stored
    for path in paths if isinstance(paths, Iterable) else ():
        file = _split_name(path)[1]
        if not any(os.path.exists(p) or glob.glob(p, recursive=True) for p in (file, file.rpartition(":")[0])):
            return file
    return None
