"""Problems of a conversion, collected and raised as one error."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from onward.errors import Error, UnsupportedError


@dataclasses.dataclass
class Problems:
    """Problems that prevent a conversion."""

    of: str
    """Subject of the error, such as "the optimizer"."""
    problems: list[str] = dataclasses.field(default_factory=list)
    hints: list[str] = dataclasses.field(default_factory=list)

    def add(self, problem: str, hint: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)
        if hint not in self.hints:
            self.hints.append(hint)

    def refuse(self) -> None:
        """Raise an UnsupportedError if there are problems."""
        if self.problems:
            raise UnsupportedError(
                f"{self.of} cannot be carried over: {'; '.join(self.problems)}", hint="; ".join(self.hints)
            )


class ErrorCollector:
    """Errors of several parts of a run."""

    def __init__(self) -> None:
        self.errors: list[Error] = []

    @contextlib.contextmanager
    def collect(self) -> Iterator[None]:
        """Collect an error of the block, which `refuse` raises."""
        try:
            yield
        except Error as error:
            self.errors.append(error)

    def refuse(self) -> None:
        """Raise the collected errors as one."""
        if len(self.errors) == 1:
            raise self.errors[0]
        if self.errors:
            hints = dict.fromkeys(error.hint for error in self.errors if error.hint)
            message = "; ".join(dict.fromkeys(error.message for error in self.errors))
            raise type(self.errors[0])(message, hint="; ".join(hints)) from self.errors[0]
