"""Configurations as plain data: YAML, and the objects of OmegaConf that pickles hold."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from onward.checkpoint.pytorch.objects import Object
from onward.errors import InvalidModelError, UnsupportedError, first_line

_LARGEST = 16 << 20


def read_yaml(data: bytes, of: str) -> dict[str, Any]:
    """A mapping in YAML: no tags, which name classes, and no references, of which a few lines make an endless tree."""
    if len(data) > _LARGEST:
        raise InvalidModelError(f"`{of}` is larger than any configuration")
    yaml = _yaml()
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(data, Loader=yaml.SafeLoader)):
            raise InvalidModelError(f"`{of}` refers to parts of itself")
        found = yaml.load(data, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidModelError(f"`{of}` is not a configuration in YAML: {first_line(error)}") from error
    if not isinstance(found, dict):
        raise InvalidModelError(f"`{of}` holds no mapping")
    return found


def write_yaml(tree: Mapping[str, Any]) -> bytes:
    return bytes(_yaml().safe_dump(dict(tree), sort_keys=False).encode())


def _yaml() -> Any:
    try:
        return importlib.import_module("yaml")
    except ImportError as error:
        missing = "the configuration is YAML, for which PyYAML is missing"
        raise UnsupportedError(missing, hint="pip install pyyaml") from error


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
