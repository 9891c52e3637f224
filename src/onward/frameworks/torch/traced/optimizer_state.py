"""What an optimizer holds, leaf by leaf: the state of parameters, settings of groups, attributes of its own."""

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


_ONE_STEP = "make one step with the optimizer first"


def with_initial_state(optimizer: Optimizer, trained: Collection[int]) -> Optimizer:
    """A copy whose state has what a first step would make: as it was when the step made it, before it was used."""
    parameters = inspect.signature(step_of(optimizer)).parameters.values()
    if any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters):
        raise _refusal(
            optimizer,
            "its step asks for a closure, to evaluate the model several times",
            "use an optimizer of one gradient for each update, such as AdamW",
        )
    made = [_first_state(optimizer, trained, seed) for seed in range(2)]
    first, second = made
    if first.keys() != second.keys() or not all(_equal(first[key], second[key]) for key in first):
        raise _refusal(optimizer, "what its state begins with depends on the first gradients", _ONE_STEP)
    result = copy_optimizer(optimizer)
    own = parameters_of(result)
    for (place, slot), value in first.items():
        result.state[own[place]][slot] = value
    before, after = leaves_of(result), leaves_of(after_step(copy_optimizer(result), trained, 2))
    strange = [path for path in before.keys() ^ after.keys() if path[0] != "state" or path[1] in trained]
    strange += [path for path in before.keys() & after.keys() if (before[path] is None) != (after[path] is None)]
    if strange:
        where = ".".join(map(str, strange[0][1:]))
        raise _refusal(optimizer, f"a step changes what it holds (`{where}`), and not only its values", _ONE_STEP)
    return result


def after_step(optimizer: Optimizer, trained: Collection[int], seed: int, scale: float = 1.0) -> Optimizer:
    """The same optimizer after a step with random gradients."""
    generator = torch.Generator().manual_seed(seed)
    for i, parameter in enumerate(parameters_of(optimizer)):
        parameter.grad = None
        if i in trained:
            parameter.grad = scale * torch.randn(parameter.shape, generator=generator).to(parameter)
    try:
        with torch.random.fork_rng():
            step_of(optimizer)()
    except UnsupportedError:
        raise
    except Exception as error:
        raise _refusal(
            optimizer, f"a step of it fails: {first_line(error)}", "see that `optimizer.step()` works"
        ) from error
    return optimizer


def step_of(optimizer: Optimizer) -> Any:
    """What the class calls a step, without what PyTorch puts around it."""
    step = type(optimizer).step
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step.__get__(optimizer)


class _Slots(dict[Any, Any]):
    """The state of a parameter, which remembers what was put into it first."""

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
    """The state of all parameters, which remembers the same."""

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(value, dict) and not isinstance(value, _Slots):
            given, value = value, _Slots()
            value.update(given)
        super().__setitem__(key, value)


def _first_state(optimizer: Optimizer, trained: Collection[int], seed: int) -> dict[tuple[int, Any], Any]:
    """What a step puts into the state that was not there, by parameter and slot."""
    made = copy_optimizer(optimizer)
    held = made.state
    made.state = _State(_Slots)
    for parameter, slots in held.items():
        dict.__setitem__(made.state, parameter, _Slots(slots) if isinstance(slots, dict) else slots)
    after_step(made, trained, seed)
    parameters = parameters_of(made)
    state = {i: made.state[parameters[i]] for i in trained if parameters[i] in made.state}
    return {(i, slot): value for i, slots in state.items() for slot, value in slots.first.items()}


def _equal(a: Any, b: Any) -> bool:
    (left, structure), (right, other) = pytree.tree_flatten(a), pytree.tree_flatten(b)
    return structure == other and all(
        torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else x is y or bool(x == y)
        for x, y in zip(left, right, strict=True)
    )


def _refusal(optimizer: Optimizer, problem: str, hint: str) -> UnsupportedError:
    return UnsupportedError(f"the optimizer {type(optimizer).__name__} cannot be carried over: {problem}", hint=hint)
