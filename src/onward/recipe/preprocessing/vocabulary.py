"""Vocabularies: which number stands for which text. A token per line, or a JSON object from tokens to numbers."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onward.errors import DataError, RecipeError, near


class Vocabulary:
    """Tokens and their numbers."""

    def __init__(self, numbers: Mapping[str, int], origin: str = "the vocabulary"):
        self.numbers, self._origin = dict(numbers), origin
        if not self.numbers:
            raise DataError(f"{origin} is empty", hint="a vocabulary has a token in each line")
        if len(set(self.numbers.values())) < len(self.numbers):
            raise DataError(f"{origin} gives several tokens the same number")
        if min(self.numbers.values()) < 0:
            raise DataError(f"{origin} has negative numbers")

    @classmethod
    def of(cls, given: Any) -> Vocabulary:
        """What was given: a file, a list of tokens in their order, or a mapping."""
        if isinstance(given, Vocabulary):
            return given
        if isinstance(given, Mapping):
            return cls({str(token): int(number) for token, number in given.items()})
        if isinstance(given, str | os.PathLike):
            return cls.read(Path(given))
        if isinstance(given, Sequence):
            return cls(_numbered([str(token) for token in given], "the vocabulary"))
        if isinstance(given, int):
            raise RecipeError(
                f"a vocabulary of {given} words is made of data, and there are none",
                hint="give the data too (`--data`), or a file: `vocabulary=vocab.txt`",
            )
        raise RecipeError("`tokenize` needs a vocabulary", hint="write `vocabulary=vocab.txt`, with a token in a line")

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
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(f"`{path}` is not valid JSON: {error}") from None
        if isinstance(found, dict) and isinstance(found.get("model"), dict):  # tokenizer.json of Hugging Face
            found = found["model"].get("vocab")
        if not isinstance(found, dict) or not all(type(number) is int for number in found.values()):
            raise DataError(f"`{path}` is no vocabulary", hint="a JSON object from tokens to their numbers")
        return cls(found, f"`{path}`")

    @classmethod
    def counted(cls, counts: Mapping[str, int], size: int, special: Sequence[str]) -> Vocabulary:
        """Of the most frequent words, `size` numbers in all; those as frequent as each other by the alphabet."""
        found = sorted((word for word in counts if word not in special), key=lambda word: (-counts[word], word))
        return cls(_numbered([*special, *found[: max(size - len(special), 0)]], "the vocabulary"))

    def __str__(self) -> str:
        return "<vocabulary>"

    def number(self, token: str | None, optional: bool = False) -> int | None:
        """The number of a token that has a task; None where there is none."""
        if token is None or (optional and token not in self.numbers):
            return None
        if token not in self.numbers:
            hint = near(token, self.numbers) or "name the one that it has: `unknown=...`, `pad=...`"
            raise RecipeError(f"{self._origin} has no token `{token}`", hint=hint)
        return self.numbers[token]


def _numbered(tokens: Sequence[str], origin: str) -> dict[str, int]:
    tokens = [token.removesuffix("\r") for token in tokens]
    numbers = {token: number for number, token in enumerate(tokens)}
    if len(numbers) < len(tokens):
        twice = next(token for token, count in Counter(tokens).items() if count > 1)
        raise DataError(f"{origin} has the token `{twice}` more than once")
    return numbers
