"""Networks of PyTorch as tutorials and textbooks write them."""

import torch
from side_torch import Objects
from torch import nn

from zoo import Case


def mlp():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    return Objects(net, torch.randn(8, 12), nn.CrossEntropyLoss(), torch.randint(0, 4, (8,)))


CASES = [Case("layers", "mlp", "torch", mlp, quick=True)]
