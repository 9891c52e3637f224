"""Batches for a model: rows in an order that depends on seed and epoch alone, converted, checked and fetched ahead."""

from __future__ import annotations

import itertools
import math
import queue
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Literal, TypeVar

import ml_dtypes
import numpy as np
import onnx_ir as ir

from onward.engines.distributed import Alone, Portion, ProcessGroup
from onward.errors import DataError, UnknownNameError, suggest
from onward.recipe.spec import check_options, lookup, parse
from onward.training.data.dataset import Batch, Dataset, bytes_of_row, pieces_of
from onward.training.data.matching import Binding, columns_of, is_float
from onward.training.data.objects import Stream
from onward.training.data.views import Order, WindowOrder

KINDS = {"normal": {"mean": 0.0, "std": 1.0}, "uniform": {"low": 0.0, "high": 1.0}}
"""Distributions of numpy's generators, and what they take in this order."""


class Noise:
    """What inputs get that no data are for: by name, a kind such as `"normal:std=0.5"`."""

    def __init__(self, kinds: Mapping[str, str], inputs: Mapping[str, ir.Value], seed: int):
        self._seed = seed
        self._kinds = {}
        for name, kind in kinds.items():
            if name not in inputs:
                raise UnknownNameError(f"there is no input `{name}` that could be noise", hint=suggest(name, inputs))
            spec = parse(kind)
            numbers = lookup("kind of noise", spec.name, KINDS)
            check_options(f"the noise `{spec.name}`", spec.options, numbers)
            self._kinds[name] = (spec.name, [*{**numbers, **spec.options}.values()], *_form(inputs[name]))

    def __call__(self, epoch: int, batch: int, rows: int) -> dict[str, np.ndarray]:
        """The noise for a batch."""
        made = {}
        for name, (kind, numbers, dtype, shape) in self._kinds.items():
            rng = np.random.default_rng((self._seed, epoch, batch, zlib.crc32(name.encode())))
            made[name] = getattr(rng, kind)(*numbers, (rows, *shape)).astype(dtype)
        return made


def _form(value: ir.Value) -> tuple[np.dtype, tuple[int, ...]]:
    """The type of an input, and the shape of one sample."""
    sizes = [] if value.shape is None else [size for size in value.shape[1:] if isinstance(size, int)]
    is_known = value.shape is not None and len(sizes) == len(value.shape) - 1
    if not is_known or value.dtype is None or not value.dtype.is_floating_point():
        raise DataError(
            f"`{value.name}` cannot be noise: it must be of a floating type, and the shape of a sample be known",
            hint="give it as data",
        )
    return value.dtype.numpy(), tuple(sizes)


T = TypeVar("T")

_PATIENCE = 0.1  # seconds until a thread that waits looks whether it is still needed
_END = object()


class _Failure:
    def __init__(self, error: BaseException):
        self.error = error


def prefetch(items: Iterable[T], depth: int) -> Iterator[T]:
    """The items, `depth` of them ahead. Errors come out where their item would; leaving early ends the thread."""
    ready: queue.Queue[Any] = queue.Queue(depth)
    is_over = threading.Event()

    def put(item: Any) -> bool:
        while not is_over.is_set():
            try:
                ready.put(item, timeout=_PATIENCE)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for item in items:
                if not put(item):
                    return
            put(_END)
        except BaseException as error:  # whatever it is belongs to the one who asked
            put(_Failure(error))

    thread = threading.Thread(target=work, name="onward-data", daemon=True)
    thread.start()
    try:
        while True:
            item = _get(ready)
            if item is _END:
                return
            if isinstance(item, _Failure):
                raise item.error
            yield item
    finally:
        is_over.set()
        thread.join(timeout=2)  # a stream that waits for something may stay; it is a daemon, and ends with the process


def _get(ready: queue.Queue[Any]) -> Any:
    while True:
        try:
            return ready.get(timeout=1)  # not for ever: some systems hear no Ctrl-C in a wait without an end
        except queue.Empty:
            continue


WINDOW = 512 << 20
"""Bytes of rows among which those of data in pieces are shuffled, unless it is said."""
_AHEAD = 64 << 20  # bytes of batches that are fetched ahead from data in pieces
_ORDERED_AT_ONCE = 1 << 16  # rows whose order is computed together


# ---- batches ---------------------------------------------------------------------------------------------------------
#


class Batches:
    """Batches of data or of a stream, epoch by epoch.

    - `size`, `shuffle`, `seed` and `last` are for data. A stream has batches and an order of its own.
    - `last` says what becomes of rows that do not fill a batch: "keep" (a smaller one), "drop", or "pad" (filled up
      with the first rows of the epoch; `samples` says how many are not).
    - `window`: within how many rows they are shuffled, after the pieces that data are read in; all rows if it is 0, or
      if it is not given and any row is read as quickly as the next. See `WindowOrder`.
    - `classes` are the numbers of classes of inputs that are labels, which must be less than that, or be `ignore`.
    - `noise` are further inputs, which are no data.
    - `group`: of each batch only the part of this process among them. Batches are the same however many there are.
    - `ahead` batches are fetched while one is used; 0 for none.
    """

    def __init__(
        self,
        data: Dataset | Stream,
        matched: Mapping[str, Binding | str],
        size: int = 32,
        *,
        shuffle: bool = True,
        seed: int = 0,
        last: Literal["keep", "drop", "pad"] = "keep",
        window: int | None = None,
        classes: Mapping[str, int] | None = None,
        ignore: int | None = None,
        noise: Noise | None = None,
        group: ProcessGroup | None = None,
        ahead: int = 2,
    ):
        if size < 1:
            raise DataError(f"a batch cannot have {size} rows", hint="use a size of at least 1")
        if last not in ("keep", "drop", "pad"):
            raise DataError(f"the last batch cannot be `{last}`", hint="use keep, drop or pad")
        self._data = data
        self._bindings = {name: _binding(given) for name, given in matched.items()}
        self._names = columns_of(self._bindings)
        self._size, self._shuffle, self._seed, self._last = size, shuffle, seed, last
        self._window = window
        self._classes, self._ignore, self._ahead = dict(classes or {}), ignore, ahead
        self._noise = noise or Noise({}, {}, seed)
        self._group = group or Alone()
        self._check_columns()
        if self.per_epoch == 0:
            hint = "make batches smaller, or keep the last one"
            raise DataError(f"{self._rows:,} rows do not fill a batch of {size}, and the rest is dropped", hint=hint)

    @property
    def per_epoch(self) -> int | None:
        """The number of batches in an epoch; None for a stream that does not know."""
        if isinstance(self._data, Stream):
            return self._data.batches_per_epoch
        return self._rows // self._size if self._last == "drop" else -(-self._rows // self._size)

    @property
    def rows(self) -> int | None:
        """How many rows a whole batch has; None for a stream, whose batches are as they are."""
        return None if isinstance(self._data, Stream) else min(self._rows, self._size)

    @property
    def is_padded(self) -> bool:
        """Whether the last batch may hold rows that were there before: `samples` tells."""
        return self._last == "pad" and isinstance(self._data, Dataset)

    def samples(self, index: int) -> int:
        """How many rows of batch `index` of an epoch of data are not padding."""
        return max(0, min(self._rows - index * self._size, self._size))

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, beginning with number `start`: exactly those that come when nothing is left out."""
        batches = self._of_stream(epoch, start) if isinstance(self._data, Stream) else self._of_data(epoch, start)
        ahead = prefetch(batches, self._count_ahead()) if self._ahead else batches
        return self._agree(ahead, epoch, start) if self._is_divided else ahead

    def _count_ahead(self) -> int:
        """How many batches to fetch ahead. Where a window begins, pieces must be read first: more of them hide that."""
        if isinstance(self._data, Stream) or pieces_of(self._data) is None:
            return self._ahead
        rows = -(-self._size // self._group.size)
        return max(self._ahead, _AHEAD // max(rows * bytes_of_row(self._data.columns, self._names), 1))

    # ---- where batches come from ----

    def _of_data(self, epoch: int, start: int) -> Iterator[Batch]:
        assert isinstance(self._data, Dataset)
        for number, rows in enumerate(self._orders(epoch, start), start):
            own = rows[self._group.share(len(rows))]
            made = self._convert(self._data.take(own, self._names), partial(_row, self._data, own))
            yield self._portion(made, self._noise(epoch, number, len(rows)), len(rows))

    def _orders(self, epoch: int, start: int) -> Iterator[np.ndarray]:
        """The rows of each batch. Their order is computed piece by piece, so that it takes no memory."""
        order = self._order(epoch) if self._shuffle else np.asarray
        at_once = max(_ORDERED_AT_ONCE // self._size, 1)
        count = self.per_epoch or 0
        for first in range(start, count, at_once):
            end = min(first + at_once, count) * self._size
            positions = np.arange(first * self._size, end if self._last == "pad" else min(end, self._rows))
            rows = order(positions % self._rows)
            yield from (rows[at : at + self._size] for at in range(0, len(rows), self._size))

    def _order(self, epoch: int) -> Order | WindowOrder:
        assert isinstance(self._data, Dataset)
        pieces, window = pieces_of(self._data), self._window
        if window is None and pieces is not None:
            window = max(WINDOW // max(bytes_of_row(self._data.columns, self._names), 1), 1)
        if not window or (pieces is None and window >= self._rows):
            return Order(self._rows, self._seed, epoch)
        if pieces is None:
            pieces = np.append(np.arange(0, self._rows, max(window // 16, 1)), self._rows)
        return WindowOrder(pieces, window, self._size, self._seed, epoch)

    def _of_stream(self, epoch: int, start: int) -> Iterator[Batch]:
        assert isinstance(self._data, Stream)
        found = self._data.epoch(epoch, start, size=self._size, drop=self._last == "drop", group=self._group)
        for number, batch in enumerate(found, start):
            for name in self._names:
                if name not in batch:
                    raise DataError(f"batch {number:,} of the stream has no column `{name}`, as the first one has")
            made = self._convert(batch, f"sample {{:,}} of batch {number:,}".format)
            if self._is_divided:
                yield made
                continue
            whole = _samples(made)
            own = self._group.share(whole)
            parts = {name: array[own] if array.ndim else array for name, array in made.items()}
            yield self._portion(parts, self._noise(epoch, number, whole), whole)

    def _agree(self, batches: Iterator[Batch], epoch: int, start: int) -> Iterator[Batch]:
        """Batches of which each process has read its own part, until one of them has no more.

        Processes talk here, so this is for the thread in which they train.
        """
        for number in itertools.count(start):
            own = next(batches, None)
            counts = self._group.gather(0 if own is None else _samples(own))
            if own is None or not all(counts):
                return
            before = sum(counts[: self._group.rank])
            noise = self._noise(epoch, number, sum(counts))
            more = {name: array[before : before + counts[self._group.rank]] for name, array in noise.items()}
            yield Portion(own | more, sum(counts))

    def _portion(self, made: Batch, noise: Batch, whole: int) -> Batch:
        own = self._group.share(whole)
        batch = made | {name: array[own] for name, array in noise.items()}
        return batch if self._group.size == 1 else Portion(batch, whole)

    @property
    def _is_divided(self) -> bool:
        """Whether each process reads a part of its own from a stream."""
        return isinstance(self._data, Stream) and self._data.is_divided and self._group.size > 1

    # ---- what is made of them ----

    @property
    def _rows(self) -> int:
        assert isinstance(self._data, Dataset)
        return len(self._data)

    def _convert(self, batch: Batch, where: Callable[[int], str]) -> Batch:
        made: Batch = {}
        for name, binding in self._bindings.items():
            for column in binding.columns:
                _check_numbers(column, batch[column], binding.dtype, where)
            made[name] = binding(batch)
            if name in self._classes:
                self._check_labels(name, made[name], where)
        return made

    def _check_columns(self) -> None:
        for name, binding in self._bindings.items():
            for column in binding.columns:
                there = self._data.columns.get(column)
                if there is None:
                    raise DataError(f"the data have no column `{column}`, which input `{name}` takes")
                if binding.classes is not None and there.classes != binding.classes:
                    hint = "both must have the same classes in the same order; or split one data set"
                    listed = f"{_few(there.classes)}, not {_few(binding.classes)}"
                    raise DataError(f"column `{column}` has other classes than it had before: {listed}", hint=hint)

    def _check_labels(self, name: str, labels: np.ndarray, where: Callable[[int], str]) -> None:
        classes = self._classes[name]
        if labels.size and 0 <= labels.min() <= labels.max() < classes:
            return
        is_wrong = (labels < 0) | (labels >= classes)
        if self._ignore is not None:
            is_wrong &= labels != self._ignore
        if is_wrong.any():
            at = np.argwhere(is_wrong)[0]
            label = int(labels[tuple(at)])
            message = f"label {label} in {where(at[0])} is out of range: input `{name}` has {classes} classes"
            ways = f"if {label} means no class: `cross_entropy:ignore_index={label}`; else correct the row"
            if label == classes and labels.min() > 0:
                ways = "if they begin at 1, subtract 1"
            elif classes <= label < 2 * classes:
                ways += f", or give the model more classes: `--new-head {label + 1}`"
            hint = f"labels go from 0 to {classes - 1}; {ways}"
            raise DataError(message, hint=hint)


def _samples(batch: Batch) -> int:
    return max((len(array) for array in batch.values() if array.ndim), default=1)


def _row(data: Dataset, rows: np.ndarray, at: int) -> str:
    return data.row(int(rows[at]))


def _binding(given: Binding | str) -> Binding:
    return Binding((given,)) if isinstance(given, str) else given


def _few(classes: tuple[str, ...] | None) -> str:
    return ", ".join((classes or ("none",))[:3]) + (", ..." if len(classes or ()) > 3 else "")


def _check_numbers(column: str, values: np.ndarray, wanted: np.dtype | None, where: Callable[[int], str]) -> None:
    """Refuse what would spread to every weight, and what its new type cannot hold."""
    if not values.size:
        return
    if is_float(values.dtype):
        _check_floats(column, values, wanted, where)
    elif wanted is not None and wanted.kind in "iu" and values.dtype.kind in "iu":
        if np.can_cast(values.dtype, wanted):
            return
        limits = np.iinfo(wanted)
        if values.min() < limits.min or values.max() > limits.max:
            _refuse(column, values, (values < limits.min) | (values > limits.max), wanted, where)


def _check_floats(column: str, values: np.ndarray, wanted: np.dtype | None, where: Callable[[int], str]) -> None:
    """No NaN, and no infinity but that below zero: masks of attention have it."""
    with np.errstate(invalid="ignore"):
        least, most = float(values.min()), float(values.max())  # both are NaN if one value is, without a copy
    if math.isnan(least) or most == math.inf:
        is_nan = math.isnan(least)
        at = np.argwhere(np.isnan(values) if is_nan else values == math.inf)[0]
        hint = "fill in what is missing, or leave the row out" if is_nan else "leave the row out, or put a limit to it"
        what = "NaN (not a number)" if is_nan else "infinite"
        raise DataError(f"column `{column}` is {what} in {where(at[0])}", hint=hint)
    if wanted is not None and is_float(wanted) and wanted.itemsize < values.dtype.itemsize:
        limit = float(ml_dtypes.finfo(wanted).max)  # type: ignore[no-untyped-call]
        if most > limit or least < -limit:
            is_large = np.isfinite(values) & (np.abs(values) > limit)
            if is_large.any():
                _refuse(column, values, is_large, wanted, where)


def _refuse(
    column: str, values: np.ndarray, is_large: np.ndarray, wanted: np.dtype, where: Callable[[int], str]
) -> None:
    at = np.argwhere(is_large)[0]
    raise DataError(f"column `{column}` is {values[tuple(at)]} in {where(at[0])}, too large for {wanted.name}")
