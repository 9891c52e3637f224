"""Image models in PyTorch."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from workloads.architectures import CLASSES, HIDDEN, LAST, MOBILENET, RESNETS, STEM, Inverted, squeezed


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(784, 512)
        self.fc2 = nn.Linear(512, 256)
        self.fc3 = nn.Linear(256, CLASSES["mlp"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


class LeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(400, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, CLASSES["lenet"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x.flatten(1))))))


class Block(nn.Module):
    """Two convolutions and a residual connection."""

    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.changes = before != after
        if self.changes:
            self.conv3 = nn.Conv2d(before, after, 1, stride, bias=False)
            self.norm3 = nn.BatchNorm2d(after)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        around = self.norm3(self.conv3(x)) if self.changes else x
        return F.relu(self.norm2(self.conv2(y)) + around)


class ResNet(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        kernel, stages = RESNETS[name]
        self.halves = kernel > 3
        before = stages[0][0]
        self.conv = nn.Conv2d(3, before, kernel, 2 if self.halves else 1, padding=kernel // 2, bias=False)
        self.norm = nn.BatchNorm2d(before)
        self.stages = nn.ModuleList()
        for number, (after, blocks) in enumerate(stages):
            first = Block(before, after, 2 if number else 1)
            self.stages.append(nn.Sequential(first, *(Block(after, after, 1) for _ in range(blocks - 1))))
            before = after
        self.head = nn.Linear(before, CLASSES[name])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.conv(x)))
        if self.halves:
            x = F.max_pool2d(x, 3, 2, padding=1)
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean((2, 3)))


class Convolution(nn.Module):
    """A convolution with its normalization, as in MobileNetV3."""

    def __init__(self, before: int, after: int, kernel: int = 1, stride: int = 1, groups: int = 1):
        super().__init__()
        self.conv = nn.Conv2d(before, after, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
        self.norm = nn.BatchNorm2d(after, eps=1e-3, momentum=0.01)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x))


class Gate(nn.Module):
    """Squeeze and excitation: a factor for each channel, computed from the means of all channels."""

    def __init__(self, channels: int):
        super().__init__()
        self.squeeze = nn.Conv2d(channels, squeezed(channels), 1)
        self.excite = nn.Conv2d(squeezed(channels), channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * F.hardsigmoid(self.excite(F.relu(self.squeeze(x.mean((2, 3), keepdim=True)))))


class InvertedBlock(nn.Module):
    def __init__(self, before: int, sizes: Inverted):
        super().__init__()
        self.active = F.hardswish if sizes.hard_swish else F.relu
        self.expand = Convolution(before, sizes.wide) if sizes.wide != before else None
        self.depthwise = Convolution(sizes.wide, sizes.wide, sizes.kernel, sizes.stride, groups=sizes.wide)
        self.gate = Gate(sizes.wide) if sizes.squeezes else None
        self.project = Convolution(sizes.wide, sizes.after)
        self.keeps_size = before == sizes.after and sizes.stride == 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.active(self.expand(x)) if self.expand else x
        y = self.active(self.depthwise(y))
        y = self.project(self.gate(y) if self.gate else y)
        return x + y if self.keeps_size else y


class MobileNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = Convolution(3, STEM, 3, 2)
        befores = [STEM, *(sizes.after for sizes in MOBILENET)]
        self.blocks = nn.Sequential(*map(InvertedBlock, befores, MOBILENET))
        self.last = Convolution(befores[-1], LAST)
        self.hidden = nn.Linear(LAST, HIDDEN)
        self.head = nn.Linear(HIDDEN, CLASSES["mobilenet"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(F.hardswish(self.stem(x)))
        x = F.hardswish(self.last(x)).mean((2, 3))
        return self.head(F.hardswish(self.hidden(x)))
