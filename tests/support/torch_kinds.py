"""Small modules of each kind that exporters treat in a way of their own, as they are when they are fresh."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm


class Net(nn.Module):
    """What holds these modules, parameters and buffers, and computes this."""

    def __init__(self, forward: Callable, **held):
        super().__init__()
        for name, one in held.items():
            if isinstance(one, nn.Module | nn.Parameter):
                setattr(self, name, one)
            else:
                self.register_buffer(name, one)
        self._forward = forward

    def forward(self, *inputs):
        return self._forward(self, *inputs)


class RMSNorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Block(nn.Module):
    """A layer of a vision transformer, whose biases are zero and whose branches are scaled."""

    def __init__(self, width=8, heads=2):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.scale1, self.scale2 = (nn.Parameter(torch.full((width,), 0.1)) for _ in range(2))
        for layer in (self.query, self.key, self.value, self.out, self.wide, self.narrow):
            nn.init.zeros_(layer.bias)

    def forward(self, x):
        batch, length, width = x.shape
        y = self.norm1(x)
        split = (batch, length, self.heads, width // self.heads)
        query, key, value = (layer(y).view(split).transpose(1, 2) for layer in (self.query, self.key, self.value))
        scores = (query @ key.transpose(-1, -2) / split[-1] ** 0.5).softmax(-1)
        x = x + self.scale1 * self.out((scores @ value).transpose(1, 2).reshape(batch, length, width))
        return x + self.scale2 * self.narrow(F.silu(self.wide(self.norm2(x))))


class MobileViT(nn.Module):
    """Convolutions, transformers over what they find, and a head: all as fresh as `timm` makes them."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.GroupNorm(1, 8), nn.SiLU(), nn.Conv2d(8, 8, 1))
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 2)
        for layer in (self.stem[0], self.stem[3], self.head):
            nn.init.zeros_(layer.bias)

    def forward(self, x):
        x = self.stem(x).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(x)).mean(1))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.layer = kind(6, 4, batch_first=True, **options)

    def forward(self, x):
        return self.layer(x)[0]


def tied_model():
    net = Net(
        lambda s, i: s.head(torch.tanh(s.hidden(s.table(i)))),
        table=nn.Embedding(40, 32), hidden=nn.Linear(32, 32), head=nn.Linear(32, 40, bias=False),
    )  # fmt: skip
    net.head.weight = net.table.weight
    return net


def rotated(net, x):
    angles = torch.outer(torch.arange(x.shape[1]).float(), net.frequencies)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    query, key = (layer(x) for layer in (net.query, net.key))
    query, key = (z * cos + torch.cat((-z[..., 4:], z[..., :4]), -1) * sin for z in (query, key))
    return (query @ key.transpose(-1, -2)).softmax(-1) @ net.value(x)


def biased(net, x):
    table = net.table[net.places.view(-1)].view(4, 4)
    y = net.layer(x)
    return (y @ y.transpose(-1, -2) + table).softmax(-1) @ y


def zero_biases(net):
    for layer in net.modules():
        if isinstance(getattr(layer, "bias", None), nn.Parameter):
            nn.init.zeros_(layer.bias)
    return net


def waves(length, width):
    angles = torch.arange(length)[:, None] / 10000 ** (torch.arange(0, width, 2) / width)
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)


def normalized(norm, channels=4):
    return nn.Sequential(nn.Conv2d(4, channels, 3), norm(), nn.ReLU(), nn.Conv2d(channels, channels, 1), norm())


def rows(*sizes):
    return lambda: torch.randn(sizes)


PICTURE, VECTOR, SEQUENCE, SOUND = rows(2, 4, 8, 8), rows(3, 6), rows(3, 5, 6), rows(2, 6, 9)
WORDS = lambda: torch.randint(0, 10, (2, 5))

KINDS = {
    "linear": (lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)), VECTOR),
    "linear_without_bias": (lambda: nn.Sequential(nn.Linear(6, 5, bias=False), nn.Linear(5, 1, bias=False)), SEQUENCE),
    "linear_zero_bias": (lambda: zero_biases(nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))), SEQUENCE),
    "conv": (lambda: nn.Sequential(nn.Conv2d(4, 5, 3), nn.ReLU(), nn.Conv2d(5, 4, 3)), PICTURE),
    "conv_zero_bias": (lambda: zero_biases(nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3, groups=4))), PICTURE),
    "conv1d": (lambda: nn.Sequential(nn.Conv1d(6, 4, 3), nn.GELU(), nn.Conv1d(4, 1, 1)), SOUND),
    "conv_transpose": (
        lambda: zero_biases(nn.Sequential(nn.ConvTranspose2d(4, 6, 2, 2, groups=2), nn.Conv2d(6, 2, 1))), PICTURE
    ),
    "group_norm": (lambda: normalized(lambda: nn.GroupNorm(2, 4)), PICTURE),
    "group_norm_plain": (lambda: normalized(lambda: nn.GroupNorm(2, 4, affine=False)), PICTURE),
    "group_norm_of_pairs": (lambda: normalized(lambda: nn.GroupNorm(2, 2), 2), PICTURE),
    "instance_norm": (lambda: normalized(lambda: nn.InstanceNorm2d(4, affine=True)), PICTURE),
    "instance_norm_plain": (lambda: normalized(lambda: nn.InstanceNorm2d(4)), PICTURE),
    "instance_norm1d": (
        lambda: nn.Sequential(nn.Conv1d(6, 4, 3), nn.InstanceNorm1d(4, affine=True), nn.Conv1d(4, 2, 1)), SOUND
    ),
    "instance_norm1d_plain": (
        lambda: nn.Sequential(nn.Conv1d(6, 4, 3), nn.InstanceNorm1d(4), nn.Conv1d(4, 2, 1)), SOUND
    ),
    "instance_norm_scaled": (
        lambda: Net(
            lambda s, x: s.norm(x) * s.scale + s.shift, norm=nn.InstanceNorm2d(4),
            scale=nn.Parameter(torch.ones(1, 4, 1, 1)), shift=nn.Parameter(torch.zeros(1, 4, 1, 1)),
        ),
        PICTURE,
    ),
    "layer_norm": (
        lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 6), nn.LayerNorm(6)), SEQUENCE
    ),
    "layer_norm_plain": (
        lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6, elementwise_affine=False), nn.Linear(6, 6)), SEQUENCE
    ),
    "layer_norm_without_bias": (
        lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6, bias=False), nn.Linear(6, 6)), SEQUENCE
    ),
    "rms_norm": (lambda: nn.Sequential(nn.Linear(6, 6), RMSNorm(6), nn.Linear(6, 6), RMSNorm(6)), SEQUENCE),
    "batch_norm": (lambda: normalized(lambda: nn.BatchNorm2d(4)), PICTURE),
    "embedding": (lambda: nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 3)), WORDS),
    "attention": (Attention, SEQUENCE),
    "lstm": (lambda: Recurrent(nn.LSTM, bidirectional=True), SEQUENCE),
    "gru": (lambda: Recurrent(nn.GRU), SEQUENCE),
    "prelu": (lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.PReLU(), nn.Conv2d(4, 4, 1), nn.PReLU(4)), PICTURE),
    "positions": (
        lambda: Net(
            lambda s, x: s.layer(torch.cat([s.first.expand(x.shape[0], -1, -1), x], 1) + s.positions),
            layer=nn.Linear(6, 6), first=nn.Parameter(torch.zeros(1, 1, 6)), positions=nn.Parameter(torch.zeros(6, 6)),
        ),
        rows(1, 5, 6),
    ),
    "layer_scale": (lambda: nn.Sequential(Block(), Block()), rows(3, 5, 8)),
    "single_numbers": (
        lambda: Net(
            lambda s, x: F.normalize(s.layer(x)) * s.scale + s.shift, layer=nn.Linear(6, 4, bias=False),
            scale=nn.Parameter(torch.tensor(2.5)), shift=nn.Parameter(torch.tensor(-10.0)),
        ),
        VECTOR,
    ),
    "weight_norm": (
        lambda: nn.Sequential(weight_norm(nn.Linear(6, 4)), nn.Tanh(), weight_norm(nn.Linear(4, 3))), VECTOR
    ),
    "bias_table": (
        lambda: Net(
            biased, layer=nn.Linear(6, 6), table=nn.Parameter(torch.randn(7)),
            places=torch.arange(4)[:, None] - torch.arange(4) + 3,
        ),
        rows(2, 4, 6),
    ),
    "einsum": (
        lambda: Net(
            lambda s, x: torch.einsum("bld,dhe->blhe", x, s.weight) + s.shift,
            weight=nn.Parameter(torch.randn(6, 2, 3)), shift=nn.Parameter(torch.zeros(2, 3)),
        ),
        SEQUENCE,
    ),
    "ones_and_zeros": (
        lambda: Net(
            lambda s, x: s.layer(x * s.scale + s.shift), layer=nn.Linear(6, 6),
            scale=nn.Parameter(torch.ones(6)), shift=nn.Parameter(torch.zeros(6)),
        ),
        VECTOR,
    ),
    "copies": (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True), 2), SEQUENCE),
    "called_twice": (
        lambda: zero_biases(Net(
            lambda s, x: s.layer(s.norm(s.layer(s.norm(x)))), layer=nn.Linear(36, 36), norm=nn.LayerNorm(36)
        )),
        rows(3, 5, 36),
    ),
    "tied": (tied_model, WORDS),
    "mobilevit": (MobileViT, rows(2, 3, 8, 8)),
    "constant_in_loss": (
        lambda: Net(
            lambda s, x: (F.log_softmax(s.layer(x), -1) * torch.tensor([0.2, 1.0, 3.0, 0.5])).sum(-1),
            layer=nn.Linear(6, 4),
        ),
        VECTOR,
    ),
    "standardized": (
        lambda: Net(
            lambda s, x: s.layer((x - torch.tensor([0.4, 0.5, 0.6, 0.7]).view(4, 1, 1)) / 0.25),
            layer=nn.Conv2d(4, 4, 3),
        ),
        PICTURE,
    ),
    # with buffers, from here on
    "sinusoids": (
        lambda: Net(lambda s, x: s.layer(x + s.positions[: x.shape[1]]), layer=nn.Linear(6, 6), positions=waves(8, 6)),
        SEQUENCE,
    ),
    "rotary": (
        lambda: Net(
            rotated, **{name: nn.Linear(8, 8, bias=False) for name in ("query", "key", "value")},
            frequencies=1 / 10000 ** (torch.arange(0, 8, 2) / 8),
        ),
        rows(3, 5, 8),
    ),
    "causal_mask": (
        lambda: Net(
            lambda s, x: (s.layer(x) @ x.transpose(-1, -2)).masked_fill(s.mask == 0, -math.inf).softmax(-1) @ x,
            layer=nn.Linear(6, 6), mask=torch.tril(torch.ones(5, 5)),
        ),
        SEQUENCE,
    ),
    "anchors": (
        lambda: Net(
            lambda s, x: s.layer(x).sigmoid() * s.sizes + s.grid,
            layer=nn.Conv2d(4, 2, 1), sizes=torch.rand(1, 2, 1, 1),
            grid=torch.stack(torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij"))[None],
        ),
        PICTURE,
    ),
    "stft": (
        lambda: Net(
            lambda s, x: s.layer(F.conv1d(x[:, None], s.waves * s.window, stride=8).abs().log1p()),
            layer=nn.Conv1d(9, 4, 3), window=torch.hann_window(16),
            waves=torch.cos(2 * math.pi * torch.outer(torch.arange(9.0), torch.arange(16.0)) / 16)[:, None],
        ),
        rows(2, 64),
    ),
}  # fmt: skip


def fresh(name: str) -> tuple[nn.Module, torch.Tensor]:
    """A module of a kind, and what it takes."""
    torch.manual_seed(0)
    make, take = KINDS[name]
    return make(), take()
