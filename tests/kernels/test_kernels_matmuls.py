"""Products, sums of rows and gradients of lookups by native kernels: against numpy in double precision."""

from __future__ import annotations

import gradcheck
import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import small_transformer
from native_kernels import needs_kernels, run_kernel
from onnxruntime.capi.onnxruntime_pybind11_state import Fail

import onward
from onward.engines import start
from onward.kernels import PASSES, finish_with_kernels, library
from onward.lowering.runtime import for_onnxruntime
from onward.lowering.step import LoweringOptions, lower_for_engine
from onward.model import load
from onward.runtime.sessions import open_session
from onward.standard import OLDEST_OPSET
from onward.transform.context import Context
from onward.transform.opset import of_one_opset

pytestmark = needs_kernels


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def assert_close(found, wanted, rtol=2e-6):
    np.testing.assert_allclose(found, wanted, rtol=rtol, atol=rtol * max(1.0, np.abs(wanted).max(initial=0)))


# ---- products --------------------------------------------------------------------------------------------------------

SIZES = [(1, 1, 1), (5, 7, 3), (3, 24, 64), (700, 25, 65), (1025, 97, 130), (2049, 9, 200), (64, 1, 4097), (2, 4105, 5)]


@pytest.mark.parametrize(("depth", "rows", "columns"), SIZES)
@pytest.mark.parametrize("turned", [0, 1])
def test_products_are_those_of_numpy(depth, rows, columns, turned):
    a, b, bias = numbers(rows, depth), numbers(depth, columns, seed=1), numbers(columns, seed=2)
    given = (a, b.T.copy() if turned else b, bias)
    (one,), (two,) = (run_kernel("Product", *given, turned=[turned], threads=threads) for threads in (1, 2))
    assert_close(one, a.astype(np.float64) @ b + bias, rtol=1e-5)
    np.testing.assert_array_equal(one, two)  # whatever the number of threads


def test_products_are_added_up():
    a, b = numbers(300, 1100), numbers(1100, 70)
    c, d = numbers(300, 8, seed=1), numbers(70, 8, seed=1)
    bias = numbers(70, seed=2)
    (one,), (two,) = (run_kernel("Product", a, b, c, d, bias, turned=[0, 1], threads=threads) for threads in (1, 2))
    assert_close(one, a.astype(np.float64) @ b + c @ d.T + bias, rtol=1e-5)
    np.testing.assert_array_equal(one, two)


def test_products_keep_all_axes_but_the_last():
    x, w = numbers(3, 5, 7), numbers(7, 2)
    (found,) = run_kernel("Product", x, w, turned=[0])
    assert_close(found, x @ w)


@pytest.mark.parametrize(("rows", "depth", "columns"), [(0, 3, 2), (4, 0, 2), (4, 3, 0)])
def test_products_of_nothing_are_the_bias(rows, depth, columns):
    bias = numbers(columns)
    a, b = np.ones((rows, depth), np.float32), np.ones((depth, columns), np.float32)
    (found,) = run_kernel("Product", a, b, bias, turned=[0])
    wanted = np.broadcast_to(bias, (rows, columns)) if depth == 0 else np.zeros((rows, columns))
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(("depth", "rows", "columns"), SIZES)
def test_transposed_products_are_those_of_numpy(depth, rows, columns):
    a, b = numbers(depth, rows), numbers(depth, columns, seed=1)
    (one,) = run_kernel("TransposedProduct", a, b, threads=1)
    (two,) = run_kernel("TransposedProduct", a, b)
    assert_close(one, a.astype(np.float64).T @ b, rtol=1e-5)
    np.testing.assert_array_equal(one, two)  # whatever the number of threads


def test_transposed_products_take_all_leading_axes_as_rows():
    a, b = numbers(3, 5, 7), numbers(5, 3, 2)
    (found,) = run_kernel("TransposedProduct", a, b)
    assert_close(found, a.reshape(15, 7).T @ b.reshape(15, 2))


@pytest.mark.parametrize("shape", [((0, 3), (0, 2)), ((4, 0), (4, 2)), ((4, 3), (4, 0))])
def test_transposed_products_of_nothing_are_zero(shape):
    (found,) = run_kernel("TransposedProduct", *(np.ones(sizes, np.float32) for sizes in shape))
    np.testing.assert_array_equal(found, np.zeros((shape[0][1], shape[1][1]), np.float32))


@pytest.mark.parametrize("name", ["TransposedProduct", "Product"])
def test_products_keep_what_is_not_finite_where_it_is(name):
    a, b = numbers(40, 30), numbers(40, 70)
    a[3, 5], b[7, 11] = np.nan, np.inf
    (found,) = run_kernel(name, a, b) if name == "TransposedProduct" else run_kernel(name, a.T.copy(), b, turned=[0])
    wrong = ~np.isfinite(found)
    wanted = np.zeros_like(wrong)
    wanted[5], wanted[:, 11] = True, True
    np.testing.assert_array_equal(wrong, wanted)


# ---- sums and lookups ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((5,), 0),
        ((1, 3), 1),
        ((7, 11, 13), 2),
        ((4, 9, 7000), 1),
        ((3000, 37), 1),
        ((0, 4), 1),
        ((4, 0), 1),
        ((6, 5), 2),
    ],
)
def test_sums_are_those_of_numpy(shape, axes):
    x = numbers(*shape)
    (one,), (two,) = (run_kernel("LeadingSum", x, axes=axes, threads=threads) for threads in (1, 2))
    assert_close(one, x.astype(np.float64).sum(tuple(range(axes))))
    np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize(
    ("table", "places"), [((50, 37), (4, 300)), ((3000, 64), (700,)), ((9,), (20,)), ((5, 2), (0,))]
)
def test_lookups_are_added_up_in_order(table, places):
    indices = np.random.default_rng(0).integers(-table[0], table[0], places)
    dy = numbers(*places, *table[1:])
    (found,) = run_kernel("LookupGradient", indices, dy, np.array(table))
    wanted = np.zeros(table, np.float32)
    np.add.at(wanted, indices.reshape(-1), dy.reshape(-1, *table[1:]))
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("name", "inputs", "settings"),
    [
        ("Product", [numbers(4, 3), numbers(4, 5)], {"turned": [0]}),
        ("Product", [numbers(4, 3), numbers(3, 5)], {"turned": [1]}),
        ("Product", [numbers(4, 3), numbers(3, 5), numbers(3)], {"turned": [0]}),
        ("Product", [numbers(4, 3), numbers(3)], {"turned": [0]}),
        ("Product", [numbers(4, 3), numbers(3, 5)], {}),
        ("Product", [numbers(4, 3)], {}),
        ("Product", [numbers(4, 3), numbers(3, 5), numbers(4, 3), numbers(3, 6)], {"turned": [0, 0]}),
        ("TransposedProduct", [numbers(4, 3), numbers(5, 3)], {}),
        ("TransposedProduct", [numbers(4), numbers(4)], {}),
        ("LeadingSum", [numbers(4, 3)], {"axes": 3}),
        ("LookupGradient", [np.array([1, 9]), numbers(2, 3), np.array([4, 3])], {}),
        ("LookupGradient", [np.array([1]), numbers(2, 3), np.array([4, 3])], {}),
        ("LookupGradient", [np.array([], np.int64), numbers(0), np.array([], np.int64)], {}),
    ],
)
def test_what_does_not_fit_is_refused(name, inputs, settings):
    with pytest.raises(Fail, match=r"product|axes|index|table"):
        run_kernel(name, *inputs, **settings)


# ---- sums of products ------------------------------------------------------------------------------------------------

TERMS = {
    "product": "MatMul(a, w)",
    "turned": "Gemm <transB = 1> (a, turned)",
    "with a bias": "Gemm(b, w, row)",
    "row": "Identity(row)",
    "matrix": "Identity(c)",
    "column": "Identity(column)",
    "read twice": "MatMul(b, w)",
}


@given(st.lists(st.sampled_from(sorted(TERMS)), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_sums_of_products_are_those_of_the_plain_graph(more, random):
    kinds = ["product", *more]
    lines = [f"t{i} = {TERMS[kind]}" for i, kind in enumerate(kinds)]
    outputs = [f"t{i}" for i, kind in enumerate(kinds) if kind == "read twice"]
    left = [f"t{i}" for i in range(len(kinds))]
    while len(left) > 1:  # in any order
        one, other = (left.pop(random.randrange(len(left))) for _ in range(2))
        left.append(f"s{len(lines)}")
        lines.append(f"{left[-1]} = Add({one}, {other})")
    results = ", ".join(f"float[n, m] {name}" for name in (*left, *outputs))
    proto = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 20]>
        sums (float[40, 9] a, float[40, 9] b, float[40, 70] c, float[40, 1] column, float[9, 70] w, float[70, 9] turned,
              float[70] row) => ({results}) {{ {" ".join(lines)} }}""")
    shapes = [[dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in proto.graph.input]
    inputs = {value.name: numbers(*shapes[i], seed=i) for i, value in enumerate(proto.graph.input)}
    model = of_one_opset(load(proto), OLDEST_OPSET).copy()
    context = Context(model)
    context.fill_in_types()
    finish_with_kernels(context)
    if "with a bias" not in kinds and not outputs:
        assert [node.op_type for node in model.graph].count("Product") == 1  # whatever the order
    with_kernels = open_session(for_onnxruntime(model), threads=2, library=library().path).run(None, inputs)
    for found, wanted in zip(with_kernels, gradcheck.evaluate(proto, inputs).values(), strict=True):
        assert_close(found, wanted, rtol=1e-5)


# ---- in a model ------------------------------------------------------------------------------------------------------


def test_a_model_has_the_same_gradients_with_and_without():
    model = onward.prepare(small_transformer(1, width=256), loss="value:loss", optimizer="sgd:lr=0.1")
    made = {node.op_type for node in lower_for_engine(model, options=LoweringOptions(passes=PASSES)).graph}
    assert made >= {"Product", "TransposedProduct", "LeadingSum", "LookupGradient", "Elementwise"}, made
    rng = np.random.default_rng(0)
    batch = {name: rng.integers(0, 32, (3, 50)) for name in ("tokens", "labels")}
    found = []
    for kernels in (True, False):
        with start(model, kernels=kernels, threads=2) as engine:
            found.append(engine.gradients(batch))
    for name, wanted in found[1].items():
        np.testing.assert_allclose(found[0][name], wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max(), err_msg=name)
