"""The compiled library: whether it is there, whether this ONNX Runtime takes it, and whether it is wanted."""

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
"""The variable of the environment that turns them off, `ONWARD_KERNELS=0`, or names another library."""


class Library(NamedTuple):
    """The native kernels of this installation."""

    path: Path | None
    """None where they cannot be used."""
    note: str
    """The instructions that they use, or why there are none."""


def library() -> Library:
    """The kernels to use now."""
    wanted = os.environ.get(SWITCH, str(LIBRARY))
    return Library(None, f"turned off by {SWITCH}=0") if wanted == "0" else _load(Path(wanted))


@functools.cache
def _load(path: Path) -> Library:
    """Whether ONNX Runtime loads a library: a test of both, since neither knows the other."""
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
