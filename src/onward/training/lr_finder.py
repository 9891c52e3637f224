"""Finding a learning rate: a short run in which it rises until the loss does."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import numpy as np

from onward.arguments import Range
from onward.errors import RecipeError
from onward.model import load
from onward.options import FeedOptions, ModelAndData, RecipeOptions, with_options
from onward.recipe.optimizers.updates import configure
from onward.recipe.spec import Spec, parse
from onward.training.config import Config
from onward.training.data import Batch, Batches, in_parts
from onward.training.feed import open_feed
from onward.training.preparation import prepare_training

_MEMORY = 0.9
"""How much of the smoothed loss is what it was before."""
_TOO_HIGH = 4.0
"""The search ends when the loss is so many times the least."""
_FEWEST = 10


@dataclasses.dataclass(frozen=True)
class Rates:
    """What a search found: the rate to use, and the curve that says why."""

    suggested: float
    """A tenth of the rate at which the loss is least."""
    rates: tuple[float, ...]
    losses: tuple[float, ...]
    """The smoothed loss at each rate."""


@dataclasses.dataclass(frozen=True)
class _Arguments(FeedOptions, RecipeOptions, ModelAndData):
    _: dataclasses.KW_ONLY
    lowest: Annotated[float, Range(above=0)] = 1e-6
    highest: Annotated[float, Range(above=0)] = 1.0
    updates: Annotated[int, Range(least=_FEWEST)] = 100


@with_options(_Arguments, steps="updates")
def find_lr(lowest: float = 1e-6, highest: float = 1.0, updates: int = 100, **given: Any) -> Rates:
    """Search for a learning rate: some steps in which it rises from `lowest` to `highest`, on a copy of the model.

        rates = onward.find_lr("digits.onnx", "digits.npz", loss="cross_entropy", optimizer="adam")
        rates.suggested

    `suggested` is what to write into the recipe: `optimizer="adam:lr=..."`. A group of parameters with a rate of its
    own keeps that in proportion: it is to be multiplied like that of the optimizer.

    - `lowest`, `highest`: the first and the last rate
    - `updates`: how many there are between them
    - `model`: one without training
    """
    if not lowest < highest:
        raise RecipeError(f"a rate cannot rise from {lowest:g} to {highest:g}", hint="begin with the lower one")
    config = Config.from_arguments("find_lr", given)
    recipe = config.recipe
    if "lr" in recipe:
        raise RecipeError("the learning rate is what is searched for", hint="leave `lr` (`--lr`) out")
    original = load(config.model)
    if original.is_training_model:
        raise RecipeError("the model carries its training already", hint="give the model without it, and its recipe")
    rate = _rate(recipe.get("optimizer", "adamw"))
    growth = (highest / lowest) ** (1 / (updates - 1))
    rising = {"schedule": Spec("exponential", {"gamma": growth}), "accumulate": 1}
    data, size = in_parts(config.data).data, given.get("batch_size")
    made = prepare_training(original, data, config.columns, size, {**recipe, **rising}, config.seed or 0, config.window)
    config = dataclasses.replace(config, data=data, batch_size=made.batch_size, seed=config.seed or 0)
    for group in made.model.step().fact("train.optimizer"):
        made.model.set(f"{group['group']}/lr", group["hyper"]["lr"] / rate * lowest)
    losses: list[float] = []
    with config.start_engine(made.model) as running:
        smoothed = 0.0
        for batch in itertools.islice(_endless(open_feed(running, config, made.data).training), updates):
            loss = float(running.step(batch)[running.loss])
            smoothed = _MEMORY * smoothed + (1 - _MEMORY) * loss
            now = smoothed / (1 - _MEMORY ** (len(losses) + 1))
            if not math.isfinite(loss) or (losses and now > _TOO_HIGH * min(losses)):
                break
            losses.append(now)
    rates = [lowest * growth**step for step in range(len(losses))]
    return Rates(_suggest(rates, losses), tuple(rates), tuple(losses))


def _rate(given: str | Mapping[str, Any] | Spec) -> float:
    """The learning rate of an optimizer, if it were to be used as it is given."""
    spec = parse(given)
    rate = configure(spec).values["lr"]
    if rate <= 0:
        raise RecipeError(f"a learning rate of {rate:g} cannot rise", hint="leave it out")
    return rate


def _endless(batches: Batches) -> Iterator[Batch]:
    for epoch in itertools.count():
        yield from batches.epoch(epoch)


def _suggest(rates: Sequence[float], losses: Sequence[float]) -> float:
    """A tenth of the rate at which the loss is least: a little later it rises, and so many steps are yet to come."""
    least = int(np.argmin(losses)) if losses else 0
    if least == 0:
        raise RecipeError(
            "the loss does not fall at any learning rate", hint="begin lower, or look at the data and the loss"
        )
    return rates[least] / 10
