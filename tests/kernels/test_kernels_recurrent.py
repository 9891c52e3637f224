"""Recurrent layers by native kernels: against PyTorch in double precision, the plain graph, and in whole models."""

from __future__ import annotations

from collections import Counter

import gradcheck
import numpy as np
import onnx
import pytest
from native_kernels import add_gradient, assert_the_same_with_kernels, lowered_gradient, needs_kernels, run_kernel
from onnxruntime.capi.onnxruntime_pybind11_state import Fail
from rule_cases.recurrent import GATES, OUTPUTS, layer
from torch_recurrent import loss_of_all, torch_gradients

import onward
from onward.kernels import DOMAIN, PASSES, library
from onward.lowering.step import LoweringOptions, lower_for_engine
from onward.runtime.sessions import open_session

pytestmark = needs_kernels
GIVEN = {"LSTM": "bhc", "GRU": "bh", "RNN": "bh"}


# ---- gradients of a layer --------------------------------------------------------------------------------------------


def gradients(proto: onnx.ModelProto, xs: list[str], inputs: dict[str, np.ndarray], kernels: bool) -> dict:
    """The gradients of a loss of all outputs by the variables `xs`."""
    given = onnx.ModelProto.FromString(proto.SerializeToString())
    add_gradient(given, "loss", xs)
    del given.graph.output[: -1 - len(xs)]
    made = lowered_gradient(given, kernels)
    kinds = Counter(node.op_type for node in made.graph if node.domain == DOMAIN)
    loops = sum(node.op_type == "Scan" for node in made.graph)
    assert (loops == 0 and any(kind.endswith("Gradient") for kind in kinds)) if kernels else loops > 0
    session = open_session(made, threads=2, library=library().path if kernels else None)
    _, *found = session.run(None, {value.name: inputs[value.name] for value in session.get_inputs()})
    return dict(zip(xs, found, strict=True))


def assert_close(found: dict, wanted: dict, rtol: float = 1e-5) -> None:
    for name, array in wanted.items():
        size = max(1.0, np.abs(array).max(initial=0))
        np.testing.assert_allclose(found[name], array, rtol=rtol, atol=rtol * size, err_msg=name)


def case(operator: str, given: str, sizes: tuple[int, int, int, int], symbolic: bool = False, **attributes):
    """A layer with a loss of all outputs, what to feed it, and the floating-point inputs among that."""
    proto, inputs = layer(operator, given, outputs=OUTPUTS[operator], sizes=sizes, **attributes)
    xs = [name for name, array in inputs.items() if array.dtype == np.float32]
    inputs |= {name: inputs[name] * 0.4 for name in ("W", "R")}  # no saturation, where slopes have no digits
    rng = np.random.default_rng(2)
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in proto.graph.output}
    seeds = {f"d{name}": rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    proto = loss_of_all(proto)
    return gradcheck.with_symbolic_dims(proto) if symbolic else proto, inputs, seeds, xs


OPTIONS = {
    "usual": {},
    "batch first": {"layout": 1},
    "lengths": {"lengths": [7, 3, 9, 0, 1]},
    "lengths, batch first": {"layout": 1, "lengths": [9, 2, 1, 5, 4]},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
@pytest.mark.parametrize("operator", GATES)
def test_gradients_are_those_of_torch_and_of_the_plain_graph(operator, direction, options):
    attributes = {"direction": direction, **OPTIONS[options]}
    if operator == "GRU":
        attributes["linear_before_reset"] = 1
    if "lengths" in attributes and direction == "forward":
        attributes["lengths"] = [max(1, n) for n in attributes["lengths"]]
    symbolic = options != "usual"
    proto, inputs, seeds, xs = case(operator, GIVEN[operator], (9, 5, 6, 19), symbolic, **attributes)
    found = gradients(proto, xs, inputs | seeds, kernels=True)
    assert_close(found, gradients(proto, xs, inputs | seeds, kernels=False))
    if 0 not in attributes.get("lengths", ()):  # PyTorch knows no empty sequence
        double = [
            {name: a.astype(np.float64) if a.dtype == np.float32 else a for name, a in d.items()}
            for d in (inputs, seeds)
        ]
        assert_close(found, torch_gradients(operator, *double, attributes))


@pytest.mark.parametrize("given", ["", "b", "bh"])
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("linear", [0, 1])
def test_gates_of_a_gru_reset_products_or_states(linear, direction, given):
    proto, inputs, seeds, xs = case("GRU", given, (4, 35, 3, 33), direction=direction, linear_before_reset=linear)
    assert_close(*(gradients(proto, xs, inputs | seeds, kernels) for kernels in (True, False)))


@pytest.mark.parametrize("sizes", [(4, 0, 2, 5), (1, 1, 1, 1)])
@pytest.mark.parametrize("operator", GATES)
def test_no_sequence_and_one_step(operator, sizes):
    proto, inputs, seeds, xs = case(operator, GIVEN[operator], sizes, symbolic=True, direction="bidirectional")
    assert_close(*(gradients(proto, xs, inputs | seeds, kernels) for kernels in (True, False)))


@pytest.mark.parametrize("operator", GATES)
def test_no_step(operator):
    """The last states are the first; ONNX Runtime's Scan knows no such thing."""
    proto, inputs, seeds, xs = case(operator, GIVEN[operator], (0, 3, 2, 5), symbolic=True, direction="bidirectional")
    wanted = {name: np.zeros_like(inputs[name]) for name in xs} | {"H0": seeds["dY_h"]}
    wanted |= {"C0": seeds["dY_c"]} if operator == "LSTM" else {}
    assert_close(gradients(proto, xs, inputs | seeds, kernels=True), wanted)


# ---- one kernel by itself --------------------------------------------------------------------------------------------

KERNELS = {"RNN": (1, 1, 0), "LSTM": (2, 4, 4), "GRU": (1, 3, 3), "LinearGRU": (1, 3, 4)}
"""States, gates, and how much is kept for the gradient, in multiples of the units."""
STEPS, BATCH, UNITS = 5, 37, 21
Call = tuple[str, list[np.ndarray], int]
"""A kernel, its inputs, and how many outputs it has."""


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(0, 0.3, shape).astype(np.float32)


def forward(name: str) -> Call:
    states, gates, kept = KERNELS[name]
    inputs = [numbers(STEPS, BATCH, gates * UNITS), numbers(gates * UNITS, UNITS), *[numbers(BATCH, UNITS)] * states]
    return name, inputs, 2 * states + (kept > 0)


def backward(name: str) -> Call:
    states = KERNELS[name][0]
    r, *initial = forward(name)[1][1:]
    made = run(forward(name))
    inputs = [r, *initial, *made[:states], *made[2 * states :], numbers(STEPS, BATCH, UNITS), *initial]
    return f"{name}Gradient", inputs, 2 + states + ("GRU" in name)


def run(call: Call, threads: int = 2) -> list[np.ndarray]:
    name, inputs, outputs = call
    return run_kernel(name, *inputs, outputs=outputs, threads=threads)


@pytest.mark.parametrize("way", [forward, backward])
@pytest.mark.parametrize("name", KERNELS)
def test_the_same_bits_with_any_number_of_threads(name, way):
    for one, two in zip(run(way(name), threads=1), run(way(name)), strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("name", KERNELS)
def test_what_is_not_a_number_stays_in_its_sequence(name):
    _, (items, *_), _ = call = forward(name)
    items[2, 7, 0], items[3, 9] = np.nan, np.inf
    every, *_ = run(call)
    assert np.isnan(every[2, 7]).any() and np.isnan(every[3:, 7]).all() and np.isfinite(every[:2]).all()
    assert np.isfinite(np.delete(every, [7, 9], axis=1)).all()
    _, inputs, _ = call = backward(name)
    inputs[-1 - KERNELS[name][0]][2, 7, 0] = np.nan
    ditems, dinitial, *_ = run(call)
    assert np.isnan(ditems[2, 7]).any() and np.isnan(ditems[:2, 7]).all() and np.isnan(dinitial[7]).all()
    assert np.isfinite(np.delete(ditems, 7, axis=1)).all() and np.isfinite(ditems[3:]).all()


def test_tanh_is_exact_for_any_number():
    x = np.concatenate([np.geomspace(1e-38, 100, 4000), np.linspace(0.5, 0.75, 999), [0, np.inf]]).astype(np.float32)
    items = np.stack([x, -x])[..., None]
    every, _ = run_kernel("RNN", items, np.zeros((1, 1), np.float32), np.zeros((len(x), 1), np.float32), outputs=2)
    np.testing.assert_array_max_ulp(every, np.tanh(items.astype(np.float64)).astype(np.float32), maxulp=2)


WRONG = {
    "fewer units": lambda array: array[..., :-1].copy(),
    "one axis more": lambda array: array[..., None],
    "one axis less": lambda array: array[0],
}


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("way", [forward, backward])
@pytest.mark.parametrize("name", KERNELS)
def test_shapes_that_do_not_go_together_are_an_error(name, way, kind):
    kernel, inputs, outputs = way(name)
    for i, array in enumerate(inputs):
        with pytest.raises(Fail, match=r"matrix|fit|differ|shape of what it is of|has steps"):
            run((kernel, [*inputs[:i], WRONG[kind](array), *inputs[i + 1 :]], outputs))
    without = [None] * (kernel == "LinearGRU")
    with pytest.raises(Fail, match="each sequence has a length"):
        run((kernel, [*inputs, *without, np.ones(BATCH + 1, np.int64)], outputs))


# ---- whole models ----------------------------------------------------------------------------------------------------


def tagger(operator: str, settings: str = "") -> onward.Model:
    """x [batch, steps, 6] -> output [steps, batch, 3], with sizes that only a run knows."""
    gates, rng = GATES[operator], np.random.default_rng(0)
    proto = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 20]>
        tagger (float[batch, steps, 6] x) => (float[steps, batch, 3] output) {{
            turned = Transpose <perm = [1, 0, 2]> (x)
            every = {operator} <hidden_size = 130, direction = "bidirectional" {settings}> (turned, w, r, b)
            together = Transpose <perm = [0, 2, 1, 3]> (every)
            sizes = Constant <value_ints = [0, 0, 260]> ()
            rows = Reshape(together, sizes)
            output = MatMul(rows, head)
        }}"""
    )
    rows = gates * 130
    shapes = {"w": (2, rows, 6), "r": (2, rows, 130), "b": (2, 2 * rows), "head": (260, 3)}
    for name, shape in shapes.items():
        weights = rng.normal(0, 0.1, shape).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(weights, name))
    return onward.prepare(proto, loss="mse", optimizer="adam", trainable=list(shapes))


@pytest.mark.parametrize("operator", GATES)
def test_whole_models_are_the_same_with_kernels(operator):
    model = tagger(operator)
    kinds = Counter(node.op_type for node in lower_for_engine(model, options=LoweringOptions(passes=PASSES)).graph)
    assert kinds[operator] == kinds[f"{operator}Gradient"] == 2 and kinds["Scan"] == 0
    rng = np.random.default_rng(1)
    for steps, batch in ((3, 5), (8, 2)):
        x, target = (rng.standard_normal(shape).astype(np.float32) for shape in ((batch, steps, 6), (steps, batch, 3)))
        assert_the_same_with_kernels(model, {"x": x, "target": target})


@pytest.mark.parametrize(
    ("operator", "settings"),
    [("LSTM", ", input_forget = 1"), ("GRU", ", clip = 2.0"), ("RNN", ', activations = ["Relu", "Tanh"]')],
)
def test_what_the_kernels_do_not_know_is_left_to_the_plain_graph(operator, settings):
    lowered = lower_for_engine(tagger(operator, settings), options=LoweringOptions(passes=PASSES))
    kinds = Counter(node.op_type for node in lowered.graph)
    assert kinds["Scan"] == 4 and kinds[f"{operator}Gradient"] == 0
