"""Updates of parameters as programs of native kernels: exactly what the operators compute that they stand for."""

from __future__ import annotations

import re

import numpy as np
import onnx
import pytest
from models import digits_mlp
from native_kernels import needs_kernels, run_kernel
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, RuntimeException
from optimizer_tables import KERAS, OPTAX, TORCH

import onward
from onward.engines import start
from onward.kernels import PASSES, update_in_place
from onward.kernels.build import SOURCES
from onward.kernels.fused_updates import OPERATORS
from onward.lowering.contract import contract_of
from onward.lowering.step import LoweringOptions, lower_for_engine
from onward.model.serde import from_proto
from onward.model.state import states as states_of

pytestmark = needs_kernels

SPECIAL = np.array([0.0, -0.0, 1.0, -2.5, np.inf, -np.inf, np.nan, 1e-40, 3e38], np.float32)


def run_program(steps, numbers, *items, results):
    program = [integer for step in steps for integer in (*step, *[step[1]] * (4 - len(step)))]
    arrays = [np.array(number, np.float32) for number in numbers] + [array for item in items for array in item]
    given = {"program": program, "results": results, "numbers": len(numbers), "tensors": len(items[0])}
    return run_kernel("Elementwise", *arrays, outputs=len(results) * len(items), **given)


# ---- programs --------------------------------------------------------------------------------------------------------

_NUMPY = {
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide, "Max": np.maximum, "Min": np.minimum,
    "Sqrt": np.sqrt, "Neg": np.negative, "Abs": np.abs, "Sign": np.sign,
}  # fmt: skip


@pytest.mark.parametrize("name", _NUMPY)
@pytest.mark.parametrize("number", ["none", "first", "second"])
def test_operators_are_those_of_numpy_also_of_what_is_not_finite(name, number):
    function, code = _NUMPY[name], OPERATORS.index(name)
    x, y = (array.reshape(-1).copy() for array in np.meshgrid(SPECIAL, SPECIAL))
    places = {"none": (1, 2), "first": (0, 1), "second": (1, 0)}[number]
    read = [np.float32(0.3), x, y]
    with np.errstate(all="ignore"):
        wanted = function(read[places[0]], read[places[1]]) if function.nin == 2 else function(read[places[0]])
    if function.nin == 1 and number == "first":
        wanted = np.full_like(x, wanted)
    (found,) = run_program([(code, *places[: function.nin])], [0.3], (x, y), results=[3])
    np.testing.assert_array_equal(found, wanted)


# ---- those that are compiled -----------------------------------------------------------------------------------------

USUAL = {
    "Sgd": "sgd:lr=0.1",
    "Momentum": "momentum:lr=0.1,momentum=0.9",
    "Adam": "adam:lr=1e-3",
    "AdamW": "adamw:lr=1e-3,weight_decay=0.01",
}


def usual_programs():
    """Those that are written down in native/usual_programs.h, by name."""
    source = (SOURCES / "usual_programs.h").read_text()
    for name, numbers, tensors, body, results in re.findall(
        r"Usual<\d+, \d> k(\w+)\{(\d+), (\d+),\s*\{(.*?)\},\s*\{([\d, ]+)\}\}", source, re.DOTALL
    ):
        steps = [
            (word.capitalize(), *map(int, given.split(","))) for word, given in re.findall(r"(\w+)\((.*?)\)", body)
        ]
        yield name, (steps, int(numbers), int(tensors), [int(result) for result in results.split(",")])


@pytest.mark.parametrize("clip", [None, "norm:1"])
@pytest.mark.parametrize("name", USUAL)
def test_programs_of_usual_optimizers_are_those_that_are_compiled(name, clip):
    steps, numbers, tensors, results = dict(usual_programs())[f"{'Clipped' if clip else ''}{name}"]
    model = onward.prepare(digits_mlp(), loss="cross_entropy", optimizer=USUAL[name], clip=clip)
    made = [
        node
        for node in lower_for_engine(model, options=LoweringOptions(passes=PASSES)).graph
        if node.op_type == "Elementwise"
    ]
    program = [n for step in steps for n in (OPERATORS.index(step[0]), *step[1:], *[step[1]] * (4 - len(step)))]
    for node in made:
        found = {key: attribute.value for key, attribute in node.attributes.items()}
        assert list(found["program"]) == program and list(found["results"]) == results
        assert (found["numbers"], found["tensors"]) == (numbers, tensors)
    assert made


@pytest.mark.parametrize("name", dict(usual_programs()))
@pytest.mark.parametrize("size", [3, 517])
def test_compiled_programs_compute_what_their_instructions_do(name, size):
    steps, numbers, tensors, results = dict(usual_programs())[name]
    steps = [(OPERATORS.index(step[0]), *step[1:]) for step in steps]
    rng = np.random.default_rng(0)
    given = rng.uniform(0.1, 1, numbers)
    items = [[rng.uniform(0, 2, size).astype(np.float32) for _ in range(tensors)] for _ in range(2)]
    items[0][0][0] = np.nan
    compiled = run_program(steps, given, *items, results=results)
    one_more = [*steps, (OPERATORS.index("Neg"), results[0])]  # of which nobody reads anything: no longer usual
    for found, expected in zip(compiled, run_program(one_more, given, *items, results=results), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("condition", [0.0, 1.0])
def test_a_condition_chooses(condition):
    x, y = SPECIAL, SPECIAL[::-1].copy()
    (found,) = run_program([(OPERATORS.index("Where"), 0, 1, 2)], [condition], (x, y), results=[3])
    np.testing.assert_array_equal(found, x if condition else y)


def test_items_of_all_sizes_are_computed_by_one_node():
    """v = 0.9 v + g; x = x - 0.1 v."""
    rng = np.random.default_rng(0)
    sizes = [(1,), (0,), (511,), (512,), (513,), (3, 5, 7), (70_001,), ()]
    items = [[rng.standard_normal(size).astype(np.float32) for _ in range(3)] for size in sizes]
    steps = [(2, 2 + 1, 0), (0, 5, 2 + 2), (2, 6, 1), (1, 2, 7)]
    found = run_program(steps, [0.9, 0.1], *items, results=[8, 6])
    for (x, v, g), new_x, new_v in zip(items, found[::2], found[1::2], strict=True):
        wanted = np.float32(0.9) * v + g
        np.testing.assert_array_equal(new_v, wanted)
        np.testing.assert_array_equal(new_x, x - np.float32(0.1) * wanted)


@pytest.mark.parametrize(
    ("steps", "numbers", "item", "results"),
    [
        ([(99, 1, 1)], [1.0], [SPECIAL], [2]),  # no such operator
        ([(0, 1, 5)], [1.0], [SPECIAL], [2]),  # no such operand
        ([(0, 1, 0)], [1.0], [SPECIAL], [1]),  # an input as a result
        ([(10, 1, 1, 1)], [1.0], [SPECIAL], [2]),  # a tensor as a condition
        ([(0, 0, 1)], [], [SPECIAL, SPECIAL[:3]], [2]),  # different shapes
    ],
)
def test_wrong_programs_are_refused(steps, numbers, item, results):
    with pytest.raises((Fail, RuntimeException), match=r"program|operand|result|condition|shape"):
        run_program(steps, numbers, item, results=results)


# ---- optimizers ------------------------------------------------------------------------------------------------------

TABLES = {"torch": TORCH, "keras": KERAS, "optax": OPTAX}
_FEW = [
    ("momentum", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, {}),
    ("adamw", {}, {"clip": "norm:0.5", "ema": 0.9, "accumulate": 2}),
    ("adamw", {"amsgrad": True}, {"clip": "value:0.001"}),
]


def assert_same_steps(model):
    """Some steps with kernels and without leave the same state."""
    nodes = lower_for_engine(model, options=LoweringOptions(passes=PASSES)).graph.all_nodes()
    made = [node for node in nodes if node.op_type == "Elementwise"]
    states = []
    for kernels in (True, False):
        with start(model, kernels=kernels, threads=2) as engine:
            for batch in digits_batches(4):
                engine.step(batch)
            states.append(engine.state())
    for name, wanted in states[1].items():
        near = 2e-6 * max(1.0, float(np.abs(wanted).max(initial=0)))  # differences of large numbers keep few digits
        np.testing.assert_allclose(states[0][name], wanted, rtol=2e-5, atol=near, err_msg=name)
    return made


@pytest.mark.parametrize(("name", "settings", "recipe"), _FEW)
def test_steps_are_the_same_with_and_without(name, settings, recipe):
    optimizer = {"name": name, **settings}
    made = assert_same_steps(onward.prepare(digits_mlp(33), loss="cross_entropy", optimizer=optimizer, **recipe))
    assert len(made) == 1  # for all parameters


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "name", "settings"),
    [(variant, name, settings) for variant, rows in TABLES.items() for name, _, settings in rows if name != "muon"],
)
def test_all_optimizers_are_the_same_with_and_without(variant, name, settings):
    optimizer = {"name": name, "variant": variant, **{k: v for k, v in settings.items() if k != "maximize"}}
    assert assert_same_steps(onward.prepare(digits_mlp(33), loss="cross_entropy", optimizer=optimizer))


# ---- in place --------------------------------------------------------------------------------------------------------


def digits_batches(count):
    rng = np.random.default_rng(0)
    return [
        {"image": rng.standard_normal((8, 64)).astype(np.float32), "labels": rng.integers(0, 10, 8)}
        for _ in range(count)
    ]


def updated_in_place(model):
    made = lower_for_engine(model, options=LoweringOptions(passes=PASSES))
    contract = contract_of(made)
    return update_in_place(made, contract.update, contract.loss)


@pytest.mark.parametrize(("name", "settings", "recipe"), [*_FEW, ("lamb", {}, {})])
def test_state_in_place_is_to_the_bit_what_it_is_in_two_places(name, settings, recipe, monkeypatch):
    model = onward.prepare(
        digits_mlp(33), loss="cross_entropy", optimizer={"name": name, **settings}, freeze="fc1.bias", **recipe
    )
    tensors = {state.name for state in states_of(model) if state.value.const_value.size > 1}
    read_again = ("accum/",) if name != "lamb" else ("/exp_avg",)  # by what else the new value goes into
    assert updated_in_place(model) == {name for name in tensors if not any(part in name for part in read_again)}
    states = []
    for in_place in (True, False):
        if not in_place:
            monkeypatch.setattr("onward.engines.onnxruntime.update_in_place", lambda *_: set())
        with start(model, threads=2) as engine:
            for batch in digits_batches(4):
                engine.step(batch)
            states.append(engine.state())
    for key, wanted in states[1].items():
        np.testing.assert_array_equal(states[0][key], wanted, err_msg=key)


@pytest.mark.parametrize("recipe", [{}, {"accumulate": 2}])
def test_a_loss_that_is_not_finite_leaves_all_as_it_was_in_place(recipe):
    with start(onward.prepare(digits_mlp(33), loss="cross_entropy", optimizer="adamw", **recipe)) as engine:
        good, bad = digits_batches(2)
        engine.step(good)
        before = engine.state()
        bad["image"][3, 5] = np.nan
        assert np.isnan(engine.step(bad)["loss"])
        for name, array in engine.state().items():
            np.testing.assert_array_equal(array, before[name], err_msg=name)
        engine.step(good)
        assert all(np.isfinite(array).all() for array in engine.state().values())


def test_what_another_update_reads_is_not_written_in_place():
    """Two parameters that each other's update reads, as in no optimizer of ours: in place one would see the other's."""
    text = """
    <ir_version: 10, opset_import: ["": 21, "onward.kernels": 1]>
    step (float[4] a, float[4] b, float[4] c, float[4] g)
    => (float loss, float[4] new_a, float[4] new_b, float[4] new_c) {
        loss = ReduceSum<keepdims=0>(g)
        h = Mul(a, g)
        new_a, new_b = onward.kernels.Elementwise<program=[1, 0, 1, 0], results=[2], numbers=0, tensors=2>(a, b, b, h)
        new_c = onward.kernels.Elementwise<program=[1, 0, 1, 0], results=[2], numbers=0, tensors=2>(c, h)
    }"""
    model = from_proto(onnx.parser.parse_model(text))  # `load` refuses what calls kernels
    update = {name: f"new_{name}" for name in "abc"}
    assert update_in_place(model, update, "loss") == {"a", "c"}
    *others, ready, first, second = model.graph
    assert [node.op_type for node in others] == ["ReduceSum", "Mul"]
    assert first.inputs[-1] is second.inputs[-1] is ready.outputs[0]
    assert {value.name for value in ready.inputs} == {"loss", "h"}
    assert update_in_place(model, update, None) == set()


def test_parameters_without_elements_are_left_to_onnxruntime():
    """As those of an adaptive softmax with a small last cluster."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 13]>
        g (float[N, 4] x) => (float[N, 3] y)
        { c = MatMul(x, a) d = MatMul(c, b) e = MatMul(x, w) y = Add(e, d) }""")
    rng = np.random.default_rng(0)
    for name, shape in {"w": (4, 3), "a": (4, 0), "b": (0, 3)}.items():
        array = rng.normal(size=shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    training = onward.prepare(model, loss="mse", optimizer="adamw:lr=1e-2")
    batch = {"x": rng.normal(size=(5, 4)).astype(np.float32), "target": np.zeros((5, 3), np.float32)}
    losses = []
    for engine in ("onnxruntime", "numpy"):
        with start(training, engine=engine) as running:
            batch = dict(zip(running.inputs, batch.values(), strict=True))
            losses.append([float(running.step(batch)["loss"]) for _ in range(2)])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    assert losses[0][1] < losses[0][0]
