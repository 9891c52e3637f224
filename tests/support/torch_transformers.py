"""Small models of `transformers` whose training has begun."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn

import onward

SIZES = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}


WHISPER = {"layers": 2, "attention_heads": 2, "ffn_dim": 16}


TEXT = {0: "batch", 1: "time"}


def tokens(n):
    return torch.randint(0, 23, (n, 6))


def labelled(n):
    ids = tokens(n)
    return {"input_ids": ids, "labels": ids}


def masked(n):
    return {"input_ids": tokens(n), "attention_mask": (torch.arange(6) < torch.randint(2, 7, (n, 1))).long()}


MODELS = {
    "bert": ("BertForSequenceClassification", {**SIZES, "vocab_size": 23, "num_labels": 3}, masked),
    "gpt2": (
        "GPT2LMHeadModel",
        {"vocab_size": 23, "n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 2},
        labelled,
    ),
    "llama": ("LlamaForCausalLM", {**SIZES, "vocab_size": 23, "num_key_value_heads": 1}, labelled),
    "t5": (
        "T5ForConditionalGeneration",
        {"vocab_size": 23, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
        | {"decoder_start_token_id": 0},
        labelled,
    ),
    "vit": (
        "ViTForImageClassification",
        {**SIZES, "image_size": 8, "patch_size": 4, "num_labels": 3},
        lambda n: {"pixel_values": torch.randn(n, 3, 8, 8)},
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        {"vocab_size": 23, "d_model": 8, "num_mel_bins": 4, "max_source_positions": 6, "max_target_positions": 16}
        | {f"{side}_{key}": n for side in ("encoder", "decoder") for key, n in WHISPER.items()}
        | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
        lambda n: {"input_features": torch.randn(n, 4, 12), "labels": tokens(n)},
    ),
}


def built(name, options):
    """Weights are spread, since those of a fresh model hardly make a difference; dropout is off."""
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    module = kind(kind.config_class(**options))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += torch.randn_like(parameter) / 5
    for layer in module.modules():
        for key, value in list(vars(layer).items()):
            if key == "p" or ("drop" in key and isinstance(value, float)):
                setattr(layer, key, 0.0)
    return module.train()


def steps(module, optimizer, scheduler, loss, batches):
    losses = []
    for inputs, classes in batches:
        optimizer.zero_grad()
        value = loss(module(**inputs), classes)
        value.backward()
        optimizer.step()
        scheduler.step()
        losses.append(float(value.detach()))
    return losses


class Begun(NamedTuple):
    """A run after five steps, and what PyTorch alone makes of it in ten more."""

    training: onward.Model
    state: dict[str, torch.Tensor]
    batches: list[Any]
    """Inputs, and classes for models that do not compute their loss."""
    losses: list[float]

    def arrays(self):
        return [
            {key: x.numpy() for key, x in {"labels": classes, **inputs}.items()} for inputs, classes in self.batches
        ]


@functools.cache
def begun(name):
    kind, options, inputs = MODELS[name]
    module = built(kind, options)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3, eps=1e-3)
    scheduler = transformers.get_linear_schedule_with_warmup(optimizer, 4, 40)
    batches = [(inputs(n), torch.randint(0, 3, (n,))) for n in [4, 3, 4, 4, 3] * 3]
    has_loss, entropy = "labels" in batches[0][0], nn.CrossEntropyLoss()
    native = (lambda y, _: y.loss) if has_loss else lambda y, classes: entropy(y.logits, classes)
    steps(module, optimizer, scheduler, native, batches[:5])
    shapes = {key: TEXT if x.dtype == torch.int64 else {0: "batch"} for key, x in batches[0][0].items()}
    training = onward.from_torch(
        module, batches[0][0], loss="loss" if has_loss else entropy,
        optimizer=optimizer, scheduler=scheduler, dynamic_shapes=shapes,
    )  # fmt: skip
    state = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    return Begun(training, state, batches[5:], steps(module, optimizer, scheduler, native, batches[5:]))
