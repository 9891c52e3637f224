"""Whole models of JAX as ONNX models: forward passes, JAX's derivatives and ours, optimizers of optax, training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from marks import needs

import onward

pytestmark = needs("jax", "optax")
jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")

import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402
from jaxpr_agreement import numbers, results, same, weights  # noqa: E402

from onward.frameworks.jax.jaxpr import export  # noqa: E402

Tree = Any


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
        same(results(model, [batch], engine), jax.jit(apply)(params, batch))


@pytest.mark.slow("convolutional", "transformer", "unrolled")
@pytest.mark.parametrize("name", MODELS)
def test_the_derivative_of_jax(name: str) -> None:
    """`value_and_grad` is a function like others."""
    apply, params, x = MODELS[name]
    step = jax.jit(jax.value_and_grad(lambda params, x, labels: cross_entropy(apply(params, x), labels)))
    model = export(step, params, x, LABELS)
    for batch in ((x, LABELS), (more(x), more(LABELS))):
        same(results(model, [*batch], "onnxruntime"), step(params, *batch), 2e-5)


@pytest.mark.parametrize("name", MODELS)
def test_our_derivative_of_the_model(name: str) -> None:
    apply, params, x = MODELS[name]
    loss = lambda params, x, labels: cross_entropy(apply(params, x), labels)
    model = export(loss, params, x, LABELS)
    with_gradients = onward.gradient(model, "output", list(model.graph.initializers))
    same(results(with_gradients, [x, LABELS], "onnxruntime")[1:], jax.jit(jax.grad(loss))(params, x, LABELS), 2e-5)


def test_a_stopped_gradient_stays_stopped() -> None:
    params = weights(a=(3, 3), b=(3, 3))
    loss = lambda params, x: (lax.stop_gradient(jnp.tanh(x @ params["a"])) * (x @ params["b"] + params["a"][0])).sum()
    x = numbers(2, 3)
    model = onward.gradient(export(loss, params, x), "output", ["a", "b"])
    same(results(model, [x], "onnxruntime")[1:], jax.grad(loss)(params, x))


@pytest.mark.slow("jax")
@pytest.mark.parametrize(
    "engine", ["onnxruntime", "numpy", "jax", *(pytest.param(e, marks=needs(e)) for e in ("torch", "tensorflow"))]
)
def test_and_so_it_does_while_any_engine_trains(engine: str) -> None:
    """Also with derivatives of its own."""
    params, x = weights(a=(3, 3), b=(3, 3)), numbers(4, 3)
    apply = lambda params, x: lax.stop_gradient(jnp.tanh(x @ params["a"])) * (x @ params["b"] + params["a"][0])
    model = onward.prepare(export(apply, params, x), loss="cross_entropy", optimizer="sgd:lr=0.1")
    gradients = jax.grad(lambda params: cross_entropy(apply(params, x), LABELS))(params)
    with onward.engines.start(model, engine=engine, compile=False) as training:
        training.step({"x": x, "labels": LABELS.astype(np.int64)})
        trained = training.state()
    same([trained[name] for name in params], jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients))


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
        same(results(model, [batch], "onnxruntime"), apply(variables, batch))
    evaluate = jax.jit(lambda variables, x: net.apply(variables, x, train=False))
    same(results(export(evaluate, variables, x), [x], "onnxruntime"), evaluate(variables, x))


@needs("flax")
def test_flax_nnx() -> None:
    from flax import nnx

    net = nnx.Sequential(nnx.Linear(5, 8, rngs=nnx.Rngs(0)), nnx.gelu, nnx.Linear(8, 3, rngs=nnx.Rngs(1)))
    graph, state = nnx.split(net)
    x = numbers(4, 5)
    model = export(lambda state, x: nnx.merge(graph, state)(x), state, x)
    assert sorted(model.graph.initializers) == [f"layers/{i}/{name}" for i in (0, 2) for name in ("bias", "kernel")]
    same(results(model, [x], "onnxruntime"), net(x))


@pytest.mark.slow("LSTMCell")
@needs("flax")
@pytest.mark.parametrize("cell", ["LSTMCell", "GRUCell"])
def test_flax_recurrent(cell: str) -> None:
    from flax import linen as nn

    net, x = nn.RNN(getattr(nn, cell)(5)), numbers(3, 6, 4)
    variables = jax.jit(net.init)(jax.random.key(0), x)
    model = export(net.apply, variables, x)
    assert "Scan" in {node.op_type for node in model.graph}
    for batch in (x, more(x)):
        same(results(model, [batch], "onnxruntime"), jax.jit(net.apply)(variables, batch))


@needs("flax")
def test_flax_with_statistics_and_random_keys() -> None:
    """A step of a module that normalizes by its batch and drops out: what changes is put out, in its order."""
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.conv = nnx.Conv(3, 4, (3, 3), rngs=rngs)
            self.norm = nnx.BatchNorm(4, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.dropout(nnx.relu(self.norm(self.conv(x))))

    graph, state = nnx.split(Net(nnx.Rngs(0)))

    def step(state: Tree, x: Any) -> Any:
        net = nnx.merge(graph, state)
        return net(x), nnx.state(net, nnx.BatchStat), nnx.state(net, nnx.RngCount)

    x = numbers(4, 5, 5, 3)
    model = export(step, state, x)
    assert [value.name for value in model.outputs][1:] == [
        "output_1/norm/mean", "output_1/norm/var", "output_2/dropout/rngs/count"
    ]  # fmt: skip
    for batch in (x, more(x)):
        same(results(model, [batch], "onnxruntime"), jax.jit(step)(state, batch))


# ---- training --------------------------------------------------------------------------------------------------------


@pytest.mark.slow("convolutional", "transformer", "unrolled")
@pytest.mark.parametrize("name", MODELS)
def test_it_trains_as_jax_does(name: str) -> None:
    apply, params, x = MODELS[name]
    model = onward.prepare(
        export(apply, params, x), loss="cross_entropy", optimizer="sgd:lr=0.1,momentum=0.9,variant=optax"
    )
    tx = optax.sgd(0.1, momentum=0.9)
    state = tx.init(params)
    value_and_grad = jax.jit(jax.value_and_grad(lambda params: cross_entropy(apply(params, x), LABELS)))
    with onward.engines.start(model, threads=1) as engine:
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
