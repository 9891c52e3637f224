"""ONNX's own tests on each engine, run by its own runner, and the scoreboard that comes of them.

python tests/support/conformity.py torch jax   # runs all, and says what the lists in conformance/ lack or have in vain
"""

from __future__ import annotations

import fnmatch
import functools
import os
import sys
import unittest
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from node_tests import NodeTest, cache_folder, onnx_node_tests
from onnx.backend.test import BackendTest
from onnx.backend.test.case.test_case import TestCase
from onnx.backend.test.loader import load_model_tests
from paths import TESTS

from onward.backend import for_engine
from onward.engines import ENGINES, is_installed
from onward.model import load
from onward.standard import operator_name

os.environ.setdefault("ONNX_HOME", str(cache_folder()))  # where the runner puts inputs of the large models

RANDOM = ("test_bernoulli*", "test_training_dropout*")
"""Cases whose result is a matter of chance: shapes and types are compared."""
KINDS = {
    "node": "operators",
    "simple": "small models",
    "pytorch-operator": "PyTorch operators",
    "pytorch-converted": "PyTorch layers",
    "real": "networks",
}
"""What the runner has, and what we call it."""


class Outcome(NamedTuple):
    passed: bool
    reason: str = ""


class Runner(BackendTest):
    """The runner of `onnx`, but that integers are equal, not close."""

    @classmethod
    def assert_similar_outputs(
        cls, ref_outputs: Sequence[Any], outputs: Sequence[Any], *tolerances: Any, **more: Any
    ) -> None:
        super().assert_similar_outputs(ref_outputs, outputs, *tolerances, **more)
        for expected, result in zip(ref_outputs, outputs, strict=True):
            if getattr(expected, "dtype", np.dtype(float)).kind in "iu":
                np.testing.assert_array_equal(result, expected)


def cases_of(kind: str) -> list[TestCase]:
    """The tests of a kind. Those of operators `onnx` computes on each start, which takes long; we have kept them."""
    return _node_cases() if kind == "node" else load_model_tests(kind=kind)


@functools.cache
def _node_cases() -> list[TestCase]:
    return [
        TestCase(case.name, case.name, None, None, case.proto(), case.data, "node", case.rtol, case.atol)
        for case in onnx_node_tests().values()
    ]


@functools.cache
def kinds() -> dict[str, str]:
    """Case -> kind."""
    return {case.name: kind for kind in KINDS for case in cases_of(kind)}


@functools.cache
def suite(engine: str) -> dict[str, Callable[..., None]]:
    """The tests that the runner makes for an engine."""
    with mock.patch("onnx.backend.test.runner.load_model_tests", cases_of):
        classes = Runner(for_engine(engine), __name__).test_cases.values()
    return {name.removesuffix("_cpu"): test for each in classes for name, test in vars(each).items() if "_cpu" in name}


def outcome(case: str, engine: str) -> Outcome:
    """Whether an engine computes what a case says, and else why not. The runner takes what is skipped as passed."""
    by_chance = any(fnmatch.fnmatch(case, pattern) for pattern in RANDOM)
    try:
        suite(engine)[case].__wrapped__(None, "CPU", **({"atol": np.inf} if by_chance else {}))
    except (unittest.SkipTest, Exception) as error:
        return Outcome(False, f"{type(error).__name__}: {error}")
    return Outcome(True)


DEPENDS = "depends on"
"""How reasons begin for which a case may pass elsewhere."""


def listed(case: str, engine: str) -> str | None:
    """Why an engine does not pass a case, if we know."""
    return next((why for pattern, why in exceptions(engine).items() if fnmatch.fnmatch(case, pattern)), None)


@functools.cache
def exceptions(engine: str) -> dict[str, str]:
    """The cases (patterns) that an engine does not pass, and why: lines of a file, and of one for all engines."""
    folder = TESTS / "conformance"
    lines = [line for name in ("runner", engine) for line in (folder / f"{name}.txt").read_text().splitlines()]
    return dict(line.split(maxsplit=1) for line in lines if line and not line.startswith("#"))


def operator_of(case: NodeTest) -> str:
    """The operator that a case is about. Expanded cases are about that whose body they are."""
    name = case.name.removesuffix("_expanded")
    original = onnx_node_tests().get(name, case) if "_expanded" in case.name else case
    graph = load(original.proto()).graph
    return operator_name(graph[-1]) if len(graph) else ""


def surprises(engine: str) -> Iterator[str]:
    """Lines for the list of an engine that are missing, and cases that it has and that pass."""
    for case in kinds():
        passed, reason = outcome(case, engine)
        known = listed(case, engine)
        if not passed and known is None:
            yield f"{case} {' '.join(reason.split())[:300]}"
        elif passed and known is not None and not known.startswith(DEPENDS):
            yield f"# {case} passes, and is listed: {known}"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    for engine in sys.argv[1:] or filter(is_installed, ENGINES):
        print(f"# {engine}", *surprises(engine), sep="\n", flush=True)
