"""Formulas of importers at arguments where plain ones go wrong: tiny, huge, negative, infinite and NaN."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest

from onward.build import Builder
from onward.frameworks.formulas import elementwise, reduction
from onward.frameworks.formulas.graph_building import model_of, permute, put_out, reverse, stack, unstack
from onward.runtime.sessions import evaluate
from onward.standard import COMMON_OPSET

POSITIVE = [1e-38, 1e-20, 1e-8, 1e-4, 0.1, 0.49, 0.5, 0.51, 1, 1.5, 2.5, 7.9, 8.1, 30, 88, 1e4, 8388609, 1e20, 3e38]
NUMBERS = np.array([*POSITIVE, *(-x for x in POSITIVE), 0.0, -0.0, math.inf, -math.inf, math.nan], np.float32)
PAIRS = np.array(list(itertools.product(NUMBERS[::2], NUMBERS[::3])), np.float32).T
WITHIN = np.linspace(-1, 1, 41, dtype=np.float32)


def compute(formula: Callable, *arrays: np.ndarray) -> np.ndarray:
    """The result of a formula on ONNX Runtime."""
    inputs = [
        ir.Value(name=f"x{i}", type=ir.TensorType(ir.DataType.from_numpy(array.dtype)), shape=ir.Shape(array.shape))
        for i, array in enumerate(arrays)
    ]
    graph = ir.Graph(inputs, [], nodes=[], opset_imports={"": COMMON_OPSET}, name="formula")
    functions: dict = {}
    op = Builder(graph, opset=COMMON_OPSET, functions=functions)
    put_out(op, formula(op, *map(op, inputs)), "y")
    return evaluate(model_of(graph, functions.values()), {f"x{i}": array for i, array in enumerate(arrays)})[0]


def of_doubles(function: Callable) -> Callable:
    return lambda *arrays: function(*(array.astype(np.float64) for array in arrays))


def product_or_zero(function: Callable) -> Callable:
    return lambda x, y: np.where(x == 0, 0, x * function(np.where(x == 0, 1, y)))


def round_away(x: np.ndarray) -> np.ndarray:
    return np.copysign(np.floor(np.abs(x) + 0.5), x)


def erfc(x: np.ndarray) -> np.ndarray:
    return np.vectorize(math.erfc)(x)


def erf(x: np.ndarray) -> np.ndarray:
    return np.vectorize(math.erf)(x)


ELEMENTWISE: dict[str, tuple[Callable, Callable, tuple[np.ndarray, ...]]] = {
    "expm1": (elementwise.expm1, np.expm1, (NUMBERS,)),
    "log1p": (elementwise.log1p, np.log1p, (NUMBERS,)),
    "erfc": (elementwise.erfc, erfc, (NUMBERS,)),
    "relu6": (elementwise.relu6, lambda x: np.clip(x, 0, 6), (NUMBERS,)),
    "round_away": (elementwise.round_away, round_away, (NUMBERS,)),
    "gelu": (lambda op, x: elementwise.multiply(op, x * 0.5, elementwise.erfc(op, x * -math.sqrt(0.5))),
             lambda x: 0.5 * x * erfc(-x / math.sqrt(2)), (NUMBERS[np.isfinite(NUMBERS)],)),
    "atan2": (elementwise.atan2, np.arctan2, tuple(PAIRS)),
    "log_add_exp": (elementwise.log_add_exp, np.logaddexp, tuple(PAIRS)),
    "xlogy": (lambda op, x, y: elementwise.product_or_zero(op, x, "log", y), product_or_zero(np.log), tuple(PAIRS)),
    "xlog1py": (lambda op, x, y: elementwise.product_or_zero(op, x, "log1p", y), product_or_zero(np.log1p),
                tuple(PAIRS)),
    "xdivy": (lambda op, x, y: elementwise.product_or_zero(op, x, "divide", y),
              product_or_zero(lambda y: 1 / y), tuple(PAIRS)),
}  # fmt: skip


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_at_extremes(name: str) -> None:
    formula, reference, arguments = ELEMENTWISE[name]
    with np.errstate(all="ignore"):
        expected = of_doubles(reference)(*arguments).astype(np.float32)
    found = compute(formula, *arguments)
    assert found.dtype == np.float32
    smallest = 1e-7 if name == "gelu" else 2e-38  # Gelu of ONNX Runtime is 1 + erf, which is 0 below -5
    np.testing.assert_allclose(found, expected, rtol=4e-6, atol=smallest)


@pytest.mark.parametrize("name", elementwise.COMMON)
def test_rows_that_importers_have_in_common(name: str) -> None:
    numpy_names = {
        "Erf": erf, "Erfc": erfc, "Pow": np.power, "Sub": np.subtract, "Atan2": np.arctan2, "Ceil": np.ceil,
        "Acos": np.arccos, "Acosh": np.arccosh, "Asin": np.arcsin, "Asinh": np.arcsinh, "Atan": np.arctan,
        "Atanh": np.arctanh, "Rsqrt": lambda x: 1 / np.sqrt(x),
    }  # fmt: skip
    reference = numpy_names.get(name) or getattr(np, name.lower())
    arguments = (np.abs(WITHIN), WITHIN[::-1]) if name in ("Pow", "Sub", "Atan2") else (WITHIN,)
    with np.errstate(all="ignore"):
        expected = of_doubles(reference)(*arguments)
    np.testing.assert_allclose(compute(elementwise.COMMON[name], *arguments), expected, rtol=4e-6, atol=1e-7)


def test_erf_inv_is_the_inverse_of_erf() -> None:
    inside = np.concatenate([WITHIN[1:-1], np.float32([1e-30, -1e-8, 0.99999, -0.999999])])
    np.testing.assert_allclose(erf(compute(elementwise.erf_inv, inside)), inside, rtol=2e-6)
    ends = np.array([-1, 1, 2, math.nan], np.float32)
    np.testing.assert_array_equal(compute(elementwise.erf_inv, ends), [-math.inf, math.inf, math.nan, math.nan])


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_division_has_the_sign_of_the_divisor(dtype: str) -> None:
    divisors = np.array([7, -7, 3, -3, 1, -1], dtype)
    numbers = np.array([8, -8, 9, -9, 2**20 + 1, -(2**20) - 1], dtype)
    a, b = np.array(list(itertools.product(numbers, divisors)), dtype).T.copy()
    np.testing.assert_array_equal(compute(elementwise.floor_mod, a, b), np.mod(a, b))
    np.testing.assert_array_equal(compute(elementwise.floor_divide, a, b), np.floor_divide(a, b))


def test_floats_become_the_nearest_integers_that_there_are() -> None:
    for dtype in (np.int8, np.uint8, np.int32, np.int64):
        ends = np.iinfo(dtype)
        numbers = np.array([-math.inf, -2e19, -1.5, 0.7, 100, math.nan, math.inf, 2e19], np.float32)
        expected = [ends.min, ends.min, max(-1, ends.min), 0, 100, 0, ends.max, ends.max]
        found = compute(lambda op, x, dtype=dtype: elementwise.saturating_cast(op, x, np.dtype(dtype)), numbers)
        assert found.dtype == dtype and found.tolist() == expected


REDUCTIONS = {
    "ReduceSum": np.sum, "ReduceProd": np.prod, "ReduceMax": np.max, "ReduceMin": np.min, "ReduceMean": np.mean,
}  # fmt: skip


@pytest.mark.parametrize(
    ("operator", "dtype"),
    [("ReduceMean", "float32"), *itertools.product([*REDUCTIONS][:4], ["float32", "int32", "int16", "uint8"])],
)
def test_reductions(operator: str, dtype: str) -> None:
    x = np.arange(24).reshape(2, 3, 4).astype(dtype) % 5
    for axes in ([1], [0, 2], [-1]):
        found = compute(lambda op, e, axes=axes: reduction.reduce(op, e, operator, axes), x)
        np.testing.assert_array_equal(found, REDUCTIONS[operator](x, axis=tuple(axes)).astype(dtype))
    kept = compute(lambda op, e: reduction.reduce(op, e, operator, [], True), x)
    np.testing.assert_array_equal(kept, x)


def test_reductions_of_booleans_and_indices() -> None:
    x = np.array([[True, False, True], [True, True, True]])
    np.testing.assert_array_equal(compute(lambda op, e: reduction.reduce(op, e, "ReduceMin", [1]), x), x.all(1))
    np.testing.assert_array_equal(compute(lambda op, e: reduction.reduce(op, e, "ReduceMax", [0]), x), x.any(0))
    y = np.array([[3, 9, 9], [-5, -7, -5]], np.int16)
    found = compute(lambda op, e: reduction.arg_reduce(op, e, "ArgMax", 1, np.int32), y)
    assert found.dtype == np.int32 and found.tolist() == [1, 0]
    both = compute(reduction.where, x, ~x, x)
    np.testing.assert_array_equal(both, np.where(x, ~x, x))


@pytest.mark.parametrize("reverse_", [False, True])
def test_cumulative_reductions(reverse_: bool) -> None:
    x = np.array([[1, -2, 3, 4], [0.5, 2, -1, 1e30]], np.float32)
    ordered = x[:, ::-1] if reverse_ else x
    cases = {
        "product": (lambda op, a, b: a * b, 1.0, np.cumprod(ordered, 1)),
        "maximum": (lambda op, a, b: op.Max(a, b), -math.inf, np.maximum.accumulate(ordered, 1)),
        "log_sum_exp": (reduction.log_sum_exp, np.finfo("f4").min, np.logaddexp.accumulate(ordered, 1)),
    }
    for combine, start, expected in cases.values():
        first = np.full(2, start, np.float32)
        found = compute(
            lambda op, e, combine=combine, first=first: reduction.cumulative(
                op, e, op.constant(first), 1, combine, ir.Shape([2]), reverse_
            ),
            x,
        )
        np.testing.assert_allclose(found[:, ::-1] if reverse_ else found, expected, rtol=1e-6)
    total = compute(lambda op, e: reduction.cumulative_sum(op, e, op.constant(np.int64(1)), reverse=reverse_), x)
    np.testing.assert_allclose(total[:, ::-1] if reverse_ else total, np.cumsum(ordered, 1), rtol=1e-6)


def test_axes() -> None:
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    np.testing.assert_array_equal(compute(lambda op, e: permute(op, permute(op, e, [2, 0, 1]), [1, 2, 0]), x), x)
    np.testing.assert_array_equal(compute(lambda op, e: reverse(op, e, [0, 2]), x), x[::-1, :, ::-1])
    np.testing.assert_array_equal(compute(lambda op, e: stack(op, unstack(op, e, 3, 1), 1), x), x)
