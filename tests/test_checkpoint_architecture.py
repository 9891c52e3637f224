"""Checkpoints that say what they compute: by a configuration of transformers, or by a module that the user gives."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onward
from conftest import needs
from onward.run import load

torch = pytest.importorskip("torch")

RECORDED = Path(__file__).parent / "checkpoints"
SMALL = {"vocab_size": 23, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}

pytestmark = pytest.mark.usefixtures("one_torch_thread")


# ---- transformers ----------------------------------------------------------------------------------------------------


@needs("transformers", "onnxscript")
def test_a_folder_of_the_trainer_alone(tmp_path: Path) -> None:
    """Its forward pass and loss are those of transformers; batches and sequences are of any size."""
    import transformers

    model = onward.from_checkpoint(RECORDED / "trainer")
    assert not onward.check(model)
    assert [(value.name, str(value.shape)) for value in model.inputs] == [
        ("input_ids", "[batch,sequence]"),
        ("attention_mask", "[batch,sequence]"),
        ("labels", "[batch]"),
    ]
    assert {"group0", "group1"} <= {name.partition("/")[0] for name in model.step().algorithm.initializers}
    theirs = transformers.BertForSequenceClassification.from_pretrained(RECORDED / "trainer").eval()
    batch = {
        "input_ids": torch.tensor([[1, 2, 3], [4, 5, 6]]),
        "attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]]),
        "labels": torch.tensor([0, 1]),
    }
    with torch.no_grad():
        expected = theirs(**batch)
    with load(model, threads=1) as engine:
        found = engine.evaluate({name: tensor.numpy() for name, tensor in batch.items()})
    np.testing.assert_allclose(found["logits"], expected.logits.numpy(), atol=1e-6)
    np.testing.assert_allclose(found["loss"], expected.loss.numpy(), rtol=1e-6)


@needs("transformers")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"auto_map": {"AutoModel": "modeling.Evil"}}, r"`auto_map`\), and is not executed"),
        ({"architectures": ["NoSuchModel"]}, r"has no model `NoSuchModel`"),
        ({"architectures": ["Trainer"]}, r"has no model `Trainer`"),
        ({"architectures": ["BertForPreTraining"]}, r"what a `BertForPreTraining` takes is not known"),
        ({"architectures": [3]}, r"names no architecture"),
        ({"num_hidden_layers": 10**9}, r"`num_hidden_layers` is 1000000000, and there are 25 tensors"),
        ({"num_attention_heads": 3}, r"transformers makes no `BertForSequenceClassification`"),
    ],
)
def test_configurations_that_are_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    folder = tmp_path / "trainer"
    shutil.copytree(RECORDED / "trainer", folder)
    configuration = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(configuration))
    with pytest.raises(onward.Error, match=said):
        onward.from_checkpoint(folder)


def sentences(count: int, **more: Any) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    made = []
    for _ in range(count):
        ids = rng.integers(3, 23, 6)
        mask = (np.arange(6) < rng.integers(2, 7)).astype(np.int64)
        made.append({"input_ids": ids, "attention_mask": mask, "labels": np.where(mask, ids, -100), **more})
    return made


def classified(count: int) -> list[dict[str, Any]]:
    return [{**each, "labels": i % 3} for i, each in enumerate(sentences(count))]


def bert() -> Any:
    import transformers

    options = {"num_labels": 3, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL, **options))


def gpt2() -> Any:
    import transformers

    sizes = {"vocab_size": 23, "n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 2}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropout, bos_token_id=1, eos_token_id=1))


def trained(make: Any, data: Any, folder: Path, resume: Path | None = None, **options: Any) -> tuple[list, list]:
    """The batches and losses of fifteen steps by the Trainer, or of those after a checkpoint; it saves after five."""
    import transformers

    batches, losses = [], []

    class Recording(transformers.Trainer):
        def _get_train_sampler(self, *args: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def training_step(self, model: Any, inputs: Any, *args: Any) -> Any:
            batches.append({name: tensor.numpy().copy() for name, tensor in inputs.items()})
            loss = super().training_step(model, inputs, *args)
            losses.append(float(loss))
            return loss

    torch.manual_seed(0)
    arguments = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=4, max_steps=15, save_steps=5, learning_rate=1e-2, weight_decay=0.1,
        warmup_steps=2, report_to="none", use_cpu=True, disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    trainer = Recording(make(), arguments, train_dataset=data, **options)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return batches, losses


RUNS = {"bert": (bert, classified), "gpt2": (gpt2, sentences)}


@pytest.mark.slow
@needs("transformers", "onnxscript", "accelerate")
@pytest.mark.parametrize("name", RUNS)
def test_the_trainer_and_onward_take_turns(name: str, tmp_path: Path) -> None:
    """Five steps there, five here without a model beside the checkpoint, five there again: one run."""
    make, examples = RUNS[name]
    data = examples(60)
    batches, losses = trained(make, data, tmp_path / "there")
    model = onward.from_checkpoint(tmp_path / "there" / "checkpoint-5")
    with load(model, threads=1) as engine:
        found = [float(engine.step(batch)[engine.loss]) for batch in batches[5:10]]
        model = engine.updated()
    np.testing.assert_allclose(found, losses[5:10], rtol=1e-6)
    onward.to_checkpoint(model, tmp_path / "back", format="hf")
    _, again = trained(make, data, tmp_path / "again", tmp_path / "back")
    np.testing.assert_allclose(again, losses[10:], rtol=1e-6)
