"""Parameters that have a type and a shape, and take no memory: all of their elements are one.

A module of them is captured as any other, with any number of parameters; their values are in a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from onward.run.torch.types import CODES

_TYPES = {code.numpy(): dtype for dtype, code in CODES.items()}


def hollow_out(module: nn.Module, types: Mapping[str, np.dtype]) -> None:
    """Replace the parameters of a module; `types` are those by name that are others than the module has."""
    made: dict[int, nn.Parameter] = {}
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        if id(parameter) not in made:
            dtype = _TYPES.get(types[name], parameter.dtype) if name in types else parameter.dtype
            empty = torch.zeros((), dtype=dtype).expand(parameter.shape)
            made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        owner, _, attribute = name.rpartition(".")
        module.get_submodule(owner)._parameters[attribute] = made[id(parameter)]


def is_hollow(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 1 and not any(tensor.stride())
