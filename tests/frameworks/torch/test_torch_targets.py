"""Losses of PyTorch with targets of all kinds: `from_torch` reads them, tries them, and the run goes on."""

from __future__ import annotations

import numpy as np
import pytest
from marks import needs

import onward
from onward.engines import start
from onward.errors import DataError, MismatchError, UnsupportedError

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch_nets import step  # noqa: E402

pytestmark = [needs("torch", "onnxscript"), pytest.mark.usefixtures("one_torch_thread")]


class Net(nn.Module):
    """Scores of sequences, and from these whatever a loss takes."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 4)

    def forward(self, x):
        scores = self.second(torch.tanh(self.first(x)))
        return {"classes": scores[:, 0], "values": scores[:, 1], "sequence": scores.transpose(0, 1).log_softmax(-1)}


torch.manual_seed(0)
CLASSES, SOFT = torch.tensor([3, 0, 2]), torch.rand(3, 4).softmax(1)
VALUES, VARIANCE = torch.rand(3, 4), torch.rand(3, 4) + 0.1
LABELS = torch.tensor([[1, 2], [3, 3], [2, 1]]), torch.tensor([6, 6, 6]), torch.tensor([2, 2, 1])
WEIGHT = torch.tensor([0.5, 2.0, 1.0, 3.0])
entropy, mse = nn.CrossEntropyLoss(), nn.MSELoss()
smooth = nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1)
binary = nn.BCEWithLogitsLoss(weight=WEIGHT, pos_weight=WEIGHT)
gaussian, ctc = nn.GaussianNLLLoss(), nn.CTCLoss()

CASES = {
    "class probabilities": (
        {"classes": smooth},
        {"classes": SOFT},
        lambda y: smooth(y["classes"], SOFT),
    ),
    "two losses of an output": (
        {"classes": [entropy, (0.5, entropy)], "values": binary},
        {"classes": [CLASSES, SOFT], "values": VALUES},
        lambda y: entropy(y["classes"], CLASSES) + 0.5 * entropy(y["classes"], SOFT) + binary(y["values"], VALUES),
    ),
    "several targets": (
        {"values": (3, gaussian), "sequence": ctc},
        {"values": (VALUES, VARIANCE), "sequence": LABELS},
        lambda y: 3 * gaussian(y["values"], VALUES, VARIANCE) + ctc(y["sequence"], *LABELS),
    ),
}


@pytest.mark.slow("class probabilities-True")
@pytest.mark.parametrize(
    ("name", "is_given"),
    [
        ("class probabilities", True),
        ("two losses of an output", True),
        pytest.param("several targets", True, marks=pytest.mark.slow),
        ("several targets", False),
    ],
)
def test_a_run_goes_on(name, is_given):
    """Targets are tried as they are given, or made up."""
    loss, targets, native = CASES[name]
    torch.manual_seed(0)
    net, x = Net(), torch.randn(3, 6, 5)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, eps=1e-3)
    training = onward.from_torch(net, x, loss=loss, optimizer=optimizer, example_targets=targets if is_given else None)
    with start(training, threads=1) as engine:
        batch = dict(zip(engine.inputs, [x.numpy(), *arrays(targets)], strict=True))
        found = [float(engine.step(batch)[engine.loss]) for _ in range(6)]
    expected = [step(native(net(x)), optimizer) for _ in range(6)]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def arrays(targets):
    """All of them, in their order."""
    if isinstance(targets, torch.Tensor):
        return [targets.numpy()]
    given = targets.values() if isinstance(targets, dict) else targets
    return [array for each in given for array in arrays(each)]


def test_the_loss_that_comes_back_is_read_again():
    torch.manual_seed(0)
    net, x = nn.Linear(5, 4), torch.randn(3, 5)
    given = {"loss": [smooth, (0.5, mse)], "example_targets": [SOFT, VALUES]}
    training = onward.from_torch(net, x, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), **given)
    back = onward.to_torch(training)
    again = onward.from_torch(
        back.module, x, loss=back.loss, optimizer=back.optimizer, example_targets=given["example_targets"]
    )
    assert again.step().fact("train.recipe")["loss"] == training.step().fact("train.recipe")["loss"]


def test_an_example_that_is_the_same_everywhere():
    """What BatchNorm makes of it are rounding errors, which are not compared."""
    net = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    onward.from_torch(net, torch.zeros(3, 5), loss=entropy, optimizer=optimizer)


def test_losses_of_several_targets_are_compared(monkeypatch):
    net = nn.Linear(5, 4)
    given = {"loss": gaussian, "optimizer": torch.optim.SGD(net.parameters(), lr=0.1)}
    onward.from_torch(net, torch.randn(3, 5), **given)
    monkeypatch.setattr(nn.GaussianNLLLoss, "forward", lambda self, x, target, variance: (x - target).square().mean())
    with pytest.raises(MismatchError, match="the loss is off"):
        onward.from_torch(net, torch.randn(3, 5), **given)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.scale = nn.Linear(6, 5), nn.Parameter(torch.tensor(0.5))

    def forward(self, a, b):
        return {"left": self.net(a), "right": self.net(b) * self.scale.exp()}


def contrastive(result, same):
    """A function of two outputs; the number of rows is a size."""
    distance = (result["left"] - result["right"]).square().sum(1).add(1e-3).sqrt()
    return (same * distance**2 + (1 - same) * (2 - distance).relu() ** 2).sum() / len(same)


@pytest.mark.slow
@pytest.mark.parametrize("live", [True, False])
def test_any_function_is_a_loss_also_when_it_comes_back(live):
    """In PyTorch, as a program and on ONNX Runtime, with a batch of another size than the example's."""
    torch.manual_seed(0)
    net, a, b, same = Pair(), torch.randn(4, 6), torch.randn(4, 6), torch.rand(4).round()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, eps=1e-3)
    training = onward.from_torch(net, (a, b), loss=contrastive, example_targets=same, optimizer=optimizer)
    a, b, same = torch.randn(7, 6), torch.randn(7, 6), torch.rand(7).round()
    back = onward.to_torch(training, live=live)
    with start(training, threads=1) as engine:
        batch = dict(zip(engine.inputs, [a.numpy(), b.numpy(), same.numpy()], strict=True))
        found = [float(engine.step(batch)[engine.loss]) for _ in range(4)]
    there = [step(back.loss(back.module(a, b), same), back.optimizer) for _ in range(4)]
    expected = [step(contrastive(net(a, b), same), optimizer) for _ in range(4)]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(there, expected, rtol=1e-5)


@pytest.mark.slow
def test_functions_and_named_losses_are_added(tmp_path):
    torch.manual_seed(0)
    net, inputs = Pair(), (torch.randn(4, 6), torch.randn(4, 6))
    y, z = torch.randn(4, 5), torch.randn(4, 5)
    losses = {"left": (0.5, lambda x, y: ((x - y) ** 4).mean()), "right": nn.MSELoss()}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    training = onward.from_torch(net, inputs, loss=losses, example_targets={"left": y, "right": z}, optimizer=optimizer)
    back = onward.to_torch(training)
    result = net(*inputs)
    expected = 0.5 * ((result["left"] - y) ** 4).mean() + mse(result["right"], z)
    np.testing.assert_allclose(back.loss(back.module(*inputs), y, z).item(), expected.item(), rtol=1e-5)


def test_a_loss_that_fixes_the_batch_takes_that_of_the_example() -> None:
    net = nn.Linear(5, 4)
    loss, optimizer = lambda x, y: ((x - y) ** 2).sum() / float(len(x)), torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="takes `output` only with a size of 3 along axis 0: the training model takes"):
        training = onward.from_torch(net, torch.randn(3, 5), loss=loss, example_targets=VALUES, optimizer=optimizer)
    assert [tuple(value.shape or ()) for value in training.inputs] == [(3, 5)]
    with pytest.raises(UnsupportedError, match="only with a size of 3"):
        named = {"input": {0: "batch"}}
        onward.from_torch(
            net, torch.randn(3, 5), loss=loss, example_targets=VALUES, optimizer=optimizer, dynamic_shapes=named
        )


@pytest.mark.parametrize(
    ("loss", "targets", "error", "message"),
    [
        (lambda x, y: (x - y) ** 2, VALUES, UnsupportedError, "not one number"),
        (
            nn.Sequential(nn.Linear(4, 1), nn.BatchNorm1d(1)),
            (),
            UnsupportedError,
            "has a BatchNorm1d, whose statistics",
        ),
        (lambda x, y: ((x - y) ** 2).mean(), None, DataError, "takes targets: `y`"),
    ],
)
def test_functions_that_are_refused(loss, targets, error, message):
    net = nn.Linear(5, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(error, match=message) as caught:
        onward.from_torch(net, torch.randn(3, 5), loss=loss, example_targets=targets, optimizer=optimizer)
    assert caught.value.hint
