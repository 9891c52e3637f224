"""ONNX's own node tests on the engines that execute operators one by one, and the scoreboard that comes of them."""

from __future__ import annotations

import fnmatch
import functools
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from conftest import NodeTest, onnx_node_tests
from onward.errors import UnsupportedError
from onward.model import read
from onward.run import function
from onward.run.calls import qualified

RANDOM = ["test_bernoulli*", "test_training_dropout*"]
"""Cases whose result is a matter of chance: shapes and types are compared."""


ENGINES = ("numpy", "torch", "jax", "tensorflow")


class Outcome(NamedTuple):
    passed: bool
    reason: str = ""


def operator_of(case: NodeTest) -> str:
    """The operator that a case is about. Expanded cases are about that whose body they are."""
    name = case.name.removesuffix("_expanded")
    original = onnx_node_tests().get(name, case) if "_expanded" in case.name else case
    graph = read(original.proto()).graph
    return qualified(graph[-1]) if len(graph) else ""


def outcome(case: NodeTest, engine: str) -> Outcome:
    """Whether an engine computes what a case says, and else why not."""
    proto = case.proto()
    try:
        run = function(read(proto), engine=engine)
        for inputs, expected in case.data:
            results = run(dict(zip((value.name for value in proto.graph.input), inputs, strict=False)))
            wanted = zip((value.name for value in proto.graph.output), expected, strict=True)
            for name, value in wanted:
                if difference := _difference(results[name], value, case):
                    return Outcome(False, f"`{name}`: {difference}")
    except UnsupportedError as error:
        return Outcome(False, str(error))
    except Exception as error:
        return Outcome(False, f"{type(error).__name__}: {error}")
    return Outcome(True)


def listed(case: str, engine: str) -> str | None:
    """Why an engine does not pass a case, if we know."""
    return next((why for pattern, why in exceptions(engine).items() if fnmatch.fnmatch(case, pattern)), None)


@functools.cache
def exceptions(engine: str) -> dict[str, str]:
    """The cases (patterns) that an engine does not pass, and why: lines of a file."""
    lines = (Path(__file__).parent / "conformance" / f"{engine}.txt").read_text().splitlines()
    return dict(line.split(maxsplit=1) for line in lines if line and not line.startswith("#"))


def _difference(result: Any, expected: Any, case: NodeTest) -> str | None:
    if isinstance(expected, list):
        if not isinstance(result, list) or len(result) != len(expected):
            return "is not a sequence of that length"
        return next((text for r, e in zip(result, expected, strict=True) if (text := _difference(r, e, case))), None)
    if expected is None or result is None:
        return None if expected is result else "is there, or is not there"
    if result.shape != expected.shape:
        return f"has the shape {list(result.shape)}, not {list(expected.shape)}"
    text = expected.dtype.kind in "OUS"
    if not text and result.dtype != expected.dtype:
        return f"is {result.dtype}, not {expected.dtype}"
    if any(fnmatch.fnmatch(case.name, pattern) for pattern in RANDOM):
        return None
    if text:
        return None if result.astype(str).tolist() == expected.astype(str).tolist() else "other text"
    if expected.dtype.kind in "biu" or expected.dtype in (ml_dtypes.int4, ml_dtypes.uint4):
        unequal = result != expected
        return f"{unequal.sum()} of {expected.size} differ" if unequal.any() else None
    exact = np.complex128 if expected.dtype.kind == "c" else np.float64
    with np.errstate(all="ignore"):
        close = np.isclose(result.astype(exact), expected.astype(exact), case.rtol, case.atol, equal_nan=True)
    return None if close.all() else f"{(~close).sum()} of {expected.size} differ"
