"""Rows of the vocabularies: the optimizers of a recipe as classes of a framework, both ways."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from onward.recipe.optimizers import ConfiguredOptimizer


class Condition(NamedTuple):
    """Settings for which a row applies."""

    words: str
    """For tables in the documentation: "without amsgrad"."""
    holds: Callable[[Mapping[str, Any]], bool]


@dataclasses.dataclass(frozen=True)
class OptimizerRow:
    """A class of a framework and the optimizers of a recipe that it computes."""

    path: str
    """Where the class is: "torch.optim.AdamW", "keras.optimizers.AdamW", "optax.adamw"."""
    optimizers: tuple[str, ...]
    """Names in a recipe. The class is read as the first."""
    variants: tuple[str, ...]
    """Whose arithmetic it has: "torch", "keras", "optax", "transformers". The class is read as the first."""
    settings: Mapping[str, Any]
    """Settings of the class: the recipe's names -> the framework's. Several of a recipe may be one tuple there."""
    slots: Mapping[str, str]
    """Slots of a recipe -> where the class keeps them."""
    applies: Condition | None = None

    @property
    def name(self) -> str:
        """The name of the class."""
        return self.path.rpartition(".")[2]

    def fits(self, configured: ConfiguredOptimizer) -> bool:
        """True if the class computes what a configured optimizer of a recipe does."""
        is_named = configured.kind.name in self.optimizers and configured.options["variant"] in self.variants
        return is_named and (self.applies is None or self.applies.holds({**configured.values, **configured.options}))


Row = TypeVar("Row", bound=OptimizerRow)


def row_for(rows: Iterable[Row], configured: ConfiguredOptimizer) -> Row | None:
    """Return the first row that fits."""
    return next((row for row in rows if row.fits(configured)), None)
