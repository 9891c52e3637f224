"""Primitives of JAX as operators: of numbers, bits, control flow, random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from marks import needs

pytestmark = needs("jax")
jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from extreme_numbers import NUMBERS, assert_equal_everywhere, pairs  # noqa: E402
from jax import lax  # noqa: E402
from jaxpr_agreement import BOTH, agrees, numbers, operators_of, results, same  # noqa: E402
from representatives import chosen  # noqa: E402

from onward.frameworks.jax.jaxpr import export  # noqa: E402

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
    "padding": lambda x: (jnp.pad(x, 1), lax.pad(x, 7.0, [(1, 0, 2), (-1, 2, 1)]), lax.pad(x, 0.0, [(0, -1, 0), (0,
        0, 0)])),
    "triangles": lambda x: (jnp.tril(x), jnp.triu(x, 1), jnp.eye(4) @ x[:1].T, jnp.diag(x[0])),
    "orders": lambda x: (jnp.sort(x), jnp.argsort(x, 0), jnp.sort(x, descending=True), lax.top_k(x, 2), jnp.median(x)),
    "products": lambda x: (x @ x.T, x.T @ x, jnp.einsum("ij,kj->ik", x, x), jnp.dot(x[0], x[1]), jnp.outer(x[0], x[1])),
    "ranges": lambda x: (jnp.arange(x.shape[0]), jnp.linspace(0, 1, 5) + x[0, 0], jnp.zeros_like(x), jnp.full((2,
        3), x[0, 0])),
    "types": lambda x: (x.astype(jnp.int32), x.astype(bool), x.astype(jnp.float16),
        x.astype(jnp.bfloat16).astype(jnp.float32)),
    "precision": lambda x: lax.reduce_precision(x, 8, 7),
    "named axes": lambda x: jax.vmap(lambda row: (row - lax.psum(row, "rows"), lax.pmax(row, "rows"),
        lax.pmin(row, "rows")), axis_name="rows")(x),
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
    "choices": lambda x: (jnp.where(x > 1, x, -x), jnp.clip(x, 0, 2), jnp.maximum(x, 1), lax.select_n(x % 2 == 0,
        x, x)),
    "reductions": lambda x: (x.sum(1), x.max(0), x.min(), x.prod(0), jnp.any(x > 1), jnp.all(x > 1, 1), x.cumsum(0)),
    "orders": lambda x: (jnp.sort(x), jnp.argsort(-x, 1), x.argmax(1), lax.top_k(x, 1)),
    "products": lambda x: (x @ x.T, x.astype(jnp.float32)),
    "windows": lambda x: lax.reduce_window(x, x.dtype.type(0), lax.add, (2, 2), (1, 1), "VALID"),
}  # fmt: skip


@pytest.mark.parametrize("dtype", chosen(["int32", "int16", "uint8", "uint32"], ["int32", "uint8"]))
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


ONE = (
    "abs arccos arccosh arcsin arcsinh arctan arctanh cbrt ceil cos cosh exp exp2 expm1 floor isfinite log log10 log1p "
    "reciprocal rint sign signbit sin sinh sqrt square tan tanh"
)
TWO = "arctan2 copysign divide floor_divide fmod heaviside hypot logaddexp maximum minimum mod nextafter power"
EXTREMES: dict[str, tuple[Callable[..., Any], ...]] = {
    "one": (*(getattr(jnp, name) for name in ONE.split()), lax.erf, lax.erfc, lax.rsqrt, lax.round),
    "one, of several": (jax.nn.log_sigmoid, jax.nn.softplus, jax.scipy.special.log_ndtr, jax.scipy.special.ndtr),
    "two": (*(getattr(jnp, name) for name in TWO.split()), jax.scipy.special.xlogy, jax.scipy.special.xlog1py),
    "integers of one": (lambda x: x.astype(np.int32), lambda x: x.astype(np.int8), lambda x: x.astype(np.uint32)),
}


@pytest.mark.parametrize("kind", EXTREMES)
def test_functions_at_extreme_arguments(kind: str) -> None:
    """Element by element, relative to each: absolute tolerances hide what is lost near 0."""
    arguments = pairs() if kind == "two" else (NUMBERS,)
    functions = EXTREMES[kind]
    model = export(lambda _, *xs: [f(*xs) for f in functions], {}, *arguments, batch=None)
    expected = jax.jit(lambda *xs: [f(*xs) for f in functions])(*arguments)
    for engine in BOTH:
        for i, found in enumerate(results(model, arguments, engine)):
            name = getattr(functions[i], "__name__", str(i))
            # exp(-x * x) rounds x * x, which is some 80 where erfc ends
            assert_equal_everywhere(found, expected[i], arguments, f"{name} on {engine}", rtol=2e-5)


def test_division_of_integers_by_zero() -> None:
    a, b = np.array([7, -7, 0, 5], np.int32), np.array([0, 0, 0, -2], np.int32)
    agrees(lambda a, b: (lax.div(a, b), lax.rem(a, b), jnp.gcd(a, b)), a, b)


def test_a_gelu_is_the_operator() -> None:
    x = numbers(3, 4, low=-4, high=4)
    model = agrees(lambda x: jax.nn.gelu(x, approximate=False), x)
    assert operators_of(model) == {"Gelu"}
    assert "Gelu" not in operators_of(agrees(lambda x: (0.5 * x) * lax.erfc(x), x))


# ---- types -----------------------------------------------------------------------------------------------------------


def test_types_stay_as_they_are() -> None:
    types = [np.bool_, np.int8, np.uint8, np.int16, np.int32, np.uint32, np.float16, jnp.bfloat16, np.float32]
    inputs = [numbers(2, 3, dtype=dtype, low=0, high=3) for dtype in types]
    model = export(lambda _, *xs: [x[:, ::-1] for x in xs], {}, *inputs)
    assert [value.dtype.numpy() for value in model.inputs] == [np.dtype(dtype) for dtype in types]
    same(results(model, inputs, "numpy"), [x[:, ::-1] for x in inputs])


WIDE: dict[str, Callable[..., Any]] = {
    "arithmetic": lambda x, i: (jnp.tanh(x) * i, x.mean(0), i.sum(), jnp.log1p(x * x), jnp.expm1(x)),
    "indexing": lambda x, i: (x[i[0] % 3], x.at[i[0] % 3].add(1), jnp.argsort(x, 0), lax.top_k(x, 2)),
    "windows": lambda x, i: lax.reduce_window(x, 0.0, lax.add, (2, 2), (1, 1), "SAME"),
    "convolutions": lambda x, i: lax.conv(x[None, None], i[None, None, :2, :2].astype(float), (1, 1), "SAME"),
    "random": lambda x, i: (jax.random.uniform(jax.random.key(i[0, 0] + 2**40), (3,)),
        jax.random.bits(jax.random.key(i[0, 1]), (3,), "uint64")),
}  # fmt: skip


@pytest.mark.parametrize("name", WIDE)
def test_64_bits_where_jax_has_them(name: str) -> None:
    with jax.enable_x64(True):
        inputs = numbers(3, 4, dtype=np.float64), numbers(3, 4, dtype=np.int64)
        agrees(WIDE[name], *inputs, engines=["numpy"], tolerance=1e-12, batch=None)


def test_sizes_have_64_bits_and_make_nothing_wide() -> None:
    model = export(lambda _, x: (x.mean(), x.shape[0] * x.sum()), {}, numbers(3, 4))
    assert [value.dtype.numpy() for value in model.outputs] == [np.float32, np.float32]
    wide = export(lambda params, x: x * params, np.float64(2), numbers(3, 4).astype(np.float64))
    assert {value.dtype.numpy() for value in (*wide.inputs, *wide.initializers(), *wide.outputs)} == {
        np.dtype(np.float32)
    }


def test_bfloat16() -> None:
    x = numbers(3, 4).astype(jnp.bfloat16)
    agrees(lambda x: (x @ x.T, jax.nn.relu(x) + 1, x.sum(1)), x, engines=["numpy"], tolerance=2e-2)


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


@pytest.mark.slow("mapped")
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
