"""Models with functions, and models put into functions."""

import numpy as np
import onnx
from onnx import helper

LAYER = """
Layer <slope: float = 0.1> (x, scale, up, down) => (y) {
    normal = LayerNormalization (x, scale)
    wide = MatMul (normal, up)
    active = LeakyRelu <alpha: float = @slope> (wide)
    narrow = MatMul (active, down)
    y = Add (x, narrow)
}
"""


def layers(count, batch="N"):
    """Layers with parameters of their own, one function for all of them."""
    shapes = {"scale": (4,), "up": (4, 6), "down": (6, 4)}
    rng = np.random.default_rng(0)
    calls = "".join(f"x{i + 1} = acme.Layer (x{i}, scale{i}, up{i}, down{i})\n" for i in range(count))
    proto = parsed(f"(float[{batch}, 4] x0) => (float y) {{ {calls} y = ReduceMean <keepdims = 0> (x{count}) }}", LAYER)
    for i in range(count):
        for name, shape in shapes.items():
            array = rng.normal(size=shape).astype(np.float32)
            proto.graph.initializer.append(onnx.numpy_helper.from_array(array, f"{name}{i}"))
    return proto


def parameters(proto):
    return [tensor.name for tensor in proto.graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT]


def parsed(text, *functions, opset=21):
    header = '<domain: "acme", opset_import: ["": {}, "acme": 1]>'
    body = "".join(f"{header.format(opset)} {function} " for function in functions)
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21, "acme": 1]> model {text} {body}')


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


X = {"x": numbers(2, 3)}
SQUASH = """
    Squash <rate: float = 2.0> (x) => (y) {
        r = Constant <value_float: float = @rate> ()
        h = Mul (x, r)
        y = Tanh (h)
    }
"""
LOOP = """
    y = Loop (n, go, a) <body = b (int64 i, bool k, float[2, 3] s) => (bool m, float[2, 3] r) {
        m = Identity (k)
        p = Mul (s, x)
        r = acme.Squash (p)
    }>
"""

CASES = {
    "nested": (
        parsed(
            """(float[2, 3] x, float[3, 3] w, float[3] b) => (float[2, 3] y) {
                h = acme.Outer (x, w, b)
                y = acme.Outer (h, w, b)
            }""",
            "Outer (x, w, b) => (y) { h = acme.Linear (x, w, b)  y = acme.Squash (h) }",
            "Linear (x, w, b) => (y) { h = MatMul (x, w)  y = Add (h, b) }",
            SQUASH,
        ),
        ["x", "w", "b"],
        X | {"w": numbers(3, 3), "b": numbers(3)},
    ),
    "attributes": (
        parsed(
            """(float[2, 3] x) => (float[2, 3] y) {
                a = acme.Squash (x)
                b = acme.Squash <rate = 0.5> (a)
                c = acme.Through <rate = 0.5> (b)
                y = acme.Squash (c)
            }""",
            "Through <rate: float> (x) => (y) { y = acme.Squash <rate: float = @rate> (x) }",
            SQUASH,
        ),
        ["x"],
        X,
    ),
    "several outputs": (
        parsed(
            """(float[2, 3] x) => (float[2, 3] y) {
                a, b, c = acme.Three (x)
                d, e, f = acme.Three (b)
                g, h, i = acme.Three (e)
                y = Mul (a, h)
            }""",
            "Three (x) => (a, b, c) { a = Exp (x)  b = Sin (a)  c = Floor (x) }",
        ),
        ["x"],
        X,
    ),
    "inputs and outputs left out": (
        parsed(
            """(float[2, 3] x, float z) => (float[2, 3] y) {
                "", a = acme.Bounds (x, "", z)
                b, c = acme.Bounds (a, z)
                y = Mul (b, c)
            }""",
            "Bounds (x, low, high) => (y, z) { h = Clip (x, low, high)  y = Neg (x)  z = Mul (h, y) }",
        ),
        ["x"],
        X | {"z": np.array(0.3, np.float32)},
    ),
    "shapes": (
        parsed(
            """(float[2, 3] x, float[N, 1, 3] z, float[M, 1, 3] u) => (float y) {
                a = acme.Scaled (x, x)
                b = acme.Scaled (x, z)
                c = acme.Scaled (x, u)
                d = ReduceSum <keepdims = 0> (a)
                e = ReduceSum <keepdims = 0> (b)
                f = ReduceSum <keepdims = 0> (c)
                y = Sum (d, e, f)
            }""",
            "Scaled (x, z) => (y) { h = Mul (x, z)  y = Sigmoid (h) }",
        ),
        ["x", "z", "u"],
        X | {"z": numbers(4, 1, 3), "u": numbers(5, 1, 3)},
    ),
    "types": (
        parsed(
            """(float[2, 3] x) => (double[2, 3] y) {
                a = acme.Double (x)
                b = Cast <to = 11> (a)
                y = acme.Double (b)
            }""",
            "Double (x) => (y) { n = Constant <value_int = 2> ()  m = CastLike (n, x)  h = Mul (x, m)  y = Sin (h) }",
        ),
        ["x"],
        X,
    ),
    "constants": (
        parsed(
            """(float[2, 3] x) => (float y) <int64[2] turned = {3, 2}, int64[1] flat = {6}> {
                a = acme.View (x, turned)
                b = acme.View (a, flat)
                axes = Constant <value_ints = [0]> ()
                y = acme.Sum (b, axes)
            }""",
            "View (x, shape) => (y) { h = Reshape (x, shape)  y = Sin (h) }",
            "Sum (x, axes) => (y) { y = ReduceSumSquare <keepdims = 0> (x, axes) }",
        ),
        ["x"],
        X,
    ),
    "control flow inside": (
        parsed(
            "(float[2, 3] x, bool c, int64 n) => (float[2, 3] y) { a = acme.Flow (x, c, n)  y = acme.Flow (a, c, n) }",
            f"""Flow (x, c, n) => (y) {{
                a = If (c) <
                    then_branch = t () => (ta) {{ ta = Sin (x) }},
                    else_branch = e () => (ea) {{ ea = Exp (x) }}
                >
                go = Constant <value = bool {{1}}> ()
                {LOOP}
            }}""",
            SQUASH,
        ),
        ["x"],
        X | {"c": np.array(True), "n": np.array(3)},
    ),
    "calls in nested graphs": (
        parsed(
            f"""(float[2, 3] x, int64 n) => (float[2, 3] y) {{
                go = Constant <value = bool {{1}}> ()
                a = acme.Squash (x)
                {LOOP}
            }}""",
            SQUASH,
        ),
        ["x"],
        X | {"n": np.array(3)},
    ),
    "an input twice": (
        parsed(
            "(float[2, 3] x) => (float[2, 3] y) { a = acme.Both (x, x)  y = acme.Both (a, x) }",
            "Both (a, b) => (y) { c = Mul (a, b)  y = Sub (c, b) }",
        ),
        ["x"],
        X,
    ),
    "gradients passed on": (
        parsed(
            """(float[2, 3] x, float[2, 3] z) => (float[2, 3] y) {
                a = acme.Plus (x, z)
                b = Mul (a, x)
                y = acme.Plus (b, z)
            }""",
            "Plus (a, b) => (y) { y = Add (a, b) }",
        ),
        ["x", "z"],
        X | {"z": numbers(2, 3, seed=1)},
    ),
}


def in_functions(proto, ends):
    """The same model with all nodes in functions: a call for each stretch between these positions; equal ones share."""
    result = onnx.ModelProto()
    result.CopyFrom(proto)
    result.opset_import.add(domain="acme", version=1)
    del result.graph.node[:]
    nodes, made = list(proto.graph.node), {}
    for start, end in zip((0, *ends), (*ends, len(nodes)), strict=True):
        part, rest = nodes[start:end], nodes[end:]
        written = [name for node in part for name in node.output if name]
        read = list(dict.fromkeys(name for node in part for name in node.input if name and name not in written))
        needed = {*(name for node in rest for name in node.input), *(output.name for output in proto.graph.output)}
        results = [name for name in written if name in needed]
        inner = {name: f"v{i}" for i, name in enumerate((*read, *written))}
        body = [_renamed(node, inner) for node in part]
        ends_of = ([inner[name] for name in names] for names in (read, results))
        function = helper.make_function("acme", "Part", *ends_of, body, proto.opset_import)
        name = made.setdefault(function.SerializeToString(), f"Part{len(made)}")
        if len(made) > len(result.functions):
            function.name = name
            result.functions.append(function)
        result.graph.node.append(helper.make_node(name, read, results, domain="acme", name=f"{name} at {start}"))
    return result


def _renamed(node, names):
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.name = ""
    copy.input[:] = [names.get(name, "") for name in node.input]
    copy.output[:] = [names.get(name, "") for name in node.output]
    return copy
