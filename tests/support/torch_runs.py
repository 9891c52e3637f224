"""Runs of PyTorch: networks, batches and optimizers for them, and the loop that trains them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

from onward.frameworks.torch import from_torch, to_torch


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 6, num_layers=2, batch_first=True, dropout=0.3)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8, padding_idx=0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens, mask):
        y = self.encoder(self.embed(tokens), src_key_padding_mask=mask)
        return self.head(y.mean(1))


class Decoder(nn.Module):
    """A token is predicted from those before it; embedding and head are tied."""

    def __init__(self, tokens=13, width=8, length=6):
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.position = nn.Parameter(torch.randn(length, width) / 10)
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(width, tokens, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.drop(self.embed(tokens) + self.position[: tokens.shape[1]])
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.mix(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return self.head(x).transpose(1, 2)


def mlp():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))


def cnn():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout2d(0.2), nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, momentum=0.3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(6, 5),
    )  # fmt: skip


class Case(NamedTuple):
    module: Callable
    inputs: Callable[[int], dict]
    target: Callable[[int], torch.Tensor]
    loss: Callable
    optimizer: Callable
    scheduler: Callable | None = None
    clip: float | None = None
    shapes: dict | None = None


def _tokens(n, vocabulary=11):
    return torch.randint(0, vocabulary, (n, 6))


CASES = {
    "mlp": Case(
        mlp,
        lambda n: {"input": torch.randn(n, 6)},
        lambda n: torch.randint(0, 4, (n,)),
        nn.CrossEntropyLoss(label_smoothing=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
        lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    ),
    "cnn": Case(
        cnn,
        lambda n: {"input": torch.randn(n, 2, 6, 6)},
        lambda n: torch.randint(0, 5, (n,)),
        nn.CrossEntropyLoss(),
        lambda p: torch.optim.Adam(p, lr=1e-2, eps=1e-3),
        clip=1.0,
    ),
    "lstm": Case(
        Recurrent,
        lambda n: {"x": torch.randn(n, 5, 4)},
        lambda n: torch.randn(n, 3),
        nn.MSELoss(),
        lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.5),
    ),
    "encoder": Case(
        Encoder,
        lambda n: {"tokens": _tokens(n), "mask": torch.arange(6)[None] >= torch.randint(2, 7, (n, 1))},
        lambda n: torch.randint(0, 3, (n,)),
        nn.CrossEntropyLoss(),
        lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-3),
        lambda o: lr_scheduler.CosineAnnealingLR(o, 30),
    ),
    "decoder": Case(
        Decoder,
        lambda n: {"tokens": _tokens(n, 13)},
        lambda n: _tokens(n, 13),
        nn.CrossEntropyLoss(),
        lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-3),
        shapes={"tokens": {0: "batch", 1: "time"}},
    ),
}


class Loop:
    """Training as people write it."""

    def __init__(self, case, module, optimizer, scheduler, loss, *, clip):
        self.module, self.optimizer, self.scheduler, self.loss, self.clip = module, optimizer, scheduler, loss, clip
        self.case = case

    @classmethod
    def of(cls, case):
        torch.manual_seed(0)
        module = case.module()
        optimizer = case.optimizer(module.parameters())
        scheduler = case.scheduler(optimizer) if case.scheduler else None
        return cls(case, module, optimizer, scheduler, case.loss, clip=case.clip)

    @classmethod
    def back(cls, case, training):
        return cls(case, *to_torch(training), clip=None)

    def steps(self, batches):
        losses = []
        for inputs, target in batches:
            self.optimizer.zero_grad()
            loss = self.loss(self.module(**inputs), target)
            loss.backward()
            if self.clip:
                nn.utils.clip_grad_norm_(self.module.parameters(), self.clip)
            self.optimizer.step()
            if self.scheduler:
                self.scheduler.step()
            losses.append(float(loss.detach()))
        return losses

    def captured(self, **more):
        case = self.case
        inputs, _ = batches(case, 1)[0]
        return from_torch(
            self.module, inputs, loss=self.loss, optimizer=self.optimizer, scheduler=self.scheduler,
            clip=self.clip, dynamic_shapes=case.shapes, **more,
        )  # fmt: skip


def batches(case, count, seed=0):
    torch.manual_seed(seed)
    sizes = [3 if i % 4 == 3 else 8 for i in range(count)]
    return [(case.inputs(n), case.target(n)) for n in sizes]


def without_dropout(case):
    def made():
        module = case.module()
        for layer in module.modules():
            for name in ("p", "dropout"):
                if isinstance(getattr(layer, name, None), float):
                    setattr(layer, name, 0.0)
        return module

    return case._replace(module=made)
