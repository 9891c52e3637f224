"""Vocabularies that are made of data: their most frequent words, split as the pipeline itself splits them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.build import Builder
from onward.errors import DataError, RecipeError
from onward.model import Model
from onward.recipe.preprocessing import Pipeline, pipelines
from onward.recipe.preprocessing.pipeline import TEXT_INPUT
from onward.recipe.preprocessing.text import Vocabulary, tokenize, words_of
from onward.recipe.spec import Spec, options_of
from onward.runtime.sessions import open_session
from onward.standard import COMMON_OPSET, IR_VERSION
from onward.training.data import Dataset, Stream, match, open_data

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
