"""What a pickle holds, as data: nothing here does anything when it is made, called, filled or printed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Name:
    """A class or function that a pickle names: a name and no more. To call it makes an `Object` of it."""

    module: str
    name: str

    def __call__(self, *arguments: Any, **keywords: Any) -> Object:
        return Object(self, arguments, keywords)

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Object:
    """What a pickle would have made of a class or function: what that is, and all that it was to be given."""

    def __init__(
        self,
        of: Name,
        arguments: tuple[Any, ...] = (),
        keywords: dict[str, Any] | None = None,
        *,
        is_instance: bool = False,
    ):
        self.of = of
        self.arguments = arguments
        self.keywords = keywords or {}
        self.is_instance = is_instance
        """Whether it was to be made without calling its class, as `object.__new__` does."""
        self.state: Any = None
        """What its attributes were to be."""
        self.items: list[Any] = []
        """What it was to hold, as a list does."""
        self.entries: list[tuple[Any, Any]] = []
        """What it was to hold, as a dict does; keys need not be hashable."""

    # What the reader of pickles calls.
    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, item: Any) -> None:
        self.items.append(item)

    def extend(self, items: Iterable[Any]) -> None:
        self.items.extend(items)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.entries.append((key, value))

    def __repr__(self) -> str:
        return f"<{self.of}>"


class Attributed(dict[Any, Any]):
    """A dict of a class of its own: the `OrderedDict` of a module's state, which notes versions in an attribute."""

    of = Name("collections", "OrderedDict")
    arguments: tuple[Any, ...] = ()
    """What the class was called with."""
    attributes: Any = None

    def __setstate__(self, state: Any) -> None:
        self.attributes = state


class WithDefault(Attributed):
    """A `defaultdict`."""

    of = Name("collections", "defaultdict")

    def __init__(self, *arguments: Any):
        super().__init__()
        self.arguments = arguments
