"""Numbers, sizes and names as text. Names come from files: their control characters are escaped."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from onward.inspect.summary import Amount, Shape

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def clean(text: str) -> str:
    """Escape characters that do not print: line breaks, escape codes, reordering marks."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def shorten(text: str, width: int = 60) -> str:
    """Shorten to `width` characters, in the middle: names differ at their ends."""
    text = clean(text)
    if len(text) <= width:
        return text
    tail = (width - 1) * 2 // 3
    return f"{text[: width - 1 - tail]}…{text[len(text) - tail :]}"


def size(count: int) -> str:
    amount = float(count)
    for unit in _UNITS:
        if amount < 1024 or unit == _UNITS[-1]:
            break
        amount /= 1024
    return f"{count:,} B" if unit == "B" else f"{amount:,.1f} {unit}"


def quantity(count: int, word: str) -> str:
    """Return `1 tensor` or `2,000 tensors`."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def amount(of: Amount) -> str:
    return f"{of.numbers:,} in {quantity(of.tensors, 'tensor')}, {size(of.bytes)}"


def percent(part: float, whole: float) -> str:
    share = 100 * part / whole
    return f"{share:.0f} %" if share == 0 or share >= 10 or share == round(share) else f"{share:.2g} %"


def setting(value: Any) -> str:
    """Return `0.001`, `1e-8`, `1,000`, `[30, 60]`, `true`, or a word."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ", ".join(setting(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(settings(value)) + "}"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    if isinstance(value, int):
        if abs(value) < 10**15:
            return f"{value:,}"
        return f"{value:.6g}" if abs(value) < 10**300 else "enormous"
    if isinstance(value, float):
        return f"{value:.6g}".replace("e-0", "e-")
    return "unknown" if value is None else shorten(str(value))


def settings(values: Mapping[str, Any]) -> list[str]:
    return [f"{shorten(name)} {setting(value)}" for name, value in values.items()]


def shape(axes: Shape | None) -> str:
    if axes is None:
        return "[?]"
    return "[" + ", ".join("?" if axis is None else shorten(str(axis), 30) for axis in axes) + "]"


def list_names(names: Sequence[str], most: int) -> str:
    """Return the first names, and the number of others."""
    shown = ", ".join(shorten(name) for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most:,} more"


def gather_names(names: Sequence[str], everything: Iterable[str], most: int = 3) -> str:
    """Return names, with many of one submodule as `backbone.* (60 tensors)`."""
    if len(names) <= most:
        return list_names(names, most)
    names_by_prefix = _by_prefix(names, most)
    if len(names_by_prefix) > most:
        return f"{quantity(len(names), 'tensor')}, such as {shorten(names[0])}"
    everything = list(everything)
    words = []
    for prefix, members in names_by_prefix.items():
        total = sum(name.startswith(prefix) for name in everything)
        count = f"{len(members):,}" if total <= len(members) else f"{len(members):,} of {total:,}"
        words.append(f"{shorten(prefix)}* ({count} tensors)" if len(members) > 1 else shorten(members[0]))
    return ", ".join(words)


def _by_prefix(names: Sequence[str], most: int) -> dict[str, list[str]]:
    """Return names by the submodule in which they first differ, or all by their common one."""
    same = os.path.commonprefix(names)  # noqa: RUF071  # separators are dots and slashes
    common = same[: max(map(same.rfind, "./")) + 1]
    names_by_prefix: dict[str, list[str]] = {}
    for name in names:
        ends = [end for separator in "./" if (end := name.find(separator, len(common))) >= 0]
        names_by_prefix.setdefault(name[: min(ends) + 1 if ends else len(name)], []).append(name)
    return {common: list(names)} if common and len(names_by_prefix) > most else names_by_prefix
