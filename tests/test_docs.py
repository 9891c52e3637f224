"""The tables in the pages are those of the code."""

import ast
import functools
import re
import sys
import tomllib
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"
sys.path.insert(0, str(DOCS))

from tables import MARKED, refreshed  # noqa: E402

from broken_models import DAMAGES  # noqa: E402

PAGES = [page for page in sorted(DOCS.rglob("*.md")) if MARKED.search(page.read_text())]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_up_to_date(page):
    assert refreshed(page.read_text()) == page.read_text(), "run `python docs/tables.py`"


def test_there_are_tables():
    names = {"checkpoints.md", "checks.md", "conformance.md", "data.md", "gradients.md", "grid.md", "recipes.md"} | {
        "specification.md"
    }
    assert {page.name for page in PAGES} == names


# ---- the specification, clause by clause -----------------------------------------------------------------------------

SPECIFICATION = tomllib.loads((DOCS / "clauses.toml").read_text())
NAMED = sorted({test for part in SPECIFICATION["part"] for clause in part["clause"] for test in clause["tests"]})


@functools.cache
def _parsed(file):
    return ast.parse((Path(__file__).parent / file).read_text())


def _functions(file):
    return {node.name for node in ast.walk(_parsed(file)) if isinstance(node, ast.FunctionDef)}


def _texts(file):
    return {node.value for node in ast.walk(_parsed(file)) if isinstance(node, ast.Constant)}


@pytest.mark.parametrize("test", NAMED)
def test_a_clause_names_a_test_that_there_is(test):
    file, name, case = re.fullmatch(r"(test_\w+\.py)::(test_\w+)(?:\[(.+)\])?", test).groups()
    assert name in _functions(file)
    if name == "test_a_damage_is_found":
        assert case in {f"{damage.code}-{damage.name}" for damage in DAMAGES}
    elif case:
        assert case in _texts(file)


def test_every_clause_and_question_says_something():
    clauses = [clause for part in SPECIFICATION["part"] for clause in part["clause"]]
    assert len(clauses) >= 60
    for clause in clauses:
        assert clause.keys() == {"where", "force", "says", "does", "tests"} and all(clause.values())
        assert clause["force"] in ("must", "should", "may", "is")
    for question in SPECIFICATION["question"]:
        assert question.keys() == {"title", "text", "readings", "ours"} and all(question.values())
