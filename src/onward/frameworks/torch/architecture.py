"""Capture of the module of a checkpoint: its graph, its tied parameters, and the order of its parameters.

Modules of transformers are created from their configurations, without values, from classes of
transformers only: code that comes with a model is never executed.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from onward.errors import InvalidModelError, UnsupportedError, first_line
from onward.frameworks.torch.arguments import hollow_copy, hollow_out, tensors_of
from onward.frameworks.torch.exporter import quiet
from onward.frameworks.torch.module_capture import (
    LOSS,
    captured_in_place,
    check_copyable,
    refuse_updates,
    training_step,
    unwrap_module,
)
from onward.frameworks.torch.probe import probe_module
from onward.model import Model

_LIKE = "give its ONNX model, from `torch.onnx.export` or `onward.from_torch`: `--like model.onnx`"
_BATCH, _LENGTH, _CHOICES = 3, 5, 2
"""Sizes of examples, greater than 1, which torch.export would fix."""
_IGNORED = -100
"""Label that losses of transformers do not count."""


def _stored_names(module: nn.Module) -> dict[str, str]:
    """Return name -> name in files of transformers, which may have those of former classes."""
    loading: Any = importlib.import_module("transformers.core_model_loading")
    tensors = {name: tensor.detach().to("meta") for name, tensor in module.state_dict().items()}
    name_of = {id(tensor): name for name, tensor in tensors.items()}
    stored = loading.revert_weight_conversion(module, dict(tensors))
    return {name_of[id(tensor)]: name for name, tensor in stored.items() if id(tensor) in name_of}


def _transformers() -> Any:
    return importlib.import_module("transformers")


def _class_of(configuration: Mapping[str, Any]) -> type:
    transformers = _transformers()
    name = configuration["architectures"][0]
    architecture = getattr(transformers, name, None)
    if not (isinstance(architecture, type) and issubclass(architecture, transformers.PreTrainedModel)):
        version = configuration.get("transformers_version", "unknown")
        raise UnsupportedError(
            f"transformers {transformers.__version__} has no model `{name}`",
            hint=f"install its version ({version}); or {_LIKE}",
        )
    return architecture


def _make_module(architecture: Any, configuration: Mapping[str, Any]) -> nn.Module:
    """Return a module of transformers whose memory is never written, and so takes none."""
    initialization: Any = importlib.import_module("transformers.initialization")
    try:
        with quiet():
            settings = architecture.config_class.from_dict(dict(configuration))
            with initialization.no_init_weights():
                module = architecture(settings)
            module.tie_weights()
    except Exception as error:  # an invalid configuration may raise anything in transformers
        raise InvalidModelError(
            f"transformers cannot create `{architecture.__name__}` from its configuration: {first_line(error)}"
        ) from error
    return module


def decay_groups(module: nn.Module) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the parameter names of the Trainer's groups: with weight decay, and without."""
    decayed = set(_transformers().Trainer.get_decay_parameter_names(None, module))
    names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    return tuple(name for name in names if name in decayed), tuple(name for name in names if name not in decayed)


def _count_labels(module: Any) -> None:
    """Let a module count the labels for its loss, in place, as the Trainer does.

    First labels of sequences count too, unless the Trainer knows that the loss shifts labels.
    """
    parameters = inspect.signature(module.forward).parameters.values()
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    if not getattr(module, "accepts_loss_kwargs", takes_any):
        return
    losses: Any = importlib.import_module("transformers.loss.loss_utils")
    is_causal = losses.LOSS_MAPPING.get(getattr(module, "loss_type", None)) is losses.ForCausalLMLoss
    start = 1 if is_causal and not getattr(module.config, "is_encoder_decoder", False) else 0
    forward = module.forward

    def counted(**inputs: Any) -> Any:
        if "labels" not in inputs:
            return forward(**inputs)
        labels = inputs["labels"]
        return forward(**inputs, num_items_in_batch=(labels[..., 1:] if start else labels).ne(_IGNORED).sum())

    module.forward = counted


# ---- examples --------------------------------------------------------------------------------------------------------

Axes = tuple[str, ...]
"""Names of the first axes, which have any size."""
_TEXT = ("batch", "sequence")


def _example_of(module: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, dict[int, str]]]:
    """Return generated inputs of a model of transformers, and the names of axes of any size."""
    name = type(module).__name__
    generate = next((make for ending, make in _KINDS.items() if name.endswith(ending)), None)
    try:
        tensors = generate(module.config, module.main_input_name) if generate is not None else {}
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise InvalidModelError(f"its configuration does not fit a `{name}`: {first_line(error)}") from error
    if tensors:
        axes = {key: dict(enumerate(names)) for key, (_, names) in tensors.items()}
        return {key: tensor for key, (tensor, _) in tensors.items()}, axes
    raise UnsupportedError(f"the inputs of a `{name}` are unknown", hint=f"give `example_inputs=...`; or {_LIKE}")


Inputs = dict[str, tuple[torch.Tensor, Axes]]


def _text(config: Any, main: str) -> Inputs:
    if main != "input_ids" or hasattr(config, "vision_config") or hasattr(config, "audio_config"):
        return {}
    ids = _tokens(config, min(_LENGTH, getattr(config, "max_position_embeddings", None) or _LENGTH))
    return {"input_ids": (ids, _TEXT), "attention_mask": (torch.ones_like(ids), _TEXT)}


def _tokens(config: Any, length: int) -> torch.Tensor:
    return torch.arange(_BATCH * length).reshape(_BATCH, length) % config.vocab_size


def _text_with(labels: Callable[[Any, torch.Tensor], tuple[torch.Tensor, Axes]]) -> Callable[[Any, str], Inputs]:
    """Return a function that generates text inputs, with labels from configuration and tokens."""

    def make(config: Any, main: str) -> Inputs:
        inputs = _text(config, main)
        return {**inputs, "labels": labels(config, inputs["input_ids"][0])} if inputs else {}

    return make


def _classes(config: Any) -> tuple[torch.Tensor, Axes]:
    """Return labels of a classification: classes, numbers, or a yes or no per label."""
    count = config.num_labels
    if config.problem_type == "regression" or (config.problem_type is None and count == 1):
        return torch.ones((_BATCH,) if count == 1 else (_BATCH, count)), ("batch",)
    if config.problem_type == "multi_label_classification":
        return torch.ones(_BATCH, count), ("batch",)
    return torch.arange(_BATCH) % count, ("batch",)


def _choices(config: Any, main: str) -> Inputs:
    axes = ("batch", "choices", "sequence")
    inputs = {name: (x[:, None].repeat(1, _CHOICES, 1), axes) for name, (x, _) in _text(config, main).items()}
    return {**inputs, "labels": (torch.arange(_BATCH) % _CHOICES, ("batch",))} if inputs else {}


def _images(config: Any, main: str) -> Inputs:
    if main != "pixel_values":
        return {}
    size = getattr(config, "image_size", None) or 32
    height, width = (size, size) if isinstance(size, int) else size
    image = torch.ones(()).expand(_BATCH, getattr(config, "num_channels", 3), height, width)
    return {"pixel_values": (image, ("batch",)), "labels": _classes(config)}


def _generation(config: Any, main: str) -> Inputs:
    """Return inputs of a sequence-to-sequence model: text, or speech as for Whisper."""
    if not getattr(config, "is_encoder_decoder", False):
        return {}
    labels = _tokens(config, _LENGTH - 1), ("batch", "target_sequence")
    if main == "input_features" and (length := getattr(config, "max_source_positions", 0)):
        features = torch.ones(()).expand(_BATCH, config.num_mel_bins, 2 * length)
        return {"input_features": (features, ("batch",)), "labels": labels}
    inputs = _text(config, main)
    return {**inputs, "labels": labels} if inputs else {}


_KINDS: dict[str, Callable[[Any, str], Inputs]] = {
    **dict.fromkeys(("ForCausalLM", "LMHeadModel", "ForMaskedLM"), _text_with(lambda config, tokens: (tokens, _TEXT))),
    "ForTokenClassification": _text_with(lambda config, tokens: (tokens % config.num_labels, _TEXT)),
    "ForSequenceClassification": _text_with(lambda config, tokens: _classes(config)),
    "ForMultipleChoice": _choices,
    "ForImageClassification": _images,
    "ForConditionalGeneration": _generation,
}
"""Generators of inputs, by the ending of the class name."""


Order = tuple[tuple[str, ...], ...]
"""Parameter names by optimizer group."""


_BY_TRAINER = "the model, as the Trainer groups its parameters"


class Architecture(NamedTuple):
    model: Model
    loss: str | None
    """Loss of a recipe, if the module computes it."""
    orders: Mapping[str, Order]
    """Possible parameter orders of an optimizer, by origin. Names are those of the graph."""
    aliases: tuple[tuple[str, ...], ...]
    """All names of each tied parameter."""
    stored: Mapping[str, str] = {}
    """Name in the graph -> name in files, where they differ."""
    probe: Callable[[Model, Any], None] | None = None
    """Function that compares the model, with any weights, under a loss with the module."""


def orders_of(configuration: Mapping[str, Any]) -> dict[str, Order]:
    """Return the possible parameter orders of an optimizer of a configured model, with names as in its files."""
    module = _make_module(_class_of(configuration), configuration)
    stored = _stored_names(module)
    names = tuple(name for name, parameter in module.named_parameters() if parameter.requires_grad)
    orders: dict[str, Order] = {_BY_TRAINER: decay_groups(module), "the model": (names,)}
    return {
        origin: tuple(tuple(stored.get(name, name) for name in group) for group in order)
        for origin, order in orders.items()
    }


def from_configuration(
    configuration: Mapping[str, Any],
    types: Mapping[str, np.dtype],
    example_inputs: Any,
    *,
    computes_loss: bool,
    in_trainer: bool,
) -> Architecture:
    """Capture the model of transformers of a configuration, with parameters of these types.

    `computes_loss` trains the loss of the model itself. `in_trainer` trains it as the Trainer does.
    """
    module = _make_module(_class_of(configuration), configuration)
    stored = _stored_names(module)
    hollow_out(module, {name: types[stored[name]] for name in stored if stored[name] in types})
    return _of_transformers(module.train(), example_inputs, computes_loss, in_trainer)


def _of_transformers(module: nn.Module, inputs: Any, computes_loss: bool, in_trainer: bool) -> Architecture:
    if inputs is None:
        inputs, axes = _example_of(module)
        if not computes_loss:
            inputs = {name: tensor for name, tensor in inputs.items() if name != "labels"}
        axes = {name: axes[name] for name in inputs}
    else:
        is_text = {name: tensor.ndim == 2 and not tensor.is_floating_point() for name, tensor in inputs.items()}
        axes = {name: dict(enumerate(_TEXT if is_text[name] else _TEXT[:1])) for name in inputs}
    orders = {_BY_TRAINER: decay_groups(module)}
    stored = {theirs: ours for ours, theirs in _stored_names(module).items() if ours != theirs}
    if in_trainer:
        _count_labels(module)
    return _architecture(module, inputs, axes, orders)._replace(stored=stored)


def from_module(module: nn.Module, example_inputs: Any, *, computes_loss: bool, in_trainer: bool) -> Architecture:
    """Capture a module, which is not changed.

    Without a loss, a Lightning module computes it in `training_step`, and the example is a batch.
    """
    module = unwrap_module(module)
    check_copyable(module)
    module = hollow_copy(module)
    if hasattr(module, "config") and hasattr(module, "main_input_name"):
        return _of_transformers(module, example_inputs, computes_loss, in_trainer)
    has_step = computes_loss and hasattr(module, "training_step")
    if example_inputs is None and not has_step:
        example_inputs = getattr(module, "example_input_array", None)
    if example_inputs is None:
        raise UnsupportedError(
            f"the inputs of `{type(module).__name__}` are unknown",
            hint="give `example_inputs=...`, " + ("a batch of its data" if has_step else "as for `from_torch`"),
        )
    if has_step:
        module, example_inputs = training_step(module, example_inputs)
    return _architecture(module, example_inputs, None, {})


def remember_example(example: Any) -> Any:
    """Return a copy of a loop's example on the CPU, with at least two samples."""

    def copied(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        tensor = tensor.detach().cpu().clone()
        return torch.cat([tensor, tensor]) if tensor.ndim and tensor.shape[0] == 1 else tensor

    return pytree.tree_map(copied, example)


def _architecture(
    module: nn.Module, inputs: Any, axes: Mapping[str, Any] | None, orders: Mapping[str, Order]
) -> Architecture:
    orders = {**orders, "the module": (tuple(name for name, _ in module.named_parameters()),)}
    model, updates = captured_in_place(module, inputs, axes)
    refuse_updates(updates)
    names: dict[int, list[str]] = {}
    for name, tensor in tensors_of(module):
        names.setdefault(id(tensor), []).append(name)
    first = {name: same[0] for same in names.values() for name in same}
    loss = f"value:{LOSS}" if any(value.name == LOSS for value in model.outputs) else None
    return Architecture(
        model,
        loss,
        {origin: tuple(tuple(first[name] for name in group) for group in order) for origin, order in orders.items()},
        tuple(tuple(same) for same in names.values() if len(same) > 1),
        probe=functools.partial(probe_module, module, inputs),
    )
