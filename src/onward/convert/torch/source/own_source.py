"""The source of classes and functions for PyTorch, with all that it needs, for files that run without us."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from onward.convert import own_source as sources
from onward.convert.torch import exact


def borrowed(objects: Iterable[Any], replaced: Mapping[str, str] | None = None) -> tuple[list[str], list[str]]:
    """Sources in an order in which they can be read, and the imports that they need.

    `replaced` has definitions to take in place of those in our files, by name.
    """
    return sources.borrowed(objects, (exact.__name__,), replaced)
