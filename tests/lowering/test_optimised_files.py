"""Files that ONNX Runtime has optimised have the gradients that they had before."""

import warnings

import kernelcheck
import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import parser

import onward
from onward.errors import UnsupportedError

WIDTH, HEADS = 16, 2


class Block(torch.nn.Module):
    """A layer of a transformer, written as those that optimisers look for."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.out = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.wide, self.narrow = torch.nn.Linear(WIDTH, 32), torch.nn.Linear(32, WIDTH)
        self.first, self.second = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (
            layer(x).view(batch, length, HEADS, WIDTH // HEADS).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        weights = torch.softmax(q @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5, dim=-1)
        x = self.first(x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, WIDTH)))
        return self.second(x + self.narrow(torch.nn.functional.gelu(self.wide(x))))


@pytest.fixture(scope="module", params=[14, 18])
def file(request, tmp_path_factory):
    """Two layers, exported at an operator set of today and at one before LayerNormalization."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(Block(), Block()).eval()
    for parameter in model.parameters():  # the exporter would merge those that are equal
        torch.nn.init.normal_(parameter, std=0.3)
    path = tmp_path_factory.mktemp("exported") / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model, torch.randn(2, 5, WIDTH), path, dynamo=False,
            opset_version=request.param, input_names=["x"], output_names=["y"],
            dynamic_axes={"x": {0: "batch", 1: "length"}},
        )  # fmt: skip
    return path


def by_onnxruntime(source, target):
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(target)
    ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    return {"BiasGelu", "FusedMatMul"}


def by_its_transformer_tools(source, target):
    optimizer = pytest.importorskip("onnxruntime.transformers.optimizer")
    optimised = optimizer.optimize_model(str(source), "bert", num_heads=HEADS, hidden_size=WIDTH, opt_level=0)
    optimised.save_model_to_file(str(target))
    return {"Attention", "BiasGelu", "SkipLayerNormalization"}


@pytest.mark.parametrize("optimise", [by_onnxruntime, by_its_transformer_tools])
def test_gradients_are_those_of_the_original(file, optimise, tmp_path):
    path = tmp_path / "optimised.onnx"
    fused = optimise(file, path)
    assert fused <= {node.op_type for node in onnx.load(path).graph.node if node.domain == "com.microsoft"}
    wrt = ["x", "1.second.weight", "0.wide.bias"]
    rng = np.random.default_rng(0)
    given = {"x": rng.standard_normal((2, 5, WIDTH)), "dy": rng.standard_normal((2, 5, WIDTH))}
    given = {name: array.astype(np.float32) for name, array in given.items()}
    made = onward.vjp(path, "y", wrt).to_proto()
    assert {node.domain for node in made.graph.node} == {""}
    wanted, found = kernelcheck.run(onward.vjp(file, "y", wrt).to_proto(), given), kernelcheck.run(made, given)
    for name, grad in wanted.items():
        np.testing.assert_allclose(found[name], grad, rtol=1e-3, atol=1e-5 * np.abs(grad).max(), err_msg=name)


def test_a_file_for_one_processor_is_refused(tmp_path):
    conv = parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18]>
        g (float[1, 16, 8, 8] x) => (float[1, 16, 6, 6] y)
        <float[16, 16, 3, 3] w = {0}> { y = Conv(x, w) }
    """.replace("{0}", "{" + ", ".join(["0.1"] * 16 * 16 * 9) + "}"))  # fmt: skip
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "blocked.onnx")
    options.log_severity_level = 4
    ort.InferenceSession(conv.SerializeToString(), options, providers=["CPUExecutionProvider"])
    if not any(node.domain == "com.microsoft.nchwc" for node in onnx.load(tmp_path / "blocked.onnx").graph.node):
        pytest.skip("ONNX Runtime has no blocked layout for this processor")
    with pytest.raises(UnsupportedError, match="for one type of processor"):
        onward.gradient(tmp_path / "blocked.onnx", "y", ["x"])
