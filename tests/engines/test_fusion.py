"""Nodes that amount to one operator, found and computed by that: the same numbers, or left as they are."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from marks import needs
from onnx import numpy_helper, parser

from onward.engines.framework import framework_class
from onward.engines.framework_engine import array_function
from onward.engines.fusion import Attention, Linear
from onward.model import load

pytestmark = needs("torch")
ENGINES = pytest.mark.parametrize("engine", ["torch", pytest.param("jax", marks=needs("jax"))])

N, HEADS, LENGTH, SIZE = 2, 3, 5, 4
CAUSAL = np.where(np.tri(LENGTH), 0, -np.inf).astype("f")
SWAPPED = "t = Transpose<perm = [0, 1, 3, 2]>(k)"
RESHAPED = """
    through = Constant<value = int64[3] {-1, 5, 4}>()  flat = Reshape(k, through)
    turned = Transpose<perm = [0, 2, 1]>(flat)
    to = Constant<value = int64[4] {2, 3, 4, 5}>()  t = Reshape(turned, to)
"""
GUARD = "nan = IsNaN(soft)  zero = Constant<value = float {0.0}>()  w = Where(nan, zero, soft)"


def attention(*lines: str, mask: np.ndarray | None = None) -> onnx.ModelProto:
    shape = f"float[{N}, {HEADS}, {LENGTH}, {SIZE}]"
    model = parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 20]>
        g ({shape} q, {shape} k, {shape} v) => ({shape} y) {{ {" ".join(lines)} }}"""
    )
    if mask is not None:
        model.graph.initializer.append(numpy_helper.from_array(mask, "mask"))
    return model


PLAIN = (SWAPPED, "s = MatMul(q, t)", "soft = Softmax(s)", "y = MatMul(soft, v)")
HALF = "half = Constant<value = float {0.5}>()"
CASES = {
    "nothing but products": (PLAIN, None),
    "scaled scores": (
        (SWAPPED, HALF, "p = MatMul(q, t)", "s = Mul(p, half)", "soft = Softmax(s)", "y = MatMul(soft, v)"),
        None,
    ),
    "scaled queries and keys, causal": (
        (RESHAPED, HALF, "a = Mul(q, half)", "b = Div(t, half)", "p = MatMul(a, b)", "s = Add(p, mask)")
        + ("soft = Softmax<axis = -1>(s)", "y = MatMul(soft, v)"),
        CAUSAL,
    ),
    "guarded": (
        (SWAPPED, "p = MatMul(q, t)", "s = Add(mask, p)", "soft = Softmax(s)", GUARD, "y = MatMul(w, v)"),
        CAUSAL,
    ),
    "some mask": (
        (SWAPPED, "p = MatMul(q, t)", "s = Add(p, mask)", "soft = Softmax(s)", "y = MatMul(soft, v)"),
        np.random.default_rng(1).standard_normal((N, 1, LENGTH, LENGTH)).astype("f"),
    ),
}
OTHERS = {
    "a row that sees nothing": (CASES["guarded"][0], np.full((LENGTH, LENGTH), -np.inf, "f")),
    "a factor for each key": (
        (SWAPPED, "p = MatMul(q, t)", "s = Mul(p, mask)", "soft = Softmax(s)", "y = MatMul(soft, v)"),
        np.arange(LENGTH, dtype="f"),
    ),
    "reshapes that do more than swap": (
        ("to = Constant<value = int64[4] {2, 3, 4, 5}>()", "through = Constant<value = int64[3] {6, 4, 5}>()")
        + ("flat = Reshape(k, through)", "turned = Transpose<perm = [0, 2, 1]>(flat)", "t = Reshape(turned, to)")
        + PLAIN[1:],
        None,
    ),
    "softmax over queries": ((SWAPPED, "s = MatMul(q, t)", "soft = Softmax<axis = 2>(s)", "y = MatMul(soft, v)"), None),
}


def computed(model, inputs, monkeypatch, engine, *, fuses=("Attention", "onward.Linear")):
    """What an engine computes, and how many times nodes were taken as one."""
    monkeypatch.setattr(framework_class(engine), "fuses", fuses)
    taken = []
    for kind in (Attention, Linear):

        def compute(self, *arguments, plain=kind.compute):
            result = plain(self, *arguments)
            taken.append(result is not NotImplemented)
            return result

        monkeypatch.setattr(kind, "compute", compute)
    y = array_function(engine, load(model))(inputs)["y"]
    monkeypatch.undo()
    return y, sum(taken)


def normal(**shapes):
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype("f") for name, shape in shapes.items()}


QKV = normal(**dict.fromkeys("qkv", (N, HEADS, LENGTH, SIZE)))


@ENGINES
@pytest.mark.parametrize("case", [*CASES, *OTHERS])
def test_attention_is_fused_if_it_is_attention(case, engine, monkeypatch):
    lines, mask = {**CASES, **OTHERS}[case]
    model = attention(*lines, mask=mask)
    expected, _ = computed(model, QKV, monkeypatch, engine, fuses=())
    y, taken = computed(model, QKV, monkeypatch, engine)
    assert taken == (case in CASES)
    np.testing.assert_allclose(y, expected, **({"rtol": 1e-5, "atol": 1e-6} if taken else {"rtol": 0}))


@ENGINES
def test_weights_that_others_read_stay(engine, monkeypatch):
    model = attention(*PLAIN)
    model.graph.output.append(onnx.helper.make_tensor_value_info("soft", onnx.TensorProto.FLOAT, None))
    _, taken = computed(model, QKV, monkeypatch, engine)
    assert taken == 0


LAYERS = {
    "a transposed weight": (
        "t = Transpose<perm = [1, 0]>(w)  p = MatMul(x, t)  y = Add(p, b)",
        (3, 2, 4),
        (5, 4),
        (5,),
        1,
    ),
    "a weight as it is": ("p = MatMul(x, w)  y = Add(b, p)", (3, 4), (4, 5), (5,), 1),
    "a bias for each row": ("p = MatMul(x, w)  y = Add(p, b)", (3, 4), (4, 5), (3, 5), 0),
    "a bias that is spread": ("p = MatMul(x, w)  y = Add(p, b)", (3, 4), (4, 5), (1,), 0),
    "many products": ("p = MatMul(x, w)  y = Add(p, b)", (2, 3, 4), (2, 4, 5), (5,), 0),
    "a product that others read": ("p = MatMul(x, w)  s = Add(p, b)  y = Mul(s, p)", (3, 4), (4, 5), (5,), 0),
}


@ENGINES
@pytest.mark.parametrize("case", LAYERS)
def test_linear_layers(case, engine, monkeypatch):
    lines, x, w, b, times = LAYERS[case]
    model = parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 20]>
        g (float{list(x)} x, float{list(w)} w, float{list(b)} b) => (float y) {{ {lines} }}"""
    )
    inputs = normal(x=x, w=w, b=b)
    expected, _ = computed(model, inputs, monkeypatch, engine, fuses=())
    y, taken = computed(model, inputs, monkeypatch, engine)
    assert taken == times
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
