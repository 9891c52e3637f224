"""Functions of JAX as models: what they are called, which sizes are free, what is refused; updates of optax."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from marks import needs

import onward
from onward.errors import UnsupportedError

pytestmark = needs("jax", "optax")
jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")

import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402
from jaxpr_agreement import agrees, numbers, results, same, weights  # noqa: E402

from onward.frameworks.jax.jaxpr import export  # noqa: E402

Tree = Any


# ---- names, shapes, refusals -----------------------------------------------------------------------------------------


def test_names() -> None:
    params = {
        "dense": [{"kernel": jnp.ones((2, 3))}, {"kernel": jnp.ones((3, 2))}],
        "unused": jnp.ones(4),
        "step": jnp.int32(3),
    }

    def apply(params: Tree, x: Any, *, scale: float = 1.0) -> Any:
        h = x["image"] @ params["dense"][0]["kernel"]
        return {"logits": h @ params["dense"][1]["kernel"], "features": (h, h), "count": params["step"] + 1}

    x = {"image": numbers(5, 2)}
    model = export(apply, params, x)
    assert list(model.graph.initializers) == ["dense/0/kernel", "dense/1/kernel", "step", "unused"]
    assert [value.name for value in model.inputs] == ["x/image"]
    assert [value.name for value in model.outputs] == ["count", "features/0", "features/1", "logits"]
    renamed = export(apply, params, x, input_names=["image"], names=list("abcd"))
    assert [value.name for value in (*renamed.inputs, *renamed.outputs)] == ["image", *"abcd"]
    same(results(renamed, [x["image"]], "onnxruntime"), apply(params, x))
    with pytest.raises(UnsupportedError, match="the function has 4 results, not 1"):
        export(apply, params, x, names=["a"])


def test_leaves_that_are_no_arrays_stay_what_they_are() -> None:
    params = [{"weight": jnp.ones((2, 3))}, jax.nn.relu, {"weight": jnp.ones((3, 1))}]  # as Equinox has its modules
    apply = lambda params, x: params[1](x @ params[0]["weight"]) @ params[2]["weight"]
    model = export(apply, params, numbers(4, 2))
    assert list(model.graph.initializers) == ["0/weight", "2/weight"]
    same(results(model, [numbers(4, 2)], "numpy"), apply(params, numbers(4, 2)))


def test_sizes_that_are_computed() -> None:
    def mixed(_: Any, x: Any, y: Any) -> Any:
        n = x.shape[0]
        flat = jnp.concatenate([x.reshape(-1), y.reshape(-1)])
        return flat, jnp.zeros((n, n)), jnp.arange(n // 2), x[: n - 1].mean(), jnp.tri(n), x[-2:], n * 2 + y.sum()

    model = export(mixed, {}, numbers(4, 3), numbers(4, 2))
    for n in (4, 7):
        same(results(model, [numbers(n, 3), numbers(n, 2)], "onnxruntime"), mixed(None, numbers(n, 3), numbers(n, 2)))


FREE: dict[str, Callable[[Any], Any]] = {
    "parts": lambda x: (jnp.roll(x, 1, 0), x[::-1], jnp.diff(x, axis=0), jnp.take(x, jnp.array([0, -1]), 0), x[-1]),
    "padding": lambda x: jnp.pad(x, ((x.shape[0], 0), (0, 0)))[: x.shape[0] + 1],
    "products": lambda x: (x.T @ x, x @ x.T, jnp.einsum("ij,kj->ik", x, x)),
    "orders": lambda x: (jnp.sort(x, axis=0), x[jnp.argsort(x[:, 0])], jnp.argmax(x, axis=0)),
    "sums": lambda x: (jnp.cumsum(jnp.ones_like(x[:, 0])) / x.shape[0], x.mean(0), lax.cummax(x, 0)),
    "loop": lambda x: lax.fori_loop(0, x.shape[0], lambda i, c: c.at[i].set(c[i] * 2), x),
    "random": lambda x: jax.random.normal(jax.random.key(0), x.shape) * x,
    "windows": lambda x: jax.vmap(lambda r: lax.reduce_window(r, 0.0, lax.add, (2,), (1,), "VALID"))(x),
    "derivative": jax.grad(lambda x: jnp.sin(jnp.concatenate([x, x * 2])[x.shape[0] :]).sum()),
}


@pytest.mark.parametrize("name", FREE)
def test_any_number_of_examples(name: str) -> None:
    model = agrees(FREE[name], numbers(3, 4), tolerance=1e-5)
    assert str(model.inputs[0].shape[0]) == "batch"


def test_a_derivative_by_hand_is_part_of_what_jax_computes() -> None:
    @jax.custom_vjp
    def twice_as_steep(x: Any) -> Any:
        return jnp.sin(x)

    twice_as_steep.defvjp(lambda x: (jnp.sin(x), x), lambda x, dy: (dy * jnp.cos(x) * 2,))
    agrees(jax.value_and_grad(lambda x: twice_as_steep(x).sum()), numbers(3, 2))


def test_symbols_of_the_caller() -> None:
    n, time = jax.export.symbolic_shape("n, time")
    x = jax.ShapeDtypeStruct((n, time, 3), jnp.float32)
    model = export(lambda _, x: (x.mean(1), x.reshape(-1, 3)), {}, x)
    assert [str(size) for size in model.inputs[0].shape] == ["n", "time", "3"]
    same(results(model, [numbers(2, 5, 3)], "onnxruntime"), (numbers(2, 5, 3).mean(1), numbers(2, 5, 3).reshape(-1, 3)))


def test_a_size_that_must_be_known_is_fixed_with_a_warning() -> None:
    def by_size(_: Any, x: Any) -> Any:
        return x * 2 if x.shape[0] > 3 else x

    with pytest.warns(UserWarning, match="the batch size is fixed"):
        model = export(by_size, {}, numbers(4, 2))
    assert list(model.inputs[0].shape) == [4, 2]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export(by_size, {}, numbers(4, 2), batch=None)


def test_all_that_is_missing_is_listed_with_its_place() -> None:
    def function(_: Any, x: Any) -> Any:
        inverse = jnp.linalg.eigvalsh(x @ x.T)
        looped = lax.fori_loop(0, 2, lambda i, c: jax.scipy.special.digamma(c), x)
        return inverse, looped, jnp.linalg.eigvalsh(x)  # the unused eigenvectors are no problem

    with pytest.raises(UnsupportedError) as caught:
        export(function, {}, numbers(3, 3), batch=None)
    message = str(caught.value)
    assert {"eigh", "digamma"} <= set(re.findall(r"^  (\w+)", message, re.MULTILINE))
    assert f"{__name__}.py" in message


def test_what_is_not_used_is_not_missing() -> None:
    def function(_: Any, x: Any) -> Any:
        jnp.linalg.eigvalsh(x)
        jax.debug.print("{}", x)
        return x + 1

    same(results(export(function, {}, numbers(3, 3), batch=None), [numbers(3, 3)], "numpy"), numbers(3, 3) + 1)


# ---- optax -----------------------------------------------------------------------------------------------------------

SCHEDULE = optax.join_schedules([optax.linear_schedule(0, 0.1, 2), optax.cosine_decay_schedule(0.1, 5)], [2])
OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(SCHEDULE, momentum=0.9, nesterov=True),
    "adam": optax.adam(0.01, eps=1e-3),
    "scheduled adam": optax.adam(optax.exponential_decay(0.01, 3, 0.5)),
    "adamw": optax.adamw(0.01, weight_decay=0.1, mask=lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree)),
    "amsgrad": optax.amsgrad(0.01),
    "nadam": optax.nadam(0.01),
    "adamax": optax.adamax(0.01),
    "adagrad": optax.adagrad(0.1),
    "rmsprop": optax.rmsprop(0.01, momentum=0.9, centered=True),
    "adadelta": optax.adadelta(1.0),
    "lion": optax.lion(0.01),
    "lamb": optax.lamb(0.01, weight_decay=0.01),
    "lars": optax.lars(0.01),
    "radam": optax.radam(0.01, threshold=2.0),
    "adafactor": optax.adafactor(0.01, min_dim_size_to_factor=2),
    "adabelief": optax.adabelief(0.01),
    "yogi": optax.yogi(0.01),
    "novograd": optax.novograd(0.01),
    "sm3": optax.sm3(0.01),
    "clipped": optax.chain(optax.clip_by_global_norm(0.5), optax.add_decayed_weights(0.1), optax.sgd(0.1)),
    "clipped values": optax.chain(optax.clip(0.2), optax.adaptive_grad_clip(0.1), optax.adam(0.01)),
    "clipped blocks": optax.chain(optax.clip_by_block_rms(0.2), optax.zero_nans(), optax.sgd(0.1)),
    "noisy": optax.noisy_sgd(0.1, key=jax.random.key(1)),
    "accumulated": optax.MultiSteps(optax.adam(0.01), 2).gradient_transformation(),
    "skipping": optax.apply_if_finite(optax.sgd(0.1), 2),
    "injected": optax.inject_hyperparams(optax.adam)(learning_rate=SCHEDULE),
    "several": optax.multi_transform({"a": optax.sgd(0.1), "b": optax.adam(0.1)}, {"kernel": "a", "bias": "b"}),
    "muon": optax.contrib.muon(0.02),
    "plateau": optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_of_optax(name: str) -> None:
    """Three updates, each from the state that the model made before."""
    tx = OPTIMIZERS[name]
    params = weights(kernel=(4, 6), bias=(6,))
    extra = {"value": jnp.float32(1.5)} if name == "plateau" else {}
    state = tx.init(params)

    @jax.jit
    def update(_: Any, gradients: Tree, state: Tree, params: Tree) -> Any:
        updates, state = tx.update(gradients, state, params, **extra)
        return optax.apply_updates(params, updates), state

    model = export(update, {}, params, state, params, batch=None)
    assert onward.check(model) == []
    ours = jax.tree.leaves((state, params))
    for step in range(3):
        gradients = weights(kernel=(4, 6), bias=(6,)) if step else jax.tree.map(lambda leaf: leaf * 0.1, params)
        params, state = update(None, gradients, state, params)
        found = results(model, [*jax.tree.leaves(gradients), *map(as_data, ours)], "onnxruntime")
        same(found, jax.tree.map(as_data, (params, state)), 1e-4 if name == "muon" else 2e-5)
        ours = [*found[2:], *found[:2]]


def as_data(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
