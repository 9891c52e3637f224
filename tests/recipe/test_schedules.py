"""Schedules in the graph give the rates that torch, optax and Keras give."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from built_graphs import OPSETS, Graph
from marks import needs
from schedule_tables import LR, STEPS, options_of, part, rates

from onward.build import Builder, Expr
from onward.errors import RecipeError, UnknownNameError
from onward.recipe.schedules import SCHEDULES, schedule, sequence


def agree(found: np.ndarray, expected: Sequence[float], tolerance: float = 1e-12) -> None:
    assert found.dtype == np.float64
    assert len(found) == len(expected)
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance * LR)


# ---- torch -----------------------------------------------------------------------------------------------------------


def torch_rates(make: Callable[..., Any], steps: int = STEPS) -> list[float]:
    import torch

    optimizer = torch.optim.SGD([torch.zeros(1)], lr=LR)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SequentialLR calls what torch itself has deprecated
        scheduler = make(torch.optim.lr_scheduler, optimizer)
        for _ in range(steps):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
    return found


TORCH: list[tuple[str, dict[str, Any], Callable[..., Any]]] = [
    ("constant", {}, lambda s, o: s.ConstantLR(o, 1.0)),
    ("step", {"size": 7, "gamma": 0.5}, lambda s, o: s.StepLR(o, 7, 0.5)),
    ("multistep", {"milestones": [3, 5, 40]}, lambda s, o: s.MultiStepLR(o, [3, 5, 40])),
    ("exponential", {"gamma": 0.97}, lambda s, o: s.ExponentialLR(o, 0.97)),
    (
        "linear",
        {"steps": 60, "start_factor": 1 / 3, "end_factor": 0.9},
        lambda s, o: s.LinearLR(o, 1 / 3, 0.9, 60),
    ),
    ("polynomial", {"steps": 70, "power": 2.5}, lambda s, o: s.PolynomialLR(o, 70, 2.5)),
    ("cosine", {"steps": 50, "min": 0.01, "after": "torch"}, lambda s, o: s.CosineAnnealingLR(o, 50, 0.01)),
    ("cosine_restarts", {"period": 20}, lambda s, o: s.CosineAnnealingWarmRestarts(o, 20)),
    (
        "cosine_restarts",
        {"period": 7, "mult": 2, "min": 1e-3},
        lambda s, o: s.CosineAnnealingWarmRestarts(o, 7, 2, 1e-3),
    ),
    ("cosine_restarts", {"period": 1, "mult": 3}, lambda s, o: s.CosineAnnealingWarmRestarts(o, 1, 3)),
    ("inverse_sqrt", {"timescale": 10}, lambda s, o: s.LambdaLR(o, lambda t: (1 + t / 10) ** -0.5)),
    ("warmup", {"steps": 30, "start_factor": 0.1}, lambda s, o: s.LinearLR(o, 0.1, 1.0, 30)),
    ("table", {"factors": [1, 0.5, 2]}, lambda s, o: s.LambdaLR(o, lambda t: [1, 0.5, 2][min(t, 2)])),
    ("table", {"factors": [1, 2, 1.5], "after": "repeat"}, lambda s, o: s.LambdaLR(o, lambda t: [1, 2, 1.5][t % 3])),
]


@needs("torch")
@pytest.mark.parametrize(("name", "options", "make"), TORCH)
def test_torch_has_the_same(name: str, options: dict[str, Any], make: Callable[..., Any]) -> None:
    agree(rates((name, options)), torch_rates(make))


@needs("torch")
@pytest.mark.parametrize(("name", "options", "make"), TORCH)
def test_torch_has_the_same_by_epochs(name: str, options: dict[str, Any], make: Callable[..., Any]) -> None:
    """A scheduler that steps once in seven updates."""
    expected = np.repeat(torch_rates(make), 7)[:STEPS]
    agree(rates((name, {**options, "every": 7})), list(expected))


@needs("torch")
@pytest.mark.parametrize("three_phase", [False, True])
@pytest.mark.parametrize("anneal", ["cos", "linear"])
@pytest.mark.parametrize("numbers", [{}, {"pct_start": 0.4, "div_factor": 10.0, "final_div_factor": 100.0}], ids=str)
def test_one_cycle_is_that_of_torch(anneal: str, three_phase: bool, numbers: dict[str, float]) -> None:
    for steps in (20, 97):
        found = rates(
            ("one_cycle", {"steps": steps, "anneal": anneal, "three_phase": three_phase, **numbers}), steps=steps
        )
        make = lambda s, o, n=steps: s.OneCycleLR(
            o, LR, n, anneal_strategy=anneal, three_phase=three_phase, cycle_momentum=False, **numbers
        )
        agree(
            found,
            torch_rates(make, steps - 1) + [LR / numbers.get("div_factor", 25) / numbers.get("final_div_factor", 1e4)],
        )


def test_one_cycle_stays_down_and_bears_phases_of_no_length() -> None:
    found = rates(("one_cycle", {"steps": 10, "pct_start": 0.1}), steps=12)
    assert found[0] == pytest.approx(LR / 25)
    assert found[1] > 0.9 * LR
    assert set(found[9:]) == {LR / 25 / 1e4}


@needs("torch")
def test_a_sequence_is_that_of_torch() -> None:
    found = rates(
        ("linear", {"start_factor": 0.25, "end_factor": 1.0, "steps": 10}, 10),
        ("cosine", {"steps": 60}, 70),
        ("step", {"size": 15, "gamma": 0.5}, 110),
        ("constant", {}),
    )
    make = lambda s, o: s.SequentialLR(
        o,
        [s.LinearLR(o, 0.25, 1.0, 10), s.CosineAnnealingLR(o, 60), s.StepLR(o, 15, 0.5), s.ConstantLR(o, 1.0)],
        [10, 70, 110],
    )
    agree(found, torch_rates(make))


# ---- optax -----------------------------------------------------------------------------------------------------------


def optax_rates(make: Callable[..., Any]) -> list[float]:
    import jax
    import optax

    with jax.enable_x64():
        rate = make(optax)
        return [float(rate(np.int64(step))) for step in range(STEPS)]


OPTAX: list[tuple[str, dict[str, Any], Callable[..., Any]]] = [
    ("step", {"size": 7, "gamma": 0.5}, lambda x: x.exponential_decay(LR, 7, 0.5, staircase=True)),
    ("multistep", {"milestones": [3, 5], "gamma": 0.1}, lambda x: x.piecewise_constant_schedule(LR, {3: 0.1, 5: 0.1})),
    ("exponential", {"gamma": 0.97}, lambda x: x.exponential_decay(LR, 1, 0.97)),
    ("linear", {"steps": 60, "end_factor": 0.2}, lambda x: x.linear_schedule(LR, 0.2 * LR, 60)),
    ("polynomial", {"steps": 70, "power": 3, "end": 0.01}, lambda x: x.polynomial_schedule(LR, 0.01, 3, 70)),
    ("cosine", {"steps": 100, "min": 0.01}, lambda x: x.cosine_decay_schedule(LR, 100, 0.1)),
    (
        "cosine",
        {"steps": 100, "warmup": 20, "warmup_start": 0.05, "min": 0.01},
        lambda x: x.warmup_cosine_decay_schedule(0.05 * LR, LR, 20, 100, 0.01),
    ),
    (
        "exponential",
        {"gamma": 0.97, "warmup": 12},
        lambda x: x.join_schedules([x.linear_schedule(0, LR, 12), x.exponential_decay(LR, 1, 0.97)], [12]),
    ),
    (
        "linear",
        {"steps": 100, "warmup": 25},
        lambda x: x.join_schedules([x.linear_schedule(0, LR, 25), x.linear_schedule(LR, 0, 75)], [25]),
    ),
]


@needs("optax")
@pytest.mark.parametrize(("name", "options", "make"), OPTAX)
def test_optax_has_the_same(name: str, options: dict[str, Any], make: Callable[..., Any]) -> None:
    agree(rates((name, options)), optax_rates(make))


# ---- Keras, which computes in float32 --------------------------------------------------------------------------------

KERAS: list[tuple[str, dict[str, Any], Callable[..., Any]]] = [
    ("step", {"size": 8, "gamma": 0.5}, lambda s: s.ExponentialDecay(LR, 8, 0.5, staircase=True)),
    ("multistep", {"milestones": [3, 5]}, lambda s: s.PiecewiseConstantDecay([2, 4], [LR, LR * 0.1, LR * 0.01])),
    ("exponential", {"gamma": 0.99}, lambda s: s.ExponentialDecay(LR, 1, 0.99)),
    ("polynomial", {"steps": 70, "power": 2, "end": 0.01}, lambda s: s.PolynomialDecay(LR, 70, 0.01, 2)),
    ("cosine", {"steps": 100, "min": 0.01}, lambda s: s.CosineDecay(LR, 100, 0.1)),
    (
        "cosine",
        {"steps": 120, "warmup": 20},
        lambda s: s.CosineDecay(0.0, 100, warmup_target=LR, warmup_steps=20),
    ),
    ("cosine_restarts", {"period": 32}, lambda s: s.CosineDecayRestarts(LR, 32, t_mul=1.0)),
]


@needs("keras")
@pytest.mark.parametrize(("name", "options", "make"), KERAS)
def test_keras_has_the_same(name: str, options: dict[str, Any], make: Callable[..., Any]) -> None:
    import keras

    rate = make(keras.optimizers.schedules)
    agree(rates((name, options)), [float(rate(step)) for step in range(STEPS)], 1e-6)


# ---- by their definition ---------------------------------------------------------------------------------------------


def test_inverse_sqrt_with_warmup_is_the_well_known_one() -> None:
    """Rising to lr over the warm-up, then lr * sqrt(warmup / step)."""
    expected = [LR * min(t / 16, (16 / t) ** 0.5 if t else 0) for t in range(STEPS)]
    agree(rates(("inverse_sqrt", {"warmup": 16})), expected)


def test_cosine_stays_at_the_floor() -> None:
    assert set(rates(("cosine", {"steps": 50, "min": 0.025}))[50:]) == {0.025}


def test_long_runs_restart_when_they_should() -> None:
    """A cycle begins exactly where the lengths of those before it add up to, however many there have been."""
    graph = Graph(
        lambda op, step: sequence(
            op, op.constant(np.float64(LR)), step, [part(op, "cosine_restarts", {"period": 7, "mult": 2})]
        ),
        np.int64(0),
    )
    for cycle in range(1, 24):
        start = 7 * (2**cycle - 1)
        assert graph(np.int64(start)) == pytest.approx(LR, rel=1e-12)
        assert graph(np.int64(start - 1)) < LR / 2


def test_warm_up_by_epochs() -> None:
    options = {"steps": 20, "warmup": 4, "warmup_start": 0.1}
    agree(rates(("cosine", {**options, "every": 5})), list(np.repeat(rates(("cosine", options)), 5)[:STEPS]))


def test_a_milestone_may_be_a_single_number() -> None:
    assert np.array_equal(rates(("multistep", {"milestones": 4})), rates(("multistep", {"milestones": [4]})))


# ---- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("opset", OPSETS)
def test_every_schedule_on_every_opset(opset: int) -> None:
    def body(op: Builder, step: Expr) -> tuple[Expr, ...]:
        lr = op.constant(np.float64(LR))
        described = [(name, {**options_of(name), "warmup": 3}) for name in SCHEDULES]
        return tuple(sequence(op, lr, step, [part(op, *description)]) for description in described)

    graph = Graph(body, np.int64(0), opset=opset)
    for step in range(12):
        found = graph(np.int64(step))
        np.testing.assert_allclose(found, graph.reference(np.int64(step)), rtol=1e-14)
        if step < 3:
            assert np.asarray(found) == pytest.approx(LR * step / 3)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_file_names_the_schedule_and_its_numbers(name: str) -> None:
    graph = Graph(
        lambda op, step: sequence(op, op.constant(np.float64(LR)), step, [part(op, name, options_of(name))]),
        np.int64(0),
    )
    call = next(node for node in graph.model.graph if node.domain == "onward")
    function = graph.model.functions[call.op_identifier()]
    assert call.op_type.endswith("Schedule")
    assert [value.name for value in function.inputs][:2] == ["lr", "step"]
    assert {value.name for value in function.inputs[2:]} == schedule(name).resolve(options_of(name))[0].keys()
    assert function.doc_string


@pytest.mark.parametrize(
    ("name", "options", "message", "hint"),
    [
        ("cosine", {"stps": 3}, "no option `stps`", "did you mean `steps`"),
        ("cosine", {"xyz": 3}, "no option `xyz`", "it has: steps, min, after, warmup"),
        ("cosine", {}, "needs `steps`", "cosine:steps=100"),
        ("cosine", {"steps": 0}, "`steps` .* is 0, but must be positive", None),
        ("cosine", {"steps": "many"}, "is `many`, which is not a number", None),
        ("cosine", {"steps": float("nan")}, "must be positive", None),
        ("cosine", {"steps": 10, "min": [1]}, r"is `\[1\]`, which is not a number", None),
        ("cosine", {"steps": 10, "after": "up"}, "`after` .* is `up`, but must be `floor` or `torch`", "`floor`"),
        ("cosine", {"steps": 10, "warmup": 10}, "not shorter than its 10 steps", "counts all updates"),
        ("step", {"size": 3, "warmup_start": 0.5}, "`warmup_start` but no `warmup`", "warmup=N"),
        ("step", {"size": 3, "warmup": -1}, "`warmup` .* at least 0", None),
        ("multistep", {"milestones": [3, "x"]}, "`milestones` .* `x`", None),
        ("cosine_restarts", {"period": 3, "mult": 0.5}, "`mult` .* at least 1", None),
        ("one_cycle", {"steps": 3, "pct_start": 1.0}, "positive and less than 1", None),
        ("inverse_sqrt", {}, "needs `timescale`", None),
        ("step", {"size": 3, "every": 0.5}, "`every` .* at least 1", None),
        ("step", {"size": 3, "every": 1.5}, "`every` .* an integer", None),
    ],
)
def test_what_is_wrong_is_said(name: str, options: dict[str, Any], message: str, hint: str | None) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        schedule(name).resolve(options)
    assert hint is None or hint in (caught.value.hint or "")


def test_unknown_schedule() -> None:
    with pytest.raises(UnknownNameError, match="unknown schedule `cosin`") as caught:
        schedule("cosin")
    assert "did you mean `cosine`" in (caught.value.hint or "")
