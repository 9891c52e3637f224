"""Models of checkpoints, from a stored graph or configuration or from a module of the user."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onward.checkpoint.format import Captured, Checkpoint, Order
from onward.checkpoint.formats import FORMATS, keras
from onward.checkpoint.name_matching import TRAINER
from onward.checkpoint.pytorch.pickle_objects import Object
from onward.errors import ArgumentError, DataError, InvalidModelError, UnsupportedError, first_line
from onward.model import Model
from onward.recipe import lora
from onward.recipe.lora.adapters import adapters
from onward.recipe.lora.files import names_in_peft

if TYPE_CHECKING:
    from onward.frameworks.torch.architecture import Architecture

_LIKE = "give its ONNX model: `--like model.onnx`, exported with `torch.onnx.export` or `onward.from_torch`"
_MOST_LAYERS, _LARGEST_SIZE, _DEEPEST = 1_000, 100_000, 8
"""Allowed layers and size of a layer in any configuration; allowed nesting of mappings."""
_SIZE = re.compile(r"_(size|dim|labels|heads|experts)$|^(n_embd|n_inner|d_model|d_ff|dim)$")
_LIGHTNING = "lightning"
"""Format whose arguments are those of the module."""


def capture_model(checkpoint: Checkpoint, module: Any, example_inputs: Any, loss: Any) -> Captured:
    """Return the graph of a checkpoint, with its loss.

    `module` is code of the user: a module, its class, or its location (`package.module:Class`). No
    other code is executed: a configuration selects classes of transformers.
    """
    if module is not None:
        return _of_module(checkpoint, module, example_inputs, loss)
    if (graph := _graph_of(checkpoint)) is not None:
        return graph(checkpoint.path)
    if checkpoint.format == keras.FORMAT.name:
        return _of_layers(checkpoint)
    if checkpoint.configuration.get("architectures"):
        return _of_configuration(checkpoint, example_inputs, loss)
    raise UnsupportedError(
        f"`{checkpoint.path}` holds the state of a run without its model",
        hint="give its ONNX model: `--like model.onnx` (`like=...`), or its module: `module=...`",
    )


def of_adapters(checkpoint: Checkpoint, model: Model) -> Captured:
    """Return a model with the adapters of a checkpoint of PEFT, which stores nothing else."""
    adapted = model if adapters(model) else lora.load(model, checkpoint.path)
    stored, tensors = names_in_peft(adapted, checkpoint.tensors), list(adapted.graph.initializers)
    added = sorted(adapters(adapted), key=lambda adapter: tensors.index(adapter.weight))
    order = [str(value.name) for adapter in added for value in (adapter.a, adapter.b)]
    return Captured(adapted, None, {"the order of PEFT": [order]}, stored=stored, frozen=frozenset(tensors) - {*order})


def has_model(checkpoint: Checkpoint) -> bool:
    """True if a checkpoint has a graph or a configuration."""
    is_keras = checkpoint.format == keras.FORMAT.name
    return is_keras or _graph_of(checkpoint) is not None or bool(checkpoint.configuration.get("architectures"))


def _graph_of(checkpoint: Checkpoint) -> Callable[[Path], Captured] | None:
    return next((format.graph for format in FORMATS if format.name == checkpoint.format), None)


def _of_layers(checkpoint: Checkpoint) -> Captured:
    """Return the model of a `.keras` file, made of Keras's own classes."""
    config = checkpoint.trees.get(keras.CONFIG)
    if config is None or checkpoint.executes:
        reason = f"names code: {checkpoint.executes[0]}" if checkpoint.executes else "holds weights without layers"
        raise UnsupportedError(f"`{checkpoint.path}` {reason}", hint="give its ONNX model: `--like model.onnx`")
    with _name_missing_packages():
        from onward.frameworks.keras.capture import from_configuration
    shapes = [(name, tensor.shape) for name, tensor in checkpoint.tensors.items()]
    return Captured(from_configuration(config, shapes), None)


def _of_configuration(checkpoint: Checkpoint, example_inputs: Any, loss: Any) -> Captured:
    _refuse_configuration(checkpoint.configuration, checkpoint)
    types = {name: tensor.dtype for name, tensor in checkpoint.tensors.items()}
    options = {"computes_loss": loss is None, "in_trainer": checkpoint.format == TRAINER}
    with _name_missing_packages():
        from onward.frameworks.torch.architecture import from_configuration

        architecture = from_configuration(checkpoint.configuration, types, example_inputs, **options)
    return _capture_module(architecture, checkpoint)


def orders_of_configuration(checkpoint: Checkpoint) -> Mapping[str, Order]:
    """Return the possible parameter orders of an optimizer, if a checkpoint has a configuration of transformers."""
    if not checkpoint.configuration.get("architectures"):
        return {}
    _refuse_configuration(checkpoint.configuration, checkpoint)
    with _name_missing_packages():
        from onward.frameworks.torch.architecture import orders_of

        return orders_of(checkpoint.configuration)


def _refuse_configuration(settings: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    """Raise an Error for an unusable configuration, before torch and transformers are imported."""
    names = settings["architectures"]
    name = names[0] if isinstance(names, list) else None
    if not isinstance(name, str) or not name.isidentifier():
        raise UnsupportedError(f"the configuration of `{checkpoint.path}` names no architecture", hint=_LIKE)
    if settings.get("auto_map"):
        raise UnsupportedError(f"`{name}` is code in the folder (`auto_map`), and is not executed", hint=_LIKE)
    if not _is_in_transformers(name):
        version = settings.get("transformers_version", "unknown")
        raise UnsupportedError(
            f"the installed transformers has no model `{name}`", hint=f"install its version ({version}); or {_LIKE}"
        )
    _refuse_sizes(settings, checkpoint)


def _refuse_sizes(settings: Mapping[str, Any], checkpoint: Checkpoint, depth: int = 0) -> None:
    """Raise an InvalidModelError for a configuration that is much larger than the tensors."""
    tensors = len(checkpoint.tensors)
    numbers = sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values())
    for key, value in settings.items():
        if isinstance(value, Mapping) and depth < _DEEPEST:
            _refuse_sizes(value, checkpoint, depth + 1)
            continue
        layers = max(tensors, _MOST_LAYERS) if "layer" in key else math.inf
        size = max(numbers, _LARGEST_SIZE) if _SIZE.search(key) else math.inf
        if isinstance(value, int) and value > min(layers, size):
            raise InvalidModelError(
                f"its configuration says that `{key}` is {f'{value:,}'[:30]}, for {tensors} tensors",
                hint="copy `config.json` again from where the model was saved",
            )


def _is_in_transformers(name: str) -> bool:
    """True if a class is in the sources of transformers, whose import would take seconds."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        return True  # the import reports the missing package
    models = Path(spec.submodule_search_locations[0]) / "models"
    table = models / "auto" / "modeling_auto.py"
    if table.is_file() and f'"{name}"' in table.read_text("utf-8"):
        return True
    return any(f"class {name}(" in path.read_text("utf-8") for path in models.glob("*/modeling_*.py"))


def _of_module(checkpoint: Checkpoint, source: Any, example_inputs: Any, loss: Any) -> Captured:
    with _name_missing_packages():
        from onward.frameworks.torch.architecture import from_module
    module_or_class = _import_object(source) if isinstance(source, str) else source
    is_module = hasattr(module_or_class, "named_parameters") and not isinstance(module_or_class, type)
    module = module_or_class if is_module else _construct(module_or_class, checkpoint)
    options = {"computes_loss": loss is None, "in_trainer": checkpoint.format == TRAINER}
    architecture = from_module(module, example_inputs, **options)
    return _capture_module(architecture, checkpoint)._replace(probe=architecture.probe)


def _capture_module(architecture: Architecture, checkpoint: Checkpoint) -> Captured:
    in_files = {ours: theirs for theirs, ours in architecture.stored.items()}
    tied: dict[str, str] = {}
    for names in architecture.aliases:
        theirs = {name: in_files.get(name, name) for name in names}
        stored = next((name for name in theirs.values() if name in checkpoint.tensors), None)
        if stored is not None:
            tied |= {name: stored for name in names if theirs[name] not in checkpoint.tensors}
    return Captured(architecture.model, architecture.loss, architecture.orders, tied, architecture.stored)


@contextlib.contextmanager
def _name_missing_packages() -> Iterator[None]:
    """Raise an UnsupportedError for a package that the model of a checkpoint needs."""
    try:
        yield
    except ModuleNotFoundError as error:
        package, _, submodule = (error.name or "").partition(".")
        if package == "onward":
            raise
        if not package:  # transformers renames what failed below it
            problem = f"its model cannot be imported: {first_line(error)}"
            hint = "repair the installation of that package; or give its ONNX model: `--like model.onnx`"
        elif submodule:
            problem, hint = f"its model needs a newer `{package}`", f"pip install -U {package}"
        else:
            package = {"torch": "onward[torch]", "keras": "onward[tensorflow]"}.get(package, package)
            problem = f"its model needs `{error.name}`, which is not installed"
            hint = f"pip install '{package}'; or give its ONNX model: `--like model.onnx`"
        raise UnsupportedError(problem, hint=hint) from error


def _import_object(location: str) -> Any:
    """Return the object at `package.module:Class`. Modules of the working directory count."""
    package, _, name = location.partition(":")
    if not package or not name:
        raise ArgumentError(f"`{location}` names no class", hint="use the form `package.module:Class`")
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        return getattr(importlib.import_module(package), name)
    except (ImportError, AttributeError) as error:
        raise ArgumentError(
            f"cannot import `{location}`: {first_line(error)}", hint="use the form `package.module:Class`"
        ) from error


def _construct(factory: Any, checkpoint: Checkpoint) -> Any:
    """Call the user's class or function with the hyper-parameters that Lightning stores."""
    if not callable(factory):
        raise ArgumentError(
            "`module` is neither a module nor its class", hint="give an nn.Module, or `package.module:Class`"
        )
    hyper_parameters = checkpoint.arguments if checkpoint.format == _LIGHTNING else {}
    takes = inspect.signature(factory).parameters
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in takes.values())
    arguments = {name: value for name, value in hyper_parameters.items() if takes_all or name in takes}
    hint = "give the module itself: `module=Class(...)`"
    if objects := [name for name, value in arguments.items() if isinstance(value, Object)]:
        problem = f"the argument `{objects[0]}` of `{factory.__name__}` is an object, which is not created"
        raise UnsupportedError(problem, hint=hint)
    try:
        return factory(**arguments)
    except TypeError as error:
        problem = f"`{factory.__name__}` does not take its hyper-parameters: {first_line(error)}"
        raise DataError(problem, hint=hint) from error
