"""A toy optimizer and a toy operator, added where docs/architecture.md says, on targets of the arrival table.

    python added.py optimizer "torch objects" "checkpoint of dcp"     # prints {target: outcome}

They are added before the tables are read for the first time, and so need a process of their own.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import onnx
import torch
from onnx import helper

from onward.build import Builder, Expr
from onward.recipe.optimizers import updates
from onward.recipe.optimizers.definition import Update
from onward.rules import gradient
from onward.rules.registry import body
from onward.vocabulary import optimizers

# ---- the optimizer: an update with its row, and a row for each framework ---------------------------------------------

HYPER = {"lr": 0.1, "beta1": 0.9, "weight_decay": 0.0}


@Update
def soft_momentum(op, x, g, soft_avg, lr, beta1):  # type: ignore[no-untyped-def]
    """m ← β₁·m + (1−β₁)·g;  x ← x − lr·m / (1 + |m|)."""
    m = updates.ema(soft_avg, g, beta1)
    return updates.descend(x, lr, m / (1.0 + op.Abs(m))), m


updates._define("softmomentum", "Momentum of limited size", HYPER, lambda s, shape: soft_momentum, {"torch": {}})
optimizers.TORCH_ROWS.append(
    optimizers._native("SoftMomentum", "softmomentum", "torch", "beta1", "", "soft_avg", counts=False)
)


class SoftMomentum(torch.optim.Optimizer):
    """The class that PyTorch would have."""

    def __init__(
        self, params: Any, lr: float = 0.1, beta1: float = 0.9, weight_decay: float = 0, maximize: bool = False
    ):
        super().__init__(params, {"lr": lr, "beta1": beta1, "weight_decay": weight_decay, "maximize": maximize})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                m = state["soft_avg"] = group["beta1"] * state.get("soft_avg", 0.0) + (1 - group["beta1"]) * p.grad
                p -= group["lr"] * m / (1 + m.abs())


torch.optim.SoftMomentum = SoftMomentum  # type: ignore[attr-defined]

# ---- the operator: a body and a derivative ---------------------------------------------------------------------------


@body("SoftLimit", domain="toy")
def soft_limit(op: Builder, x: Expr) -> Expr:
    return x / (1.0 + op.Abs(x))


@gradient("SoftLimit", domain="toy")
def soft_limit_gradient(op: Builder, dy: Expr, x: Expr) -> Expr:
    return dy / (1.0 + op.Abs(x)) ** 2


# ---- on targets ------------------------------------------------------------------------------------------------------


def main(added: str, *targets: str) -> None:
    from arrival import features
    from arrival.targets import TARGETS, through_checkpoint
    from arrival.trial import tried

    import conftest  # noqa: F401  frameworks are quiet and have one thread

    formats = {target: target.removeprefix("checkpoint of ") for target in targets if target not in TARGETS}
    TARGETS.update({target: ("torch", through_checkpoint(name)) for target, name in formats.items()})

    def insert(proto: onnx.ModelProto) -> None:
        features._insert(proto, helper.make_node("SoftLimit", ["IN"], ["limited"], domain="toy"))
        proto.opset_import.append(helper.make_opsetid("toy", 1))

    feature = {
        "optimizer": features.features()["optimizer softmomentum"],
        "operator": features.Feature("operator SoftLimit", "operator", features._changed(insert), "SoftLimit"),
    }[added]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        print(json.dumps({target: tried([feature], target) for target in targets}))


if __name__ == "__main__":
    main(*sys.argv[1:])
