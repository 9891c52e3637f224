"""Functions with operator sets of their own, in models of another.

What they mean is what ONNX Runtime makes of their bodies as models of those operator sets. What it makes of the file
itself is another matter: it reads functions as if they had the operator sets of the model.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import onward
from onward.engines import function, start
from onward.frameworks.run_files import ENDINGS, Framework, write

ENGINES = ("onnxruntime", "numpy", "torch", "jax", "tensorflow")

MODEL = """
<ir_version: 10, opset_import: ["": {model}, "f": 1]>
g (float[2,4,6] x) => (float[a,b,c] y) {{
    v = Mul (x, w)
    {call}
}}
"""
BODIES = {
    "softmax": (11, "", "y = Softmax <axis = 1> (x)"),
    "log_softmax": (11, "axis: int", "y = LogSoftmax <axis: int = @axis> (x)"),
    "reduce_mean": (13, "axes: ints", "s = ReduceMean <axes: ints = @axes> (x)  y = Sub (x, s)"),
    "reduce_sum": (
        11,
        "",
        "s = ReduceSum <axes = [-1], keepdims = 0> (x)  u = Unsqueeze <axes = [2]> (s)  y = Mul (x, u)",
    ),
    "split": (13, "", "a, b = Split <axis = 2> (x)  p = Mul (a, b)  y = Concat <axis = 2> (p, a)"),
    "split_sizes": (
        11,
        "sizes: ints",
        "a, b = Split <axis = 2, split: ints = @sizes> (x)  y = Concat <axis = 2> (b, a)",
    ),
    "clip": (6, "", "y = Clip <min = -0.5, max = 0.5> (x)"),
    "pad": (10, "", 'y = Pad <mode = "edge", pads = [0, 0, 1, 0, 0, 2]> (x)'),
    "dropout": (10, "", "d = Dropout <ratio = 0.5> (x)  y = Sin (d)"),
    "batch_norm": (
        9,
        "",
        """s = Constant <value = float[4] {1, 2, 3, 4}> ()  b = Constant <value = float[4] {4, 3, 2, 1}> ()
        m = Constant <value = float[4] {0, 1, 0, 1}> ()  v = Constant <value = float[4] {1, 1, 2, 2}> ()
        y = BatchNormalization (x, s, b, m, v)""",
    ),
    "grid_sample": (
        16,
        "mode: string",
        """one = Constant <value = int64[1] {0}> ()  u = Unsqueeze (x, one)
        g = Constant <value = float[1, 1, 3, 2] {-0.7, -0.2, 0.1, 0.3, 0.8, 0.6}> ()
        s = GridSample <mode: string = @mode, align_corners = 1> (u, g)  y = Squeeze (s, one)""",
    ),
    "group_norm": (
        18,
        "",
        """o = Constant <value = float[2] {0.5, 2}> ()
        y = GroupNormalization <num_groups = 2, epsilon = 0.01> (x, o, o)""",
    ),
    "if": (
        13,
        "axes: ints",
        """c = Constant <value = bool {1}> ()
        y = If (c) <
            then_branch = t () => (z) { z = ReduceMean <axes: ints = @axes> (x) },
            else_branch = e () => (q) { q = Identity (x) }
        >""",
    ),
    "resize": (10, "", "s = Constant <value = float[3] {1, 1, 1.5}> ()  y = Resize (x, s)"),
    "dft": (
        17,
        "",
        """a = Constant <value = int64[1] {3}> ()  u = Unsqueeze (x, a)  d = DFT <axis = 2> (u)
        y = ReduceSumSquare <axes = [3], keepdims = 0> (d)""",
    ),
    "newer": (21, "", 'y = Gelu <approximate = "tanh"> (x)'),
    "nested": (
        13,
        "axes: ints",
        "s = f.Inner <axes: ints = @axes> (x)  n = ReduceMax (x)  y = Sub (s, n)",
    ),
}
PLAIN = {"nested": "s = ReduceMean <axes = [1]> (x)  n = ReduceMax <keepdims = 1> (x)  y = Sub (s, n)"}
CALLS = {"axes": "axes = [1]", "axis": "axis = 2", "sizes": "sizes = [2, 4]", "mode": 'mode = "bilinear"'}
INNER = (
    '<domain: "f", opset_import: ["": 12]> Inner <axes: ints> (x) => (y) { y = ReduceMean <axes: ints = @axes> (x) }'
)


def mixed(case: str) -> onnx.ModelProto:
    version, attributes, body = BODIES[case]
    given = f"<{CALLS[attributes.partition(':')[0]]}>" if attributes else ""
    text = MODEL.format(model=18 if case == "newer" else 21, call=f"y = f.F {given} (v)")
    taken = f"<{attributes}>" if attributes else ""
    text += f'<domain: "f", opset_import: ["": {version}, "f": 1]> F {taken} (x) => (y) {{ {body} }}'
    proto = onnx.parser.parse_model(text + (INNER if case == "nested" else ""))
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weights(), "w"))
    return proto


def weights() -> np.ndarray:
    return np.random.default_rng(1).uniform(0.5, 1.5, (4, 6)).astype(np.float32)


def data() -> np.ndarray:
    return np.random.default_rng(0).uniform(-2, 2, (2, 4, 6)).astype(np.float32)


def truth(case: str, x: np.ndarray) -> np.ndarray:
    """What a function computes, as a model of its operator set."""
    version, attributes, body = BODIES[case]
    name = attributes.partition(":")[0]
    body = re.sub(r"(\w+): \w+ = @\w+", rf"\1 = {CALLS.get(name, '').partition('= ')[2]}", PLAIN.get(case, body))
    head = f'<ir_version: 8, opset_import: ["": {version}]> g (float[2,4,6] x) => (y)'
    session = ort.InferenceSession(onnx.parser.parse_model(f"{head} {{ {body} }}").SerializeToString())
    return session.run(None, {"x": x * weights()})[0]


@pytest.mark.slow("grid_sample")
@pytest.mark.parametrize("case", BODIES)
def test_every_engine_computes_what_the_file_means(case: str) -> None:
    proto = mixed(case)
    expected = truth(case, data())
    for engine in ENGINES:
        result = function(proto, engine=engine)({"x": data()})["y"]
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5, err_msg=engine)


@pytest.mark.parametrize("case", BODIES)
def test_gradients_are_those_of_the_file(case: str) -> None:
    proto = mixed(case)
    random = np.random.default_rng(2)
    x, direction, step = data(), random.uniform(-1, 1, (2, 4, 6)).astype(np.float32), 2e-3
    ahead, behind = (truth(case, x + s * step * direction).astype(np.float64).sum() for s in (1, -1))
    expected = (ahead - behind) / (2 * step)
    for keep in (False, True):
        gradients = onward.gradient(proto, "y", ["x"], keep_functions=keep)
        found = function(gradients, engine="onnxruntime")({"x": x})["x/grad"]
        np.testing.assert_allclose((found * direction).sum(dtype=np.float64), expected, rtol=0.02, atol=0.02)


QUICK = {"softmax", "batch_norm", "nested"}
SOME_SLOW = [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in BODIES]


@pytest.mark.slow("softmax")
@pytest.mark.parametrize("case", SOME_SLOW)
def test_training_steps_agree(case: str) -> None:
    proto = mixed(case)
    training = onward.prepare(proto, loss="mse", optimizer="sgd:lr=0.01")
    batch = {"x": data(), "target": np.zeros_like(truth(case, data()))}
    results = {}
    for engine in ENGINES:
        with start(training, engine=engine, **({} if engine == "onnxruntime" else {"compile": False})) as loaded:
            evaluated = loaded.evaluate(batch)["loss"]
            losses = [float(loaded.step(batch)["loss"]) for _ in range(2)]
            results[engine] = losses, loaded.state()["w"]
        np.testing.assert_allclose(evaluated, np.square(truth(case, data())).mean(), rtol=1e-4)
    for losses, w in results.values():
        np.testing.assert_allclose(losses, results["torch"][0], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(w, results["torch"][1], rtol=1e-4, atol=1e-5)


def test_each_kind_of_call_has_its_function() -> None:
    """In branches too, and where only functions import the standard's operators, under its long name."""
    proto = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["f": 1]>
        g (float[2, 3] x, float[2, 3, 4] z) => (float[a, b] y, float[d, e, f] w) { y = f.F (x)  w = f.G (z) }
        <domain: "f", opset_import: ["ai.onnx": 13, "f": 1]> F (x) => (y) {
            c = Constant <value = bool {1}> ()
            y = If (c) <
                then_branch = t () => (p) { q = Sin (x)  p = f.H <axes = [0]> (q) },
                else_branch = e () => (r) { r = f.H <axes = [1]> (x) }
            >
        }
        <domain: "f", opset_import: ["f": 1]> G (z) => (w) { w = f.H <axes = [1, 2]> (z) }
        <domain: "f", opset_import: ["": 16]> H <axes: ints> (x) => (y) { y = ReduceMean <axes: ints = @axes> (x) }
    """)
    x, z = data()[:, :3, 0], data()[:, :3, :4]
    for engine in ("numpy", "onnxruntime"):
        found = function(proto, engine=engine)({"x": x, "z": z})
        np.testing.assert_allclose(found["y"], np.sin(x).mean(0, keepdims=True), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found["w"], z.mean((1, 2), keepdims=True), rtol=1e-5, atol=1e-6)
    onnx.checker.check_model(onward.transform.convert_opset(proto, 21).to_proto(), full_check=True)


def test_a_function_that_no_older_operator_set_can_say_is_named() -> None:
    with pytest.raises(onward.Error, match=r"Gelu exists\nin the function `f\.F`"):
        onward.transform.convert_opset(mixed("newer"), 18)


# ---- files that carry training ---------------------------------------------------------------------------------------


def mixed_training(case: str) -> onnx.ModelProto:
    """A training model whose function is again the one that the model had before it was prepared."""
    original = mixed(case)
    proto = onward.prepare(original, loss="mse", optimizer="sgd:lr=0.01").to_proto()
    (old,) = (node for node in original.graph.node if node.domain == "f")
    (new,) = (node for node in proto.graph.node if node.domain == "f")
    new.op_type = old.op_type
    new.attribute.extend(old.attribute)
    others = [function for function in proto.functions if function.domain != "f"]
    del proto.functions[:]
    proto.functions.extend([*others, *original.functions])
    return proto


def test_reading_and_writing_changes_nothing() -> None:
    proto = mixed_training("nested")
    again = onward.load(proto).to_proto()
    assert [*map(onnx.printer.to_text, again.functions)] == [*map(onnx.printer.to_text, proto.functions)]
    assert onnx.printer.to_text(again.graph) == onnx.printer.to_text(proto.graph)


@pytest.mark.parametrize("case", ["nested", pytest.param("softmax", marks=pytest.mark.slow)])
def test_every_converter_takes_them(case: str) -> None:
    torch = pytest.importorskip("torch")
    training, x, expected = mixed_training(case), data(), truth(case, data())
    batch = {"x": x, "target": np.zeros_like(expected)}
    loss = np.square(expected).mean()
    carried = onward.to_torch(training)
    np.testing.assert_allclose(carried.module.eval()(torch.tensor(x)).detach().numpy(), expected, rtol=1e-5, atol=1e-6)
    step, state = onward.to_jax(training)[:2]
    np.testing.assert_allclose(step(state, batch)[1]["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(onward.to_keras(training)(x), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(onward.to_tensorflow(training).train_step(**batch)["loss"], loss, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["torch", "jax", "keras", "tensorflow"])
def test_programs_are_written_of_them(framework: Framework, tmp_path: Path) -> None:
    """Who writes one tries it, against the training model."""
    path = tmp_path / f"run{ENDINGS[framework]}"
    assert write(onward.load(mixed_training("nested")), framework, path)


# ---- what the checker says -------------------------------------------------------------------------------------------


def test_the_checker_says_which_operator_is_another() -> None:
    found = [finding for finding in onward.check(mixed("reduce_mean")) if finding.code == "OW618"]
    assert [finding.severity for finding in found] == ["error"]
    assert "`ReduceMean` has version 13" in found[0].message
    assert "onward opset MODEL 21" in (found[0].hint or "")
    assert not onward.check(onward.transform.convert_opset(mixed("reduce_mean"), 21))


ENCODER = """
<ir_version: 10, opset_import: ["": 21, "ai.onnx.ml": 3, "f": 1]>
g (int64[3] x) => (y) { y = f.F (x) }
<domain: "f", opset_import: ["ai.onnx.ml": %s]> F (x) => (y) { y = ai.onnx.ml.LabelEncoder %s (x) }
"""


def test_other_domains_are_of_one_version_or_refused() -> None:
    """LabelEncoder is the same in versions 2 and 3 of its domain, and another in version 1."""
    same = onnx.parser.parse_model(ENCODER % (2, "<keys_int64s = [1, 2], values_floats = [0.5, 0.25]>"))
    np.testing.assert_array_equal(function(same)({"x": np.array([2, 1, 2])})["y"], [0.25, 0.5, 0.25])
    other = onnx.parser.parse_model(ENCODER % (1, '<classes_strings = ["a", "b"]>'))
    with pytest.raises(onward.Error, match=r"imports version 1 of `ai\.onnx\.ml` for `LabelEncoder`"):
        onward.transform.inline(other)
    assert "OW618" in {finding.code for finding in onward.check(other)}
