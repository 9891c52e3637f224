"""Preparation of a run: the training model of a model, a recipe and data."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.build import Builder
from onward.engines.initialization import start_over
from onward.errors import DataError, RecipeError, UnsupportedError
from onward.inspect.parameters import exporter_remarks, verdicts
from onward.inspect.summary import port
from onward.model import Model
from onward.model.state import states
from onward.recipe.head import replace_head
from onward.recipe.interface import batch_axes, with_samples_first
from onward.recipe.losses import LOSSES
from onward.recipe.losses.definitions import LENGTHS
from onward.recipe.metrics import Labels, labels_of, objectives
from onward.recipe.objective import with_option
from onward.recipe.prepare import prepare
from onward.recipe.preprocessing.augment import notes_on_moves, shared_axes
from onward.recipe.preprocessing.join import open_preprocessing
from onward.recipe.preprocessing.pipeline import TEXT_INPUT, Pipeline, Raw, form_of, pipelines
from onward.recipe.preprocessing.text import Vocabulary, tokenize, words_of
from onward.recipe.spec import Spec, arguments, options_of, parse
from onward.recipe.training_mode import is_switchable
from onward.run_state.reading import read_terms
from onward.runtime.sessions import open_session
from onward.standard import COMMON_OPSET, IR_VERSION
from onward.training.data import Binding, Column, Dataset, Stream, format_for, match, open_data, with_classes
from onward.training.data.objects import Samples
from onward.transform.declare import USUAL_BATCH, fixed_batch, rebatch


@dataclasses.dataclass(frozen=True)
class PreparedRun:
    """A training model with its batch size, notes, data and preprocessing."""

    model: Model
    batch_size: int
    notes: list[str] = dataclasses.field(default_factory=list)
    """Notes for the user."""
    data: Dataset | Stream | None = None
    """The data, if they had to be opened."""
    preprocess: Any = None


def prepare_training(
    original: Model,
    data: Any,
    columns: Mapping[str, str | Sequence[str]],
    batch_size: int | None,
    recipe: Mapping[str, Any],
    seed: int,
    window: int | None = None,
) -> PreparedRun:
    """Return the training model of a model, a recipe and data; preprocessing depends on the data.

    Initial values of the recipe are applied.
    """
    for value in original.inputs:
        if isinstance(value.type, ir.SequenceType | ir.OptionalType):
            raise UnsupportedError(
                f"input `{value.name}` is a {port(value).type}, which data cannot be",
                hint="cut the model after it: `onward extract MODEL --from TENSOR -o cut.onnx`",
            )
    if original.is_training_model:
        if recipe:
            raise RecipeError(
                f"the model is already a training model, so `{next(iter(recipe))}` has no effect",
                hint="leave it out, or strip the model first (`onward strip`, `onward.transform.strip`)",
            )
        notes = [note for step in original.steps for note in notes_on_moves(step)]
        return PreparedRun(original.copy(), batch_size or fixed_batch(original) or USUAL_BATCH, notes)
    if recipe.get("loss") is None and recipe.get("teacher") is None:
        raise RecipeError(
            "missing `loss`: the model is not a training model",
            hint='for example `loss="cross_entropy"` (`--loss cross_entropy`)',
        )
    axes, symbols = batch_axes(original, recipe.get("batch_axis") or {}, recipe.get("constants") or {})
    recipe = {**recipe, "batch_axis": axes}
    original = with_samples_first(original, axes, recipe.get("constants") or {})
    model, size, notes, refusal = _for_batches(original, batch_size)
    notes = [*(f"samples of `{name}` are along axis {axes[name]}, named `{symbols[name]}`" for name in symbols), *notes]
    preprocess, opened = with_vocabularies(open_preprocessing(recipe.get("preprocess")), model, data, columns)
    recipe = {"loss": None, "seed": seed, **recipe, "preprocess": preprocess}
    if fixed := _small_batches(model, data, size, recipe):
        recipe["batch_norm"] = "frozen"
        notes = [*notes, fixed]
    training = prepare(model, **recipe)
    changed: dict[str, Any] = {}
    if any(term.name == "ctc" and "lengths" not in term.options for term in read_terms(training.step())):
        opened = open_data(data, window=window) if opened is None else opened
        if lengths := _lengths_in(opened, training, columns):
            changed["loss"] = with_option(recipe["loss"], "ctc", "lengths", lengths)
            notes = [*notes, _NOTES_ON_LENGTHS[lengths]]
    if refusal is not None and "accumulate" not in recipe:
        if (reason := _not_a_mean(training)) is not None and batch_size is not None:
            raise UnsupportedError(f"{refusal.message}; {reason}", hint=refusal.hint)
        opened = open_data(data, window=window) if opened is None and reason is None else opened
        rows = len(opened) if isinstance(opened, Dataset) else batch_size or USUAL_BATCH
        count = min(batch_size or USUAL_BATCH, rows) // size if reason is None else 1
        if count > 1:
            changed["accumulate"] = count
            how = f"each update accumulates {count} batches of {size}, with the gradient of a batch of {count * size}"
        else:
            how = "training with that batch size" + (f", since {reason}" if reason else "")
        notes = [*notes, f"{refusal.message}; {how}"]
    elif refusal is not None:
        if batch_size is not None:
            raise refusal
        notes = [*notes, f"{refusal.message}; training with that batch size"]
    if changed:
        recipe |= changed
        with warnings.catch_warnings(action="ignore"):  # the first call has warned
            training = prepare(model, **recipe)
    notes = [*notes, *exporter_remarks(training, verdicts(training)), *notes_on_moves(training.step())]
    initialize = start_over if recipe.get("init", "file") != "file" else lambda prepared: prepared
    if preprocess is None or isinstance(preprocess, Model):
        return PreparedRun(initialize(training), size, notes, preprocess=preprocess)
    inputs = {value.name or "": value for value in (*training.inputs, *training.step().algorithm.inputs)}
    by_input = pipelines(model, preprocess)
    if all(pipeline.is_text for pipeline in by_input.values()):
        return PreparedRun(initialize(training), size, notes, opened, preprocess)
    source, resolved = open_images(by_input, model, inputs, data, columns, window=window)
    text_specs = {name: pipeline.all_specs for name, pipeline in by_input.items() if pipeline.is_text}
    preprocess = {name: pipeline.all_specs for name, pipeline in resolved.items()} | text_specs
    for_raw_data = {name: as_bytes(pipeline).all_specs for name, pipeline in resolved.items()} | text_specs
    training = prepare(model, **{**recipe, "preprocess": preprocess})
    return PreparedRun(initialize(training), size, notes, source, for_raw_data)


def open_images(
    by_input: Mapping[str, Pipeline],
    model: Model,
    inputs: Mapping[str, ir.Value],
    data: Any,
    columns: Mapping[str, str | Sequence[str]],
    **options: Any,
) -> tuple[Dataset | Stream, dict[str, Pipeline]]:
    """Open the data of image pipelines; return these with the type and shape of the data.

    `inputs` are those of the model with its preprocessing, and targets. `options` are for `open_data`.
    """
    images = {name: pipeline for name, pipeline in by_input.items() if not pipeline.is_text}
    singles = {name: p for name, p in images.items() if p.raw is None or p.raw.dtype is ir.DataType.FLOAT}
    source = open_data(data, images=format_for(inputs, singles), **options)
    check_masks(images, model, inputs, source.columns, columns)
    return source, with_data(images, inputs, source.columns, columns)


def with_head_of(recipe: Mapping[str, Any], original: Model, seed: int) -> Model:
    """Return the original model with the head of the recipe: trained weights need its shape."""
    if "new_head" not in recipe:
        return original
    head = arguments(replace_head, recipe["new_head"], "new_head")
    return replace_head(original, **{"seed": seed, **head})


_NOTES_ON_LENGTHS = {
    "neither": "the data have no lengths: inputs have their full width, labels end before padding (blank or negative)",
    "input": "the data have no `target_lengths`: labels end before their padding (blank or negative)",
    "target": "the data have no `input_lengths`: inputs have their full width",
}


def _lengths_in(data: Dataset | Stream, training: Model, columns: Mapping[str, str | Sequence[str]]) -> str | None:
    """Return the option `lengths` of a CTC loss for data without some of its lengths; None if they have all."""
    inputs = {value.name or "": value for value in (*training.inputs, *training.step().algorithm.inputs)}
    lengths = [name for names in LENGTHS.values() for name in names]
    missing = {
        kind for kind in lengths for name in inputs if name.endswith(kind) and name not in {*data.columns, *columns}
    }
    if missing:
        with contextlib.suppress(DataError):
            match(data.columns, inputs, columns)
            return None
    return {0: None, 1: "target" if "input_lengths" in missing else "input", 2: "neither"}[len(missing)]


def _for_batches(model: Model, batch_size: int | None) -> tuple[Model, int, list[str], UnsupportedError | None]:
    """Return the model for batches of a size, that size, notes, and why it takes no more samples, if so."""
    size = fixed_batch(model)
    if size is None or size == batch_size or (size > 1 and batch_size is None):
        return model, batch_size or size or USUAL_BATCH, [], None
    try:
        freed = rebatch(model)
    except UnsupportedError as error:
        if batch_size is not None and batch_size % size:
            raise
        return model, size, [], error
    note = f"the batch size of the model is fixed to {size}; made it dynamic for training"
    return freed, batch_size or USUAL_BATCH, [note], None


def _not_a_mean(training: Model) -> str | None:
    """Return why the gradient of a batch may not be the mean of those of its parts; None if it is."""
    step = training.step()
    if any(state.role == "statistics" for state in states(training)):
        return "statistics are those of a batch"
    labels = labels_of(training)
    if step.fact("train.distill") is not None or (labels is not None and labels.ignored is not None):
        return "the loss is not a mean over samples"
    recipe = step.fact("train.recipe")
    weight = recipe.get("sample_weight") if isinstance(recipe, dict) else None
    if weight is not None and parse(weight).options.get("by", "count") != "count":
        return "the loss is divided by the sum of weights"
    for objective in objectives(training):
        options = {**(LOSSES[objective.name].options if objective.name in LOSSES else {}), **objective.options}
        is_divided = objective.by_number and options.get("weight") is not None
        if options.get("reduction") not in ("mean", "batchmean") or is_divided:
            return f"the loss `{objective.name}` is not a mean over samples"
    return None


_ROUGH = 16
"""Smallest batch whose statistics replace those of a pretrained BatchNormalization by default."""


def _small_batches(model: Model, data: Any, size: int, recipe: Mapping[str, Any]) -> str | None:
    """Return a note if BatchNormalization keeps the statistics of the file, since those of a batch are too rough."""
    if recipe.get("batch_norm") is not None or recipe.get("init", "file") != "file":
        return None
    if not any(node.op_type == "BatchNormalization" and is_switchable(node, ()) for node in model.graph):
        return None
    if isinstance(data, Mapping):
        columns = [column for column in data.values() if hasattr(column, "__len__") and hasattr(column, "__getitem__")]
        size = min([size, *(len(column) for column in columns if getattr(column, "shape", None) != ())])
    if size >= _ROUGH:
        return None
    return (
        f"batches of {size}: BatchNormalization keeps its statistics; to use those of each batch, write "
        '`batch_norm="batch"` (`--batch-norm batch`)'
    )


_ROWS = 1024  # whose words are counted together


def with_vocabularies(
    preprocess: Any, model: Model, data: Any, columns: Mapping[str, str | Sequence[str]]
) -> tuple[Any, Dataset | Stream | None]:
    """Return preprocessing with vocabularies counted from the data, and the data if opened."""
    if preprocess is None or isinstance(preprocess, Model):
        return preprocess, None
    by_input = pipelines(model, preprocess)
    if not any(is_open(pipeline) for pipeline in by_input.values()):
        return preprocess, None
    opened = open_data(data)
    return {name: with_vocabulary(p, opened, columns).all_specs for name, p in by_input.items()}, opened


def is_open(pipeline: Pipeline) -> bool:
    """True if the vocabulary of a text pipeline is only a number of words."""
    return pipeline.is_text and isinstance(pipeline.specs[0].options.get("vocabulary"), int)


def with_vocabulary(pipeline: Pipeline, data: Dataset | Stream, columns: Mapping[str, str | Sequence[str]]) -> Pipeline:
    """Return the pipeline; an open vocabulary becomes the most frequent words of the data."""
    if not is_open(pipeline):
        return pipeline
    usual, _ = options_of(tokenize)
    options = {**usual, **pipeline.specs[0].options}
    if options["by"] != "words":
        raise RecipeError(
            f"cannot count a vocabulary for `{options['by']}`", hint="pass a file: `vocabulary=vocab.txt`"
        )
    edges = [pipeline.specs[0].options.get(name) for name in ("begin", "end")]
    special = list(dict.fromkeys(token for token in (options["pad"], options["unknown"], *edges) if token))
    counts: Counter[str] = Counter()
    for words in _words(data, columns, options):
        counts.update(words)
    vocabulary = Vocabulary.counted(counts, options["vocabulary"], special)
    spec = Spec(pipeline.specs[0].name, {**pipeline.specs[0].options, "vocabulary": vocabulary})
    return dataclasses.replace(pipeline, specs=(spec,))


def _words(
    data: Dataset | Stream, columns: Mapping[str, str | Sequence[str]], options: Mapping[str, Any]
) -> Iterator[Sequence[str]]:
    if isinstance(data, Stream):
        raise DataError("cannot count the words of a stream", hint="pass a vocabulary: `vocabulary=vocab.txt`")
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
"""Most rows that are stratified by default: with more, a random split has the same shares."""


def check_classes(classes: tuple[str, ...] | None, labels: Labels) -> None:
    """Refuse data with more classes than the model."""
    if classes is not None and len(classes) > labels.count:
        raise DataError(
            f"the data have {len(classes)} classes, but the model has {labels.count}",
            hint=f'replace the last layer: `new_head="classes={len(classes)}"` (`--new-head classes={len(classes)}`)',
        )


def too_few_classes(data: Dataset | Stream, matched: Mapping[str, Binding], labels: Labels | None) -> str | None:
    """Return a note if the model has more classes than the data: its head was made for other data."""
    if labels is None:
        return None
    names = matched[labels.name].classes
    if names is not None:
        count, enough = len(names), labels.count
    elif (numbers := _numbers(data, matched[labels.name])) is not None:
        count, enough = int(numbers.max(initial=-1)) + 1, labels.count // 2 + 1  # a few classes may lack samples
    else:
        return None
    if not 0 < count < enough:
        return None
    return (
        f"the model has {labels.count} classes, but the data have {count}; to replace the last layer: "
        f'`new_head="classes={count}"` (`--new-head classes={count}`)'
    )


def in_classes(
    data: Dataset | Stream, binding: Binding, classes: tuple[str, ...] | None, origin: str
) -> Dataset | Stream:
    """Return data whose class numbers are those of `origin`."""
    theirs = data.columns[binding.columns[0]].classes
    if isinstance(data, Stream) or theirs == classes:
        return data
    if classes is None:
        raise DataError(
            f"column `{binding.columns[0]}` has class names, but numbers in {origin}",
            hint="write classes the same way in both",
        )
    return with_classes(data, binding.columns[0], classes, origin)


def strata_of(
    data: Dataset | Stream, matched: Mapping[str, Binding], labels: Labels | None, stratify: bool | None
) -> np.ndarray | None:
    """Return the class of each row for a stratified split, or None for a random split.

    By default, a split is stratified if labels are classes that can be read without the samples.
    """
    if stratify is False or isinstance(data, Stream):
        return None
    binding = matched[labels.name] if labels is not None else None
    if binding is None or not _is_class_each(data, binding):
        if stratify:
            raise UnsupportedError(
                "`stratify` needs one class per row, which this loss does not have", hint="leave `stratify` out"
            )
        return None
    return _numbers(data, binding, at_any_cost=stratify is True)


def _is_class_each(data: Dataset, binding: Binding) -> bool:
    return all(not data.columns[name].shape for name in binding.columns)


def _numbers(data: Dataset | Stream, binding: Binding, at_any_cost: bool = False) -> np.ndarray | None:
    """Return the class of each row if it is cheap to read, or at any cost."""
    if isinstance(data, Stream) or not _is_class_each(data, binding):
        return None
    if not at_any_cost and (isinstance(data, Samples) or len(data) > _FEW):
        return None
    return binding(data.take(np.arange(len(data)), list(binding.columns))).reshape(len(data))


# ---- raw inputs ------------------------------------------------------------------------------------------------------


def with_data(
    images: Mapping[str, Pipeline],
    inputs: Mapping[str, ir.Value],
    columns: Mapping[str, Column],
    mapping: Mapping[str, str | Sequence[str]],
) -> dict[str, Pipeline]:
    """Return the operations for each input, with the type and shape of the data.

    `inputs` are those of the training model without raw data.
    """
    candidates = {name: _shapes(inputs[name]) for name, pipeline in images.items() if pipeline.raw is None}
    first_problem: DataError | None = None
    for shapes in itertools.product(*candidates.values()):
        float_inputs = dict(inputs)
        for name, dims in zip(candidates, shapes, strict=True):
            shape = ir.Shape([None, *dims])
            float_inputs[name] = ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=shape)
        try:
            bindings = match(columns, float_inputs, mapping)
        except DataError as problem:
            first_problem = first_problem or problem
            continue
        resolved = {
            name: dataclasses.replace(images[name], raw=_raw(bindings[name], columns, dims))
            for name, dims in zip(candidates, shapes, strict=True)
        }
        return {**images, **resolved}
    assert first_problem is not None
    hint = f"{first_problem.hint}; or begin preprocessing with `channels_first`, `to_rgb` or `resize`"
    raise DataError(first_problem.message, hint=hint)


def check_masks(
    pipelines_by_input: Mapping[str, Pipeline],
    model: Model,
    inputs: Mapping[str, ir.Value],
    columns: Mapping[str, Column],
    mapping: Mapping[str, str | Sequence[str]],
) -> None:
    """Refuse masks that do not have the size of the preprocessed images."""
    images = {value.name or "": value for value in model.inputs}
    others = {name: value for name, value in inputs.items() if name not in pipelines_by_input}
    for (image, pipeline), (name, value) in itertools.product(pipelines_by_input.items(), others.items()):
        axes = shared_axes(value, images[image]) if pipeline.size is not None else None
        column = columns.get(str(mapping.get(name, name)))
        if axes is None or column is None or pipeline.size is None or len(column.shape) != len(value.shape or ()) - 1:
            continue
        size = tuple(column.shape[axis - 1] for axis in axes)
        if size != pipeline.size:
            mask_size, image_size = (" x ".join(map(str, sizes)) for sizes in (size, pipeline.size))
            raise DataError(
                f"`{name}` is {mask_size}, but preprocessing makes the images of `{image}` {image_size}",
                hint=f"resize the masks in the data to {image_size}, by nearest neighbor",
            )


def _shapes(value: ir.Value) -> list[tuple[int | None, ...]]:
    """Return the possible shapes of a sample: grayscale images may lack the channel axis."""
    form = form_of(value)
    gray = [dim for axis, dim in enumerate(form.dims) if axis != form.channels]
    is_grey = form.is_picture and form.dims[form.channels] in (None, 1)
    return [form.dims, *([tuple(gray)] if is_grey else [])]


def _raw(binding: Binding, columns: Mapping[str, Column], dims: Sequence[int | None]) -> Raw:
    sources = [columns[name] for name in binding.columns]
    are_bytes = all(column.dtype == np.uint8 for column in sources)
    return Raw(ir.DataType.UINT8 if are_bytes else ir.DataType.FLOAT, tuple(dims), sources[0].limit)


def single_pictures(training: Model) -> dict[str, Pipeline]:
    """Return the image operations of a training model; the first ones may run on each image alone."""
    inputs = {value.name or "": value for value in training.inputs}
    recipe = training.step().fact("train.recipe")
    specs_by_input = recipe.get("preprocess") if isinstance(recipe, dict) else None
    if not isinstance(specs_by_input, dict) or not all(isinstance(specs, list) for specs in specs_by_input.values()):
        return {}
    floats = [name for name in specs_by_input if name in inputs and inputs[name].dtype is ir.DataType.FLOAT]
    return {name: Pipeline.of(specs_by_input[name]) for name in floats}


def as_bytes(pipeline: Pipeline) -> Pipeline:
    """Return the operations for image files of any size."""
    if pipeline.raw is None or pipeline.raw.limit is None:
        return pipeline
    return dataclasses.replace(pipeline, raw=Raw(ir.DataType.UINT8, pipeline.raw.dims))
