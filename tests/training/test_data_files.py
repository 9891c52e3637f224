"""Data in many files, of which each process reads its part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from marks import needs
from models import digits_mlp
from runs import QUIET, RECIPE, digits, interrupted_after, state
from thread_group import run_together

from onward.engines.distributed import ProcessGroup
from onward.errors import DataError
from onward.training.api import resume, train
from onward.training.data import Batches, Stream, files, open_data, split
from onward.training.data.dataset import Dataset
from onward.training.data.views import WindowOrder
from onward.training.feed import samples_in


class Process(ProcessGroup):
    """One of several, that says nothing to the others."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size

    def sum(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        raise NotImplementedError

    def gather(self, value: Any) -> list[Any]:
        raise NotImplementedError


def parts(data: Dataset, count: int, epoch: int, start: int = 0, **options: Any) -> list[list[np.ndarray]]:
    """What each of some processes gets, batch by batch."""
    processes = [Process(rank, count) for rank in range(count)]
    every = [Batches(data, {"x": "x", "y": "y"}, group=one, ahead=0, **options) for one in processes]
    found = [[np.stack([batch["x"], batch["y"]]) for batch in batches.epoch(epoch, start)] for batches in every]
    return [list(batch) for batch in zip(*found, strict=True)]


# ---- the order -------------------------------------------------------------------------------------------------------


@given(st.data())
def test_an_order_of_pieces(draw: st.DataObject) -> None:
    """Each row once; and a part of the samples of a batch is always from the same part of a window."""
    lengths = draw.draw(st.lists(st.integers(1, 30), min_size=1, max_size=12))
    starts = np.concatenate([[0], np.cumsum(lengths)])
    batch, window, seed = (draw.draw(st.integers(1, most)) for most in (20, 120, 9))
    rows = WindowOrder(starts, window, batch, seed, epoch=1)(np.arange(starts[-1]))
    np.testing.assert_array_equal(np.sort(rows), np.arange(starts[-1]))
    whole = max(window // batch, 1) * batch
    shuffled = WindowOrder(starts, 1, 1, seed, epoch=1)(np.arange(starts[-1]))  # pieces alone
    place = np.argsort(shuffled)[rows]
    for first in range(0, len(rows) // batch * batch, whole):
        batches = place[first : first + whole]
        batches = batches[: len(batches) // batch * batch].reshape(-1, batch)
        np.testing.assert_array_equal(
            (batches - first) // len(batches), np.broadcast_to(np.arange(batch), batches.shape)
        )


def test_an_order_of_pieces_is_always_the_same() -> None:
    """Resumed runs depend on it, also across versions: these numbers never change."""
    order = WindowOrder(np.array([0, 4, 6, 12]), 8, 2, seed=3, epoch=1)
    assert order(np.arange(12)).tolist() == [0, 5, 1, 6, 3, 7, 2, 4, 8, 10, 9, 11]
    random = [WindowOrder(np.array([0, 40]), 40, 4, seed, 0)(np.arange(40))[0] for seed in range(600)]
    assert np.bincount(random, minlength=10).min() > 30  # of 60: any row of the first stretch may be the first


# ---- files -----------------------------------------------------------------------------------------------------------

COUNT = 230


def columns() -> dict[str, np.ndarray]:
    return {"x": np.arange(COUNT), "y": np.arange(COUNT) * 0.5}


def write_files(folder: Path, kind: str, count: int = 5) -> None:
    for number, rows in enumerate(np.array_split(np.arange(COUNT), count)):
        part = {name: array[rows] for name, array in columns().items()}
        path = folder / f"part-{number:02}.{kind}"
        if kind == "parquet":
            pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
            pq.write_table(pa.table(part), path, row_group_size=7)
        else:
            np.savez(path, **part)


@pytest.mark.parametrize("window", [None, 60])
@pytest.mark.parametrize("kind", ["npz", pytest.param("parquet", marks=needs("pyarrow"))])
def test_every_number_of_processes_has_the_same_batches(kind: str, window: int | None, tmp_path: Path) -> None:
    """Also one that goes on where another number of them was; and all have what is in the files."""
    write_files(tmp_path, kind)
    data = open_data(str(tmp_path / f"part-*.{kind}"), window=window)
    assert (data.pieces is not None) == (kind == "parquet" and window is not None)
    options = {"size": 16, "seed": 4, "window": window}
    alone = [batch for (batch,) in parts(data, 1, 2, **options)]
    together = np.concatenate(alone, axis=1)
    np.testing.assert_array_equal(np.sort(together[0]), np.arange(COUNT))
    np.testing.assert_array_equal(together[1], together[0] * 0.5)
    for size in (2, 3, 5):
        for start in (0, 7):
            found = [np.concatenate(batch, axis=1) for batch in parts(data, size, 2, start, **options)]
            assert [x.tolist() for x in found] == [x.tolist() for x in alone[start:]]
    if window is None:  # then the order is that of one file in memory
        in_memory = parts(open_data(columns()), 1, 2, **options)
        assert [x.tolist() for (x,) in in_memory] == [x.tolist() for x in alone]


@needs("pyarrow")
def test_a_process_reads_its_part_of_the_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from onward.training.data import parquet

    write_files(tmp_path, "parquet")
    monkeypatch.setattr(parquet, "KEPT", 0)  # but for what the window needs
    monkeypatch.setattr(parquet, "CONVERTED", 0)
    read: list[tuple[str, int]] = []
    original = parquet._batches

    def batches(file: Any, group: Any, names: Any, rows: int = 4096) -> Any:
        read.append((group.path.name, group.number))
        return original(file, group, names, rows)

    monkeypatch.setattr(parquet, "_batches", batches)
    options: dict[str, Any] = {"size": 20, "window": 80}
    for size, most in ((1, 45), (2, 26), (4, 16)):
        for rank in range(size):
            data = open_data(tmp_path, window=80)  # a folder of such files
            read.clear()
            rows = [batch["x"] for batch in Batches(data, {"x": "x"}, group=Process(rank, size), **options).epoch(0)]
            assert len(np.concatenate(rows)) in range(COUNT // size - 3, COUNT // size + 5)
            assert len(read) <= most  # of 35 groups; those at the borders of windows and parts are read twice
    assert open_data(tmp_path).pieces is not None  # since they are large
    assert open_data(tmp_path, window=0).pieces is None


@needs("pyarrow")
def test_a_split_of_data_in_pieces_keeps_them(tmp_path: Path) -> None:
    write_files(tmp_path, "parquet")
    data = open_data(tmp_path, window=50)
    assert isinstance(data, Dataset)
    for fraction in (0.001, 0.1, 0.37, 0.5, 0.8, 0.99):
        both = split(data, fraction, seed=1)
        rows = [part.take(np.arange(len(part)))["x"] for part in both]
        np.testing.assert_array_equal(np.sort(np.concatenate(rows)), np.arange(COUNT))
        assert len(rows[1]) == max(round(COUNT * fraction), 1)
        for part, values in zip(both, rows, strict=True):
            pieces, starts = part.pieces, data.pieces
            assert pieces is not None and starts is not None
            expected = np.unique(np.searchsorted(values, starts))
            np.testing.assert_array_equal(pieces, expected)
    strata = split(data, 0.2, strata=np.arange(COUNT) % 3)
    assert strata[0].pieces is not None


@needs("pyarrow")
def test_a_run_on_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted in an epoch, it goes on with the rows that would have come."""
    monkeypatch.chdir(tmp_path)
    import pyarrow as pa
    import pyarrow.parquet as pq

    data = digits()
    for part in range(4):
        rows = slice(part * 24, part * 24 + 24)
        table = pa.table({"image": data["image"][rows].tolist(), "labels": data["labels"][rows]})
        image = pa.list_(pa.float32(), 64)
        pq.write_table(table.set_column(0, "image", table["image"].cast(image)), f"{part}.parquet", row_group_size=5)
    settings = {"window": 40, "batch_size": 8, "validation": 0.25, **RECIPE, **QUIET}
    whole = train(digits_mlp(), "*.parquet", epochs=2, run="whole", **settings)
    with monkeypatch.context() as patch:
        interrupted_after(5, patch)
        cut = train(digits_mlp(), "*.parquet", epochs=2, run="cut", **settings)
    assert cut.progress["step"] == 5
    resume("cut", quiet=True)
    for name, array in state(whole).items():
        np.testing.assert_array_equal(state(cut)[name], array, err_msg=name)
    for file in tmp_path.glob("*.parquet"):
        file.unlink()
    with pytest.raises(DataError, match=r"no longer at .*\*\.parquet"):
        resume("whole", epochs=3, quiet=True)


# ---- mistakes --------------------------------------------------------------------------------------------------------


def test_columns_in_files_of_their_own(tmp_path: Path) -> None:
    for number in range(3):
        np.save(tmp_path / f"x-{number}.npy", np.arange(2) + 2 * number)
        np.save(tmp_path / f"{'abc'[number]}.npy", -np.arange(2) - 2 * number)
    data = open_data([f"x={tmp_path}/x-*.npy", f"y={tmp_path}/[abc].npy"])
    assert {name: array.tolist() for name, array in data.take(np.array([5, 0])).items()} == {"x": [5, 0], "y": [-5, 0]}
    assert data.row(5) == "row 1 of x-2.npy and row 1 of c.npy"


def test_files_that_are_none(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.arange(3))
    np.save(tmp_path / "b.npy", np.arange(3))
    for pattern, message, hint in [
        ("*.parquet", r"no file matches `.*\*.parquet`", "holds a.npz, b.npy"),
        ("no/*.npz", "no file matches", "relative to the current folder"),
        ("*.np*", r"different formats \(.npy, .npz\)", "one format"),
    ]:
        with pytest.raises(DataError, match=message) as error:
            open_data(str(tmp_path / pattern))
        assert hint in (error.value.hint or "")


@needs("pyarrow")
@pytest.mark.parametrize("other", [{"x": np.arange(3.0)}, {"x": np.arange(3), "z": np.arange(3)}])
def test_files_must_be_alike(other: dict[str, np.ndarray], tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    for name, table in (("a", {"x": np.arange(3)}), ("b", other)):
        pq.write_table(pa.table(table), tmp_path / f"{name}.parquet")
        np.savez(tmp_path / f"{name}.npz", **table)
    for kind in ("parquet", "npz"):
        with pytest.raises(DataError, match=r"files have different columns: `[xz]`") as error:
            open_data(str(tmp_path / f"*.{kind}"))
        assert "same columns" in (error.value.hint or "")


@pytest.mark.parametrize("kind", ["npz", pytest.param("parquet", marks=needs("pyarrow"))])
def test_a_file_that_vanishes(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few files are open at a time, so that one may have gone, or be another, when its turn comes again."""
    monkeypatch.setattr(files, "_MOST_OPEN", 2)
    monkeypatch.setattr(files, "LIMIT", 0)
    write_files(tmp_path, kind)
    data = open_data(str(tmp_path / f"*.{kind}"), window=50)
    assert isinstance(data, Dataset)
    rows = np.arange(COUNT)
    if kind == "npz":
        np.testing.assert_array_equal(data.take(rows)["x"], rows)
        assert len(files.DataFile._open) <= 2
    (tmp_path / f"part-00.{kind}").unlink()
    with pytest.raises(DataError, match=rf"part-00.{kind} is gone") as error:
        data.take(rows)
    assert "resume the run" in (error.value.hint or "")
    write_files(tmp_path, kind)
    for _ in range(2):
        with pytest.raises(DataError, match="has changed since it was opened"):
            data.take(rows)


def test_classes_are_those_of_all_files(tmp_path: Path) -> None:
    for number, labels in enumerate(("ba", "ca", "c")):
        (tmp_path / f"{number}.csv").write_text("x,label\n" + "\n".join(f"1,{one}" for one in labels))
    data = open_data(str(tmp_path / "*.csv"))
    assert isinstance(data, Dataset) and data.columns["label"].classes == ("a", "b", "c")
    assert data.take(np.arange(5))["label"].tolist() == [1, 0, 2, 0, 2]


# ---- streams ---------------------------------------------------------------------------------------------------------


def together(count: int, open_source: Callable[[int, int], Any], start: int = 0, **options: Any) -> list[list[Any]]:
    """What each of some processes, which are threads, gets from a stream."""

    def work(group: ProcessGroup) -> list[Any]:
        stream = open_data(open_source(group.rank, count))
        return [
            (batch, samples_in(batch)) for batch in Batches(stream, {"x": "x"}, group=group, **options).epoch(1, start)
        ]

    with pytest.MonkeyPatch.context() as patch:
        return [[(batch["x"].tolist(), whole) for batch, whole in found] for found in run_together(count, patch, work)]


def test_a_function_may_give_each_process_its_part() -> None:
    """Until the first of them has no more; and noise is that of the whole batch."""

    def source(epoch: int, *, rank: int, size: int) -> Iterator[Any]:
        for number in range(3 + rank):
            yield {"x": 100 * epoch + 10 * number + np.arange(2 + rank) + 2 * rank}

    batches = together(2, lambda rank, size: source)
    assert batches[0] == [([100, 101], 5), ([110, 111], 5), ([120, 121], 5)]
    assert batches[1] == [([102, 103, 104], 5), ([112, 113, 114], 5), ([122, 123, 124], 5)]
    assert together(2, lambda rank, size: source, start=2) == [part[2:] for part in batches]
    assert together(1, lambda rank, size: source)[0] == [([100, 101], 2), ([110, 111], 2), ([120, 121], 2)]
    whole = together(2, lambda rank, size: lambda: iter([{"x": np.arange(5)}]))  # which both read, and divide
    assert whole == [[([0, 1, 2], 5)], [([3, 4], 5)]]


@needs("torch")
def test_a_loader_with_a_distributed_sampler() -> None:
    from torch.utils.data import DataLoader, DistributedSampler

    rows = [{"x": number} for number in range(20)]

    def loader(rank: int, size: int) -> Any:
        return DataLoader(rows, batch_size=4, sampler=DistributedSampler(rows, size, rank, seed=5))  # type: ignore[arg-type]

    parts = together(2, loader)
    assert [count for _, count in parts[0]] == [8, 8, 4]
    sampler = DistributedSampler(rows, 2, 0, seed=5)  # type: ignore[arg-type]
    sampler.set_epoch(1)
    assert [x for batch, _ in parts[0] for x in batch] == list(sampler)
    assert sorted(x for part in parts for batch, _ in part for x in batch) == list(range(20))


class Shards:
    """As an `IterableDataset` is: shards one after the other, or those of a process; the epoch turns their order."""

    features = None

    def __init__(self, part: Any = None, skipped: int = 0):
        self._distributed, self._skipped, self._epoch = part, skipped, 0

    def with_format(self, kind: str) -> Shards:
        return Shards(self._distributed)

    def skip(self, count: int) -> Shards:
        return Shards(self._distributed, count)

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def iter(self, size: int, drop_last_batch: bool) -> Iterator[Any]:
        shards = np.roll(np.arange(24).reshape(4, 6), self._epoch, 0)
        if self._distributed is not None:
            shards = shards[self._distributed.rank :: self._distributed.world_size]
        rows = shards.ravel()[self._skipped :]
        for at in range(0, len(rows) // size * size if drop_last_batch else len(rows), size):
            yield {"x": rows[at : at + size]}


def test_samples_that_are_streamed() -> None:
    batches = Batches(open_data(Shards()), {"x": "x"}, 10, last="drop")
    alone = [batch["x"].tolist() for batch in batches.epoch(1)]
    assert alone == np.roll(np.arange(24), 6)[:20].reshape(2, 10).tolist()
    assert [batch["x"].tolist() for batch in batches.epoch(1, start=1)] == alone[1:]
    whole = together(3, lambda rank, size: Shards(), size=10, last="drop")
    assert [a + b + c for (a, _), (b, _), (c, _) in zip(*whole, strict=True)] == alone
    own = together(2, lambda rank, size: Shards(SimpleNamespace(rank=rank, world_size=size)), size=10, start=1)
    assert own == [[([23, 6, 7, 8, 9], 10), ([10, 11], 4)], [([5, 12, 13, 14, 15], 10), ([16, 17], 4)]]
    with pytest.raises(DataError, match="shard 1 of 2, but this is process 0 of 1"):
        next(Batches(open_data(Shards(SimpleNamespace(rank=1, world_size=2))), {"x": "x"}).epoch(0))


@needs("datasets")
def test_data_sets_of_hugging_face() -> None:
    import datasets
    from datasets.distributed import split_dataset_by_node

    classes = datasets.Features({"x": datasets.Value("int64"), "y": datasets.ClassLabel(names=["a", "b"])})
    rows = datasets.Dataset.from_dict({"x": list(range(23)), "y": [0, 1] * 11 + [0]}, features=classes)
    by_number = open_data(rows)
    assert by_number.columns["y"].classes == ("a", "b")
    np.testing.assert_array_equal(by_number.take(np.array([7, 2]), ["x"])["x"], [7, 2])

    def shuffled() -> Any:
        return rows.to_iterable_dataset(num_shards=4).shuffle(seed=3, buffer_size=5)

    stream = open_data(shuffled())
    assert isinstance(stream, Stream) and stream.columns == by_number.columns
    batches = Batches(stream, {"x": "x"}, 4)
    found = [[batch["x"].tolist() for batch in batches.epoch(epoch)] for epoch in (0, 1)]
    assert [sorted(x for batch in one for x in batch) for one in found] == [list(range(23))] * 2 and found[0] != found[
        1
    ]
    assert [batch["x"].tolist() for batch in batches.epoch(1, start=3)] == found[1][3:]
    assert [len(batch["x"]) for batch in Batches(stream, {"x": "x"}, 4, last="drop").epoch(0)] == [4] * 5
    whole = together(2, lambda rank, size: shuffled(), size=4)
    assert [a + b for (a, _), (b, _) in zip(*whole, strict=True)] == found[1]  # as for one process
    own = together(2, lambda rank, size: split_dataset_by_node(shuffled(), rank, size), size=4)
    seen = [x for part in own for batch, count in part for x in batch]
    assert len(set(seen)) == len(seen) >= 20  # 11 and 12 rows: the last one is not in a batch of both
    assert all(count == 4 for part in own for _, count in part[:5])


@needs("ray")
@pytest.mark.slow
def test_data_sets_of_ray() -> None:
    import ray
    import ray.data

    ray.init(num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False)
    try:
        rows = ray.data.range(40).rename_columns({"id": "x"})
        stream = open_data(rows)
        assert isinstance(stream, Stream)
        batches = Batches(stream, {"x": "x"}, 16)
        for epoch in range(2):
            assert [batch["x"].tolist() for batch in batches.epoch(epoch)] == [
                list(range(16)),
                list(range(16, 32)),
                list(range(32, 40)),
            ]
        assert [batch["x"].tolist() for batch in batches.epoch(0, start=2)] == [list(range(32, 40))]
        parts = rows.streaming_split(2, equal=True)
        own = together(2, lambda rank, size: parts[rank], size=10)
        assert sorted(x for part in own for batch, _ in part for x in batch) == list(range(40))
        assert [count for _, count in own[0]] == [10] * 4
    finally:
        ray.shutdown()
