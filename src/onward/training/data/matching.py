"""Which column goes to which input of the model: by name, else by type and shape where there is exactly one way."""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from onward.errors import DataError, UnknownNameError, suggest
from onward.training.data.dataset import Batch, Column


@dataclass(frozen=True)
class Wanted:
    """What an input takes per sample."""

    dtype: np.dtype
    shape: tuple[int | None, ...] | None  # None: whatever comes

    @classmethod
    def by(cls, value: Any) -> Wanted:
        """By an input: something with a `dtype` (of onnx_ir) and a `shape` that begins with the batch."""
        shape = None
        if value.shape is not None:
            shape = tuple(dim if isinstance(dim, int) else None for dim in list(value.shape)[1:])
        return cls(np.dtype(value.dtype.numpy()), shape)

    def __str__(self) -> str:
        return f"{self.dtype.name}[...]" if self.shape is None else str(Column(self.dtype, self.shape))


@dataclass(frozen=True)
class Binding:
    """How an input is made of columns."""

    columns: tuple[str, ...]  # several: numbers that together are one row
    dtype: np.dtype | None = None  # None: as it is
    shape: tuple[int, ...] | None = None  # of a sample; None: as it is
    classes: tuple[str, ...] | None = None
    texts: tuple[str, ...] | None = None  # what numbers stand for, where the input takes text
    length: int | None = None  # of text that is given as so many bytes
    note: str = ""  # what a user should know

    def __call__(self, batch: Batch) -> np.ndarray:
        parts = [batch[name] for name in self.columns]
        values = parts[0] if len(parts) == 1 else np.stack(parts, axis=1)
        if self.shape is not None:
            values = values.reshape(len(values), *self.shape)
        if self.texts is not None:
            values = np.asarray(self.texts, object)[values]
        if self.dtype is None or self.dtype == values.dtype:
            return values
        if self.length is not None:
            return _as_bytes(values, self.length)
        return values.astype(self.dtype)


def fit(names: Sequence[str], columns: Mapping[str, Column], wanted: Wanted, is_named: bool = False) -> Binding | None:
    """How these columns, side by side if there are several, make what is wanted; None if they do not.

    `is_named`: that it is these is certain, so that two classes may be no and yes, 0 and 1.
    """
    parts = [columns[name] for name in names]
    if (length := _text_length(wanted)) is not None and len(parts) == 1 and _is_text(parts[0]):
        return Binding(tuple(names), wanted.dtype, texts=parts[0].classes, length=length)
    if not all(_converts(part, wanted.dtype, is_named) for part in parts):
        return None
    if len(parts) > 1 and any(part.shape for part in parts):
        return None
    given = parts[0].shape if len(parts) == 1 else (len(parts),)
    shape = None
    if wanted.shape is not None and not _is_same(given, wanted.shape):
        shape = _reshape_to(given, wanted.shape)
        if shape is None:
            return None
    note = ""
    if parts[0].dtype == np.uint8 and is_float(wanted.dtype):
        note = f"`{names[0]}` is given as it is, 0 to 255, not scaled"
    if wanted.dtype.kind == "O":
        return Binding(tuple(names), wanted.dtype, shape, texts=parts[0].classes)
    return Binding(tuple(names), wanted.dtype, shape, parts[0].classes, note=note)


def is_float(dtype: np.dtype) -> bool:
    return "float" in dtype.name  # bfloat16 and its like are of no kind that numpy knows


def _converts(column: Column, wanted: np.dtype, is_named: bool) -> bool:
    """Whether a conversion keeps the meaning: never of fractions to whole numbers, nor of classes to amounts.

    Whole numbers may become narrower: each batch is checked.
    """
    given = column.dtype
    if wanted.kind == "O":
        return _is_text(column)
    if column.classes is not None:
        return wanted.kind in "iu" or (is_named and is_float(wanted) and len(column.classes) == 2)
    if given.kind in "USO":
        return False
    if is_float(wanted):
        return is_float(given) or given.kind in "iub"
    if wanted.kind in "iu":
        return given.kind in "iub"
    return given == wanted


def _is_text(column: Column) -> bool:
    return not column.shape and (column.dtype.kind in "UO" or column.classes is not None)


def _text_length(wanted: Wanted) -> int | None:
    """How many bytes of text an input takes, if that is what it takes: a row of them."""
    is_row = wanted.dtype == np.uint8 and wanted.shape is not None and len(wanted.shape) == 1
    length = wanted.shape[0] if is_row and wanted.shape is not None else None
    return length if length is not None and length > 1 else None


def _as_bytes(texts: np.ndarray, length: int) -> np.ndarray:
    """Text in UTF-8, cut off or filled up with 0."""
    rows = [str(text).encode()[:length].ljust(length, b"\0") for text in texts]
    return np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), length).copy()


def _is_same(given: tuple[int | None, ...], wanted: tuple[int | None, ...]) -> bool:
    return len(given) == len(wanted) and all(b is None or a == b for a, b in zip(given, wanted, strict=True))


def _reshape_to(given: tuple[int | None, ...], wanted: tuple[int | None, ...]) -> tuple[int, ...] | None:
    """The wanted shape, if values in their order can mean only that: one of both is flat, or only ones differ."""
    old = tuple(dim for dim in given if dim is not None)
    new = tuple(dim for dim in wanted if dim is not None)
    if len(old) != len(given) or len(new) != len(wanted) or math.prod(old) != math.prod(new):
        return None
    is_flat = len(old) == 1 or len(new) == 1
    return new if is_flat or [dim for dim in old if dim != 1] == [dim for dim in new if dim != 1] else None


_NAMELESS = re.compile(r"(arr_)?\d+")  # parts of a tuple, and what np.savez calls an array without a name
_MOST_LISTED = 20
_ONE_HOT = "if it has a number for each class, as one-hot labels do, say so to the loss: `ce:target=probabilities`"

Way = dict[str, Binding]


# ---- matching --------------------------------------------------------------------------------------------------------


def columns_of(bindings: Mapping[str, Binding]) -> list[str]:
    """Return the columns of all inputs, each once."""
    return list(dict.fromkeys(column for binding in bindings.values() for column in binding.columns))


def match(
    columns: Mapping[str, Column],
    inputs: Mapping[str, Any],
    mapping: Mapping[str, str | Sequence[str]] | None = None,
    may_be_noise: Collection[str] = (),
) -> Way:
    """Return the columns of each input.

    Args:
        inputs: values with a `dtype` (of onnx_ir) and a `shape` that begins with the batch.
        mapping: {input: column} for some; a pattern (`pixel*`) or a list means several columns side by side.
        may_be_noise: inputs for which a hint may offer random numbers, such as that of a generator.
    """
    wanted = {name: Wanted.by(value) for name, value in inputs.items()}
    return _Sides(columns, wanted, may_be_noise).match(mapping or {})


class _Sides:
    """The columns of the data and the inputs of the model."""

    def __init__(self, columns: Mapping[str, Column], wanted: Mapping[str, Wanted], may_be_noise: Collection[str]):
        self._columns, self._wanted, self._may_be_noise = columns, wanted, may_be_noise

    def match(self, mapping: Mapping[str, str | Sequence[str]]) -> Way:
        bound: Way = {}
        for name, given in mapping.items():
            if name not in self._wanted:
                hint = suggest(name, self._wanted) or _list_names("inputs", self._wanted)
                raise UnknownNameError(f"the model has no input `{name}`", hint=hint)
            bound[name] = self._bind(name, self._resolve(given))
        for name in self._wanted:
            if name in self._columns and name not in bound:
                bound[name] = self._bind(name, [name])
        used = {column for binding in bound.values() for column in binding.columns}
        rest = [name for name in self._wanted if name not in bound]
        free = [name for name in self._columns if name not in used]
        bound |= self._by_position(rest, free) or self._only_way(rest, free)
        return {name: bound[name] for name in self._wanted}

    # ---- as the user says, or by name ----

    def _resolve(self, given: str | Sequence[str]) -> list[str]:
        """The columns that are meant by names or patterns."""
        names: list[str] = []
        for pattern in [given] if isinstance(given, str) else given:
            found = [pattern] if pattern in self._columns else fnmatch.filter(self._columns, pattern)
            if not found:
                hint = " ".join(filter(None, [suggest(pattern, self._columns), _list_names("columns", self._columns)]))
                raise UnknownNameError(f"the data have no column `{pattern}`", hint=hint)
            names += found
        return names

    def _bind(self, name: str, chosen: Sequence[str]) -> Binding:
        binding = fit(chosen, self._columns, self._wanted[name], is_named=True)
        if binding is not None:
            return binding
        wanted, column = self._wanted[name], self._columns[chosen[0]]
        together = "" if len(chosen) == 1 else f", {len(chosen)} of them side by side"
        hint = f"convert the column, or choose another: {_say(name, 'COLUMN')}"
        if is_float(column.dtype) and wanted.dtype.kind in "iu":
            hint = "numbers with a fraction are not rounded; if these are whole numbers, store them as such"
        if self._may_be_one_hot(name, chosen):
            hint = _ONE_HOT
        raise self._misfit(f"input `{name}` takes {wanted}, but column `{chosen[0]}` is {column}{together}", hint)

    def _fit(self, name: str, *chosen: str) -> Binding | None:
        return fit(chosen, self._columns, self._wanted[name])

    # ---- by what fits ----

    def _by_position(self, rest: list[str], free: list[str]) -> Way:
        """Columns without names, as many as inputs, mean those in their order, if they fit."""
        if len(rest) != len(free) or not all(_NAMELESS.fullmatch(name) for name in free):
            return {}
        found = {name: self._fit(name, column) for name, column in zip(rest, free, strict=True)}
        fitting = {name: binding for name, binding in found.items() if binding is not None}
        return fitting if len(fitting) == len(found) else {}

    def _only_way(self, rest: list[str], free: list[str]) -> Way:
        fitting = {name: {c: one for c in free if (one := self._fit(name, c)) is not None} for name in rest}
        ways = list(itertools.islice(self._ways(fitting, free), 2))
        if len(ways) == 1:
            return ways[0]
        name = max(rest, key=lambda one: len(fitting[one]))
        if not ways:
            name = next((name for name in rest if not fitting[name]), name)
        found = list(fitting[name])
        if found:
            could = [*(f"`{column}`" for column in found[:4]), "..."][: len(found)]
            why = f"input `{name}` could be {' or '.join(could)}" + (" or several" if len(found) == 1 and ways else "")
            raise self._misfit(why, f"say which column it is: {_say(name, found[0])}")
        meant = suggest(name, free)
        idle = [column for column in free if not any(column in columns for columns in fitting.values())]
        hint = self._hint_at_several(name, rest, free) or f"say which column it is: {_say(name, 'COLUMN')}"
        if meant:
            hint = f"{meant} It must be {self._wanted[name]}"
        elif not idle and name in self._may_be_noise:
            hint = f'if it is random: --noise {name}=normal, or noise={{"{name}": "normal"}}; else {hint}'
        if any(self._may_be_one_hot(name, [column]) for column in idle):
            hint = _ONE_HOT
        raise self._misfit(f"no column can be input `{name}`", hint)

    def _hint_at_several(self, name: str, rest: list[str], free: list[str]) -> str | None:
        """Say how columns of one number each make a row, if that is what an input takes."""
        shape = self._wanted[name].shape
        if shape is None or len(shape) != 1 or shape[0] is None or shape[0] < 2:
            return None
        left_out = self._not_beside_others(name, free)
        numbers = [column for column in free if column not in left_out]
        others = [other for other in rest if self._wanted[other].shape == ()]
        if not numbers:
            return None
        if len(numbers) < shape[0] + len(others):
            takers = f"`{name}` takes {shape[0]} numbers" + "".join(f", `{other}` 1" for other in others)
            return f"{takers}: the data have {len(numbers)} columns of numbers; add what is missing"
        listed = ", ".join(f'"{column}"' for column in numbers[: min(shape[0], 3)]) + (", ..." if shape[0] > 3 else "")
        return f"name {shape[0]} columns: columns={{\"{name}\": [{listed}]}}, or --column '{name}=PATTERN'"

    def _may_be_one_hot(self, name: str, chosen: Sequence[str]) -> bool:
        """Whether an input takes the number of a class, and a column has a number for each class."""
        wanted, shape = self._wanted[name], self._columns[chosen[0]].shape
        return (
            len(chosen) == 1 and wanted.dtype.kind in "iu" and wanted.shape == () and len(shape) == 1 and shape != (1,)
        )

    def _ways(self, fitting: Mapping[str, Mapping[str, Binding]], free: list[str]) -> Iterator[Way]:
        """Ways to give each input a column of its own, or one of them all numbers that are left, side by side.

        All there are, as long as there is one at most of each kind; of many, two.
        """
        for several in [None, *fitting]:
            others = {name: columns for name, columns in fitting.items() if name != several}
            alone = self._not_beside_others(several, free) if several is not None else ()
            found = assign(others, alone)
            if found is None:
                continue
            way = {name: others[name][column] for name, column in found.chosen.items()}
            if several is not None:
                used = set(found.chosen.values())
                left = [name for name in free if name not in used]
                together = self._fit(several, *left) if len(left) > 1 else None
                if together is None:
                    continue
                way[several] = together
            yield from [way] if found.is_only else [way, way]

    def _not_beside_others(self, name: str, free: list[str]) -> list[str]:
        """The columns that cannot be a part of what an input gets."""
        part = dataclasses.replace(self._wanted[name], shape=())
        return [c for c in free if self._columns[c].shape or fit([c], self._columns, part) is None]

    def _misfit(self, why: str, hint: str) -> DataError:
        lines = [f"the data do not fit the model: {why}"]
        sides: list[tuple[str, Mapping[str, object]]] = [
            ("the model takes, per sample:", self._wanted),
            ("the data have, per row:", self._columns),
        ]
        for title, side in sides:
            lines += [f"  {title}", *(f"    {name}: {what}" for name, what in list(side.items())[:_MOST_LISTED])]
            if len(side) > _MOST_LISTED:
                lines.append(f"    and {len(side) - _MOST_LISTED} more")
        return DataError("\n".join(lines), hint=hint)


def _say(name: str, column: str) -> str:
    return f'--column {name}={column}, or columns={{"{name}": "{column}"}}'


def _list_names(what: str, names: Mapping[str, object]) -> str:
    return f"{what} are " + ", ".join(f"`{name}` ({kind})" for name, kind in list(names.items())[:_MOST_LISTED])


# ---- one column for each input ---------------------------------------------------------------------------------------


class Assignment(NamedTuple):
    chosen: dict[str, str]
    is_only: bool


def assign(choices: Mapping[str, Iterable[str]], needed: Collection[str] = ()) -> Assignment | None:
    """A choice for each taker, in which all that are `needed` are taken; None if there is no way.

    It is the only one if no taker can do without what it has: any other way gives something else to somebody.
    """
    chosen = _match(choices, needed)
    if chosen is None:
        return None
    others = ({**choices, taker: [o for o in choices[taker] if o != one]} for taker, one in chosen.items())
    return Assignment(chosen, all(_match(other, needed) is None for other in others))


def _match(choices: Mapping[str, Iterable[str]], needed: Collection[str]) -> dict[str, str] | None:
    takers: dict[str, list[str]] = {one: [] for one in needed}
    for taker, ones in choices.items():
        for one in ones:
            takers.setdefault(one, []).append(taker)
    chosen: dict[str, str] = {}
    taken_by: dict[str, str] = {}
    if not all(one in taken_by or _augment(one, takers, taken_by, chosen) for one in needed):
        return None
    return chosen if all(taker in chosen or _augment(taker, choices, chosen, taken_by) for taker in choices) else None


def _augment(start: str, edges: Mapping[str, Iterable[str]], mates: dict[str, str], back: dict[str, str]) -> bool:
    """Give `start` a partner on the other side. Whoever has one on either side still has one afterwards."""
    came_from: dict[str, str] = {}
    waiting = [start]
    for here in waiting:  # which grows
        for there in edges[here]:
            if there in came_from:
                continue
            came_from[there] = here
            if there not in back:
                _turn(there, came_from, mates, back)
                return True
            waiting.append(back[there])
    return False


def _turn(end: str, came_from: Mapping[str, str], mates: dict[str, str], back: dict[str, str]) -> None:
    """Exchange partners along the path that ends here."""
    there: str | None = end
    while there is not None:
        here = came_from[there]
        before = mates.get(here)
        mates[here], back[there] = there, here
        there = before
