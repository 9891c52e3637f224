"""Training on JAX: losses and state as on ONNX Runtime, control flow as it is compiled, and what the options mean."""

import functools
import re

import gradcheck
import numpy as np
import onnx
import pytest
from framework_training import assert_trains_alike, equal_layers
from lowered import SQUARE
from marks import needs
from models import small_cnn
from onnx import helper
from rule_tables import FAMILIES

import onward
from onward.differentiate.gradients import lower_gradients
from onward.engines import function, start
from onward.engines.framework import framework_of
from onward.engines.framework_engine import computation
from onward.lowering.step import lower_for_engine
from onward.model import load
from onward.model.state import carried_state
from onward.transform.context import Context

pytestmark = needs("jax")

trains_alike = functools.partial(assert_trains_alike, engine="jax")


# ---- the same as on ONNX Runtime -------------------------------------------------------------------------------------


@pytest.mark.slow
@needs("torch")
def test_a_loop_without_an_end_that_is_known_is_not_compiled():
    """JAX has no derivative of it. It is trained all the same, operator by operator."""
    from training_cases import CASES, arrays, exported, made, prepared

    case = CASES["while"]
    subject = made(case)
    model = prepared(case, subject, exported(case, subject))
    with pytest.warns(UserWarning, match="the step is not compiled: JAX cannot differentiate a Loop"):
        trains_alike(model, [arrays(subject.batch(8)) for _ in range(3)])


# ---- operators -------------------------------------------------------------------------------------------------------


OPERATORS = {f"{family.__name__[11:]}.{name}": case for family in FAMILIES for name, case in family.CASES.items()}
NOT_AS_THE_RULES = {
    "attention.softmax_in_float16": "its rounding errors are larger",
    "elementwise.Where_hides_what_is_not_a_number": "JAX multiplies the gradient 0 by a slope that is no number",
}
QUICK = ("elementwise.Pow", "indexing.scatter_elements_mul", "indexing.scatter_nd_mul", "normalization.softmax")


def differentiated(proto, inputs):
    """A model that computes also the gradient of the sum of its first output, and the names of the gradients."""
    proto = onnx.ModelProto.FromString(proto.SerializeToString())
    given = [value.name for value in proto.graph.input if value.name not in gradcheck.settings(proto)]
    xs = [name for name in given if isinstance(x := inputs[name], np.ndarray) and x.dtype.kind == "f"]
    names, domain = [f"d/{x}" for x in xs], "ai.onnx.preview.training"
    y = proto.graph.output[0].name
    proto.graph.node.append(helper.make_node("Gradient", xs, names, domain=domain, xs=xs, y=y))
    kinds = {value.name: value.type.tensor_type.elem_type for value in proto.graph.input}
    outputs = zip(names, xs, strict=True)
    proto.graph.output.extend(helper.make_tensor_value_info(name, kinds[x], None) for name, x in outputs)
    proto.opset_import.append(helper.make_opsetid(domain, 1))
    return load(proto), names


def _operators():
    for name, (proto, inputs) in OPERATORS.items():
        output = proto.graph.output[0].type.tensor_type.elem_type
        floats = [x for x in inputs.values() if isinstance(x, np.ndarray) and x.dtype.kind == "f"]
        if output in gradcheck.FLOATS and floats and name not in NOT_AS_THE_RULES:
            yield pytest.param(name, marks=() if name.startswith(QUICK) else pytest.mark.slow)


@pytest.mark.slow(
    "elementwise.Pow_broadcast",
    "elementwise.Pow_integer_exponents_of_zero_and_negative",
    "indexing.scatter_nd_mul",
    "normalization.softmax_unknown_rank",
)
@pytest.mark.parametrize("name", list(_operators()))
def test_derivatives_are_those_of_the_rules(name):
    proto, inputs = OPERATORS[name]
    model, names = differentiated(proto, inputs)
    own, rules = (function(m, engine="jax")(inputs) for m in (model, lower_gradients(Context(model.copy()))))
    for gradient in names:
        scale = np.abs(rules[gradient][np.isfinite(rules[gradient])]).max(initial=1)
        np.testing.assert_allclose(own[gradient], rules[gradient], rtol=1e-3, atol=1e-4 * scale, err_msg=gradient)


# ---- the engine ------------------------------------------------------------------------------------------------------


def cnn():
    return onward.prepare(small_cnn(), loss="cross_entropy", optimizer="adam:lr=1e-2")


def test_the_process_keeps_its_numbers_of_32_bits():
    import jax.numpy as jnp

    with start(cnn(), engine="jax") as engine:
        engine.step(SQUARE)
        assert engine.state()["step"].dtype == np.int64
    assert jnp.arange(3).dtype == jnp.int32 and jnp.asarray(np.float64(1)).dtype == jnp.float32


def test_a_step_is_compiled_once_for_each_shape():
    said = []
    fewer = {name: array[:3] for name, array in SQUARE.items()}
    with start(cnn(), engine="jax", on_compile=said.append) as engine:
        for batch in (SQUARE, SQUARE, fewer, SQUARE, fewer):
            engine.step(batch)
    assert said == [f"jax compiles the step for image [{n}, 1, 8, 8], labels [{n}]" for n in (6, 3)]


def test_a_step_copies_no_moments():
    """They are written over, and what is computed of new ones reads those that are kept if the loss is finite."""
    import jax

    model, batches = equal_layers(2, optimizer="adam:lr=0.01")
    framework = framework_of("jax")
    compute = computation(lower_for_engine(model, None, "step"), framework)
    state = {s.name: framework.tensor(s.array) for s in carried_state(model, 0)}
    with framework.active():
        made = jax.jit(lambda state, batch: compute(state | batch), donate_argnums=0).lower(state, batches[0])
    text = made.compile().as_text()
    assert "exp_avg_sq" in text and not re.findall(r" copy\(%exp_avg\w*", text)


def test_state_that_was_handed_out_stays():
    """A step is in place, and what was read before must not change with it; nor may what only looks at the state."""
    with start(cnn(), engine="jax") as engine, start(cnn()) as other:
        engine.step(SQUARE)
        state = engine.state()
        kept = {name: array.copy() for name, array in state.items()}
        engine.load_state(state)
        engine.evaluate(SQUARE)
        engine.gradients(SQUARE)
        engine.step(SQUARE)
        for name, array in kept.items():
            np.testing.assert_array_equal(state[name], array, err_msg=name)
        other.step(SQUARE)
        other.step(SQUARE)
        np.testing.assert_allclose(engine.state()["fc.weight"], other.state()["fc.weight"], rtol=1e-4, atol=1e-6)


def test_a_tensor_does_not_follow_its_array():
    framework = framework_of("jax")
    for number in range(20):  # JAX copies in the background, so that one try can pass by chance
        array = np.full((4096, 64), number, np.float32)
        tensor = framework.tensor(array)
        array[...] = -1
        np.testing.assert_array_equal(tensor, number)


def test_steps_leave_the_model_and_the_batch_alone():
    model = cnn()
    before = {name: value.const_value.numpy().copy() for name, value in model.graph.initializers.items()}
    with start(model, engine="jax") as engine:
        for _ in range(3):
            engine.step(SQUARE)
    for name, array in before.items():
        np.testing.assert_array_equal(model.graph.initializers[name].const_value.numpy(), array, err_msg=name)
