"""Learning rates that fall with the depth: which block a parameter belongs to, and what a step makes of it."""

from __future__ import annotations

import re

import numpy as np
import onnx
import onnx.parser
import pytest
from marks import needs
from models import digits_mlp, small_cnn
from onnx import helper, numpy_helper

import onward
from onward.engines import start
from onward.errors import RecipeError


def rates(model: onnx.ModelProto, **recipe: object) -> dict[str, float]:
    training = onward.prepare(model, **{"loss": "mse", "optimizer": "sgd:lr=1", "lr_decay": 0.5, **recipe})
    groups = training.step().fact("train.optimizer")
    assert groups[0]["hyper"]["lr"] == max(group["hyper"]["lr"] for group in groups)  # which is what is shown
    return {name: group["hyper"]["lr"] for group in groups for name in group["params"]}


def chain(*names: str) -> onnx.ModelProto:
    """A matrix (`.weight`) or a vector for each name, one after another."""
    values = ["x", *(f"v{i}" for i in range(len(names)))]
    nodes = [
        helper.make_node("MatMul" if name.endswith("weight") else "Add", [values[i], name], [values[i + 1]])
        for i, name in enumerate(names)
    ]
    tensors = [
        numpy_helper.from_array(
            np.eye(4, dtype=np.float32) if name.endswith("weight") else np.ones(4, np.float32), name
        )
        for name in names
    ]
    info = lambda name: helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["N", 4])
    graph = helper.make_graph(nodes, "chain", [info("x")], [info(values[-1])], tensors[::-1])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def test_layers_without_numbers_are_blocks() -> None:
    assert rates(digits_mlp(), loss="cross_entropy") == {
        "fc2.weight": 1, "fc2.bias": 1, "fc1.weight": 0.5, "fc1.bias": 0.5,
    }  # fmt: skip
    found = rates(small_cnn(), loss="cross_entropy")
    assert {name: rate for name, rate in found.items() if rate == 1} == {"fc.weight": 1, "fc.bias": 1}
    assert set(found) - {"fc.weight", "fc.bias"} == {f"{a}.{b}" for a in ("conv", "bn") for b in ("weight", "bias")}


@pytest.mark.parametrize(
    "names",
    [
        {
            "tokens.weight": 3,
            "norm": 3,
            "h.0.a.weight": 2,
            "h.0.a.bias": 2,
            "h.0.b.weight": 2,
            "h.1.weight": 1,
            "end": 0,
        },
        {"encoder.0.weight": 3, "encoder.1.weight": 2, "between": 2, "decoder.0.weight": 1, "decoder.1.weight": 0},
        {"0.weight": 2, "0.bias": 2, "2.weight": 1, "2.bias": 1, "4.weight": 0, "4.bias": 0},
        {"stem.weight": 3, "layer1.0.weight": 2, "layer1.0.bn1": 2, "layer1.1.conv2.weight": 1, "fc.weight": 0},
        {"layer1.layer1.0.conv.weight": 1, "layer1.0.bias": 1, "layer1.layer1.1.conv.weight": 0},
        {"first": 2, "a.weight": 1, "b": 1, "c.weight": 0, "d": 0},
    ],
)
def test_blocks(names: dict[str, int]) -> None:
    assert rates(chain(*names)) == {name: 0.5**depth for name, depth in names.items()}


def test_rates_of_groups_are_multiplied_too() -> None:
    found = rates(digits_mlp(), loss="cross_entropy", groups=["*.bias:lr=10"])
    assert found == {"fc2.bias": 10, "fc1.bias": 5, "fc2.weight": 1, "fc1.weight": 0.5}


def test_only_what_is_trained_counts() -> None:
    assert rates(chain("0.weight", "1.weight", "2.weight"), freeze="1.weight") == {"0.weight": 0.5, "2.weight": 1}


@pytest.mark.parametrize("decay", [0, -1, 1.5])
def test_decays_that_make_no_sense(decay: float) -> None:
    with pytest.raises(RecipeError, match="`lr_decay` is"):
        rates(digits_mlp(), loss="cross_entropy", lr_decay=decay)


def reference_scale(name: str, blocks: int, decay: float) -> float:
    """As it is done for vision transformers: embeddings are layer 0, blocks follow, and the rest has the full rate."""
    block = re.search(r"layers?\.(\d+)\.", name)
    layer = 0 if "embeddings" in name else int(block[1]) + 1 if block else blocks + 1
    return decay ** (blocks + 1 - layer)


@pytest.mark.slow("by_dynamo")
@needs("torch", "transformers")
@pytest.mark.parametrize("exporter", ["by_dynamo", "by_torchscript"])
def test_a_vision_transformer_learns_as_in_pytorch(exporter: str) -> None:
    import torch
    import torch_export
    import torch_models

    made = torch_models.vit("eager")
    module, batch = made.module.eval(), made.inputs(4, 0)
    proto = getattr(torch_export, exporter)(module, batch, made.axes)
    groups = [
        {"params": [value], "lr": 0.1 * reference_scale(name, 2, 0.6)} for name, value in module.named_parameters()
    ]
    optimizer = torch.optim.SGD(groups)
    with start(onward.prepare(proto, loss="value:loss", optimizer="sgd:lr=0.1", lr_decay=0.6)) as engine:
        for _ in range(3):
            loss = module(*batch.values())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found = engine.step({name: tensor.numpy() for name, tensor in batch.items()})[engine.loss]
            np.testing.assert_allclose(found, loss.detach().numpy(), rtol=1e-4)
        state = engine.state()
    shared = [name for name, value in module.named_parameters() if name in state and state[name].shape == value.shape]
    assert len(shared) > 20
    for name, value in module.named_parameters():
        if name in shared:
            np.testing.assert_allclose(state[name], value.detach().numpy(), rtol=1e-4, atol=1e-5, err_msg=name)
