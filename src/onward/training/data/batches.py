"""Batches for a model, converted, checked and prefetched. Their order depends on seed and epoch only."""

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
from onward.training.data.dataset import Batch, Dataset, bytes_of_row
from onward.training.data.matching import Binding, columns_of, is_float
from onward.training.data.objects import Stream
from onward.training.data.views import Order, WindowOrder

KINDS = {"normal": {"mean": 0.0, "std": 1.0}, "uniform": {"low": 0.0, "high": 1.0}}
"""Distributions of NumPy generators, with their arguments in order."""


class Noise:
    """Random inputs that are not in the data: by name, a kind such as `"normal:std=0.5"`."""

    def __init__(self, kinds: Mapping[str, str], inputs: Mapping[str, ir.Value], seed: int):
        self._seed = seed
        self._kinds = {}
        for name, text in kinds.items():
            if name not in inputs:
                raise UnknownNameError(f"the model has no input `{name}` for noise", hint=suggest(name, inputs))
            spec = parse(text)
            numbers = lookup("kind of noise", spec.name, KINDS)
            check_options(f"the noise `{spec.name}`", spec.options, numbers)
            self._kinds[name] = (spec.name, [*{**numbers, **spec.options}.values()], *_form(inputs[name]))

    def __call__(self, epoch: int, batch: int, rows: int) -> dict[str, np.ndarray]:
        """Return the noise of a batch."""
        arrays = {}
        for name, (distribution, numbers, dtype, shape) in self._kinds.items():
            rng = np.random.default_rng((self._seed, epoch, batch, zlib.crc32(name.encode())))
            arrays[name] = getattr(rng, distribution)(*numbers, (rows, *shape)).astype(dtype)
        return arrays


def _form(value: ir.Value) -> tuple[np.dtype, tuple[int, ...]]:
    """Return the type of an input and the shape of a sample."""
    sizes = [] if value.shape is None else [size for size in value.shape[1:] if isinstance(size, int)]
    is_static = value.shape is not None and len(sizes) == len(value.shape) - 1
    if not is_static or value.dtype is None or not value.dtype.is_floating_point():
        raise DataError(
            f"`{value.name}` cannot be noise: noise needs a float type and a static sample shape",
            hint="pass it as data",
        )
    return value.dtype.numpy(), tuple(sizes)


T = TypeVar("T")

_PATIENCE = 0.1  # seconds between two checks whether the consumer has gone
_END = object()


class _Failure:
    def __init__(self, error: BaseException):
        self.error = error


def prefetch(items: Iterable[T], depth: int) -> Iterator[T]:
    """Yield the items, with `depth` of them prefetched by a thread.

    Errors are raised at their item. Closing the generator ends the thread.
    """
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
        except BaseException as error:  # raised in the consumer
            put(_Failure(error))

    thread = threading.Thread(target=work, name="onward-data", daemon=True)
    thread.start()
    try:
        while True:
            try:
                item = ready.get(timeout=1)  # some systems ignore Ctrl-C in a wait without timeout
            except queue.Empty:
                continue
            if item is _END:
                return
            if isinstance(item, _Failure):
                raise item.error
            yield item
    finally:
        is_over.set()
        thread.join(timeout=2)  # a blocked stream may stay: it is a daemon thread


WINDOW = 512 << 20
"""Bytes of rows that are shuffled together, for data in pieces (default)."""
_AHEAD = 64 << 20  # bytes of batches that are prefetched from data in pieces
_ORDERED_AT_ONCE = 1 << 16  # rows whose order is computed together


# ---- batches ---------------------------------------------------------------------------------------------------------


class Batches:
    """Batches of a dataset or a stream, epoch by epoch.

    - `size`, `shuffle`, `seed` and `last` are for datasets. A stream has its own batches and order.
    - `last`: what to do with an incomplete last batch: "keep", "drop", or "pad" (with the first
      rows of the epoch; `samples` counts the others).
    - `window`: number of rows that are shuffled together, after the pieces of the data; 0 for all
      rows, the default if any row is as fast to read as the next. See `WindowOrder`.
    - `classes`: number of classes of each label input. Labels must be smaller, or `ignore`.
    - `noise`: further inputs that are not in the data.
    - `group`: processes that share each batch. Batches do not depend on their number.
    - `ahead`: number of prefetched batches; 0 for none.
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
            raise DataError(f"the batch size is {size}", hint="use a batch size of at least 1")
        if last not in ("keep", "drop", "pad"):
            raise DataError(f"`last` is `{last}`", hint="use `keep`, `drop` or `pad`")
        self._data = data
        self._bindings = {
            name: Binding((source,)) if isinstance(source, str) else source for name, source in matched.items()
        }
        self._names = columns_of(self._bindings)
        self._size, self._shuffle, self._seed, self._last = size, shuffle, seed, last
        self._window = window
        self._classes, self._ignore, self._ahead = dict(classes or {}), ignore, ahead
        self._noise = noise or Noise({}, {}, seed)
        self._group = group or Alone()
        self._check_columns()
        if self.per_epoch == 0:
            hint = "use a smaller `batch_size`, or `last=keep`"
            raise DataError(f"{self._rows:,} rows do not fill a batch of {size}", hint=hint)

    @property
    def per_epoch(self) -> int | None:
        """Return the number of batches per epoch; None for a stream of unknown length."""
        if isinstance(self._data, Stream):
            return self._data.batches_per_epoch
        return self._rows // self._size if self._last == "drop" else -(-self._rows // self._size)

    @property
    def rows(self) -> int | None:
        """Return the number of rows of a full batch; None for a stream."""
        return None if isinstance(self._data, Stream) else min(self._rows, self._size)

    @property
    def is_padded(self) -> bool:
        """True if the last batch may be padded: `samples` counts the rows that are not padding."""
        return self._last == "pad" and isinstance(self._data, Dataset)

    def samples(self, index: int) -> int:
        """Return the number of rows in batch `index` of an epoch that are not padding."""
        return max(0, min(self._rows - index * self._size, self._size))

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch from number `start`: the same as when all are read."""
        batches = self._of_stream(epoch, start) if isinstance(self._data, Stream) else self._of_data(epoch, start)
        ahead = prefetch(batches, self._count_ahead()) if self._ahead else batches
        return self._agree(ahead, epoch, start) if self._is_divided else ahead

    def _count_ahead(self) -> int:
        """Return the number of batches to prefetch: more for pieces, read at the start of a window."""
        if isinstance(self._data, Stream) or self._data.pieces is None:
            return self._ahead
        rows = -(-self._size // self._group.size)
        return max(self._ahead, _AHEAD // max(rows * bytes_of_row(self._data.columns, self._names), 1))

    # ---- sources ----

    def _of_data(self, epoch: int, start: int) -> Iterator[Batch]:
        assert isinstance(self._data, Dataset)
        for number, rows in enumerate(self._orders(epoch, start), start):
            own_rows = rows[self._group.share(len(rows))]
            describe_row = partial(lambda data, rows, at: data.row(int(rows[at])), self._data, own_rows)
            batch = self._convert(self._data.take(own_rows, self._names), describe_row)
            yield self._portion(batch, self._noise(epoch, number, len(rows)), len(rows))

    def _orders(self, epoch: int, start: int) -> Iterator[np.ndarray]:
        """Yield the rows of each batch. Their order is computed in chunks, to save memory."""
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
        pieces, window = self._data.pieces, self._window
        if window is None and pieces is not None:
            window = max(WINDOW // max(bytes_of_row(self._data.columns, self._names), 1), 1)
        if not window or (pieces is None and window >= self._rows):
            return Order(self._rows, self._seed, epoch)
        if pieces is None:
            pieces = np.append(np.arange(0, self._rows, max(window // 16, 1)), self._rows)
        return WindowOrder(pieces, window, self._size, self._seed, epoch)

    def _of_stream(self, epoch: int, start: int) -> Iterator[Batch]:
        assert isinstance(self._data, Stream)
        batches = self._data.epoch(epoch, start, size=self._size, drop=self._last == "drop", group=self._group)
        for number, batch in enumerate(batches, start):
            for name in self._names:
                if name not in batch:
                    raise DataError(f"batch {number:,} of the stream has no column `{name}`, as the first one has")
            converted = self._convert(batch, f"sample {{:,}} of batch {number:,}".format)
            if self._is_divided:
                yield converted
                continue
            whole = _samples(converted)
            share = self._group.share(whole)
            shards = {name: array[share] if array.ndim else array for name, array in converted.items()}
            yield self._portion(shards, self._noise(epoch, number, whole), whole)

    def _agree(self, batches: Iterator[Batch], epoch: int, start: int) -> Iterator[Batch]:
        """Yield the shards that each process has read, until one process has no more.

        The processes communicate here, so this runs in the thread that trains.
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

    def _portion(self, shard: Batch, noise: Batch, whole: int) -> Batch:
        share = self._group.share(whole)
        batch = shard | {name: array[share] for name, array in noise.items()}
        return batch if self._group.size == 1 else Portion(batch, whole)

    @property
    def _is_divided(self) -> bool:
        """True if each process reads its own shard of a stream."""
        return isinstance(self._data, Stream) and self._data.is_divided and self._group.size > 1

    # ---- conversion and checks ----

    @property
    def _rows(self) -> int:
        assert isinstance(self._data, Dataset)
        return len(self._data)

    def _convert(self, batch: Batch, describe_row: Callable[[int], str]) -> Batch:
        converted: Batch = {}
        for name, binding in self._bindings.items():
            for column in binding.columns:
                if binding.is_checked:
                    _check_numbers(column, batch[column], binding.dtype, describe_row)
            converted[name] = binding(batch)
            if name in self._classes:
                self._check_labels(name, converted[name], describe_row)
        return converted

    def _check_columns(self) -> None:
        for name, binding in self._bindings.items():
            for column in binding.columns:
                source = self._data.columns.get(column)
                if source is None:
                    raise DataError(f"the data have no column `{column}` for input `{name}`")
                if binding.classes is not None and source.classes != binding.classes:
                    hint = "use the same classes in the same order, or split one dataset"
                    listed = f"{_few(source.classes)}, not {_few(binding.classes)}"
                    raise DataError(f"the classes of column `{column}` have changed: {listed}", hint=hint)

    def _check_labels(self, name: str, labels: np.ndarray, describe_row: Callable[[int], str]) -> None:
        classes = self._classes[name]
        if labels.size and 0 <= labels.min() <= labels.max() < classes:
            return
        is_wrong = (labels < 0) | (labels >= classes)
        if self._ignore is not None:
            is_wrong &= labels != self._ignore
        if is_wrong.any():
            at = np.argwhere(is_wrong)[0]
            label = int(labels[tuple(at)])
            message = f"label {label} in {describe_row(at[0])} is out of range: input `{name}` has {classes} classes"
            advice = f"if {label} means no class: `cross_entropy:ignore_index={label}`; else correct the row"
            if label == classes and labels.min() > 0:
                advice = "if they begin at 1, subtract 1"
            elif classes <= label < 2 * classes:
                advice += f", or give the model more classes: `--new-head {label + 1}`"
            hint = f"labels go from 0 to {classes - 1}; {advice}"
            raise DataError(message, hint=hint)


def _samples(batch: Batch) -> int:
    return max((len(array) for array in batch.values() if array.ndim), default=1)


def _few(classes: tuple[str, ...] | None) -> str:
    return ", ".join((classes or ("none",))[:3]) + (", ..." if len(classes or ()) > 3 else "")


def _check_numbers(
    column: str, values: np.ndarray, target: np.dtype | None, describe_row: Callable[[int], str]
) -> None:
    """Refuse NaN and infinities, which spread to every weight, and overflows of the new type."""
    if not values.size:
        return
    if is_float(values.dtype):
        _check_floats(column, values, target, describe_row)
    elif target is not None and target.kind in "iu" and values.dtype.kind in "iu":
        if np.can_cast(values.dtype, target):
            return
        limits = np.iinfo(target)
        if values.min() < limits.min or values.max() > limits.max:
            _refuse(column, values, (values < limits.min) | (values > limits.max), target, describe_row)


def _check_floats(column: str, values: np.ndarray, target: np.dtype | None, describe_row: Callable[[int], str]) -> None:
    """Refuse NaN and positive infinity. Attention masks contain negative infinity."""
    with np.errstate(invalid="ignore"):
        least, most = float(values.min()), float(values.max())  # both are NaN if one value is, without a copy
    if math.isnan(least) or most == math.inf:
        is_nan = math.isnan(least)
        at = np.argwhere(np.isnan(values) if is_nan else values == math.inf)[0]
        hint = "fill in missing values, or remove the row" if is_nan else "remove the row, or clip the value"
        name = "NaN (not a number)" if is_nan else "infinite"
        raise DataError(f"column `{column}` is {name} in {describe_row(at[0])}", hint=hint)
    if target is not None and is_float(target) and target.itemsize < values.dtype.itemsize:
        limit = float(ml_dtypes.finfo(target).max)  # type: ignore[no-untyped-call]
        if most > limit or least < -limit:
            is_large = np.isfinite(values) & (np.abs(values) > limit)
            if is_large.any():
                _refuse(column, values, is_large, target, describe_row)


def _refuse(
    column: str, values: np.ndarray, is_large: np.ndarray, target: np.dtype, describe_row: Callable[[int], str]
) -> None:
    at = np.argwhere(is_large)[0]
    raise DataError(f"column `{column}` is {values[tuple(at)]} in {describe_row(at[0])}, too large for {target.name}")
