"""Training models as compiled Keras models: `fit` goes on as ONNX Runtime does, and what comes back is the same."""

from __future__ import annotations

import models
import numpy as np
import pytest
from marks import needs

import onward

keras = pytest.importorskip("keras")
from keras_runs import Run, batches, layers, mlp, named, on_backend, one_hot, real, step, whole  # noqa: E402

from onward.engines import start  # noqa: E402
from onward.errors import DataError, UnsupportedError  # noqa: E402
from onward.frameworks.keras import from_keras, to_keras  # noqa: E402
from onward.recipe.optimizers import OPTIMIZERS  # noqa: E402
from onward.vocabulary.optimizers import KERAS_ROWS  # noqa: E402

pytestmark = [needs("keras"), needs("tensorflow")]


@pytest.fixture(scope="module")
def plain():
    """An inference model: five numbers in, three out."""
    return onward.transform.strip(from_keras(mlp().model, probe=False))


def begun(model, data, *, steps=3):
    """A training model after some steps on ONNX Runtime."""
    with start(model, threads=1) as engine:
        for _ in range(steps):
            engine.step(named(engine.inputs, next(data)))
        for name, array in engine.state().items():
            model.set(name, array)
    return model


def continues(training, data, *, steps=10, within=1e-5):
    """Keras and ONNX Runtime make the same steps; the Keras model, and the state of the other side."""
    made = to_keras(training)
    with start(training, threads=1) as engine:
        for _ in range(steps):
            batch = next(data)
            expected = float(engine.step(named(engine.inputs, batch))["loss"])
            np.testing.assert_allclose(step(made, batch), expected, rtol=within, atol=1e-7)
        return made, engine.state()


def same_state(made, state, *, within=1e-5):
    back = from_keras(made)
    for name, array in state.items():
        found = back.initializer(name).const_value.numpy()
        assert found.dtype == array.dtype and found.shape == array.shape, name
        np.testing.assert_allclose(
            found, array, rtol=within, atol=2e-6, err_msg=name
        )  # a bias before a normalization is noise


# ---- optimizers ------------------------------------------------------------------------------------------------------

NATIVE = {"torch": {"sgd", "sgdw", "adadelta"}, "optax": {"sgd", "sgdw", "adadelta", "adagrad", "rmsprop", "lion"}}
"""Where the arithmetic of others is that of Keras, too."""
OF_KERAS = {name for row in KERAS_ROWS.values() for name in row.optimizers}
CASES = [
    pytest.param(name, variant, marks=() if variant == [*kind.variants][-1] else pytest.mark.slow)
    for name, kind in OPTIMIZERS.items()
    for variant in kind.variants
    if name != "muon"
]
"""Of the arithmetics of an optimizer the last is quick, which is that of Keras where it has one."""


@pytest.mark.slow("adafactor-optax", "adamax-keras")
@pytest.mark.parametrize(("name", "variant"), CASES)
def test_optimizers(plain, name, variant):
    options = {"eps": 1e-3} if "eps" in OPTIMIZERS[name].hyper else {}
    given = {"name": name, "variant": variant, "lr": 0.02, **options}
    data = batches(real(5), whole(3))
    training = begun(onward.prepare(plain, loss="cross_entropy", optimizer=given), data)
    made, state = continues(training, data)
    native = (variant == "keras" and name in OF_KERAS) or name in NATIVE.get(variant, ())
    assert type(made.optimizer).__module__.startswith("keras.") == native
    assert int(made.optimizer.iterations) == 13
    same_state(made, state)


@pytest.mark.parametrize(
    ("schedule", "native"),
    [
        ("exponential:gamma=0.9", True),
        ("step:size=3,gamma=0.5", True),
        ("multistep:milestones=[4,8],gamma=0.3", True),
        ("linear:steps=10", True),
        ("polynomial:steps=10,power=2,end=0.001", True),
        ("cosine:steps=12,min=0.001", True),
        ("cosine:steps=12,warmup=6,warmup_start=0.1", True),
        ("step:size=2,gamma=0.5,every=3", True),
        ("exponential:gamma=0.5,every=4", True),
        ("cosine:steps=3,every=4", False),
        ("cosine:steps=5,after=torch", False),
        ("one_cycle:steps=20", False),
        ("linear:steps=10,warmup=5", False),
    ],
)
def test_schedules(plain, schedule, native):
    optimizer = "momentum:lr=0.1,variant=keras"
    training = onward.prepare(plain, loss="cross_entropy", optimizer=optimizer, schedule=schedule)
    made, _ = continues(training, batches(real(5), whole(3)))
    assert (type(made.optimizer).__name__ == "SGD") == native


@pytest.mark.parametrize(
    ("options", "native"),
    [
        ({"clip": {"norm": 0.1, "variant": "keras"}}, True),
        ({"clip": {"tensor_norm": 0.1, "variant": "keras"}}, True),
        ({"clip": "value:0.01"}, True),
        ({"clip": "norm:0.1"}, False),
        ({"groups": [{"match": "*bias", "weight_decay": 0.0}]}, True),
        ({"groups": [{"match": "*bias", "lr": 0.1}]}, False),
        ({"accumulate": 2}, False),
        ({"ema": 0.9}, False),
        ({"freeze": "*hidden*"}, True),
    ],
)
def test_recipes(plain, options, native):
    optimizer = "adamw:lr=0.02,variant=keras,weight_decay=0.1"
    data = batches(real(5), whole(3))
    training = begun(onward.prepare(plain, loss="cross_entropy", optimizer=optimizer, **options), data)
    made, state = continues(training, data)
    assert (type(made.optimizer).__name__ == "AdamW") == native
    same_state(made, state)


# ---- losses ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow("cross_entropy-<lambda>-True")
@pytest.mark.parametrize(
    ("loss", "target", "native"),
    [
        ("mse", real(3), True),
        ("huber", real(3), True),
        ("huber:delta=0.5", real(3), False),  # which Keras would not save
        ("cross_entropy", whole(3), True),
        ("cross_entropy:target=probabilities,label_smoothing=0.1", one_hot(3), True),
        ("bce_with_logits", one_hot(3), True),
        ("cross_entropy:label_smoothing=0.1", whole(3), False),
        ("cross_entropy:weight=[1,2,3]", whole(3), False),
        ("mse:reduction=sum", real(3), False),
        ("smooth_l1", real(3), False),
    ],
)
def test_losses(plain, loss, target, native):
    training = onward.prepare(plain, loss=loss, optimizer="sgd:lr=0.02")
    made, _ = continues(training, batches(real(5), target))
    assert (made.loss is not None) == native


def test_what_from_keras_reads_comes_back():
    """Losses of Keras's own, on what is behind the outputs, with a penalty of weights, for several outputs."""
    a, b = layers.Input((4,), name="a"), layers.Input((4,), name="b")
    shared = layers.Dense(6, "tanh", kernel_regularizer="l2")
    x = layers.BatchNormalization()(layers.Concatenate()([shared(a), shared(b)]))
    frozen = layers.Dense(5, trainable=False, name="frozen")
    outputs = [layers.Dense(3, "softmax")(frozen(x)), layers.Dense(2)(x)]
    model = keras.Model([a, b], outputs)
    model.compile(
        keras.optimizers.Nadam(1e-2), ["sparse_categorical_crossentropy", "log_cosh"], loss_weights=[0.5, 2.0]
    )
    run = Run(model, batches([real(4), real(4)], [whole(3), real(2)]))
    for _ in range(3):
        step(run.model, next(run.batches))
    made = to_keras(from_keras(run.model))
    assert {v.path for v in model.trainable_variables} == {v.path for v in made.trainable_variables}
    assert "frozen/kernel" in {v.path for v in made.non_trainable_variables}
    assert isinstance(made.optimizer, keras.optimizers.Nadam)
    for _ in range(10):
        batch = next(run.batches)
        np.testing.assert_allclose(step(made, batch), step(model, batch), rtol=1e-5)


# ---- as a Keras model ------------------------------------------------------------------------------------------------


def test_fit_evaluate_and_predict():
    """With dropout, whose random numbers are those of the training model, and sizes of batches that differ."""
    model = keras.Sequential(
        [layers.Input((5,)), layers.Dense(6, "tanh"), layers.BatchNormalization(), layers.Dropout(0.3), layers.Dense(3)]
    )
    model.compile("sgd", "mse")
    plain = onward.transform.strip(from_keras(model, probe=False))
    training = onward.prepare(plain, loss="cross_entropy", optimizer="adam:lr=0.01", schedule="cosine:steps=100")
    made = to_keras(training)
    x, y = (array for array in next(batches(real(5), whole(3), samples=40)))
    history = made.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0).history["loss"]
    with start(training, threads=1) as engine:
        parts = [slice(0, 16), slice(16, 32), slice(32, 40)]
        for epoch in range(2):
            found = [float(engine.step(named(engine.inputs, (x[part], y[part])))["loss"]) for part in parts]
            np.testing.assert_allclose(np.average(found, weights=[16, 16, 8]), history[epoch], rtol=1e-5)
        expected = engine.evaluate(named(engine.inputs, (x, y)))
        same_state(made, engine.state())
    np.testing.assert_allclose(made.evaluate(x, y, batch_size=40, verbose=0), expected["loss"], rtol=1e-5)
    np.testing.assert_allclose(made.predict(x, verbose=0), expected[plain.outputs[0].name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("build", [models.digits_mlp, models.small_cnn])
def test_models_of_others(build):
    """Models that did not come from Keras, with layouts of their own and PyTorch's arithmetic."""
    model = onward.load(build())
    shape = [size if isinstance(size, int) else 1 for size in model.inputs[0].shape][1:]
    training = onward.prepare(model, loss="cross_entropy", optimizer="adamw:lr=1e-3,eps=1e-3", variance="sample")
    made, state = continues(training, batches(real(*shape), whole(10)))
    plain = {name.replace(".", "/") for name in training.graph.initializers}  # names of PyTorch have no dots
    assert {v.path.replace(".", "/") for v in made.trainable_variables} <= plain
    same_state(made, state)


def test_a_model_that_was_compiled_again_is_refused(plain):
    made = to_keras(onward.prepare(plain, loss="mse"))
    made.compile("sgd", "mse")
    with pytest.raises(UnsupportedError, match="compiled again"):
        from_keras(made)


def test_the_rate_of_a_graph_is_not_changed_from_outside(plain):
    made = to_keras(onward.prepare(plain, loss="mse", optimizer="adam"))
    with pytest.raises(UnsupportedError, match="learning rate"):
        made.optimizer.learning_rate = 0.1


def test_embeddings_have_dense_gradients():
    """Keras would square the gradients of a token that occurs twice before it adds them up."""
    tokens = layers.Input((6,), dtype="int32")
    model = keras.Model(tokens, layers.Dense(3)(layers.GlobalAveragePooling1D()(layers.Embedding(9, 4)(tokens))))
    model.compile(keras.optimizers.Adam(1e-2), "mse")
    data = batches(lambda rng, n: rng.integers(0, 9, (n, 6)).astype(np.int32), real(3))
    made, _ = continues(from_keras(model, approx=True), data)
    assert isinstance(made.optimizer, keras.optimizers.Adam)


def test_a_model_with_its_loss_inside():
    """`fit` needs no targets, and says so where some are given."""
    training = onward.prepare(models.small_transformer(), loss="value:loss", optimizer="sgd:lr=0.1")
    made, rng = to_keras(training), np.random.default_rng(0)
    x = [rng.integers(0, 32, (4, 6)), rng.integers(0, 32, (4, 6))]
    with start(training, threads=1) as engine:
        expected = [float(engine.step(dict(zip(engine.inputs, x, strict=True)))[engine.loss]) for _ in range(2)]
    made.run_eagerly = True
    found = []
    for _ in expected:
        made.reset_metrics()
        found.append(made.train_on_batch(x, return_dict=True)["loss"])
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    with pytest.raises(DataError, match="the loss takes 0 targets, not 1"):
        made.train_on_batch(x, x[0])


@needs("torch")
def test_losses_of_several_parts_in_pytorch():
    """Of what the module returns and all targets: `loss(module(x), y)`."""
    import torch

    inputs = layers.Input((4,))
    model = keras.Model(inputs, layers.Dense(3, kernel_regularizer="l2")(inputs))
    model.compile("sgd", "mse")
    module, _, _, loss = onward.to_torch(from_keras(model, probe=False), probe=False)
    x, y = np.random.default_rng(0).standard_normal((2, 5, 4)).astype("f")
    outputs, target = module(torch.from_numpy(x)), torch.from_numpy(y[:, :3])
    expected = float(model.evaluate(x, y[:, :3], verbose=0))
    np.testing.assert_allclose(loss(outputs, target).item(), expected, rtol=1e-5)
    first, second = outputs.values()
    np.testing.assert_allclose(loss((first, target), (second,)).item(), expected, rtol=1e-5)
    with pytest.raises(TypeError, match="the losses take 1 targets, not 2"):
        loss(outputs, target, target)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_other_backends(backend):
    """What has graphs of its own: forward passes, losses, optimizers, with dropout and statistics."""
    chosen = "fit or others or comes_back or dense or test_losses or lamb or nadam"
    on_backend(backend, "-m", "pytest", "-q", "-x", __file__, "-k", chosen, "-p", "no:cacheprovider")
