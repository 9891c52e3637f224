"""Networks in PyTorch to train, each with batches that there is something to learn from, and the loop that does it."""

import copy
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
import torch_models
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


class Subject(NamedTuple):
    net: nn.Module
    batch: Callable[[int], dict[str, torch.Tensor]]
    """A random batch of `n` by name, in the order of the inputs; where the loss is outside, what it takes is last."""
    loss: str | None = None
    """The function of torch.nn.functional; None if the network computes its loss itself."""
    axes: dict[str, str] | None = None
    """As for exporters; None if the first axis of each input is the batch."""

    def inputs(self, n):
        """What the network itself takes of a batch."""
        named = self.batch(n)
        return dict(list(named.items())[: None if self.loss is None else -1])


# ---- images ----------------------------------------------------------------------------------------------------------


def _classes(count, *shape, inputs="x"):
    """Each class has a pattern of its own, under noise."""
    patterns = torch.randn(count, *shape)

    def batch(n):
        labels = torch.randint(0, count, (n,))
        return {inputs: patterns[labels] + torch.randn(n, *shape) / 2, "labels": labels}

    return batch


def mlp():
    net = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    return Subject(net, _classes(4, 12), "cross_entropy")


def lenet5():
    net = nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.Tanh(), nn.AvgPool2d(2),
        nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.Tanh(), nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, 10),
    )  # fmt: skip
    return Subject(net, _classes(10, 1, 28, 28), "cross_entropy")


def _norm(channels):
    """Whose running statistics follow soon enough for a few steps."""
    return nn.BatchNorm2d(channels, momentum=0.3)


class Block(nn.Module):
    """Two convolutions, and a way past them."""

    def __init__(self, before, after, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = _norm(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = _norm(after)
        self.past = nn.Sequential()
        if stride > 1:
            self.past = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), _norm(after))

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.past(x))


def resnet():
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), _norm(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
        Block(8, 8, 1), Block(8, 16, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5),
    )  # fmt: skip
    return Subject(net, _classes(5, 3, 16, 16), "cross_entropy")


def autoencoder():
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.ELU(), nn.Conv2d(4, 3, 3, stride=2, padding=1), nn.ELU(),
        nn.ConvTranspose2d(3, 4, 4, stride=2, padding=1), nn.ELU(), nn.ConvTranspose2d(4, 1, 4, stride=2, padding=1),
    )  # fmt: skip
    images = _classes(3, 1, 12, 12)

    def batch(n):
        x = images(n)["x"]
        return {"x": x, "target": x}

    return Subject(net, batch, "mse_loss")


# ---- transformers ----------------------------------------------------------------------------------------------------


class Logits(torch_models.Transformer):
    def forward(self, *inputs):
        return self.model(**dict(zip(self.names, inputs, strict=True))).logits


def vit():
    net = torch_models.vit("sdpa").module.model
    return Subject(Logits(net, "pixel_values"), _classes(3, 3, 8, 8, inputs="pixel_values"), "cross_entropy")


def bert():
    """Which third of the vocabulary a text begins with; what its mask leaves out does not matter."""
    names = ("input_ids", "attention_mask", "token_type_ids")
    model = torch_models.bert("sdpa")

    def batch(n):
        given = model.inputs(n, 6)
        return {**given, "labels": given["input_ids"][:, 0] // 10}

    return Subject(Logits(model.module.model, *names), batch, "cross_entropy", dict.fromkeys(names, "nt"))


def gpt2():
    """Counting, from anywhere, by one or two."""

    def batch(n):
        tokens = (torch.randint(0, 23, (n, 1)) + torch.arange(8) * torch.randint(1, 3, (n, 1))) % 23
        return {"input_ids": tokens, "labels": tokens}

    model = torch_models.gpt2("sdpa")
    return Subject(model.module, batch, axes=model.axes)


# ---- sequences, tied weights and control flow ------------------------------------------------------------------------


def lstm():
    """The tag of a word is always the same."""

    def batch(n):
        words = torch.randint(0, 11, (n, 5))
        return {"words": words, "labels": words // 4}

    model = torch_models.lstm()
    return Subject(model.module, batch, axes=model.axes)


def tied():
    """The next word is the one after this one."""

    def batch(n):
        words = torch.randint(0, 9, (n, 4))
        return {"words": words, "labels": (words + 1) % 9}

    model = torch_models.tied()
    return Subject(model.module, batch, axes=model.axes)


class Branches(nn.Module):
    """A loop over time in axis 1 that takes one way at moments of high input and another at others."""

    def __init__(self):
        super().__init__()
        self.high = nn.Linear(3, 6)
        self.low = nn.Linear(3, 6)
        self.keep = nn.Linear(6, 6, bias=False)
        self.out = nn.Linear(6, 2)

    def forward(self, x):
        state = torch.zeros([x.shape[0], 6])
        for moment in range(x.shape[1]):
            now = x[:, moment]
            if bool(now.sum() > 0):
                state = torch.tanh(self.high(now) + self.keep(state))
            else:
                state = torch.sigmoid(self.low(now) + self.keep(state))
        return self.out(state)


def branches():
    def batch(n):
        x = torch.randn(n, 4, 3)
        return {"x": x, "target": x[:, -1, :2]}

    return Subject(Branches(), batch, "mse_loss", {"x": "nt"})


def settling():
    """A loop that runs until little changes, with the loss inside."""

    def batch(n):
        x = torch.randn(3, n, 3)
        return {"x": x, "target": x.mean(0)[:, :2]}

    model = torch_models.settling()
    return Subject(model.module, batch, axes=model.axes)


# ---- training --------------------------------------------------------------------------------------------------------


class Trainer:
    """The loop that everybody writes, in PyTorch."""

    def __init__(self, subject, optimizer, schedule=None, clip=None, accumulate=1):
        """`optimizer` is made from torch.optim and the network, `schedule` from its lr_scheduler and the optimizer."""
        self.net, self.loss_name = copy.deepcopy(subject.net), subject.loss
        self.optimizer = optimizer(torch.optim, self.net)
        self.schedule = schedule and schedule(torch.optim.lr_scheduler, self.optimizer)
        self.clip, self.accumulate = clip, accumulate
        self.count = 0

    def step(self, batch):
        _switch(self.net)
        loss = self.loss(batch)
        (loss / self.accumulate).backward()
        self.count += 1
        if self.count % self.accumulate == 0:
            _fill_in_gradients(self.net)
            if self.clip:
                nn.utils.clip_grad_norm_(self.net.parameters(), self.clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.schedule:
                self.schedule.step()
        return float(loss.detach())

    def loss(self, batch):
        if self.loss_name is None:
            return self.net(*batch.values())
        *inputs, wanted = batch.values()
        return getattr(F, self.loss_name)(self.net(*inputs), wanted)

    def gradients(self, batch, names):
        """Of the loss by these, which must be all that is trained, each once. Everything stays as it is."""
        other = copy.copy(self)
        other.net = copy.deepcopy(self.net)
        _switch(other.net)
        other.loss(batch).backward()
        _fill_in_gradients(other.net)
        named = dict(other.net.named_parameters(remove_duplicate=False))  # what is tied has two names
        trained = [x for x in other.net.parameters() if x.requires_grad]
        assert sorted(id(named[name]) for name in names) == sorted(map(id, trained))
        return {name: named[name].grad.numpy() for name in names}

    @torch.no_grad()
    def evaluate(self, batch):
        """The loss, and what the network computes, in inference mode."""
        self.net.eval()
        outputs = self.net(*list(batch.values())[: None if self.loss_name is None else -1])
        return float(self.loss(batch)), outputs.numpy()

    def state(self):
        return {name: x.detach().numpy().copy() for name, x in self.net.state_dict().items()}


def _fill_in_gradients(net):
    """Zeros for the weights of a branch that was not taken; PyTorch's optimizers pass over what has none."""
    for parameter in net.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def _switch(net):
    """To training: but not Dropout, whose random numbers nobody else has, and not what is frozen."""
    for layer in net.modules():
        layer.training = isinstance(layer, _BatchNorm) and layer.weight.requires_grad
