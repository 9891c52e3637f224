"""Whole models of JAX as ONNX models: forward passes, JAX's derivatives and ours, optimizers of optax, training."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import onward
from conftest import needs
from onward.errors import UnsupportedError
from onward.model import Model
from onward.run import function as function_of

pytestmark = needs("jax", "optax")
jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")

import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402

from onward.convert.jax.jaxpr import export  # noqa: E402

Tree = Any


def numbers(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng([seed, *shape]).normal(size=shape) * scale).astype(np.float32)


def weights(**shapes: tuple[int, ...]) -> dict[str, Any]:
    """A tree of weights, `dense__kernel=(3, 4)` at dense/kernel."""
    made: dict[str, Any] = {}
    for i, (name, shape) in enumerate(shapes.items()):
        *path, last = name.split("__")
        place = made
        for part in path:
            place = place.setdefault(part, {})
        place[last] = jnp.asarray(numbers(*shape, seed=i, scale=0.5))
    return made


# ---- models in plain JAX ---------------------------------------------------------------------------------------------


def perceptron(params: Tree, x: Any) -> Any:
    for layer in (params["first"], params["second"]):
        x = jax.nn.gelu(x @ layer["kernel"] + layer["bias"])
    return x @ params["last"]["kernel"]


def normalized(x: Any, scale: Any, bias: Any, axes: tuple[int, ...]) -> Any:
    mean, variance = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-5) * scale + bias


def convolve(x: Any, kernel: Any, **options: Any) -> Any:
    options = {"window_strides": (1, 1), "padding": "SAME", **options}
    return lax.conv_general_dilated(x, kernel, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options)


def convolutional(params: Tree, x: Any) -> Any:
    """Convolutions in the three kinds that there are, BatchNorm in training, both kinds of pools."""
    x = convolve(x, params["conv"]["kernel"])
    x = jax.nn.relu(normalized(x, params["norm"]["scale"], params["norm"]["bias"], (0, 1, 2)))
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    x = convolve(x, params["grouped"]["kernel"], feature_group_count=2, window_strides=(2, 1))
    x = lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 1, 1, 1), "SAME") / 4
    x = lax.conv_transpose(x, params["up"]["kernel"], (2, 2), "SAME")
    return x.mean((1, 2)) @ params["last"]["kernel"]


def recurrent(params: Tree, x: Any) -> Any:
    """An LSTM over the second axis."""

    def step(carry: Any, item: Any) -> Any:
        h, c = carry
        i, f, g, o = jnp.split(item @ params["input"] + h @ params["hidden"] + params["bias"], 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    start = jnp.zeros((x.shape[0], params["hidden"].shape[0]))
    (h, _), all_of_them = lax.scan(step, (start, start), jnp.swapaxes(x, 0, 1))
    return (h + all_of_them.mean(0)) @ params["last"]


def unrolled(params: Tree, x: Any) -> Any:
    h = jnp.zeros((x.shape[0], params["hidden"].shape[0]))
    for t in range(x.shape[1]):
        h = jnp.tanh(x[:, t] @ params["input"] + h @ params["hidden"])
    return h @ params["last"]


def transformer(params: Tree, tokens: Any) -> Any:
    """A block of a causal one on top of an embedding, with its head tied to it."""
    n, time = tokens.shape
    x = params["embedding"][tokens] + params["positions"][:time]
    h = normalized(x, params["norm1"]["scale"], params["norm1"]["bias"], (-1,))
    q, k, v = (h @ params["attention"][name] for name in ("query", "key", "value"))
    q, k, v = (part.reshape(n, time, 2, -1) for part in (q, k, v))
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / jnp.sqrt(q.shape[-1])
    scores = jnp.where(jnp.tril(jnp.ones((time, time), bool)), scores, -jnp.inf)
    x = x + jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v).reshape(n, time, -1) @ params["attention"]["out"]
    h = normalized(x, params["norm2"]["scale"], params["norm2"]["bias"], (-1,))
    x = x + jax.nn.gelu(h @ params["mlp"]["up"]) @ params["mlp"]["down"]
    return (x @ params["embedding"].T).mean(1)


MODELS: dict[str, tuple[Callable[..., Any], Tree, np.ndarray]] = {
    "perceptron": (
        perceptron,
        weights(first__kernel=(5, 8), first__bias=(8,), second__kernel=(8, 6), second__bias=(6,), last__kernel=(6, 3)),
        numbers(4, 5),
    ),
    "convolutional": (
        convolutional,
        weights(
            conv__kernel=(3, 3, 2, 4), norm__scale=(4,), norm__bias=(4,), grouped__kernel=(3, 2, 2, 4),
            up__kernel=(2, 2, 4, 3), last__kernel=(3, 3),
        ),
        numbers(4, 7, 6, 2),
    ),
    "recurrent": (recurrent, weights(input=(3, 16), hidden=(4, 16), bias=(16,), last=(4, 3)), numbers(4, 6, 3)),
    "unrolled": (unrolled, weights(input=(3, 5), hidden=(5, 5), last=(5, 3)), numbers(4, 5, 3)),
    "transformer": (
        transformer,
        weights(
            embedding=(7, 8), positions=(6, 8), norm1__scale=(8,), norm1__bias=(8,), norm2__scale=(8,),
            norm2__bias=(8,), attention__query=(8, 8), attention__key=(8, 8), attention__value=(8, 8),
            attention__out=(8, 8), mlp__up=(8, 16), mlp__down=(16, 8),
        ),
        np.random.default_rng(0).integers(0, 7, (4, 5)).astype(np.int32),
    ),
}  # fmt: skip
LABELS = np.array([0, 2, 1, 2], np.int32)


def cross_entropy(logits: Any, labels: Any) -> Any:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1).mean()


def computed(model: Model, engine: str, *inputs: Any) -> list[np.ndarray]:
    fed = {value.name: np.asarray(x) for value, x in zip(model.inputs, inputs, strict=True)}
    found = function_of(model, engine=engine)(fed)
    return [np.asarray(found[value.name]) for value in model.outputs]


def same(found: list[np.ndarray], expected: Tree, tolerance: float = 1e-5) -> None:
    leaves = jax.tree.leaves(expected)
    assert len(found) == len(leaves)
    for ours, theirs in zip(found, leaves, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance * max(1e-3, np.abs(theirs).max()))


def more(x: np.ndarray) -> np.ndarray:
    """A batch of another size."""
    return np.concatenate([x, x[:3]])


# ---- forward and derivatives -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["numpy", "onnxruntime"])
@pytest.mark.parametrize("name", MODELS)
def test_forward(name: str, engine: str) -> None:
    apply, params, x = MODELS[name]
    model = export(apply, params, x)
    assert onward.check(model) == []
    for batch in (x, more(x)):
        same(computed(model, engine, batch), jax.jit(apply)(params, batch))


@pytest.mark.parametrize("name", MODELS)
def test_the_derivative_of_jax(name: str) -> None:
    """`value_and_grad` is a function like others."""
    apply, params, x = MODELS[name]
    step = jax.jit(jax.value_and_grad(lambda params, x, labels: cross_entropy(apply(params, x), labels)))
    model = export(step, params, x, LABELS)
    for batch in ((x, LABELS), (more(x), more(LABELS))):
        same(computed(model, "onnxruntime", *batch), step(params, *batch), 2e-5)


@pytest.mark.parametrize("name", MODELS)
def test_our_derivative_of_the_model(name: str) -> None:
    apply, params, x = MODELS[name]
    loss = lambda params, x, labels: cross_entropy(apply(params, x), labels)
    model = export(loss, params, x, LABELS)
    with_gradients = onward.gradient(model, "output", list(model.graph.initializers))
    same(computed(with_gradients, "onnxruntime", x, LABELS)[1:], jax.jit(jax.grad(loss))(params, x, LABELS), 2e-5)


def test_a_stopped_gradient_stays_stopped() -> None:
    params = weights(a=(3, 3), b=(3, 3))
    loss = lambda params, x: (lax.stop_gradient(jnp.tanh(x @ params["a"])) * (x @ params["b"] + params["a"][0])).sum()
    x = numbers(2, 3)
    model = onward.gradient(export(loss, params, x), "output", ["a", "b"])
    same(computed(model, "onnxruntime", x)[1:], jax.grad(loss)(params, x))


# ---- Flax ------------------------------------------------------------------------------------------------------------


@needs("flax")
def test_flax_linen() -> None:
    from flax import linen as nn

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any, train: bool = True) -> Any:
            x = nn.BatchNorm(use_running_average=not train)(nn.Conv(4, (3, 3))(x))
            x = nn.avg_pool(nn.max_pool(nn.relu(x), (2, 2), strides=(2, 2)), (2, 2))
            x = nn.LayerNorm()(x.reshape(x.shape[0], -1))
            return nn.Dense(3)(nn.MultiHeadDotProductAttention(num_heads=2)(x[:, None], x[:, None])[:, 0])

    net, x = Net(), numbers(4, 8, 8, 2)
    variables = jax.jit(net.init)(jax.random.key(0), x)
    apply = jax.jit(lambda variables, x: net.apply(variables, x, mutable=["batch_stats"]))
    model = export(apply, variables, x)
    assert {"params/Conv_0/kernel", "batch_stats/BatchNorm_0/mean"} <= set(model.graph.initializers)
    assert any("Conv_0" in (node.name or "") for node in model.graph)
    statistics = [f"output_1/batch_stats/BatchNorm_0/{name}" for name in ("mean", "var")]
    assert [value.name for value in model.outputs] == ["output_0", *statistics]
    for batch in (x, more(x)):
        same(computed(model, "onnxruntime", batch), apply(variables, batch))
    evaluate = jax.jit(lambda variables, x: net.apply(variables, x, train=False))
    same(computed(export(evaluate, variables, x), "onnxruntime", x), evaluate(variables, x))


@needs("flax")
def test_flax_nnx() -> None:
    from flax import nnx

    net = nnx.Sequential(nnx.Linear(5, 8, rngs=nnx.Rngs(0)), nnx.gelu, nnx.Linear(8, 3, rngs=nnx.Rngs(1)))
    graph, state = nnx.split(net)
    x = numbers(4, 5)
    model = export(lambda state, x: nnx.merge(graph, state)(x), state, x)
    assert sorted(model.graph.initializers) == [f"layers/{i}/{name}" for i in (0, 2) for name in ("bias", "kernel")]
    same(computed(model, "onnxruntime", x), net(x))


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
        found = computed(model, "onnxruntime", *jax.tree.leaves(gradients), *map(as_data, ours))
        same(found, jax.tree.map(as_data, (params, state)), 1e-4 if name == "muon" else 2e-5)
        ours = [*found[2:], *found[:2]]


def as_data(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


# ---- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_it_trains_as_jax_does(name: str) -> None:
    apply, params, x = MODELS[name]
    model = onward.prepare(
        export(apply, params, x), loss="cross_entropy", optimizer="sgd:lr=0.1,momentum=0.9,variant=optax"
    )
    tx = optax.sgd(0.1, momentum=0.9)
    state = tx.init(params)
    value_and_grad = jax.jit(jax.value_and_grad(lambda params: cross_entropy(apply(params, x), LABELS)))
    with onward.run.load(model, threads=1) as engine:
        fed = [value.name for value in model.inputs]
        label = next(value.name for value in model.step().algorithm.inputs)
        for _ in range(5):
            value, gradients = value_and_grad(params)
            updates, state = tx.update(gradients, state, params)
            params = optax.apply_updates(params, updates)
            found = engine.step({fed[0]: x, label: LABELS.astype(np.int64)})
            np.testing.assert_allclose(found[engine.loss], value, rtol=1e-5)
        trained = engine.state()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        ours = trained[jax.tree_util.keystr(path, simple=True, separator="/")]
        np.testing.assert_allclose(ours, leaf, rtol=1e-4, atol=1e-5)


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
    same(computed(renamed, "onnxruntime", x["image"]), apply(params, x))
    with pytest.raises(UnsupportedError, match="there are 4 results, and names for 1"):
        export(apply, params, x, names=["a"])


def test_leaves_that_are_no_arrays_stay_what_they_are() -> None:
    params = [{"weight": jnp.ones((2, 3))}, jax.nn.relu, {"weight": jnp.ones((3, 1))}]  # as Equinox has its modules
    apply = lambda params, x: params[1](x @ params[0]["weight"]) @ params[2]["weight"]
    model = export(apply, params, numbers(4, 2))
    assert list(model.graph.initializers) == ["0/weight", "2/weight"]
    same(computed(model, "numpy", numbers(4, 2)), apply(params, numbers(4, 2)))


def test_sizes_that_are_computed() -> None:
    def mixed(_: Any, x: Any, y: Any) -> Any:
        n = x.shape[0]
        flat = jnp.concatenate([x.reshape(-1), y.reshape(-1)])
        return flat, jnp.zeros((n, n)), jnp.arange(n // 2), x[: n - 1].mean(), jnp.tri(n), x[-2:], n * 2 + y.sum()

    model = export(mixed, {}, numbers(4, 3), numbers(4, 2))
    for n in (4, 7):
        same(computed(model, "onnxruntime", numbers(n, 3), numbers(n, 2)), mixed(None, numbers(n, 3), numbers(n, 2)))


def test_symbols_of_the_caller() -> None:
    n, time = jax.export.symbolic_shape("n, time")
    x = jax.ShapeDtypeStruct((n, time, 3), jnp.float32)
    model = export(lambda _, x: (x.mean(1), x.reshape(-1, 3)), {}, x)
    assert [str(size) for size in model.inputs[0].shape] == ["n", "time", "3"]
    same(computed(model, "onnxruntime", numbers(2, 5, 3)), (numbers(2, 5, 3).mean(1), numbers(2, 5, 3).reshape(-1, 3)))


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

    same(computed(export(function, {}, numbers(3, 3)), "numpy", numbers(3, 3)), numbers(3, 3) + 1)
