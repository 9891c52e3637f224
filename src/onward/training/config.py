"""How a run was started: as a file for people, which starts another like it, and is all that is needed to go on."""

from __future__ import annotations

import dataclasses
import glob
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, get_type_hints

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
from onward.recipe import Recipe
from onward.recipe.spec import Spec

Natural = Annotated[int, Range(least=0, most=2**53)]
"""Whole numbers up to there are the same in every language that reads JSON."""

EDITED = "was it edited, or written by another version of Onward? undo that, or start a new run"


def parse_json_as(text: str | bytes, kind: type, name: str) -> dict[str, Any]:
    """The object that JSON holds, with the values that are fields of this kind as it wants them."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name} is not valid JSON: {first_line(error)}", hint=EDITED) from error
    if not isinstance(values, dict):
        raise DataError(f"{name} is not a JSON object", hint=EDITED)
    return check_values(values, get_type_hints(kind, include_extras=True), name, EDITED)


def check_values(values: dict[str, Any], hints: Mapping[str, Any], name: str, hint: str) -> dict[str, Any]:
    """The values as their types want them, or one error about all that do not fit; others stay as they are."""
    problems = []
    for key, kind in hints.items():
        try:
            if key in values:
                values |= {key: coerce(f"`{key}`", values[key], kind)}
        except (ArgumentError, RecipeError) as error:
            problems.append(error)
    if problems:
        told = "; ".join(problem.message for problem in problems)
        raise DataError(f"{name} cannot be used: {told}", hint=problems[0].hint or hint)
    return values


_Paths = str | Sequence[str] | Mapping[str, str]

_SOURCES = ("data", "validation")
_RECIPE = {field.name for field in dataclasses.fields(RecipeOptions)} - {"seed"}

_OF_RUNS = {field.name for field in dataclasses.fields(TrainOptions)}

_OF_ENGINES = {one.name: one.default for one in options_of(TrainConfig) if one.panel == ENGINE and one.name != "engine"}
"""What the engine is told, where it is not as usual."""

PLACEHOLDER = "<object>"
"""What stands for what was given as an object of Python."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Stored(TrainOptions):
    """What files may hold: of some, less than what can be given in Python."""

    model: str | None = None
    data: _Paths | None = None
    validation: Annotated[float, Range(above=0, below=1)] | _Paths | None = None


def read_settings(
    path: str | os.PathLike[str], hint: str = "`onward train --help` says what is what"
) -> dict[str, Any]:
    """The arguments of `onward.train` that a configuration file holds, checked."""
    settings = with_new_names(read_configuration(path), former_names(TrainOptions))
    hints = field_types(_Stored)
    if unknown := [key for key in settings if key not in hints]:
        raise DataError(
            f"`{path}` has the key `{unknown[0]}`, and there is no such option", hint=suggest(unknown[0], hints) or hint
        )
    typed = {
        name: from_text(value, hints[name]) if isinstance(value, str) else value for name, value in settings.items()
    }
    return check_values(typed, hints, f"`{path}`", hint)


def write_settings(settings: Mapping[str, Any]) -> str:
    """The text of a configuration file; what was not said is left out."""
    remark = "How this run was started. `onward train --config` starts another like it; flags say what differs."
    return write_yaml({name: value for name, value in settings.items() if value not in (None, {})}, remark)


def select_recipe(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a training's arguments that is its recipe; what is None is not said."""
    return {name: value for name, value in settings.items() if name in _RECIPE and value is not None}


def settings_from(
    function: str,
    given: Mapping[str, Any],
    recipe: Recipe | None = None,
    config: str | os.PathLike[str] | TrainConfig | None = None,
) -> dict[str, Any]:
    """Return the arguments of a training: those of objects, those given alone, and those of a file for the rest.

    Raises:
        ArgumentError: if a field of an object that is not at its default is given a second time.
    """
    stored = read_settings(config) if isinstance(config, str | os.PathLike) else {}
    asked = dict(given)
    for where, one in (("recipe", recipe), ("config", config)):
        for name, value in one.changed().items() if isinstance(one, Recipe | TrainConfig) else ():
            if name not in _OF_RUNS:
                raise RecipeError(
                    f"`{name}` of a recipe has no effect in `{function}`",
                    hint="make the training model first: `recipe.apply(onward.load(model))`",
                )
            if name in asked:
                raise ArgumentError(f"`{function}` is given `{name}` twice, once in `{where}`", hint="give it once")
            asked[name] = value
    return stored | asked


def refuse_placeholders(settings: Mapping[str, Any]) -> None:
    """Fail where a file says that something was an object, which files cannot hold."""
    for name, value in settings.items():
        if isinstance(value, str) and value == PLACEHOLDER:
            raise DataError(f"the {name} of this run came from Python", hint=f"give it again: `{name}=...`")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(TrainConfig, ModelAndData):
    """How a run was started: its options as they were settled, and its recipe as it was given."""

    batch_size: int = 1
    metrics: Sequence[str] = ()
    recipe: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def start_engine(self, training: Model) -> Engine:
        """The engine that the run is on. What is not asked for is not mentioned: not every engine has it."""
        options = {name: wanted for name, usual in _OF_ENGINES.items() if (wanted := getattr(self, name)) != usual}
        if isinstance(self.deepspeed_config, Mapping):
            options["deepspeed_config"] = with_batch_size(
                self.deepspeed_config, training, self.batch_size, current_group().size
            )
        return engines.start(training, self.steps, engine=self.engine, **options)

    def on_engine(self, engine: str, device: str) -> Config:
        """The same on another engine or device. What is the engine's own business stays behind with it."""
        if engine == self.engine:
            return dataclasses.replace(self, device=device)
        left = {name: usual for name, usual in _OF_ENGINES.items() if name != "compile"}
        return dataclasses.replace(self, **{**left, "engine": engine, "device": device})

    def shared_out(self, strategy: Parallel | None, mesh: str | None, deepspeed_config: Any) -> Config:
        """The same for processes that share the work in another way, if one is given.

        A mesh, and a configuration of DeepSpeed, are part of that.
        """
        if strategy in (None, self.strategy) and mesh is None and deepspeed_config is None:
            own = self.deepspeed_config
            if isinstance(own, Mapping):  # there may be more processes now, or fewer
                own = without_batch_size(own)
            return dataclasses.replace(self, deepspeed_config=own)
        kept = self.strategy if mesh is None else None
        return dataclasses.replace(self, strategy=strategy or kept, mesh=mesh, deepspeed_config=deepspeed_config)

    def spread_over(self, group: ProcessGroup) -> Config:
        """The same for several processes, which each have a part of every batch unless more is said."""
        of_deepspeed = read_deepspeed_config(self.deepspeed_config)  # as it is now: a run needs nothing but its folder
        config = dataclasses.replace(self, deepspeed_config=of_deepspeed)
        if group.size == 1:
            return config
        if self.engine == "jax":
            return dataclasses.replace(config, mesh=self.mesh or "data")
        return dataclasses.replace(config, strategy=self.strategy or ("ddp" if self.mesh is None else "tensor"))

    def to_json(self) -> dict[str, Any]:
        """What files can hold of it. Paths become absolute, so that the run can go on from anywhere."""
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "recipe"}
        places = {name: _to_stored(own[name]) for name in ("model", "checkpoint", *_SOURCES)}
        plain = {name: _plain(value, name) for name, value in {**own, **self.recipe}.items() if name not in places}
        return {**places, **plain}

    @classmethod
    def from_arguments(cls, function: str, given: Mapping[str, Any]) -> Config:
        """What was given to a function, its recipe apart; what is None is not said."""
        if missing := [name for name in ("model", "data") if given.get(name) is None]:
            raise ArgumentError(
                f"`{function}` needs `{missing[0]}`", hint=f"`help(onward.{function})` says what that is"
            )
        recipe = select_recipe(given)
        own = {name: value for name, value in given.items() if name not in recipe and value is not None}
        return cls(**own, recipe=recipe)

    @property
    def title(self) -> str:
        """What the model is called that was given."""
        path = self.model if isinstance(self.model, str | os.PathLike) else getattr(self.model, "path", None)
        return str(path) if path and path != PLACEHOLDER else "model.onnx"

    @classmethod
    def from_settings(cls, stored: Mapping[str, Any], **given: Any) -> Config:
        """What was stored, or was given anew; data that were objects must be."""
        settings = {**stored, **{name: value for name, value in given.items() if value is not None}}
        if missing := [name for name in ("data", "batch_size") if settings.get(name) is None]:
            raise DataError(f"the configuration of this run lacks `{missing[0]}`", hint=EDITED)
        for name in _SOURCES:
            if isinstance(settings.get(name), str) and settings[name] == PLACEHOLDER:
                raise DataError(
                    f"the {name} of this run came from Python", hint=f"give it again: `onward.resume(run, {name}=...)`"
                )
            if given.get(name) is None and (gone := _missing_path(settings.get(name))):
                raise DataError(
                    f"the {name} of this run is no longer at `{gone}`",
                    hint=f"say where it is: `--{name} NEW` (`onward.resume(run, {name}=...)`)",
                )
        names = {field.name for field in dataclasses.fields(cls)}
        own = {name: value for name, value in settings.items() if name in names}
        return cls(**own, recipe=select_recipe(settings))


def _plain(value: Any, name: str = "") -> Any:
    """Return what a file can hold of a setting. Paths become absolute, also those within a spec."""
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
    """Also of the path in `name=path`."""
    name, path = _parts(path)
    return name + os.path.abspath(path)


def _parts(path: str) -> tuple[str, str]:
    """`name=` and the path in `name=path`; nothing and the path where that is all there is."""
    name = re.match(r"[^=/\\]+=", path)
    return ("", path) if name is None or os.path.exists(path) else (name[0], path[name.end() :])


def _missing_path(stored: Any) -> str | None:
    """A path that leads nowhere, of those that were stored; `file:column` is one, too."""
    paths = [stored] if isinstance(stored, str) else stored.values() if isinstance(stored, Mapping) else stored
    for path in paths if isinstance(paths, Iterable) else ():
        file = _parts(path)[1]
        if not any(os.path.exists(one) or glob.glob(one, recursive=True) for one in (file, file.rpartition(":")[0])):
            return file
    return None
