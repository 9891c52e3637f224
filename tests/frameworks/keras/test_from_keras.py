"""Keras models that have been trained for a while go on as training models: the losses of Keras, step by step."""

from __future__ import annotations

import numpy as np
import pytest
from marks import needs

keras = pytest.importorskip("keras")
from keras_runs import (  # noqa: E402
    Run,
    agree,
    batches,
    binary,
    goes_on,
    layers,
    mlp,
    on_backend,
    one_hot,
    real,
    step,
    whole,
)  # fmt: skip

import onward  # noqa: E402
from onward.engines import start  # noqa: E402
from onward.errors import MismatchError, UnsupportedError  # noqa: E402
from onward.frameworks.keras import from_keras  # noqa: E402
from onward.inspect import describe  # noqa: E402
from onward.model.state import states  # noqa: E402

pytestmark = [needs("keras"), needs("tensorflow")]


def compiled(inputs, outputs, optimizer, loss, **options):
    model = keras.Model(inputs, outputs)
    model.compile(optimizer, loss, **options)
    return model


@pytest.fixture(autouse=True)
def _seed():
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)


# ---- whole models ----------------------------------------------------------------------------------------------------


def test_a_classifier_goes_on_and_keeps_names_shapes_and_bytes():
    run = mlp(
        keras.optimizers.AdamW(1e-2, epsilon=1e-3), "sparse_categorical_crossentropy", target=whole(3), last="softmax"
    )
    training = from_keras(run.model, probe=False)
    for variable in run.model.trainable_variables:
        stored = training.initializer(variable.path).const_value.numpy()
        assert stored.tobytes() == variable.numpy().tobytes() and stored.shape == tuple(variable.shape)
    assert onward.check(goes_on(run)) == []


def test_the_original_is_not_changed_by_trying_it():
    run = mlp(keras.optimizers.Adam(1e-2))
    step(run.model, next(run.batches))
    variables = [*run.model.variables, *run.model.optimizer.variables]
    before = [variable.numpy().copy() for variable in variables]
    from_keras(run.model)
    assert all(np.array_equal(a, v.numpy()) for a, v in zip(before, variables, strict=True))


def cnn():
    inputs = layers.Input((12, 12, 3))
    x = layers.Conv2D(6, 3, padding="same", use_bias=False)(inputs)
    x = layers.BatchNormalization()(x)
    x = shortcut = layers.MaxPooling2D()(layers.ReLU()(x))
    x = layers.Conv2D(6, 3, padding="same", activation="gelu")(x)
    x = layers.Add()([x, shortcut])
    x = layers.SeparableConv2D(8, 3, strides=2, padding="same")(x)
    x = layers.Dropout(0.0)(layers.BatchNormalization(momentum=0.9, scale=False)(x))
    x = layers.DepthwiseConv2D(3, padding="same", depth_multiplier=2)(x)
    x = layers.Conv2DTranspose(4, 3, strides=2, padding="same")(layers.GroupNormalization(4)(x))
    x = layers.Dense(5)(layers.Flatten()(layers.AveragePooling2D(2)(x)))
    rate = keras.optimizers.schedules.ExponentialDecay(0.05, 5, 0.8)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = compiled(inputs, x, keras.optimizers.SGD(rate, momentum=0.9, nesterov=True), loss)
    return Run(model, batches(real(12, 12, 3), whole(5)))


def test_a_convolutional_network_with_batch_normalization():
    run = cnn()
    training = goes_on(run)
    state = {v.path: v.numpy() for v in run.model.non_trainable_variables}
    assert "batch_normalization/moving_mean" in state
    assert "batch_normalization/moving_mean" in training.step().update


def test_transposes_between_layers_of_one_kind_cancel():
    inputs = layers.Input((8, 8, 2))
    x = layers.MaxPooling2D()(layers.BatchNormalization()(layers.Conv2D(3, 3, activation="relu")(inputs)))
    model = compiled(inputs, layers.Flatten()(layers.Conv2D(2, 2)(x)), "sgd", "mse")
    training = from_keras(model, probe=False)
    moved = [node for node in training.graph if node.op_type == "Transpose" and len(node.attributes["perm"].value) == 4]
    kernels = [node for node in moved if node.inputs[0].is_initializer()]
    assert (len(moved), len(kernels)) == (4, 2)  # in and out, and the kernels


@pytest.mark.slow("Bidirectional", "GRU")
@pytest.mark.parametrize(
    "recurrent",
    [
        pytest.param(lambda: [layers.LSTM(5, return_sequences=True), layers.LSTM(4)], marks=pytest.mark.slow),
        lambda: [layers.GRU(5, return_sequences=True), layers.GRU(4, reset_after=False)],
        lambda: [layers.SimpleRNN(5, return_sequences=True, go_backwards=True), layers.SimpleRNN(4, activation="relu")],
        lambda: [
            layers.Bidirectional(layers.LSTM(5, return_sequences=True)),
            layers.Bidirectional(layers.GRU(4), merge_mode="sum"),
        ],
    ],
    ids=["LSTM", "GRU", "SimpleRNN", "Bidirectional"],
)
def test_recurrent_layers(recurrent):
    inputs = x = layers.Input((7, 3))
    for layer in recurrent():
        x = layer(x)
    optimizer = keras.optimizers.Adam(1e-2, epsilon=1e-3, clipnorm=0.5)
    model = compiled(inputs, layers.Dense(1, "sigmoid")(x), optimizer, "binary_crossentropy")
    goes_on(Run(model, batches(real(7, 3), binary(1))))


def encoder(optimizer, causal=False):
    tokens = layers.Input((6,), dtype="int32")
    x = layers.Embedding(20, 8)(tokens)
    attention = layers.MultiHeadAttention(2, 4, dropout=0.0)
    x = layers.LayerNormalization()(x + attention(x, x, use_causal_mask=causal))
    hidden = layers.Dense(8)(layers.Dense(16, activation="gelu")(x))
    x = layers.LayerNormalization(epsilon=1e-5)(layers.Add()([x, hidden]))
    x = layers.Dense(4)(layers.GlobalAveragePooling1D()(x))
    model = compiled(tokens, x, optimizer, keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1))
    return Run(model, batches(lambda rng, n: rng.integers(0, 20, (n, 6)).astype(np.int32), one_hot(4)))


@pytest.mark.slow("True")
@pytest.mark.parametrize("causal", [False, True])
def test_a_transformer(causal):
    goes_on(encoder(keras.optimizers.SGD(0.05, momentum=0.9), causal))


@pytest.mark.slow
def test_embeddings_on_tensorflow_are_exact_or_refused():
    """There Keras squares the gradients of a token that occurs twice before it adds them up."""
    run = encoder(keras.optimizers.Adam(1e-2))
    with pytest.raises(UnsupportedError, match="token by token"):
        from_keras(run.model)
    step(run.model, next(run.batches))
    training = from_keras(run.model, approx=True)
    agree(training, run.model, run.batches, steps=1)  # before the first update nothing can differ
    with pytest.raises(AssertionError):
        agree(training, run.model, run.batches, steps=5)


@pytest.mark.slow
def test_layers_of_one_and_three_dimensions():
    inputs = layers.Input((12, 3))
    x = layers.Conv1D(4, 3, padding="causal", dilation_rate=2)(layers.ZeroPadding1D(2)(inputs))
    x = layers.SpatialDropout1D(0.0)(layers.LayerNormalization()(x))
    x = layers.UpSampling1D(2)(layers.Cropping1D((1, 2))(x))
    x = layers.AveragePooling1D(2)(layers.Conv1D(4, 3, strides=2)(x))
    x = layers.TimeDistributed(layers.Dense(3))(layers.PReLU()(x))
    x = layers.RepeatVector(2)(layers.Reshape((-1,))(layers.Permute((2, 1))(x)))
    x = layers.RMSNormalization()(layers.GlobalMaxPooling1D()(layers.UnitNormalization()(x)))
    model = compiled(inputs, layers.Dense(2)(x), keras.optimizers.RMSprop(1e-2, momentum=0.9, centered=True), "mse")
    goes_on(Run(model, batches(real(12, 3), real(2))))

    inputs = layers.Input((6, 6, 6, 2))
    x = layers.Conv3D(3, 3, activation="silu")(layers.Rescaling(0.5, offset=0.1)(inputs))
    x = layers.GlobalAveragePooling3D()(layers.MaxPooling3D(2)(layers.BatchNormalization()(x)))
    model = compiled(inputs, layers.Dense(1)(x), keras.optimizers.Adagrad(1e-2, 1e-4), "huber")
    goes_on(Run(model, batches(real(6, 6, 6, 2), real(1))))


ACTIVATIONS = [
    "relu", "leaky_relu", "relu6", "elu", "selu", "celu", "softplus", "softsign", "soft_shrink", "hard_shrink",
    "tanh_shrink", "silu", "squareplus", "gelu", "tanh", "hard_tanh", "sigmoid", "log_sigmoid", "exponential",
    "hard_sigmoid", "hard_silu", "mish", "softmax", "log_softmax", "linear",
]  # fmt: skip


def test_all_activations():
    inputs = layers.Input((5,))
    x = layers.Concatenate()([layers.Dense(3, activation=name)(inputs) for name in [*ACTIVATIONS, keras.ops.gelu]])
    model = compiled(inputs, layers.Dense(2)(x), keras.optimizers.SGD(1e-3), "mse")
    goes_on(Run(model, batches(real(5), real(2))))


# ---- what is trained -------------------------------------------------------------------------------------------------


def test_frozen_shared_regularized_nested_and_several_outputs():
    a, b = layers.Input((4,), name="a"), layers.Input((4,), name="b")
    shared = layers.Dense(6, "tanh", kernel_regularizer=keras.regularizers.L1L2(0.01, 0.02), name="shared")
    u, v = shared(a), shared(b)
    frozen = layers.Dense(5, "selu", trainable=False, name="frozen")
    still = layers.BatchNormalization(trainable=False, name="still")
    x = still(frozen(layers.Concatenate()([u, v, layers.Multiply()([u, v])])))
    x = keras.Sequential([layers.Input((5,)), layers.Dense(3), layers.BatchNormalization()], name="inner")(x)
    outputs = [layers.Dense(3, "softmax", name="label")(x), layers.Dense(2, name="value")(x)]
    optimizer = keras.optimizers.AdamW(1e-2, weight_decay=0.2)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    losses = ["sparse_categorical_crossentropy", keras.losses.MeanSquaredError(reduction="sum")]
    model = compiled([a, b], outputs, optimizer, losses, loss_weights=[0.5, 2.0])
    run = Run(model, batches([real(4), real(4)], [whole(3), real(2)]))
    training = goes_on(run)
    weights = {weight.name: weight.role for weight in describe(training).weights}
    assert weights["shared/kernel"] == "trained" and weights["frozen/kernel"] == "frozen"
    assert "still/moving_mean" not in training.step().update
    assert sum(name.endswith("bias") for name in describe(training).steps[0].groups[1].parameters) > 0
    assert all(not name.endswith("bias") for name in describe(training).steps[0].groups[0].parameters)


def test_layers_that_are_called_as_in_inference():
    """Keras 3 puts the mode of the whole model in the place of `training=False`, and so their statistics follow."""
    body = keras.Sequential(
        [layers.Input((4,)), layers.Dense(6), layers.BatchNormalization(name="inside")], name="body"
    )
    inputs = layers.Input((4,))
    x = layers.BatchNormalization(name="beside")(body(inputs, training=False), training=False)
    model = compiled(inputs, layers.Dense(2)(x), keras.optimizers.SGD(0.05), "mse")
    training = goes_on(Run(model, batches(real(4), real(2))))
    assert {"beside/moving_mean", "body/inside/moving_mean"} <= set(training.step().update)


def test_dropout_is_carried():
    inputs = layers.Input((4,))
    model = compiled(inputs, layers.Dense(2)(layers.Dropout(0.4)(layers.Dense(8)(inputs))), "sgd", "mse")
    training = from_keras(model)  # tried without it
    assert [node.op_type for node in training.graph].count("Dropout") == 1
    assert "rng" in {state.role for state in states(training)}


@pytest.mark.parametrize(("name", "bound"), [("relu6", 0.0), ("relu6", 6.0), ("hard_sigmoid", -3.0)])
def test_slopes_at_a_bound(name, bound):
    """Both frameworks say 0 there, where channels are that are dead after a normalization."""
    inputs = layers.Input((3,))
    hidden = layers.Dense(4, kernel_initializer="zeros", bias_initializer=keras.initializers.Constant(bound))
    model = compiled(inputs, layers.Dense(2)(layers.Activation(name)(hidden(inputs))), "sgd", "mse")
    with start(from_keras(model)) as engine:
        batch = [np.ones((2, 3), np.float32), np.ones((2, 2), np.float32)]
        found = engine.gradients(dict(zip(engine.inputs, batch, strict=True)))
    assert (found[hidden.bias.path] == 0).all() and np.abs(found[hidden.kernel.path]).max() == 0


@pytest.mark.slow
def test_what_rounding_decides_is_not_compared():
    """The gradient of a bias before a normalization is rounding alone, of which RMSprop makes real steps."""
    inputs = layers.Input((4,))
    x = layers.BatchNormalization()(layers.Dense(6)(inputs))
    model = compiled(inputs, layers.Dense(2)(x), keras.optimizers.RMSprop(1e-2, momentum=0.9), "mse")
    goes_on(Run(model, batches(real(4), real(2))))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "optimizer", "settings"), [("MobileNetV3Small", "sgd", {}), ("MobileNet", "adam", {"alpha": 0.25})]
)
def test_a_network_that_comes_with_keras(name, optimizer, settings):
    """Keras itself is off by up to 1 % from float64: rounding switches units of a ReLU, eight samples to a batch."""
    keras.utils.set_random_seed(1)
    model = getattr(keras.applications, name)(weights=None, classes=5, input_shape=(32, 32, 3), **settings)
    model.compile(optimizer, "sparse_categorical_crossentropy")
    training = from_keras(model)
    assert {v.path for v in model.trainable_variables} <= set(training.step().update)


# ---- refusals --------------------------------------------------------------------------------------------------------


@keras.saving.register_keras_serializable("tests")
class Gated(layers.Layer):
    """With weights, a layer and a constant of its own; in training it may compute something else, or draw."""

    def __init__(self, units, factor=1.0, rate=0.0, **options):
        super().__init__(**options)
        self.units, self.factor, self.rate = units, factor, rate

    def build(self, shape):
        self.gate = self.add_weight(shape=(shape[-1], self.units), name="gate")
        self.size = self.add_weight(shape=(self.units,), name="size", trainable=False, initializer="ones")
        self.inner = layers.Dense(self.units)
        self.inner.build(shape)
        if self.rate:
            self.drop = layers.Dropout(self.rate)

    def call(self, x, training=False):
        gated = keras.ops.sigmoid(x @ self.gate) * keras.ops.tanh(self.inner(x)) * self.size
        gated = gated * self.factor if training else gated
        gated = self.drop(gated) if self.rate else gated
        return gated + keras.ops.logsumexp(gated, -1, keepdims=True)

    def get_config(self):
        return {**super().get_config(), "units": self.units, "factor": self.factor, "rate": self.rate}


def test_layers_of_ones_own_are_traced():
    inputs = layers.Input((6,))
    x = Gated(5, name="own")(layers.Dense(8, activation="relu")(inputs))
    x = layers.Lambda(lambda x: keras.ops.softplus(x) * 2, name="anything")(x)
    model = compiled(inputs, layers.Dense(3)(x), keras.optimizers.Adam(1e-2, epsilon=1e-3), "mse")
    training = goes_on(Run(model, batches(real(6), real(3))))
    assert {"own/gate", "own/dense_1/kernel"} <= set(training.step().update)
    assert "own/size" not in training.step().update
    assert onward.check(training) == []


class Partly(layers.Layer):
    """Passes a gradient to its input, and none to its weight."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), name="scale")

    def call(self, x):
        return keras.ops.stop_gradient(x * self.scale) * x + x


def test_gradients_that_a_layer_stops():
    inputs = layers.Input((4,))
    model = compiled(inputs, layers.Dense(2)(Partly()(layers.Dense(4)(inputs))), "sgd", "mse")
    training = goes_on(Run(model, batches(real(4), real(2))))
    assert [name for _, name, _ in training.functions if name == "StopGradient"]


def test_what_a_layer_computes_otherwise_in_training():
    inputs = layers.Input((6,))
    model = compiled(inputs, Gated(3, factor=2.0, name="own")(inputs), "sgd", "mse")
    training = goes_on(Run(model, batches(real(6), real(3))), steps=2)
    x, target = next(batches(real(6), real(3)))
    with start(from_keras(model)) as engine:
        results = engine.evaluate(dict(zip(engine.inputs, (x, target), strict=True)))
    np.testing.assert_allclose(results["own"], model(x, training=False), rtol=1e-5, atol=1e-6)
    assert onward.check(training) == []


def test_a_trial_changes_nothing():
    class Times(layers.Layer):
        def __init__(self, factor, **options):
            super().__init__(**options)
            self.factor = factor

        def call(self, x):
            return x * self.factor()

    inputs = layers.Input((6,))
    model = compiled(inputs, layers.Dense(3)(Times(lambda: 2.0)(inputs)), "adam", "mse")
    step(model, next(batches(real(6), real(3))))
    before = [np.array(v) for v in (*model.variables, *model.optimizer.variables)]
    assert from_keras(model).steps
    after = [np.array(v) for v in (*model.variables, *model.optimizer.variables)]
    assert all(map(np.array_equal, before, after))


def test_all_that_cannot_be_carried_is_told_at_once():
    tokens = layers.Input((4,), dtype="int32")
    x = layers.Embedding(7, 3, name="table")(tokens)
    x = layers.Lambda(lambda x: keras.ops.svd(x)[0], name="anything")(x)
    x = Gated(3, rate=0.5, name="own")(layers.LSTM(3, name="drops")(x))
    x = layers.Dense(2, kernel_constraint=keras.constraints.NonNeg(), name="bound")(x)
    model = compiled(tokens, x, keras.optimizers.Ftrl(0.1), lambda t, p: keras.ops.svd(t - p)[1][0])
    with pytest.raises(UnsupportedError) as caught:
        from_keras(model)
    told = ("anything", "bound/kernel", "loss")
    assert [name for name in told if name not in str(caught.value)] == []
    assert caught.value.hint


def test_what_is_no_compiled_graph_of_layers_is_refused():
    inputs = layers.Input((3,))
    with pytest.raises(UnsupportedError, match="not a compiled"):
        from_keras(keras.Model(inputs, layers.Dense(1)(inputs)))

    class Own(keras.Model):
        def call(self, x):
            return x

    model = Own()
    model.compile("sgd", "mse")
    with pytest.raises(UnsupportedError, match="Python code of its own"):
        from_keras(model)


def test_trying_finds_what_was_read_wrongly(monkeypatch):
    from onward.recipe.spec import Spec
    from onward.vocabulary.rows import KerasRow

    run = mlp(keras.optimizers.Adam(1e-2, epsilon=1e-3))
    monkeypatch.setattr(
        KerasRow, "read", lambda row, config, lr: Spec("adam", {"lr": lr, "beta1": 0.8, "variant": "keras"})
    )
    with pytest.raises(MismatchError, match="after step"):
        from_keras(run.model)


# ---- another backend -------------------------------------------------------------------------------------------------

ON_JAX = """
import keras
from keras_runs import Run, batches, goes_on, layers, one_hot, whole
assert keras.backend.backend() == "jax"
import numpy as np
tokens = layers.Input((6,), dtype="int32")
x = layers.BatchNormalization()(layers.Conv1D(4, 3)(layers.Embedding(20, 8)(tokens)))
x = layers.Dense(3, "softmax")(layers.LSTM(4)(x))
model = keras.Model(tokens, x)
model.compile(keras.optimizers.Adam(1e-2, epsilon=1e-3), "sparse_categorical_crossentropy")
draw = lambda rng, n: rng.integers(0, 20, (n, 6)).astype(np.int32)
goes_on(Run(model, batches(draw, whole(3))))
import onward
given = draw(np.random.default_rng(0), 5)
np.testing.assert_allclose(onward.to_keras(onward.from_keras(model)).predict(given), model.predict(given), rtol=1e-4)
"""


RANDOM_ON_JAX = """
import keras, numpy as np, onward
from onward.errors import UnsupportedError
from keras_runs import layers
augment = [layers.RandomFlip(), layers.RandomRotation(0.1), layers.RandomZoom(0.2, 0.2), layers.GaussianNoise(0.1)]
drop = lambda seed: layers.Lambda(lambda x: keras.random.dropout(x, 0.5, seed=seed))
for seed in (keras.random.SeedGenerator(0), 7):
    model = keras.Sequential([keras.Input((6, 6, 2)), *augment, layers.Flatten(), drop(seed), layers.Dense(2)])
    model.compile("sgd", "mse")
    try:
        kinds = {node.op_type for node in onward.from_keras(model).graph}
        assert seed != 7 and {"Dropout", "RandomUniformLike", "RandomNormalLike"} <= kinds, kinds
    except UnsupportedError as error:
        assert seed == 7 and "with a seed of its own" in str(error), error
"""


@pytest.mark.slow
@needs("jax")
@pytest.mark.parametrize("code", [ON_JAX, RANDOM_ON_JAX], ids=["layers", "random"])
def test_the_jax_backend(code):
    on_backend("jax", "-c", code)
