"""Models of Hugging Face, trained by PyTorch for five steps, go on elsewhere, and as modules again."""

import functools
from typing import Any, NamedTuple

import numpy as np
import pytest

from conftest import needs
from onward.run import load

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from torch import nn  # noqa: E402

import onward  # noqa: E402
from onward.errors import UnsupportedError  # noqa: E402

pytestmark = [needs("torch", "transformers", "onnxscript"), pytest.mark.usefixtures("one_torch_thread")]

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


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_in_torch(name):
    run = begun(name)
    back = onward.to_torch(run.training)
    found = back.module.state_dict()
    assert list(found) == list(run.state)
    assert all(torch.equal(found[key], tensor) for key, tensor in run.state.items())
    loss = (lambda y, _: back.loss(y)) if "labels" in run.batches[0][0] else back.loss
    losses = steps(back.module, back.optimizer, back.scheduler, loss, run.batches)
    np.testing.assert_allclose(losses, run.losses, rtol=1e-5)


def on_onnxruntime(training, batches):
    with load(training, threads=1) as engine:
        return [float(engine.step(batch)[engine.loss]) for batch in batches]


def in_jax(training, batches, **options):
    import jax

    step, state = onward.to_jax(training, **options)[:2]
    step, losses = jax.jit(step), []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses


def in_tensorflow(training, batches):
    module = onward.to_tensorflow(training)
    return [float(module.train_step(**batch)["loss"]) for batch in batches]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "target",
    [on_onnxruntime, pytest.param(in_jax, marks=needs("jax")), pytest.param(in_tensorflow, marks=needs("tensorflow"))],
)
def test_elsewhere(name, target):
    run = begun(name)
    np.testing.assert_allclose(target(run.training, run.arrays()), run.losses, rtol=1e-5)


@needs("jax")
def test_a_small_one_in_jax():
    """What the slow tests do, at the price of one."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES | {"num_hidden_layers": 1}, vocab_size=23)
    module = transformers.LlamaForCausalLM(config).train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3, eps=1e-3)
    scheduler = transformers.get_linear_schedule_with_warmup(optimizer, 4, 40)
    batches = [(labelled(4), None) for _ in range(10)]
    steps(module, optimizer, scheduler, lambda y, _: y.loss, batches[:5])
    given = {"loss": "loss", "optimizer": optimizer, "scheduler": scheduler, "probe": False}
    training = onward.from_torch(module, batches[0][0], **given)
    losses = steps(module, optimizer, scheduler, lambda y, _: y.loss, batches[5:])
    arrays = [{key: x.numpy() for key, x in inputs.items()} for inputs, _ in batches[5:]]
    np.testing.assert_allclose(in_jax(training, arrays, probe=False), losses, rtol=1e-5)


@pytest.mark.slow
def test_layers_that_are_left_out_at_random():
    kind, options, inputs = MODELS["whisper"]
    module = built(kind, options)
    module.model.encoder.layerdrop, module.config.apply_spec_augment = 0.5, True
    given = {"loss": "loss", "optimizer": torch.optim.AdamW(module.parameters())}
    with pytest.raises(UnsupportedError, match=r"`model.encoder` leaves out whole layers at random \(layerdrop=0.5\)"):
        onward.from_torch(module, inputs(4), **given)
    module.model.encoder.layerdrop = 0.0
    with pytest.raises(UnsupportedError, match=r"draws random numbers by `numpy.random`"):
        onward.from_torch(module, inputs(4), **given)
