"""Operators of operator sets that ONNX Runtime does not have: lowered for it, or refused by name."""

from __future__ import annotations

import functools
import importlib

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from conformity import operator_of
from node_tests import onnx_node_tests

import onward
from onward.engines import function, start
from onward.lowering import runtime
from onward.runtime.sessions import Limits, onnxruntime_limits

WITH_BODIES = ("LinearAttention", "CausalConvWithState", "SwiGLU", "Range", "SpaceToDepth", "DepthToSpace", "Celu")
FLOATS = ("float32", "float64", "int64", "int32")

NET = """
<ir_version: 10, opset_import: ["": 28]>
net (float[2, 3, 8] x) => (float[2, 3, 8] y) {
    swapped = Transpose <perm = [0, 2, 1]> (x)
    convolved, state = CausalConvWithState <activation = "silu"> (swapped, kernel, bias)
    q = Transpose <perm = [0, 2, 1]> (convolved)
    k = MatMul (x, wk)
    v = MatMul (x, wv)
    decay = MatMul (x, wd)
    log_decay = Celu (decay)
    attended, present = LinearAttention <q_num_heads = 2, kv_num_heads = 2, update_rule = "gated"> (
        q, k, v, , log_decay
    )
    gate = MatMul (attended, wk)
    y = SwiGLU (gate, attended)
}
"""


def net() -> onnx.ModelProto:
    proto = onnx.parser.parse_model(NET)
    random = np.random.default_rng(0)
    shapes = {"kernel": (8, 1, 3), "bias": (8,), "wk": (8, 8), "wv": (8, 8), "wd": (8, 8)}
    for name, shape in shapes.items():
        tensor = random.uniform(-0.5, 0.5, shape).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(tensor, name))
    return proto


@functools.cache
def operators() -> dict[str, str]:
    """Node test -> the operator that it is about."""
    return {name: operator_of(case) for name, case in onnx_node_tests().items()}


def cases(operator: str) -> list[str]:
    """The node tests of an operator in types that ONNX Runtime computes in."""
    found = [name for name, about in operators().items() if about == operator]
    data = {name: onnx_node_tests()[name].data for name in found}
    return [name for name in found if all(str(x.dtype) in FLOATS for given, _ in data[name] for x in given)]


@pytest.mark.skipif(onnxruntime_limits().opset >= 28, reason="ONNX Runtime has these operators")
@pytest.mark.parametrize("operator", WITH_BODIES)
def test_node_tests_run_in_the_lowered_form(operator: str) -> None:
    names = cases(operator)
    assert names
    for name in names:
        case = onnx_node_tests()[name]
        proto = case.proto()
        lowered = onward.lower(proto).to_proto()
        assert all(opset.version <= onnxruntime_limits().opset for opset in lowered.opset_import)
        onnx.checker.check_model(lowered, full_check=True)
        session = ort.InferenceSession(lowered.SerializeToString(), providers=["CPUExecutionProvider"])
        for inputs, expected in case.data:
            fed = dict(zip((value.name for value in proto.graph.input), inputs, strict=False))
            for found, wanted in zip(session.run(None, fed), expected, strict=True):
                np.testing.assert_allclose(found, wanted, case.rtol, case.atol, err_msg=name)


def test_training_agrees_on_every_engine() -> None:
    training = onward.prepare(net(), loss="mse", optimizer="sgd:lr=0.1")
    assert training.opset == 28
    batch = {"x": np.random.default_rng(1).normal(size=(2, 3, 8)).astype(np.float32)}
    batch["target"] = np.zeros_like(batch["x"])
    results = {}
    for engine in ("onnxruntime", "numpy", "torch", "jax", "tensorflow"):
        with start(training, engine=engine, **({} if engine == "onnxruntime" else {"compile": False})) as loaded:
            results[engine] = [loaded.gradients(batch), *(loaded.step(batch)["loss"] for _ in range(3))]
    for gradients, *losses in results.values():
        np.testing.assert_allclose(losses, results["torch"][1:], rtol=1e-4)
        for name, gradient in gradients.items():
            np.testing.assert_allclose(gradient, results["torch"][0][name], rtol=1e-3, atol=1e-6, err_msg=name)


def test_gradients_on_onnxruntime_are_those_of_torch() -> None:
    torch = pytest.importorskip("torch")
    x = np.random.default_rng(1).normal(size=(2, 3, 8)).astype(np.float32)
    module = importlib.import_module("onward.frameworks.torch").to_module(net())
    module(torch.tensor(x)).sum().backward()
    expected = {name: parameter.grad.numpy() for name, parameter in module.named_parameters()}
    assert expected.keys() >= {"kernel", "wk", "wd"}
    found = function(onward.gradient(net(), "y", list(expected)), engine="onnxruntime")({"x": x})
    for name, gradient in expected.items():
        np.testing.assert_allclose(found[f"{name}/grad"], gradient, rtol=1e-4, atol=1e-5, err_msg=name)


def test_what_has_neither_kernel_nor_body_is_named() -> None:
    text = """<ir_version: 10, opset_import: ["": 28]> g (int8[2] x, int8[2] n) => (int8[2] y) {
        y = BitShift <direction = "LEFT"> (x, n)
    }"""
    with pytest.raises(onward.Error, match=r"`BitShift` on int8 of operator set 28 \(node `y`\)"):
        onward.lower(onnx.parser.parse_model(text))


def test_a_newer_runtime_gets_the_operators_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "onnxruntime_limits", lambda: Limits(28, 14, "ONNX Runtime of tomorrow"))
    lowered = onward.lower(net())
    assert lowered.opset == 28
    assert {"LinearAttention", "CausalConvWithState", "SwiGLU"} <= {node.op_type for node in lowered.graph}
