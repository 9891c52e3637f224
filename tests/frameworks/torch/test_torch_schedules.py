"""Schedulers move between PyTorch and training models in the middle of a run: the rates after that are the same."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import schedule_tables
from marks import needs

from onward.errors import UnsupportedError
from onward.recipe.schedules import SCHEDULES
from onward.recipe.spec import Spec, parse
from onward.run_state.state import RunState

torch = pytest.importorskip("torch")
from torch.optim import lr_scheduler as s  # noqa: E402

from onward.frameworks.torch.optimizer import read_optimizer  # noqa: E402
from onward.frameworks.torch.schedule import make_schedule, read_schedule, updates_per_step  # noqa: E402
from onward.vocabulary.rate_formulas import Factor, complete  # noqa: E402

pytestmark = [needs("torch"), pytest.mark.filterwarnings("ignore:.*lr_scheduler.step:UserWarning")]

LR, STEPS = schedule_tables.LR, 60
Make = Callable[[Any], Any]


def sgd(*rates: float) -> Any:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates or (LR,)]
    return torch.optim.SGD(groups, lr=LR)


def rates_of(scheduler: Any, steps: int) -> list[float]:
    """The rate of each update from now on."""
    found = []
    for _ in range(steps):
        found.append(scheduler.optimizer.param_groups[0]["lr"])
        scheduler.optimizer.step()
        scheduler.step()
    return found


def in_the_graph(specs: list[Spec], steps: int) -> np.ndarray:
    parts = [(spec.name, spec.without("until").options, spec.options.get("until")) for spec in specs]
    return schedule_tables.rates(*(parts or [("constant", {})]), steps=steps)


# ---- from PyTorch ----------------------------------------------------------------------------------------------------

TORCH: dict[str, Make] = {
    "StepLR": lambda o: s.StepLR(o, 7, 0.5),
    "LambdaLR, powers": lambda o: s.LambdaLR(o, lambda t: 0.95**t),
    "LambdaLR, steps": lambda o: s.LambdaLR(o, lambda t: 0.5 ** (t // 10)),
    "LambdaLR, a root": lambda o: s.LambdaLR(o, lambda t: 1 / math.sqrt(1 + t / 100)),
    "LambdaLR, a cosine": lambda o: s.LambdaLR(o, lambda t: 0.1 + 0.45 * (1 + math.cos(math.pi * min(t, 33) / 33))),
    "LambdaLR, lines": lambda o: s.LambdaLR(o, lambda t: t / 9 if t < 9 else max(0.0, (50 - t) / 41)),
    "LambdaLR, numbers": lambda o: s.LambdaLR(o, lambda t: 1 if t < 13 else 0.1 if t < 40 else 0.01),
    "MultiplicativeLR": lambda o: s.MultiplicativeLR(o, lambda t: 0.97),
    "MultiStepLR": lambda o: s.MultiStepLR(o, [3, 20, 20, 41], 0.3),
    "MultiStepLR without any": lambda o: s.MultiStepLR(o, []),
    "ExponentialLR": lambda o: s.ExponentialLR(o, 0.97),
    "LinearLR": lambda o: s.LinearLR(o, 0.2, 0.8, 30),
    "LinearLR to zero": lambda o: s.LinearLR(o, 1.0, 0.0, 40),
    "ConstantLR": lambda o: s.ConstantLR(o, 0.25, 12),
    "PolynomialLR": lambda o: s.PolynomialLR(o, 45, 2.5),
    "CosineAnnealingLR": lambda o: s.CosineAnnealingLR(o, 25, 0.01),
    "CosineAnnealingWarmRestarts": lambda o: s.CosineAnnealingWarmRestarts(o, 8, 2, 1e-3),
    "CosineAnnealingWarmRestarts, all as long": lambda o: s.CosineAnnealingWarmRestarts(o, 9),
    "OneCycleLR": lambda o: s.OneCycleLR(o, LR, 80, cycle_momentum=False),
    "OneCycleLR in three": lambda o: s.OneCycleLR(
        o, LR, 70, pct_start=0.4, anneal_strategy="linear", three_phase=True, div_factor=5.0, cycle_momentum=False
    ),
    "SequentialLR": lambda o: s.SequentialLR(
        o, [s.LinearLR(o, 0.1, 1.0, 10), s.CosineAnnealingLR(o, 30), s.StepLR(o, 4, 0.5)], [10, 35]
    ),
    "SequentialLR of parts with parts": lambda o: s.SequentialLR(
        o, [s.ConstantLR(o, 0.1, 4), s.ConstantLR(o, 0.3, 20), s.ConstantLR(o, 0.5, 4)], [6, 12]
    ),
    "ChainedScheduler of exponentials": lambda o: s.ChainedScheduler(
        [s.ExponentialLR(o, 0.9), s.ExponentialLR(o, 0.99)]
    ),
    "ChainedScheduler of steps": lambda o: s.ChainedScheduler([s.MultiStepLR(o, [3, 9]), s.MultiStepLR(o, [5, 30])]),
    "ChainedScheduler of one": lambda o: s.ChainedScheduler([s.ConstantLR(o, 1.0, 3), s.StepLR(o, 9, 0.5)]),
}


@pytest.mark.parametrize("position", [0, 1, 13, 41])
@pytest.mark.parametrize("name", TORCH)
def test_from_torch(name: str, position: int) -> None:
    scheduler = TORCH[name](sgd())
    rates_of(scheduler, position)
    read = read_schedule(scheduler)
    assert (read.position, read.every, read.base_rates) == (position, 1, pytest.approx([LR]))
    steps = min(STEPS, getattr(scheduler, "total_steps", 1000) - 1 - position)
    expected = rates_of(scheduler, steps)
    found = in_the_graph(read.specs, position + steps)[position:]
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in TORCH if "OneCycle" not in name])
def test_from_torch_by_epochs(name: str) -> None:
    """Four updates for each step of the scheduler; the optimizer does not count, so its step is that of an epoch."""
    optimizer = sgd()
    scheduler = TORCH[name](optimizer)
    rates_of(scheduler, 6)
    read = read_schedule(scheduler, every=4)
    _, _, step = read_optimizer(optimizer, {id(optimizer.param_groups[0]["params"][0]): "p"}, read)
    assert step == 24
    expected = np.repeat(rates_of(scheduler, STEPS // 4), 4)
    np.testing.assert_allclose(in_the_graph(read.specs, 24 + STEPS)[24:], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("position", [0, 17])
def test_groups_have_their_own_rates(position: int) -> None:
    optimizer = sgd(0.1, 0.3)
    scheduler = s.LinearLR(optimizer, 0.5, 1.0, 20)
    rates_of(scheduler, position)
    names = {id(group["params"][0]): f"p{i}" for i, group in enumerate(optimizer.param_groups)}
    groups, _, step = read_optimizer(optimizer, names, read_schedule(scheduler))
    assert [group.optimizer.options["lr"] for group in groups] == [0.1, 0.3]
    assert step == position


def test_optimizer_and_scheduler_go_together() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([parameter], lr=LR)
    scheduler = s.StepLR(optimizer, 2)
    for i in range(7):
        parameter.grad = torch.ones(2)
        optimizer.step()
        if i % 3 == 2:
            scheduler.step()
    assert read_optimizer(optimizer, {id(parameter): "p"}, read_schedule(scheduler, 3))[2] == 7
    with pytest.raises(UnsupportedError, match="made 7 updates, but its scheduler 2 steps, one in 1") as caught:
        read_optimizer(optimizer, {id(parameter): "p"}, read_schedule(scheduler))
    assert "per step of the scheduler" in (caught.value.hint or "")


# ---- transformers ----------------------------------------------------------------------------------------------------


TRANSFORMERS: dict[str, Callable[[Any, Any], Any]] = {
    "constant": lambda t, o: t.get_constant_schedule(o),
    "constant with warm-up": lambda t, o: t.get_constant_schedule_with_warmup(o, 9),
    "linear": lambda t, o: t.get_linear_schedule_with_warmup(o, 10, 50),
    "linear without warm-up": lambda t, o: t.get_linear_schedule_with_warmup(o, 0, 50),
    "cosine": lambda t, o: t.get_cosine_schedule_with_warmup(o, 10, 50),
    "cosine, twice": lambda t, o: t.get_cosine_schedule_with_warmup(o, 5, 41, num_cycles=2),
    "cosine with a floor": lambda t, o: t.get_cosine_with_min_lr_schedule_with_warmup(o, 10, 50, min_lr_rate=0.1),
    "restarts": lambda t, o: t.get_cosine_with_hard_restarts_schedule_with_warmup(o, 8, 50, num_cycles=3),
    "polynomial": lambda t, o: t.get_polynomial_decay_schedule_with_warmup(o, 10, 50, lr_end=1e-3, power=2.0),
    "inverse square root": lambda t, o: t.get_inverse_sqrt_schedule(o, 12),
    "warm up, stay, fall": lambda t, o: t.get_wsd_schedule(o, 5, 20, num_stable_steps=15),
    "warm up, stay, fall to a floor": lambda t, o: t.get_wsd_schedule(
        o, 5, 20, num_stable_steps=15, decay_type="linear", min_lr_ratio=0.2
    ),
}


@needs("transformers")
@pytest.mark.parametrize("position", [0, 13, 41])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_from_transformers(name: str, position: int) -> None:
    optimization = pytest.importorskip("transformers").optimization
    scheduler = TRANSFORMERS[name](optimization, sgd())
    rates_of(scheduler, position)
    read = read_schedule(scheduler)
    found = in_the_graph(read.specs, position + STEPS)[position:]
    np.testing.assert_allclose(found, rates_of(scheduler, STEPS), rtol=1e-10, atol=1e-12)


def get_linear_schedule_with_warmup(num_warmup_steps: int, num_training_steps: int) -> Callable[[int], float]:
    """As in old versions of transformers: a function that closes over its numbers."""

    def lr_lambda(step: int) -> float:
        if step < num_warmup_steps:
            return step / max(1, num_warmup_steps)
        return max(0.0, (num_training_steps - step) / (num_training_steps - num_warmup_steps))

    return lr_lambda


def get_constant_schedule_with_warmup(num_warmup_steps: int) -> Callable[[int], float]:
    """Not what its name says."""
    return lambda step: min(1.0, step / num_warmup_steps) ** 2


def test_a_function_is_believed_if_it_does_what_its_name_says() -> None:
    scheduler = s.LambdaLR(sgd(), get_linear_schedule_with_warmup(4, 30))
    found = in_the_graph(read_schedule(scheduler).specs, STEPS)
    np.testing.assert_allclose(found, rates_of(scheduler, STEPS), rtol=1e-12, atol=1e-15)
    scheduler = s.LambdaLR(sgd(), get_constant_schedule_with_warmup(9))
    with pytest.warns(UserWarning, match="LambdaLR is tabulated"):
        found = in_the_graph(read_schedule(scheduler).specs, STEPS)
    np.testing.assert_allclose(found, rates_of(scheduler, STEPS), rtol=1e-12, atol=1e-15)


class Mine(s.LRScheduler):
    def get_lr(self) -> list[float]:
        return [rate * (1.5 + math.sin(self.last_epoch)) for rate in self.base_lrs]


TABLES: dict[str, tuple[Make, str]] = {
    "CyclicLR": (lambda o: s.CyclicLR(o, LR, 0.4, 3, 2, cycle_momentum=False), "repeats its 5 rates"),
    "CyclicLR, triangular2": (
        lambda o: s.CyclicLR(o, LR, 0.4, 3, mode="triangular2", cycle_momentum=False), "after 6,1.. steps"),
    "LambdaLR": (lambda o: s.LambdaLR(o, lambda t: 1 / (1 + 0.1 * t)), "after 10,000 steps"),
    "LambdaLR, a late change": (lambda o: s.LambdaLR(o, lambda t: 1.0 if t < 30_000 else 0.1), "after 10,000 steps"),
    "MultiplicativeLR": (lambda o: s.MultiplicativeLR(o, lambda t: 0.9 if t < 5 else 0.8), "after 10,000 steps"),
    "ChainedScheduler": (lambda o: s.ChainedScheduler([s.StepLR(o, 3), s.ExponentialLR(o, 0.9)]), "after 10,000 steps"),
    "SequentialLR": (
        lambda o: s.SequentialLR(o, [s.LinearLR(o, 0.5, 1.0, 4), s.LambdaLR(o, lambda t: 1 / (1 + t))], [4]),
        "after 10,000 steps"),
    "its own class": (Mine, "after 10,000 steps"),
}  # fmt: skip


@pytest.mark.parametrize("position", [0, 13])
@pytest.mark.parametrize("name", TABLES)
def test_other_schedulers_are_tabulated(name: str, position: int) -> None:
    make, message = TABLES[name]
    optimizer = sgd()
    scheduler = make(optimizer)
    rates_of(scheduler, position)
    with pytest.warns(UserWarning, match=message):
        read = read_schedule(scheduler)
    found = in_the_graph(read.specs, position + STEPS)[position:]
    groups, _, step = read_optimizer(optimizer, {id(optimizer.param_groups[0]["params"][0]): "p"}, read)
    run = RunState(None, None, groups, {}, step, read.specs)  # type: ignore[arg-type]
    again = make_schedule(run, sgd(*read.base_rates))
    expected = rates_of(scheduler, STEPS)
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(rates_of(again, STEPS), expected, rtol=1e-10, atol=1e-12)


# ---- to PyTorch ------------------------------------------------------------------------------------------------------

MADE = {
    "constant": s.ConstantLR,
    "step:size=7,gamma=0.5": s.StepLR,
    "multistep:milestones=[3,20,41],gamma=0.3": s.MultiStepLR,
    "exponential:gamma=0.97": s.ExponentialLR,
    "linear:steps=30,start_factor=0.2,end_factor=0.8": s.LinearLR,
    "linear:steps=40": s.LinearLR,
    "warmup:steps=20,start_factor=0.1": s.LinearLR,
    "polynomial:steps=45,power=2.5": s.PolynomialLR,
    "cosine:steps=25,min=0.01,after=torch": s.CosineAnnealingLR,
    "cosine_restarts:period=8,mult=2,min=1e-3": s.CosineAnnealingWarmRestarts,
    "cosine_restarts:period=9": s.CosineAnnealingWarmRestarts,
    "one_cycle:steps=150": s.OneCycleLR,
    "one_cycle:steps=150,pct_start=0.4,anneal=linear,three_phase=true,div_factor=5": s.OneCycleLR,
    "warmup:steps=10,start_factor=0.1,until=10 cosine:steps=30,after=torch,until=35 step:size=4": s.SequentialLR,
    "constant:until=5 cosine_restarts:period=4,mult=2,until=30 polynomial:steps=20": s.SequentialLR,
    **dict.fromkeys(
        (
            "step:size=7,gamma=0.5,warmup=5",
            "linear:steps=50,warmup=10",
            "linear:steps=30,start_factor=2,end_factor=0.5",
            "warmup:steps=20",
            "polynomial:steps=45,power=2,end=0.01",
            "cosine:steps=25,min=0.01",
            "cosine:steps=40,warmup=8,warmup_start=0.1",
            "cosine_restarts:period=7.5,mult=1.5",
            "inverse_sqrt:timescale=10",
            "inverse_sqrt:warmup=12",
            "table:factors=[1,0.5,0.2]",
            "table:factors=[1,0.5,0.2],after=repeat",
            "exponential:gamma=0.97,every=4,until=20 cosine:steps=25,min=0.01",
            "constant:until=10 cosine:steps=30",
        ),
        s.LambdaLR,
    ),
}


def run_at(schedule: str, step: int) -> RunState:
    return RunState(None, None, [], {}, step, [parse(item) for item in schedule.split()])  # type: ignore[arg-type]


def check_made(schedule: str, step: int) -> Any:
    run = run_at(schedule, step)
    scheduler = make_schedule(run, sgd())
    assert scheduler.last_epoch == step // updates_per_step(run)
    again = copy.deepcopy(scheduler.state_dict())
    unit = updates_per_step(run)
    begun = step // unit * unit
    expected = in_the_graph(list(run.schedule), begun + STEPS)[begun::unit]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_allclose(rates_of(scheduler, STEPS // unit), expected, rtol=1e-10, atol=1e-12)
    other = make_schedule(run, sgd())
    other.load_state_dict(again)
    np.testing.assert_allclose(rates_of(other, STEPS // unit), expected, rtol=1e-10, atol=1e-12)
    return scheduler


@pytest.mark.parametrize("step", [0, 1, 17, 41])
@pytest.mark.parametrize("schedule", MADE)
def test_to_torch(schedule: str, step: int) -> None:
    assert type(check_made(schedule, step)) is MADE[schedule]


def test_after_the_end_of_a_cycle() -> None:
    assert type(check_made("one_cycle:steps=30", 41)) is s.LambdaLR


@pytest.mark.parametrize("step", [0, 10, 40])
@pytest.mark.parametrize(
    "schedule",
    [
        "step:size=3,gamma=0.5,every=5",
        "cosine:steps=6,warmup=2,every=5",
        "linear:steps=3,start_factor=0.1,end_factor=1,every=5,until=15 exponential:gamma=0.9,every=5",
    ],
)
def test_to_torch_by_epochs(schedule: str, step: int) -> None:
    assert updates_per_step(run_at(schedule, step)) == 5
    check_made(schedule, step)


@pytest.mark.parametrize("schedule", MADE)
def test_there_and_back(schedule: str) -> None:
    scheduler = make_schedule(run_at(schedule, 11), sgd(LR, 2 * LR) if "min" not in schedule else sgd())
    read = read_schedule(scheduler)
    assert read.position == 11
    specs = [parse(item) for item in schedule.split()]
    np.testing.assert_allclose(in_the_graph(read.specs, 70), in_the_graph(specs, 70), rtol=1e-10, atol=1e-12)


def test_every_schedule_is_tested() -> None:
    assert {item.split(":")[0] for text in MADE for item in text.split()} == SCHEDULES.keys()


def test_no_schedule_no_scheduler() -> None:
    assert make_schedule(run_at("", 3), sgd()) is None


@pytest.mark.parametrize(
    "options", [{"warmup": 4}, {"every": 3}, {"warmup": 2, "warmup_start": 0.5, "every": 2}], ids=str
)
@pytest.mark.parametrize("name", SCHEDULES)
def test_formulas_are_those_of_the_graph(name: str, options: dict[str, float]) -> None:
    spec = Spec(name, {**schedule_tables.options_of(name), **options})
    factor = Factor(LR, complete([(spec, float("inf"))]))
    found = [LR * factor(step) for step in range(STEPS)]
    np.testing.assert_allclose(found, in_the_graph([spec], STEPS), rtol=1e-12, atol=1e-15)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda o: s.ReduceLROnPlateau(o), "depends on a metric"),
        (lambda o: s.LambdaLR(o, [lambda t: 0.9**t, lambda t: 0.8**t]), "different factors"),
    ],
)
def test_refused(make: Make, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message) as caught:
        read_schedule(make(sgd(LR, LR)))
    assert caught.value.hint


def test_momentum_that_moves_is_refused() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR, momentum=0.9)
    with pytest.raises(UnsupportedError, match="changes `momentum`") as caught:
        read_schedule(s.OneCycleLR(optimizer, LR, 50))
    assert "cycle_momentum=False" in (caught.value.hint or "")


def test_a_rate_changed_by_hand_is_refused() -> None:
    optimizer = sgd()
    scheduler = s.StepLR(optimizer, 4)
    optimizer.param_groups[0]["lr"] = 0.02
    with pytest.raises(UnsupportedError, match=r"rate is 0\.02, but 0\.1 by the scheduler after 0 steps"):
        read_schedule(scheduler)
