"""Matching of columns with model inputs: by name, else by type and shape if that is unambiguous."""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onward.errors import DataError, UnknownNameError, suggest
from onward.inspect.formatting import quantity
from onward.training.data.dataset import Batch, Column


@dataclass(frozen=True)
class InputType:
    """Type of an input, per sample."""

    dtype: np.dtype
    shape: tuple[int | None, ...] | None  # None: any

    @classmethod
    def by(cls, value: Any) -> InputType:
        """Return the type of a value with a `dtype` of onnx_ir and a `shape` with a batch axis."""
        shape = None
        if value.shape is not None:
            shape = tuple(dim if isinstance(dim, int) else None for dim in list(value.shape)[1:])
        return cls(np.dtype(value.dtype.numpy()), shape)

    def __str__(self) -> str:
        return f"{self.dtype.name}[...]" if self.shape is None else str(Column(self.dtype, self.shape))


@dataclass(frozen=True)
class Binding:
    """The columns of an input, and their conversion."""

    columns: tuple[str, ...]  # several: one number each, stacked to a row
    dtype: np.dtype | None = None  # None: unchanged
    shape: tuple[int, ...] | None = None  # of a sample; None: unchanged
    classes: tuple[str, ...] | None = None
    texts: tuple[str, ...] | None = None  # strings of class numbers, for a string input
    length: int | None = None  # bytes of a string, for a uint8 input
    note: str = ""  # for the user
    is_checked: bool = True  # False: a column that is only copied, whose numbers may be missing

    def __call__(self, batch: Batch) -> np.ndarray:
        arrays = [batch[name] for name in self.columns]
        values = arrays[0] if len(arrays) == 1 else np.stack(arrays, axis=1)
        if self.shape is not None:
            values = values.reshape(len(values), *self.shape)
        if self.texts is not None:
            values = np.asarray(self.texts, object)[values]
        if self.dtype is None or self.dtype == values.dtype:
            return values
        if self.length is not None:
            return _as_bytes(values, self.length)
        return values.astype(self.dtype)


def fit(
    names: Sequence[str], columns: Mapping[str, Column], expected: InputType, is_named: bool = False
) -> Binding | None:
    """Return the binding of an input to these columns, stacked if several; None if they do not fit.

    `is_named`: the user named the columns, so two classes may become 0 and 1 of a float input.
    """
    sources = [columns[name] for name in names]
    if (length := _text_length(expected)) is not None and len(sources) == 1 and _is_text(sources[0]):
        return Binding(tuple(names), expected.dtype, texts=sources[0].classes, length=length)
    if not all(_converts(source, expected.dtype, is_named) for source in sources):
        return None
    if len(sources) > 1 and any(source.shape for source in sources):
        return None
    stored = sources[0].shape if len(sources) == 1 else (len(sources),)
    shape = None
    if expected.shape is not None and (
        len(stored) != len(expected.shape)
        or any(dim not in (None, size) for size, dim in zip(stored, expected.shape, strict=True))
    ):
        shape = _reshape_to(stored, expected.shape)
        if shape is None:
            return None
    note = ""
    if sources[0].dtype == np.uint8 and is_float(expected.dtype):
        note = f"`{names[0]}` is not scaled: 0 to 255"
    if expected.dtype.kind == "O":
        return Binding(tuple(names), expected.dtype, shape, texts=sources[0].classes)
    return Binding(tuple(names), expected.dtype, shape, sources[0].classes, note=note)


def is_float(dtype: np.dtype) -> bool:
    return "float" in dtype.name  # NumPy has no kind for bfloat16 and float8


def _converts(column: Column, expected: np.dtype, is_named: bool) -> bool:
    """True if a conversion keeps the meaning: not from floats to integers, nor from classes to
    amounts.

    Integers may become narrower: each batch is checked.
    """
    source_dtype = column.dtype
    if expected.kind == "O":
        return source_dtype.kind in "UO" or column.classes is not None
    if column.classes is not None:
        return expected.kind in "iu" or (is_named and is_float(expected) and len(column.classes) == 2)
    if source_dtype.kind in "USO":
        return False
    if is_float(expected):
        return is_float(source_dtype) or source_dtype.kind in "iub"
    if expected.kind in "iu":
        return source_dtype.kind in "iub"
    return source_dtype == expected


def _is_text(column: Column) -> bool:
    return not column.shape and (column.dtype.kind in "UO" or column.classes is not None)


def _text_length(expected: InputType) -> int | None:
    """Return the number of bytes of text that an input takes, if it takes a row of bytes."""
    is_row = expected.dtype == np.uint8 and expected.shape is not None and len(expected.shape) == 1
    length = expected.shape[0] if is_row and expected.shape is not None else None
    return length if length is not None and length > 1 else None


def _as_bytes(texts: np.ndarray, length: int) -> np.ndarray:
    """Return text in UTF-8, truncated or padded with 0."""
    rows = [str(text).encode()[:length].ljust(length, b"\0") for text in texts]
    return np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), length).copy()


def _reshape_to(shape: tuple[int | None, ...], expected: tuple[int | None, ...]) -> tuple[int, ...] | None:
    """Return the expected shape if the reshape is unambiguous: one side is flat, or only ones differ."""
    old = tuple(dim for dim in shape if dim is not None)
    new = tuple(dim for dim in expected if dim is not None)
    if len(old) != len(shape) or len(new) != len(expected) or math.prod(old) != math.prod(new):
        return None
    is_flat = len(old) == 1 or len(new) == 1
    return new if is_flat or [dim for dim in old if dim != 1] == [dim for dim in new if dim != 1] else None


_NAMELESS = re.compile(r"(arr_)?\d+")  # elements of a tuple, and unnamed arrays of np.savez
_MOST_LISTED = 20
_TARGET_NAMES = ("target", "targets", "label", "labels", "y")
_ONE_HOT = "for one-hot labels, use the loss `ce:target=probabilities`"

Bindings = dict[str, Binding]


# ---- matching --------------------------------------------------------------------------------------------------------


def columns_of(bindings: Mapping[str, Binding]) -> list[str]:
    """Return the columns of all inputs, each once."""
    return list(dict.fromkeys(column for binding in bindings.values() for column in binding.columns))


def match(
    columns: Mapping[str, Column],
    inputs: Mapping[str, Any],
    mapping: Mapping[str, str | Sequence[str]] | None = None,
    may_be_noise: Collection[str] = (),
    class_targets: Collection[str] = (),
    targets: Collection[str] = (),
) -> Bindings:
    """Return the columns of each input.

    Args:
        inputs: values with a `dtype` (of onnx_ir) and a `shape` that begins with the batch.
        mapping: {input: column} for some inputs; a pattern (`pixel*`), commas or a list stack several columns.
        may_be_noise: inputs for which a hint may offer random numbers, such as that of a generator.
        class_targets: inputs with class indices of a loss whose classes are on axis 1.
        targets: inputs that losses compare outputs with.
    """
    expected = {name: InputType.by(value) for name, value in inputs.items()}
    return _Matcher(columns, expected, may_be_noise, class_targets, targets).match(mapping or {})


class _Matcher:
    """The columns of the data and the inputs of the model."""

    def __init__(
        self,
        columns: Mapping[str, Column],
        expected: Mapping[str, InputType],
        may_be_noise: Collection[str],
        class_targets: Collection[str],
        targets: Collection[str],
    ):
        self._columns, self._inputs = columns, expected
        self._may_be_noise, self._class_targets, self._targets = may_be_noise, class_targets, targets

    def match(self, mapping: Mapping[str, str | Sequence[str]]) -> Bindings:
        bound: Bindings = {}
        for name, source in mapping.items():
            if name not in self._inputs:
                hint = suggest(name, self._inputs) or _list_names("inputs", self._inputs)
                if name in _TARGET_NAMES and len(self._targets) == 1:
                    (target,) = self._targets
                    column = source if isinstance(source, str) else ",".join(source)
                    hint = f"this loss calls it `{target}`: {_column_option(target, column)}"
                raise UnknownNameError(f"the model has no input `{name}`", hint=hint)
            bound[name] = self._bind(name, self._resolve(source))
        for name in self._inputs:
            if name in self._columns and name not in bound:
                bound[name] = self._bind(name, [name])
        used = {column for binding in bound.values() for column in binding.columns}
        rest = [name for name in self._inputs if name not in bound]
        free = [name for name in self._columns if name not in used]
        bound |= self._by_position(rest, free) or self._only_way(rest, free)
        return {name: bound[name] for name in self._inputs}

    # ---- by name ----

    def _resolve(self, patterns: str | Sequence[str]) -> list[str]:
        """Return the columns of names or patterns; commas separate several."""
        names: list[str] = []
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            matches = [pattern] if pattern in self._columns else fnmatch.filter(self._columns, pattern)
            if not matches and len(parts := pattern.split(",")) > 1:
                matches = self._resolve([part.strip() for part in parts])
            if not matches:
                hint = " ".join(filter(None, [suggest(pattern, self._columns), _list_names("columns", self._columns)]))
                raise UnknownNameError(f"the data have no column `{pattern}`", hint=hint)
            names += matches
        return names

    def _bind(self, name: str, chosen: Sequence[str]) -> Binding:
        binding = fit(chosen, self._columns, self._inputs[name], is_named=True)
        if binding is not None:
            return binding
        expected, column = self._inputs[name], self._columns[chosen[0]]
        count = "" if len(chosen) == 1 else f", {len(chosen)} of them stacked"
        hint = f"convert the column, or use another: {_column_option(name, 'COLUMN')}"
        if expected.shape is not None and len(expected.shape) == 1 and 1 < len(chosen) != (expected.shape[0] or 0):
            hint = f"name {expected.shape[0] or 'other'} columns: {_column_option(name, 'A,B,...')}"
        if is_float(column.dtype) and expected.dtype.kind in "iu":
            hint = f"floats are not rounded to integers: convert them, as in `{chosen[0]}.astype(np.int64)`"
        if self._may_be_one_hot(name, chosen):
            hint = _ONE_HOT
        hint = self._text_hint(name, chosen) or self._axis_hint(name, chosen) or hint
        raise self._misfit(f"input `{name}` takes {expected}, but column `{chosen[0]}` is {column}{count}", hint)

    def _text_hint(self, name: str, columns: Sequence[str]) -> str | None:
        """Return the option that tokenizes, if an input takes token indices and a column is text."""
        expected = self._inputs[name]
        texts = [column for column in columns if _is_text(self._columns[column])]
        if not texts or expected.dtype.kind not in "iu" or expected.shape is None or len(expected.shape) != 1:
            return None
        length = f",length={expected.shape[0]}" if expected.shape[0] is not None else ""
        specs = f"{name}=tokenize:wordpiece,vocabulary=vocab.txt{length}"
        return f"to make it from the text in `{texts[0]}`: --preprocess '{specs}'"

    def _axis_hint(self, name: str, chosen: Sequence[str]) -> str | None:
        """Return the axis of a loss for language models, if labels have an index per position."""
        shape, column = self._inputs[name].shape, self._columns[chosen[0]]
        if name not in self._class_targets or len(chosen) > 1 or column.dtype.kind not in "iu" or not column.shape:
            return None
        if shape is None or len(column.shape) != len(shape):
            return None
        return "if the model's classes are on its last axis, as in language models: `--loss ce:axis=-1`"

    def _fit(self, name: str, *chosen: str) -> Binding | None:
        return fit(chosen, self._columns, self._inputs[name])

    # ---- by type and shape ----

    def _by_position(self, rest: list[str], free: list[str]) -> Bindings:
        """Match unnamed columns, as many as inputs, in order, if they fit."""
        if len(rest) != len(free) or not all(_NAMELESS.fullmatch(name) for name in free):
            return {}
        bindings = {name: self._fit(name, column) for name, column in zip(rest, free, strict=True)}
        fits = {name: binding for name, binding in bindings.items() if binding is not None}
        return fits if len(fits) == len(bindings) else {}

    def _only_way(self, rest: list[str], free: list[str]) -> Bindings:
        fits = {name: {c: binding for c in free if (binding := self._fit(name, c)) is not None} for name in rest}
        solutions = list(itertools.islice(self._solutions(fits, free), 2))
        if len(solutions) == 1:
            return solutions[0]
        name = max(rest, key=lambda name: len(fits[name]))
        if not solutions:
            unfit = [name for name in rest if not fits[name]]
            # An input that can stack columns is not the one that lacks data.
            name = next((name for name in unfit if not self._may_stack(name, free)), (*unfit, name)[0])
        labels = self._class_labels(rest, free) if not solutions else None
        if labels is not None and not fits[labels[0]]:
            name = labels[0]
        candidates = list(fits[name])
        if candidates:
            listed = [*(f"`{column}`" for column in candidates[:4]), "..."][: len(candidates)]
            several = " or several" if len(candidates) == 1 and solutions else ""
            why = f"input `{name}` could be {' or '.join(listed)}{several}"
            raise self._misfit(why, f"name its column: {_column_option(name, candidates[0])}")
        idle = [column for column in free if not any(column in columns for columns in fits.values())]
        specific = self._hint_at_several(name, rest, free) or self._float_label_hint(name, rest, free)
        if labels is not None:
            specific = f"if `{labels[1]}` holds class labels: `--loss cross_entropy`"
        hint = specific or f"name its column: {_column_option(name, 'COLUMN')}"
        if not specific and (suggestion := suggest(name, free)):
            hint = f"{suggestion} It must be {self._inputs[name]}"
        elif not idle and name in self._may_be_noise:
            hint = f'if it is random: --noise {name}=normal, or noise={{"{name}": "normal"}}; else {hint}'
        if any(self._may_be_one_hot(name, [column]) for column in idle):
            hint = _ONE_HOT
        axis_hints = (self._axis_hint(name, [column]) for column in idle)
        hint = self._text_hint(name, idle) or next(filter(None, axis_hints), hint)
        raise self._misfit(f"no column can be input `{name}`", hint)

    def _hint_at_several(self, name: str, rest: list[str], free: list[str]) -> str | None:
        """Return a hint to stack columns of one number each, if the input takes a row of numbers."""
        shape = self._inputs[name].shape
        if shape is None or len(shape) != 1 or shape[0] is None or shape[0] < 2:
            return None
        unstackable = self._unstackable(name, free)
        numbers = [column for column in free if column not in unstackable]
        if not numbers:
            return None
        if missing := self._missing_numbers(name, rest, free):
            return missing
        listed = ", ".join(f'"{column}"' for column in numbers[: min(shape[0], 3)]) + (", ..." if shape[0] > 3 else "")
        typed = "PATTERN" if shape[0] > 3 else ",".join(numbers[: shape[0]])
        return f"name {shape[0]} columns: columns={{\"{name}\": [{listed}]}}, or --column '{name}={typed}'"

    def _missing_numbers(self, name: str, rest: list[str], free: list[str]) -> str | None:
        """Return that the columns are too few for a row of numbers and the inputs of one number."""
        (size,) = self._inputs[name].shape or ()
        assert size is not None
        count = len(free) - len(self._unstackable(name, free))
        others = [other for other in rest if self._inputs[other].shape == ()]
        if count >= size + len(others):
            return None
        takers = f"`{name}` takes {size} numbers" + "".join(f", `{other}` 1" for other in others)
        return f"{takers}: the data have {quantity(count, 'column')} of numbers; add what is missing"

    def _may_stack(self, name: str, free: list[str]) -> bool:
        """True if an input takes a row of numbers, and the columns have as many."""
        shape = self._inputs[name].shape
        if shape is None or len(shape) != 1 or shape[0] is None or shape[0] < 2:
            return False
        return len(free) - len(self._unstackable(name, free)) >= shape[0]

    def _class_labels(self, rest: list[str], free: list[str]) -> tuple[str, str] | None:
        """Return a target of several numbers and the only free column that may hold class labels."""
        rows = [
            name
            for name in rest
            if name in self._targets and is_float(self._inputs[name].dtype) and len(self._inputs[name].shape or ()) == 1
        ]
        scalars = [(name, column) for name in free if not (column := self._columns[name]).shape]
        labels = [name for name, column in scalars if column.classes is not None or column.dtype.kind in "iu"]
        return (rows[0], labels[0]) if rows and len(labels) == 1 else None

    def _float_label_hint(self, name: str, rest: list[str], free: list[str]) -> str | None:
        """Return what labels need if all free columns are floats: their own column, or a conversion."""
        expected = self._inputs[name]
        floats = [c for c in free if is_float(self._columns[c].dtype) and not self._columns[c].shape]
        if expected.dtype.kind not in "iu" or expected.shape != () or not floats:
            return None
        missing = (self._missing_numbers(row, rest, free) for row in rest if self._may_stack(row, free))
        subject, example = (f"`{floats[0]}`", floats[0]) if len(floats) == 1 else ("one column", "y")
        convert = f"if {subject} holds the labels, they are floats: convert them, as in `{example}.astype(np.int64)`"
        return next(filter(None, missing), convert)

    def _may_be_one_hot(self, name: str, chosen: Sequence[str]) -> bool:
        """True if an input takes a class index, and a column has a number per class."""
        expected, shape = self._inputs[name], self._columns[chosen[0]].shape
        return (
            len(chosen) == 1
            and expected.dtype.kind in "iu"
            and expected.shape == ()
            and len(shape) == 1
            and shape != (1,)
        )

    def _solutions(self, fits: Mapping[str, Mapping[str, Binding]], free: list[str]) -> Iterator[Bindings]:
        """Yield the ways to give each input one column, or one input all remaining columns stacked.

        An ambiguous way is yielded twice.
        """
        for stacked in [None, *fits]:
            others = {name: columns for name, columns in fits.items() if name != stacked}
            required = self._unstackable(stacked, free) if stacked is not None else ()
            chosen = _match(others, required)
            if chosen is None:
                continue
            solution = {name: others[name][column] for name, column in chosen.items()}
            if stacked is not None:
                remaining = [name for name in free if name not in chosen.values()]
                binding = self._fit(stacked, *remaining) if len(remaining) > 1 else None
                if binding is None:
                    continue
                solution[stacked] = binding
            # It is the only assignment if no input can do without its column.
            without = ({**others, name: others[name].keys() - {column}} for name, column in chosen.items())
            is_only = all(_match(choices, required) is None for choices in without)
            yield from [solution] if is_only else [solution, solution]

    def _unstackable(self, name: str, free: list[str]) -> list[str]:
        """Return the columns that cannot be one number of an input."""
        number = dataclasses.replace(self._inputs[name], shape=())
        return [c for c in free if self._columns[c].shape or fit([c], self._columns, number) is None]

    def _misfit(self, why: str, hint: str) -> DataError:
        lines = [f"the data do not fit the model: {why}"]
        sides: list[tuple[str, Mapping[str, object]]] = [
            ("the model takes, per sample:", self._inputs),
            ("the data have, per row:", self._columns),
        ]
        for title, side in sides:
            lines += [f"  {title}", *(f"    {name}: {value}" for name, value in list(side.items())[:_MOST_LISTED])]
            if len(side) > _MOST_LISTED:
                lines.append(f"    and {len(side) - _MOST_LISTED} more")
        return DataError("\n".join(lines), hint=hint)


def _column_option(name: str, column: str) -> str:
    return f'--column {name}={column}, or columns={{"{name}": "{column}"}}'


def _list_names(noun: str, names: Mapping[str, object]) -> str:
    return f"{noun} are " + ", ".join(f"`{name}` ({value})" for name, value in list(names.items())[:_MOST_LISTED])


# ---- one column for each input ---------------------------------------------------------------------------------------


def _match(choices: Mapping[str, Iterable[str]], needed: Collection[str]) -> dict[str, str] | None:
    """Return a choice per taker that uses all `needed` choices, or None."""
    takers: dict[str, list[str]] = {choice: [] for choice in needed}
    for taker, options in choices.items():
        for choice in options:
            takers.setdefault(choice, []).append(taker)
    chosen: dict[str, str] = {}
    taken_by: dict[str, str] = {}
    if not all(choice in taken_by or _augment(choice, takers, taken_by, chosen) for choice in needed):
        return None
    return chosen if all(taker in chosen or _augment(taker, choices, chosen, taken_by) for taker in choices) else None


def _augment(start: str, edges: Mapping[str, Iterable[str]], mates: dict[str, str], back: dict[str, str]) -> bool:
    """Match `start` along an augmenting path; matched nodes stay matched. False without a path."""
    came_from: dict[str, str] = {}
    waiting = [start]
    for node in waiting:  # grows meanwhile
        for neighbor in edges[node]:
            if neighbor in came_from:
                continue
            came_from[neighbor] = node
            if neighbor not in back:
                _flip(neighbor, came_from, mates, back)
                return True
            waiting.append(back[neighbor])
    return False


def _flip(end: str, came_from: Mapping[str, str], mates: dict[str, str], back: dict[str, str]) -> None:
    """Exchange partners along the path to `end`."""
    neighbor: str | None = end
    while neighbor is not None:
        node = came_from[neighbor]
        previous = mates.get(node)
        mates[node], back[neighbor] = neighbor, node
        neighbor = previous
