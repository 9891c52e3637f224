"""What engines refuse, and how: each mistake by the same class of error on every engine, at the door."""

from __future__ import annotations

import os
import signal
import threading
import time
import types

import numpy as np
import onnx
import onnx.parser
import pytest
from marks import needs
from models import digits_mlp

import onward
from onward.engines import function, start, step_errors
from onward.engines.numpy import Numpy
from onward.errors import DataError, Error, InvalidModelError, OutOfMemoryError, UnknownNameError, UnsupportedError

ENGINES = [
    "onnxruntime",
    "numpy",
    *(pytest.param(name, marks=needs(name)) for name in ("torch", "jax", "tensorflow")),
]


def loaded(name, model=None, **options):
    if name in ("torch", "tensorflow", "jax"):
        options = {"compile": False, **options}
    return start(
        model or onward.prepare(digits_mlp(8), loss="cross_entropy", optimizer="sgd:lr=0.1"), engine=name, **options
    )


GOOD = {"image": np.zeros((2, 64), np.float32), "labels": np.zeros(2, np.int64)}
MISTAKES = {
    "nothing": ({}, UnknownNameError),
    "a missing input": ({"image": GOOD["image"]}, UnknownNameError),
    "an unknown input": ({**GOOD, "mask": GOOD["labels"]}, UnknownNameError),
    "another type": ({**GOOD, "image": GOOD["image"].astype(np.float64)}, DataError),
    "text": ({**GOOD, "image": np.full((2, 64), "one")}, DataError),
    "objects": ({**GOOD, "image": GOOD["image"].astype(object)}, DataError),
    "another size": ({**GOOD, "image": np.zeros((2, 63), np.float32)}, DataError),
    "another rank": ({**GOOD, "image": np.zeros(64, np.float32)}, DataError),
    "a list": ({**GOOD, "image": [[0.0] * 64] * 2}, DataError),
    "a number": ({**GOOD, "labels": 1}, DataError),
    "None": ({**GOOD, "labels": None}, DataError),
}


@pytest.mark.parametrize("name", ENGINES)
def test_wrong_batches_and_states(name):
    with loaded(name) as engine:
        before = engine.state()
        for what, (batch, kind) in MISTAKES.items():
            for call in (engine.step, engine.gradients, engine.evaluate):
                with pytest.raises(kind, match="does not fit the model"):
                    call(batch)
                    pytest.fail(f"{what} was accepted by {call}")
        weight = before["fc1.weight"]
        for state, kind in (
            ({"fc9.weight": weight}, UnknownNameError),
            ({"fc1.weight": weight.astype(np.float64)}, DataError),
            ({"fc1.weight": weight[:1]}, DataError),
            ({"fc1.weight": weight.tolist()}, DataError),
        ):
            with pytest.raises(kind):
                engine.load_state(state)
        engine.load_state({"fc1.weight": np.full_like(weight, np.nan)})
        assert np.isnan(engine.step(GOOD)["loss"])  # and so the state stays
        np.testing.assert_array_equal(engine.state()["fc2.weight"], before["fc2.weight"])


@pytest.mark.parametrize("name", ENGINES)
def test_batches_without_rows(name):
    """Runtimes make 0, NaN or an abort of the mean of nothing."""
    with loaded(name) as engine:
        for call in (engine.step, engine.gradients, engine.evaluate):
            with pytest.raises(DataError, match="no rows"):
                call({key: array[:0] for key, array in GOOD.items()})


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float8e4m3fn", "float8e5m2", "string"])
def test_inputs_of_rare_types(name, kind):
    """A cast, and what follows is float32; text is compared first."""
    first = 'a = Constant <value_strings = ["a"]> () hit = Equal (x, a) y = Cast <to = 1> (hit)'
    proto = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 21]>
        g ({kind}[N, 2] x) => (float[N, 3] logits) <float[2, 3] w = {{0.1, 0.2, 0.3, 0.4, 0.5, 0.6}}>
        {{ {first if kind == "string" else "y = Cast <to = 1> (x)"} logits = MatMul (y, w) }}"""
    )
    numbers, weight = np.array([[1, 0], [0, 1]]), np.arange(1, 7).reshape(2, 3) / 10
    given = np.where(numbers, "a", "b").astype(object) if kind == "string" else numbers
    batch = {"x": given.astype(onward.load(proto).inputs[0].dtype.numpy()), "labels": np.array([0, 2])}
    logits = numbers @ weight
    expected = np.mean(np.log(np.exp(logits).sum(1)) - logits[[0, 1], batch["labels"]])
    training = onward.prepare(proto, loss="cross_entropy", optimizer="sgd:lr=0.1")
    with loaded(name, training) as engine:
        assert float(engine.evaluate(batch)["loss"]) == pytest.approx(expected, rel=1e-4)
        assert float(engine.step(batch)["loss"]) == pytest.approx(expected, rel=1e-4)


def test_options_name_what_there_is():
    with pytest.raises(UnsupportedError) as caught:
        start(digits_mlp(8), precision="bfloat16")
    assert "--engine torch" in caught.value.hint
    with pytest.raises(UnknownNameError) as caught:
        start(digits_mlp(8), engine="tourch")
    assert "`torch`" in caught.value.hint and "tensorflow" in caught.value.hint
    model = onward.prepare(digits_mlp(8), loss="cross_entropy", optimizer="sgd:lr=0.1")
    with pytest.raises(UnknownNameError) as caught:
        start(model, device="gpu")
    assert "cuda" in caught.value.hint and "cpu" in caught.value.hint
    for threads in (0, -1, 100_000, 99999999999999999999, 1.5, "two"):
        with pytest.raises(Error, match="threads"):
            start(model, threads=threads)
    with pytest.raises(UnknownNameError) as caught:
        onward.verify(digits_mlp(8), on_start=lambda name: pytest.fail(f"{name} was tried"))
    assert "onward prepare" in caught.value.hint


def test_mistakes_of_our_own_look_like_mistakes(monkeypatch):
    """And say in which node; what the framework refuses is said as such."""
    row = types.FunctionType((lambda x: {}["no such row"]).__code__, {"__name__": "onward.engines.numpy.elementwise"})
    monkeypatch.setitem(Numpy.operators, "Relu", row)
    with pytest.raises(KeyError, match="no such row") as caught:
        function(digits_mlp(8))({"image": GOOD["image"]})
    assert caught.value.__notes__ == ["in `Relu` (node `relu`), on numpy"]
    monkeypatch.setitem(Numpy.operators, "Relu", lambda x: np.matmul(x, np.zeros((3, 3))))
    with pytest.raises(UnsupportedError, match="numpy fails in `Relu`"):
        function(digits_mlp(8))({"image": GOOD["image"]})


@needs("torch")
def test_a_derivative_that_a_framework_lacks(monkeypatch):
    from onward.engines.torch import Torch

    def lacking(*given):
        raise RuntimeError("derivative for aten::relu is not implemented")

    with loaded("torch") as engine:
        monkeypatch.setattr(Torch, "derivative", lacking)
        with pytest.raises(UnsupportedError, match=r"torch fails in its derivative.*not implemented") as caught:
            engine.step(GOOD)
    assert "rules=True" in caught.value.hint


# ---- loops -----------------------------------------------------------------------------------------------------------

LOOP = """<ir_version: 10, opset_import: ["" : 21]>
g (float[N, 64] image, {given}) => (float[N, 10] logits)
<int64 trips = {{ {trips} }}, bool go = {{ 1 }}>
{{
  last, all = Loop (trips, go, image)
    <body = b (int64 i, bool c, float[N, 64] h) => (bool c2, float[N, 64] h2, float[1] s)
    {{ c2 = {condition}
       h2 = Identity (h)
       s = Constant <value_floats=[1.0]> () }}>
  logits = MatMul (last, w)
}}"""


def with_a_loop(trips, condition="Identity (c)"):
    proto = onnx.parser.parse_model(LOOP.format(given="bool more", trips=trips, condition=condition))
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros((64, 10), np.float32), "w"))
    return proto


FEED = {"image": GOOD["image"], "more": np.array(True)}


@pytest.mark.parametrize("name", ENGINES)
def test_a_loop_that_never_ends_is_refused(name):
    for condition in ("Identity (c)", "Constant <value = bool {1}> ()"):
        with pytest.raises(UnsupportedError, match="never ends"):
            function(with_a_loop(2**63 - 1, condition), engine=name)
    assert function(with_a_loop(100), engine=name)(FEED)["logits"].shape == (2, 10)


def test_a_loop_ends_when_memory_does(monkeypatch):
    monkeypatch.setattr(step_errors, "_memory", lambda: 1 << 22)
    with pytest.raises(OutOfMemoryError, match="a Loop has collected more than fits"):
        function(with_a_loop(2**63 - 1, "Identity (more)"))(FEED)


def test_a_loop_on_onnxruntime_hears_an_interruption():
    proto = with_a_loop(2**63 - 1, "Identity (more)")
    loop = proto.graph.node[0]
    del loop.output[1], loop.attribute[0].g.output[2], loop.attribute[0].g.node[2]  # which takes time alone
    run = function(proto, engine="onnxruntime")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    start = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            run(FEED)
    finally:
        timer.cancel()
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - start < 30


@pytest.mark.parametrize("name", ENGINES)
def test_results_that_there_are_not(name):
    """A KeyError, as of any mapping, that lists what there is."""
    with loaded(name) as engine:
        results = engine.step(GOOD), engine.evaluate(GOOD), engine.gradients(GOOD), engine.state()
        for named, wrong, right in zip(results, ("los", "logit", "fc1.weights", "fc1.weights"),
                                       ("loss", "logits", "fc1.weight", "fc1.weight"), strict=True):  # fmt: skip
            with pytest.raises(KeyError, match=f"unknown result `{wrong}`\nhint: .*`{right}`"):
                named[wrong]
            assert named.get(wrong) is None and wrong not in named and right in named


IMAGE = GOOD["image"]
WRONG_FEEDS = {
    "nothing": None,
    "an array": IMAGE,
    "no input": {},
    "another input": {"image": IMAGE, "mask": IMAGE},
    "a weight": {"image": IMAGE, "fc1.weight": np.zeros((64, 8), np.float32)},
    "None": {"image": None},
    "text": {"image": np.full((2, 64), "one")},
    "objects": {"image": IMAGE.astype(object)},
    "another type": {"image": IMAGE.astype(np.float64)},
    "complex": {"image": IMAGE.astype(np.complex64)},
    "another rank": {"image": IMAGE[0]},
    "another size": {"image": IMAGE[:, :63]},
    "lists": {"image": IMAGE.tolist()},
    "a number": {"image": 1.0},
    "anything": {"image": object()},
}


@pytest.mark.parametrize("name", ENGINES)
def test_wrong_inputs_of_functions(name):
    compute = function(digits_mlp(8), engine=name)
    for what, given in WRONG_FEEDS.items():
        with pytest.raises((DataError, UnknownNameError)):
            compute(given)
            pytest.fail(f"{what} was accepted")


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("batch", [None, IMAGE, [IMAGE], "text"])
def test_batches_that_are_none(name, batch):
    with loaded(name) as engine, pytest.raises(DataError, match="not arrays by name"):
        engine.step(batch)


@pytest.mark.parametrize("name", ENGINES)
def test_inputs_without_a_type(name):
    model = digits_mlp(8)
    model.graph.input[0].ClearField("type")
    for use in (lambda: function(model, engine=name), lambda: onward.prepare(model, loss="cross_entropy")):
        with pytest.raises(InvalidModelError, match="`image` has no type"):
            use()
