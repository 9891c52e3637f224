"""Sequence models in PyTorch: transformers, and a tagger with a GRU."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from workloads.architectures import CLASSES, DISTILBERT, GPT, PATCH, POSITIONS, TAGGER, VIT, Adapters, Transformer


class Layer(nn.Module):
    """Attention, then an MLP, each behind a LayerNorm."""

    def __init__(self, sizes: Transformer, is_causal: bool) -> None:
        super().__init__()
        self.heads, self.is_causal, width = sizes.heads, is_causal, sizes.width
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, 2)
        x = x + self.project(attend(q, k, v, self.heads, self.is_causal))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, is_causal: bool = False) -> torch.Tensor:
    n, length, width = q.shape
    q, k, v = (x.view(n, length, heads, -1).transpose(1, 2) for x in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    return mixed.transpose(1, 2).reshape(n, length, width)


class LanguageModel(nn.Module):
    """A GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(GPT.vocabulary, GPT.width)
        self.positions = nn.Parameter(torch.empty(GPT.length, GPT.width).normal_(std=0.02))
        self.layers = nn.ModuleList(Layer(GPT, is_causal=True) for _ in range(GPT.layers))
        self.norm = nn.LayerNorm(GPT.width)
        self.head = nn.Linear(GPT.width, GPT.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class VisionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, VIT.width, PATCH, PATCH)
        self.class_token = nn.Parameter(torch.empty(1, 1, VIT.width).normal_(std=0.02))
        self.positions = nn.Parameter(torch.empty(VIT.length, VIT.width).normal_(std=0.02))
        self.layers = nn.ModuleList(Layer(VIT, is_causal=False) for _ in range(VIT.layers))
        self.norm = nn.LayerNorm(VIT.width)
        self.head = nn.Linear(VIT.width, CLASSES["vit"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patches = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), patches], 1) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)[:, 0])


class SelfAttention(nn.Module):
    def __init__(self, sizes: Transformer) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.query, self.key, self.value, self.out = (nn.Linear(sizes.width, sizes.width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(attend(self.query(x), self.key(x), self.value(x), self.heads))


class EncoderLayer(nn.Module):
    """Attention, then an MLP, each before a LayerNorm, as in BERT."""

    def __init__(self, sizes: Transformer) -> None:
        super().__init__()
        self.attention = SelfAttention(sizes)
        self.norm1 = nn.LayerNorm(sizes.width)
        self.up = nn.Linear(sizes.width, 4 * sizes.width)
        self.down = nn.Linear(4 * sizes.width, sizes.width)
        self.norm2 = nn.LayerNorm(sizes.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class TextClassifier(nn.Module):
    """DistilBERT."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(DISTILBERT.vocabulary, DISTILBERT.width)
        self.positions = nn.Parameter(torch.empty(POSITIONS, DISTILBERT.width))
        self.norm = nn.LayerNorm(DISTILBERT.width)
        self.layers = nn.ModuleList(EncoderLayer(DISTILBERT) for _ in range(DISTILBERT.layers))
        self.hidden = nn.Linear(DISTILBERT.width, DISTILBERT.width)
        self.head = nn.Linear(DISTILBERT.width, CLASSES["distilbert"])
        for name, parameter in self.named_parameters():
            if "norm" not in name:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.tokens(tokens) + self.positions[: tokens.shape[1]])
        for layer in self.layers:
            x = layer(x)
        return self.head(F.relu(self.hidden(x[:, 0])))


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TAGGER.vocabulary, TAGGER.embedding)
        self.gru = nn.GRU(TAGGER.embedding, TAGGER.hidden, bidirectional=True, batch_first=True)
        self.head = nn.Linear(2 * TAGGER.hidden, TAGGER.tags)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.gru(self.tokens(tokens))[0])


class Adapted(nn.Linear):
    """A layer with a low-rank adapter beside it, as PEFT writes it."""

    def __init__(self, layer: nn.Linear, adapters: Adapters) -> None:
        super().__init__(layer.in_features, layer.out_features)
        self.scale = adapters.scale
        self.lora_A = nn.Linear(layer.in_features, adapters.rank, bias=False)
        self.lora_B = nn.Linear(adapters.rank, layer.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.lora_B(self.lora_A(x)) * self.scale
