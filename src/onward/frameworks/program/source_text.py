"""Texts of programs: names, literals, and how lines are laid out."""

from __future__ import annotations

import keyword
import math
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from onward.build import Names


def quote(value: str) -> str:
    """A string, in quotes; all on one line, and nothing in it that one does not see."""
    made = repr(value)
    return f'"{made[1:-1]}"' if made[0] == "'" and '"' not in value else made


def docstring(content: str) -> str:
    """Lines as a docstring, in its quotes."""
    lines = "\n".join("".join(map(_visible, line)) for line in content.split("\n"))
    return '"""' + re.sub(r'"(?="|\Z)', r"\"", lines) + '"""'


def _visible(character: str) -> str:
    return character if character.isprintable() and character != "\\" else repr(character)[1:-1]


# ---- names -----------------------------------------------------------------------------------------------------------

BUILTINS = frozenset({
    "abs", "all", "any", "bool", "bytes", "callable", "dict", "divmod", "enumerate", "float", "getattr", "hasattr",
    "int",
    "isinstance", "iter", "len", "list", "map", "max", "min", "next", "object", "property", "range", "reversed",
    "round", "set", "setattr", "slice", "sorted", "staticmethod", "str", "sum", "super", "tuple", "type", "zip",
    "AttributeError", "Exception", "IndexError", "KeyError", "NotImplementedError", "RuntimeError", "TypeError",
    "ValueError",
    "__file__", "__name__",
})  # fmt: skip
"""What programs use of what is built in."""
RESERVED = frozenset([*keyword.kwlist, *BUILTINS, "_", "self"])
"""What no variable of a program is called."""


def identifier(name: str, otherwise: str = "x") -> str:
    """A name of Python that is like another one: of ASCII, as others would be read as their look-alikes.

    It is not private, since Python would change that within a class, no keyword, and nothing that a program may need.
    """
    plain = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_") or otherwise
    plain = f"_{plain}" if plain[0].isdigit() else plain
    return f"{plain}_" if plain in RESERVED else plain


def is_identifier(name: str) -> bool:
    """Whether Python takes a name, as an attribute, for what it is."""
    return name.isascii() and name.isidentifier() and not keyword.iskeyword(name) and not name.startswith("__")


class Identifiers(Names):
    """Names of a program, each of which is given away once."""

    def __init__(self, taken: Iterable[str] = ()):
        super().__init__({*taken, *RESERVED})

    def like(self, name: str, otherwise: str = "x") -> str:
        """A fresh name that is like one of a model."""
        return self.fresh(identifier(name, otherwise))


_MODULES = {"jax", "keras", "numpy", "onward", "optax", "tensorflow", "torch", *sys.stdlib_module_names}


def program_beside(path: Path) -> Path:
    """The file for the program that belongs to a file: a module that can be imported, and that hides no other."""
    name = identifier(path.stem, "run")
    return path.with_name(f"{name}_run.py" if name in _MODULES else f"{name}.py")


# ---- literals --------------------------------------------------------------------------------------------------------


def number(value: Any, module: str = "math") -> str:
    """A number. Attributes of a model have the digits of float32, and are as short as these allow.

    `module` is what the program takes infinity from.
    """
    if isinstance(value, np.floating):
        plain, short = float(value), str(value)
    elif isinstance(value, float):
        plain, short = value, _short(value)
    else:
        return repr(value.item() if isinstance(value, np.generic) else value)
    if not math.isfinite(plain):
        return f"{module}.nan" if math.isnan(plain) else f"{module}.inf" if plain > 0 else f"-{module}.inf"
    return repr(float(short))


def _short(plain: float) -> str:
    with np.errstate(over="ignore"):
        single = np.float32(plain)
    fits = float(single) == plain and abs(float(str(single))) <= float(np.finfo(np.float32).max)  # not its own digits
    return str(single) if fits else repr(plain)


def literal(value: Any, module: str = "math") -> str:
    """Numbers, texts and what holds them."""
    if isinstance(value, str):
        return quote(value)
    if isinstance(value, np.ndarray):
        return literal(list(value) if value.ndim else value[()], module)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{literal(key)}: {literal(item, module)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        inside = ", ".join(literal(item, module) for item in value)
        return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' if len(value) == 1 else ''})"
    return number(value, module)


# ---- layout ----------------------------------------------------------------------------------------------------------

WIDTH = 100


def arrange_imports(lines: Iterable[str]) -> str:
    """Imports as linters want them: the future, the standard library, the rest."""
    blocks: list[list[str]] = [[], [], []]
    for line in sorted(set(lines), key=lambda line: (line.startswith("from"), line)):
        module = line.split()[1].partition(".")[0]
        blocks[0 if module == "__future__" else 1 if module in sys.stdlib_module_names else 2].append(line)
    return "\n\n".join("\n".join(block) for block in blocks if block)


def indent(lines: Iterable[str]) -> list[str]:
    """Lines, some of which may be several, one level deeper."""
    return [textwrap.indent(line, "    ") for line in lines]


def break_lines(text: str) -> str:
    return "\n".join(part for line in text.split("\n") for part in _break_line(line))


def _break_line(line: str) -> list[str]:
    """A line, or its last call with one argument in each line."""
    if len(line) <= WIDTH or not line.endswith((")", "]", "}", "):", ") -> None:")):
        return [line]
    opened = _opening(line)
    if opened is None:
        return [line]
    begin, end = opened
    indent = " " * (len(line) - len(line.lstrip()))
    arguments = _arguments(line[begin + 1 : end])
    together = f"{indent}    {', '.join(arguments)}"
    inner = [together] if len(together) <= WIDTH else [f"{indent}    {argument}," for argument in arguments]
    inner = [together] if len(arguments) == 1 else inner  # a comma would make a tuple of what is in brackets
    return [line[: begin + 1], *(part for each in inner for part in _break_line(each)), f"{indent}{line[end:]}"]


TEXT = r"""\"(?:\\.|[^"\\])*\"|'(?:\\.|[^'\\])*'"""
"""A string of Python in one line."""
_TEXT = re.compile(TEXT)


def mask_texts(line: str) -> str:
    """The same, with other signs in place of texts: what is in these is no code."""
    return _TEXT.sub(lambda found: "_" * len(found[0]), line)


def _opening(line: str) -> tuple[int, int] | None:
    """Where the outermost bracket that holds most opens, and where it closes."""
    found: tuple[int, int] | None = None
    depth, start = 0, 0
    for i, character in enumerate(mask_texts(line)):
        if character in "([{":
            start = i if not depth else start
            depth += 1
        elif character in ")]}":
            depth -= 1
            if not depth and (found is None or i - start > found[1] - found[0]):
                found = start, i
    return found


def _arguments(text: str) -> list[str]:
    """What commas divide, outside of brackets and quotes."""
    parts, depth, start = [], 0, 0
    for i, character in enumerate(mask_texts(text)):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == "," and not depth:
            parts.append(text[start:i].strip())
            start = i + 1
    last = text[start:].strip()
    return [*parts, last] if last else parts
