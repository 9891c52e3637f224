"""Each engine on ONNX's own node tests: a case passes, or is listed with the reason why it does not."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from conformity import listed, outcome
from conftest import onnx_node_tests
from onward.run import framework
from onward.run.catalogue import UNWRITTEN, lacking
from onward.run.interpreted import framework_class
from operator_families import FAMILIES
from representatives import by_mode, first_of_each

FRAMEWORKS = [
    pytest.param("numpy"),
    pytest.param("torch", marks=pytest.mark.needs("torch")),
    pytest.param("jax", marks=pytest.mark.needs("jax")),
    pytest.param("tensorflow", marks=pytest.mark.needs("tensorflow")),
]


NODE_TESTS = {name: (case.proto(), dict(enumerate(case.data[0][0]))) for name, case in onnx_node_tests().items()}
KINDS = first_of_each(NODE_TESTS, by_mode)


def quick(name: str, engine: str) -> bool:
    """JAX compiles whatever it sees for the first time. Bodies of functions are of operators that others test."""
    return engine == "numpy" or ("_expanded" not in name and (engine != "jax" or name in KINDS))


def cases() -> Iterator[Any]:
    for name, parameter in itertools.product(NODE_TESTS, FRAMEWORKS):
        (engine,) = parameter.values
        slow = () if quick(name, engine) else (pytest.mark.slow,)
        yield pytest.param(name, engine, marks=(*parameter.marks, *slow))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "engine"), cases())
def test_a_case_passes_or_is_listed(name: str, engine: str) -> None:
    passed, reason = outcome(onnx_node_tests()[name], engine)
    known = listed(name, engine)
    assert passed == (known is None), reason or f"it passes, and is listed: {known}"


def test_families_are_those_of_the_tables() -> None:
    assert tuple(FAMILIES) == framework.FAMILIES


@pytest.mark.parametrize("engine", FRAMEWORKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_tables_have_the_same_rows_in_the_same_order(engine: str, family: str) -> None:
    try:
        module = importlib.import_module(f"onward.run.{engine}.{family}")
    except ModuleNotFoundError:
        return  # all of it is shared, or expressed by other operators: the cases above tell
    assert list(module.operators) == [name for name in FAMILIES[family] if name in module.operators]


@pytest.mark.parametrize("engine", FRAMEWORKS)
def test_what_an_engine_lacks_has_a_reason(engine: str) -> None:
    missing = lacking(framework_class(engine))
    assert not [name for name, reason in missing.items() if reason == UNWRITTEN]
