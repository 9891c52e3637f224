"""Training models as JAX, and runs of JAX, with Flax or without, as training models."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import models
import numpy as np
import onnx
import pytest
from jax_training import Arrays, apply_dense, cross_entropy, dense, digits, mlp, sentences, trained, with_short_labels
from marks import needs
from representatives import chosen

import onward
from onward.engines import start
from onward.errors import UnsupportedError
from onward.run_state.training_models import from_training_model

pytestmark = needs("jax", "optax")


# ---- training models in JAX ------------------------------------------------------------------------------------------


Case = tuple[onnx.ModelProto, list[Arrays], dict[str, Any]]
MODELS: dict[str, Callable[[], Case]] = {
    "mlp": lambda: (
        models.digits_mlp(),
        digits(15, 64),
        {"loss": "cross_entropy:label_smoothing=0.1", "optimizer": "adam:lr=1e-2,eps=1e-3", "clip": "norm:1"},
    ),
    "groups, averages, accumulation": lambda: (
        models.digits_mlp(),
        digits(15, 64),
        {
            "loss": "cross_entropy",
            "optimizer": "amsgrad:lr=1e-2",
            "groups": ["*.bias:lr=1e-3"],
            "freeze": "fc1.weight",
            "accumulate": 2,
            "ema": 0.9,
        },
    ),
    "cnn with batch norm and dropout": lambda: (
        models.small_cnn(),
        digits(15, 1, 8, 8),
        {
            "loss": "cross_entropy",
            "optimizer": "momentum:lr=0.05",
            "schedule": "exponential:gamma=0.9",
            "variance": "sample",
        },
    ),
    "transformer": lambda: (
        models.small_transformer(1),
        sentences(15),
        {"loss": "value:loss", "optimizer": "rmsprop:lr=1e-3,momentum=0.9,variant=keras"},
    ),
}


@pytest.mark.slow("cnn with batch norm and dropout", "mlp")
@pytest.mark.parametrize("name", chosen(MODELS, set(MODELS) - {"transformer"}))
def test_a_training_model_goes_on_in_jax(name: str) -> None:
    """With the same losses, compiled with its state given away; and back again with the same state."""
    import jax

    proto, batches, recipe = MODELS[name]()
    training = onward.prepare(onward.load(proto), **recipe)
    with start(training, threads=1) as engine:
        for batch in batches[:5]:
            engine.step(batch)
        for key, array in engine.state().items():
            training.set(key, array)
        made = onward.to_jax(training)
        step, state = jax.jit(made.step, donate_argnums=0), jax.tree.map(lambda x: x.copy(), made.state)
        for batch in batches[5:]:
            expected = float(engine.step(batch)[engine.loss])
            state, metrics = step(state, batch)
            assert float(metrics["loss"]) == pytest.approx(expected, rel=1e-5)
        again = made.training(state)
        for key, array in engine.state().items():
            found = again.initializer(key).const_value.numpy()
            assert found.dtype == array.dtype and found.shape == array.shape
            if key not in ("conv.bias", "conv.bias/momentum_buffer"):  # whose gradient is rounding alone
                assert np.abs(found.astype(float) - array).max() <= 2e-4 * max(np.abs(array).max(), 1e-3), key
        assert set(made.state["params"]) == set(from_training_model(training).parameters)


def test_functions_are_pure() -> None:
    """Runs side by side with `vmap`; a loop of one's own; predictions."""
    import jax
    import jax.numpy as jnp
    import optax

    batches = digits(2, 64)
    training = onward.prepare(onward.load(models.digits_mlp()), loss="cross_entropy", optimizer="adam:lr=1e-2")
    made = onward.to_jax(training)
    both = {key: np.stack([batch[key] for batch in batches]) for key in batches[0]}
    states = jax.tree.map(lambda x: jnp.stack([x, x]), made.state)
    mapped, _ = jax.jit(jax.vmap(made.step))(states, both)
    step = jax.jit(made.step)
    for i, batch in enumerate(batches):
        alone, metrics = step(made.state, batch)
        assert np.allclose(mapped["params"]["fc1.weight"][i], alone["params"]["fc1.weight"], rtol=1e-5, atol=1e-7)
    state = made.state
    slope = jax.jit(jax.value_and_grad(made.loss, has_aux=True))
    (value, _), slopes = slope(state["params"], state, batches[1])
    changes, _ = made.tx.update(slopes, state["opt_state"], state["params"])
    assert float(value) == pytest.approx(float(metrics["loss"]))
    mine = optax.apply_updates(state["params"], changes)
    assert np.allclose(mine["fc2.bias"], alone["params"]["fc2.bias"], rtol=1e-4)  # optax's powers have 32 bits here
    with pytest.raises(onward.Error, match="`labels` is missing, `label` is not an input"):
        made.step(state, {"image": batches[0]["image"], "label": batches[0]["labels"]})
    logits = made.apply(state, {"image": batches[0]["image"]})["logits"]
    weights = {name: np.asarray(array) for name, array in state["params"].items()}
    hidden = np.maximum(batches[0]["image"] @ weights["fc1.weight"].T + weights["fc1.bias"], 0)
    assert np.allclose(logits, hidden @ weights["fc2.weight"].T + weights["fc2.bias"], atol=1e-5)


def test_state_that_optax_has_no_place_for() -> None:
    training = onward.prepare(onward.load(models.digits_mlp()), loss="cross_entropy", loss_scale="dynamic")
    with pytest.raises(UnsupportedError, match="scales its loss"):
        onward.to_jax(training)


# ---- runs of JAX -----------------------------------------------------------------------------------------------------


def transformer(params: Any, tokens: Any) -> Any:
    import jax
    import jax.numpy as jnp

    x = params["embedding"][tokens]
    q, k, v = jnp.split(apply_dense(params["qkv"], normal(x)), 3, -1)
    scores = jnp.einsum("nqd,nkd->nqk", q, k) / 4.0
    seen = jnp.tril(jnp.ones((7, 7), bool))
    x = x + jax.nn.softmax(jnp.where(seen, scores, -1e9)) @ v
    x = x + apply_dense(params["down"], jax.nn.gelu(apply_dense(params["up"], normal(x))))
    return x @ params["embedding"].T


def normal(x: Any) -> Any:
    import jax

    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def cnn(params: Any, statistics: Any, image: Any) -> tuple[Any, Any]:
    import jax

    x = jax.lax.conv_general_dilated(image, params["conv"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
    x = jax.nn.relu((x - mean) * jax.lax.rsqrt(var + 1e-5) * params["scale"] + params["shift"])
    following = {"mean": 0.9 * statistics["mean"] + 0.1 * mean, "var": 0.9 * statistics["var"] + 0.1 * var}
    return apply_dense(params["fc"], x.reshape(x.shape[0], -1)), following


def go_on(
    loss: Callable[..., Any], params: Any, batches: list[Arrays], tx: Any, statistics: Any = None
) -> onward.Model:
    """Five steps in JAX, ten on both sides, with the same losses."""
    import jax

    from onward.frameworks.jax.closures import named_leaves

    step, state = trained(loss, tx), tx.init(params)
    for batch in batches[:5]:
        params, state, statistics, _ = step(params, state, statistics, batch)
    training = onward.from_jax(loss, params, batches[0], optimizer=tx, opt_state=state, statistics=statistics)
    with start(training, threads=1) as engine:
        for batch in batches[5:15]:
            params, state, statistics, value = step(params, state, statistics, batch)
            found = float(engine.step(batch)[engine.loss])
            assert found == pytest.approx(float(value), rel=1e-5)
        for name, leaf in named_leaves(statistics).items():
            is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            array = jax.random.key_data(leaf) if is_key else leaf
            state = engine.state()
            now = state[name] if name in state else training.array(name)  # a key that never changes is a constant
            assert np.allclose(now, array, rtol=1e-4, atol=1e-5)
    assert onward.check(training) == []
    return training


def test_a_run_of_jax_goes_on() -> None:
    import optax

    rng = np.random.default_rng(0)
    params = {"fc1": dense(rng, 64, 32), "fc2": dense(rng, 32, 10)}
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 5, 30)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, eps=1e-3))
    loss = lambda params, batch: cross_entropy(mlp(params, batch["image"]), batch["labels"])
    batches = with_short_labels(digits(15, 64))
    training = go_on(loss, params, batches, tx)
    (group,) = from_training_model(training).groups
    assert list(group.parameters) == ["fc1/bias", "fc1/kernel", "fc2/bias", "fc2/kernel"]
    assert int(onward.to_jax(training).state["step"]) == 5


@pytest.mark.slow
def test_a_transformer_of_jax_goes_on() -> None:
    import jax.numpy as jnp
    import optax

    rng = np.random.default_rng(0)
    params = {
        "embedding": jnp.asarray(rng.normal(size=(32, 16)) * 0.5, "float32"),
        "qkv": dense(rng, 16, 48),
        "up": dense(rng, 16, 32),
        "down": dense(rng, 32, 16),
    }
    loss = lambda params, batch: cross_entropy(transformer(params, batch["tokens"]), batch["labels"])
    go_on(loss, params, with_short_labels(sentences(15)), optax.lion(1e-3))


@needs("torch")
def test_statistics_of_jax_in_pytorch() -> None:
    """They are buffers, which `to_torch` compares before it returns, and no outputs of the module."""
    import jax
    import jax.numpy as jnp
    import optax
    import torch

    def loss(params: Any, mean: Any, batch: Any) -> tuple[Any, Any]:
        hidden = batch["x"] @ params["w"]
        return jnp.mean((hidden - mean["mean"] - batch["y"]) ** 2), {"mean": 0.9 * mean["mean"] + 0.1 * hidden.mean(0)}

    rng = np.random.default_rng(0)
    batch = {name: rng.normal(size=(6, 3)).astype(np.float32) for name in ("x", "y")}
    params, mean, tx = {"w": jnp.eye(3)}, {"mean": jnp.ones(3)}, optax.adam(1e-2, eps=1e-3)
    training = onward.from_jax(loss, params, batch, optimizer=tx, statistics=mean, probe=False)
    module, optimizer, _, minimized = onward.to_torch(training)
    state = tx.init(params)
    for _ in range(2):
        (expected, mean), gradients = jax.value_and_grad(loss, has_aux=True)(params, mean, batch)
        updates, state = tx.update(gradients, state)
        params = optax.apply_updates(params, updates)
        optimizer.zero_grad()
        value = minimized(module(*map(torch.from_numpy, batch.values())))
        value.backward()
        optimizer.step()
        np.testing.assert_allclose(value.item(), expected, rtol=1e-5)
    np.testing.assert_allclose(dict(module.named_buffers())["mean"].numpy(), mean["mean"], rtol=1e-5)


def test_statistics_of_jax_go_on() -> None:
    import jax.numpy as jnp
    import optax

    rng = np.random.default_rng(0)
    params = {
        "conv": jnp.asarray(rng.normal(size=(3, 3, 1, 4)) * 0.3, "float32"),
        "scale": jnp.ones(4),
        "shift": jnp.zeros(4),
        "fc": dense(rng, 256, 10),
    }

    def loss(params: Any, statistics: Any, batch: Any) -> Any:
        logits, following = cnn(params, statistics, batch["image"])
        return cross_entropy(logits, batch["labels"]), following

    statistics = {"mean": jnp.zeros(4), "var": jnp.ones(4)}
    falling = optax.exponential_decay(0.1, 1, 0.9)
    go_on(loss, params, with_short_labels(digits(15, 8, 8, 1)), optax.sgd(falling, 0.9), statistics)


def test_predictions_of_jax_with_a_loss_of_a_recipe() -> None:
    import optax

    rng = np.random.default_rng(0)
    params = {"fc1": dense(rng, 64, 32), "fc2": dense(rng, 32, 10)}
    batches = with_short_labels(digits(10, 64))
    tx = optax.adagrad(0.1, initial_accumulator_value=1e-3)
    state = tx.init(params)
    training = onward.from_jax(mlp, params, batches[0]["image"], loss="cross_entropy", optimizer=tx)
    step = trained(lambda params, batch: cross_entropy(mlp(params, batch["image"]), batch["labels"]), tx)
    with start(training, threads=1) as engine:
        for batch in batches:
            params, state, _, value = step(params, state, None, batch)
            found = engine.step({"x": batch["image"], "labels": batch["labels"].astype(np.int64)})[engine.loss]
            assert float(found) == pytest.approx(float(value), rel=1e-5)


@needs("flax")
def test_a_run_of_flax_goes_on() -> None:
    import jax
    import optax
    from flax import linen

    class Digits(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            return linen.Dense(10)(linen.LayerNorm()(linen.relu(linen.Dense(32)(x))))

    batches = with_short_labels(digits(15, 64))
    module = Digits()
    params = module.init(jax.random.key(0), batches[0]["image"])
    loss = lambda params, batch: cross_entropy(module.apply(params, batch["image"]), batch["labels"])
    decays = functools.partial(jax.tree.map, lambda x: x.ndim > 1)
    training = go_on(loss, params, batches, optax.adamw(1e-2, weight_decay=0.1, mask=decays))
    by_name = {
        name: group.optimizer.name for group in from_training_model(training).groups for name in group.parameters
    }
    assert by_name["params/Dense_0/kernel"] == "adamw" and by_name["params/LayerNorm_0/scale"] == "adam"


@needs("flax")
def test_a_module_of_nnx_goes_on() -> None:
    import optax
    from flax import nnx

    class Digits(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.first = nnx.Linear(64, 16, use_bias=False, rngs=rngs)
            self.norm = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
            self.drop = nnx.Dropout(0.3, rngs=rngs)
            self.last = nnx.Linear(16, 10, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.last(self.drop(nnx.relu(self.norm(self.first(x)))))

    graph, params, statistics = nnx.split(Digits(nnx.Rngs(0)), nnx.Param, ...)

    def loss(params: Any, statistics: Any, batch: Any) -> Any:
        module = nnx.merge(graph, params, statistics, copy=True)
        value = cross_entropy(module(batch["image"]), batch["labels"])
        return value, nnx.split(module, nnx.Param, ...)[2]

    training = go_on(loss, params, with_short_labels(digits(15, 64)), optax.adamw(1e-2), statistics)
    changed = {"norm/mean", "norm/var", "drop/rngs/count", "first/kernel", "last/bias/exp_avg"}
    assert changed <= training.step().update.keys()


def test_parameters_that_are_not_used() -> None:
    import optax

    rng = np.random.default_rng(0)
    params = {"fc1": dense(rng, 64, 10), "fc2": dense(rng, 3, 3)}
    loss = lambda params, batch: cross_entropy(apply_dense(params["fc1"], batch["image"]), batch["labels"])
    (batch,) = with_short_labels(digits(1, 64))
    training = onward.from_jax(loss, params, batch, optimizer=optax.adagrad(0.1))
    assert "fc2/kernel" in training.graph.initializers and "fc2/kernel" not in training.step().update
    with pytest.raises(UnsupportedError, match="`fc2/kernel`"):
        onward.from_jax(loss, params, batch, optimizer=optax.adamw(0.1))
