"""Training on JAX and TensorFlow, compiled or not, by their derivative or our rules: as on ONNX Runtime."""

import itertools
import warnings

import numpy as np
import pytest
from control_flow import CASES as CONTROL_FLOW
from framework_training import MODES, STEPS, assert_trains_alike, trained
from lowered import CASES, FLAT, SQUARE, penalised
from marks import needs
from models import digits_mlp, small_cnn

import onward
from onward.engines import FRAMEWORKS, function, start
from onward.engines.framework import framework_of
from onward.engines.framework_engine import interpreter
from onward.errors import UnknownNameError, UnsupportedError
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


@pytest.mark.slow
@needs("torch")
@ON_EACH
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["resnet", "vit", "bert", "gpt2", "lstm", "if and loop", "while"])
def test_trains_what_pytorch_exports(name, mode, engine):
    """Also compiled: on TensorFlow, a loop that ends when the data say so is in the graph; JAX does not compile it."""
    from training_cases import CASES, arrays, exported, made, prepared

    if name == "while" and engine == "jax":
        pytest.skip("test_jax_engine.py has it")
    case = CASES[name]
    subject = made(case)
    model = prepared(case, subject, exported(case, subject))
    batches = [arrays(subject.batch(3 if i % 7 == 6 else 8)) for i in range(STEPS)]
    idle = ["key.bias", "k_proj.bias", "c_attn.bias"]
    assert_trains_alike(model, batches, idle, engine=engine, **MODES[mode])


# ---- compiled control flow -------------------------------------------------------------------------------------------

_OPEN = {"placeholder 0", "placeholder 3", "unknown rank"}
NOT_COMPILED = {"jax": {"scan outputs", "unread output", "tangled", *_OPEN}, "tensorflow": _OPEN}
"""Loops that collect something in each iteration, if only the batch says how many these are, and states whose shape
changes or that only the batch knows.
"""


@ON_EACH
@pytest.mark.parametrize("name", [name for name, (proto, _) in CONTROL_FLOW.items() if not proto.functions])
def test_control_flow_is_the_same_compiled(name, engine):
    proto, inputs = CONTROL_FLOW[name]
    if not all(isinstance(value, np.ndarray) for value in inputs.values()):
        pytest.skip("a batch is of arrays")
    framework = framework_of(engine)
    execute = interpreter(load(proto).copy(), framework)
    step = framework.compile(lambda state, constants, batch: ({}, execute(batch)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, found = step({}, {}, {name: framework.feed(value) for name, value in inputs.items()})
    assert bool(caught) == (name in NOT_COMPILED[engine]), [str(warning.message) for warning in caught]
    atol = 1e-6 if engine == "jax" else 0
    for output, expected in function(load(proto), engine="numpy")(inputs).items():
        np.testing.assert_allclose(framework.host(found[output]), expected, rtol=1e-5, atol=atol, err_msg=output)


# ---- options ---------------------------------------------------------------------------------------------------------


def cnn():
    return onward.prepare(small_cnn(), loss="cross_entropy", optimizer="adam:lr=1e-2")


@pytest.mark.slow("bfloat16-jax", "float16-jax", "float16-tensorflow")
@ON_EACH
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_matmuls_in_16_bits(precision, engine):
    """Losses are near, but not equal; weights stay float32."""
    exact, _ = trained(cnn(), [SQUARE] * STEPS, engine=engine)
    losses, state = trained(cnn(), [SQUARE] * STEPS, engine=engine, precision=precision)
    assert losses != exact
    np.testing.assert_allclose(losses[:5], exact[:5], rtol=2e-2)
    assert losses[-1] < 0.5 * losses[0]
    assert state["fc.weight"].dtype == np.float32


@pytest.mark.parametrize("engine", [pytest.param(name, marks=needs(name)) for name in FRAMEWORKS])
@pytest.mark.parametrize(
    ("option", "error", "message"),
    [
        ({"device": "abacus"}, UnknownNameError, "no device `abacus`"),
        ({"precision": "bfloat61"}, UnknownNameError, "unknown precision `bfloat61`"),
        ({"speed": 11}, UnsupportedError, "no option `speed`"),
    ],
)
def test_unknown_options(option, error, message, engine):
    with pytest.raises(error, match=message):
        start(cnn(), engine=engine, **option)
