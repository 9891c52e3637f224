"""What a module takes and returns, however it is nested, as tensors with names; and modules without values."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from onward.engines.torch.types import CODES
from onward.errors import DataError
from onward.model.storage.containers import read_npz
from onward.model.storage.files import reason


def _arguments(module: nn.Module, example_inputs: Any) -> inspect.BoundArguments:
    signature = inspect.signature(module.forward)
    try:
        if isinstance(example_inputs, Mapping):
            return signature.bind(**example_inputs)
        if isinstance(example_inputs, torch.Tensor):
            return signature.bind(example_inputs)
        return signature.bind(*example_inputs)
    except TypeError as error:
        raise DataError(
            f"the module does not take the example: {error}",
            hint=f"it takes {', '.join(signature.parameters)}: give a tensor, a sequence, or a mapping by these names",
        ) from error


class Flat(nn.Module):  # type: ignore[misc]
    """A module as a function from tensors to tensors, however it takes and returns them."""

    def __init__(self, module: nn.Module, example_inputs: Any):
        super().__init__()
        self.module = module
        arguments = _arguments(module, example_inputs)
        leaves, self._structure = pytree.tree_flatten_with_path((arguments.args, arguments.kwargs))
        names, held = _argument_names(arguments), dict(tensors_of(module))
        self._leaves = [None if isinstance(leaf, torch.Tensor) else leaf for _, leaf in leaves]
        self._places = [place for place, (_, leaf) in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self.inputs: dict[str, torch.Tensor] = {}
        for place in self._places:
            path, tensor = leaves[place]
            name = _join_path((names[path[:2]], *path[2:]))
            if any(tensor is other for other in self.inputs.values()):
                tensor = tensor.clone()  # the exporter would take two inputs for one
            self.inputs[f"{name}_input" if name in held else name] = tensor
        devices = {str(tensor.device) for tensor in held.values()} or {"cpu"}
        wrong = [f"`{name}` is on {x.device}" for name, x in self.inputs.items() if str(x.device) not in devices]
        if wrong:
            raise DataError(
                f"the module is on {', '.join(sorted(devices))}, but of the example {', '.join(wrong)}",
                hint="move both to one device: `module.to(device)`, `tensor.to(device)`",
            )

    def forward(self, *tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self._structure)
        found = pytree.tree_flatten_with_path(self.module(*args, **kwargs))[0]
        outputs = {_join_path(path or ("output",)): x for path, x in found if isinstance(x, torch.Tensor)}
        for name, x in outputs.items():  # under `torch.autocast` losses are computed in float32
            if x.dtype in (torch.float16, torch.bfloat16) and torch.is_autocast_enabled(x.device.type):
                outputs[name] = x.float()
        return outputs


def tensors_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All parameters and buffers, as `state_dict` orders them, those that are not kept by it among them."""
    held = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    order = [name for name in module.state_dict() if name in held]
    for name in dict.fromkeys([*order, *held]):
        yield name, held[name]


def _argument_names(arguments: inspect.BoundArguments) -> dict[tuple[Any, ...], str]:
    """Where `(args, kwargs)` have an argument -> its name."""
    names: list[str] = []
    for name, value in arguments.arguments.items():
        kind = arguments.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            names += [f"{name}_{i}" for i in range(len(value))]
        elif len(names) < len(arguments.args):
            names.append(name)
    placed = {(pytree.SequenceKey(0), pytree.SequenceKey(i)): name for i, name in enumerate(names)}
    return placed | {(pytree.SequenceKey(1), pytree.MappingKey(name)): name for name in arguments.kwargs}


def _join_path(path: Sequence[Any]) -> str:
    """A name from where something is: `state_0`, `logits`, and `output_1` for what has no name."""
    parts = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path]
    return "_".join(["output", *parts] if parts[0].isdigit() else parts)


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


_UNNAMED = re.compile(r"arr_\d+")
"""What `numpy.savez` calls arrays that have no names."""


def read_example(file: Path) -> Any:
    """The arrays of an .npz file as tensors: by name; without names in their order, and one alone as it is."""
    try:
        found = {name: torch.from_numpy(array) for name, array in read_npz(file).items()}
    except (OSError, ValueError, TypeError) as error:
        raise DataError(
            f"`{file}` is no .npz file of arrays: {reason(error)}", hint="write it with `numpy.savez`"
        ) from error
    if not found or not all(map(_UNNAMED.fullmatch, found)):
        return found
    in_order = tuple(found.values())
    return in_order if len(in_order) > 1 else in_order[0]
