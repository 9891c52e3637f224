"""Gradients of If, Scan and Loop: against differences, PyTorch and ONNX Runtime, with static and symbolic shapes."""

import numpy as np
import onnx
import pytest
from control_flow import CASES, SEQUENCE, f32, on_onnxruntime, parsed, rnn
from gradcheck import check, check_on_onnxruntime, with_symbolic_dims

from onward.differentiate import gradient, vjp
from onward.errors import UnsupportedError


@pytest.mark.slow("Loop in Scan-symbolic", "Scan axes-symbolic", "Scan forward-symbolic", "Scan reverse-symbolic")
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("name", CASES)
def test_differences(name, symbolic):
    proto, inputs = CASES[name]
    check(with_symbolic_dims(proto) if symbolic else proto, inputs, order=2)


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("name", CASES)
def test_onnxruntime(name, symbolic):
    proto, inputs = CASES[name]
    check_on_onnxruntime(with_symbolic_dims(proto) if symbolic else proto, inputs)


def without_inner_shapes(proto):
    """With nothing known of the values of nested graphs but what follows from outside."""
    proto = with_symbolic_dims(proto)
    pending = [proto.graph]
    while pending:
        for node in pending.pop().node:
            for graph in (a.g for a in node.attribute if a.type == onnx.AttributeProto.GRAPH):
                for value in (*graph.input, *graph.output):
                    if len(value.type.tensor_type.shape.dim):
                        value.type.tensor_type.ClearField("shape")
                pending.append(graph)
    return proto


NEED_SHAPES = {
    "tangled": "its counters have one element",
    "unknown rank": "ONNX Runtime's Scan wants the shapes of its outputs",
    "Loop in Scan": "ONNX Runtime's Scan wants the shapes of its outputs, and a Loop in it gives none",
}


@pytest.mark.parametrize("name", [name for name in CASES if name not in NEED_SHAPES])
def test_nothing_known_inside(name):
    proto, inputs = CASES[name]
    check(without_inner_shapes(proto), inputs, order=1)
    check_on_onnxruntime(without_inner_shapes(proto), inputs)


def floats(inputs):
    return [name for name, x in inputs.items() if x.dtype.kind == "f"]


def torch_if(torch, c, x, w, b):
    h = torch.tanh(x)
    return torch.sigmoid(h @ w) * x if c else (h + b) ** 2


def torch_nested_if(torch, c, d, x, w):
    h = x @ w
    return (torch.tanh(h) * x if d else h * h) if c else torch.exp(x)


def torch_rnn(torch, x, h0, w, r):
    h = h0
    for item in x:
        h = torch.tanh(item @ w + h @ r)
    return h


def torch_reversed_rnn(torch, x, h0, w, r):
    return torch_rnn(torch, x.flip(0), h0, w, r)


def torch_accumulate(torch, n, x, w):
    v = x
    for _ in range(n):
        v = torch.tanh(v @ w) + x
    return v


def torch_early_exit(torch, x, w):
    v = x
    while True:
        v = v * w + v
        if (v * v).sum() >= 3:
            return v


def torch_if_in_loop(torch, n, x, w):
    v = x
    for i in range(n):
        v = torch.sin(v) * w if i % 2 == 0 else v + w
    return v


IN_TORCH = {
    "If True": torch_if,
    "If False": torch_if,
    "nested If True True": torch_nested_if,
    "nested If True False": torch_nested_if,
    "nested If False True": torch_nested_if,
    "Scan forward": torch_rnn,
    "Scan reverse": torch_reversed_rnn,
    "Loop 0 trips": torch_accumulate,
    "Loop 4 trips": torch_accumulate,
    "early exit": torch_early_exit,
    "If in Loop": torch_if_in_loop,
}


@pytest.mark.torch
@pytest.mark.needs("torch")
@pytest.mark.parametrize("name", IN_TORCH)
def test_torch(name):
    import torch

    proto, inputs = CASES[name]
    xs = floats(inputs)
    tensors = {key: torch.tensor(x, requires_grad=True) if key in xs else x.item() for key, x in inputs.items()}
    y = IN_TORCH[name](torch, **tensors)
    dy = f32(*y.shape, seed=9)
    wanted = torch.autograd.grad(
        y, [tensors[x] for x in xs], torch.tensor(dy), allow_unused=True, materialize_grads=True
    )
    ours = on_onnxruntime(vjp(proto, proto.graph.output[0].name, xs).to_proto(), {**inputs, "dy": dy})
    for grad, expected in zip(ours, wanted, strict=True):
        np.testing.assert_allclose(grad, expected.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in CASES if name != "unread output"])  # which ONNX Runtime refuses
def test_the_model_computes_what_it_did(name):
    proto, inputs = CASES[name]
    before = on_onnxruntime(proto, inputs)
    after = on_onnxruntime(gradient(proto, proto.graph.output[0].name, floats(inputs)).to_proto(), inputs)
    for expected, found in zip(before, after, strict=False):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_no_trips_twice():
    """The second derivative of a Loop that does not go round is zero, in the shape of what it belongs to."""
    proto, inputs = CASES["Loop 0 trips"]
    first = vjp(proto, "y", ["x", "w"]).to_proto()
    inputs = {**inputs, "dy": f32(2, 3)}
    for x, output in zip(("x", "w"), first.graph.output, strict=True):
        second = vjp(first, output.name, ["x", "w"]).to_proto()
        given = {**inputs, second.graph.input[-1].name: f32(*inputs[x].shape)}
        grads = on_onnxruntime(second, {value.name: given[value.name] for value in second.graph.input})
        for grad, name in zip(grads, ("x", "w"), strict=True):
            np.testing.assert_array_equal(grad, np.zeros_like(inputs[name]))


def test_half_precision():
    proto = rnn()
    body = next(a.g for a in proto.graph.node[0].attribute if a.name == "body")
    for value in (*proto.graph.input, *proto.graph.output, *body.input, *body.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    check_on_onnxruntime(proto, {name: x.astype(np.float16) for name, x in SEQUENCE.items()}, rtol=3e-2)


GROWING = parsed("""
g (int64 n, float[1] x, float[1] w) => (float[k] y) {
  y = Loop <body = b (int64 i, bool c, float[k] v) => (bool go, float[j] next) {
    next = Concat <axis = 0> (v, w)
    go = Identity(c)
  }> (n, , x)
}""")

CACHE = parsed("""
g (int64 n, float[1,b] x, float[1,b] w, float[k,b] z) => (float[1,b] y) {
  past, y = Loop <body = b (int64 i, bool c, float[t,b] v, float[1,b] s) => (bool go, float[u,b] next, float[1,b] sum) {
    p = Mul(s, w)  next = Concat <axis = 0> (v, p)  m = ReduceSum <keepdims = 1> (next)  sum = Add(s, m)
    go = Identity(c)
  }> (n, , z, x)
}""")

NOISY = parsed("""
g (bool c, float[3] x) => (float[3] y) {
  y = If (c) <
    then_branch = t () => (float[3] yt) { r = RandomNormalLike(x)  yt = Mul(r, x) },
    else_branch = e () => (float[3] ye) { ye = Identity(x) }
  >
}""")

UNKNOWN = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21, "somewhere" : 1]>
g (bool c, float[3] x) => (float[3] y) {
  y = If (c) <
    then_branch = t () => (float[3] yt) { h = Exp(x)  yt = somewhere.Strange(h) },
    else_branch = e () => (float[3] ye) { ye = Identity(x) }
  >
}""")


@pytest.mark.parametrize(
    ("proto", "words"),
    [
        (GROWING, "changes its shape"),
        (CACHE, r"the state `v` of `Loop` .* grows in each iteration"),
        (NOISY, "draws random numbers"),
        (UNKNOWN, "no gradient rule for `Strange`"),
    ],
    ids=["growing state", "cache", "random numbers", "an operator without a rule"],
)
def test_refused(proto, words):
    with pytest.raises(UnsupportedError, match=words):
        vjp(proto, "y", ["x"])
