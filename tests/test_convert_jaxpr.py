"""Functions of JAX as models: what JAX computes, ONNX Runtime and the numpy engine compute from the model too."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from conftest import needs
from hypothesis import given, settings
from hypothesis import strategies as st

import onward
from onward.errors import UnsupportedError
from onward.model import Model
from onward.run import function as function_of

pytestmark = needs("jax")
jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402

from onward.convert.jax.jaxpr import export  # noqa: E402

BOTH = ("numpy", "onnxruntime")


def numbers(*shape: int, dtype: Any = np.float32, seed: int = 0, low: float = -2, high: float = 2) -> np.ndarray:
    """Numbers of any type, integers from `low` to `high` too."""
    random = np.random.default_rng([seed, *shape])
    if np.dtype(dtype) == bool:
        return random.random(shape) < 0.5
    if np.dtype(dtype).kind in "iu":
        return random.integers(int(low), int(high), shape, endpoint=True).astype(dtype)
    return random.uniform(low, high, shape).astype(dtype)


def results(model: Model, inputs: Sequence[Any], engine: str) -> list[np.ndarray]:
    fed = {value.name: np.asarray(x) for value, x in zip(model.inputs, inputs, strict=True)}
    computed = function_of(model, engine=engine)(fed)
    return [np.asarray(computed[value.name]) for value in model.outputs]


def same(found: Sequence[np.ndarray], expected: Any, tolerance: float = 2e-6) -> None:
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(expected)]
    assert len(found) == len(leaves)
    for ours, theirs in zip(found, leaves, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        wide = [x if x.dtype.kind in "biuf" else x.astype(np.float32) for x in (ours, theirs)]
        np.testing.assert_allclose(*wide, rtol=tolerance, atol=tolerance)


def agrees(
    function: Callable[..., Any],
    *inputs: Any,
    engines: Sequence[str] = BOTH,
    tolerance: float = 2e-6,
    batch: str | None = "batch",
) -> Model:
    """The model of a function without parameters, which computes the same, and the same of twice as large a batch."""
    model = export(lambda _, *xs: function(*xs), {}, *inputs, batch=batch)
    assert onward.check(model) == []
    cases = [inputs]
    free = [x.shape is not None and len(x.shape) > 0 and not isinstance(x.shape[0], int) for x in model.inputs]
    if any(free):
        cases.append([np.concatenate([x, x]) if of_batch else x for x, of_batch in zip(inputs, free, strict=True)])
    for case in cases:
        expected = jax.jit(function)(*case)
        for engine in engines:
            same(results(model, case, engine), expected, tolerance)
    return model


def operators_of(model: Model) -> set[str]:
    return {node.op_type for node in model.graph.all_nodes()}


# ---- primitives ------------------------------------------------------------------------------------------------------

FLOATS = {
    "arithmetic": lambda x: (x + 1, x - x * x, 1 / (x + 5), -x, abs(x), x**2, (x + 3) ** 0.5, x**3, (x + 3) ** -2),
    "powers": lambda x: (lax.integer_pow(x, 5), lax.integer_pow(x, 0), lax.integer_pow(x, -3), lax.square(x)),
    "remainder": lambda x: (lax.rem(x, 0.7), jnp.mod(x, 0.7), jnp.floor_divide(x, 0.7)),
    "roots": lambda x: (jnp.sqrt(abs(x)), lax.rsqrt(abs(x) + 1), jnp.cbrt(x)),
    "rounding": lambda x: (jnp.floor(x), jnp.ceil(x), jnp.round(x), jnp.sign(x), lax.round(x)),
    "exponentials": lambda x: (jnp.exp(x), jnp.exp2(x), jnp.log(abs(x) + 0.1), jnp.expm1(x), jnp.log1p(abs(x))),
    "trigonometry": lambda x: (jnp.sin(x), jnp.cos(x), jnp.tan(x / 2), jnp.arctan(x), jnp.arctan2(x, 1 - x)),
    "inverse": lambda x: (jnp.arcsin(x / 2), jnp.arccos(x / 2), jnp.arctanh(x / 3), jnp.arcsinh(x), jnp.arccosh(x + 4)),
    "hyperbolic": lambda x: (jnp.sinh(x), jnp.cosh(x), jnp.tanh(x)),
    "errors": lambda x: (lax.erf(x), lax.erfc(x), lax.erf_inv(x / 2.5)),
    "activations": lambda x: (jax.nn.relu(x), jax.nn.gelu(x), jax.nn.silu(x), jax.nn.softplus(x), jax.nn.elu(x)),
    "comparisons": lambda x: (x > 0, x >= 1, x < 0.5, x <= -1, x == x, x != x, jnp.isfinite(1 / jnp.floor(x))),
    "choices": lambda x: (jnp.where(x > 0, x, 2 * x), jnp.clip(x, -1, 1), jnp.maximum(x, 0.3), jnp.minimum(x, 0.1)),
    "softmax": lambda x: (jax.nn.softmax(x), jax.nn.log_softmax(x, 0), jax.nn.logsumexp(x, axis=1)),
    "reductions": lambda x: (x.sum(), x.sum(1), x.max(0), x.min((0, 1)), x.prod(-1), x.mean(), x.var(0), x.std(1)),
    "positions": lambda x: (x.argmax(1), x.argmin(0), jnp.argmax(x)),
    "cumulative": lambda x: (x.cumsum(1), x.cumprod(1), lax.cummax(x, 1), lax.cummin(x, 0, reverse=True)),
    "cumulative logarithms": lambda x: (lax.cumlogsumexp(x, 1), lax.cumsum(x, 0, reverse=True)),
    "movement": lambda x: (x.T, x.reshape(-1), x[None, :, None], jnp.squeeze(x[:, :1], 1), jnp.tile(x, (2, 1))),
    "parts": lambda x: (x[1:], x[:, ::2], x[::-1], x[:, -1], x[1, 2], jnp.split(x, 2, axis=1), jnp.roll(x, 1, 1)),
    "stacks": lambda x: (jnp.stack([x, 2 * x]), jnp.concatenate([x, x], 1), jnp.hstack([x, x]), jnp.repeat(x, 2, 1)),
    "padding": lambda x: (jnp.pad(x, 1), lax.pad(x, 7.0, [(1, 0, 2), (-1, 2, 1)]), lax.pad(x, 0.0, [(0, -1, 0), (0, 0, 0)])),
    "triangles": lambda x: (jnp.tril(x), jnp.triu(x, 1), jnp.eye(4) @ x[:1].T, jnp.diag(x[0])),
    "orders": lambda x: (jnp.sort(x), jnp.argsort(x, 0), jnp.sort(x, descending=True), lax.top_k(x, 2), jnp.median(x)),
    "products": lambda x: (x @ x.T, x.T @ x, jnp.einsum("ij,kj->ik", x, x), jnp.dot(x[0], x[1]), jnp.outer(x[0], x[1])),
    "ranges": lambda x: (jnp.arange(x.shape[0]), jnp.linspace(0, 1, 5) + x[0, 0], jnp.zeros_like(x), jnp.full((2, 3), x[0, 0])),
    "types": lambda x: (x.astype(jnp.int32), x.astype(bool), x.astype(jnp.float16), x.astype(jnp.bfloat16).astype(jnp.float32)),
    "precision": lambda x: lax.reduce_precision(x, 8, 7),
    "marks": lambda x: (lax.stop_gradient(x), lax.optimization_barrier(x), jax.checkpoint(jnp.sin)(x)),
}  # fmt: skip


@pytest.mark.parametrize("name", FLOATS)
def test_floats(name: str) -> None:
    agrees(FLOATS[name], numbers(3, 4), tolerance=1e-5)


INTEGERS = {
    "arithmetic": lambda x: (x + 1, x * x - x, -x, abs(x), lax.div(x, 2 * x + 1), lax.rem(x, x * 2 + 1), jnp.sign(x)),
    "python's division": lambda x: (x // 3, x % 3, x / 2),
    "bits": lambda x: (x & 3, x | 4, x ^ 5, ~x, x << 2, x >> 1, lax.shift_right_logical(x, x.dtype.type(1))),
    "wide shifts": lambda x: (lax.shift_left(x, x.dtype.type(40)), lax.population_count(x)),
    "choices": lambda x: (jnp.where(x > 1, x, -x), jnp.clip(x, 0, 2), jnp.maximum(x, 1), lax.select_n(x % 2 == 0, x, x)),
    "reductions": lambda x: (x.sum(1), x.max(0), x.min(), x.prod(0), jnp.any(x > 1), jnp.all(x > 1, 1), x.cumsum(0)),
    "orders": lambda x: (jnp.sort(x), jnp.argsort(-x, 1), x.argmax(1), lax.top_k(x, 1)),
    "products": lambda x: (x @ x.T, x.astype(jnp.float32)),
    "windows": lambda x: lax.reduce_window(x, x.dtype.type(0), lax.add, (2, 2), (1, 1), "VALID"),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["int32", "int16", "uint8", "uint32"])
@pytest.mark.parametrize("name", INTEGERS)
def test_integers(name: str, dtype: str) -> None:
    agrees(INTEGERS[name], numbers(3, 4, dtype=dtype, low=0 if dtype[0] == "u" else -5, high=6), tolerance=1e-5)


def test_truth_values() -> None:
    def logic(a: Any, b: Any) -> Any:
        every = jnp.all(a, 1), jnp.any(b, 0), a.sum(), lax.reduce_xor(a, (0,)), jnp.sort(a, 1)
        return a & b, a | b, a ^ b, ~a, jnp.where(a, b, ~b), a < b, a == b, a * b, every

    agrees(logic, numbers(4, 3, dtype=bool), numbers(4, 3, dtype=bool, seed=1))


def test_a_choice_of_many() -> None:
    agrees(lambda i, x: lax.select_n(i, x, 2 * x, 3 * x), numbers(5, dtype=np.int32, low=0, high=2), numbers(5))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_numbers_read_as_bits_and_back(dtype: str) -> None:
    width = jnp.dtype(dtype).itemsize * 8
    wide = {"float32": 1e-38, "float16": 6e-6, "bfloat16": 1e-38}[dtype]  # some are below the smallest normal number
    x = np.array([0, -0.0, 1, -1.5, 3.1415, wide, -wide / 3, np.inf, -np.inf, 65504], jnp.dtype(dtype))
    as_bits = lambda x: lax.bitcast_convert_type(x.astype(dtype), f"uint{width}").astype(np.uint32)
    as_floats = lambda b: lax.bitcast_convert_type(b.astype(f"uint{width}"), dtype).astype(np.float32)
    with jax.disable_jit():
        bits = np.asarray(as_bits(jnp.asarray(x)))
    model = export(lambda _, x: as_bits(x), {}, jnp.asarray(x))
    np.testing.assert_array_equal(results(model, [x], "numpy")[0], bits)
    model = export(lambda _, b: as_floats(b), {}, bits)
    for engine in BOTH if dtype == "float32" else ("numpy",):
        np.testing.assert_array_equal(results(model, [bits], engine)[0], x.astype(np.float32))


def test_near_zero_nothing_is_lost() -> None:
    x = np.array([1e-7, -3e-6, 1e-4, 1e-2, 0.4, 0.6, 30, 1e4], np.float32)
    for function in (jnp.log1p, jnp.expm1):
        model = export(lambda _, x, f=function: f(x), {}, x)
        for engine in BOTH:
            np.testing.assert_allclose(results(model, [x], engine)[0], function(x), rtol=1e-6)


# ---- types -----------------------------------------------------------------------------------------------------------


def test_types_stay_as_they_are() -> None:
    types = [np.bool_, np.int8, np.uint8, np.int16, np.int32, np.uint32, np.float16, jnp.bfloat16, np.float32]
    inputs = [numbers(2, 3, dtype=dtype, low=0, high=3) for dtype in types]
    model = export(lambda _, *xs: [x[:, ::-1] for x in xs], {}, *inputs)
    assert [value.dtype.numpy() for value in model.inputs] == [np.dtype(dtype) for dtype in types]
    same(results(model, inputs, "numpy"), [x[:, ::-1] for x in inputs])


def test_64_bits_where_jax_has_them() -> None:
    with jax.enable_x64(True):
        agrees(
            lambda x, i: (jnp.tanh(x) * i, x.mean(0), i.sum()),
            numbers(3, 4, dtype=np.float64),
            numbers(3, 4, dtype=np.int64),
        )
    model = export(lambda _, x: x.mean(), {}, numbers(3, 4))
    assert model.outputs[0].dtype.numpy() == np.float32  # the batch size, which has 64 bits, does not make it double


def test_bfloat16() -> None:
    x = numbers(3, 4).astype(jnp.bfloat16)
    agrees(lambda x: (x @ x.T, jax.nn.relu(x) + 1, x.sum(1)), x, engines=["numpy"], tolerance=2e-2)


# ---- indexing --------------------------------------------------------------------------------------------------------

AT = {
    "rows": lambda x, i: x[i],
    "columns": lambda x, i: x[:, i],
    "pairs": lambda x, i: x[i, i[::-1]],
    "one place": lambda x, i: (x[i[0]], x[i[1], i[2]]),
    "between": lambda x, i: x[i, :, None, i],
    "after rows": lambda x, i: x[1:, i],
    "take": lambda x, i: (jnp.take(x, i, 0), jnp.take(x, i, 1, mode="clip"), jnp.take(x, i + 3, 0, mode="fill")),
    "filled": lambda x, i: (x.at[i + 2].get(mode="fill", fill_value=-1), x.at[i * 3].get(mode="clip")),
    "along": lambda x, i: (jnp.take_along_axis(x, i[None, :, None], 1), jnp.take_along_axis(x, i[:, None, None], 0)),
    "two axes": lambda x, i: x[jnp.stack([i, i])],
    "windows": lambda x, i: lax.dynamic_slice(x, (i[0], i[1], 0), (2, 2, 3)),
    "window outside": lambda x, i: lax.dynamic_slice_in_dim(x, i[0] + 3, 3),
    "written window": lambda x, i: lax.dynamic_update_slice(x, jnp.ones((2, 1, 3)), (i[0], i[1], 0)),
    "written row": lambda x, i: lax.dynamic_update_index_in_dim(x, jnp.ones((4, 3)), i[2], 0),
    "set": lambda x, i: (x.at[i[0]].set(1), x.at[:, 1].set(2), x.at[i[:1], i[1:2]].set(3), x.at[1:3, ::2].set(4)),
    "set outside": lambda x, i: (x.at[i + 4].set(jnp.ones((3, 4, 3))), x.at[i[:1] + 9, i[:1]].set(5)),
    "add": lambda x, i: (x.at[i].add(1), x.at[:, i].add(2), x.at[i, i].add(3), x.at[i + 4].add(7)),
    "multiply": lambda x, i: (x.at[i].multiply(2), x.at[i].min(0), x.at[i].max(0.5), x.at[i + 4].max(3)),
    "one hot": lambda x, i: (jax.nn.one_hot(i, 5), jax.nn.one_hot(i, 3, axis=0)),
    "counts": lambda x, i: (jnp.bincount(i, length=4), jax.ops.segment_sum(x[i], i, 5), jnp.searchsorted(jnp.sort(x[0, 0]), x[1, 1])),
}  # fmt: skip


@pytest.mark.parametrize("name", AT)
def test_indexing(name: str) -> None:
    agrees(AT[name], numbers(4, 4, 3), np.array([2, 0, 2], np.int32), batch=None)


def test_indexing_of_a_batch() -> None:
    x, i = numbers(5, 4, 3), numbers(5, dtype=np.int32, low=0, high=3)

    def read(x: Any, i: Any) -> Any:
        along = jnp.take_along_axis(x, i[:, None, None], 1)
        mapped = jax.vmap(lambda row, place: row[place])(x, i)
        return along, mapped, x[jnp.arange(x.shape[0]), i], x[:, 1], x.at[jnp.arange(x.shape[0]), i].add(1)

    agrees(read, x, i)
    agrees(lambda x, i: jax.vmap(lambda row, place: row.at[place].set(0))(x, i), x, i)
    agrees(lambda x, i: jax.vmap(lambda row, place: lax.dynamic_slice_in_dim(row, place, 2))(x, i), x, i)


@given(
    st.lists(st.integers(2, 4), min_size=1, max_size=3).flatmap(
        lambda shape: st.tuples(
            st.just(shape),
            st.lists(st.integers(-9, 9), min_size=1, max_size=4),
            st.integers(0, len(shape) - 1),
            st.sampled_from(["fill", "clip"]),
        )
    )
)
@settings(max_examples=25)
def test_any_place_along_any_axis(case: tuple[list[int], list[int], int, str]) -> None:
    shape, places, axis, mode = case
    agrees(lambda x, i: jnp.take(x, i, axis, mode=mode), numbers(*shape), np.array(places, np.int32), batch=None)
    write = lambda x, i: jnp.moveaxis(x, axis, 0).at[i].add(1, mode="drop")
    agrees(write, numbers(*shape), np.array(places, np.int32), batch=None)


# ---- products and convolutions ---------------------------------------------------------------------------------------


@given(st.data())
@settings(max_examples=40)
def test_any_product(data: st.DataObject) -> None:
    """Axes that are summed, shared or free, in any order on both sides."""
    kinds = data.draw(st.lists(st.sampled_from("sba"), max_size=4))
    left = data.draw(st.permutations([*enumerate(kinds)]))
    right = data.draw(st.permutations([*enumerate(kinds)]))
    size = lambda i: 2 + i
    sides = [[(i, k) for i, k in side if k != "a" or free] for side, free in ((left, True), (right, False))]
    sides[1] = data.draw(st.permutations([*sides[1], *((9 + n, "c") for n in range(data.draw(st.integers(0, 2))))]))
    axis = lambda side, kind: [
        next(p for p, (j, _) in enumerate(side) if j == i) for i, k in enumerate(kinds) if k == kind
    ]
    dimensions = tuple(tuple(tuple(axis(side, kind)) for side in sides) for kind in "sb")
    a, b = (numbers(*(size(i % 7) for i, _ in side)) for side in sides)
    agrees(lambda a, b: lax.dot_general(a, b, dimensions), a, b, batch=None, tolerance=1e-5)


def test_products_that_lie_well_are_no_einsum() -> None:
    x, w = numbers(2, 3, 4), numbers(4, 5)
    for function, inputs in {
        (lambda x, w: x @ w): (x, w),
        (lambda x, w: x @ w.T): (x, w.T.copy()),
        (lambda x, w: jnp.einsum("bij,bkj->bik", x, x) + w[0, 0]): (x, w),
    }.items():
        assert "MatMul" in operators_of(agrees(function, *inputs, tolerance=1e-5))
    flipped = agrees(
        lambda a, b: lax.dot_general(a, b, (((0,), (1,)), ((), ()))), numbers(4, 3), w.T.copy(), batch=None
    )
    assert "Gemm" in operators_of(flipped) and "Transpose" not in operators_of(flipped)


CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "same": {"padding": "SAME"},
    "strided": {"window_strides": (2, 1), "padding": "SAME"},
    "dilated": {"rhs_dilation": (2, 1), "padding": "VALID"},
    "spread": {"lhs_dilation": (2, 3), "padding": [(1, 2), (0, 1)]},
    "cut": {"padding": [(-1, 0), (2, -2)]},
    "grouped": {"feature_group_count": 2, "padding": "SAME"},
    "groups of examples": {"batch_group_count": 2, "padding": "VALID"},
}
LAYOUTS = [("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW"), ("CHWN", "IHWO", "HWNC")]


def laid_out(array: np.ndarray, old: str, new: str) -> np.ndarray:
    return np.ascontiguousarray(array.transpose([old.index(axis) for axis in new]))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda names: names[0])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name: str, layout: tuple[str, str, str]) -> None:
    options = {"window_strides": (1, 1), **CONVOLUTIONS[name]}
    x, kernel = numbers(4, 4, 7, 6), numbers(6, 4 // options.get("feature_group_count", 1), 3, 2)
    inputs = laid_out(x, "NCHW", layout[0]), laid_out(kernel, "OIHW", layout[1])
    batch = "batch" if layout[0][0] == "N" and name != "groups of examples" else None
    function = functools.partial(lax.conv_general_dilated, dimension_numbers=layout, **options)
    agrees(lambda x, kernel: function(x, kernel), *inputs, batch=batch, tolerance=1e-5)


@pytest.mark.parametrize("rank", [1, 3])
def test_convolutions_of_other_ranks(rank: int) -> None:
    x, kernel = numbers(2, 3, *(5,) * rank), numbers(4, 3, *(2,) * rank)
    agrees(lambda x, k: lax.conv(x, k, (2,) * rank, "SAME"), x, kernel, tolerance=1e-5, batch=None)


def test_transposed_convolution() -> None:
    x, kernel = numbers(2, 4, 4, 3), numbers(3, 3, 3, 5)
    agrees(lambda x, k: lax.conv_transpose(x, k, (2, 2), "SAME"), x, kernel, tolerance=1e-5)


POOLS: dict[str, Callable[[Any], Any]] = {
    "max": lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 3, 1), (1, 2, 1, 1), "SAME"),
    "min": lambda x: lax.reduce_window(x, jnp.inf, lax.min, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
    "sum": lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 3, 2, 1), (1, 1, 2, 1), "SAME"),
    "one axis": lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 1, 1), (1, 1, 1, 1), "SAME"),
    "three axes": lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 2), (1, 1, 1, 1), "VALID"),
    "far around": lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 1, 1, 1), [(0, 0), (2, 3), (0, 1), (0, 0)]),
    "spread": lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 1, 1, 1), "VALID", base_dilation=(1, 2, 1, 1)),
    "nothing": lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 1, 1, 1), (1, 1, 1, 1), "VALID"),
}  # fmt: skip


@pytest.mark.parametrize("name", POOLS)
def test_pools(name: str) -> None:
    agrees(POOLS[name], numbers(2, 6, 5, 3), tolerance=1e-5)


def test_a_dilated_pool() -> None:
    dilated = functools.partial(lax.reduce_window, window_dilation=(1, 2, 2, 1))
    pool = lambda x: dilated(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 1, 1, 1), "VALID")
    agrees(pool, numbers(2, 6, 5, 3))


# ---- control flow ----------------------------------------------------------------------------------------------------


def test_conditions() -> None:
    two = lambda x: lax.cond(x.sum() > 0, lambda x: (x * 2, x[0]), lambda x: (jnp.sin(x), x[1]), x)
    many = lambda i, x: lax.switch(i, [jnp.sin, jnp.cos, lambda x: x * x, lambda x: x], x)
    for seed in range(3):
        agrees(two, numbers(3, seed=seed) + seed - 1, batch=None)
    for i in (-1, 0, 1, 2, 3, 7):
        agrees(many, np.int32(i), numbers(3), batch=None)


def test_loops() -> None:
    def collatz(n: Any) -> Any:
        odd = lambda n: lax.cond(n % 2 == 0, lambda n: n // 2, lambda n: 3 * n + 1, n)
        return lax.while_loop(lambda c: c[0] != 1, lambda c: (odd(c[0]), c[1] + 1), (n, 0))

    agrees(collatz, np.int32(27))
    agrees(lambda x, n: lax.fori_loop(0, n, lambda i, c: c * 0.5 + i, x), numbers(3), np.int32(5), batch=None)
    agrees(lambda x: lax.fori_loop(2, 6, lambda i, c: c.at[i % 3].add(i), x), numbers(3), batch=None)
    scaled = lambda x, y: lax.while_loop(lambda c: c.sum() < y, lambda c: c * (1 + y), x)
    agrees(scaled, abs(numbers(3)), np.float32(9), batch=None)


@pytest.mark.parametrize("reverse", [False, True])
def test_scans(reverse: bool) -> None:
    def step(carry: Any, item: Any) -> Any:
        h, c = carry
        a, b = item
        c = c * 0.5 + a
        return (jnp.tanh(h + c), c), (h * b, c.sum())

    run = lambda h, a, b: lax.scan(step, (h, h * 2), (a, b), reverse=reverse)
    agrees(run, numbers(3), numbers(5, 3), numbers(5, 3), batch=None, tolerance=1e-5)
    agrees(lambda x: lax.scan(lambda c, _: (c * 2, c), x, None, length=4, reverse=reverse), numbers(3), batch=None)
    agrees(lambda xs: lax.map(lambda x: x.sum(), xs), numbers(5, 3))
    agrees(lambda xs: lax.associative_scan(jnp.add, xs, reverse=reverse), numbers(5, 3), batch=None)


# ---- random numbers --------------------------------------------------------------------------------------------------

DRAWS: dict[str, Callable[[Any], Any]] = {
    "bits": lambda key: [jax.random.bits(key, (5, 3), f"uint{width}") for width in (8, 16, 32)],
    "uniform": lambda key: jax.random.uniform(key, (7,), minval=-1, maxval=3),
    "normal": lambda key: jax.random.normal(key, (4, 5)),
    "bernoulli": lambda key: jax.random.bernoulli(key, 0.3, (20,)),
    "integers": lambda key: jax.random.randint(key, (9,), 0, 17),
    "permutation": lambda key: jax.random.permutation(key, 10),
    "categorical": lambda key: jax.random.categorical(key, jnp.arange(5.0), shape=(6,)),
    "truncated": lambda key: jax.random.truncated_normal(key, -1, 1, (6,)),
    "keys": lambda key: [jax.random.uniform(k, (3,)) for k in jax.random.split(jax.random.fold_in(key, 7), 3)],
    "mapped": lambda key: jax.vmap(lambda k: jax.random.normal(k, (2,)))(jax.random.split(key, 4)),
}


@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_are_those_of_jax(name: str) -> None:
    agrees(DRAWS[name], np.asarray(jax.random.PRNGKey(42)), batch=None, tolerance=1e-5)


def test_a_key_of_its_own_type_and_from_a_seed() -> None:
    key = jax.random.key(3)
    model = export(
        lambda state, x: jnp.where(jax.random.bernoulli(state["key"], 0.5, x.shape), x, 0), {"key": key}, numbers(8, 3)
    )
    x = numbers(11, 3)  # dropout of a batch of any size
    expected = jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0)
    assert [value.const_value.numpy().tolist() for value in model.graph.initializers.values()] == [[0, 3]]
    for engine in BOTH:
        same(results(model, [x], engine), expected)
    agrees(lambda seed: jax.random.uniform(jax.random.key(seed), (3,)), np.int32(12), batch=None)


def test_a_vector_times_a_matrix_that_was_transposed() -> None:
    agrees(lambda a, v: (a.T @ v, v @ a, a @ a[1]), numbers(3, 3), numbers(3), batch=None)
