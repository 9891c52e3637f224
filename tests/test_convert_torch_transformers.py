"""Models of Hugging Face, trained by PyTorch for five steps, go on as training models and as modules again."""

import numpy as np
import pytest

from conftest import needs
from onward.run import load

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from torch import nn  # noqa: E402

from onward.convert.torch import from_torch, to_torch  # noqa: E402

pytestmark = [
    needs("torch", "transformers", "onnxscript"),
    pytest.mark.slow,
    pytest.mark.usefixtures("one_torch_thread"),
]

SIZES = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
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


@pytest.mark.parametrize("name", MODELS)
def test_a_run_goes_on(name):
    kind, options, inputs = MODELS[name]
    module = built(kind, options)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3, eps=1e-3)
    scheduler = transformers.get_linear_schedule_with_warmup(optimizer, 4, 40)
    batches = [(inputs(n), torch.randint(0, 3, (n,))) for n in [4, 3, 4, 4, 3] * 3]
    has_loss, entropy = "labels" in batches[0][0], nn.CrossEntropyLoss()
    native = (lambda y, _: y.loss) if has_loss else lambda y, classes: entropy(y.logits, classes)
    steps(module, optimizer, scheduler, native, batches[:5])

    shapes = {key: TEXT if x.dtype == torch.int64 else {0: "batch"} for key, x in batches[0][0].items()}
    training = from_torch(
        module, batches[0][0], loss="loss" if has_loss else entropy,
        optimizer=optimizer, scheduler=scheduler, dynamic_shapes=shapes,
    )  # fmt: skip
    back = to_torch(training)
    expected, found = module.state_dict(), back.module.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())

    losses = steps(module, optimizer, scheduler, native, batches[5:])
    carried = (lambda y, _: back.loss(y)) if has_loss else back.loss
    again = steps(back.module, back.optimizer, back.scheduler, carried, batches[5:])
    np.testing.assert_allclose(again, losses, rtol=1e-5)
    with load(training, threads=1) as engine:
        given = [{**x, "labels": x.get("labels", classes)} for x, classes in batches[5:]]
        ours = [float(engine.step({k: x.numpy() for k, x in batch.items()})[engine.loss]) for batch in given]
    np.testing.assert_allclose(ours, losses, rtol=1e-5)
