"""What an engine returns belongs to the caller, and what it was given stays the caller's."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from marks import needs
from models import digits_mlp
from onnx import helper

import onward
from onward.training.data import Batches, open_data

ENGINES = [
    pytest.param("onnxruntime", {}, id="onnxruntime"),
    pytest.param("numpy", {}, id="numpy"),
    pytest.param("torch", {"compile": False}, marks=needs("torch"), id="torch"),
    pytest.param("torch", {}, marks=[needs("torch"), pytest.mark.slow], id="torch-compiled"),
    pytest.param("jax", {"compile": False}, marks=needs("jax"), id="jax"),
    pytest.param("jax", {}, marks=needs("jax"), id="jax-compiled"),
    pytest.param("tensorflow", {"compile": False}, marks=needs("tensorflow"), id="tensorflow"),
    pytest.param("tensorflow", {}, marks=needs("tensorflow"), id="tensorflow-compiled"),
]


def training_model():
    """Its outputs, and the metrics of a step, are also what might be handed out as it is: an input and a weight."""
    proto = digits_mlp(16)
    for source, name, shape in (("image", "image_again", ["N", 64]), ("fc2.weight", "weight_again", [10, 16])):
        proto.graph.node.append(helper.make_node("Identity", [source], [name]))
        proto.graph.output.append(helper.make_tensor_value_info(name, 1, shape))
    model = onward.prepare(proto, loss={"logits": "cross_entropy"}, optimizer="adam:lr=0.1")
    algorithm = model.step(0).algorithm
    for value in (model.inputs[0], model.graph.initializers["fc2.weight"]):
        shown = ir.Value(name=f"{value.name}/shown", type=value.type, shape=value.shape)
        algorithm.append(ir.Node("", "Identity", [value], outputs=[shown]))
        algorithm.outputs.append(shown)
    return model


def batch(seed, rows=8):
    rng = np.random.default_rng(seed)
    return {"image": rng.standard_normal((rows, 64)).astype("f"), "labels": rng.integers(0, 10, rows)}


def everything(engine, given):
    """All that an engine hands out, by kind and name."""
    kinds = {
        "step": engine.step(given),
        "evaluate": engine.evaluate(given),
        "gradients": engine.gradients(given),
        "state": engine.state(),
    }
    return {(kind, name): array for kind, results in kinds.items() for name, array in results.items()}


def copied(arrays):
    return {name: np.array(array) for name, array in arrays.items()}


def assert_same(found, expected):
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=str(name))


@pytest.mark.parametrize(("name", "options"), ENGINES)
def test_results_stay_what_they_were_and_may_be_written(name, options):
    model = training_model()
    original = copied({name: value.const_value.numpy() for name, value in model.graph.initializers.items()})
    with onward.engines.start(model, engine=name, **options) as engine:
        kept = [everything(engine, batch(i)) for i in range(4)]
        at_once = [copied(results) for results in kept]
        engine.step(batch(4))
        for results, copies in zip(kept, at_once, strict=True):
            assert_same(results, copies)
        given, before = batch(5), engine.state()
        kept.append({("evaluate", name): array for name, array in engine.evaluate(given).items()})
        for results in kept:
            for array in results.values():
                array[...] = 77
        assert_same(engine.state(), before)
        assert_same(given, batch(5))
    assert_same({name: value.const_value.numpy() for name, value in model.graph.initializers.items()}, original)


@pytest.mark.parametrize(("name", "options"), ENGINES)
def test_what_was_given_may_be_written_afterwards(name, options):
    """At once, while a step may still run; it is large enough to do so."""
    with onward.engines.start(training_model(), engine=name, **options) as engine:
        start, rows = engine.state(), 4096
        expected = copied(engine.step(batch(0, rows)))
        after = engine.state()
        state = copied(start)
        engine.load_state(state)
        for array in state.values():
            array[...] = 5
        assert_same(engine.state(), start)
        given = batch(0, rows)
        metrics = engine.step(given)
        given["image"][...] = 1e3
        given["labels"][...] = 0
        assert_same(metrics, expected)
        assert_same(engine.state(), after)


def test_a_stream_may_use_one_buffer_for_all_batches():
    def source():
        buffer = np.empty((2, 3), np.float32)
        for i in range(5):
            buffer[...] = i
            yield {"x": buffer}

    batches = list(Batches(open_data(source), {"x": "x"}).epoch(0))
    assert [float(found["x"][0, 0]) for found in batches] == [0, 1, 2, 3, 4]
