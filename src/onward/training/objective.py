"""What a training model says about its losses."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from onward.model import Model
from onward.recipe.losses import LOSSES


@dataclasses.dataclass(frozen=True)
class Objective:
    """One loss: what it compares, and how."""

    name: str
    """In full: `cross_entropy`, not `ce`."""
    output: str | None = None
    target: str | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def axis(self) -> int:
        """Along which the output has classes."""
        return int(self.options.get("axis", 1))

    @property
    def by_number(self) -> bool:
        """Whether targets are numbers of classes."""
        return self.name == "nll" or (self.name == "cross_entropy" and "target" not in self.options)


def objectives(training: Model) -> list[Objective]:
    """The losses of all steps, as far as the model says which they are."""
    return [
        Objective(
            LOSSES[fact["name"]].name if fact.get("name") in LOSSES else str(fact.get("name")),
            fact.get("output"),
            next(iter(fact.get("inputs") or ()), None),
            fact.get("options") or {},
        )
        for step in training.steps
        for fact in step.fact("train.loss") or []
    ]
