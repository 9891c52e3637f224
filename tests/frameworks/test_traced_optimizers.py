"""Optimizers that nobody knows: a step is traced into an ONNX function, and training goes on with it as in PyTorch."""

from __future__ import annotations

import copy
import math
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
from torch import nn  # noqa: E402
from torch.optim import Optimizer  # noqa: E402

from onward.frameworks.torch.module_capture import capture_module  # noqa: E402
from onward.frameworks.torch.optimizer import make_optimizer, read_optimizer  # noqa: E402

pytestmark = [needs("torch"), pytest.mark.usefixtures("one_torch_thread")]


class AdaBelief(Optimizer):
    """Counts in a Python int, and takes roots of Python numbers."""

    def __init__(self, params, lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(p)
                    state["exp_avg_var"] = torch.zeros_like(p)
                state["step"] += 1
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                mean, var = state["exp_avg"], state["exp_avg_var"]
                mean.mul_(beta1).add_(p.grad, alpha=1 - beta1)
                surprise = p.grad - mean
                var.mul_(beta2).addcmul_(surprise, surprise, value=1 - beta2).add_(group["eps"])
                root = (var.sqrt() / math.sqrt(1 - beta2 ** state["step"])).add_(group["eps"])
                p.addcdiv_(mean, root, value=-group["lr"] / (1 - beta1 ** state["step"]))


class Simple(Optimizer):
    """Updates each parameter by itself, in `update` of a subclass."""

    def __init__(self, params, lr=0.1, **settings):
        super().__init__(params, {"lr": lr, **settings})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                if p.grad is not None:
                    self.update(p, group, i)


class LARS(Simple):
    """Steps in proportion to the norm of each tensor."""

    def __init__(self, params, lr=1.0, momentum=0.9, trust=0.02):
        super().__init__(params, lr, momentum=momentum, trust=trust)

    def update(self, p, group, i):
        state = self.state[p]
        state.setdefault("momentum_buffer", torch.zeros_like(p))
        size, slope = torch.norm(p), torch.norm(p.grad)
        ratio = torch.where((size > 0) & (slope > 0), group["trust"] * size / slope, 1.0)
        state["momentum_buffer"] = group["momentum"] * state["momentum_buffer"] + ratio * p.grad
        p.sub_(state["momentum_buffer"], alpha=group["lr"])


class Normalized(Optimizer):
    """Divides by the norm over all gradients of all groups, averaged, which it keeps in an attribute."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})
        self.average = 1.0
        self.updates = 0

    @torch.no_grad()
    def step(self, closure=None):
        with_gradients = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in with_gradients]).norm().item()
        self.updates += 1
        self.average = 0.5 * self.average + 0.5 * norm
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] / (self.average * math.sqrt(self.updates)))


class Distance(Optimizer):
    """Finds its own rate, as D-Adaptation does: numbers of the group follow from all tensors of it."""

    def __init__(self, params, lr=1.0, d0=1e-3, beta=0.9):
        super().__init__(params, {"lr": lr, "d": d0, "numerator": 0.0, "beta": beta, "k": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            d, denominator = group["d"], 0.0
            rate = d * group["lr"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "p0" not in state:
                    state["p0"] = p.detach().clone()
                    state["s"] = torch.zeros_like(p)
                group["numerator"] += rate * torch.dot(p.grad.flatten(), (state["p0"] - p).flatten()).item()
                state["s"].mul_(group["beta"]).add_(p.grad, alpha=rate)
                denominator += state["s"].abs().sum().item()
            hat = group["numerator"] / (denominator + 1e-12)
            group["d"] = max(d, min(hat, 2 * d))
            group["k"] = group["k"] + 1
            for p in group["params"]:
                if p.grad is not None:
                    p.data.add_(self.state[p]["s"], alpha=-group["d"])


class ScheduleFree(Optimizer):
    """Averages instead of a schedule (Defazio et al. 2024), with what it needs for that in its group."""

    def __init__(self, params, lr=0.1, beta=0.9, warmup=3):
        super().__init__(params, {"lr": lr, "beta": beta, "warmup": warmup, "k": 0, "weight_sum": 0.0, "lr_max": -1.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            k = group["k"]
            lr = group["lr"] * min(1.0, (k + 1) / group["warmup"])
            group["lr_max"] = max(lr, group["lr_max"])
            weight = group["lr_max"] ** 2
            group["weight_sum"] += weight
            share = weight / group["weight_sum"]
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                if "z" not in self.state[p]:
                    self.state[p]["z"] = torch.clone(p)
            ys, grads, zs = params, [p.grad for p in params], [self.state[p]["z"] for p in params]
            torch._foreach_lerp_(ys, zs, weight=share)
            torch._foreach_add_(ys, grads, alpha=lr * (group["beta"] * (1 - share) - 1))
            torch._foreach_sub_(zs, grads, alpha=lr)
            group["k"] = k + 1


class Rectified(Simple):
    """Does something else in its first updates, as RAdam does; and every third one."""

    def __init__(self, params, lr=0.01, beta=0.95):
        super().__init__(params, lr, beta=beta)

    def update(self, p, group, i):
        state = self.state[p]
        if not state:
            state.update(step=0, square=torch.zeros_like(p), slow=torch.clone(p))
        state["step"] += 1
        t, beta = state["step"], group["beta"]
        state["square"].mul_(beta).addcmul_(p.grad, p.grad, value=1 - beta)
        if t > 2:
            root = state["square"].sqrt().add_(1e-6)
            p.addcdiv_(p.grad, root, value=-group["lr"] * math.sqrt((1 - beta**t) / t))
        else:
            p.add_(p.grad, alpha=-group["lr"])
        if t % 3 == 0:
            state["slow"].add_(p - state["slow"], alpha=0.5)
            p.copy_(state["slow"])


class Flagged(Optimizer):
    """Notes in its group whether it has warmed up, and in words what it does."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "warm": False, "k": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            rate = group["lr"] if group["warm"] else 0.1 * group["lr"]
            for p in group["params"]:
                p.add_(p.grad, alpha=-rate)
            group["k"] += 1
            if group["k"] >= 5:
                group["warm"] = True


class First(Simple):
    """Begins with the first gradient."""

    def update(self, p, group, i):
        state = self.state[p]
        if "buffer" not in state:
            state["buffer"] = torch.clone(p.grad)
        else:
            state["buffer"].mul_(0.9).add_(p.grad)
        p.add_(state["buffer"], alpha=-group["lr"])


class SAM(Simple):
    """Looks at the loss twice (Foret et al. 2021)."""

    def step(self, closure=None):
        assert closure is not None, "SAM needs a closure"


class Hard(Simple):
    """Decides for each tensor by what is in it."""

    def update(self, p, group, i):
        if p.grad.norm() > 1 and p.norm() > 1 and p.grad.mean() > p.mean():
            p.add_(p.grad, alpha=-group["lr"])


class Noisy(Simple):
    """Langevin dynamics: draws random numbers."""

    def update(self, p, group, i):
        p.add_(p.grad, alpha=-group["lr"]).add_(torch.randn_like(p), alpha=0.1)


CALLS = []


class Outside(Simple):
    """Keeps something where nobody looks."""

    def update(self, p, group, i):
        CALLS.append(1)
        p.add_(p.grad, alpha=-group["lr"] / len(CALLS))


class Alternating(Simple):
    """Does not treat alike what is alike."""

    def update(self, p, group, i):
        p.add_(p.grad, alpha=-group["lr"] * (1 + i % 3))


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
    optimizer = globals()[name](module.parameters())
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
    optimizer = AdaBelief(two_groups(module))
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
    optimizer = Normalized(two_groups(module))
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
    optimizer = globals()[name](module.parameters())
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
        read_optimizer(globals()[name](module.parameters()), names_of(module))
    assert caught.value.hint


def test_a_closure_that_must_be_given() -> None:
    class Twice(torch.optim.SGD):
        def step(self, closure):
            closure()

    module = network()
    with pytest.raises(UnsupportedError, match="its step needs a closure"):
        read_optimizer(Twice(module.parameters()), names_of(module))
