"""Calls that lowering writes for their types compute what ONNX Runtime computes from the functions themselves."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from onward.lowering import lower
from onward.lowering.optimize import inline_typed_calls
from onward.model import Model, load
from onward.recipe.prepare import prepare
from onward.transform.context import Context

HEADER = '<ir_version: 10, opset_import: ["": 20, "local": 1]>'
SCALED = """
<opset_import: ["": 20], domain: "local">
scaled <factor: float = 3.0> (x) => (y, unused) {
    number = Constant <value_float: float = @factor> ()
    cast = CastLike(number, x)
    y = Mul(x, cast)
    unused = Identity(y)
}
"""
TWICE = """
<opset_import: ["": 20, "local": 1], domain: "local">
twice <factor: float> (x, bias) => (y) {
    once, rest = local.scaled <factor: float = @factor> (x)
    again, more = local.scaled (once)
    y = Add(again, bias)
}
"""
BRANCH = """
<opset_import: ["": 20], domain: "local">
branch (x, flag) => (y) {
    y = If (flag) <then_branch = g1 () => (a) { a = Neg(x) }, else_branch = g2 () => (b) { b = Abs(x) }>
}
"""


def model(body: str, *functions: str, types: str = "float[2] x, float[2] b, bool c", out: str = "float[2] y") -> Model:
    return load(onnx.parser.parse_model(f"{HEADER} g ({types}) => ({out}) {{ {body} }} {''.join(functions)}"))


CASES = {
    "an attribute and a default": model("y = local.twice <factor: float = 0.5> (x, b)", SCALED, TWICE),
    "two calls": model("a, _ = local.scaled (x) z, _1 = local.scaled (b) y = Add(a, z)", SCALED),
    "the same call twice": model("a, _ = local.scaled (x) z, _1 = local.scaled (x) y = Add(a, z)", SCALED),
    "two outputs that are one value": model("y, z = local.scaled (x)", SCALED, out="float[2] y, float[2] z"),
    "the same call for two outputs": model(
        "y, _ = local.scaled (x) z, _1 = local.scaled (x)", SCALED, out="float[2] y, float[2] z"
    ),
    "another type": model(
        "y, _ = local.scaled (x) z, _1 = local.scaled (b)",
        SCALED,
        types="float[2] x, double[2] b, bool c",
        out="float[2] y, double[2] z",
    ),
    "a graph in a function": model("a = local.branch (x, c) y, _ = local.scaled (a)", SCALED, BRANCH),
}


def results(proto: onnx.ModelProto) -> list[np.ndarray]:
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    given = {"x": np.array([1.5, -2], np.float32), "b": np.array([0.1, 7]), "c": np.array(True)}
    kinds = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(bool)": np.bool_}
    return session.run(None, {i.name: given[i.name].astype(kinds[i.type]) for i in session.get_inputs()})


@pytest.mark.parametrize("name", CASES)
def test_calls_compute_the_same(name: str) -> None:
    before, after = CASES[name], CASES[name].copy()
    inline_typed_calls(Context(after))
    proto = after.to_proto()
    onnx.checker.check_model(proto, full_check=True)
    for wanted, found in zip(results(before.to_proto()), results(proto), strict=True):
        assert wanted.dtype == found.dtype
        np.testing.assert_array_equal(found, wanted)


def test_calls_share_what_they_have_in_common() -> None:
    made = CASES["two calls"].copy()
    inline_typed_calls(Context(made))
    kinds = [node.op_type for node in made.graph]
    assert kinds.count("Constant") == kinds.count("Cast") == 1
    assert "CastLike" not in kinds
    assert not made.functions


def test_a_function_with_a_nested_graph_is_left_to_the_inliner() -> None:
    made = CASES["a graph in a function"].copy()
    inline_typed_calls(Context(made))
    assert [name for _, name, _ in made.functions] == ["branch"]
    assert {node.op_type for node in made.graph if node.domain} == {"branch"}


def test_no_use_of_a_replaced_call_is_left() -> None:
    made = CASES["an attribute and a default"].copy()
    inline_typed_calls(Context(made))
    users = [user for node in made.graph for output in node.outputs for user in output.consumers()]
    assert all(isinstance(user.graph, ir.Graph) for user in users)


def test_integers_are_followed_where_no_function_is_called() -> None:
    """An optimizer that is a function does not keep shapes in the forward pass from being known."""
    text = f"""{HEADER} g (float[4, 3] x) => (float[4, 3] y) <float[3] w = {{2, 3, 4}}> {{
        shape = Shape(x)
        wide = Expand(w, shape)
        y = Mul(x, wide)
    }}"""
    step = lower(prepare(onnx.parser.parse_model(text), loss="mse", optimizer="adam:lr=0.1"))
    assert "NonZero" not in {node.op_type for node in step.graph}, "axes to sum over are looked for at run time"
