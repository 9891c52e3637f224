"""Steps that others wrote, in operators of the standard: which are a run, and which hold more than one."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest

import onward
from onward.engines import start
from onward.model.state import states
from onward.run_state.standard_steps import adopt

INFERENCE = """<ir_version: 8, opset_import: ["": 17, "ai.onnx.preview.training": 1]>
    inference (float[4,3] x) => (float[4,2] y)
    <float[3,2] w = {0.1, 0.2, -0.3, 0.4, 0.5, -0.6}, float[2] b = {0.0, 1.0}> { h = MatMul(x, w) y = Add(h, b) }"""
GRADIENT = 'gw, gb = ai.onnx.preview.training.Gradient <xs=["w", "b"], zs=["x", "l"], y="loss"> (w, b, x, l)'
SLOTS = "float[3,2] wv = {0.1, 0.2, 0.3, 0.4, 0.5, 0.6}, float[2] bv = {0.5, 0.25}"
ENTROPY = ("int64[4] l", "loss = SoftmaxCrossEntropyLoss(y, l)")
SQUARES = ("float[4,2] l", "d = Sub(y, l) s = Mul(d, d) loss = ReduceMean<keepdims=0>(s)")
COUNT = "one = Constant<value_int = 1>() t_new = Add(t, one)"
MOMENTUM = 'w_new, b_new, wv_new, bv_new = ai.onnx.preview.training.Momentum <alpha = 0.9, beta = {}, \
norm_coefficient = 0.01, mode = "{}"> (r, t, w, b, gw, gb, wv, bv)'
ADAGRAD = "w_new, b_new, wv_new, bv_new = ai.onnx.preview.training.Adagrad <decay_factor = {}> \
(r, t, w, b, gw, gb, wv, bv)"


def model(loss: tuple[str, str], update: str, *more: str, count: int = 0) -> onward.Model:
    label, body = loss
    proto = onnx.parser.parse_model(INFERENCE)
    text = f"""step ({label}) => (float loss, float[3,2] w_new, float[2] b_new, float[3,2] wv_new, float[2] bv_new)
        <float r = {{0.1}}, int64 t = {{{count}}}, {SLOTS}> {{ {body} {GRADIENT} {update} {" ".join(more)} }}"""
    info = proto.training_info.add(algorithm=onnx.parser.parse_graph(text))
    names = ["w", "b", "wv", "bv"]
    if COUNT in more:
        names.append("t")
        info.algorithm.output.append(onnx.helper.make_tensor_value_info("t_new", onnx.TensorProto.INT64, []))
    for name in names:
        info.update_binding.add(key=name, value=f"{name}_new")
    return onward.load(proto)


RUNS = {
    "momentum": (SQUARES, MOMENTUM.format(0.8, "standard"), COUNT),
    "nesterov": (ENTROPY, MOMENTUM.format(1.0, "nesterov"), COUNT),
    "a count without effect": (ENTROPY, MOMENTUM.format(1.0, "standard")),
    "adagrad": (SQUARES, ADAGRAD.format(0.1), COUNT),
}


@pytest.mark.parametrize("count", [0, 3])
@pytest.mark.parametrize("name", RUNS)
def test_a_step_that_is_a_run_computes_the_same_as_one(name: str, count: int) -> None:
    theirs = model(*RUNS[name], count=count)
    ours = adopt(theirs)
    assert ours is not theirs
    assert {state.role for state in states(ours)} == {"parameter", "optimizer_state", "counter"}
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 4) if RUNS[name][0] is ENTROPY else rng.normal(size=(4, 2)).astype(np.float32)
    batch = {"x": rng.normal(size=(4, 3)).astype(np.float32), "l": labels}
    sides = [start(side, engine="numpy") for side in (theirs, ours)]
    for _ in range(3):
        first, second = (float(side.step(batch)["loss"]) for side in sides)
        assert first == pytest.approx(second, rel=1e-6)
    for weight in ("w", "b"):
        np.testing.assert_allclose(*(side.state()[weight] for side in sides), rtol=1e-5)


OTHERS = {
    "a count that matters, and stands still": (SQUARES, ADAGRAD.format(0.1)),
    "dampening that begins at once": (SQUARES, MOMENTUM.format(0.8, "standard")),
    "more than it takes": (SQUARES, ADAGRAD.format(0.0), "more = Neg(w)"),
    "clipping": (SQUARES, ADAGRAD.format(0.0).replace("gw,", "gc,"), "gc = Clip(gw)"),
    "a loss without a name": (("float[4,2] l", "d = Sub(y, l) loss = ReduceMax<keepdims=0>(d)"), ADAGRAD.format(0.0)),
    "a label that is spread": (("float[4,1] l", SQUARES[1]), ADAGRAD.format(0.0)),
    "a loss with weights": (("int64[4] l", "loss = SoftmaxCrossEntropyLoss(y, l, b)"), ADAGRAD.format(0.0)),
    "a sum": (("int64[4] l", 'loss = SoftmaxCrossEntropyLoss<reduction="sum">(y, l)'), ADAGRAD.format(0.0)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_step_that_is_more_than_a_run_stays_as_it_is(name: str) -> None:
    theirs = model(*OTHERS[name])
    assert adopt(theirs) is theirs
