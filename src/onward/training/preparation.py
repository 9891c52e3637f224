"""What is trained: a training model, made of the model that was given where it is none yet."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from onward.engines.initialization import start_over
from onward.errors import RecipeError, UnsupportedError
from onward.inspect.parameters import exporter_remarks, verdicts
from onward.model import Model
from onward.recipe import prepare, replace_head
from onward.recipe.preprocessing import notes_on_moves, open_preprocessing, pipelines
from onward.recipe.spec import arguments
from onward.training.data import Dataset, Stream, format_for, open_data
from onward.training.raw_inputs import as_bytes, check_masks, with_data
from onward.training.vocabularies import in_kinds, with_vocabularies
from onward.transform.declare import USUAL_BATCH, fixed_batch, rebatch


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A training model, and what goes with it."""

    model: Model
    batch_size: int
    notes: list[str] = dataclasses.field(default_factory=list)
    """What the user should know about that."""
    data: Dataset | Stream | None = None
    """The data, if it was needed to open them."""
    preprocess: Any = None


def prepare_training(
    original: Model,
    data: Any,
    columns: Mapping[str, str | Sequence[str]],
    batch_size: int | None,
    recipe: Mapping[str, Any],
    seed: int,
    window: int | None = None,
) -> Prepared:
    """The training model for a model, a recipe and data; the latter matter if they are preprocessed.

    Where the recipe says what parameters start as, they do.
    """
    if original.is_training_model:
        if recipe:
            raise RecipeError(
                f"the model carries its training already, so `{next(iter(recipe))}` has no effect",
                hint="leave it out, or strip the model first (`onward.transform.strip`)",
            )
        notes = [note for step in original.steps for note in notes_on_moves(step)]
        return Prepared(original, batch_size or fixed_batch(original) or USUAL_BATCH, notes)
    if recipe.get("loss") is None and recipe.get("teacher") is None:
        raise RecipeError(
            "to train a model one must know its loss",
            hint='for example `loss="cross_entropy"` (`--loss cross_entropy`)',
        )
    model, size, notes = _for_batches(original, batch_size)
    preprocess, opened = with_vocabularies(open_preprocessing(recipe.get("preprocess")), model, data, columns)
    recipe = {"loss": None, "seed": seed, **recipe, "preprocess": preprocess}
    training = prepare(model, **recipe)
    notes = [*notes, *exporter_remarks(training, verdicts(training)), *notes_on_moves(training.step())]
    begun = start_over if recipe.get("init", "file") != "file" else lambda prepared: prepared
    if preprocess is None or isinstance(preprocess, Model):
        return Prepared(begun(training), size, notes, preprocess=preprocess)
    inputs = {value.name or "": value for value in (*training.inputs, *training.step().algorithm.inputs)}
    given, texts = in_kinds(pipelines(model, preprocess))
    if not given:
        return Prepared(begun(training), size, notes, opened, preprocess)
    singles = {name: one for name, one in given.items() if one.raw is None or one.raw.dtype is ir.DataType.FLOAT}
    source = open_data(data, images=format_for(inputs, singles), window=window)
    check_masks(given, model, inputs, source.columns, columns)
    told = with_data(given, inputs, source.columns, columns)
    of_text = {name: pipeline.all_specs for name, pipeline in texts.items()}
    preprocess = {name: pipeline.all_specs for name, pipeline in told.items()} | of_text
    kept = {name: as_bytes(pipeline).all_specs for name, pipeline in told.items()} | of_text
    training = prepare(model, **{**recipe, "preprocess": preprocess})
    return Prepared(begun(training), size, notes, source, kept)


def with_head_of(recipe: Mapping[str, Any], original: Model, seed: int) -> Model:
    """The model that was given, with the head that a recipe gives it: what is trained is not what was given then."""
    if "new_head" not in recipe:
        return original
    head = arguments(replace_head, recipe["new_head"], "new_head")
    return replace_head(original, **{"seed": seed, **head})


def _for_batches(model: Model, wanted: int | None) -> tuple[Model, int, list[str]]:
    """The model in a form that takes batches as large as wanted, that size, and what the user should know."""
    size = fixed_batch(model)
    if size is None or size == wanted or (size > 1 and wanted is None):
        return model, wanted or size or USUAL_BATCH, []
    try:
        freed = rebatch(model)
    except UnsupportedError as error:
        if wanted is not None:
            raise
        return model, size, [f"{error.message}; so it is trained with those"]
    note = f"the model is for batches of {size}; for training it was made to take any size"
    return freed, wanted or USUAL_BATCH, [note]
