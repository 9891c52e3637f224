"""Files of a run as objects: they may have been edited, so each value is checked when it is read, and only then.

What a key may hold says the dataclass that it becomes a field of.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, get_type_hints

from onward.arguments import Range, fitting
from onward.errors import ArgumentError, DataError, RecipeError, first_line

Natural = Annotated[int, Range(least=0, most=2**53)]
"""Whole numbers up to there are the same in every language that reads JSON."""

_HINT = "was it edited? undo that, or start a new run"


def checked(text: str | bytes, kind: type, name: str) -> dict[str, Any]:
    """The object that JSON holds, with the values that are fields of this kind as it wants them."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name} is not valid JSON: {first_line(error)}", hint=_HINT) from error
    if not isinstance(values, dict):
        raise DataError(f"{name} is not a JSON object", hint=_HINT)
    problems = []
    for key, hint in get_type_hints(kind, include_extras=True).items():
        try:
            values |= {key: fitting(f"`{key}`", values[key], hint)} if key in values else {}
        except (ArgumentError, RecipeError) as error:
            problems.append(str(error))
    if problems:
        raise DataError(f"{name} cannot be used: {'; '.join(problems)}", hint=_HINT)
    return values
