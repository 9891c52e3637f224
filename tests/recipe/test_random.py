"""The generator in the graph: JAX's bits, on every opset, on two engines; distributions that are what they say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from built_graphs import OPSETS, Graph
from marks import needs
from scipy import special, stats

from onward.build import Builder
from onward.errors import RecipeError
from onward.recipe import random

FLOAT, DOUBLE = ir.DataType.FLOAT, ir.DataType.DOUBLE
SEEDS = [0, 1, 42, 2**31, 2**32 - 1]
SHAPES = [(), (1,), (0,), (3, 0, 2), (7,), (5, 3), (2, 3, 4), (100_001,)]


def drawn(draw: Callable[..., Any], *arguments: Any, opset: int = 21) -> Graph:
    """A graph (key, shape) -> draw(op, key, shape, *arguments)."""
    body = lambda op, key, shape: draw(op, key, shape, *arguments)
    return Graph(body, random.new_key(0), np.array([2, 3]), opset=opset)


def dims(*shape: int) -> np.ndarray:
    return np.array(shape, np.int64)


@pytest.fixture(scope="module")
def bits_and_uniform() -> Graph:
    return drawn(lambda op, key, shape: (random.random_bits(op, key, shape), random.uniform(op, key, shape)))


# ---- keys and bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("opset", OPSETS)
def test_cipher_gives_the_published_answers(opset: int) -> None:
    key, counter = np.zeros(2, np.uint32), np.zeros(1, np.uint32)
    cipher = Graph(
        lambda op, *inputs: _uint32(op.call(random.threefry2x32, *inputs)), key, counter, counter, opset=opset
    )
    for key_hex, counter_hex, answer in [  # Random123, kat_vectors: threefry2x32 20
        ("00000000 00000000", "00000000 00000000", "6b200159 99ba4efe"),
        ("ffffffff ffffffff", "ffffffff ffffffff", "1cb996fc bb002be7"),
        ("13198a2e 03707344", "243f6a88 85a308d3", "c4923a9c 483df7a0"),
    ]:
        counters = [words[None] for words in _words(counter_hex)]
        assert np.array_equal(np.concatenate(cipher(_words(key_hex), *counters)), _words(answer))


def _words(text: str) -> np.ndarray:
    return np.array([int(word, 16) for word in text.split()], np.uint32)


def _uint32(words: Any) -> Any:
    for word in words:
        word.value.type = ir.TensorType(ir.DataType.UINT32)
    return words


@needs("jax")
def test_keys_are_those_of_jax() -> None:
    import jax

    for seed in SEEDS:
        assert np.array_equal(random.new_key(seed), jax.random.key_data(jax.random.key(seed)))
    with jax.enable_x64():
        assert np.array_equal(random.new_key(2**40 + 7), jax.random.key_data(jax.random.key(2**40 + 7)))


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_seed_out_of_range(seed: int) -> None:
    with pytest.raises(RecipeError, match="does not fit into 64 bits"):
        random.new_key(seed)


@needs("jax")
def test_fold_in_is_that_of_jax() -> None:
    import jax

    numbers = [0, 1, 17, 2**31, 2**32 - 1]
    by_tensor = Graph(random.fold_in, random.new_key(0), np.int64(0))
    by_number = Graph(lambda op, key: tuple(random.fold_in(op, key, n) for n in numbers), random.new_key(0))
    for seed in SEEDS:
        expected = [jax.random.key_data(jax.random.fold_in(jax.random.key(seed), np.uint32(n))) for n in numbers]
        assert np.array_equal(by_number(random.new_key(seed)), expected)
        assert np.array_equal([by_tensor(random.new_key(seed), np.int64(n)) for n in numbers], expected)


def test_site_keys_depend_on_seed_and_name_alone() -> None:
    names = [f"layer{i}.weight" for i in range(100)]
    keys_of = Graph(lambda op, key: tuple(random.site_key(op, key, name) for name in names), random.new_key(0))
    keys = [keys_of(random.new_key(seed)) for seed in (0, 1)]
    assert len({tuple(key) for key in np.concatenate(keys)}) == 200
    alone = Graph(lambda op, key: random.site_key(op, key, names[7]), random.new_key(0))
    assert np.array_equal(alone(random.new_key(1)), keys[1][7])


@needs("jax")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_and_uniform_are_those_of_jax(shape: tuple[int, ...], bits_and_uniform: Graph) -> None:
    import jax

    for seed in SEEDS:
        key = jax.random.key(seed)
        expected = [jax.random.bits(key, shape, "uint32"), jax.random.uniform(key, shape)]
        for run in (bits_and_uniform, bits_and_uniform.reference):
            for found, wanted in zip(run(random.new_key(seed), dims(*shape)), expected, strict=True):
                assert found.dtype == wanted.dtype
                assert np.array_equal(found, wanted)


@needs("jax")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float64_is_that_of_jax(shape: tuple[int, ...]) -> None:
    import jax

    found = drawn(random.uniform, DOUBLE)(random.new_key(3), dims(*shape))
    with jax.enable_x64():
        assert np.array_equal(found, jax.random.uniform(jax.random.key(3), shape, np.float64))


@needs("jax")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mask_is_that_of_jax_with_the_layout_of_two_words_a_block(shape: tuple[int, ...]) -> None:
    import jax

    mask = drawn(random.bernoulli_mask, 0.3)
    for seed in SEEDS:
        with jax.threefry_partitionable(False):
            expected = jax.random.bernoulli(jax.random.key(seed), np.float32(0.3), shape)
        assert np.array_equal(mask(random.new_key(seed), dims(*shape)), expected)


@pytest.mark.parametrize("opset", OPSETS)
def test_every_opset_gives_what_the_reference_gives(opset: int) -> None:
    def everything(op: Builder, key: Any, shape: Any) -> tuple[Any, ...]:
        folded = random.fold_in(op, random.site_key(op, key, "here"), op.constant(np.int64(5)))
        return (
            folded,
            random.random_bits(op, folded, shape),
            random.uniform(op, folded, shape, DOUBLE),
            random.normal(op, folded, shape),
            random.truncated_normal(op, folded, shape, DOUBLE),
            random.bernoulli_mask(op, folded, shape, 0.5),
            random.dropout(op, random.uniform(op, key, shape), 0.5, folded),
        )

    arguments = random.new_key(9), dims(3, 11)
    graph = drawn(everything, opset=opset)
    for found, reference in zip(graph(*arguments), graph.reference(*arguments), strict=True):
        assert found.dtype == reference.dtype
        np.testing.assert_allclose(found, reference, rtol=1e-15)


# ---- distributions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "rtol"), [(np.float32, 6e-8), (np.float64, 2e-15)])
def test_quantiles_are_those_of_scipy(dtype: type, rtol: float) -> None:
    def body(op: Builder, uniform: Any, low: Any) -> Any:
        return op.call(random.normal_quantile, uniform, low, np.float64(1))

    quantile = Graph(body, np.zeros(1, dtype), np.float64(0))
    powers = 2.0 ** -np.arange(1, 24)
    u = np.concatenate([np.linspace(0, 1, 10_001)[:-1], powers, 1 - powers]).astype(dtype)
    q = u.astype(np.float64) + (2.0**-54 - 0.5)
    tail = -np.sign(q) * special.ndtri(0.5 - np.abs(q))
    expected = np.where(np.abs(q) < 0.25, np.sqrt(2) * special.erfinv(2 * q), tail)
    np.testing.assert_allclose(quantile(u, np.float64(2.0**-54 - 0.5)), expected, rtol=rtol)


@needs("jax")
def test_normal_is_that_of_jax_but_for_rounding() -> None:
    import jax

    n, key = 100_000, jax.random.key(8)
    arguments = random.new_key(8), dims(n)
    np.testing.assert_allclose(drawn(random.normal)(*arguments), jax.random.normal(key, n), atol=3e-5)
    cut = drawn(random.truncated_normal, FLOAT, -1.0, 3.0)(*arguments)
    np.testing.assert_allclose(cut, jax.random.truncated_normal(key, -1.0, 3.0, n), atol=1e-5)
    with jax.enable_x64():
        expected = jax.random.normal(key, n, np.float64)
    np.testing.assert_allclose(drawn(random.normal, DOUBLE)(*arguments), expected, rtol=1e-11)


@pytest.mark.slow("float64")
@pytest.mark.parametrize("dtype", [FLOAT, DOUBLE], ids=["float32", "float64"])
def test_distributions_are_what_they_say(dtype: ir.DataType) -> None:
    for draw, expected in [
        (random.uniform, stats.uniform),
        (random.normal, stats.norm),
        (random.truncated_normal, stats.truncnorm(-2, 2)),
    ]:
        for seed in range(5):
            found = drawn(draw, dtype)(random.new_key(seed), dims(100_000))
            assert stats.kstest(found, expected.cdf).pvalue > 1e-3


def test_truncated_normal_stays_within_its_bounds() -> None:
    found = drawn(random.truncated_normal, FLOAT, -0.5, 0.25)(random.new_key(1), dims(300_000))
    assert found.min() >= -0.5
    assert found.max() <= 0.25
    assert found.min() < -0.4999
    assert found.max() > 0.2499


def test_random_numbers_of_other_types_are_refused() -> None:
    with pytest.raises(RecipeError, match="random numbers cannot be FLOAT16"):
        drawn(random.normal, ir.DataType.FLOAT16)


# ---- dropout ---------------------------------------------------------------------------------------------------------


def dropout(x: np.ndarray, ratio: Any, seed: int = 0) -> np.ndarray:
    return Graph(random.dropout, x, ratio, random.new_key(0))(x, ratio, random.new_key(seed))


@pytest.mark.parametrize(("dtype", "rtol"), [(np.float16, 2e-3), (np.float32, 2e-7), (np.float64, 1e-7)])
def test_dropout_drops_and_scales(dtype: type, rtol: float) -> None:
    x = np.random.default_rng(0).normal(size=(300, 401)).astype(dtype)
    y = dropout(x, np.float32(0.25))
    kept = y != 0
    assert stats.binomtest(int(kept.sum()), kept.size, 0.75).pvalue > 1e-3
    np.testing.assert_allclose(y, np.where(kept, x / 0.75, 0), rtol=rtol)


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_dropout_of_nothing_and_of_everything(ratio: float) -> None:
    x = np.random.default_rng(0).normal(size=1001).astype(np.float32)
    assert np.array_equal(dropout(x, np.float32(ratio)), x * np.float32(1 - ratio))


def test_dropout_repeats_with_its_key_and_differs_with_another() -> None:
    x = np.ones(1000, np.float32)
    assert np.array_equal(dropout(x, np.float32(0.5), seed=1), dropout(x, np.float32(0.5), seed=1))
    kept = [dropout(x, np.float32(0.5), seed=seed) > 0 for seed in (1, 2)]
    assert 400 < np.count_nonzero(kept[0] == kept[1]) < 600


@pytest.mark.parametrize("shape", [(), (0, 4), (1, 1), (2, 3, 5)], ids=str)
def test_dropout_keeps_the_shape(shape: tuple[int, ...]) -> None:
    assert dropout(np.ones(shape, np.float32), np.float32(0.5)).shape == shape
