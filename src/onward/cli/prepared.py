"""What `onward prepare` says in the end: what became of the model in a few lines, and what to do next."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onward.cli.console import count, print_rows, size, word

if TYPE_CHECKING:
    import onnx_ir as ir

    from onward import Model


def print_prepared(made: Model, path: Path) -> None:
    step = made.steps[-1]
    optimizers = [_call(fact, fact["hyper"]) + _for(fact) for fact in step.fact("train.optimizer")]
    schedules = [_call(fact, fact) for fact in step.fact("train.lr_scheduler") or ()]
    rows = [
        ["trains", _trained(made)],
        ["loss", " + ".join(_loss(fact) for fact in step.fact("train.loss"))],
        ["optimizer", optimizers[0]],
        *(["", optimizer] for optimizer in optimizers[1:]),
        *([["schedule", ", then ".join(schedules)]] if schedules else []),
        ["feed", ", ".join(_typed(value) for value in (*made.inputs, *step.algorithm.inputs))],
        ["wrote", f"{path} ({size(path.stat().st_size)})"],
        ["next", f"onward show {path}"],
        ["", f"onward check {path}"],
    ]
    print_rows(rows, styles=("bold",))


def _trained(made: Model) -> str:
    """How much is trained, and how many tensors could be but are not."""
    step = made.steps[-1]
    names = step.differentiated()
    shapes = [made.initializer(name).shape for name in names]
    numbers = sum(math.prod(shape.numpy()) for shape in shapes if shape is not None)
    frozen = sum(map(len, (step.fact("train.selection") or {}).get("frozen", {}).values()))
    return f"{count(numbers, 'parameter')} in {count(len(names), 'tensor')}" + (f"; {frozen} frozen" if frozen else "")


def _loss(fact: Mapping[str, Any]) -> str:
    scale = "" if fact["scale"] == 1 else f"{word(fact['scale'])} * "
    return f"{scale}{_call(fact, fact['options'])} of {fact['output']}"


def _call(fact: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """`name` with its options, as one would type it."""
    given = ",".join(f"{key}={word(value)}" for key, value in options.items() if key != "name")
    return f"{fact['name']}:{given}" if given else str(fact["name"])


def _for(fact: Mapping[str, Any]) -> str:
    return f" ({fact['group']}, {count(len(fact['params']), 'tensor')})"


def _typed(value: ir.Value) -> str:
    dtype = value.dtype.name.lower() if value.dtype is not None else "any type"
    return f"{value.name} {dtype}{value.shape if value.shape is not None else ''}"
