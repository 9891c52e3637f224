"""The tables in the pages are those of the code."""

import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"
sys.path.insert(0, str(DOCS))

from tables import MARKED, refreshed  # noqa: E402

PAGES = [page for page in sorted(DOCS.rglob("*.md")) if MARKED.search(page.read_text())]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_up_to_date(page):
    assert refreshed(page.read_text()) == page.read_text(), "run `python docs/tables.py`"


def test_there_are_tables():
    names = {"checkpoints.md", "checks.md", "conformance.md", "data.md", "gradients.md", "grid.md", "recipes.md"}
    assert {page.name for page in PAGES} == names
