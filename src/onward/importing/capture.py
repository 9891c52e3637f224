"""What a checkpoint computes: from the graph or the configuration that it holds, or by a module that its user gives."""

from __future__ import annotations

import importlib.util
import inspect
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onward.checkpoint.format import Captured, Checkpoint
from onward.checkpoint.formats import FORMATS, keras
from onward.checkpoint.matching import TRAINER
from onward.checkpoint.pytorch.pickling import Object
from onward.errors import ArgumentError, DataError, InvalidModelError, UnsupportedError, first_line

if TYPE_CHECKING:
    from onward.frameworks.torch.architecture import Architecture

_LIKE = (
    "give the ONNX model that it is of: `--like model.onnx`, which `torch.onnx.export` makes, or `onward.from_torch`"
)
_MOST_LAYERS, _LARGEST_SIZE, _DEEPEST = 1_000, 100_000, 8
"""Layers, and the size of a layer, that a configuration may have in any case; mappings within each other."""
_SIZE = re.compile(r"_(size|dim|labels|heads|experts)$|^(n_embd|n_inner|d_model|d_ff|dim)$")
_LIGHTNING = "lightning"
"""The format whose arguments are those of the module."""


def capture_model(checkpoint: Checkpoint, module: Any, example_inputs: Any, loss: Any) -> Captured:
    """The graph that a checkpoint is of, and what goes with it.

    `module` is code of the user's own: a module, its class, or where that is (`package.module:Class`). Nothing else is
    executed: of a configuration, classes of transformers itself are made.
    """
    if module is not None:
        return _of_module(checkpoint, module, example_inputs, loss)
    graph = _graph_of(checkpoint)
    if graph is not None:
        return graph(checkpoint.path)
    if checkpoint.format == keras.FORMAT.name:
        return _of_layers(checkpoint)
    if checkpoint.configuration.get("architectures"):
        return _of_configuration(checkpoint, example_inputs, loss)
    raise UnsupportedError(
        f"`{checkpoint.path}` holds the state of a run, and not what it computes",
        hint="give the ONNX model that it is of: `--like model.onnx`, or `like=...`; or its module: `module=...`",
    )


def has_model(checkpoint: Checkpoint) -> bool:
    """True if a checkpoint says what it computes."""
    is_keras = checkpoint.format == keras.FORMAT.name
    return is_keras or _graph_of(checkpoint) is not None or bool(checkpoint.configuration.get("architectures"))


def _graph_of(checkpoint: Checkpoint) -> Callable[[Path], Captured] | None:
    return next((format.graph for format in FORMATS if format.name == checkpoint.format), None)


def _of_layers(checkpoint: Checkpoint) -> Captured:
    """Return the layers of a `.keras` file, made by Keras of its own classes."""
    config = checkpoint.trees.get(keras.CONFIG)
    if config is None or checkpoint.executes:
        what = f"names code: {checkpoint.executes[0]}" if checkpoint.executes else "holds weights, and no layers"
        raise UnsupportedError(
            f"`{checkpoint.path}` {what}", hint="give the ONNX model that it is of: `--like model.onnx`"
        )
    try:
        from onward.frameworks.keras.capture import from_configuration
    except ModuleNotFoundError as error:
        raise missing_package(error) from error
    return Captured(from_configuration(config, [(name, each.shape) for name, each in checkpoint.tensors.items()]), None)


def _of_configuration(checkpoint: Checkpoint, example_inputs: Any, loss: Any) -> Captured:
    _refuse_configuration(checkpoint.configuration, checkpoint)
    types = {name: tensor.dtype for name, tensor in checkpoint.tensors.items()}
    how = {"computes_loss": loss is None, "in_trainer": checkpoint.format == TRAINER}
    try:
        from onward.frameworks.torch.architecture import from_configuration

        made = from_configuration(checkpoint.configuration, types, example_inputs, **how)
    except ModuleNotFoundError as error:
        raise missing_package(error) from error
    return _capture_module(made, checkpoint)


def _refuse_configuration(settings: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    """Raise an Error for a configuration that no model can be made of, before torch and transformers are imported."""
    names = settings["architectures"]
    name = names[0] if isinstance(names, list) else None
    if not isinstance(name, str) or not name.isidentifier():
        raise UnsupportedError("its configuration names no architecture", hint=_LIKE)
    if settings.get("auto_map"):
        raise UnsupportedError(f"`{name}` is code in the folder (`auto_map`), and is not executed", hint=_LIKE)
    if not _is_in_transformers(name):
        version = settings.get("transformers_version", "unknown")
        raise UnsupportedError(
            f"the installed transformers has no model `{name}`",
            hint=f"install the version that it is of ({version}); or {_LIKE}",
        )
    _refuse_sizes(settings, checkpoint)


def _refuse_sizes(settings: Mapping[str, Any], checkpoint: Checkpoint, depth: int = 0) -> None:
    """A model of more layers, or of larger ones, than there are tensors would be made without end."""
    tensors = len(checkpoint.tensors)
    numbers = sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values())
    for key, value in settings.items():
        if isinstance(value, Mapping) and depth < _DEEPEST:
            _refuse_sizes(value, checkpoint, depth + 1)
        elif isinstance(value, int) and (
            ("layer" in key and value > max(tensors, _MOST_LAYERS))
            or (_SIZE.search(key) and value > max(numbers, _LARGEST_SIZE))
        ):
            raise InvalidModelError(
                f"its configuration says that `{key}` is {f'{value:,}'[:30]}, for {tensors} tensors",
                hint="copy `config.json` again from where the model was saved",
            )


def _is_in_transformers(name: str) -> bool:
    """True if a class is in the sources of transformers. To import it takes seconds."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        return True  # which is reported as a missing package
    models = Path(spec.submodule_search_locations[0]) / "models"
    listed = models / "auto" / "modeling_auto.py"
    if listed.is_file() and f'"{name}"' in listed.read_text("utf-8"):
        return True
    return any(f"class {name}(" in path.read_text("utf-8") for path in models.glob("*/modeling_*.py"))


def _of_module(checkpoint: Checkpoint, given: Any, example_inputs: Any, loss: Any) -> Captured:
    try:
        from onward.frameworks.torch.architecture import from_module
    except ModuleNotFoundError as error:
        raise missing_package(error) from error
    found = _import_object(given) if isinstance(given, str) else given
    is_module = hasattr(found, "named_parameters") and not isinstance(found, type)
    module = found if is_module else _construct(found, checkpoint)
    how = {"computes_loss": loss is None, "in_trainer": checkpoint.format == TRAINER}
    made = from_module(module, example_inputs, **how)
    return _capture_module(made, checkpoint)._replace(probe=made.probe)


def _capture_module(made: Architecture, checkpoint: Checkpoint) -> Captured:
    in_files = {ours: theirs for theirs, ours in made.stored.items()}
    tied: dict[str, str] = {}
    for names in made.aliases:
        theirs = {name: in_files.get(name, name) for name in names}
        stored = next((name for name in theirs.values() if name in checkpoint.tensors), None)
        if stored is not None:
            tied |= {name: stored for name in names if theirs[name] not in checkpoint.tensors}
    return Captured(made.model, made.loss, made.orders, tied, made.stored)


def missing_package(error: ModuleNotFoundError) -> Exception:
    """What to say where the model of a checkpoint cannot be made without a package."""
    if str(error.name).startswith("onward"):
        return error
    package, _, part = str(error.name).partition(".")
    if part:
        return UnsupportedError(f"to make its model needs a newer `{package}`", hint=f"pip install -U {package}")
    package = {"torch": "onward[torch]", "keras": "onward[tensorflow]"}.get(package, package)
    return UnsupportedError(
        f"to make its model needs `{error.name}`, which is not installed",
        hint=f"pip install '{package}'; or give the ONNX model that it is of: `--like model.onnx`",
    )


def _import_object(place: str) -> Any:
    """What is at `package.module:Class`, with modules of the working directory, as for `python -m`."""
    package, _, name = place.partition(":")
    if not package or not name:
        raise ArgumentError(f"`{place}` names no class", hint="say where it is: `package.module:Class`")
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        return getattr(importlib.import_module(package), name)
    except (ImportError, AttributeError) as error:
        raise ArgumentError(
            f"there is no `{place}`: {first_line(error)}", hint="say where it is: `package.module:Class`"
        ) from error


def _construct(kind: Any, checkpoint: Checkpoint) -> Any:
    """What the user's class or function makes, with the hyper-parameters that Lightning stores as arguments."""
    if not callable(kind):
        raise ArgumentError(
            "`module` is neither a module nor its class", hint="give an nn.Module, or `package.module:Class`"
        )
    given = checkpoint.arguments if checkpoint.format == _LIGHTNING else {}
    takes = inspect.signature(kind).parameters
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in takes.values())
    arguments = {name: value for name, value in given.items() if takes_all or name in takes}
    unmade = [name for name, value in arguments.items() if isinstance(value, Object)]
    hint = "give the module itself: `module=Class(...)`"
    if unmade:
        raise UnsupportedError(
            f"the argument `{unmade[0]}` of `{kind.__name__}` is an object, which is not made", hint=hint
        )
    try:
        return kind(**arguments)
    except TypeError as error:
        raise DataError(
            f"`{kind.__name__}` does not take its hyper-parameters: {first_line(error)}", hint=hint
        ) from error
