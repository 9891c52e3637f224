"""Checks of arguments: names, types and ranges, before a function runs.

A `checked` function declares them in its signature; a range is `Annotated[int, Range(least=1)]`.
NumPy scalars become Python numbers, and a string becomes a list of one where a list of strings is
expected.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
import numbers
import operator
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from onward.errors import ArgumentError, RecipeError, alternatives, suggest

_P = ParamSpec("_P")
_R = TypeVar("_R")
_MISSING = object()
_SHOWN = 60


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers within bounds, `least` and `most` included. With `finite=False`, infinity too."""

    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    below: float = math.inf
    finite: bool = True

    def __contains__(self, number: float) -> bool:
        inside = (
            self.least <= number <= self.most and number > self.above and (number < self.below or number == math.inf)
        )
        return inside and (math.isfinite(number) or not self.finite)

    def __str__(self) -> str:
        bounds = {"at least": self.least, "more than": self.above, "at most": self.most, "less than": self.below}
        clauses = [f"{word} {bound:,}" for word, bound in bounds.items() if math.isfinite(bound)]
        return " and ".join(clauses).replace("more than 0", "positive") or "finite"

    def check(self, what: str, number: float) -> None:
        """Raise RecipeError for a number outside the range. `what` names the argument."""
        if number not in self:
            raise RecipeError(f"{what} is {number:{'g' if isinstance(number, float) else ''}}, but must be {self}")


OPENED: set[Any] = set()
"""Types that are checked where their values are opened."""

Seed = Annotated[int, Range(least=0, most=2**64 - 1)]
Threads = Annotated[int, Range(least=1, most=1024)]
Count = Annotated[int, Range(least=1)]


def checked(
    *, rest: Callable[..., Any] | None = None, types: bool = True, **formerly: str
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Check the arguments of each call against the signature of the function.

    Args:
        rest: function whose arguments are accepted as further keywords.
        types: False to check names only. Annotations with framework objects are for type checkers.
        **formerly: former names of arguments -> current ones, until the next release.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            bound = bind(function.__name__, _signature(function), args, with_new_names(kwargs, formerly), rest)
            hints = _hints(function) if types else {}
            for name, value in bound.arguments.items():
                if name in hints and bound.signature.parameters[name].kind is not inspect.Parameter.VAR_KEYWORD:
                    bound.arguments[name] = coerce(f"`{name}`", value, hints[name])
            return function(*bound.args, **bound.kwargs)

        call.__dict__["is_checked"] = True
        return call

    return decorate


def coerce(what: str, value: Any, hint: Any) -> Any:
    """Return the value as the type of the hint.

    Raises:
        ArgumentError: if the value is of none of its types.
    """
    kinds = sorted(kinds_of(hint), key=lambda kind: get_origin(kind[0]) in (Sequence, Iterable))  # a string stays one
    for kind, bounds in kinds:
        result = _as(value, kind)
        if result is _MISSING:
            continue
        if isinstance(result, int | float) and not isinstance(result, bool) and kind in (int, float):
            (bounds or Range()).check(what, result)
        return result
    expected = alternatives([_word(kind, bounds) for kind, bounds in kinds if kind is not type(None)])
    raise ArgumentError(f"{what} is {_show(value)}, but must be {expected}", hint=_hint_for(value, kinds))


def is_empty(value: Any) -> bool:
    """True for None and for empty strings, lists and mappings."""
    return value is None or (isinstance(value, str | Sequence | Mapping) and not value)


def from_text(text: str, hint: Any) -> Any:
    """Convert typed text to a number if the hint allows one; otherwise return the text."""
    types = [cls for cls, _ in kinds_of(hint)]
    for cls in (int, float):
        with contextlib.suppress(ValueError):
            if cls in types:
                return cls(text)
    return text


# ---- names -----------------------------------------------------------------------------------------------------------


@functools.cache
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


def with_new_names(arguments: Mapping[str, Any], renamed: Mapping[str, str]) -> dict[str, Any]:
    """Return arguments under their current names."""
    names = {old: new if (new := renamed.get(old, old)) not in arguments else old for old in arguments}
    return {names[old]: value for old, value in arguments.items()}


def bind(
    name: str, signature: inspect.Signature, args: Any, kwargs: Any, rest: Callable[..., Any] | None = None
) -> inspect.BoundArguments:
    """Bind the arguments of a call to the names of a signature.

    Raises:
        ArgumentError: if an argument is unknown, missing, or given twice.
    """
    signatures = [signature, *([_signature(rest)] if rest is not None else [])]
    parameters = [(name, p) for item in signatures for name, p in item.parameters.items()]
    names = [name for name, p in parameters if p.kind is not p.VAR_KEYWORD]
    if unknown := [name for name in kwargs if name not in names]:
        hint = suggest(unknown[0], names) or f"arguments: {', '.join(names)}"
        raise ArgumentError(f"`{name}` has no argument `{unknown[0]}`", hint=hint)
    try:
        return signature.bind(*args, **kwargs)
    except TypeError:
        raise _binding_error(name, signature, args, kwargs) from None


def _binding_error(
    name: str, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> ArgumentError:
    """Return the error for an argument that is missing, duplicate or superfluous."""
    parameters = list(signature.parameters.values())
    plain = [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    if len(args) > len(plain):
        named = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY and p.name not in kwargs]
        hint = f"pass the others by name, such as `{named[0]}=...`" if named else f"arguments: {', '.join(plain)}"
        return ArgumentError(f"`{name}` takes {len(plain)} positional arguments, not {len(args)}", hint=hint)
    if twice := [argument for argument in plain[: len(args)] if argument in kwargs]:
        return ArgumentError(f"`{name}` is given `{twice[0]}` twice", hint="pass it once")
    bound = {*plain[: len(args)], *kwargs}
    missing = [p.name for p in parameters if p.default is p.empty and p.name not in bound]
    return ArgumentError(f"`{name}` needs `{missing[0]}`", hint=f"see `help(onward.{name})`")


# ---- types -----------------------------------------------------------------------------------------------------------


@functools.cache
def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    return get_type_hints(function, include_extras=True)


def kinds_of(hint: Any, bounds: Range | None = None) -> Iterator[tuple[Any, Range | None]]:
    """Yield the types that a hint allows, with the range of numbers."""
    if hint in OPENED:
        yield Any, None
        yield from ((kind, None) for kind in get_args(hint) if kind is float)
    elif get_origin(hint) is Annotated:
        inner, *notes = get_args(hint)
        yield from kinds_of(inner, next((note for note in notes if isinstance(note, Range)), bounds))
    elif get_origin(hint) in (Union, UnionType):
        for option in get_args(hint):
            yield from kinds_of(option, bounds)
    else:
        yield hint, bounds


def _as(value: Any, kind: Any) -> Any:
    """Return the value as that type, or `_MISSING`."""
    origin = get_origin(kind) or kind
    if kind is Any:
        return value
    if kind is int:
        whole = not isinstance(value, bool) and isinstance(value, numbers.Integral)
        return operator.index(value) if whole else _MISSING
    if kind is float:
        real = not isinstance(value, bool) and isinstance(value, numbers.Real)
        return (value if isinstance(value, int | float) else float(value)) if real else _MISSING
    if kind is bool:
        return bool(value) if isinstance(value, bool) or type(value).__name__ == "bool" else _MISSING
    if origin is Literal:
        return value if isinstance(value, Hashable) and value in get_args(kind) else _MISSING
    if origin in (Sequence, Iterable):
        return _as_list(value, *get_args(kind))
    if origin is Mapping:
        return _as_mapping(value, *get_args(kind))
    if origin is tuple and get_args(kind)[1:] == (...,):
        return value if isinstance(value, tuple) and _as_list(value, get_args(kind)[0]) is not _MISSING else _MISSING
    if isinstance(origin, type):
        return value if isinstance(value, origin) else _MISSING
    return value  # no other hint is checked


def _as_list(value: Any, item: Any = Any) -> Any:
    if isinstance(value, str):
        return [value] if item is not Any and _fit(value, item) is not _MISSING else _MISSING
    if isinstance(value, bytes | Mapping) or not isinstance(value, Iterable):
        return _MISSING
    items = value if isinstance(value, Sequence) else list(value)
    return _MISSING if any(_fit(element, item) is _MISSING for element in items) else items


def _as_mapping(value: Any, key: Any = Any, item: Any = Any) -> Any:
    if not isinstance(value, Mapping):
        return _MISSING
    fits = all(_fit(k, key) is not _MISSING and _fit(v, item) is not _MISSING for k, v in value.items())
    return value if fits else _MISSING


def _fit(value: Any, hint: Any) -> Any:
    return next((result for kind, _ in kinds_of(hint) if (result := _as(value, kind)) is not _MISSING), _MISSING)


# ---- words -----------------------------------------------------------------------------------------------------------


def _word(kind: Any, bounds: Range | None) -> str:
    origin = get_origin(kind) or kind
    if kind in (int, float):
        return f"{'an integer' if kind is int else 'a number'}{f', {bounds}' if bounds else ''}"
    if origin is Literal:
        return alternatives([f"`{choice}`" for choice in get_args(kind)])
    words = {str: "a string", bool: "`True` or `False`", os.PathLike: "a path", Mapping: "a mapping", bytes: "bytes"}
    if origin in (Sequence, Iterable):
        return "a list of strings" if get_args(kind) == (str,) else "a list"
    return words.get(origin) or f"a `{getattr(origin, '__name__', origin)}`"


def _show(value: Any) -> str:
    text = repr(value)
    simple = value is None or isinstance(value, str | int | float | list | tuple | dict)
    return f"`{text}`" if simple and len(text) <= _SHOWN else f"a `{type(value).__name__}`"


def _hint_for(value: Any, kinds: Sequence[tuple[Any, Range | None]]) -> str | None:
    if value is None:
        return "leave it out"
    if isinstance(value, str):
        for kind, _ in kinds:
            choices = get_args(kind) if get_origin(kind) is Literal else ()
            if choices and (hint := suggest(value, [str(choice) for choice in choices])):
                return hint
        if any(kind in (int, float) for kind, _ in kinds):
            return "pass a number, without quotes"
    if any(callable(item) for item in (value if isinstance(value, list | tuple) else [value])):
        return "pass a name, not a function"
    return None
