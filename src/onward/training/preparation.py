"""What is trained: a training model, made of the model that was given where it is none yet."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.build import Builder
from onward.engines.initialization import start_over
from onward.errors import DataError, RecipeError, UnsupportedError
from onward.inspect.parameters import exporter_remarks, verdicts
from onward.model import Model
from onward.recipe import prepare, replace_head
from onward.recipe.metrics import Labels
from onward.recipe.preprocessing import Pipeline, Raw, notes_on_moves, open_preprocessing, pipelines, shared_axes
from onward.recipe.preprocessing.pipeline import TEXT_INPUT, form_of
from onward.recipe.preprocessing.text import Vocabulary, tokenize, words_of
from onward.recipe.spec import Spec, arguments, options_of
from onward.runtime.sessions import open_session
from onward.standard import COMMON_OPSET, IR_VERSION
from onward.training.data import Binding, Column, Dataset, Stream, format_for, match, open_data, with_classes
from onward.training.data.objects import Samples
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


_ROWS = 1024  # that are looked at together


def in_kinds(given: Mapping[str, Pipeline]) -> tuple[dict[str, Pipeline], dict[str, Pipeline]]:
    """Pipelines for pictures, and those for text."""
    pictures = {name: pipeline for name, pipeline in given.items() if not pipeline.is_text}
    return pictures, {name: pipeline for name, pipeline in given.items() if pipeline.is_text}


def with_vocabularies(
    preprocess: Any, model: Model, data: Any, columns: Mapping[str, str | Sequence[str]]
) -> tuple[Any, Dataset | Stream | None]:
    """Preprocessing in which no vocabulary is only a number of words, and the data, if they were needed for it."""
    if preprocess is None or isinstance(preprocess, Model):
        return preprocess, None
    given = pipelines(model, preprocess)
    if not any(is_open(pipeline) for pipeline in given.values()):
        return preprocess, None
    opened = open_data(data)
    return {name: with_vocabulary(one, opened, columns).all_specs for name, one in given.items()}, opened


def is_open(pipeline: Pipeline) -> bool:
    return pipeline.is_text and isinstance(pipeline.specs[0].options.get("vocabulary"), int)


def with_vocabulary(pipeline: Pipeline, data: Dataset | Stream, columns: Mapping[str, str | Sequence[str]]) -> Pipeline:
    """The same with the most frequent words of the data, where it has only a number of them."""
    if not is_open(pipeline):
        return pipeline
    usual, _ = options_of(tokenize)
    options = {**usual, **pipeline.specs[0].options}
    if options["by"] != "words":
        raise RecipeError(
            f"a vocabulary for `{options['by']}` is not made by counting", hint="give a file: `vocabulary=vocab.txt`"
        )
    edges = [pipeline.specs[0].options.get(name) for name in ("begin", "end")]
    special = list(dict.fromkeys(token for token in (options["pad"], options["unknown"], *edges) if token))
    counts: Counter[str] = Counter()
    for words in _words(data, columns, options):
        counts.update(words)
    found = Vocabulary.counted(counts, options["vocabulary"], special)
    spec = Spec(pipeline.specs[0].name, {**pipeline.specs[0].options, "vocabulary": found})
    return dataclasses.replace(pipeline, specs=(spec,))


def _words(
    data: Dataset | Stream, columns: Mapping[str, str | Sequence[str]], options: Mapping[str, Any]
) -> Iterator[Sequence[str]]:
    if isinstance(data, Stream):
        raise DataError("the words of a stream are not counted", hint="give a vocabulary: `vocabulary=vocab.txt`")
    raw = ir.Value(name=TEXT_INPUT, type=ir.TensorType(ir.DataType.STRING), shape=ir.Shape(["N"]))
    binding = match(
        data.columns, {TEXT_INPUT: raw}, {TEXT_INPUT: columns[TEXT_INPUT]} if TEXT_INPUT in columns else {}
    )[TEXT_INPUT]
    graph = ir.Graph([raw], [], nodes=[], name="words", opset_imports={"": COMMON_OPSET})
    op = Builder(graph, opset=COMMON_OPSET)
    words, _ = words_of(op(raw), *(options[name] for name in ("lowercase", "punctuation", "locale")))
    graph.outputs.append(words.value)
    session = open_session(Model(ir.Model(graph, ir_version=IR_VERSION)))
    for start in range(0, len(data), _ROWS):
        rows = data.take(np.arange(start, min(start + _ROWS, len(data))), list(binding.columns))
        yield [word for word in session.run(None, {TEXT_INPUT: binding(rows)})[0].ravel() if word]


# ---- labels ----------------------------------------------------------------------------------------------------------


_FEW = 1_000_000
"""Rows that are split with the same share of every class by themselves; of more, chance does not make a difference."""


def check_classes(classes: tuple[str, ...] | None, labels: Labels) -> None:
    """Refuse data with more classes than the model knows."""
    if classes is not None and len(classes) > labels.count:
        raise DataError(
            f"the data have {len(classes)} classes, and the model tells {labels.count} apart",
            hint=f'give it a new last layer: `new_head="classes={len(classes)}"` (`--new-head classes={len(classes)}`)',
        )


def too_few_classes(data: Dataset | Stream, matched: Mapping[str, Binding], labels: Labels | None) -> str | None:
    """What to say where the model tells more classes apart than the data have: its head was made for something else."""
    if labels is None:
        return None
    names = matched[labels.name].classes
    if names is not None:
        count, enough = len(names), labels.count
    elif (numbers := _numbers(data, matched[labels.name])) is not None:
        count, enough = int(numbers.max(initial=-1)) + 1, labels.count // 2 + 1  # some may be missing by chance
    else:
        return None
    if not 0 < count < enough:
        return None
    return (
        f"the model tells {labels.count} classes apart, and the data have {count}: a last layer for these is "
        f'`new_head="classes={count}"` (`--new-head classes={count}`)'
    )


def in_classes(
    data: Dataset | Stream, binding: Binding, classes: tuple[str, ...] | None, origin: str
) -> Dataset | Stream:
    """Data whose labels have the numbers that they have in `origin`."""
    theirs = data.columns[binding.columns[0]].classes
    if isinstance(data, Stream) or theirs == classes:
        return data
    if classes is None:
        raise DataError(
            f"column `{binding.columns[0]}` has names of classes, but numbers in {origin}",
            hint="write classes in the same way in both",
        )
    return with_classes(data, binding.columns[0], classes, origin)


def strata_of(
    data: Dataset | Stream, matched: Mapping[str, Binding], labels: Labels | None, wanted: bool | None
) -> np.ndarray | None:
    """The class of each row, if every class is to have its share; None for a split at random.

    Unless it is said, that is so where labels are classes, and can be read without the samples they belong to.
    """
    if wanted is False or isinstance(data, Stream):
        return None
    binding = matched[labels.name] if labels is not None else None
    if binding is None or not _is_class_each(data, binding):
        if wanted:
            raise UnsupportedError(
                "a split with the same share of every class needs a class for each row, which the loss has not",
                hint="leave `stratify` out",
            )
        return None
    return _numbers(data, binding, at_any_cost=wanted is True)


def _is_class_each(data: Dataset, binding: Binding) -> bool:
    return all(not data.columns[name].shape for name in binding.columns)


def _numbers(data: Dataset | Stream, binding: Binding, at_any_cost: bool = False) -> np.ndarray | None:
    """The class of each row, if that is to be had without much ado."""
    if isinstance(data, Stream) or not _is_class_each(data, binding):
        return None
    if not at_any_cost and (isinstance(data, Samples) or len(data) > _FEW):
        return None
    return binding(data.take(np.arange(len(data)), list(binding.columns))).reshape(len(data))


# ---- raw inputs ------------------------------------------------------------------------------------------------------


def with_data(
    given: Mapping[str, Pipeline],
    inputs: Mapping[str, ir.Value],
    columns: Mapping[str, Column],
    mapping: Mapping[str, str | Sequence[str]],
) -> dict[str, Pipeline]:
    """The operations for each input, with what the data are. `inputs` are those of the training model without that."""
    open_ones = {name: _shapes(inputs[name]) for name, pipeline in given.items() if pipeline.raw is None}
    first_problem: DataError | None = None
    for shapes in itertools.product(*open_ones.values()):
        wanted = {**inputs, **{name: _number(name, dims) for name, dims in zip(open_ones, shapes, strict=True)}}
        try:
            way = match(columns, wanted, mapping)
        except DataError as problem:
            first_problem = first_problem or problem
            continue
        found = {
            name: dataclasses.replace(given[name], raw=_raw(way[name], columns, dims))
            for name, dims in zip(open_ones, shapes, strict=True)
        }
        return {**given, **found}
    assert first_problem is not None
    hint = f"{first_problem.hint}; or let preprocessing begin with `channels_first`, `to_rgb` or `resize`"
    raise DataError(first_problem.message, hint=hint)


def check_masks(
    given: Mapping[str, Pipeline],
    model: Model,
    inputs: Mapping[str, ir.Value],
    columns: Mapping[str, Column],
    mapping: Mapping[str, str | Sequence[str]],
) -> None:
    """Refuse masks that do not have the size that preprocessing gives the images of `model`."""
    images = {value.name or "": value for value in model.inputs}
    others = {name: value for name, value in inputs.items() if name not in given}
    for (image, pipeline), (name, value) in itertools.product(given.items(), others.items()):
        axes = shared_axes(value, images[image]) if pipeline.size is not None else None
        column = columns.get(str(mapping.get(name, name)))
        if axes is None or column is None or pipeline.size is None or len(column.shape) != len(value.shape or ()) - 1:
            continue
        size = tuple(column.shape[axis - 1] for axis in axes)
        if size != pipeline.size:
            found, wanted = (" x ".join(map(str, each)) for each in (size, pipeline.size))
            raise DataError(
                f"`{name}` is {found}, and preprocessing makes the images of `{image}` {wanted}",
                hint=f"it resizes images only: resize the masks in the data to {wanted}, by nearest neighbor",
            )


def _shapes(value: ir.Value) -> list[tuple[int | None, ...]]:
    """The shapes that a sample may have: grey pictures may be without an axis for their only channel."""
    form = form_of(value)
    grey = [dim for axis, dim in enumerate(form.dims) if axis != form.channels]
    is_grey = form.is_picture and form.dims[form.channels] in (None, 1)
    return [form.dims, *([tuple(grey)] if is_grey else [])]


def _number(name: str, dims: Sequence[int | None]) -> ir.Value:
    """An input that takes any number."""
    return ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([None, *dims]))


def _raw(binding: Binding, columns: Mapping[str, Column], dims: Sequence[int | None]) -> Raw:
    found = [columns[name] for name in binding.columns]
    are_bytes = all(column.dtype == np.uint8 for column in found)
    return Raw(ir.DataType.UINT8 if are_bytes else ir.DataType.FLOAT, tuple(dims), found[0].limit)


def single_pictures(training: Model) -> dict[str, Pipeline]:
    """The operations of a training model that take numbers, so that the first may be done with each picture alone."""
    inputs = {value.name or "": value for value in training.inputs}
    recipe = training.step().fact("train.recipe")
    given = recipe.get("preprocess") if isinstance(recipe, dict) else None
    if not isinstance(given, dict) or not all(isinstance(operations, list) for operations in given.values()):
        return {}
    floats = [name for name in given if name in inputs and inputs[name].dtype is ir.DataType.FLOAT]
    return {name: Pipeline.of(given[name]) for name in floats}


def as_bytes(pipeline: Pipeline) -> Pipeline:
    """The same for pictures as they are in files, of any size."""
    if pipeline.raw is None or pipeline.raw.limit is None:
        return pipeline
    return dataclasses.replace(pipeline, raw=Raw(ir.DataType.UINT8, pipeline.raw.dims))
