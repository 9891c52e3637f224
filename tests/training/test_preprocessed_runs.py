"""Runs on data as they are: whatever they come from, the first operation gets what they have."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from marks import needs
from models import digits_mlp, small_cnn
from runs import QUIET, RECIPE, Arrays, state

import onward
from onward.errors import DataError, RecipeError
from onward.recipe.preprocessing.join import with_preprocessing
from onward.training.api import find_lr, resume, train
from onward.training.data import format_for, open_data
from onward.training.preparation import single_pictures
from onward.training.run import Run
from onward.transform.extract import extract


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


@pytest.mark.slow("bytes", "flat", "fractions", "other names")
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
    with pytest.raises(RecipeError, match="is already a training model, so `preprocess` has no effect"):
        train(training, pixels(), preprocess="scale", **QUIET)


def test_learning_rates(folder: Path) -> None:
    data = pixels(64)
    scaled = {**data, "image": data["image"][:, None].astype(np.float32) / np.float32(16)}
    settings: dict[str, Any] = {"steps": 20, "threads": 1, **RECIPE}
    assert find_lr(small_cnn(), data, preprocess="scale:max=16", **settings) == find_lr(small_cnn(), scaled, **settings)


# ---- pictures of different sizes -------------------------------------------------------------------------------------

SIZES = [(9, 12), (8, 8), (21, 10), (64, 48), (16, 33), (40, 8)]


def photos(folder: Path, *, exif: bool = False) -> dict[str, np.ndarray]:
    """Pictures of all sizes and modes in a folder, and by file as people see them, in RGB."""
    from PIL import Image

    rng = np.random.default_rng(0)
    found = {}
    for label in ("cat", "dog"):
        (folder / "photos" / label).mkdir(parents=True)
        for number, (size, mode) in enumerate(zip(SIZES, ["RGB", "L", "RGBA", "P", "1", "RGB"], strict=True)):
            image = Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8)).convert(mode)
            path = folder / "photos" / label / f"{number}.png"
            tags = Image.Exif()
            if exif and number == 0:
                tags[0x0112] = 6  # to be turned by a quarter
            image.save(path, exif=tags)
            seen = image.rotate(-90, expand=True) if exif and number == 0 else image
            found[str(path.relative_to(folder))] = np.asarray(seen.convert("RGB"))
    return found


def colours() -> onnx.ModelProto:
    """A classifier of 8 by 8 pictures in colour."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        colours (float[N, 3, 8, 8] image) => (float[N, 10] logits) {
            flat = Flatten(image)
            logits = MatMul(flat, weight)
        }""")
    weight = np.random.default_rng(1).normal(size=(192, 10)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "weight"))
    return model


def preprocessed(model: onward.Model, pictures: np.ndarray) -> np.ndarray:
    """What a model with preprocessing reads, on ONNX Runtime."""
    first = extract(onward.transform.strip(model), ["image"], ["image/preprocessed"])
    return ort.InferenceSession(first.to_proto().SerializeToString()).run(None, {"image": pictures})[0]


def as_read(run: Run, folder: str) -> Any:
    """Data as the run reads them."""
    model = run.model
    inputs = {value.name or "": value for value in model.inputs}
    return open_data(folder, images=format_for(inputs, single_pictures(model)))


@pytest.mark.slow(
    "center_crop:size=8 scale-[3,?,?]",
    "channels_first resize:size=8 scale-[?,?,3]",
    "resize:size=8 scale normalize:mean=0.5,std=0.25-[3,?,?]",
    "to_rgb channels_first resize:size=8-[?,?,1]",
)
@needs("PIL")
@pytest.mark.parametrize(
    ("operations", "shape"),
    [
        ("resize:size=8 scale normalize:mean=0.5,std=0.25", "[3,?,?]"),
        ("center_crop:size=8 scale", "[3,?,?]"),
        ("resize:size=12x10 center_crop:size=8 scale", "[3,?,?]"),
        ("channels_first resize:size=8 scale", "[?,?,3]"),
        ("to_rgb channels_first resize:size=8", "[?,?,1]"),
    ],
)
def test_pictures_of_different_sizes(operations: str, shape: str, folder: Path) -> None:
    """What is trained on are the numbers that the preprocessing gives for each picture alone."""
    from PIL import Image

    pictures = photos(folder, exif=True)
    settings: dict[str, Any] = {**RECIPE, **QUIET, "augment": "flip", "validation": 0.25, "batch_size": 4}
    run = train(colours(), "photos", preprocess=operations, keep_preprocessing=True, run="run", **settings)
    alone = with_preprocessing(onward.load(colours()), f"input:shape={shape} {operations}")
    assert [(v.name, v.dtype, v.shape) for v in run.best.inputs] == [(v.name, v.dtype, v.shape) for v in alone.inputs]
    data = as_read(run, "photos")
    rows = data.take(np.arange(len(data)))["image"]
    for row, batched in enumerate(preprocessed(run.model, rows)):
        seen = pictures[data.row(row)]
        if "to_rgb" in operations:
            seen = np.asarray(Image.fromarray(seen).convert("L"))[..., None]
        expected = preprocessed(alone, (seen if shape[1] == "?" else seen.transpose(2, 0, 1))[None])
        np.testing.assert_array_equal(batched[None], expected)
    again = state(train(colours(), "photos", preprocess=operations, run="whole", epochs=2, **settings))
    resumed = state(resume("run", epochs=2, quiet=True))
    assert all(np.array_equal(again[name], resumed[name]) for name in again)


@needs("PIL")
def test_pictures_are_resized_as_pillow_does_it(folder: Path) -> None:
    from PIL import Image

    pictures = photos(folder)
    run = train(colours(), "photos", preprocess="resize:size=8 scale", run="run", **RECIPE, **QUIET)
    data = as_read(run, "photos")
    for row in range(len(data)):
        theirs = Image.fromarray(pictures[data.row(row)]).resize((8, 8), Image.Resampling.BILINEAR)
        ours = data.take(np.array([row]))["image"][0].transpose(1, 2, 0)
        assert np.abs(ours - np.asarray(theirs)).max() <= 1.01  # which rounds after each of two directions


@needs("PIL")
def test_pictures_that_cannot_be_brought_to_one_size(folder: Path) -> None:
    photos(folder)
    for operations, why, hint in (
        (
            "center_crop:size=30 resize:size=8",
            "is 12 x 9 pixels, too small for `center_crop:size=30`",
            "resize",
        ),
        ("scale resize:size=8", "pixels, but the first image is 12 x 9", "begin preprocessing with `resize`"),
    ):
        with pytest.raises(DataError, match=why) as caught:
            train(colours(), "photos", preprocess=operations, **RECIPE, **QUIET)
        assert hint in (caught.value.hint or "")
    prepared = onward.prepare(colours(), preprocess="resize:size=8", **RECIPE)  # which takes bytes
    with pytest.raises(DataError, match="but the first image is"):
        train(prepared, "photos", **QUIET)
    numbers = onward.prepare(
        colours(), preprocess={"image": ["input:dtype=float32,max=255", "resize:size=8"]}, **RECIPE
    )
    assert train(numbers, "photos", run="numbers", **QUIET).config["classes"] == ["cat", "dog"]
