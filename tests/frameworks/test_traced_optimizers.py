"""Optimizers that nobody knows: a step is traced into an ONNX function, and training goes on with it as in PyTorch."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from marks import needs

import onward
from onward.engines import start
from onward.errors import MismatchError, UnsupportedError
from onward.recipe.spec import Spec
from onward.run_state.state import RunState
from onward.run_state.training_models import from_training_model, to_training_model

torch = pytest.importorskip("torch")
import torch_optimizers as theirs  # noqa: E402
from torch import nn  # noqa: E402

from onward.frameworks.torch.capture import capture_module  # noqa: E402
from onward.frameworks.torch.optimizer import make_optimizer, read_optimizer  # noqa: E402

pytestmark = [needs("torch"), pytest.mark.usefixtures("one_torch_thread")]

RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((6, 4)).astype("f"), RNG.integers(0, 3, 6)
BATCH = {"input": X, "labels": Y}


def network() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


@pytest.fixture(scope="module")
def model() -> Any:
    return capture_module(network(), torch.tensor(X))


def train(module: Any, optimizer: Any, count: int, scheduler: Any = None) -> list[float]:
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module(torch.tensor(X)), torch.tensor(Y))
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(float(loss.detach()))
    return losses


def run(training: Any, count: int = 10) -> tuple[list[float], Any]:
    with start(training, threads=1) as engine:
        return [float(engine.step(BATCH)["loss"]) for _ in range(count)], engine.updated()


def names_of(module: Any) -> dict[int, str]:
    return {id(parameter): name for name, parameter in module.named_parameters()}


def carried(model: Any, module: Any, optimizer: Any) -> Any:
    """The training model of a run, with the weights as they are now."""
    groups, state, step = read_optimizer(optimizer, names_of(module))
    now = model.copy()
    for name, parameter in module.named_parameters():
        now.set(name, parameter.detach().numpy())
    return to_training_model(RunState(now, Spec("cross_entropy"), groups, state, step))


def two_groups(module: Any) -> Any:
    return [{"params": module[0].parameters()}, {"params": module[2].parameters(), "lr": 0.03}]


SLOTS = {
    "AdaBelief": {"exp_avg", "exp_avg_var", "step"},
    "LARS": {"momentum_buffer"},
    "Normalized": {"average", "updates"},
    "Distance": {"p0", "s", "d", "numerator", "k"},
    "ScheduleFree": {"z", "k", "weight_sum", "lr_max"},
    "Rectified": {"step", "square", "slow"},
    "Flagged": {"warm", "k"},
}
QUICK = {("LARS", 0), ("AdaBelief", 3)}
CASES = [
    case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow)
    for name in SLOTS
    for case in ((name, 0), (name, 3))
]


@pytest.mark.slow("AdaBelief-3")
@pytest.mark.parametrize(("name", "begun"), CASES)
def test_a_run_goes_on(name: str, begun: int, model: Any) -> None:
    """On ONNX Runtime, back in PyTorch, and on from there; from the first step on, or from the fourth."""
    module = network()
    optimizer = getattr(theirs, name)(module.parameters())
    train(module, optimizer, begun)
    training = carried(model, module, optimizer)
    assert onward.check(training) == []
    (group,) = onward.describe(training).steps[0].groups
    assert (group.optimizer, set(group.slots)) == (name, SLOTS[name])
    losses, end = run(training)
    np.testing.assert_allclose(losses, train(module, optimizer, 10), rtol=1e-5)
    back, held = from_training_model(end), network()
    for key, parameter in held.named_parameters():
        parameter.data = torch.tensor(end.array(key))
    again = make_optimizer(back, dict(held.named_parameters()))
    again = copy.deepcopy({"module": held, "optimizer": again})
    np.testing.assert_allclose(train(*again.values(), 5), train(module, optimizer, 5), rtol=1e-5)
    once_more = carried(model, *again.values())
    np.testing.assert_allclose(run(once_more, 3)[0], train(module, optimizer, 3), rtol=1e-5)


@pytest.mark.slow
def test_the_whole_way() -> None:
    """A rate that falls, groups with rates of their own, and gradients that are clipped."""
    module = network()
    optimizer = theirs.AdaBelief(two_groups(module))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    train(module, optimizer, 4, scheduler)
    training = onward.from_torch(
        module, torch.tensor(X), loss=nn.CrossEntropyLoss(), optimizer=optimizer, scheduler=scheduler
    )
    assert [group.hyper["lr"] for group in onward.describe(training).steps[0].groups] == [0.01, 0.03]
    losses, end = run(training)
    np.testing.assert_allclose(losses, train(module, optimizer, 10, scheduler), rtol=1e-5)
    back = onward.to_torch(end)
    found = train(back.module, back.optimizer, 5, back.scheduler)
    np.testing.assert_allclose(found, train(module, optimizer, 5, scheduler), rtol=1e-5)


@pytest.mark.slow
def test_groups_that_depend_on_one_another(model: Any) -> None:
    """A norm over all groups makes them one, whose other rates follow the first."""
    module = network()
    optimizer = theirs.Normalized(two_groups(module))
    training = carried(model, module, optimizer)
    assert [group.hyper["lr"] for group in onward.describe(training).steps[0].groups] == [0.1]
    np.testing.assert_allclose(run(training)[0], train(module, optimizer, 10), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("make", [torch.optim.ASGD, torch.optim.Rprop, type("Mine", (torch.optim.AdamW,), {})])
def test_classes_of_pytorch(make: Any, model: Any) -> None:
    module = network()
    optimizer = make(module.parameters(), lr=0.01)
    training = carried(model, module, optimizer)
    np.testing.assert_allclose(run(training)[0], train(module, optimizer, 10), rtol=1e-5)


@pytest.mark.parametrize("name", ["LARS", pytest.param("Alternating", marks=pytest.mark.slow)])
def test_many_parameters_of_few_shapes(name: str) -> None:
    """Of those that are alike one is traced; and if they are not treated alike, all are."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    optimizer = getattr(theirs, name)(module.parameters())
    (group,), _, _ = read_optimizer(optimizer, names_of(module))
    again = copy.deepcopy(module)
    twin = make_optimizer(
        RunState(capture_module(again, torch.tensor(X)), None, [group]), dict(again.named_parameters())
    )
    for parameter, other in zip(module.parameters(), again.parameters(), strict=True):
        parameter.grad = torch.randn_like(parameter)
        other.grad = parameter.grad.clone()
    optimizer.step()
    twin.step()
    for parameter, other in zip(module.parameters(), again.parameters(), strict=True):
        np.testing.assert_allclose(other.detach(), parameter.detach(), rtol=1e-5, atol=1e-7)


# ---- what is refused -------------------------------------------------------------------------------------------------

REFUSED = {
    "SAM": (UnsupportedError, "its step fails: SAM needs a closure"),
    "First": (UnsupportedError, "its initial state depends on the first gradients"),
    "Hard": (UnsupportedError, "branches on values of tensors"),
    "Noisy": (UnsupportedError, "draws random numbers"),
    "Outside": (MismatchError, "an update of `0.weight` by the optimizer Outside is off"),
}


@pytest.mark.parametrize(
    "name", [name if name in ("SAM", "First") else pytest.param(name, marks=pytest.mark.slow) for name in REFUSED]
)
def test_refusals(name: str) -> None:
    kind, message = REFUSED[name]
    module = network()
    with pytest.raises(kind, match=message) as caught:
        read_optimizer(getattr(theirs, name)(module.parameters()), names_of(module))
    assert caught.value.hint


def test_a_closure_that_must_be_given() -> None:
    class Twice(torch.optim.SGD):
        def step(self, closure):
            closure()

    module = network()
    with pytest.raises(UnsupportedError, match="its step needs a closure"):
        read_optimizer(Twice(module.parameters()), names_of(module))
