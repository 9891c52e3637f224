"""Faster ways to the same gradients: each agrees with PyTorch, and with what is computed without it."""

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest
import torch
from lowered import SQUARE, Part, assert_close, part, stored
from models import small_cnn
from sessions import run

import onward
from onward.build import Builder
from onward.rules import convolution

RNG = np.random.default_rng(0)
OFF = {
    "by row": ("_pays_by_row", lambda *_: False),
    "pieces": ("MOST_PIECES", 1),
    "factor": ("_without_factor", lambda op, dy, w: (dy, None)),
}
"""Each way, and what switches it off in `convolution`."""


@pytest.fixture
def tiny_cache(monkeypatch):
    """So small that the batches of tests do not fit."""
    monkeypatch.setattr(convolution, "CACHED", 400)


def array(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def gradients(body, feeds, y_shape):
    """A model of the gradients of all that it is fed with, and what it computes."""
    inputs = ", ".join(f"float[{','.join(map(str, value.shape))}] {name}" for name, value in feeds.items())
    y = f"float[{','.join(map(str, y_shape))}] y"
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> g ({inputs}) => ({y}) {{ {body} }}')
    model = onward.vjp(proto, "y", list(feeds))
    return model, run(model, {**feeds, "dy": np.random.default_rng(1).normal(size=y_shape).astype(np.float32)})


def torch_gradients(function, feeds):
    tensors = {name: torch.tensor(value, requires_grad=True) for name, value in feeds.items()}
    y = function(**tensors)
    dy = np.random.default_rng(1).normal(size=tuple(y.shape)).astype(np.float32)
    y.backward(torch.from_numpy(dy))
    return tuple(y.shape), {f"{name}/grad": tensor.grad.numpy() for name, tensor in tensors.items()}


def operators(model):
    return [node.op_type for node in model.graph]


CONVOLUTIONS = {
    "square": ((4, 3, 9, 8), (4, 3, 3, 3), {"padding": 1}),
    "one channel": ((4, 1, 12, 10), (3, 1, 5, 5), {"padding": 2}),
    "strided along rows only": ((4, 4, 9, 8), (4, 4, 3, 3), {"stride": (1, 2), "padding": 1}),
    "dilated": ((4, 4, 12, 12), (4, 4, 3, 2), {"dilation": (2, 3), "padding": (1, 0)}),
    "tall": ((4, 4, 16, 5), (3, 4, 4, 1), {}),
    "signal": ((4, 4, 30), (4, 4, 5), {"padding": 2}),
    "volume": ((2, 3, 6, 5, 4), (3, 3, 3, 2, 3), {"padding": (1, 0, 1)}),
}


def convolution_case(shape, weight, options):
    """The body in ONNX, arrays, and the function in PyTorch."""
    rank = len(shape) - 2

    def per_axis(name, default):
        given = options.get(name, default)
        return list(given) if isinstance(given, tuple) else [given] * rank

    pads, strides, dilations = per_axis("padding", 0), per_axis("stride", 1), per_axis("dilation", 1)
    body = f"y = Conv<pads={pads * 2}, strides={strides}, dilations={dilations}>(x, w, b)"
    forward = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}[rank]
    feeds = {"x": array(*shape), "w": array(*weight), "b": array(weight[0])}
    return body, feeds, lambda x, w, b: forward(x, w, b, **options)


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("way", ["by row", "pieces"])
def test_weights_of_convolutions(name, way, tiny_cache, monkeypatch):
    body, feeds, function = convolution_case(*CONVOLUTIONS[name])
    shape, expected = torch_gradients(function, feeds)
    model, found = gradients(body, feeds, shape)
    monkeypatch.setattr(convolution, *OFF[way])
    plain, same = gradients(body, feeds, shape)
    sign = {"by row": "Concat", "pieces": "Split"}[way]
    assert sign in operators(model) and sign not in operators(plain)
    for gradient, value in expected.items():
        np.testing.assert_allclose(found[gradient], value, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(found[gradient], same[gradient], rtol=1e-4, atol=1e-4)


def test_weights_of_strided_convolutions_in_pieces(tiny_cache):
    """Not by row, so whole windows are copied."""
    body, feeds, function = convolution_case((6, 4, 9, 8), (4, 4, 3, 3), {"stride": 2, "padding": 1})
    shape, expected = torch_gradients(function, feeds)
    model, found = gradients(body, feeds, shape)
    assert "Split" in operators(model) and "Concat" not in operators(model)
    for gradient, value in expected.items():
        np.testing.assert_allclose(found[gradient], value, rtol=1e-4, atol=1e-4)


def test_pieces_of_the_batch_are_equal_and_few(tiny_cache):
    """A batch of 7 goes one by one, one of 11 would make too many pieces."""
    for count, pieces in ((7, 7), (11, 1)):
        body, feeds, function = convolution_case((count, 4, 9, 8), (4, 4, 3, 3), {"padding": 1})
        shape, _ = torch_gradients(function, feeds)
        model, _ = gradients(body, feeds, shape)
        splits = [node for node in model.graph if node.op_type == "Split"]
        assert [len(node.outputs) for node in splits] == ([pieces] * 2 if pieces > 1 else [])


@pytest.mark.parametrize("group", [1, 2])
def test_factors_of_channels_go_to_the_weights(group, monkeypatch):
    """What a normalisation multiplies the gradient by is not multiplied with every element of it."""
    body = (
        f"z = Conv<pads=[1, 1, 1, 1], group={group}>(x, w, b) "
        "none = Constant<value=float {0}>() m0 = Mul(s, none) v0 = Mul(t, none) "
        "y, m, v = BatchNormalization<training_mode=1, momentum=0.0>(z, s, t, m0, v0)"
    )
    feeds = {"x": array(5, 4, 6, 7), "w": array(4, 4 // group, 3, 3), "b": array(4), "s": array(4), "t": array(4)}

    def function(x, w, b, s, t):
        return torch.batch_norm(torch.conv2d(x, w, b, padding=1, groups=group), s, t, None, None, True, 0, 1e-5, False)

    shape, expected = torch_gradients(function, feeds)
    model, found = gradients(body, feeds, shape)
    monkeypatch.setattr(convolution, *OFF["factor"])
    plain, same = gradients(body, feeds, shape)
    assert _products_of_images(model) < _products_of_images(plain)
    for gradient, value in expected.items():
        np.testing.assert_allclose(found[gradient], value, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(found[gradient], same[gradient], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("channels", "taken"), [(4, True), (1, False)])
def test_factors_stay_where_they_make_the_channels(channels, taken):
    """A gradient may be one image times a number per channel; without the numbers it has too few channels."""
    image, numbers, weights = (
        ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT))
        for name, shape in (("image", (2, channels, 5, 5)), ("numbers", (4, 1, 1)), ("weights", (4, 3, 2, 2)))
    )
    op = Builder(ir.Graph([image, numbers, weights], [], nodes=[], opset_imports={"": 21}), opset=21)
    dy = op.Mul(image, numbers)
    rest, factor = convolution._without_factor(op, dy, op(weights))
    assert rest.value is (image if taken else dy.value)
    assert (factor is not None) == taken


def _products_of_images(model):
    return sum(node.op_type == "Mul" and list(node.outputs[0].shape or ()) == [5, 4, 6, 7] for node in model.graph)


@pytest.mark.parametrize("way", OFF)
def test_a_step_is_the_same_without(way, tiny_cache, monkeypatch):
    proto = small_cnn(4)
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = len(SQUARE["image"])
    model = onward.prepare(proto, loss="cross_entropy", optimizer="sgd:lr=0.1")
    steps = [part(model, "step")]
    monkeypatch.setattr(convolution, *OFF[way])
    steps.append(part(model, "step"))
    results = [_trained(step, stored(model)) for step in steps]
    assert_close(*results)


def _trained(step: Part, state):
    for _ in range(3):
        results = step({**SQUARE, **state})
        state = {**state, **step.new_state(results)}
    return state
