"""Checkpoints as training scripts of PyTorch write them: what each saves, and how it groups parameters.

A row of `LAYOUTS` follows the files of a public project, or uses its classes where the tests have them.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import re
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import nn
from torch.nn import functional as F

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


def train(
    module: Any, optimizer: Any, seed: int, scheduler: Any = None, every: int = 1, after: Any = None
) -> list[float]:
    """Train for ten steps; return the losses. `after` is called after each update."""
    losses = []
    for step, (inputs, labels) in enumerate(batches(module, seed), 1):
        optimizer.zero_grad()
        loss = F.cross_entropy(module(inputs).flatten(0, -2), labels.flatten())
        loss.backward()
        optimizer.step()
        if scheduler is not None and step % every == 0:
            scheduler.step(*(1.0,) * isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau))
        if after is not None:
            after(module)
        losses.append(float(loss.detach()))
    return losses


# ---- files -----------------------------------------------------------------------------------------------------------


class Files(NamedTuple):
    """How a tree is saved and loaded, and the format that Onward writes back."""

    save: Callable[[Any, Path], None]
    load: Callable[[Path], Any]
    form: str


def _save_folder(tree: Mapping[str, Any], folder: Path) -> None:
    for name, part in tree.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".safetensors":
            safetensors.torch.save_file({k: v.contiguous() for k, v in part.items()}, path, {"format": "pt"})
        elif path.suffix == ".json":
            path.write_text(json.dumps(part))
        else:
            torch.save(part, path)


def _load_folder(folder: Path) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(path.relative_to(folder))
        if path.suffix == ".safetensors" and "-of-" in name:  # shards are one model
            name = re.sub("-.*-of-.*", ".safetensors", name)
            tree[name] = {**tree.get(name, {}), **safetensors.torch.load_file(path)}
            continue
        if path.suffix == ".safetensors":
            tree[name] = safetensors.torch.load_file(path)
        elif path.suffix == ".json":
            tree[name] = json.loads(path.read_text())
        else:
            tree[name] = torch.load(path, weights_only=False)
    return tree


def _save_sharded(tree: Any, folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(tree, checkpoint_id=folder, no_dist=True)


def _load_sharded(folder: Path) -> Any:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(folder, folder / "whole.pt")
    return torch.load(folder / "whole.pt", weights_only=False)


def _load(path: Path) -> Any:
    return torch.load(path, weights_only=False)


FILE = Files(torch.save, _load, "torch")
FOLDER = Files(_save_folder, _load_folder, "torch-files")
TRAINER = Files(_save_folder, _load_folder, "hf")
ACCELERATE = Files(_save_folder, _load_folder, "accelerate")
LIGHTNING = Files(torch.save, _load, "lightning")
SHARDED = Files(_save_sharded, _load_sharded, "dcp")


class Layout(NamedTuple):
    """How a script groups parameters, and what it saves."""

    tree: Callable[[Any, Any, Any], Any]
    """Of the module, the optimizer and the scheduler."""
    optimizer: Callable[[Any], Any] = lambda module: torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-3)
    module: type = Language
    options: Mapping[str, Any] = {}
    scheduler: Callable[[Any], Any] = lambda optimizer: None
    every: int = 1
    """Updates for each step of the scheduler."""
    refusal: str = ""
    """What the error says, if the layout is refused."""
    files: Files = FILE
    is_same_after: bool = True
    """True if ONNX Runtime writes what PyTorch saves after further steps."""


# ---- optimizers ------------------------------------------------------------------------------------------------------


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


def momentum(module: Any, **options: Any) -> Any:
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, **options)


def _adam(module: Any) -> Any:
    return torch.optim.Adam(module.parameters(), lr=1e-2, eps=1e-3)


def _adafactor(module: Any, **options: Any) -> Any:
    """Return Adafactor of transformers, as its Trainer makes it."""
    from transformers import Adafactor

    return Adafactor(module.parameters(), **{"lr": 1e-3, "scale_parameter": False, "relative_step": False, **options})


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


def _layer_decay(module: Any) -> Any:
    """Return an optimizer with two groups for each layer, whose rate its scale multiplies, as in MAE."""
    groups: dict[str, dict[str, Any]] = {}
    layers = ["stem", "bn1", "conv", "bn2", "head", "fc"]
    for name, parameter in module.named_parameters():
        layer = layers.index(name.partition(".")[0])
        has_decay = parameter.dim() > 1
        group = groups.setdefault(
            f"layer_{layer}_{'decay' if has_decay else 'no_decay'}",
            {"params": [], "weight_decay": 0.05 * has_decay, "lr_scale": 0.75 ** (5 - layer)},
        )
        group["params"].append(parameter)
    optimizer = torch.optim.AdamW([*groups.values()], lr=1e-2, eps=1e-3)
    for row in optimizer.param_groups:
        row["lr"] *= row["lr_scale"]
    return optimizer


def _backbone_and_head(module: Any) -> Any:
    """Return the groups of DETR: all but the backbone, then the backbone with a smaller rate."""
    rows = [*module.named_parameters()]
    inner, outer = ([p for n, p in rows if n.startswith(("stem", "bn1")) == is_inner] for is_inner in (True, False))
    return torch.optim.AdamW([{"params": outer}, {"params": inner, "lr": 1e-3}], lr=1e-2, eps=1e-3)


class Several:
    """Optimizers of parts of a module, which step together."""

    def __init__(self, *optimizers: Any) -> None:
        self.optimizers = optimizers

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def state_dict(self) -> list[Any]:
        return [optimizer.state_dict() for optimizer in self.optimizers]


def _adamw_and_muon(module: Any) -> Any:
    """Return the optimizers of nanochat: AdamW for embeddings and vectors, Muon for matrices of blocks."""
    matrices = [p for n, p in module.named_parameters() if n.startswith("h.") and p.dim() == 2]
    others = [p for n, p in module.named_parameters() if not (n.startswith("h.") and p.dim() == 2)]
    return Several(torch.optim.AdamW(others, 1e-2, eps=1e-3), torch.optim.Muon(matrices, 0.02, momentum=0.95))


def _encoder_and_head(module: Any) -> Any:
    """Return optimizers of the encoder and of the head."""
    inner = [p for n, p in module.named_parameters() if not n.startswith("fc")]
    return Several(torch.optim.SGD(inner, 0.05, momentum=0.9), torch.optim.Adam(module.fc.parameters(), 1e-3, eps=1e-3))


def _redundancy(module: Any) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    return ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, lr=1e-2, eps=1e-3)


def milestones(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [STEPS + 3, STEPS + 6])


def _warmup_and_cosine(optimizer: Any) -> Any:
    schedulers = torch.optim.lr_scheduler
    warmup = schedulers.LinearLR(optimizer, 0.1, 1.0, 4)
    return schedulers.SequentialLR(optimizer, [warmup, schedulers.CosineAnnealingLR(optimizer, 40)], [4])


def _timm_cosine(optimizer: Any) -> Any:
    """Return a scheduler of timm by updates, with the methods of PyTorch's."""
    from timm.scheduler import CosineLRScheduler

    scheduler = CosineLRScheduler(optimizer, 30, lr_min=0.0, t_in_epochs=False)
    state, updates = scheduler.state_dict, itertools.count(1)
    scheduler.step_update(0)
    scheduler.step = lambda: scheduler.step_update(next(updates))
    scheduler.state_dict = lambda: {name: x for name, x in state().items() if name not in ("step", "state_dict")}
    return scheduler


def _of_transformers(optimizer: Any) -> Any:
    """Return a LambdaLR, whose function is not saved."""

    def factor(step: int) -> float:
        return step / 4 if step < 4 else 0.5 * (1 + math.cos(math.pi * (step - 4) / 36))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


# ---- what scripts save -----------------------------------------------------------------------------------------------


def plain(module: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    """Return what most scripts save."""
    return {"model": module.state_dict(), "optimizer": optimizer.state_dict()}


def _weights(module: Any, optimizer: Any, scheduler: Any) -> Any:
    return module.state_dict()


def _renamed(state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {f"{prefix}{name}": tensor for name, tensor in state.items()}


def _copied(module: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    """Return a state dict whose tied weights are stored twice, as `.clone()` on each makes them."""
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    return {"model": state, "optimizer": optimizer.state_dict()}


def _by_name(module: Any, optimizer: Any) -> dict[str, Any]:
    """Return the state of an optimizer by the names of parameters, as FSDP and DCP have it."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    order = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    state = optimizer.state_dict()
    groups = [{**group, "params": [order[at] for at in group["params"]]} for group in state["param_groups"]]
    return {"state": {order[at]: slots for at, slots in state["state"].items()}, "param_groups": groups}


def _of_nanogpt(module: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    arguments = {"n_layer": 2, "n_head": 2, "n_embd": WIDTH, "block_size": LENGTH, "bias": True, "vocab_size": TOKENS}
    rest = {"model_args": arguments, "iter_num": 7, "best_val_loss": torch.tensor(3.1), "config": {"lr": 1e-2}}
    return {"model": _renamed(module.state_dict(), "_orig_mod."), "optimizer": optimizer.state_dict(), **rest}


def _of_litgpt(module: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    return {**plain(module, optimizer, None), "iter_num": 40, "step_count": STEPS, "hparams": {"devices": 1}}


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


def _flat(module: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    """Return the state of one flat parameter, as fairseq's and apex's optimizers of float32 copies keep it."""
    state = optimizer.state_dict()
    slots = {
        name: torch.cat([row[name].flatten() for row in state["state"].values()]) for name in ("exp_avg", "exp_avg_sq")
    }
    flat = {"state": {0: {"step": STEPS, **slots}}, "param_groups": [{**state["param_groups"][0], "params": [0]}]}
    return {**_of_fairseq(module, optimizer, scheduler), "last_optimizer_state": flat}


def _averaged(module: Any) -> Any:
    average = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in average.parameters():
            parameter.mul_(0.9)
    return average


def _swa(module: Any) -> dict[str, Any]:
    """Return the state of an `AveragedModel`, with averages of its own."""
    average = torch.optim.swa_utils.AveragedModel(_averaged(module))
    average.n_averaged += 3
    return average.state_dict()


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


def _of_mmcv(module: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    meta = {"env_info": "", "config": "model = dict()", "seed": None, "epoch": 1, "iter": STEPS, "hook_msgs": {}}
    return {"meta": meta, "state_dict": module.state_dict(), "optimizer": optimizer.state_dict()}


def _of_ultralytics(module: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    rest = {"updates": 10, "train_args": {"lr0": 0.02}, "train_metrics": {}, "version": "8.3.0", "license": "AGPL-3.0"}
    return {"epoch": 3, "best_fitness": 0.5, "model": None, "ema": copy.deepcopy(module), **rest, "optimizer": None} | {
        "optimizer": optimizer.state_dict()
    }


def _round_to_half(module: Any) -> None:
    """Round what a script stores in half precision, from which it resumes."""
    module.load_state_dict({name: x.half().to(x.dtype) for name, x in module.state_dict().items()})


def _in_half(module: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    _round_to_half(module)
    return {**_of_ultralytics(module, optimizer, scheduler), "ema": copy.deepcopy(module).half()}


def _of_yolov5(module: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    _round_to_half(module)
    return {
        "epoch": 3,
        "best_fitness": 0.5,
        "model": copy.deepcopy(module).half(),
        "ema": _averaged(module).half(),
        "updates": STEPS,
        "optimizer": optimizer.state_dict(),
        "opt": {"lr0": 0.02},
        "git": {"remote": None},
        "date": "2024-01-01",
    }


def _of_torchvision(module: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    return {
        "model": module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "lr_scheduler": scheduler.state_dict(),
        "epoch": 4,
        "args": argparse.Namespace(model="vision", lr=0.05),
        "model_ema": _swa(module),
        "scaler": torch.amp.GradScaler("cpu").state_dict(),
    }


def _of_imagenet(module: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    return {
        "epoch": 2,
        "arch": "vision",
        "state_dict": _renamed(module.state_dict(), "module."),
        "best_acc1": torch.tensor(60.0),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
    }


def _of_dino(module: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    return {
        "student": _renamed(module.state_dict(), "module."),
        "teacher": _averaged(module).state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": 1,
        "args": argparse.Namespace(arch="vision"),
        "dino_loss": {"center": torch.zeros(1, 5)},
    }


def _of_moco(module: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    """Return encoders of queries and of keys in one state, with a queue."""
    state = {
        **_renamed(module.state_dict(), "module.encoder_q."),
        **_renamed(_averaged(module).state_dict(), "module.encoder_k."),
        "module.queue": torch.zeros(5, 8),
        "module.queue_ptr": torch.zeros(1, dtype=torch.long),
    }
    return {"epoch": 1, "arch": "vision", "state_dict": state, "optimizer": optimizer.state_dict()}


def _of_mae(module: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    scaler = torch.amp.GradScaler("cpu").state_dict()
    return {**plain(module, optimizer, None), "epoch": 1, "scaler": scaler, "args": argparse.Namespace(lr=1e-2)}


def _of_deit(module: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    return {
        **_of_mae(module, optimizer, None),
        "lr_scheduler": scheduler.state_dict(),
        "model_ema": _averaged(module).state_dict(),
    }


def _of_open_clip(module: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    state = _renamed(module.state_dict(), "module.")
    return {"epoch": 1, "name": "run", "state_dict": state, "optimizer": optimizer.state_dict()}


def _of_composer(module: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    state = {
        "model": _renamed(module.state_dict(), "model."),
        "optimizers": {"AdamW": optimizer.state_dict()},
        "schedulers": {},
        "algorithms": [],
        "callbacks": [],
        "timestamp": {"Timestamp": {"epoch": 1, "batch": STEPS}},
        "rank_zero_seed": 1,
        "run_name": "run",
    }
    return {"state": state, "rng": [{"python": (3, (1,) * 625, None), "torch": torch.get_rng_state()}]}


def _of_ignite(module: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    trainer = OrderedDict(epoch_length=STEPS, max_epochs=5, iteration=STEPS)
    return {
        "trainer": trainer,
        **plain(module, optimizer, None),
        "lr_scheduler": scheduler.state_dict(),
        "checkpointer": {"saved": [(10, "checkpoint_10.pt")]},
    }


def _of_espnet(module: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    reporter = {"epoch": 1, "stats": {1: {"train": {"loss": 3.0, "total_count": STEPS}}}}
    optimizers = {"optimizers": [optimizer.state_dict()], "schedulers": [scheduler.state_dict()], "scaler": None}
    return {"model": module.state_dict(), "reporter": reporter, **optimizers}


def _of_icefall(module: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    return {
        "model": module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": None,
        "grad_scaler": torch.amp.GradScaler("cpu").state_dict(),
        "sampler": {"epoch": 1, "world_size": 1},
        "model_avg": _averaged(module).state_dict(),
        "batch_idx_train": STEPS,
        "best_train_loss": 3.0,
    }


def _of_coqui(module: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    return {
        "config": {"model": "tts", "lr": 1e-2},
        "model": module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scaler": None,
        "step": STEPS,
        "epoch": 0,
        "date": "January 1, 2024",
        "model_loss": 3.0,
    }


def _of_vits(module: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    """Return a file whose iteration is an epoch, as in VITS, so-vits and RVC."""
    return {
        "model": module.state_dict(),
        "iteration": 2,
        "optimizer": optimizer.state_dict(),
        "learning_rate": optimizer.param_groups[0]["lr"],
    }


def _of_fastai(module: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    """Return a file of `Learner.save`, whose optimizer has a form of its own."""
    slots = {"grad_avg": torch.zeros(1), "sqr_avg": torch.zeros(1), "step": STEPS}
    return {"model": module.state_dict(), "opt": {"state": [slots], "hypers": [{"lr": 1e-2, "mom": 0.9}]}}


def _of_apex(module: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    return {**plain(module, optimizer, None), "amp": {"loss_scaler0": {"loss_scale": 65536.0, "unskipped": STEPS}}}


def _of_swa(module: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    return {
        "epoch": 3,
        "state_dict": module.state_dict(),
        "swa_state_dict": _swa(module),
        "swa_n": 3,
        "optimizer": optimizer.state_dict(),
    }


def _of_lucidrains(module: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    """Return a file of denoising-diffusion-pytorch, with the module and its average in `ema`."""
    ema = {
        "initted": torch.tensor(True),
        "step": torch.tensor(STEPS),
        **_renamed(module.state_dict(), "online_model."),
        **_renamed(_averaged(module).state_dict(), "ema_model."),
    }
    return {
        "step": STEPS,
        "model": module.state_dict(),
        "opt": optimizer.state_dict(),
        "ema": ema,
        "scaler": None,
        "version": "2.2.5",
    }


def _of_compvis(module: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    """Return a file of Lightning with the averages of latent diffusion, in the same state without dots."""
    averages = {f"model_ema.{name.replace('.', '')}": tensor for name, tensor in _averaged(module).named_parameters()}
    counters = {"model_ema.decay": torch.tensor(0.9999), "model_ema.num_updates": torch.tensor(STEPS)}
    return {**_of_lightning(module, optimizer, scheduler)} | {
        "state_dict": {**_renamed(module.state_dict(), "model."), **averages, **counters}
    }


def _of_lightning(module: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    return {
        "epoch": 1,
        "global_step": STEPS,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": _renamed(module.state_dict(), "model."),
        "loops": {},
        "callbacks": {},
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [] if scheduler is None else [scheduler.state_dict()],
    }


def _pickled_optimizer(module: Any, optimizer: Any, scheduler: Any) -> list[Any]:
    """Return objects that are pickled whole, as the AWD-LSTM saves them."""
    return [module, nn.CrossEntropyLoss(), optimizer]


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


def _of_dqn(module: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    target = _averaged(module).state_dict()
    return {"policy_net": module.state_dict(), "target_net": target, "optimizer": optimizer.state_dict(), "episode": 9}


# ---- folders ---------------------------------------------------------------------------------------------------------


def _apart(module: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    return {
        "model.safetensors": module.state_dict(),
        "optimizer.pt": optimizer.state_dict(),
        "scheduler.pt": scheduler.state_dict(),
    }


def _of_basicsr(module: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    state = {"optimizers": [optimizer.state_dict()], "schedulers": [scheduler.state_dict()]}
    return {
        "net_g_10.pth": {"params": module.state_dict(), "params_ema": _averaged(module).state_dict()},
        "10.state": {"epoch": 1, "iter": STEPS, **state},
    }


def _of_guided_diffusion(module: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    return {
        "model000010.pt": module.state_dict(),
        "ema_0.9999_000010.pt": _averaged(module).state_dict(),
        "opt000010.pt": optimizer.state_dict(),
    }


def _of_torchtune(module: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    state = {"seed": 1, "epochs_run": 1, "total_epochs": 3, "max_steps_per_epoch": None}
    return {
        "ft-model-00001-of-00001.safetensors": {n: x for n, x in module.state_dict().items() if n != "wte.weight"},
        "recipe_state.pt": {**state, "optimizer": optimizer.state_dict()},
    }


def _of_torchtune_apart(module: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    tree = _of_torchtune(module, optimizer, scheduler)
    folders = {"ft-model-00001-of-00001.safetensors": "epoch_0", "recipe_state.pt": "recipe_state"}
    return {f"{folders[name]}/{name}": part for name, part in tree.items()}


def _of_skorch(module: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    history = [{"epoch": 1, "train_loss": 3.0, "batches": []}]
    states = {"params.pt": module.state_dict(), "optimizer.pt": optimizer.state_dict(), "criterion.pt": OrderedDict()}
    return {**states, "history.json": history}


def _of_baselines(module: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    """Return the members of a file of stable-baselines3."""
    state = {"policy.pth": module.state_dict(), "policy.optimizer.pth": optimizer.state_dict()}
    return {**state, "pytorch_variables.pth": None, "data.json": {"num_timesteps": 100, "_n_updates": STEPS}}


def _of_trainer(module: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    """Return the files of the Trainer of transformers."""
    state = {"global_step": STEPS, "epoch": 1.0, "max_steps": 100, "num_train_epochs": 1, "log_history": []}
    return {
        "model.safetensors": {n: x for n, x in module.state_dict().items() if n != "wte.weight"},
        "optimizer.pt": optimizer.state_dict(),
        "scheduler.pt": scheduler.state_dict(),
        "trainer_state.json": state,
        "rng_state.pth": {"python": None, "cpu": torch.get_rng_state()},
    }


def _in_bin(module: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    tree = _of_trainer(module, optimizer, scheduler)
    del tree["model.safetensors"]
    return {"pytorch_model.bin": module.state_dict(), **tree}


def _in_shards(module: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    tree = _of_trainer(module, optimizer, scheduler)
    state = tree.pop("model.safetensors")
    shards = {f"model-0000{at + 1}-of-00002.safetensors": [*state][at::2] for at in range(2)}
    index = {"metadata": {"total_size": 1}, "weight_map": {n: file for file, names in shards.items() for n in names}}
    files = {file: {name: state[name] for name in names} for file, names in shards.items()}
    return {**files, "model.safetensors.index.json": index, **tree}


def _of_sentences(module: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    """Return the files of a Trainer of sentence-transformers."""
    pooling = {"word_embedding_dimension": WIDTH, "pooling_mode_mean_tokens": True}
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    files = {"modules.json": modules, "1_Pooling/config.json": pooling}
    return {**_of_trainer(module, optimizer, scheduler), **files}


def _of_accelerate(module: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    return {
        "pytorch_model.bin": module.state_dict(),
        "optimizer.bin": optimizer.state_dict(),
        "scheduler.bin": scheduler.state_dict(),
        "random_states_0.pkl": {"random_state": None, "torch_manual_seed": torch.get_rng_state()},
        "custom_checkpoint_0.pkl": {"seen": 40},
    }


def _of_diffusers(module: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    """Return the files of a script of diffusers, whose hook saves models into folders."""
    tree = _of_accelerate(module, optimizer, scheduler)
    state, config = tree.pop("pytorch_model.bin"), {"_class_name": "UNet2DModel"}
    averages = {"unet_ema/diffusion_pytorch_model.safetensors": _averaged(module).state_dict()}
    return {"unet/diffusion_pytorch_model.safetensors": state, "unet/config.json": config, **averages, **tree}


def _of_titan(module: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    """Return the tree of torchtitan: a flat module, and a flat optimizer by name."""
    state = _by_name(module, optimizer)
    flat = {f"state.{name}.{slot}": x for name, slots in state["state"].items() for slot, x in slots.items()}
    settings = {
        f"param_groups.{name}.{key}": value
        for group in state["param_groups"]
        for name in group["params"]
        for key, value in group.items()
        if key != "params"
    }
    return {"model": module.state_dict(), "optimizer": {**flat, **settings}, "train_state": {"step": STEPS}}


# ---- the table -------------------------------------------------------------------------------------------------------

_VISION: dict[str, Any] = {"module": Vision, "optimizer": momentum}
_DETECTRON: dict[str, Any] = {**_VISION, "scheduler": milestones}
_HF: dict[str, Any] = {"optimizer": _nanogpt, "scheduler": _warmup_and_cosine, "files": TRAINER}


def _with_schedule(module: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    return {**plain(module, optimizer, scheduler), "scheduler": scheduler.state_dict()}


def _with_iteration(module: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    return {**_with_schedule(module, optimizer, scheduler), "iteration": STEPS - 1}


LAYOUTS: dict[str, Layout] = {
    # language models
    "one group": Layout(plain),
    "nanoGPT": Layout(_of_nanogpt, _nanogpt),
    "groups without decay first": Layout(plain, _timm),
    "copies of tied weights": Layout(_copied, _nanogpt),
    "frozen, told by shapes": Layout(plain, _embeddings),
    "frozen, named": Layout(plain, _head_and_last_block, options={"trainable": ["h.1.*", "ln_f.*"]}),
    "frozen, ambiguous": Layout(plain, _head_and_last_block, refusal="`--freeze PATTERN`"),
    "minGPT": Layout(_weights, refusal="`onward train --weights"),
    "RWKV": Layout(
        lambda m, o, s: {n: x.bfloat16() for n, x in m.state_dict().items()}, refusal="`onward train --weights"
    ),
    "LitGPT": Layout(_of_litgpt, _nanogpt),
    "modded-nanoGPT, nanochat": Layout(
        lambda m, o, s: {"step": STEPS, "code": "", "model": m.state_dict(), "optimizers": o.state_dict()},
        _adamw_and_muon,
        refusal="PyTorch's Muon orthogonalizes in bfloat16",
    ),
    "fairseq": Layout(_of_fairseq),
    "fairseq, flat": Layout(_flat, refusal="in one vector of 7,"),
    "names of FSDP": Layout(lambda m, o, s: {"model": m.state_dict(), "optimizer": _by_name(m, o)}, _nanogpt),
    "DCP": Layout(
        lambda m, o, s: {"model": m.state_dict(), "optim": _by_name(m, o), "step": STEPS}, _nanogpt, files=SHARDED
    ),
    "torchtitan": Layout(_of_titan, _nanogpt, files=SHARDED),
    "ZeroRedundancyOptimizer": Layout(lambda m, o, s: (o.consolidate_state_dict(), plain(m, o, s))[1], _redundancy),
    "Composer": Layout(_of_composer),
    "DistributedDataParallel": Layout(lambda m, o, s: {**plain(m, o, s), "model": _renamed(m.state_dict(), "module.")}),
    "list": Layout(lambda m, o, s: [m.state_dict(), o.state_dict(), 3]),
    "pickled optimizer": Layout(_pickled_optimizer, _adam),
    "apex": Layout(_of_apex),
    "ESPnet": Layout(_of_espnet, scheduler=_warmup_and_cosine),
    "icefall": Layout(_of_icefall),
    "Coqui TTS": Layout(_of_coqui),
    "VITS, RVC": Layout(_of_vits),
    "Trainer": Layout(_of_trainer, **_HF),
    "Trainer, pytorch_model.bin": Layout(_in_bin, **_HF),
    "Trainer, sharded": Layout(_in_shards, **_HF),
    "sentence-transformers": Layout(_of_sentences, **_HF),
    "Adafactor of a Trainer": Layout(_of_trainer, _adafactor, Vision, scheduler=_warmup_and_cosine, files=TRAINER),
    "Adafactor, scaled": Layout(
        plain, lambda module: _adafactor(module, lr=1e-2, scale_parameter=True, weight_decay=0.1), Vision
    ),
    "Adafactor with relative steps": Layout(
        plain, lambda module: _adafactor(module, lr=None, relative_step=True), refusal="relative_step=False"
    ),
    "Adafactor with beta1": Layout(plain, lambda module: _adafactor(module, beta1=0.9), refusal="beta1=None"),
    "torchtune": Layout(_of_torchtune, files=FOLDER),
    "torchtune, in folders": Layout(_of_torchtune_apart, files=FOLDER),
    # vision
    "timm train.py": Layout(_of_timm, _timm, Vision),
    "average before the model": Layout(
        lambda m, o, s: {"model_ema": _averaged(m).state_dict(), **plain(m, o, s)}, **_VISION
    ),
    "pickled module": Layout(lambda m, o, s: {"model": m, "optimizer": o.state_dict(), "epoch": 3}, **_VISION),
    "tuple": Layout(lambda m, o, s: (m.state_dict(), o.state_dict()), **_VISION),
    "ImageNet example": Layout(
        _of_imagenet,
        **_VISION,
        scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 3),
        every=5,
        options={"updates": STEPS, "updates_per_epoch": 5},
    ),
    "torchvision references": Layout(
        _of_torchvision,
        **_VISION,
        scheduler=_warmup_and_cosine,
        every=5,
        options={"updates": STEPS, "updates_per_epoch": 5},
    ),
    "MAE": Layout(_of_mae, _timm, Vision),
    "MAE, layer decay": Layout(_of_mae, _layer_decay, Vision),
    "DeiT": Layout(_of_deit, _timm, Vision, scheduler=_timm_cosine, refusal="the shape of its schedule"),
    "DeiT, with its schedule": Layout(
        _of_deit,
        _timm,
        Vision,
        scheduler=_timm_cosine,
        options={"schedule": "cosine:steps=30,after=torch"},
        is_same_after=False,
    ),
    "LambdaLR": Layout(_with_iteration, **_VISION, scheduler=_of_transformers, refusal="the shape of its schedule"),
    "LambdaLR, with its schedule": Layout(
        _with_iteration,
        **_VISION,
        scheduler=_of_transformers,
        options={"schedule": "cosine:steps=40,warmup=4"},
    ),
    "OneCycleLR": Layout(
        _with_schedule,
        _adam,
        Vision,
        scheduler=lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.02, 40, cycle_momentum=False),
    ),
    "OneCycleLR with momentum": Layout(
        _with_schedule,
        **_VISION,
        scheduler=lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.02, 40),
        refusal="OneCycleLR changes the momentum",
    ),
    "ReduceLROnPlateau": Layout(
        _with_schedule,
        _adam,
        Vision,
        scheduler=lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=3),
        refusal="the shape of its schedule",
    ),
    "DETR": Layout(_of_mae, _backbone_and_head, Vision),
    "open_clip": Layout(_of_open_clip, _timm, Vision),
    "Ultralytics": Layout(_of_ultralytics, _ultralytics, Vision),
    "Ultralytics, in half precision": Layout(_in_half, _ultralytics, Vision, is_same_after=False),
    "YOLOv5": Layout(_of_yolov5, _ultralytics, Vision, is_same_after=False),
    "fastai": Layout(_of_fastai, _adam, Vision, refusal="`onward train --weights"),
    "Detectron2": Layout(_with_iteration, **_DETECTRON),
    "Detectron2, a group for each parameter": Layout(_with_iteration, **{**_DETECTRON, "optimizer": _detectron}),
    "MMCV": Layout(_of_mmcv, **_VISION, options={"updates": STEPS}),
    "MMEngine": Layout(_of_mmengine, **_VISION, refusal="does not store the shape of its schedule"),
    "MMEngine, with its schedule": Layout(
        _of_mmengine, **_VISION, options={"schedule": "constant", "updates": STEPS}, is_same_after=False
    ),
    "pytorch-ignite": Layout(_of_ignite, **_DETECTRON),
    "SWA": Layout(_of_swa, **_VISION),
    "denoising-diffusion-pytorch": Layout(_of_lucidrains, _adam, Vision),
    "latent diffusion": Layout(_of_compvis, _adam, Vision, files=LIGHTNING),
    "Lightning": Layout(_of_lightning, **_DETECTRON, files=LIGHTNING),
    "encoder and head": Layout(
        lambda m, o, s: {"model": m.state_dict(), "optimizers": o.state_dict()}, _encoder_and_head, Vision
    ),
    "several files": Layout(_apart, **_DETECTRON, options={"updates": STEPS}, files=FOLDER),
    "BasicSR": Layout(_of_basicsr, _adam, Vision, scheduler=milestones, files=FOLDER),
    "guided-diffusion": Layout(_of_guided_diffusion, _adam, Vision, files=FOLDER),
    "skorch": Layout(_of_skorch, **_VISION, files=FOLDER),
    "stable-baselines3, unpacked": Layout(_of_baselines, _adam, Vision, files=FOLDER),
    "Accelerate": Layout(_of_accelerate, **_DETECTRON, options={"updates": STEPS}, files=ACCELERATE),
    "diffusers": Layout(_of_diffusers, _adam, Vision, scheduler=milestones, files=ACCELERATE),
    # several modules
    "GAN": Layout(_of_gan, **_VISION),
    "GAN of equal networks": Layout(_of_twins, **_VISION, options={"module": "generator"}),
    "GAN of equal networks, not named": Layout(_of_twins, **_VISION, refusal="`--module discriminator`"),
    "GAN in one state dict": Layout(_in_one_state, **_VISION, options={"module": "generator"}),
    "GAN in one state dict, not named": Layout(_in_one_state, **_VISION, refusal="`--module discriminator`"),
    "DINO": Layout(_of_dino, _timm, Vision, options={"module": "student"}),
    "DINO, not named": Layout(_of_dino, _timm, Vision, refusal="`--module student`"),
    "MoCo, not named": Layout(_of_moco, **_VISION, refusal="`--module encoder_q`"),
    "MoCo": Layout(_of_moco, **_VISION, options={"module": "encoder_q"}),
    "DQN": Layout(_of_dqn, _adam, Vision, options={"module": "policy_net"}),
    "DQN, not named": Layout(_of_dqn, _adam, Vision, refusal="`--module policy_net`"),
}


_OTHERS = {"RMS", "ema", "avg", "swa", "teacher", "target", "encoder_k"}
"""Words of tensors that a script computes anew."""


def tensors_of(tree: Any, path: str = "") -> dict[str, Any]:
    """Return the tensors of a tree by path, without averages, which its script would update."""
    if isinstance(tree, nn.Module | torch.optim.Optimizer):
        tree = tree.state_dict()
    if isinstance(tree, Mapping | list | tuple):
        items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
        return {
            k: v
            for key, child in items
            if not {"RMS", "ema", "avg", "swa", "teacher", "target", "encoder_k"}
            & {*re.split(r"[./]|_(?!k)", str(key))}
            for k, v in tensors_of(child, f"{path}/{key}").items()
        }
    return {path: tree} if isinstance(tree, torch.Tensor) else {}
