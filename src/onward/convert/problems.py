"""Everything that cannot be carried over, said at once."""

from __future__ import annotations

import dataclasses

from onward.errors import UnsupportedError


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
