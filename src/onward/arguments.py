"""What callers hand over: names, types and ranges, checked at the door, before anything is done.

A function that is `checked` says all of it in its signature, ranges as `Annotated[int, Range(least=1)]`. Numbers of
numpy become Python's on the way, and a name where a list of names is wanted becomes a list of one.
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
    """The numbers within bounds, of which `least` and `most` are allowed themselves; infinity if that is said."""

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
        words = [f"{word} {bound:,}" for word, bound in bounds.items() if math.isfinite(bound)]
        return " and ".join(words).replace("more than 0", "positive") or "finite"

    def check(self, what: str, number: float) -> None:
        """Refuse a number that is outside; `what` says whose it is."""
        if number not in self:
            raise RecipeError(f"{what} is {number:{'g' if isinstance(number, float) else ''}}, but must be {self}")


OPENED: set[Any] = set()
"""Types that are checked where a value is opened."""

Seed = Annotated[int, Range(least=0, most=2**64 - 1)]
Threads = Annotated[int, Range(least=1, most=1024)]
Count = Annotated[int, Range(least=1)]


def checked(
    *, rest: Callable[..., Any] | None = None, types: bool = True, **formerly: str
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Check what a function is called with against its signature; keywords beyond it are those of `rest`.

    Without `types` only names are checked: those of objects of frameworks are there for type checkers alone. `formerly`
    are other names that arguments have until the next release.
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
    """The value as a type wants it, or an error that says what is wanted."""
    kinds = sorted(kinds_of(hint), key=lambda kind: get_origin(kind[0]) in (Sequence, Iterable))  # a text stays one
    for kind, within in kinds:
        found = _as(value, kind)
        if found is _MISSING:
            continue
        if isinstance(found, int | float) and not isinstance(found, bool) and kind in (int, float):
            (within or Range()).check(what, found)
        return found
    wanted = alternatives([_word(kind, within) for kind, within in kinds if kind is not type(None)])
    raise ArgumentError(f"{what} is {_show(value)}, but must be {wanted}", hint=_way_out(value, kinds))


def is_empty(value: Any) -> bool:
    """True for what says nothing: None, and texts, lists and mappings without a content."""
    return value is None or (isinstance(value, str | Sequence | Mapping) and not value)


def from_text(text: str, hint: Any) -> Any:
    """What a text that was typed stands for, where it may be a number: that number; else the text itself."""
    kinds = [kind for kind, _ in kinds_of(hint)]
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            if kind in kinds:
                return kind(text)
    return text


# ---- names -----------------------------------------------------------------------------------------------------------


@functools.cache
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


def with_new_names(given: Mapping[str, Any], renamed: Mapping[str, str]) -> dict[str, Any]:
    """Return arguments under the names that they have now."""
    return {now if (now := renamed.get(name, name)) not in given else name: value for name, value in given.items()}


def bind(
    name: str, signature: inspect.Signature, args: Any, kwargs: Any, rest: Callable[..., Any] | None = None
) -> inspect.BoundArguments:
    """The arguments of a call by name, or an error that says which is unknown, missing, or there twice."""
    signatures = [signature, *([_signature(rest)] if rest is not None else [])]
    known = [each for one in signatures for each, p in one.parameters.items() if p.kind is not p.VAR_KEYWORD]
    unknown = [each for each in kwargs if each not in known]
    if unknown:
        hint = suggest(unknown[0], known) or f"it has {', '.join(known)}"
        raise ArgumentError(f"`{name}` has no argument `{unknown[0]}`", hint=hint)
    try:
        return signature.bind(*args, **kwargs)
    except TypeError:
        raise _misfit(name, signature, args, kwargs) from None


def _misfit(name: str, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ArgumentError:
    """What is missing, twice there, or one too many."""
    parameters = list(signature.parameters.values())
    plain = [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    if len(args) > len(plain):
        named = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY and p.name not in kwargs]
        hint = f"give the others by name, such as `{named[0]}=...`" if named else f"it has {', '.join(plain)}"
        return ArgumentError(f"`{name}` takes {len(plain)} arguments without a name, not {len(args)}", hint=hint)
    if twice := [given for given in plain[: len(args)] if given in kwargs]:
        return ArgumentError(f"`{name}` is given `{twice[0]}` twice", hint="give it once")
    given = {*plain[: len(args)], *kwargs}
    missing = [p.name for p in parameters if p.default is p.empty and p.name not in given]
    return ArgumentError(f"`{name}` needs `{missing[0]}`", hint=f"`help(onward.{name})` says what that is")


# ---- types -----------------------------------------------------------------------------------------------------------


@functools.cache
def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    return get_type_hints(function, include_extras=True)


def kinds_of(hint: Any, within: Range | None = None) -> Iterator[tuple[Any, Range | None]]:
    """What a hint allows, one by one, with the range of numbers."""
    if hint in OPENED:
        yield Any, None
        yield from ((kind, None) for kind in get_args(hint) if kind is float)
    elif get_origin(hint) is Annotated:
        inner, *notes = get_args(hint)
        yield from kinds_of(inner, next((note for note in notes if isinstance(note, Range)), within))
    elif get_origin(hint) in (Union, UnionType):
        for option in get_args(hint):
            yield from kinds_of(option, within)
    else:
        yield hint, within


def _as(value: Any, kind: Any) -> Any:
    """The value as one of that kind, or `_MISSING` if it is none."""
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
    return value  # anything, as far as one can say here


def _as_list(value: Any, item: Any = Any) -> Any:
    if isinstance(value, str):
        return [value] if item is not Any and _fit(value, item) is not _MISSING else _MISSING
    if isinstance(value, bytes | Mapping) or not isinstance(value, Iterable):
        return _MISSING
    items = value if isinstance(value, Sequence) else list(value)
    return _MISSING if any(_fit(each, item) is _MISSING for each in items) else items


def _as_mapping(value: Any, key: Any = Any, item: Any = Any) -> Any:
    if not isinstance(value, Mapping):
        return _MISSING
    fits = all(_fit(k, key) is not _MISSING and _fit(v, item) is not _MISSING for k, v in value.items())
    return value if fits else _MISSING


def _fit(value: Any, hint: Any) -> Any:
    return next((found for kind, _ in kinds_of(hint) if (found := _as(value, kind)) is not _MISSING), _MISSING)


# ---- words -----------------------------------------------------------------------------------------------------------


def _word(kind: Any, within: Range | None) -> str:
    origin = get_origin(kind) or kind
    if kind in (int, float):
        return f"{'a whole number' if kind is int else 'a number'}{f', {within}' if within else ''}"
    if origin is Literal:
        return alternatives([f"`{choice}`" for choice in get_args(kind)])
    words = {str: "a text", bool: "`True` or `False`", os.PathLike: "a path", Mapping: "a mapping", bytes: "bytes"}
    if origin in (Sequence, Iterable):
        return "a list of texts" if get_args(kind) == (str,) else "a list"
    return words.get(origin) or f"a `{getattr(origin, '__name__', origin)}`"


def _show(value: Any) -> str:
    text = repr(value)
    simple = value is None or isinstance(value, str | int | float | list | tuple | dict)
    return f"`{text}`" if simple and len(text) <= _SHOWN else f"a `{type(value).__name__}`"


def _way_out(value: Any, kinds: Sequence[tuple[Any, Range | None]]) -> str | None:
    if value is None:
        return "leave it out"
    if isinstance(value, str):
        for kind, _ in kinds:
            choices = get_args(kind) if get_origin(kind) is Literal else ()
            if choices and (hint := suggest(value, [str(choice) for choice in choices])):
                return hint
        if any(kind in (int, float) for kind, _ in kinds):
            return "give a number, without quotes"
    if any(callable(each) for each in (value if isinstance(value, list | tuple) else [value])):
        return "functions are not taken here: give a name"
    return None
