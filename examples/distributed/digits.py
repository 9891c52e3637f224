"""Two training models on scikit-learn's digits, and their data, for the programs in this folder.

`cnn` classifies digits, with BatchNormalization. `gpt` generates digits: it predicts the next
pixel.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
from sklearn.datasets import load_digits

import onward

BATCH, ACCUMULATE, UPDATES = 32, 2, 20
"""Samples in a batch of all processes; batches per update; updates."""
CLIP = 1.0
_WIDTH, _LAYERS, _SHADES = 16, 2, 17

_CNN = """
    <ir_version: 11, opset_import: ["": 23]>
    cnn (float[n, 1, 8, 8] image) => (float[n, 10] scores) {
        a = Conv<pads = [1, 1, 1, 1]>(image, conv1_weight)
        b = BatchNormalization(a, norm1_scale, norm1_bias, norm1_mean, norm1_var)
        c = Relu(b)
        d = Conv<pads = [1, 1, 1, 1], strides = [2, 2]>(c, conv2_weight)
        e = BatchNormalization(d, norm2_scale, norm2_bias, norm2_mean, norm2_var)
        f = Relu(e)
        g = Flatten(f)
        scores = MatMul(g, head)
    }"""
_CNN_WEIGHTS = {"conv1.weight": (8, 1, 3, 3), "conv2.weight": (8, 8, 3, 3), "head": (128, 10)} | {
    f"norm{i}.{name}": (8,) for i in (1, 2) for name in ("scale", "bias", "mean", "var")
}

_LAYER = """
        a# = LayerNormalization(x#, layer#_scale1, layer#_bias1)
        q# = MatMul(a#, layer#_query)
        k# = MatMul(a#, layer#_key)
        v# = MatMul(a#, layer#_value)
        b# = Attention<is_causal = 1, q_num_heads = 2, kv_num_heads = 2>(q#, k#, v#)
        c# = MatMul(b#, layer#_out)
        d# = Add(x#, c#)
        e# = LayerNormalization(d#, layer#_scale2, layer#_bias2)
        f# = MatMul(e#, layer#_up)
        g# = Gelu(f#)
        h# = MatMul(g#, layer#_down)
        x@ = Add(d#, h#)"""
_GPT = f"""
    <ir_version: 11, opset_import: ["": 23]>
    gpt (int64[n, 63] pixels) => (float[n, 63, {_SHADES}] scores) {{
        words = Gather(embedding, pixels)
        x0 = Add(words, positions)
        LAYERS
        scores = MatMul(x{_LAYERS}, head)
    }}""".replace("LAYERS", "".join(_LAYER.replace("#", str(i)).replace("@", str(i + 1)) for i in range(_LAYERS)))
_LAYER_WEIGHTS = {
    **dict.fromkeys(["query", "key", "value", "out"], (_WIDTH, _WIDTH)),
    **dict.fromkeys(["scale1", "bias1", "scale2", "bias2"], (_WIDTH,)),
    "up": (_WIDTH, 4 * _WIDTH),
    "down": (4 * _WIDTH, _WIDTH),
}
_GPT_WEIGHTS = {
    "embedding": (_SHADES, _WIDTH),
    "positions": (63, _WIDTH),
    "head": (_WIDTH, _SHADES),
    **{f"layer{i}.{name}": shape for i in range(_LAYERS) for name, shape in _LAYER_WEIGHTS.items()},
}


def prepare_digits(kind: str, **changes: object) -> tuple[onward.Model, np.ndarray, np.ndarray]:
    """Return a training model by its name, with inputs and targets for all updates."""
    images, labels = (digits[: BATCH * ACCUMULATE * UPDATES] for digits in load_digits(return_X_y=True))
    recipe = {"optimizer": "adamw:lr=3e-3", "schedule": f"cosine:steps={2 * UPDATES}", "clip": f"norm:{CLIP}"} | changes
    if kind == "cnn":
        training = onward.prepare(_with_weights(_CNN, _CNN_WEIGHTS), loss="cross_entropy", **recipe)
        return training, (images / 16).astype(np.float32).reshape(-1, 1, 8, 8), labels
    training = onward.prepare(_with_weights(_GPT, _GPT_WEIGHTS), loss="cross_entropy:axis=-1", **recipe)
    pixels = images.astype(np.int64)
    return training, pixels[:, :-1], pixels[:, 1:]


def _with_weights(text: str, shapes: dict[str, tuple[int, ...]]) -> onnx.ModelProto:
    model, rng = onnx.parser.parse_model(text), np.random.default_rng(0)
    for node in model.graph.node:
        node.input[:] = [name.replace("_", ".") for name in node.input]  # the text format of ONNX has no dots in names
    for name, shape in shapes.items():
        is_one = name.rpartition(".")[2].startswith(("scale", "var"))
        numbers = rng.normal(0, 0.2, shape) if len(shape) > 1 else np.full(shape, is_one)
        model.graph.initializer.append(onnx.numpy_helper.from_array(numbers.astype(np.float32), name))
    return model
