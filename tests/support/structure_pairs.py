"""Architectures written twice, in two frameworks, at small sizes and with names that do not fit.

Each function returns two inference models with different weights. Keras and Flax sides are written here from the papers
unless the framework has them.
"""

import functools
import tempfile
from pathlib import Path

import numpy as np

import onward

# ---- graphs ----------------------------------------------------------------------------------------------------------


def of_torch(module, *examples, unfolded=False):
    """Return a module as PyTorch exports it, with drawn weights and statistics."""
    import torch

    torch.manual_seed(3)
    for name, tensor in module.state_dict().items():
        if tensor.is_floating_point() and tensor.ndim < 2:
            tensor.uniform_(0.5, 1.5) if "var" in name else tensor.add_(torch.randn(tensor.shape) * 0.2)
    path = Path(tempfile.mkdtemp()) / "model.onnx"
    batch = tuple({0: torch.export.Dim.DYNAMIC} for _ in examples)
    torch.onnx.export(
        module.eval(), examples, path, dynamo=True, dynamic_shapes=batch, optimize=not unfolded, verbose=False
    )
    return onward.load(path)


def of_keras(model):
    rng = np.random.default_rng(4)
    for weight in model.weights:
        weight.assign(drawn(rng, weight.path, weight.shape))
    model.compile("sgd", "mse")
    return onward.transform.strip(onward.from_keras(model, probe=False, approx=True))


def of_flax(module, *examples):
    import jax
    import optax

    params = module.init(jax.random.key(0), *examples)
    rng = np.random.default_rng(5)
    params = jax.tree_util.tree_map_with_path(lambda path, x: drawn(rng, str(path), x.shape), params)
    inputs = {f"x{i}": example for i, example in enumerate(examples)}

    def predict(params, batch):
        return module.apply(params, *batch.values())

    training = onward.from_jax(predict, params, inputs, loss="mse", optimizer=optax.sgd(0.1), probe=False)
    return onward.transform.strip(training)


def drawn(rng, name, shape):
    if "var" in name:
        return rng.uniform(0.5, 1.5, shape).astype(np.float32)
    scale = 0.2 if len(shape) < 2 else np.sqrt(shape[-1] / np.prod(shape))
    one = "gamma" in name or "scale" in name
    return (one + scale * rng.standard_normal(shape)).astype(np.float32)


def zeros(*shape, integers=False):
    import torch

    return torch.zeros(shape, dtype=torch.long) if integers else torch.zeros(shape)


# ---- recurrent -------------------------------------------------------------------------------------------------------


def lstm_tagger(units=8):
    import keras
    from torch import nn

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.tags = nn.Embedding(20, 8), nn.Linear(2 * units, 5)
            self.reader = nn.LSTM(8, units, batch_first=True, bidirectional=True)

        def forward(self, tokens):
            return self.tags(self.reader(self.words(tokens))[0])

    tokens = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(20, 8)(tokens)
    x = keras.layers.Bidirectional(keras.layers.LSTM(units, return_sequences=True))(x)
    return of_torch(Tagger(), zeros(2, 6, integers=True)), of_keras(keras.Model(tokens, keras.layers.Dense(5)(x)))


# ---- images ----------------------------------------------------------------------------------------------------------


def unet(activation="relu"):
    import keras
    import torch
    from torch import nn

    def conv(inputs, outputs):
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs, eps=1e-3), nn.ReLU())

    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.down1, self.down2, self.middle = conv(3, 8), conv(8, 16), conv(16, 32)
            self.up2, self.up1 = nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)
            self.left2, self.left1, self.head = conv(32, 16), conv(16, 8), nn.Conv2d(8, 2, 1)
            self.pool = nn.MaxPool2d(2)

        def forward(self, image):
            a = self.down1(image)
            b = self.down2(self.pool(a))
            c = self.up2(self.middle(self.pool(b)))
            d = self.up1(self.left2(torch.cat([b, c], 1)))
            return self.head(self.left1(torch.cat([a, d], 1)))

    def block(x, size):
        x = keras.layers.Conv2D(size, 3, padding="same")(x)
        return keras.layers.Activation(activation)(keras.layers.BatchNormalization()(x))

    def up(x, size):
        return keras.layers.Conv2DTranspose(size, 2, 2)(x)

    image = keras.Input((16, 16, 3))
    a = block(image, 8)
    b = block(keras.layers.MaxPooling2D()(a), 16)
    c = up(block(keras.layers.MaxPooling2D()(b), 32), 16)
    d = up(block(keras.layers.Concatenate()([b, c]), 16), 8)
    logits = keras.layers.Conv2D(2, 1)(block(keras.layers.Concatenate()([a, d]), 8))
    return of_torch(UNet(), zeros(2, 3, 16, 16), unfolded=True), of_keras(keras.Model(image, logits))


def cnn():
    """A dense layer after a flattened image, whose inputs are in another order if channels are last."""
    import keras
    from torch import nn

    module = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(4 * 3 * 4, 6),
        nn.Tanh(),
        nn.Linear(6, 2),
    )
    layers = [keras.layers.Conv2D(4, 3, activation="relu"), keras.layers.MaxPooling2D(), keras.layers.Flatten()]
    layers += [keras.layers.Dense(6, "tanh"), keras.layers.Dense(2)]
    return of_torch(module, zeros(2, 3, 8, 10)), of_keras(keras.Sequential([keras.Input((8, 10, 3)), *layers]))


def resnet():
    """ResNet of transformers and of keras.applications, whose convolutions have biases before BatchNormalization."""
    from keras.src.applications import resnet as of_applications
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=64, hidden_sizes=[32, 64], depths=[2, 2], num_labels=5, downsample_in_bottleneck=True,
        layer_type="bottleneck",
    )  # fmt: skip

    def stack(x):
        x = of_applications.stack_residual_blocks_v1(x, 8, 2, stride1=1, name="a")
        return of_applications.stack_residual_blocks_v1(x, 16, 2, name="b")

    model = of_applications.ResNet(
        stack, False, True, input_shape=(32, 32, 3), weights=None, classes=5, classifier_activation=None
    )
    return of_torch(ResNetForImageClassification(config), zeros(2, 3, 32, 32), unfolded=True), of_keras(model)


def mobilenet():
    import keras
    import timm

    module = timm.create_model("mobilenetv2_035", num_classes=5, pad_type="same", bn_eps=1e-3)
    model = keras.applications.MobileNetV2((32, 32, 3), 0.35, weights=None, classes=5, classifier_activation=None)
    return of_torch(module, zeros(2, 3, 32, 32)), of_keras(model)


def efficientnet():
    import keras
    import timm

    module = timm.create_model("tf_efficientnetv2_b0", num_classes=5)
    model = keras.applications.EfficientNetV2B0(
        weights=None, input_shape=(32, 32, 3), classes=5, classifier_activation=None, include_preprocessing=False
    )
    return of_torch(module, zeros(2, 3, 32, 32)), of_keras(model)


def mixer():
    import flax.linen as nn
    import jax.numpy as jnp
    import timm

    module = timm.models.mlp_mixer.MlpMixer(
        img_size=32, patch_size=8, embed_dim=24, num_blocks=2, num_classes=5, mlp_ratio=(0.5, 4.0)
    )

    class Mlp(nn.Module):
        hidden: int

        @nn.compact
        def __call__(self, x):
            return nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(self.hidden)(x), approximate=False))

    class Mixer(nn.Module):
        @nn.compact
        def __call__(self, image):
            norm = functools.partial(nn.LayerNorm, epsilon=1e-6)
            x = nn.Conv(24, (8, 8), (8, 8))(image)
            x = x.reshape(x.shape[0], 16, 24)
            for _ in range(2):
                x = x + Mlp(12)(norm()(x).swapaxes(1, 2)).swapaxes(1, 2)
                x = x + Mlp(96)(norm()(x))
            return nn.Dense(5)(norm()(x).mean(1))

    return of_torch(module, zeros(2, 3, 32, 32)), of_flax(Mixer(), jnp.zeros((2, 32, 32, 3)))


def vit(epsilon=1e-6, depth=2):
    import keras
    import timm

    module = timm.models.vision_transformer.VisionTransformer(
        img_size=16, patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=5
    )

    class Tokens(keras.layers.Layer):
        """A class token before the patches, and positions."""

        def build(self, shape):
            self.first = self.add_weight(shape=(1, 1, shape[-1]), name="first")
            self.positions = self.add_weight(shape=(1, shape[1] + 1, shape[-1]), name="positions")

        def call(self, x):
            first = keras.ops.broadcast_to(self.first, (keras.ops.shape(x)[0], 1, x.shape[-1]))
            return keras.ops.concatenate([first, x], 1) + self.positions

    image = keras.Input((16, 16, 3))
    x = keras.layers.Reshape((4, 24))(keras.layers.Conv2D(24, 8, 8)(image))
    x = Tokens()(x)
    for _ in range(depth):
        y = keras.layers.LayerNormalization(epsilon=epsilon)(x)
        x = x + keras.layers.MultiHeadAttention(3, 8)(y, y)
        y = keras.layers.Dense(96, "gelu")(keras.layers.LayerNormalization(epsilon=epsilon)(x))
        x = x + keras.layers.Dense(24)(y)
    x = keras.layers.LayerNormalization(epsilon=epsilon)(x)
    return of_torch(module, zeros(2, 3, 16, 16)), of_keras(keras.Model(image, keras.layers.Dense(5)(x[:, 0])))


# ---- text ------------------------------------------------------------------------------------------------------------


def bert_config():
    from transformers import BertConfig

    return BertConfig(
        vocab_size=30, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=48,
        max_position_embeddings=6, num_labels=4, type_vocab_size=2,
    )  # fmt: skip


def bert():
    import keras
    from transformers import BertForSequenceClassification

    layers = keras.layers

    class Positions(layers.Layer):
        def build(self, shape):
            self.table = self.add_weight(shape=shape[1:], name="table")

        def call(self, x):
            return x + self.table

    tokens, mask, kinds = (keras.Input((6,), dtype="int32") for _ in range(3))
    norm = functools.partial(layers.LayerNormalization, epsilon=1e-12)
    x = norm()(Positions()(layers.Embedding(30, 24)(tokens) + layers.Embedding(2, 24)(kinds)))
    seen = keras.ops.cast(mask, "bool")[:, None, :] | (keras.ops.ones_like(mask) > 1)[:, :, None]
    for _ in range(2):
        x = norm()(x + layers.MultiHeadAttention(3, 8)(x, x, attention_mask=seen))
        x = norm()(x + layers.Dense(24)(layers.Dense(48, "gelu")(x)))
    logits = layers.Dense(4)(layers.Dense(24, "tanh")(x[:, 0]))
    examples = (zeros(2, 6, integers=True), zeros(2, 6, integers=True) + 1, zeros(2, 6, integers=True))
    return of_torch(BertForSequenceClassification(bert_config()), *examples), of_keras(
        keras.Model([tokens, mask, kinds], logits)
    )


def gpt2(activation="gelu_new"):
    import flax.linen as nn
    import jax.numpy as jnp
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=30, n_positions=8, n_embd=24, n_layer=2, n_head=3, use_cache=False, activation_function=activation
    )

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            size = x.shape[1]
            y = nn.LayerNorm(epsilon=1e-5)(x)
            query, key, value = (nn.DenseGeneral((3, 8))(y) for _ in range(3))
            scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / 8**0.5
            scores = jnp.where(jnp.tril(jnp.ones((size, size), bool)), scores, -1e9)
            mixed = jnp.einsum("bhqk,bkhd->bqhd", nn.softmax(scores), value)
            x = x + nn.DenseGeneral(24, axis=(-2, -1))(mixed)
            return x + nn.Dense(24)(nn.gelu(nn.Dense(96)(nn.LayerNorm(epsilon=1e-5)(x)), approximate=True))

    class Gpt(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            words = nn.Embed(30, 24)
            x = words(tokens) + self.param("positions", nn.initializers.normal(), (8, 24))[: tokens.shape[1]]
            for _ in range(2):
                x = Block()(x)
            return words.attend(nn.LayerNorm(epsilon=1e-5)(x))

    class Logits(GPT2LMHeadModel):
        def forward(self, tokens):
            return super().forward(tokens, return_dict=True).logits

    return of_torch(Logits(config), zeros(2, 8, integers=True)), of_flax(Gpt(), jnp.zeros((2, 8), jnp.int32))


def t5():
    import flax.linen as nn
    import jax.numpy as jnp
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=30, d_model=24, d_kv=8, d_ff=48, num_layers=2, num_heads=3, use_cache=False, dropout_rate=0.0,
        relative_attention_num_buckets=8, relative_attention_max_distance=16, attn_implementation="eager",
    )  # fmt: skip
    length = 6

    def buckets(causal):
        """Return the bucket of each pair of positions."""
        apart = np.arange(length)[None] - np.arange(length)[:, None]
        count = 8 if causal else 4
        first = 0 if causal else (apart > 0) * count
        apart = np.maximum(-apart, 0) if causal else np.abs(apart)
        exact = count // 2
        far = exact + np.log(np.maximum(apart, 1) / exact) / np.log(16 / exact) * (count - exact)
        return first + np.where(apart < exact, apart, np.minimum(far, count - 1)).astype(int)

    class Norm(nn.Module):
        @nn.compact
        def __call__(self, x):
            scale = self.param("scale", nn.initializers.ones, x.shape[-1:])
            return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale

    def attend(x, memory, bias):
        dense = functools.partial(nn.DenseGeneral, use_bias=False)
        query, key, value = dense((3, 8))(x), dense((3, 8))(memory), dense((3, 8))(memory)
        weights = nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", query, key) + bias)
        return dense(24, axis=(-2, -1))(jnp.einsum("bhqk,bkhd->bqhd", weights, value))

    def feed(x):
        return nn.Dense(24, use_bias=False)(nn.relu(nn.Dense(48, use_bias=False)(x)))

    class T5(nn.Module):
        @nn.compact
        def __call__(self, tokens, targets):
            words = nn.Embed(30, 24)
            x, bias = words(tokens), nn.Embed(8, 3)(buckets(False)).transpose(2, 0, 1)
            for _ in range(2):
                y = Norm()(x)
                x = x + attend(y, y, bias)
                x = x + feed(Norm()(x))
            memory = Norm()(x)
            x, bias = words(targets), nn.Embed(8, 3)(buckets(True)).transpose(2, 0, 1)
            bias = bias + jnp.where(np.tril(np.ones((length, length), bool)), 0, -1e9)
            for _ in range(2):
                y = Norm()(x)
                x = x + attend(y, y, bias)
                x = x + attend(Norm()(x), memory, 0.0)
                x = x + feed(Norm()(x))
            return words.attend(Norm()(x) * 24**-0.5)

    class Logits(T5ForConditionalGeneration):
        def forward(self, tokens, targets):
            return super().forward(input_ids=tokens, decoder_input_ids=targets, return_dict=True).logits

    tokens = jnp.zeros((2, length), jnp.int32)
    examples = (zeros(2, length, integers=True), zeros(2, length, integers=True))
    return of_torch(Logits(config), *examples, unfolded=True), of_flax(T5(), tokens, tokens)
