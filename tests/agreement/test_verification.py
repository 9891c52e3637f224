"""`verify`: engines that agree, one that does not, and what no engine can run."""

from __future__ import annotations

import contextlib
import math
import warnings

import models
import numpy as np
import onnx
import pytest
from marks import needs
from onnx import numpy_helper, parser

import onward
from onward.agreement.steps import StepResult, compare_steps
from onward.agreement.tolerance import Sides, noise_in
from onward.engines import start
from onward.engines.framework import framework_class
from onward.errors import InvalidModelError, MismatchError, OutOfMemoryError, UnknownNameError, UnsupportedError

FRAMEWORKS = [pytest.param(name, marks=needs(name)) for name in ("torch", "jax", "tensorflow")]
EVERYWHERE = ["onnxruntime", "numpy", *FRAMEWORKS]


def training():
    return onward.prepare(models.digits_mlp(), loss="cross_entropy", optimizer="adam:lr=0.01")


@needs("torch", "jax", "tensorflow")
def test_all_engines_agree():
    report = onward.verify(training(), steps=3)
    assert report.ok
    assert {(row.engine, row.derivative) for row in report.rows} >= {("torch", "own"), ("torch", "rules")}
    assert {row.verdict for row in report.rows} == {"agrees"}
    assert max(row.state for row in report.rows) < 1e-5


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        ({"picture": np.zeros((4, 64))}, UnknownNameError, "no input `picture`"),
        ({"image": np.zeros((4, 8, 8), np.float32)}, InvalidModelError, r"`image` must be float32 \[N, 64\]"),
        ({"image": np.full((4, 64), "x")}, InvalidModelError, "`image` must be float32"),
        ({"labels": np.zeros(4)}, InvalidModelError, "`labels` must be int64"),
    ],
)
def test_inputs_must_fit_before_any_engine_is_tried(inputs, error, message):
    started = []
    with pytest.raises(error, match=message):
        onward.verify(training(), inputs=inputs, on_start=started.append)
    assert not started


def test_a_bias_before_a_normalization_follows_rounding_errors():
    """Its gradient is zero, and Adam makes whole steps of what is left of it."""
    model = onward.prepare(models.small_cnn(), loss="cross_entropy", optimizer="adam:lr=0.01")
    states = []
    for engine in ("onnxruntime", "numpy"):
        with start(model, engine=engine) as running:
            batch = {"image": np.random.default_rng(0).random((4, 1, 8, 8), np.float32), "labels": np.arange(4)}
            running.step(batch)
            states.append(running.state()["conv.bias"])
    assert np.abs(states[0] - states[1]).max() > 1e-3
    assert onward.verify(model, engines=["onnxruntime", "numpy"], steps=3).ok


def spoiled(monkeypatch, engine, operator, change):
    """Let one engine compute one operator otherwise."""
    rows = framework_class(engine).operators
    right = rows[operator]
    monkeypatch.setitem(rows, operator, lambda *inputs, **attributes: change(right(*inputs, **attributes)))


@pytest.mark.slow("tensorflow")
@pytest.mark.parametrize("engine", FRAMEWORKS)
def test_the_first_value_that_differs_is_named(engine, monkeypatch):
    spoiled(monkeypatch, engine, "Relu", lambda y: y * 1.01)
    report = onward.verify(training(), engines=["onnxruntime", "numpy", engine], steps=3)
    assert not report.ok
    odd = [row for row in report.rows if row.verdict == "differs"]
    assert {row.engine for row in odd} == {engine}
    for row in odd:
        found = row.difference
        assert found.step == 1
        assert found.value == first_relu()
        assert (found.engine, found.reference) in {(engine, "onnxruntime"), (engine, "numpy")}
        assert found.magnitude == pytest.approx(1.01 * found.expected, rel=1e-4)


@pytest.mark.slow("jax")
@pytest.mark.parametrize("engine", FRAMEWORKS)
def test_a_nan_on_one_engine(engine, monkeypatch):
    spoiled(monkeypatch, engine, "Relu", lambda y: y * math.nan)
    report = onward.verify(training(), engines=["onnxruntime", "numpy", engine], steps=2)
    odd = [row for row in report.rows if row.verdict != "agrees"]
    assert {row.engine for row in odd} == {engine}
    for row in odd:
        assert row.difference.value == first_relu()
        assert math.isnan(row.difference.magnitude)
        assert math.isfinite(row.difference.expected)


def first_relu():
    return next(node.output[0] for node in models.digits_mlp().graph.node if node.op_type == "Relu")


# ---- what cannot run -------------------------------------------------------------------------------------------------


def of(text, **weights):
    proto = parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21, "acme" : 1]> {text}')
    for name, shape in weights.items():
        proto.graph.initializer.append(numpy_helper.from_array(np.ones(shape, "f"), name))
    return proto


@pytest.mark.parametrize("engine", EVERYWHERE)
def test_operators_that_no_engine_has_are_named_at_once(engine):
    proto = of(
        """g (float[n, 4] x) => (float[n, 4] y)
        { h = MatMul(x, w)  a = acme.Twist(x)  b = acme.Turn(a)  y = Add(h, b) }""",
        w=(4, 4),
    )
    proto.graph.value_info.extend(onnx.helper.make_tensor_value_info(n, 1, ["n", 4]) for n in "ab")
    model = onward.prepare(proto, loss="mse", optimizer="sgd")
    with pytest.raises(UnsupportedError) as caught:
        start(model, engine=engine)
    assert "acme.Twist" in str(caught.value)
    assert "acme.Turn" in str(caught.value)


@pytest.mark.parametrize("engine", ["onnxruntime", *FRAMEWORKS])
def test_a_device_that_is_not_there(engine):
    with pytest.raises((UnsupportedError, UnknownNameError), match="abacus"):
        start(training(), engine=engine, device="abacus")


@pytest.mark.slow("torch-options2", "torch-options3")
@pytest.mark.parametrize(
    ("engine", "options"),
    [
        ("onnxruntime", {}),
        ("numpy", {}),
        pytest.param("torch", {}, marks=needs("torch")),
        pytest.param("torch", {"compile": False}, marks=needs("torch")),
        pytest.param("tensorflow", {"compile": False}, marks=needs("tensorflow")),
    ],
)
def test_a_model_that_is_too_large(engine, options):
    """XLA ends the process where a CPU has too little memory; on GPUs it raises an exception."""
    proto = of(
        """g (float[n, 4] x) => (float[n, 2] y)
        { size = Constant<value = int64[2] {4398046511104, 4}>()  wide = Expand(w, size)  p = MatMul(wide, v)
          s = ReduceSum<keepdims = 0>(p)  h = MatMul(x, v)  y = Add(h, s) }""",
        w=(1, 4),
        v=(4, 2),
    )
    model = onward.prepare(proto, loss="mse", optimizer="sgd")
    batch = {"x": np.ones((3, 4), "f"), "target": np.ones((3, 2), "f")}
    with warnings.catch_warnings(), start(model, engine=engine, **options) as loaded:
        warnings.simplefilter("ignore")
        before = loaded.state()
        with pytest.raises(OutOfMemoryError, match="does not fit into the memory") as caught:
            loaded.step(batch)["loss"]
        assert "smaller" in caught.value.hint
        np.testing.assert_array_equal(loaded.state()["v"], before["v"])


# ---- the rule --------------------------------------------------------------------------------------------------------

ONE, HALF = np.float32([1, 0.5]), np.float16([1, 0.5])


@pytest.mark.parametrize(
    ("found", "expected", "before", "agrees"),
    [
        (ONE + np.float32(9e-5), ONE, None, True),
        (ONE + np.float32(2e-4), ONE, None, False),
        (ONE * 1e-6 + np.float32(9e-8), ONE * 1e-6, None, True),  # a sum that cancels
        (ONE + np.float32(2e-5), ONE, ONE - np.float32(0.1), False),  # of a change of 0.1
        (ONE + np.float32(2e-7), ONE, ONE - np.float32(1e-4), True),  # rounding of what is changed
        (HALF + np.float16(2**-9), HALF, None, True),  # two roundings
        (ONE * np.nan, ONE * np.nan, None, False),
        (ONE * np.inf, ONE * np.inf, None, True),
        (ONE[:1], ONE, None, False),
    ],
)
def test_what_agrees(found, expected, before, agrees):
    compare = Sides("that of another", "a hint")
    with contextlib.nullcontext() if agrees else pytest.raises(MismatchError, match="`x` is off by"):
        compare({"x": found}, {"x": expected}, before=None if before is None else {"x": before})


def test_gradients_that_are_rounding_errors():
    noise = noise_in({"a": np.float32([1, 1e-5]), "b": np.float32([1e-6, 0])})
    assert {name: mask.tolist() for name, mask in noise.items()} == {"a": [False, False], "b": [True, True]}
    Sides("", "")({"b": np.ones(2)}, {"b": np.zeros(2)}, ignored=noise)


_SWITCH = """<ir_version: 10, opset_import: ["" : 20]>
    g (float[N, 1] x) => (float[N, 1] y)
    <float[1, 1] w = {1}, float[1] b = {-1.0000006}, float[1, 1] v = {1}, float[1] c = {0.25}> {
        product = MatMul (x, w)
        before = Add (product, b)
        h = Relu (before)
        out = MatMul (h, v)
        y = Add (out, c)
    }"""


def _switched_on(batch, factor=1.0):
    """A step of a framework that rounds the other way, and so sees a gradient behind the ReLU."""
    gradient = np.float32(2 * (0.25 - batch["target"].mean()))
    gradients = {"w": np.full((1, 1), gradient), "b": np.full(1, gradient), "c": np.full(1, gradient)}
    start = {"w": np.ones((1, 1), np.float32), "b": np.float32([-1.0000006]), "c": np.float32([0.25])}
    weights = {name: start[name] - np.float32(0.1) * gradients[name] * (factor if name == "c" else 1) for name in start}
    return StepResult(float((0.25 - batch["target"].mean()) ** 2), gradients, weights)


def test_a_unit_that_rounding_switches_is_no_mismatch():
    """Not the first change in the last digits switches it; what no change explains is a mismatch still."""
    training = onward.prepare(parser.parse_model(_SWITCH), loss="mse", optimizer="sgd:lr=0.1")
    given = [{name: np.ones((2, 1), np.float32) for name in ("x", "target")}]
    compare_steps(training, given, _switched_on, framework="another")
    with pytest.raises(MismatchError, match="`c` is off"):
        compare_steps(training, given, lambda one: _switched_on(one, factor=1.01), framework="another")


_CANCEL = """<ir_version: 10, opset_import: ["" : 20]>
    g (float[N, 1] x) => (float[N, 1] y)
    <float[1, 1] w = {1}, float[1] b = {-1.0001}, float scale = {10000}> {
        product = MatMul (x, w)
        small = Add (product, b)
        y = Mul (small, scale)
    }"""


def test_a_loss_is_compared_beyond_what_rounding_moves():
    training = onward.prepare(parser.parse_model(_CANCEL), loss="mse", optimizer="sgd:lr=1e-9", freeze="scale")
    ones = np.ones((2, 1), np.float32)
    compare = lambda target, loss: compare_steps(
        training, [{"x": ones, "target": target}], lambda _: StepResult(loss, {}, {}), framework="another"
    )
    compare(0 * ones, 1.02)  # a change of the weights by 1e-6 moves the loss by 0.02
    with pytest.raises(MismatchError, match="the loss is off"):
        compare(0 * ones, 2.0)
