"""Models of transformers from their configurations: modules without values, and examples of what they take.

Only classes of transformers itself are made. Code that comes with a model is never executed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from onward.convert.torch.hollow import hollow_out
from onward.errors import InvalidModelError, UnsupportedError, first_line

OWN = "give the ONNX model that it is of: `--like model.onnx`, which `onward.from_torch` or `torch.onnx.export` makes"
_BATCH, _LENGTH, _CHOICES = 3, 5, 2
_MOST_LAYERS = 1000


class Example(NamedTuple):
    """What a module takes."""

    inputs: dict[str, torch.Tensor]
    axes: dict[str, dict[int, str]]
    """Those of any size, by name."""


class Architecture(NamedTuple):
    module: nn.Module
    """Its parameters are hollow."""
    example: Example
    groups: tuple[tuple[str, ...], ...]
    """Parameters as the Trainer gives them to an optimizer: those that decay, and the others."""


def architecture_of(configuration: Mapping[str, Any], types: Mapping[str, np.dtype]) -> Architecture:
    """The model that a configuration describes; `types` are those of its parameters, by name."""
    kind = _kind(configuration)
    _check_sizes(configuration, len(types))
    module = _made(kind, configuration)
    hollow_out(module, types)
    return Architecture(module, example_of(module), decay_groups(module))


def _kind(configuration: Mapping[str, Any]) -> type:
    import transformers

    names = configuration.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None
    if name is None:
        raise UnsupportedError("its configuration names no architecture", hint=OWN)
    if configuration.get("auto_map"):
        raise UnsupportedError(f"`{name}` is code that came with the model (`auto_map`), which is not executed", hint=OWN)
    kind = getattr(transformers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise UnsupportedError(
            f"transformers {transformers.__version__} has no model `{name}`",
            hint=f"install the version that made it ({configuration.get('transformers_version', 'unknown')}); or {OWN}",
        )
    return kind


def _check_sizes(configuration: Mapping[str, Any], tensors: int) -> None:
    """Refuse configurations of more layers than there can be: they would be made without end."""
    for key, value in configuration.items():
        if isinstance(value, int) and "layer" in key and value > max(tensors, _MOST_LAYERS):
            raise InvalidModelError(f"its configuration says `{key}` is {value}, and there are {tensors} tensors")


def _made(kind: Any, configuration: Mapping[str, Any]) -> nn.Module:
    """A module of a class of transformers: in memory that is not touched, which takes none."""
    from transformers.initialization import no_init_weights

    logging.disable(logging.WARNING)
    try:
        with no_init_weights():
            module = kind(kind.config_class.from_dict(dict(configuration)))
        module.tie_weights()
    except Exception as error:  # whatever a configuration makes transformers do
        raise InvalidModelError(f"transformers makes no `{kind.__name__}` of its configuration: {first_line(error)}") from error
    finally:
        logging.disable(logging.NOTSET)
    return module.train()


def decay_groups(module: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Parameters in the order in which the Trainer gives them to an optimizer."""
    from transformers import Trainer

    decayed = set(Trainer.get_decay_parameter_names(None, module))
    names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    return tuple(name for name in names if name in decayed), tuple(name for name in names if name not in decayed)


# ---- examples --------------------------------------------------------------------------------------------------------


def example_of(module: nn.Module) -> Example:
    """What a model of transformers takes in training, made up by its configuration."""
    name, config = type(module).__name__, module.config
    for ending, made in _KINDS.items():
        if name.endswith(ending) and (tensors := dict(made(config, module.main_input_name))):
            return Example(
                {key: tensor for key, (tensor, _) in tensors.items()},
                {key: dict(enumerate(axes)) for key, (_, axes) in tensors.items()},
            )
    raise UnsupportedError(f"what a `{name}` takes is not known", hint=f"give `example_inputs`; or {OWN}")


Tensors = Iterator[tuple[str, tuple[torch.Tensor, tuple[str, ...]]]]
_TEXT = ("batch", "sequence")


def _text(config: Any, main: str) -> Tensors:
    if main != "input_ids" or hasattr(config, "vision_config") or hasattr(config, "audio_config"):
        return
    ids = _tokens(config, min(_LENGTH, getattr(config, "max_position_embeddings", None) or _LENGTH))
    yield "input_ids", (ids, _TEXT)
    yield "attention_mask", (torch.ones_like(ids), _TEXT)


def _tokens(config: Any, length: int) -> torch.Tensor:
    return torch.arange(_BATCH * length).reshape(_BATCH, length) % config.get_text_config().vocab_size


def _language_model(config: Any, main: str) -> Tensors:
    for name, (tensor, axes) in _text(config, main):
        yield name, (tensor, axes)
        if name == "input_ids":
            yield "labels", (tensor, axes)


def _token_classes(config: Any, main: str) -> Tensors:
    for name, (tensor, axes) in _text(config, main):
        yield name, (tensor, axes)
        if name == "input_ids":
            yield "labels", (tensor % config.num_labels, axes)


def _classes(config: Any) -> tuple[torch.Tensor, tuple[str, ...]]:
    """Labels as the loss of a classification takes them: a class, numbers, or a yes or no for each label."""
    labels = config.num_labels
    if config.problem_type == "regression" or (config.problem_type is None and labels == 1):
        return torch.ones((_BATCH,) if labels == 1 else (_BATCH, labels)), ("batch",)
    if config.problem_type == "multi_label_classification":
        return torch.ones(_BATCH, labels), ("batch",)
    return torch.arange(_BATCH) % labels, ("batch",)


def _text_classes(config: Any, main: str) -> Tensors:
    for name, tensor in _text(config, main):
        yield name, tensor
        if name == "input_ids":
            yield "labels", _classes(config)


def _answers(config: Any, main: str) -> Tensors:
    for name, tensor in _text(config, main):
        yield name, tensor
        if name == "input_ids":
            yield "start_positions", (torch.zeros(_BATCH, dtype=torch.int64), ("batch",))
            yield "end_positions", (torch.ones(_BATCH, dtype=torch.int64), ("batch",))


def _choices(config: Any, main: str) -> Tensors:
    for name, (tensor, _) in _text(config, main):
        yield name, (tensor[:, None].repeat(1, _CHOICES, 1), ("batch", "choices", "sequence"))
        if name == "input_ids":
            yield "labels", (torch.arange(_BATCH) % _CHOICES, ("batch",))


def _images(config: Any, main: str) -> Tensors:
    size = getattr(config, "image_size", None) or 32
    if main != "pixel_values" or not isinstance(size, int | list | tuple):
        return
    height, width = (size, size) if isinstance(size, int) else size
    yield "pixel_values", (torch.ones(_BATCH, getattr(config, "num_channels", 3), height, width), ("batch",))
    yield "labels", _classes(config)


def _generation(config: Any, main: str) -> Tensors:
    if not getattr(config, "is_encoder_decoder", False):
        return
    if main == "input_features":  # of speech, as Whisper takes it
        length = 2 * getattr(config, "max_source_positions", 0)
        if length:
            yield "input_features", (torch.ones(_BATCH, config.num_mel_bins, length), ("batch",))
            yield "labels", (_tokens(config, _LENGTH), _TEXT)
        return
    for name, (tensor, axes) in _text(config, main):
        yield name, (tensor, axes)
        if name == "input_ids":
            yield "labels", (tensor, ("batch", "target_sequence"))


_KINDS: dict[str, Callable[[Any, str], Tensors]] = {
    "ForCausalLM": _language_model,
    "LMHeadModel": _language_model,
    "ForMaskedLM": _language_model,
    "ForTokenClassification": _token_classes,
    "ForSequenceClassification": _text_classes,
    "ForQuestionAnswering": _answers,
    "ForMultipleChoice": _choices,
    "ForImageClassification": _images,
    "ForConditionalGeneration": _generation,
}
"""What models take, by how their classes are called."""
