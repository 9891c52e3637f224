"""Transformers for images as exporters write them by default, for a single picture: trained in batches."""

import numpy as np
import onnx
import pytest
from marks import needs
from runs import QUIET

import onward
from onward.engines import start
from onward.training.run import in_form_of
from onward.transform.declare import rebatch

pytestmark = [needs("torch", "transformers", "onnxscript"), pytest.mark.filterwarnings("ignore")]


def transformer():
    import torch
    from transformers import ViTConfig, ViTForImageClassification

    class Logits(torch.nn.Module):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def forward(self, x):
            return self.net(pixel_values=x).logits

    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "image_size": 8, "patch_size": 4, "num_channels": 1}
    heads = {"num_attention_heads": 2, "num_hidden_layers": 1, "num_labels": 3}
    return Logits(ViTForImageClassification(ViTConfig(**sizes, **heads))).eval()


def exported(net, path, dynamo):
    import torch

    torch.onnx.export(
        net, (torch.zeros(1, 1, 8, 8),), path, dynamo=dynamo, verbose=False, input_names=["x"], output_names=["y"]
    )
    return onnx.load(path)


@pytest.mark.slow("dynamo")
@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "tracing"])
def test_the_class_token_of_a_transformer(tmp_path, monkeypatch, dynamo):
    """One exporter folds its Expand into a tensor, the other leaves nodes that compute the shape [1, 1, 1]."""
    import torch

    net = transformer()
    proto = exported(net, tmp_path / "vit.onnx", dynamo)
    rng = np.random.default_rng(0)
    data = {"x": rng.standard_normal((8, 1, 8, 8)).astype("f"), "labels": rng.integers(0, 3, 8)}
    loss = torch.nn.functional.cross_entropy(net(torch.tensor(data["x"])), torch.tensor(data["labels"]))
    token = net.net.vit.embeddings.cls_token
    (wanted,) = torch.autograd.grad(loss, [token])
    model = onward.prepare(rebatch(proto), loss="cross_entropy")
    with start(model, threads=1) as engine:
        batch = {name: data["x"] if name == "x" else data["labels"] for name in engine.inputs}
        gradients = {name: array for name, array in engine.gradients(batch).items() if array.shape == (1, 1, 8)}
        assert float(engine.evaluate(batch)["loss"]) == pytest.approx(float(loss), rel=1e-5)
    (found,) = gradients.values()
    np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-3, atol=1e-6)
    monkeypatch.chdir(tmp_path)
    result = onward.train(proto, data, loss="cross_entropy", batch_size=4, epochs=1, **QUIET)
    if not dynamo:
        return  # where tensors that were stored once are trained apart, the graph that was trained comes back
    trained = in_form_of(onward.load(proto), result.model)
    assert trained.inputs[0].shape == [1, 1, 8, 8]
    assert [node.op_type for node in trained.graph] == [node.op_type for node in proto.graph.node]


def test_what_depends_on_the_other_samples_is_trained_with_several_to_an_update():
    text = """<ir_version: 10, opset_import: ["" : 21]>
    g (float[1,3] x) => (float[1,3] y) <float[3,3] w = {1,2,3,4,5,6,7,8,9}> {
      axes = Constant <value_ints = [0]> ()
      mean = ReduceMean(x, axes)
      twice = Add(mean, x)
      y = MatMul(twice, w)
    }"""
    with pytest.raises(onward.Error, match="works for batches of 1 only") as raised:
        rebatch(onnx.parser.parse_model(text))
    assert "`--batch-size 1 --accumulate 32`" in raised.value.hint
