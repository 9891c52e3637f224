"""Training on any engine, and comparing it with that on ONNX Runtime."""

import numpy as np
import onnx
from onnx import parser

import onward
from onward.engines import start

STEPS = 20
MODES = {
    "compiled": {},
    "eager": {"compile": False},
    "compiled, rules": {"rules": True},
    "eager, rules": {"compile": False, "rules": True},
}


def trained(model, batches, engine="onnxruntime", **options):
    """The losses of all steps, and the state after them."""
    with start(model, engine=engine, **options) as loaded:
        losses = [float(loaded.step(batch)[loaded.loss]) for batch in batches]
        return losses, loaded.state()


def assert_trains_alike(model, batches, idle=(), tolerance=1e-5, *, engine, **options):
    """Losses, and state by its largest element."""
    losses, state = trained(model, batches, threads=1)
    found, found_state = trained(model, batches, engine=engine, **options)
    np.testing.assert_allclose(found, losses, rtol=tolerance, atol=1e-6)
    assert found_state.keys() == state.keys()
    for name, expected in state.items():
        assert found_state[name].dtype == expected.dtype, name
        if not any(part in name for part in idle):
            scale = np.abs(expected.astype(np.float64)).max(initial=0)
            np.testing.assert_allclose(found_state[name], expected, rtol=0, atol=10 * tolerance * scale, err_msg=name)


def equal_layers(count, scale=2.0, **recipe):
    """Equal layers, with a constant that is more than a number, and batches."""
    rng = np.random.default_rng(0)
    calls = " ".join(f"m{i} = MatMul(h{i}, w{i}) a{i} = Add(m{i}, b{i}) h{i + 1} = Tanh(a{i})" for i in range(count))
    proto = parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 21]> g (float[n, 4] x) => (float[n, 4] y)
        <float[4] scales = {{{scale}, 1.0, 3.0, 0.5}}>
        {{ h0 = Mul(x, scales) {calls} y = Identity(h{count}) }}"""
    )
    for i in range(count):
        for name, shape in ((f"w{i}", (4, 4)), (f"b{i}", (4,))):
            proto.graph.initializer.append(onnx.numpy_helper.from_array(rng.normal(size=shape).astype("f"), name))
    batches = [{"x": rng.normal(size=(6, 4)).astype("f"), "labels": rng.integers(0, 4, 6)} for _ in range(3)]
    return onward.prepare(proto, loss="cross_entropy", trainable=["w*", "b*"], **recipe), batches
