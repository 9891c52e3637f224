"""Measure training on one GPU: the engines torch and jax against idiomatic PyTorch, in turns, in one run.

    python benchmarks/gpu/run.py gpt2 mlp resnet50 --json results.json

Needs a CUDA build of torch, one of jax for the jax engine, and onnxscript for the export. Prints
milliseconds per step, the ratio to torch.compile, and peak memory. A contender that fails is listed
with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import numpy as np
import torch
from models import GPT2, LENGTH, MLP, VOCABULARY, ResNet50
from torch import nn
from torch.nn import functional as F

import onward
import onward.engines

Step = Callable[[], Any]


class Workload(NamedTuple):
    module: Callable[[], nn.Module]
    inputs: tuple[int, ...]
    classes: int
    optimizer: str
    options: dict[str, Any]
    precision: str
    steps: int
    channels_last: bool = False

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        if self.module is GPT2:
            tokens = torch.randint(0, VOCABULARY, (*self.inputs[:-1], self.inputs[-1] + 1), device="cuda")
            return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        return torch.randn(self.inputs, device="cuda"), torch.randint(0, self.classes, self.inputs[:1], device="cuda")


WORKLOADS = {
    "gpt2": Workload(GPT2, (16, LENGTH), VOCABULARY, "adamw", {"lr": 3e-4, "weight_decay": 0.1}, "bfloat16", steps=20),
    "mlp": Workload(MLP, (128, 784), 10, "adam", {"lr": 1e-3}, "float32", steps=1000),
    "resnet50": Workload(
        ResNet50, (256, 3, 224, 224), 1000, "momentum", {"lr": 0.1, "momentum": 0.9}, "bfloat16", 20, channels_last=True
    ),
}


def by_torch(work: Workload, module: nn.Module, *, compiled: bool) -> Step:
    """Return a step in idiomatic, fast PyTorch: fused optimizer, autocast, channels last."""
    module = module.cuda().train()
    x, labels = work.batch()
    if work.channels_last:
        module, x = module.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    classes = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "momentum": torch.optim.SGD}
    optimizer = classes[work.optimizer](module.parameters(), fused=True, **work.options)

    def loss_of(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=work.precision == "bfloat16"):
            logits = module(x)
            return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten())

    torch.compiler.reset()  # else shapes of an earlier workload make these dynamic
    compute = torch.compile(loss_of) if compiled else loss_of

    def step() -> torch.Tensor:
        loss = compute(x, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def by_cuda_graph(work: Workload, module: nn.Module) -> Step:
    """Return the whole step as a CUDA graph, for models whose kernels take less time than their launch."""
    module = module.cuda().train()
    x, labels = work.batch()
    optimizer = torch.optim.Adam(module.parameters(), capturable=True, fused=True, **work.options)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = F.cross_entropy(module(x), labels)
        loss.backward()
        optimizer.step()
        return loss

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    def replay(reads: Any = (step, x, labels)) -> torch.Tensor:  # keeps the memory that the graph reads
        graph.replay()
        return loss

    return replay


def by_onward(work: Workload, file: Path, engine: str) -> Step:
    rates = ",".join(f"{name}={value}" for name, value in work.options.items())
    training = onward.prepare(
        file, loss="cross_entropy:axis=-1", optimizer=f"{work.optimizer}:{rates}", variance="sample"
    )
    options = {} if work.precision == "float32" else {"precision": work.precision}
    loaded = onward.engines.start(training, engine=engine, device="cuda", **options)
    x, labels = work.batch()
    if engine == "jax":
        import jax

        x, labels = (jax.dlpack.from_dlpack(tensor) for tensor in (x, labels))
    return lambda: loaded.step({"x": x, "labels": labels})


def export(work: Workload, module: nn.Module, file: Path) -> None:
    """Export a module with the defaults of the exporter, without optimizations that fold trainable weights."""
    x, _ = work.batch()
    module.cpu().train(work.module is ResNet50)
    torch.onnx.export(
        module, (x.cpu(),), file, dynamo=True, optimize=False, input_names=["x"], output_names=["logits"], verbose=False
    )


def finished(result: Any) -> float:
    """Return the loss, after all work on the GPU has finished."""
    loss = float(np.asarray(result["loss"])) if not isinstance(result, torch.Tensor) else float(result)
    torch.cuda.synchronize()
    return loss


def measure(name: str, work: Workload, names: list[str], rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    original = work.module()
    state = {key: tensor.clone() for key, tensor in original.state_dict().items()}

    def fresh() -> nn.Module:
        module = work.module()
        module.load_state_dict(state)
        return module

    with TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        export(work, fresh(), file)
        contenders: dict[str, Callable[[], Step]] = {
            "torch": lambda: by_torch(work, fresh(), compiled=False),
            "torch.compile": lambda: by_torch(work, fresh(), compiled=True),
            **({"CUDA graph": lambda: by_cuda_graph(work, fresh())} if work.module is MLP else {}),
            "onward torch": lambda: by_onward(work, file, "torch"),
            "onward jax": lambda: by_onward(work, file, "jax"),
        }
        results: dict[str, Any] = {}
        steps: dict[str, Step] = {}
        for contender, make in contenders.items():
            if names and contender not in names:
                continue
            results[contender] = first(contender, make, steps)
            print(f"{name}: {contender}: {results[contender]}", flush=True)
    times: dict[str, list[float]] = {contender: [] for contender in steps}
    for _ in range(rounds):
        for contender, step in steps.items():
            finished(step())
            start = time.perf_counter()
            for _ in range(work.steps):
                result = step()
            finished(result)
            times[contender].append((time.perf_counter() - start) / work.steps * 1e3)
    for contender, values in times.items():
        results[contender]["ms"] = statistics.median(values)
    return results


def first(contender: str, make: Callable[[], Step], steps: dict[str, Step]) -> dict[str, Any]:
    """Set up a contender; return the seconds to its first step, its first losses and its peak memory."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    start = time.perf_counter()
    try:
        step = make()
        losses = [finished(step())]
        seconds = time.perf_counter() - start
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        losses += [finished(step()) for _ in range(4)]
    except Exception as error:
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}"[:300]}
    steps[contender] = step
    peak = torch.cuda.max_memory_reserved() - before if "jax" not in contender else peak_of_jax()
    return {
        "first_step_s": round(seconds, 1),
        "losses": [round(loss, 4) for loss in losses],
        "peak_mb": round(peak / 2**20),
    }


def peak_of_jax() -> int:
    """Return the peak of memory since the start of the process, in bytes."""
    import jax

    return int((jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "workloads",
        nargs="*",
        default=list(WORKLOADS),
        help=f"workloads to measure, of {', '.join(WORKLOADS)} (default: all)",
    )
    parser.add_argument("--contenders", nargs="*", default=[], help="contenders to measure (default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds to measure (default: 5)")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    results = {name: measure(name, WORKLOADS[name], options.contenders, options.rounds) for name in options.workloads}
    for name, rows in results.items():
        peer = rows.get("torch.compile", {}).get("ms")
        print(f"\n{name}, on {torch.cuda.get_device_name()}")
        for contender, row in rows.items():
            if "ms" not in row:
                print(f"  {contender:15} {row.get('failed', 'not measured')}")
                continue
            ratio = f"{row['ms'] / peer:6.2f}" if peer else ""
            print(f"  {contender:15} {row['ms']:9.3f} ms {ratio}  {row['peak_mb']:7} MB  first {row['first_step_s']} s")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
