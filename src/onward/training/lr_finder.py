"""Learning rate finder: a short run in which the learning rate rises until the loss does."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Annotated, Any

import numpy as np

from onward.arguments import Range
from onward.errors import RecipeError
from onward.model import load
from onward.options import FeedOptions, ModelAndData, RecipeOptions, with_options
from onward.recipe.optimizers.updates import configure
from onward.recipe.spec import Spec, parse
from onward.training.config import Config
from onward.training.data import in_parts
from onward.training.feed import open_feed
from onward.training.preparation import prepare_training

_MEMORY = 0.9
"""Decay of the smoothed loss."""
_TOO_HIGH = 4.0
"""The search ends at a loss of this many times the minimum."""
_FEWEST = 10


@dataclasses.dataclass(frozen=True)
class Rates:
    """Result of a search: the learning rate to use, and the loss curve."""

    suggested: float
    """A tenth of the learning rate with the lowest loss."""
    rates: tuple[float, ...]
    losses: tuple[float, ...]
    """Smoothed loss at each learning rate."""


@dataclasses.dataclass(frozen=True)
class _Arguments(FeedOptions, RecipeOptions, ModelAndData):
    _: dataclasses.KW_ONLY
    lowest: Annotated[float, Range(above=0)] = 1e-6
    highest: Annotated[float, Range(above=0)] = 1.0
    updates: Annotated[int, Range(least=_FEWEST)] = 100


@with_options(_Arguments, steps="updates")
def find_lr(lowest: float = 1e-6, highest: float = 1.0, updates: int = 100, **arguments: Any) -> Rates:
    """Search for a learning rate. Train a copy of the model with a rate that rises from `lowest` to
    `highest`.

        rates = onward.find_lr("digits.onnx", "digits.npz", loss="cross_entropy", optimizer="adam")
        rates.suggested

    Use `suggested` in the recipe: `optimizer="adam:lr=..."`. Parameter groups with their own
    learning rate keep its ratio to that of the optimizer.

    - `lowest`, `highest`: first and last learning rate
    - `updates`: number of updates
    - `model`: a model without training
    """
    if not lowest < highest:
        raise RecipeError(f"`lowest` is {lowest:g}, not below `highest`, {highest:g}", hint="swap them")
    config = Config.from_arguments("find_lr", arguments)
    recipe = config.recipe
    if "lr" in recipe:
        raise RecipeError("`lr` has no effect: the learning rate is searched", hint="leave `lr` (`--lr`) out")
    original = load(config.model)
    if original.is_training_model:
        raise RecipeError("the model is a training model", hint="pass the model without training, and a recipe")
    rate = configure(parse(recipe.get("optimizer", "adamw"))).values["lr"]
    if rate <= 0:
        raise RecipeError(f"a learning rate of {rate:g} cannot rise", hint="leave it out")
    growth = (highest / lowest) ** (1 / (updates - 1))
    rising = {"schedule": Spec("exponential", {"gamma": growth}), "accumulate": 1}
    data, size = in_parts(config.data)[0], arguments.get("batch_size")
    seed = config.seed or 0
    prepared = prepare_training(original, data, config.columns, size, {**recipe, **rising}, seed, config.window)
    config = dataclasses.replace(config, data=data, batch_size=prepared.batch_size, seed=seed)
    for group in prepared.model.step().fact("train.optimizer"):
        prepared.model.set(f"{group['group']}/lr", group["hyper"]["lr"] / rate * lowest)
    losses: list[float] = []
    with config.start_engine(prepared.model) as running:
        smoothed, epochs = 0.0, map(open_feed(running, config, prepared.data).training.epoch, itertools.count())
        for batch in itertools.islice(itertools.chain.from_iterable(epochs), updates):
            loss = float(running.step(batch)[running.loss])
            smoothed = _MEMORY * smoothed + (1 - _MEMORY) * loss
            average = smoothed / (1 - _MEMORY ** (len(losses) + 1))
            if not math.isfinite(loss) or (losses and average > _TOO_HIGH * min(losses)):
                break
            losses.append(average)
    rates = [lowest * growth**step for step in range(len(losses))]
    least = int(np.argmin(losses)) if losses else 0
    if least == 0:
        raise RecipeError(
            "the loss does not fall at any learning rate", hint="lower `lowest`, or check the data and the loss"
        )
    suggested = rates[least] / 10  # just above the minimum the loss rises, and real runs are longer
    return Rates(suggested, tuple(rates), tuple(losses))
