"""A process of two, `python divided_operators.py job.json`: operators on parts, beside the same on whole tensors."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from processes import meet
from torch.distributed.device_mesh import init_device_mesh

from onward.engines.distributed.torch_tensor_parallel import ELEMENTWISE, Division
from onward.engines.framework import keywords
from onward.engines.torch import Torch

USUAL = {
    "alpha": 1.0, "approximate": "none", "axis": 1, "beta": 0.5, "bias": 0.0, "detect_negative": 1,
    "detect_positive": 1, "gamma": 1.0, "lambd": 0.5, "saturate": 1, "to": 1, "round_mode": "up",
}  # fmt: skip
BINARY = {
    "Add", "And", "CastLike", "Div", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Min", "Mul",
    "Or", "PRelu", "Pow", "Sub", "Sum", "Where",
}  # fmt: skip
HEADS = {"scale": 0.5, "is_causal": 1, "kv_num_heads": None, "q_num_heads": None}


def cases() -> Iterator[tuple[str, list[Any], dict[str, Any], list[int | None]]]:
    """Operator, inputs, attributes; along which axis inputs are divided."""
    torch.manual_seed(0)
    x, y, w = torch.rand(3, 4, 8) + 0.1, torch.rand(3, 4, 8) + 0.1, torch.rand(8)
    table, rows, columns = torch.rand(6, 8), torch.rand(8, 6), torch.rand(8, 4)
    for name in sorted(ELEMENTWISE - BINARY):
        yield name, [x], USUAL, [2]
    for name in sorted(BINARY - {"And", "Or", "Where", "PRelu"}):
        yield name, [x, y], USUAL, [2, None]
        yield name, [x, w], USUAL, [2, None]
        yield name, [w, x], USUAL, [None, 2]
    yield "And", [x > 0.5, y > 0.5], {}, [2, None]
    yield "Or", [x > 0.5, y > 0.5], {}, [2, None]
    yield "Where", [y > 0.5, x, y], {}, [None, 2, None]
    yield "PRelu", [x - 0.5, w], {}, [2, 0]
    for shape in ([3, 4, 2, 4], [3, 4, 4, 2], [3, 4, 1, 8], [12, 8], [3, 32], [-1], [3, 2, 2, 8], [6, 16]):
        yield "Reshape", [x, np.array(shape)], {"allowzero": 0}, [2, None]
    yield "Reshape", [x[:, :, :6], np.array([3, 4, 3, 2])], {"allowzero": 0}, [2, None]
    for axis in (0, 1, 2):
        yield "Flatten", [x], {"axis": axis}, [2]
        yield "Softmax", [x], {"axis": axis}, [2]
        yield "Unsqueeze", [x, np.array([axis])], {}, [2, None]
        yield "Slice", [x, np.array([1]), np.array([3]), np.array([axis])], {}, [2, None, None, None]
        yield "Concat", [x, y], {"axis": axis}, [2, None]
        yield "ReduceSum", [x, np.array([axis])], {"keepdims": 1, "noop_with_empty_axes": 0}, [2, None]
        yield (
            "LayerNormalization",
            [x, w, w],
            {"axis": -1, "epsilon": 1e-5, "stash_type": 1, "outputs": 1},
            [2, 0, None],
        )
    for axis in (1, 2):
        yield "Split", [x, np.array([2, 2] if axis == 1 else [4, 4])], {"axis": axis, "outputs": 2}, [2, None]
    yield "Squeeze", [x[:1], np.array([0])], {}, [2, None]
    yield "Expand", [x, np.array([2, 3, 4, 8])], {}, [2, None]
    yield "Transpose", [x], {"perm": [0, 2, 1]}, [2]
    for divided in ([2, None], [None, 0], [None, 1], [2, 0], [2, 1]):
        yield "MatMul", [x, rows], {}, divided
        yield "onward.Linear", [x, columns, w[:4]], {}, [*divided, 0]
        yield (
            "Gemm",
            [x[0], rows, w[:6]],
            {"alpha": 2.0, "beta": 0.5, "transA": 0, "transB": 0},
            [d and d - 1 if d == 2 else d for d in divided] + [None],
        )
    heads = x.reshape(3, 4, 4, 2)
    yield "MatMul", [heads, heads.transpose(2, 3)], {}, [1, 1]
    yield "MatMul", [heads, heads.transpose(2, 3)], {}, [1, None]
    yield "Attention", [heads, heads, heads, None], HEADS, [1, 1, 1, None]
    yield "Attention", [heads, heads, heads, torch.rand(4, 4)], HEADS, [1, 1, 1, None]
    yield "Attention", [heads, heads[:, :2], heads[:, :2], torch.rand(4, 4, 4)], HEADS, [1, 1, 1, None]
    yield "Gather", [table, torch.tensor([[0, 5], [-1, 2]])], {"axis": 0}, [0, None]
    yield "Gather", [table, torch.tensor([1, 0])], {"axis": 1}, [0, None]


def _leaf(x: Any, division: Division | None = None, axis: int | None = None) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    made = x.detach().clone()
    if division is not None and axis is not None:
        made = division.join(torch.from_numpy(division.part(made.numpy(), axis).copy()), axis)
    return made.requires_grad_(x.is_floating_point())


def compute(operators: Any, name: str, inputs: list[Any], given: dict[str, Any], division: Division) -> Any:
    """The outputs and the gradients of floats, as plain tensors."""
    function = operators[name]
    chosen = {key: value for key, value in given.items() if key in keywords(function)}
    results = function(*inputs, **chosen)
    outputs = [division.whole(y) for y in (results if isinstance(results, tuple) else (results,))]
    leaves = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
    floats = [y for y in outputs if y.requires_grad]
    gradients = []
    if floats:
        loss = sum((y * torch.arange(y.numel()).reshape(y.shape).cos()).sum() for y in floats)
        found = torch.autograd.grad(loss, leaves, allow_unused=True)
        gradients = [
            torch.zeros(x.shape) if dx is None else division.whole(dx) for x, dx in zip(leaves, found, strict=True)
        ]
    return [y.detach() for y in outputs] + gradients


def main(job: dict[str, Any]) -> None:
    meet(job)
    division = Division(init_device_mesh("cpu", (2,)))
    plain, divided = Torch(), Torch()
    division.wrap(divided.operators)
    wrong = []
    for name, inputs, given, axes in cases():
        if name not in plain.operators:
            continue
        given_twice = [
            [_leaf(x) for x in inputs],
            [_leaf(x, division, axis) for x, axis in zip(inputs, axes, strict=True)],
        ]
        expected, found = (
            compute(framework.operators, name, leaves, given, division)
            for framework, leaves in zip((plain, divided), given_twice, strict=True)
        )
        for one, other in zip(found, expected, strict=True):
            if one.shape != other.shape or not torch.allclose(one, other, rtol=1e-5, atol=1e-6):
                wrong.append(f"{name} {axes} {given}")
    if job["rank"] == 0:
        Path(job["to"]).write_text("\n".join(dict.fromkeys(wrong)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
    os._exit(0)
