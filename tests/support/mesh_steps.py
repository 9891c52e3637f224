"""Training steps on a mesh of JAX, and what they lead to as JSON: `python mesh_steps.py MODEL MESH`."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import onnx
import onnx.parser

import onward

NET = """
    <ir_version: 10, opset_import: ["": 21]>
    net (float[n, 1, 8, 8] image) => (float[n, 10] logits)
    <float[4, 1, 3, 3] w1, float[4] scale, float[4] bias, float[4] mean, float[4] var, float[144, 32] w2, float[32] b2,
     float[32, 10] w3, float[10] b3>
    {
        conv = Conv(image, w1)
        normal = BatchNormalization(conv, scale, bias, mean, var)
        active = Relu(normal)
        flat = Flatten(active)
        hidden = Gemm(flat, w2, b2)
        kept = Relu(hidden)
        logits = Gemm(kept, w3, b3)
    }"""

BLOCK = """
        n{i} = LayerNormalization<axis=-1>({x}, h{i}_scale, h{i}_shift)
        q{i} = MatMul(n{i}, h{i}_q)
        k{i} = MatMul(n{i}, h{i}_k)
        v{i} = MatMul(n{i}, h{i}_v)
        qh{i} = Reshape(q{i}, heads)
        kh{i} = Reshape(k{i}, heads)
        vh{i} = Reshape(v{i}, heads)
        qt{i} = Transpose<perm=[0, 2, 1, 3]>(qh{i})
        kt{i} = Transpose<perm=[0, 2, 3, 1]>(kh{i})
        vt{i} = Transpose<perm=[0, 2, 1, 3]>(vh{i})
        s{i} = MatMul(qt{i}, kt{i})
        m{i} = Add(s{i}, mask)
        p{i} = Softmax(m{i})
        c{i} = MatMul(p{i}, vt{i})
        ct{i} = Transpose<perm=[0, 2, 1, 3]>(c{i})
        cf{i} = Reshape(ct{i}, flat)
        o{i} = MatMul(cf{i}, h{i}_o)
        r{i} = Add({x}, o{i})
        f{i} = MatMul(r{i}, h{i}_fc1)
        fb{i} = Add(f{i}, h{i}_fc1_bias)
        g{i} = Gelu(fb{i})
        d{i} = MatMul(g{i}, h{i}_fc2)
        x{i} = Add(r{i}, d{i})"""
WIDTH, WORDS, LENGTH = 16, 40, 6
SIZES = {"scale": [16], "shift": [16], "q": [16, 16], "k": [16, 16], "v": [16, 16], "o": [16, 16], "fc1": [16, 64]}
SIZES |= {"fc1_bias": [64], "fc2": [64, 16]}


def gpt(layers: int) -> onnx.ModelProto:
    shapes = {"words": [WORDS, WIDTH], "places": [LENGTH, WIDTH]}
    shapes |= {f"h{i}_{name}": size for i in range(layers) for name, size in SIZES.items()}
    declared = ", ".join(f"float{shape} {name}" for name, shape in shapes.items())
    blocks = "".join(BLOCK.format(i=i, x="x" if i == 0 else f"x{i - 1}") for i in range(layers))
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 21]>
        gpt (int64[n, {LENGTH}] tokens) => (float[n, {WORDS}, {LENGTH}] logits)
        <{declared}, float[{LENGTH}, {LENGTH}] mask, int64[4] heads = {{0, 0, 4, 4}}, int64[3] flat = {{0, 0, {WIDTH}}}>
        {{
        e = Gather(words, tokens)
        x = Add(e, places){blocks}
        table = Transpose(words)
        y = MatMul(x{layers - 1}, table)
        logits = Transpose<perm=[0, 2, 1]>(y)
        }}""")
    return fill(model, {**shapes, "mask": [LENGTH, LENGTH]})


def net() -> onnx.ModelProto:
    shapes = {"w1": [4, 1, 3, 3], "scale": [4], "bias": [4], "mean": [4], "var": [4], "w2": [144, 32], "b2": [32]}
    return fill(onnx.parser.parse_model(NET), {**shapes, "w3": [32, 10], "b3": [10]})


def fill(model: onnx.ModelProto, shapes: dict[str, list[int]]) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    for name, shape in shapes.items():
        if name == "mask":
            array = np.triu(np.full(shape, -1e9), 1)
        elif len(shape) == 1:
            array = np.full(shape, float(name.rpartition("_")[2] in ("scale", "var")))
        else:
            array = rng.normal(0, 0.1, shape)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    return model


MODELS = {"net": net, "gpt": lambda: gpt(2), "small gpt": lambda: gpt(1)}
RECIPE: dict[str, Any] = {"optimizer": "adamw:lr=1e-3", "clip": "norm:0.5", "accumulate": 2}


def training(name: str) -> onward.Model:
    return onward.prepare(MODELS[name](), loss="cross_entropy", **RECIPE)


def batches(name: str, count: int) -> list[dict[str, np.ndarray]]:
    """Every third is one that two devices cannot share, but for the model that is to be quick."""
    rng = np.random.default_rng(1)
    sizes = [7 if i % 3 == 2 and name != "small gpt" else 8 for i in range(count)]
    if name == "net":
        return [{"image": rng.normal(1, 2, (n, 1, 8, 8)).astype("f4"), "labels": rng.integers(0, 10, n)} for n in sizes]
    shapes = [(n, LENGTH) for n in sizes]
    return [{"tokens": rng.integers(0, WORDS, s), "labels": rng.integers(0, WORDS, s)} for s in shapes]


def run(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """What 20 steps lead to. State is taken out and put back in the middle."""
    with onward.engines.start(training(name), engine="jax", **options) as engine:
        parts = [engine.group.part(batch) for batch in batches(name, 20)]
        losses = [float(engine.step(part)["loss"]) for part in parts[:10]]
        state = engine.state()
        engine.load_state(state)
        losses += [float(engine.step(part)["loss"]) for part in parts[10:]]
        found = engine.evaluate(parts[2])
        gradients = engine.gradients(parts[2]) if name != "small gpt" else {}
        return {
            "losses": [*losses, float(found["loss"])],
            "logits": found["logits"].tolist(),
            "state": {name: float(np.linalg.norm(array)) for name, array in engine.state().items()},
            "norms": {name: float(np.linalg.norm(array)) for name, array in gradients.items()},
            "bytes": sum((x.addressable_data(0) if options else x).nbytes for x in engine._state.values()),
        }


if __name__ == "__main__":
    _, name, mesh = sys.argv
    print(json.dumps(run(name, {"mesh": mesh} if mesh else {})))
