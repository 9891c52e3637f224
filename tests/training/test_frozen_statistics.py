"""BatchNormalization in runs of small batches: as PyTorch trains a module in eval mode."""

import numpy as np
import pytest
from marks import needs
from onnx import numpy_helper, parser

import onward

RNG = np.random.default_rng(0)
SHAPES = {"w": (4, 3, 3, 3), "scale": (4,), "bias": (4,), "mean": (4,), "var": (4,), "head": (4, 2)}
WEIGHTS = {name: RNG.uniform(0.2, 1, shape).astype("f") for name, shape in SHAPES.items()}
DATA = {"x": RNG.standard_normal((6, 3, 5, 5)).astype("f"), "target": RNG.standard_normal((6, 2)).astype("f")}
RUN = {"loss": "mse", "optimizer": "sgd:lr=0.05", "epochs": 4, "shuffle": False, "quiet": True}


def model():
    proto = parser.parse_model("""<ir_version: 9, opset_import: ["" : 18]>
    g (float[n,3,5,5] x) => (float[n,2] y) {
      c = Conv(x, w)  b = BatchNormalization(c, scale, bias, mean, var)  r = Relu(b)
      p = GlobalAveragePool(r)  f = Flatten(p)  y = MatMul(f, head)
    }""")
    proto.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in WEIGHTS.items())
    return proto


def losses(run):
    return [event["loss"] for event in run.read_log() if event["event"] == "epoch"]


@needs("torch")
@pytest.mark.parametrize("kind", [None, "batch"])
def test_as_in_torch(tmp_path, kind):
    import torch

    w = {name: torch.nn.Parameter(torch.tensor(array)) for name, array in WEIGHTS.items()}
    mean, var = (w.pop(name).detach() for name in ("mean", "var"))
    optimizer, expected = torch.optim.SGD(w.values(), lr=0.05), []
    for _ in range(4):
        h = torch.nn.functional.conv2d(torch.tensor(DATA["x"]), w["w"])
        h = torch.nn.functional.batch_norm(h, mean, var, w["scale"], w["bias"], training=kind == "batch")
        y = h.relu().mean((2, 3)) @ w["head"]
        loss = ((y - torch.tensor(DATA["target"])) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    run = onward.train(model(), DATA, run=tmp_path / "run", batch_norm=kind, **RUN)
    np.testing.assert_allclose(losses(run), expected, rtol=1e-5)
    trained = run.load_last()
    assert np.array_equal(trained.array("mean"), WEIGHTS["mean"]) == (kind is None)
    np.testing.assert_allclose(trained.array("scale"), w["scale"].detach(), rtol=1e-5)
    text = (tmp_path / "run" / "log.jsonl").read_text()
    assert ("batches of 6: BatchNormalization keeps its statistics" in text) == (kind is None)


def test_when_the_batch_counts(tmp_path):
    """Batches of 16 or more, and training from scratch, measure the batch."""
    rows = {name: np.concatenate([array] * 3) for name, array in DATA.items()}
    for number, (data, options) in enumerate([(rows, {}), (DATA, {"init": "normal"})]):
        run = onward.train(model(), data, run=tmp_path / str(number), **options, **RUN)
        assert not np.array_equal(run.load_last().array("mean"), WEIGHTS["mean"])


@needs("torch")
def test_frozen_statistics_arrive_in_torch(tmp_path):
    training = onward.train(model(), DATA, run=tmp_path / "run", **RUN).load_training()
    onward.to_torch(training)  # compares a step of both
    assert not [node for node in onward.transform.strip(training).graph if node.metadata_props]
