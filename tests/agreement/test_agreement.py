"""The same training on every engine: the losses and the state of ONNX Runtime, by other operators and derivatives.

Models and recipes are those that test_training_models.py compares with PyTorch's own training: every kind of model,
clipping, accumulation, groups, schedules. Losses agree to 1e-5 of themselves over the first 10 steps. After that
rounding errors grow with the training itself, and a loss may be off by 1e-4, the state by 1e-3 of its largest element.
"""

from __future__ import annotations

import functools
import itertools

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from framework_training import trained
from marks import needs
from onnx import parser
from representatives import chosen
from training_cases import CASES, arrays, exported, made, prepared

import onward
from onward.engines import start
from onward.model.state import states
from onward.transform.float_type import convert_floats

pytestmark = needs("torch")

FRAMEWORKS = [
    pytest.param("numpy"),
    pytest.param("torch"),
    pytest.param("jax", marks=needs("jax")),
    pytest.param("tensorflow", marks=needs("tensorflow")),
]
STEPS = 12
ALL_STEPS = 50


CALM = {"resnet, dynamo": {"optimizer": "sgd:lr=0.05"}}
"""Where the rate is so high that the sign of a rounding error decides about an activation, a lower one."""


@functools.cache
def training(name):
    """A training model, and batches for it; every seventh is smaller."""
    case = CASES[name]._replace(recipe=CASES[name].recipe | CALM.get(name, {}))
    subject = made(case)
    model = prepared(case, subject, exported(case, subject))
    return model, [arrays(subject.batch(3 if i % 7 == 6 else 8)) for i in range(ALL_STEPS)]


@functools.cache
def on_onnxruntime(name, steps):
    model, batches = training(name)
    return trained(model, batches[:steps], "onnxruntime", threads=1)


def assert_agreement(name, engine, steps, **options):
    model, batches = training(name)
    losses, state = trained(model, batches[:steps], engine, **options)
    expected, other = on_onnxruntime(name, steps)
    np.testing.assert_allclose(losses[:10], expected[:10], rtol=1e-5)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    idle = CASES[name].idle
    for key in state:
        if idle not in key:
            size = max(np.abs(other[key]).max(initial=0), 1e-3)
            assert np.abs(state[key].astype(np.float64) - other[key]).max(initial=0) <= 1e-3 * size, key


SOONEST = {
    "numpy": {},
    "jax": {},
    "torch": {"compile": False},
    "tensorflow": {"compile": False},
}
"""How the first steps come soonest: JAX compiles operators one by one, too."""
WHILE = "ignore:the step is not compiled. JAX cannot differentiate a Loop"


QUICK = ("mlp", "resnet", "gpt2")
"""Layers, convolutions and normalizations, attention."""
MORE = {
    "numpy": CASES.keys(),
    "torch": {*QUICK, "while"},
    "jax": {*QUICK[:2], "if and loop"},
    "tensorflow": {*QUICK, "lstm", "if and loop"},
}
"""On numpy all are quick, since nothing is compiled; on others, what they execute in ways of their own."""


def quick_on_each_engine():
    for name, parameter in itertools.product(CASES, FRAMEWORKS):
        slow = () if name in MORE[parameter.values[0]] else (pytest.mark.slow,)
        yield pytest.param(name, *parameter.values, marks=(*parameter.marks, *slow))


@pytest.mark.slow("mlp-torch", "resnet-jax", "resnet-torch")
@pytest.mark.parametrize("engine", ["torch", pytest.param("jax", marks=needs("jax"))])
@pytest.mark.parametrize("name", chosen(CASES, QUICK[:2]))
@pytest.mark.filterwarnings(WHILE)
def test_products_of_fewer_bits(name, engine):
    """Losses and gradients are near those of all bits; the state is float32 as before."""
    model, batches = training(name)
    losses, state = trained(model, batches[:5], engine, **SOONEST[engine], precision="bfloat16")
    expected, other = on_onnxruntime(name, STEPS)
    np.testing.assert_allclose(losses, expected[:5], rtol=5e-2)
    assert {key: array.dtype for key, array in state.items()} == {key: array.dtype for key, array in other.items()}


@pytest.mark.slow(
    "autoencoder-numpy",
    "bert-numpy",
    "gpt2-numpy",
    "gpt2-tensorflow",
    "gpt2-torch",
    "lstm-tensorflow",
    "resnet, dynamo-numpy",
    "resnet-jax",
    "tied-numpy",
    "vit-numpy",
    "while-numpy",
)
@pytest.mark.parametrize(("name", "engine"), quick_on_each_engine())
@pytest.mark.filterwarnings(WHILE)
def test_engines_agree(name, engine):
    assert_agreement(name, engine, STEPS, **SOONEST[engine])


@pytest.mark.slow
@pytest.mark.parametrize("engine", FRAMEWORKS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings(WHILE)
def test_engines_agree_for_long(name, engine):
    assert_agreement(name, engine, ALL_STEPS, **SOONEST[engine])


@pytest.mark.parametrize("engine", FRAMEWORKS[1:])
@pytest.mark.parametrize("name", chosen(QUICK, ["mlp"]))
def test_engines_agree_by_our_rules(name, engine):
    assert_agreement(name, engine, STEPS, rules=True, **SOONEST[engine])


@pytest.mark.slow  # the quick ones are those of test_framework_training.py and test_torch_engine.py
@pytest.mark.parametrize("engine", FRAMEWORKS[1:])
@pytest.mark.parametrize("name", ["mlp", "resnet", "lenet5"])
def test_engines_agree_when_compiled(name, engine):
    assert_agreement(name, engine, STEPS)


@pytest.mark.slow("adadelta:lr=1-jax", "adam:lr=0.01,eps=1e-3-jax", "lion:lr=1e-3-jax", "sgd:lr=0.1-jax")
@pytest.mark.parametrize("engine", FRAMEWORKS)
@pytest.mark.parametrize("optimizer", ["sgd:lr=0.1", "adam:lr=0.01,eps=1e-3", "lion:lr=1e-3", "adadelta:lr=1"])
def test_engines_agree_in_float64(optimizer, engine):
    """The rounding errors of float64 are all that is left: 1e-10 over 50 steps."""
    import models

    graph = convert_floats(onward.load(models.digits_mlp()), ir.DataType.DOUBLE)
    model = onward.prepare(graph, loss="cross_entropy", optimizer=optimizer)
    rng = np.random.default_rng(0)
    x = next(value.name for value in graph.inputs)
    batches = [{x: rng.standard_normal((16, 64)), "labels": rng.integers(0, 10, 16)} for _ in range(ALL_STEPS)]
    expected, other = trained(model, batches, "onnxruntime", threads=1)
    losses, state = trained(model, batches, engine, **({} if engine == "numpy" else {"compile": False}))
    np.testing.assert_allclose(losses, expected, rtol=1e-10)
    for key in state:
        np.testing.assert_allclose(state[key], other[key], rtol=1e-8, atol=1e-10 * np.abs(other[key]).max(initial=0))


@pytest.mark.slow("jax")
@pytest.mark.parametrize("engine", FRAMEWORKS)
def test_dropout_draws_the_same_numbers_everywhere(engine):
    text = """<ir_version: 10, opset_import: ["" : 21]>
        g (float[n, 8] x) => (float[n, 4] y)
        { h = MatMul(x, w1)  a = Relu(h)  ratio = Constant<value = float {0.4}>()  d = Dropout(a, ratio)
          y = MatMul(d, w2) }"""
    rng = np.random.default_rng(0)
    proto = parser.parse_model(text)
    for name, shape in (("w1", (8, 16)), ("w2", (16, 4))):
        proto.graph.initializer.append(onnx.numpy_helper.from_array(rng.standard_normal(shape).astype("f"), name))
    model = onward.prepare(proto, loss="cross_entropy", optimizer="sgd:lr=0.1")
    assert "rng" in {state.role for state in states(model)}
    batches = [{"x": rng.standard_normal((8, 8)).astype("f"), "labels": rng.integers(0, 4, 8)} for _ in range(STEPS)]
    expected, _ = trained(model, batches, "onnxruntime", threads=1)
    losses, _ = trained(model, batches, engine, **({} if engine == "numpy" else {"compile": False}))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


@pytest.mark.parametrize("engine", FRAMEWORKS)
def test_a_gradient_of_a_gradient(engine):
    """A penalty on the gradient by the input, as a Wasserstein GAN has it."""
    from broken_models import second_order

    model = onward.load(second_order())
    rng = np.random.default_rng(0)
    with start(model, threads=1) as reference:
        batches = [
            {name: rng.standard_normal(_shape(value)).astype("f") for name, value in reference.inputs.items()}
            for _ in range(STEPS)
        ]
    expected, other = trained(model, batches, "onnxruntime", threads=1)
    losses, state = trained(model, batches, engine, **({} if engine == "numpy" else {"compile": False}))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for key in state:
        np.testing.assert_allclose(state[key], other[key], rtol=1e-4, atol=1e-6)


def _shape(value):
    return [size if isinstance(size, int) else 5 for size in value.shape]


@pytest.mark.slow("True-torch", "False-jax")
@pytest.mark.parametrize("engine", ["onnxruntime", *FRAMEWORKS])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_without_a_finite_loss_changes_nothing(engine, compiled):
    import models

    if engine == "numpy" and compiled:
        pytest.skip("numpy compiles nothing")
    model = onward.prepare(models.digits_mlp(), loss="cross_entropy", optimizer="adam")
    rng = np.random.default_rng(0)
    x = model.inputs[0].name
    batch = {x: rng.standard_normal((4, 64)).astype("f"), "labels": rng.integers(0, 10, 4)}
    with start(model, engine=engine, compile=compiled) as loaded:
        loaded.step(batch)
        before = loaded.state()
        assert not np.isfinite(loaded.step({**batch, x: batch[x] * np.float32("nan")})[loaded.loss])
        assert all(np.array_equal(before[name], after) for name, after in loaded.state().items())
        assert np.isfinite(loaded.step(batch)[loaded.loss])
        assert any(not np.array_equal(before[name], after) for name, after in loaded.state().items())
