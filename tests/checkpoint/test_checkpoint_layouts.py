"""Checkpoints as training scripts write them: tied weights, groups by weight decay, frozen parameters, wrappers.

Each layout is written by PyTorch, continued there for ten steps and on ONNX Runtime, with equal losses. What ONNX
Runtime trained is written back and equal to what PyTorch saves then.
"""

from __future__ import annotations

import copy
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_layouts_jax import BATCHES, JAX_LAYOUTS, parameters
from checkpoint_layouts_keras import DATA, KERAS_LAYOUTS, compiled, steps
from marks import needs
from paths import CHECKPOINTS
from torch_export import by_dynamo, quiet

import onward
from onward.errors import UnsupportedError

torch = pytest.importorskip("torch")
from checkpoint_layouts import (  # noqa: E402
    LAYOUTS,
    STEPS,
    Language,
    Layout,
    Vision,
    batches,
    milestones,
    momentum,
    plain,
    tensors_of,
    train,
)
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402


def run(training: onward.Model, module: Any) -> tuple[list[float], onward.Model]:
    """Train on ONNX Runtime; return the losses and the training model."""
    name = "tokens" if isinstance(module, Language) else "image"
    with onward.engines.start(training) as engine:
        steps = ({name: inputs.numpy(), "labels": labels.numpy()} for inputs, labels in batches(module, 2))
        return [float(engine.step(batch)["loss"]) for batch in steps], engine.updated()


@pytest.fixture(scope="module")
def models() -> dict[type, onward.Model]:
    exports = {Language: ({"tokens": "bt"}, "logits"), Vision: ({"image": "b"}, "logits")}
    with quiet():
        return {
            cls: onward.load(by_dynamo(cls().eval(), {next(iter(axes)): next(batches(cls(), 0))[0]}, axes, output))
            for cls, (axes, output) in exports.items()
        }


EXPORTS: dict[str, tuple[type, str, tuple[str, ...]]] = {
    "BatchNormalization folded": (Vision, "bn1.weight", ("folded BatchNormalization", "optimize=False")),
    "positions folded": (Language, "wpe.weight", ("folded `wpe.weight` at length 8", "`embedding_1`")),
}
"""Exports that do not fit: the module, a tensor that they lack, and what the hint says."""


def test_the_page_lists_these_layouts() -> None:
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
    section = page.partition("## Layouts of scripts")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("| ")]
    layouts: dict[str, Any] = {**LAYOUTS, **JAX_LAYOUTS, **KERAS_LAYOUTS}
    outcomes = {name: "refused" if layout.refusal else "continues" for name, layout in layouts.items()}
    assert {row[0]: row[2] for row in rows[1:]} == outcomes | dict.fromkeys(EXPORTS, "refused")


def _saved(path: Path, layout: Layout) -> tuple[list[float], Any]:
    """Train, save as a layout, train on, and return the losses since then and what would be saved now."""
    module = layout.module()
    optimizer = layout.optimizer(module)
    scheduler = layout.scheduler(optimizer)
    train(module, optimizer, 1, scheduler, layout.every)
    layout.files.save(layout.tree(module, optimizer, scheduler), path)
    losses = train(module, optimizer, 2, scheduler, layout.every)
    return losses, layout.tree(module, optimizer, scheduler)


_QUICK = (
    "nanoGPT",
    "Adafactor, scaled",
    "frozen, ambiguous",
    "torchtitan",
    "pickled optimizer",
    "Trainer",
    "timm train.py",
    "MoCo",
)


@pytest.mark.slow(*(name for name in LAYOUTS if name not in _QUICK))
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_continues(name: str, models: dict[type, onward.Model], tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    losses, tree = _saved(tmp_path / "ckpt.pt", layout)
    options = {"loss": "cross_entropy:axis=-1", **layout.options}
    if layout.refusal:
        with pytest.raises(UnsupportedError) as refusal:
            onward.from_checkpoint(tmp_path / "ckpt.pt", models[layout.module], **options)
        assert layout.refusal in f"{refusal.value.message} {refusal.value.hint}"
        return
    training = onward.from_checkpoint(tmp_path / "ckpt.pt", models[layout.module], **options)
    ours, trained = run(training, layout.module())
    np.testing.assert_allclose(ours, losses, rtol=1e-5)
    if layout.is_same_after:
        onward.to_checkpoint(trained, tmp_path / "after.pt", format=layout.files.form)
        layout.files.save(tree, tmp_path / "expected.pt")
        expected, actual = (tensors_of(layout.files.load(tmp_path / name)) for name in ("expected.pt", "after.pt"))
        assert actual.keys() == expected.keys()
        for key, tensor in expected.items():
            np.testing.assert_allclose(actual[key].numpy(), tensor.numpy(), rtol=1e-3, atol=2e-5, err_msg=key)


_RECORDED = CHECKPOINTS / "layouts"
RECORDED: dict[str, dict[str, Any]] = json.loads((_RECORDED / "losses.json").read_text())
_OPTIONS = {"MMEngine": {"schedule": "multistep:milestones=[13,16],gamma=0.1", "updates": STEPS}}
_REFUSALS = {"stable-baselines3": "unpack it"}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", sorted(RECORDED.keys() - {"PaddlePaddle"}))
def test_a_recorded_layout_continues(name: str, models: dict[type, onward.Model]) -> None:
    """Files that the projects themselves wrote, and the losses of ten more steps there."""
    path, cls = _RECORDED / RECORDED[name]["file"], Language if name == "PEFT" else Vision
    options = {"loss": "cross_entropy:axis=-1", **_OPTIONS.get(name, {})}
    if name in _REFUSALS:
        with pytest.raises(UnsupportedError) as refusal:
            onward.from_checkpoint(path, models[cls], **options)
        assert _REFUSALS[name] in f"{refusal.value.message} {refusal.value.hint}"
        return
    losses, _ = run(onward.from_checkpoint(path, models[cls], **options), cls())
    np.testing.assert_allclose(losses, RECORDED[name]["losses"], rtol=1e-5)


def test_weights_of_paddle() -> None:
    row = RECORDED["PaddlePaddle"]
    tensors = onward.open_checkpoint(_RECORDED / row["file"]).tensors
    x = np.linspace(-1, 1, 8, dtype=np.float32) @ tensors["0.weight"].array() + tensors["0.bias"].array()
    outputs = np.maximum(x, 0) @ tensors["2.weight"].array() + tensors["2.bias"].array()
    np.testing.assert_allclose(outputs, row["losses"], rtol=1e-5, atol=1e-6)


@pytest.mark.slow("positions folded")
@pytest.mark.parametrize("name", EXPORTS)
def test_an_export_that_lost_parameters(name: str, tmp_path: Path) -> None:
    cls, lost, causes = EXPORTS[name]
    layout = Layout(plain, module=cls)
    _saved(tmp_path / "ckpt.pt", layout)
    module, inputs = cls().eval(), next(batches(cls(), 0))[0]
    with quiet():
        if cls is Vision:
            torch.onnx.export(module, (inputs,), tmp_path / "model.onnx", dynamo=False)
        else:
            program = torch.onnx.export(module, (inputs,), dynamo=True, verbose=False)
            program.save(tmp_path / "model.onnx")
    with pytest.raises(UnsupportedError) as refusal:
        onward.from_checkpoint(tmp_path / "ckpt.pt", tmp_path / "model.onnx", loss="cross_entropy:axis=-1")
    assert f"the model has no `{'stem.weight' if cls is Vision else lost}`" in refusal.value.message
    assert lost in refusal.value.message
    for cause in causes:
        assert cause in (refusal.value.hint or "")


@pytest.mark.parametrize("form", ["state dict", "half precision", "training checkpoint", "pickled module"])
def test_weights_alone_start_a_run(form: str, models: dict[type, onward.Model], tmp_path: Path) -> None:
    module, path = Language(), tmp_path / "weights.pt"
    torch.manual_seed(1)
    for parameter in module.parameters():
        nn.init.normal_(parameter.requires_grad_(False), std=0.1)
    module.load_state_dict({name: tensor.half().float() for name, tensor in module.state_dict().items()})
    state = module.state_dict()
    forms = {
        "state dict": state,
        "half precision": {name: tensor.half() for name, tensor in state.items()},
        "training checkpoint": {"model": state, "best_loss": 1.5},
        "pickled module": module,
    }
    torch.save(forms[form], path)
    tokens, labels = next(batches(module, 3))
    data = {"tokens": tokens.numpy(), "labels": labels.numpy()}
    run = onward.train(
        models[Language],
        data,
        loss="cross_entropy:axis=-1",
        weights=path,
        run=tmp_path / "run",
        batch_size=4,
        quiet=True,
    )
    expected = F.cross_entropy(module(tokens).flatten(0, 1), labels.flatten())
    np.testing.assert_allclose(next(row["loss"] for row in run.read_log() if "loss" in row), float(expected), rtol=1e-6)


def test_a_pickled_module_trains_when_it_is_loaded(models: dict[type, onward.Model], tmp_path: Path) -> None:
    module = Language()
    train(module, optimizer := momentum(module), 1)
    torch.save({"model": module, "optimizer": optimizer.state_dict()}, tmp_path / "ckpt.pt")
    with pytest.warns(UserWarning, match="taken as none"):
        training = onward.from_checkpoint(tmp_path / "ckpt.pt", models[Language], loss="cross_entropy:axis=-1")
    onward.to_checkpoint(training, tmp_path / "after.pt", format="torch")
    after = torch.load(tmp_path / "after.pt", weights_only=False)["model"]
    assert after.wte.weight is after.lm_head.weight
    (after_optimizer := momentum(after)).load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert train(after, after_optimizer, 2) == train(module, optimizer, 2)


def test_weights_of_another_model_are_refused(models: dict[type, onward.Model], tmp_path: Path) -> None:
    torch.save(nn.Linear(4, 3).state_dict(), tmp_path / "other.pt")
    with pytest.raises(UnsupportedError, match="cannot be carried over: `weight` is"):
        onward.train(models[Vision], {}, loss="cross_entropy:axis=-1", weights=tmp_path / "other.pt")


# ---- frameworks ------------------------------------------------------------------------------------------------------


class _Adapted(nn.Module):
    """A linear layer as PEFT wraps it."""

    def __init__(self, base: Any, rank: int, alpha: float) -> None:
        super().__init__()
        self.base_layer, self.scale = base, alpha / rank
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})
        nn.init.zeros_(self.lora_B["default"].weight)

    def forward(self, x: Any) -> Any:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x)) * self.scale


def _in_trainer(folder: Path, optimizer: Any, scheduler: Any) -> None:
    """Save what the Trainer of transformers saves beside the model."""
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save(scheduler.state_dict(), folder / "scheduler.pt")
    state = {"global_step": STEPS, "epoch": 1.0, "max_steps": 100, "num_train_epochs": 1, "log_history": []}
    (folder / "trainer_state.json").write_text(json.dumps(state))


@pytest.mark.slow
def test_adapters_of_peft_in_a_trainer(models: dict[type, onward.Model], tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    module = Language().requires_grad_(False)
    for block in module.h:
        block.attn, block.out = _Adapted(block.attn, 2, 4), _Adapted(block.out, 2, 4)
    trained = {f"base_model.model.{n}": p for n, p in module.named_parameters() if p.requires_grad}
    groups = [{"params": [*trained.values()], "weight_decay": 0.01}, {"params": [], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 40)
    train(module, optimizer, 1, scheduler)
    tensors = {name.replace(".default", ""): p.detach() for name, p in trained.items()}
    safetensors.save_file(tensors, tmp_path / "adapter_model.safetensors", {"format": "pt"})
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "lora_dropout": 0.0, "target_modules": ["attn", "out"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    _in_trainer(tmp_path, optimizer, scheduler)
    losses = train(module, optimizer, 2, scheduler)
    ours, after = run(onward.from_checkpoint(tmp_path, models[Language], loss="cross_entropy:axis=-1"), module)
    np.testing.assert_allclose(ours, losses, rtol=1e-5)
    onward.to_checkpoint(after, tmp_path / "after", format="hf")
    written = safetensors.load_file(tmp_path / "after" / "adapter_model.safetensors")
    for name, tensor in tensors.items():  # the tensors of the module, trained further
        np.testing.assert_allclose(written[name].numpy(), tensor.numpy(), rtol=1e-4, atol=1e-6, err_msg=name)
    state = torch.load(tmp_path / "after" / "optimizer.pt")["state"]
    for key, slots in optimizer.state_dict()["state"].items():
        np.testing.assert_allclose(state[key]["exp_avg"].numpy(), slots["exp_avg"].numpy(), rtol=1e-3, atol=1e-6)


def test_a_trainer_that_saved_the_model_only(models: dict[type, onward.Model], tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    module = Vision()
    train(module, optimizer := momentum(module), 1)
    _in_trainer(tmp_path, optimizer, milestones(optimizer))
    for name in ("optimizer", "scheduler"):
        (tmp_path / f"{name}.pt").unlink()
    safetensors.save_file(module.state_dict(), tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedError, match="has no optimizer state") as refusal:
        onward.from_checkpoint(tmp_path, models[Vision], loss="cross_entropy")
    assert "onward train --weights" in (refusal.value.hint or "")
    inputs, labels = next(batches(module, 3))
    data = {"image": inputs.numpy(), "labels": labels.numpy()}
    options = {"loss": "cross_entropy", "batch_norm": "batch", "run": tmp_path / "run", "batch_size": 4, "quiet": True}
    run = onward.train(models[Vision], data, weights=tmp_path, **options)
    expected = F.cross_entropy(module.train()(inputs), labels).item()
    np.testing.assert_allclose(next(row["loss"] for row in run.read_log() if "loss" in row), expected, rtol=1e-6)


def test_an_optimizer_of_no_recipe_is_named_by_its_slots(models: dict[type, onward.Model], tmp_path: Path) -> None:
    module = Vision()
    train(module, optimizer := momentum(module), 1)
    tree = plain(module, optimizer, None)
    for slots in tree["optimizer"]["state"].values():  # as 8-bit optimizers have them
        slots |= {"state1": slots.pop("momentum_buffer"), "qmap1": torch.zeros(256)}
    torch.save(tree, tmp_path / "ckpt.pt")
    with pytest.raises(UnsupportedError, match="keeps `qmap1`, `state1`"):
        onward.from_checkpoint(tmp_path / "ckpt.pt", models[Vision], loss="cross_entropy")


@pytest.mark.slow
def test_several_models_of_accelerate(models: dict[type, onward.Model], tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    modules = [Vision(), Vision()]
    nn.init.zeros_(modules[0].fc.weight)
    optimizers = [momentum(module) for module in modules]
    accelerator = accelerate.Accelerator(cpu=True)
    wrapped = accelerator.prepare(*modules, *optimizers)
    for module, optimizer in zip(wrapped[:2], wrapped[2:], strict=True):
        train(module, optimizer, 1)
    accelerator.save_state(tmp_path / "state")
    with pytest.raises(UnsupportedError, match=r"2 modules of .* fit the model: `model`, `model_1`"):
        onward.from_checkpoint(tmp_path / "state", models[Vision], loss="cross_entropy")
    training = onward.from_checkpoint(tmp_path / "state", models[Vision], loss="cross_entropy", module="model_1")
    losses, trained = run(training, Vision())
    np.testing.assert_allclose(losses, train(wrapped[1], wrapped[3], 2), rtol=1e-5)
    onward.to_checkpoint(trained, tmp_path / "after", format="accelerate")
    expected = [train(wrapped[0], wrapped[2], 3), train(wrapped[1], wrapped[3], 3)]
    accelerator.load_state(tmp_path / "state")
    first = train(wrapped[0], wrapped[2], 3)
    accelerator.load_state(tmp_path / "after")
    np.testing.assert_allclose(train(wrapped[0], wrapped[2], 3), first, rtol=1e-6)
    np.testing.assert_allclose(train(wrapped[1], wrapped[3], 3), expected[1], rtol=1e-5)


@pytest.mark.slow
def test_gan_of_lightning(models: dict[type, onward.Model], tmp_path: Path) -> None:
    lightning = pytest.importorskip("pytorch_lightning")

    class Gan(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.discriminator, self.generator = nn.Linear(5, 1), Vision()

        def training_step(self, batch: Any, index: int) -> None:
            losses = [F.cross_entropy(self.generator(batch[0]), batch[1]), self.discriminator(torch.ones(2, 5)).sum()]
            for optimizer, loss in zip(self.optimizers(), losses, strict=True):
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()

        def configure_optimizers(self) -> list[Any]:
            return [momentum(self.generator), torch.optim.Adam(self.discriminator.parameters())]

    gan = Gan()
    quiet_options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", enable_checkpointing=False, barebones=False, **quiet_options
    )
    trainer.fit(gan, torch.utils.data.DataLoader(list(batches(gan.generator, 1)), batch_size=None))
    trainer.save_checkpoint(tmp_path / "gan.ckpt")
    training = onward.from_checkpoint(
        tmp_path / "gan.ckpt", models[Vision], loss="cross_entropy", module="generator", updates=STEPS
    )
    losses, trained = run(training, Vision())
    expected = train(gan.generator, trainer.optimizers[0], 2)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    onward.to_checkpoint(trained, tmp_path / "after.ckpt", format="lightning")
    again = Gan()
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", enable_checkpointing=False, **quiet_options)
    trainer.fit(again, torch.utils.data.DataLoader([]), ckpt_path=tmp_path / "after.ckpt", weights_only=False)
    for name, tensor in gan.state_dict().items():
        np.testing.assert_allclose(again.state_dict()[name].numpy(), tensor.numpy(), rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.slow
@needs("jax", "optax", "flax", "orbax")
@pytest.mark.parametrize("name", JAX_LAYOUTS)
def test_a_layout_of_jax_continues(name: str, tmp_path: Path) -> None:
    import jax
    import optax

    layout = JAX_LAYOUTS[name]
    if layout.module != "dict":
        pytest.importorskip(layout.module)
    params, logits = parameters(layout.module)
    optimizer, path = layout.optimizer(), tmp_path / layout.file

    def loss(params: Any, batch: Any) -> Any:
        values = logits(params, batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(values, batch["labels"]).mean()

    @jax.jit
    def update(params: Any, state: Any, batch: Any) -> tuple[Any, Any, Any]:
        value, slopes = jax.value_and_grad(loss)(params, batch)
        updates, state = optimizer.update(slopes, state, params)
        return value, optax.apply_updates(params, updates), state

    like = onward.from_jax(loss, params, BATCHES[0], optimizer=optimizer)
    state, losses = optimizer.init(params), []
    for step, batch in enumerate(BATCHES):
        if step == STEPS:
            layout.save(path, {"params": params, "opt_state": state, "step": step})
        value, params, state = update(params, state, batch)
        losses.append(float(value))
    if layout.refusal:
        with pytest.raises(UnsupportedError) as refusal:
            onward.from_checkpoint(path, like)
        assert layout.refusal in f"{refusal.value.message} {refusal.value.hint}"
        return
    with onward.engines.start(onward.from_checkpoint(path, like)) as engine:
        ours = [float(engine.step(batch)["loss"]) for batch in BATCHES[STEPS:]]
        trained = engine.updated()
    np.testing.assert_allclose(ours, losses[STEPS:], rtol=1e-5)
    if layout.load is not None:
        onward.to_checkpoint(trained, tmp_path / "after", format=layout.form)
        tree = {"params": params, "opt_state": state, "step": 2 * STEPS}
        after = layout.load(tmp_path / "after", tree)
        assert jax.tree.structure(after) == jax.tree.structure(tree)
        for actual, expected in zip(jax.tree.leaves(after), jax.tree.leaves(tree), strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=2e-5)


@pytest.mark.slow
@needs("keras", "tensorflow")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", KERAS_LAYOUTS)
def test_a_layout_of_keras_continues(name: str, tmp_path: Path) -> None:
    layout, model, path = KERAS_LAYOUTS[name], compiled(), tmp_path / KERAS_LAYOUTS[name].file
    like = onward.from_keras(model, probe=False) if layout.like else None
    layout.train(model, path)
    if layout.refusal:
        with pytest.raises(UnsupportedError) as refusal:
            onward.from_checkpoint(path, like)
        assert layout.refusal in f"{refusal.value.message} {refusal.value.hint}"
        return
    with onward.engines.start(training := onward.from_checkpoint(path, like)) as engine:
        feeds = ({training.graph.inputs[0].name: inputs, "labels": labels} for inputs, labels in DATA[STEPS:])
        ours = [float(engine.step(feed)["loss"]) for feed in feeds]
        trained = engine.updated()
    np.testing.assert_allclose(ours, steps(model, DATA[STEPS:]), rtol=1e-5)
    if layout.load is not None:
        target = tmp_path / ("after.keras" if layout.form == "keras" else "after")
        onward.to_checkpoint(trained, target, format=layout.form)
        expected = steps(model, DATA)
        np.testing.assert_allclose(steps(layout.load(compiled(1), target), DATA), expected, rtol=1e-4)


def test_gguf(tmp_path: Path) -> None:
    """Tensors are as in the specification of GGUF: dimensions reversed, blocks of 32 with one scale in Q8_0."""

    def text(words: str) -> bytes:
        return struct.pack("<Q", len(words)) + words.encode()

    rng = np.random.default_rng(0)
    matrix, blocks = rng.normal(size=(3, 8)).astype("f4"), rng.integers(-127, 128, (4, 32)).astype("i1")
    scales = np.asarray([0.5, 0.25, 2, 1], "f2")
    quantized = b"".join(scale.tobytes() + block.tobytes() for scale, block in zip(scales, blocks, strict=True))
    values = text("general.architecture") + struct.pack("<I", 8) + text("llama")
    values += text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("b")
    tensors = [("w", (8, 3), 0, matrix.tobytes()), ("q", (64, 2), 8, quantized), ("k", (256,), 12, bytes(144))]
    head, body = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 2) + values, b""
    for name, shape, kind, data in tensors:
        head += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, len(body))
        body += data + bytes(-len(data) % 32)
    (tmp_path / "x.gguf").write_bytes(head + bytes(-len(head) % 32) + body)
    checkpoint = onward.open_checkpoint(tmp_path / "x.gguf")
    assert checkpoint.arguments["tokenizer.ggml.tokens"] == ["a", "b"]
    assert checkpoint.layout == {"tensors of F32": 1, "tensors of Q8_0": 1, "tensors of Q4_K": 1}
    np.testing.assert_array_equal(checkpoint.tensors["w"].array(), matrix)
    expected = (scales[:, None].astype("f4") * blocks).reshape(2, 64)
    np.testing.assert_array_equal(checkpoint.tensors["q"].array(), expected)
    with pytest.raises(UnsupportedError, match="`k` is Q4_K, which is not read"):
        checkpoint.tensors["k"].array()
    (tmp_path / "cut.gguf").write_bytes(head + body[:100])
    with pytest.raises(onward.Error, match=r"is cut off|not a whole GGUF"):
        onward.open_checkpoint(tmp_path / "cut.gguf")


@pytest.mark.slow
def test_weights_alone_are_deployable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """transformers loads the folder in the type of its configuration, rounded as PyTorch rounds."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr("onward.checkpoint.formats.safetensors._LARGEST", 100)
    trainer = Path(__file__).parents[1] / "recorded" / "trainer"
    with pytest.warns(UserWarning, match="`hf-model` does not hold: optimizer"):
        onward.to_checkpoint(trainer, tmp_path / "deploy", format="hf-model", dtype="bfloat16")
    assert len(list((tmp_path / "deploy").glob("model-0000*-of-*.safetensors"))) > 1
    cls = transformers.BertForSequenceClassification
    deployed, original = cls.from_pretrained(tmp_path / "deploy", dtype="auto"), cls.from_pretrained(trainer)
    assert deployed.dtype == torch.bfloat16
    for name, tensor in original.to(torch.bfloat16).state_dict().items():
        assert torch.equal(deployed.state_dict()[name], tensor), name
    with pytest.raises(onward.Error, match="holds the optimizer, too"):
        onward.to_checkpoint(trainer, tmp_path / "sharded", format="dcp", dtype="bfloat16")
