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


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers within bounds, `least` and `most` included. With `finite=False`, infinity too."""

    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    below: float = math.inf
    finite: bool = True

    def __contains__(self, number: float) -> bool:
        # Infinity is below no bound, but it is allowed with `finite=False`.
        is_inside = self.least <= number <= self.most and self.above < number and not self.below <= number < math.inf
        return is_inside and (math.isfinite(number) or not self.finite)

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
    # Lists last: a string that may be a string stays one.
    types = sorted(types_of(hint), key=lambda row: get_origin(row[0]) in (Sequence, Iterable))
    for cls, bounds in types:
        if (result := _as(value, cls)) is not _MISSING:
            if cls in (int, float):
                (bounds or Range()).check(what, result)
            return result
    expected = alternatives([_word(cls, bounds) for cls, bounds in types if cls is not type(None)])
    raise ArgumentError(f"{what} is {_show(value)}, but must be {expected}", hint=_hint_for(value, types))


def is_empty(value: Any) -> bool:
    """True for None and for empty strings, lists and mappings."""
    return value is None or (isinstance(value, str | Sequence | Mapping) and not value)


def from_text(text: str, hint: Any) -> Any:
    """Convert typed text to a number if the hint allows one; otherwise return the text."""
    types = [cls for cls, _ in types_of(hint)]
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
    plain = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(args) > len(plain):
        named = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in kwargs]
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


def types_of(hint: Any, bounds: Range | None = None) -> Iterator[tuple[Any, Range | None]]:
    """Yield the types that a hint allows, with the range of numbers."""
    if hint in OPENED:
        yield Any, None
        yield from ((cls, None) for cls in get_args(hint) if cls is float)
    elif get_origin(hint) is Annotated:
        inner, *notes = get_args(hint)
        yield from types_of(inner, next((note for note in notes if isinstance(note, Range)), bounds))
    elif get_origin(hint) in (Union, UnionType):
        for option in get_args(hint):
            yield from types_of(option, bounds)
    else:
        yield hint, bounds


def _as(value: Any, cls: Any) -> Any:
    """Return the value as that type, or `_MISSING`."""
    origin, inner = get_origin(cls) or cls, get_args(cls)
    if cls is int:
        is_right = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        return operator.index(value) if is_right else _MISSING
    if cls is float:
        is_right = isinstance(value, numbers.Real) and not isinstance(value, bool)
        return (value if isinstance(value, int | float) else float(value)) if is_right else _MISSING
    if cls is bool:  # numpy's, too
        return bool(value) if type(value).__name__ == "bool" else _MISSING
    if origin in (Sequence, Iterable):
        return _as_list(value, *inner)
    if origin is Literal:
        is_right = isinstance(value, Hashable) and value in inner
    elif origin is Mapping:
        key, item = inner or (Any, Any)
        is_right = isinstance(value, Mapping) and all(_fits(k, key) and _fits(v, item) for k, v in value.items())
    elif origin is tuple and inner[1:] == (...,):
        is_right = isinstance(value, tuple) and all(_fits(element, inner[0]) for element in value)
    else:  # no other hint is checked
        is_right = cls is Any or not isinstance(origin, type) or isinstance(value, origin)
    return value if is_right else _MISSING


def _as_list(value: Any, item: Any = Any) -> Any:
    if isinstance(value, str):
        return [value] if item is not Any and _fits(value, item) else _MISSING
    if isinstance(value, bytes | Mapping) or not isinstance(value, Iterable):
        return _MISSING
    items = value if isinstance(value, Sequence) else list(value)
    return items if all(_fits(element, item) for element in items) else _MISSING


def _fits(value: Any, hint: Any) -> bool:
    return any(_as(value, cls) is not _MISSING for cls, _ in types_of(hint))


# ---- words -----------------------------------------------------------------------------------------------------------


_WORDS = {str: "a string", bool: "`True` or `False`", os.PathLike: "a path", Mapping: "a mapping", bytes: "bytes"}


def _word(cls: Any, bounds: Range | None) -> str:
    origin = get_origin(cls) or cls
    if cls in (int, float):
        return f"{'an integer' if cls is int else 'a number'}{f', {bounds}' if bounds else ''}"
    if origin is Literal:
        return alternatives([f"`{choice}`" for choice in get_args(cls)])
    if origin in (Sequence, Iterable):
        return "a list of strings" if get_args(cls) == (str,) else "a list"
    return _WORDS.get(origin) or f"a `{getattr(origin, '__name__', origin)}`"


def _show(value: Any) -> str:
    text = repr(value)
    simple = value is None or isinstance(value, str | int | float | list | tuple | dict)
    return f"`{text}`" if simple and len(text) <= 60 else f"a `{type(value).__name__}`"


def _hint_for(value: Any, types: Sequence[tuple[Any, Range | None]]) -> str | None:
    if value is None:
        return "leave it out"
    if isinstance(value, str):
        for cls, _ in types:
            if get_origin(cls) is Literal and (hint := suggest(value, [str(choice) for choice in get_args(cls)])):
                return hint
        if any(cls in (int, float) for cls, _ in types):
            return "pass a number, without quotes"
    if any(callable(item) for item in (value if isinstance(value, list | tuple) else [value])):
        return "pass a name, not a function"
    return None
