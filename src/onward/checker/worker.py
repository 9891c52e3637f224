"""Worker process that runs onnx.checker and shape inference, which may crash it.

`sandbox.py` starts this file as a program. Requests and answers are frames: the length in eight
bytes, then the bytes. A request is the folder of the model (may be empty) and the model. An answer
is a report in JSON and the inferred model. The first frame is empty and says that the worker is
ready.
"""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import onnx.checker
import onnx.shape_inference

Report = dict[str, Any]


def examine(model: bytes) -> tuple[Report, bytes]:
    """Return the objections of onnx.checker and shape inference, and the model with inferred types."""
    # Strict inference, which full_check runs, stops at the first contradiction and gives the verdict; the other kind
    # continues and gives the types. Without data_prop: it lists every known element of a vector, and parameters can be
    # vectors with a billion elements.
    _, inferred = _attempt(lambda: onnx.shape_inference.infer_shapes(model).SerializeToString())
    invalid, _ = _attempt(lambda: onnx.checker.check_model(model))
    contradiction = None
    if not invalid:
        contradiction, _ = _attempt(lambda: onnx.checker.check_model(model, full_check=True))
    loads = bool(invalid or contradiction) and _attempt(lambda: _load(model))[0] is None
    return {"invalid": invalid, "contradiction": contradiction, "loads": loads}, inferred or b""


def _load(model: bytes) -> None:
    """Load a model in ONNX Runtime, which takes more than the standard allows."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _attempt(action: Callable[[], bytes | None]) -> tuple[str | None, bytes | None]:
    try:
        return None, action()
    except Exception as error:  # any exception is the verdict of onnx
        return str(error) or type(error).__name__, None


def read_frame(stream: IO[bytes]) -> bytes:
    """Return the next frame; raise EOFError if the other side has ended."""
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
    """Limit the memory: a few bytes of a model can make shape inference fill all of it."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = used + (1 << 30) + 16 * len(model)
    resource.setrlimit(resource.RLIMIT_AS, (soft if hard < 0 else min(soft, hard), hard))


def _memory_in_use() -> int:
    """Return the address space of the process before it reads a model; a high guess if unknown."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (OSError, ValueError):
        return 4 << 30
    return pages * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    requests = sys.stdin.buffer
    # onnx sometimes prints to standard output; answers use another descriptor.
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
