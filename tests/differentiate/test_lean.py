"""Backward graphs are short, are made in time that grows with the graph, and can trade time for memory."""

import subprocess
import sys

import numpy as np
import onnx.parser
import pytest
from models import digits_mlp, small_transformer
from sessions import run

import onward
from onward.build import Builder
from onward.differentiate.simplify import simplify
from onward.transform.training import remove_unused


def parameters(proto):
    return [tensor.name for tensor in proto.graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT]


def parsed(body, inputs, output="float[] y"):
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> g ({inputs}) => ({output}) {{ {body} }}')


@pytest.fixture
def tokens():
    rng = np.random.default_rng(0)
    return {name: rng.integers(0, 32, (2, 8)) for name in ("tokens", "labels")}


# ---- short -----------------------------------------------------------------------------------------------------------


def count(model, *op_types):
    return sum(node.op_type in op_types for node in model.graph.all_nodes())


def test_backward_graph_of_a_transformer_is_short():
    """Each layer has 27 nodes, most of them one kernel; what goes back has more to do, and no more than that."""
    sizes = []
    for layers in (1, 2, 3):
        proto = small_transformer(layers)
        forward = sum(node.op_type != "Constant" for node in proto.graph.node)
        model = onward.gradient(proto, "loss", parameters(proto))
        sizes.append((len(model.graph) - count(model, "Constant") - forward, forward))
    assert sizes[2][0] - sizes[1][0] == sizes[1][0] - sizes[0][0]
    assert (sizes[2][0] - sizes[1][0]) / (sizes[2][1] - sizes[1][1]) < 3.5


def test_equal_nodes_are_one():
    proto = parsed("a = Tanh (x)  b = Mul (a, a)  y = ReduceSum <keepdims = 0> (b)", "float[N, 3] x")
    model = onward.gradient(proto, "y", ["x"])
    nodes = [(node.op_type, tuple(node.inputs), str(node.attributes)) for node in model.graph]
    assert len(nodes) == len(set(nodes))


def test_nodes_that_draw_numbers_or_bear_names_are_not_shared():
    model = onward.load(digits_mlp())
    op = Builder(model.graph, opset=21, names=model.names(), share=True)
    assert op.Relu(model.graph.inputs[0]).value is op.Relu(model.graph.inputs[0]).value
    for name in ("Identity", "RandomNormalLike", "Dropout"):
        first, second = (getattr(op, name)(model.graph.inputs[0]) for _ in range(2))
        assert first.value is not second.value


TWO_RESHAPES = """s = Constant <value_ints = [-1, 6]> ()  a = Reshape (x, s)
                  t = Constant <value_ints = [4, -1]> ()  y = Reshape (a, t)"""


@pytest.mark.parametrize(
    ("body", "shape", "left"),
    [
        ("a = Transpose <perm = [2, 0, 1]> (x)  b = Transpose <perm = [1, 2, 0]> (a)  y = Relu (b)", "2, 3, 4", 1),
        ("a = Transpose <perm = [2, 0, 1]> (x)  b = Transpose <perm = [2, 0, 1]> (a)  y = Relu (b)", "3, 4, 2", 2),
        ("a = Transpose <perm = [0, 2, 1]> (x)  b = MatMul (a, x)  y = Transpose <perm = [0, 2, 1]> (b)", "2, 4, 4", 2),
        ("a = Transpose <perm = [0, 2, 1]> (x)  b = MatMul (x, a)  y = Transpose <perm = [0, 2, 1]> (b)", "2, 3, 3", 2),
        ("a = MatMul (x, w)  y = Transpose <perm = [0, 2, 1]> (a)", "2, 5, 3", 2),
        (TWO_RESHAPES, "4, 6", 2),
    ],
)
def test_simplification_keeps_the_values(body, shape, left):
    given = "float[2, 3, 4] x, float[4, 5] w"
    proto, rng = parsed(body, given, f"float[{shape}] y"), np.random.default_rng(0)
    feeds = {"x": rng.standard_normal((2, 3, 4), np.float32), "w": rng.standard_normal((4, 5), np.float32)}
    model = onward.load(proto)
    expected = run(model, feeds)["y"]
    model = model.copy()
    simplify(list(model.graph))
    np.testing.assert_allclose(run(model, feeds)["y"], expected, rtol=1e-6)
    remove_unused(model.graph)
    assert len(model.graph) == left


def test_what_only_a_dropped_branch_reads_is_dropped_with_it():
    branch = "() => (float[3] b) { b = Neg (a) }"
    body = f"a = Exp (x)  c = If (flag) <then_branch = one {branch}, else_branch = two {branch}>  y = Relu (x)"
    model = onward.load(parsed(body, "float[3] x, bool flag", "float[3] y")).copy()
    remove_unused(model.graph)
    assert [node.op_type for node in model.graph] == ["Relu"]


def test_shape_arithmetic_is_followed_unless_it_explodes():
    """Exporters compute shapes in the graph; where they can be followed, broadcasting is known beforehand."""
    arithmetic = "n = Shape <start = 0, end = 1> (x)  k = Constant <value_ints = [12]> ()  s = Concat <axis = 0> (n, k)"
    proto = parsed(
        f"{arithmetic}  a = Reshape (x, s)  b = Mul (a, a)  y = ReduceSum <keepdims = 0> (b)", "float[2, 3, 4] x"
    )
    assert count(onward.gradient(proto, "y", ["x"]), "NonZero") == 0
    doubling = " ".join(f"s{i + 1} = Concat <axis = 0> (s{i}, s{i})" for i in range(40))
    proto = parsed(
        f"s0 = Shape (x)  {doubling}  k = Size (s40)  f = CastLike (k, x)  y = Mul (x, f)", "float[3] x", "float[3] y"
    )
    onward.gradient(proto, "y", ["x"])  # comes to an end


# ---- recomputation ---------------------------------------------------------------------------------------------------


@pytest.mark.slow("*gelu", "1", "3")
@pytest.mark.parametrize("recompute", [1, 2, 3, "*gelu", ["layers.0.*", "layers.2.*"], "*"])
def test_recomputation_changes_no_number(recompute, tokens):
    proto = small_transformer(4)
    xs = parameters(proto)
    expected = run(onward.gradient(proto, "loss", xs), tokens)
    model = onward.gradient(proto, "loss", xs, recompute=recompute)
    assert any((node.name or "").startswith("again/") for node in model.graph)
    for name, grad in run(model, tokens).items():
        np.testing.assert_allclose(grad, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_recomputed_gradients_can_be_differentiated(tokens):
    proto = small_transformer(3)
    first = [
        onward.vjp(proto, "layers.2.gelu", ["layers.0.up.weight"], recompute=choice).to_proto() for choice in (None, 1)
    ]
    feeds = {**tokens, "dy": np.ones((2, 8, 64), np.float32)}
    plain, again = (run(onward.gradient(p, "layers.0.up.weight/grad", ["layers.0.ln2.bias"]), feeds) for p in first)
    np.testing.assert_allclose(again["layers.0.ln2.bias/grad"], plain["layers.0.ln2.bias/grad"], rtol=1e-4, atol=1e-5)


def test_what_draws_numbers_is_not_computed_again():
    body = """t = Constant <value = bool {1}> ()  a = MatMul (x, w)  b = Tanh (a)  c, m = Dropout (b, r, t)
              d = MatMul (c, w)  e = Tanh (d)  y = ReduceSum <keepdims = 0> (e)"""
    proto = parsed(body, "float[2, 3] x, float[3, 3] w, float r")
    model = onward.gradient(proto, "y", ["w"], recompute="*")
    assert count(model, "Dropout") == 1
    assert count(model, "Tanh") == 4


def test_recomputation_that_is_not_possible_is_refused():
    with pytest.raises(onward.errors.UnsupportedError, match="too few"):
        onward.gradient(digits_mlp(), "logits", ["fc1.weight"], recompute=3)
    with pytest.raises(onward.errors.UnsupportedError, match="every 0th"):
        onward.gradient(digits_mlp(), "logits", ["fc1.weight"], recompute=0)
    with pytest.raises(onward.errors.UnknownNameError, match=r"matches `gelu\*`"):
        onward.gradient(digits_mlp(), "logits", ["fc1.weight"], recompute="gelu*")


MEMORY = """
import re, sys
from pathlib import Path
import numpy as np, onnxruntime as ort

def peak():  # not ru_maxrss, which a child inherits
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

session = ort.InferenceSession(sys.argv[1])
before = peak()
session.run(None, {v.name: np.zeros((4, 256), np.int64) for v in session.get_inputs()})
print(peak() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak memory from /proc")
def test_recomputation_saves_memory(tmp_path):
    proto = small_transformer(8, width=64, heads=4)
    peaks = []
    for i, recompute in enumerate((None, 2)):
        path = tmp_path / f"{i}.onnx"
        onward.gradient(proto, "loss", parameters(proto), recompute=recompute).save(path)
        done = subprocess.run([sys.executable, "-c", MEMORY, path], capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout))
    assert peaks[1] < 0.7 * peaks[0], peaks
