"""Rules of other packages, which say where theirs are by entry points of the group `onward.rules`."""

from __future__ import annotations

import warnings
from importlib.metadata import entry_points

GROUP = "onward.rules"

_done = False


def load() -> None:
    """Import the rules of other packages, when they are first needed. What cannot be imported is left out."""
    global _done
    if _done:
        return
    _done = True
    for entry in entry_points(group=GROUP):
        try:
            entry.load()
        except Exception as error:
            package = f" of {entry.dist.name}" if entry.dist is not None else ""
            reason = f"{type(error).__name__}: {error}"
            warnings.warn(f"the rules `{entry.value}`{package} cannot be loaded: {reason}", stacklevel=2)
