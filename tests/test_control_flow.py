"""Gradients of If, Scan and Loop: against differences, PyTorch and ONNX Runtime, with static and symbolic shapes."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from gradcheck import check, check_on_onnxruntime, with_symbolic_dims
from onward.differentiate import gradient, vjp
from onward.errors import UnsupportedError


def parsed(text, **domains):
    imports = ", ".join(f'"{domain}" : {version}' for domain, version in {"": 21, **domains}.items())
    model = onnx.parser.parse_model(f"<ir_version: 10, opset_import: [{imports}]> {text}")
    onnx.checker.check_model(model, full_check=True)
    return model


def f32(*shape, seed=0):
    return (np.random.default_rng(seed).standard_normal(shape) * 0.7).astype(np.float32)


IF = parsed("""
g (bool c, float[2,3] x, float[3,3] w, float[3] b) => (float[2,3] y) {
  h = Tanh(x)
  y = If (c) <
    then_branch = t () => (float[2,3] yt) { m = MatMul(h, w)  e = Sigmoid(m)  yt = Mul(e, x) },
    else_branch = e () => (float[2,3] ye) { s = Add(h, b)  ye = Mul(s, s) }
  >
}""")

NESTED_IF = parsed("""
g (bool c, bool d, float[2,3] x, float[3,3] w) => (float[2,3] y) {
  y = If (c) <
    then_branch = t () => (float[2,3] yt) {
      h = MatMul(x, w)
      yt = If (d) <
        then_branch = tt () => (float[2,3] ytt) { a = Tanh(h)  ytt = Mul(a, x) },
        else_branch = te () => (float[2,3] yte) { yte = Mul(h, h) }
      >
    },
    else_branch = e () => (float[2,3] ye) { ye = Exp(x) }
  >
}""")

RNN_BODY = """body = b (float[2,4] before, float[2,3] item) => (float[2,4] after, float[2,4] out) {
    p = MatMul(item, w)
    q = MatMul(before, r)
    z = Add(p, q)
    after = Tanh(z)
    out = Mul(after, before)
}"""


def rnn(attributes="", x="5,2,3", ys="5,2,4"):
    return parsed(f"""
g (float[{x}] x, float[2,4] h0, float[3,4] w, float[4,4] r) => (float[2,4] h, float[{ys}] ys) {{
  h, ys = Scan <num_scan_inputs = 1, {attributes} {RNN_BODY}> (h0, x)
}}""")


ACCUMULATE = parsed("""
g (int64 n, float[2,3] x, float[3,3] w) => (float[2,3] y) {
  y = Loop <body = b (int64 i, bool c, float[2,3] v) => (bool go, float[2,3] next) {
    m = MatMul(v, w)
    t = Tanh(m)
    next = Add(t, x)
    go = Identity(c)
  }> (n, , x)
}""")

EARLY_EXIT = parsed("""
g (float[3] x, float[3] w) => (float[3] y) {
  limit = Constant <value = float {3.0}> ()
  yes = Constant <value = bool {1}> ()
  y = Loop <body = b (int64 i, bool c, float[3] v) => (bool go, float[3] next) {
    a = Mul(v, w)
    next = Add(a, v)
    s = ReduceSumSquare <keepdims = 0> (next)
    go = Less(s, limit)
  }> (, yes, x)
}""")

SCAN_OUTPUTS = parsed("""
g (int64 n, float[3] x, float[3] w) => (float[3] y, float[T,3] ys, float[T] sums) {
  y, count, ys, sums = Loop <body = b (int64 i, bool c, float[3] v, int64 k)
      => (bool go, float[3] next, int64 more, float[3] item, float total) {
    p = Mul(v, w)
    next = Sin(p)
    q = CastLike(i, v)
    item = Mul(next, q)
    e = Exp(item)
    total = ReduceSum <keepdims = 0> (e)
    one = Constant <value = int64 {1}> ()
    more = Add(k, one)
    go = Identity(c)
  }> (n, , x, n)
}""")

IF_IN_LOOP = parsed("""
g (int64 n, float[3] x, float[3] w) => (float[3] y) {
  y = Loop <body = b (int64 i, bool c, float[3] v) => (bool go, float[3] next) {
    two = Constant <value = int64 {2}> ()
    zero = Constant <value = int64 {0}> ()
    rest = Mod(i, two)
    even = Equal(rest, zero)
    s = Sin(v)
    next = If (even) <
      then_branch = t () => (float[3] yt) { yt = Mul(s, w) },
      else_branch = e () => (float[3] ye) { ye = Add(v, w) }
    >
    go = Identity(c)
  }> (n, , x)
}""")

TANGLED = parsed("""
g (int64[1] n, float[3] x) => (float[3] y, float[3] kept, float[T,3] before) {
  k = Constant <value = float[3] {1.5, -0.5, 2.0}> ()
  y, kept, before = Loop <body = b (int64[1] i, bool[1] c, float[3] v, float[3] same)
      => (bool[1] go, float[3] next, float[3] same2, float[3] item) {
    p = Mul(v, k)
    q = Mul(p, x)
    next = Sub(q, same)
    same2 = Identity(same)
    item = Identity(v)
    go = Identity(c)
  }> (n, , x, x)
}""")
"""States that start as the same value, which is captured too; one is not changed; counters with one element."""

FUNCTION = parsed(
    """
g (bool c, float[2,3] x, float[3] w) => (float[2,3] y) {
  y = If (c) <
    then_branch = t () => (float[2,3] yt) { yt = my.Square(x, w) },
    else_branch = e () => (float[2,3] ye) { ye = Sin(x) }
  >
}
<domain: "my", opset_import: ["" : 21]> Square (a, b) => (d) { e = Mul(a, b)  d = Mul(e, e) }""",
    my=1,
)


def unread_output():
    """A Loop whose body has initializers, and a scan output that the node leaves out."""
    body = onnx.parser.parse_graph("""
b (int64 i, bool c, float[2,3] v) => (bool go, float[2,3] next, float[2,3] out)
    <float[3] k = {1.5, -0.5, 2.0}, int64[1] last = {-1}> {
  a = Mul(v, k)
  s = Softmax <axis = -1> (a)
  mean = ReduceMean <keepdims = 1> (v, last)
  p = Mul(s, w)
  next = Add(p, mean)
  out = Exp(v)
  go = Identity(c)
}""")
    proto = parsed("g (int64 n, float[2,3] x, float[3] w) => (float[2,3] y) { y = Identity(x) }")
    proto.graph.node[0].CopyFrom(onnx.helper.make_node("Loop", ["n", "", "x"], ["y", ""], body=body))
    return proto


LOOP_IN_SCAN = parsed("""
g (int64 n, float[4,3] xs, float[3] s0, float[3] w) => (float[3] s, float[4,3] ys) {
  s, ys = Scan <num_scan_inputs = 1, body = b (float[3] before, float[3] item) => (float[3] after, float[3] out) {
    after = Loop <body = l (int64 i, bool c, float[3] v) => (bool go, float[3] next) {
      p = Mul(v, w)
      t = Tanh(p)
      next = Add(t, item)
      go = Identity(c)
    }> (n, , before)
    out = Mul(after, w)
  }> (s0, xs)
}""")

SEQUENCE = {"x": f32(5, 2, 3), "h0": f32(2, 4, seed=1), "w": f32(3, 4, seed=2), "r": f32(4, 4, seed=3)}
CELLS = {
    "forward": ("", "5,2,3", "5,2,4", (5, 2, 3)),
    "reverse": ("scan_input_directions = [1], scan_output_directions = [1],", "5,2,3", "5,2,4", (5, 2, 3)),
    "mixed": ("scan_input_directions = [1], scan_output_directions = [0],", "5,2,3", "5,2,4", (5, 2, 3)),
    "axes": ("scan_input_axes = [1], scan_output_axes = [-1],", "2,5,3", "2,4,5", (2, 5, 3)),
}

CASES = {
    **{
        f"If {c}": (IF, {"c": np.array(c), "x": f32(2, 3), "w": f32(3, 3, seed=1), "b": f32(3, seed=2)})
        for c in (True, False)
    },
    **{
        f"nested If {c} {d}": (
            NESTED_IF,
            {"c": np.array(c), "d": np.array(d), "x": f32(2, 3), "w": f32(3, 3, seed=1)},
        )
        for c, d in ((True, True), (True, False), (False, True))
    },
    **{
        f"Scan {name}": (rnn(attributes, x, ys), {**SEQUENCE, "x": f32(*shape)})
        for name, (attributes, x, ys, shape) in CELLS.items()
    },
    **{f"Loop {n} trips": (ACCUMULATE, {"n": np.array(n), "x": f32(2, 3), "w": f32(3, 3, seed=1)}) for n in (0, 1, 4)},
    "early exit": (EARLY_EXIT, {"x": np.abs(f32(3)) + 0.1, "w": np.abs(f32(3, seed=1)) + 0.1}),
    "scan outputs": (SCAN_OUTPUTS, {"n": np.array(4), "x": f32(3), "w": f32(3, seed=1)}),
    "function": (FUNCTION, {"c": np.array(True), "x": f32(2, 3), "w": f32(3, seed=1)}),
    "unread output": (unread_output(), {"n": np.array(3), "x": f32(2, 3), "w": f32(3, seed=1)}),
    "tangled": (TANGLED, {"n": np.array([3]), "x": f32(3)}),
    "If in Loop": (IF_IN_LOOP, {"n": np.array(3), "x": f32(3), "w": f32(3, seed=1)}),
    "Loop in Scan": (LOOP_IN_SCAN, {"n": np.array(2), "xs": f32(4, 3), "s0": f32(3, seed=1), "w": f32(3, seed=2)}),
}


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
    "Loop in Scan": "ONNX Runtime's Scan wants the shapes of its outputs, and a Loop in it gives none",
}


@pytest.mark.parametrize("name", [name for name in CASES if name not in NEED_SHAPES])
def test_nothing_known_inside(name):
    proto, inputs = CASES[name]
    check(without_inner_shapes(proto), inputs, order=1)
    check_on_onnxruntime(without_inner_shapes(proto), inputs)


def on_onnxruntime(proto, inputs):
    options = ort.SessionOptions()
    options.log_severity_level = 4
    return ort.InferenceSession(proto.SerializeToString(), options).run(None, inputs)


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
        (NOISY, "draws random numbers"),
        (UNKNOWN, "no gradient rule for `Strange`"),
    ],
    ids=["growing state", "random numbers", "an operator without a rule"],
)
def test_refused(proto, words):
    with pytest.raises(UnsupportedError, match=words):
        vjp(proto, "y", ["x"])
