"""Preprocessing, against what others make of the same pictures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest
from marks import needs
from models import digits_mlp, small_cnn
from onnx import TensorProto, helper

import onward
from onward.engines import start
from onward.errors import Error, RecipeError
from onward.recipe.preprocessing.join import with_preprocessing

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
RGB = np.random.default_rng(0).integers(0, 256, (3, 50, 70, 3), np.uint8)
GREY = RGB[..., :1]


def identity(*shape: Any, dtype: int = TensorProto.FLOAT) -> onward.Model:
    """A model that gives what it takes."""
    values = [helper.make_tensor_value_info(name, dtype, shape) for name in ("image", "same")]
    graph = helper.make_graph([helper.make_node("Identity", ["image"], ["same"])], "identity", [values[0]], [values[1]])
    return onward.load(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))


def made(model: onward.Model, preprocess: Any, images: np.ndarray) -> np.ndarray:
    """What a model gets of images."""
    proto = with_preprocessing(model, preprocess).to_proto()
    onnx.checker.check_model(proto, full_check=True)
    (name,) = [value.name for value in proto.graph.input]
    return ort.InferenceSession(proto.SerializeToString()).run(None, {name: images})[0]


def resized(images: np.ndarray, height: int, width: int) -> np.ndarray:
    """Channels come first."""
    import torch

    pictures = torch.from_numpy(images.astype(np.float32).transpose(0, 3, 1, 2))
    return torch.nn.functional.interpolate(pictures, (height, width), mode="bilinear", antialias=True).numpy()


def first(images: np.ndarray) -> np.ndarray:
    return images.astype(np.float32).transpose(0, 3, 1, 2)


CASES: list[tuple[tuple[Any, ...], str, np.ndarray, Callable[[], np.ndarray]]] = [
    (("N", 3, 50, 70), "scale channels_first", RGB, lambda: first(RGB) / np.float32(255)),
    (("N", 50, 70, 3), "scale:max=100", RGB, lambda: RGB.astype(np.float32) / np.float32(100)),
    (("N", 50, 70, 3), "channels_last", RGB.transpose(0, 3, 1, 2), lambda: RGB.astype(np.float32)),
    (
        ("N", 3, 50, 70),
        "scale normalize:preset=imagenet channels_first",
        RGB,
        lambda: (first(RGB) / 255 - np.reshape(MEAN, (3, 1, 1))) / np.reshape(STD, (3, 1, 1)),
    ),
    (
        ("N", 3, 50, 70),
        "channels_first normalize:mean=[1, 2, 3],std=[4,5,6]",
        RGB,
        lambda: (first(RGB) - np.reshape([1, 2, 3], (3, 1, 1))) / np.reshape([4, 5, 6], (3, 1, 1)),
    ),
    (("N", 3, 20, 30), "resize:size=20x30 channels_first", RGB, lambda: resized(RGB, 20, 30)),
    (("N", 3, 90, 31), "channels_first resize:size=[90,31]", RGB, lambda: resized(RGB, 90, 31)),
    (("N", 3, 100, 100), "channels_first resize:size=100", RGB, lambda: resized(RGB, 100, 100)),
    (("N", 3, 21, 40), "center_crop:size=21x40 channels_first", RGB, lambda: first(RGB)[:, :, 14:35, 15:55]),
    (("N", 3, 50, 70), "to_rgb channels_first", GREY, lambda: first(np.repeat(GREY, 3, 3))),
    (("N", 3, 50, 70), "to_rgb channels_first", GREY[..., 0], lambda: first(np.repeat(GREY, 3, 3))),
    (("N", 1, 20, 20), "resize:size=20", GREY[..., 0], lambda: resized(GREY, 20, 20)),
    (("N", 64), "normalize:mean=2,std=4", np.arange(128.0, dtype="f4").reshape(2, 64), lambda: _counted()),
]


def _counted() -> np.ndarray:
    return (np.arange(128.0).reshape(2, 64) - 2) / 4


@needs("torch")
@pytest.mark.parametrize(("shape", "preprocess", "images", "expected"), CASES, ids=[case[1] for case in CASES])
def test_operations(
    shape: tuple[Any, ...], preprocess: str, images: np.ndarray, expected: Callable[[], np.ndarray]
) -> None:
    raw = f"input:dtype={images.dtype},shape={['?', *images.shape[2:]]}".replace(" ", "")
    found = made(identity(*shape), [raw, preprocess], images)
    np.testing.assert_allclose(found, expected(), rtol=1e-5, atol=2e-3)


@needs("PIL")
def test_resizing_is_that_of_pillow() -> None:
    from PIL import Image

    found = made(identity("N", 24, 17, 3), "resize:size=24x17", RGB)
    pillow = [np.asarray(Image.fromarray(image).resize((17, 24), Image.Resampling.BILINEAR)) for image in RGB]
    assert np.abs(found - np.stack(pillow)).max() <= 1  # Pillow rounds, twice


@needs("torch")
def test_a_model_that_takes_whole_numbers() -> None:
    found = made(identity("N", 24, 17, 3, dtype=TensorProto.UINT8), "resize:size=24x17", RGB)
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, np.rint(resized(RGB, 24, 17)).clip(0, 255).transpose(0, 2, 3, 1))


@pytest.mark.parametrize(
    ("preprocess", "why", "hint"),
    [
        ("resize", "`resize` needs `size`", "size="),
        ("resise:size=8", "unknown preprocessing `resise`", "`resize`"),
        ("resize:size=8,mode=cubic", "has no option `mode`", "size"),
        ("resize:size=9", "gives samples of the shape [1, 9, 9], but `image` takes [1, 8, 8]", "resize"),
        ("resize:size=0", "`size` of `resize` is `0`", "size=32"),
        ("to_rgb", "`to_rgb` gives three channels", None),
        ("channels_last", "`channels_last` cannot give [1, 8, 8]", "leave it out"),
        ("input:shape=[8,8,1] scale", "samples are [8, 8, 1], but `scale` takes [1, 8, 8]", "`channels_first`"),
        ("input:shape=[9,9] scale", "samples are [9, 9], but `scale` takes [1, 8, 8]", "`resize`"),
        ("input:dtype=text scale", "unknown type `text`", "uint8"),
        ("scale:max=0", "`max` of `scale` is `0`, but must be positive", "scale:max=255"),
        ("normalize:mean=[1,2]", "`mean` of `normalize` has 2 numbers for 1 channels", None),
        ("normalize:std=0", "`std` of `normalize` is `0`, but must be positive", None),
        ("normalize:preset=imagenet", "is for values from 0 to 1, and these go to 255", "put `scale` before it"),
        ("center_crop:size=9", "gives samples of the shape", None),
        ("photo=scale", "the model has no input `photo`", "image"),
        ({"image": "scale", "other": "scale"}, "the model has no input `other`", "image"),
    ],
)
def test_what_does_not_go(preprocess: Any, why: str, hint: str | None) -> None:
    with pytest.raises(Error) as caught:
        onward.prepare(small_cnn(), loss="cross_entropy", preprocess=preprocess)
    assert why in str(caught.value)
    assert hint is None or hint in (caught.value.hint or "")


# ---- in a training model ---------------------------------------------------------------------------------------------

RECIPE: dict[str, Any] = {"loss": "cross_entropy", "optimizer": "sgd:lr=0.1"}
FLAT = np.random.default_rng(1).integers(0, 17, (16, 64), np.uint8)
LABELS = np.arange(16) % 10


def test_training_is_that_of_data_which_were_prepared_before() -> None:
    batch = {"image": FLAT, "labels": LABELS}
    scaled = {"image": FLAT.astype(np.float32) / np.float32(16), "labels": LABELS}
    raw = start(onward.prepare(digits_mlp(), preprocess="scale:max=16", **RECIPE))
    plain = start(onward.prepare(digits_mlp(), **RECIPE))
    with raw, plain:
        for _ in range(3):
            assert raw.step(batch) == plain.step(scaled)
            before, after = raw.evaluate(batch), plain.evaluate(scaled)
            assert all(np.array_equal(before[name], after[name]) for name in after)
        a, b = raw.state(), plain.state()
    assert a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def test_training_models_are_sound_and_lower_to_one_step_for_raw_pictures(tmp_path: Path) -> None:
    preprocess = "resize:size=8 scale normalize:mean=0.5,std=0.25 channels_first"
    model = onward.prepare(small_cnn(), preprocess=preprocess, augment="flip crop:padding=1 noise", **RECIPE)
    assert onward.check(model) == []
    model.save(tmp_path / "training.onnx")
    step = onward.lower(tmp_path / "training.onnx").to_proto()
    onnx.checker.check_model(step, full_check=True)
    assert {node.domain for node in step.graph.node} <= {"", "ai.onnx"}
    image = next(value for value in step.graph.input if value.name == "image")
    assert image.type.tensor_type.elem_type == TensorProto.UINT8
    assert [d.dim_value for d in image.type.tensor_type.shape.dim] == [0, 0, 0, 1]
    evaluation = onward.lower(tmp_path / "training.onnx", part="evaluation")
    assert "rng" not in [value.name for value in evaluation.graph.inputs]


def test_nothing_of_it_is_trained() -> None:
    model = onward.prepare(small_cnn(), preprocess="channels_first normalize:mean=[3],std=[2]", **RECIPE)
    plain = onward.prepare(small_cnn(), **RECIPE)
    assert model.step().differentiated() == plain.step().differentiated()


def drawn(*names: str) -> onward.Model:
    """Preprocessing that somebody drew: from bytes to numbers around 0, with a weight of its own."""
    outputs = ", ".join(f"float[N, 64] {name}" for name in names)
    nodes = " ".join(f"{name} = Sub(wide, mean)" for name in names)
    text = f"""<ir_version: 9, opset_import: ["" : 18]>
    prep (uint8[N, 64] pixels) => ({outputs}) <float[64] mean = {{{",".join(["8"] * 64)}}}>
    {{ wide = Cast<to = 1>(pixels) {nodes} }}"""
    return onward.load(onnx.parser.parse_model(text))


@pytest.mark.parametrize("name", ["image", "anything"])
def test_a_graph_of_ones_own(name: str, tmp_path: Path) -> None:
    drawn(name).save(tmp_path / "prep.onnx")
    model = onward.prepare(digits_mlp(), preprocess=str(tmp_path / "prep.onnx"), augment="noise:std=0.1", **RECIPE)
    assert onward.check(model) == []
    assert [value.name for value in model.inputs] == ["pixels"]
    assert "mean" not in " ".join(model.step().differentiated())
    with start(model) as engine, start(onward.prepare(digits_mlp(), **RECIPE)) as plain:
        found = engine.evaluate({"pixels": FLAT, "labels": LABELS})
        expected = plain.evaluate({"image": FLAT.astype(np.float32) - 8, "labels": LABELS})
        assert engine.step({"pixels": FLAT, "labels": LABELS})["loss"] != found["loss"]
    np.testing.assert_array_equal(found["logits"], expected["logits"])


def test_graphs_that_do_not_fit() -> None:
    with pytest.raises(RecipeError, match="the preprocessing gives `a`, `b`, and the model takes `image`"):
        onward.prepare(digits_mlp(), preprocess=drawn("a", "b"), **RECIPE)
    with pytest.raises(RecipeError, match=r"`image` of the preprocessing has the shape \[\?, 64\]"):
        onward.prepare(small_cnn(), preprocess=drawn("image"), **RECIPE)


def test_a_teacher_sees_what_the_student_sees() -> None:
    """The same model, which teaches itself: there is nothing to learn, whatever pictures are made of the data."""
    model = onward.prepare(
        digits_mlp(), loss=None, teacher=digits_mlp(), preprocess="scale", augment="noise:std=3", optimizer="sgd"
    )
    with start(model) as engine:
        assert float(engine.step({"image": FLAT})["loss"]) == pytest.approx(0, abs=1e-6)


def colour_net() -> onnx.ModelProto:
    weights = helper.make_tensor("w", TensorProto.FLOAT, [192, 2], np.linspace(-1, 1, 384))
    nodes = [helper.make_node("Flatten", ["image"], ["flat"]), helper.make_node("MatMul", ["flat", "w"], ["logits"])]
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, ["N", 3, 8, 8])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 2])
    graph = helper.make_graph(nodes, "net", [image], [logits], [weights])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=9)


FILTERS = """<ir_version: 10, opset_import: ["": 21]>
filters (float[N,3,8,8] x) => (float[N,3,8,8] image) <float[2] zeros = {0, 0}> {
    mixing = Constant<value = float[8,8] {NUMBERS}>()
    shift = Constant<value = float[3,1,1] {0.1, 0.2, 0.3}>()
    mixed = MatMul(x, mixing)
    image = Add(mixed, shift)
}""".replace("NUMBERS", ", ".join(["0.1"] * 64))


@pytest.mark.parametrize("drawn", [False, True])
def test_constants_of_preprocessing_are_never_trained(drawn: bool, tmp_path: Path) -> None:
    operations = "scale normalize:mean=[0.5,0.4,0.3],std=[0.2,0.3,0.4] channels_first"
    kept = tmp_path / "kept.onnx"
    with_preprocessing(onward.load(colour_net()), onnx.parser.parse_model(FILTERS) if drawn else operations).save(kept)
    for options in ({}, {"trainable": "*"}):
        assert onward.prepare(kept, loss="ce", **options).steps[0].differentiated() == ["w"]
    roles = {weight.name: weight.role for weight in onward.describe(kept).weights}
    assert [name for name, role in roles.items() if role == "trainable"] == ["w"]
