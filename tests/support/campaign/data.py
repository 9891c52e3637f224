"""Data to train on, in files of every kind, and inputs that are given to commands."""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import onnx
from models import digits_mlp, small_cnn

import onward
from campaign.kinds import Kind
from campaign.mutations import BYTES, JSON, changed_npy, changed_safetensors, changed_zip, deep_json
from onward.training.data import Batches, Dataset, open_data

NPZ = (*(changed_zip({".npy": (*(changed_npy,) * 4, *BYTES)}),) * 6, *BYTES)


def some(rows: int = 8) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"x": rng.random((rows, 3), np.float32), "label": rng.integers(0, 3, rows), "ok": rng.random(rows) < 0.5}


def _arrays(folder: Path) -> None:
    from safetensors.numpy import save_file

    np.savez(folder / "stored.npz", **some())
    np.savez_compressed(folder / "packed.npz", **some())
    np.save(folder / "x.npy", some()["x"])
    save_file(some(), folder / "x.safetensors")


def _tables(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = some() | {"kind": np.array(["cat", "dog"] * 4), "list": np.arange(16.0).reshape(8, 2)}
    table = pa.table({name: array.tolist() for name, array in columns.items()})
    pq.write_table(table, folder / "x.parquet")
    for name, options in {"x.arrow": None, "packed.arrow": pa.ipc.IpcWriteOptions(compression="zstd")}.items():
        with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_file(file, table.schema, options=options) as out:
            out.write_table(table)
    with pa.OSFile(str(folder / "stream.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as out:
        out.write_table(table)
    rows = zip(*(array.tolist() for array in columns.values() if array.ndim == 1), strict=True)
    lines = ["label,ok,kind", *(",".join(map(str, row)) for row in rows)]
    (folder / "x.csv").write_text("\n".join(lines), encoding="utf-8")


def _saved(folder: Path) -> None:
    """As `Dataset.save_to_disk` writes it."""
    import pyarrow as pa

    features = {"label": {"names": ["cat", "dog", "cow"], "_type": "ClassLabel"}, "x": {"dtype": "float32"}}
    schema = pa.schema({"label": pa.int64(), "x": pa.list_(pa.float32())})
    schema = schema.with_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    table = pa.table({name: some()[name].tolist() for name in ("label", "x")}, schema=schema)
    with pa.OSFile(str(folder / "data-0.arrow"), "wb") as file, pa.ipc.new_stream(file, schema) as out:
        out.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-0.arrow"}], "_split": "train"}))
    (folder / "dataset_info.json").write_text(json.dumps({"features": features}))


def _pictures(folder: Path) -> None:
    from PIL import Image

    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (folder / "photos" / name).mkdir(parents=True)
        for number, ending in enumerate(("png", "jpg", "gif", "bmp", "tiff", "webp", "ppm")):
            picture = Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).convert("RGB")
            mode = "RGBA" if ending == "png" else "P" if ending == "tiff" else "RGB"
            picture.convert(mode).save(folder / "photos" / name / f"{number}.{ending}")


def _for_runs(folder: Path) -> None:
    """Data in parts, and pictures of different sizes, with a model for both."""
    from PIL import Image

    onnx.save(small_cnn(channels=2), folder / "model.onnx")
    rng = np.random.default_rng(0)
    (folder / "parts").mkdir()
    for name, rows in {"train": 12, "val": 6}.items():
        labels = rng.integers(0, 10, rows)
        np.savez(folder / "parts" / f"{name}.npz", image=rng.random((rows, 1, 8, 8), np.float32), labels=labels)
        for label in ("cat", "dog"):
            place = folder / "photos" / name / label
            place.mkdir(parents=True)
            for number, size in enumerate([(8, 9), (20, 8), (11, 30)]):
                Image.fromarray(rng.integers(0, 256, size, np.uint8)).save(place / f"{number}.png")


def _given(folder: Path) -> None:
    onward.prepare(digits_mlp(hidden=4), loss="ce").save(folder / "training.onnx")
    rng = np.random.default_rng(0)
    np.savez(folder / "batch.npz", image=rng.random((4, 64), np.float32), labels=rng.integers(0, 10, 4))


def read(name: str) -> None:
    """All that is done with data before a model gets them."""
    tempfile.tempdir = "."
    data = open_data(Path(name))
    assert isinstance(data, Dataset) and str(data.columns)
    usable = [column for column, what in data.columns.items() if what.dtype.kind in "iufb"]
    batches = Batches(data, {column: column for column in usable}, size=4)
    for _, batch in zip(range(3), batches.epoch(0), strict=False):
        assert all(len(array) <= 4 for array in batch.values())


def no_file(rng: random.Random, folder: Path) -> None:
    """A file becomes something else: a pipe, a device, a folder, nothing."""
    path = rng.choice([path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix != ".onnx"])
    path.unlink()
    becomes: tuple[Callable[[], object], ...] = (
        lambda: os.mkfifo(path),
        lambda: path.symlink_to("/dev/zero"),
        lambda: path.symlink_to("/dev/stdin"),
        lambda: path.symlink_to(path.name),
        lambda: path.symlink_to("."),
        lambda: path.mkdir(),
        lambda: path.write_bytes(b""),
        lambda: shutil.rmtree(path.parent) if path.parent != folder else None,
        lambda: None,
    )
    rng.choice(becomes)()


def read_all(*names: str) -> None:
    errors = []
    for name in names:
        try:
            read(name)
        except onward.Error as error:
            errors.append(error)
    if errors:
        raise errors[0]


TRAIN = ("train", "model.onnx", "--loss", "ce", "-b", "4", "--run", "run", "--quiet")
COMMON = ("training.onnx", "--inputs", "batch.npz")
KINDS = {
    "arrays": Kind(
        _arrays,
        {
            "*.npz": NPZ,
            "*.npy": (*(changed_npy,) * 4, *BYTES),
            "*.safetensors": (*(changed_safetensors,) * 6, deep_json, *BYTES),
        },
        (partial(read_all, "stored.npz", "packed.npz", "x.npy", "x.safetensors"),),
        no_file,
    ),
    "tables": Kind(
        _tables,
        {"*": BYTES},
        (partial(read_all, "x.parquet", "x.arrow", "packed.arrow", "stream.arrow", "x.csv"),),
        no_file,
        needs=("pyarrow",),
    ),
    "saved data sets": Kind(
        _saved, {"*.json": JSON, "*.arrow": BYTES}, (partial(read, "."),), no_file, needs=("pyarrow",)
    ),
    "pictures": Kind(_pictures, {"*": BYTES}, (partial(read, "photos"),), no_file, needs=("PIL",)),
    "data of runs": Kind(
        _for_runs,
        {"*.npz": NPZ, "*.png": BYTES},
        (
            (*TRAIN, "--data", "parts", "--monitor", "f1"),
            (*TRAIN, "--data", "photos", "--preprocess", "resize:size=8 scale"),
        ),
        no_file,
        needs=("PIL",),
    ),
    "inputs": Kind(
        _given,
        {"*.npz": NPZ},
        (
            ("check-gradients", *COMMON),
            ("verify", *COMMON, "--engine", "onnxruntime", "--engine", "numpy", "--steps", "1"),
        ),
        no_file,
    ),
}
