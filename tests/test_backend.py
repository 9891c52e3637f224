"""ONNX's interface for backends on each engine: what is given and returned."""

import unittest

import ml_dtypes
import numpy as np
import onnx
import pytest
from marks import needs
from models import digits_mlp
from onnx.backend.base import Backend

import onward
from onward.backend import for_engine, is_compatible, prepare, run_model, run_node, supports_device
from onward.engines import FRAMEWORKS
from onward.errors import DataError, UnknownNameError, UnsupportedError

ENGINES = ["onnxruntime", "numpy", *(pytest.param(name, marks=needs(name)) for name in FRAMEWORKS)]
X = np.arange(6, dtype=np.float32).reshape(2, 3)


def parsed(text):
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {text}')


TWO = parsed(
    "g (float[N,3] a, float[3] b, float c) => (float[N,3] sum, float[N,3] scaled) { \
    sum = Add(a, b) \n scaled = Mul(sum, c) }"
)


@pytest.mark.parametrize("engine", ENGINES)
def test_inputs_by_position_and_by_name_and_outputs_by_both(engine):
    b, c = np.ones(3, np.float32), np.float32(2)
    prepared = prepare(TWO, engine=engine)
    for inputs in ([X, b, c], (X, b, c), {"c": c, "a": X, "b": b}, {"a": X, "b": [1, 1, 1], "c": 2}):
        results = prepared.run(inputs)
        total, scaled = results
        np.testing.assert_array_equal(total, X + 1)
        np.testing.assert_array_equal(results["scaled"], (X + 1) * 2)
        assert scaled.dtype == np.float32


def test_a_model_with_training_computes_its_graph():
    training = onward.prepare(digits_mlp(), loss="cross_entropy")
    image = np.random.default_rng(0).random((4, 64), np.float32)
    (scores,) = run_model(training.to_proto(), image)
    np.testing.assert_array_equal(scores, run_model(digits_mlp(), [image])[0])


@pytest.mark.parametrize("engine", ENGINES)
def test_sequences_optionals_text_and_narrow_types(engine):
    model = parsed("g (seq(float[N]) s) => (float[M] y) { y = ConcatFromSequence<axis=0>(s) }")
    np.testing.assert_array_equal(run_model(model, [[X[0], X[1]]], engine=engine)[0], X.reshape(-1))
    model = parsed("g (optional(float[N]) o) => (bool y) { y = OptionalHasElement(o) }")
    assert [run_model(model, [given], engine=engine)[0].item() for given in (X[0], None)] == [True, False]
    model = parsed("g (string[N] a, string[N] b) => (string[N] y) { y = StringConcat(a, b) }")
    assert run_model(model, [["a", "b"], np.array(["c", "d"])], engine=engine)[0].tolist() == ["ac", "bd"]
    model = parsed(
        "g (bfloat16[2,3] x) => (bfloat16[2,3] y, float8e5m2[2,3] z) { \
        y = Add(x, x) \n z = Cast<to=19>(x) }"
    )
    y, z = run_model(model, X.astype(ml_dtypes.bfloat16), engine=engine)
    np.testing.assert_array_equal(y, (X + X).astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(z.view(np.uint8), X.astype(ml_dtypes.float8_e5m2).view(np.uint8))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_single_operator(engine):
    node = onnx.helper.make_node("Clip", ["x", "", "most"], ["y"])
    (y,) = run_node(node, [X, np.float32(2)], engine=engine)
    np.testing.assert_array_equal(y, X.clip(max=2))
    node = onnx.helper.make_node("ReduceSum", ["x"], ["y"], axes=[1], keepdims=0)  # an attribute until 13
    np.testing.assert_array_equal(run_node(node, X, opset_version=11, engine=engine)[0], X.sum(1))


def test_each_engine_is_a_backend():
    assert issubclass(for_engine("numpy"), Backend)
    assert for_engine("numpy") is for_engine("numpy")
    for device, there in {"CPU": True, "CPU:0": True, "CUDA": False}.items():
        assert supports_device(device, engine="numpy") == there


def test_what_an_engine_lacks_is_refused_and_skipped():
    model = parsed("g (float[N] x) => (float[N] y) { y = Nothing(x) }")
    for engine in ("onnxruntime", "numpy"):
        assert not is_compatible(model, engine=engine)
        with pytest.raises(UnsupportedError, match="Nothing") as caught:
            prepare(model, engine=engine)
        assert isinstance(caught.value, unittest.SkipTest)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: prepare(TWO).run([X]), UnknownNameError, "`b` is missing, `c` is missing"),
        (lambda: prepare(TWO).run([X] * 4), DataError, "got 4 inputs, but the model has 3"),
        (lambda: prepare(TWO).run([X.astype(float), X[0], 1]), DataError, "`a` is float64, not float32"),
        (lambda: prepare(TWO).run([X, X, None]), DataError, r"`b` has the shape \[2, 3\], not \[3\]; `c` is NoneType"),
        (lambda: prepare(TWO, engine="pytorch"), UnknownNameError, "unknown engine `pytorch`"),
        (lambda: for_engine("ort"), UnknownNameError, "unknown engine `ort`"),
        (lambda: prepare(TWO, "TPU"), UnknownNameError, "unknown device `tpu`"),
        (lambda: prepare(TWO, "CUDA", engine="numpy"), UnknownNameError, "numpy has no device `cuda`"),
        (lambda: prepare(TWO, fast=True), UnsupportedError, "no option `fast`"),
    ],
)
def test_mistakes(call, error, words):
    with pytest.raises(error, match=words):
        call()
