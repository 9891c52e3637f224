"""Importing TensorFlow without what it prints about the machine, unless its log is asked for in full."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

_LEVEL = "TF_CPP_MIN_LOG_LEVEL"


@contextlib.contextmanager
def _without_errors_of_c() -> Iterator[None]:
    """What is written before it has read its own setting goes straight to the file."""
    kept = os.dup(2)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


with contextlib.nullcontext() if os.environ.setdefault(_LEVEL, "3") == "0" else _without_errors_of_c():
    import tensorflow as tensorflow
