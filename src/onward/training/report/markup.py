"""HTML that cannot be broken by what is in it: every text is escaped, unless it is HTML that was made here."""

from __future__ import annotations

import html
import json
from typing import Any


class Markup(str):
    """Text that is HTML already."""


def tag(name: str, /, *content: str, **attributes: str | bool | None) -> Markup:
    """An element. An attribute `class_` is `class`, `aria_label` is `aria-label`; False and None leave it out."""
    written = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{escape(value)}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    return Markup(f"<{name}{written}>{join(*content)}</{name}>")


def join(*content: str) -> Markup:
    return Markup("".join(item if isinstance(item, Markup) else escape(item) for item in content))


def escape(text: str) -> str:
    """What a text is in HTML. Characters that do not print, and those that reorder others, are shown as escapes."""
    printable = "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
    return html.escape(printable)


def data(value: Any) -> Markup:
    """A value as JSON that can stand in a script: nothing in it ends the script or begins a comment."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)  # which is ASCII
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))
