"""LSTM, GRU and RNN: gradients as PyTorch has them, and results as ONNX Runtime's own kernels and the equations do.

ONNX Runtime departs from the standard here, so that the equations alone judge: it has no layout 1; a sequence without
elements ends with zeros, not with its first state; LSTM clips neither the input of h nor what peepholes add; and the
defaults of alpha and beta are 0 for Affine, ScaledTanh and ThresholdedRelu.
"""

import gradcheck
import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from marks import needs
from representatives import examples
from rule_cases.recurrent import ACTIVATIONS, EVALUATORS, FUNCTIONS, GATES, OUTPUTS, layer
from sessions import session
from torch_recurrent import loss_of_all, torch_gradients

from onward.differentiate import gradient

DIRECTIONS = ["forward", "reverse", "bidirectional"]
gradcheck.OPERATORS += EVALUATORS
EVERYTHING = {"LSTM": "bhcp", "GRU": "bh", "RNN": "bh"}


def run(proto, inputs):
    loaded = session(proto)
    names = [value.name for value in loaded.get_outputs()]
    return dict(zip(names, loaded.run(None, {v.name: inputs[v.name] for v in loaded.get_inputs()}), strict=True))


def rewritten(proto, inputs):
    """The outputs of a model after it was made ready for differentiation, by ONNX Runtime."""
    outputs = [value.name for value in proto.graph.output]
    results = run(gradient(proto, outputs[0], ["X"]).to_proto(), inputs)
    return {name: results[name] for name in outputs}


def by_the_equations(proto, inputs):
    evaluator = onnx.reference.ReferenceEvaluator(gradcheck.to_double(proto), new_ops=EVALUATORS)
    names = [value.name for value in proto.graph.output]
    return dict(zip(names, evaluator.run(None, gradcheck.double(proto, inputs)), strict=True))


def assert_same(results, expected, rtol=2e-5):
    for name, wanted in expected.items():
        np.testing.assert_allclose(results[name], wanted, rtol=rtol, atol=rtol, err_msg=name)


# ---- PyTorch ---------------------------------------------------------------------------------------------------------


@needs("torch")
@pytest.mark.parametrize(
    "options", [{}, {"layout": 1}, {"lengths": [3, 1, 4]}, {"layout": 1, "lengths": [2, 4, 1]}], ids=str
)
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
@pytest.mark.parametrize("operator", GATES)
def test_torch(operator, direction, options):
    extra = {"linear_before_reset": 1} if operator == "GRU" else {}
    attributes = {"direction": direction, **extra, **options}
    proto, inputs = layer(
        operator, "bhc" if operator == "LSTM" else "bh", outputs=OUTPUTS[operator], dtype=np.float64,
        sizes=(4, 3, 2, 5), **attributes,
    )  # fmt: skip
    rng = np.random.default_rng(2)
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in proto.graph.output}
    seeds = {f"d{name}": rng.standard_normal(shape) for name, shape in shapes.items()}
    expected = torch_gradients(operator, inputs, seeds, attributes)
    results = run(gradient(loss_of_all(proto), "loss", list(expected)).to_proto(), inputs | seeds)
    assert_same({name: results[f"{name}/grad"] for name in expected}, expected, rtol=1e-9)


# ---- ONNX Runtime's own kernels --------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("operator", GATES)
def test_kernels_of_onnxruntime(operator, direction):
    extra = {
        "GRU": [{"linear_before_reset": 0}, {"linear_before_reset": 1, "clip": 0.5}],
        "LSTM": [{"input_forget": 1}],
    }
    for options in [{"lengths": [2, 4]}, *extra.get(operator, [{"clip": 0.5}])]:
        proto, inputs = layer(
            operator,
            EVERYTHING[operator],
            outputs=OUTPUTS[operator],
            sizes=(4, 2, 3, 2),
            direction=direction,
            **options,
        )
        assert_same(rewritten(proto, inputs), run(proto, inputs))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name):
    """Each function where there is one alone; by the kernel with numbers given, by the equations without."""
    proto, inputs = layer(
        "RNN", "b", activations=[name], activation_alpha=[0.3], activation_beta=[0.6], sizes=(2, 9, 2, 2)
    )
    assert_same(rewritten(proto, inputs), run(proto, inputs))
    proto, inputs = layer("RNN", "b", activations=[name], sizes=(2, 9, 2, 2))
    assert_same(rewritten(proto, inputs), by_the_equations(proto, inputs))


# ---- any combination -------------------------------------------------------------------------------------------------


@st.composite
def layers(draw):
    operator = draw(st.sampled_from(list(GATES)))
    steps, batch = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    attributes = {"direction": draw(st.sampled_from(DIRECTIONS)), "layout": draw(st.integers(0, 1))}
    if operator != "RNN":
        attributes["linear_before_reset" if operator == "GRU" else "input_forget"] = draw(st.integers(0, 1))
    if draw(st.booleans()):
        attributes["clip"] = draw(st.sampled_from([0.25, 1.0]))
    if draw(st.booleans()):
        count = len(FUNCTIONS[operator]) * (1 + (attributes["direction"] == "bidirectional"))
        bounded = ["HardSigmoid", "Sigmoid", "Softsign", "Tanh", "ScaledTanh", "Softplus", "Elu"]
        attributes["activations"] = draw(st.lists(st.sampled_from(bounded), min_size=count, max_size=count))
        attributes["activation_alpha"] = draw(st.lists(st.sampled_from([0.25, 0.5]), min_size=1, max_size=2))
    outputs = draw(st.lists(st.sampled_from(OUTPUTS[operator]), min_size=1, unique=True))
    lengths = draw(st.none() | st.lists(st.integers(0, steps), min_size=batch, max_size=batch))
    optional = [name for name in EVERYTHING[operator] if draw(st.booleans())]
    return layer(operator, optional, lengths=lengths, outputs=outputs, sizes=(steps, batch, 2, 3), **attributes)


@examples(10)
@given(layers(), st.booleans())
def test_any_layer(case, symbolic):
    """Results by the equations, gradients by differences."""
    proto, inputs = case
    proto = gradcheck.with_symbolic_dims(proto) if symbolic else proto
    assert_same(rewritten(proto, inputs), by_the_equations(proto, inputs))
    gradcheck.check(proto, inputs, order=1)


@pytest.mark.parametrize("operator", GATES)
def test_gradients_of_weights_are_not_carried_through_the_steps(operator):
    """They are one product after the last step; only the gradients of states go from step to step."""
    proto, _ = layer(operator, direction="bidirectional")
    scans = [node for node in gradient(proto, "Y", ["X", "R"]).graph if node.op_type == "Scan"]
    states = [len(node.inputs) - node.attributes["num_scan_inputs"].as_int() for node in scans]
    assert states == [len(OUTPUTS[operator]) - 1] * 4


# ---- where a layer stands, and what it is given ----------------------------------------------------------------------


def test_beyond_the_end_may_be_anything():
    proto, inputs = layer("LSTM", "bhc", direction="bidirectional", lengths=[2, 1])
    wanted = run(gradient(proto, "Y", ["X", "W", "R"]).to_proto(), inputs)
    inputs["X"][2, 0], inputs["X"][1:, 1] = np.inf, np.nan
    assert_same(run(gradient(proto, "Y", ["X", "W", "R"]).to_proto(), inputs), wanted)


@pytest.mark.parametrize("operator", GATES)
def test_half_precision(operator):
    proto, inputs = layer(operator, "bh", direction="bidirectional", lengths=[2, 3], dtype=np.float16)
    gradcheck.check_on_onnxruntime(proto, inputs, rtol=2e-2)


@pytest.mark.parametrize("operator", GATES)
def test_old_operator_set(operator):
    proto, inputs = layer(operator, "bh", lengths=[2, 3], opset=7)
    gradcheck.check(proto, inputs, order=1)


def test_inside_a_branch_where_no_type_is_stated():
    model = onnx.parser.parse_model("""
    <ir_version: 10, opset_import: ["" : 21]>
    g (bool c, float[T,2,3] x, float[1,16,3] w, float[1,16,4] r) => (float[1,2,4] y) {
      y = If (c) <
        then_branch = t () => (float[1,2,4] yt) { s = Sin(x)  none, yt = LSTM <hidden_size = 4> (s, w, r) },
        else_branch = e () => (float[1,2,4] ye) { none2, ye = LSTM <hidden_size = 4, direction = "reverse"> (x, w, r) }
      >
    }""")
    rng = np.random.default_rng(0)
    inputs = {
        name: rng.standard_normal(shape) for name, shape in {"x": (3, 2, 3), "w": (1, 16, 3), "r": (1, 16, 4)}.items()
    }
    for truth in (True, False):
        gradcheck.check(model, {"c": np.array(truth), **inputs}, order=2)
