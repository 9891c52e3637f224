"""Parameters that have a type and a shape, and take no memory: all of their elements are one.

A module of them is captured as any other, with any number of parameters; their values are in a checkpoint.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from onward.engines.torch.types import CODES

_TYPES = {code.numpy(): dtype for dtype, code in CODES.items()}


def hollow_out(module: nn.Module, types: Mapping[str, np.dtype]) -> None:
    """Replace the parameters of a module; `types` are those by name that are others than the module has."""
    made: dict[int, nn.Parameter] = {}
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        if id(parameter) not in made:
            dtype = _TYPES.get(types[name], parameter.dtype) if name in types else parameter.dtype
            made[id(parameter)] = _hollow(parameter, dtype)
        owner, _, attribute = name.rpartition(".")
        module.get_submodule(owner)._parameters[attribute] = made[id(parameter)]


def hollow_copy(module: nn.Module) -> nn.Module:
    """A copy of a module, on the CPU, that holds buffers only."""
    memo: dict[int, object] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        if isinstance(tensor, nn.Parameter):
            memo[id(tensor)] = _hollow(tensor, tensor.dtype)
        elif tensor.device.type != "cpu":
            memo[id(tensor)] = tensor.cpu()
    return copy.deepcopy(module, memo)


def _hollow(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.zeros((), dtype=dtype).expand(parameter.shape), requires_grad=parameter.requires_grad)


def is_hollow(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 1 and not any(tensor.stride())
