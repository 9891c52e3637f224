"""Steps that do not fit into memory, whose exceptions every runtime has of its own."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from onward.errors import OutOfMemoryError

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
