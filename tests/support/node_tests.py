"""The node tests that come with `onnx`."""

from __future__ import annotations

import functools
import os
import pickle
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx


class NodeTest(NamedTuple):
    """One of the standard's own tests. A value is an array, a list of arrays (a sequence), or None (an optional)."""

    name: str
    model: bytes
    data: list[tuple[list[Any], list[Any]]]
    rtol: float
    atol: float

    def proto(self) -> onnx.ModelProto:
        return onnx.ModelProto.FromString(self.model)


@functools.cache
def onnx_node_tests() -> dict[str, NodeTest]:
    """All node tests by name. `onnx` computes them anew on each start, which takes long, so they are kept on disk."""
    path = cache_folder() / f"node-tests-1-onnx-{onnx.__version__}-numpy-{np.__version__}.pickle"
    with locked(path.with_suffix(".lock")):  # the first worker builds, the others wait
        try:
            rows = pickle.loads(path.read_bytes())
        except Exception:  # not there, or unreadable for whatever reason: build it
            rows = _build_node_tests()
            _write_atomically(path, pickle.dumps(rows, protocol=pickle.HIGHEST_PROTOCOL))
    return {row[0]: NodeTest(*row) for row in rows}


def _build_node_tests() -> list[tuple]:
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        cases = load_model_tests(kind="node")
    return [
        (
            case.name,
            case.model.SerializeToString(),
            [([_plain(v) for v in inputs], [_plain(v) for v in outputs]) for inputs, outputs in case.data_sets],
            case.rtol,
            case.atol,
        )
        for case in cases
    ]


def _plain(value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if isinstance(value, onnx.TensorProto):  # how `onnx` writes what numpy alone has no dtype for
        return onnx.numpy_helper.to_array(value)
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)
    raise TypeError(f"a node test holds a {type(value)}: say here how to keep it")


def cache_folder() -> Path:
    """A folder of this user's alone, since what is read from it is unpickled."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "onward-tests"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="onward-tests-"))


@contextmanager
def locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        if sys.platform != "win32":  # there, workers may do the work twice; the write is atomic either way
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write_atomically(path: Path, data: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
