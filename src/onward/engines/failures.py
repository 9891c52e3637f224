"""Whose fault it is that an operator fails: that of the framework, which refuses types and shapes, or our own."""

from __future__ import annotations

import re
import traceback

_OURS = (AssertionError, AttributeError, KeyError, NameError)
_OF_PYTHON = re.compile(
    r"missing \d+ required|takes (from )?\d+|unexpected keyword|multiple values|object is not|object has no"
    r"|unsupported operand|cannot unpack|^(list|tuple|string|range object) .*index out of range|from empty"
)
"""What Python says of calls and lists that are wrong; frameworks use the same classes, with words of their own."""


def is_ours(error: Exception) -> bool:
    """Whether an error was raised by a line of ours, as a mistake in it would be."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    if not str(frame.f_globals.get("__name__")).startswith("onward."):
        return False
    return isinstance(error, _OURS) or (
        type(error) in (TypeError, IndexError, ValueError) and _OF_PYTHON.search(str(error)) is not None
    )
