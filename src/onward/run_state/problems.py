"""Everything that cannot be carried over, said at once."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from onward.errors import Error, UnsupportedError


@dataclasses.dataclass
class Problems:
    """What stands in the way of a conversion."""

    of: str
    """Such as "the optimizer"."""
    found: list[str] = dataclasses.field(default_factory=list)
    hints: list[str] = dataclasses.field(default_factory=list)

    def add(self, problem: str, hint: str) -> None:
        self.found.append(problem)
        if hint not in self.hints:
            self.hints.append(hint)

    def refuse(self) -> None:
        """Raise, if there are any."""
        if self.found:
            raise UnsupportedError(
                f"{self.of} cannot be carried over: {'; '.join(self.found)}", hint="; ".join(self.hints)
            )


class Parts:
    """What stands in the way in several parts of a run, each of which says so by itself."""

    def __init__(self) -> None:
        self.errors: list[Error] = []

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Go on after an error in what follows: `refuse` raises it."""
        try:
            yield
        except Error as error:
            self.errors.append(error)

    def refuse(self) -> None:
        """Raise what was found, as one error if there is more."""
        if len(self.errors) == 1:
            raise self.errors[0]
        if self.errors:
            hints = dict.fromkeys(error.hint for error in self.errors if error.hint)
            message = "; ".join(dict.fromkeys(error.message for error in self.errors))
            raise type(self.errors[0])(message, hint="; ".join(hints)) from self.errors[0]
