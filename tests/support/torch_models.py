"""Small models in PyTorch, each with its loss inside, so that all of it is exported and differentiated.

What an architecture is known for is there, at the smallest size that shows it; weights are random.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn


class Model(NamedTuple):
    module: nn.Module
    """From the inputs, in their order, to a scalar."""
    inputs: Callable[[int, int], dict[str, torch.Tensor]]
    """Inputs by name for a batch of `n`, and, where there is something to count, `t` of it."""
    axes: dict[str, str]
    """Of an input, which of its first axes may vary: "n" the first, "nt" the first two."""


class WithLoss(nn.Module):
    """A network, and the cross entropy of its logits."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x, labels):
        return F.cross_entropy(self.net(x), labels)


class WeightsAsInputs(nn.Module):
    """A module whose parameters are given with its inputs, in front of them."""

    def __init__(self, module):
        super().__init__()
        self.call = functools.partial(torch.func.functional_call, module)
        self.names = list(dict(module.named_parameters()))

    def forward(self, *values):
        count = len(self.names)
        return self.call(dict(zip(self.names, values[:count], strict=True)), values[count:])


# ---- images ----------------------------------------------------------------------------------------------------------


def cnn():
    net = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3, stride=2, padding=1, groups=2),
        nn.BatchNorm2d(8),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )
    spread_statistics(net)
    inputs = lambda n, t: {"x": torch.randn(n, 3, 8, 8), "labels": torch.randint(0, 5, (n,))}
    return Model(WithLoss(net), inputs, {"x": "n", "labels": "n"})


def spread_statistics(net):
    """Running statistics that are not those of a fresh layer, so that it matters whether they are used."""
    for layer in net.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.normal_(layer.running_mean, std=0.1)
            nn.init.uniform_(layer.running_var, 0.5, 2)


class UNet(nn.Module):
    """Two levels: down by pooling and by stride, up by ConvTranspose and by interpolation, joined by skips."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 6, 3, stride=2, padding=1)
        self.bottom = nn.Conv2d(6, 6, 3, padding=2, dilation=2)
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.norm = nn.GroupNorm(2, 8)
        self.smooth = nn.Conv2d(8, 4, 3, padding=1)
        self.last = nn.Conv2d(8, 1, 1)

    def forward(self, image, mask):
        top = F.silu(self.first(image))
        middle = F.max_pool2d(top, 2)
        bottom = F.silu(self.bottom(F.silu(self.second(middle))))
        joined = F.leaky_relu(self.norm(torch.cat([self.up(bottom), middle], 1)), 0.25)
        grown = F.interpolate(self.smooth(joined), scale_factor=2.0, mode="bilinear", align_corners=False)
        logits = self.last(torch.cat([grown, top], 1))
        coarse = F.interpolate(middle.mean(1, keepdim=True), scale_factor=2.0, mode="nearest")
        return F.binary_cross_entropy_with_logits(logits + coarse, mask)


def unet():
    inputs = lambda n, t: {"image": torch.randn(n, 2, 8, 8), "mask": torch.rand(n, 1, 8, 8)}
    return Model(UNet(), inputs, {"image": "n", "mask": "n"})


# ---- transformers, as Hugging Face writes them -----------------------------------------------------------------------


class Transformer(nn.Module):
    def __init__(self, model, *names):
        super().__init__()
        self.model = model
        self.names = names

    def forward(self, *inputs):
        return self.model(**dict(zip(self.names, inputs, strict=True))).loss


def vit(attention):
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, image_size=8, patch_size=4,
        num_labels=3, attn_implementation=attention,
    )  # fmt: skip
    module = Transformer(ViTForImageClassification(config), "pixel_values", "labels")
    inputs = lambda n, t: {"pixel_values": torch.randn(n, 3, 8, 8), "labels": torch.randint(0, 3, (n,))}
    return Model(module, inputs, {"pixel_values": "n", "labels": "n"})


def bert(attention):
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=30, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=12, num_labels=3, attn_implementation=attention,
    )  # fmt: skip

    def inputs(n, t):
        words = torch.randint(2, t + 1, (n, 1))  # in each text; the rest of it is padding
        mask = (torch.arange(t) < words).long()
        return {
            "input_ids": torch.randint(1, 30, (n, t)) * mask,
            "attention_mask": mask,
            "token_type_ids": (torch.arange(t) >= t // 2).long().repeat(n, 1),
            "labels": torch.randint(0, 3, (n,)),
        }

    names = ("input_ids", "attention_mask", "token_type_ids")
    module = Transformer(BertForSequenceClassification(config), *names, "labels")
    return Model(module, inputs, dict.fromkeys(names, "nt") | {"labels": "n"})


def gpt2(attention):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=23, n_positions=10, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0, use_cache=False,
        attn_implementation=attention,
    )  # fmt: skip
    return _language_model(GPT2LMHeadModel(config))


def llama(attention):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=23, hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, use_cache=False, attn_implementation=attention,
    )  # fmt: skip
    return _language_model(LlamaForCausalLM(config))


def _language_model(model):
    def inputs(n, t):
        tokens = torch.randint(0, 23, (n, t))
        labels = tokens.clone()
        labels[0, :2] = -100  # a prompt: read, not learned
        return {"input_ids": tokens, "labels": labels}

    return Model(Transformer(model, "input_ids", "labels"), inputs, {"input_ids": "nt", "labels": "nt"})


# ---- sequences -------------------------------------------------------------------------------------------------------


class Tagger(nn.Module):
    """A label for each word of a text."""

    def __init__(self, cell):
        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.net = cell(6, 4, num_layers=2, bidirectional=True, batch_first=True)
        self.out = nn.Linear(8, 3)

    def forward(self, words, labels):
        states, _ = self.net(self.words(words))
        return F.cross_entropy(self.out(states).flatten(0, 1), labels.flatten(), ignore_index=-100)


def _tagger(cell):
    def inputs(n, t):
        labels = torch.randint(0, 3, (n, t))
        labels[-1, -1] = -100
        return {"words": torch.randint(0, 11, (n, t)), "labels": labels}

    return Model(Tagger(cell), inputs, {"words": "nt", "labels": "nt"})


lstm = functools.partial(_tagger, nn.LSTM)
gru = functools.partial(_tagger, nn.GRU)


class Recurrence(nn.Module):
    """A recurrent network that is a loop, over time in axis 0."""

    def __init__(self):
        super().__init__()
        self.read = nn.Linear(3, 4)
        self.keep = nn.Linear(4, 4, bias=False)
        self.out = nn.Linear(4, 2)

    def step(self, state, x):
        return torch.tanh(self.read(x) + self.keep(state))

    def forward(self, x, target):
        state = x.new_zeros(x.shape[1], 4)
        for moment in range(x.shape[0]):
            state = self.step(state, x[moment])
        return F.mse_loss(self.out(state), target)


class ScannedRecurrence(Recurrence):
    """The same, with the loss of each moment."""

    def forward(self, x, target):
        def step(state, x):
            state = self.step(state, x)
            return state, self.out(state)

        _, outputs = _scan(step, x.new_zeros(x.shape[1], 4), x)
        return ((outputs - target) ** 2).mean()


def _scan(step, state, xs):
    if torch.compiler.is_exporting():
        from torch._higher_order_ops.scan import scan

        return scan(lambda state, x: step(state, x), state, xs)
    outputs = []
    for x in xs:
        state, output = step(state, x)
        outputs.append(output)
    return state, torch.stack(outputs)


class Settling(Recurrence):
    """Repeats a step until little changes: how often is known only when it runs."""

    def forward(self, x, target):
        drive = x.mean(0)

        def moving(state, change, count):
            return (change > 0.05) & (count < 20)

        def body(state, change, count):
            new = torch.tanh(self.read(drive) + 0.5 * self.keep(state))
            return new, (new - state).detach().abs().max(), count + 1

        start = (x.new_zeros(x.shape[1], 4), x.new_ones(()), torch.zeros((), dtype=torch.int64))
        state, _, _ = _while(moving, body, start)
        return F.mse_loss(self.out(state), target)


def _while(condition, body, state):
    if torch.compiler.is_exporting():
        return torch._higher_order_ops.while_loop(condition, body, state)
    while condition(*state):
        state = body(*state)
    return state


def loop(module=Recurrence):
    inputs = lambda n, t: {"x": torch.randn(t, n, 3), "target": torch.randn(n, 2)}
    return Model(module(), inputs, {"x": "tn", "target": "n"})


def scan():
    inputs = lambda n, t: {"x": torch.randn(t, n, 3), "target": torch.randn(t, n, 2)}
    return Model(ScannedRecurrence(), inputs, {"x": "tn", "target": "tn"})


def settling():
    return loop(Settling)


# ---- graphs ----------------------------------------------------------------------------------------------------------


class GraphNet(nn.Module):
    """Messages along edges, gathered at nodes in every way there is: sum, mean, largest."""

    def __init__(self):
        super().__init__()
        self.message = nn.Linear(7, 6)
        self.update = nn.Linear(21, 3)

    def forward(self, nodes, edges, source, target, labels):
        messages = F.elu(self.message(torch.cat([nodes[source], nodes.index_select(0, target), edges], 1)))
        zeros = nodes.new_zeros(nodes.shape[0], 6)
        index = target[:, None].expand(-1, 6)
        total = zeros.index_add(0, target, messages)
        again = zeros.scatter_add(0, index, messages * messages)
        best = zeros.scatter_reduce(0, index, messages, "amax", include_self=False)
        count = zeros[:, :1].scatter_add(0, index[:, :1], torch.ones_like(edges))
        mean = total / count.clamp(min=1)
        return F.cross_entropy(self.update(torch.cat([nodes, mean, again, best], 1)), labels)


def graph():
    def inputs(n, t):
        ends = torch.stack([torch.arange(t) % n, torch.randint(0, n, (t,))])
        return {
            "nodes": torch.randn(n, 3), "edges": torch.randn(t, 1), "source": ends[1], "target": ends[0],
            "labels": torch.randint(0, 3, (n,)),
        }  # fmt: skip

    return Model(GraphNet(), inputs, {"nodes": "n", "edges": "t", "source": "t", "target": "t", "labels": "n"})


# ---- what else people write ------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """An embedding that is the last layer too, and a layer that is applied twice."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(9, 5)
        self.layer = nn.Linear(5, 5)
        self.out = nn.Linear(5, 9, bias=False)
        self.out.weight = self.words.weight

    def forward(self, words, labels):
        x = self.words(words)
        x = x + torch.tanh(self.layer(x))
        x = x * torch.sigmoid(self.layer(x))
        return F.cross_entropy(self.out(x).flatten(0, 1), labels.flatten())


def tied():
    inputs = lambda n, t: {"words": torch.randint(0, 9, (n, t)), "labels": torch.randint(0, 9, (n, t))}
    return Model(Tied(), inputs, {"words": "nt", "labels": "nt"})


class Assignments(nn.Module):
    """Tensors that are changed in place."""

    def __init__(self):
        super().__init__()
        self.row = nn.Parameter(torch.randn(4))
        self.column = nn.Parameter(torch.randn(3, 1))
        self.scale = nn.Parameter(torch.randn(2))

    def forward(self, x, rows):
        y = x * 2
        y[0] = self.row
        y[:, 1:2] = self.column.sum() * x[:, :1]
        y[..., 2:] *= self.scale
        y[rows] = y[rows] ** 2
        y = torch.sin(y).index_put((rows,), self.row.expand(rows.shape[0], 4), accumulate=True)
        y = y.masked_fill(x > 1, 0.5)
        return (y * y).sum() + y[rows, 1].prod()


def assignments():
    inputs = lambda n, t: {"x": torch.randn(n + 3, 4), "rows": torch.tensor([2, 0])}
    return Model(Assignments(), inputs, {"x": "n"})


class Odd(nn.Module):
    """What must not disturb a gradient: rounding, branches that nothing reads, or that are NaN and not taken."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.randn(4))
        self.b = nn.Parameter(torch.randn(4))
        self.unused = nn.Parameter(torch.randn(4))

    def forward(self, x):
        filled = torch.where(x.isnan(), self.a, x)
        rounded = (filled * 3).int().to(x.dtype)
        _ = torch.log(self.unused * filled)
        safe = torch.where(filled > 0, filled, torch.ones_like(filled))
        root = torch.where(filled > 0, safe.sqrt(), self.b)
        bits = (filled > 0.5).to(x.dtype)
        kept = filled.clamp(-1, 1) + F.relu(filled - 1)
        return (root * self.a + rounded * self.b + bits * kept * self.b + filled.norm(dim=1, keepdim=True)).sum()


def odd():
    def inputs(n, t):
        x = torch.randn(n, 4)
        x[0, 1] = x[-1, 2] = torch.nan
        return {"x": x}

    return Model(Odd(), inputs, {"x": "n"})


class HalfPrecision(nn.Module):
    """Products in float16, everything else in float32, as mixed precision does it."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 5)

    def forward(self, x, labels):
        for layer in (self.first, self.second):
            product = F.linear(x.half(), layer.weight.half(), layer.bias.half())
            x = torch.tanh(product.float())
        return F.cross_entropy(x, labels)


def half_precision():
    inputs = lambda n, t: {"x": torch.randn(n, 6), "labels": torch.randint(0, 5, (n,))}
    return Model(HalfPrecision(), inputs, {"x": "n", "labels": "n"})
