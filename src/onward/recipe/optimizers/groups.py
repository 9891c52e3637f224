"""Parameter groups: which optimizer updates which parameter, with which numbers."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import onnx_ir as ir

from onward.arguments import fitting
from onward.errors import RecipeError, UnknownNameError, near_or_first
from onward.recipe.optimizers.configuration import ConfiguredOptimizer
from onward.recipe.optimizers.graph_optimizer import FunctionOptimizer
from onward.recipe.optimizers.selection import Given, given_optimizer
from onward.recipe.optimizers.table import configure
from onward.recipe.spec import Spec, parse_options
from onward.recipe.trainable import matching

_NAMED = re.compile(r"(.+?)(:)(\w+=.*)", re.DOTALL)
"""A pattern, in which there may be colons, and options."""


@dataclasses.dataclass(frozen=True)
class Group:
    """Parameters that share an optimizer and its settings."""

    name: str
    optimizer: ConfiguredOptimizer | FunctionOptimizer
    parameters: list[ir.Value]

    def fact(self) -> dict[str, Any]:
        kind = (
            {"name": self.optimizer.kind.name, "options": dict(self.optimizer.options)}
            if isinstance(self.optimizer, ConfiguredOptimizer)
            else {"name": self.optimizer.name, "options": {}, "is_function": True}
        )
        return {
            "group": self.name,
            **kind,
            "hyper": dict(self.optimizer.values),
            "params": [value.name for value in self.parameters],
        }


def patterns(given: Sequence[Any]) -> list[str]:
    """All patterns of groups, as they are given."""
    return [pattern for item in given for pattern in _parse_group(item, Spec(""))[0]]


def opset_of(default: Given, given: Sequence[Any]) -> int:
    """The operator set that optimizers which are graphs need; 0 where there are none."""
    optimizers = [default, *(_parse_group(item, default)[1] for item in given)]
    return max((one.update.opset for one in optimizers if isinstance(one, FunctionOptimizer)), default=0)


def groups(
    parameters: Sequence[ir.Value],
    default: Given,
    given: Sequence[Any],
    roles: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> list[Group]:
    """The parameters divided: each goes to the first given group that matches it, the rest to the default.

    A group is given as `{"match": "*.bias", "weight_decay": 0}` or `*.bias:weight_decay=0`; `optimizer` in it is
    another optimizer than the default, and the other options change its settings. `roles` says what the patterns that
    are no patterns of names stand for.
    """
    remaining = {value.name or "": value for value in parameters}
    everything = list(remaining)
    found: list[tuple[Given, list[ir.Value]]] = []
    for item in given:
        match, spec = _parse_group(item, default)
        if not matching(match, everything, roles):
            listed = ", ".join(f"`{pattern}`" for pattern in match)
            hint = near_or_first(match[0].strip("*"), everything)
            raise UnknownNameError(f"{listed} matches no parameter", hint=hint)
        members = [remaining.pop(name) for name in matching(match, list(remaining), roles)]
        if not members:
            raise RecipeError(
                f"the group `{', '.join(match)}` is left without a parameter: groups before it have them all",
                hint="each parameter goes to the first group that matches it; put this one first, or leave it out",
            )
        found.append((spec, members))
    found.append((default, list(remaining.values())))
    return [
        Group(f"group{i}", _configure(spec), chosen)
        for i, (spec, chosen) in enumerate(item for item in found if item[1])
    ]


def _configure(given: Given) -> ConfiguredOptimizer | FunctionOptimizer:
    return given if isinstance(given, FunctionOptimizer) else configure(given)


def _parse_group(item: Any, default: Given) -> tuple[list[str], Given]:
    if isinstance(item, str):
        named = _NAMED.fullmatch(item)
        pattern, colon, rest = named.groups() if named else item.partition(":")
        if "=" in pattern and not colon:
            raise RecipeError(
                f"the group `{item}` does not say which parameters it is for", hint=f"write `*.bias:{item}`"
            )
        item = {"match": pattern, **parse_options(rest, item)}
    if not isinstance(item, Mapping) or "match" not in item:
        raise RecipeError(f"the group {item!r} does not say which parameters it is for", hint="write `*.bias:lr=1e-4`")
    match = fitting("`match` of a group", item["match"], Sequence[str])
    changes = {key: value for key, value in item.items() if key not in ("match", "optimizer")}
    base = given_optimizer(item["optimizer"]) if "optimizer" in item else default
    if isinstance(base, FunctionOptimizer):
        return match, base if not changes else given_optimizer({"function": base, **changes})
    return match, Spec(base.name, {**base.options, **changes})
