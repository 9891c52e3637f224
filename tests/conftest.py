"""What all tests share: skipping where a framework is missing, and the node tests that come with `onnx`."""

from __future__ import annotations

import functools
import gc
import importlib.util
import json
import os
import random
import signal
import sys
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
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
# Most of what JAX does in tests is to compile what runs once: a fourth of it.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false")

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


# ---- shards and seconds ----------------------------------------------------------------------------------------------

SECONDS = Path(__file__).with_name("seconds.json")
"""Seconds of test functions that take more than a few, all cases together, by `file::function`."""
BUDGET = 3.0
"""Seconds that a quick test may take."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", metavar="I/N", help="run the I-th of N shards, each of which takes about as long")
    parser.addoption("--measure", action="store_true", help="write the seconds of what was run to seconds.json")


def _function(nodeid: str) -> str:
    return nodeid.partition("[")[0].removeprefix("tests/")


def _shard(items: list[pytest.Item], shard: str) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return the items of a shard and the others. Cases of one function stay together, which share what they make."""
    index, count = (int(number) for number in shard.split("/"))
    if not 1 <= index <= count:
        raise pytest.UsageError(f"--shard {shard}: the first number counts from 1 to the second")
    measured = json.loads(SECONDS.read_text())
    cases = Counter(_function(item.nodeid) for item in items)
    weights = {name: measured.get(name, 0.05 * number) for name, number in cases.items()}
    loads = [0.0] * count
    home = {}
    for name in sorted(weights, key=lambda name: (-weights[name], name)):
        home[name] = loads.index(min(loads))
        loads[home[name]] += weights[name]
    chosen = [item for item in items if home[_function(item.nodeid)] == index - 1]
    return chosen, [item for item in items if home[_function(item.nodeid)] != index - 1]


_spent: Counter[str] = Counter()
_over_budget: list[tuple[float, str]] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _spent[_function(report.nodeid)] += report.duration
    if report.when == "call" and report.duration > BUDGET and "slow" not in report.keywords:
        _over_budget.append((report.duration, report.nodeid))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if _over_budget:
        terminalreporter.section(f"quick tests over {BUDGET:g} s")
        for seconds, name in sorted(_over_budget, reverse=True)[:20]:
            terminalreporter.line(f"{seconds:6.1f} s  {name}")
    if config.getoption("measure"):
        long = {name: round(seconds, 1) for name, seconds in _spent.items() if seconds > BUDGET}
        kept = {name: seconds for name, seconds in json.loads(SECONDS.read_text()).items() if name not in _spent}
        SECONDS.write_text(json.dumps({**kept, **long}, indent=0, sort_keys=True) + "\n")


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if shard := config.getoption("shard"):
        items[:], others = _shard(items, shard)
        config.hook.pytest_deselected(items=others)
    for item in items:
        for mark in [mark for mark in item.own_markers if mark.name == "slow" and mark.args]:
            if item.callspec.id not in mark.args:
                item.own_markers.remove(mark)
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
    monkeypatch.setattr("onward.frameworks.program.trial.sys", types.SimpleNamespace(executable=""))


@pytest.fixture(scope="module")
def one_torch_thread() -> Iterator[None]:
    """More have nothing to do in models of the size that tests have, and wait for one another."""
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
