"""What programs that are written are made of: whatever comes from a model becomes a literal, or a name that is checked.

Names, attributes and documentation of a model may have been written by anybody. Every writer of programs takes them
from here, so that none of them can become code, in code, comments and docstrings alike.
"""

from __future__ import annotations

import keyword
import re
import sys
from collections.abc import Iterable
from pathlib import Path

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
