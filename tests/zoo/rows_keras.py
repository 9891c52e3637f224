"""Models of Keras as tutorials and keras.applications have them."""

import keras
import numpy as np
from keras import layers, ops
from side_keras import Objects

from zoo import Case

RNG = np.random.default_rng


def images(size=8, channels=3, rows=8):
    return RNG(0).random((rows, size, size, channels), np.float32)


def floats(*shape):
    return RNG(0).normal(size=shape).astype(np.float32)


def tokens(*shape, below=20):
    return RNG(0).integers(1, below, shape).astype(np.int32)


def labels(classes=4, rows=8):
    return RNG(1).integers(0, classes, rows)


CROSS_ENTROPY = "sparse_categorical_crossentropy"


def compiled(model, inputs, targets, loss=CROSS_ENTROPY, optimizer=None, **options):
    model.compile(optimizer or keras.optimizers.SGD(0.05, momentum=0.9), loss=loss)
    return Objects(model, inputs, targets, options)


def classifier(inputs, *stack, classes=4, **more):
    """Return a sequential classifier with a softmax."""
    net = keras.Sequential([keras.Input(inputs.shape[1:], dtype=str(inputs.dtype)), *stack])
    net.add(layers.Dense(classes, activation="softmax"))
    return compiled(net, inputs, labels(classes, len(inputs)), **more)


# ---- layers ----------------------------------------------------------------------------------------------------------


def of_images(*stack, **more):
    return lambda: classifier(images(), *[make() for make in stack], layers.Flatten(), **more)


def of_vectors(*stack, **more):
    return lambda: classifier(floats(8, 12), *[make() for make in stack], **more)


def of_sequences(*stack, **more):
    return lambda: classifier(floats(8, 6, 5), *[make() for make in stack], **more)


LAYERS = {
    "mlp": of_vectors(lambda: layers.Dense(16, "relu"), layers.BatchNormalization, lambda: layers.Dropout(0.5)),
    "adam": of_vectors(lambda: layers.Dense(16, "gelu"), optimizer="adam"),
    "regularizers": of_vectors(lambda: layers.Dense(16, "elu", kernel_regularizer="l2", bias_regularizer="l1")),
    "activity regularizer": of_vectors(lambda: layers.Dense(16, "tanh", activity_regularizer="l2")),
    "normalizations": of_vectors(
        lambda: layers.Dense(16), lambda: layers.LayerNormalization(), lambda: layers.UnitNormalization()
    ),
    "gaussian": of_vectors(
        lambda: layers.GaussianNoise(0.5), lambda: layers.Dense(16), lambda: layers.GaussianDropout(0.2)
    ),
    "lambda": of_vectors(lambda: layers.Lambda(lambda x: ops.log1p(ops.abs(x))), lambda: layers.Dense(8, "relu")),
    "cnn": of_images(
        lambda: layers.Conv2D(6, 3, activation="relu"), lambda: layers.MaxPooling2D(), lambda: layers.Conv2D(8, 3)
    ),
    "separable": of_images(
        lambda: layers.SeparableConv2D(6, 3, padding="same"), lambda: layers.DepthwiseConv2D(3), lambda: layers.ReLU(6)
    ),
    "transposed": of_images(
        lambda: layers.Conv2DTranspose(4, 3, strides=2, padding="same"), lambda: layers.AveragePooling2D(4)
    ),
    "group normalization": of_images(lambda: layers.Conv2D(8, 3), lambda: layers.GroupNormalization(4)),
    "spatial dropout": of_images(lambda: layers.Conv2D(8, 3), lambda: layers.SpatialDropout2D(0.3)),
    "augmentation": of_images(
        lambda: layers.RandomFlip("horizontal"), lambda: layers.RandomRotation(0.1), lambda: layers.RandomZoom(0.2),
        lambda: layers.Conv2D(6, 3),
    ),
    "random crop": of_images(lambda: layers.RandomCrop(6, 6), lambda: layers.Conv2D(6, 3)),
    "contrast": of_images(
        lambda: layers.RandomContrast(0.2), lambda: layers.RandomTranslation(0.1, 0.1), lambda: layers.Conv2D(6, 3)
    ),
    "resizing": of_images(lambda: layers.Resizing(12, 12), lambda: layers.Conv2D(6, 3), lambda: layers.UpSampling2D(2)),
    "channels and padding": of_images(
        lambda: layers.ZeroPadding2D(2), lambda: layers.Conv2D(6, 3), lambda: layers.Cropping2D(1)
    ),
    "conv1d": of_sequences(lambda: layers.Conv1D(8, 3, padding="causal"), lambda: layers.GlobalMaxPooling1D()),
    "lstm": of_sequences(lambda: layers.LSTM(7, return_sequences=True), lambda: layers.LSTM(5)),
    "gru": of_sequences(lambda: layers.GRU(7, return_sequences=True), lambda: layers.GRU(5, reset_after=False)),
    "simple rnn": of_sequences(lambda: layers.SimpleRNN(7)),
    "bidirectional": of_sequences(lambda: layers.Bidirectional(layers.LSTM(5))),
    "lstm with dropout": of_sequences(lambda: layers.LSTM(7, dropout=0.2, recurrent_dropout=0.2)),
    "time distributed": of_sequences(lambda: layers.TimeDistributed(layers.Dense(6)), lambda: layers.Flatten()),
    "rnn of a cell": of_sequences(lambda: layers.RNN(layers.GRUCell(6))),
    "stacked cells": of_sequences(lambda: layers.RNN([layers.LSTMCell(6), layers.LSTMCell(4)])),
    "masking": of_sequences(lambda: layers.Masking(0.0), lambda: layers.LSTM(6)),
}  # fmt: skip


def conv_lstm():
    return classifier(floats(4, 3, 6, 6, 2), layers.ConvLSTM2D(4, 3, padding="same"), layers.Flatten())


def embedding_with_mask():
    inputs = tokens(8, 6)
    inputs[:4, 4:] = 0
    stack = (
        layers.Embedding(20, 6, mask_zero=True),
        layers.LSTM(7, return_sequences=True),
        layers.GlobalAveragePooling1D(),
    )
    return classifier(inputs, *stack)


def dot_normalized():
    a, b = keras.Input((6,)), keras.Input((6,))
    y = layers.Dot(1, normalize=True)([layers.Dense(5)(a), layers.Dense(5)(b)])
    return compiled(keras.Model([a, b], y), [floats(8, 6), floats(8, 6) + 1], floats(8, 1), "mse")


# ---- functional models -----------------------------------------------------------------------------------------------


def several_inputs():
    a, b = keras.Input((6,), name="numbers"), keras.Input((4,), dtype="int32", name="words")
    words = layers.Flatten()(layers.Embedding(20, 3)(b))
    y = layers.Dense(4, activation="softmax")(layers.concatenate([layers.Dense(8, "relu")(a), words]))
    return compiled(keras.Model([a, b], y), [floats(8, 6), tokens(8, 4)], labels())


def several_outputs():
    x = keras.Input((6,))
    h = layers.Dense(8, "relu")(x)
    net = keras.Model(x, {"kind": layers.Dense(4, activation="softmax")(h), "size": layers.Dense(1)(h)})
    loss = {"kind": CROSS_ENTROPY, "size": "mse"}
    return compiled(net, floats(8, 6), {"kind": labels(), "size": floats(8, 1)}, loss)


def functions_of_ops():
    x = keras.Input((6, 4))
    y = ops.where(ops.not_equal(x[:, 1:], 0.0), ops.log1p(ops.abs(x[:, 1:])), 0.0)
    y = ops.concatenate([ops.mean(y, axis=1), ops.max(x, axis=1), x[:, 0]], axis=-1)
    return compiled(keras.Model(x, layers.Dense(4, "softmax")(y)), floats(8, 6, 4), labels())


def siamese():
    embed = keras.Sequential([layers.Dense(8, "relu"), layers.Dense(4)])
    a, b = keras.Input((6,)), keras.Input((6,))
    distance = ops.sqrt(ops.maximum(ops.sum(ops.square(embed(a) - embed(b)), axis=1, keepdims=True), 1e-7))
    net = keras.Model([a, b], layers.Dense(1, "sigmoid")(layers.BatchNormalization()(distance)))

    def contrastive(y_true, y_pred):
        margin = ops.square(ops.maximum(1.0 - y_pred, 0.0))
        return ops.mean((1 - y_true) * ops.square(y_pred) + y_true * margin)

    return compiled(net, [floats(8, 6), floats(8, 6)[::-1].copy()], labels(2).astype("f4")[:, None], contrastive)


def attention():
    x = keras.Input((6, 8))
    y = layers.MultiHeadAttention(2, 4, dropout=0.1)(x, x, use_causal_mask=True)
    y = layers.Attention()([y, x]) + layers.AdditiveAttention()([x, y])
    return compiled(keras.Model(x, layers.Dense(4, "softmax")(y[:, -1])), floats(8, 6, 8), labels())


def seq2seq():
    source, target = keras.Input((5, 4)), keras.Input((6, 3))
    _, h, c = layers.LSTM(7, return_state=True)(source)
    y = layers.Dense(3, "softmax")(layers.LSTM(7, return_sequences=True)(target, initial_state=[h, c]))
    one_hot = np.eye(3, dtype=np.float32)[RNG(2).integers(0, 3, (8, 6))]
    return compiled(
        keras.Model([source, target], y), [floats(8, 5, 4), floats(8, 6, 3)], one_hot, "categorical_crossentropy"
    )


def autoencoder():
    x = keras.Input((8, 8, 3))
    y = layers.MaxPooling2D(2, padding="same")(layers.Conv2D(4, 3, activation="relu", padding="same")(x))
    y = layers.Conv2DTranspose(3, 3, strides=2, activation="sigmoid", padding="same")(y)
    return compiled(keras.Model(x, y), images(), images(), "binary_crossentropy")


# ---- custom layers and subclassed models -----------------------------------------------------------------------------


class TransformerBlock(layers.Layer):
    def __init__(self, width, heads, rate=0.1):
        super().__init__()
        self.attention = layers.MultiHeadAttention(heads, width // heads, dropout=rate)
        self.dense = keras.Sequential([layers.Dense(2 * width, activation="relu"), layers.Dense(width)])
        self.norms = [layers.LayerNormalization(epsilon=1e-6) for _ in range(2)]
        self.dropouts = [layers.Dropout(rate) for _ in range(2)]

    def call(self, x, training=None):
        x = self.norms[0](x + self.dropouts[0](self.attention(x, x), training=training))
        return self.norms[1](x + self.dropouts[1](self.dense(x), training=training))


def transformer():
    x = keras.Input((6, 8))
    y = layers.GlobalAveragePooling1D()(TransformerBlock(8, 2)(x))
    return compiled(keras.Model(x, layers.Dense(4, "softmax")(y)), floats(8, 6, 8), labels())


class Residual(keras.Model):
    def __init__(self):
        super().__init__()
        self.augment = keras.Sequential([layers.RandomFlip(), layers.GaussianNoise(0.1)])
        self.convs = [layers.Conv2D(6, 3, padding="same", use_bias=False) for _ in range(2)]
        self.norms = [layers.BatchNormalization() for _ in range(2)]
        self.head = layers.Dense(4)

    def call(self, x, training=None):
        x = ops.relu(self.norms[0](self.convs[0](self.augment(x, training=training)), training=training))
        x = ops.relu(x + self.norms[1](self.convs[1](x), training=training))
        return self.head(ops.mean(x, axis=(1, 2)))


def residual():
    return compiled(Residual(), images(), labels(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))


class Sampling(layers.Layer):
    def __init__(self):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(3)

    def call(self, inputs):
        mean, log_variance = inputs
        noise = keras.random.normal(ops.shape(mean), seed=self.seeds)
        self.add_loss(-0.01 * ops.mean(1 + log_variance - ops.square(mean) - ops.exp(log_variance)))
        return mean + ops.exp(0.5 * log_variance) * noise


def vae_with_add_loss():
    x = keras.Input((12,))
    h = layers.Dense(8, "relu")(x)
    y = layers.Dense(12)(Sampling()([layers.Dense(2)(h), layers.Dense(2)(h)]))
    return compiled(keras.Model(x, y), floats(8, 12), floats(8, 12), "mse")


class Quantizer(layers.Layer):
    def build(self, shape):
        self.table = self.add_weight(shape=(shape[-1], 10), initializer="random_uniform", name="table")

    def call(self, x):
        flat = ops.reshape(x, (-1, x.shape[-1]))
        distances = ops.sum(flat**2, axis=1, keepdims=True) + ops.sum(self.table**2, axis=0) - 2 * flat @ self.table
        chosen = ops.one_hot(ops.argmin(distances, axis=1), 10)
        result = ops.reshape(chosen @ ops.transpose(self.table), ops.shape(x))
        self.add_loss(0.25 * ops.mean((ops.stop_gradient(result) - x) ** 2))
        self.add_loss(ops.mean((result - ops.stop_gradient(x)) ** 2))
        return x + ops.stop_gradient(result - x)


def vector_quantizer():
    x = keras.Input((6, 5))
    y = layers.Dense(5)(Quantizer()(layers.Dense(4)(x)))
    return compiled(keras.Model(x, y), floats(8, 6, 5), floats(8, 6, 5), "mse")


class Gated(layers.Layer):
    """A layer with a state of its own shape, and a branch for training."""

    def __init__(self, units):
        super().__init__()
        self.units = units

    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1], self.units), initializer="glorot_uniform")
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x, training=False):
        y = ops.tanh(x @ self.w) * self.scale
        return y * 0.5 if training else y


def branch_for_training():
    x = keras.Input((6,))
    return compiled(keras.Model(x, layers.Dense(4, "softmax")(Gated(8)(x))), floats(8, 6), labels())


class OwnStep(keras.Model):
    def __init__(self):
        super().__init__()
        self.net = keras.Sequential([layers.Dense(8, "relu"), layers.Dense(1)])

    def call(self, x):
        return self.net(x)

    def train_step(self, data):
        import tensorflow as tf

        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(self(x, training=True) - y)) + 0.01 * ops.sum(self.net.layers[0].kernel ** 2)
        weights = self.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


def own_step():
    return compiled(OwnStep(), floats(8, 6), floats(8, 1), None, keras.optimizers.Adam(0.01))


class OwnLoss(OwnStep):
    train_step = keras.Model.train_step

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean(ops.abs(y_pred - y)) + ops.sum(self.losses)


def own_loss():
    return compiled(OwnLoss(), floats(8, 6), floats(8, 1), None, keras.optimizers.Adam(0.01))


# ---- keras.applications ----------------------------------------------------------------------------------------------


def application(name, size):
    def build():
        net = getattr(keras.applications, name)(weights=None, input_shape=(size, size, 3), classes=4)
        return compiled(net, images(size, rows=4), labels(rows=4))

    return build


APPLICATIONS = {
    "MobileNet": 32, "MobileNetV2": 32, "MobileNetV3Small": 32, "EfficientNetB0": 32, "EfficientNetV2B0": 32,
    "DenseNet121": 32, "ResNet50": 32, "ResNet50V2": 32, "VGG16": 32, "NASNetMobile": 32, "Xception": 71,
    "InceptionV3": 75, "ConvNeXtTiny": 32,
}  # fmt: skip


def cases(family, builders, quick=()):
    return [Case(family, name.replace("_", " "), "keras", make, quick=name in quick) for name, make in builders.items()]


def named(*functions):
    return {function.__name__: function for function in functions}


CASES = [
    *cases("layers", LAYERS, quick=("mlp",)),
    *cases("layers", named(conv_lstm, embedding_with_mask, dot_normalized)),
    *cases(
        "functional models",
        named(several_inputs, several_outputs, functions_of_ops, siamese, attention, seq2seq, autoencoder),
        quick=("functions_of_ops",),
    ),
    *cases(
        "custom layers and models",
        named(transformer, residual, vae_with_add_loss, vector_quantizer, branch_for_training, own_step, own_loss),
        quick=("residual",),
    ),
    *cases("keras.applications", {name: application(name, size) for name, size in APPLICATIONS.items()}),
]
