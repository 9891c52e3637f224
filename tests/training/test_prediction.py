"""`predict`: classes, probabilities and raw outputs, for any data, into any file."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from commands import failed, run
from models import digits_mlp, small_cnn
from PIL import Image
from runs import QUIET, digits

import onward
from onward.errors import DataError

NAMES = ["zero", "one, or so", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def predict(*arguments: Any, **options: Any) -> onward.Predictions:
    return onward.predict(*arguments, **options, quiet=True, threads=1)


def wanted(images: np.ndarray) -> np.ndarray:
    (logits,) = ort.InferenceSession(digits_mlp().SerializeToString()).run(None, {"image": images})
    powers = np.exp(logits - logits.max(1, keepdims=True))
    return np.asarray(powers / powers.sum(1, keepdims=True))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    onnx.save(digits_mlp(), "digits.onnx")
    np.savez("new.npz", image=digits(70)["image"], weight=np.linspace(0, np.nan, 70))
    return tmp_path


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet", "npz"])
def test_files(folder: Path, ending: str) -> None:
    """Every format holds the same: rows, classes by name, exact probabilities, and kept columns, NaN included."""
    p = wanted(digits(70)["image"])
    made = predict("digits.onnx", "new.npz", loss="ce", classes=NAMES, keep="weight", batch_size=32)
    made.save(f"p.{ending}")
    if ending == "npz":
        arrays = dict(np.load("p.npz"))
    elif ending == "jsonl":
        rows = [json.loads(line) for line in Path("p.jsonl").read_text().splitlines()]
        arrays = {name: np.array([row[name] for row in rows]) for name in ("row", "prediction", "weight")}
        assert list(rows[0]["probabilities"]) == NAMES
        arrays["probabilities"] = np.array([list(row["probabilities"].values()) for row in rows])
    else:
        if ending == "csv":
            with open("p.csv", newline="") as file:
                names, *cells = csv.reader(file)
            columns = dict(zip(names, zip(*cells, strict=True), strict=True))
        else:
            columns = pytest.importorskip("pyarrow.parquet").read_table("p.parquet").to_pydict()
        assert list(columns) == ["row", "weight", "prediction", "probability", *(f"p_{name}" for name in NAMES)]
        arrays = {name: np.array(columns[name]) for name in ("row", "prediction", "weight")}
        arrays["probabilities"] = np.array([columns[f"p_{name}"] for name in NAMES]).astype(np.float32).T
    assert arrays["row"].astype(int).tolist() == list(range(70))
    assert arrays["prediction"].tolist() == [NAMES[i] for i in p.argmax(1)]
    assert np.allclose(arrays["probabilities"].astype(np.float32), p, rtol=1e-5, atol=1e-8)
    assert np.isnan(arrays["weight"].astype(float)).all()
    assert [path.name for path in folder.iterdir() if path.name.endswith(".tmp")] == []


def test_raw_outputs_and_unknown_tasks(folder: Path) -> None:
    made = predict("digits.onnx", "new.npz")
    assert "raw outputs" in made.notes[0]
    assert made.arrays().keys() == {"row", "logits"}
    raw = predict("digits.onnx", "new.npz", loss="ce", raw=True).arrays()["logits"]
    assert np.array_equal(raw, made.arrays()["logits"]) and raw.shape == (70, 10)
    assert [len(batch["row"]) for batch in predict("digits.onnx", "new.npz", batch_size=32)] == [32, 32, 6]


def test_labels_are_not_features(tmp_path: Path) -> None:
    """A table may have its label, in another order of columns; the model knows the columns of its inputs."""
    rng = np.random.default_rng(0)
    table = {name: rng.normal(size=60).astype(np.float32) for name in "abc"}
    species = np.where(table["a"] > 0, "setosa", "virginica")
    data = {**table, "species": species.astype(object)}
    pandas = pytest.importorskip("pandas")
    model = onward.load(
        onnx.parser.parse_model(
            """<ir_version: 10, opset_import: ["" : 21]> g (float[N, 3] x) => (float[N, 2] y)
            <float[3, 2] w = {0.1, 0.2, 0.3, 0.4, 0.5, 0.6}> { y = MatMul (x, w) }"""
        )
    )
    made = onward.train(
        model, pandas.DataFrame(data), columns={"x": ["a", "b", "c"], "labels": "species"}, loss="ce",
        optimizer="adam:lr=0.1", epochs=20, run=tmp_path / "run", **QUIET,
    )  # fmt: skip
    turned = {name: data[name] for name in ("c", "species", "b", "a")}
    assert (predict(made, pandas.DataFrame(turned)).arrays()["prediction"] == species).mean() > 0.9
    assert (predict(made, pandas.DataFrame(table)).arrays()["prediction"] == species).mean() > 0.9
    kept = predict(made, pandas.DataFrame(turned), keep="species").arrays()
    assert kept["species"].tolist() == species.tolist()
    for others in (["a", "c", "d"], ["d", "e", "f"]):  # as many numbers, but not those of the training
        lacking = pandas.DataFrame(dict(zip(others, table.values(), strict=True)))
        with pytest.raises(DataError, match=r"has no column `[ab]`, a part of `x` in training"):
            predict(made, lacking)
        named = predict(made, lacking, columns={"x": ", ".join(others)}).arrays()
        assert np.array_equal(named["probabilities"], predict(made, pandas.DataFrame(table)).arrays()["probabilities"])


def test_pictures_without_classes(folder: Path) -> None:
    onnx.save(small_cnn(), "cnn.onnx")
    for name in ("flat/a.png", "flat/b.png", "deep/x/y/c.png", "deep/d.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (9, 7), len(name)).save(name)

    def files(*data: str) -> list[str]:
        return predict("cnn.onnx", data[0] if len(data) == 1 else list(data), loss="ce").arrays()["file"].tolist()

    assert files("flat") == ["flat/a.png", "flat/b.png"]
    assert files("deep") == ["deep/d.png", "deep/x/y/c.png"]
    assert files("flat/a.png") == ["flat/a.png"]
    assert files("deep", "flat/b.png") == ["deep/d.png", "deep/x/y/c.png", "flat/b.png"]
    (folder / "flat" / "c.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"flat/c\.png is not a complete image"):
        predict("cnn.onnx", "flat", loss="ce").save("p.csv")
    assert not list(folder.glob("*p.csv*"))
    message, hint = failed("evaluate", "cnn.onnx", "--data", "flat", "--loss", "ce")
    assert message == "the images in flat have no classes" and "onward predict" in hint


def test_command(folder: Path) -> None:
    shown = run("predict", "digits.onnx", "--data", "new.npz", "--loss", "ce", "-q").stdout
    run("predict", "digits.onnx", "--data", "new.npz", "--loss", "ce", "-q", "-o", "p.csv")
    assert shown == Path("p.csv").read_text() and shown.startswith("row,prediction,probability,p_0,")
    again = ["predict", "digits.onnx", "--data", "new.npz", "-o"]
    assert failed(*again, "p.csv")[0] == "`p.csv` already exists"
    assert failed(*again, "p.xls")[0] == "cannot write predictions to `p.xls`"
    assert failed(*again, "no/p.csv")[1].startswith("mkdir -p")
    assert failed(*again, "q.csv", "--keep", "wieght")[1] == "did you mean `weight`?"
    assert failed("predict", "digits.onnx", "-o", "q.csv", code=2)[0] == "missing option `--data`"
    np.savez("empty.npz", image=np.zeros((0, 64), np.float32))
    assert failed("predict", "digits.onnx", "--data", "empty.npz")[0] == "empty.npz has no rows"


def test_streams(folder: Path) -> None:
    images = digits(50)["image"]
    made = predict("digits.onnx", ({"image": images[i : i + 20]} for i in range(0, 50, 20)), loss="ce").arrays()
    assert made["row"].tolist() == list(range(50)) and np.allclose(made["probabilities"], wanted(images), atol=1e-6)
    with pytest.raises(DataError, match="the stream has no column `id`"):
        predict("digits.onnx", ({"image": images} for _ in range(1)), keep="id")
