"""What all tests share: skipping where a framework is missing, and the node tests that come with `onnx`."""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import pickle
import random
import signal
import sys
import tempfile
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import settings

gc.disable()  # until all is collected: most of what is imported stays

# Before any framework is imported: be quiet, stay on the CPU, compute as written.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# One thread: more would wait for one another in models of this size, and sums would depend on the number of cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
# Most of what JAX does in tests is to compile what runs once: a third less of it.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

# ONNX Runtime asks no variable: where a session is not told how many threads, one.
_start_session = onnxruntime.InferenceSession.__init__


@functools.wraps(_start_session)
def _start_session_with_one_thread(
    self: onnxruntime.InferenceSession, model: Any, sess_options: Any = None, *rest: Any, **more: Any
) -> None:
    options = sess_options or onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.intra_op_num_threads or 1
    _start_session(self, model, options, *rest, **more)


onnxruntime.InferenceSession.__init__ = _start_session_with_one_thread

# Tests send SIGINT to what they start, which would ignore it where they themselves do: in the background of a shell.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A first call that imports or compiles is slow, and no failure. `make test` says the same of the same source each time;
# `make test-all` searches anew, and more.
settings.register_profile("quick", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None, max_examples=300, print_blob=True)
settings.load_profile("quick")


# ---- frameworks ------------------------------------------------------------------------------------------------------

# The extra of `onward` that installs a module. Each framework's extra is also the marker that selects its tests.
EXTRAS = {"torch": "torch", "jax": "jax", "optax": "jax", "tensorflow": "tensorflow", "keras": "tensorflow"}


SLOW = Path(__file__).with_name("slow_cases.txt")


def needs(*modules: str) -> pytest.MarkDecorator:
    """Mark a test, a module (`pytestmark = needs("torch")`) or a parameter that cannot run without these modules."""
    return pytest.mark.needs(*modules)


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow = tuple(f"tests/{line}" for line in SLOW.read_text().splitlines() if not line.startswith("#"))
    for item in items:
        if item.nodeid.startswith(slow):
            item.add_marker("slow")
        for module in dict.fromkeys(name for mark in item.iter_markers("needs") for name in mark.args):
            extra = EXTRAS.get(module)
            if extra:
                item.add_marker(extra)
            if importlib.util.find_spec(module) is None:
                how = f"pip install 'onward[{extra}]'" if extra else f"pip install {module}"
                item.add_marker(pytest.mark.skip(reason=f"needs {module}, which is not installed: {how}"))


def pytest_collection_finish() -> None:
    """Tests collect garbage, if more rarely than Python does by itself."""
    gc.set_threshold(50_000, 5, 5)
    gc.enable()


@pytest.fixture(autouse=True)
def what_stays(request: pytest.FixtureRequest, looked_at: set[Any] = set()) -> None:  # noqa: B006
    """What frameworks import and earlier files keep is not looked through at each collection: that takes a second."""
    if not {request.path, state := len(sys.modules) // 100} <= looked_at:
        looked_at |= {request.path, state}
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """What a test draws without a seed does not depend on the tests before it."""
    random.seed(0)
    np.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
    if tensorflow := sys.modules.get("tensorflow"):
        tensorflow.random.set_seed(0)


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that are written are not tried, as where there is no interpreter to do it: that takes seconds each."""
    monkeypatch.setattr("onward.frameworks.program.child.sys", types.SimpleNamespace(executable=""))


@pytest.fixture(scope="module")
def one_torch_thread() -> Iterator[None]:
    """More have nothing to do in models of the size that tests have, and wait for one another."""
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# ---- the node tests of `onnx` ----------------------------------------------------------------------------------------


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
    raise TypeError(f"a node test holds a {type(value)}: say in conftest.py how to keep it")


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
