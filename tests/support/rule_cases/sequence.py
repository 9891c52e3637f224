"""Sequences and Optional, where the node tests of `onnx` do not go: positions, known and unknown, and bodies."""

import numpy as np
from onnx import parser


def model(text):
    return parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> g {text}')


def f32(*shape, seed=0):
    return (np.random.default_rng(seed).standard_normal(shape) * 0.7).astype(np.float32)


THREE = [f32(2, 3), f32(2, 3, seed=1), f32(2, 3, seed=2)]
UNEQUAL = [f32(2, 3), f32(4, 3, seed=1), f32(1, 3, seed=2)]
X, Y = f32(2, 3, seed=3), f32(2, 3, seed=4)


SQUARED = "y = SequenceMap <body = b (float[k,3] a) => (float[k,3] c) { c = Mul(a, a) }> (t)"


def at(position, kind=np.int64):
    proto = model(f"""(seq(float[2,3]) s, {kind.__name__} p) => (float[2,3] y) {{
        a = SequenceAt(s, p)
        y = Mul(a, a)
    }}""")
    return proto, {"s": THREE, "p": np.array(position, kind)}


def insert(position):
    given = "" if position is None else ", p"
    proto = model(f"""(seq(float[n,3]) s, float[2,3] x, int64 p) => (seq(float[m,3]) y) {{
        t = SequenceInsert(s, x{given})
        {SQUARED}
    }}""")
    return proto, {"s": UNEQUAL, "x": X, "p": np.array(position or 0)}


def erase(position):
    given = "" if position is None else ", p"
    proto = model(f"""(seq(float[n,3]) s, int64 p) => (seq(float[m,3]) y) {{
        t = SequenceErase(s{given})
        {SQUARED}
    }}""")
    return proto, {"s": UNEQUAL, "p": np.array(position or 0)}


def concat(axis, new_axis, elements):
    shape = "[n,3]" if elements is UNEQUAL else "[2,3]"
    proto = model(f"""(seq(float{shape}) s) => (float y) {{
        a = ConcatFromSequence <axis = {axis}, new_axis = {new_axis}> (s)
        b = Mul(a, a)
        y = ReduceSum <keepdims = 0> (b)
    }}""")
    return proto, {"s": elements}


def split(sizes, axis, keepdims=1):
    """Sizes that are known only when the model runs."""
    given = "" if sizes is None else ", k"
    dims = "[n]" if sizes is None and not keepdims else "[n,m]"
    proto = model(f"""(float[5,3] x, int64{"[2]" if isinstance(sizes, list) else ""} k, int64 p) => (float{dims} y) {{
        a = Mul(x, x)
        t = SplitToSequence <axis = {axis}, keepdims = {keepdims}> (a{given})
        e = SequenceAt(t, p)
        y = Mul(e, e)
    }}""")
    return proto, {"x": f32(5, 3), "k": np.array(1 if sizes is None else sizes), "p": np.array(1)}


KNOWN = model("""(float[6,3] x, float[2,3] v) => (float[n,3] y) {
    k = Constant <value = int64[3] {3, 1, 2}> ()
    zero = Constant <value_int = 0> ()
    last = Constant <value_int = -1> ()
    s = SplitToSequence(x, k)
    a = SequenceAt(s, zero)
    b = SequenceAt(s, last)
    e = SequenceEmpty()
    t = SequenceInsert(e, a)
    u = SequenceInsert(t, v, last)
    w = SequenceErase(u)
    h = SequenceInsert(u, b, zero)
    i = Identity(h)
    c = ConcatFromSequence <axis = 0> (i)
    d = ConcatFromSequence <axis = 0> (w)
    f = Concat <axis = 0> (c, d)
    y = Mul(f, f)
}""")

MAP = model("""(seq(float[n,3]) s, seq(float[n,3]) t, float[3] w, float[3] v) => (seq(float[n,3]) y, seq(float[n]) z) {
    y, z = SequenceMap <body = b (float[n,3] p, float[3] q, float[n,3] r) => (float[n,3] out, float[n] total) {
        h = Tanh(p)
        m = Mul(h, r)
        o = Mul(m, q)
        out = Add(o, v)
        axis = Constant <value = int64[1] {1}> ()
        total = ReduceSum <keepdims = 0> (m, axis)
    }> (s, w, t)
}""")

OPTIONAL = model("""(optional(float[3]) o, optional(seq(float[3])) q, float[3] x, int64 p) => (float[3] y) {
    a = OptionalGetElement(o)
    s = OptionalGetElement(q)
    b = SequenceAt(s, p)
    c = Optional(x)
    d = OptionalGetElement(c)
    e = OptionalGetElement(o)
    f = Mul(a, b)
    g = Mul(d, e)
    h = Mul(f, f)
    y = Add(g, h)
}""")

CASES = {
    **{f"at {p}": at(p) for p in (0, 1, -1, -3)},
    "at a short position": at(-1, np.int32),
    **{f"insert {p}": insert(p) for p in (None, 0, 3, -1, -3)},
    **{f"erase {p}": erase(p) for p in (None, 0, 2, -1, -3)},
    "concat": concat(0, 0, UNEQUAL),
    "concat from the end": concat(-1, 0, THREE),
    "concat along a new axis": concat(1, 1, THREE),
    "concat along a new last axis": concat(-1, 1, THREE),
    "split by sizes": split([2, 3], 0),
    "split by a size": split(2, -2),
    "split into ones": split(None, 1),
    "split without the axis": split(None, -1, keepdims=0),
    "known elements": (KNOWN, {"x": f32(6, 3), "v": X}),
    "map": (MAP, {"s": UNEQUAL, "t": [np.sin(a) for a in UNEQUAL], "w": f32(3), "v": f32(3, seed=1)}),
    "construct": (
        model("""(float[2,3] x, float[2,3] v, int64 p) => (float[2,3] y) {
            s = SequenceConstruct(x, v, x)
            a = SequenceAt(s, p)
            y = Mul(a, a)
        }"""),
        {"x": X, "v": Y, "p": np.array(2)},
    ),
    "optional": (OPTIONAL, {"o": f32(3), "q": [f32(3, seed=1), f32(3, seed=2)], "x": f32(3, seed=3), "p": np.array(1)}),
}
