"""Source text of programs: names, literals, and the layout of lines."""

from __future__ import annotations

import keyword
import math
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from onward.build import Names


def quote(value: str) -> str:
    """Return a string in double quotes where possible, on one line, without invisible characters."""
    text = repr(value)
    return f'"{text[1:-1]}"' if text[0] == "'" and '"' not in value else text


def docstring(content: str) -> str:
    """Return lines as a docstring, with its quotes."""
    lines = "".join(c if c == "\n" or (c.isprintable() and c != "\\") else repr(c)[1:-1] for c in content)
    return '"""' + re.sub(r'"(?="|\Z)', r"\"", lines) + '"""'


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
"""Built-in names that programs use."""
RESERVED = frozenset([*keyword.kwlist, *BUILTINS, "_", "self"])
"""Names that no variable of a program has."""


def identifier(name: str, otherwise: str = "x") -> str:
    """Return a Python name similar to another name.

    It has ASCII characters only, since Python reads others as their look-alikes. It is not private,
    which Python would change within a class, and not a keyword or another reserved name.
    """
    plain = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_") or otherwise
    plain = f"_{plain}" if plain[0].isdigit() else plain
    return f"{plain}_" if plain in RESERVED else plain


def is_identifier(name: str) -> bool:
    """True if a name can be an attribute as it is."""
    return name.isascii() and name.isidentifier() and not keyword.iskeyword(name) and not name.startswith("__")


class Identifiers(Names):
    """Unique names of a program."""

    def __init__(self, taken: Iterable[str] = ()):
        super().__init__({*taken, *RESERVED})

    def like(self, name: str) -> str:
        """Return a fresh name similar to one of a model."""
        return self.fresh(identifier(name))


_MODULES = {"jax", "keras", "numpy", "onward", "optax", "tensorflow", "torch", *sys.stdlib_module_names}


def program_beside(path: Path) -> Path:
    """Return the path of the program beside a file: an importable module that hides no other."""
    name = identifier(path.stem, "run")
    return path.with_name(f"{name}_run.py" if name in _MODULES else f"{name}.py")


# ---- literals --------------------------------------------------------------------------------------------------------


def number(value: Any, module: str = "math") -> str:
    """Return a number as text, with the fewest digits of float32 or float64, or `module.inf`."""
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
    """Return numbers, strings and containers of them as text."""
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
    """Return import lines in the order of linters: `__future__`, the standard library, the rest."""
    blocks: list[list[str]] = [[], [], []]
    for line in sorted(set(lines), key=lambda line: (line.startswith("from"), line)):
        module = line.split()[1].partition(".")[0]
        blocks[0 if module == "__future__" else 1 if module in sys.stdlib_module_names else 2].append(line)
    return "\n\n".join("\n".join(block) for block in blocks if block)


def indent(lines: Iterable[str]) -> list[str]:
    """Indent lines, some of which are several."""
    return [textwrap.indent(line, "    ") for line in lines]


def break_lines(text: str) -> str:
    return "\n".join(piece for line in text.split("\n") for piece in _break_line(line))


def _break_line(line: str) -> list[str]:
    """Return a line, or its last call with one argument per line."""
    if len(line) <= WIDTH or not line.endswith((")", "]", "}", "):", ") -> None:")):
        return [line]
    bracket = _longest_bracket(line)
    if bracket is None:
        return [line]
    begin, end = bracket
    indent = " " * (len(line) - len(line.lstrip()))
    arguments = _arguments(line[begin + 1 : end])
    together = f"{indent}    {', '.join(arguments)}"
    inner = [together] if len(together) <= WIDTH else [f"{indent}    {argument}," for argument in arguments]
    inner = [together] if len(arguments) == 1 else inner  # a comma would make a tuple of what is in brackets
    return [
        line[: begin + 1],
        *(piece for inner_line in inner for piece in _break_line(inner_line)),
        f"{indent}{line[end:]}",
    ]


TEXT = r"""\"(?:\\.|[^"\\])*\"|'(?:\\.|[^'\\])*'"""
"""Python string in one line."""
_TEXT = re.compile(TEXT)


def mask_texts(line: str) -> str:
    """Return a line with its strings masked, since they are not code."""
    return _TEXT.sub(lambda match: "_" * len(match[0]), line)


def _longest_bracket(line: str) -> tuple[int, int] | None:
    """Return the start and end of the longest outermost bracket."""
    outer = [(i, character) for i, character, depth in _depths(line) if not depth]
    opened = [i for i, character in outer if character in "([{"]
    closed = [i for i, character in outer if character in ")]}"]
    return max(zip(opened, closed, strict=False), key=lambda pair: pair[1] - pair[0], default=None)


def _arguments(text: str) -> list[str]:
    """Split at commas outside of brackets and strings."""
    commas = [i for i, character, depth in _depths(text) if character == "," and not depth]
    parts = [text[start + 1 : end].strip() for start, end in zip([-1, *commas], [*commas, len(text)], strict=True)]
    return parts if parts[-1] else parts[:-1]


def _depths(text: str) -> Iterator[tuple[int, str, int]]:
    """Yield the index and nesting depth of each character. Brackets have the depth around them."""
    depth = 0
    for i, character in enumerate(mask_texts(text)):
        depth -= character in ")]}"
        yield i, character, depth
        depth += character in "([{"
