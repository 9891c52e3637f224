"""PyTorch in the grid."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import lr_scheduler

from grid.record import Outcome
from grid.side import BEFORE, HIDDEN, INPUTS, OUTPUTS, Arrays, Data, goes_on, in_words, name_of
from onward.frameworks.torch import from_torch, to_torch
from onward.frameworks.torch.schedule import updates_per_step
from onward.model import Model
from onward.run_state.training_models import from_training_model

OPTIMIZERS = [
    *("SGD()", "SGD(weight_decay=0.1)", "SGD(momentum=0.9)", "SGD(momentum=0.9, nesterov=True)"),
    *("SGD(momentum=0.9, dampening=0.5)", "SGD(maximize=True)"),
    *("Adam(eps=1e-3)", "Adam(weight_decay=0.1)", "Adam(amsgrad=True, eps=1e-3)"),
    *("Adam(decoupled_weight_decay=True, weight_decay=0.1)", "AdamW(eps=1e-3)", "AdamW(amsgrad=True)"),
    *("Adagrad(initial_accumulator_value=1e-6)", "Adagrad(lr_decay=0.1, weight_decay=0.1)"),
    *("Adadelta(weight_decay=0.1)", "Adamax(weight_decay=0.1)", "Adafactor(weight_decay=0.1)"),
    *("NAdam()", "NAdam(decoupled_weight_decay=True, weight_decay=0.1)"),
    *("RAdam()", "RAdam(decoupled_weight_decay=True, weight_decay=0.1)"),
    *("RMSprop(eps=1e-3)", "RMSprop(momentum=0.9, weight_decay=0.1)", "RMSprop(centered=True)"),
    *("ASGD()", "Rprop()", "LBFGS()", "SparseAdam()", "Muon()", "Own()"),
]
RATES = {"Adadelta": 1.0}
NO_DENSE_GRADIENTS = ("SparseAdam",)
MATRICES_ONLY = ("Muon",)

SCHEDULERS = [
    *("StepLR(2, 0.5)", "MultiStepLR([4, 6], 0.5)", "ExponentialLR(0.8)", "PolynomialLR(8, 2.0)"),
    *("LinearLR(0.2, total_iters=8)", "ConstantLR(0.3, total_iters=4)"),
    *("CosineAnnealingLR(6, 0.01)", "CosineAnnealingWarmRestarts(3, 2)"),
    *("OneCycleLR(0.1, total_steps=20, cycle_momentum=False)", "OneCycleLR(0.1, total_steps=20)"),
    "SequentialLR([LinearLR(0.2, total_iters=4), ExponentialLR(0.8)], milestones=[4])",
    *("ChainedScheduler([ExponentialLR(0.8), ExponentialLR(0.9)])", "ChainedScheduler([StepLR(2), LinearLR()])"),
    *("LambdaLR(lambda n: 0.8**n)", "MultiplicativeLR(lambda n: 0.8)"),
    *("CyclicLR(0.01, 0.1)", "ReduceLROnPlateau()"),
]

INSIDE = " in the module"
LOSSES = {
    "CrossEntropyLoss()": Data(None, ("labels",)),
    "CrossEntropyLoss(label_smoothing=0.1)": Data(None, ("labels",)),
    "CrossEntropyLoss(weight=torch.arange(1.0, 5.0), ignore_index=0)": Data(None, ("labels",)),
    "CrossEntropyLoss(reduction='sum')": Data(None, ("labels",)),
    "CrossEntropyLoss(reduction='none')": Data(None, ("labels",)),
    "NLLLoss()": Data("LogSoftmax", ("labels",)),
    "BCELoss()": Data("Sigmoid", ("binary",)),
    "BCEWithLogitsLoss(pos_weight=torch.arange(1.0, 5.0))": Data(None, ("binary",)),
    "MSELoss()": Data(),
    "L1Loss()": Data(),
    "SmoothL1Loss(beta=0.3)": Data(),
    "HuberLoss(delta=0.3)": Data(),
    "KLDivLoss(reduction='batchmean')": Data("LogSoftmax", ("shares",)),
    "PoissonNLLLoss()": Data(None, ("positive",)),
    "GaussianNLLLoss()": Data(None, ("real", "positive")),
    "CTCLoss()": Data("LogSoftmax", ("sequences",)),
    "TripletMarginLoss()": Data(None, ("real", "real")),
    "TripletMarginLoss(swap=True)": Data(None, ("real", "real")),
    "TripletMarginWithDistanceLoss()": Data(None, ("real", "real")),
    "CosineEmbeddingLoss()": Data(None, ("real", "sign")),
    "HingeEmbeddingLoss()": Data(None, ("signs",)),
    "MarginRankingLoss()": Data(None, ("real", "signs")),
    "MultiLabelMarginLoss()": Data(None, ("indices",)),
    "MultiLabelSoftMarginLoss()": Data(None, ("binary",)),
    "MultiMarginLoss()": Data(None, ("labels",)),
    "SoftMarginLoss()": Data(None, ("signs",)),
    "AdaptiveLogSoftmaxWithLoss(4, 4, [2])": Data(None, ("labels",)),
    "LinearCrossEntropyLoss(4, 4)": Data(None, ("labels",)),
    f"SoftMarginLoss(){INSIDE}": Data(None, ("signs",)),
}


class Own(torch.optim.Optimizer):
    """What a user may have written: steps along the mean of the gradients, all of the same length."""

    def __init__(self, params: Any, lr: float):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["mean"] = 0.9 * state.get("mean", torch.zeros_like(p)) + 0.1 * p.grad
                p -= group["lr"] * state["mean"] / (state["mean"].square().mean().sqrt() + 1e-3)


def public(kind: str) -> set[str]:
    if kind == "losses":
        return {name for name in vars(nn) if name.endswith("Loss")}
    home, base = {
        "optimizers": (torch.optim, torch.optim.Optimizer),
        "schedules": (lr_scheduler, lr_scheduler.LRScheduler),
    }[kind]
    classes = {value for value in vars(home).values() if inspect.isclass(value) and issubclass(value, base)}
    return {value.__name__ for value in classes - {base} if not value.__name__.startswith("_")}


def rows(kind: str) -> Sequence[str]:
    return {"optimizers": OPTIMIZERS, "losses": list(LOSSES), "schedules": SCHEDULERS}[kind]


# ---- from PyTorch ----------------------------------------------------------------------------------------------------


class _Run:
    """A training loop as users write it."""

    def __init__(
        self, last: str | None, *, optimizers: str = "SGD(momentum=0.9)", schedules: str = "", losses: str = "MSELoss()"
    ):
        torch.manual_seed(0)
        bias = name_of(optimizers) not in MATRICES_ONLY
        layers = [nn.Linear(INPUTS, HIDDEN, bias), nn.Tanh(), nn.Linear(HIDDEN, OUTPUTS, bias)]
        self.module = nn.Sequential(*layers, *([] if last is None else [_LAST[last]]))
        self.optimizer = eval(optimizers, self._optimizers())
        self.scheduler = eval(schedules, self._schedulers()) if schedules else None
        self.loss = eval(f"nn.{losses.removesuffix(INSIDE)}", {"nn": nn, "torch": torch})
        if losses.endswith(INSIDE):
            self.module, self.loss = _WithLoss(self.module, self.loss), "loss"

    def _optimizers(self) -> dict[str, Any]:
        classes = {name: getattr(torch.optim, name) for name in public("optimizers")} | {"Own": Own}
        parameters = self.module.parameters()
        return {name: functools.partial(made, parameters, lr=RATES.get(name, 0.02)) for name, made in classes.items()}

    def _schedulers(self) -> dict[str, Any]:
        classes = {name: getattr(lr_scheduler, name) for name in public("schedules")}
        made = {name: functools.partial(kind, self.optimizer) for name, kind in classes.items()}
        return {**made, "ChainedScheduler": lr_scheduler.ChainedScheduler}

    def step(self, batch: list[np.ndarray]) -> float:
        def loss() -> torch.Tensor:
            x, *targets = map(torch.from_numpy, batch)
            self.optimizer.zero_grad()
            inside = isinstance(self.module, _WithLoss)
            found = self.module(x, *targets)["loss"] if inside else self.loss(self.module(x), *targets)
            found.backward()
            return found

        found = loss()
        self.optimizer.step(*([loss] if isinstance(self.optimizer, torch.optim.LBFGS) else []))
        if self.scheduler is not None:
            self.scheduler.step(*([found] if isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau) else []))
        return found.item()


class _WithLoss(nn.Module):
    """A module that computes its loss itself."""

    def __init__(self, network: nn.Module, loss: nn.Module):
        super().__init__()
        self.network, self.loss = network, loss

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.loss(self.network(x), target)}


_LAST = {"LogSoftmax": nn.LogSoftmax(-1), "Sigmoid": nn.Sigmoid()}


def read(kind: str, row: str) -> Outcome:
    data = LOSSES[row] if kind == "losses" else Data()
    given = {"schedules": "ExponentialLR(0.9)"} if kind == "optimizers" else {}
    run = _Run(data.last, **given, **{kind: row})
    begins = name_of(row) in NO_DENSE_GRADIENTS or kind == "losses"  # a loss may be refused that is no number

    def convert() -> Model:
        inputs = [torch.from_numpy(array) for array in data.batch(0)]
        example = inputs if row.endswith(INSIDE) else inputs[:1]
        parts = {"loss": run.loss, "optimizer": run.optimizer, "scheduler": run.scheduler}
        parts["example_targets"] = None if row.endswith(INSIDE) else tuple(inputs[1:])
        return from_torch(run.module, example, **parts, probe=False)

    outcome = in_words(kind, goes_on(run.step, convert, data, 0 if begins else BEFORE))
    return Outcome("traced") if kind == "losses" and outcome.way == "exact" else outcome


# ---- to PyTorch ------------------------------------------------------------------------------------------------------


def make(kind: str, training: Model, batches: Iterable[Arrays]) -> tuple[Outcome, list[float]]:
    carried, run = to_torch(training), from_training_model(training)
    made = {"optimizers": carried.optimizer, "losses": carried.loss, "schedules": carried.scheduler}[kind]
    own = type(made).__module__.startswith("torch.") and not isinstance(made, lr_scheduler.LambdaLR)
    outcome = Outcome("native" if own or made is None else "exact", f"`{type(made).__name__}`" if made else "")
    every, losses = updates_per_step(run), []
    for number, batch in enumerate(batches, run.step + 1):
        x, *targets = map(torch.from_numpy, batch.values())
        carried.optimizer.zero_grad()
        loss = carried.loss(carried.module(x), *targets)
        loss.backward()
        carried.optimizer.step()
        if carried.scheduler is not None and number % every == 0:
            carried.scheduler.step()
        losses.append(loss.item())
    return outcome, losses
