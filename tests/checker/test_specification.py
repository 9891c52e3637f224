"""What the specification allows works, on every engine; docs/clauses.toml says which sentence each test stands for.

What it forbids are the damages of broken_models.py. The models here are as small as a sentence, and what comes out of a
step is computed by hand: `x` is [3, 4], so `y` is [3, 8].
"""

from typing import NamedTuple

import numpy as np
import onnx
import pytest
from lowered import part
from marks import needs
from models import comparable

import onward
from onward import engines
from onward.checker import check_proto

PLAIN = "g (float[2] x) => (float[2] y) <float[2] w = {1, 2}> { y = Mul(x, w) }"
DEEP = "g (float[2] x) => (float[2] y) <float[2] w = {1, 2}> { h = Mul(x, w) y = Neg(h) }"
TWO = "g (float[2] x) => (float[2] y) <float[2] w = {1, 2}, float[2] v = {3, 4}> { h = Mul(x, w) y = Mul(h, v) }"
WITH_BIAS = "g (float[2] x) => (float[2] y) <float[2] w = {1, 2}, float[2] b = {0, 0}> { h = Mul(x, w) y = Add(h, b) }"
GRADIENT = "ai.onnx.preview.training.Gradient"
LOSS = "squares = Mul(y, y) loss = ReduceSum<keepdims = 0>(squares)"
ENGINES = ["onnxruntime", "numpy", *(pytest.param(name, marks=needs(name)) for name in ("torch", "jax", "tensorflow"))]


class Case(NamedTuple):
    algorithm: str
    update: dict[str, str]
    expected: dict[str, object]
    """The state after a step."""
    graph: str = PLAIN
    said: frozenset[str] = frozenset()
    """What the checker remarks, beside that there is no initialization."""


def descent(attributes: str, inputs: str, outputs: str = "d", takes: str = "", holds: str = "") -> str:
    heading = f"({takes}) => (float[2] w2, float loss) {holds}"
    return f"{heading} {{ {LOSS} {outputs} = {GRADIENT}<{attributes}>({inputs}) w2 = Sub(w, d) }}"


USUAL = 'xs = ["w"], zs = ["x"], y = "loss"'


CASES = {
    "state of its own": Case(
        "() => (float[2] w2, float[2] m2) <float[2] m = {5, 6}, float lr = {0.5}>"
        "{ m2 = Add(m, y) s = Mul(m2, lr) w2 = Sub(w, s) }",
        {"w": "w2", "m": "m2"},
        {"w": [-3, -5], "m": [8, 14]},
    ),
    "an input": Case("(float[2] t) => (float[2] t) { }", {"w": "t"}, {"w": [5, 6]}),
    "an input of inference": Case("() => (float[2] x) { }", {"w": "x"}, {"w": [3, 4]}),
    "a constant": Case("() => (float[2] c) <float[2] c = {7, 8}> { }", {"w": "c"}, {"w": [7, 8]}),
    "a value of inference": Case("() => (float[2] h) { }", {"w": "h"}, {"w": [3, 8]}, DEEP),
    "an output of inference": Case("() => (float[2] z) { z = Neg(y) }", {"w": "y"}, {"w": [3, 8]}, said={"OW206"}),
    "an output of both": Case("() => (float[2] y) { }", {"w": "y"}, {"w": [3, 8]}, said={"OW127"}),
    "two variables change places": Case(
        "() => (float[2] v, float[2] w) { }", {"w": "v", "v": "w"}, {"w": [3, 4], "v": [1, 2]}, TWO
    ),
    "what was before": Case(
        "() => (float[2] p, float[2] q) { p = Neg(w) q = Identity(w) }",
        {"w": "p", "v": "q"},
        {"w": [-1, -2], "v": [1, 2]},
        TWO,
    ),
    "one value for two variables": Case(
        "() => (float[2] p) { p = Neg(w) }", {"w": "p", "v": "p"}, {"w": [-1, -2], "v": [-1, -2]}, TWO, {"OW211"}
    ),
    "the loss is kept": Case(
        descent(USUAL, "w, x", holds="<float last = {0}>"),
        {"w": "w2", "last": "loss"},
        {"w": [-17, -62], "last": 73},
    ),
    "nothing": Case("() => () { }", {}, {}, said={"OW217"}),
    "only a counter": Case(
        "() => (int64 t2) <int64 t = {3}, int64 one = {1}> { t2 = Add(t, one) }", {"t": "t2"}, {"t": 4}
    ),
    "an input with a value": Case(
        "() => (float[2] w2) { w2 = Neg(w) }",
        {"w": "w2"},
        {"w": [-1, -2]},
        "g (float[2] x, float[2] w) => (float[2] y) <float[2] w = {1, 2}> { y = Mul(x, w) }",
        {"OW210"},
    ),
    "an input of the algorithm with a value": Case(
        "(float lr) => (float[2] w2) <float lr = {0.5}> { w2 = Mul(w, lr) }", {"w": "w2"}, {"w": [0.5, 1]}
    ),
    "notes on values": Case(
        "() => (float[2] w2) <float[2] s, float[2] y> { s = Neg(y) w2 = Neg(s) }", {"w": "w2"}, {"w": [3, 8]}
    ),
    "no inference": Case(
        "() => (float[2] w2) { w2 = Neg(w) }", {"w": "w2"}, {"w": [-1, -2]}, "g () => () <float[2] w = {1, 2}> { }"
    ),
    "a first gradient left out": Case(
        descent('xs = ["b", "w"], zs = ["x"], y = "loss"', "b, w, x", '"", d'),
        {"w": "w2"},
        {"w": [-17, -62]},
        WITH_BIAS,
    ),
    "a last gradient left out": Case(
        descent('xs = ["w", "b"], zs = ["x"], y = "loss"', "w, b, x"),
        {"w": "w2"},
        {"w": [-17, -62]},
        WITH_BIAS,
    ),
    "a gradient without zs": Case(
        descent('xs = ["w"], y = "loss"', "w"),
        {"w": "w2"},
        {"w": [-17, -62]},
        said={"OW412"},
    ),
    "a gradient by what is between": Case(
        descent('xs = ["h"], y = "loss"', "h"),
        {"w": "w2"},
        {"w": [-5, -14]},
        DEEP,
    ),
    "a gradient elsewhere": Case(
        descent(USUAL, "p, x", holds="<float[2] p = {10, 20}>"),
        {"w": "w2"},
        {"w": [-179, -638]},
    ),
    "a gradient with other data": Case(
        descent(USUAL, "w, t", takes="float[2] t"),
        {"w": "w2"},
        {"w": [-49, -142]},
    ),
    "a gradient of what is held": Case(
        f'() => (float[2] w2) {{ d = {GRADIENT}<xs = ["w"], zs = ["h"], y = "y">(w, h) w2 = Sub(w, d) }}',
        {"w": "w2"},
        {"w": [1, 2]},
        DEEP,
        frozenset({"OW408", "OW410", "OW411"}),
    ),
    "a gradient in a branch": Case(
        f"""() => (float[2] w2) <bool c = {{1}}> {{ w2 = If (c) <
            then_branch = t () => (float[2] p)
                {{ d = {GRADIENT}<xs = ["w"], zs = ["x"], y = "y">(w, x) p = Sub(w, d) }},
            else_branch = e () => (float[2] q) {{ q = Identity(w) }}> }}""",
        {"w": "w2"},
        {"w": [4, 6]},
        DEEP,
        frozenset({"OW416"}),
    ),
    "a rate of another type": Case(
        """() => (double[2] u2, double[2] v2) <double[2] u = {1, 2}, double[2] v = {0, 0}, double[2] k = {3, 4},
            float r = {0.5}, int64 t = {0}>
        { u2, v2 = ai.onnx.preview.training.Momentum<alpha = 0.9, beta = 1.0, norm_coefficient = 0.0, mode = "standard">
            (r, t, u, k, v) }""",
        {"u": "u2", "v": "v2"},
        {"u": [-0.5, 0], "v": [3, 4]},
    ),
    "a gradient of a sum": Case(
        f'() => (float[2] w2) {{ d = {GRADIENT}<xs = ["w"], zs = ["x"], y = "y">(w, x) w2 = Sub(w, d) }}',
        {"w": "w2"},
        {"w": [-2, -2]},
        said={"OW411"},
    ),
}


def model(
    graph: str, algorithm: str = "", update: dict[str, str] | None = None, ir_version: int = 10
) -> onnx.ModelProto:
    imports = '"": 21, "ai.onnx.preview.training": 1'
    proto = onnx.parser.parse_model(f"<ir_version: {ir_version}, opset_import: [{imports}]> {graph}")
    if algorithm:
        step(proto, algorithm, update or {})
    return proto


def step(proto: onnx.ModelProto, algorithm: str, update: dict[str, str]) -> onnx.TrainingInfoProto:
    entry = proto.training_info.add()
    entry.algorithm.CopyFrom(onnx.parser.parse_graph(f"a {algorithm}"))
    for key, value in update.items():
        entry.update_binding.add(key=key, value=value)
    return entry


def start(entry: onnx.TrainingInfoProto, initialization: str, reset: dict[str, str]) -> None:
    entry.initialization.CopyFrom(onnx.parser.parse_graph(f"i {initialization}"))
    for key, value in reset.items():
        entry.initialization_binding.add(key=key, value=value)


def serious(proto: onnx.ModelProto) -> set[str]:
    return {finding.code for finding in check_proto(proto) if finding.severity != "info"} - {"OW216"}


def after_a_step(proto, engine, index=0, **options):
    with engines.start(proto, index, engine=engine, **options) as loaded:
        given = {"x": np.array([3, 4], np.float32), "t": np.array([5, 6], np.float32)}
        metrics = dict(loaded.step({name: given[name] for name in loaded.inputs}))
        return loaded.state(), metrics


def assert_state(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-6)


# ---- what a step may be ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])
@pytest.mark.parametrize("engine", ENGINES)
def test_what_a_step_may_be(case, engine):
    options = {} if engine in ("onnxruntime", "numpy") else {"compile": False}
    state, metrics = after_a_step(model(case.graph, case.algorithm, case.update), engine, **options)
    assert_state(state, case.expected)
    assert ("loss" in metrics) == (f"d = {GRADIENT}" in case.algorithm and "If" not in case.algorithm)


@pytest.mark.parametrize("name", ["two variables change places", "what was before", "an input", "nothing"])
@pytest.mark.parametrize("engine", ENGINES[2:])
def test_a_compiled_step_reads_the_old_state_only(name, engine):
    case = CASES[name]
    assert_state(after_a_step(model(case.graph, case.algorithm, case.update), engine)[0], case.expected)


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])
def test_what_is_said_of_it(case):
    """It comes back as it was, also from a copy; it may be renamed and converted."""
    proto = model(case.graph, case.algorithm, case.update)
    assert serious(proto) == case.said
    read = onward.load(proto)
    assert comparable(read.to_proto()) == comparable(read.copy().to_proto()) == comparable(proto)
    state, _ = after_a_step(onward.transform.convert_opset(read, 18), "numpy")
    assert_state(state, case.expected)
    state, _ = after_a_step(onward.transform.rename(read, {"w": "weight"}), "numpy")
    assert_state(state, {"weight" if name == "w" else name: array for name, array in case.expected.items()})


@pytest.mark.parametrize("engine", ENGINES)
def test_inference_changes_nothing(engine):
    """Nor do gradients; and inference computes the same each time, of the state as it is."""
    case = CASES["the loss is kept"]
    options = {} if engine in ("onnxruntime", "numpy") else {"compile": False}
    x = np.array([3, 4], np.float32)
    with engines.start(model(case.graph, case.algorithm, case.update), engine=engine, **options) as loaded:
        np.testing.assert_array_equal(loaded.evaluate({"x": x})["y"], [3, 8])
        np.testing.assert_array_equal(loaded.evaluate({"x": x})["y"], [3, 8])
        np.testing.assert_array_equal(loaded.gradients({"x": x})["w"], [18, 64])
        assert_state(loaded.state(), {"w": [1, 2], "last": 0})
        loaded.step({"x": x})
        np.testing.assert_array_equal(loaded.evaluate({"x": x})["y"], x * [-17, -62])
        assert_state(loaded.state(), case.expected)


WITHOUT_LOSS = (
    f'() => (float[2] w2) {{ {LOSS} d = {GRADIENT}<xs = ["w"], zs = ["x"], y = "loss">(w, x) w2 = Sub(w, d) }}'
)


def test_an_algorithm_need_not_return_its_loss(tmp_path):
    """It is what the Gradient differentiates, and reported all the same."""
    x = np.array([0.1, 0.2, -0.1, 0.3], np.float32)
    proto = model(PLAIN, WITHOUT_LOSS, {"w": "w2"})
    run = onward.train(proto, {"x": x}, epochs=1, batch_size=2, shuffle=False, run=tmp_path / "run")
    first = np.array([1, 2]) * (1 - 2 * x[:2] ** 2)
    losses = [event["loss"] for event in run.log if event["event"] == "step"]
    np.testing.assert_allclose(losses, [sum((x[:2] * [1, 2]) ** 2), sum((x[2:] * first) ** 2)], rtol=1e-5)


@pytest.mark.parametrize("engine", ENGINES[:3])
def test_a_step_need_not_have_a_loss_nor_read_what_inference_reads(engine, tmp_path):
    case = CASES["only a counter"]
    proto = model(case.graph, case.algorithm, case.update)
    options = {"compile": False} if engine == "torch" else {}
    with engines.start(proto, engine=engine, **options) as loaded:
        assert not loaded.gradients({})
        np.testing.assert_array_equal(loaded.evaluate({"x": np.array([3, 4], np.float32)})["y"], [3, 8])
    assert onward.verify(proto, engines=["onnxruntime", "numpy"]).ok
    with pytest.raises(onward.Error, match="the step has no loss"):
        onward.train(proto, {"x": np.zeros(4, np.float32)}, batch_size=2, run=tmp_path / "run")


def test_device_configurations_are_kept():
    proto = model(PLAIN, *CASES["state of its own"][:2], ir_version=11)
    proto.configuration.add(name="two", num_devices=2)
    proto.graph.node[0].device_configurations.add(configuration_id="two", pipeline_stage=1)
    proto.training_info[0].algorithm.node[0].device_configurations.add(configuration_id="two")
    assert (
        comparable(onward.load(proto).to_proto())
        == comparable(onward.load(proto).copy().to_proto())
        == comparable(proto)
    )
    assert_state(after_a_step(proto, "numpy")[0], CASES["state of its own"].expected)


# ---- several steps, initialization, sparse tensors, rare types -------------------------------------------------------


@pytest.mark.parametrize("engine", ["onnxruntime", "numpy"])
def test_each_entry_is_a_step_and_all_share_the_state_of_inference(engine):
    """Both change `w`: the comment asks for one key in all entries, IR.md in each."""
    proto = model(PLAIN)
    step(proto, "() => (float[2] w2) { w2 = Add(w, w) }", {"w": "w2"})
    step(proto, "() => (float[2] w2) <float[2] k = {1, 1}> { w2 = Sub(w, k) }", {"w": "w2"})
    assert serious(proto) == {"OW203"}
    assert_state(after_a_step(proto, engine, 0)[0], {"w": [2, 4]})
    assert_state(after_a_step(proto, engine, 1)[0], {"w": [0, 1]})
    with (
        engines.start(proto, 0, engine=engine) as first,
        engines.start(proto, 1, engine=engine) as second,
    ):
        first.step({})
        second.load_state(first.state())
        second.step({})
        assert_state(second.state(), {"w": [1, 3]})  # not [1, 2], which is the other order
    with engines.start(proto, engine=engine) as both:
        both.step({})
        assert_state(both.state(), {"w": [1, 3]})


def test_an_initialization_has_names_and_constants_of_its_own():
    """Its names are those of other graphs too; an output may be a constant, and start two variables."""
    proto = model(PLAIN)
    entry = step(proto, "() => (float[2] y2, float[2] m2) <float[2] m = {5, 6}> { y2 = Neg(w) m2 = Neg(m) }", {})
    start(entry, "() => (float[2] w, float[2] x) <float[2] x = {9, 8}> { y = Neg(x) w = Neg(y) }", {"w": "w", "m": "x"})
    entry.update_binding.add(key="w", value="y2")
    entry.update_binding.add(key="m", value="m2")
    assert not serious(proto)
    initial = part(onward.load(proto), "initialization")({})
    assert_state(initial, {"w": [9, 8], "m": [9, 8]})


def test_an_entry_may_only_initialize():
    proto = model(PLAIN)
    start(proto.training_info.add(), "() => (float[2] z) <float[2] z = {9, 9}> { }", {"w": "z"})
    assert serious(proto) == {"OW215"}
    for engine in ("onnxruntime", "numpy"):
        assert_state(after_a_step(proto, engine)[0], {"w": [1, 2]})
    assert_state(part(onward.load(proto), "initialization")({}), {"w": [9, 9]})


@pytest.mark.parametrize("where", ["inference", "algorithm"])
@pytest.mark.parametrize("engine", ENGINES[:2])
def test_sparse_initializers_are_read_as_any_other(where, engine):
    proto = model(PLAIN.replace("Mul(x, w)", "Sub(w, s)" if where == "inference" else "Mul(x, w)"))
    read = "y" if where == "inference" else "s"
    entry = step(proto, f"() => (float[2] w2) {{ w2 = Add(w, {read}) }}", {"w": "w2"})
    values, indices = onnx.helper.make_tensor("s", 1, [1], [5.0]), onnx.helper.make_tensor("", 7, [1], [1])
    holder = proto.graph if where == "inference" else entry.algorithm
    holder.sparse_initializer.append(onnx.helper.make_sparse_tensor(values, indices, [2]))
    assert not serious(proto)
    expected = [2, -1] if where == "inference" else [1, 7]
    assert_state(after_a_step(proto, engine)[0], {"w": expected})
    assert_state(after_a_step(onward.transform.convert_opset(proto, 18), engine)[0], {"w": expected})


def test_a_damaged_sparse_initializer_is_found():
    proto = model(PLAIN, "() => (float[2] w2) { w2 = Add(w, s) }", {"w": "w2"})
    values, indices = onnx.helper.make_tensor("s", 1, [1], [5.0]), onnx.helper.make_tensor("", 7, [1], [9])
    proto.training_info[0].algorithm.sparse_initializer.append(onnx.helper.make_sparse_tensor(values, indices, [2]))
    assert serious(proto) == {"OW111"}


RARE = {"uint64": {"torch"}, "string": {"onnxruntime", "torch", "jax"}, "float8e4m3fn": set(), "bool": set()}


@pytest.mark.parametrize("engine", [*ENGINES[:2], *ENGINES[2:4]])
@pytest.mark.parametrize("kind", RARE)
def test_state_of_rare_types_is_held_or_refused(kind, engine):
    """The text says nothing of the types of variables; those that an engine does not hold are refused by name."""
    code = onnx.TensorProto.DataType.Value(kind.upper())
    proto = model(PLAIN, f"() => ({kind} s) {{ }}", {"s": "other"})
    algorithm = proto.training_info[0].algorithm
    first, second = (["a"], ["b"]) if kind == "string" else ([0], [1])
    algorithm.initializer.extend(
        onnx.helper.make_tensor(*named) for named in (("s", code, [], first), ("other", code, [], second))
    )
    algorithm.output[0].name = "other"
    if engine in RARE[kind]:
        with pytest.raises(onward.Error, match=f"cannot hold `s`, a state of type {kind}"):
            engines.start(proto, engine=engine)
        return
    state, _ = after_a_step(proto, engine)
    assert state["s"] == second[0]


# ---- operators that training needs -----------------------------------------------------------------------------------

NORMAL = "<float[2] s = {1, 3}, float[2] b = {0, 1}, float[2] m = {0, 0}, float[2] v = {1, 1}>"
PLANE = f"g (float[4, 2] x) => (float[4, 2] y) {NORMAL} {{ y = BatchNormalization(x, s, b, m, v) }}"
ALONE = "<float[1] s = {3}, float[1] b = {1}, float[1] m = {0}, float[1] v = {1}>"
LINE = f"g (float[4] x) => (float[4] y) {ALONE} {{ y = BatchNormalization(x, s, b, m, v) }}"
IN_TRAINING = "BatchNormalization<training_mode = 1>(x, s, b, m, v)"
STATISTICS = {
    "both": ("z, m2, v2 = ", {"m": "m2", "v": "v2"}),
    "mean": ('z, m2, "" = ', {"m": "m2"}),
    "variance": ('z, "", v2 = ', {"v": "v2"}),
    "unused": ("z, m2, v2 = ", {}),
    "computed with": ("z, m1, v1 = ", {"m": "m2", "v": "v2"}),
}


@pytest.mark.parametrize("shape", ["plane", "line"])
@pytest.mark.parametrize("statistics", STATISTICS)
@pytest.mark.parametrize("engine", ENGINES)
def test_batch_normalization_in_training(engine, statistics, shape):
    """ONNX Runtime crashes without names for statistics, and overwrites what is given if they are no outputs."""
    outputs, update = STATISTICS[statistics]
    size = 2 if shape == "plane" else 1
    then = "m2 = Neg(m1) v2 = Neg(v1)" if statistics == "computed with" else ""
    returned = "".join(f", float[{size}] {name}" for name in update.values())
    loss = "squares = Mul(z, z) loss = ReduceSum<keepdims = 0>(squares)"
    algorithm = f"() => (float loss{returned}) {{ {outputs}{IN_TRAINING} {then} {loss} }}"
    proto = model(PLANE if shape == "plane" else LINE, algorithm, update)
    x = np.array([[1, 5], [2, 3], [4, 9], [8, -1]], np.float32)[:, 2 - size :]
    z = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5) * np.array([1, 3])[-size:] + np.array([0, 1])[-size:]
    mean, variance = np.zeros(size), np.ones(size)
    options = {} if engine in ("onnxruntime", "numpy") else {"compile": False}
    with engines.start(proto, engine=engine, **options) as loaded:
        for _ in range(2):
            metrics = loaded.step({"x": x.reshape((4, 2)[:size])})
            assert float(metrics["loss"]) == pytest.approx((z**2).sum(), rel=1e-5)
            mean, variance = 0.9 * mean + 0.1 * x.mean(0), 0.9 * variance + 0.1 * x.var(0)
            if statistics == "computed with":
                mean, variance = -mean, -variance
        expected = {"m": mean, "v": variance}
        assert_state(loaded.state(), {name: expected[name] for name in update})


def test_statistics_need_training_mode():
    proto = model(PLANE, "() => (float[2] m2) { z, m2, v2 = BatchNormalization(x, s, b, m, v) }", {"m": "m2"})
    assert serious(proto) == {"OW113"}
    for engine in ("onnxruntime", "numpy"):
        with pytest.raises(onward.Error, match="has statistics, but is not in training mode"):
            engines.start(proto, engine=engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_dropout_drops_in_training_only(engine):
    """The mask is all true without training; what is kept is scaled by 1 / (1 - ratio), of which the default is 0.5."""
    nodes = """ones = ConstantOfShape<value = float[1] {1}>(n)
        plain, all = Dropout(ones) off, all_too = Dropout(ones, half, no) none, kept = Dropout(ones, zero, yes)
        dropped, mask = Dropout(ones, "", yes) a = Equal(plain, ones) b = Equal(off, ones) c = Equal(none, ones)
        scaled = Cast<to = 1>(mask) twice = Add(scaled, scaled) d = Equal(dropped, twice)
        e = And(a, b) f = And(c, d) g = And(all, all_too) h = And(e, f) i = And(g, kept) j = And(h, i)
        right = Cast<to = 1>(j) least = ReduceMin<keepdims = 0>(right) share = ReduceMean<keepdims = 0>(scaled)"""
    holds = "<float zero = {0}, float half = {0.75}, bool yes = {1}, bool no = {0}, int64[1] n = {4000}>"
    options = {} if engine in ("onnxruntime", "numpy") else {"compile": False}
    proto = model(PLAIN, f"() => (float least, float share) {holds} {{ {nodes} }}")
    _, metrics = after_a_step(proto, engine, **options)
    assert metrics["least"] == 1
    assert float(metrics["share"]) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_label_that_is_ignored_has_no_part_in_loss_and_gradient(engine):
    """It may be out of range, and its weight does not count."""
    graph = """g (float[2] x) => (float[1, 2] y) <float[2] w = {1, 2}, int64[1] zero = {0}>
        { h = Mul(x, w) y = Unsqueeze(h, zero) }"""
    body = f"""scores = Concat<axis = 0>(y, y, y) loss = SoftmaxCrossEntropyLoss<ignore_index = 9>(scores, k, c)
        d = {GRADIENT}<xs = ["w"], zs = ["x"], y = "loss">(w, x) w2 = Sub(w, d)"""
    holds = "<int64[3] k = {0, 9, 1}, float[2] c = {1, 3}>"
    options = {} if engine in ("onnxruntime", "numpy") else {"compile": False}
    proto = model(graph, f"() => (float[2] w2, float loss) {holds} {{ {body} }}", {"w": "w2"})
    state, metrics = after_a_step(proto, engine, **options)
    shares = np.exp([3.0, 8.0]) / np.exp([3.0, 8.0]).sum()
    assert float(metrics["loss"]) == pytest.approx((-np.log(shares) * [1, 3]).sum() / 4, rel=1e-5)
    gradient = shares - np.array([1, 3]) / 4
    np.testing.assert_allclose(state["w"], [1 - 3 * gradient[0], 2 - 4 * gradient[1]], rtol=1e-4)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_mean_of_losses_that_are_all_ignored_is_no_number(engine):
    """As PyTorch has it; and a step whose loss is no number changes nothing."""
    body = f"""two = Unsqueeze(y, k) loss = SoftmaxCrossEntropyLoss<ignore_index = 0>(two, k)
        d = {GRADIENT}<xs = ["w"], zs = ["x"], y = "loss">(w, x) w2 = Sub(w, d)"""
    options = {} if engine in ("onnxruntime", "numpy") else {"compile": False}
    proto = model(PLAIN, f"() => (float[2] w2, float loss) <int64[1] k = {{0}}> {{ {body} }}", {"w": "w2"})
    state, metrics = after_a_step(proto, engine, **options)
    assert np.isnan(metrics["loss"])
    assert_state(state, {"w": [1, 2]})
