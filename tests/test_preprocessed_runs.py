"""Runs on data as they are: whatever they come from, the first operation gets what they have."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onward
from conftest import needs
from models import digits_mlp, small_cnn
from onward.errors import DataError, RecipeError
from onward.training.api import find_lr, train
from runs import QUIET, RECIPE, Arrays, state


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def pixels(count: int = 48) -> Arrays:
    rng = np.random.default_rng(0)
    return {"image": rng.integers(0, 17, (count, 8, 8), np.uint8), "labels": np.arange(count) % 10}


def csv(data: Arrays) -> str:
    rows = np.column_stack([data["image"].reshape(len(data["labels"]), -1), data["labels"]])
    header = ",".join([*(f"p{i}" for i in range(64)), "labels"])
    np.savetxt("data.csv", rows, "%d", ",", header=header, comments="")
    return "data.csv"


def batches(data: Arrays) -> Any:
    def stream() -> Iterator[Arrays]:
        for at in range(0, len(data["labels"]), 16):
            yield {name: array[at : at + 16] for name, array in data.items()}

    return stream


SOURCES = {
    "bytes": lambda data: data,
    "with channels": lambda data: {**data, "image": data["image"][:, None]},
    "flat": lambda data: {**data, "image": data["image"].reshape(-1, 64)},
    "other names": lambda data: {"x": data["image"], "y": data["labels"]},
    "whole numbers": lambda data: {**data, "image": data["image"].astype(np.int64)},
    "fractions": lambda data: {**data, "image": data["image"].astype(np.float64)},
    "csv": csv,
    "stream": batches,
}


@pytest.mark.parametrize("source", SOURCES)
def test_all_sources_are_preprocessed_alike(source: str, folder: Path) -> None:
    data = pixels()
    settings: dict[str, Any] = {"shuffle": False, "batch_size": 16, **RECIPE, **QUIET}
    scaled = {**data, "image": data["image"][:, None].astype(np.float32) / np.float32(16)}
    expected = state(train(small_cnn(), scaled, run="scaled", **settings))
    run = train(small_cnn(), SOURCES[source](data), run="run", preprocess="scale:max=16", **settings)
    found = state(run)
    assert found.keys() == expected.keys() and all(np.array_equal(found[name], expected[name]) for name in found)
    are_bytes = source not in ("whole numbers", "fractions", "csv")
    assert run.model.inputs[0].dtype.name == ("UINT8" if are_bytes else "FLOAT")  # type: ignore[union-attr]


@needs("PIL")
def test_folders_of_images(folder: Path) -> None:
    from PIL import Image

    data = pixels(40)
    for index, (image, label) in enumerate(zip(data["image"], data["labels"], strict=True)):
        place = folder / "images" / f"class {label}"
        place.mkdir(parents=True, exist_ok=True)
        file = io.BytesIO()
        Image.fromarray(np.kron(image, np.ones((2, 2), np.uint8))).save(file, "PNG")
        (place / f"{index:03}.png").write_bytes(file.getvalue())
    run = train(small_cnn(), "images", preprocess="resize:size=8 scale:max=16", run="run", **RECIPE, **QUIET)
    assert [str(dim) for dim in run.model.inputs[0].shape or ()] == ["N", "1", "image_2", "image_3"]
    assert run.config["classes"] == [f"class {label}" for label in range(10)]
    as_read = train(small_cnn(), "images", preprocess="scale:max=16", run="as-read", **RECIPE, **QUIET)
    assert [str(dim) for dim in as_read.model.inputs[0].shape or ()] == ["N", "1", "8", "8"]


def test_a_training_model_brings_its_preprocessing(folder: Path) -> None:
    data = pixels()
    model = onward.prepare(small_cnn(), preprocess="input:shape=[8,8] scale:max=16", augment="flip", **RECIPE)
    a = train(model, data, run="a", **QUIET)
    b = train(small_cnn(), data, preprocess="scale:max=16", augment="flip", run="b", **RECIPE, **QUIET)
    assert all(np.array_equal(x, y) for x, y in zip(state(a).values(), state(b).values(), strict=True))


def test_what_does_not_fit(folder: Path) -> None:
    colours = {"image": np.zeros((8, 8, 8, 3), np.uint8), "labels": np.zeros(8, np.int64)}
    why = r"input `image` takes float32\[1, 8, 8\], but column `image` is uint8\[8, 8, 3\]"
    with pytest.raises(DataError, match=why) as caught:
        train(small_cnn(), colours, preprocess="scale", **RECIPE, **QUIET)
    assert "`channels_first`" in (caught.value.hint or "")
    with pytest.raises(RecipeError, match="no preprocessing to keep"):
        train(digits_mlp(), pixels(), keep_preprocessing=True, **RECIPE, **QUIET)
    training = onward.prepare(small_cnn(), **RECIPE)
    with pytest.raises(RecipeError, match="carries its training already, so `preprocess` has no effect"):
        train(training, pixels(), preprocess="scale", **QUIET)


def test_learning_rates(folder: Path) -> None:
    data = pixels(64)
    scaled = {**data, "image": data["image"][:, None].astype(np.float32) / np.float32(16)}
    settings: dict[str, Any] = {"steps": 20, "threads": 1, **RECIPE}
    assert find_lr(small_cnn(), data, preprocess="scale:max=16", **settings) == find_lr(small_cnn(), scaled, **settings)
