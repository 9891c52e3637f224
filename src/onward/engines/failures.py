"""Whose fault it is that a step fails: the framework, which refuses types and shapes, our own, or too little memory."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator

from onward.errors import OutOfMemoryError

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


# ---- steps that do not fit into memory -------------------------------------------------------------------------------


_SIGNS = re.compile(r"out of memory|RESOURCE_EXHAUSTED|OOM when|(can't|unable to|failed to) allocate", re.IGNORECASE)
_HINT = "make batches smaller, and `accumulate` their gradients; or compute in fewer bits: `precision=bfloat16`"


@contextlib.contextmanager
def memory_of(engine: str) -> Iterator[None]:
    """Say it in the same words for all engines if there is not enough."""
    try:
        yield
    except Exception as error:
        first = str(error).partition("\n")[0]
        if isinstance(error, OutOfMemoryError) or not (isinstance(error, MemoryError) or _SIGNS.search(first)):
            raise
        raise OutOfMemoryError(f"the step does not fit into the memory of {engine}: {first}", hint=_HINT) from error
