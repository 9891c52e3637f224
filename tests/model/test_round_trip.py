"""Every model that comes with `onnx` goes through Onward unharmed, as it is and with a recipe applied."""

import glob
import os
import re

import numpy as np
import onnx
import pytest
from models import comparable
from node_tests import onnx_node_tests
from representatives import by_operators, first_of_each
from sessions import session

import onward

ROOT = os.path.join(os.path.dirname(onnx.__file__), "backend", "test", "data")
FILES = sorted(os.path.relpath(path, ROOT) for path in glob.glob(ROOT + "/**/*.onnx", recursive=True))
LIGHT = [name for name in FILES if name.startswith("light")]
CHUNKS = 8


def load(name):
    with open(os.path.join(ROOT, name), "rb") as file:
        return onnx.ModelProto.FromString(file.read())


def check_unchanged(proto):
    before = proto.SerializeToString()
    model = onward.load(proto)
    assert comparable(model.to_proto()) == comparable(proto)
    assert comparable(model.copy().to_proto()) == comparable(proto)
    assert proto.SerializeToString() == before


@pytest.mark.parametrize("name", FILES)
def test_files_come_back_the_same(name):
    check_unchanged(load(name))


def test_a_node_test_of_each_kind_comes_back_the_same():
    protos = {name: (case.proto(), {}) for name, case in onnx_node_tests().items()}
    for name in first_of_each(protos, by_operators):
        check_unchanged(protos[name][0])


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_node_tests_come_back_the_same(chunk):
    cases = list(onnx_node_tests().values())[chunk::CHUNKS]
    assert cases
    for case in cases:
        check_unchanged(case.proto())


def with_recipe(proto, **recipe):
    """The model with a loss on its first floating-point output; None if there is nothing to train in it."""
    outputs = [v for v in onward.load(proto).outputs if v.dtype is not None and v.dtype.is_floating_point()]
    if not outputs:
        return None
    try:
        return onward.prepare(proto, loss={outputs[0].name: "mse"}, **recipe)
    except onward.Error as error:
        assert re.search(
            "nothing is left to train|matches no floating-point tensor|is a sequence, which", str(error)
        ), error
        return None


def run(proto, feeds):
    return session(proto).run(None, feeds)


def feeds_for(proto):
    rng = np.random.default_rng(0)
    weights = {tensor.name for tensor in proto.graph.initializer}
    dims = {
        value.name: [dim.dim_value or 2 for dim in value.type.tensor_type.shape.dim]
        for value in proto.graph.input
        if value.name not in weights
    }
    return {name: rng.random(shape, np.float32) for name, shape in dims.items()}


def check_inference_unchanged(proto, feeds, training):
    assert training.steps and training.steps[0].update
    reread = onward.load(training.to_proto())
    assert comparable(reread.to_proto()) == comparable(training.to_proto())
    for before, after in zip(run(proto, feeds), run(training.to_proto(), feeds), strict=True):
        pairs = zip(after, before, strict=True) if isinstance(before, list) else [(after, before)]
        for ours, theirs in pairs:
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("pytorch")])
def test_a_recipe_leaves_inference_alone(name):
    proto = load(name)
    training = with_recipe(proto, optimizer="adam:lr=1e-3")
    if training is None:
        pytest.skip("the model has nothing to train")
    inputs, outputs = stored(name, "input"), stored(name, "output")
    feeds = {value.name: x for value, x in zip(training.inputs, inputs, strict=False)}
    for expected, after in zip(outputs, run(training.to_proto(), feeds), strict=True):
        np.testing.assert_allclose(after, expected, rtol=1e-4, atol=1e-5)
    assert comparable(onward.load(training.to_proto()).to_proto()) == comparable(training.to_proto())


def stored(name, kind):
    """The inputs or outputs that come with a model."""
    folder = os.path.join(ROOT, os.path.dirname(name), "test_data_set_0")
    paths = sorted(glob.glob(os.path.join(folder, f"{kind}_*.pb")))
    return [onnx.numpy_helper.to_array(onnx.load_tensor(path)) for path in paths]


@pytest.mark.parametrize("each", [12, pytest.param(1, marks=pytest.mark.slow)])
def test_node_tests_with_a_recipe(each):
    """Node tests whose weights are constants of the model, e.g. those of operators that are written as functions."""
    prepared = 0
    for case in list(onnx_node_tests().values())[::each]:
        proto = case.proto()
        training = with_recipe(proto, optimizer="sgd", trainable="*")
        if training is None:
            continue
        prepared += 1
        inputs, _ = case.data[0]
        feeds = {v.name: x for v, x in zip(proto.graph.input, inputs, strict=False) if x is not None}
        try:
            run(proto, feeds)
        except Exception:  # ONNX Runtime does not run it before either
            continue
        check_inference_unchanged(proto, feeds, training)
    assert prepared > 160 / each


@pytest.mark.slow("light/light_shufflenet.onnx")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if "squeezenet" in name or "shufflenet" in name else pytest.mark.slow)
        for name in LIGHT
    ],
)
def test_classic_networks_with_a_recipe(name):
    """Their weights are the outputs of ConstantOfShape nodes, at operator sets from before 2019."""
    proto = load(name)
    training = with_recipe(proto, optimizer="sgd:lr=0.1", init="ones")
    assert training is not None
    assert len(training.steps[0].differentiated()) >= 16
    check_inference_unchanged(proto, feeds_for(proto), training)
