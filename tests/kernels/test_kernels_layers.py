"""Layers of images and signals with native kernels: outputs and gradients of the plain graph, and of PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from marks import needs
from native_kernels import lowered_gradient, needs_kernels, with_gradient
from onnx import TensorProto, helper, numpy_helper

import onward
from onward.kernels import DOMAIN, library
from onward.runtime.sessions import open_session

pytestmark = needs_kernels
Layer = tuple[str, dict[str, np.ndarray], dict[str, Any]]
"""An operator, what it reads beside the image, and its attributes."""


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def after_convolution(shape: tuple[int, ...], *layers: Layer) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A convolution, which begins the other order, and layers that are to keep it."""
    channels, rank = shape[1], len(shape) - 2
    first: Layer = ("Conv", {"weight": random(channels, channels, *[1] * rank, seed=1)}, {})
    nodes, weights, image = [], {}, "x"
    for i, (operator, inputs, settings) in enumerate((first, *layers)):
        names = {name: f"{i}.{name}" if array.size else "" for name, array in inputs.items()}
        weights |= {names[name]: array for name, array in inputs.items() if array.size}
        nodes.append(helper.make_node(operator, [image, *names.values()], [f"y{i}"], **settings))
        image = f"y{i}"
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", *shape[1:]])]
    outputs = [helper.make_tensor_value_info(image, TensorProto.FLOAT, None)]
    stored = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "layers", inputs, outputs, stored)
    proto = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)])
    return proto, {"x": random(*shape, seed=9)}


def run(model: onward.Model, inputs: dict[str, np.ndarray], threads: int = 2) -> list[np.ndarray]:
    return open_session(model, threads=threads, library=library().path).run(None, inputs)


def trained(proto: onnx.ModelProto) -> list[str]:
    return ["x", *(tensor.name for tensor in proto.graph.initializer if tensor.name.endswith(("weight", "bias")))]


def used_kernels(model: onward.Model) -> list[str]:
    return [node.op_type for node in model.graph if node.domain == DOMAIN]


def assert_the_same(proto: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> onward.Model:
    given = with_gradient(proto, inputs, trained(proto))
    made = lowered_gradient(given, kernels=True)
    found, expected = run(made, inputs), run(lowered_gradient(given, kernels=False), inputs)
    for one, other in zip(found, expected, strict=True):
        if not other.shape:  # the loss, a sum of both signs
            continue
        size = max(1.0, float(np.abs(other).max(initial=0)))
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=2e-6 * size)
    for one, other in zip(found, run(made, inputs, threads=1), strict=True):
        np.testing.assert_array_equal(one, other)
    return made


# ---- windows ---------------------------------------------------------------------------------------------------------

NOTHING = np.zeros(0, np.float32)
IMAGE, SIGNAL = (2, 6, 9, 7), (2, 6, 19)


def weights(*shape: int, bias: int = 0) -> dict[str, np.ndarray]:
    return {"weight": random(*shape, seed=2), **({"bias": random(bias, seed=3)} if bias else {})}


WINDOWS: dict[str, tuple[tuple[int, ...], Layer]] = {
    "transposed": (IMAGE, ("ConvTranspose", weights(6, 5, 2, 2, bias=5), {"strides": [2, 2]})),
    "transposed, padded": (
        IMAGE,
        ("ConvTranspose", weights(6, 5, 4, 3), {"strides": [2, 3], "pads": [1, 0, 2, 1], "output_padding": [1, 2]}),
    ),
    "transposed, groups": (
        IMAGE,
        ("ConvTranspose", weights(6, 2, 3, 3, bias=4), {"group": 2, "dilations": [2, 1], "strides": [1, 4]}),
    ),
    "transposed, by channel": (
        IMAGE,
        ("ConvTranspose", weights(6, 1, 3, 3, bias=6), {"group": 6, "strides": [2, 1], "pads": [1] * 4}),
    ),
    "transposed, 3 x 3": (
        (2, 48, 6, 5),
        ("ConvTranspose", weights(48, 32, 3, 3, bias=32), {"pads": [1] * 4, "auto_pad": "NOTSET"}),
    ),
    "transposed signal": (
        SIGNAL,
        ("ConvTranspose", weights(6, 4, 5, bias=4), {"strides": [2], "pads": [1, 2], "output_padding": [1]}),
    ),
    "same": (IMAGE, ("Conv", weights(5, 6, 3, 4, bias=5), {"auto_pad": "SAME_UPPER", "strides": [2, 3]})),
    "same, lower": (IMAGE, ("Conv", weights(5, 6, 2, 4), {"auto_pad": "SAME_LOWER"})),
    "signal": (SIGNAL, ("Conv", weights(5, 6, 4, bias=5), {"pads": [2, 1], "strides": [3], "dilations": [2]})),
    "signal by channel": (SIGNAL, ("Conv", weights(6, 1, 5), {"group": 6, "auto_pad": "SAME_UPPER"})),
    "averages": (IMAGE, ("AveragePool", {}, {"kernel_shape": [2, 2], "strides": [2, 2]})),
    "averages, pads": (IMAGE, ("AveragePool", {}, {"kernel_shape": [3, 2], "pads": [1, 0, 2, 1], "strides": [2, 1]})),
    "averages with pads": (
        IMAGE,
        (
            "AveragePool",
            {},
            {"kernel_shape": [3, 3], "pads": [1, 1, 0, 2], "count_include_pad": 1, "dilations": [1, 2]},
        ),
    ),
    "averages, same": (IMAGE, ("AveragePool", {}, {"kernel_shape": [2, 4], "auto_pad": "SAME_LOWER"})),
    "averages of a signal": (SIGNAL, ("AveragePool", {}, {"kernel_shape": [4], "strides": [3], "pads": [1, 3]})),
    "largest of a signal": (SIGNAL, ("MaxPool", {}, {"kernel_shape": [4], "strides": [3], "pads": [1, 3]})),
    "largest, same": (IMAGE, ("MaxPool", {}, {"kernel_shape": [3, 3], "strides": [2, 2], "auto_pad": "SAME_UPPER"})),
}


@pytest.mark.parametrize("case", WINDOWS)
def test_windows(case: str) -> None:
    shape, layer = WINDOWS[case]
    made = assert_the_same(*after_convolution(shape, layer))
    kernels = used_kernels(made)
    assert layer[0] in kernels and kernels.count("ChannelsLast") == 1


# ---- other sizes -----------------------------------------------------------------------------------------------------

PLACES = ["half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"]


def resized(shape: tuple[int, ...], factors: dict[str, Any], **settings: Any) -> Any:
    scales = np.array([1, 1, *factors["scales"]], np.float32) if "scales" in factors else NOTHING
    sizes = {"sizes": np.array(factors["sizes"], np.int64)} if "sizes" in factors else {}
    axes = {"axes": list(range(2, len(shape)))} if sizes else {}
    return after_convolution(shape, ("Resize", {"roi": NOTHING, "scales": scales, **sizes}, {**settings, **axes}))


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("factors", [{"scales": [2, 3]}, {"scales": [1, 0.6]}, {"sizes": [13, 1]}, {"sizes": [5, 7]}])
def test_other_sizes(places: str, factors: dict[str, Any]) -> None:
    for settings in ({"mode": "linear"}, {"nearest_mode": "floor"}, {"nearest_mode": "round_prefer_ceil"}, {}):
        proto, inputs = resized(IMAGE, factors, coordinate_transformation_mode=places, **settings)
        assert "ResizeGradient" in used_kernels(assert_the_same(proto, inputs))


def test_signals_in_other_sizes() -> None:
    assert "Resize" in used_kernels(assert_the_same(*resized(SIGNAL, {"scales": [2.5]}, mode="linear")))


@needs("torch")
@pytest.mark.parametrize(("mode", "corners"), [("nearest", None), ("bilinear", False), ("bilinear", True)])
def test_other_sizes_of_pytorch(mode: str, corners: bool | None) -> None:
    import torch

    places = {None: "asymmetric", False: "pytorch_half_pixel", True: "align_corners"}[corners]
    settings = {"mode": "nearest" if corners is None else "linear", "nearest_mode": "floor"}
    proto, inputs = resized(IMAGE, {"sizes": [20, 5]}, coordinate_transformation_mode=places, **settings)
    given = with_gradient(proto, inputs, ["x"])
    y, _, dx = run(lowered_gradient(given, kernels=True), inputs)
    image = torch.from_numpy(inputs["x"]).requires_grad_()
    weight = torch.from_numpy(numpy_helper.to_array(given.graph.initializer[0]).copy())
    expected = torch.nn.functional.interpolate(
        torch.nn.functional.conv2d(image, weight), (20, 5), mode=mode, align_corners=corners
    )
    factors = torch.from_numpy(numpy_helper.to_array(given.graph.initializer[-1]).copy())
    (expected * factors).sum().backward()
    np.testing.assert_allclose(y, expected.detach(), atol=1e-5)
    np.testing.assert_allclose(dx, image.grad, atol=1e-4)


def add_nodes(proto: onnx.ModelProto, text: str, **constants: np.ndarray) -> None:
    """What others make of `y0`, the result of the convolution; `z` is the output."""
    proto.graph.node.extend(onnx.parser.parse_graph(f"g (float[N] y0) => (float[N] z) {{ {text} }}").node)
    proto.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
    proto.graph.output[0].name = "z"


PUT_TOGETHER = {
    "scales": "scales = Concat <axis = 0> (ones, factors) a = Resize (y0, , scales) z = Resize (a, , scales)",
    "sizes": """shape = Shape (y0) first = Slice (shape, zero, two, zero) all = Concat <axis = 0> (first, sizes)
        z = Resize (y0, , , all)""",
}


@pytest.mark.parametrize("case", PUT_TOGETHER)
def test_sizes_that_exporters_put_together(case: str) -> None:
    proto, inputs = after_convolution(IMAGE)
    numbers = {"zero": np.array([0]), "two": np.array([2]), "sizes": np.array([12, 8])}
    factors = {"ones": np.ones(2, np.float32), "factors": np.array([2, 1.5], np.float32)}
    add_nodes(proto, PUT_TOGETHER[case], **numbers, **factors)
    made = assert_the_same(proto, inputs)
    assert "ResizeGradient" in used_kernels(made) and not any(
        node.op_type == "Resize" and not node.domain for node in made.graph
    )


LEFT_ALONE: dict[str, Layer] = {
    "cubic": ("Resize", {"roi": NOTHING, "scales": np.array([1, 1, 2, 2], np.float32)}, {"mode": "cubic"}),
    "channels": ("Resize", {"roi": NOTHING, "scales": np.array([1, 2, 2, 2], np.float32)}, {}),
    "a last window that is cut off": ("AveragePool", {}, {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1}),
    "sizes of outputs": ("ConvTranspose", weights(6, 5, 2, 2), {"strides": [2, 2], "output_shape": [19, 15]}),
}


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_what_is_left_to_the_plain_graph(case: str) -> None:
    made = assert_the_same(*after_convolution(IMAGE, LEFT_ALONE[case]))
    assert not {"Resize", "AveragePool", "ConvTranspose"} & set(used_kernels(made))


# ---- several ---------------------------------------------------------------------------------------------------------


def test_signals_keep_their_order() -> None:
    """Through all that an image does; and means of them have the axes that they should have."""
    statistics = {name: np.abs(random(6, seed=i)) + 1 for i, name in enumerate(("weight", "bias", "mean", "variance"))}
    convolution: Layer = ("Conv", weights(6, 6, 3, bias=6), {"pads": [1, 1]})
    made = assert_the_same(
        *after_convolution(
            SIGNAL,
            ("BatchNormalization", statistics, {}),
            ("LeakyRelu", {}, {"alpha": 0.1}),
            ("MaxPool", {}, {"kernel_shape": [2], "strides": [2]}),
            convolution,
            ("ReduceMean", {"axes": np.array([-1])}, {"keepdims": 0}),
        )
    )
    assert used_kernels(made).count("ChannelsLast") == 1
    assert sum(node.op_type == "Transpose" for node in made.graph) == 1  # the gradient of the input


@pytest.mark.parametrize("shape", [IMAGE, SIGNAL])
def test_models_that_put_channels_last_themselves(shape: tuple[int, ...]) -> None:
    """As for a normalization over channels: nothing is transposed but what goes in."""
    there, back = ("[0, 2, 1]",) * 2 if len(shape) == 3 else ("[0, 2, 3, 1]", "[0, 3, 1, 2]")
    proto, inputs = after_convolution(shape)
    text = f"""a = Transpose <perm = {there}> (y0) b = LayerNormalization (a, scale) c = Transpose <perm = {back}> (b)
        d = Sigmoid (c) e = Mul (c, d) f = Conv (e, kernel) g = Add (f, y0) z = ReduceMean <keepdims = 0> (g, axes)"""
    kernel = random(6, 6, *[1] * (len(shape) - 2), seed=1)
    add_nodes(proto, text, scale=random(6), kernel=kernel, axes=np.arange(2, len(shape)))
    made = assert_the_same(proto, inputs)
    kernels = used_kernels(made)
    assert kernels.count("ChannelsLast") == 1 and "SwishGradient" in kernels
    assert sum(node.op_type == "Transpose" for node in made.graph) == 1  # the gradient of the input


def test_signals_are_joined() -> None:
    for axis in (1, 2, -1):
        proto, inputs = after_convolution(SIGNAL, ("Relu", {}, {}))
        proto.graph.node.append(helper.make_node("Concat", ["y0", "y1"], ["joined"], axis=axis))
        proto.graph.output[0].name = "joined"
        assert_the_same(proto, inputs)


def test_an_image_and_a_signal_are_not_of_one_order() -> None:
    """[6, 9, 7] beside [2, 6, 9, 7] is no signal, but images without their first axis."""
    proto, inputs = after_convolution(IMAGE, ("Relu", {}, {}))
    proto.graph.input.append(helper.make_tensor_value_info("s", TensorProto.FLOAT, [6, 9, 7]))
    proto.graph.initializer.append(numpy_helper.from_array(random(9, 9, 1, seed=4), "s.weight"))
    proto.graph.node.append(helper.make_node("Conv", ["s", "s.weight"], ["other"]))
    proto.graph.node.append(helper.make_node("Add", ["y1", "other"], ["both"]))
    proto.graph.output[0].name = "both"
    assert_the_same(proto, {**inputs, "s": random(6, 9, 7, seed=5)})


@pytest.mark.parametrize("case", ["transposed", "averages", "signal", "transposed signal"])
def test_no_batch_and_no_number(case: str) -> None:
    """Where the plain graph has NaN, kernels have it, too."""
    shape, layer = WINDOWS[case]
    proto, inputs = after_convolution(shape, layer)
    made, plain = (lowered_gradient(proto, kernels=use) for use in (True, False))
    inputs["x"][0, 2, 3] = np.nan
    inputs["x"][1, 2, 5] = np.inf
    for batch in (inputs["x"], inputs["x"][:0]):
        found, expected = (run(model, {"x": batch})[0] for model in (made, plain))
        np.testing.assert_array_equal(np.isfinite(found), np.isfinite(expected))
