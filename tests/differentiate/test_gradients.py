"""Gradients of whole models, against PyTorch."""

import numpy as np
import onnx
import onnx.parser
import pytest
from marks import needs
from models import digits_mlp, small_cnn
from sessions import run
from stepping import weights

import onward


def torch_cnn(w):
    import torch

    def forward(x):
        x = torch.nn.functional.conv2d(x, w["conv.weight"], w["conv.bias"], padding=1)
        x = torch.nn.functional.batch_norm(
            x, w["bn.running_mean"], w["bn.running_var"], w["bn.weight"], w["bn.bias"], eps=1e-5
        )
        x = torch.nn.functional.max_pool2d(torch.relu(x), 2)
        return x.flatten(1) @ w["fc.weight"].T + w["fc.bias"]

    return forward


@pytest.fixture
def image():
    return np.random.default_rng(0).standard_normal((3, 1, 8, 8)).astype(np.float32)


@needs("torch")
def test_gradient_adds_outputs_that_equal_autograd(image):
    import torch

    names = ["image", "conv.weight", "bn.weight", "bn.bias", "fc.weight", "fc.bias"]
    model = onward.gradient(small_cnn(), y="logits", xs=names)
    outputs = run(model, {"image": image})
    assert list(outputs) == ["logits", *(f"{name}/grad" for name in names)]
    w = {name: torch.tensor(array, requires_grad="running" not in name) for name, array in weights(model).items()}
    w["image"] = torch.tensor(image, requires_grad=True)
    expected = torch.autograd.grad(torch_cnn(w)(w["image"]).sum(), [w[name] for name in names])
    for name, grad in zip(names, expected, strict=True):
        np.testing.assert_allclose(outputs[f"{name}/grad"], grad.numpy(), rtol=1e-4, atol=1e-5, err_msg=name)


@needs("torch")
def test_vjp_and_jvp_are_adjoint_and_equal_torch(image):
    import torch

    rng = np.random.default_rng(1)
    dy = rng.standard_normal((3, 10)).astype(np.float32)
    dimage = rng.standard_normal(image.shape).astype(np.float32)
    back = run(onward.vjp(small_cnn(), y="logits", xs=["image"]), {"image": image, "dy": dy})
    ahead = run(onward.jvp(small_cnn(), "logits", ["image"]), {"image": image, "dimage": dimage})
    assert list(back) == ["image/grad"] and list(ahead) == ["dlogits"]
    w = {name: torch.tensor(array) for name, array in weights(onward.load(small_cnn())).items()}
    _, expected = torch.func.jvp(torch_cnn(w), (torch.tensor(image),), (torch.tensor(dimage),))
    np.testing.assert_allclose(ahead["dlogits"], expected.numpy(), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(np.sum(ahead["dlogits"] * dy), np.sum(back["image/grad"] * dimage), rtol=1e-3)


def test_gradients_of_gradients():
    text = '<ir_version: 10, opset_import: ["": 21]> g (double[N] x) => (double[N] y) { a = Mul(x, x) y = Mul(a, x) }'
    once = onward.gradient(onnx.parser.parse_model(text), y="y", xs=["x"])
    twice = onward.gradient(once, y="x/grad", xs=["x"])
    outputs = run(twice, {"x": np.array([2.0, 3.0])})
    np.testing.assert_allclose(outputs["x/grad"], [12, 27])
    np.testing.assert_allclose(outputs["x/grad_1"], [12, 18])


def test_values_in_between_and_weights_used_twice():
    text = """<ir_version: 10, opset_import: ["": 21]> g (float[N,2] x) => (float[N,2] y)
    <float[2,2] w = {1, 2, 3, 4}> { h = MatMul(x, w) r = Relu(h) y = MatMul(r, w) }"""
    x = np.array([[1, -1], [2, 1]], np.float32)
    outputs = run(onward.gradient(onnx.parser.parse_model(text), y="y", xs=["h", "w"]), {"x": x})
    w = np.array([[1, 2], [3, 4]], np.float32)
    h = x @ w
    dh = np.ones((2, 2), np.float32) @ w.T * (h > 0)
    np.testing.assert_allclose(outputs["h/grad"], dh)
    np.testing.assert_allclose(outputs["w/grad"], np.maximum(h, 0).T @ np.ones((2, 2)) + x.T @ dh)


def test_functions_are_differentiated_through_their_bodies():
    text = """<ir_version: 10, opset_import: ["": 21, "mine": 1]> g (float[N] x) => (float[N] y) { y = mine.Cube(x) }
    <opset_import: ["": 21], domain: "mine"> Cube (a) => (c) { b = Mul(a, a) c = Mul(a, b) }"""
    outputs = run(onward.gradient(onnx.parser.parse_model(text), y="y", xs=["x"]), {"x": np.array([2, 3], np.float32)})
    np.testing.assert_allclose(outputs["x/grad"], [12, 27])


def test_what_does_not_depend_has_a_gradient_of_zero():
    text = """<ir_version: 10, opset_import: ["": 21]> g (float[N] x, float[N] z) => (float[N] y)
    { i = Cast <to = 7> (x) f = Cast <to = 1> (i) y = Mul(f, z) }"""
    feeds = {"x": np.array([2.5, 3], np.float32), "z": np.array([1, 1], np.float32)}
    outputs = run(onward.gradient(onnx.parser.parse_model(text), y="y", xs=["x", "z"]), feeds)
    np.testing.assert_allclose(outputs["x/grad"], [0, 0])
    np.testing.assert_allclose(outputs["z/grad"], [2, 3])


def test_the_backward_graph_is_lean():
    model = onward.vjp(digits_mlp(), y="logits", xs=["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"])
    assert len(model.graph) <= 12


def test_mistakes_are_named():
    with pytest.raises(onward.Error, match="unknown value `logit`") as error:
        onward.gradient(digits_mlp(), y="logit", xs=["image"])
    assert "logits" in error.value.hint
