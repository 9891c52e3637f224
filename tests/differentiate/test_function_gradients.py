"""Gradients that keep the functions of a model: the same numbers as without, in few and readable pieces."""

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import needs
from models import small_cnn, small_transformer
from onnx import helper
from sessions import run
from typer.testing import CliRunner

import onward
from onward.cli.commands import app
from onward.errors import UnsupportedError

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


def names(model):
    return sorted(name for _, name, _ in model.functions)


def assert_same(kept, plain, inputs):
    """Valid models with the same outputs in the same order."""
    found, expected = run(kept, inputs), run(plain, inputs)
    assert list(found) == list(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


TOKENS = np.random.default_rng(0).integers(0, 32, (2, 2, 8))
TRANSFORMER = (small_transformer(2), "loss", dict(zip(("tokens", "labels"), TOKENS, strict=True)))
CNN = (small_cnn(), "logits", {"image": numbers(2, 1, 8, 8)})
AROUND = ("Shape", "ConstantOfShape", "Identity", "Add")
"""What there is beside calls: the gradient of the result itself, and sums."""


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_those_without_functions(case):
    proto, xs, inputs = CASES[case]
    kept, plain = (onward.gradient(proto, "y", xs, keep_functions=keep) for keep in (True, False))
    assert any(name.endswith("_backward") for name in names(kept))
    assert not names(plain)
    assert_same(kept, plain, inputs)
    again, half, none = (
        onward.gradient(first, "x/grad", xs, keep_functions=keep)
        for first, keep in ((kept, True), (kept, False), (plain, False))
    )
    assert_same(again, none, inputs)
    assert_same(half, none, inputs)


@settings(max_examples=12, derandomize=True, deadline=None)
@given(st.data())
def test_any_part_of_a_model_may_be_a_function(data):
    proto, y, inputs = data.draw(st.sampled_from((TRANSFORMER, CNN)), label="model")
    ends = data.draw(st.sets(st.integers(1, len(proto.graph.node) - 1), max_size=4).map(sorted), label="ends")
    xs = [name for name in parameters(proto) if "running" not in name]
    kept = onward.gradient(in_functions(proto, ends), y, xs, keep_functions=True)
    assert {node.domain for node in kept.graph if node.op_type not in AROUND} == {"acme"}
    assert_same(kept, onward.gradient(proto, y, xs), inputs)


# ---- few pieces ------------------------------------------------------------------------------------------------------


def test_equal_layers_share_two_functions():
    """However many there are, and with as few nodes as calls: those of the layers, of their gradients, of the loss."""
    sizes = []
    for count in (2, 4, 12):
        proto = layers(count)
        kept = onward.gradient(proto, "y", ["x0", *parameters(proto)], keep_functions=True)
        assert names(kept) == ["Layer_backward", "Layer_forward"]
        sizes.append(len(kept.graph) - 2 * count)
        assert_same(kept, onward.gradient(proto, "y", ["x0", *parameters(proto)]), {"x0": numbers(5, 4)})
    assert len(set(sizes)) == 1


def test_the_first_layer_needs_no_gradient_of_its_input():
    proto = layers(3)
    kept = onward.gradient(proto, "y", parameters(proto), keep_functions=True)
    assert names(kept) == ["Layer_backward", "Layer_backward_1", "Layer_forward"]
    first = kept.functions["acme", "Layer_backward_1", ""]
    assert [value.name for value in first.outputs] == ["dscale", "dup", "ddown"]
    assert_same(kept, onward.gradient(proto, "y", parameters(proto)), {"x0": numbers(5, 4)})


def test_forward_values_are_kept_and_not_computed_again():
    proto = layers(1)
    kept = onward.gradient(proto, "y", parameters(proto), keep_functions=True)
    forward, backward = (kept.functions["acme", f"Layer_{half}", ""] for half in ("forward", "backward"))
    assert sum(node.op_type == "MatMul" for node in forward) == 2
    assert sum(node.op_type == "MatMul" for node in backward) == 4  # one for each operand
    assert {"wide", "active"} <= {value.name for value in forward.outputs}
    assert {"wide", "active"} <= {value.name for value in backward.inputs}


def test_calls_of_one_kind_differ_only_in_names_of_sizes():
    proto, xs, _ = CASES["shapes"]
    kept = onward.gradient(proto, "y", xs, keep_functions=True)
    called = [node.op_type for node in kept.graph if node.op_type.startswith("Scaled")]
    assert called.count("Scaled_forward") == 3
    assert called.count("Scaled_backward") == 2
    assert called.count("Scaled_backward_1") == 1


def test_names_in_use_stay_what_they_are():
    text = "(float[2, 3] x) => (float[2, 3] y) { h = acme.Squash (x)  y = acme.Squash_forward (h) }"
    proto = parsed(text, SQUASH, "Squash_forward (x) => (y) { y = Sin (x) }")
    kept = onward.gradient(proto, "y", ["x"], keep_functions=True)
    assert "Squash_forward_1" in names(kept)
    assert_same(kept, onward.gradient(proto, "y", ["x"]), X)


@needs("torch")
def test_gradients_against_pytorch():
    import torch

    proto = layers(4, batch=5)
    xs = ["x0", *parameters(proto)]
    inputs = {"x0": numbers(5, 4)}
    found = run(onward.gradient(proto, "y", xs, keep_functions=True), inputs)
    values = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in proto.graph.initializer} | inputs
    tensors = {name: torch.tensor(values[name], requires_grad=True) for name in xs}
    x = tensors["x0"]
    for i in range(4):
        normal = torch.nn.functional.layer_norm(x, (4,), tensors[f"scale{i}"])
        x = x + torch.nn.functional.leaky_relu(normal @ tensors[f"up{i}"], 0.1) @ tensors[f"down{i}"]
    x.mean().backward()
    for name, tensor in tensors.items():
        np.testing.assert_allclose(found[f"{name}/grad"], tensor.grad.numpy(), rtol=1e-4, atol=1e-6, err_msg=name)


# ---- together with the rest ------------------------------------------------------------------------------------------


def test_vjp_keeps_functions():
    proto = layers(2)
    kept, plain = (onward.vjp(proto, "x2", ["x0"], keep_functions=keep) for keep in (True, False))
    assert names(kept) == ["Layer_backward", "Layer_forward"]
    assert_same(kept, plain, {"x0": numbers(5, 4), "dy": numbers(5, 4, seed=1)})


def test_command_line(tmp_path):
    onnx.save(layers(2), tmp_path / "layers.onnx")
    arguments = ["grad", str(tmp_path / "layers.onnx"), "--of", "y", "--wrt", "x0", "--keep-functions"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert names(onward.load(tmp_path / "layers-gradient.onnx")) == ["Layer_backward", "Layer_forward"]


@pytest.mark.parametrize("recompute", [1, 2, "Layer_1", "*"])
def test_calls_are_computed_again_on_request(recompute):
    """The first run is the function as it was; the second keeps what the gradient needs."""
    proto = layers(4)
    for i, node in enumerate(proto.graph.node):
        node.name = f"{node.op_type}_{i}"
    kept = onward.gradient(proto, "y", parameters(proto), keep_functions=True, recompute=recompute)
    assert "Layer" in names(kept)
    assert any(node.name.startswith("again/") and node.op_type == "Layer_forward" for node in kept.graph)
    assert_same(kept, onward.gradient(proto, "y", parameters(proto)), {"x0": numbers(5, 4)})


def test_lowered_training_replaces_functions():
    """What a runtime is to execute has no functions, and the same gradients."""
    proto = layers(2)
    lowered = onward.lower(onward.prepare(proto, loss="value:y", optimizer="sgd:lr=0.1"), part="gradients")
    assert not names(lowered)
    state = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    inputs = {"x0": numbers(5, 4)}
    expected = run(lowered, state | inputs)
    found = run(onward.gradient(proto, "y", list(state), keep_functions=True), inputs)
    for name in state:
        np.testing.assert_allclose(found[f"{name}/grad"], expected[f"{name}/grad"], rtol=1e-4, atol=1e-6)


# ---- functions that cannot stay --------------------------------------------------------------------------------------

ROUNDING = "<float s = {0.1}, uint8 z = {128}>"
INLINED = {
    "random numbers": parsed(
        "(float[2, 3] x) => (float[2, 3] y) { y = acme.Outer (x) }",
        "Outer (x) => (y) { a = acme.Noisy (x)  y = Mul (a, x) }",
        "Noisy (x) => (y) { n = RandomUniformLike <low = 1.0, high = 1.000001> (x)  y = Mul (x, n) }",
    ),
    "rounded results": parsed(
        f"""(float[2, 3] x) => (float[2, 3] y) {ROUNDING} {{
            q = acme.Rounded (x, s, z)
            y = DequantizeLinear (q, s, z)
        }}""",
        "Rounded (x, s, z) => (q) { h = Sin (x)  q = QuantizeLinear (h, s, z) }",
    ),
    "rounded inputs": parsed(
        f"""(float[2, 3] x) => (float[2, 3] y) {ROUNDING} {{
            q = QuantizeLinear (x, s, z)
            y = acme.Restored (q, s, z)
        }}""",
        "Restored (q, s, z) => (y) { h = DequantizeLinear (q, s, z)  y = Sin (h) }",
    ),
}


@pytest.mark.parametrize("case", INLINED)
def test_functions_that_cannot_stay_are_replaced(case):
    kept = onward.gradient(INLINED[case], "y", ["x"], keep_functions=True)
    assert not names(kept)
    assert np.any(run(kept, X)["x/grad"])
    assert_same(kept, onward.gradient(INLINED[case], "y", ["x"]), X)


def test_an_operator_without_a_rule_is_named_with_its_function():
    text = "(float[2, 3] x) => (float[2, 3] y) { y = acme.Outer (x) }"
    proto = parsed(text, "Outer (x) => (y) { h = Exp (x)  y = acme.Unheard (h) }")
    with pytest.raises(UnsupportedError, match=r"`Unheard`(.|\n)*y <- Unheard\nin the function `Outer`"):
        onward.gradient(proto, "y", ["x"], keep_functions=True)


def test_a_function_that_calls_itself_is_refused():
    text = "(float[2, 3] x) => (float[2, 3] y) { y = acme.Endless (x) }"
    with pytest.raises(onward.Error, match="a function calls itself"):
        onward.gradient(parsed(text, "Endless (x) => (y) { y = acme.Endless (x) }"), "y", ["x"], keep_functions=True)


def test_a_function_through_which_nothing_flows_stays_as_it_is():
    text = "(float[2, 3] x) => (float[2, 3] y) { a = acme.Steps (x)  y = Mul (a, x) }"
    proto = parsed(text, "Steps (x) => (y) { h = Floor (x)  y = Mul (h, h) }")
    kept = onward.gradient(proto, "y", ["x"], keep_functions=True)
    assert names(kept) == ["Steps"]
    assert_same(kept, onward.gradient(proto, "y", ["x"]), X)
