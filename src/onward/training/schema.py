"""What the files of a run may hold: each key with its type, its range, and the words for both.

A run folder may have been edited, or written by something else. It is checked as a whole when it is read, and nowhere
else after that.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from onward.errors import DataError, first_line

_MOST = 2**53
"""Whole numbers up to here are the same in every language that reads JSON."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """What a value must be, as the end of "it must be"."""

    words: str
    fits: Callable[[Any], bool]

    def __or__(self, other: Kind) -> Kind:
        return Kind(f"{self.words} or {other.words}", lambda value: self.fits(value) or other.fits(value))


def whole(least: int = 0, most: int = _MOST) -> Kind:
    limit = "" if most >= _MOST else f" and at most {most:,}"
    return Kind(f"a whole number, at least {least}{limit}", lambda value: _is_whole(value) and least <= value <= most)


def one_of(*values: str) -> Kind:
    listed = ", ".join(f"`{value}`" for value in values)
    return Kind(f"one of {listed}", lambda value: isinstance(value, str) and value in values)


def many(kind: Kind, words: str) -> Kind:
    return Kind(words, lambda value: isinstance(value, list | tuple) and all(kind.fits(item) for item in value))


def named(kind: Kind, words: str) -> Kind:
    def fits(value: Any) -> bool:
        return isinstance(value, Mapping) and all(TEXT.fits(k) and kind.fits(v) for k, v in value.items())

    return Kind(words, fits)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (_is_whole(value) and abs(value) <= _MOST)


NOTHING = Kind("null", lambda value: value is None)
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
TEXT = Kind("a text", lambda value: isinstance(value, str))
TEXTS = many(TEXT, "a list of texts")
NUMBER = Kind("a number", _is_number)
SECONDS = Kind("a number of seconds, 0 or more", lambda value: _is_number(value) and 0 <= value < math.inf)
SHARE = Kind("a share between 0 and 1", lambda value: isinstance(value, float) and 0 < value < 1)
PATH = Kind("a path", lambda value: isinstance(value, str) and value != "" and "\0" not in value)
PLACES = PATH | many(PATH, "a list of paths") | named(PATH, "paths by name")


def problems(values: Mapping[str, Any], kinds: Mapping[str, Kind]) -> list[str]:
    """What is wrong with each value that does not fit, as a sentence."""
    wrong = [(key, kind) for key, kind in kinds.items() if key in values and not kind.fits(values[key])]
    return [f"`{key}` is {_shown(values[key])}, and must be {kind.words}" for key, kind in wrong]


def checked(text: str | bytes, kinds: Mapping[str, Kind], name: str) -> dict[str, Any]:
    """The object that JSON holds, if each value that has a kind is of it."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name} is not valid JSON: {first_line(error)}", hint=_HINT) from error
    if not isinstance(values, dict):
        raise DataError(f"{name} is {_shown(values)}, and must be an object", hint=_HINT)
    if found := problems(values, kinds):
        raise DataError(f"{name} cannot be used: {'; '.join(found)}", hint=_HINT)
    return values


_HINT = "was it edited? undo that, or start a new run"


def _shown(value: Any) -> str:
    if isinstance(value, Mapping | list) and value:
        return "an object" if isinstance(value, Mapping) else "a list"
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        return f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."
