"""What must hold before any rule can look: texts are texts, and nesting ends.

protobuf does not look into strings when it parses, and hands out the bytes of one that is not UTF-8. It also lets a
program nest messages deeper than any reader accepts. Both are found here, so that no rule has to expect them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from onward.checker.findings import Finding, make_finding

DEEPEST = 100  # messages; the limit of protobuf's own parsers
_MOST = 20


class _Fields(NamedTuple):
    """The fields of a message that can hold text, directly or further down. Tensor data holds none."""

    text: tuple[str, ...]
    texts: tuple[str, ...]
    message: tuple[str, ...]
    messages: tuple[str, ...]


@cache
def _fields(descriptor: Descriptor) -> _Fields:
    def names(kind: int, repeated: bool) -> tuple[str, ...]:
        return tuple(f.name for f in descriptor.fields if f.type == kind and bool(f.is_repeated) == repeated)

    text, message = FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_MESSAGE
    return _Fields(names(text, False), names(text, True), names(message, False), names(message, True))


def problems(proto: Message) -> Iterator[Finding]:
    """Why the model cannot be read at all; nothing for almost every file."""
    number = 0
    todo: list[tuple[Message, Any, int]] = [(proto, None, 1)]
    while todo:
        message, path, depth = todo.pop()
        if depth > DEEPEST:
            yield make_finding("OW105", "model", f"messages are nested more than {DEEPEST} levels deep")
            return
        fields = _fields(message.DESCRIPTOR)
        for field in _broken_texts(message, fields):
            yield make_finding("OW104", _place((path, field)), f"`{field}` holds bytes that are not UTF-8 text")
            number += 1
            if number == _MOST:
                return
        for name in fields.message:
            if message.HasField(name):
                todo.append((getattr(message, name), (path, name), depth + 1))
        for name in fields.messages:
            for i, child in enumerate(getattr(message, name)):
                todo.append((child, (path, (name, i)), depth + 1))


def _broken_texts(message: Message, fields: _Fields) -> Iterator[str]:
    for name in fields.text:
        if type(getattr(message, name)) is not str:
            yield name
    for name in fields.texts:
        if any(type(text) is not str for text in getattr(message, name)):
            yield name


def _place(path: Any) -> str:
    """`graph.node[3].name`, from the links that the walk left behind."""
    parts: list[str] = []
    while path is not None:
        path, last = path
        parts.append(last if isinstance(last, str) else f"{last[0]}[{last[1]}]")
    return ".".join(reversed(parts))
