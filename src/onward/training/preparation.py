"""What is trained: a training model, made of the model that was given where it is none yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onward.errors import RecipeError, UnsupportedError
from onward.model import Model
from onward.recipe import prepare
from onward.transform.rebatch import fixed_batch, rebatch

_USUAL_BATCH = 32


def prepared(
    original: Model, batch_size: int | None, recipe: Mapping[str, Any], seed: int
) -> tuple[Model, int, list[str]]:
    """The training model, how large its batches are, and what the user should know about that."""
    if original.is_training_model:
        if recipe:
            raise RecipeError(
                f"the model carries its training already, so `{next(iter(recipe))}` has no effect",
                hint="leave it out, or strip the model first (`onward.strip`)",
            )
        if len(original.steps) > 1:
            raise UnsupportedError(
                f"the model has {len(original.steps)} training steps, and a run makes one of them again and again",
                hint="drive them yourself: `onward.run.load(model, step=...)` for each",
            )
        return original, batch_size or fixed_batch(original) or _USUAL_BATCH, []
    if recipe.get("loss") is None and recipe.get("teacher") is None:
        raise RecipeError(
            "to train a model one must know its loss",
            hint='for example `loss="cross_entropy"` (`--loss cross_entropy`)',
        )
    model, size, notes = _for_batches(original, batch_size)
    return prepare(model, **{"loss": None, "seed": seed, **recipe}), size, notes


def _for_batches(model: Model, wanted: int | None) -> tuple[Model, int, list[str]]:
    """The model in a form that takes batches as large as wanted, that size, and what the user should know."""
    size = fixed_batch(model)
    if size is None or size == wanted or (size > 1 and wanted is None):
        return model, wanted or size or _USUAL_BATCH, []
    try:
        freed = rebatch(model)
    except UnsupportedError as error:
        if wanted is not None:
            raise
        return model, size, [f"{error}; so it is trained with those"]
    note = f"the model is for batches of {size}; for training it was made to take any size"
    return freed, wanted or _USUAL_BATCH, [note]
