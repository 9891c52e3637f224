"""optax: what it computes after a conversion, and what ONNX Runtime does with the same gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from marks import needs
from onnx import helper, numpy_helper
from optimizer_tables import OPTAX_EXACT, OPTAX_NATIVE, OPTAX_READ
from paths import ROOT
from representatives import chosen

import onward
from onward.engines import start
from onward.errors import MismatchError, RecipeError, UnsupportedError
from onward.recipe.optimizers import OPTIMIZERS
from onward.recipe.spec import Spec, parse
from onward.run_state.state import RunState
from onward.run_state.training_models import from_training_model, to_training_model

pytestmark = needs("jax", "optax")

Arrays = dict[str, np.ndarray]
SHAPES = {"layers/0": (4, 5), "layers/1": (2, 4, 6), "bias": (5,)}


def tree(dtype: str = "float32", seed: int = 0) -> dict[str, Any]:
    """Parameters, in which names are places."""
    import jax.numpy as jnp

    rng = np.random.default_rng(seed)
    arrays = {name: jnp.asarray(rng.normal(size=shape), dtype) for name, shape in SHAPES.items()}
    return {"layers": [arrays["layers/0"], arrays["layers/1"]], "bias": arrays["bias"]}


def flat(params: Any) -> Arrays:
    return {
        "layers/0": np.asarray(params["layers"][0]),
        "layers/1": np.asarray(params["layers"][1]),
        "bias": np.asarray(params["bias"]),
    }


def gradients(dtype: str, seed: int) -> Iterator[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    while True:
        sizes = {name: rng.normal(size=shape) * 10 ** rng.uniform(-3, 0, shape) for name, shape in SHAPES.items()}
        given = {name: array.astype(dtype) for name, array in sizes.items()}
        yield {"layers": [given["layers/0"], given["layers/1"]], "bias": given["bias"]}


def update(tx: Any, state: Any, params: Any, given: Any) -> tuple[Any, Any]:
    import optax

    compute = compiled(tx) if isinstance(state, optax.MultiStepsState) else tx.update
    changes, state = compute(given, state, params)
    return state, optax.apply_updates(params, changes)


@functools.cache
def compiled(tx: Any) -> Callable[..., Any]:
    """An update with branches, which would be compiled at each call."""
    import jax

    return jax.jit(tx.update)


def fed(weights: Arrays) -> onward.Model:
    """A model whose gradients are its inputs: the loss is the sum of the products of both."""
    first = next(iter(weights.values()))
    kind = helper.np_dtype_to_tensor_dtype(first.dtype)
    nodes, inputs = [], []
    for i, (name, array) in enumerate(weights.items()):
        inputs.append(helper.make_tensor_value_info(f"{name}/g", kind, array.shape))
        nodes.append(helper.make_node("Mul", [name, f"{name}/g"], [f"product{i}"]))
        nodes.append(helper.make_node("ReduceSum", [f"product{i}"], [f"sum{i}"], keepdims=0))
    nodes.append(helper.make_node("Sum", [f"sum{i}" for i in range(len(weights))], ["loss"]))
    graph = helper.make_graph(nodes, "fed", inputs, [helper.make_tensor_value_info("loss", kind, [])])
    graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    return onward.load(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))


def run_of(tx: Any, state: Any, params: Any) -> RunState:
    from onward.frameworks.jax.optimizer import read_optimizer

    found = read_optimizer(tx, state, params)
    trained = [name for group in found.groups for name in group.parameters]
    model = fed({name: array for name, array in flat(params).items() if name in trained})
    recipe = found.recipe
    return RunState(
        model, "value:loss", found.groups, found.state, found.step, found.schedule, found.clip, recipe=recipe
    )


def largest_difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> float:
    return max(float(np.abs(ours[name] - theirs[name]).max() / np.abs(theirs[name]).max()) for name in theirs)


def some_updates(make: Callable[[Any], Any], dtype: str) -> tuple[float, float]:
    """optax for 3 updates, then both for 6; and what optax does that was made of our run. Largest differences."""
    import jax
    import optax

    from onward.frameworks.jax.optimizer import make_optimizer

    with jax.enable_x64(dtype == "float64"):
        tx, params, source = make(optax), tree(dtype), gradients(dtype, 1)
        state = tx.init(params)
        for _ in range(3):
            state, params = update(tx, state, params, next(source))
        run = run_of(tx, state, params)
        own = {name: params_of for name, params_of in flat(params).items() if name in run.parameters}
        made, made_state = make_optimizer(run, own)
        with start(to_training_model(run), threads=1) as engine:
            for given in (next(source) for _ in range(6)):
                state, params = update(tx, state, params, given)
                known = {name: array for name, array in flat(given).items() if name in run.parameters}
                engine.step({f"{name}/g": array for name, array in known.items()})
                made_state, own = update(made, made_state, own, known)
            expected = {name: array for name, array in flat(params).items() if name in run.parameters}
            return largest_difference(engine.state(), expected), largest_difference(own, expected)


# ---- every optimizer -------------------------------------------------------------------------------------------------


def falling(o: Any) -> Any:
    return o.exponential_decay(0.1, 1, 0.9)


def by_rank(matrix: Any, vector: Any) -> Callable[[Any], Any]:
    """A function of parameters: one value for matrices, another one for vectors."""

    def labels(params: Any) -> Any:
        import jax

        return jax.tree.map(lambda x: matrix if x.ndim > 1 else vector, params)

    return labels


kinds, is_matrix = by_rank("matrix", "vector"), by_rank(True, False)
CHAINS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda o: o.sgd(0.1),
    "sgd with decay": lambda o: o.chain(o.add_decayed_weights(0.1), o.sgd(0.1, 0.9)),
    "sgd with decoupled decay": lambda o: o.chain(o.trace(0.9), o.add_decayed_weights(0.1), o.scale(-0.1)),
    "momentum, falling": lambda o: o.sgd(falling(o), 0.9),
    "nesterov": lambda o: o.sgd(0.1, 0.9, nesterov=True),
    "momentum after the rate": lambda o: o.chain(o.scale_by_learning_rate(falling(o)), o.trace(0.9)),
    "adam": lambda o: o.adam(1e-2, eps=1e-3),
    "adam with decay": lambda o: o.chain(o.add_decayed_weights(0.1), o.adam(1e-2)),
    "adamw": lambda o: o.adamw(1e-2, weight_decay=0.1),
    "amsgrad": lambda o: o.amsgrad(1e-2, eps=1e-3),
    "nadam": lambda o: o.nadam(1e-2),
    "nadamw": lambda o: o.nadamw(1e-2, weight_decay=0.1),
    "radam": lambda o: o.radam(1e-2, b2=0.9),
    "adamax": lambda o: o.adamax(1e-2),
    "lion": lambda o: o.lion(1e-2, weight_decay=0.1),
    "lamb": lambda o: o.lamb(1e-2, weight_decay=0.1),
    "adagrad": lambda o: o.adagrad(0.1, initial_accumulator_value=1e-6),
    "adadelta": lambda o: o.adadelta(1.0, weight_decay=0.01),
    "rmsprop": lambda o: o.rmsprop(1e-2, eps=1e-3),
    "rmsprop with momentum, falling": lambda o: o.rmsprop(falling(o), momentum=0.9),
    "rmsprop, centered": lambda o: o.rmsprop(1e-2, centered=True, momentum=0.8, initial_scale=1.0),
    "rmsprop, eps outside": lambda o: o.rmsprop(1e-2, eps_in_sqrt=False, eps=1e-3),
    "rmsprop, eps outside, momentum": lambda o: o.rmsprop(1e-2, eps_in_sqrt=False, momentum=0.9),
    "rmsprop, momentum before the rate": lambda o: o.chain(
        o.scale_by_rms(eps_in_sqrt=False), o.trace(0.9), o.scale_by_learning_rate(falling(o))
    ),
    "rmsprop with decoupled decay": lambda o: o.chain(o.scale_by_rms(), o.add_decayed_weights(0.1), o.scale(-0.01)),
    "adafactor": lambda o: o.adafactor(0.1, min_dim_size_to_factor=4),
    "adafactor, whole": lambda o: o.adafactor(0.1, factored=False, weight_decay_rate=0.01, clipping_threshold=None),
    "clip by norm": lambda o: o.chain(o.clip_by_global_norm(0.5), o.adam(1e-2)),
    "clip by value": lambda o: o.chain(o.clip(0.1), o.sgd(0.1)),
    "scales": lambda o: o.chain(o.scale_by_adam(), o.scale(0.5), o.scale_by_schedule(falling(o)), o.scale(-1.0)),
    "masked decay": lambda o: o.adamw(1e-2, weight_decay=0.1, mask=is_matrix),
    "groups": lambda o: o.multi_transform({"matrix": o.adam(1e-2), "vector": o.sgd(0.1, 0.9)}, kinds),
    "frozen": lambda o: o.multi_transform({"matrix": o.adam(1e-2), "vector": o.set_to_zero()}, kinds),
    "frozen at last": lambda o: o.chain(o.adamw(1e-2), o.masked(o.set_to_zero(), is_matrix)),
    "injected": lambda o: o.inject_hyperparams(o.adamw)(falling(o), weight_decay=0.1),
    "accumulated": lambda o: o.MultiSteps(o.chain(o.clip_by_global_norm(0.5), o.adam(1e-2)), 3),
}  # of optax


ONLY_32_BITS = {  # parts of optax compute in float32 whatever the parameters are
    "adafactor",
    "adafactor, whole",
    "momentum, falling",
    "momentum after the rate",
    "rmsprop with momentum, falling",
    "rmsprop, momentum before the rate",
    "scales",
    "injected",
    "accumulated",
}


@pytest.mark.slow("adafactor", "momentum after the rate", "momentum, falling")
@pytest.mark.parametrize("name", chosen(CHAINS, ONLY_32_BITS))  # the others are quick with more digits, below
def test_optax_goes_on(name: str) -> None:
    ours, back = some_updates(CHAINS[name], "float32")
    assert ours < 1e-5 and back < 1e-5


@pytest.mark.slow("clip by norm", "lamb", "radam")
@pytest.mark.parametrize("name", [name for name in CHAINS if name not in ONLY_32_BITS])
def test_optax_goes_on_in_float64(name: str) -> None:
    ours, back = some_updates(CHAINS[name], "float64")
    assert ours < 1e-10 and back < 1e-10


def test_state_comes_back() -> None:
    """optax -> recipe -> optax is the same chain, and the same bits."""
    import jax
    import optax

    from onward.frameworks.jax.optimizer import make_optimizer

    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(optax.cosine_decay_schedule(0.1, 9), eps=1e-3))
    params = flat(tree())
    state, rng = tx.init(params), np.random.default_rng(0)
    for _ in range(4):
        given = {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
        state, params = update(tx, state, params, given)
    from onward.frameworks.jax.optimizer import read_optimizer

    found = read_optimizer(tx, state, params)
    run = RunState(fed(params), "value:loss", found.groups, found.state, found.step, found.schedule, found.clip)
    _, made = make_optimizer(run, {name: params[name] for name in params})
    assert jax.tree.structure(made) == jax.tree.structure(state)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(state), strict=True))


# ---- optimizers that others have -------------------------------------------------------------------------------------


@pytest.mark.slow("adafactor:variant=optax,min_dim_size_to_factor=4", "radam:beta2=0.9")
@pytest.mark.parametrize("optimizer", [*sorted(OPTAX_EXACT), *sorted(OPTAX_NATIVE)])
def test_every_optimizer_in_optax(optimizer: str) -> None:
    from onward.frameworks.jax.optimizer import is_native, make_optimizer

    weights = flat(tree())
    training = onward.prepare(
        fed(weights), loss="value:loss", optimizer=optimizer, schedule="cosine:steps=12,warmup=3", clip="norm:0.5"
    )
    source = gradients("float32", 2)
    with start(training, threads=1) as engine:
        for _ in range(3):
            engine.step({f"{name}/g": array for name, array in flat(next(source)).items()})
        for name, array in engine.state().items():
            training.set(name, array)
        run = from_training_model(training)
        assert is_native(run.groups[0].optimizer) == (optimizer in OPTAX_NATIVE)
        params = {name: engine.state()[name] for name in weights}
        tx, state = make_optimizer(run, params)
        for _ in range(10):
            given = flat(next(source))
            engine.step({f"{name}/g": array for name, array in given.items()})
            changes, state = compiled(tx)(given, state, params)
            params = {name: params[name] + change for name, change in changes.items()}
        assert largest_difference(params, {name: engine.state()[name] for name in weights}) < 1e-5


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_in_checkpoints_are_refused_where_optax_computes_otherwise(name: str) -> None:
    """Where optax has no such state, `to_jax` computes the update itself."""
    from onward.checkpoint.pytree.optax_states import stages
    from onward.frameworks.jax.optimizer import is_native
    from onward.recipe.optimizers import configure
    from onward.vocabulary.optimizers import OPTAX_ROWS
    from onward.vocabulary.rows import row_for

    for variant in ("torch", "keras", "optax", "transformers"):
        for option in ("", "weight_decay=0.1", "momentum=0.9", "amsgrad=1", "maximize=1", "momentum=0.9,dampening=0.1"):
            try:
                spec = parse(f"{name}:lr=0.1,variant={variant},{option}".rstrip(","))
                configured = configure(spec)
            except RecipeError:
                continue
            row = row_for(OPTAX_ROWS, configured)
            assert is_native(spec) == (row is not None and not row.difference), spec
            if row is not None:
                assert stages(spec, configured), spec
                continue
            with pytest.raises(UnsupportedError, match="optax has no optimizer"):
                stages(spec, configured)


def test_no_optimizer_is_forgotten() -> None:
    """Muon, which is for matrices, and two other names of SGD are not in the lists."""
    assert {text.partition(":")[0] for text in OPTAX_EXACT | OPTAX_NATIVE} | {
        "muon",
        "momentum",
        "nesterov",
    } == OPTIMIZERS.keys()


def test_the_documentation_says_how_functions_of_optax_are_read() -> None:
    import optax

    page = (ROOT / "docs/frameworks/jax.md").read_text(encoding="utf-8")
    for names, text in OPTAX_READ.items():
        assert all(hasattr(optax, name) for name in names.split(", ")) and text in page


# ---- schedules -------------------------------------------------------------------------------------------------------


CYCLE = {"init_value": 0.01, "peak_value": 0.1, "warmup_steps": 5, "decay_steps": 20, "end_value": 0.01}
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "exponential": lambda o: o.exponential_decay(0.1, 7, 0.5),
    "exponential in steps": lambda o: o.exponential_decay(0.1, 7, 0.5, staircase=True),
    "exponential to a floor": lambda o: o.exponential_decay(0.1, 7, 0.5, transition_begin=5, end_value=0.01),
    "exponential in steps to a floor": lambda o: o.exponential_decay(0.1, 7, 0.5, 5, staircase=True, end_value=0.03),
    "cosine": lambda o: o.cosine_decay_schedule(0.1, 40, 0.1),
    "warmup and cosine": lambda o: o.warmup_cosine_decay_schedule(0.01, 0.1, 10, 50, 0.003),
    "cosine without its warmup": lambda o: o.warmup_cosine_decay_schedule(0.01, 0.1, 0, 50, 0.003),
    "warmup and exponential": lambda o: o.warmup_exponential_decay_schedule(0.0, 0.1, 10, 7, 0.5, end_value=0.01),
    "warmup": lambda o: o.warmup_constant_schedule(0.0, 0.1, 10),
    "polynomial": lambda o: o.polynomial_schedule(0.1, 0.01, 2.0, 40, 5),
    "linear": lambda o: o.linear_schedule(0.1, 0.02, 30),
    "linear, later": lambda o: o.linear_schedule(0.0, 0.02, 30, 7),
    "piecewise": lambda o: o.piecewise_constant_schedule(0.1, {10: 0.5, 30: 0.5}),
    "piecewise with scales": lambda o: o.piecewise_constant_schedule(0.1, {10: 0.5, 30: 0.1}),
    "one cycle of lines": lambda o: o.linear_onecycle_schedule(50, 0.1),
    "one cycle of cosines": lambda o: o.cosine_onecycle_schedule(50, 0.1),
    "joined": lambda o: o.join_schedules(
        [o.linear_schedule(0.0, 0.1, 5), o.constant_schedule(0.1), o.cosine_decay_schedule(0.1, 20)], [5, 12]
    ),
    "joined to a constant": lambda o: o.join_schedules([o.constant_schedule(0.1), o.constant_schedule(0.01)], [10]),
    "restarts": lambda o: o.sgdr_schedule([CYCLE] * 3),
    "half a cosine": lambda o: o.piecewise_interpolate_schedule("cosine", 0.1, {20: 0.1}),
}  # of optax


@pytest.mark.parametrize("name", SCHEDULES)
def test_sixty_steps_of_a_schedule(name: str) -> None:
    import jax
    import jax.numpy as jnp
    import optax

    from onward.frameworks.jax.schedule import make_schedule, read_schedule

    theirs = SCHEDULES[name](optax)
    base, specs = read_schedule(theirs)
    counts = jnp.arange(60)
    expected = np.asarray(jax.vmap(theirs)(counts))
    again = np.asarray(jax.vmap(make_schedule(specs, base))(counts))
    weights = {"w": np.ones((2, 2), np.float32)}
    training = onward.prepare(fed(weights), loss="value:loss", optimizer=Spec("sgd", {"lr": base}), schedule=specs)
    with start(training, threads=1) as engine:
        ours = [float(engine.step({"w/g": weights["w"]})["lr"]) for _ in counts]
    assert np.abs(ours - expected).max() < 1e-7
    assert np.abs(again - expected).max() < 1e-7


@pytest.mark.parametrize(
    "schedule",
    ["cosine:steps=20,min=0.01,after=torch", "cosine_restarts:period=7,mult=2", "inverse_sqrt:timescale=9"]
    + ["one_cycle:steps=50,three_phase=true", "one_cycle:steps=50,pct_start=0.31", "step:size=3,gamma=0.5,every=4"]
    + ["cosine:steps=40,warmup=10,warmup_start=0.1", "multistep:milestones=[5,9,30],gamma=0.3"],
)
def test_a_schedule_that_others_have(schedule: str) -> None:
    import jax
    import jax.numpy as jnp

    from onward.frameworks.jax.schedule import make_schedule, read_schedule

    made = make_schedule([parse(schedule)], 0.1)
    weights = {"w": np.ones((2, 2), np.float32)}
    training = onward.prepare(fed(weights), loss="value:loss", optimizer="sgd:lr=0.1", schedule=schedule)
    with start(training, threads=1) as engine:
        ours = [float(engine.step({"w/g": weights["w"]})["lr"]) for _ in range(60)]
    assert np.abs(ours - np.asarray(jax.vmap(made)(jnp.arange(60)))).max() < 1e-7
    base, specs = read_schedule(made)  # and it can be read again
    assert base == pytest.approx(0.1) and specs


# ---- refusals --------------------------------------------------------------------------------------------------------


def cosine(o: Any) -> Any:
    return o.cosine_decay_schedule(0.1, 10)


REFUSED: list[tuple[Callable[[Any], Any], str]] = [
    (lambda o: o.adabelief(0.1), "`scale_by_belief`"),
    (lambda o: o.lars(0.1), "`scale_by_trust_ratio` after sgd"),
    (lambda o: o.noisy_sgd(0.1, key=0), "`add_noise`"),
    (lambda o: o.adamaxw(0.1), "decoupled weight decay of adamax"),
    (lambda o: o.adam(0.1, eps_root=1e-3), "eps_root=0.001"),
    (lambda o: o.adam(0.1, mu_dtype="bfloat16"), "mu_dtype=bfloat16"),
    (lambda o: o.chain(o.zero_nans(), o.clip_by_block_rms(1.0), o.sgd(0.1)), "`zero_nans`, `clip_by_block_rms`"),
    (lambda o: o.sgd(lambda count: 0.1 / (count + 1)), "not one of optax"),
    (lambda o: o.sgd(o.cosine_decay_schedule(0.1, 10, exponent=2.0)), "with an exponent"),
    (lambda o: o.adamw(0.1, weight_decay=cosine(o)), "`weight_decay` follows a schedule"),
    (lambda o: o.chain(o.trace(0.9), o.scale(0.1)), "go up the gradient"),
    (lambda o: o.rmsprop(cosine(o), eps_in_sqrt=False, momentum=0.9), "RMSprop with momentum"),
    (lambda o: o.masked(o.sgd(0.1), is_matrix), "adds their unchanged gradients"),
    (lambda o: o.adafactor(0.1, multiply_by_parameter_scale=False), "multiply_by_parameter_scale"),
    (
        lambda o: o.multi_transform({"matrix": o.adam(cosine(o)), "vector": o.sgd(0.1)}, kinds),
        "schedules of groups differ",
    ),
    (
        lambda o: o.chain(o.clip_by_global_norm(1.0), o.masked(o.set_to_zero(), is_matrix), o.sgd(0.1)),
        "does not clip|`set_to_zero`",
    ),
    (lambda o: o.GradientTransformation(lambda params: (), lambda g, state, params=None: (g, state)), "<lambda>"),
    (lambda o: o.MultiSteps(o.sgd(0.1), 2, use_grad_mean=False), "`MultiSteps` sums"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_refused(make: Callable[[Any], Any], message: str) -> None:
    import optax

    from onward.frameworks.jax.optimizer import read_optimizer

    tx = make(optax)
    with pytest.raises(UnsupportedError, match=message):
        read_optimizer(tx, tx.init(tree()), tree())


def test_counts_that_differ() -> None:
    import optax

    from onward.frameworks.jax.optimizer import read_optimizer

    tx = optax.adam(optax.cosine_decay_schedule(0.1, 10))
    adam, schedule = tx.init(tree())
    with pytest.raises(UnsupportedError, match="counts of updates in the optimizer differ"):
        read_optimizer(tx, (adam._replace(count=adam.count + 3), schedule), tree())


def test_an_optimizer_that_was_read_wrongly_is_found() -> None:
    import dataclasses

    import optax

    from onward.frameworks.jax.probe import try_updates
    from onward.run_state.state import ParameterGroup

    tx = optax.adam(1e-2, eps=1e-3)
    state = tx.init(tree())
    run = run_of(tx, state, tree())
    try_updates(tx, state, tree(), run)
    keras = Spec("adam", {**run.groups[0].optimizer.options, "variant": "keras"})
    wrong = dataclasses.replace(run, groups=[ParameterGroup(keras, run.groups[0].parameters)])
    with pytest.raises(MismatchError, match="is off by"):
        try_updates(tx, state, tree(), wrong)
