"""Activations, normalizations of rows and losses by native kernels: against PyTorch in double precision."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from models import digits_mlp
from native_kernels import assert_the_same_with_kernels, needs_kernels, run_kernel
from onnx import numpy_helper, parser
from onnxruntime.capi.onnxruntime_pybind11_state import Fail
from paths import TESTS
from torch.nn import functional as F

import onward
from onward.engines import function, start
from onward.kernels import PASSES
from onward.lowering.step import LoweringOptions, lower_for_engine

pytestmark = needs_kernels


def gradients(function, dy, *inputs):
    """The output of a function and its derivatives, in double precision."""
    variables = [torch.tensor(array, dtype=torch.float64, requires_grad=True) for array in inputs]
    y = function(*variables)
    found = torch.autograd.grad(y, variables, torch.tensor(dy, dtype=torch.float64))
    return y.detach().numpy(), [gradient.numpy() for gradient in found]


# ---- activations -----------------------------------------------------------------------------------------------------

ACTIVATIONS = {  # the function, whether its gradient is of the output, whether there is a forward kernel, attributes
    "Gelu": (F.gelu, False, True, {}),
    "GeluOfTanh": (lambda x: F.gelu(x, approximate="tanh"), False, True, {}),
    "Swish": (lambda x: x * torch.sigmoid(1.7 * x), False, True, {"alpha": 1.7}),
    "HardSwish": (F.hardswish, False, False, {}),
    "LeakyRelu": (lambda x: F.leaky_relu(x, 0.3), False, False, {"alpha": 0.3}),
    "HardSigmoid": (lambda x: torch.clip(0.3 * x + 0.5, 0, 1), True, False, {"alpha": 0.3}),
    "Sigmoid": (torch.sigmoid, True, False, {}),
    "Tanh": (torch.tanh, True, False, {}),
}


@pytest.mark.parametrize("size", [0, 1, 37, 70_001])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_those_of_torch(name, size):
    function, of_output, has_forward, settings = ACTIVATIONS[name]
    x = np.linspace(-30, 31, size, dtype=np.float32)
    dy = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    y, (dx,) = gradients(function, dy, x)
    if has_forward:
        np.testing.assert_allclose(run_kernel(name, x, **settings)[0], y, rtol=1e-5, atol=5e-7)
    (found,) = run_kernel(f"{name}Gradient", dy, y.astype(np.float32) if of_output else x, **settings)
    np.testing.assert_allclose(found, dx, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_extreme_numbers_stay_what_they_are(name):
    _, of_output, has_forward, settings = ACTIVATIONS[name]
    x = np.array([np.nan, 3e38, -3e38, 100, -100, 1e-38, -0.0], np.float32)
    if has_forward:
        y = run_kernel(name, x, **settings)[0]
        assert np.isnan(y[0]) and y[1] == x[1] and y[3] == 100 and not np.isnan(y[1:]).any()
        assert (np.abs(y[[2, 4]]) < 1e-6).all()
    slope = run_kernel(f"{name}Gradient", np.ones_like(x), np.clip(x, -1, 1) if of_output else x, **settings)[0]
    assert np.isnan(slope[0]) or name == "LeakyRelu"  # whose slope is that of all that is not positive
    assert np.isfinite(slope[1:]).all()


CHAINS = {
    "Gelu": """root = Constant <value_float = 1.41421356> () one = Constant <value_float = 1.0> ()
        half = Constant <value_float = 0.5> () a = Div(h, root) b = Erf(a) c = Add(b, one) d = Mul(h, c)
        e = Mul(d, half)""",
    "GeluOfTanh": """three = Constant <value_float = 3.0> () small = Constant <value_float = 0.044715> ()
        scale = Constant <value_float = 0.79788456> () one = Constant <value_float = 1.0> ()
        half = Constant <value_float = 0.5> () a = Mul(half, h) cube = Pow(h, three) b = Mul(small, cube)
        c = Add(h, b) d = Mul(c, scale) t = Tanh(d) g = Add(one, t) e = Mul(a, g)""",
    "Swish": "s = Sigmoid(h) e = Mul(h, s)",
    "": "s = Sigmoid(h) two = Add(s, s) e = Mul(h, s) dead = Mul(two, e)",  # what others read stays
}


@pytest.mark.parametrize("kernel", CHAINS)
def test_activations_of_exporters_are_found_and_give_the_same(kernel):
    text = f"""<ir_version: 10, opset_import: ["": 18]> chain (float[5, 8] x) => (float[5, 8] y)
        {{ h = MatMul(x, w) {CHAINS[kernel]} y = MatMul({"dead" if not kernel else "e"}, w) }}"""
    proto = parser.parse_model(text)
    rng = np.random.default_rng(0)
    proto.graph.initializer.append(numpy_helper.from_array(rng.normal(0, 1, (8, 8)).astype(np.float32), "w"))
    model = onward.prepare(proto, loss="mse", optimizer="sgd:lr=0.01")
    kinds = Counter(node.op_type for node in lower_for_engine(model, options=LoweringOptions(passes=PASSES)).graph)
    assert kinds[f"{kernel}Gradient"] == kinds[kernel] == bool(kernel) and kinds["Erf"] == kinds["Tanh"] == 0
    batch = {name: rng.standard_normal((5, 8)).astype(np.float32) for name in ("x", "target")}
    assert_the_same_with_kernels(model, batch)


def test_what_only_a_gradient_names_stays():
    """The scaled loss is read by nothing: a Gradient says its name."""
    model = onward.prepare(digits_mlp(8), loss="cross_entropy", optimizer="sgd:lr=0.1", loss_scale=128, clip=1.0)
    rng = np.random.default_rng(0)
    batch = {"image": rng.standard_normal((6, 64)).astype(np.float32), "labels": rng.integers(0, 10, 6)}
    assert_the_same_with_kernels(model, batch)


# ---- rows ------------------------------------------------------------------------------------------------------------

ROWS = {"odd": (7, 13), "several axes": (3, 5, 33), "many": (4000, 48), "no rows": (0, 5), "one": (1, 1)}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", ROWS)
def test_normalizations_of_rows_are_those_of_torch(shape, threads):
    rng = np.random.default_rng(0)
    x, dy = (rng.standard_normal(ROWS[shape]).astype(np.float32) for _ in range(2))
    scale, bias = (rng.standard_normal(x.shape[-1:]).astype(np.float32) for _ in range(2))
    x += 3
    _, expected = gradients(lambda x, s, b: F.layer_norm(x, x.shape[-1:], s, b, 1e-5), dy, x, scale, bias)
    mean = x.mean(-1, keepdims=True, dtype=np.float64)
    inverse = 1 / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5)
    statistics = mean.astype(np.float32), inverse.astype(np.float32)
    found = run_kernel("LayerNormalizationGradient", dy, x, scale, *statistics, outputs=3, threads=threads, axis=-1)
    for gradient, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(gradient, wanted, rtol=2e-5, atol=2e-5 if x.shape[-1] > 1 else 1e-2)
    _, expected = gradients(lambda x, s: F.rms_norm(x, x.shape[-1:], s, 1e-6), dy, x, scale)
    found = run_kernel(
        "RMSNormalizationGradient", dy, x, scale, outputs=2, threads=threads, axis=x.ndim - 1, epsilon=1e-6
    )
    for gradient, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(gradient, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("shape", ROWS)
@pytest.mark.parametrize("name, function", [("Softmax", torch.softmax), ("LogSoftmax", torch.log_softmax)])
def test_softmax_gradients_are_those_of_torch(name, function, shape):
    rng = np.random.default_rng(0)
    x, dy = (rng.standard_normal(ROWS[shape]).astype(np.float32) for _ in range(2))
    y, (dx,) = gradients(lambda x: function(x, -1), dy, x)
    np.testing.assert_allclose(run_kernel(f"{name}Gradient", dy, y.astype(np.float32))[0], dx, rtol=1e-5, atol=1e-6)


# ---- cross entropy ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("rows, classes", [(5, 7), (300, 1001), (1, 2), (9, 16)])
def test_cross_entropy_is_that_of_torch(rows, classes, weighted, reduction):
    rng = np.random.default_rng(0)
    scores = (4 * rng.standard_normal((rows, classes))).astype(np.float32)
    labels, weights = rng.integers(0, classes, rows), rng.random(classes).astype(np.float32) if weighted else None
    labels[1::3] = -100
    given = {"weight": torch.tensor(weights, dtype=torch.float64)} if weighted else {}
    loss, (dscores,) = gradients(
        lambda x: F.cross_entropy(x, torch.tensor(labels), reduction=reduction, ignore_index=-100, **given), 2.5, scores
    )
    settings = {"mean": int(reduction == "mean"), "ignores": 1, "ignore_index": -100}
    found, logarithms = run_kernel("CrossEntropy", scores, labels, weights, outputs=2, **settings)
    np.testing.assert_allclose(found, loss, rtol=1e-6)
    seed = np.array(2.5, np.float32)
    (gradient,) = run_kernel("CrossEntropyGradient", seed, logarithms, scores, labels, weights, **settings)
    np.testing.assert_allclose(gradient, dscores, rtol=1e-5, atol=1e-7)
    with pytest.raises(Fail, match="out of bounds"):
        run_kernel("CrossEntropy", scores, labels + classes, outputs=2)


def test_cross_entropy_takes_any_number():
    labels = np.array([0, 0, 1, 1])
    scores = np.array([[np.nan, 0], [1000, -1000], [-np.inf, 0], [3e38, 3e38]], np.float32)
    logarithms = run_kernel("CrossEntropy", scores, labels, outputs=2)[1]
    np.testing.assert_array_equal(logarithms, [np.nan, 1000, 0, np.float32(3e38)])
    nothing = np.full(4, -1)
    loss, logarithms = run_kernel("CrossEntropy", scores, nothing, outputs=2, ignores=1, ignore_index=-1)
    assert np.isnan(loss)  # of nothing there is no mean
    given = np.ones((), np.float32), logarithms, scores, nothing
    gradient = run_kernel("CrossEntropyGradient", *given, ignores=1, ignore_index=-1)[0]
    wanted = torch.tensor(scores, requires_grad=True)
    F.cross_entropy(wanted, torch.tensor(nothing), ignore_index=-1, reduction="sum").backward()
    np.testing.assert_array_equal(gradient, wanted.grad)  # NaN for the first row, as PyTorch has it


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_ignored_rows_that_are_no_numbers(value):
    """The loss leaves them out; gradients are those of the plain graph and of PyTorch."""
    rng = np.random.default_rng(0)
    w, b = rng.standard_normal((4, 5)).astype(np.float32), np.zeros(5, np.float32)
    model = parser.parse_model("""<ir_version: 10, opset_import: ["" : 20]>
        g (float[N, 4] x) => (float[N, 5] y) <float[4, 5] w, float[5] b> {
            product = MatMul (x, w) y = Add (product, b)
        }""")
    model.graph.initializer.extend([numpy_helper.from_array(w, "w"), numpy_helper.from_array(b, "b")])
    training = onward.prepare(model, loss="cross_entropy:ignore_index=-1")
    x, labels = rng.standard_normal((3, 4)).astype(np.float32), np.array([0, -1, 2])
    x[1, 2] = value
    results = []
    for kernels in (True, False):
        with start(training, kernels=kernels) as engine:
            batch = dict(zip(("x", next(n for n in engine.inputs if n != "x")), (x, labels), strict=True))
            results.append({**engine.gradients(batch), "loss": engine.step(batch)[engine.loss]})
    tensors = {name: torch.tensor(array, requires_grad=True) for name, array in (("w", w), ("b", b))}
    scores = torch.tensor(x) @ tensors["w"] + tensors["b"]
    loss = F.cross_entropy(scores, torch.tensor(labels), ignore_index=-1)
    loss.backward()
    expected = {"loss": loss.detach(), **{name: tensor.grad for name, tensor in tensors.items()}}
    for found in results:
        for name, wanted in expected.items():
            np.testing.assert_allclose(found[name], wanted, rtol=1e-5, atol=1e-6, err_msg=name)


def test_the_slope_of_hard_swish_far_away():
    x = np.array([-np.inf, -3e38, 3e38, np.inf], np.float32)
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 20]> g (float[4] x) => (float[4] y) { y = HardSwish (x) }"""
    )
    slopes = function(onward.gradient(model, "y", ["x"]), engine="onnxruntime")({"x": x})["x/grad"]
    np.testing.assert_array_equal(slopes, [0, 0, 1, 1])


# ---- mistakes, and instructions --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, shapes, outputs",
    [
        ("GeluGradient", [(3,), (4,)], 1),
        ("SoftmaxGradient", [(3, 2), (2, 3)], 1),
        ("SoftmaxGradient", [(), ()], 1),
        ("LayerNormalizationGradient", [(3, 4), (3, 4), (3,), (3,), (3,)], 3),
        ("RMSNormalizationGradient", [(3, 4), (3, 5), (4,)], 2),
        ("Attention", [(1, 2, 3, 4), (1, 2, 5, 4), (1, 2, 6, 4)], 2),
        ("Attention", [(2, 3, 4), (2, 3, 4), (2, 3, 4)], 2),
        ("Attention", [(1, 2, 3, 4), (1, 2, 5, 4), (1, 2, 5, 4), (3, 4)], 2),
        ("AttentionGradient", [(1, 2, 3, 4)] * 4 + [(1, 2, 3, 5), (1, 2, 3, 2)], 3),
    ],
)
def test_shapes_that_do_not_fit_are_errors(name, shapes, outputs):
    with pytest.raises(Fail):
        run_kernel(name, *(np.zeros(shape, np.float32) for shape in shapes), outputs=outputs)


@pytest.mark.slow
@pytest.mark.parametrize("instructions", ["baseline", "avx2", "avx512"])
def test_all_instructions_give_the_same(instructions):
    """One shape of each kernel that fills no vector, and attention in several blocks."""
    tests = ["test_kernels_attention.py", "test_kernels_elementwise.py"]
    environment = {**os.environ, "ONWARD_KERNELS_INSTRUCTIONS": instructions}
    some = "of_torch and (odd or 37 or 1001 or (blocks and finite))"
    command = [sys.executable, "-m", "pytest", "-q", "-k", some, *tests]
    subprocess.run(command, check=True, cwd=TESTS / "kernels", env=environment)
