"""The compiled library, if it exists, ONNX Runtime loads it, and it is not turned off."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from typing import NamedTuple

from onward.kernels.build import LIBRARY
from onward.standard import KERNELS

DOMAIN = KERNELS
SWITCH = "ONWARD_KERNELS"
"""Environment variable that turns kernels off, `ONWARD_KERNELS=0`, or names another library."""


class Library(NamedTuple):
    """Native kernels of this installation."""

    path: Path | None
    """None if they cannot be used."""
    note: str
    """Instruction set that they use, or the reason why there are none."""


def library() -> Library:
    """Return the kernels to use."""
    path = os.environ.get(SWITCH, str(LIBRARY))
    return Library(None, f"turned off by {SWITCH}=0") if path == "0" else _load(Path(path))


@functools.cache
def _load(path: Path) -> Library:
    """Return the library if ONNX Runtime loads it: neither states its version to the other."""
    if not path.exists():
        missing = "not compiled: `python -m onward.kernels.build`"
        return Library(None, missing if path == LIBRARY else f"{SWITCH} names `{path}`, which does not exist")
    import onnxruntime as ort

    try:
        ort.SessionOptions().register_custom_ops_library(str(path))
        name = ctypes.CDLL(str(path)).onward_instructions
    except Exception as error:
        return Library(None, f"ONNX Runtime {ort.__version__} does not load them: {str(error).splitlines()[0]}")
    name.restype = ctypes.c_char_p
    return Library(path, name().decode())
