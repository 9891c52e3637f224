"""Augmentation: what comes out could have come out, as often as it should, and again when a run is resumed."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from marks import needs
from models import small_cnn
from runs import QUIET, accuracy, interrupted_after, outputs, state
from scipy import stats
from whole_runs import WholeRun, check_same, trained

import onward
from onward.engines import start
from onward.errors import Error
from onward.model import Model
from onward.training.api import resume, train
from onward.training.run import Run
from onward.transform.training import remove_unused

RECIPE: dict[str, Any] = {"loss": "cross_entropy", "optimizer": "sgd:lr=0.05"}
PICTURES = np.random.default_rng(0).random((512, 1, 8, 8), np.float32)  # no two pixels are alike


def pictures(augment: Any, images: np.ndarray = PICTURES, seed: int = 0, steps: int = 1, **recipe: Any) -> np.ndarray:
    """What the model gets to see of images, in a step after so many others."""
    model = onward.prepare(small_cnn(), augment=augment, seed=seed, **RECIPE, **recipe)
    with start(model) as engine:
        for _ in range(steps - 1):
            engine.step({"image": images[:2], "labels": np.zeros(2, np.int64)})
        model = engine.updated()
    return read_by_step(model, {"image": images})["image"]


def read_by_step(training: Model, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What augmentation makes of the inputs of a step, by input."""
    combined = Model(training.combined())
    graph = combined.graph
    made = [v for node in graph for v in node.outputs if (v.name or "").endswith(("/augmented", "/moved"))]
    graph.outputs[:] = made
    remove_unused(graph)
    graph.inputs[:] = [value for value in graph.inputs if value.name in batch]
    session = ort.InferenceSession(combined.to_proto().SerializeToString())
    found = session.run(None, {value.name or "": batch[value.name or ""] for value in graph.inputs})
    return {(value.name or "").rpartition("/")[0]: array for value, array in zip(made, found, strict=True)}


def assert_share(happened: np.ndarray, p: float) -> None:
    """That something happened as often as its probability says, to one in a million."""
    assert stats.binomtest(int(happened.sum()), happened.size, p).pvalue > 1e-6


def same(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Which pictures are equal."""
    return (a == b).reshape(len(a), -1).all(1)


@pytest.mark.slow("flip:p=0.2-3-0.2")
@pytest.mark.parametrize(
    ("augment", "axis", "p"), [("flip", 3, 0.5), ("flip:p=0.2", 3, 0.2), ("flip:direction=vertical", 2, 0.5)]
)
def test_flips(augment: str, axis: int, p: float) -> None:
    seen = pictures(augment)
    flipped = same(seen, np.flip(PICTURES, axis))
    assert (flipped ^ same(seen, PICTURES)).all()
    assert_share(flipped, p)


def test_crops_are_windows_of_a_padded_picture() -> None:
    seen, padded = pictures("crop:padding=2"), np.pad(PICTURES, ((0, 0), (0, 0), (2, 2), (2, 2)))
    windows = [padded[:, :, y : y + 8, x : x + 8] for y, x in itertools.product(range(5), repeat=2)]
    found = np.stack([same(seen, window) for window in windows])
    assert (found.sum(0) == 1).all()
    assert stats.chisquare(found.sum(1)).pvalue > 1e-6


@pytest.mark.slow
def test_channels_last() -> None:
    """The same, for pictures whose channels are at the other end."""
    images = PICTURES.transpose(0, 2, 3, 1)
    preprocess = "input:dtype=float32 normalize:mean=0 channels_first"  # augmentation comes before it
    for augment in ("flip", "flip:direction=vertical", "crop:padding=2", "erase", "contrast"):
        seen = pictures(augment, images, preprocess=preprocess)
        np.testing.assert_allclose(seen.transpose(0, 3, 1, 2), pictures(augment), rtol=1e-6)


def test_rectangles_are_erased() -> None:
    seen = pictures("erase:p=0.75,area=[0.1,0.4]")
    black = (seen == 0)[:, 0]
    np.testing.assert_array_equal(seen[:, 0][~black], PICTURES[:, 0][~black])
    erased = black.any((1, 2))
    assert_share(erased, 0.75)
    for mask in black[erased]:
        rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        assert mask.sum() == (np.ptp(rows) + 1) * (np.ptp(columns) + 1)  # a rectangle
    shares = black[erased].mean((1, 2))
    assert shares.min() > 0.05 and shares.max() < 0.5 and shares.std() > 0.05  # sides are whole numbers
    corners = {(np.flatnonzero(mask.any(1))[0], np.flatnonzero(mask.any(0))[0]) for mask in black[erased]}
    assert len(corners) > 20


def test_brightness() -> None:
    factors = (pictures("brightness:amount=0.3") / PICTURES)[:, 0]
    np.testing.assert_allclose(factors, np.broadcast_to(factors[:, :1, :1], factors.shape), rtol=1e-5)
    assert stats.kstest(factors[:, 0, 0], "uniform", (0.7, 0.6)).pvalue > 1e-6


def test_contrast() -> None:
    seen, means = pictures("contrast:amount=0.5"), PICTURES.mean((1, 2, 3), keepdims=True)
    np.testing.assert_allclose(seen.mean((1, 2, 3), keepdims=True), means, rtol=1e-5)
    factors = np.median((seen - means) / (PICTURES - means), (1, 2, 3))
    np.testing.assert_allclose(seen, means + (PICTURES - means) * factors.reshape(-1, 1, 1, 1), atol=1e-5)
    assert stats.kstest(factors, "uniform", (0.5, 1.0)).pvalue > 1e-6


def test_noise() -> None:
    noise = pictures("noise:std=0.5") - PICTURES
    assert stats.kstest(noise.ravel(), "norm", (0, 0.5)).pvalue > 1e-6


def test_values_of_bytes_stay_in_their_range() -> None:
    bytes_ = (PICTURES * 256).astype(np.uint8)
    seen = pictures("noise:std=0.5 brightness:amount=1", bytes_, preprocess="scale")
    assert seen.min() == 0 and seen.max() == 1
    assert pictures("noise:std=0.5").max() > 1  # of other numbers the range is not known


@pytest.mark.slow
def test_luck_differs_by_sample_step_place_and_seed() -> None:
    one = np.repeat(PICTURES[:1], 64, 0)
    seen = pictures("brightness", one)
    assert len(np.unique(seen[:, 0, 0, 0])) == 64
    np.testing.assert_array_equal(seen, pictures("brightness", one))
    assert not same(seen, pictures("brightness", one, steps=2)).any()
    assert not same(seen, pictures("brightness", one, seed=1)).any()
    flips = same(pictures("flip flip:direction=vertical"), np.flip(PICTURES, (2, 3)))
    assert_share(flips, 0.25)  # each flips by itself
    np.testing.assert_array_equal(
        pictures("flip crop:padding=2 flip:p=0", seed=5), pictures("flip crop:padding=2", seed=5)
    )


def test_half_precision() -> None:
    """There is luck that float16 would round to 1; a step sees finite numbers all the same."""
    model = small_cnn()
    for tensor in model.graph.initializer:
        tensor.CopyFrom(
            onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor).astype(np.float16), tensor.name)
        )
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    everything = "flip crop:padding=2 erase brightness contrast noise"
    training = onward.prepare(model, augment=everything, loss_scale=8.0, master_weights=False, **RECIPE)
    assert onward.check(training) == []
    batch = {"image": np.tile(PICTURES, (8, 1, 1, 1)).astype(np.float16), "labels": np.zeros(4096, np.int64)}
    with start(training) as engine:
        assert np.isfinite(engine.step(batch)["loss"])


def test_evaluation_does_not_augment() -> None:
    batch = {"image": PICTURES[:16], "labels": np.arange(16) % 10}
    noisy = start(onward.prepare(small_cnn(), augment="noise:std=2", **RECIPE))
    plain = start(onward.prepare(small_cnn(), **RECIPE))
    with noisy, plain:
        np.testing.assert_array_equal(noisy.evaluate(batch)["logits"], plain.evaluate(batch)["logits"])
        assert noisy.evaluate(batch)["loss"] == plain.evaluate(batch)["loss"]


@pytest.mark.parametrize(
    ("augment", "why"),
    [
        ("turn", "unknown augmentation `turn`"),
        ("crop", "`crop` needs `padding`"),
        ("crop:padding=0", "`padding` is `0`, but must be a number of pixels"),
        ("flip:p=2", "`p` is `2`, but must be a probability"),
        ("flip:direction=up", "`direction` of `flip` is `up`"),
        ("erase:area=2", "`area` is `2`, but must be two numbers"),
        ("noise:std=-1", "`std` is `-1`, but must be a positive number"),
        ("brightness:amount=2", "`amount` is `2`, but must be a number from 0 to 1"),
        ("picture=flip", "the model has no input `picture`"),
    ],
)
def test_what_does_not_go(augment: str, why: str) -> None:
    with pytest.raises(Error) as caught:
        onward.prepare(small_cnn(), augment=augment, **RECIPE)
    assert why in str(caught.value)


@pytest.mark.slow("numpy")
@pytest.mark.parametrize("engine", ["numpy", pytest.param("torch", marks=needs("torch"))])
def test_engines_draw_the_same(engine: str) -> None:
    augment = "flip crop:padding=1 erase brightness contrast noise"
    model = onward.prepare(small_cnn(), preprocess="resize:size=8 scale", augment=augment, **RECIPE)
    images = np.random.default_rng(0).integers(0, 256, (16, 1, 12, 10), np.uint8)
    batch = {"image": images, "labels": np.arange(16) % 10}
    with start(model) as ours, start(model, engine=engine, compile=False) as other:
        for _ in range(2):
            assert float(other.step(batch)["loss"]) == pytest.approx(float(ours.step(batch)["loss"]), rel=1e-5)


# ---- masks and further images ----------------------------------------------------------------------------------------

CODES = np.arange(64 * 64, dtype=np.int64).reshape(64, 8, 8) + 1  # no two pixels are alike, and none is 0
PLACED = [codes[y : y + 8, x : x + 8] for codes in (CODES[0], CODES[0, :, ::-1])
          for codes in (np.pad(codes, 2),) for y, x in itertools.product(range(5), repeat=2)]  # fmt: skip
"""All that `flip crop:padding=2` can make of the first of them, but for the codes that the others add."""


def segmenter(image: str = "N, 1, 8, 8", logits: str = "N, 1, 8, 8", more: str = "", body: str = "") -> onnx.ModelProto:
    """A model with a number for each pixel."""
    return onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 20]>
        segmenter (float[{image}] image{more}) => (float[{logits}] logits) <float[1] weight = {{1.0}}>
        {{ logits = Mul (image, weight) {body} }}"""
    )


def pixelwise(model: onnx.ModelProto, augment: Any = "flip crop:padding=2", loss: str = "mse", **recipe: Any) -> Model:
    settings = {"optimizer": "sgd:lr=0.05", "trainable": "weight", **recipe}
    return onward.prepare(model, loss=loss, augment=augment, **settings)


def assert_alike(*moved: np.ndarray) -> None:
    """That all are moved by the same draw for each sample, and as numpy would."""
    masks = [array.astype(np.int64).reshape(64, 8, 8) for array in moved]
    assert all(np.array_equal(mask, masks[0]) for mask in masks)
    first = np.where(masks[0] > 0, (masks[0] - 1) % 64 + 1, 0)
    found = np.array([[np.array_equal(mask, placed) for placed in PLACED] for mask in first])
    assert (found.sum(1) == 1).all() and found.any(0).sum() > 20
    np.testing.assert_array_equal((masks[0].max((1, 2)) - 1) // 64, np.arange(64))


@pytest.mark.parametrize(
    ("model", "settings", "shape"),
    [
        (segmenter(), {"loss": "mse"}, (64, 1, 8, 8)),
        (segmenter("N, 1, H, W", "N, 1, H, W"), {"loss": "bce_with_logits"}, (64, 1, 8, 8)),
        (
            segmenter("N, 1, H, W", "N, 1, H, W"),
            {"loss": "ce", "preprocess": "input:dtype=float32 resize:size=8"},
            (64, 8, 8),
        ),
        (segmenter("N, 8, 8, 1", "N, 8, 8, 1"), {"loss": "ce:axis=-1"}, (64, 8, 8)),
        (
            segmenter("N, 8, 8, 1", "N, 8, 8, 1"),
            {"preprocess": "input:dtype=float32 normalize:std=2 channels_last"},
            (64, 8, 8, 1),
        ),
        (segmenter(), {"augment": "noise:std=0.01 flip brightness crop:padding=2"}, (64, 1, 8, 8)),
    ],
)
def test_a_target_moves_with_its_image(model: onnx.ModelProto, settings: dict, shape: tuple[int, ...]) -> None:
    training = pixelwise(model, **settings)
    (target,) = training.step().algorithm.inputs
    size = [
        dim if isinstance(dim, int) else 64 if axis == 0 else 8 for axis, dim in enumerate(training.inputs[0].shape)
    ]
    batch = {"image": CODES.reshape(size).astype("f"), target.name: CODES.reshape(shape).astype(target.dtype.numpy())}
    seen = read_by_step(training, batch)
    assert_alike(*([seen[target.name]] if "noise" in settings.get("augment", "") else seen.values()))
    assert onward.check(training) == []


def test_inputs_move_with_their_image() -> None:
    """A second image and masks of all types, that the model takes; the loss is a value of the model."""
    kinds = ("float", "double", "float16", "bool", "int8", "uint16", "int32", "int64", "uint8", "uint32")
    more = "".join(f", {kind}[N, 8, 8] {kind}_mask" for kind in kinds) + ", float[N, 8, 8, 3] other, float[N, 5] age"
    model = segmenter(more=more, body="loss = ReduceMean<keepdims=0>(logits)")
    batch = {"image": CODES[:, None].astype(np.float32), "other": np.repeat(CODES[..., None], 3, -1).astype(np.float32)}
    types = {
        value.name: onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        for value in model.graph.input
    }
    batch |= {f"{kind}_mask": (CODES % 90).astype(types[f"{kind}_mask"]) for kind in kinds}
    training = pixelwise(model, "image=flip crop:padding=2", loss="value:loss")
    seen = read_by_step(training, batch)
    assert training.step().fact("train.augmentation") == {"moved": [n for n in types if n != "age"], "kept": ["age"]}
    assert_alike(seen["image"], seen["other"][..., 2])
    for name, mask in batch.items():
        codes = seen["image"][:, 0].astype(np.int64)
        expected = np.where(
            codes > 0,
            mask.reshape(-1, *mask.shape[3:])[codes.ravel() - 1].reshape(seen[name].shape) if mask.ndim == 3 else 0,
            0,
        )
        assert mask.ndim != 3 or np.array_equal(seen[name], expected.astype(mask.dtype))


def test_pairs_of_images() -> None:
    model = segmenter(more=", float[N, 1, 8, 8] other")
    image = CODES[:, None].astype(np.float32)
    batch = {"image": image, "other": image, "target": image}
    both = ["image=flip crop:padding=2", "other=brightness flip crop:padding=2"]
    seen = read_by_step(pixelwise(model, ["image=flip crop:padding=2", "other=flip crop:padding=2"]), batch)
    assert_alike(*seen.values())
    seen = read_by_step(pixelwise(model, both), batch)
    assert_alike(seen["image"], seen["target"])
    np.testing.assert_array_equal(seen["other"] == 0, seen["image"] == 0)
    seen = read_by_step(pixelwise(model, both, move_with_image="none"), batch)
    assert "target" not in seen and ((seen["other"] == 0) != (seen["image"] == 0)).any()


def test_what_a_crop_lays_open_is_ignored_where_the_loss_ignores_something() -> None:
    training = pixelwise(segmenter(), loss="ce:ignore_index=-1")
    seen = read_by_step(training, {"image": CODES[:, None].astype(np.float32), "labels": CODES})
    assert_alike(seen["image"], np.where(seen["labels"] == -1, 0, seen["labels"]))
    assert (seen["labels"] == -1).any() and not (seen["labels"] == 0).any()


def detector(shape: str) -> onnx.ModelProto:
    """A model of images that gives numbers of a shape."""
    sizes = [int(size) for size in shape.split(",")]
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 20]>
        detector (float[N, 1, 8, 8] image) => (float[N, {shape}] found) <float[1] weight = {{1.0}},
            int64[1] start = {{0}}, int64[1] end = {{{np.prod(sizes)}}}, int64[1] axis = {{1}},
            int64[{len(sizes) + 1}] shape = {{-1, {shape}}}>
        {{ scaled = Mul (image, weight) flat = Flatten (scaled) part = Slice (flat, start, end, axis)
          found = Reshape (part, shape) }}"""
    )
    return model


@pytest.mark.parametrize(
    ("model", "settings", "why"),
    [
        (detector("10, 4"), {}, "`target` [N, 10, 4] may have to move with `image` under `flip` and `crop`"),
        (detector("5, 2"), {"augment": "flip"}, "if it holds coordinates, leave `flip` out"),
        (detector("10, 4"), {}, 'if it must not move: `move_with_image="none"` (`--move-with-image none`)'),
        (detector("64"), {}, "give it the height and width of the image"),
        (detector("4, 4"), {"augment": "flip"}, 'a mask or image: `move_with_image=["target"]`'),
        (detector("4, 4"), {"move_with_image": "target"}, "`crop` moves by pixels, and `target` is 4 x 4, not 8 x 8"),
        (detector("10, 4"), {"move_with_image": "target"}, "`target` is 10 x 4, but the image is 8 x 8"),
        (detector("4"), {"move_with_image": "target"}, "`target` of `move_with_image` has no height and width"),
        (segmenter(), {"move_with_image": ["targte"]}, "did you mean `target`?"),
        (segmenter(), {"augment": "noise", "move_with_image": "target"}, "`move_with_image` needs `flip` or `crop`"),
        (segmenter(more=", float[N, 4, 4] low"), {}, "`low` [N, 4, 4] may have to move with `image`"),
        (
            segmenter(more=", float[N, 1, 8, 8] other"),
            {"augment": {"image": "flip", "other": "crop:padding=1"}},
            "`augment` moves `image` and `other` in different ways",
        ),
        (
            segmenter(more=", float[N, 1, 8, 8] second, float[N, 1, 8, 8] third"),
            {"augment": {"image": "flip", "second": "flip", "third": "flip:p=1"}},
            "`augment` moves `image` and `third` in different ways",
        ),
        (
            segmenter("N, 1, 8, 8", "N, 1, 8, 8"),
            {"preprocess": "input:shape=[1,12,12] normalize:mean=9 center_crop:size=8"},
            "put `center_crop` before `normalize`",
        ),
    ],
)
def test_what_may_have_to_move_is_refused(model: onnx.ModelProto, settings: dict[str, Any], why: str) -> None:
    with pytest.raises(Error) as caught:
        pixelwise(model, **settings)
    assert why in str(caught.value)


def test_what_stays_is_said() -> None:
    kept = {"moved": ["image"], "kept": ["target"]}
    for shape, settings in (("4", {}), ("10, 4", {"move_with_image": "none"}), ("10, 4", {"move_with_image": []})):
        training = pixelwise(detector(shape), **settings)
        assert training.step().fact("train.augmentation") == kept
        assert onward.describe(training).remarks == ("augmentation moves `image` together; `target` does not move",)
    small = pixelwise(detector("4, 4"), "flip", move_with_image="target")
    target = np.arange(64 * 16, dtype=np.float32).reshape(64, 4, 4)
    seen = read_by_step(small, {"image": CODES[:, None].astype(np.float32), "target": target})
    flipped = same(seen["image"], CODES[:, None, :, ::-1])
    np.testing.assert_array_equal(seen["target"], np.where(flipped[:, None, None], target[..., ::-1], target))


def test_a_mask_of_another_size_fails_in_the_step() -> None:
    """Symbols say that sizes are the same, and data may say otherwise."""
    training = pixelwise(segmenter("N, 1, H, W", "N, 1, H, W"), "crop:padding=2")
    image = CODES[:, None].astype(np.float32)
    with start(training) as engine, pytest.raises(Error):
        engine.step({"image": image, "target": np.repeat(image, 2, -1)})


# ---- in runs ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def raw_digits(count: int = 96) -> dict[str, np.ndarray]:
    """Pictures of bytes, of another size, without an axis for channels. Two bright rows show the class."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 8, count)
    images = rng.integers(0, 100, (count, 16, 16), np.uint8)
    images[np.arange(count), labels * 2] = images[np.arange(count), labels * 2 + 1] = 255
    return {"image": images, "labels": labels}


PREPROCESS = "resize:size=8 scale normalize:mean=0.25,std=0.25"
SETTINGS: dict[str, Any] = {"preprocess": PREPROCESS, "augment": "flip noise:std=0.05", **RECIPE, **QUIET}


@pytest.mark.slow
def test_an_interrupted_run_goes_on_bit_for_bit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = raw_digits()
    whole = train(small_cnn(), data, run="whole", epochs=2, validation=0.25, **SETTINGS)
    with monkeypatch.context() as patch:
        interrupted_after(4, patch)
        run = train(small_cnn(), data, run="run", epochs=2, validation=0.25, **SETTINGS)
    assert run.progress["step"] == 4 and run.log[-1]["reason"] == "interrupted"
    run = resume(run, data, quiet=True)
    a, b = state(run), state(whole)
    assert "rng" in a and a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)
    assert run.results == whole.results
    assert not np.array_equal(
        a["fc.weight"], state(train(small_cnn(), data, run="other", seed=1, **SETTINGS))["fc.weight"]
    )


def test_the_model_that_comes_out_takes_what_it_took(folder: Path) -> None:
    data = raw_digits(192)
    settings = {**SETTINGS, "augment": "flip", "optimizer": "adam:lr=1e-2", "epochs": 12, "validation": data}
    run = train(small_cnn(), data, run="run", **settings)
    original = onward.load(small_cnn()).to_proto().graph
    best = run.best.to_proto().graph
    assert (best.input, best.output, best.node) == (original.input, original.output, original.node)
    halves = data["image"].astype(np.float32).reshape(-1, 8, 2, 8, 2)
    weights = np.array([0.5, 0.5], np.float32)
    shrunk = np.einsum("nhawb,a,b->nhw", halves, weights, weights)  # not what resizing does, but near it
    prepared = {"image": (shrunk[:, None] / 255 - 0.25) / 0.25, "labels": data["labels"]}
    assert accuracy(run.best, prepared) > 0.9

    kept = train(small_cnn(), data, run="kept", keep_preprocessing=True, **settings)
    assert kept.results == run.results
    assert accuracy(kept.best, data) == pytest.approx(max(_accuracies(kept)))
    for name, value in run.best.graph.initializers.items():
        np.testing.assert_array_equal(kept.best.graph.initializers[name].const_value.numpy(), value.const_value.numpy())
    assert accuracy(onward.transform.strip(run.model), data) == pytest.approx(run.results["accuracy"])


def _accuracies(run: Run) -> list[float]:
    return [event["accuracy"] for event in run.log if event["event"] == "validation"]


def shapes(count: int = 256) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Bright rectangles, and a model that sees all pixels at once: it could learn to mirror masks, too."""
    rng = np.random.default_rng(0)
    masks = np.zeros((count, 8, 8), np.int64)
    for mask, (top, left), (height, width) in zip(
        masks, rng.integers(0, 6, (count, 2)), rng.integers(2, 5, (count, 2)), strict=True
    ):
        mask[top : top + height, left : left + width] = 1
    images = (rng.uniform(0, 0.3, masks.shape) + masks).astype(np.float32)[:, None]
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20]>
        segmenter (float[N, 1, 8, 8] image) => (float[N, 2, 8, 8] logits) <int64[4] shape = {-1, 2, 8, 8}>
        { flat = Flatten (image) scores = MatMul (flat, weight) logits = Reshape (scores, shape) }"""
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros((64, 128), np.float32), "weight"))
    return model, {"image": images, "labels": masks}


def test_masks_are_learned_from_mirrored_pictures(folder: Path) -> None:
    model, data = shapes()
    settings = {**QUIET, "loss": "ce", "optimizer": "adam:lr=0.05", "epochs": 8, "validation": data}
    plain = train(model, data, run="plain", **settings)
    run = train(model, data, augment="flip:p=1", run="mirrored", **settings)
    covered = data["labels"] == 1
    for each in (plain, run):
        found = outputs(each.last, data["image"]).argmax(1)
        assert (found == data["labels"]).mean() > 0.97 and found[covered].mean() > 0.9
    moved = [event.get("augmentation") for event in run.log if event["event"] == "start"]
    assert moved == [{"moved": ["image", "labels"], "kept": []}]


def test_whole_runs_move_masks(folder: Path) -> None:
    model, data = shapes(40)
    training = onward.prepare(model, loss="ce", optimizer="adam:lr=0.1", augment="flip crop:padding=2")
    whole = WholeRun(training, batch_size=16)
    check_same(whole, whole(data, 2), trained(training, data, folder, epochs=2, batch_size=16))


@pytest.mark.parametrize("symbolic", [False, True])
def test_masks_that_preprocessing_leaves_in_their_size_are_refused(folder: Path, symbolic: bool) -> None:
    model, data = shapes(8)
    for value in (*model.graph.input, *model.graph.output) if symbolic else ():
        for axis, name in ((2, "H"), (3, "W")):
            value.type.tensor_type.shape.dim[axis].dim_param = name
    large = {name: np.kron(array, np.ones((2, 2), array.dtype)) for name, array in data.items()}
    with pytest.raises(Error, match="`labels` is 16 x 16, but preprocessing makes the images of `image` 8 x 8"):
        train(model, large, loss="ce", preprocess="resize:size=8", run="large", **QUIET)
    assert not (folder / "large").exists()
    train(model, large | {"labels": data["labels"]}, loss="ce", preprocess="resize:size=8", run="small", **QUIET)
