"""onnx.checker and shape inference for one model after another, in a process that may die of it.

`sandbox.py` starts this file as a program. Requests and answers are frames: the length in eight bytes, then the bytes.
A request is the folder of the model (may be empty) and the model; an answer is a report in JSON and the inferred model.
The first frame, an empty one, says that the worker is there.
"""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

import onnx.checker
import onnx.shape_inference

Report = dict[str, str | None]


def examine(model: bytes) -> tuple[Report, bytes]:
    """What onnx.checker objects to, what shape inference objects to, and the model with inferred types."""
    # Inference stops at the first contradiction when it is strict, and steps over it when it is not: verdicts come from
    # the first kind, which full_check runs, types from the second. Without data_prop: it keeps a list of what is known
    # about each element of a vector, and parameters can be vectors of a billion.
    _, inferred = _attempt(lambda: onnx.shape_inference.infer_shapes(model).SerializeToString())
    invalid, _ = _attempt(lambda: onnx.checker.check_model(model))
    contradiction = None
    if not invalid:
        contradiction, _ = _attempt(lambda: onnx.checker.check_model(model, full_check=True))
    return {"invalid": invalid, "contradiction": contradiction}, inferred or b""


def _attempt(action: Callable[[], bytes | None]) -> tuple[str | None, bytes | None]:
    try:
        return None, action()
    except Exception as error:  # whatever it is, it is what onnx has to say about the model
        return str(error) or type(error).__name__, None


def read_frame(stream: IO[bytes]) -> bytes:
    """The next frame; EOFError when the other side is gone."""
    size = stream.read(8)
    if len(size) < 8:
        raise EOFError
    (length,) = struct.unpack("<Q", size)
    data = stream.read(length)
    if len(data) < length:
        raise EOFError
    return data


def write_frame(stream: IO[bytes], data: bytes) -> None:
    stream.write(struct.pack("<Q", len(data)))
    stream.write(data)


def _limit_memory(used: int, model: bytes) -> None:
    """A model must not take the machine with it: a few bytes can make shape inference fill all memory."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = used + (1 << 30) + 16 * len(model)
    resource.setrlimit(resource.RLIMIT_AS, (soft if hard < 0 else min(soft, hard), hard))


def _memory_in_use() -> int:
    """The address space that the process has before it sees a model; a generous guess where it cannot be read."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (OSError, ValueError):
        return 4 << 30
    return pages * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    requests = sys.stdin.buffer
    # onnx prints to standard output now and then; answers go through a descriptor that it does not know.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    used = _memory_in_use()
    write_frame(answers, b"")
    answers.flush()
    while True:
        try:
            folder, model = os.fsdecode(read_frame(requests)), read_frame(requests)
        except EOFError:
            return
        os.chdir(folder or os.sep)
        _limit_memory(used, model)
        report, inferred = examine(model)
        write_frame(answers, json.dumps(report).encode())
        write_frame(answers, inferred)
        answers.flush()


if __name__ == "__main__":
    main()
