"""Transformations of optax that no recipe has words for: their update is traced, and training goes on with it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax_training import cross_entropy, dense, digits, mlp, trained, with_short_labels
from marks import needs

import onward
from onward.errors import UnsupportedError
from onward.recipe.optimizers import FunctionOptimizer
from onward.run_state.training_models import from_training_model

pytestmark = needs("jax", "optax")

Transformation = Any


def loss(params: Any, batch: Any) -> Any:
    return cross_entropy(mlp(params, batch["image"]), batch["labels"])


def start() -> Any:
    rng = np.random.default_rng(0)
    return {"fc1": dense(rng, 64, 16), "fc2": dense(rng, 16, 10)}


def coupled() -> Transformation:
    """Steps over the largest norm of all gradients so far, in the direction of their average."""
    import jax
    import jax.numpy as jnp
    import optax

    def init(params: Any) -> Any:
        return {"largest": jnp.zeros([]), "mean": jax.tree.map(jnp.zeros_like, params)}

    def update(gradients: Any, state: Any, params: Any = None) -> Any:
        largest = jnp.maximum(state["largest"], optax.global_norm(gradients))
        mean = jax.tree.map(lambda m, g: 0.9 * m + g / largest, state["mean"], gradients)
        return jax.tree.map(lambda m: -0.05 * m, mean), {"largest": largest, "mean": mean}

    return optax.GradientTransformation(init, update)


def contrib(name: str, *arguments: float) -> Transformation:
    import optax.contrib

    return getattr(optax.contrib, name)(*arguments)


def optax(name: str, *arguments: Any, **options: Any) -> Transformation:
    import optax

    return getattr(optax, name)(*arguments, **options)


def partitioned() -> Transformation:
    """One with a schedule of its own, one that a recipe has."""
    import jax.numpy as jnp
    import optax

    own = optax.inject_hyperparams(optax.yogi)(learning_rate=lambda count: 0.02 * jnp.exp(-0.1 * count))
    return optax.partition({"a": own, "b": optax.adam(1e-2)}, {"fc1": "a", "fc2": "b"})


def slow(name: str, make: Callable[[], Transformation]) -> Any:
    return pytest.param(make, marks=pytest.mark.slow, id=name)


TRANSFORMATIONS = [
    pytest.param(lambda: contrib("prodigy", 1.0), id="prodigy"),
    slow("partitioned", partitioned),
    slow("coupled", coupled),
    slow("schedule-free", lambda: contrib("schedule_free_adamw", 1e-2)),
    slow("ademamix", lambda: contrib("ademamix", 1e-2)),
    slow("madgrad", lambda: contrib("madgrad", 1e-2)),
    slow("muon", lambda: contrib("muon", 1e-2)),
    slow("adabelief", lambda: optax("adabelief", 1e-2)),
    slow("lars", lambda: optax("lars", 1e-2)),
    slow("rprop", lambda: optax("rprop", 1e-2)),
    slow("noise", lambda: optax("noisy_sgd", 1e-2)),
    slow("accumulated", lambda: optax("MultiSteps", optax("yogi", 1e-2), 2)),
    slow("if finite", lambda: optax("apply_if_finite", optax("adam", 1e-2), 3)),
]


class Run:
    """Five steps in JAX, and the training model that goes on."""

    def __init__(self, tx: Transformation):
        self.batches = with_short_labels(digits(20, 64))
        self.step, params, state = trained(loss, tx), start(), tx.init(start())
        for batch in self.batches[:5]:
            params, state, _, _ = self.step(params, state, None, batch)
        self.training = onward.from_jax(loss, params, self.batches[0], optimizer=tx, opt_state=state)
        self.losses = []
        for batch in self.batches[5:]:
            params, state, _, value = self.step(params, state, None, batch)
            self.losses.append(float(value))
        self.end = params


@pytest.mark.slow("prodigy")
@pytest.mark.parametrize("make", TRANSFORMATIONS)
def test_training_goes_on(make: Callable[[], Transformation]) -> None:
    """Ten steps on ONNX Runtime, and five in JAX again."""
    import jax

    run = Run(make())
    assert onward.check(run.training) == []
    (group,) = from_training_model(run.training).groups
    assert isinstance(group.optimizer, FunctionOptimizer)
    with onward.engines.start(run.training, threads=1) as engine:
        losses = [float(engine.step(batch)[engine.loss]) for batch in run.batches[5:15]]
        again = engine.updated()
    assert losses == pytest.approx(run.losses[:10], rel=1e-5)
    made = onward.to_jax(again, probe=False)
    state, step = made.state, jax.jit(made.step)
    for batch, expected in zip(run.batches[15:], run.losses[10:], strict=True):
        state, metrics = step(state, batch)
        assert float(metrics["loss"]) == pytest.approx(expected, rel=1e-5)
    last = made.training(state)
    for layer, kind in itertools.product(("fc1", "fc2"), ("kernel", "bias")):
        np.testing.assert_allclose(last.array(f"{layer}/{kind}"), run.end[layer][kind], rtol=1e-3, atol=1e-5)


def test_names_and_programs_of_it(tmp_path: Path) -> None:
    """State that mirrors a parameter belongs to it, the rest to the group; a file of JAX has the function, too."""
    import jax

    from onward.frameworks.run_files import restore, write

    run = Run(coupled())
    parameters = {f"{layer}/{kind}" for layer in ("fc1", "fc2") for kind in ("kernel", "bias")}
    own = {*parameters, *(f"{name}/mean" for name in parameters), "group0/largest"}
    assert own < set(run.training.step().update)
    assert onward.describe(run.training).steps[0].groups[0].optimizer == "coupled"
    write(run.training, "jax", tmp_path / "run")
    module: dict[str, Any] = {"__file__": str(tmp_path / "run" / "run.py")}
    exec((tmp_path / "run" / "run.py").read_text(), module)
    state, step = module["load"](), jax.jit(module["step"])
    for batch, expected in zip(run.batches[5:], run.losses, strict=True):
        state, metrics = step(state, batch)
        assert float(metrics["loss"]) == pytest.approx(expected, rel=1e-5)
    module["save"](state)
    again = restore("jax", tmp_path / "run", run.training)
    np.testing.assert_allclose(again.array("fc1/kernel"), run.end["fc1"]["kernel"], rtol=1e-4, atol=1e-6)


def test_averages_beside_the_parameters() -> None:
    """`lookahead` keeps slow weights, on which the loss does not depend, in the tree of the parameters."""
    import optax

    ahead = optax.lookahead(optax.sgd(0.1), sync_period=3, slow_step_size=0.5)
    tx = optax.GradientTransformation(ahead.init, lambda g, state, params=None: ahead.update(g.fast, state, params))
    own = lambda params, batch: loss(params.fast, batch)
    params = optax.LookaheadParams.init_synced(start())
    batches, step, state = with_short_labels(digits(10, 64)), trained(own, tx), tx.init(params)
    training = onward.from_jax(own, params, batches[0], optimizer=tx)
    with onward.engines.start(training, threads=1) as engine:
        for batch in batches:
            params, state, _, value = step(params, state, None, batch)
            assert float(engine.step(batch)[engine.loss]) == pytest.approx(float(value), rel=1e-5)
        slow = engine.state()["group0/parameter.slow.fc1.kernel"]
    np.testing.assert_allclose(slow, params.slow["fc1"]["kernel"], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_parameters_of_16_bits() -> None:
    """Are updated as they are, and not as copies in float32; of their arithmetic ONNX Runtime has little."""
    import jax
    import jax.numpy as jnp

    def half(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)

    def loss(params: Any, batch: Any) -> Any:
        return cross_entropy(mlp(params, half(batch["image"])).astype(jnp.float32), batch["labels"])

    batches, tx, params = with_short_labels(digits(8, 64)), optax("sgd", 0.05, 0.9), half(start())
    training = onward.from_jax(loss, params, batches[0], optimizer=tx)
    step, state = trained(loss, tx), tx.init(params)
    with onward.engines.start(training, engine="jax") as engine:
        for batch in batches:
            params, state, _, value = step(params, state, None, batch)
            assert float(engine.step(batch)[engine.loss]) == pytest.approx(float(value), rel=1e-3)
        assert engine.state()["fc1/kernel"].dtype == jnp.bfloat16


# ---- refused ---------------------------------------------------------------------------------------------------------


def stateless(update: Callable[[Any], Any]) -> Transformation:
    import jax

    return optax(
        "GradientTransformation", lambda params: (), lambda g, state, params=None: (jax.tree.map(update, g), state)
    )


def with_callback(g: Any) -> Any:
    import jax

    return jax.pure_callback(lambda g: -0.1 * g, jax.ShapeDtypeStruct(g.shape, g.dtype), g)


COUNT = itertools.count(1)
REFUSED: dict[str, tuple[Callable[[], Transformation], str]] = {
    "callback": (lambda: stateless(with_callback), "pure_callback"),
    "decision of Python": (
        lambda: stateless(lambda g: -0.1 * g if float(g.sum()) > 0 else -0.2 * g), "cannot be traced"
    ),
    "state in Python": (lambda: stateless(lambda g: -g / next(COUNT)), "an update of `fc1/bias` by the optimizer"),
    "lbfgs": (lambda: optax("lbfgs"), "value"),
    "polyak_sgd": (lambda: optax("polyak_sgd"), "value"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    make, message = REFUSED[name]
    (batch,) = with_short_labels(digits(1, 64))
    with pytest.raises(UnsupportedError, match=message):
        onward.from_jax(loss, start(), batch, optimizer=make())
