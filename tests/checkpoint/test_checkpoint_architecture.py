"""Checkpoints that say what they compute: by a configuration of transformers, or by a module that the user gives."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_runs import close, data, net, steps, steps_of_onward
from commands import run
from marks import needs
from paths import CHECKPOINTS

import onward
from onward.engines import start

torch = pytest.importorskip("torch")

SMALL = {"vocab_size": 23, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}

pytestmark = pytest.mark.usefixtures("one_torch_thread")


# ---- transformers ----------------------------------------------------------------------------------------------------


@needs("transformers", "onnxscript")
def test_a_folder_of_the_trainer_alone(tmp_path: Path) -> None:
    """Its forward pass and loss are those of transformers; batches and sequences are of any size."""
    import transformers

    model = onward.from_checkpoint(CHECKPOINTS / "trainer")
    assert not onward.check(model)
    assert [(value.name, str(value.shape)) for value in model.inputs] == [
        ("input_ids", "[batch,sequence]"),
        ("attention_mask", "[batch,sequence]"),
        ("labels", "[batch]"),
    ]
    assert {"group0", "group1"} <= {name.partition("/")[0] for name in model.step().algorithm.initializers}
    theirs = transformers.BertForSequenceClassification.from_pretrained(CHECKPOINTS / "trainer").eval()
    batch = {
        "input_ids": torch.tensor([[1, 2, 3], [4, 5, 6]]),
        "attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]]),
        "labels": torch.tensor([0, 1]),
    }
    with torch.no_grad():
        expected = theirs(**batch)
    with start(model, threads=1) as engine:
        found = engine.evaluate({name: tensor.numpy() for name, tensor in batch.items()})
    np.testing.assert_allclose(found["logits"], expected.logits.numpy(), atol=1e-6)
    np.testing.assert_allclose(found["loss"], expected.loss.numpy(), rtol=1e-6)


@needs("transformers")
def test_a_folder_of_the_trainer_becomes_another_format(tmp_path: Path) -> None:
    """The configuration gives the order in which its optimizer numbers parameters."""
    import transformers

    run("convert", str(CHECKPOINTS / "trainer"), "--to", "dcp", "-o", str(tmp_path / "dcp"))
    module = transformers.BertForSequenceClassification.from_pretrained(CHECKPOINTS / "trainer")
    decayed = transformers.Trainer.get_decay_parameter_names(None, module)
    names = sorted(dict(module.named_parameters()), key=lambda name: name not in decayed)  # stable
    stored = torch.load(CHECKPOINTS / "trainer" / "optimizer.pt", weights_only=True)["state"]
    (optimizer,) = onward.open_checkpoint(tmp_path / "dcp").optimizers
    for number, name in enumerate(names):
        np.testing.assert_array_equal(optimizer.slots[name]["exp_avg"].array(), stored[number]["exp_avg"])


@needs("transformers", "onnxscript")
def test_labels_that_the_trainer_smooths() -> None:
    """The loss must have the smoothing of the arguments, and is then that of the Trainer; any other is refused."""
    from transformers.trainer_pt_utils import LabelSmoother

    opened = onward.open_checkpoint(CHECKPOINTS / "trainer")
    opened = dataclasses.replace(opened, arguments={**opened.arguments, "label_smoothing_factor": 0.1})
    for loss in (None, "logits=cross_entropy", "logits=cross_entropy:label_smoothing=0.2"):
        with pytest.raises(onward.Error, match=r"smooths labels by 0\.1") as caught:
            onward.from_checkpoint(opened, loss=loss)
        assert "logits=cross_entropy:label_smoothing=0.1" in str(caught.value.hint)
    model = onward.from_checkpoint(opened, loss="logits=cross_entropy:label_smoothing=0.1")
    batch = {name: np.array([[1, 2, 3], [4, 5, 6]]) for name in ("input_ids", "attention_mask")}
    batch["attention_mask"][:] = 1
    labels = next(value.name for value in [*model.inputs, *model.step().algorithm.inputs] if value.name not in batch)
    with start(model, threads=1) as engine:
        found = engine.evaluate({**batch, labels: np.array([0, 1])})
    expected = LabelSmoother(0.1)({"logits": torch.tensor(found["logits"])}, torch.tensor([0, 1]))
    np.testing.assert_allclose(found["loss"], expected.item(), rtol=1e-6)


@needs("transformers")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"auto_map": {"AutoModel": "modeling.Evil"}}, r"`auto_map`\), and is not executed"),
        ({"architectures": ["NoSuchModel"]}, r"has no model `NoSuchModel`"),
        ({"architectures": ["Trainer"]}, r"has no model `Trainer`"),
        ({"architectures": ["BertForPreTraining"]}, r"the inputs of a `BertForPreTraining` are unknown"),
        ({"architectures": [3]}, r"names no architecture"),
        ({"num_hidden_layers": 10**9}, r"`num_hidden_layers` is 1,000,000,000, for 25 tensors"),
        ({"hidden_size": 10**12}, r"`hidden_size` is 1,000,000,000,000, for 25 tensors"),
        ({"text_config": {"vocab_size": 10**400}}, r"`vocab_size` is 10,000,000"),
        ({"num_attention_heads": 3}, r"transformers cannot create `BertForSequenceClassification`"),
    ],
)
def test_configurations_that_are_refused(
    change: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of unknown classes and giant sizes before torch and transformers are imported."""
    folder = tmp_path / "trainer"
    shutil.copytree(CHECKPOINTS / "trainer", folder)
    configuration = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(configuration))
    if not said.startswith(("the inputs", "transformers")):  # which are known once its class is made
        monkeypatch.setitem(sys.modules, "onward.frameworks.torch.architecture", None)
    with pytest.raises(onward.Error, match=said):
        onward.from_checkpoint(folder)


TEXT = {"input_ids": "tokens", "attention_mask": "mask"}
LABELLED = {**TEXT, "labels": "tokens"}
SEQUENCES = {"vocab_size": 23, "d_model": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIDES = {f"{side}_{key}": n for side in ("encoder", "decoder") for key, n in
         {"layers": 1, "attention_heads": 2, "ffn_dim": 16}.items()}  # fmt: skip
KINDS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "BertForMaskedLM": (SMALL, LABELLED),
    "BertForTokenClassification": ({**SMALL, "num_labels": 3}, {**TEXT, "labels": "tokens of 3"}),
    "BertForMultipleChoice": (SMALL, {"input_ids": "choices", "attention_mask": "choice masks", "labels": "2"}),
    "RobertaForSequenceClassification": ({**SMALL, "num_labels": 1, "pad_token_id": 0}, {**TEXT, "labels": "numbers"}),
    "LlamaForCausalLM": ({**SMALL, "num_key_value_heads": 1}, LABELLED),
    "T5ForConditionalGeneration": (
        {"vocab_size": 23, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2,
         "decoder_start_token_id": 0},
        {**TEXT, "labels": "answers"},
    ),
    "BartForConditionalGeneration": (
        {**SEQUENCES, **SIDES, "decoder_start_token_id": 2, "max_position_embeddings": 16},
        {**TEXT, "labels": "answers"},
    ),
    "WhisperForConditionalGeneration": (
        {**SEQUENCES, **SIDES, "decoder_start_token_id": 1, "num_mel_bins": 4, "max_source_positions": 6,
         "max_target_positions": 16},
        {"input_features": "sound", "labels": "answers"},
    ),
    "ViTForImageClassification": (
        {**SMALL, "image_size": 8, "patch_size": 4, "num_labels": 3},
        {"pixel_values": "images", "labels": "3"},
    ),
    "ResNetForImageClassification": (
        {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1], "num_labels": 3},
        {"pixel_values": "large images", "labels": "3"},
    ),
}  # fmt: skip
"""Classes, how they are made, and what they take, in batches of 4 and sequences of 7."""


def made_up(kind: str) -> Any:
    mask = (torch.arange(7) < torch.tensor([[7], [4], [5], [7]])).long()
    return {
        "tokens": lambda: torch.randint(3, 23, (4, 7)),
        "mask": lambda: mask,
        "tokens of 3": lambda: torch.randint(0, 3, (4, 7)),
        "choices": lambda: torch.randint(3, 23, (4, 2, 7)),
        "choice masks": lambda: mask[:, None].repeat(1, 2, 1),
        "numbers": lambda: torch.rand(4),
        "answers": lambda: torch.randint(3, 23, (4, 6)),
        "sound": lambda: torch.randn(4, 4, 12),
        "images": lambda: torch.randn(4, 3, 8, 8),
        "large images": lambda: torch.randn(4, 3, 32, 32),
        "2": lambda: torch.randint(0, 2, (4,)),
        "3": lambda: torch.randint(0, 3, (4,)),
    }[kind]()


@pytest.mark.slow
@needs("transformers", "onnxscript")
@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_models(name: str, tmp_path: Path) -> None:
    """Three more steps are those of PyTorch; only a configuration says what is computed."""
    import transformers

    from onward.frameworks.torch.architecture import decay_groups

    options, takes = KINDS[name]
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    config = kind.config_class(**options)
    for key, value in config.to_dict().items():
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
    module = kind(config).train()
    groups = [[module.get_parameter(each) for each in group] for group in decay_groups(module)]
    optimizer = torch.optim.AdamW([{"params": group, "weight_decay": 0.1} for group in groups], lr=1e-2, eps=1e-3)
    batches = [{key: made_up(which) for key, which in takes.items()} for _ in range(5)]
    losses = []
    for i, batch in enumerate(batches):
        if i == 2:
            module.save_pretrained(tmp_path / "checkpoint")
            torch.save(optimizer.state_dict(), tmp_path / "checkpoint" / "optimizer.pt")
            (tmp_path / "checkpoint" / "trainer_state.json").write_text(json.dumps({"global_step": 2}))
        optimizer.zero_grad()
        loss = module(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model = onward.from_checkpoint(tmp_path / "checkpoint")
    found, _ = losses_of(model, [{key: x.numpy() for key, x in batch.items()} for batch in batches[2:]])
    np.testing.assert_allclose(found, losses[2:], rtol=1e-5)


@pytest.mark.slow
@needs("transformers", "onnxscript", "psutil")
def test_a_large_model_is_captured_without_its_values() -> None:
    """15 GB of parameters."""
    import psutil
    import transformers

    from onward.frameworks.torch.architecture import from_configuration

    sizes = {"vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=64, num_key_value_heads=8)
    configuration = {**config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    before = psutil.Process().memory_info().rss
    made = from_configuration(configuration, {}, None, computes_loss=True, in_trainer=True)
    weights = [value for value in made.model.graph.initializers.values() if value.const_value is not None]
    assert sum(value.const_value.nbytes for value in weights) > 15e9
    assert psutil.Process().memory_info().rss - before < 400e6


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


def trained(make: Any, data: Any, folder: Path, resume: Path | None = None, callbacks: Any = None) -> tuple[list, list]:
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
    trainer = Recording(make(), arguments, train_dataset=data, callbacks=callbacks)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return batches, losses


def losses_of(model: onward.Model, batches: list[dict[str, np.ndarray]]) -> tuple[list[float], onward.Model]:
    with start(model, threads=1) as engine:
        return [float(engine.step(batch)[engine.loss]) for batch in batches], engine.updated()


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
    np.testing.assert_allclose(losses_of(model, batches[5:10])[0], losses[5:10], rtol=1e-6)
    columns = {key: np.concatenate([batch[key] for batch in batches[5:10]]) for key in batches[0]}
    run = onward.train(model, columns, batch_size=4, shuffle=False, run=tmp_path / "run", threads=1, quiet=True)
    onward.to_checkpoint(run.path / "training.onnx", tmp_path / "back", format="hf")
    _, again = trained(make, data, tmp_path / "again", tmp_path / "back")
    np.testing.assert_allclose(again, losses[10:], rtol=1e-6)


@pytest.mark.slow
@needs("transformers", "onnxscript", "accelerate")
def test_training_models_beside_the_checkpoints_of_the_trainer(tmp_path: Path) -> None:
    """They go on as the Trainer does, hold no copy of its tensors, and the training is as it is without them."""
    data = classified(60)
    batches, losses = trained(bert, data, tmp_path / "alone")
    _, with_them = trained(bert, data, tmp_path / "there", callbacks=[onward.TrainerCallback(strict=True)])
    assert with_them == losses
    for at in (5, 10):
        folder = tmp_path / "there" / f"checkpoint-{at}"
        assert (folder / "training.data").stat().st_size == 2 * 512 * 8  # which BERT has beside its parameters
        found, _ = losses_of(onward.load(folder / "training.onnx"), batches[at : at + 5])
        np.testing.assert_allclose(found, losses[at : at + 5], rtol=1e-6)
    assert not {"training.onnx", "training.data"} & {*onward.open_checkpoint(folder).files}


@pytest.mark.slow
@needs("transformers", "accelerate")
def test_a_training_model_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"training\.onnx` was not written: .*`nothing`"):
        trained(bert, classified(60), tmp_path, callbacks=[onward.TrainerCallback(optimizer="nothing")])


# ---- modules that users give -----------------------------------------------------------------------------------------


class Squares(torch.nn.Module):
    """What `lightning.ckpt` was made of, but for Lightning."""

    def __init__(self, width: int = 7):
        super().__init__()
        self.layer = torch.nn.Linear(3, width)

    def training_step(self, batch: Any, index: int) -> Any:
        return self.layer(batch).square().sum()


def test_a_class_with_the_hyper_parameters_of_lightning() -> None:
    """The loss is that of `training_step`, and the run goes on as with PyTorch alone."""
    path = CHECKPOINTS / "lightning.ckpt"
    model = onward.from_checkpoint(path, module=Squares, example_inputs=torch.ones(2, 3))
    tree = torch.load(path, weights_only=True)
    module = Squares(**tree["hyper_parameters"])
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    module.load_state_dict(tree["state_dict"])
    optimizer.load_state_dict(tree["optimizer_states"][0])
    schedule.load_state_dict(tree["lr_schedulers"][0])
    expected = []
    for i in range(4):  # two make an epoch
        optimizer.zero_grad()
        loss = module.training_step(torch.ones(2, 3), i)
        loss.backward()
        optimizer.step()
        if i % 2:
            schedule.step()
        expected.append(loss.item())
    found, _ = losses_of(model, [{"batch": np.ones((2, 3), np.float32)}] * 4)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_module_by_where_it_is(tmp_path: Path) -> None:
    module = net()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    steps(module, optimizer, None, range(5))
    torch.save({"module": module.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    expected = steps(module, optimizer, None, range(5, 10))
    given = {"example_inputs": torch.zeros(4, 4), "loss": "cross_entropy"}
    model = onward.from_checkpoint(tmp_path / "x.pt", module="checkpoint_runs:net", **given)
    close(steps_of_onward(model, range(5, 10))[0], expected)
    for module, said in {
        "checkpoint_runs": "has no module",
        "checkpoint_runs:nothing": "cannot import `checkpoint_runs:nothing`",
        "checkpoint_runs:SIZE": "neither a module nor its class",
    }.items():
        with pytest.raises(onward.Error, match=said):
            onward.from_checkpoint(tmp_path / "x.pt", module=module, **given)
    with pytest.raises(onward.Error, match="the inputs of `Sequential` are unknown"):
        onward.from_checkpoint(tmp_path / "x.pt", module=net(), loss="cross_entropy")


@pytest.mark.slow
@needs("pytorch_lightning")
@pytest.mark.parametrize("loss", [None, "cross_entropy"])
def test_training_models_beside_the_checkpoints_of_lightning(loss: str | None, tmp_path: Path) -> None:
    """By the loss of `training_step`, and by one of the forward pass; those of removed checkpoints are removed."""
    import pytorch_lightning

    class Net(pytorch_lightning.LightningModule):
        def __init__(self, width: int):
            super().__init__()
            self.save_hyperparameters()
            self.layers = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.ReLU(), torch.nn.Linear(width, 3))
            self.losses: list[float] = []

        def forward(self, x: Any) -> Any:
            return self.layers(x)

        def training_step(self, batch: Any, index: int) -> Any:
            loss = torch.nn.functional.cross_entropy(self(batch[0]), batch[1])
            self.log("loss", loss)
            if not torch.compiler.is_exporting():
                self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
            return [optimizer], [{"scheduler": scheduler, "interval": "epoch" if loss else "step"}]

    def fitted(count: int, folder: Path, *callbacks: Any) -> tuple[list[float], Any]:
        torch.manual_seed(0)
        net = Net(5)
        options = {"every_n_train_steps": 5, "save_top_k": 1, "filename": "{step}", "save_last": "link"}
        saving = pytorch_lightning.callbacks.ModelCheckpoint(folder, **options)
        trainer = pytorch_lightning.Trainer(
            max_steps=count, accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=folder,
            callbacks=[saving, *callbacks], gradient_clip_val=0.05,
        )  # fmt: skip
        batches = torch.utils.data.TensorDataset(*map(torch.from_numpy, data()))
        trainer.fit(net, torch.utils.data.DataLoader(batches, batch_size=None))
        assert trainer.save_checkpoint == type(trainer).save_checkpoint.__get__(trainer)
        return net.losses, torch.get_rng_state()

    losses, state = fitted(10, tmp_path / "alone")
    callback = onward.LightningCallback(loss=loss, strict=True)
    with_them, state_with_them = fitted(10, tmp_path / "there", callback)
    assert with_them == losses and torch.equal(state, state_with_them)
    assert [path.name for path in (tmp_path / "there").glob("*.onnx")] == ["step=10.onnx"]
    model = onward.load(tmp_path / "there" / "step=10.onnx")
    names = [value.name or "" for value in (*model.inputs, *model.step().algorithm.inputs)]
    batches = [dict(zip(names, batch, strict=True)) for batch in zip(*data(), strict=True)]
    expected, _ = fitted(15, tmp_path / "longer")
    np.testing.assert_allclose(losses_of(model, batches[10:])[0], expected[10:], rtol=1e-6)
