"""Inputs and outputs of modules as named tensors, and modules without values."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
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


def _bind(module: nn.Module, example_inputs: Any) -> inspect.BoundArguments:
    signature = inspect.signature(module.forward)
    try:
        if isinstance(example_inputs, Mapping):
            return signature.bind(**example_inputs)
        return signature.bind(*([example_inputs] if isinstance(example_inputs, torch.Tensor) else example_inputs))
    except TypeError as error:
        raise DataError(
            f"the module does not take the example: {error}",
            hint=f"pass a tensor, a sequence, or a mapping of {', '.join(signature.parameters)}",
        ) from error


class Flat(nn.Module):  # type: ignore[misc]
    """Module as a function from tensors to tensors, whatever its arguments and results."""

    def __init__(self, module: nn.Module, example_inputs: Any):
        super().__init__()
        self.module = module
        arguments = _bind(module, example_inputs)
        leaves, self._structure = pytree.tree_flatten_with_path((arguments.args, arguments.kwargs))
        names, own_tensors = _argument_names(arguments), dict(tensors_of(module))
        self.updated: Sequence[str] = ()
        """Buffers of the module to return as well, as `NAME/next`."""
        self._leaves = [None if isinstance(leaf, torch.Tensor) else leaf for _, leaf in leaves]
        self._positions = [index for index, (_, leaf) in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self.inputs: dict[str, torch.Tensor] = {}
        for index in self._positions:
            path, tensor = leaves[index]
            tensor = tensor if tensor.layout is torch.strided else tensor.to_dense()  # graphs have no sparse inputs
            name = _join_path((names[path[:2]], *path[2:]))
            if any(tensor is other for other in self.inputs.values()):
                tensor = tensor.clone()  # the exporter would merge the two inputs
            self.inputs[f"{name}_input" if name in own_tensors else name] = tensor
        devices = {str(tensor.device) for tensor in own_tensors.values()} or {"cpu"}
        misplaced = [f"`{name}` is on {x.device}" for name, x in self.inputs.items() if str(x.device) not in devices]
        if misplaced:
            raise DataError(
                f"the module is on {', '.join(sorted(devices))}, but {', '.join(misplaced)} of the example",
                hint="move both to one device: `module.to(device)`, `tensor.to(device)`",
            )

    def forward(self, *tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = named_tensors(self.result(*tensors))
        outputs |= {f"{name}/next": self.module.get_buffer(name).clone() for name in self.updated}
        first = {id(x): name for name, x in reversed(outputs.items())}  # the exporter would merge equal outputs
        return {name: x if first[id(x)] == name else x.clone() for name, x in outputs.items()}

    def result(self, *tensors: torch.Tensor) -> Any:
        """Return what the module returns, in float32 under `torch.autocast`, as losses are computed."""
        leaves = list(self._leaves)
        for index, tensor in zip(self._positions, tensors, strict=True):
            leaves[index] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self._structure)
        return pytree.tree_map_only(torch.Tensor, _widened, self.module(*args, **kwargs))


def _widened(x: torch.Tensor) -> torch.Tensor:
    is_narrow = x.dtype in (torch.float16, torch.bfloat16) and torch.is_autocast_enabled(x.device.type)
    return x.float() if is_narrow else x


def named_tensors(result: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a nested result by their paths: `logits`, `state_0`; `output` for a single tensor."""
    leaves = pytree.tree_flatten_with_path(result)[0]
    return {_join_path(path or ("output",)): x for path, x in leaves if isinstance(x, torch.Tensor)}


def defaults_of(call: Callable[..., Any] | None) -> dict[str, Any]:
    """Return the defaults of a function's parameters; none for a function without a signature."""
    try:
        parameters = inspect.signature(call).parameters.values() if call is not None else ()
    except (TypeError, ValueError):  # written in C
        return {}
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def tensors_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all parameters and buffers in the order of `state_dict`, non-persistent ones included."""
    tensors = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    for name in dict.fromkeys([*module.state_dict(), *tensors]):
        if name in tensors:
            yield name, tensors[name]


def _argument_names(arguments: inspect.BoundArguments) -> dict[tuple[Any, ...], str]:
    """Return path in `(args, kwargs)` -> name of the argument."""
    names: list[str] = []
    for name, value in arguments.arguments.items():
        parameter_kind = arguments.signature.parameters[name].kind
        if parameter_kind is inspect.Parameter.VAR_POSITIONAL:
            names += [f"{name}_{i}" for i in range(len(value))]
        elif len(names) < len(arguments.args):
            names.append(name)
    positional = {(pytree.SequenceKey(0), pytree.SequenceKey(i)): name for i, name in enumerate(names)}
    return positional | {(pytree.SequenceKey(1), pytree.MappingKey(name)): name for name in arguments.kwargs}


def _join_path(path: Sequence[Any]) -> str:
    """Return a name for a path: `state_0`, `logits`, or `output_1` if it has no name."""
    parts = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path]
    return "_".join(["output", *parts] if parts[0].isdigit() else parts)


_TYPES = {code.numpy(): dtype for dtype, code in CODES.items()}


def hollow_out(module: nn.Module, types: Mapping[str, np.dtype]) -> None:
    """Replace the parameters of a module by ones without memory, of these types."""
    parameters: dict[int, nn.Parameter] = {}
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        if id(parameter) not in parameters:
            dtype = _TYPES.get(types[name], parameter.dtype) if name in types else parameter.dtype
            parameters[id(parameter)] = _hollow(parameter, dtype)
        owner, _, attribute = name.rpartition(".")
        module.get_submodule(owner)._parameters[attribute] = parameters[id(parameter)]


def hollow_copy(module: nn.Module) -> nn.Module:
    """Return a copy of a module on the CPU with buffers only."""
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
"""Names that `numpy.savez` gives to unnamed arrays."""


def read_example(file: Path) -> Any:
    """Return the arrays of an .npz file as tensors: by name, in order, or a single one."""
    try:
        tensors = {name: torch.from_numpy(array) for name, array in read_npz(file).items()}
    except (OSError, ValueError, TypeError) as error:
        raise DataError(
            f"`{file}` is not an .npz file of arrays: {reason(error)}", hint="write it with `numpy.savez`"
        ) from error
    if not tensors or not all(map(_UNNAMED.fullmatch, tensors)):
        return tensors
    in_order = tuple(tensors.values())
    return in_order if len(in_order) > 1 else in_order[0]
