"""Sequence models in TensorFlow: transformers, and a tagger with a GRU."""

from __future__ import annotations

import tensorflow as tf

from workloads.architectures import DISTILBERT, GPT, PATCH, TAGGER, VIT, Transformer
from workloads.on_tensorflow.layers import Variables, attend, conv, layer_norm, linear


def gpt(w: Variables, tokens: tf.Tensor) -> tf.Tensor:
    x = _layers(w, GPT, tf.gather(w["tokens.weight"], tokens) + w["positions"], is_causal=True)
    return layer_norm(w, "norm", x) @ w["head.weight"]


def vit(w: Variables, x: tf.Tensor) -> tf.Tensor:
    patches = tf.nn.bias_add(conv(w, "patches", x, PATCH), w["patches.bias"])
    patches = tf.reshape(patches, [x.shape[0], -1, VIT.width])
    class_token = tf.tile(w["class_token"], [x.shape[0], 1, 1])
    x = _layers(w, VIT, tf.concat([class_token, patches], 1) + w["positions"], is_causal=False)
    return linear(w, "head", layer_norm(w, "norm", x)[:, 0])


def _layers(w: Variables, sizes: Transformer, x: tf.Tensor, is_causal: bool) -> tf.Tensor:
    for i in range(sizes.layers):
        at = f"layers.{i}"
        q, k, v = tf.split(linear(w, f"{at}.qkv", layer_norm(w, f"{at}.norm1", x)), 3, axis=-1)
        x = x + linear(w, f"{at}.project", attend(q, k, v, sizes.heads, is_causal))
        x = x + _mlp(w, at, layer_norm(w, f"{at}.norm2", x))
    return x


def _mlp(w: Variables, at: str, x: tf.Tensor) -> tf.Tensor:
    return linear(w, f"{at}.down", tf.nn.gelu(linear(w, f"{at}.up", x)))


def distilbert(w: Variables, tokens: tf.Tensor) -> tf.Tensor:
    x = layer_norm(w, "norm", tf.gather(w["tokens.weight"], tokens) + w["positions"][: DISTILBERT.length])
    for i in range(DISTILBERT.layers):
        at = f"layers.{i}"
        q, k, v = (linear(w, f"{at}.attention.{name}", x) for name in ("query", "key", "value"))
        x = x + linear(w, f"{at}.attention.out", attend(q, k, v, DISTILBERT.heads))
        x = layer_norm(w, f"{at}.norm1", x)
        x = layer_norm(w, f"{at}.norm2", x + _mlp(w, at, x))
    return linear(w, "head", tf.nn.relu(linear(w, "hidden", x[:, 0])))


def tagger(w: Variables, tokens: tf.Tensor) -> tf.Tensor:
    x = tf.gather(w["tokens.weight"], tf.transpose(tokens))
    forward, backward = _gru(w, "l0", x), _gru(w, "l0_reverse", x[::-1])[::-1]
    both = [tf.concat(pair, -1) for pair in zip(forward, backward, strict=True)]
    return linear(w, "head", tf.stack(both, 1))


def _gru(w: Variables, layer: str, x: tf.Tensor) -> list[tf.Tensor]:
    """Return the outputs of an unrolled GRU."""
    hidden, every = tf.zeros([x.shape[1], TAGGER.hidden]), []
    for projected in tf.unstack(x @ w[f"gru.weight_ih_{layer}"] + w[f"gru.bias_ih_{layer}"]):
        recurrent = hidden @ w[f"gru.weight_hh_{layer}"] + w[f"gru.bias_hh_{layer}"]
        (reset, update, new), (reset_, update_, new_) = (tf.split(x, 3, axis=-1) for x in (projected, recurrent))
        new = tf.tanh(new + tf.sigmoid(reset + reset_) * new_)
        hidden = new + tf.sigmoid(update + update_) * (hidden - new)
        every.append(hidden)
    return every


MODELS = {"gpt": gpt, "vit": vit, "distilbert": distilbert, "tagger": tagger}
