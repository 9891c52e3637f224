"""Files of a run as objects: they may have been edited, so each value is checked when it is read, and only then.

What a key may hold says the dataclass that it becomes a field of.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, get_type_hints

from onward.arguments import Range, fitting
from onward.errors import ArgumentError, DataError, RecipeError, first_line

Natural = Annotated[int, Range(least=0, most=2**53)]
"""Whole numbers up to there are the same in every language that reads JSON."""

EDITED = "was it edited, or written by another version of Onward? undo that, or start a new run"


def parse_json_as(text: str | bytes, kind: type, name: str) -> dict[str, Any]:
    """The object that JSON holds, with the values that are fields of this kind as it wants them."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name} is not valid JSON: {first_line(error)}", hint=EDITED) from error
    if not isinstance(values, dict):
        raise DataError(f"{name} is not a JSON object", hint=EDITED)
    return check_values(values, get_type_hints(kind, include_extras=True), name, EDITED)


def check_values(values: dict[str, Any], hints: Mapping[str, Any], name: str, hint: str) -> dict[str, Any]:
    """The values as their types want them, or one error about all that do not fit; others stay as they are."""
    problems = []
    for key, kind in hints.items():
        try:
            if key in values:
                values |= {key: fitting(f"`{key}`", values[key], kind)}
        except (ArgumentError, RecipeError) as error:
            problems.append(error)
    if problems:
        told = "; ".join(map(str, problems))
        raise DataError(f"{name} cannot be used: {told}", hint=problems[0].hint or hint)
    return values
