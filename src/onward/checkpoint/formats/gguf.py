"""GGUF files of llama.cpp: metadata and weights, without optimizer state."""

from __future__ import annotations

import math
import struct
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from onward.checkpoint.format import Checkpoint, Format
from onward.errors import UnsupportedError
from onward.model.storage.files import blame_file, regular
from onward.run_state.tensors import ComputedTensor, StoredTensor, Tensor, contiguous_strides

_MAGIC = b"GGUF"
_MOST = 10_000_000
"""Largest number of tensors, values or elements of an array."""
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
_DTYPES: dict[str, Any] = {
    "F32": np.float32, "F16": np.float16, "I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64,
    "F64": np.float64, "BF16": ml_dtypes.bfloat16,
}  # fmt: skip
_NAMES = (
    "F32 F16 Q4_0 Q4_1 - - Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ2_XXS IQ2_XS IQ3_XXS IQ1_S IQ4_NL IQ3_S "
    "IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M BF16 - - - TQ1_0 TQ2_0 - - - MXFP4"
)
_TYPES = dict(enumerate(_NAMES.split()))
_BLOCK = np.dtype([("scale", np.float16), ("elements", np.int8, 32)])
"""Block of Q8_0."""


def _matches(path: Path) -> bool:
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def _read(path: Path) -> Checkpoint:
    with (
        blame_file(f"`{path}` is not a whole GGUF file", OSError, ValueError, struct.error),
        open(path, "rb") as file,
    ):
        size = regular(path).st_size
        version, tensors, values = struct.unpack("<4xIQQ", file.read(24))
        if version not in (2, 3) or max(tensors, values) > _MOST:
            raise ValueError(f"its version is {version}")
        metadata = {_text(file): _value(file, *_unpack(file, "I")) for _ in range(values)}
        heads = []
        for _ in range(tensors):
            name, rank = _text(file), _unpack(file, "I")[0]
            *dims, kind, offset = _unpack(file, f"{min(rank, 8)}QIQ")
            heads.append((name, tuple(dims[::-1]), _TYPES.get(kind, str(kind)), offset))
        alignment = metadata.get("general.alignment", 32)
        start = -(-file.tell() // alignment) * alignment
        stored = {name: _tensor(path, size, name, shape, kind, start + at) for name, shape, kind, at in heads}
    return Checkpoint(
        path=path,
        format=FORMAT.name,
        title=f"GGUF {version}",
        tensors=stored,
        configuration={"model_type": metadata.get("general.architecture")},
        arguments=metadata,
        layout=dict(Counter(f"tensors of {kind}" for _, _, kind, _ in heads)),
    )


def _tensor(path: Path, size: int, name: str, shape: tuple[int, ...], kind: str, offset: int) -> Tensor:
    if kind in _DTYPES:
        stored = StoredTensor(path, offset, np.dtype(_DTYPES[kind]), shape, contiguous_strides(shape))
        if stored.end > size:
            raise ValueError(f"`{name}` is cut off")
        return stored

    def elements() -> np.ndarray:
        if kind != "Q8_0" or math.prod(shape) % 32:
            raise UnsupportedError(
                f"`{name}` is {kind}, which is not read", hint="take a file in F32, F16, BF16 or Q8_0"
            )
        blocks = np.fromfile(path, _BLOCK, math.prod(shape) // 32, offset=offset)
        return (blocks["scale"].astype(np.float32)[:, None] * blocks["elements"]).reshape(shape)

    return ComputedTensor(np.dtype(np.float32), shape, elements)


def _unpack(file: BinaryIO, form: str) -> tuple[Any, ...]:
    return struct.unpack(f"<{form}", file.read(struct.calcsize(f"<{form}")))


def _text(file: BinaryIO) -> str:
    (length,) = _unpack(file, "Q")
    data = file.read(min(length, _MOST))
    if len(data) < length:
        raise ValueError("a text is cut off")
    return data.decode("utf-8", "replace")


def _value(file: BinaryIO, kind: int, depth: int = 4) -> Any:
    if kind == _TEXT:
        return _text(file)
    if kind != _ARRAY:
        if kind not in _NUMBERS:
            raise ValueError(f"a value has the unknown type {kind}")
        return _unpack(file, _NUMBERS[kind])[0]
    inner, count = _unpack(file, "IQ")
    if count > _MOST or not depth:
        raise ValueError("an array is too large")
    return [_value(file, inner, depth - 1) for _ in range(count)]


FORMAT = Format("gguf", "GGUF", _matches, _read)
