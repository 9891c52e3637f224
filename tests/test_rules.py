"""The whole table of derivatives, by the standard's own node tests and by cases of ours; a new rule needs no edit."""

import importlib
import pkgutil

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

import gradcheck
import rule_cases
from conftest import onnx_node_tests
from onward.differentiate import vjp
from onward.rules import RULES, NoGradient, Rewrite, Rule
from onward.rules.registry import lookup
from test_control_flow import CASES as CONTROL_FLOW

AT_A_KINK = "its example lies on a kink, where differences see both sides"
AT_AN_END = "its example lies at the end of the domain, where the derivative is infinite"
SINGLE = "the reference evaluator computes it in float32"
NOT_FINITE = "its example holds infinities"

EXCLUDED = {
    "test_acosh_example": AT_AN_END,
    "test_celu_float16": AT_A_KINK,
    "test_elu_example": AT_A_KINK,
    "test_gelu_default_1": SINGLE,
    "test_gelu_default_2": SINGLE,
    "test_leakyrelu_example": AT_A_KINK,
    "test_maxpool_3d_dilations": "its example has ties",
    "test_maxpool_3d_dilations_use_ref_impl": "its example has ties",
    "test_mod_float_edge_cases_fmod_0_float16": NOT_FINITE,
    "test_mod_float_edge_cases_fmod_0_float32": NOT_FINITE,
    "test_mod_float_edge_cases_fmod_0_float64": NOT_FINITE,
    "test_mod_float_edge_cases_fmod_1_float16": NOT_FINITE,
    "test_mod_float_edge_cases_fmod_1_float32": NOT_FINITE,
    "test_mod_float_edge_cases_fmod_1_float64": NOT_FINITE,
    "test_pow": AT_AN_END,
    "test_reduce_min_default_axes_keepdims_example": "its example has a tie of three",
    "test_scan_sum": "the reference evaluator does not run Scan of operator set 8",
    "test_selu_example": AT_A_KINK,
    "test_thresholdedrelu_example": AT_A_KINK,
}
"""Node tests that cannot be compared with differences, and why."""

ALIGN_CORNERS = "ONNX Runtime's Resize departs from the standard's text for align_corners with scales"
NO_ARRAYS = "ONNX Runtime takes no arrays of this type from Python"

EXCLUDED_ON_ONNXRUNTIME = {
    "test_dequantizelinear_e4m3fn": NO_ARRAYS,
    "test_dequantizelinear_e4m3fn_float16": NO_ARRAYS,
    "test_dequantizelinear_e4m3fn_zero_point": NO_ARRAYS,
    "test_dequantizelinear_float4e2m1": NO_ARRAYS,
    "test_dequantizelinear_int2": NO_ARRAYS,
    "test_dequantizelinear_int4": NO_ARRAYS,
    "test_dequantizelinear_uint2": NO_ARRAYS,
    "test_dequantizelinear_uint4": NO_ARRAYS,
    "test_mod_float16_mixed_sign_fmod_0": "ONNX Runtime has no Mod of floats without fmod",
    "test_mod_float32_mixed_sign_fmod_0": "ONNX Runtime has no Mod of floats without fmod",
    "test_mod_float64_mixed_sign_fmod_0": "ONNX Runtime has no Mod of floats without fmod",
    "test_resize_downsample_scales_cubic_align_corners": ALIGN_CORNERS,
    "test_resize_downsample_scales_linear_align_corners": ALIGN_CORNERS,
    "test_rnn_seq_length": "its example saturates, where float32 has no digits for the slope of Tanh",
}


def comparable_node_tests():
    """Node tests of operators that have rules, with floating-point inputs and outputs."""
    for case in onnx_node_tests().values():
        proto = case.proto()
        nodes = proto.graph.node
        if len(nodes) != 1 or not isinstance(lookup(ir.serde.deserialize_node(nodes[0])), Rule | Rewrite):
            continue
        inputs = dict(zip((v.name for v in proto.graph.input), case.data[0][0], strict=False))
        if gradcheck.differentiable(proto, inputs) and gradcheck.float_outputs(proto):
            yield case.name, proto, inputs


FAMILIES = [
    importlib.import_module(f"rule_cases.{module.name}") for module in pkgutil.iter_modules(rule_cases.__path__)
]
for family in FAMILIES:
    EXCLUDED |= getattr(family, "EXCLUDED", {})
    gradcheck.OPERATORS += getattr(family, "EVALUATORS", [])

CASES = {name: (proto, inputs) for name, proto, inputs in comparable_node_tests() if name not in EXCLUDED}
EDGES = {}
for family in FAMILIES:
    short = family.__name__.partition(".")[2]
    CASES |= {f"{short}_{name}": case for name, case in family.CASES.items()}
    EDGES |= {f"{short}_{name}": edge for name, edge in getattr(family, "EDGES", {}).items()}
    EDGES |= {f"{short}_{name}": edge for name, edge in getattr(family, "STRAIGHT_THROUGH", {}).items()}


@pytest.mark.parametrize("name", CASES)
def test_rule_agrees_with_differences(name):
    gradcheck.check(*CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_rule_agrees_with_no_dimension_known(name):
    proto, inputs = CASES[name]
    gradcheck.check(gradcheck.with_symbolic_dims(proto), inputs, order=1)


@pytest.mark.parametrize("name", CASES)
def test_rule_runs_on_onnxruntime(name):
    if name in EXCLUDED_ON_ONNXRUNTIME:
        pytest.skip(EXCLUDED_ON_ONNXRUNTIME[name])
    proto, inputs = CASES[name]
    proto = gradcheck.for_onnxruntime(proto)
    if proto is None:
        pytest.skip("ONNX Runtime does not load this operator set")
    gradcheck.check_on_onnxruntime(proto, inputs)


@pytest.mark.parametrize("name", EDGES)
def test_rule_at_an_edge(name):
    """Kinks, ties and saturation, where differences say nothing: what PyTorch has there."""
    proto, inputs, dy, expected = EDGES[name]
    model = vjp(proto, "y", list(expected)).to_proto()
    given = {**inputs, "dy": dy.astype(np.float32)}
    session = ort.InferenceSession(model.SerializeToString())
    grads = session.run(None, {value.name: given[value.name] for value in session.get_inputs()})
    for wanted, grad in zip(expected.values(), grads, strict=True):
        np.testing.assert_allclose(grad, wanted, rtol=1e-6)


def test_every_rule_has_a_case():
    protos = [proto for proto, _ in (*CASES.values(), *CONTROL_FLOW.values())]
    operators = {
        ("" if node.domain == "ai.onnx" else node.domain, node.op_type) for proto in protos for node in proto.graph.node
    }
    assert {operator for operator, rule in RULES.items() if not isinstance(rule, NoGradient)} - operators == set()


def test_rules_emit_only_what_has_rules():
    """Closure: whatever a rule emits can be differentiated again."""
    emitted = set()
    for proto, inputs in CASES.values():
        xs = gradcheck.differentiable(proto, inputs)
        for y in gradcheck.float_outputs(proto):
            emitted |= {(node.domain, node.op_type) for node in vjp(proto, y, xs).graph.all_nodes()}
    assert {operator for operator in emitted if operator not in RULES} == set()
