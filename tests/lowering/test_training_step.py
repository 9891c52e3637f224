"""A training model trains: whole steps on stock ONNX Runtime, with our own gradients, against PyTorch."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from marks import needs
from models import digits_mlp, small_cnn
from stepping import Stepper, batches, torch_mlp, weights

import onward
from onward.differentiate.gradients import lower_gradients
from onward.model import Model
from onward.transform.context import Context


@needs("torch")
@pytest.mark.parametrize(
    ("loss", "recipe"),
    [
        ("cross_entropy", {"optimizer": "sgd:lr=0.1"}),
        ("cross_entropy:label_smoothing=0.1", {"optimizer": "momentum:lr=0.05,weight_decay=0.01"}),
        ("cross_entropy", {"optimizer": "adamw:lr=1e-2", "clip": "norm:0.5", "accumulate": 2}),
    ],
)
def test_an_mlp_trains_as_in_pytorch(loss, recipe):
    import torch

    model = onward.prepare(digits_mlp(), loss=loss, **recipe)
    stepper, (w, forward) = Stepper(model, own_gradients=True), torch_mlp(model)
    optimizer = {
        "sgd": lambda: torch.optim.SGD(w.values(), lr=0.1),
        "momentum": lambda: torch.optim.SGD(w.values(), lr=0.05, momentum=0.9, weight_decay=0.01),
        "adamw": lambda: torch.optim.AdamW(w.values(), lr=1e-2),
    }[recipe["optimizer"].partition(":")[0]]()
    smoothing = 0.1 if "smoothing" in loss else 0.0
    every = recipe.get("accumulate", 1)
    for i, (x, y) in enumerate(batches((16, 64), 20)):
        if i % every == 0:
            optimizer.zero_grad()
        value = torch.nn.functional.cross_entropy(forward(torch.tensor(x)), torch.tensor(y), label_smoothing=smoothing)
        (value / every).backward()
        if i % every == every - 1:
            if "clip" in recipe:
                torch.nn.utils.clip_grad_norm_(w.values(), 0.5)
            optimizer.step()
        outputs = stepper({"image": x, "labels": y})
        assert outputs["loss"] == pytest.approx(float(value.detach()), rel=1e-4)
    for name, parameter in w.items():
        np.testing.assert_allclose(stepper.state[name], parameter.detach().numpy(), rtol=1e-3, atol=1e-5)


@needs("torch")
def test_a_cnn_with_batch_normalization_trains_as_in_pytorch():
    import torch

    proto = small_cnn()
    ratio = next(tensor for tensor in proto.graph.initializer if tensor.name == "dropout.ratio")
    ratio.CopyFrom(onnx.numpy_helper.from_array(np.array(0.0, np.float32), ratio.name))
    model = onward.prepare(proto, loss="cross_entropy", optimizer="momentum:lr=0.05", variance="sample")
    stepper = Stepper(model, own_gradients=True)
    start = {name: torch.tensor(array) for name, array in weights(model).items()}
    net = torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
        torch.nn.Flatten(), torch.nn.Linear(128, 10),
    )  # fmt: skip
    names = {"0": "conv", "1": "bn", "5": "fc"}
    ours = lambda name: f"{names[name[0]]}{name[1:]}"
    net.load_state_dict({k: start[ours(k)] for k in net.state_dict() if "tracked" not in k}, strict=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for x, y in batches((8, 1, 8, 8), 20):
        optimizer.zero_grad()
        value = torch.nn.functional.cross_entropy(net(torch.tensor(x)), torch.tensor(y))
        value.backward()
        optimizer.step()
        assert stepper({"image": x, "labels": y})["loss"] == pytest.approx(float(value.detach()), rel=1e-4)
    for key, tensor in net.state_dict().items():
        if "tracked" not in key:
            np.testing.assert_allclose(stepper.state[ours(key)], tensor.numpy(), rtol=1e-3, atol=1e-5)


def test_training_makes_the_model_better():
    """A recipe with everything in it learns the digits that come with scikit-learn."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    recipe = {"optimizer": "adamw:lr=1e-2", "schedule": "cosine:steps=112,warmup=10", "clip": 1.0, "ema": 0.9}
    model = onward.prepare(small_cnn(), loss="cross_entropy:label_smoothing=0.05", **recipe)
    stepper = Stepper(model, own_gradients=True)
    order = np.random.default_rng(0).permutation(len(images))
    losses = []
    for _ in range(4):
        for start in range(0, len(order) - 63, 64):
            chosen = order[start : start + 64]
            losses.append(float(stepper({"image": images[chosen], "labels": labels[chosen]})["loss"]))
    assert np.mean(losses[-10:]) < 0.5 * np.mean(losses[:10])
    for name in stepper.state:
        if name in model.graph.initializers:
            model.set(name, stepper.state[name])
    logits = Stepper(model).forward({"image": images, "labels": labels})["logits"]
    assert np.mean(logits.argmax(1) == labels) > 0.95


def lowered(text, feeds):
    from onnx.reference import ReferenceEvaluator

    proto = lower_gradients(Context(onward.load(onnx.parser.parse_model(text)))).to_proto()
    assert not any(node.op_type == "Gradient" for node in proto.graph.node)
    return ReferenceEvaluator(proto).run(None, {name: np.asarray(x, np.float32) for name, x in feeds.items()})


HEAD = '<ir_version: 10, opset_import: ["": 21, "ai.onnx.preview.training": 1]>'
GRADIENT = "ai.onnx.preview.training.Gradient"


@pytest.mark.parametrize(
    ("signature", "nodes", "inputs", "expected"),
    [
        ("(float[2] x, float[2] z) => (float[2] d)", f'y = Mul(x, x) d = {GRADIENT}<xs=["x"], y="y">(z)',
         {"x": [1, 2], "z": [5, 7]}, [[10, 14]]),
        ("(float[2] x) => (float[2] dd)",
         f'a = Mul(x, x) y = Mul(a, x) d = {GRADIENT}<xs=["x"], y="y">(x) dd = {GRADIENT}<xs=["x"], y="d">(x)',
         {"x": [2, 3]}, [[12, 18]]),
        ("(float[2] x) => (float[2] dx, float[2] dh)",
         f'h = Mul(x, x) y = Mul(h, x) dx, dh = {GRADIENT}<xs=["x", "h"], y="y">(x, h)',
         {"x": [2, 3]}, [[4, 9], [2, 3]]),  # h counts as independent of x
        ("(float[2] x, float[2] w) => (float[2] d)", f'y = Mul(x, w) "", d = {GRADIENT}<xs=["x", "w"], y="y">(x, w)',
         {"x": [2, 3], "w": [1, 1]}, [[2, 3]]),
    ],
    ids=["at another point", "second derivative", "an intermediate cuts the way", "an output is left out"],
)  # fmt: skip
def test_gradients_of_small_graphs(signature, nodes, inputs, expected):
    np.testing.assert_allclose(lowered(f"{HEAD} g {signature} {{ {nodes} }}", inputs), expected)


def test_a_missing_rule_is_named_with_the_way():
    text = (
        f"{HEAD} g (float[N,3] x) => (float[N,3] d) "
        f'{{ a = Relu(x) b = mine.Odd(a) y = Exp(b) d = {GRADIENT}<xs=["x"], y="y">(x) }}'
    )
    text = text.replace('"": 21,', '"": 21, "mine": 1,')
    with pytest.raises(onward.Error, match="no gradient rule for `Odd`") as error:
        lower_gradients(Context(onward.load(onnx.parser.parse_model(text))))
    assert "from `y` to `x`" in str(error.value) and "@gradient" in error.value.hint


def test_gradients_are_plain_onnx():
    model = onward.prepare(digits_mlp(), loss="cross_entropy", optimizer="sgd")
    lowered = lower_gradients(Context(Model(model.combined())))
    proto = ir.to_proto(lowered.ir)
    assert not any(node.domain == "ai.onnx.preview.training" for node in proto.graph.node)
    onnx.checker.check_model(proto, full_check=True)
