"""Data to train on: every source gives the same batches."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from marks import needs
from safetensors.numpy import save_file
from sklearn.datasets import load_digits

from onward.errors import DataError
from onward.training.data import Batches, Column, Stream, match, open_data
from onward.training.data import files as data_files
from onward.training.data.views import Order

ROWS = 60


def digits() -> dict[str, np.ndarray]:
    data = load_digits()
    order = np.argsort(data.target[:ROWS], kind="stable")  # by class, as the folders of images are
    return {"image": data.images[order].astype(np.uint8)[:, None], "label": data.target[order].astype(np.int64)}


def inputs(**specs: tuple[ir.DataType, list[Any] | None]) -> dict[str, ir.Value]:
    return {
        name: ir.Value(name=name, type=ir.TensorType(dtype), shape=None if dims is None else ir.Shape(dims))
        for name, (dtype, dims) in specs.items()
    }


DIGITS = inputs(image=(ir.DataType.FLOAT, ["N", 1, 8, 8]), label=(ir.DataType.INT64, ["N"]))


# ---- every source gives the same batches -----------------------------------------------------------------------------

Write = Callable[[Path, dict[str, np.ndarray]], Any]


def _npz(folder: Path, data: dict[str, np.ndarray]) -> Any:
    np.savez(folder / "digits.npz", **data)
    return folder / "digits.npz"


def _npz_compressed(folder: Path, data: dict[str, np.ndarray]) -> Any:
    np.savez_compressed(folder / "digits.npz", **data)
    return str(folder / "digits.npz")


def _npy(folder: Path, data: dict[str, np.ndarray]) -> Any:
    np.save(folder / "x.npy", np.asfortranarray(data["image"]))
    np.save(folder / "y.npy", data["label"].astype(np.int32))
    return {"image": folder / "x.npy", "label": str(folder / "y.npy")}


def _npy_strings(folder: Path, data: dict[str, np.ndarray]) -> Any:
    np.savez(folder / "all.npz", x=data["image"].astype(">f8"), unused=np.zeros(3))
    np.save(folder / "y.npy", data["label"])
    return [f"image={folder / 'all.npz'}:x", f"label={folder / 'y.npy'}"]


def _safetensors(folder: Path, data: dict[str, np.ndarray]) -> Any:
    save_file({"image": data["image"].astype(np.float32), "label": data["label"]}, folder / "digits.safetensors")
    return folder / "digits.safetensors"


def _csv(folder: Path, data: dict[str, np.ndarray]) -> Any:
    lines = [",".join(["label", *(f"pixel{i}" for i in range(64))])]
    lines += [f"{label}," + ",".join(map(str, image.ravel())) for image, label in zip(*data_of(data), strict=True)]
    (folder / "digits.csv").write_text("\n".join(lines), encoding="utf-8")
    return folder / "digits.csv"


def _tsv_of_text(folder: Path, data: dict[str, np.ndarray]) -> Any:
    """Labels are words, numbers have fractions, a cell is quoted, and lines end as they do on Windows."""
    lines = ["\t".join([*(f"pixel{i}" for i in range(64)), "label"])]
    for image, label in zip(*data_of(data), strict=True):
        lines.append("\t".join([*(f"{value:.1f}" for value in image.ravel()), f'"digit {label}"']))
    (folder / "digits.tsv").write_bytes("\r\n".join(lines).encode("utf-8-sig"))
    return folder / "digits.tsv"


def data_of(data: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    return data["image"], data["label"]


def _arrow_table(data: dict[str, np.ndarray]) -> Any:
    import pyarrow as pa

    flat = pa.array(data["image"].reshape(ROWS, 64).tolist(), pa.list_(pa.uint8()))
    return pa.table({"image": flat, "label": data["label"].astype(np.int32), "comment": ["text"] * ROWS})


def _parquet(folder: Path, data: dict[str, np.ndarray]) -> Any:
    import pyarrow.parquet as pq

    pq.write_table(_arrow_table(data), folder / "digits.parquet", row_group_size=7)
    return folder / "digits.parquet"


def _parquet_parts(folder: Path, data: dict[str, np.ndarray]) -> Any:
    import pyarrow.parquet as pq

    for part in range(3):
        pq.write_table(_arrow_table(data).slice(part * 20, 20), folder / f"part-{part}.parquet")
    return folder


def _feather(compression: str) -> Write:
    def write(folder: Path, data: dict[str, np.ndarray]) -> Any:
        import pyarrow.feather

        pyarrow.feather.write_feather(_arrow_table(data), folder / "digits.feather", compression, chunksize=9)
        return folder / "digits.feather"

    return write


def _tensors(folder: Path, data: dict[str, np.ndarray]) -> Any:
    import pyarrow as pa

    transposed = np.ascontiguousarray(data["image"][:, 0].transpose(0, 2, 1)).transpose(0, 2, 1)
    images = pa.FixedShapeTensorArray.from_numpy_ndarray(transposed)
    assert images.type.permutation == [1, 0]
    table = pa.table({"image": images, "label": data["label"]})
    with pa.OSFile(str(folder / "digits.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    return folder / "digits.arrow"


def _saved_datasets(folder: Path, data: dict[str, np.ndarray]) -> Any:
    """As `datasets` 5.2 writes: streams of Arrow, and a file that names them. Images are PNG."""
    import pyarrow as pa

    encoded = [{"bytes": png(image[0]), "path": None} for image in data["image"]]
    images = pa.array(encoded, pa.struct({"bytes": pa.binary(), "path": pa.string()}))
    table = pa.table({"image": images, "label": data["label"]})
    names = [f"data-0000{part}-of-00002.arrow" for part in range(2)]
    for part, name in enumerate(names):
        with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table.slice(part * 30, 30), max_chunksize=8)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0", "_split": None}
    (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
    return folder


def png(values: np.ndarray) -> bytes:
    import io

    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(values).save(file, "PNG")
    return file.getvalue()


def _images(folder: Path, data: dict[str, np.ndarray]) -> Any:
    for index, (image, label) in enumerate(zip(*data_of(data), strict=True)):
        path = folder / f"class {label}" / f"{index:04}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(png(image[0]))
    return folder


def _samples(folder: Path, data: dict[str, np.ndarray]) -> Any:
    return [{"image": image, "label": int(label)} for image, label in zip(*data_of(data), strict=True)]


SOURCES = {
    "dict": lambda folder, data: data,
    "tuple": lambda folder, data: data_of(data),
    "samples": _samples,
    "npz": _npz,
    "npz, compressed": _npz_compressed,
    "npy, Fortran order": _npy,
    "npy, as strings": _npy_strings,
    "safetensors": _safetensors,
    "csv": _csv,
    "tsv, text": _tsv_of_text,
    "parquet": _parquet,
    "parquet, folder": _parquet_parts,
    "feather, mapped": _feather("uncompressed"),
    "feather, compressed": _feather("lz4"),
    "arrow, tensors": _tensors,
    "datasets": _saved_datasets,
    "images": _images,
}
NEEDS = {"parquet": "pyarrow", "feather": "pyarrow", "arrow": "pyarrow", "datasets": "pyarrow", "images": "PIL"}


def _parameter(source: str) -> Any:
    module = NEEDS.get(source.split(",")[0])
    return pytest.param(source, marks=needs(module) if module else ())


@pytest.mark.parametrize("source", [_parameter(source) for source in SOURCES])
@pytest.mark.parametrize("held", [True, False], ids=["held in memory", "read by rows"])
def test_sources_agree(source: str, held: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not held:
        monkeypatch.setattr(data_files, "LIMIT", 0)
    data = digits()
    opened = open_data(SOURCES[source](tmp_path, data), inputs=DIGITS)
    assert len(opened) == ROWS
    matched = match(opened.columns, DIGITS)
    expected = Order(ROWS, seed=3, epoch=1)(np.arange(ROWS))
    at = 0
    for batch in Batches(opened, matched, size=16, seed=3, classes={"label": 10}).epoch(1):
        rows = expected[at : at + 16]
        assert batch["image"].dtype == np.float32 and batch["label"].dtype == np.int64
        np.testing.assert_array_equal(batch["image"], data["image"][rows])
        np.testing.assert_array_equal(batch["label"], data["label"][rows])
        at += len(rows)
    assert at == ROWS


def test_what_is_held_in_memory_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all data together: a folder of many small files is large."""
    gc.collect()
    before = data_files._used
    monkeypatch.setattr(data_files, "LIMIT", before + 4000)
    for number in range(5):
        np.save(tmp_path / f"{number}.npy", np.full(1000, number, np.uint8))
    files = [open_data({"x": tmp_path / f"{number}.npy"}) for number in range(5)]
    assert data_files._used == before + 4000
    assert [int(file.take(np.array([7]))["x"][0]) for file in files] == [0, 1, 2, 3, 4]
    files.clear()
    gc.collect()
    assert data_files._used == before


def test_bfloat16_of_safetensors(tmp_path: Path) -> None:
    values = np.arange(6, dtype=ml_dtypes.bfloat16).reshape(3, 2)
    save_file({"x": values}, tmp_path / "x.safetensors")
    data = open_data(tmp_path / "x.safetensors")
    wanted = inputs(x=(ir.DataType.FLOAT, [None, 2]))
    batch = next(Batches(data, match(data.columns, wanted), shuffle=False).epoch(0))
    np.testing.assert_array_equal(batch["x"], values.astype(np.float32))


def test_files_are_joined_and_only_if_alike(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(5))
    np.save(tmp_path / "b.npy", np.arange(5, 9))
    (tmp_path / "a.csv").write_text("x\n1\n2\n", encoding="utf-8")
    (tmp_path / "b.csv").write_text("x\n3\n", encoding="utf-8")
    (tmp_path / "c.csv").write_text("x\n3.5\n", encoding="utf-8")
    data = open_data([tmp_path / "a.csv", str(tmp_path / "b.csv")])
    np.testing.assert_array_equal(data.take(np.array([2, 0]))["x"], [3, 1])
    assert data.row(2) == "line 2 of b.csv"
    with pytest.raises(DataError, match=r"`x` is int64\[\] and float64\[\] \(line 2 of a.csv and line 2 of c.csv"):
        open_data([tmp_path / "a.csv", tmp_path / "c.csv"])


@needs("PIL")
def test_images_become_what_the_model_takes(tmp_path: Path) -> None:
    from PIL import Image

    pixels = np.arange(5 * 4 * 3, dtype=np.uint8).reshape(5, 4, 3)
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.png").write_bytes(png(pixels))
    opened = open_data(tmp_path)
    assert opened.columns["image"] == Column(np.dtype(np.uint8), (3, 5, 4))
    assert opened.columns["label"].classes == ("cat", "dog")
    np.testing.assert_array_equal(opened.take(np.array([1]))["image"][0], pixels.transpose(2, 0, 1))

    channels_last = inputs(x=(ir.DataType.FLOAT, ["N", 10, 8, 1]), y=(ir.DataType.INT32, ["N"]))
    resized = open_data(tmp_path, inputs=channels_last)
    grey = Image.fromarray(pixels).convert("L").resize((8, 10), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(resized.take(np.array([0]))["image"][0, :, :, 0], np.asarray(grey))
    assert "not scaled" in match(resized.columns, channels_last)["x"].note


class HubLike:
    """What a `datasets.Dataset` does, as far as it is asked to."""

    def __init__(self, data: dict[str, Any]):
        self._data = data

    def __len__(self) -> int:
        return ROWS

    def with_format(self, kind: str, columns: list[str] | None = None) -> HubLike:
        assert kind == "numpy"
        return HubLike({name: self._data[name] for name in columns or self._data})

    def __getitem__(self, indices: list[int]) -> dict[str, Any]:
        return {
            name: [column[index] for index in indices] if isinstance(column, list) else column[indices]
            for name, column in self._data.items()
        }


def test_datasets_as_objects() -> None:
    data = digits()
    opened = open_data(HubLike(data))
    assert opened.columns["image"] == Column(np.dtype(np.uint8), (1, 8, 8))
    batch = opened.take(np.array([9, 3]), ["label"])
    assert list(batch) == ["label"]
    np.testing.assert_array_equal(batch["label"], data["label"][[9, 3]])
    with pytest.raises(DataError, match="several datasets: `train`, `test`"):
        open_data({"train": HubLike(data), "test": HubLike(data)})
    ragged = HubLike({"image": [np.zeros(3), np.zeros(4)]})
    with pytest.raises(DataError, match="column `image` of the dataset is not an array"):
        open_data(ragged).take(np.arange(2))


# ---- streams ---------------------------------------------------------------------------------------------------------


def _batches_of(data: dict[str, np.ndarray], size: int = 16) -> Iterator[dict[str, np.ndarray]]:
    for at in range(0, ROWS, size):
        yield {name: array[at : at + size] for name, array in data.items()}


def test_streams_come_as_they_are() -> None:
    data = digits()
    sources: dict[str, Any] = {
        "function": lambda: _batches_of(data),
        "function of the epoch": lambda epoch: _batches_of({n: np.roll(a, epoch, 0) for n, a in data.items()}),
        "function with a default": lambda size=16: _batches_of(data, size),
        "tuples": lambda: (tuple(batch.values()) for batch in _batches_of(data)),
    }
    for name, source in sources.items():
        stream = open_data(source)
        assert isinstance(stream, Stream)
        batches = Batches(stream, match(stream.columns, DIGITS), size=1, classes={"label": 10})
        assert batches.per_epoch is None
        for epoch in (0, 2):
            found = list(batches.epoch(epoch))
            labels = np.roll(data["label"], epoch if name == "function of the epoch" else 0)
            np.testing.assert_array_equal(np.concatenate([batch["label"] for batch in found]), labels)
            resumed = list(batches.epoch(epoch, start=2)) if epoch else found[2:]
            for one, other in zip(found[2:], resumed, strict=True):
                np.testing.assert_array_equal(one["image"], other["image"])


def test_a_stream_resumes_in_a_later_epoch() -> None:
    stream = open_data(lambda epoch: iter([{"x": np.full(2, 10 * epoch)}, {"x": np.full(2, 10 * epoch + 1)}]))
    assert [batch["x"].tolist() for batch in Batches(stream, {"x": "x"}).epoch(3, start=1)] == [[31, 31]]


def test_a_stream_is_started_once_per_epoch() -> None:
    """A DataLoader starts its workers and draws random numbers whenever it is."""
    started = []

    class Loader:
        def __iter__(self) -> Iterator[Any]:
            started.append(len(started))
            return _batches_of(digits())

    stream = open_data(Loader())
    batches = Batches(stream, match(stream.columns, DIGITS))
    for epoch in range(3):
        assert len(list(batches.epoch(epoch))) == 4
    assert started == [0, 1, 2]


def test_a_generator_is_read_once() -> None:
    stream = open_data(_batches_of(digits()))
    batches = Batches(stream, match(stream.columns, DIGITS))
    assert len(list(batches.epoch(0))) == 4
    with pytest.raises(DataError, match="epoch 1 needs it again"):
        next(batches.epoch(1))
    with pytest.raises(DataError, match="is empty"):
        open_data(iter([]))
    with pytest.raises(DataError, match="batch 0 has no common number of samples"):
        open_data(iter([(np.zeros(3), np.zeros(2))]))


@needs("torch")
def test_torch() -> None:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    data = digits()
    tensors = TensorDataset(*(torch.from_numpy(array) for array in data_of(data)))
    loader = DataLoader(tensors, batch_size=16, shuffle=True)
    stream = open_data(loader)
    batches = Batches(stream, match(stream.columns, DIGITS))
    assert batches.per_epoch == 4
    for epoch in range(2):
        labels = np.concatenate([batch["label"] for batch in batches.epoch(epoch)])
        np.testing.assert_array_equal(np.sort(labels), data["label"])

    by_number = open_data(tensors)
    np.testing.assert_array_equal(by_number.take(np.array([7, 2]))["0"], data["image"][[7, 2]])
    columns = open_data({"image": tensors.tensors[0].requires_grad_(False), "label": tensors.tensors[1]})
    np.testing.assert_array_equal(columns.take(np.array([7]))["label"], data["label"][[7]])
