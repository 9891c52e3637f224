"""Attention by native kernels: against PyTorch in double precision, and whole models with and without them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from native_kernels import needs_kernels, run_kernel

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
