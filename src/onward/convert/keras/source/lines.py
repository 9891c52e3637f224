"""Lines of a program: what is needed of them, and what fits into others."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

from onward.convert.program.layout import TEXT, masked


@dataclasses.dataclass
class Line:
    targets: list[str]
    text: str
    is_single: bool = True

    def __str__(self) -> str:
        return f"{', '.join(self.targets)}{'' if self.is_single or len(self.targets) > 1 else ','} = {self.text}"

    @property
    def reads(self) -> list[str]:
        return names_in(self.text)


_TOKEN = re.compile(rf"{TEXT}|[A-Za-z_][A-Za-z_0-9.]*(?!\s*=[^=])(?![A-Za-z_0-9.])")
"""Texts, which are no code, and names, but for those of arguments."""


def names_in(line: str) -> list[str]:
    """The names that a line reads."""
    return [found[0] for found in _TOKEN.finditer(line) if found[0][0] not in "\"'"]


def renamed(line: str, names: Mapping[str, str]) -> str:
    return _TOKEN.sub(lambda found: names.get(found[0], found[0]), line)


class Numbered:
    """Names of Python's, counted from 1."""

    def __init__(self, taken: Iterable[str]):
        self._taken = set(taken)
        self._counts: dict[str, int] = {}

    def numbered(self, stem: str) -> str:
        while True:
            self._counts[stem] = self._counts.get(stem, 0) + 1
            name = f"{stem}_{self._counts[stem]}"
            if name not in self._taken:
                return name

    def __contains__(self, name: str) -> bool:
        return name in self._taken

    def fresh(self, wanted: str) -> str:
        name = wanted if wanted not in self._taken else self.numbered(wanted)
        self._taken.add(name)
        return name


def needed(lines: Sequence[Line], wanted: Iterable[str]) -> list[Line]:
    """Without what nobody reads."""
    read, kept = set(wanted), []
    for line in reversed(lines):
        if any(name in read for name in line.targets):
            if len(line.targets) > 1:
                line.targets = [name if name in read else "_" for name in line.targets]
            read.update(line.reads)
            kept.append(line)
    return kept[::-1]


_WIDTH = 84


def nested(lines: Sequence[Line], wanted: Iterable[str]) -> list[str]:
    """What is read once, in its place, as long as lines do not grow long."""
    uses = collections.Counter([name for line in lines for name in line.reads])
    uses.update(dict.fromkeys(wanted, 2))  # results keep their names: state may be assigned before they are read
    inside: dict[str, Line] = {}
    kept: list[str] = []
    for line in lines:
        text = line.text
        for name in line.reads:
            if name in inside:
                text = _put(text, name, inside[name].text)
        (target, *others) = line.targets
        if line.is_single and not others and uses[target] == 1 and len(text) < _WIDTH // 2:
            inside[target] = Line([target], text)
        else:
            kept.append(str(Line(line.targets, text, line.is_single)))
    return kept


def _put(text: str, name: str, expression: str) -> str:
    """An expression in the place of a name, in brackets where it needs them."""
    place = next(found for found in _TOKEN.finditer(text) if found[0] == name)
    before, after = text[: place.start()], text[place.end() :]
    is_argument = before.endswith(("(", ", ", "=", "[")) and after[:1] in (")", ",", "]")
    bare = (not before and not after) or is_argument or not re.search(r" [-+*/@] ", _outside(expression))
    return f"{before}{expression if bare else f'({expression})'}{after}"


def _outside(text: str) -> str:
    """What is in no brackets."""
    depth, kept = 0, []
    for character in masked(text):
        depth -= character in ")]"
        kept.append(character if not depth else "")
        depth += character in "(["
    return "".join(kept)
