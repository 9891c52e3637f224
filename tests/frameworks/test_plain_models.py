"""Inference models as native objects: outputs of stock ONNX Runtime, gradients of modules written here by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import models
import numpy as np
import onnx
import onnxruntime
import pytest
from marks import needs

import onward
from onward.errors import MismatchError, UnsupportedError
from onward.frameworks import inference
from onward.frameworks.run_files import restore, write

RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(6, 1, 8, 8)).astype(np.float32)
WEIGHTS = RNG.normal(size=(6, 10)).astype(np.float32)
TIED = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
    tied (int64[N, 3] tokens) => (float[N, 7] logits) <float[7, 4] table = {
        0.1, 0.2, -0.3, 0.4, 0.5, -0.6, 0.7, 0.8, -0.9, 1.0, 1.1, 1.2, 0.3, 0.2, 0.1, -0.4, 0.9, 0.8, -0.7, 0.6, 0.5,
        0.4, -0.2, 0.3, 0.1, 0.6, 0.7, 0.2}, int64[1] axis = {1}> {
        rows = Gather(table, tokens)
        mean = ReduceMean<keepdims = 0>(rows, axis)
        turned = Transpose(table)
        logits = MatMul(mean, turned)
    }""")


@pytest.fixture(scope="module")
def cnn() -> onnx.ModelProto:
    return models.small_cnn()


def stock(proto: onnx.ModelProto, *arrays: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {value.name: array for value, array in zip(session.get_inputs(), arrays, strict=True)}
    return np.asarray(session.run(None, feeds)[0])


def hand_written(proto: onnx.ModelProto) -> Any:
    """The CNN as somebody writes it in PyTorch, with the same weights."""
    import torch
    from torch import nn

    class Net(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bn, self.fc = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(128, 10)

        def forward(self, image: Any) -> Any:
            return self.fc(nn.functional.max_pool2d(self.bn(self.conv(image)).relu(), 2).flatten(1))

    arrays = {x.name: torch.tensor(onnx.numpy_helper.to_array(x)) for x in proto.graph.initializer}
    net = Net().eval()
    net.load_state_dict({name: x for name, x in arrays.items() if name != "dropout.ratio"}, strict=False)
    return net


def gradients(module: Any) -> dict[str, np.ndarray]:
    import torch

    module.zero_grad()
    (module(torch.from_numpy(IMAGES)) * torch.from_numpy(WEIGHTS)).sum().backward()
    return {name: x.grad.numpy().copy() for name, x in module.named_parameters()}


def agree(ours: dict[str, Any], theirs: dict[str, np.ndarray]) -> None:
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        np.testing.assert_allclose(np.asarray(ours[name]), array, rtol=1e-4, atol=1e-4, err_msg=name)


@needs("torch")
def test_torch(cnn: onnx.ModelProto) -> None:
    import torch

    module, net = onward.to_torch(cnn), hand_written(cnn)
    assert isinstance(module, torch.nn.Module) and not module.training
    assert [name for name, _ in module.named_parameters()] == [name for name, _ in net.named_parameters()]
    assert {*module.state_dict()} == {*net.state_dict()} - {"bn.num_batches_tracked"}  # buffers are buffers
    np.testing.assert_allclose(module(torch.from_numpy(IMAGES)).detach(), stock(cnn, IMAGES), atol=1e-5)
    agree(gradients(module), gradients(net))
    module.train().leave_out_dropout()
    agree(gradients(module), gradients(net.train()))  # with batch statistics
    torch.testing.assert_close(module.bn.running_var, net.bn.running_var)
    torch.optim.SGD(module.parameters(), 1e-3).step()
    trained = stock(module.to_model().to_proto(), IMAGES)
    np.testing.assert_allclose(module.eval()(torch.from_numpy(IMAGES)).detach(), trained, rtol=1e-4, atol=1e-5)


@needs("jax", "torch")
def test_jax(cnn: onnx.ModelProto) -> None:
    import jax

    apply, params = onward.to_jax(cnn)
    np.testing.assert_allclose(jax.jit(apply)(params, {"image": IMAGES})["logits"], stock(cnn, IMAGES), atol=1e-5)
    loss = lambda params: (apply(params, {"image": IMAGES})["logits"] * WEIGHTS).sum()
    agree(jax.grad(loss)(params), gradients(hand_written(cnn)))


@needs("tensorflow", "torch")
def test_tensorflow(cnn: onnx.ModelProto) -> None:
    import tensorflow as tf

    module = onward.to_tensorflow(cnn)
    np.testing.assert_allclose(module(image=IMAGES)["logits"], stock(cnn, IMAGES), atol=1e-5)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(module(IMAGES)["logits"] * WEIGHTS)
    trained = {name: variable for name, variable in module.state.items() if variable.trainable}
    agree(tape.gradient(loss, trained), gradients(hand_written(cnn)))


@needs("keras", "tensorflow", "torch")
def test_keras_layers(cnn: onnx.ModelProto, tmp_path: Path) -> None:
    import keras
    import tensorflow as tf

    model = onward.to_keras(cnn)
    kinds = [type(layer).__name__ for layer in model.layers]
    layers = ["Conv2D", "BatchNormalization", "Activation", "MaxPooling2D", "Dropout"]
    assert kinds == ["InputLayer", "Permute", *layers, "Permute", "Reshape", "Dense"]
    np.testing.assert_allclose(model(IMAGES), stock(cnn, IMAGES), atol=1e-5)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(IMAGES, training=False) * WEIGHTS)
    theirs = gradients(hand_written(cnn))
    ours = tape.gradient(loss, [model.layers[2].kernel, model.layers[-1].kernel])
    agree({"conv": ours[0].numpy().transpose(3, 2, 0, 1)}, {"conv": theirs["conv.weight"]})
    agree({"fc": ours[1].numpy().T}, {"fc": theirs["fc.weight"]})
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(IMAGES), model(IMAGES))
    loaded.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), run_eagerly=True)
    losses = loaded.fit(IMAGES, np.arange(6), epochs=3, verbose=0).history["loss"]
    assert losses[-1] < losses[0]


@needs("keras", "tensorflow")
def test_tied_weights_stay_one_in_keras() -> None:
    """A table that an Embedding and a matmul read is one variable, whose gradient is the sum of both."""
    import tensorflow as tf

    model, tokens = onward.to_keras(TIED), np.array([[0, 1, 2], [3, 4, 6]])
    np.testing.assert_allclose(model(tokens), stock(TIED, tokens), atol=1e-6)
    (table,) = model.trainable_variables
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(tokens) ** 2)
    gradient, values = tf.convert_to_tensor(tape.gradient(loss, table)).numpy(), table.numpy()
    for i, j in ((0, 0), (5, 2)):
        losses = []
        for change in (1e-2, -1e-2):
            moved = values.astype(np.float64)
            moved[i, j] += change
            losses.append(((moved[tokens].mean(1) @ moved.T) ** 2).sum())
        np.testing.assert_allclose(gradient[i, j], (losses[0] - losses[1]) / 2e-2, rtol=1e-3)


OPEN_SIZES = """<ir_version: 10, opset_import: ["": 21]>
    images (float[N, 2, H, W] image) => (float[N, C, X, Y] y) <float[3, 2, 3, 3] w, float[3, 2, 2, 2] t,
        int64[8] pads = {0, 0, 1, 2, 0, 0, 2, 1}, float[4] scales = {1., 1., 2., 1.5}> {
        a = Conv<auto_pad = "SAME_UPPER", strides = [2, 2]>(image, w)
        b = MaxPool<ceil_mode = 1, kernel_shape = [2, 2], strides = [2, 2]>(a)
        c = AveragePool<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(b)
        d = ConvTranspose<strides = [2, 2], pads = [1, 0, 0, 1]>(c, t)
        e = Pad<mode = "MODE">(d, pads)
        f = Resize<mode = "nearest", nearest_mode = "floor", coordinate_transformation_mode = "asymmetric">(e, , scales)
        g = Resize<mode = "linear">(f, , scales)
        h = GlobalAveragePool(g)
        y = Mul(g, h)
    }"""


@needs("tensorflow")
@pytest.mark.parametrize("mode", ["reflect", "edge"])
def test_open_sizes_in_tensorflow(mode: str) -> None:
    model = onnx.parser.parse_model(OPEN_SIZES.replace("MODE", mode))
    arrays = {"w": RNG.normal(size=(3, 2, 3, 3)), "t": RNG.normal(size=(3, 2, 2, 2))}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(x.astype(np.float32), n) for n, x in arrays.items())
    module = onward.to_tensorflow(model)
    for shape in ((1, 2, 19, 22), (2, 2, 24, 17)):
        image = RNG.normal(size=shape).astype(np.float32)
        np.testing.assert_allclose(module(image)["y"], stock(model, image), rtol=1e-4, atol=1e-5)


@needs("tensorflow")
@pytest.mark.parametrize("mode", ["constant", "reflect"])
def test_padding_computed_from_open_sizes_in_tensorflow(mode: str) -> None:
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 18]>
        g (float[N, T] x) => (float[N, M] y)
        <float[1] w = {{2}}, int64[1] four = {{4}}, int64[1] two = {{2}}, int64[1] one = {{1}}> {{
            size = Shape<start = 1, end = 2>(x)
            rest = Mod(size, four)
            before = Sub(rest, two)
            after = Sub(four, rest)
            pads = Concat<axis = 0>(before, after)
            padded = Pad<mode = "{mode}">(x, pads, , one)
            y = Mul(padded, w)
        }}""")
    module = onward.to_tensorflow(model)
    for length in (8, 9, 11):  # the first cuts two columns off
        x = RNG.normal(size=(2, length)).astype(np.float32)
        np.testing.assert_allclose(module(x)["y"], stock(model, x), rtol=1e-6)


PROGRAMS = {
    "torch": ("model.pt", "m = model.load('model.pt'); y = m(torch.from_numpy(x)).detach().numpy()"),
    "jax": ("model", "y = model.apply(model.load(), {'image': x})['logits']"),
    "keras": ("model.keras", "m = keras.models.load_model('model.keras'); y = keras.ops.convert_to_numpy(m(x))"),
    "tensorflow": ("model", "m = tf.saved_model.load('model'); y = m.infer(x)['logits'].numpy()"),
}


@pytest.mark.parametrize(
    "framework",
    [
        pytest.param(name, marks=[needs(name), *([pytest.mark.slow] if name in ("keras", "tensorflow") else [])])
        for name in PROGRAMS
    ],
)
def test_programs_need_nothing_of_onward(
    framework: Any, cnn: onnx.ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onward.frameworks.program.trial.can_try", lambda: False)  # the test does
    file, code = PROGRAMS[framework]
    write(onward.load(cnn), framework, tmp_path / file)
    np.save(tmp_path / "x.npy", IMAGES)
    imports = {"torch": "import torch, model", "jax": "import model", "keras": "import keras, model"}
    lines = [
        f"import sys, numpy as np; sys.path[:0] = ['{tmp_path}', '{tmp_path / 'model'}']",
        imports.get(framework, "import tensorflow as tf"),
        f"x = np.load('x.npy'); {code}; assert 'onward' not in sys.modules",
        "np.save('y.npy', np.asarray(y))",
    ]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([sys.executable, "-c", "\n".join(lines)], cwd=tmp_path, env=environment, check=True)
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), stock(cnn, IMAGES), atol=1e-5)
    if framework == "keras":
        with pytest.raises(UnsupportedError, match="own names"):
            restore(framework, tmp_path / file, onward.load(cnn))
    else:
        restored = restore(framework, tmp_path / file, onward.load(cnn))
        np.testing.assert_array_equal(stock(restored.to_proto(), IMAGES), stock(cnn, IMAGES))


@needs("torch")
def test_what_differs_from_onnxruntime_is_refused(cnn: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch) -> None:
    from onward.engines.torch import Torch

    monkeypatch.setitem(Torch.operators, "Relu", lambda x: x.relu() * 1.01)
    with pytest.raises(MismatchError, match=r"`logits` is off by .* from that of ONNX Runtime"):
        onward.to_torch(cnn)


@needs("torch")
def test_open_images_are_compared_where_they_are_large_enough() -> None:
    import torch

    proto = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 13]>
        g (float[N, 1, H, W] x) => (float[N, 1] y) <float[1, 1, 1, 1] w = {-9}> {
            halved = AveragePool<kernel_shape = [2, 2], strides = [2, 2]>(x)
            mixed = Conv(halved, w)
            pooled = MaxPool<kernel_shape = [8, 8], strides = [8, 8]>(mixed)
            mean = GlobalAveragePool(pooled)
            flat = Flatten(mean)
            y = Sigmoid(flat)
        }""")
    images = np.abs(RNG.normal(size=(3, 1, 32, 32))).astype(np.float32)
    module = onward.to_torch(proto)  # images of 8 pixels leave nothing to pool
    np.testing.assert_allclose(module(torch.from_numpy(images)).detach(), stock(proto, images), atol=2e-7)


def test_a_sigmoid_of_onnxruntime_rounds_like_its_half() -> None:
    proto = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 13]>
        g (float[N] x) => (float[N] y) <float[1] b = {-11}> { z = Sub(x, b) n = Neg(z) y = Sigmoid(n) }""")
    moved = inference._moved(onward.load(proto), {"x": IMAGES[0, 0, 0]}, {"y": stock(proto, IMAGES[0, 0, 0])})
    exact = 1 / (1 + np.exp(IMAGES[0, 0, 0].astype(np.float64) + 11))
    error = np.abs(stock(proto, IMAGES[0, 0, 0]) - exact).max()
    assert 0 < error <= moved["y"] < 1e-6
