"""Starting over: the state of a training model as its initialization makes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from commands import run as command
from marks import needs
from models import digits_mlp, small_cnn
from onnx import parser
from onnx.reference import ReferenceEvaluator
from runs import QUIET, RECIPE, Arrays, digits

import onward
from onward.engines import ENGINES, FRAMEWORKS
from onward.model.state import carried_state, states
from onward.recipe.optimizers.updates import OPTIMIZERS

DRAWN = {"conv.weight": "kaiming_normal", "fc.weight": "orthogonal", "fc.bias": "truncated_normal:std=0.1"}


def stored(model: onward.Model, step: int = 0) -> Arrays:
    return {s.name: s.array for s in states(model, step)}


def assert_equal(found: Arrays, wanted: Arrays) -> None:
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array, strict=True, err_msg=name)


def prepared(**recipe: Any) -> onward.Model:
    return onward.prepare(small_cnn(), loss="cross_entropy", optimizer="adam", **{"init": DRAWN, **recipe})


def trained(model: onward.Model, steps: int = 2) -> onward.Model:
    data = digits(8, flat=False)
    with onward.engines.start(model) as engine:
        for _ in range(steps):
            engine.step(data)
        return engine.updated()


# ---- files of others -------------------------------------------------------------------------------------------------

GRAPH = """<ir_version: 10, opset_import: ["" : 21]>
g (float[2] x) => (float[2] y) <float[2] w = {1, 2}, float[2] shared = {3, 4}, float[2] own = {5, 6}> {
  a = Mul(x, w) b = Add(a, shared) y = Add(b, own) }"""
ALGORITHM = """a () => (float[2] w1, float[2] s1, float[2] o1, int64 n1) <int64 n = {0}, int64 one = {1}> {
  w1 = Neg(y) s1 = Abs(y) o1 = Exp(y) n1 = Add(n, one) }"""
FIRST = """i () => (float[2] a, float[2] b, int64 c) <float[2] v = {7, 8}> {
  a = Sin(v) s = Constant<value = int64[1] {2}>() b = ConstantOfShape<value = float[1] {9}>(s) c = Size(v) }"""
SECOND = "i () => (float[2] b) <float[3] v = {1, 2, 3}, int64[1] k = {2}> { b, at = TopK(v, k) }"


def several(*initializations: tuple[str, dict[str, str]] | None) -> onnx.ModelProto:
    """A model with a training_info for each: an initialization and its bindings, or none."""
    proto = parser.parse_model(GRAPH)
    for given in initializations:
        info = proto.training_info.add()
        info.algorithm.CopyFrom(parser.parse_graph(ALGORITHM))
        for key, value in (("w", "w1"), ("shared", "s1"), ("own", "o1"), ("n", "n1")):
            info.update_binding.add(key=key, value=value)
        if given is not None:
            info.initialization.CopyFrom(parser.parse_graph(given[0]))
            for key, value in given[1].items():
                info.initialization_binding.add(key=key, value=value)
    return proto


def evaluated(proto: onnx.ModelProto, step: int) -> Arrays:
    """What the reference implementation of the standard makes of an initialization, by state."""
    info = proto.training_info[step]
    shell = onnx.ModelProto(ir_version=proto.ir_version, graph=info.initialization, opset_import=proto.opset_import)
    shell.functions.extend(proto.functions)
    names = [value.name for value in info.initialization.output]
    values = dict(zip(names, ReferenceEvaluator(shell).run(names, {}), strict=True))
    return {binding.key: np.asarray(values[binding.value]) for binding in info.initialization_binding}


def test_stored_initializers_first_then_every_initialization_in_order() -> None:
    """A counter of each step is its own; what nothing initialises stays; an entry may have no
    initialization.
    """
    proto = several((FIRST, {"w": "a", "shared": "b", "n": "c"}), None, (SECOND, {"shared": "b"}))
    fresh = onward.reset(proto)
    first, last = evaluated(proto, 0), evaluated(proto, 2)
    common = {"w": first["w"], "shared": last["shared"], "own": np.float32([5, 6])}
    np.testing.assert_array_equal(last["shared"], [3, 2])
    for step, count in enumerate([2, 0, 0]):
        assert_equal(stored(fresh, step), common | {"n": np.array(count)})
    assert_equal(stored(onward.reset(fresh)), stored(fresh))


def test_what_is_not_initialized_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(several((FIRST, {"w": "a"}), (SECOND, {"shared": "b"})), "training.onnx")
    said = command("reset", "training.onnx").stderr
    assert said.endswith("kept as stored: `own`, `n`\n")


@pytest.mark.parametrize(
    ("initialization", "message"),
    [
        (None, "no initialization"),
        (("i () => (double[2] a) { a = Constant<value = double[2] {1, 2}>() }", {"w": "a"}), r"\[2\].*double"),
        (("i () => (float[n] a) <float[3] v = {1, 2, 3}> { a = Exp(v) }", {"w": "a"}), r"float\[2\].*float\[3\]"),
        (("i (float[2] x) => (float[2] a) { a = Exp(x) }", {"w": "a"}), "has inputs"),
        (("i () => (float[2] a) { a = Constant<value = float[2] {1, 2}>() }", {"w": "b"}), "has no value `b`"),
    ],
)  # fmt: skip
def test_refused(initialization: tuple[str, dict[str, str]] | None, message: str) -> None:
    with pytest.raises(onward.Error, match=message):
        onward.reset(several(initialization))


# ---- seeds -----------------------------------------------------------------------------------------------------------

RANDOM = """i () => (float[2] a, float[2] b) { a = RandomNormal<shape = [2]>()
  c = RandomNormal<shape = [2], seed = 3.0>() b = Mul(a, c) }"""
IN_A_LOOP = """i () => (float[2] a) <int64 n = {2}, float[2] z = {0, 0}, bool yes = {1}> {
  a = Loop(n, yes, z) <body = body (int64 k, bool go, float[2] s) => (bool more, float[2] t) {
    r = RandomNormal<shape = [2]>() t = Add(s, r) more = Identity(go) }> }"""


def test_what_has_no_seed_is_drawn_anew_unless_one_is_given() -> None:
    model = onward.load(several((RANDOM, {"w": "a", "shared": "b"})))
    one, other = stored(onward.reset(model)), stored(onward.reset(model))
    assert not (one["w"] == other["w"]).any()
    np.testing.assert_allclose(one["shared"] / one["w"], other["shared"] / other["w"], rtol=1e-6)  # this has a seed
    fresh = onward.reset(model, seed=7)
    again, apart = stored(onward.reset(model, seed=7)), stored(onward.reset(model, seed=8))
    assert_equal(stored(fresh), again)
    assert_equal(stored(onward.reset(fresh)), again)  # the file holds the seed from now on
    assert not any((apart[name] == again[name]).any() for name in ("w", "shared"))
    assert (again["shared"] != again["w"] ** 2).all()  # each node draws its own


def test_a_seed_for_draws_that_cannot_be_told_apart_is_refused() -> None:
    model = onward.load(several((IN_A_LOOP, {"w": "a"})))
    onward.reset(model)
    with pytest.raises(onward.Error, match="may draw random numbers"):
        onward.reset(model, seed=1)


# ---- what `prepare` writes -------------------------------------------------------------------------------------------


def test_initializers_agree_with_the_reference_implementation() -> None:
    model = prepared(ema=0.9, seed=5)
    found, wanted = stored(onward.reset(trained(model))), evaluated(model.to_proto(), 0)
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-6, atol=1e-7, err_msg=name)
    assert onward.check(onward.reset(model)) == []


def test_another_seed_is_as_if_prepared_with_it() -> None:
    """Also for the key of Dropout."""
    fresh, wanted = onward.reset(trained(prepared(seed=1)), seed=2), onward.reset(prepared(seed=2))
    assert_equal(stored(fresh), stored(wanted))
    assert (stored(fresh)["conv.weight"] != stored(onward.reset(prepared(seed=1)))["conv.weight"]).all()
    drawn = [model.to_proto().training_info[0].initialization for model in (fresh, wanted)]
    assert drawn[0] == drawn[1]


def test_weights_of_the_file_come_back_where_nothing_else_is_said() -> None:
    """A model that is fine-tuned is not turned to noise; and what was recorded of its progress
    begins anew.
    """
    model = prepared(init="file")
    after = trained(model)
    after.step().metadata["train.progress"] = json.dumps({"step": 2, "epoch": 1, "samples": 16})
    fresh = onward.reset(after)
    assert_equal(stored(fresh), stored(model))
    assert fresh.to_proto() == model.to_proto()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_model_that_was_just_prepared_is_its_own_reset(optimizer: str) -> None:
    model = onward.prepare(digits_mlp(4), loss="cross_entropy", optimizer=optimizer, trainable="*.weight")
    assert_equal(stored(onward.reset(model)), stored(model))


# ---- engines and runs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [pytest.param(e, marks=needs(e) if e in FRAMEWORKS else ()) for e in ENGINES])
def test_every_engine_starts_from_the_same_numbers(engine: str) -> None:
    model = onward.prepare(digits_mlp(8), loss="cross_entropy", optimizer="sgd", init={"*.weight": "normal"})
    wanted = stored(onward.reset(model))
    with onward.engines.start(model, engine=engine, compile=False) as loaded:
        loaded.step(digits(8))
        loaded.reset()
        assert_equal(loaded.state(), wanted)
        loaded.step(digits(8))
        assert loaded.state()["step"] == 1


def test_an_engine_of_one_step_takes_over_what_another_step_initializes() -> None:
    """Also what is initialised only, and never updated."""
    proto = several((FIRST, {"w": "a", "n": "c"}), (SECOND, {"shared": "b"}))
    for info in proto.training_info:
        del info.update_binding[1]  # of `shared`
    fresh = onward.reset(proto)
    for step in range(2):
        with onward.engines.start(proto, step) as engine:
            engine.reset()
            assert_equal(engine.state(), {s.name: s.array for s in carried_state(fresh, step)})
            np.testing.assert_array_equal(engine.state()["shared"], [3, 2])


def first_loss(run: Any) -> float:
    return next(event["loss"] for event in run.read_log() if event["event"] == "step")


def test_a_run_starts_over_only_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = onward.prepare(digits_mlp(8), **RECIPE, init={"*": "zeros"})
    for reset in (False, True):
        run = onward.train(model, digits(), run=str(reset), reset=reset, **QUIET)
        assert bool(first_loss(run) == pytest.approx(np.log(10))) is reset  # with weights that are 0, all are as likely
        assert run.read_config()["reset"] is run.read_log()[0]["config"]["reset"] is reset


def test_a_run_draws_of_the_seed_that_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = onward.prepare(digits_mlp(8), **RECIPE, init={"*.weight": "normal"}, seed=4)
    for seed in (None, 0, 5):
        run = onward.train(model, digits(), run=f"run{seed}", reset=True, seed=seed, epochs=0, **QUIET)
        assert_equal(stored(run.model), stored(onward.reset(model, seed=seed)))


def test_what_a_recipe_initialises_a_run_starts_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = onward.train(digits_mlp(8), digits(), run="run", **RECIPE, init={"fc2.*": "zeros"}, **QUIET)
    assert first_loss(run) == pytest.approx(np.log(10))
