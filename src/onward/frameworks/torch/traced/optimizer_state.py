"""What an optimizer holds, leaf by leaf: the state of parameters, settings of groups, attributes of its own."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

Path = tuple[Any, ...]
"""`("state", 0, "exp_avg")`: of the first parameter; `("group", 1, "lr")`; `("self", "k")`."""
Leaves = dict[Path, Any]

_OF_PYTORCH = ("state", "param_groups", "defaults", "step", "_opt_called")
_OF_PYTORCH_TOO = ("_optimizer_", "_zero_grad_profile_name", "_warned_capturable_if_run_uncaptured")


def copy_optimizer(optimizer: Optimizer, memo: dict[int, Any] | None = None) -> Optimizer:
    """A copy with all attributes, of which PyTorch's own way to copy an optimizer knows only some."""
    memo = {} if memo is None else memo
    made = copy.deepcopy(optimizer, memo)
    for name, value in _attributes(optimizer).items():
        vars(made)[name] = copy.deepcopy(value, memo)
    return made


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def leaves_of(optimizer: Optimizer) -> Leaves:
    """Everything that an optimizer holds but for the parameters themselves, by where it is."""
    found: Leaves = {}
    places = {id(parameter): i for i, parameter in enumerate(parameters_of(optimizer))}
    for key, value in optimizer.state.items():
        found |= _flat(("state", places.get(id(key), key)), value)
    for i, group in enumerate(optimizer.param_groups):
        found |= _flat(("group", i), {key: value for key, value in group.items() if key != "params"})
    for name, value in _attributes(optimizer).items():
        found |= _flat(("self", name), value)
    return found


def shell_of(optimizer: Optimizer, parameters: Mapping[int, Tensor], new: Callable[[Path, Any], Any]) -> Optimizer:
    """An optimizer of the same class that holds other leaves, and has these parameters; others have no gradients."""
    made: Optimizer = object.__new__(type(optimizer))
    vars(made).update(vars(optimizer))
    vars(made).pop("step", None)  # where a scheduler counts the steps of the original
    own = {i: parameters.get(i, torch.empty(0)) for i in range(len(parameters_of(optimizer)))}
    places = {id(parameter): i for i, parameter in enumerate(parameters_of(optimizer))}
    made.state = defaultdict(dict)
    for key, value in optimizer.state.items():
        place = places.get(id(key), key)
        made.state[own[place] if id(key) in places else key] = _map_leaf(("state", place), value, new)
    rest = iter(own.values())
    made.param_groups = []
    for i, group in enumerate(optimizer.param_groups):
        settings = {key: _map_leaf(("group", i, key), value, new) for key, value in group.items() if key != "params"}
        made.param_groups.append({"params": [next(rest) for _ in group["params"]], **settings})
    for name, value in _attributes(optimizer).items():
        vars(made)[name] = _map_leaf(("self", name), value, new)
    return made


def is_scalar(value: Any) -> bool:
    """Whether it is a number, or true or false."""
    return isinstance(value, int | float)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _attributes(optimizer: Optimizer) -> dict[str, Any]:
    """What the class itself has added."""
    own = {name: value for name, value in vars(optimizer).items() if name not in _OF_PYTORCH}
    return {name: value for name, value in own.items() if not name.startswith(_OF_PYTORCH_TOO)}


def _flat(place: Path, value: Any) -> Leaves:
    found, _ = pytree.tree_flatten_with_path(value)
    return {(*place, *map(_key, path)): leaf for path, leaf in found}


def _map_leaf(place: Path, value: Any, new: Callable[[Path, Any], Any]) -> Any:
    return pytree.tree_map_with_path(lambda path, leaf: new((*place, *map(_key, path)), leaf), value)


def _key(entry: Any) -> Any:
    return getattr(entry, "key", getattr(entry, "idx", getattr(entry, "name", entry)))
