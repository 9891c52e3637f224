"""Attention that is written out, found and computed by the framework's own: the same numbers, or left as it is."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from conftest import needs
from onward.model import read
from onward.run import fusion, interpreter
from onward.run.interpreted import array_function

pytestmark = needs("torch")

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


def computed(model, monkeypatch, *, fuses):
    """What torch computes, and how many times it was asked for its own attention, and took it."""
    from onward.run.torch import Torch

    monkeypatch.setattr(Torch, "fuses", fuses)
    answers = []

    def attend(*arguments):
        answers.append(fusion.attend(*arguments))
        return answers[-1]

    monkeypatch.setattr(interpreter, "attend", attend)
    rng = np.random.default_rng(0)
    inputs = {name: rng.standard_normal((N, HEADS, LENGTH, SIZE)).astype("f") for name in "qkv"}
    y = array_function("torch", read(model))(inputs)["y"]
    return y, sum(answer is not NotImplemented for answer in answers)


@pytest.mark.parametrize("case", CASES)
def test_attention_is_found(case, monkeypatch):
    lines, mask = CASES[case]
    model = attention(*lines, mask=mask)
    (expected, _), (y, taken) = (computed(model, monkeypatch, fuses=fuses) for fuses in (False, True))
    assert taken == 1
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", OTHERS)
def test_what_only_looks_like_it_is_left_alone(case, monkeypatch):
    lines, mask = OTHERS[case]
    model = attention(*lines, mask=mask)
    (expected, _), (y, taken) = (computed(model, monkeypatch, fuses=fuses) for fuses in (False, True))
    assert taken == 0
    np.testing.assert_array_equal(y, expected)


def test_weights_that_others_read_stay(monkeypatch):
    model = attention(*PLAIN)
    model.graph.output.append(onnx.helper.make_tensor_value_info("soft", onnx.TensorProto.FLOAT, None))
    _, taken = computed(model, monkeypatch, fuses=True)
    assert taken == 0
