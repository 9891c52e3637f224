"""Networks of JAX as tutorials write them: plain functions, Flax linen, Flax NNX, Equinox and Haiku."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from side_jax import NNX, Objects

from zoo import Case

CASES = []


def row(family, *needs, quick=False):
    """Add the function below as a row."""

    def add(build):
        name = build.__name__.removeprefix(f"{family}_")
        CASES.append(Case(family, name, "jax", build, needs, quick=quick))
        return build

    return add


def normal(*shape, scale=1.0):
    return (np.random.randn(*shape) * scale).astype(np.float32)


def weight(*shape):
    """Return a matrix with outputs on its last axis, scaled by its inputs."""
    return jnp.asarray(normal(*shape, scale=1 / np.sqrt(np.prod(shape[:-1]))))


def integers(high, *shape):
    return np.random.randint(0, high, shape).astype(np.int32)


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def squared(x, y):
    return jnp.mean((x - y) ** 2)


def labeled(*shape, classes=4):
    return {"x": normal(*shape), "y": integers(classes, shape[0])}


def tokens(batch=4, length=6, words=11):
    return {"ids": integers(words, batch, length), "after": integers(words, batch, length)}


adam = functools.partial(optax.adam, eps=1e-3)


# ---- plain functions -------------------------------------------------------------------------------------------------


def dense(p, x):
    return x @ p["w"] + p["b"]


def dense_of(n, m):
    return {"w": weight(n, m), "b": jnp.zeros(m)}


def norm(p, x, eps=1e-6):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(x.var(-1, keepdims=True) + eps) * p["scale"] + p["bias"]


def norm_of(n):
    return {"scale": jnp.ones(n), "bias": jnp.zeros(n)}


def rms(scale, x):
    return x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * scale


def attend(q, k, v, heads, bias=0.0, mask=None):
    split = lambda t: t.reshape(*t.shape[:2], heads, -1)
    q, k, v = split(q), split(k), split(v)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1]) + bias
    if mask is not None:
        scores = jnp.where(mask, scores, -1e9)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    return mixed.reshape(*mixed.shape[:2], -1)


def causal(length):
    return jnp.tril(jnp.ones((length, length), bool))


@row("plain", quick=True)
def plain_mlp():
    params = {"fc1": dense_of(12, 16), "fc2": dense_of(16, 4)}
    loss = lambda p, b: cross_entropy(dense(p["fc2"], jax.nn.relu(dense(p["fc1"], b["x"]))), b["y"])
    return Objects(loss, params, labeled(8, 12), optax.sgd(0.1, momentum=0.9, nesterov=True))


@row("plain")
def plain_cnn():
    params = {"conv1": weight(3, 3, 1, 8), "conv2": weight(3, 3, 8, 8), "out": dense_of(8 * 4, 4)}

    def loss(p, b):
        x = b["x"]
        for name in ("conv1", "conv2"):
            x = jax.nn.relu(
                lax.conv_general_dilated(x, p[name], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            )
            x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return cross_entropy(dense(p["out"], x.reshape(x.shape[0], -1)), b["y"])

    return Objects(loss, params, labeled(4, 8, 8, 1), optax.rmsprop(1e-3, eps=1e-3))


def block_of(width):
    return {
        "ln1": norm_of(width), "qkv": weight(width, 3 * width), "proj": weight(width, width),
        "ln2": norm_of(width), "fc1": dense_of(width, 2 * width), "fc2": dense_of(2 * width, width),
    }  # fmt: skip


def block(p, x, heads=2, mask=None):
    x = x + attend(*jnp.split(norm(p["ln1"], x) @ p["qkv"], 3, -1), heads, mask=mask) @ p["proj"]
    return x + dense(p["fc2"], jax.nn.gelu(dense(p["fc1"], norm(p["ln2"], x))))


def gpt_of(layers=2, width=8):
    return {
        "wte": weight(11, width), "wpe": weight(6, width), "blocks": [block_of(width) for _ in range(layers)],
        "ln": norm_of(width),
    }  # fmt: skip


@row("plain")
def plain_gpt():
    def loss(p, b):
        x = p["wte"][b["ids"]] + p["wpe"]
        for layer in p["blocks"]:
            x = block(layer, x, mask=causal(6))
        return cross_entropy(norm(p["ln"], x) @ p["wte"].T, b["after"])

    tx = optax.chain(
        optax.clip_by_global_norm(0.5), optax.adamw(optax.warmup_cosine_decay_schedule(0, 1e-2, 2, 9), eps=1e-3)
    )
    return Objects(loss, gpt_of(), tokens(), tx)


@row("plain")
def plain_gpt_scanned_remat():
    params = gpt_of(3)
    params["blocks"] = jax.tree.map(lambda *xs: jnp.stack(xs), *params["blocks"])

    def loss(p, b):
        layer = jax.checkpoint(lambda x, q: (block(q, x, mask=causal(6)), None))
        x, _ = lax.scan(layer, p["wte"][b["ids"]] + p["wpe"], p["blocks"])
        return cross_entropy(norm(p["ln"], x) @ p["wte"].T, b["after"])

    return Objects(loss, params, tokens(), optax.lion(1e-3))


@row("plain")
def plain_t5():
    width, heads = 8, 2
    layer = lambda: {
        "n1": jnp.ones(width), "q": weight(width, width), "kv": weight(width, 2 * width), "o": weight(width, width),
        "n2": jnp.ones(width), "wi": weight(width, 2, 16), "wo": weight(16, width),
        "nx": jnp.ones(width), "xq": weight(width, width), "xkv": weight(width, 2 * width), "xo": weight(width, width),
    }  # fmt: skip
    params = {"embed": weight(11, width), "bias": weight(32, heads), "encoder": [layer()], "decoder": [layer()]}

    def bias(table, length):
        distance = jnp.arange(length)[:, None] - jnp.arange(length)
        small = jnp.abs(distance)
        far = 8 + (jnp.log(jnp.maximum(small, 1) / 8) / np.log(16) * 8).astype(jnp.int32)
        bucket = jnp.where(distance < 0, 16, 0) + jnp.where(small < 8, small, jnp.minimum(far, 15))
        return table[bucket].transpose(2, 0, 1)

    def run(layers, x, position, mask=None, memory=None):
        for p in layers:
            y = rms(p["n1"], x)
            x = x + attend(y @ p["q"], *jnp.split(y @ p["kv"], 2, -1), heads, position, mask) @ p["o"]
            if memory is not None:
                x = x + attend(rms(p["nx"], x) @ p["xq"], *jnp.split(memory @ p["xkv"], 2, -1), heads) @ p["xo"]
            gate = jnp.einsum("btd,dgf->gbtf", rms(p["n2"], x), p["wi"])
            x = x + (jax.nn.gelu(gate[0]) * gate[1]) @ p["wo"]
        return x

    def loss(p, b):
        memory = run(p["encoder"], p["embed"][b["ids"]], bias(p["bias"], 6))
        shifted = jnp.pad(b["after"], ((0, 0), (1, 0)))[:, :-1]
        x = run(p["decoder"], p["embed"][shifted], bias(p["bias"], 6), causal(6), memory)
        return cross_entropy(x @ p["embed"].T / np.sqrt(width), b["after"])

    params["encoder"] = [{k: v for k, v in p.items() if "x" not in k} for p in params["encoder"]]
    return Objects(loss, params, tokens(), optax.adafactor(1e-2))


@row("plain")
def plain_gru_scan():
    params = {"ih": weight(5, 24), "hh": weight(8, 24), "b": jnp.zeros(24), "out": dense_of(8, 4)}

    def loss(p, b):
        def step(h, x):
            xi, hi = jnp.split(x @ p["ih"] + p["b"], 3, -1), jnp.split(h @ p["hh"], 3, -1)
            r, z = jax.nn.sigmoid(xi[0] + hi[0]), jax.nn.sigmoid(xi[1] + hi[1])
            h = (1 - z) * jnp.tanh(xi[2] + r * hi[2]) + z * h
            return h, h

        h, _ = lax.scan(step, jnp.zeros((b["x"].shape[0], 8)), b["x"].swapaxes(0, 1))
        return cross_entropy(dense(p["out"], h), b["y"])

    return Objects(loss, params, labeled(4, 7, 5), optax.rmsprop(1e-2, eps=1e-2, momentum=0.9))


@row("plain")
def plain_lstm_masked():
    params = {"ih": weight(5, 32), "hh": weight(8, 32), "b": jnp.zeros(32), "out": dense_of(8, 4)}

    def loss(p, b):
        def step(carry, inputs):
            (h, c), (x, t) = carry, inputs
            i, f, g, o = jnp.split(x @ p["ih"] + h @ p["hh"] + p["b"], 4, -1)
            new_c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            new_h = jax.nn.sigmoid(o) * jnp.tanh(new_c)
            valid = (t < b["length"])[:, None]
            return (jnp.where(valid, new_h, h), jnp.where(valid, new_c, c)), None

        zero = jnp.zeros((b["x"].shape[0], 8))
        (h, _), _ = lax.scan(step, (zero, zero), (b["x"].swapaxes(0, 1), jnp.arange(7)))
        return cross_entropy(dense(p["out"], h), b["y"])

    batch = {**labeled(4, 7, 5), "length": np.array([7, 3, 5, 1], np.int32)}
    return Objects(loss, params, batch, optax.chain(optax.clip(0.05), adam(1e-2)))


@row("plain")
def plain_mingru_associative_scan():
    params = {"z": dense_of(5, 8), "h": dense_of(5, 8), "out": dense_of(8, 4)}

    def loss(p, b):
        z = jax.nn.sigmoid(dense(p["z"], b["x"]))
        combine = lambda left, right: (left[0] * right[0], right[0] * left[1] + right[1])
        _, h = lax.associative_scan(combine, (1 - z, z * dense(p["h"], b["x"])), axis=1)
        return cross_entropy(dense(p["out"], h[:, -1]), b["y"])

    return Objects(loss, params, labeled(4, 7, 5), optax.adadelta(0.5))


@row("plain")
def plain_vae():
    params = {
        "e": dense_of(12, 16),
        "m": dense_of(16, 3),
        "v": dense_of(16, 3),
        "d1": dense_of(3, 16),
        "d2": dense_of(16, 12),
    }

    def loss(p, key, b):
        key, own = jax.random.split(key)
        h = jnp.tanh(dense(p["e"], b["x"]))
        mean, logvar = dense(p["m"], h), dense(p["v"], h)
        z = mean + jnp.exp(0.5 * logvar) * jax.random.normal(own, mean.shape)
        logits = dense(p["d2"], jnp.tanh(dense(p["d1"], z)))
        kl = -0.5 * jnp.sum(1 + logvar - mean**2 - jnp.exp(logvar), -1)
        return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, b["x"]).sum(-1) + kl), key

    batch = {"x": (np.random.rand(8, 12) > 0.5).astype(np.float32)}
    return Objects(loss, params, batch, adam(1e-2), statistics=jax.random.PRNGKey(3))


def graph(nodes=7, edges=12):
    return {
        "x": normal(nodes, 5), "start": integers(nodes, edges), "end": integers(nodes, edges), "y": integers(4, nodes)
    }  # fmt: skip


@row("plain")
def plain_gcn_segment_sum():
    params = {"w1": weight(5, 8), "w2": weight(8, 4)}

    def loss(p, b):
        x = b["x"]
        degree = jax.ops.segment_sum(jnp.ones(b["end"].shape), b["end"], 7) + 1
        for name in ("w1", "w2"):
            h = x @ p[name] * lax.rsqrt(degree)[:, None]
            x = jnp.tanh((jax.ops.segment_sum(h[b["start"]], b["end"], 7) + h) * lax.rsqrt(degree)[:, None])
        return cross_entropy(x, b["y"])

    return Objects(loss, params, graph(), adam(1e-2))


@row("plain")
def plain_sage_segment_mean_max():
    params = {"mean": weight(5, 8), "max": weight(5, 8), "out": weight(16, 4)}

    def loss(p, b):
        messages, to = b["x"][b["start"]], b["end"]
        count = jnp.maximum(jax.ops.segment_sum(jnp.ones_like(to, jnp.float32), to, 7), 1)
        mean = jax.ops.segment_sum(messages, to, 7) / count[:, None]
        largest = jax.ops.segment_max(messages @ p["max"], to, 7)
        largest = jnp.where(jnp.isfinite(largest), largest, 0)
        return cross_entropy(jnp.concatenate([mean @ p["mean"], largest], -1) @ p["out"], b["y"])

    return Objects(loss, params, graph(), optax.adagrad(0.1))


@row("plain")
def plain_gat_segment_softmax():
    params = {"w": weight(5, 2, 4), "a": weight(2, 8), "out": weight(8, 4)}

    def loss(p, b):
        h = jnp.einsum("nd,dhf->nhf", b["x"], p["w"])
        pair = jnp.concatenate([h[b["start"]], h[b["end"]]], -1)
        score = jax.nn.leaky_relu(jnp.einsum("ehf,hf->eh", pair, p["a"]), 0.2)
        score = jnp.exp(score - lax.stop_gradient(jax.ops.segment_max(score, b["end"], 7))[b["end"]])
        share = score / (jax.ops.segment_sum(score, b["end"], 7)[b["end"]] + 1e-9)
        x = jax.ops.segment_sum(share[..., None] * h[b["start"]], b["end"], 7)
        return cross_entropy(x.reshape(7, 8) @ p["out"], b["y"])

    return Objects(loss, params, graph(), optax.yogi(1e-2))


@row("plain")
def plain_nerf():
    sizes = [3 + 3 * 2 * 4, 16, 16, 4]
    params = [dense_of(n, m) for n, m in itertools.pairwise(sizes)]

    def loss(p, b):
        t = jnp.linspace(0.1, 2.0, 8)
        x = b["origin"][:, None] + b["direction"][:, None] * t[:, None]
        angles = x[..., None] * 2.0 ** jnp.arange(4)
        h = jnp.concatenate(
            [x, jnp.sin(angles).reshape(*x.shape[:2], -1), jnp.cos(angles).reshape(*x.shape[:2], -1)], -1
        )
        for layer in p[:-1]:
            h = jax.nn.relu(dense(layer, h))
        raw = dense(p[-1], h)
        gaps = jnp.diff(t, append=2.3)
        alpha = 1 - jnp.exp(-jax.nn.softplus(raw[..., 3]) * gaps)
        clear = jnp.cumprod(1 - alpha + 1e-10, -1)
        clear = jnp.concatenate([jnp.ones_like(clear[:, :1]), clear[:, :-1]], -1)
        return squared(jnp.sum((alpha * clear)[..., None] * jax.nn.sigmoid(raw[..., :3]), 1), b["color"])

    batch = {"origin": normal(6, 3), "direction": normal(6, 3), "color": np.random.rand(6, 3).astype(np.float32)}
    return Objects(loss, params, batch, optax.radam(1e-2, eps=1e-3))


@row("plain")
def plain_realnvp_flow():
    layer = lambda: {"fc1": dense_of(2, 8), "fc2": dense_of(8, 4)}
    params = [layer() for _ in range(3)]

    def loss(p, b):
        x, total = b["x"], 0.0
        for i, layer in enumerate(p):
            left, right = (x[:, :2], x[:, 2:]) if i % 2 == 0 else (x[:, 2:], x[:, :2])
            scale, shift = jnp.split(dense(layer["fc2"], jnp.tanh(dense(layer["fc1"], left))), 2, -1)
            right = right * jnp.exp(jnp.tanh(scale)) + shift
            total += jnp.tanh(scale).sum(-1)
            x = jnp.concatenate([left, right] if i % 2 == 0 else [right, left], -1)
        return -jnp.mean(jax.scipy.stats.norm.logpdf(x).sum(-1) + total)

    return Objects(loss, params, {"x": normal(8, 4)}, optax.nadamw(1e-2, eps=1e-3))


@row("plain")
def plain_s4_fft():
    n, length = 4, 16
    params = {"a": weight(3, n), "c": weight(3, n), "d": jnp.ones(3), "in": weight(2, 3), "out": weight(3, 4)}

    def loss(p, b):
        u = (b["x"] @ p["in"]).swapaxes(1, 2)
        decay = jnp.exp(-jax.nn.softplus(p["a"])[..., None] * jnp.arange(length))
        kernel = jnp.einsum("hn,hnl->hl", p["c"], decay)
        spectrum = jnp.fft.rfft(u, 2 * length) * jnp.fft.rfft(kernel, 2 * length)
        y = jnp.fft.irfft(spectrum, 2 * length)[..., :length] + u * p["d"][:, None]
        return cross_entropy(jax.nn.gelu(y).mean(-1) @ p["out"], b["y"])

    return Objects(loss, params, labeled(4, length, 2), adam(1e-2))


@row("plain")
def plain_fnet_fft():
    params = {"in": weight(4, 8), "ln": norm_of(8), "fc1": dense_of(8, 16), "fc2": dense_of(16, 8), "out": weight(8, 4)}

    def loss(p, b):
        x = b["x"] @ p["in"]
        x = norm(p["ln"], x + jnp.fft.fft2(x, axes=(1, 2)).real)
        return cross_entropy((x + dense(p["fc2"], jax.nn.gelu(dense(p["fc1"], x)))).mean(1) @ p["out"], b["y"])

    return Objects(loss, params, labeled(4, 6, 4), adam(1e-2))


@row("plain")
def plain_deepsets():
    params = {"phi": dense_of(3, 16), "rho": dense_of(48, 4)}

    def loss(p, b):
        h = jax.nn.elu(dense(p["phi"], b["x"]))
        present = (jnp.arange(5) < b["size"][:, None])[..., None]
        pooled = [jnp.sum(h, 1, where=present), jnp.max(h, 1, where=present, initial=-9), jnp.mean(h, 1, where=present)]
        return cross_entropy(dense(p["rho"], jnp.concatenate(pooled, -1)), b["y"])

    return Objects(loss, params, {**labeled(4, 5, 3), "size": np.array([5, 2, 1, 4], np.int32)}, optax.novograd(1e-2))


@row("plain")
def plain_mixer():
    layer = lambda: {
        "ln1": norm_of(8), "t1": dense_of(4, 8), "t2": dense_of(8, 4), "ln2": norm_of(8), "c1": dense_of(8, 16),
        "c2": dense_of(16, 8),
    }  # fmt: skip
    params = {"stem": weight(16, 8), "layers": [layer(), layer()], "out": dense_of(8, 4)}

    def loss(p, b):
        x = b["x"].reshape(-1, 2, 4, 2, 4).transpose(0, 1, 3, 2, 4).reshape(-1, 4, 16) @ p["stem"]
        for q in p["layers"]:
            x = x + dense(q["t2"], jax.nn.gelu(dense(q["t1"], norm(q["ln1"], x).swapaxes(1, 2)))).swapaxes(1, 2)
            x = x + dense(q["c2"], jax.nn.gelu(dense(q["c1"], norm(q["ln2"], x))))
        return cross_entropy(dense(p["out"], x.mean(1)), b["y"])

    return Objects(loss, params, labeled(4, 8, 8), optax.lamb(1e-2, eps=1e-3))


@row("plain")
def plain_neural_ode():
    params = {"fc1": dense_of(4, 8), "fc2": dense_of(8, 4)}

    def loss(p, b):
        f = lambda y: dense(p["fc2"], jnp.tanh(dense(p["fc1"], y)))

        def rk4(y, _):
            k1 = f(y)
            k2 = f(y + 0.05 * k1)
            k3 = f(y + 0.05 * k2)
            k4 = f(y + 0.1 * k3)
            return y + 0.1 / 6 * (k1 + 2 * k2 + 2 * k3 + k4), y

        y, _ = lax.scan(rk4, b["x"], None, length=5)
        return squared(y, b["y"])

    return Objects(loss, params, {"x": normal(4, 4), "y": normal(4, 4)}, optax.adabelief(1e-2, eps=1e-3))


@row("plain")
def plain_pinn_second_derivatives():
    params = [dense_of(2, 16), dense_of(16, 16), dense_of(16, 1)]

    def u(p, x, t):
        h = jnp.stack([x, t])
        for layer in p[:-1]:
            h = jnp.tanh(dense(layer, h))
        return dense(p[-1], h)[0]

    def loss(p, b):
        def residual(x, t):
            slope = jax.grad(u, 2)(p, x, t)
            return slope - 0.1 * jax.grad(jax.grad(u, 1), 1)(p, x, t) + u(p, x, t) * jax.grad(u, 1)(p, x, t)

        inner = jax.vmap(residual)(b["x"], b["t"])
        start = jax.vmap(u, (None, 0, None))(p, b["x"], 0.0) + jnp.sin(np.pi * b["x"])
        return jnp.mean(inner**2) + jnp.mean(start**2)

    return Objects(loss, params, {"x": normal(8), "t": np.random.rand(8).astype(np.float32)}, adam(1e-2))


@row("plain")
def plain_moe_top_k():
    params = {"gate": weight(6, 4), "w1": weight(4, 6, 12), "w2": weight(4, 12, 6), "out": weight(6, 4)}

    def loss(p, b):
        scores = jax.nn.softmax(b["x"] @ p["gate"])
        best, index = lax.top_k(scores, 2)
        chosen = jnp.einsum("bk,bke->be", best / best.sum(-1, keepdims=True), jax.nn.one_hot(index, 4))
        h = jax.nn.silu(jnp.einsum("bd,edf->bef", b["x"], p["w1"]))
        y = jnp.einsum("bef,efd,be->bd", h, p["w2"], chosen)
        balance = 4 * jnp.sum(scores.mean(0) * jax.nn.one_hot(index[:, 0], 4).mean(0))
        return cross_entropy(y @ p["out"], b["y"]) + 0.01 * balance

    return Objects(loss, params, labeled(8, 6), optax.adamaxw(1e-2, eps=1e-3))


@row("plain")
def plain_llama_rotary():
    params = gpt_of(1)

    def rotate(x):
        half = x.shape[-1] // 2
        angle = jnp.arange(x.shape[1])[:, None] * 100.0 ** (-jnp.arange(half) / half)
        sin, cos = jnp.sin(angle)[:, None], jnp.cos(angle)[:, None]
        a, b = x[..., :half], x[..., half:]
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def loss(p, b):
        q, x = p["blocks"][0], p["wte"][b["ids"]]
        y = rms(q["ln1"]["scale"], x)
        heads = [t.reshape(*t.shape[:2], 2, 4) for t in jnp.split(y @ q["qkv"], 3, -1)]
        mixed = jax.nn.dot_product_attention(rotate(heads[0]), rotate(heads[1]), heads[2], is_causal=True)
        x = x + mixed.reshape(*x.shape) @ q["proj"]
        return cross_entropy(rms(p["ln"]["scale"], x) @ p["wte"].T, b["after"])

    used = {
        "wte": params["wte"],
        "blocks": [{k: params["blocks"][0][k] for k in ("ln1", "qkv", "proj")}],
        "ln": params["ln"],
    }
    return Objects(loss, used, tokens(), optax.chain(optax.clip_by_global_norm(1.0), optax.contrib.muon(1e-2)))


@row("plain")
def plain_clip_contrastive():
    params = {"image": dense_of(6, 8), "text": dense_of(5, 8), "scale": jnp.asarray(1.0)}

    def loss(p, b):
        unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)
        logits = jnp.exp(p["scale"]) * unit(dense(p["image"], b["image"])) @ unit(dense(p["text"], b["text"])).T
        own = jnp.diagonal(logits)
        return jnp.mean(jax.nn.logsumexp(logits, 0) + jax.nn.logsumexp(logits, 1) - 2 * own)

    return Objects(
        loss, params, {"image": normal(6, 6), "text": normal(6, 5)}, optax.contrib.schedule_free_adamw(1e-2, eps=1e-3)
    )


@row("plain")
def plain_critic_gradient_penalty():
    params = [dense_of(5, 16), dense_of(16, 1)]

    def critic(p, x):
        return dense(p[1], jax.nn.leaky_relu(dense(p[0], x)))[..., 0]

    def loss(p, b):
        mixed = 0.3 * b["real"] + 0.7 * b["fake"]
        slopes = jax.vmap(jax.grad(critic, 1), (None, 0))(p, mixed)
        penalty = jnp.mean((jnp.sqrt(jnp.sum(slopes**2, -1) + 1e-8) - 1) ** 2)
        return jnp.mean(critic(p, b["fake"])) - jnp.mean(critic(p, b["real"])) + 10 * penalty

    return Objects(loss, params, {"real": normal(6, 5), "fake": normal(6, 5)}, adam(1e-3, b1=0.0, b2=0.9))


@row("plain")
def plain_lars_partitioned():
    params = {"body": dense_of(6, 8), "head": dense_of(8, 4)}
    loss = lambda p, b: cross_entropy(dense(p["head"], jnp.tanh(dense(p["body"], b["x"]))), b["y"])
    tx = optax.partition({"body": optax.lars(0.1), "head": optax.sgd(0.1)}, {"body": "body", "head": "head"})
    return Objects(loss, params, labeled(8, 6), tx)


# ---- Flax linen ------------------------------------------------------------------------------------------------------


def linen(module, batch, optimizer=None, loss=None, call=None):
    """Return a module with a loss of its result; collections beside the parameters are statistics."""
    from flax import linen as nn  # noqa: F401

    loss = loss or (lambda result, b: cross_entropy(result, b["y"]))
    call = call or (lambda b: ((b["x"],), {}))
    args, settings = call(batch)
    variables = module.init(jax.random.PRNGKey(0), *args, **settings)
    params = {"params": variables["params"]}
    rest = {name: tree for name, tree in variables.items() if name != "params"}
    chosen = {"optimizer": optimizer} if optimizer else {}

    def plain(p, b):
        args, settings = call(b)
        return loss(module.apply(p, *args, **settings), b)

    def changing(p, statistics, b):
        args, settings = call(b)
        result, new = module.apply({**p, **statistics}, *args, mutable=list(rest), **settings)
        return loss(result, b), new

    if rest:
        return Objects(changing, params, batch, statistics=rest, **chosen)
    return Objects(plain, params, batch, **chosen)


def linen_compact(body, settings=()):
    """Return a module whose `__call__` is a function of the module and its arguments."""
    from flax import linen as nn

    class Net(nn.Module):
        @nn.compact
        def __call__(self, *args, **kwargs):
            return body(nn, *args, **kwargs)

    return Net()


@row("linen", "flax", quick=True)
def linen_cnn():
    def net(nn, x):
        for features in (8, 8):
            x = nn.avg_pool(nn.relu(nn.Conv(features, (3, 3))(x)), (2, 2), (2, 2))
        return nn.Dense(4)(x.reshape(x.shape[0], -1))

    return linen(linen_compact(net), labeled(2, 8, 8, 1), optax.sgd(0.1, momentum=0.9))


@row("linen", "flax")
def linen_resnet():
    def net(nn, x):
        bn = lambda: nn.BatchNorm(use_running_average=False, momentum=0.9)
        x = nn.relu(bn()(nn.Conv(8, (3, 3), use_bias=False)(x)))
        for features, stride in ((8, 1), (16, 2)):
            y = nn.relu(bn()(nn.Conv(features, (3, 3), stride, use_bias=False)(x)))
            y = bn()(nn.Conv(features, (3, 3), use_bias=False)(y))
            if x.shape != y.shape:
                x = bn()(nn.Conv(features, (1, 1), stride, use_bias=False)(x))
            x = nn.relu(x + y)
        return nn.Dense(4)(x.mean((1, 2)))

    return linen(
        linen_compact(net),
        labeled(4, 8, 8, 3),
        optax.sgd(optax.cosine_decay_schedule(0.1, 9), momentum=0.9, nesterov=True),
    )


@row("linen", "flax")
def linen_unet():
    def net(nn, x):
        a = nn.relu(nn.GroupNorm(2)(nn.Conv(4, (3, 3))(x)))
        b = nn.relu(nn.Conv(8, (3, 3))(nn.max_pool(a, (2, 2), (2, 2))))
        c = nn.ConvTranspose(4, (2, 2), (2, 2))(b)
        return nn.Conv(2, (1, 1))(nn.relu(nn.Conv(4, (3, 3))(jnp.concatenate([a, c], -1))))

    batch = {"x": normal(2, 8, 8, 1), "y": integers(2, 2, 8, 8)}
    return linen(linen_compact(net), batch, adam(1e-2))


@row("linen", "flax")
def linen_vit():
    def net(nn, x):
        x = nn.Conv(8, (4, 4), (4, 4))(x).reshape(x.shape[0], -1, 8)
        token = net_param(nn)
        x = jnp.concatenate([jnp.broadcast_to(token, (x.shape[0], 1, 8)), x], 1)
        for _ in range(2):
            y = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(2, dropout_rate=0.0, deterministic=True)(y, y)
            y = nn.gelu(nn.Dense(16)(nn.LayerNorm()(x)))
            x = x + nn.Dropout(0.0, deterministic=False)(nn.Dense(8)(y))
        return nn.Dense(4)(nn.LayerNorm()(x)[:, 0])

    def net_param(nn):
        class Token(nn.Module):
            @nn.compact
            def __call__(self):
                return self.param("token", nn.initializers.normal(0.02), (1, 1, 8))

        return Token()()

    return linen(linen_compact(net), labeled(2, 8, 8, 3))


@row("linen", "flax")
def linen_bert():
    def net(nn, ids, mask):
        x = nn.LayerNorm()(nn.Embed(11, 8)(ids) + nn.Embed(6, 8)(jnp.arange(6)))
        for _ in range(2):
            pairs = nn.make_attention_mask(mask, mask)
            x = nn.LayerNorm()(x + nn.MultiHeadDotProductAttention(2)(x, x, mask=pairs))
            x = nn.LayerNorm()(x + nn.Dense(8)(nn.gelu(nn.Dense(16)(x), approximate=False)))
        return nn.Dense(11)(x)

    batch = {**tokens(), "mask": (np.random.rand(4, 6) > 0.3).astype(np.float32)}
    batch["mask"][:, 0] = 1
    return linen(
        linen_compact(net), batch, loss=lambda r, b: jnp.sum(
            optax.softmax_cross_entropy_with_integer_labels(r, b["after"]) * b["mask"]
        ) / b["mask"].sum(), call=lambda b: ((b["ids"], b["mask"]), {}),
    )  # fmt: skip


@row("linen", "flax")
def linen_gpt_decoder():
    def net(nn, ids):
        embed = nn.Embed(11, 8)
        x = embed(ids) + nn.Embed(6, 8)(jnp.arange(6))
        for _ in range(2):
            y = nn.RMSNorm()(x)
            x = x + nn.SelfAttention(2, qkv_features=8)(y, mask=nn.make_causal_mask(ids))
            y = nn.RMSNorm()(x)
            x = x + nn.Dense(8, use_bias=False)(nn.silu(nn.Dense(16)(y)) * nn.Dense(16)(y))
        return embed.attend(x)

    matrices = lambda p: jax.tree.map(lambda x: x.ndim > 1, p)
    return linen(linen_compact(net), tokens(), optax.adamw(1e-2, eps=1e-3, mask=matrices),
                 lambda r, b: cross_entropy(r, b["after"]), lambda b: ((b["ids"],), {}))  # fmt: skip


@row("linen", "flax")
def linen_lstm():
    def net(nn, x):
        return nn.Dense(4)(nn.RNN(nn.OptimizedLSTMCell(8))(x)[:, -1])

    return linen(linen_compact(net), labeled(3, 5, 4), adam(1e-2))


@row("linen", "flax")
def linen_bidirectional_gru():
    def net(nn, x, lengths):
        both = nn.Bidirectional(nn.RNN(nn.GRUCell(6)), nn.RNN(nn.GRUCell(6)))
        return nn.Dense(4)(both(x, seq_lengths=lengths).mean(1))

    batch = {**labeled(3, 5, 4), "n": np.array([5, 2, 3], np.int32)}
    return linen(linen_compact(net), batch, adam(1e-2), call=lambda b: ((b["x"], b["n"]), {}))


@row("linen", "flax")
def linen_conv_lstm():
    def net(nn, x):
        return nn.Dense(4)(nn.RNN(nn.ConvLSTMCell(3, (3, 3)))(x)[:, -1].reshape(x.shape[0], -1))

    return linen(linen_compact(net), labeled(2, 3, 4, 4, 2), adam(1e-2))


@row("linen", "flax")
def linen_weight_norm():
    def net(nn, x):
        return nn.Dense(4)(nn.relu(nn.WeightNorm(nn.Dense(8))(x)))

    return linen(linen_compact(net), labeled(4, 6))


@row("linen", "flax")
def linen_spectral_norm():
    def net(nn, x):
        return nn.Dense(4)(nn.relu(nn.SpectralNorm(nn.Dense(8))(x, update_stats=True)))

    return linen(linen_compact(net), labeled(4, 6))


@row("linen", "flax")
def linen_autoencoder():
    def net(nn, x):
        for features in (4, 8):
            x = nn.relu(nn.Conv(features, (3, 3), 2)(x))
        for features in (4, 1):
            x = nn.ConvTranspose(features, (3, 3), (2, 2))(nn.leaky_relu(x))
        return nn.sigmoid(x)

    return linen(linen_compact(net), {"x": normal(2, 8, 8, 1)}, adam(1e-2), lambda r, b: squared(r, b["x"]))


@row("linen", "flax")
def linen_mobilenet_depthwise():
    def net(nn, x):
        for features, stride in ((8, 2), (12, 1)):
            x = nn.Conv(x.shape[-1], (3, 3), stride, feature_group_count=x.shape[-1], use_bias=False)(x)
            x = nn.relu6(nn.BatchNorm(use_running_average=False)(x))
            x = nn.Conv(features, (1, 1), use_bias=False)(x)
            x = nn.hard_swish(nn.BatchNorm(use_running_average=False)(x))
        gate = nn.sigmoid(nn.Dense(12)(x.mean((1, 2), keepdims=True)))
        return nn.Dense(4)((x * gate).mean((1, 2)))

    return linen(linen_compact(net), labeled(4, 8, 8, 3), optax.rmsprop(1e-3, decay=0.9, eps=1e-3, momentum=0.9))


@row("linen", "flax")
def linen_wavenet_dilated():
    def net(nn, x):
        for dilation in (1, 2, 4):
            y = nn.Conv(8, (2,), kernel_dilation=dilation, padding="CAUSAL")(x)
            gate, value = jnp.split(y, 2, -1)
            x = x + nn.Dense(x.shape[-1])(nn.tanh(value) * nn.sigmoid(gate))
        return nn.Dense(4)(x.mean(1))

    return linen(linen_compact(net), labeled(3, 9, 4), adam(1e-2))


@row("linen", "flax")
def linen_scanned_layers():
    from flax import linen as nn

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return x + nn.Dense(6)(nn.tanh(nn.LayerNorm()(x))), None

    def net(nn, x):
        stack = nn.scan(nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return nn.Dense(4)(stack()(x, None)[0])

    return linen(linen_compact(net), labeled(4, 6))


@row("linen", "flax")
def linen_dropout_random():
    """Keep the key of dropout as state; masks are JAX's own on every route."""
    net = linen_compact(lambda nn, x: nn.Dense(4)(nn.Dropout(0.5, deterministic=False)(nn.relu(nn.Dense(16)(x)))))
    batch = labeled(6, 5)
    params = net.init({"params": jax.random.PRNGKey(0), "dropout": jax.random.PRNGKey(1)}, batch["x"])

    def loss(p, key, b):
        key, own = jax.random.split(key)
        return cross_entropy(net.apply(p, b["x"], rngs={"dropout": own}), b["y"]), key

    return Objects(loss, params, batch, adam(1e-2), statistics=jax.random.PRNGKey(2))


# ---- Flax NNX --------------------------------------------------------------------------------------------------------


def rngs():
    from flax import nnx

    return nnx.Rngs(0, dropout=1)


def classified(module, batch, *optimizer):
    return NNX(lambda net, b: cross_entropy(net(b["x"]), b["y"]), module, batch, *optimizer)


@row("nnx", "flax", quick=True)
def nnx_mlp():
    from flax import nnx

    r = rngs()
    return classified(nnx.Sequential(nnx.Linear(6, 8, rngs=r), nnx.relu, nnx.Linear(8, 4, rngs=r)), labeled(4, 6))


@row("nnx", "flax")
def nnx_cnn_batchnorm_dropout():
    from flax import nnx

    r = rngs()
    pool = functools.partial(nnx.avg_pool, window_shape=(2, 2), strides=(2, 2))
    net = nnx.Sequential(
        nnx.Conv(1, 8, (3, 3), rngs=r), nnx.BatchNorm(8, rngs=r), nnx.relu, pool,
        lambda x: x.reshape(x.shape[0], -1), nnx.Dropout(0.5, rngs=r), nnx.Linear(8 * 9, 4, rngs=r),
    )  # fmt: skip
    return classified(net, labeled(4, 6, 6, 1), adam(1e-2))


@row("nnx", "flax")
def nnx_resnet():
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, n, m, stride, rngs):
            self.conv1 = nnx.Conv(n, m, (3, 3), stride, use_bias=False, rngs=rngs)
            self.bn1, self.bn2 = nnx.BatchNorm(m, rngs=rngs), nnx.BatchNorm(m, rngs=rngs)
            self.conv2 = nnx.Conv(m, m, (3, 3), use_bias=False, rngs=rngs)
            self.short = nnx.Conv(n, m, (1, 1), stride, rngs=rngs) if n != m else None

        def __call__(self, x):
            y = self.bn2(self.conv2(nnx.relu(self.bn1(self.conv1(x)))))
            return nnx.relu(y + (self.short(x) if self.short else x))

    r = rngs()
    net = nnx.Sequential(Block(3, 3, 1, r), Block(3, 8, 2, r), lambda x: x.mean((1, 2)), nnx.Linear(8, 4, rngs=r))
    return classified(net, labeled(4, 8, 8, 3), optax.sgd(0.1, momentum=0.9))


@row("nnx", "flax")
def nnx_transformer():
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, r):
            self.embed = nnx.Embed(11, 8, rngs=r)
            self.position = nnx.Param(jax.random.normal(r.params(), (6, 8)))
            self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=r)
            self.ln1, self.ln2 = nnx.LayerNorm(8, rngs=r), nnx.RMSNorm(8, rngs=r)
            self.fc1, self.fc2 = nnx.Linear(8, 16, rngs=r), nnx.Linear(16, 8, rngs=r)

        def __call__(self, ids):
            x = self.embed(ids) + self.position[...]
            x = x + self.attention(self.ln1(x), mask=nnx.make_causal_mask(ids))
            x = x + self.fc2(nnx.gelu(self.fc1(self.ln2(x))))
            return self.embed.attend(x)

    return NNX(lambda net, b: cross_entropy(net(b["ids"]), b["after"]), Net(rngs()), tokens())


@row("nnx", "flax")
def nnx_dropout_random():
    from flax import nnx

    r = rngs()
    layers = nnx.Linear(6, 16, rngs=r), nnx.relu, nnx.Dropout(0.4, rngs=r), nnx.Linear(16, 4, rngs=r)
    return classified(nnx.Sequential(*layers), labeled(4, 6), adam(1e-2))


@row("nnx", "flax")
def nnx_vae():
    from flax import nnx

    class VAE(nnx.Module):
        def __init__(self, r):
            self.encoder, self.decoder = nnx.Linear(6, 4, rngs=r), nnx.Linear(2, 6, rngs=r)
            self.rngs = nnx.Rngs(noise=3)

        def __call__(self, x):
            mean, log = jnp.split(self.encoder(x), 2, -1)
            z = mean + jnp.exp(log) * jax.random.normal(self.rngs.noise(), mean.shape)
            return self.decoder(z), -0.5 * jnp.sum(1 + 2 * log - mean**2 - jnp.exp(2 * log), -1).mean()

    def loss(net, b):
        x, kl = net(b["x"])
        return squared(x, b["x"]) + 0.1 * kl

    return NNX(loss, VAE(rngs()), {"x": normal(5, 6)}, adam(1e-2))


@row("nnx", "flax")
def nnx_lstm():
    from flax import nnx

    r = rngs()
    net = nnx.Sequential(nnx.RNN(nnx.OptimizedLSTMCell(4, 8, rngs=r)), lambda x: x[:, -1], nnx.Linear(8, 4, rngs=r))
    return classified(net, labeled(3, 5, 4), adam(1e-2))


@row("nnx", "flax")
def nnx_gru_bidirectional():
    from flax import nnx

    r = rngs()
    both = nnx.Bidirectional(nnx.RNN(nnx.GRUCell(4, 6, rngs=r)), nnx.RNN(nnx.GRUCell(4, 6, rngs=r)))
    return classified(
        nnx.Sequential(both, lambda x: x.mean(1), nnx.Linear(12, 4, rngs=r)), labeled(3, 5, 4), adam(1e-2)
    )


@row("nnx", "flax")
def nnx_groupnorm_transpose():
    from flax import nnx

    r = rngs()
    net = nnx.Sequential(
        nnx.Conv(1, 4, (3, 3), 2, rngs=r), nnx.GroupNorm(4, 2, rngs=r), nnx.swish,
        nnx.ConvTranspose(4, 1, (4, 4), (2, 2), rngs=r),
    )  # fmt: skip
    return NNX(lambda net, b: squared(net(b["x"]), b["x"]), net, {"x": normal(2, 6, 6, 1)}, adam(1e-2))


@row("nnx", "flax")
def nnx_lora_only():
    from flax import nnx

    r = rngs()
    net = nnx.Sequential(nnx.LoRALinear(6, 8, lora_rank=2, rngs=r), nnx.relu, nnx.Linear(8, 4, rngs=r))
    return NNX(lambda net, b: cross_entropy(net(b["x"]), b["y"]), net, labeled(4, 6), adam(1e-2), nnx.LoRAParam)


@row("nnx", "flax")
def nnx_spectral_norm():
    from flax import nnx

    r = rngs()
    net = nnx.Sequential(nnx.SpectralNorm(nnx.Linear(6, 8, rngs=r), rngs=r), nnx.relu, nnx.Linear(8, 4, rngs=r))
    return classified(net, labeled(4, 6), adam(1e-2))


@row("nnx", "flax")
def nnx_instance_norm_prelu():
    from flax import nnx

    r = rngs()
    net = nnx.Sequential(
        nnx.Conv(2, 4, (3, 3), rngs=r), nnx.InstanceNorm(4, rngs=r), nnx.PReLU(), lambda x: x.max((1, 2)),
        nnx.Linear(4, 4, rngs=r),
    )  # fmt: skip
    return classified(net, labeled(2, 6, 6, 2), optax.adagrad(0.1))


@row("nnx", "flax")
def nnx_einsum_heads():
    from flax import nnx

    r = rngs()
    net = nnx.Sequential(
        nnx.Einsum("bd,dhf->bhf", (6, 2, 4), (2, 4), rngs=r),
        nnx.tanh,
        nnx.LinearGeneral((2, 4), 4, axis=(-2, -1), rngs=r),
    )
    return classified(net, labeled(4, 6), optax.lion(1e-3))


@row("nnx", "flax")
def nnx_vmapped_layers():
    from flax import nnx

    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def layers(r):
        return nnx.Linear(6, 6, rngs=r)

    class Net(nnx.Module):
        def __init__(self, r):
            self.layers, self.out = layers(r), nnx.Linear(6, 4, rngs=r)

        def __call__(self, x):
            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            def forward(x, layer):
                return x + nnx.tanh(layer(x))

            return self.out(forward(x, self.layers))

    return classified(Net(rngs()), labeled(4, 6), adam(1e-2))


# ---- Equinox ---------------------------------------------------------------------------------------------------------


def keys(n):
    return jax.random.split(jax.random.PRNGKey(0), n)


def equinox(module, batch, *optimizer, loss=None):
    """Return a module of single examples with a loss of its results."""
    each = loss or (lambda net, b: cross_entropy(jax.vmap(net)(b["x"]), b["y"]))
    return Objects(each, module, batch, *optimizer)


@row("equinox", "equinox")
def equinox_mlp():
    import equinox as eqx

    return equinox(eqx.nn.MLP(6, 4, 8, 2, key=keys(1)[0]), labeled(4, 6))


@row("equinox", "equinox")
def equinox_cnn():
    import equinox as eqx

    a, b, c = keys(3)
    net = eqx.nn.Sequential([
        eqx.nn.Conv2d(1, 3, 4, key=a), eqx.nn.MaxPool2d(2, 2), eqx.nn.Lambda(jax.nn.relu), eqx.nn.Lambda(jnp.ravel),
        eqx.nn.Linear(12, 8, key=b), eqx.nn.Lambda(jax.nn.sigmoid), eqx.nn.Linear(8, 4, key=c),
        eqx.nn.Lambda(jax.nn.log_softmax),
    ])  # fmt: skip
    loss = lambda net, b: -jnp.mean(jnp.take_along_axis(jax.vmap(net)(b["x"]), b["y"][:, None], 1))
    return equinox(net, labeled(4, 1, 8, 8), loss=loss)


@row("equinox", "equinox")
def equinox_gru():
    import equinox as eqx

    class RNN(eqx.Module):
        cell: eqx.nn.GRUCell
        linear: eqx.nn.Linear

        def __call__(self, x):
            h, _ = lax.scan(lambda h, x: (self.cell(x, h), None), jnp.zeros(8), x)
            return self.linear(h)

    a, b = keys(2)
    return equinox(RNN(eqx.nn.GRUCell(4, 8, key=a), eqx.nn.Linear(8, 4, key=b)), labeled(3, 5, 4), adam(1e-2))


@row("equinox", "equinox")
def equinox_lstm():
    import equinox as eqx

    class RNN(eqx.Module):
        cell: eqx.nn.LSTMCell
        linear: eqx.nn.Linear

        def __call__(self, x):
            (h, _), _ = lax.scan(lambda c, x: (self.cell(x, c), None), (jnp.zeros(8), jnp.zeros(8)), x)
            return self.linear(h)

    a, b = keys(2)
    return equinox(RNN(eqx.nn.LSTMCell(4, 8, key=a), eqx.nn.Linear(8, 4, key=b)), labeled(3, 5, 4), optax.sm3(0.1))


@row("equinox", "equinox")
def equinox_vit_attention():
    import equinox as eqx

    class Block(eqx.Module):
        patch: eqx.nn.Linear
        attention: eqx.nn.MultiheadAttention
        norms: list
        mlp: eqx.nn.MLP
        out: eqx.nn.Linear

        def __call__(self, x):
            x = jax.vmap(self.patch)(x)
            y = jax.vmap(self.norms[0])(x)
            x = x + self.attention(y, y, y)
            x = x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))
            return self.out(x.mean(0))

    k = keys(4)
    net = Block(
        eqx.nn.Linear(6, 8, key=k[0]), eqx.nn.MultiheadAttention(2, 8, key=k[1]),
        [eqx.nn.LayerNorm(8), eqx.nn.RMSNorm(8)],
        eqx.nn.MLP(8, 8, 16, 1, activation=jax.nn.gelu, key=k[2]), eqx.nn.Linear(8, 4, key=k[3]),
    )  # fmt: skip
    return equinox(net, labeled(3, 5, 6))


@row("equinox", "equinox")
def equinox_batchnorm_state():
    import equinox as eqx

    class Net(eqx.Module):
        conv: eqx.nn.Conv2d
        norm: eqx.nn.BatchNorm
        linear: eqx.nn.Linear

        def __call__(self, x, state):
            x, state = self.norm(self.conv(x), state)
            return self.linear(jax.nn.relu(x).mean((1, 2))), state

    def make(key):
        a, b = jax.random.split(key)
        norm = eqx.nn.BatchNorm(6, "batch", mode="batch")
        return Net(eqx.nn.Conv2d(2, 6, 3, key=a), norm, eqx.nn.Linear(6, 4, key=b))

    net, state = eqx.nn.make_with_state(make)(keys(1)[0])

    def loss(net, state, b):
        call = jax.vmap(net, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        result, state = call(b["x"], state)
        return cross_entropy(result, b["y"]), state

    return Objects(loss, net, labeled(4, 2, 6, 6), adam(1e-2), statistics=state)


@row("equinox", "equinox")
def equinox_unet_transpose():
    import equinox as eqx

    class UNet(eqx.Module):
        down: eqx.nn.Conv2d
        norm: eqx.nn.GroupNorm
        mid: eqx.nn.Conv2d
        up: eqx.nn.ConvTranspose2d
        out: eqx.nn.Conv2d

        def __call__(self, x):
            a = jax.nn.silu(self.norm(self.down(x)))
            b = jax.nn.silu(self.mid(eqx.nn.AvgPool2d(2, 2)(a)))
            return self.out(jnp.concatenate([a, self.up(b)]))

    k = keys(4)
    net = UNet(
        eqx.nn.Conv2d(1, 4, 3, padding=1, key=k[0]), eqx.nn.GroupNorm(2, 4),
        eqx.nn.Conv2d(4, 8, 3, padding=1, key=k[1]),
        eqx.nn.ConvTranspose2d(8, 4, 2, 2, key=k[2]), eqx.nn.Conv2d(8, 1, 1, key=k[3]),
    )  # fmt: skip
    return equinox(net, {"x": normal(2, 1, 8, 8)}, loss=lambda net, b: squared(jax.vmap(net)(b["x"]), b["x"]))


@row("equinox", "equinox")
def equinox_weight_norm():
    import equinox as eqx

    a, b = keys(2)
    net = eqx.nn.Sequential([
        eqx.nn.WeightNorm(eqx.nn.Linear(6, 8, key=a)), eqx.nn.Lambda(jnp.tanh), eqx.nn.Linear(8, 4, key=b)
    ])  # fmt: skip
    return equinox(net, labeled(4, 6))


@row("equinox", "equinox")
def equinox_spectral_norm_state():
    import equinox as eqx

    class Net(eqx.Module):
        first: eqx.nn.SpectralNorm
        second: eqx.nn.Linear

        def __call__(self, x, state):
            x, state = self.first(x, state)
            return self.second(jnp.tanh(x)), state

    def make():
        a, b, c = keys(3)
        first = eqx.nn.SpectralNorm(eqx.nn.Linear(6, 8, key=a), "weight", key=b)
        return Net(first, eqx.nn.Linear(8, 4, key=c))

    net, state = eqx.nn.make_with_state(make)()

    def loss(net, state, b):
        result, state = jax.vmap(net, in_axes=(0, None), out_axes=(0, None))(b["x"], state)
        return cross_entropy(result, b["y"]), state

    return Objects(loss, net, labeled(4, 6), adam(1e-2), statistics=state)


@row("equinox", "equinox")
def equinox_embedding_rotary():
    import equinox as eqx

    class Net(eqx.Module):
        embed: eqx.nn.Embedding
        rotary: eqx.nn.RotaryPositionalEmbedding
        q: eqx.nn.Linear
        out: eqx.nn.Linear

        def __call__(self, ids):
            x = jax.vmap(self.embed)(ids)
            q = self.rotary(jax.vmap(self.q)(x))
            return jax.vmap(self.out)(jax.nn.softmax(jnp.where(causal(6), q @ q.T, -jnp.inf)) @ x)

    a, b, c = keys(3)
    net = Net(
        eqx.nn.Embedding(11, 8, key=a), eqx.nn.RotaryPositionalEmbedding(8), eqx.nn.Linear(8, 8, key=b),
        eqx.nn.Linear(8, 11, key=c),
    )  # fmt: skip
    return equinox(net, tokens(), loss=lambda net, b: cross_entropy(jax.vmap(net)(b["ids"]), b["after"]))


@row("equinox", "equinox")
def equinox_dropout_prelu_ensemble():
    import equinox as eqx

    make = lambda key: eqx.nn.MLP(6, 4, 8, 1, activation=eqx.nn.PReLU(0.1), key=key)
    nets = eqx.filter_vmap(make)(keys(3))

    def loss(nets, b):
        run = eqx.filter_vmap(lambda net, x: jax.vmap(net)(x), in_axes=(eqx.if_array(0), None))
        drop = eqx.nn.Dropout(0.0)
        return cross_entropy(drop(run(nets, b["x"]), key=jax.random.PRNGKey(0)).mean(0), b["y"])

    return equinox(nets, labeled(4, 6), adam(1e-2), loss=loss)


# ---- Haiku -----------------------------------------------------------------------------------------------------------


def haiku(net, batch, *optimizer, loss=None):
    import haiku as hk

    transformed = hk.transform_with_state(lambda b: net(hk, b))
    params, state = transformed.init(jax.random.PRNGKey(0), batch)
    loss = loss or (lambda result, b: cross_entropy(result, b["y"]))

    def plain(p, b):
        return loss(transformed.apply(p, {}, None, b)[0], b)

    def changing(p, statistics, b):
        result, new = transformed.apply(p, statistics, None, b)
        return loss(result, b), new

    if state:
        return Objects(changing, params, batch, *optimizer, statistics=state)
    return Objects(plain, params, batch, *optimizer)


@row("haiku", "haiku")
def haiku_mlp():
    return haiku(lambda hk, b: hk.nets.MLP([8, 8, 4])(b["x"]), labeled(4, 6))


@row("haiku", "haiku")
def haiku_lenet():
    def net(hk, b):
        layers = [
            hk.Conv2D(4, 3),
            jax.nn.relu,
            hk.MaxPool(2, 2, "SAME"),
            hk.Conv2D(8, 3, 2),
            jnp.tanh,
            hk.AvgPool(2, 1, "VALID"),
        ]
        return hk.Sequential([*layers, hk.Flatten(), hk.Linear(4)])(b["x"])

    return haiku(net, labeled(2, 8, 8, 1), optax.sgd(optax.exponential_decay(0.1, 1, 0.9)))


@row("haiku", "haiku")
def haiku_resnet_blocks():
    def net(hk, b):
        x = b["x"]
        settings = {"create_scale": True, "create_offset": True, "decay_rate": 0.9}
        for stride, channels in ((1, 3), (2, 8)):
            bottleneck = hk.nets.ResNet.BlockGroup(
                channels=channels, num_blocks=1, stride=stride, bn_config=settings, resnet_v2=False, bottleneck=False,
                use_projection=True,
            )  # fmt: skip
            x = bottleneck(x, is_training=True, test_local_stats=False)
        return hk.Linear(4)(x.mean((1, 2)))

    return haiku(net, labeled(4, 8, 8, 3), optax.sgd(0.1, momentum=0.9))


@row("haiku", "haiku")
def haiku_lstm_unroll():
    def net(hk, b):
        core = hk.DeepRNN([hk.LSTM(6), hk.GRU(5)])
        result, _ = hk.dynamic_unroll(core, b["x"], core.initial_state(b["x"].shape[0]), time_major=False)
        return hk.Linear(4)(result[:, -1])

    return haiku(net, labeled(3, 5, 4), adam(1e-2))


@row("haiku", "haiku")
def haiku_transformer():
    def net(hk, b):
        x = hk.Embed(11, 8)(b["ids"]) + hk.get_parameter("positions", [6, 8], init=hk.initializers.TruncatedNormal())
        for _ in range(2):
            ln = lambda: hk.LayerNorm(-1, create_scale=True, create_offset=True)
            y = ln()(x)
            x = x + hk.MultiHeadAttention(2, 4, w_init=hk.initializers.VarianceScaling(1.0))(
                y, y, y, mask=causal(6)[None, None]
            )
            x = x + hk.Linear(8)(jax.nn.gelu(hk.Linear(16)(ln()(x))))
        return hk.Linear(11)(x)

    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(optax.linear_schedule(1e-2, 1e-3, 5), eps=1e-3))
    return haiku(net, tokens(), tx, loss=lambda r, b: cross_entropy(r, b["after"]))


@row("haiku", "haiku")
def haiku_autoencoder_transpose():
    def net(hk, b):
        x = jax.nn.elu(hk.Conv2D(4, 3, 2)(b["x"]))
        return hk.Conv2DTranspose(1, 3, 2)(jax.nn.elu(hk.GroupNorm(2)(x)))

    return haiku(net, {"x": normal(2, 6, 6, 1)}, adam(1e-2), loss=lambda r, b: squared(r, b["x"]))
