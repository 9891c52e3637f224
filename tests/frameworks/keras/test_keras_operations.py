"""Operators as calls of `keras.ops`: what ONNX's own node tests say, on whichever backend Keras has."""

from __future__ import annotations

import fnmatch
import functools

import numpy as np
import onnx.parser
import pytest
from marks import needs
from node_tests import onnx_node_tests

keras = pytest.importorskip("keras")
from conformity import operator_of  # noqa: E402
from keras_runs import on_backend  # noqa: E402

from onward.engines.framework import NotOnHost  # noqa: E402
from onward.engines.keras import ROWS  # noqa: E402
from onward.errors import UnsupportedError  # noqa: E402
from onward.frameworks.keras.step_graphs import GraphKeras, interpret  # noqa: E402
from onward.model import load  # noqa: E402

pytestmark = [needs("keras"), needs("tensorflow")]

EXCLUDED = {
    "test_bitshift_*_shift*": "shifts by less than nothing, or by more than there are bits",
    "test_equal_string*": "text",
    "test_identity_sequence": "a sequence",
    "test_identity_opt": "an optional",
    "test_reduce_m*_empty_set*": "the largest of nothing",
    "test_range_*16_type*": "numbers of types that Python does not have",
    "test_range_int32_type*": "numbers of types that Python does not have",
    "test_training_dropout*": "a matter of chance",
    "test_cast*_STRING*": "text",
}
OTHER_TYPES = ("UINT64", "UI64", "FLOAT8", "INT4", "INT2", "FLOAT4", "E4M3", "E5M2", "E8M0")
ON_TORCH = {"test_top_k_same_values*": "PyTorch chooses others of equals", "test_bitwise_not_3d": "has no uint16"}


@functools.cache
def cases() -> dict[str, list[str]]:
    """Operator -> its cases."""
    excluded = EXCLUDED | (ON_TORCH if keras.backend.backend() == "torch" else {})
    found: dict[str, list[str]] = {}
    for name, case in onnx_node_tests().items():
        strange = any(kind in name.upper() for kind in OTHER_TYPES) or "_expanded" in name
        if not strange and not any(fnmatch.fnmatch(name, pattern) for pattern in excluded):
            found.setdefault(operator_of(case), []).append(name)
    return {operator: names for operator, names in found.items() if operator in ROWS}


def check(name: str) -> None:
    case, framework = onnx_node_tests()[name], GraphKeras()
    proto = case.proto()
    run = interpret(load(proto).copy(), framework)
    for inputs, expected in case.data:
        given = {value.name: framework.tensor(x) for value, x in zip(proto.graph.input, inputs, strict=False)}
        results = run(given)
        for value, wanted in zip(proto.graph.output, expected, strict=True):
            compare(results[value.name], wanted, case)


def compare(result, wanted, case) -> None:
    if isinstance(wanted, list):
        for one, other in zip(result, wanted, strict=True):
            compare(one, other, case)
        return
    result = GraphKeras().host(result)
    assert result.shape == wanted.shape, case.name
    wide = keras.backend.backend() == "tensorflow"  # others lack some types
    assert result.dtype == wanted.dtype or not wide, case.name
    rtol = max(case.rtol, 0.02 if wanted.dtype.itemsize == 2 else 0)
    exact = result.astype(np.float64), wanted.astype(np.float64)
    np.testing.assert_allclose(*exact, rtol, max(case.atol, 1e-5), err_msg=case.name)


WITHOUT_CASES = {"GlobalLpPool", "Scatter", "ConcatFromSequence"}


def test_each_operator():
    """One case each. All cases are `test_all_cases`."""
    lacking = {name for name in ROWS if "." not in name} - cases().keys()
    assert lacking <= WITHOUT_CASES, lacking
    for names in cases().values():
        check(names[0])


@pytest.mark.slow
def test_all_cases():
    for names in cases().values():
        for name in names:
            check(name)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_other_backends(backend):
    on_backend(backend, "-m", "pytest", "-q", "-x", __file__, "-k", "all_cases or chosen", "-p", "no:cacheprovider")


def test_what_the_table_lacks_is_named_at_once():
    text = """<ir_version: 10, opset_import: ["" : 21]>
        g (float[4] x) => (int64[a, b] places, float[c] values) { places = NonZero(x)  values = Unique(x) }"""
    with pytest.raises(UnsupportedError, match=r"(?s)the engine `keras` lacks .*`NonZero`.*`Unique`"):
        interpret(load(onnx.parser.parse_model(text)), GraphKeras())


def test_a_single_size_that_is_not_known():
    import tensorflow as tf

    text = """<ir_version: 10, opset_import: ["" : 21]>
        g (float[n, 6] x) => (float[n, 2, 3] y) {
            sizes = Shape(x)
            first = Constant<value_int = 0>()
            n = Gather(sizes, first)
            one = Constant<value_ints = [1]>()
            vector = Reshape(n, one)
            others = Constant<value_ints = [2, 3]>()
            shape = Concat<axis = 0>(vector, others)
            y = Reshape(x, shape)
        }"""
    run = interpret(load(onnx.parser.parse_model(text)), GraphKeras())
    traced = tf.function(lambda x: run({"x": x})["y"], input_signature=[tf.TensorSpec([None, 6])])
    x = np.arange(24, dtype="f").reshape(4, 6)
    np.testing.assert_array_equal(traced(x), x.reshape(4, 2, 3))


def test_a_branch_that_only_data_decide_about_is_chosen(monkeypatch):
    """While a step is compiled there are no values: both sides are computed."""
    proto = onnx_node_tests()["test_if"].proto()
    framework = GraphKeras()

    def unknown(tensor):
        raise NotOnHost

    expected = [
        interpret(load(proto).copy(), framework)({"cond": framework.tensor(np.array(c))}) for c in (True, False)
    ]
    monkeypatch.setattr(framework, "array", unknown)
    found = [interpret(load(proto).copy(), framework)({"cond": framework.tensor(np.array(c))}) for c in (True, False)]
    for one, other in zip(expected, found, strict=True):
        (a,), (b,) = one.values(), other.values()
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(a), keras.ops.convert_to_numpy(b))


def test_a_vector_along_the_second_axis_is_not_taken_for_a_bias_along_the_last():
    text = """<ir_version: 10, opset_import: ["" : 21]>
        g (float[2, 4, 4] x, float[1, 4, 1] b) => (float[2, 4, 4] y, float[2, 4, 4] z) {
            y = Add(x, b)
            z = Sum(x, b)
        }"""
    x, b = np.zeros((2, 4, 4), "f"), np.arange(4, dtype="f").reshape(1, 4, 1)
    results = interpret(load(onnx.parser.parse_model(text)), GraphKeras())({"x": x, "b": b})
    for name in ("y", "z"):
        np.testing.assert_array_equal(GraphKeras().host(results[name]), x + b)
