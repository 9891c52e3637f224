"""JAX in the grid, with optax."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax._src import alias

from grid.record import Outcome
from grid.side import BEFORE, HIDDEN, INPUTS, OUTPUTS, Arrays, Data, goes_on, in_words, name_of
from onward.frameworks.jax import from_jax, to_jax
from onward.frameworks.jax.closures import origin, transformations
from onward.frameworks.jax.schedule import make_schedule
from onward.model import Model
from onward.run_state.training_models import from_training_model

OPTIMIZERS = [
    *("sgd()", "sgd(momentum=0.9)", "sgd(momentum=0.9, nesterov=True)", "adam(eps=1e-3)", "adam(eps_root=1e-3)"),
    *("adamw(eps=1e-3, weight_decay=0.1)", "amsgrad(eps=1e-3)", "nadam()", "nadamw(weight_decay=0.1)", "radam(b2=0.9)"),
    *("adamax()", "adamaxw(weight_decay=0.1)", "lion(weight_decay=0.1)", "lamb(weight_decay=0.1)"),
    *("adagrad(initial_accumulator_value=1e-6)", "adadelta(weight_decay=0.1)"),
    *("rmsprop(eps=1e-3)", "rmsprop(momentum=0.9)", "rmsprop(centered=True)", "rmsprop(eps_in_sqrt=False)"),
    *("adafactor(min_dim_size_to_factor=4)", "adafactor(multiply_by_parameter_scale=False)"),
    *("adabelief()", "adan()", "fromage()", "lars()", "novograd()", "optimistic_adam()", "optimistic_adam_v2()"),
    *("optimistic_gradient_descent()", "rprop()", "sign_sgd()", "signum()", "sm3()", "yogi()"),
    *("noisy_sgd(key=0)", "polyak_sgd()", "lbfgs()", "own()"),
]
RATES = {"adadelta": 1.0, "lion": 2e-3}
NUMBERS_ONLY = ("optimistic_adam", "polyak_sgd", "rprop", "sm3", "own")
"""Those whose rate cannot follow a schedule."""
MORE_THAN_GRADIENTS = ("polyak_sgd", "lbfgs")

SCHEDULES = [
    *("constant_schedule(0.1)", "exponential_decay(0.1, 4, 0.5)", "exponential_decay(0.1, 4, 0.5, staircase=True)"),
    *("exponential_decay(0.1, 2, 0.5, end_value=0.03)", "cosine_decay_schedule(0.1, 8, 0.1)"),
    *("cosine_decay_schedule(0.1, 8, exponent=2.0)", "polynomial_schedule(0.1, 0.01, 2.0, 8)"),
    *("linear_schedule(0.1, 0.01, 8)", "piecewise_constant_schedule(0.1, {4: 0.5, 7: 0.5})"),
    *("piecewise_constant_schedule(0.1, {4: 0.5, 7: 0.1})", "piecewise_interpolate_schedule('linear', 0.1, {8: 0.1})"),
    *("cosine_onecycle_schedule(20, 0.1)", "linear_onecycle_schedule(20, 0.1)"),
    *("warmup_constant_schedule(0.0, 0.1, 5)", "warmup_cosine_decay_schedule(0.01, 0.1, 4, 10)"),
    "warmup_exponential_decay_schedule(0.0, 0.1, 4, 3, 0.5)",
    "sgdr_schedule([dict(init_value=0.01, peak_value=0.1, decay_steps=5, warmup_steps=2, end_value=0.01)] * 2)",
    "join_schedules([linear_schedule(0.0, 0.1, 4), exponential_decay(0.1, 1, 0.8)], [4])",
    "lambda count: 0.1 / (count + 1)",
]

LOSSES = {
    "softmax_cross_entropy_with_integer_labels(y, t)": Data(None, ("labels",)),
    **dict.fromkeys(
        ("softmax_cross_entropy(y, t)", "safe_softmax_cross_entropy(y, t)", "poly_loss_cross_entropy(y, t)")
        + ("softmax_cross_entropy(y, smooth_labels(t, 0.1))", "smooth_labels(y, 0.1) * t"),
        Data(None, ("one_hot",)),
    ),
    **dict.fromkeys(
        ("sigmoid_binary_cross_entropy(y, t)", "sigmoid_focal_loss(y, t)", "binary_dice_loss(y, t)")
        + ("sparsemax_loss(y, t)", "ranking_softmax_loss(y, t)"),
        Data(None, ("binary",)),
    ),
    **dict.fromkeys(
        (
            "squared_error(y, t)",
            "l2_loss(y, t)",
            "huber_loss(y, t, delta=0.3)",
            "log_cosh(y, t)",
            "cosine_distance(y, t)",
        )
        + ("cosine_similarity(y, t)", "make_fenchel_young_loss(jax.nn.logsumexp)(y, t)"),
        Data(),
    ),
    **dict.fromkeys(("hinge_loss(y, t)", "perceptron_loss(y, t)"), Data(None, ("signs",))),
    **dict.fromkeys(
        ("multiclass_hinge_loss(y, t)", "multiclass_perceptron_loss(y, t)", "multiclass_sparsemax_loss(y, t)"),
        Data(None, ("labels",)),
    ),
    **dict.fromkeys(
        ("kl_divergence(y, t)", "convex_kl_divergence(y, t)", "generalized_kl_divergence(y, t)"),
        Data("LogSoftmax", ("shares",)),
    ),
    "kl_divergence_with_log_targets(y, t)": Data("LogSoftmax", ("logs",)),
    **dict.fromkeys(("dice_loss(y, t)", "multiclass_generalized_dice_loss(y, t)"), Data(None, ("one_hot",))),
    "ntxent(y, t)": Data(None, ("labels",)),
    "triplet_margin_loss(y, t, u)": Data(None, ("real", "real")),
    "ctc_loss(y, jnp.zeros(y.shape[:2]), t, jnp.zeros(t.shape))": Data(None, ("words",)),
    "ctc_loss_with_forward_probs(y, jnp.zeros(y.shape[:2]), t, jnp.zeros(t.shape))[0]": Data(None, ("words",)),
}


def own(learning_rate: float) -> optax.GradientTransformation:
    """What a user may have written: steps along the sign of the gradient."""

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return jax.tree.map(lambda g: -learning_rate * jnp.sign(g), gradients), state

    return optax.GradientTransformation(lambda params: (), update)


def public(kind: str) -> set[str]:
    if kind == "optimizers":
        aliases = {name: value for name, value in vars(optax).items() if value is getattr(alias, name, None)}
        made_there = {
            n: v for n, v in aliases.items() if getattr(v, "__module__", "") == alias.__name__ or hasattr(v, "func")
        }
        return {name for name, value in made_there.items() if not inspect.isclass(value)}
    functions = {name for name, value in vars(_HOMES[kind]).items() if inspect.isfunction(value)}
    return {name for name in functions if not name.startswith(("_", "inject_"))}


_HOMES = {"losses": optax.losses, "schedules": optax.schedules}


def rows(kind: str) -> Sequence[str]:
    return {"optimizers": OPTIMIZERS, "losses": list(LOSSES), "schedules": SCHEDULES}[kind]


# ---- from JAX --------------------------------------------------------------------------------------------------------


def read(kind: str, row: str) -> Outcome:
    data = LOSSES[row] if kind == "losses" else Data()
    tx = eval(row, _optimizers()) if kind == "optimizers" else optax.sgd(0.02, 0.9)
    if kind == "schedules":
        tx = optax.sgd(eval(row, {name: getattr(optax.schedules, name) for name in public("schedules")}), 0.9)
    function = _function(row if kind == "losses" else "squared_error(y, t)", data.last)
    params = _parameters()
    state = tx.init(params)
    update = jax.jit(lambda params, state, batch: _update(tx, function, params, state, batch))

    def step(batch: list[np.ndarray]) -> float:
        nonlocal params, state
        params, state, loss = update(params, state, _named("xtu", batch))
        return float(loss)

    def convert() -> Model:
        return from_jax(function, params, _named("xtu", data.batch(0)), optimizer=tx, opt_state=state, probe=False)

    before = 0 if name_of(row) in MORE_THAN_GRADIENTS else BEFORE
    return in_words(kind, goes_on(step, convert, data, before, lambda _, batch: _named("xtu", batch)))


def _optimizers() -> dict[str, Any]:
    made = {name: getattr(optax, name) for name in public("optimizers")} | {"own": own}
    fixed = {name: RATES.get(name, 0.02) for name in made}
    rates = {
        name: rate if name in NUMBERS_ONLY else optax.exponential_decay(rate, 1, 0.9) for name, rate in fixed.items()
    }
    return {name: functools.partial(function, rates[name]) for name, function in made.items()}


def _parameters() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    sizes = {"fc1": (INPUTS, HIDDEN), "fc2": (HIDDEN, OUTPUTS)}
    return {
        name: {"kernel": jnp.asarray(rng.normal(size=shape) / 2, "f"), "bias": jnp.zeros(shape[1])}
        for name, shape in sizes.items()
    }


def _function(loss: str, last: str | None) -> Any:
    compiled = compile(loss, "loss", "eval")
    active = jax.nn.log_softmax if last == "LogSoftmax" else lambda x: x

    def function(params: Any, batch: Any) -> Any:
        hidden = jnp.tanh(batch["x"] @ params["fc1"]["kernel"] + params["fc1"]["bias"])
        y = active(hidden @ params["fc2"]["kernel"] + params["fc2"]["bias"])
        known = {**vars(optax.losses), "jax": jax, "jnp": jnp, "y": y, **batch}
        return eval(compiled, known).mean()

    return function


def _update(tx: Any, function: Any, params: Any, state: Any, batch: Any) -> Any:
    loss, gradients = jax.value_and_grad(function)(params, batch)
    changes, state = tx.update(gradients, state, params)
    return optax.apply_updates(params, changes), state, loss


def _named(names: str, batch: list[np.ndarray]) -> Arrays:
    """A batch as JAX takes it, without 64 bits."""
    small = [array.astype(np.int32) if array.dtype == np.int64 else array for array in batch]
    return dict(zip(names, small, strict=False))


# ---- to JAX ----------------------------------------------------------------------------------------------------------


def make(kind: str, training: Model, batches: Iterable[Arrays]) -> tuple[Outcome, list[float]]:
    carried = to_jax(training, probe=False)
    step, state, losses = jax.jit(carried.step), carried.state, []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return _outcome(kind, carried, training), losses


def _outcome(kind: str, carried: Any, training: Model) -> Outcome:
    """Losses are functions of the graph; optimizers are chains, in which one of ours may be."""
    if kind == "losses":
        return Outcome("exact")
    state = carried.state
    found = [each.name for each in transformations(carried.tx, state["opt_state"], state["params"])]
    if kind == "optimizers":
        chain = ", ".join(f"`{name}`" for name in found if name != "identity")
        return Outcome("native", chain) if all(hasattr(optax, name) for name in found) else Outcome("exact")
    made = make_schedule(from_training_model(training).schedule, 0.1)
    if not callable(made):
        return Outcome("native")
    name = origin(made)
    return Outcome("native", f"`{name}`") if hasattr(optax, name) else Outcome("exact")
