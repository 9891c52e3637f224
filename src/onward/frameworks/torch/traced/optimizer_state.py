"""Leaves of an optimizer: state of parameters, settings of groups, and its own attributes."""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from onward.errors import UnsupportedError, first_line

Path = tuple[Any, ...]
"""`("state", 0, "exp_avg")` of the first parameter, `("group", 1, "lr")`, or `("self", "k")`."""
Leaves = dict[Path, Any]

_OF_PYTORCH = {"state", "param_groups", "defaults", "step", "_opt_called"}
_PREFIXES_OF_PYTORCH = ("_optimizer_", "_zero_grad_profile_name", "_warned_capturable_if_run_uncaptured")


def copy_optimizer(optimizer: Optimizer, memo: dict[int, Any] | None = None) -> Optimizer:
    """Return a copy with all attributes, of which PyTorch's own copy has only some."""
    memo = {} if memo is None else memo
    copied = copy.deepcopy(optimizer, memo)
    for name, value in _attributes(optimizer).items():
        vars(copied)[name] = copy.deepcopy(value, memo)
    return copied


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def leaves_of(optimizer: Optimizer) -> Leaves:
    """Return path -> leaf of an optimizer, without the parameters themselves."""
    leaves: Leaves = {}
    indices = {id(parameter): i for i, parameter in enumerate(parameters_of(optimizer))}
    for key, value in optimizer.state.items():
        leaves |= _flat(("state", indices.get(id(key), key)), value)
    for i, group in enumerate(optimizer.param_groups):
        leaves |= _flat(("group", i), {key: value for key, value in group.items() if key != "params"})
    for name, value in _attributes(optimizer).items():
        leaves |= _flat(("self", name), value)
    return leaves


def shell_of(optimizer: Optimizer, parameters: Mapping[int, Tensor], new: Callable[[Path, Any], Any]) -> Optimizer:
    """Return an optimizer of the same class with other leaves, and these or empty parameters."""
    shell: Optimizer = object.__new__(type(optimizer))
    vars(shell).update(vars(optimizer))
    vars(shell).pop("step", None)  # where a scheduler counts the steps of the original
    parameters_by_index = {i: parameters.get(i, torch.empty(0)) for i in range(len(parameters_of(optimizer)))}
    indices = {id(parameter): i for i, parameter in enumerate(parameters_of(optimizer))}
    shell.state = defaultdict(dict)
    for key, value in optimizer.state.items():
        index = indices.get(id(key), key)
        shell.state[parameters_by_index[index] if id(key) in indices else key] = _map_leaf(("state", index), value, new)
    rest = iter(parameters_by_index.values())
    shell.param_groups = []
    for i, group in enumerate(optimizer.param_groups):
        settings = {key: _map_leaf(("group", i, key), value, new) for key, value in group.items() if key != "params"}
        shell.param_groups.append({"params": [next(rest) for _ in group["params"]], **settings})
    for name, value in _attributes(optimizer).items():
        vars(shell)[name] = _map_leaf(("self", name), value, new)
    return shell


def is_scalar(value: Any) -> bool:
    """True for numbers and booleans."""
    return isinstance(value, int | float)


def is_number(value: Any) -> bool:
    return is_scalar(value) and not isinstance(value, bool)


def _attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Return the attributes that the class itself adds."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in _OF_PYTORCH and not name.startswith(_PREFIXES_OF_PYTORCH)
    }


def _flat(prefix: Path, value: Any) -> Leaves:
    leaves, _ = pytree.tree_flatten_with_path(value)
    return {(*prefix, *map(_key, path)): leaf for path, leaf in leaves}


def _map_leaf(prefix: Path, value: Any, new: Callable[[Path, Any], Any]) -> Any:
    return pytree.tree_map_with_path(lambda path, leaf: new((*prefix, *map(_key, path)), leaf), value)


def _key(entry: Any) -> Any:
    return getattr(entry, "key", getattr(entry, "idx", getattr(entry, "name", entry)))


_ONE_STEP = "make one step with the optimizer first"


def with_initial_state(optimizer: Optimizer, trained: Collection[int]) -> Optimizer:
    """Return a copy with the state that a first step creates, before its first use."""
    parameters = inspect.signature(step_of(optimizer)).parameters.values()
    if any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters):
        raise _refusal(
            optimizer,
            "its step needs a closure that evaluates the model several times",
            "use an optimizer with one gradient per update, such as AdamW",
        )
    first, second = (_first_state(optimizer, trained, seed) for seed in range(2))
    if first.keys() != second.keys() or not all(_equal(first[key], second[key]) for key in first):
        raise _refusal(optimizer, "its initial state depends on the first gradients", _ONE_STEP)
    result = copy_optimizer(optimizer)
    copied_parameters = parameters_of(result)
    for (index, slot), value in first.items():
        result.state[copied_parameters[index]][slot] = value
    before, after = leaves_of(result), leaves_of(_after_step(copy_optimizer(result), trained, 2))
    changed = [path for path in before.keys() ^ after.keys() if path[0] != "state" or path[1] in trained]
    changed += [path for path in before.keys() & after.keys() if (before[path] is None) != (after[path] is None)]
    if changed:
        path_text = ".".join(map(str, changed[0][1:]))
        raise _refusal(optimizer, f"a step adds or removes `{path_text}`", _ONE_STEP)
    return result


def _after_step(optimizer: Optimizer, trained: Collection[int], seed: int) -> Optimizer:
    """Return the optimizer after a step with random gradients."""
    generator = torch.Generator().manual_seed(seed)
    for i, parameter in enumerate(parameters_of(optimizer)):
        parameter.grad = None
        if i in trained:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter)
    try:
        with torch.random.fork_rng():
            step_of(optimizer)()
    except UnsupportedError:
        raise
    except Exception as error:
        raise _refusal(optimizer, f"its step fails: {first_line(error)}", "check `optimizer.step()`") from error
    return optimizer


def step_of(optimizer: Optimizer) -> Any:
    """Return the step of the class, without PyTorch's wrappers."""
    step = type(optimizer).step
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step.__get__(optimizer)


class _Slots(dict[Any, Any]):
    """State of a parameter that records the first value of each key."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.first: dict[Any, Any] = {}

    def __setitem__(self, key: Any, value: Any) -> None:
        if key not in self and key not in self.first:
            self.first[key] = copy.deepcopy(value)
        super().__setitem__(key, value)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value


class _State(defaultdict[Any, Any]):
    """State of all parameters, with `_Slots` as values."""

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(value, dict) and not isinstance(value, _Slots):
            entries, value = value, _Slots()
            value.update(entries)
        super().__setitem__(key, value)


def _first_state(optimizer: Optimizer, trained: Collection[int], seed: int) -> dict[tuple[int, Any], Any]:
    """Return the first values that a step adds to the state, by parameter and slot."""
    copied = copy_optimizer(optimizer)
    state_before = copied.state
    copied.state = _State(_Slots)
    for parameter, slots in state_before.items():
        dict.__setitem__(copied.state, parameter, _Slots(slots) if isinstance(slots, dict) else slots)
    _after_step(copied, trained, seed)
    parameters = parameters_of(copied)
    state = {i: copied.state[parameters[i]] for i in trained if parameters[i] in copied.state}
    return {(i, slot): value for i, slots in state.items() for slot, value in slots.first.items()}


def _equal(a: Any, b: Any) -> bool:
    (left, structure), (right, other) = pytree.tree_flatten(a), pytree.tree_flatten(b)
    return structure == other and all(
        torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else x is y or bool(x == y)
        for x, y in zip(left, right, strict=True)
    )


def _refusal(optimizer: Optimizer, problem: str, hint: str) -> UnsupportedError:
    return UnsupportedError(f"the optimizer {type(optimizer).__name__} cannot be carried over: {problem}", hint=hint)
