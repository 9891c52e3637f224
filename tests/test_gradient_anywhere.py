"""`Gradient` and the optimizers of the standard outside training: wherever a node may be."""

import os

import numpy as np
import onnx
import pytest

import onward
from conftest import needs
from onward.run import FRAMEWORKS, function

SIMPLE = os.path.join(os.path.dirname(onnx.__file__), "backend", "test", "data", "simple")
ENGINES = ["onnxruntime", "numpy", *(pytest.param(name, marks=needs(name)) for name in FRAMEWORKS)]


def on(engine, model, feeds, **options):
    return function(model, engine=engine, **options)(feeds)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["test_gradient_of_add", "test_gradient_of_add_and_mul"])
def test_the_gradient_tests_of_onnx(name, engine):
    model = onnx.load(os.path.join(SIMPLE, name, "model.onnx"))
    stored = lambda kind, i: onnx.numpy_helper.to_array(
        onnx.load_tensor(os.path.join(SIMPLE, name, "test_data_set_0", f"{kind}_{i}.pb"))
    )
    feeds = {value.name: stored("input", i) for i, value in enumerate(model.graph.input)}
    results = on(engine, model, feeds)
    for i, value in enumerate(model.graph.output):
        np.testing.assert_array_equal(results[value.name], stored("output", i))
        assert results[value.name].dtype == np.float32
    lowered = onward.lower(model).to_proto()
    onnx.checker.check_model(lowered, full_check=True)
    assert [domain.domain for domain in lowered.opset_import] == [""]
