"""Batches: every row once, in an order one can come back to, within little memory, fetched ahead."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from representatives import examples

from onward.errors import DataError
from onward.training.data import Batches, open_data, split
from onward.training.data.batches import prefetch
from onward.training.data.views import Order

# ---- order -----------------------------------------------------------------------------------------------------------


@examples(30)
@given(st.integers(1, 5000), st.integers(0, 2**70), st.integers(0, 100))
def test_an_order_is_a_permutation(count: int, seed: int, epoch: int) -> None:
    rows = Order(count, seed, epoch)(np.arange(count))
    np.testing.assert_array_equal(np.sort(rows), np.arange(count))


def test_an_order_is_always_the_same() -> None:
    """Resumed runs depend on it, also across versions: these numbers never change."""
    assert Order(10, seed=0, epoch=0)(np.arange(10)).tolist() == [5, 9, 3, 7, 8, 0, 1, 2, 4, 6]
    assert Order(10**12, seed=1, epoch=2)(np.arange(3)).tolist() == [772835190490, 434479629304, 676193592301]


@pytest.mark.parametrize("count", [5, 64, 100])
def test_an_order_is_random(count: int) -> None:
    """Each row comes at each position equally often, and its neighbour is any other (chi squared, five sigma)."""
    trials = 2000
    rows = np.stack(
        [Order(count, seed, epoch)(np.arange(count)) for seed in range(40) for epoch in range(trials // 40)]
    )
    for numbers, options in [(rows, count), ((rows[:, 1:] - rows[:, :-1]) % count - 1, count - 1)]:
        for position in range(0, numbers.shape[1], max(count // 8, 1)):
            counts = np.bincount(numbers[:, position], minlength=options)
            expected = trials / options
            chi_squared = ((counts - expected) ** 2 / expected).sum()
            freedom = options - 1
            assert abs(chi_squared - freedom) < 5 * np.sqrt(2 * freedom), (position, chi_squared, freedom)


@given(st.integers(1, 300), st.integers(1, 70), st.sampled_from(["keep", "drop", "pad"]), st.booleans(), st.data())
def test_batches_hold_every_row_once(rows: int, size: int, last: Any, shuffle: bool, data: st.DataObject) -> None:
    opened = open_data({"x": np.arange(rows)})
    if last == "drop" and rows < size:
        with pytest.raises(DataError, match="do not fill a batch"):
            Batches(opened, {"x": "x"}, size, last=last)
        return
    batches = Batches(opened, {"x": "x"}, size, shuffle=shuffle, seed=data.draw(st.integers(0, 9)), last=last, ahead=0)
    epoch = data.draw(st.integers(0, 9))
    found = [batch["x"] for batch in batches.epoch(epoch)]
    assert len(found) == batches.per_epoch
    values = np.concatenate(found)
    if last == "keep":
        np.testing.assert_array_equal(np.sort(values), np.arange(rows))
    elif last == "drop":
        assert len(np.unique(values)) == len(values) == rows // size * size
    else:
        assert {len(x) for x in found} == {size}
        real = np.concatenate([x[: batches.samples(at)] for at, x in enumerate(found)])
        np.testing.assert_array_equal(np.sort(real), np.arange(rows))
        np.testing.assert_array_equal(values[rows:], np.resize(values[:rows], size)[: len(values) - rows])
    start = data.draw(st.integers(0, len(found)))
    resumed = [batch["x"] for batch in batches.epoch(epoch, start)]
    assert [x.tolist() for x in resumed] == [x.tolist() for x in found[start:]]


def test_orders_differ() -> None:
    data = open_data({"x": np.arange(100)})

    def order(seed: int, epoch: int, size: int = 7) -> list[int]:
        batches = Batches(data, {"x": "x"}, size, seed=seed).epoch(epoch)
        return np.concatenate([batch["x"] for batch in batches]).tolist()

    assert order(0, 0) == order(0, 0, size=100)
    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9
    assert Batches(data, {"x": "x"}, 7, shuffle=False).epoch(5).__next__()["x"].tolist() == list(range(7))


def test_a_split_is_two_parts() -> None:
    data = open_data({"x": np.arange(103)})
    training, validation = split(data, 0.2, seed=1)
    assert (len(training), len(validation)) == (82, 21)
    parts = [part.take(np.arange(len(part)))["x"] for part in (training, validation)]
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(103))
    again = split(data, 0.2, seed=1)[1]
    np.testing.assert_array_equal(again.take(np.arange(21))["x"], parts[1])
    assert validation.row(0) == f"row {parts[1][0]} of the data"
    for fraction, source in [(0.0, data), (1.5, data), (0.5, open_data({"x": np.zeros(1)}))]:
        with pytest.raises(DataError):
            split(source, fraction)
    with pytest.raises(DataError, match="stream"):
        split(open_data(lambda: iter([(np.zeros(3),)])), 0.1)


def test_training_and_validation_share_data(tmp_path: Path) -> None:
    """Both are fetched ahead, at the same time, and the data are converted when they are first taken."""
    (tmp_path / "x.csv").write_text("x\n" + "\n".join(map(str, range(10_000))), encoding="utf-8")
    parts = split(open_data(tmp_path / "x.csv"), 0.5)
    running = [Batches(part, {"x": "x"}, 100, seed=2).epoch(0) for part in parts]
    found = [batch["x"] for both in zip(*running, strict=True) for batch in both]
    np.testing.assert_array_equal(np.sort(np.concatenate(found)), np.arange(10_000))


# ---- ahead -----------------------------------------------------------------------------------------------------------


def _threads() -> int:
    return sum(thread.name == "onward-data" for thread in threading.enumerate())


def test_items_are_made_ahead_but_not_all() -> None:
    made: list[int] = []

    def make() -> Iterator[int]:
        for item in range(100):
            made.append(item)
            yield item

    items = prefetch(make(), depth=3)
    assert next(items) == 0
    deadline = time.monotonic() + 5
    while len(made) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert made == [0, 1, 2, 3, 4]  # one is used, three are ready, one waits for room
    assert list(items) == list(range(1, 100))
    assert _threads() == 0


def test_leaving_early_ends_the_thread() -> None:
    items = prefetch(itertools.count(), depth=2)
    assert [next(items), next(items)] == [0, 1]
    items.close()
    assert _threads() == 0


def test_an_error_comes_where_its_item_would() -> None:
    def make() -> Iterator[int]:
        yield 1
        raise DataError("broken")

    items = prefetch(make(), depth=5)
    assert next(items) == 1
    with pytest.raises(DataError, match="broken"):
        next(items)
    assert _threads() == 0


# ---- memory ----------------------------------------------------------------------------------------------------------

PEAK = """
import sys
import numpy as np
from onward.training.data import Batches, open_data

def peak():
    return next(int(line.split()[1]) // 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))

before = peak()
data = open_data(sys.argv[1])
names = list(data.columns)
batches = Batches(data, {name: name for name in names}, size=int(sys.argv[2]), seed=1).epoch(4, start=11)
total = sum(int(next(batches)[names[0]].astype(np.int64).sum()) for _ in range(int(sys.argv[3])))
batches.close()
print(peak() - before, total, len(data))
"""


def _peak(source: Path, size: int, count: int) -> tuple[int, int, int]:
    """Megabytes that some hundred shuffled batches take, the sum of what they hold, and the number of rows."""
    command = [sys.executable, "-c", PEAK, str(source), str(size), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    megabytes, total, rows = map(int, done.stdout.split())
    return megabytes, total, rows


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and sparse files")
def test_data_of_20_gigabytes_take_no_memory(tmp_path: Path) -> None:
    shape = (20_000_000_000 // (3 * 64 * 64), 3, 64, 64)
    np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.uint8, shape).flush()
    assert (tmp_path / "x.npy").stat().st_size > 19.9e9
    megabytes, total, rows = _peak(tmp_path / "x.npy", 32, 300)
    assert (total, rows) == (0, shape[0])
    assert megabytes < 20


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and sparse files")
def test_many_rows_take_no_memory(tmp_path: Path) -> None:
    """An order of so many rows would take 32 GB."""
    np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.uint8, (4_000_000_000,)).flush()
    megabytes, _, rows = _peak(tmp_path / "x.npy", 32, 300)
    assert rows == 4_000_000_000
    assert megabytes < 20
