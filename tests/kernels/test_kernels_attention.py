"""Attention by native kernels: against PyTorch in double precision, and whole models with and without them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest
import torch
from models import small_transformer
from native_kernels import assert_the_same_with_kernels, needs_kernels, run_kernel
from onnx import numpy_helper, parser

import onward
from onward.kernels import DOMAIN, PASSES
from onward.lowering.step import LoweringOptions, lower_for_engine

pytestmark = needs_kernels

SHAPES = {  # samples, heads, queries, keys, width, width of values
    "odd": (2, 3, 7, 5, 9, 11),
    "one": (1, 1, 1, 1, 1, 1),
    "several blocks": (1, 2, 130, 601, 33, 16),
    "parts of queries": (1, 1, 700, 300, 64, 64),
    "no samples": (0, 2, 3, 4, 8, 8),
    "no keys": (2, 1, 3, 0, 8, 8),
}
MASKS = {
    "none": lambda rng, n, h, t, s: None,
    "all": lambda rng, n, h, t, s: rng.standard_normal((n, h, t, s)),
    "keys": lambda rng, n, h, t, s: np.where(rng.random((n, 1, 1, s)) < 0.5, 0, -np.inf),
    "finite": lambda rng, n, h, t, s: np.where(rng.random((t, s)) < 0.5, 0, np.finfo(np.float32).min),
    "queries": lambda rng, n, h, t, s: rng.standard_normal((h, t, 1)),
}


def attend(q, k, v, mask, scale, causal, guarded=False):
    """The definition."""
    scores = q @ k.transpose(-1, -2) * scale
    if mask is not None:
        scores = scores + mask
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).tril() == 0, -torch.inf)
    weights = torch.softmax(scores, -1)
    hidden = (scores == -torch.inf).all(-1, keepdim=True)
    return (weights.masked_fill(hidden, 0) if guarded else weights) @ v


@pytest.mark.parametrize("length_first", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_and_its_gradient_are_those_of_torch(shape, mask, causal, length_first):
    n, h, t, s, d, e = SHAPES[shape]
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(size).astype(np.float32) for size in ((n, h, t, d), (n, h, s, d), (n, h, s, e))]
    added = MASKS[mask](rng, n, h, t, s)
    added = None if added is None else added.astype(np.float32)
    dy = rng.standard_normal((n, h, t, e)).astype(np.float32)
    q, k, v = (torch.tensor(array, dtype=torch.float64, requires_grad=True) for array in arrays)
    wide = None if added is None else torch.tensor(added, dtype=torch.float64)
    y = attend(q, k, v, wide, 0.3, causal)
    expected = torch.autograd.grad(y, (q, k, v), torch.tensor(dy, dtype=torch.float64))
    blind = np.isnan(y.detach().numpy()).any()

    def turn(array):
        return array.swapaxes(1, 2).copy() if length_first else array

    settings = {"scale": 0.3, "causal": int(causal), "length_first": int(length_first)}
    out, sums = run_kernel("Attention", *map(turn, arrays), added, outputs=2, **settings)
    np.testing.assert_allclose(turn(out), y.detach(), rtol=1e-5, atol=2e-6)
    found = run_kernel(
        "AttentionGradient", turn(dy), *map(turn, arrays), out, sums, added, outputs=3, threads=1, **settings
    )
    for gradient, wanted in zip(found, expected, strict=True):
        if not blind:
            np.testing.assert_allclose(turn(gradient), wanted, rtol=1e-4, atol=1e-5)
    again = run_kernel("Attention", *map(turn, arrays), added, outputs=2, threads=1, **settings)[0]
    np.testing.assert_array_equal(out, again)


@pytest.mark.parametrize("guarded", [0, 1])
def test_numbers_that_are_none_are_not_hidden(guarded):
    """A query without numbers has no result, also where queries that see nothing get zeros."""
    rng = np.random.default_rng(0)
    q, k, v, dy = (rng.standard_normal((1, 2, 5, 8)).astype(np.float32) for _ in range(4))
    q[0, 1, 3, 2] = np.nan
    out, sums = run_kernel("Attention", q, k, v, outputs=2, guarded=guarded)
    wide = [torch.tensor(array, requires_grad=True) for array in (q, k, v)]
    y = attend(*wide, None, 1, False, bool(guarded))
    np.testing.assert_allclose(out, y.detach(), rtol=1e-4, atol=1e-5)
    found = run_kernel("AttentionGradient", dy, q, k, v, out, sums, outputs=3, guarded=guarded)
    for gradient, wanted in zip(found, torch.autograd.grad(y, wide, torch.tensor(dy)), strict=True):
        np.testing.assert_array_equal(np.isnan(gradient), torch.isnan(wanted).numpy())


def test_queries_that_see_nothing_get_zeros_where_that_is_asked_for():
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((1, 2, 40, 8)).astype(np.float32) for _ in range(4)]
    mask = np.zeros((40, 40), np.float32)
    mask[3] = mask[39] = mask[:, 5] = -np.inf
    dy = arrays.pop()
    q, k, v = (torch.tensor(array, dtype=torch.float64, requires_grad=True) for array in arrays)
    seen = [i for i in range(40) if i not in (3, 39)]
    y = attend(q[:, :, seen], k, v, torch.tensor(mask[seen]), 1, False)
    expected = torch.autograd.grad(y, (q, k, v), torch.tensor(dy[:, :, seen], dtype=torch.float64))
    out, sums = run_kernel("Attention", *arrays, mask, outputs=2, guarded=1)
    np.testing.assert_allclose(out[:, :, seen], y.detach(), rtol=1e-5, atol=2e-6)
    assert (out[:, :, [3, 39]] == 0).all()
    found = run_kernel("AttentionGradient", dy, *arrays, out, sums, mask, outputs=3, guarded=1)
    for gradient, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(gradient, wanted, rtol=1e-4, atol=1e-5)


# ---- whole models ----------------------------------------------------------------------------------------------------

TRIANGLE = np.tri(6, dtype=bool)
FORMS = {  # from q, k, v [2, 2, 6, 4] to y, and what the kernel is told
    "torch": (
        """dim = Shape <start = 3, end = 4> (q) wide = CastLike(dim, q) one = Constant <value_float = 1.0> ()
        root = Sqrt(wide) scale = Div(one, root) side = Sqrt(scale) a = Mul(q, side)
        whole = Shape(k) flat = Constant <value_ints = [-1, 6, 4]> () back = Constant <value_ints = [2, 2, 4, 6]> ()
        k3 = Reshape(k, flat) kt = Transpose <perm = [0, 2, 1]> (k3) k4 = Reshape(kt, back)
        side2 = CastLike(side, k4) b = Mul(k4, side2) scores = MatMul(a, b) weights = Softmax <axis = -1> (scores)
        y = MatMul(weights, v)""",
        {"scale": 0.5},
    ),
    "causal by Trilu": (
        """square = Constant <value_ints = [6, 6]> () one = Constant <value_float = 1.0> ()
        ones = Expand(one, square) lower = Trilu <upper = 0> (ones) zero = Constant <value_float = 0.0> ()
        hidden = Equal(lower, zero) least = Constant <value = float {-3.4028234663852886e+38}> ()
        mask = Where(hidden, least, zero) kt = Transpose <perm = [0, 1, 3, 2]> (k) scores = MatMul(q, kt)
        masked = Add(scores, mask) weights = Softmax <axis = 3> (masked) y = MatMul(weights, v)""",
        {"causal": 1},
    ),
    "causal by Where": (
        """kt = Transpose <perm = [0, 1, 3, 2]> (k) scores = MatMul(q, kt) two = Constant <value_float = 2.0> ()
        scaled = Div(scores, two) least = Constant <value_float = -1e38> () masked = Where(triangle, scaled, least)
        weights = Softmax <axis = -1> (masked) y = MatMul(weights, v)""",
        {"scale": 0.5, "mask": True},
    ),
    "keys that are hidden, guarded": (
        """zero = Constant <value_float = 0.0> () least = Constant <value = float {-inf}> ()
        mask = Where(seen, zero, least) kt = Transpose <perm = [0, 1, 3, 2]> (k) scores = MatMul(q, kt)
        masked = Add(mask, scores) all = Softmax <axis = -1> (masked) nothing = IsNaN(all)
        weights = Where(nothing, zero, all) y = MatMul(weights, v)""",
        {"guarded": 1, "mask": True},
    ),
    "a temperature that is learned": (
        """kt = Transpose <perm = [0, 1, 3, 2]> (k) scores = MatMul(q, kt) scaled = Mul(scores, temperature)
        weights = Softmax <axis = -1> (scaled) y = MatMul(weights, v)""",
        {"scale": 1.0},
    ),
    "the operator": ("y = Attention(q, k, v, triangle)", {"guarded": 1, "scale": 0.5, "mask": True}),
    "heads side by side": (
        """mixed3 = Attention <q_num_heads = 2, kv_num_heads = 2, is_causal = 1> (pq, pk, pv)
        mixed4 = Reshape(mixed3, heads) y = Transpose <perm = [0, 2, 1, 3]> (mixed4)""",
        {"causal": 1, "scale": 0.5},
    ),
    "a mask that is learned": (
        """kt = Transpose <perm = [0, 1, 3, 2]> (k) scores = MatMul(q, kt) masked = Add(scores, bias)
        weights = Softmax <axis = -1> (masked) y = MatMul(weights, v)""",
        None,
    ),
}


def model_with(form: str) -> onnx.ModelProto:
    """Attention between projections, with the loss: x [2, 6, 8], seen [2, 1, 1, 6] -> loss []."""
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(0, 0.6, (8, 8)) for name in ("wq", "wk", "wv", "wo")}
    weights |= {"temperature": np.array([0.7]), "bias": rng.normal(0, 1, (6, 6))}
    used = "Attention" in form
    model = parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": {23 if used else 20}]>
        attention (float[2, 6, 8] x, bool[2, 1, 1, 6] seen) => (float[2, 6, 8] output)
        <int64[4] heads = {{2, 6, 2, 4}}, int64[3] joined = {{2, 6, 8}}> {{
            pq = MatMul(x, wq) pk = MatMul(x, wk) pv = MatMul(x, wv)
            hq = Reshape(pq, heads) hk = Reshape(pk, heads) hv = Reshape(pv, heads)
            q = Transpose <perm = [0, 2, 1, 3]> (hq) k = Transpose <perm = [0, 2, 1, 3]> (hk)
            v = Transpose <perm = [0, 2, 1, 3]> (hv)
            {form}
            turned = Transpose <perm = [0, 2, 1, 3]> (y) mixed = Reshape(turned, joined) output = MatMul(mixed, wo)
        }}"""
    )
    named = {**weights, "triangle": TRIANGLE}
    read = {name for node in model.graph.node for name in node.input}
    arrays = {n: w if w.dtype == bool else w.astype(np.float32) for n, w in named.items() if n in read}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    return model


@pytest.mark.parametrize("form", FORMS)
def test_attention_of_exporters_is_found_and_gives_the_same(form):
    text, wanted = FORMS[form]
    trained = [name for name in ("wq", "wk", "wv", "wo", "temperature", "bias") if name[0] == "w" or name in text]
    model = onward.prepare(model_with(text), loss="mse", optimizer="sgd:lr=0.1", trainable=trained)
    lowered = lower_for_engine(model, options=LoweringOptions(passes=PASSES))
    kinds = Counter(node.op_type for node in lowered.graph)
    found = [node for node in lowered.graph if node.domain == DOMAIN and node.op_type == "Attention"]
    assert len(found) == kinds["AttentionGradient"] == (wanted is not None)
    if wanted is not None:
        swaps = [
            node for node in lowered.graph if node.op_type == "Transpose" and len(node.attributes["perm"].value) == 4
        ]
        assert kinds["Softmax"] == 0 and (not swaps or form == "heads side by side")
        settings = {name: attribute.value for name, attribute in found[0].attributes.items()}
        settings["mask"] = len(found[0].inputs) > 3
        usual = {"scale": 1.0, "causal": 0, "guarded": 0, "length_first": 1, "mask": False}
        expected = {**usual, **wanted}
        assert settings.pop("scale") == pytest.approx(expected.pop("scale"))
        assert settings == expected
    rng = np.random.default_rng(1)
    x, target = (rng.standard_normal((2, 6, 8)).astype(np.float32) for _ in range(2))
    seen = np.ones((2, 1, 1, 6), bool)
    seen[1, ..., 2:] = False
    assert_the_same_with_kernels(model, {"x": x, "target": target, "seen": seen})


def test_whole_models_are_the_same_with_kernels():
    model = onward.prepare(small_transformer(), loss="value:loss", optimizer="adam")
    kinds = Counter(node.op_type for node in lower_for_engine(model, options=LoweringOptions(passes=PASSES)).graph)
    assert kinds["Attention"] == kinds["GeluOfTanhGradient"] == 2 and kinds["LayerNormalizationGradient"] == 4
    assert kinds["CrossEntropy"] == 1
    rng = np.random.default_rng(0)
    assert_the_same_with_kernels(model, {name: rng.integers(0, 32, (3, 11)) for name in ("tokens", "labels")})
