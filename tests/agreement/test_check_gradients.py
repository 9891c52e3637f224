"""`check_gradients`: right gradients pass, wrong ones are found and blamed on the right operator."""

from __future__ import annotations

import json

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import digits_mlp, small_cnn
from node_tests import onnx_node_tests
from onnx import TensorProto, helper
from representatives import examples
from typer.testing import CliRunner

import onward
from onward.cli.commands import app
from onward.rules.registry import RULES, Rule, make_rewrite

HEAD = '<ir_version: 10, opset_import: ["": 21]> '


def parsed(text):
    return onnx.parser.parse_model(HEAD + text)


def verdicts(report):
    return {row.x if row.order == 1 else f"{row.x}'": row.verdict for row in report.rows}


def unary(operator, shape="3"):
    return parsed(f"g (float[{shape}] x) => (float[{shape}] y) {{ y = {operator}(x) }}")


# ---- what is right passes --------------------------------------------------------------------------------------------

BLOCK = """g (int64[N,T] tokens, int64[N] labels) => (float loss, float[N,5] logits)
<float[11,8] embedding, float[8,24] qkv, float[8] scale, float[8] bias, float[8,5] head> {
    x = Gather(embedding, tokens)
    n = LayerNormalization(x, scale, bias)
    m = MatMul(n, qkv)
    q, k, v = Split<axis = 2, num_outputs = 3>(m)
    t = Transpose<perm = [0, 2, 1]>(k)
    s = MatMul(q, t)
    p = Softmax(s)
    a = MatMul(p, v)
    g = Gelu(a)
    r = Add(x, g)
    axes = Constant<value_ints = [1]>()
    c = ReduceMean<keepdims = 0>(r, axes)
    logits = MatMul(c, head)
    loss = SoftmaxCrossEntropyLoss(logits, labels)
}"""

LOOP = """g (float[3] x, float[3] w) => (float[3] y) {
    n = Constant<value_int = 3>()
    yes = Constant<value = bool {1}>()
    y = Loop(n, yes, x) <body = b (int64 i, bool go, float[3] s) => (bool on, float[3] t)
        { on = Identity(go) p = Mul(s, w) t = Tanh(p) }>
}"""


def transformer_block():
    """Integers that index: tokens below 11, labels below 5."""
    model = parsed(BLOCK)
    rng = np.random.default_rng(0)
    shapes = {"embedding": (11, 8), "qkv": (8, 24), "scale": (8,), "bias": (8,), "head": (8, 5)}
    del model.graph.initializer[:]
    for name, shape in shapes.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(rng.standard_normal(shape).astype("f"), name))
    return model


def training_cnn():
    """With statistics over the batch, and random numbers of a generator in the graph."""
    return onward.prepare(small_cnn(), loss="cross_entropy", optimizer="sgd")


MODELS = {
    "mlp": digits_mlp,
    "cnn": small_cnn,
    "transformer": transformer_block,
    "loop": lambda: parsed(LOOP),
    "training": lambda: onward.prepare(digits_mlp(), loss="cross_entropy:label_smoothing=0.1", optimizer="adamw"),
    "float16": lambda: parsed("g (float16[N,4] x) => (float16[N,4] y) { y = Softmax(x) }"),
    "old": lambda: onnx.parser.parse_model(
        '<ir_version: 7, opset_import: ["": 11]> g (float[2,3] x) => (float[2] y)'
        "{ s = Mul(x, x) y = ReduceMean<axes = [1], keepdims = 0>(s) }"
    ),
    "axes as a scalar": lambda: parsed(  # as in the standard's body of AffineGrid
        "g (float[3] x) => (float[3,1] y) { a = Constant<value_int = -1>() s = Sin(x) y = Unsqueeze(s, a) }"
    ),
    "only in float32 in runtimes": lambda: parsed("""g (float[2,3,6,6] x, float[2,3,6,6] w) => (float y)
    { z = Mul(x, w) l = LRN<size = 3>(z) t = Tanh(l) y = ReduceSum<keepdims = 0>(t) }"""),
    "finite only for some inputs": lambda: unary("Log", "50"),
}


@pytest.mark.parametrize("name", MODELS)
def test_right_gradients_pass_to_the_second_order(name):
    report = onward.check_gradients(MODELS[name](), order=2)
    assert report.ok and set(verdicts(report).values()) == {"ok"}, report
    assert max(row.difference for row in report.rows) < 1e-5
    assert any(row.by_differences for row in report.rows)
    assert {row.order for row in report.rows} == {1, 2}


def test_defaults():
    report = onward.check_gradients(transformer_block())
    assert (report.y, report.made_up) == ("loss", ("tokens", "labels"))
    assert [row.x for row in report.rows] == ["embedding", "qkv", "scale", "bias", "head"]
    report = onward.check_gradients(onward.prepare(digits_mlp(), loss="cross_entropy", freeze="fc1.*"))
    assert (report.y, [row.x for row in report.rows]) == ("loss", ["fc2.weight", "fc2.bias"])
    report = onward.check_gradients(digits_mlp())
    assert (report.y, report.rows[-1].x) == ("logits", "image")


def test_values_in_between():
    """By the results of Relu, the maxima of the pool have kinks: they are taken over several zeros."""
    report = onward.check_gradients(small_cnn(), y="flat", xs=["conv", "image", "relu"])
    assert verdicts(report) == {"conv": "ok", "image": "ok", "relu": "kink"}


def test_directions_are_not_the_weights_that_were_drawn_with_the_same_seed():
    """Along the weights before a BatchNormalization, the derivative is zero."""
    report = onward.check_gradients(training_cnn(), xs=["conv.weight"])
    assert abs(report.rows[0].by_differences) > 1e-3


def test_the_same_seed_gives_the_same_report():
    first, same, other = (onward.check_gradients(digits_mlp(), seed=seed) for seed in (1, 1, 2))
    assert first == same != other


def test_the_report_is_readable():
    text = str(onward.check_gradients(digits_mlp(), xs=["image", "fc1.bias"]))
    lines = text.splitlines()
    assert lines[0] == "derivatives of logits along random directions, in float64; random inputs: image"
    assert lines[1].split("  ")[0] == "x" and len(lines) == 4
    assert all(line.endswith("ok") for line in lines[2:])


# ---- what is wrong is found ------------------------------------------------------------------------------------------


def break_rule(monkeypatch, operator, function, domain=""):
    rule = RULES[domain, operator]
    assert isinstance(rule, Rule)
    broken = Rule(rule.operator, function(rule.function), rule.broadcasts, rule.keywords, rule.many, rule.positional)
    monkeypatch.setitem(RULES, (domain, operator), broken)


def doubled(rule):
    """Twice the derivative by the first input."""

    def broken(op, *arguments, **options):
        result = rule(op, *arguments, **options)
        first, *rest = result if isinstance(result, tuple | list) else (result,)
        return (first * 2.0, *rest)

    return broken


@pytest.mark.parametrize(
    ("operator", "node", "model", "order"),
    [
        ("Relu", "relu", digits_mlp, 1),
        ("MaxPool", "pool", small_cnn, 1),
        ("Conv", "conv", small_cnn, 2),
        ("Softmax", "", transformer_block, 1),
        ("LayerNormalization", "", transformer_block, 1),
        ("BatchNormalization", "train/bn/BatchNormalization", training_cnn, 1),
    ],
)
def test_a_wrong_rule_is_blamed(monkeypatch, operator, node, model, order):
    proto = model()
    break_rule(monkeypatch, operator, doubled)
    report = onward.check_gradients(proto, order=order)
    assert not report.ok
    assert (report.culprit.operator, report.culprit.node) == (operator, node)
    row = report.culprit.row
    if operator != "MaxPool":  # which has kinks there
        assert row.by_gradient == pytest.approx(2 * row.by_differences, rel=1e-4)
    assert f"{operator} (node `{node}`)" in str(report)


def test_what_lies_before_the_wrong_operator_is_wrong_and_what_lies_behind_is_not(monkeypatch):
    break_rule(monkeypatch, "Relu", doubled)
    found = verdicts(onward.check_gradients(digits_mlp()))
    assert {x for x, verdict in found.items() if verdict == "wrong"} == {"image", "fc1.weight", "fc1.bias"}


def test_an_operator_in_a_function_is_blamed(monkeypatch):
    break_rule(monkeypatch, "Tanh", doubled)
    text = """<ir_version: 10, opset_import: ["": 21, "mine": 1]> g (float[3] x) => (float[3] y) { y = mine.F(x) }
    <opset_import: ["": 21], domain: "mine"> F (a) => (c) { b = Tanh(a) c = Mul(a, b) }"""
    assert onward.check_gradients(onnx.parser.parse_model(text)).culprit.operator == "Tanh"


def test_a_wrong_rewrite_is_blamed(monkeypatch):
    monkeypatch.setitem(RULES, ("", "Gelu"), make_rewrite(("", "Gelu"), lambda op, x: x * op.Sigmoid(1.702 * x)))
    report = onward.check_gradients(transformer_block())
    assert report.culprit.operator == "Gelu"


def test_a_small_mistake_is_found(monkeypatch):
    break_rule(monkeypatch, "Tanh", lambda rule: lambda op, dy, x, **options: rule(op, dy, x, **options) * 1.0001)
    assert verdicts(onward.check_gradients(unary("Tanh"))) == {"x": "wrong"}
    assert verdicts(onward.check_gradients(unary("Tanh"), tolerance=1e-3)) == {"x": "ok"}


def test_only_the_second_order_may_be_wrong(monkeypatch):
    """The derivative of tanh in a form that has the wrong derivative itself: 1 - y² with y held fixed."""

    def frozen(rule):
        def broken(op, dy, x, *, y, **options):
            y = op.Cast(op.Cast(y * 2.0**40, to=ir.DataType.INT64), to=ir.DataType.FLOAT) / 2.0**40
            return dy * (1.0 - y * y)

        return broken

    break_rule(monkeypatch, "Tanh", frozen)
    report = onward.check_gradients(unary("Tanh"), order=2)
    assert verdicts(report) == {"x": "ok", "x'": "wrong"}
    assert report.culprit.operator == "Tanh"


# ---- kinks, and what is not finite -----------------------------------------------------------------------------------


@pytest.mark.parametrize("body", ["y = Relu(x)", "n = Neg(x) r = Relu(n) s = Relu(x) y = Sub(s, r)"])
def test_a_kink_is_a_kink(body):
    model = parsed(f"g (float[3] x) => (float[3] y) {{ {body} }}")
    report = onward.check_gradients(model, inputs={"x": np.zeros(3)})
    assert report.ok and verdicts(report) == {"x": "kink"}


def test_a_wrong_rule_at_a_kink_is_wrong(monkeypatch):
    break_rule(monkeypatch, "Relu", doubled)
    report = onward.check_gradients(unary("Relu"), inputs={"x": np.array([0, 1, 2])})
    assert verdicts(report) == {"x": "wrong"}


@pytest.mark.parametrize(
    ("operator", "x", "what"), [("Log", [1, -1, 1], "y"), ("Reciprocal", [1, 0, 1], "y"), ("Exp", [1, 800, 1], "y")]
)
def test_what_is_not_finite_is_reported_as_such(operator, x, what):
    report = onward.check_gradients(unary(operator), inputs={"x": np.array(x, np.float32)})
    assert not report.ok and [(row.verdict, row.note) for row in report.rows] == [("not finite", what)]


def test_a_gradient_that_is_not_finite(monkeypatch):
    break_rule(monkeypatch, "Exp", lambda rule: lambda op, dy, x, **options: dy / (x - x))
    report = onward.check_gradients(unary("Exp"))
    assert [(row.verdict, row.note) for row in report.rows] == [("not finite", "the gradient")]


# ---- inputs ----------------------------------------------------------------------------------------------------------


def test_inputs_are_used(tmp_path):
    report = onward.check_gradients(unary("Exp"), inputs={"x": np.full(3, 30.0)})
    assert abs(report.rows[0].by_differences) > 1e10 and not report.made_up
    np.savez(tmp_path / "inputs.npz", x=np.full(3, 30.0))
    assert onward.check_gradients(unary("Exp"), inputs=tmp_path / "inputs.npz") == report


def test_the_rest_is_made_up_to_fit():
    tokens = np.zeros((3, 7), np.int64)
    report = onward.check_gradients(transformer_block(), xs=["head"], inputs={"tokens": tokens})
    assert report.ok and report.made_up == ("labels",)


def test_inputs_that_y_does_not_need_may_be_given():
    inputs = {"tokens": np.zeros((2, 3), np.int64), "labels": np.zeros(2, np.int64)}
    assert onward.check_gradients(transformer_block(), y="logits", inputs=inputs).ok


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        ({"y": "logit"}, "no value `logit`", "logits"),
        ({"xs": ["fc1.weigth"]}, "no value `fc1.weigth`", "fc1.weight"),
        ({"y": "hidden", "xs": ["fc2.bias"]}, "`hidden` does not depend on `fc2.bias`", "remove"),
        ({"inputs": {"imagé": np.zeros((2, 64))}}, "no input `imagé`", "image"),
        (
            {"inputs": {"image": np.zeros((2, 63))}},
            r"`image` must be float32 \[N, 64\], not float64 \[2, 63\]",
            "such an array",
        ),
        ({"inputs": {"image": np.zeros((2, 64), bool)}}, "not bool", "such an array"),
    ],
)
def test_mistakes_are_named(arguments, message, hint):
    with pytest.raises(onward.Error, match=message) as error:
        onward.check_gradients(digits_mlp(), **arguments)
    assert hint in error.value.hint


def test_a_model_that_does_not_run_asks_for_inputs():
    model = parsed("g (int64[2] shape, float[3,5] x) => (float[M,N] y) { y = Reshape(x, shape) }")
    with pytest.raises(onward.Error, match="does not run") as error:
        onward.check_gradients(model)
    assert "inputs" in error.value.hint
    assert onward.check_gradients(model, inputs={"shape": np.array([5, 3])}).ok


def test_dimensions_are_large_enough():
    model = parsed("g (float[N,1,H,W] x) => (float[N,1,P,Q] y) { y = AveragePool<kernel_shape = [7, 7]>(x) }")
    assert onward.check_gradients(model).ok


def test_random_results_are_refused():
    model = parsed("""g (float[99] x) => (float[99] y)
    { r = Constant<value_float = 0.5>() t = Constant<value = bool {1}>() y = Dropout(x, r, t) }""")
    with pytest.raises(onward.Error, match="random"):
        onward.check_gradients(model)


# ---- precision -------------------------------------------------------------------------------------------------------


def test_types_that_the_standard_does_not_have_in_float64():
    """The scales of Resize, which are computed, and the scale of DequantizeLinear."""
    model = parsed("""g (float[1,1,4] x, float[3] s) => (float[1,1,N] y)
    { one = Constant<value = int8[1,1,4] {1, 2, 3, 4}>() t = Constant<value_float = 0.5>() d = DequantizeLinear(one, t)
      z = Mul(x, d) r = Round(s) c = Constant<value_floats = [1.0, 1.0, 2.0]>() f = Mul(r, c)
      e = Resize<mode = "linear">(z, , f) y = Tanh(e) }""")
    assert verdicts(onward.check_gradients(model, xs=["x"], inputs={"s": np.ones(3)})) == {"x": "ok"}


def test_an_operator_with_its_own_precision():
    test = onnx_node_tests()["test_attention_4d_gqa_causal_nonpad_decode"]
    names = [value.name for value in test.proto().graph.input]
    assert onward.check_gradients(test.proto(), inputs=dict(zip(names, test.data[0][0], strict=True))).ok


# ---- random graphs ---------------------------------------------------------------------------------------------------

UNARY = ["Tanh", "Sigmoid", "Softplus", "Sin", "Gelu", "Softmax", "Erf", "Abs", "Relu", "Elu", "Identity"]
BINARY = ["Add", "Mul", "Sub", "Max", "MatMul"]


@st.composite
def graphs(draw):
    values, nodes = ["x", "w"], []
    for i in range(draw(st.integers(1, 6))):
        operator = draw(st.sampled_from(UNARY + BINARY))
        inputs = [draw(st.sampled_from(values)) for _ in range(2 if operator in BINARY else 1)]
        nodes.append(helper.make_node(operator, inputs, [f"v{i}"], name=f"n{i}"))
        values.append(f"v{i}")
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [3, 3]) for name in ("x", "w", values[-1])]
    graph = helper.make_graph(nodes, "random", ports[:2], ports[2:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@examples(8)
@given(model=graphs())
def test_random_graphs_pass(model):
    report = onward.check_gradients(model, order=2)
    assert report.ok, report


# ---- the command -----------------------------------------------------------------------------------------------------


def run(*arguments, code=0):
    result = CliRunner().invoke(app, ["check-gradients", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.stdout


@pytest.fixture
def digits(tmp_path):
    onnx.save(digits_mlp(), tmp_path / "digits.onnx")
    return tmp_path / "digits.onnx"


def test_the_command_prints_a_table(digits):
    text = run(digits, "--of", "logits", "--wrt", "fc1.*", "--order", "2", "--directions", "2")
    assert [line.split()[0] for line in text.splitlines()[2:]] == ["fc1.weight", "fc1.bias"] * 2
    assert text.count(" ok\n") == 4


def test_the_command_fails_where_a_gradient_is_wrong(digits, monkeypatch):
    break_rule(monkeypatch, "Relu", doubled)
    assert "first wrong operator: Relu (node `relu`)" in run(digits, code=1)
    found = json.loads(run(digits, "--json", code=1))
    assert not found["ok"] and found["culprit"]["operator"] == "Relu"
    assert {row["x"]: row["verdict"] for row in found["rows"]}["image"] == "wrong"


def test_inputs_that_are_none_are_refused(digits, tmp_path):
    def said(path):
        result = CliRunner().invoke(app, ["check-gradients", str(digits), "--inputs", str(path)])
        assert result.exit_code == 1, result.output
        return result.stderr

    batch = tmp_path / "batch.npz"
    batch.write_bytes(b"")
    assert "is not an .npz file" in said(batch)
    batch.unlink()
    batch.symlink_to("/dev/zero")
    assert "a device, not a file" in said(batch)
    assert "No such file" in said(tmp_path / "none.npz")


def test_the_command_takes_inputs(digits, tmp_path):
    np.savez(tmp_path / "batch.npz", image=np.full((1, 64), np.nan, np.float32))
    found = json.loads(run(digits, "--inputs", tmp_path / "batch.npz", "--json", code=1))
    assert found["made_up"] == [] and found["rows"][0]["by_differences"] == "nan"
