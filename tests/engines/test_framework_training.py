"""Training on JAX and TensorFlow, compiled or not, by their derivative or our rules: as on ONNX Runtime."""

import itertools

import numpy as np
import pytest
from framework_training import MODES, STEPS, assert_trains_alike
from lowered import CASES, FLAT, penalised
from marks import needs
from models import digits_mlp

import onward
from onward.model import load
from onward.recipe.optimizers import OPTIMIZERS

ON_EACH = pytest.mark.parametrize(
    "engine", [pytest.param("jax", marks=needs("jax")), pytest.param("tensorflow", marks=needs("tensorflow"))]
)
IDLE = {"cnn": ["conv.bias", "bn.running_mean"], "transformer": ["qkv.bias"]}
"""A bias before a normalization, and that of keys: the loss does not depend on them, and where they go is rounding."""


def some_smaller(batch):
    fewer = {name: array[: len(array) // 2] for name, array in batch.items()}
    return [fewer if i % 7 == 6 else batch for i in range(STEPS)]


@pytest.mark.slow(
    "cnn-jax",
    "cnn-tensorflow",
    "float16-jax",
    "function-tensorflow",
    "mlp, everything-jax",
    "mlp, everything-tensorflow",
    "transformer with dropout-jax",
    "transformer with dropout-tensorflow",
    "transformer-jax",
)
@ON_EACH
@pytest.mark.parametrize("name", CASES)
def test_trains_as_on_onnxruntime(name, engine):
    proto, batch, recipe = CASES[name]
    idle = next((names for part, names in IDLE.items() if part in name), ())
    tolerance = 1e-3 if name == "float16" else 1e-5
    assert_trains_alike(onward.prepare(proto(), **recipe), some_smaller(batch), idle, tolerance, engine=engine)


def modes():
    """Those that are not compiled by JAX's or TensorFlow's own derivative, which is how all are trained above."""
    for name, mode in itertools.product(["mlp, everything", "cnn", "transformer with dropout"], MODES):
        if MODES[mode]:
            is_quick = name == "mlp, everything"
            yield pytest.param(name, mode, marks=() if is_quick else pytest.mark.slow)


@pytest.mark.slow(
    "mlp, everything-compiled, rules-jax", "mlp, everything-eager, rules-jax", "mlp, everything-eager-jax"
)
@ON_EACH
@pytest.mark.parametrize(("name", "mode"), modes())
def test_modes_agree(name, mode, engine):
    """Dropout is our own generator's, of whole numbers: the same elements are dropped everywhere."""
    proto, batch, recipe = CASES[name]
    idle = next((names for part, names in IDLE.items() if part in name), ())
    assert_trains_alike(onward.prepare(proto(), **recipe), some_smaller(batch), idle, engine=engine, **MODES[mode])


@ON_EACH
@pytest.mark.parametrize("mode", MODES)
def test_a_penalty_on_a_gradient_is_differentiated(mode, engine):
    batches = [{"x": np.random.default_rng(i).normal(size=4).astype(np.float32)} for i in range(STEPS)]
    assert_trains_alike(load(penalised(21)), batches, engine=engine, **MODES[mode])


def optimizers():
    """Each on one of them, in turn; the other is slow."""
    for i, name in enumerate(OPTIMIZERS):
        for engine, turn in (("jax", 0), ("tensorflow", 1)):
            yield pytest.param(name, engine, marks=(needs(engine), *([] if i % 2 == turn else [pytest.mark.slow])))


@pytest.mark.parametrize(("name", "engine"), optimizers())
def test_optimizers(name, engine):
    trainable = "*.weight" if name == "muon" else None  # it is for matrices
    model = onward.prepare(digits_mlp(8), loss="cross_entropy", optimizer=name, trainable=trainable)
    assert_trains_alike(model, [FLAT] * STEPS, engine=engine)
