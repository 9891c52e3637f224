"""Sequence models in JAX: transformers, and a tagger with a GRU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from workloads.architectures import DISTILBERT, GPT, PATCH, TAGGER, VIT, Transformer
from workloads.on_jax.layers import Arrays, attend, conv, layer_norm, linear


def gpt(w: Arrays, stats: Arrays, tokens: jax.Array) -> tuple[jax.Array, Arrays]:
    x = _layers(w, GPT, w["tokens.weight"][tokens] + w["positions"], is_causal=True)
    return layer_norm(w, "norm", x) @ w["head.weight"], stats


def vit(w: Arrays, stats: Arrays, x: jax.Array) -> tuple[jax.Array, Arrays]:
    patches = conv(w, "patches", x, PATCH) + w["patches.bias"]
    patches = patches.reshape(x.shape[0], -1, VIT.width)
    class_token = jnp.broadcast_to(w["class_token"], (x.shape[0], 1, VIT.width))
    x = _layers(w, VIT, jnp.concatenate([class_token, patches], 1) + w["positions"], is_causal=False)
    return linear(w, "head", layer_norm(w, "norm", x)[:, 0]), stats


def _layers(w: Arrays, sizes: Transformer, x: jax.Array, is_causal: bool) -> jax.Array:
    for i in range(sizes.layers):
        at = f"layers.{i}"
        q, k, v = jnp.split(linear(w, f"{at}.qkv", layer_norm(w, f"{at}.norm1", x)), 3, -1)
        x = x + linear(w, f"{at}.project", attend(q, k, v, sizes.heads, is_causal))
        x = x + _mlp(w, at, layer_norm(w, f"{at}.norm2", x))
    return x


def _mlp(w: Arrays, at: str, x: jax.Array) -> jax.Array:
    return linear(w, f"{at}.down", jax.nn.gelu(linear(w, f"{at}.up", x), approximate=False))


def distilbert(w: Arrays, stats: Arrays, tokens: jax.Array) -> tuple[jax.Array, Arrays]:
    x = layer_norm(w, "norm", w["tokens.weight"][tokens] + w["positions"][: DISTILBERT.length])
    for i in range(DISTILBERT.layers):
        at = f"layers.{i}"
        q, k, v = (linear(w, f"{at}.attention.{name}", x) for name in ("query", "key", "value"))
        x = x + linear(w, f"{at}.attention.out", attend(q, k, v, DISTILBERT.heads))
        x = layer_norm(w, f"{at}.norm1", x)
        x = layer_norm(w, f"{at}.norm2", x + _mlp(w, at, x))
    return linear(w, "head", jax.nn.relu(linear(w, "hidden", x[:, 0]))), stats


def tagger(w: Arrays, stats: Arrays, tokens: jax.Array) -> tuple[jax.Array, Arrays]:
    x = w["tokens.weight"][tokens].swapaxes(0, 1)
    both = jnp.concatenate([_gru(w, "l0", x), _gru(w, "l0_reverse", x, reverse=True)], -1)
    return linear(w, "head", both.swapaxes(0, 1)), stats


def _gru(w: Arrays, layer: str, x: jax.Array, reverse: bool = False) -> jax.Array:
    projected = x @ w[f"gru.weight_ih_{layer}"] + w[f"gru.bias_ih_{layer}"]

    def step(hidden: jax.Array, projected: jax.Array) -> tuple[jax.Array, jax.Array]:
        recurrent = hidden @ w[f"gru.weight_hh_{layer}"] + w[f"gru.bias_hh_{layer}"]
        (reset, update, new), (reset_, update_, new_) = (jnp.split(x, 3, -1) for x in (projected, recurrent))
        new = jnp.tanh(new + jax.nn.sigmoid(reset + reset_) * new_)
        hidden = new + jax.nn.sigmoid(update + update_) * (hidden - new)
        return hidden, hidden

    return lax.scan(step, jnp.zeros((x.shape[1], TAGGER.hidden)), projected, reverse=reverse)[1]


MODELS = {"gpt": gpt, "vit": vit, "distilbert": distilbert, "tagger": tagger}
