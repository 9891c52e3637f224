"""A training model taken apart into a run, and put together again: the same training."""

from __future__ import annotations

import subprocess
import sys

import models
import numpy as np
import onnx
import pytest
from onnx import parser

import onward
from onward.agreement.steps import without_dropout
from onward.engines import start
from onward.errors import UnsupportedError
from onward.model.state import states
from onward.recipe.optimizers import OPTIMIZERS
from onward.run_state.training_models import from_training_model, to_training_model

RNG = np.random.default_rng(0)
BATCH = {"image": RNG.standard_normal((8, 64)).astype("f"), "labels": RNG.integers(0, 10, 8)}
RECIPES = {
    "schedules, clipping, groups": {
        "optimizer": "adamw:lr=1e-2",
        "schedule": ["linear:steps=3,start_factor=0.1,until=3", "cosine:steps=20,min=1e-4"],
        "groups": ["*bias:weight_decay=0,lr=2e-3", {"match": "fc1*", "optimizer": "sgd:lr=0.01,momentum=0.9"}],
        "clip": {"norm": 0.5, "variant": "optax"},
    },
    "some are frozen, gradients accumulate, an average": {"freeze": ["fc1*"], "accumulate": 2, "ema": 0.9},
    "a smooth loss of half weight": {"loss": "cross_entropy:label_smoothing=0.1,scale=0.5", "optimizer": "sgd:lr=0.1"},
    **{f"optimizer {name}": {"optimizer": name, "freeze": ["*bias"]} for name in OPTIMIZERS},
    "a number without a use": {"optimizer": "nadam:variant=optax"},
    "clipped by value": {"clip": "value:0.01"},
    "clipped tensor by tensor": {"clip": "tensor_norm:0.1", "schedule": "step:size=2,gamma=0.5,warmup=2"},
}


def steps(model, count, batch=BATCH):
    with start(model, threads=1) as engine:
        losses = [float(engine.step(batch)["loss"]) for _ in range(count)]
        return losses, engine.updated()


@pytest.mark.parametrize("name", RECIPES)
def test_a_run_goes_on(name):
    recipe = {"loss": "cross_entropy", **RECIPES[name]}
    _, model = steps(onward.prepare(models.digits_mlp(), **recipe), 4)
    again = to_training_model(from_training_model(model))
    onward.check(again)
    expected, end = steps(model, 4)
    losses, other = steps(again, 4)
    assert losses == expected
    assert [state.name for state in states(other)] == [state.name for state in states(end)]
    for found, state in zip(states(other), states(end), strict=True):
        np.testing.assert_array_equal(found.value.const_value.numpy(), state.value.const_value.numpy(), state.name)


def test_a_loss_that_the_model_computes():
    proto = models.digits_mlp()
    proto.graph.node.append(onnx.helper.make_node("ReduceMean", ["logits"], ["mean"], keepdims=0))
    proto.graph.output.append(onnx.helper.make_tensor_value_info("mean", onnx.TensorProto.FLOAT, ()))
    model = onward.prepare(proto, loss="value:mean")
    image = {"image": BATCH["image"]}
    assert steps(to_training_model(from_training_model(model)), 3, image)[0] == steps(model, 3, image)[0]


def test_what_is_written_out_is_no_run():
    model = onward.prepare(models.digits_mlp(), loss="cross_entropy")
    model.step().algorithm.metadata_props.pop("train.loss")
    with pytest.raises(UnsupportedError, match="the loss is written in plain operators"):
        from_training_model(model)


def test_a_framework_that_is_not_installed():
    code = "import sys; sys.modules['torch'] = None; import onward; onward.from_torch"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "`onward.from_torch` needs `torch`, which is not installed" in done.stderr


def test_an_output_that_dropout_computes_keeps_its_name():
    text = """<ir_version: 10, opset_import: ["" : 21]> g (float[n, 4] x) => (float[n, 4] y) { y = Dropout(x) }"""
    model = without_dropout(onward.load(parser.parse_model(text)))
    assert [node.op_type for node in model.graph] == ["Identity"]
    assert [value.name for value in model.outputs] == ["y"]
