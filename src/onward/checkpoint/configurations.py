"""Configurations that pickles hold as objects of OmegaConf, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onward.checkpoint.pytorch.pickling import Object
from onward.errors import InvalidModelError


def plain(tree: Any) -> Any:
    """A tree in which what OmegaConf wraps is itself. Each thing is looked at once, however often it is there."""
    return _plain(tree, {}, 100)


def _plain(tree: Any, seen: dict[int, Any], depth: int) -> Any:
    if not depth:
        raise InvalidModelError("the configuration in the checkpoint is nested deeper than any")
    if isinstance(tree, Object) and tree.of.module.startswith("omegaconf.") and isinstance(tree.state, Mapping):
        return _plain(tree.state.get("_content", tree.state.get("_val")), seen, depth - 1)
    if not isinstance(tree, dict | list):
        return tree
    if id(tree) not in seen:
        made: Any = {} if isinstance(tree, dict) else []
        seen[id(tree)] = made
        if isinstance(tree, dict):
            made.update({key: _plain(value, seen, depth - 1) for key, value in tree.items()})
        else:
            made += [_plain(item, seen, depth - 1) for item in tree]
    return seen[id(tree)]
