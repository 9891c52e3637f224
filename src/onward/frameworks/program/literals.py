"""Numbers, texts and lists of them as Python writes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from onward.frameworks.program.names import quote


def number(value: Any, module: str = "math") -> str:
    """A number. Attributes of a model have the digits of float32, and are as short as these allow.

    `module` is what the program takes infinity from.
    """
    if isinstance(value, np.floating):
        plain, short = float(value), str(value)
    elif isinstance(value, float):
        plain, short = value, _short(value)
    else:
        return repr(value.item() if isinstance(value, np.generic) else value)
    if not math.isfinite(plain):
        return f"{module}.nan" if math.isnan(plain) else f"{module}.inf" if plain > 0 else f"-{module}.inf"
    return repr(float(short))


def _short(plain: float) -> str:
    with np.errstate(over="ignore"):
        single = np.float32(plain)
    fits = float(single) == plain and abs(float(str(single))) <= float(np.finfo(np.float32).max)  # not its own digits
    return str(single) if fits else repr(plain)


def literal(value: Any, module: str = "math") -> str:
    """Numbers, texts and what holds them."""
    if isinstance(value, str):
        return quote(value)
    if isinstance(value, np.ndarray):
        return literal(list(value) if value.ndim else value[()], module)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{literal(key)}: {literal(item, module)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        inside = ", ".join(literal(item, module) for item in value)
        return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' if len(value) == 1 else ''})"
    return number(value, module)
