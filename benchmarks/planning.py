"""Compare the memory that `onward plan` estimates with measurements in PyTorch: a step, and a process that shards.

    python benchmarks/planning.py                 # an MLP, a CNN with BatchNormalization and a GPT; two processes
    python benchmarks/planning.py gpt --no-processes

On a GPU the peak of the allocator is measured, with models that are large enough for it to matter.
On a CPU the storages of all tensors are counted. The step is that of `onward.to_torch`: forward and
backward pass, and an in-place optimizer.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import tempfile
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import onward

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


class MLP(nn.Module):
    def __init__(self, width: int = 8192 if CUDA else 1024):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(4)])
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return self.head(x)


class Stage(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = (nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class CNN(nn.Module):
    def __init__(self, width: int = 128 if CUDA else 16, depth: int = 6):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.stages = nn.ModuleList(Stage(width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.stem(x)))
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean((2, 3)))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, length, width = x.shape
        q, k, v = (p.view(n, length, self.heads, -1).transpose(1, 2) for p in self.qkv(self.norm1(x)).split(width, 2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(n, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, width: int = 1024 if CUDA else 128, words: int = 32000 if CUDA else 512):
        super().__init__()
        self.tokens = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Layer(width, width // 64) for _ in range(12 if CUDA else 6))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Case(NamedTuple):
    module: type[nn.Module]
    shape: tuple[int, ...]
    optimizer: str = "adamw"

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        if self.module is GPT:
            tokens = torch.randint(0, 500, (self.shape[0], self.shape[1] + 1))
            return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        return torch.randn(self.shape), torch.randint(0, 10, self.shape[:1])

    def training_model(self, folder: Path) -> onward.Model:
        file = folder / "model.onnx"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logging.disable(logging.WARNING)
            torch.onnx.export(
                self.module().eval(), (self.batch()[0],), file, input_names=["x"], output_names=["logits"],
                dynamo=True, verbose=False, optimize=False,
            )  # fmt: skip
            logging.disable(logging.NOTSET)
        return onward.prepare(file, loss="cross_entropy:axis=-1", optimizer=self.optimizer, variance="sample")


CASES = {
    "mlp": Case(MLP, (4096, 8192) if CUDA else (512, 1024)),
    "cnn": Case(CNN, (64, 3, 64, 64) if CUDA else (8, 3, 32, 32)),
    "gpt": Case(GPT, (8, 1024) if CUDA else (4, 128)),
}


# ---- one device ------------------------------------------------------------------------------------------------------


class Storages(TorchDispatchMode):
    """Counter of the memory of all tensors that operators make, while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = {t.untyped_storage()._cdata for t in torch.utils._pytree.tree_leaves(args) if torch.is_tensor(t)}
        for tensor in torch.utils._pytree.tree_leaves(result):
            if torch.is_tensor(tensor):
                self._follow(tensor.untyped_storage(), inputs)
        return result

    def _follow(self, storage: torch.UntypedStorage, inputs: set[int]) -> None:
        key = storage._cdata
        if key in self._seen or key in inputs or not storage.nbytes():
            return
        self._seen.add(key)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key, storage.nbytes())

    def _gone(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


class Measured(NamedTuple):
    state: int
    saved: int
    """Bytes that the forward pass leaves for the backward pass."""
    peak: int
    """Bytes at the peak, with the state."""


def measure(
    case: Case, training: onward.Model, *, precision: str | None = None, recompute_blocks: bool = False
) -> Measured:
    module, optimizer, _, loss_of = onward.to_torch(training, probe=False, blocks=recompute_blocks)
    module.to(DEVICE)
    for block in module.repeated_blocks() if recompute_blocks else ():
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    x, labels = (tensor.to(DEVICE) for tensor in case.batch())
    for group in optimizer.param_groups:
        group.update(foreach=False, fused=CUDA)

    def forward() -> torch.Tensor:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=precision is not None):
            return loss_of(module(x), labels)

    def step() -> None:
        forward().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # the optimizer makes its state in the first step
    tensors = [*module.parameters(), *module.buffers()]
    slots = [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t) and t.numel() > 1]
    state = sum(tensor.numel() * tensor.element_size() for tensor in [*tensors, *slots])
    batch = sum(tensor.numel() * tensor.element_size() for tensor in (x, labels))
    with memory_counter() as memory:
        before = memory.now
        loss = forward()
        saved = memory.now - before
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad()
    return Measured(state, saved, memory.peak - before + state + batch)


class _Allocator:
    @property
    def now(self) -> int:
        return torch.cuda.memory_allocated()

    @property
    def peak(self) -> int:
        return torch.cuda.max_memory_allocated()


@contextlib.contextmanager
def memory_counter() -> Iterator[Any]:
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
        yield _Allocator()
        return
    with Storages() as memory:
        yield memory


# ---- two processes ---------------------------------------------------------------------------------------------------


def sharded(rank: int, folder: str, results: Any) -> None:
    """Put the bytes of parameters and optimizer state of one of two processes into `results`."""
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    case, mesh = CASES["gpt"], init_device_mesh("cpu", (2,))
    module, *_, loss_of = onward.to_torch(f"{folder}/training.onnx", probe=False, blocks=True)
    for block in module.repeated_blocks():
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(module.parameters())
    x, labels = case.batch()
    loss_of(module(x), labels).backward()
    optimizer.step()
    slots = [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t) and t.dim()]
    local = [tensor.to_local() for tensor in [*module.parameters(), *slots]]
    results.put(sum(tensor.numel() * tensor.element_size() for tensor in local))
    dist.barrier()
    dist.destroy_process_group()


def measure_processes(training: onward.Model, folder: Path) -> int:
    training.save(folder / "training.onnx")
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(sharded, (str(folder), results), nprocs=2)
    return max(results.get() for _ in range(2))


def difference(planned: float, measured: float) -> str:
    return f"{planned / 2**20:10,.1f} {measured / 2**20:10,.1f} {100 * (planned / measured - 1):+7.1f} %"


VARIANTS: list[dict[str, Any]] = [{}, {"recompute_blocks": True}, {"precision": "bfloat16"}]


def compare(name: str, training: onward.Model, options: dict[str, Any]) -> None:
    plan = onward.plan(training, **options)
    memory, measured = plan.estimates["ddp"].memory, measure(CASES[name], training, **options)
    title = " ".join([name, *(option.replace("_", " ") for option in options)])
    saved = plan.model["kept_bytes_with_recompute" if options.get("recompute_blocks") else "kept_bytes"]
    print(f"{title:20} parameters and state  {difference(memory.parameters + memory.state, measured.state)}")
    print(f"{title:20} saved for backward    {difference(saved, measured.saved)}")
    print(f"{title:20} peak of a step        {difference(memory.total, measured.peak)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "cases", nargs="*", default=list(CASES), help=f"models to measure, of {', '.join(CASES)} (default: all)"
    )
    parser.add_argument("--no-processes", action="store_true", help="skip the measurement in two processes")
    args = parser.parse_args()
    print(f"{'on ' + (torch.cuda.get_device_name() if CUDA else 'the CPU'):42}    planned   measured  (MiB)")
    for name in args.cases:
        with tempfile.TemporaryDirectory() as folder:
            training = CASES[name].training_model(Path(folder))
            for options in VARIANTS if name == "gpt" else VARIANTS[:1]:
                compare(name, training, options)
            if name == "gpt" and not args.no_processes:
                half = onward.plan(training, devices=2, strategy="fsdp").estimates["fsdp"].memory
                local = measure_processes(training, Path(folder))
                print(f"{name:20} one process, fsdp     {difference(half.parameters + half.state, local)}")


if __name__ == "__main__":
    main()
