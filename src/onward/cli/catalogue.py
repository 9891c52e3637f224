"""What a recipe can name: losses, optimizers, schedules, initializers, preprocessing, with options and defaults."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from onward.cli.console import print_json, print_rows, say, word

Catalogue = Literal["losses", "optimizers", "schedules", "initializers", "preprocessing", "augmentations"]


@dataclass(frozen=True)
class Entry:
    summary: str
    options: Mapping[str, Any]
    """Every option with its default."""
    choices: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """What those options can be that are one of a few words."""
    required: tuple[str, ...] = ()
    short_names: tuple[str, ...] = ()


def entries(catalogue: Catalogue) -> dict[str, Entry]:
    tables = {
        "losses": _losses,
        "optimizers": _optimizers,
        "schedules": _schedules,
        "initializers": _initializers,
        "preprocessing": _preprocessing,
        "augmentations": _augmentations,
    }
    return dict(tables[catalogue]())


def _losses() -> Iterator[tuple[str, Entry]]:
    from onward.recipe.losses import LOSSES

    for loss in dict.fromkeys(LOSSES.values()):
        short = tuple(name for name, other in LOSSES.items() if other is loss and name != loss.name)
        yield loss.name, Entry(loss.summary, {**loss.options, "scale": 1.0}, short_names=short)


def _optimizers() -> Iterator[tuple[str, Entry]]:
    from onward.recipe.optimizers import OPTIMIZERS

    for name, kind in OPTIMIZERS.items():
        choices = {key: value for key, value in kind.choices.items() if isinstance(value, tuple)}
        chosen = {key: value[0] if isinstance(value, tuple) else value for key, value in kind.choices.items()}
        yield name, Entry(kind.summary, {**kind.hyper, **chosen}, choices)


def _schedules() -> Iterator[tuple[str, Entry]]:
    from onward.recipe.schedules import SCHEDULES

    for name, kind in SCHEDULES.items():
        required = tuple(key for key, value in kind.options.items() if value is None and key != "timescale")
        yield name, Entry(kind.summary, kind.options, kind.choices, required)


def _initializers() -> Iterator[tuple[str, Entry]]:
    from onward.recipe.initialize import INITIALIZERS

    yield "file", Entry("the value in the file", {})
    for name, kind in INITIALIZERS.items():
        yield name, Entry(kind.summary, kind.options, kind.choices)


def _preprocessing() -> Iterator[tuple[str, Entry]]:
    from onward.recipe.preprocessing.operations import OPERATIONS

    for name, operation in OPERATIONS.items():
        yield name, _of_function(operation.build)


def _augmentations() -> Iterator[tuple[str, Entry]]:
    from onward.recipe.preprocessing.augmentations import AUGMENTATIONS

    for name, function in AUGMENTATIONS.items():
        yield name, _of_function(function)


def _of_function(function: Callable[..., Any]) -> Entry:
    from onward.recipe.spec import options_of

    options, required = options_of(function)
    return Entry((function.__doc__ or "").splitlines()[0], options, required=required)


def print_catalogue(catalogue: Catalogue, as_json: bool) -> None:
    found = entries(catalogue)
    if as_json:
        print_json({name: asdict(entry) for name, entry in found.items()})
        return
    for name, entry in found.items():
        say(" or ".join([name, *entry.short_names]), style="bold")
        print_rows([["  ", entry.summary]])
        if entry.options:
            listed = "  ".join(_option(key, value, entry) for key, value in entry.options.items())
            print_rows([["  ", listed]], styles=("", "cyan"))


def _option(name: str, default: Any, entry: Entry) -> str:
    if name in entry.required:
        return f"{name}=?"
    values = entry.choices.get(name, (default,))
    return f"{name}={'|'.join(word(value) for value in values)}"
