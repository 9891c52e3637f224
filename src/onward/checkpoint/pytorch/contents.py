"""What the trees of PyTorch's files hold: modules, optimizers, schedulers, states of random numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from onward.checkpoint.pytorch.objects import Attributed, Name, Object
from onward.checkpoint.pytorch.optimizers import is_optimizer_state
from onward.checkpoint.pytorch.schedules import is_schedule_state
from onward.errors import InvalidModelError
from onward.run_state.state import RandomState
from onward.run_state.tensors import Tensor

_MOST_NODES = 5_000_000
"""Of a tree. A small pickle can describe one without end, by naming the same part again and again."""

_HARMLESS = ("torch", "collections", "numpy", "builtins", "__builtin__")
"""Modules of names that are types and classes of data in every checkpoint."""


_HARMFUL = ("eval", "exec", "getattr", "setattr", "open", "compile", "__import__", "apply", "execfile", "input")


def nodes(tree: Any) -> Iterator[Any]:
    """All that a tree holds, each thing once."""
    seen: set[int] = set()
    pending = [tree]
    while pending:
        here = pending.pop()
        if id(here) in seen:
            continue
        if len(seen) > _MOST_NODES:
            raise InvalidModelError("the checkpoint holds more objects than any does")
        if isinstance(here, dict | list | tuple | set | frozenset | Object):
            seen.add(id(here))
        yield here
        pending.extend(_parts(here))


def _parts(tree: Any) -> list[Any]:
    if isinstance(tree, Object):
        return [tree.of, tree.arguments, tree.keywords, tree.state, tree.items, tree.entries]
    if isinstance(tree, dict):
        attributes = [tree.attributes] if isinstance(tree, Attributed) else []
        return [*tree, *tree.values(), *attributes]
    return list(tree) if isinstance(tree, list | tuple | set | frozenset) else []


def executed_names(tree: Any) -> tuple[str, ...]:
    """What a loader that trusts the file would import and call, but for what all files are made of."""
    names = {str(node) for node in nodes(tree) if isinstance(node, Name) and not is_harmless(node)}
    return tuple(sorted(names))


def is_harmless(name: Name) -> bool:
    """Whether it is of what all checkpoints are made of."""
    if name.module.startswith(("torch.", "numpy.")):
        return False
    return name.module in _HARMLESS and name.name not in _HARMFUL


@dataclasses.dataclass
class Contents:
    """The parts of a tree that are of a known kind."""

    modules: list[Mapping[str, Any]] = dataclasses.field(default_factory=list)
    optimizers: list[Mapping[str, Any]] = dataclasses.field(default_factory=list)
    schedules: list[Mapping[str, Any]] = dataclasses.field(default_factory=list)
    randomness: list[RandomState] = dataclasses.field(default_factory=list)
    averages: list[Mapping[str, Any]] = dataclasses.field(default_factory=list)
    scalers: list[Mapping[str, Any]] = dataclasses.field(default_factory=list)
    data: list[Mapping[str, Any]] = dataclasses.field(default_factory=list)


def contents_of(*trees: Any) -> Contents:
    """What is in trees of dicts and lists: the outermost parts that are something."""
    found = Contents()
    pending = [(tree, _DEEPEST) for tree in reversed(trees)]
    while pending:
        tree, depth = pending.pop()
        if is_optimizer_state(tree):
            found.optimizers.append(tree)
        elif is_schedule_state(tree):
            found.schedules.append(tree)
        elif (kind := _random_kind(tree)) is not None:
            found.randomness.append(RandomState(kind, tree))
        elif isinstance(tree, Mapping) and tree.keys() >= _SCALER:
            found.scalers.append(tree)
        elif isinstance(tree, Mapping) and tree.keys() >= _LOADER:
            found.data.append(tree)
        elif _is_module_state(tree):
            (found.averages if AVERAGED in tree else found.modules).append(tree)
        elif depth and isinstance(tree, Mapping | list):
            inside = list(tree.values() if isinstance(tree, Mapping) else tree)
            pending += [(part, depth - 1) for part in reversed(inside)]
    return found


_SCALER = {"scale", "growth_factor", "backoff_factor", "growth_interval"}
"""What the state of a `GradScaler` has."""
_LOADER = {"_num_yielded", "_sampler_iter_yielded"}
"""What the state of a `StatefulDataLoader` has."""
AVERAGED = "n_averaged"
"""What the state of an `AveragedModel` has beside that of its module."""
_DEEPEST = 3
"""How far below the top what users save is looked for."""


def _is_module_state(tree: Any) -> bool:
    """Whether a tree is tensors by name."""
    return (
        isinstance(tree, Mapping)
        and any(isinstance(value, Tensor) and _random_kind(value) is None for value in tree.values())
        and all(isinstance(key, str) for key in tree)
        and all(isinstance(value, Tensor | Object | int | float | bytes) for value in tree.values())
    )


def _random_kind(tree: Any) -> str | None:
    """Which generator of random numbers a tree is the state of."""
    if isinstance(tree, Tensor) and tree.dtype == np.uint8 and len(tree.shape) == 1:
        return {5056: "torch, CPU", 16: "torch, CUDA"}.get(tree.shape[0])
    if isinstance(tree, tuple) and len(tree) == 3 and isinstance(tree[1], tuple) and len(tree[1]) == 625:
        return "Python"
    if isinstance(tree, tuple) and len(tree) == 5 and tree[0] == "MT19937":
        return "numpy"
    return None
