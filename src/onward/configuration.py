"""Configuration files: mappings in YAML or TOML, read as data and nothing else."""

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
_LARGEST_KEY, _LONGEST_NUMBER = 1 << 60, 100
"""From this integer on, several have the same hash; and characters of a number."""
_FORM = "write a line such as `epochs: 5` for each setting (in TOML, `epochs = 5`)"


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML without tags that name classes, with numbers such as `1e-3`, and each key once."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys: set[Any] = set()
        for part, _ in node.value:
            key = self.construct_object(part, deep=True)
            if not isinstance(key, Hashable) or (isinstance(key, int) and abs(key) >= _LARGEST_KEY):
                raise yaml.constructor.ConstructorError(
                    None, None, "a key is a list, a mapping or a giant number", node.start_mark
                )
            if key in keys:
                raise yaml.constructor.ConstructorError(None, None, f"`{key}` is there twice", node.start_mark)
            keys.add(key)
        return super().construct_mapping(node, deep)


def _read_number(loader: _Loader, node: Any) -> Any:
    """Return a number. One such as `1:30:00` is multiplied out, in a time that grows with the square of its length."""
    if len(str(node.value)) > _LONGEST_NUMBER:
        raise yaml.constructor.ConstructorError(None, None, "a number has too many digits", node.start_mark)
    return yaml.SafeLoader.yaml_constructors[node.tag](loader, node)


for _kind in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _read_number)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\.\d+|\d+(\.\d*)?)[eE][-+]?\d+$"), list("-+.0123456789")
)


def read_configuration(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The mapping that a .yaml or .toml file holds: texts, numbers, truth values, lists and mappings of those."""
    file = Path(path)
    try:
        regular(file)
        with file.open("rb") as stream:
            data = stream.read(_LARGEST + 1)
    except OSError as error:
        raise DataError(f"`{file}` cannot be read: {reason(error)}", hint="check the path") from error
    _refuse_large(data, str(file))
    found = _parse_toml(data, file) if file.suffix == ".toml" else parse_yaml(data, str(file))
    _refuse_deep(found, str(file))
    for key, value in found.items():
        if not isinstance(key, str) or not _is_plain(value):
            raise DataError(f"`{key}` in `{file}` is no text, number or list of such", hint="write texts in quotes")
    return found


def parse_yaml(data: bytes, of: str) -> dict[str, Any]:
    """A mapping in YAML. References are refused, of which a few lines make an endless tree, and deep nesting."""
    _refuse_large(data, of)
    depth = 0
    try:
        for event in yaml.parse(data, Loader=_Loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent) or depth > _DEEPEST:
                what = "refers to parts of itself" if depth <= _DEEPEST else "is nested deeper than any configuration"
                raise DataError(f"`{of}` {what}", hint="write it out")
        found = yaml.load(data, Loader=_Loader)
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"`{of}` is not a configuration in YAML: {_problem(error)}", hint=_FORM) from error
    if not isinstance(found, dict):
        raise DataError(f"`{of}` holds no mapping", hint=_FORM)
    return found


def write_yaml(tree: Mapping[str, Any], remark: str = "") -> str:
    lines = "".join(f"# {line}\n" for line in remark.splitlines())
    return lines + str(yaml.safe_dump(dict(tree), sort_keys=False, allow_unicode=True, width=120))


def _refuse_large(data: bytes, of: str) -> None:
    if len(data) > _LARGEST:
        raise DataError(f"`{of}` is larger than any configuration", hint=_FORM)


def _parse_toml(data: bytes, file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise DataError(f"`{file}` is not valid TOML: {first_line(error)}", hint=_FORM) from error


def _refuse_deep(tree: dict[str, Any], of: str) -> None:
    """Refuse deep nesting, level by level: in TOML, dots in a key nest without a bracket."""
    level: list[Any] = [tree]
    for _ in range(_DEEPEST + 1):
        inner = (list(one.values()) if isinstance(one, dict) else one for one in level)
        level = [item for items in inner for item in items if isinstance(item, dict | list)]
        if not level:
            return
    raise DataError(f"`{of}` is nested deeper than any configuration", hint="write it out")


def _problem(error: Exception) -> str:
    """What is wrong, and in which line."""
    problem, mark = getattr(error, "problem", None), getattr(error, "problem_mark", None)
    return f"{problem}{f' (line {mark.line + 1})' if mark else ''}" if problem else first_line(error)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    return value is None or isinstance(value, str | int | float)
