"""Checkpoints as training scripts write them: tied weights, groups by weight decay, frozen parameters, wrappers.

Each layout is written by PyTorch, continued there for ten steps and on ONNX Runtime, with equal losses. What ONNX
Runtime trained is written back and equal to what PyTorch saves then.
"""

from __future__ import annotations

import argparse
import copy
import json
import pickle
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from torch_export import by_dynamo, quiet

import onward
from onward.errors import UnsupportedError

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

TOKENS, WIDTH, LENGTH = 50, 16, 8
STEPS = 10


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH, bias=False)
        self.attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.ln_2 = nn.LayerNorm(WIDTH, bias=False)
        self.fc = nn.Linear(WIDTH, 4 * WIDTH)
        self.out = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        batch, length, _ = x.shape
        parts = self.attn(self.ln_1(x)).split(WIDTH, 2)
        q, k, v = (part.view(batch, length, 2, WIDTH // 2).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.proj(attended.reshape(batch, length, WIDTH))
        return x + self.out(F.gelu(self.fc(self.ln_2(x))))


class Language(nn.Module):
    """A GPT whose embedding and head share one weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wte = nn.Embedding(TOKENS, WIDTH)
        self.wpe = nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList([Block() for _ in range(2)])
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, tokens: Any) -> Any:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class Vision(nn.Module):
    """A network with BatchNormalization."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.conv = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(4)
        self.head = nn.Conv2d(4, 4, 1)
        self.fc = nn.Linear(4, 5)

    def forward(self, image: Any) -> Any:
        x = torch.relu(self.bn1(self.stem(image)))
        x = torch.relu(self.bn2(self.conv(x)))
        return self.fc(torch.relu(self.head(x)).mean((2, 3)))


def batches(module: Any, seed: int) -> Iterator[tuple[Any, Any]]:
    """Yield inputs and labels."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        if isinstance(module, Language):
            yield tuple(torch.randint(TOKENS, (2, 4, LENGTH), generator=generator))
        else:
            yield torch.rand((4, 3, 6, 6), generator=generator), torch.randint(5, (4,), generator=generator)


def train(module: Any, optimizer: Any, seed: int, scheduler: Any = None) -> list[float]:
    losses = []
    for inputs, labels in batches(module, seed):
        optimizer.zero_grad()
        loss = F.cross_entropy(module(inputs).flatten(0, -2), labels.flatten())
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(float(loss.detach()))
    return losses


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


# ---- layouts ---------------------------------------------------------------------------------------------------------


class Layout(NamedTuple):
    """How a script groups parameters, and what it saves."""

    tree: Callable[[Any, Any, Any], Any]
    """Of the module, the optimizer and the scheduler."""
    optimizer: Callable[[Any], Any] = lambda module: torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-3)
    module: type = Language
    options: Mapping[str, Any] = {}
    scheduler: Callable[[Any], Any] = lambda optimizer: None
    refusal: str = ""
    """What the error says, if the layout is refused."""
    is_folder: bool = False
    is_same_after: bool = True
    """True if ONNX Runtime writes what PyTorch saves after further steps."""


def _decayed_first(module: Any) -> list[dict[str, Any]]:
    """Return the groups of nanoGPT: matrices decay, vectors do not."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    matrices, vectors = ([p for p in parameters if (p.dim() >= 2) == is_matrix] for is_matrix in (True, False))
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


def _nanogpt(module: Any) -> Any:
    return torch.optim.AdamW(_decayed_first(module), lr=1e-2, betas=(0.9, 0.95), eps=1e-3)


def _timm(module: Any) -> Any:
    """Return an optimizer whose parameters without decay come first."""
    return torch.optim.AdamW(_decayed_first(module)[::-1], lr=1e-2, eps=1e-3)


def _head_and_last_block(module: Any) -> Any:
    """Freeze all but the last block and the final normalization."""
    module.requires_grad_(False)
    trained = [*module.h[1].parameters(), *module.ln_f.parameters()]
    for parameter in trained:
        parameter.requires_grad_(True)
    return torch.optim.AdamW(trained, lr=1e-2, eps=1e-3)


def _embeddings(module: Any) -> Any:
    module.requires_grad_(False)
    return torch.optim.AdamW([module.wpe.weight.requires_grad_(True), module.lm_head.weight.requires_grad_(True)], 1e-2)


def _momentum(module: Any, **options: Any) -> Any:
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, **options)


def _ultralytics(module: Any) -> Any:
    """Return an optimizer of biases, then weights with decay, then weights of normalizations."""
    groups: tuple[list[Any], ...] = [], [], []
    for layer in module.modules():
        for name, parameter in layer.named_parameters(recurse=False):
            groups[0 if name == "bias" else 2 if isinstance(layer, nn.BatchNorm2d) else 1].append(parameter)
    optimizer = torch.optim.SGD(groups[0], lr=0.02, momentum=0.9, nesterov=True)
    optimizer.add_param_group({"params": groups[1], "weight_decay": 5e-4})
    optimizer.add_param_group({"params": groups[2], "weight_decay": 0.0})
    return optimizer


def _detectron(module: Any) -> Any:
    """Return an optimizer with a group for each parameter."""
    groups = [{"params": [p], "weight_decay": 1e-4 if p.dim() > 1 else 0.0} for p in module.parameters()]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def _milestones(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [STEPS + 3, STEPS + 6])


def _plain(module: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    return {"model": module.state_dict(), "optimizer": optimizer.state_dict()}


def _copied(module: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    """Return a state dict whose tied weights are stored twice, as `.clone()` on each makes them."""
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    return {"model": state, "optimizer": optimizer.state_dict()}


def _of_nanogpt(module: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    state = {f"_orig_mod.{name}": tensor for name, tensor in module.state_dict().items()}
    arguments = {"n_layer": 2, "n_head": 2, "n_embd": WIDTH, "block_size": LENGTH, "bias": True, "vocab_size": TOKENS}
    rest = {"model_args": arguments, "iter_num": 7, "best_val_loss": torch.tensor(3.1), "config": {"lr": 1e-2}}
    return {"model": state, "optimizer": optimizer.state_dict(), **rest}


def _of_litgpt(module: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    return {**_plain(module, optimizer, None), "iter_num": 40, "step_count": STEPS, "hparams": {"devices": 1}}


def _of_fairseq(module: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    history = {"criterion_name": "CrossEntropy", "optimizer_name": "FairseqAdam", "lr_scheduler_state": {"best": None}}
    return {
        "args": None,
        "cfg": {"common": {"seed": 1}, "model": argparse.Namespace(arch="transformer_lm")},
        "model": module.state_dict(),
        "criterion": {},
        "optimizer_history": [{**history, "num_updates": STEPS}],
        "task_state": {},
        "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": STEPS}, "val_loss": 3.0},
        "last_optimizer_state": optimizer.state_dict(),
    }


def _averaged(module: Any) -> Any:
    average = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in average.parameters():
            parameter.mul_(0.9)
    return average


def _of_timm(module: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    return {
        "epoch": 3,
        "arch": "vision",
        "state_dict": module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "version": 2,
        "args": argparse.Namespace(model="vision", opt="adamw"),
        "amp_scaler": torch.amp.GradScaler("cpu").state_dict(),
        "state_dict_ema": _averaged(module).state_dict(),
        "metric": 71.0,
    }


def _of_mmengine(module: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    polynomial = {"begin": 0, "end": 100, "by_epoch": False, "param_name": "lr", "base_values": [0.05], "power": 0.9}
    counters = {"last_step": STEPS, "_global_step": STEPS + 1, "verbose": False, "_last_value": [0.05], "eta_min": 0.0}
    return {
        "meta": {"cfg": "model = dict()", "seed": 0, "epoch": 1, "iter": STEPS, "mmengine_version": "0.10.7"},
        "state_dict": module.state_dict(),
        "message_hub": {"log_scalars": {}, "runtime_info": {}, "resumed_keys": {}},
        "optimizer": optimizer.state_dict(),
        "param_schedulers": [{**polynomial, **counters}],
    }


def _save(tree: Any, path: Path, is_folder: bool) -> None:
    if not is_folder:
        torch.save(tree, path)
        return
    path.mkdir()
    pytest.importorskip("safetensors.torch").save_file(tree["model"], path / "model.safetensors")
    for name in ("optimizer", "scheduler"):
        torch.save(tree[name], path / f"{name}.pt")


def _load(path: Path, is_folder: bool) -> Any:
    if not is_folder:
        return torch.load(path, weights_only=False)
    tree = {name: torch.load(path / f"{name}.pt") for name in ("optimizer", "scheduler")}
    return {"model": pytest.importorskip("safetensors.torch").load_file(path / "model.safetensors"), **tree}


def _other(cls: type = Vision) -> tuple[Any, Any]:
    """Return another module that was trained, and its optimizer."""
    torch.manual_seed(0)
    module = cls() if cls is Vision else nn.Linear(3, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.3, momentum=0.5)
    if cls is Vision:
        train(module, optimizer, 5)
    return module, optimizer


def _of_gan(module: Any, optimizer: Any, scheduler: Any, cls: type = nn.Linear) -> dict[str, Any]:
    other, its_optimizer = _other(cls)
    return {
        "discriminator": other.state_dict(),
        "generator": module.state_dict(),
        "optimizer_g": optimizer.state_dict(),
        "optimizer_d": its_optimizer.state_dict(),
    }


def _of_twins(module: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    return _of_gan(module, optimizer, scheduler, Vision)


def _in_one_state(module: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    """Return two modules in one state dict, as those of a LightningModule are."""
    tree = _of_twins(module, optimizer, scheduler)
    state = {f"{key}.{name}": x for key in ("discriminator", "generator") for name, x in tree[key].items()}
    return {"state_dict": state, "optimizer_states": [tree["optimizer_d"], tree["optimizer_g"]]}


_VISION: dict[str, Any] = {"module": Vision, "optimizer": _momentum}
_DETECTRON: dict[str, Any] = {**_VISION, "scheduler": _milestones}

LAYOUTS: dict[str, Layout] = {
    "one group": Layout(_plain),
    "nanoGPT": Layout(_of_nanogpt, _nanogpt),
    "groups without decay first": Layout(_plain, _timm),
    "copies of tied weights": Layout(_copied, _nanogpt),
    "frozen, told by shapes": Layout(_plain, _embeddings),
    "frozen, named": Layout(_plain, _head_and_last_block, options={"trainable": ["h.1.*", "ln_f.*"]}),
    "frozen, ambiguous": Layout(_plain, _head_and_last_block, refusal="`--freeze PATTERN`"),
    "LitGPT": Layout(_of_litgpt, _nanogpt),
    "fairseq": Layout(_of_fairseq),
    "timm train.py": Layout(_of_timm, _timm, Vision),
    "average before the model": Layout(
        lambda m, o, s: {"model_ema": _averaged(m).state_dict(), **_plain(m, o, s)}, **_VISION
    ),
    "pickled module": Layout(lambda m, o, s: {"model": m, "optimizer": o.state_dict(), "epoch": 3}, **_VISION),
    "tuple": Layout(lambda m, o, s: (m.state_dict(), o.state_dict()), **_VISION),
    "Ultralytics": Layout(
        lambda m, o, s: {
            "epoch": 3,
            "model": None,
            "ema": copy.deepcopy(m),
            "updates": 10,
            "optimizer": o.state_dict(),
        },
        _ultralytics,
        Vision,
    ),
    "Detectron2": Layout(
        lambda m, o, s: {**_plain(m, o, s), "scheduler": s.state_dict(), "iteration": STEPS - 1}, **_DETECTRON
    ),
    "Detectron2, a group for each parameter": Layout(
        lambda m, o, s: {**_plain(m, o, s), "scheduler": s.state_dict(), "iteration": STEPS - 1},
        **{**_DETECTRON, "optimizer": _detectron},
    ),
    "several files": Layout(
        lambda m, o, s: {**_plain(m, o, s), "scheduler": s.state_dict()},
        **_DETECTRON,
        options={"updates": STEPS},
        is_folder=True,
    ),
    "MMEngine": Layout(_of_mmengine, **_VISION, refusal="does not store the shape of its schedule"),
    "MMEngine, with its schedule": Layout(
        _of_mmengine, **_VISION, options={"schedule": "constant", "updates": STEPS}, is_same_after=False
    ),
    "GAN": Layout(_of_gan, **_VISION),
    "GAN of equal networks": Layout(_of_twins, **_VISION, options={"module": "generator"}),
    "GAN of equal networks, not named": Layout(_of_twins, **_VISION, refusal="`--module discriminator`"),
    "GAN in one state dict": Layout(_in_one_state, **_VISION, options={"module": "generator"}),
    "GAN in one state dict, not named": Layout(_in_one_state, **_VISION, refusal="`--module discriminator`"),
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
    outcomes = {name: "refused" if layout.refusal else "continues" for name, layout in LAYOUTS.items()}
    assert {row[0]: row[2] for row in rows[1:]} == outcomes | dict.fromkeys(EXPORTS, "refused")


def _saved(path: Path, layout: Layout) -> tuple[list[float], Any]:
    """Train, save as a layout, train on, and return the losses since then and what would be saved now."""
    module = layout.module()
    optimizer = layout.optimizer(module)
    scheduler = layout.scheduler(optimizer)
    train(module, optimizer, 1, scheduler)
    _save(layout.tree(module, optimizer, scheduler), path, layout.is_folder)
    losses = train(module, optimizer, 2, scheduler)
    return losses, layout.tree(module, optimizer, scheduler)


def _tensors(tree: Any, path: str = "") -> dict[str, Any]:
    """Return the tensors of a tree by path, without averages, which its script would update."""
    if isinstance(tree, nn.Module):
        tree = tree.state_dict()
    if isinstance(tree, Mapping | list | tuple):
        items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
        return {
            k: v for key, child in items if "_ema" not in str(key) for k, v in _tensors(child, f"{path}/{key}").items()
        }
    return {path: tree} if isinstance(tree, torch.Tensor) else {}


@pytest.mark.slow("copies of tied weights", "frozen, named", "groups without decay first", "one group", "LitGPT")
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
        form = "torch-files" if layout.is_folder else "torch"
        onward.to_checkpoint(trained, tmp_path / "after.pt", format=form)
        expected = _tensors(tree)
        actual = _tensors(_load(tmp_path / "after.pt", layout.is_folder))
        assert actual.keys() == expected.keys()
        for key, tensor in expected.items():
            np.testing.assert_allclose(actual[key].numpy(), tensor.numpy(), rtol=1e-3, atol=2e-5, err_msg=key)


@pytest.mark.slow("positions folded")
@pytest.mark.parametrize("name", EXPORTS)
def test_an_export_that_lost_parameters(name: str, tmp_path: Path) -> None:
    cls, lost, causes = EXPORTS[name]
    layout = Layout(_plain, module=cls)
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
    train(module, optimizer := _momentum(module), 1)
    _in_trainer(tmp_path, optimizer, _milestones(optimizer))
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


@pytest.mark.slow
def test_adafactor_of_transformers_is_refused(models: dict[type, onward.Model], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    module = Vision()
    options = {"scale_parameter": False, "relative_step": False, "lr": 1e-2}
    optimizer = transformers.Adafactor(module.parameters(), **options)
    train(module, optimizer, 1)
    torch.save(_plain(module, optimizer, None), tmp_path / "ckpt.pt")
    with pytest.raises(UnsupportedError, match="does not name its optimizer"):
        onward.from_checkpoint(tmp_path / "ckpt.pt", models[Vision], loss="cross_entropy")
    with pytest.raises(UnsupportedError):
        onward.from_checkpoint(
            tmp_path / "ckpt.pt", models[Vision], loss="cross_entropy", optimizer="adafactor:lr=1e-2"
        )


@pytest.mark.slow
def test_several_models_of_accelerate(models: dict[type, onward.Model], tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    modules = [Vision(), Vision()]
    nn.init.zeros_(modules[0].fc.weight)
    optimizers = [_momentum(module) for module in modules]
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
            return [_momentum(self.generator), torch.optim.Adam(self.discriminator.parameters())]

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
@pytest.mark.parametrize("form", ["pickle", "pickle of numpy", "Equinox"])
def test_layouts_of_jax(form: str, tmp_path: Path) -> None:
    jax, optax = pytest.importorskip("jax"), pytest.importorskip("optax")
    rng = np.random.default_rng(0)
    data = [
        {"image": rng.normal(size=(16, 8)).astype("float32"), "labels": rng.integers(0, 3, 16, "int32")}
        for _ in range(2 * STEPS)
    ]
    if form == "Equinox":
        equinox = pytest.importorskip("equinox")
        keys = jax.random.split(jax.random.PRNGKey(0))
        layers = [equinox.nn.Linear(8, 6, key=keys[0]), equinox.nn.Dropout(0.1, inference=True)]
        net = equinox.nn.Sequential([*layers, equinox.nn.Linear(6, 3, key=keys[1])])
        params, static = equinox.partition(net, equinox.is_array)

        def logits(params: Any, image: Any) -> Any:
            return jax.vmap(equinox.combine(params, static))(image)
    else:
        haiku = pytest.importorskip("haiku")
        function = haiku.without_apply_rng(haiku.transform(lambda image: haiku.nets.MLP([6, 3])(image)))
        params, logits = function.init(jax.random.PRNGKey(0), data[0]["image"]), function.apply

    def loss(params: Any, batch: Any) -> Any:
        values = logits(params, batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(values, batch["labels"]).mean()

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    like = onward.from_jax(loss, params, data[0], optimizer=optimizer)
    state, losses = optimizer.init(params), []
    for step, batch in enumerate(data):
        if step == STEPS:
            path = tmp_path / ("net.eqx" if form == "Equinox" else "net.pkl")
            tree = {"params": params, "opt_state": state, "step": step}
            if form == "Equinox":
                equinox.tree_serialise_leaves(path, (equinox.combine(params, static), state))
            else:
                path.write_bytes(pickle.dumps(tree if form == "pickle" else jax.device_get(tree)))
        value, slopes = jax.value_and_grad(loss)(params, batch)
        updates, state = optimizer.update(slopes, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(value))
    with onward.engines.start(onward.from_checkpoint(path, like)) as engine:
        np.testing.assert_allclose([float(engine.step(b)["loss"]) for b in data[STEPS:]], losses[STEPS:], rtol=1e-5)


@pytest.mark.slow
def test_whole_h5_of_keras(tmp_path: Path) -> None:
    keras = pytest.importorskip("keras")
    layers, rng = keras.layers, np.random.default_rng(0)
    model = keras.Sequential(
        [keras.Input((8,)), layers.Dense(6, "relu", name="a"), layers.BatchNormalization(name="norm"), layers.Dense(3)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.AdamW(1e-2, epsilon=1e-3), loss=loss)
    data = [(rng.random((8, 8), "float32"), rng.integers(0, 3, 8)) for _ in range(2 * STEPS)]

    def steps(model: Any, data: Any) -> list[float]:
        losses = []
        for inputs, labels in data:
            model.reset_metrics()
            losses.append(float(model.train_on_batch(inputs, labels)))
        return losses

    steps(model, data[:STEPS])
    model.save(tmp_path / "model.h5")
    training = onward.from_checkpoint(tmp_path / "model.h5")
    with onward.engines.start(training) as engine:
        name = training.graph.inputs[0].name
        ours = [float(engine.step({name: inputs, "labels": labels})["loss"]) for inputs, labels in data[STEPS:]]
        trained = engine.updated()
    np.testing.assert_allclose(ours, steps(model, data[STEPS:]), rtol=1e-5)
    onward.to_checkpoint(trained, tmp_path / "after.keras", format="keras")
    after = keras.saving.load_model(tmp_path / "after.keras")
    np.testing.assert_allclose(steps(after, data), steps(model, data), rtol=1e-4)


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
