"""Text as token indices: `tokenize`, built from the standard's string operators.

The standard can split, concatenate, match and look up strings, but has no characters. So characters
are replaced by splitting and joining, and found by patterns: see word_pieces.py. Whitespace is
Unicode's; punctuation is `PUNCTUATION`.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from onward.build import Builder, Expr
from onward.errors import DataError, RecipeError, suggest
from onward.recipe.preprocessing.word_pieces import Pieces, loop_inputs, split_words

WHITESPACE = (
    "\t\n\x0b\x0c\r\x85\u00a0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"
)
"""Whitespace characters of Unicode, except the space."""
PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~¡§«¶·»¿‐‑‒–—―‘’‚“”„†‡•…‰‹›"
"""Characters that `punctuation` makes tokens: those of ASCII and common others."""
TEXT_OPSET = 20
"""The first operator set with StringSplit, StringConcat and RegexFullMatch."""

Kind = Literal["words", "wordpiece", "bytes"]


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Token indices of a batch of texts, [N, length], and a mask: 0 for padding, else 1."""

    ids: Expr
    mask: Expr


def tokenize(
    text: Expr,
    by: Kind = "words",
    vocabulary: Any = None,
    length: int | None = None,
    lowercase: bool = False,
    punctuation: bool = False,
    unknown: str = "[UNK]",
    pad: str = "[PAD]",
    begin: str | None = "[CLS]",
    end: str | None = "[SEP]",
    longest: int = 100,
    offset: int = 0,
    locale: str = "C.UTF-8",
) -> Tokens:
    """Convert text to indices `by` `words`, `wordpiece`s or `bytes`, padded to a `length`."""
    for name, value in (("lowercase", lowercase), ("punctuation", punctuation)):
        if not isinstance(value, bool):
            raise RecipeError(f"`{name}` of `tokenize` is `{value}`", hint=f"write `{name}=true`, or leave it out")
    if by == "bytes":
        if vocabulary is not None or lowercase or punctuation:
            message = "`tokenize:bytes` takes no `vocabulary`, `lowercase` or `punctuation`"
            raise RecipeError(message, hint="leave them out, or write `tokenize:words`")
        return _bytes(text, length, offset, (pad, begin, end))
    if offset != 0:
        raise RecipeError(f"`offset` is for `tokenize:bytes`, not `tokenize:{by}`", hint="leave `offset` out")
    splitters = {"words": Pieces.whole, "wordpiece": lambda *args: split_words(*args, longest=longest)}
    if by not in splitters:
        raise RecipeError(
            f"`tokenize` has no `by={by}`",
            hint="choose `words`, `wordpiece` or `bytes`; for others, such as byte pairs, pass token indices as data",
        )
    length = checked_length(length)
    tokens = Vocabulary.of(vocabulary)
    edges = [tokens.number(token, optional=token in ("[CLS]", "[SEP]")) for token in (begin, end)]
    if length < sum(edge is not None for edge in edges):
        raise RecipeError(f"a length of {length} has no room for `{begin}` and `{end}`")
    words, counts = words_of(text, lowercase, punctuation, locale)
    is_word = _columns(words) < text.op.Unsqueeze(counts, [1])
    unknown_index, pad_index = (tokens.number(token) for token in (unknown, pad))
    if unknown_index is None or pad_index is None:
        raise RecipeError(
            "`tokenize` needs tokens for unknown words and padding", hint="write `unknown=[UNK],pad=[PAD]`"
        )
    return _packed(splitters[by](words, is_word, tokens.numbers, unknown_index), length, pad_index, *edges)


_USUAL = ("[PAD]", "[CLS]", "[SEP]")


def checked_length(length: Any) -> int:
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise RecipeError(f"`length` of `tokenize` is `{length}`, but must be an integer", hint="write `length=128`")
    return length


def _bytes(text: Expr, length: Any, offset: int, tokens: tuple[Any, Any, Any]) -> Tokens:
    """Return the UTF-8 bytes of texts. 0 occurs only behind the end; special tokens are numbers."""
    if strange := [token for token in tokens if not isinstance(token, int) and token not in (None, *_USUAL)]:
        raise RecipeError(f"`{strange[0]}` is not a number, as tokens of `tokenize:bytes` are", hint="write `end=1`")
    pad, begin, end = (token if isinstance(token, int) else None for token in tokens)
    whole = text.op.Cast(text, to=ir.DataType.INT64)
    pieces = Pieces(whole + offset, text.op.Greater(whole, np.int64(0)))
    return _packed(pieces, checked_length(length), pad or 0, begin, end)


def words_of(text: Expr, lowercase: bool, punctuation: bool, locale: str) -> tuple[Expr, Expr]:
    """Return the words of texts, [N, L], padded with empty ones, and their counts."""
    op = text.op
    if lowercase:
        text = op.StringNormalizer(text, case_change_action="LOWER", is_case_sensitive=0, locale=locale)
    for space in WHITESPACE:
        text = _replace(text, space, " ")
    for mark in PUNCTUATION if punctuation else "":
        text = _replace(text, mark, f" {mark} ")
    words, counts = op.StringSplit(text, outputs=2)
    return words, counts


def _replace(text: Expr, old: str, new: str) -> Expr:
    op = text.op
    pieces, counts = op.StringSplit(text, delimiter=old, outputs=2)
    is_followed = _columns(pieces) < op.Unsqueeze(counts, [1]) - 1
    glue = op.Gather(_strings(op, ["", new]), op.Cast(is_followed, to=ir.DataType.INT64))
    pieces = op.StringConcat(pieces, glue)
    start = op.Gather(_strings(op, [""]), op.ConstantOfShape(op.Shape(text), value=ir.tensor(np.zeros(1, np.int64))))

    def join(op: Builder, i: Expr, going: Expr, so_far: Expr) -> tuple[Expr, Expr]:
        return going, op.StringConcat(so_far, op.Gather(pieces, i, axis=1))

    count = op.Squeeze(op.Shape(pieces, start=1))
    joined: Expr = op.Loop(count, True, start, body=op.subgraph(join, loop_inputs(ir.DataType.STRING)))
    joined.value.type, joined.value.shape = ir.TensorType(ir.DataType.STRING), text.value.shape
    return joined


def _packed(pieces: Pieces, length: int, pad: int, begin: int | None, end: int | None) -> Tokens:
    """Move the counted items of each row to the front, between begin and end tokens, and pad."""
    ids, counts = pieces.ids, pieces.is_piece
    op = ids.op
    first = int(begin is not None)
    room = length - first - int(end is not None)
    number = op.Cast(counts, to=ir.DataType.INT64)
    position = op.CumSum(number, np.int64(1), exclusive=1)
    taken = op.And(counts, position < room)
    slot = op.Where(taken, position + first, op.constant(np.int64(length)))  # an extra column, cut off below
    rows = op.Slice(op.Shape(ids), [0], [1])
    shape = op.Concat(rows, np.asarray([length + 1], np.int64), axis=0)
    filling = op.ConstantOfShape(shape, value=ir.tensor(np.asarray([pad], np.int64)))
    packed = op.Slice(op.ScatterElements(filling, slot, ids, axis=1), [0], [length], [1])
    total = op.Min(op.ReduceSum(number, [1], keepdims=1), np.int64(room)) + first
    columns = op.constant(np.arange(length, dtype=np.int64)[None])
    if begin is not None:
        packed = op.Where(op.Equal(columns, np.int64(0)), np.int64(begin), packed)
    if end is not None:
        packed = op.Where(op.Equal(columns, total), np.int64(end), packed)
        total = total + 1
    return Tokens(packed, op.Cast(columns < total, to=ir.DataType.INT64))


def _columns(x: Expr) -> Expr:
    op = x.op
    return op.Range(np.int64(0), op.Squeeze(op.Shape(x, start=1)), np.int64(1))


def _strings(op: Builder, texts: list[str]) -> Expr:
    constant: Expr = op.node("", "Constant", value_strings=texts)
    constant.value.type, constant.value.shape = ir.TensorType(ir.DataType.STRING), ir.Shape([len(texts)])
    return constant


# ---- vocabularies ----------------------------------------------------------------------------------------------------


class Vocabulary:
    """Tokens and their indices."""

    def __init__(self, numbers: Mapping[str, int], origin: str = "the vocabulary"):
        self.numbers, self._origin = dict(numbers), origin
        if not self.numbers:
            raise DataError(f"{origin} is empty", hint="write one token per line")
        if len(set(self.numbers.values())) < len(self.numbers):
            raise DataError(f"{origin} gives several tokens the same index")
        if min(self.numbers.values()) < 0:
            raise DataError(f"{origin} has negative indices")

    @classmethod
    def of(cls, value: Any) -> Vocabulary:
        """Read a vocabulary: a file, a list of tokens in order, or a mapping."""
        if isinstance(value, Vocabulary):
            return value
        if isinstance(value, Mapping):
            return cls({str(token): int(number) for token, number in value.items()})
        if isinstance(value, str | os.PathLike):
            return cls.read(Path(value))
        if isinstance(value, Sequence):
            return cls(_numbered([str(token) for token in value], "the vocabulary"))
        if isinstance(value, int):
            raise RecipeError(
                f"`vocabulary={value}` needs data to count words in",
                hint="pass the data (`--data`), or a file: `vocabulary=vocab.txt`",
            )
        raise RecipeError("`tokenize` needs a vocabulary", hint="write `vocabulary=vocab.txt`, with one token per line")

    @classmethod
    def read(cls, path: Path) -> Vocabulary:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise DataError(f"cannot read the vocabulary `{path}`: {reason}") from None
        if path.suffix.lower() != ".json":
            return cls(_numbered(text.split("\n")[: -1 if text.endswith("\n") else None], f"`{path}`"), f"`{path}`")
        try:
            tokens = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(f"`{path}` is not valid JSON: {error}") from None
        if isinstance(tokens, dict) and isinstance(tokens.get("model"), dict):  # tokenizer.json of Hugging Face
            tokens = tokens["model"].get("vocab")
        if not isinstance(tokens, dict) or not all(type(number) is int for number in tokens.values()):
            raise DataError(f"`{path}` is not a vocabulary", hint='write `{"the": 0, "a": 1}`: tokens and indices')
        return cls(tokens, f"`{path}`")

    @classmethod
    def counted(cls, counts: Mapping[str, int], size: int, special: Sequence[str]) -> Vocabulary:
        """Return the `size` most frequent words as a vocabulary; ties go by the alphabet."""
        frequent = sorted((word for word in counts if word not in special), key=lambda word: (-counts[word], word))
        return cls(_numbered([*special, *frequent[: max(size - len(special), 0)]], "the vocabulary"))

    def __str__(self) -> str:
        return "<vocabulary>"

    def number(self, token: str | None, optional: bool = False) -> int | None:
        """Return the index of a special token; None if there is none."""
        if token is None or (optional and token not in self.numbers):
            return None
        if token not in self.numbers:
            hint = suggest(token, self.numbers) or "name its tokens: `unknown=...`, `pad=...`"
            raise RecipeError(f"{self._origin} has no token `{token}`", hint=hint)
        return self.numbers[token]


def _numbered(tokens: Sequence[str], origin: str) -> dict[str, int]:
    tokens = [token.removesuffix("\r") for token in tokens]
    numbers = {token: number for number, token in enumerate(tokens)}
    if len(numbers) < len(tokens):
        twice = next(token for token, count in Counter(tokens).items() if count > 1)
        raise DataError(f"{origin} has the token `{twice}` more than once")
    return numbers
