"""What a module takes, from a file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from onward.errors import DataError
from onward.model.storage.containers import read_npz
from onward.model.storage.files import reason

_UNNAMED = re.compile(r"arr_\d+")
"""What `numpy.savez` calls arrays that have no names."""


def read_example(file: Path) -> Any:
    """The arrays of an .npz file as tensors: by name; without names in their order, and one alone as it is."""
    try:
        found = {name: torch.from_numpy(array) for name, array in read_npz(file).items()}
    except (OSError, ValueError, TypeError) as error:
        raise DataError(
            f"`{file}` is no .npz file of arrays: {reason(error)}", hint="write it with `numpy.savez`"
        ) from error
    if not found or not all(map(_UNNAMED.fullmatch, found)):
        return found
    in_order = tuple(found.values())
    return in_order if len(in_order) > 1 else in_order[0]
