"""Import of TensorFlow without its messages about the machine, unless the full log is requested."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

_LEVEL = "TF_CPP_MIN_LOG_LEVEL"


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    """Close file descriptor 2: TensorFlow writes to it before it reads its log level."""
    stderr = os.dup(2)
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


with contextlib.nullcontext() if os.environ.setdefault(_LEVEL, "3") == "0" else _without_stderr():
    import tensorflow as tensorflow
