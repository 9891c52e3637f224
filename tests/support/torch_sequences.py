"""Functions of (x, h, w) that PyTorch exports with sequences: lists in loops, and tensors in parts."""

import io

import torch


@torch.jit.script
def append_to_list(x, h, w):
    states = []
    for i in range(x.size(0)):
        h = torch.tanh(x[i] @ w + h)
        states.append(h)
    return torch.stack(states)


@torch.jit.script
def go_through_parts(x, h, w):
    for i, part in enumerate(torch.split(x, 2, dim=0)):
        h = torch.tanh(part.sum(0) @ w) * (i + 1) + h
    return h


@torch.jit.script
def read_list(x, h, w):
    states = [h, x[0]]
    for i in range(x.size(0)):
        states.append(torch.tanh(states[-1] @ w) + states[i] * x[i])
    return torch.cat(states, 0)


def take_apart(x, h, w):
    first, second = torch.split(x, [1, 4], dim=0)
    a, b, c = (h @ w).unbind(1)
    return torch.sin(first).sum(0) @ w * second[1] + torch.stack([c, a * b, a], 1)


def exported(function, inputs):
    """The model of a function, with a first dimension of x that is not known."""
    file = io.BytesIO()
    names = {"input_names": list(inputs), "output_names": ["y"], "dynamic_axes": {"x": [0]}}
    torch.onnx.export(function, tuple(inputs.values()), file, dynamo=False, opset_version=18, **names)
    return file.getvalue()


class Bag(torch.nn.Module):
    def __init__(self, mode):
        super().__init__()
        self.bag = torch.nn.EmbeddingBag(10, 3, mode=mode)

    def forward(self, x, offsets):
        return self.bag(x, offsets)


class Stack(torch.nn.Module):
    def forward(self, a, b, c):
        return torch.dstack([a, b * 2, c.sin()])


def exported_by_dynamo(module, inputs, **options):
    names = {"input_names": list(inputs), "output_names": ["y"]}
    return torch.onnx.export(
        module.eval(), tuple(inputs.values()), dynamo=True, verbose=False, **names, **options
    ).model_proto
