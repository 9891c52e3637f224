"""What exporters and optimizers fold away is said, and nothing is said of models that never had it."""

from __future__ import annotations

import io
import json
from pathlib import Path

import models
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from marks import needs
from onnx import helper, numpy_helper
from typer.testing import CliRunner

import onward
from onward.cli.commands import app

LIGHT = Path(onnx.__file__).parent / "backend/test/data/light"


def normalized(prefix: str) -> onnx.ModelProto:
    """Three blocks of Conv, BatchNormalization, a sum and Relu."""
    rng, nodes, weights, before = np.random.default_rng(2), [], {}, "image"
    for i in range(3):
        conv, norm, summed, after = (f"{prefix}{i}/{kind}" for kind in ("Conv", "Norm", "Add", "Relu"))
        weights[f"w{i}"] = rng.standard_normal((2, 2, 3, 3))
        statistics = {f"{kind}{i}": rng.uniform(0.5, 2, 2) for kind in ("scale", "bias", "mean", "var")}
        weights |= statistics
        nodes += [
            helper.make_node("Conv", [before, f"w{i}"], [conv], pads=[1] * 4),
            helper.make_node("BatchNormalization", [conv, *statistics], [norm]),
            helper.make_node("Add", [norm, before], [summed]),
            helper.make_node("Relu", [summed], [after]),
        ]  # fmt: skip
        before = after
    ends = [helper.make_tensor_value_info(name, 1, ["N", 2, 4, 4]) for name in ("image", before)]
    tensors = [numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "normalized", ends[:1], ends[1:], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def optimized(proto: onnx.ModelProto, path: Path) -> onnx.ModelProto:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(path)
    ort.InferenceSession(proto.SerializeToString(), options)
    return onnx.load(path)


def remarks(model) -> tuple[str, ...]:
    return onward.describe(model).remarks


@pytest.mark.parametrize("prefix", ["block", "block/BatchNorm"])
def test_what_onnxruntime_folds_is_said(prefix, tmp_path):
    whole = normalized(prefix)
    fused = optimized(whole, tmp_path / "fused.onnx")
    assert "BatchNormalization" not in {node.op_type for node in fused.graph.node}
    assert not remarks(whole)
    (said,) = remarks(fused)
    assert "BatchNormalization seems to be folded into 3 of its layers" in said
    prepared = CliRunner().invoke(app, ["prepare", str(tmp_path / "fused.onnx"), "--loss", "mse"])
    assert "note " in prepared.stdout and "BatchNormalization seems to be" in prepared.stdout
    onward.train(
        str(tmp_path / "fused.onnx"),
        (np.zeros((4, 2, 4, 4), np.float32), np.zeros((4, 2, 4, 4), np.float32)),
        loss="mse",
        run=tmp_path / "run",
        quiet=True,
    )
    notes = [event["text"] for event in onward.Run(tmp_path / "run").log if event["event"] == "note"]
    assert notes == [said] and "do_constant_folding=False" in said
    shown = CliRunner().invoke(app, ["show", str(tmp_path / "fused.onnx"), "--json"])
    assert json.loads(shown.stdout)["remarks"] == [said]


@needs("torch", "onnxscript")
@pytest.mark.parametrize("dynamo", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore")
def test_what_pytorch_folds_is_said(dynamo, tmp_path):
    import torch
    from torch import nn

    def net(norm: bool) -> nn.Module:
        parts = [nn.Conv2d(1, 4, 3), *([nn.BatchNorm2d(4)] if norm else []), nn.ReLU(), nn.Flatten(), nn.Dropout()]
        return nn.Sequential(*parts, nn.Linear(144, 3)).eval()

    def exported(module: nn.Module) -> onnx.ModelProto:
        if norms := [part for part in module if isinstance(part, nn.BatchNorm2d)]:
            norms[0].running_mean.fill_(0.5)
        file = tmp_path / "net.onnx" if dynamo else io.BytesIO()
        torch.onnx.export(module, (torch.zeros(1, 1, 8, 8),), file, dynamo=dynamo, verbose=False)
        return onnx.load(file) if dynamo else onnx.load_from_string(file.getvalue())

    (said,) = remarks(exported(net(norm=True)))
    assert "BatchNormalization seems to be folded into 1 of its layers" in said
    assert not remarks(exported(net(norm=False)))


def test_nothing_is_said_of_models_that_never_had_it():
    never = ["bvlc_alexnet", "squeezenet", "vgg19", "inception_v1", "resnet50"]
    for model in (*(LIGHT / f"light_{name}.onnx" for name in never), models.digits_mlp(), models.small_transformer()):
        assert not remarks(model)


def test_dropout_that_became_an_identity_is_said():
    proto = models.digits_mlp()
    relu = next(node for node in proto.graph.node if node.op_type == "Relu")
    inner, relu.output[0] = relu.output[0], "before_dropout"
    identity = helper.make_node("Identity", ["before_dropout"], [inner], name="model/dropout/Identity")
    proto.graph.node.insert(list(proto.graph.node).index(relu) + 1, identity)
    (said,) = remarks(proto)
    assert "Dropout seems to be removed" in said


def test_integers_are_said_not_to_be_trained(tmp_path):
    from onnxruntime.quantization import quantize_dynamic

    proto = models.small_transformer()
    onnx.save(proto, tmp_path / "whole.onnx")
    quantize_dynamic(tmp_path / "whole.onnx", tmp_path / "integers.onnx", op_types_to_quantize=["MatMul"])
    assert any("compute with integers" in said for said in remarks(tmp_path / "integers.onnx"))
