"""Initial values have the distribution that torch.nn.init, Keras or JAX document, and depend on seed and site alone."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from built_graphs import OPSETS, Graph
from marks import needs
from scipy import stats

from onward.build import Builder, Expr
from onward.errors import RecipeError, UnknownNameError
from onward.recipe import random
from onward.recipe.initialize import INITIALIZERS, Draw, initializer

SHAPES = [(64, 300), (30, 20, 5, 5), (3, 3, 24, 40)]
FLOAT = ir.DataType.FLOAT


def weight(shape: tuple[int | str, ...], dtype: ir.DataType = FLOAT, name: str = "weight") -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))


def initial(
    name: str,
    shape: tuple[int, ...],
    *,
    dtype: ir.DataType = FLOAT,
    site: str = "weight",
    seed: int = 0,
    opset: int = 21,
    **options: Any,
) -> np.ndarray:
    def body(op: Builder, key: Expr) -> Expr:
        return initializer(name).build(op, random.site_key(op, key, site), weight(shape, dtype, site), **options)

    graph = Graph(body, random.new_key(seed), opset=opset)
    found = graph(random.new_key(seed))
    assert found.shape == shape
    return found


# ---- distributions ---------------------------------------------------------------------------------------------------


def matches(values: np.ndarray, distribution: Any) -> None:
    assert stats.kstest(values.ravel().astype(np.float64), distribution.cdf).pvalue > 1e-3


def uniform(bound: float) -> Any:
    return stats.uniform(-bound, 2 * bound)


def truncated(std: float) -> Any:
    return stats.truncnorm(-2, 2, scale=std)


def test_constants() -> None:
    assert np.array_equal(initial("zeros", (2, 3)), np.zeros((2, 3)))
    assert np.array_equal(initial("ones", ()), np.ones(()))
    assert np.array_equal(initial("constant", (4,), value=0.1), np.full(4, 0.1, np.float32))
    assert np.array_equal(initial("constant", (4,), value=0.1, dtype=ir.DataType.DOUBLE), np.full(4, 0.1))


def test_plain_distributions() -> None:
    shape = (100, 300)
    matches(initial("normal", shape, mean=0.5, std=0.02), stats.norm(0.5, 0.02))
    matches(initial("uniform", shape, low=-0.3, high=0.1), stats.uniform(-0.3, 0.4))
    cut = initial("truncated_normal", shape, mean=1.0, std=0.1)
    matches(cut, stats.truncnorm(-2, 2, loc=1.0, scale=0.1))
    assert np.abs(cut - 1).max() <= 0.2 + 1e-6


@needs("torch")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fans_are_those_of_torch(shape: tuple[int, ...]) -> None:
    import torch

    fans = torch.nn.init._calculate_fan_in_and_fan_out(torch.empty(shape))
    assert drawing(shape).fans("torch") == fans
    fan_in, fan_out = fans
    matches(initial("xavier_uniform", shape, gain=2.0), uniform(2 * math.sqrt(6 / (fan_in + fan_out))))
    matches(initial("xavier_normal", shape), stats.norm(scale=math.sqrt(2 / (fan_in + fan_out))))
    gain = torch.nn.init.calculate_gain("leaky_relu", math.sqrt(5))
    matches(initial("kaiming_uniform", shape, a=math.sqrt(5)), uniform(gain * math.sqrt(3 / fan_in)))
    gain = torch.nn.init.calculate_gain("tanh")
    found = initial("kaiming_normal", shape, mode="fan_out", nonlinearity="tanh")
    matches(found, stats.norm(scale=gain / math.sqrt(fan_out)))


@needs("torch")
@pytest.mark.parametrize("nonlinearity", INITIALIZERS["kaiming_normal"].choices["nonlinearity"])
def test_gains_are_those_of_torch(nonlinearity: str) -> None:
    import torch

    found = initial("kaiming_normal", (8, 100), nonlinearity=nonlinearity, a=0.3)
    same_numbers = initial("normal", (8, 100))
    gain = torch.nn.init.calculate_gain(nonlinearity, 0.3)
    np.testing.assert_allclose(found, same_numbers * gain / 10, rtol=1e-6)


@needs("torch")
@pytest.mark.parametrize("name", ["xavier_uniform", "xavier_normal", "kaiming_uniform", "kaiming_normal"])
def test_moments_are_those_of_torch(name: str) -> None:
    import torch

    torch.manual_seed(0)
    theirs = getattr(torch.nn.init, f"{name}_")(torch.empty(200, 500)).numpy()
    ours = initial(name, (200, 500))
    assert stats.ks_2samp(ours.ravel(), theirs.ravel()).pvalue > 1e-3
    assert np.abs(ours).max() == pytest.approx(np.abs(theirs).max(), rel=1e-3 if "uniform" in name else 0.2)


@needs("keras")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_other_layout_is_that_of_keras(shape: tuple[int, ...]) -> None:
    import keras

    theirs = np.asarray(keras.initializers.GlorotUniform(seed=0)(shape))
    ours = initial("xavier_uniform", shape, layout="keras")
    assert np.abs(ours).max() == pytest.approx(np.abs(theirs).max(), rel=1e-3)
    assert stats.ks_2samp(ours.ravel(), theirs.ravel()).pvalue > 1e-3
    theirs = np.asarray(keras.initializers.HeUniform(seed=0)(shape))
    ours = initial("kaiming_uniform", shape, layout="keras")
    assert np.abs(ours).max() == pytest.approx(np.abs(theirs).max(), rel=1e-3)


@needs("jax")
def test_lecun_normal_is_that_of_jax() -> None:
    import jax

    shape = (300, 80)
    ours = initial("lecun_normal", shape, layout="keras")
    theirs = np.asarray(jax.nn.initializers.lecun_normal()(jax.random.key(0), shape))
    assert stats.ks_2samp(ours.ravel(), theirs.ravel()).pvalue > 1e-3
    assert ours.std() == pytest.approx(1 / math.sqrt(300), rel=0.02)
    assert np.abs(ours).max() == pytest.approx(np.abs(theirs).max(), rel=1e-3)


def drawing(shape: tuple[int, ...]) -> Draw:
    return Draw(None, None, shape, FLOAT, "weight")  # type: ignore[arg-type]


# ---- orthogonal ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "layout", "matrix"),
    [
        ((16, 16), "torch", (16, 16)),
        ((200, 200), "torch", (200, 200)),
        ((33, 90), "torch", (33, 90)),
        ((90, 33), "torch", (90, 33)),
        ((1, 5), "torch", (1, 5)),
        ((1, 1), "torch", (1, 1)),
        ((40, 3, 3, 3), "torch", (40, 27)),
        ((3, 3, 3, 40), "keras", (27, 40)),
        ((90, 33), "keras", (90, 33)),
    ],
    ids=str,
)
def test_orthogonal_is_orthogonal(shape: tuple[int, ...], layout: str, matrix: tuple[int, int]) -> None:
    q = initial("orthogonal", shape, layout=layout).reshape(matrix).astype(np.float64)
    q = q if matrix[0] <= matrix[1] else q.T
    np.testing.assert_allclose(q @ q.T, np.eye(len(q)), atol=1e-6)
    doubled = initial("orthogonal", shape, layout=layout, gain=2.0).reshape(matrix)
    np.testing.assert_allclose(doubled if matrix[0] <= matrix[1] else doubled.T, 2 * q, rtol=1e-6)


def test_orthogonal_is_the_q_of_normal_numbers() -> None:
    """Which makes all orthogonal matrices equally likely, as torch does it."""
    numbers = initial("normal", (40, 60), dtype=ir.DataType.DOUBLE)
    q, r = np.linalg.qr(numbers.T)
    found = initial("orthogonal", (60, 40), dtype=ir.DataType.DOUBLE)
    np.testing.assert_allclose(found, q * np.sign(np.diag(r)), atol=1e-12)


def test_orthogonal_bears_empty_weights() -> None:
    assert initial("orthogonal", (0, 4)).size == 0


# ---- seeds, sites, types, files --------------------------------------------------------------------------------------

DRAWN = sorted(INITIALIZERS.keys() - {"zeros", "ones", "constant"})


@pytest.mark.parametrize("name", DRAWN)
def test_seed_and_site_decide(name: str) -> None:
    first = initial(name, (20, 30), seed=1, site="a")
    assert np.array_equal(first, initial(name, (20, 30), seed=1, site="a"))
    for other in (initial(name, (20, 30), seed=2, site="a"), initial(name, (20, 30), seed=1, site="b")):
        assert np.count_nonzero(first == other) < 3
        assert abs(stats.pearsonr(first.ravel(), other.ravel()).statistic) < 0.2


@pytest.mark.parametrize("name", INITIALIZERS)
def test_every_type(name: str) -> None:
    single = initial(name, (9, 17))
    half = initial(name, (9, 17), dtype=ir.DataType.FLOAT16)
    assert half.dtype == np.float16
    assert np.array_equal(half, single.astype(np.float16))
    double = initial(name, (9, 17), dtype=ir.DataType.DOUBLE)
    assert double.dtype == np.float64


def test_bfloat16() -> None:
    def body(op: Builder, key: Expr) -> Expr:
        drawn = initializer("normal").build(op, key, weight((50, 40), ir.DataType.BFLOAT16))
        assert drawn.dtype == ir.DataType.BFLOAT16
        return op.Cast(drawn, to=FLOAT)  # ONNX Runtime hands no bfloat16 to numpy

    found = Graph(body, random.new_key(0))(random.new_key(0))
    wide = Graph(lambda op, key: initializer("normal").build(op, key, weight((50, 40))), random.new_key(0))
    assert np.array_equal(found, wide(random.new_key(0)).astype(ml_dtypes.bfloat16).astype(np.float32))


@pytest.mark.parametrize("opset", OPSETS)
def test_every_initializer_on_every_opset(opset: int) -> None:
    names = list(INITIALIZERS)
    values = [weight((9, 17), name=name) for name in names]

    def body(op: Builder, key: Expr) -> tuple[Expr, ...]:
        return tuple(initializer(v.name).build(op, random.site_key(op, key, v.name), v) for v in values)  # type: ignore[arg-type]

    graph = Graph(body, random.new_key(3), opset=opset)
    for name, found, reference in zip(names, graph(random.new_key(3)), graph.reference(random.new_key(3)), strict=True):
        assert not {node.op_type for node in graph.model.graph} & {"RandomNormal", "RandomUniform"}
        np.testing.assert_allclose(found, reference, rtol=1e-6, atol=1e-7, err_msg=name)


@pytest.mark.parametrize(
    ("name", "shape", "options", "message"),
    [
        ("kaiming_normal", (10,), {}, r"`weight` has no fan_in: its shape \[10\]"),
        ("orthogonal", (10,), {}, "fewer than two axes"),
        ("normal", ("N", 3), {}, "its shape or type is unknown"),
        ("normal", (2, 3), {"sigma": 1}, "initializer `normal` has no option `sigma`"),
        ("normal", (2, 3), {"std": "wide"}, "is `wide`, which is not a number"),
        ("xavier_normal", (2, 3), {"layout": "chainer"}, "is `chainer`, but must be `torch` or `keras`"),
    ],
)
def test_what_is_wrong_is_said(name: str, shape: tuple[int | str, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Graph(lambda op, key: initializer(name).build(op, key, weight(shape), **options), random.new_key(0))


def test_unknown_initializer() -> None:
    with pytest.raises(UnknownNameError, match="unknown initializer `kaiming`") as caught:
        initializer("kaiming")
    assert "kaiming_normal" in (caught.value.hint or "")
