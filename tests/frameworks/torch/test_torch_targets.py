"""Losses of PyTorch with targets of all kinds: `from_torch` reads them, tries them, and the run goes on."""

from __future__ import annotations

import numpy as np
import pytest
from marks import needs

import onward
from onward.engines import start
from onward.errors import MismatchError

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
