"""Long lines of Python, as a formatter would break them."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterable

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
