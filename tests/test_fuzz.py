"""Damaged, random and hostile files: each gives a result or an `onward.Error`; no traceback, no hang, no memory explosion.

Real files are mutated as bytes and as protobuf, thousands of times, always the same way: a failure names its case, and
`damaged(model, kind, number)` makes the file again. More of them: ONWARD_FUZZ=10 pytest tests/test_fuzz.py.
"""

from __future__ import annotations

import functools
import os
import random
import resource
import signal
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import DecodeError, Message
from hypothesis import given
from hypothesis import strategies as st
from onnx import AttributeProto, ModelProto, TensorProto, helper
from typer.testing import CliRunner

import onward
from broken_models import GOOD
from models import digits_mlp, small_cnn
from onward.cli.commands import app
from onward.cli.failure import BUG

TIMES = int(os.environ.get("ONWARD_FUZZ", "1"))
SECONDS, BYTES = 30, 3 << 30

# ---- the files -------------------------------------------------------------------------------------------------------


@functools.cache
def files() -> dict[str, bytes]:
    """What is mutated: models for inference, a recipe with everything in it, training models that others wrote."""
    recipe = onward.prepare(
        small_cnn(channels=2),
        loss=["logits=cross_entropy:label_smoothing=0.1", "logits=cross_entropy:scale=0.5,target=probabilities"],
        optimizer="adamw:lr=1e-3",
        schedule=["warmup:steps=10,until=10", "one_cycle:steps=100"],
        freeze="conv.bias",
        groups=["*.bias:optimizer=momentum"],
        clip="norm:1",
        accumulate=2,
        ema=0.99,
        loss_scale="dynamic",
        init={"fc.*": "normal", "conv.weight": "orthogonal"},
    )
    made = {"mlp": digits_mlp(hidden=4), "cnn": small_cnn(channels=2), "recipe": recipe.to_proto()}
    made |= {name: build() for name, build in GOOD.items()}
    made["everything"] = everything()
    return {name: proto.SerializeToString(deterministic=True) for name, proto in made.items()}


def everything() -> ModelProto:
    """A valid model with messages of every kind that a model can hold."""
    proto = GOOD["control_flow"]() if "control_flow" in GOOD else next(iter(GOOD.values()))()
    values = helper.make_tensor("sparse", TensorProto.FLOAT, [2], [1.0, 2.0])
    indices = helper.make_tensor("", TensorProto.INT64, [2], [0, 3])
    proto.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [4]))
    for i, elem in enumerate((TensorProto.STRING, TensorProto.INT4, TensorProto.BFLOAT16, TensorProto.COMPLEX64)):
        data = [b"a", b"b"] if elem == TensorProto.STRING else [1, 2]
        proto.graph.initializer.append(helper.make_tensor(f"typed{i}", elem, [2], data))
    float_type = helper.make_tensor_type_proto(TensorProto.FLOAT, ["N", None, 3])
    for i, kind in enumerate(
        (
            helper.make_sequence_type_proto(float_type),
            helper.make_optional_type_proto(helper.make_sequence_type_proto(float_type)),
            helper.make_map_type_proto(TensorProto.STRING, float_type),
            helper.make_sparse_tensor_type_proto(TensorProto.FLOAT, [4]),
        )
    ):
        proto.graph.value_info.append(helper.make_value_info(f"note{i}", kind))
    proto.graph.node.append(
        helper.make_node("Constant", [], ["sparse_attribute"], sparse_value=proto.graph.sparse_initializer[0])
    )
    proto.graph.quantization_annotation.add(tensor_name="sparse").quant_parameter_tensor_names.add(key="a", value="b")
    proto.metadata_props.add(key="who", value="knows")
    proto.graph.node[0].metadata_props.add(key="who", value="knows")
    for elem in (TensorProto.FLOAT, TensorProto.INT64):
        one = helper.make_tensor("", elem, [2], [1, 2])
        proto.graph.node.append(helper.make_node("Constant", [], [f"constant{elem}"], value=one))
    return proto


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
    _, length, content, stop = rng.choice(texts or fields(data))
    text = rng.choice((b"\xff\xfe", b"\xc3(", b"\xed\xa0\x80", b"\x00", b"\x1b[31m\x07", b"\n\nerror: no", b"../" * 9, b""))
    return data[:length] + encoded(len(text)) + text + data[stop:]


# ---- mutations of protobuf -------------------------------------------------------------------------------------------

_INTEGERS = (0, 1, -1, 2, 7, 127, 255, 2**31 - 1, -(2**31), 2**32, 2**40, 2**60, 2**63 - 1, -(2**63))
_TEXTS = ("", "x", "a/b", "logits", "image", "location", "../../etc/passwd", "é" * 9, "[" * 5000, "{}", '{"a": 1}', "5", "null")


def messages(root: Message) -> list[Message]:
    found, pending = [], [root]
    while pending:
        message = pending.pop()
        found.append(message)
        for field, value in message.ListFields():
            if field.type == Field.TYPE_MESSAGE:
                pending.extend(value if field.is_repeated else [value])
    return found


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
    small = field.type in (Field.TYPE_INT32, Field.TYPE_UINT32)
    unsigned = field.type in (Field.TYPE_UINT32, Field.TYPE_UINT64)
    return rng.choice([n for n in _INTEGERS if (not small or abs(n) < 2**31) and (not unsigned or n >= 0)])


def rearranged(rng: random.Random, data: bytes) -> bytes:
    """One to three fields of one to three messages set, cleared, doubled or swapped with those of their like."""
    proto = ModelProto.FromString(data)
    everyone = messages(proto)
    for _ in range(rng.choice((1, 1, 2, 3))):
        message = rng.choice(everyone)
        field = rng.choice(message.DESCRIPTOR.fields)
        alike = [m for m in everyone if m.DESCRIPTOR is message.DESCRIPTOR]
        other = getattr(rng.choice(alike), field.name)
        current = getattr(message, field.name)
        if rng.random() < 0.2:
            message.ClearField(field.name)
        elif field.is_repeated:
            items = [type(item).FromString(item.SerializeToString()) for item in other] if field.type == Field.TYPE_MESSAGE else list(other)
            if field.type != Field.TYPE_MESSAGE:
                items += [some_value(rng, field, items) for _ in range(rng.randrange(3))]
            rng.shuffle(items)
            if rng.random() < 0.5:
                del current[:]
            current.extend(items)
        elif field.type == Field.TYPE_MESSAGE:
            current.CopyFrom(type(current).FromString(other.SerializeToString()))
        else:
            pool = [getattr(m, field.name) for m in alike if m.HasField(field.name)]
            setattr(message, field.name, some_value(rng, field, pool))
    return proto.SerializeToString()


KINDS: dict[str, Callable[[random.Random, bytes], bytes]] = {
    f.__name__: f
    for f in (truncated, flipped, inserted, deleted, moved, relabelled, resized, unreadable, rearranged)
}


def damaged(model: str, kind: str, number: int) -> bytes:
    return KINDS[kind](random.Random(f"{model} {kind} {number}"), files()[model])
