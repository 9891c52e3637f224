"""What frameworks have in common in the grid: data, and the steps of both sides."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from grid.record import Outcome
from onward.engines import start
from onward.model import Model
from onward.recipe.losses import LOSSES
from onward.recipe.optimizers import FunctionOptimizer
from onward.run_state.training_models import from_training_model

KINDS = ("optimizers", "losses", "schedules")

BEFORE, AFTER = 3, 7
"""Steps before a conversion, and after it."""

SAMPLES, INPUTS, HIDDEN, OUTPUTS = 8, 5, 6, 4

Arrays = dict[str, np.ndarray]


class Framework(Protocol):
    """What the grid needs to know of a framework. Modules of this package are such."""

    def public(self, kind: str) -> set[str]:
        """What the framework has, by name."""

    def rows(self, kind: str) -> Sequence[str]:
        """What is tried: expressions as users write them, such as `Adam(amsgrad=True)`."""

    def read(self, kind: str, row: str) -> Outcome:
        """Let the framework make some steps, make a training model of the run, and let both go on."""

    def make(self, kind: str, training: Model, batches: Iterable[Arrays]) -> tuple[Outcome, list[float]]:
        """Make a run of the framework of a training model, and let it make steps: with which losses."""


# ---- data ------------------------------------------------------------------------------------------------------------


class Data(NamedTuple):
    """What a loss is tried with."""

    last: str | None = None
    """What the model does to its outputs, in the words of ONNX."""
    targets: tuple[str, ...] = ("real",)

    def batch(self, seed: int) -> list[np.ndarray]:
        """Inputs and targets."""
        rng = np.random.default_rng(seed)
        if self.targets == ("sequences",):
            lengths = [np.full(SAMPLES, 7), rng.integers(1, 4, SAMPLES)]
            return [_DRAW["real"](rng, (7, SAMPLES, INPUTS)), rng.integers(1, OUTPUTS, (SAMPLES, 3)), *lengths]
        if self.targets == ("words",):
            return [_DRAW["real"](rng, (SAMPLES, 7, INPUTS)), rng.integers(1, OUTPUTS, (SAMPLES, 3))]
        targets = [_DRAW[kind](rng, (SAMPLES, OUTPUTS)) for kind in self.targets]
        return [_DRAW["real"](rng, (SAMPLES, INPUTS)), *targets]


Sizes = tuple[int, ...]
_DRAW: dict[str, Callable[[np.random.Generator, Sizes], np.ndarray]] = {
    "real": lambda rng, sizes: rng.normal(size=sizes).astype("f"),
    "positive": lambda rng, sizes: (rng.random(sizes) + 0.2).astype("f"),
    "shares": lambda rng, sizes: rng.dirichlet(np.ones(sizes[-1]), sizes[:-1]).astype("f"),
    "logs": lambda rng, sizes: np.log(rng.dirichlet(np.ones(sizes[-1]) * 5, sizes[:-1])).astype("f"),
    "binary": lambda rng, sizes: rng.integers(0, 2, sizes).astype("f"),
    "signs": lambda rng, sizes: rng.integers(0, 2, sizes).astype("f") * 2 - 1,
    "sign": lambda rng, sizes: rng.integers(0, 2, sizes[:-1]).astype("f") * 2 - 1,
    "indices": lambda rng, sizes: rng.integers(0, sizes[-1], sizes),
    "one_hot": lambda rng, sizes: np.eye(sizes[-1], dtype="f")[rng.integers(0, sizes[-1], sizes[:-1])],
    "labels": lambda rng, sizes: rng.integers(0, sizes[-1], sizes[:-1]),
}


# ---- both sides ------------------------------------------------------------------------------------------------------


def in_order(names: Sequence[str], batch: list[np.ndarray]) -> Arrays:
    return dict(zip(names, batch, strict=True))


def goes_on(
    step: Callable[[list[np.ndarray]], float],
    convert: Callable[[], Model],
    data: Data,
    before: int = BEFORE,
    named: Callable[[Sequence[str], list[np.ndarray]], Arrays] = in_order,
) -> Model:
    """Let a framework make steps, convert its run, and let both make further steps with the same losses.

    Conversions need no probe, which is the same with fewer steps.
    """
    for seed in range(before):
        step(data.batch(seed))
    training = convert()
    with start(training, threads=1) as engine:
        for seed in range(before, before + AFTER):
            batch = data.batch(seed)
            expected = step(batch)
            found = engine.step(named(list(engine.inputs), batch))[engine.loss]
            np.testing.assert_allclose(found, expected, rtol=1e-5)
    return training


def in_words(kind: str, training: Model) -> Outcome:
    """What a training model has that was made of a framework's run."""
    run = from_training_model(training, forward=False)
    optimizer = run.groups[0].optimizer
    if kind != "losses" and isinstance(optimizer, FunctionOptimizer):  # with its rates
        return Outcome("traced")
    if kind == "schedules":
        return Outcome("native", ", then ".join(f"`{spec.name}`" for spec in run.schedule) or "`constant`")
    if kind == "optimizers":
        return Outcome("native", f"`{optimizer.name}` of {optimizer.options['variant']}")
    (term,) = run.loss
    if isinstance(term, str):  # the value of an output
        return Outcome("traced")
    ((_, options),) = term.items()
    return Outcome("native", f"`{options['name']}`") if options["name"] in LOSSES else Outcome("exact")


def name_of(row: str) -> str:
    """`Adam` of `Adam(amsgrad=True)`, `adam` of `adam:eps=1e-3`."""
    return row.partition("(")[0].partition(":")[0]
