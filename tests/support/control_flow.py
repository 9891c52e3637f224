"""Models with If, Scan and Loop, with something to feed each of them."""

import numpy as np
import onnx
from sessions import session


def parsed(text, **domains):
    imports = ", ".join(f'"{domain}" : {version}' for domain, version in {"": 21, **domains}.items())
    model = onnx.parser.parse_model(f"<ir_version: 10, opset_import: [{imports}]> {text}")
    onnx.checker.check_model(model, full_check=True)
    return model


def f32(*shape, seed=0):
    return np.asarray(np.random.default_rng(seed).standard_normal(shape) * 0.7, np.float32)


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

# `out` starts as a number that the body does not read, and the matrix `v` stays what it is.
PLACEHOLDER = parsed("""
g (int64 n, float[2,3] x, float[3,3] w, float p) => (float[k] y) {
  h, out, f = Loop <body = b (int64 i, bool c, float[2,3] h, float o, float[3,3] v) => (
      bool go, float[2,3] after, float[2,3] result, float[3,3] same) {
    m = MatMul(h, v)
    after = Tanh(m)
    result = Exp(after)
    same = Identity(v)
    go = Identity(c)
  }> (n, , x, p, w)
  all = Constant <value = int64[1] {-1}> ()
  flat = Reshape(out, all)
  s = ReduceSum <keepdims = 0> (h)
  y = Add(flat, s)
}""")

# The rank of `c` is not known.
UNKNOWN_RANK = parsed("""
g (float[4,2] x, float[6] k, int64[r] shape) => (float[4,2] y) <float[2] w = {1, 2}, float[2] h0 = {0, 0},
    int32[1] one = {1}, int32[1] two = {2}, int32[1] zero = {0}> {
  c = Reshape(k, shape)
  h, y = Scan <num_scan_inputs = 1, body = b (float[2] h, float[2] item) => (float[2] after, float[2] out) {
    part = Slice(c, one, two, zero)
    s = ReduceSum <keepdims = 0> (part)
    sum = Add(h, item)
    scaled = Mul(sum, w)
    all = Mul(scaled, s)
    after = Tanh(all)
    out = Identity(after)
  }> (h0, x)
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
    **{
        f"placeholder {n}": (PLACEHOLDER, {"n": np.array(n), "x": f32(2, 3), "w": f32(3, 3, seed=1), "p": f32(seed=2)})
        for n in (0, 3)
    },
    "unknown rank": (UNKNOWN_RANK, {"x": f32(4, 2), "k": f32(6, seed=1), "shape": np.array([3, 2])}),
    "tangled": (TANGLED, {"n": np.array([3]), "x": f32(3)}),
    "If in Loop": (IF_IN_LOOP, {"n": np.array(3), "x": f32(3), "w": f32(3, seed=1)}),
    "Loop in Scan": (LOOP_IN_SCAN, {"n": np.array(2), "xs": f32(4, 3), "s0": f32(3, seed=1), "w": f32(3, seed=2)}),
}


def on_onnxruntime(proto, inputs):
    return session(proto).run(None, inputs)
