"""Training on TensorFlow: losses and state as on ONNX Runtime, derivatives as our rules have them, and its options."""

import functools
import subprocess
import sys

import gradcheck
import numpy as np
import pytest
from framework_training import assert_trains_alike
from lowered import SQUARE
from marks import needs
from models import small_cnn
from representatives import by_operators, chosen, first_of_each
from rule_tables import CASES as RULE_CASES
from rule_tables import EDGES

import onward
from onward.differentiate import vjp
from onward.engines import start
from onward.engines.framework_engine import interpreter
from onward.errors import DataError
from onward.model import load

pytestmark = needs("tensorflow")

trains_alike = functools.partial(assert_trains_alike, engine="tensorflow")


@functools.cache
def tensorflow():
    from onward.engines.tensorflow import TensorFlow

    return TensorFlow()


# ---- the same as on ONNX Runtime -------------------------------------------------------------------------------------


# ---- derivatives -----------------------------------------------------------------------------------------------------

ON_HOST = "a type that TensorFlow lacks stays on the host, where nothing is differentiated"
OTHER_TYPES = "its body has constants of float32, which do not go with float64"
EXCLUDED = {
    **dict.fromkeys(
        [f"test_dequantizelinear_{kind}" for kind in ("e4m3fn", "e4m3fn_float16", "e4m3fn_zero_point")], ON_HOST
    ),
    **dict.fromkeys([f"test_dequantizelinear_{kind}" for kind in ("int4", "uint4", "int2", "uint2")], ON_HOST),
    "test_dequantizelinear_float4e2m1": ON_HOST,
    "test_dynamicquantizelinear": OTHER_TYPES,
    "test_dynamicquantizelinear_max_adjusted": OTHER_TYPES,
    "quantization_dynamic_scale": OTHER_TYPES,
    "quantization_dynamic_scale_of_positive_values": OTHER_TYPES,
    "matrix_det_of_singular": "the derivative of tf.linalg.det needs the inverse",
}


def derivative(proto, inputs, y, xs, dy):
    """By TensorFlow itself: the gradient of the sum of `dy` times `y`."""
    import tensorflow as tf

    framework = tensorflow()
    execute = interpreter(load(proto).copy(), framework)
    given = {name: placed(framework, value) for name, value in inputs.items()}

    def forward(tensors):
        tensors = iter(tensors)
        at = {x: gradcheck.mapped(lambda _: next(tensors), inputs[x]) for x in xs}
        found = execute({**given, **at})[y]
        pairs = zip(found if isinstance(found, list) else [found], gradcheck.flat(dy), strict=True)
        return sum(tf.reduce_sum(tf.where(d != 0, framework.place(part), 0) * d) for part, d in pairs), []

    flat = [framework.tensor(array) for x in xs for array in gradcheck.flat(inputs[x])]
    _, _, gradients = framework.derivative(forward, flat)
    return [framework.array(gradient) for gradient in gradients()]


def placed(framework, value):
    if isinstance(value, list):
        return [placed(framework, item) for item in value]
    return framework.tensor(value) if value is not None and framework.supports(np.asarray(value).dtype) else value


DERIVED = {name: case for name, case in RULE_CASES.items() if name not in EXCLUDED}
OWN_WAYS = {
    "Pow", "Where", "Softmax", "MatMul", "Einsum", "Conv", "ConvTranspose", "MaxPool", "AveragePool", "Resize",
    "BatchNormalization", "LayerNormalization", "Gather", "GatherND", "ScatterElements", "ScatterND", "TopK", "CumSum",
    "ReduceMax", "ReduceProd", "Pad", "Slice", "Attention", "LSTM", "SoftmaxCrossEntropyLoss",
}  # fmt: skip
"""Operators whose derivatives TensorFlow computes in ways of its own; the others are made of the same few."""


def first_derivatives():
    found = {name: case for name, case in DERIVED.items() if {node.op_type for node in case[0].graph.node} <= OWN_WAYS}
    return first_of_each(found, by_operators)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", chosen(DERIVED, first_derivatives()))
def test_derivatives_are_those_of_our_rules(name):
    proto, inputs = DERIVED[name]
    inputs, xs = gradcheck.double(proto, inputs), gradcheck.differentiable(proto, inputs)
    proto = gradcheck.to_double(proto)
    before = gradcheck.evaluate(proto, inputs)
    for y in gradcheck.float_outputs(proto):
        if not gradcheck.is_float(before[y]):
            continue
        dy = gradcheck.direction(np.random.default_rng(0), before[y])
        model = vjp(proto, y, xs).to_proto()
        expected = gradcheck.gradients(model, {**inputs, model.graph.input[-1].name: dy}, xs)
        wanted = [array for value in expected.values() for array in gradcheck.flat(value)]
        scale = max([1e-3, *(np.abs(array).max(initial=0) for array in wanted)])
        for found, array in zip(derivative(proto, inputs, y, xs, dy), wanted, strict=True):
            np.testing.assert_allclose(found, array, rtol=1e-5, atol=1e-6 * scale)


OF_INTEGERS = {f"quantization_{name}" for name in ("integer_conv", "integer_matmul", "moved_integers")}
"""TensorFlow has no derivative by integers: for these the engine takes our rules."""
OTHER_EDGES = {"elementwise_Pow_of_0", *OF_INTEGERS}
"""The slope of a root at 0, which is infinite, times 0."""


@pytest.mark.parametrize("name", [name for name in EDGES if name not in OTHER_EDGES])
def test_derivatives_at_kinks(name):
    proto, inputs, dy, expected = EDGES[name]
    found = derivative(proto, inputs, "y", list(expected), dy.astype(np.float32))
    for gradient, wanted in zip(found, expected.values(), strict=True):
        np.testing.assert_allclose(gradient, wanted, rtol=1e-5, atol=1e-6)


# ---- compiled steps --------------------------------------------------------------------------------------------------


def cnn():
    return onward.prepare(small_cnn(), loss="cross_entropy", optimizer="adam:lr=1e-2")


def test_a_step_is_compiled_once_for_each_shape_but_odd_ones():
    """Smaller batches run operator by operator, until they are what comes."""
    said = []
    fewer = {name: array[:3] for name, array in SQUARE.items()}
    batches = [SQUARE, SQUARE, fewer, SQUARE, fewer, fewer, fewer]
    with start(cnn(), engine="tensorflow", on_compile=said.append) as engine, start(cnn(), engine="numpy") as other:
        for batch in batches:
            np.testing.assert_allclose(engine.step(batch)["loss"], other.step(batch)["loss"], rtol=1e-5)
            assert len(said) == 1 + (batch is batches[-1] and other.state()["step"] == len(batches))
    assert said == [f"tensorflow compiles the step for image [{n}, 1, 8, 8], labels [{n}]" for n in (6, 3)]


def test_a_label_that_there_is_not():
    with start(cnn(), engine="tensorflow") as engine:
        engine.step(SQUARE)
        with pytest.raises(DataError, match=r"label value of 99 which is outside the valid range of \[0, 10\)"):
            engine.step(SQUARE | {"labels": np.full_like(SQUARE["labels"], 99)})


def test_what_needs_a_value_is_not_compiled():
    """How many elements are not zero, only the batch says: the step runs operator by operator, and says why."""
    from onnx import parser

    proto = parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
        g (float[n] x) => (float[m] y) { c = Cast<to = 9>(x)  y = Compress(x, c) }""")
    framework = tensorflow()
    execute = interpreter(load(proto).copy(), framework)
    step = framework.compile(lambda state, constants, batch: ({}, execute(batch)))
    for n in (1, 2):
        batch = {"x": framework.tensor(np.arange(3 * n, dtype=np.float32))}
        with pytest.warns(UserWarning, match="the step is not compiled: `Compress`"):
            _, found = step({}, {}, batch)
        np.testing.assert_array_equal(framework.array(found["y"]), np.arange(1, 3 * n))


# ---- options ---------------------------------------------------------------------------------------------------------


@needs("torch")
def test_tensors_of_another_framework():
    """Wherever they begin in memory; and what is state does not change with them."""
    import torch

    with start(cnn(), engine="tensorflow") as engine, start(cnn(), engine="tensorflow") as other:
        mine = {name: torch.from_numpy(np.concatenate([array[:1], array]))[1:] for name, array in SQUARE.items()}
        assert float(engine.step(mine)["loss"]) == float(other.step(SQUARE)["loss"])
        state = {name: torch.from_numpy(array.copy()) for name, array in engine.state().items() if array.dtype == "f4"}
        engine.load_state(state)
        for tensor in state.values():
            tensor.zero_()
        assert np.abs(engine.state()["fc.weight"]).max() > 0


@pytest.mark.slow
def test_nothing_is_printed_on_import():
    code = "import onward.engines.tensorflow, tensorflow as tf; tf.function(lambda x: x + 1)(tf.constant(1.0))"
    environment = {"PATH": "", "PYTHONPATH": ":".join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
