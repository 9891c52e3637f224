"""Random numbers of PyTorch's own. Training steps of Onward make theirs in the graph."""

from __future__ import annotations

import struct

import torch
from torch.nn import functional as F

from onward.engines.framework import Operators
from onward.engines.torch.types import CODES, TYPES

operators = Operators()


def generator(seed, device):
    """None stands for PyTorch's own."""
    if seed is None:
        return None
    bits = struct.unpack("<q", struct.pack("<d", seed))[0]  # a float, of which different ones must not be the same
    return torch.Generator(device).manual_seed(bits)


@operators.define("Dropout")
def dropout(x, ratio=None, training_mode=None, *, seed, outputs):
    share = 0.5 if ratio is None else float(ratio)
    if training_mode is None or not training_mode:
        return x, torch.ones_like(x, dtype=torch.bool)
    if outputs == 1 and seed is None:
        return F.dropout(x, share)
    mask = torch.rand(x.shape, generator=generator(seed, x.device), device=x.device) >= share
    return torch.where(mask, x / (1 - share), 0), mask


@operators.define("Bernoulli")
def bernoulli(x, *, dtype, seed):
    drawn = torch.rand(x.shape, generator=generator(seed, x.device), device=x.device, dtype=x.dtype) < x
    return drawn.to(x.dtype if dtype is None else TYPES[dtype])


@operators.define("Multinomial")
def multinomial(x, *, dtype, sample_size, seed):
    drawn = torch.multinomial(x.softmax(1), sample_size, replacement=True, generator=generator(seed, x.device))
    return drawn.to(TYPES[dtype])


@operators.define("RandomNormal")
def random_normal(*, dtype, mean, scale, seed, shape, device="cpu"):
    drawn = torch.randn(shape, generator=generator(seed, device), device=device, dtype=TYPES[dtype])
    return drawn * scale + mean


@operators.define("RandomNormalLike")
def random_normal_like(x, *, dtype, mean, scale, seed):
    dtype = CODES[x.dtype] if dtype is None else dtype
    return random_normal(dtype=dtype, mean=mean, scale=scale, seed=seed, shape=x.shape, device=x.device)


@operators.define("RandomUniform")
def random_uniform(*, dtype, high, low, seed, shape, device="cpu"):
    drawn = torch.rand(shape, generator=generator(seed, device), device=device, dtype=TYPES[dtype])
    return drawn * (high - low) + low


@operators.define("RandomUniformLike")
def random_uniform_like(x, *, dtype, high, low, seed):
    dtype = CODES[x.dtype] if dtype is None else dtype
    return random_uniform(dtype=dtype, high=high, low=low, seed=seed, shape=x.shape, device=x.device)
