"""Primitives of JAX that move windows: indexing, products, convolutions, pools, and the way back through them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from marks import needs
from representatives import examples

pytestmark = needs("jax")
jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402
from jaxpr_agreement import agrees, numbers, operators_of  # noqa: E402

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
    "counts": lambda x, i: (jnp.bincount(i, length=4), jax.ops.segment_sum(x[i], i, 5),
        jnp.searchsorted(jnp.sort(x[0, 0]), x[1, 1])),
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
@examples(3)
def test_any_place_along_any_axis(case: tuple[list[int], list[int], int, str]) -> None:
    shape, places, axis, mode = case
    agrees(lambda x, i: jnp.take(x, i, axis, mode=mode), numbers(*shape), np.array(places, np.int32), batch=None)
    write = lambda x, i: jnp.moveaxis(x, axis, 0).at[i].add(1, mode="drop")
    agrees(write, numbers(*shape), np.array(places, np.int32), batch=None)


# ---- products and convolutions ---------------------------------------------------------------------------------------

EPS = float(np.finfo(np.float32).eps)


@given(st.data())
@examples(5)
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
    product = lambda a, b: lax.dot_general(a, b, dimensions)
    sizes = lambda a, b: product(np.abs(a), np.abs(b))
    agrees(product, a, b, batch=None, tolerance=4 * EPS, sizes=sizes)


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


def test_a_vector_times_a_matrix_that_was_transposed() -> None:
    agrees(lambda a, v: (a.T @ v, v @ a, a @ a[1]), numbers(3, 3), numbers(3), batch=None)


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


@pytest.mark.slow("dilated-NCHW", "grouped-CHWN", "same-NCHW", "spread-NCHW", "strided-CHWN")
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
    "far around": lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 1, 1, 1), [(0, 0), (2, 3),
        (0, 1), (0, 0)]),
    "spread": lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 1, 1, 1), "VALID", base_dilation=(1,
        2, 1, 1)),
    "nothing": lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 1, 1, 1), (1, 1, 1, 1), "VALID"),
}  # fmt: skip


@pytest.mark.parametrize("name", POOLS)
def test_pools(name: str) -> None:
    agrees(POOLS[name], numbers(2, 6, 5, 3), tolerance=1e-5)


def test_a_dilated_pool() -> None:
    dilated = functools.partial(lax.reduce_window, window_dilation=(1, 2, 2, 1))
    pool = lambda x: dilated(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 1, 1, 1), "VALID")
    agrees(pool, numbers(2, 6, 5, 3))


@given(st.data())
@examples(2)
def test_any_convolution(data: st.DataObject) -> None:
    """With its way back to both inputs."""
    pair = lambda low, high: tuple(data.draw(st.integers(low, high)) for _ in range(2))
    groups = data.draw(st.sampled_from([1, 2]))
    options = {
        "window_strides": pair(1, 2),
        "padding": [(data.draw(st.integers(-1, 2)), data.draw(st.integers(-1, 2))) for _ in range(2)],
        "lhs_dilation": pair(1, 2),
        "rhs_dilation": pair(1, 2),
        "feature_group_count": groups,
        "dimension_numbers": ("NHWC", "HWIO", "NHWC"),
    }
    x, kernel = numbers(2, 6, 7, 2), numbers(*pair(1, 2), 2 // groups, 4)
    both = functools.partial(jax.value_and_grad, argnums=(0, 1))
    convolved = lambda x, kernel: lax.conv_general_dilated(x, kernel, **options)
    loss = lambda x, kernel: jnp.sin(convolved(x, kernel)).sum()

    def sizes(x: np.ndarray, kernel: np.ndarray) -> Any:
        """The terms, of which none is larger than 1, with the errors of what the sine and its slope are taken of."""
        terms = lambda y: 1 + y + y * y / 2
        return both(lambda x, kernel: terms(convolved(x, kernel)).sum())(np.abs(x), np.abs(kernel))

    agrees(both(loss), x, kernel, engines=["onnxruntime"], tolerance=4 * EPS, batch=None, sizes=sizes)


# ---- derivatives -----------------------------------------------------------------------------------------------------

PLACES = np.array([0, 2])
POOL = functools.partial(lax.reduce_window, window_dimensions=(2, 2), window_strides=(2, 1), padding="SAME")
DERIVATIVES: dict[str, Callable[[Any], Any]] = {
    "sums": lambda x: (x.cumsum(1), x.cumprod(1), lax.cummax(x, 1), lax.cumlogsumexp(x, 1)),
    "reductions": lambda x: (x.prod(1), x.max(1), jnp.linalg.norm(x, axis=1), x.std(0)),
    "orders": lambda x: (jnp.sort(x, 1), lax.top_k(x, 2)[0], jnp.quantile(x, 0.3, axis=1)),
    "reads": lambda x: (jnp.take(x, PLACES, 1), x[PLACES, PLACES + 1], lax.dynamic_slice(x, (1, 2), (2, 2))),
    "writes": lambda x: (x.at[PLACES].set(x[1]), x.at[PLACES].multiply(2), lax.dynamic_update_slice(x, x[:1, :2],
        (1, 2))),
    "movement": lambda x: (lax.pad(x, 1.0, ((1, 2, 1), (-1, 0, 0))), x[::-1, ::2], jnp.repeat(x, 2, 0),
        x.T.reshape(-1)),
    "pools": lambda x: (POOL(x, -jnp.inf, lax.max), POOL(x, jnp.inf, lax.min), POOL(x, 0.0, lax.add)),
    "control": lambda x: (lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x), lax.fori_loop(0, 3, lambda i,
        c: c * c * i + x, x)),
    "losses": lambda x: (optax_losses(x),),
}  # fmt: skip


def optax_losses(x: Any) -> Any:
    optax = pytest.importorskip("optax")
    labels = jnp.arange(x.shape[0]) % x.shape[1]
    smooth = optax.smooth_labels(jax.nn.one_hot(labels, x.shape[1]), 0.1)
    return (
        optax.softmax_cross_entropy_with_integer_labels(x, labels).mean()
        + optax.softmax_cross_entropy(x, smooth).mean()
        + optax.sigmoid_binary_cross_entropy(x * 50, (x > 0).astype(float)).mean()
        + optax.huber_loss(x, 0.5).mean()
    )


@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives(name: str) -> None:
    def loss(x: Any) -> Any:
        return sum(jnp.sin(part).sum() for part in DERIVATIVES[name](x))

    agrees(jax.value_and_grad(loss), numbers(4, 5), tolerance=1e-5, batch=None)


def test_second_derivatives() -> None:
    agrees(jax.hessian(lambda x: jnp.tanh(x @ x.T).sum()), numbers(2, 3), batch=None, tolerance=1e-5)
    gradient = jax.grad(lambda x: jnp.sin(POOL(x, -jnp.inf, lax.max)).sum())
    agrees(lambda x: jax.jvp(gradient, (x,), (x * x,)), numbers(4, 5), batch=None, tolerance=1e-5)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_derivatives_of_convolutions(name: str) -> None:
    options = {"window_strides": (1, 1), **CONVOLUTIONS[name]}
    inputs = numbers(4, 7, 6, 4), numbers(3, 2, 4 // options.get("feature_group_count", 1), 6)
    convolve = functools.partial(lax.conv_general_dilated, dimension_numbers=LAYOUTS[0], **options)
    both = jax.grad(lambda x, kernel: jnp.sin(convolve(x, kernel)).sum(), argnums=(0, 1))
    agrees(both, *inputs, batch=None, tolerance=2e-5)


# ---- larger functions ------------------------------------------------------------------------------------------------

FUNCTIONS: dict[str, tuple[Callable[..., Any], np.ndarray]] = {
    "attention": (lambda q: jax.nn.dot_product_attention(q, q, q, is_causal=True), numbers(2, 5, 2, 4)),
    "resize": (lambda x: jax.image.resize(x, (x.shape[0], 9, 4, 3), "bilinear"), numbers(2, 6, 6, 3)),
    "statistics": (lambda x: (jnp.cov(x), jnp.quantile(x, 0.3, axis=1), jnp.histogram(x, 4, (-2, 2))[0]),
        numbers(3, 5)),
    "interpolation": (lambda x: jnp.interp(x, jnp.arange(4.0), jnp.arange(4.0) ** 2), numbers(3, 5)),
    "products": (lambda x: (jnp.kron(x, x), jnp.convolve(x[0], x[1]), jnp.polyval(x[0], x[1])), numbers(3, 5)),
    "mapped scan": (lambda x: jax.vmap(lambda row: lax.scan(lambda c, v: (c * v, c + v), 1.0, row))(x), numbers(3, 5)),
    "mapped condition": (lambda x: jax.vmap(lambda row: lax.cond(row.sum() > 0, jnp.sin, jnp.cos, row))(x),
        numbers(3, 5)),
    "mapped loop": (lambda x: jax.vmap(lambda v: lax.while_loop(lambda c: c < 9, lambda c: c * 2, v))(abs(x)),
        numbers(5)),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str) -> None:
    function, x = FUNCTIONS[name]
    agrees(function, x, tolerance=1e-5, batch=None)
