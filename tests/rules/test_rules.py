"""The whole table of derivatives, by the standard's own node tests and by cases of ours; a new rule needs no edit.

Every node test that has floating-point inputs and outputs is either compared or listed with the reason why not. Those
of one node are compared in full. Those of several, the bodies of functions, are compared to the first order.

By differences all are compared, always. What follows from that nearly always (the second order, shapes that are not
known, ONNX Runtime) is quick for one case of each operator, set of attributes and rank, and slow for the others.
"""

import collections

import gradcheck
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from control_flow import CASES as CONTROL_FLOW
from node_tests import onnx_node_tests
from onnx import defs
from representatives import by_attributes_and_ranks, by_mode, chosen, first_of_each
from rule_tables import ALL, BODIES, CASES, EDGES, EXCLUDED, EXCLUDED_ON_ONNXRUNTIME, known, without_onnxruntime

import onward
from onward.differentiate import sweep, vjp
from onward.differentiate.expand import expand
from onward.model import load
from onward.rules import RULES, NoGradient, Rewrite
from onward.rules.registry import has_gradient
from onward.transform.context import Context
from onward.transform.opset import convert_opset

QUICK = {*first_of_each(CASES, by_attributes_and_ranks), *first_of_each(BODIES, by_mode)}
OF_EACH_MODE = {*first_of_each(CASES, by_mode), *first_of_each(BODIES, by_mode)}
ON_ONNXRUNTIME = {name for name in CASES if not without_onnxruntime(name)}


NEED_SIZES = {"convolution_conv_same_beyond_stride"}
"""Padding that ONNX Runtime computes differently is written out, and refused where it depends on unknown sizes."""


@pytest.mark.parametrize("name", [name for name in CASES if name not in QUICK])
def test_rule_agrees_with_differences(name):
    gradcheck.check(*CASES[name], order=1)


@pytest.mark.parametrize("name", chosen(CASES, QUICK))
def test_rule_agrees_with_differences_to_the_second_order(name):
    gradcheck.check(*CASES[name])


@pytest.mark.parametrize("name", chosen(CASES, OF_EACH_MODE - ON_ONNXRUNTIME))
def test_rule_agrees_with_no_dimension_known(name):
    """What ONNX Runtime computes with no dimension known is compared below."""
    proto, inputs = CASES[name]
    if name in NEED_SIZES:
        with pytest.raises(onward.Error, match="depends on unknown sizes"):
            gradcheck.check(gradcheck.with_symbolic_dims(proto), inputs, order=1)
        return
    gradcheck.check(gradcheck.with_symbolic_dims(proto), inputs, order=1)


def test_linear_attention_agrees_with_no_shape_known():
    """Its state comes from an input, of which not even the rank is known."""
    proto, inputs = CASES["test_linear_attention_decode_step"]
    proto = onnx.ModelProto.FromString(proto.SerializeToString())
    for value in proto.graph.input:
        value.type.tensor_type.ClearField("shape")
    gradcheck.check(proto, inputs, order=1)


@pytest.mark.parametrize("name", chosen(BODIES, QUICK))
def test_body_agrees_with_differences(name):
    gradcheck.check(*BODIES[name], order=1)


@pytest.mark.parametrize("name", chosen(ALL, OF_EACH_MODE))
def test_rule_runs_on_onnxruntime(name):
    """With and without dimensions: the reference evaluator does not mind shapes that are declared wrongly."""
    if reason := without_onnxruntime(name):
        pytest.skip(reason)
    gradcheck.check_on_onnxruntime(*ALL[name], symbolic=name in ON_ONNXRUNTIME - NEED_SIZES)


def test_nearly_all_rules_run_on_onnxruntime():
    left_out = [name for name in ALL if without_onnxruntime(name)]
    assert len(left_out) <= 0.02 * len(ALL), left_out


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


REWRITTEN = {
    name: case
    for name, case in onnx_node_tests().items()
    if any(node.domain == "" and isinstance(known(node), Rewrite) for node in case.proto().graph.node)
}


@pytest.mark.parametrize("name", REWRITTEN)
def test_rewrite_computes_the_same(name):
    """What an operator is replaced by gives the outputs that its node test expects."""
    case = REWRITTEN[name]
    proto = case.proto()
    inputs = dict(zip((value.name for value in proto.graph.input), case.data[0][0], strict=False))
    outputs = [value.name for value in proto.graph.output]
    model = load(proto) if load(proto).opset >= 18 else convert_opset(proto, 21)
    context = Context(model.copy())
    expand(context, outputs[0], gradcheck.differentiable(proto, inputs))
    model = context.model.to_proto()
    assert not any(isinstance(known(node), Rewrite) for node in model.graph.node)
    computed = gradcheck.evaluate(model, inputs)
    for output, wanted in zip(outputs, case.data[0][1], strict=True):
        np.testing.assert_allclose(np.asarray(computed[output]), wanted, rtol=case.rtol, atol=case.atol)


def test_the_table_says_which_inputs_have_a_gradient(monkeypatch):
    """`has_gradient`, which the checker and the choice of parameters ask, against what the rules give."""
    given = collections.defaultdict(set)
    derivatives = sweep._derivatives

    def spy(op, node, *others):
        found = derivatives(op, node, *others)
        values = {value for value, _ in found}
        for i, value in enumerate(node.inputs):
            if node.domain == "" and value is not None and value.dtype in sweep._FLOATS:
                given[node.op_type, i].add(value in values)
        return found

    monkeypatch.setattr(sweep, "_derivatives", spy)
    for proto, inputs in some_cases_of_each_operator():
        for y in gradcheck.float_outputs(proto):
            vjp(proto, y, gradcheck.differentiable(proto, inputs))
    wrong = [where for where, answers in given.items() if has_gradient("", *where) != (True in answers)]
    assert not wrong
    assert len(given) > 200


def some_cases_of_each_operator(most=4):
    counts = collections.Counter()
    for proto, inputs in CASES.values():
        operators = frozenset(node.op_type for node in proto.graph.node)
        counts[operators] += 1
        if counts[operators] <= most:
            yield proto, inputs


def test_every_rule_has_a_case():
    """Of the standard: those of other domains have tests of their own."""
    protos = [proto for proto, *_ in (*CASES.values(), *CONTROL_FLOW.values(), *EDGES.values())]
    protos += [case.proto() for case in REWRITTEN.values()]
    operators = {
        ("" if node.domain == "ai.onnx" else node.domain, node.op_type) for proto in protos for node in proto.graph.node
    }
    ruled = {operator for operator, rule in RULES.items() if not isinstance(rule, NoGradient)}
    assert {(domain, name) for domain, name in ruled if domain == "" and defs.has(name)} - operators == set()


def test_every_exclusion_is_of_a_case():
    names = onnx_node_tests()
    assert [name for name in EXCLUDED if name not in names] == []
    assert [name for name in EXCLUDED_ON_ONNXRUNTIME if name not in ALL] == []


@pytest.mark.parametrize(
    "names", [OF_EACH_MODE & CASES.keys(), pytest.param(CASES.keys(), marks=pytest.mark.slow)], ids=["modes", "all"]
)
def test_rules_emit_only_what_has_rules(names):
    """Closure: whatever a rule emits can be differentiated again."""
    emitted = set()
    for proto, inputs in (CASES[name] for name in names):
        xs = gradcheck.differentiable(proto, inputs)
        for y in gradcheck.float_outputs(proto):
            emitted |= {(node.domain, node.op_type) for node in vjp(proto, y, xs).graph.all_nodes()}
    assert {operator for operator in emitted if operator not in RULES} == set()
