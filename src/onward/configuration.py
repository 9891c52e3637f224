"""Configuration files: mappings in YAML or TOML, read as data only."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import yaml

from onward.errors import DataError, first_line
from onward.model.storage.files import reason, regular

_LARGEST, _DEEPEST = 1 << 20, 50
_LARGEST_KEY = 1 << 60  # larger integers share hashes, which makes a mapping of them slow
_LONGEST_NUMBER = 100  # characters
_FORM = "write a line such as `epochs: 5` for each setting (in TOML, `epochs = 5`)"


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML loader without class tags, with numbers such as `1e-3` and unique keys."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable) or (isinstance(key, int) and abs(key) >= _LARGEST_KEY):
                raise yaml.constructor.ConstructorError(
                    None, None, "a key is a list, a mapping or a giant number", node.start_mark
                )
            if key in keys:
                raise yaml.constructor.ConstructorError(None, None, f"`{key}` is given twice", node.start_mark)
            keys.add(key)
        return super().construct_mapping(node, deep)


def _read_number(loader: _Loader, node: Any) -> Any:
    """Return a number. The time to multiply out `1:30:00` grows with the square of its length."""
    if len(str(node.value)) > _LONGEST_NUMBER:
        raise yaml.constructor.ConstructorError(None, None, "a number has too many digits", node.start_mark)
    return yaml.SafeLoader.yaml_constructors[node.tag](loader, node)


for _kind in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _read_number)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\.\d+|\d+(\.\d*)?)[eE][-+]?\d+$"), list("-+.0123456789")
)


def read_configuration(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the mapping in a .yaml or .toml file, of strings, numbers, booleans, lists, mappings."""
    file = Path(path)
    try:
        regular(file)
        with file.open("rb") as stream:
            data = stream.read(_LARGEST + 1)
    except OSError as error:
        raise DataError(f"cannot read `{file}`: {reason(error)}", hint="check the path") from error
    settings = _parse_toml(data, str(file)) if file.suffix == ".toml" else parse_yaml(data, str(file))
    for key, value in settings.items():
        if not isinstance(key, str) or not _is_plain(value):
            raise DataError(f"`{key}` in `{file}` is not a string, number or list", hint="write strings in quotes")
    return settings


def parse_yaml(data: bytes, of: str) -> dict[str, Any]:
    """Return a mapping in YAML. Deep nesting is refused, and references, which can make huge trees."""
    _refuse_large(data, of)
    depth = 0
    try:
        for event in yaml.parse(data, Loader=_Loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent) or depth > _DEEPEST:
                problem = "uses YAML references" if depth <= _DEEPEST else f"is nested deeper than {_DEEPEST} levels"
                raise DataError(f"`{of}` {problem}", hint="write it out")
        tree = yaml.load(data, Loader=_Loader)
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"`{of}` is not valid YAML: {_problem(error)}", hint=_FORM) from error
    if not isinstance(tree, dict):
        raise DataError(f"`{of}` holds no mapping", hint=_FORM)
    return tree


def write_yaml(tree: Mapping[str, Any], remark: str = "") -> str:
    lines = "".join(f"# {line}\n" for line in remark.splitlines())
    return lines + str(yaml.safe_dump(dict(tree), sort_keys=False, allow_unicode=True, width=120))


def _refuse_large(data: bytes, of: str) -> None:
    if len(data) > _LARGEST:
        raise DataError(f"`{of}` is larger than {_LARGEST >> 20} MiB, too large for a configuration", hint=_FORM)


def _parse_toml(data: bytes, of: str) -> dict[str, Any]:
    _refuse_large(data, of)
    try:
        tree = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise DataError(f"`{of}` is not valid TOML: {first_line(error)}", hint=_FORM) from error
    level: list[Any] = [tree]  # not recursively: dots in a key nest without brackets, to any depth
    for _ in range(_DEEPEST + 1):
        inner = (list(node.values()) if isinstance(node, dict) else node for node in level)
        level = [item for items in inner for item in items if isinstance(item, dict | list)]
        if not level:
            return tree
    raise DataError(f"`{of}` is nested deeper than {_DEEPEST} levels", hint="write it out")


def _problem(error: Exception) -> str:
    """Return the problem and its line."""
    problem, mark = getattr(error, "problem", None), getattr(error, "problem_mark", None)
    return f"{problem}{f' (line {mark.line + 1})' if mark else ''}" if problem else first_line(error)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    return value is None or isinstance(value, str | int | float)
