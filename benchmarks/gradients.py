"""Measure the time of differentiation and the size of its graphs."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
from common import in_turns, residual_mlp

import onward


@dataclasses.dataclass(frozen=True)
class Measured:
    """Numbers of a model and of the gradient of its loss for all parameters. Nodes exclude constants."""

    name: str
    parameters: int
    forward: int
    backward: int
    seconds: float
    peer: float | None
    """Seconds that torch takes to trace the forward and backward pass of the same module into one graph."""


def differentiating(folder: Path) -> list[dict[str, Any]]:
    """Measure chains of growing length, which show how time grows, and GPT-2 as PyTorch exports it."""
    chains = [(f"residual MLP, {nodes:,} nodes", residual_mlp(nodes // 4, 4)) for nodes in (1_000, 10_000, 50_000)]
    measured = [_measured(name, proto, proto.graph.output[0].name) for name, proto in chains]
    return [dataclasses.asdict(row) for row in (*measured, *_gpt2(folder))]


def _gpt2(folder: Path) -> Iterator[Measured]:
    """Measure GPT-2 with 124 million untrained parameters and the loss in the graph."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    class WithLoss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = GPT2LMHeadModel(GPT2Config(use_cache=False, attn_implementation="eager"))

        def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            logits = self.model(tokens, attention_mask=torch.ones_like(tokens)).logits
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    module = WithLoss().eval()
    with torch.no_grad():  # the exporter merges equal tensors
        for parameter in module.parameters():
            parameter.normal_(std=0.02)
    example = torch.zeros(2, 64, dtype=torch.int64)
    batch = torch.export.Dim("N", max=4096)
    tokens = torch.export.Dim("T", max=1024)
    exports = {
        "GPT-2, exported by torch.export": {"dynamo": True},
        "GPT-2, the same with any batch and length": {
            "dynamo": True,
            "dynamic_shapes": ({0: batch, 1: tokens}, {0: batch, 1: tokens}),
        },
        "GPT-2, exported by TorchScript": {"dynamo": False, "opset_version": 18},
    }
    peer = _traced_by_torch(module, example)
    for name, options in exports.items():
        path = folder / "gpt2.onnx"
        with _quietly():
            torch.onnx.export(
                module, (example, example), path, input_names=["tokens", "labels"], output_names=["loss"], **options
            )
        yield _measured(name, onward.load(path), "loss", peer)


def _traced_by_torch(module: Any, example: Any) -> float:
    import torch
    from torch._functorch.aot_autograd import aot_export_joint_simple

    captured = torch.export.export(module, (example, example)).module()
    parameters = dict(captured.named_parameters())

    def loss(*inputs: Any) -> tuple[Any]:
        weights = dict(zip(parameters, inputs[2:], strict=True))
        return (torch.func.functional_call(captured, weights, inputs[:2]),)

    start = time.perf_counter()
    with _quietly():
        aot_export_joint_simple(loss, [example, example, *parameters.values()], trace_joint=True)
    return time.perf_counter() - start


def _measured(name: str, model: onward.Model | onnx.ModelProto, y: str, peer: float | None = None) -> Measured:
    model = onward.load(model)
    xs = [name for name, value in model.graph.initializers.items() if value.dtype is not None and _is_weight(value)]
    gradient = onward.gradient(model, y, xs)
    seconds = in_turns(onward=lambda: onward.gradient(model, y, xs))["onward"]
    forward = _nodes(model)
    return Measured(name, len(xs), forward, _nodes(gradient) - forward, seconds, peer)


def _is_weight(value: Any) -> bool:
    return value.dtype.is_floating_point() and value.const_value.size > 1


def _nodes(model: onward.Model) -> int:
    return sum(node.op_type != "Constant" for node in model.graph.all_nodes())


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    with warnings.catch_warnings(), open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        yield
        logging.disable(logging.NOTSET)


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| model | parameters | nodes | nodes of the gradient | ratio | seconds | torch |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in (Measured(**row) for row in rows):
        peer = f"{row.peer:.1f}" if row.peer is not None else ""
        ratio = row.backward / row.forward
        cells = [row.name, f"{row.parameters:,}", f"{row.forward:,}", f"{row.backward:,}", f"{ratio:.2f}"]
        lines.append("| " + " | ".join([*cells, f"{row.seconds:.2f}", peer]) + " |")
    return "\n".join(lines)
