"""Damages to files: of bytes, of protobuf, of JSON, and of what archives and headers hold. Each is a function of a
random generator and the bytes of a good file, and gives the same bytes whenever it gets the same.
"""

from __future__ import annotations

import copy
import functools
import io
import json
import random
import struct
import zipfile
from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import Message
from onnx import ModelProto

Damage = Callable[[random.Random, bytes], bytes]

# ---- mutations of bytes ----------------------------------------------------------------------------------------------


def varint(data: bytes, at: int) -> tuple[int, int] | None:
    """The number at a place and where it ends, or None."""
    value = 0
    for i in range(10):
        if at + i >= len(data):
            return None
        value |= (data[at + i] & 127) << 7 * i
        if data[at + i] < 128:
            return value, at + i + 1
    return None


def encoded(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


@functools.lru_cache(maxsize=4)
def fields(data: bytes) -> list[tuple[int, int, int, int]]:
    """Every field, nested ones included: where its tag, its length (or value), and its content begin, and its end."""
    found: list[tuple[int, int, int, int]] = []

    def walk(start: int, end: int, depth: int) -> bool:
        at, own = start, []
        while at < end:
            tag = varint(data, at)
            if tag is None or not tag[0] >> 3:
                return False
            kind, after = tag[0] & 7, tag[1]
            if kind == 2:
                size = varint(data, after)
                if size is None or size[1] + size[0] > end:
                    return False
                own.append((at, after, size[1], size[1] + size[0]))
                at = size[1] + size[0]
            elif kind in (0, 1, 5):
                stop = varint(data, after) if kind == 0 else (0, after + (8 if kind == 1 else 4))
                if stop is None or stop[1] > end:
                    return False
                own.append((at, after, after, stop[1]))
                at = stop[1]
            else:
                return False
        found.extend(own)
        for _, length, content, stop in own:
            if content > length and stop - content > 1 and depth < 12:
                walk(content, stop, depth + 1)
        return True

    walk(0, len(data), 0)
    return found


def place(rng: random.Random, data: bytes) -> int:
    """Anywhere; more often where a field begins than within its bytes."""
    known = fields(data)
    if known and rng.random() < 0.7:
        return min(rng.choice(rng.choice(known)) + rng.choice((-1, 0, 0, 0, 1)), len(data) - 1)
    return rng.randrange(len(data))


def truncated(rng: random.Random, data: bytes) -> bytes:
    return data[: place(rng, data)]


def flipped(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        changed[place(rng, data)] ^= 1 << rng.randrange(8)
    return bytes(changed)


def inserted(rng: random.Random, data: bytes) -> bytes:
    at = place(rng, data)
    return data[:at] + rng.randbytes(rng.choice((1, 1, 2, 5, 40))) + data[at:]


def deleted(rng: random.Random, data: bytes) -> bytes:
    at = place(rng, data)
    return data[:at] + data[at + rng.choice((1, 1, 2, 5, 40)) :]


def moved(rng: random.Random, data: bytes) -> bytes:
    """A field doubled, dropped, or put in the place of another."""
    known = fields(data)
    (a, _, _, b), (c, _, _, d) = sorted(rng.sample(known, 2))
    if b > c:  # nested
        return data[:c] + data[d:] if rng.random() < 0.5 else data[:d] + data[c:d] + data[d:]
    return data[:a] + data[c:d] + data[b:c] + data[a:b] + data[d:]


def relabelled(rng: random.Random, data: bytes) -> bytes:
    """A field under another number or of another kind."""
    at, after, *_ = rng.choice(fields(data))
    tag = encoded(rng.choice((*range(1, 30), 1000)) << 3 | rng.choice((0, 1, 2, 2, 2, 3, 4, 5, 7)))
    return data[:at] + tag + data[after:]


def resized(rng: random.Random, data: bytes) -> bytes:
    """A length or a number that is wrong by little or by much."""
    _, length, content, stop = rng.choice(fields(data))
    end = content if content > length else stop
    sizes = (0, 1, 127, 2**31 - 1, 2**31, 2**32, 2**60, 2**63 - 1, 2**63, 2**64 - 1, stop - content + 1)
    return data[:length] + encoded(rng.choice(sizes)) + data[end:]


def unreadable(rng: random.Random, data: bytes) -> bytes:
    """A text that is not UTF-8, or holds characters that terminals and file systems take amiss."""
    texts = [f for f in fields(data) if 0 < f[3] - f[2] < 60 and data[f[2] : f[3]].isascii()]
    _, length, _, stop = rng.choice(texts or fields(data))
    text = rng.choice(
        (b"\xff\xfe", b"\xc3(", b"\xed\xa0\x80", b"\x00", b"\x1b[31m\x07", b"\n\nerror: no", b"../" * 9, b"")
    )
    return data[:length] + encoded(len(text)) + text + data[stop:]


# ---- mutations of protobuf -------------------------------------------------------------------------------------------

_INTEGERS = (0, 1, -1, 2, 7, 127, 255, 2**31 - 1, -(2**31), 2**32, 2**40, 2**60, 2**63 - 1, -(2**63))
_TEXTS = (
    "",
    "x",
    "a/b",
    "logits",
    "image",
    "location",
    "../../etc/passwd",
    "é" * 9,
    "[" * 5000,
    "{}",
    '{"a": 1}',
    "5",
    "null",
)


def messages(root: Message) -> list[Message]:
    found, pending = [], [root]
    while pending:
        message = pending.pop()
        found.append(message)
        for field, value in message.ListFields():
            if _is_map(field):
                pending.extend(item for item in value.values() if isinstance(item, Message))
            elif field.type == Field.TYPE_MESSAGE:
                pending.extend(value if field.is_repeated else [value])
    return found


def _is_map(field: Any) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def some_value(rng: random.Random, field: Any, pool: list[Any]) -> Any:
    if pool and rng.random() < 0.5:
        return rng.choice(pool)
    if field.type == Field.TYPE_STRING:
        return rng.choice(_TEXTS)
    if field.type == Field.TYPE_BYTES:
        return rng.choice((b"", b"\xff\x00", rng.randbytes(9), b"mean"))
    if field.type in (Field.TYPE_FLOAT, Field.TYPE_DOUBLE):
        return rng.choice((0.0, -1.0, 1e38, float("inf"), float("nan")))
    if field.type == Field.TYPE_ENUM:
        return rng.choice(field.enum_type.values).number
    if field.type == Field.TYPE_BOOL:
        return rng.random() < 0.5
    small = field.type in (Field.TYPE_INT32, Field.TYPE_UINT32, Field.TYPE_FIXED32)
    unsigned = field.type in (Field.TYPE_UINT32, Field.TYPE_UINT64, Field.TYPE_FIXED32, Field.TYPE_FIXED64)
    return rng.choice([n for n in _INTEGERS if (not small or abs(n) < 2**31) and (not unsigned or n >= 0)])


def rearranged(rng: random.Random, data: bytes, kind: type[Message] = ModelProto) -> bytes:
    """One to three fields of one to three messages set, cleared, doubled or swapped with those of their like."""
    proto = kind.FromString(data)
    everyone = messages(proto)
    for _ in range(rng.choice((1, 1, 2, 3))):
        message = rng.choice(everyone)
        plain = [field for field in message.DESCRIPTOR.fields if not _is_map(field)]
        if not plain:
            continue
        field = rng.choice(plain)
        alike = [m for m in everyone if m.DESCRIPTOR is message.DESCRIPTOR]
        other = getattr(rng.choice(alike), field.name)
        current = getattr(message, field.name)
        if rng.random() < 0.2:
            message.ClearField(field.name)
        elif field.is_repeated:
            items = (
                [type(item).FromString(item.SerializeToString()) for item in other]
                if field.type == Field.TYPE_MESSAGE
                else list(other)
            )
            if field.type != Field.TYPE_MESSAGE:
                items += [some_value(rng, field, items) for _ in range(rng.randrange(3))]
            rng.shuffle(items)
            if rng.random() < 0.5:
                del current[:]
            current.extend(items)
        elif field.type == Field.TYPE_MESSAGE:
            current.CopyFrom(type(current).FromString(other.SerializeToString()))
        else:
            pool = [getattr(m, field.name) for m in alike if not field.has_presence or m.HasField(field.name)]
            setattr(message, field.name, some_value(rng, field, pool))
    return proto.SerializeToString()


KINDS: dict[str, Damage] = {
    f.__name__: f for f in (truncated, flipped, inserted, deleted, moved, relabelled, resized, unreadable, rearranged)
}

BYTES = (truncated, flipped, inserted, deleted)


def renumbered(rng: random.Random, data: bytes) -> bytes:
    """A number of four or eight bytes in a binary file that is another: an offset, a length, a size."""
    width = rng.choice((4, 4, 4, 8))
    at = rng.randrange(max(len(data) - width, 1)) // 4 * 4
    number = rng.choice((0, 1, 2, 255, at, len(data), len(data) - at, 1 << 31, (1 << 31) - 1, -1, rng.randrange(256)))
    return data[:at] + (number % (1 << 8 * width)).to_bytes(width, "little") + data[at + width :]


# ---- mutations of JSON -----------------------------------------------------------------------------------------------

_ODD: tuple[Any, ...] = (
    None, True, 0, -1, 2, 1.5, 2**31, -(2**63), 2**64, 10**400, float("nan"), float("inf"), "", "x",
    "../../secret", "/etc/passwd", "\x00", "\x1b[31m", "é" * 300, [], {}, [[]], [None], {"x": 1}, "nan", "-1", "1e400",
    ["a"] * 99,
)  # fmt: skip


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where in a tree of objects and lists there is something."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [path, *(place for key, item in items for place in places(item, (*path, key)))]


def changed_tree(rng: random.Random, tree: Any) -> Any:
    """One to three places of a tree dropped, renamed, doubled, or given a value of another kind."""
    tree = json.loads(json.dumps(tree))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        *way, last = rng.choice(places(tree)[1:]) if len(places(tree)) > 1 else (None,)
        if last is None:
            return rng.choice(_ODD)
        around = functools.reduce(lambda at, key: at[key], way, tree)
        action = rng.random()
        if action < 0.15:
            del around[last]
        elif action < 0.3 and isinstance(around, dict):
            around[rng.choice(("", "x", "__class__", str(last).upper(), f"{last}\n"))] = around.pop(last)
        elif action < 0.4 and isinstance(around, list):
            around.append(around[last])
        elif action < 0.5 and isinstance(around[last], int | float):
            around[last] = rng.choice((-1, 0, 0.5, 2, 1e9)) * around[last]
        else:
            around[last] = copy.deepcopy(rng.choice(_ODD))  # which may be changed next
    return tree


def changed_json(rng: random.Random, data: bytes) -> bytes:
    return json.dumps(changed_tree(rng, json.loads(data)), ensure_ascii=rng.random() < 0.5).encode("utf-8", "replace")


def deep_json(rng: random.Random, data: bytes) -> bytes:
    return rng.choice((b"[", b'{"a":')) * rng.choice((500, 100_000))


JSON = (changed_json, changed_json, changed_json, changed_json, deep_json, *BYTES)


def changed_lines(rng: random.Random, data: bytes) -> bytes:
    """A file with an object in each line, one of which is another."""
    lines = data.splitlines()
    at = rng.randrange(len(lines))
    lines[at] = changed_json(rng, lines[at])
    return b"\n".join(lines) + b"\n"


# ---- mutations of headers and archives -------------------------------------------------------------------------------


def changed_safetensors(rng: random.Random, data: bytes) -> bytes:
    """A file of safetensors whose header says something else, or is of another length."""
    size = int.from_bytes(data[:8], "little")
    header = changed_json(rng, data[8 : 8 + size])
    length = len(header) if rng.random() < 0.9 else rng.choice((0, 1, 2**31, 2**63, 2**64 - 1))
    return struct.pack("<Q", length) + header + data[8 + size :]


_TYPES = (">f4", "|O", "<f8", "<M8[s]", "|V4", "<U9", "|S4", "<c8", "|b1", "f4,i4")


def changed_npy(rng: random.Random, data: bytes) -> bytes:
    """An array of NumPy whose header says something else."""
    size = int.from_bytes(data[8:10], "little")
    header = data[10 : 10 + size].decode("latin-1").strip()
    header = rng.choice(
        (
            header.replace("<f4", rng.choice(_TYPES)),
            header.replace("'shape': (", f"'shape': ({rng.choice((-1, 0, 2**40, 2**63, 10**30))}, "),
            header.replace("False", rng.choice(("True", "None", "__import__('os').system('true')"))),
            header.replace("'descr'", rng.choice(("'x'", "descr", "b'descr'"))),
            "{" * rng.choice((1, 5000)),
        )
    )
    return data[:8] + struct.pack("<H", len(header)) + header.encode("latin-1") + data[10 + size :]


def changed_zip(inner: dict[str, tuple[Damage, ...]]) -> Damage:
    """Damages of an archive: to a member, by the ending of its name, or to which members there are, and their names."""

    def damage(rng: random.Random, data: bytes) -> bytes:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = [(info.filename, archive.read(info)) for info in archive.infolist()]
        at = rng.randrange(len(members))
        name, content = members[at]
        action = rng.random()
        if action < 0.65:
            kinds = next((kinds for ending, kinds in inner.items() if name.endswith(ending)), BYTES)
            members[at] = name, rng.choice(kinds)(rng, content or b"\0")
        elif action < 0.75:
            del members[at]
        elif action < 0.85:
            members[at] = rng.choice(("../../outside", "/tmp/outside", "x", "\x00", name.upper(), "")), content
        elif action < 0.95:
            members.append((name, members[rng.randrange(len(members))][1]))
        else:
            members[at] = name, bytes(200 << 20)  # which takes no room while it is packed
        made = io.BytesIO()
        with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED if rng.random() < 0.5 or action >= 0.95 else 0) as archive:
            for name, content in members:
                archive.writestr(zipfile.ZipInfo(name or "empty"), content)
        return made.getvalue()

    return damage
