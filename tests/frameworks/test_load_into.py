"""`load_into`: a run of a framework, three steps of its training model, and the framework again."""

import copy

import numpy as np
import pytest

import onward
from onward.errors import UnsupportedError

STEPS = 3


def batch(classes=3, seed=0):
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(8, 5)).astype(np.float32), "y": rng.integers(0, classes, 8).astype(np.int32)}


def advanced(training, feeds):
    """Return the training model after some steps of ONNX Runtime, and their losses."""
    with onward.engines.start(training, threads=1) as engine:
        types = {value.name: value.dtype.numpy() for value in training.step().algorithm.inputs}
        types |= {value.name: value.dtype.numpy() for value in training.inputs}
        fed = {name: feeds[name].astype(types[name]) for name in engine.inputs}
        losses = [float(engine.step(fed)[engine.loss]) for _ in range(STEPS)]
        after = training.copy()
        for name, array in engine.state().items():
            after.set(name, array)
    return after, losses


def compare(losses, expected):
    np.testing.assert_allclose(losses, expected, rtol=2e-5)


# ---- PyTorch ---------------------------------------------------------------------------------------------------------


def torch_objects(torch, width=8):
    torch.manual_seed(0)
    module = torch.nn.Sequential(
        torch.nn.Linear(5, width), torch.nn.BatchNorm1d(width), torch.nn.ReLU(), torch.nn.Linear(width, 3)
    )
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05, weight_decay=0.1)
    return module, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def torch_steps(torch, module, optimizer, scheduler, feeds, count):
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(module(torch.tensor(feeds["x"])), torch.tensor(feeds["y"]).long())
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


def test_pytorch_goes_on():
    torch = pytest.importorskip("torch")
    feeds = batch()
    objects = torch_objects(torch)
    training = onward.from_torch(
        objects[0], torch.tensor(feeds["x"]), loss=torch.nn.CrossEntropyLoss(), optimizer=objects[1],
        scheduler=objects[2], probe=False,
    )  # fmt: skip
    (target,) = (value.name for value in training.step().algorithm.inputs)
    after, losses = advanced(training, {target: feeds["y"], training.inputs[0].name: feeds["x"]})
    module, optimizer, scheduler = torch_objects(torch)
    assert onward.load_into(module, after, optimizer=optimizer, scheduler=scheduler) is module
    losses += torch_steps(torch, module, optimizer, scheduler, feeds, STEPS)
    compare(losses, torch_steps(torch, *objects, feeds, 2 * STEPS))


@pytest.mark.slow
def test_other_objects_of_pytorch_are_refused_and_unchanged():
    torch = pytest.importorskip("torch")
    feeds = batch()
    module, optimizer, scheduler = torch_objects(torch)
    training = onward.from_torch(
        module, torch.tensor(feeds["x"]), loss=torch.nn.CrossEntropyLoss(), optimizer=optimizer, probe=False
    )
    training.set("0.bias", np.ones(8, np.float32))
    before = copy.deepcopy(module.state_dict())
    others = {
        "optimizer AdamW, not SGD": (module, torch.optim.SGD(module.parameters(), 0.1)),
        "other settings": (module, torch.optim.AdamW(module.parameters(), lr=0.05, weight_decay=0.2)),
        "has no `0.weight`": (torch.nn.Linear(5, 3), None),
        "shape": (torch_objects(torch, width=9)[0], None),
    }  # fmt: skip
    for message, (target, own) in others.items():
        with pytest.raises(UnsupportedError, match=message):
            onward.load_into(target, training, optimizer=own)
    with pytest.raises(UnsupportedError, match="scheduler"):
        onward.load_into(module, training, optimizer=optimizer, scheduler=scheduler)
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    onward.load_into(module, training)
    assert (module[0].bias == 1).all()


# ---- JAX -------------------------------------------------------------------------------------------------------------


def jax_loss(params, feeds):
    import jax
    import optax

    hidden = jax.nn.relu(feeds["x"] @ params["first"]["w"] + params["first"]["b"])
    return optax.softmax_cross_entropy_with_integer_labels(hidden @ params["last"], feeds["y"]).mean()


def jax_params():
    rng = np.random.default_rng(1)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32) * 0.3
    return {"first": {"w": draw(5, 8), "b": draw(8)}, "last": draw(8, 3)}


def optax_optimizers():
    optax = pytest.importorskip("optax")
    rate = optax.cosine_decay_schedule(0.05, 10)
    return {
        "adamw": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, mask={"first": True, "last": False})),
        "sgd": optax.sgd(rate, momentum=0.9, nesterov=True),
        "traced": optax.yogi(0.05),
        "partition": optax.partition(
            {"a": optax.lars(0.5), "b": optax.adam(0.01)}, {"first": {"w": "a", "b": "b"}, "last": "b"}
        ),
    }  # fmt: skip


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("sgd", "traced", "partition")]


@pytest.mark.parametrize("name", ["adamw", *SLOW])
def test_trees_of_jax_go_on(name):
    jax, tx = pytest.importorskip("jax"), optax_optimizers()[name]
    import optax

    params, feeds = jax.tree.map(jax.numpy.asarray, jax_params()), batch()

    @jax.jit
    def step(params, state):
        loss, gradients = jax.value_and_grad(jax_loss)(params, feeds)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    def steps(params, state, count):
        losses = []
        for _ in range(count):
            params, state, loss = step(params, state)
            losses.append(float(loss))
        return losses

    training = onward.from_jax(jax_loss, params, feeds, optimizer=tx, probe=False)
    after, losses = advanced(training, feeds)
    compare(
        losses + steps(*onward.load_into(params, after, optimizer=tx), STEPS), steps(params, tx.init(params), 2 * STEPS)
    )
    with pytest.raises(UnsupportedError, match="other settings"):
        onward.load_into(params, after, optimizer=optax.sgd(0.3))


@pytest.mark.slow
def test_a_module_of_nnx_goes_on():
    nnx, optax = pytest.importorskip("flax.nnx"), pytest.importorskip("optax")
    feeds = batch()

    def objects():
        rngs = nnx.Rngs(0, dropout=1)
        layers = [nnx.Linear(5, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs), nnx.Dropout(0.3, rngs=rngs)]
        module = nnx.Sequential(*layers, nnx.relu, nnx.Linear(8, 3, rngs=rngs))
        return module, nnx.Optimizer(module, optax.adam(0.05), wrt=nnx.Param)

    def loss(module, feeds):
        return optax.softmax_cross_entropy_with_integer_labels(module(feeds["x"]), feeds["y"]).mean()

    @nnx.jit
    def step(module, optimizer):
        value, gradients = nnx.value_and_grad(loss)(module, feeds)
        optimizer.update(module, gradients)
        return value

    native, optimizer = objects()
    training = onward.from_jax(loss, native, feeds, optimizer=optimizer, probe=False)
    after, losses = advanced(training, feeds)
    module, other = objects()
    assert onward.load_into(module, after, optimizer=other) is module
    assert int(other.step[...]) == STEPS
    losses += [float(step(module, other)) for _ in range(STEPS)]
    compare(losses, [float(step(native, optimizer)) for _ in range(2 * STEPS)])


@pytest.mark.slow
def test_a_train_state_of_linen_goes_on():
    nn, optax = pytest.importorskip("flax.linen"), pytest.importorskip("optax")
    import jax
    from flax.training.train_state import TrainState

    feeds = batch()
    module = nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(3)])
    params = module.init(jax.random.PRNGKey(0), feeds["x"])
    start = TrainState.create(apply_fn=module.apply, params=params, tx=optax.adam(0.05))

    def loss(params, feeds):
        logits = start.apply_fn(params, feeds["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, feeds["y"]).mean(), {"logits": logits}

    def steps(state, count):
        losses = []
        for _ in range(count):
            (value, _), gradients = jax.value_and_grad(loss, has_aux=True)(state.params, feeds)
            state = state.apply_gradients(grads=gradients)
            losses.append(float(value))
        return losses

    training = onward.from_jax(loss, start, feeds, has_aux=True, probe=False)
    after, losses = advanced(training, feeds)
    state = onward.load_into(start, after)
    assert state.step == STEPS
    compare(losses + steps(state, STEPS), steps(start, 2 * STEPS))


@pytest.mark.slow
def test_an_equinox_module_goes_on():
    eqx, optax = pytest.importorskip("equinox"), pytest.importorskip("optax")
    import jax

    feeds, tx = batch(), optax.adam(0.05)
    module = eqx.nn.MLP(5, 3, 8, 1, key=jax.random.PRNGKey(0))

    def loss(module, feeds):
        return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(module)(feeds["x"]), feeds["y"]).mean()

    def steps(module, state, count):
        losses = []
        for _ in range(count):
            value, gradients = eqx.filter_value_and_grad(loss)(module, feeds)
            updates, state = tx.update(gradients, state, eqx.filter(module, eqx.is_inexact_array))
            module = eqx.apply_updates(module, updates)
            losses.append(float(value))
        return losses

    state = tx.init(eqx.filter(module, eqx.is_inexact_array))
    training = onward.from_jax(loss, module, feeds, optimizer=tx, opt_state=state, probe=False)
    after, losses = advanced(training, feeds)
    compare(losses + steps(*onward.load_into(module, after, optimizer=tx), STEPS), steps(module, state, 2 * STEPS))


# ---- Keras -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_keras_model_goes_on():
    keras = pytest.importorskip("keras")
    feeds = batch()

    def model():
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(8, "relu", name="first"), keras.layers.Dense(3, name="last")]
        model = keras.Sequential([keras.Input((5,), name="x"), *layers])
        optimizer = keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.9), epsilon=1e-3)
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), run_eagerly=True)
        return model

    def steps(model, count):
        losses = []
        for _ in range(count):
            model.reset_metrics()
            losses.append(float(model.train_on_batch(feeds["x"], feeds["y"])))
        return losses

    native, other = model(), model()
    after, losses = advanced(onward.from_keras(native, probe=False), {"x": feeds["x"], "labels": feeds["y"]})
    assert onward.load_into(other, after) is other
    compare(losses + steps(other, STEPS), steps(native, 2 * STEPS))
    with pytest.raises(UnsupportedError, match="not Lion"):
        onward.load_into(other, after, optimizer=keras.optimizers.Lion(0.1))
