"""The same updates of an optimizer and of what was read or traced of it, by random gradients.

A number that was taken for a constant, and is none, shows here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from onward import engines
from onward.agreement.gradcheck.inputs import generator
from onward.agreement.tolerance import Arrays, Comparison, Tolerance
from onward.recipe.optimizers import FunctionOptimizer
from onward.recipe.optimizers.graph_optimizer import COUNT, RATE, gradient_of

_TRIALS = ((1.0, 1.0), (0.4, 1e-3), (2.5, 30.0), (1.0, 0.1))
"""Updates: by what the learning rate is multiplied, and how large gradients are."""
_RELATIVE = 1e-5
"""Updates are made element by element, without sums in an order of one's own."""
_UNSEEN = "a step depends on what a trace does not see: random numbers, or something outside of the optimizer"


class Trial(NamedTuple):
    """An update."""

    number: int
    """The first is 1."""
    factor: float
    """By what the learning rate is multiplied."""
    gradients: Arrays


def compare_updates(
    ours: Callable[[Arrays, Trial], Arrays],
    theirs: Callable[[Trial], Arrays],
    start: Arrays,
    parameters: Iterable[str],
    *,
    optimizer: str,
    reference: str = "what was traced of it",
    hint: str = _UNSEEN,
    repeats: int = 1,
) -> None:
    """Let both make the same updates, each from the same parameters and state, or say what differs first.

    `start` is what the optimizer, `theirs`, begins with: parameters, and what else is to be compared. `ours` makes an
    update from where the optimizer was before.
    """
    called = "an update of `{}` by " + optimizer.replace("{", "{{").replace("}", "}}")
    compare = Comparison(reference, hint, Tolerance(_RELATIVE), called.format)
    before = dict(start)
    for trial in _trials({name: before[name] for name in parameters}, repeats):
        found, expected = ours(before, trial), theirs(trial)
        compare(found, expected, before=before)
        before |= expected


def update_by(function: FunctionOptimizer, engine: str = "onnxruntime") -> Callable[[Arrays, Trial], Arrays]:
    """Updates by the graph of an optimizer."""
    names = [*function.parameters, *(value.name or "" for value in function.state)]
    types = {value.name or "": value.dtype.numpy() for value in function.inputs if value.dtype is not None}
    compute = engines.function(function.update, engine=engine)

    def update(before: Arrays, trial: Trial) -> Arrays:
        gradients = {gradient_of(name): gradient for name, gradient in trial.gradients.items()}
        given = {**before, **gradients, RATE: function.lr * trial.factor, COUNT: trial.number}
        found = compute({name: np.asarray(given[name], dtype) for name, dtype in types.items()})
        return dict(zip(names, found.values(), strict=True))

    return update


def _trials(parameters: Arrays, repeats: int = 1) -> Iterator[Trial]:
    """Updates of these parameters, whose gradients have elements of very different sizes: it matters where an ε is."""
    rng = generator(0)
    for number, (factor, size) in enumerate(_TRIALS * repeats, 1):
        shapes = {name: array.shape for name, array in parameters.items()}
        drawn = {name: rng.normal(size=shape) * 10.0 ** rng.uniform(-6, 0, shape) for name, shape in shapes.items()}
        yield Trial(number, factor, {n: np.asarray(size * x, parameters[n].dtype) for n, x in drawn.items()})
