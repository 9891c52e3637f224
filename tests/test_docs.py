"""The tables in the pages are those of the code."""

import ast
import functools
import inspect
import re
import sys
import tomllib

import pytest
from paths import ROOT, TESTS

DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))

from broken_models import DAMAGES  # noqa: E402
from tables import MARKED, refreshed  # noqa: E402

import onward  # noqa: E402

PAGES = [page for page in sorted(DOCS.rglob("*.md")) if MARKED.search(page.read_text())]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_up_to_date(page):
    assert refreshed(page.read_text()) == page.read_text(), "run `python docs/tables.py`"


def test_there_are_tables():
    names = {"checkpoints.md", "checks.md", "conformance.md", "data.md", "gradients.md", "grid.md", "jax.md"} | {
        "models.md", "wild.md",
        "command-line.md", "recipes.md", "specification.md", "torch.md", "training.md",
    }  # fmt: skip
    assert {page.name for page in PAGES} == names


# ---- what is where ---------------------------------------------------------------------------------------------------


def _links(page):
    targets = re.findall(r"\]\(([^)#\s]+\.md)(?:#[^)]*)?\)", page.read_text())
    return {(page.parent / target).resolve() for target in targets if "://" not in target}


def test_the_index_leads_to_every_page():
    reached, todo = set(), [DOCS / "index.md"]
    while todo:
        page = todo.pop()
        if page not in reached:
            reached.add(page)
            todo.extend(_links(page))
    assert reached >= set(DOCS.rglob("*.md"))


def test_contributors_are_sent_to_files_that_there_are():
    root = DOCS.parent
    named = re.findall(r"`([\w./*-]+(?:/|\.(?:py|md|txt|toml)))`", (root / "CONTRIBUTING.md").read_text())
    assert len(named) > 10
    assert [
        name for name in named if not any(any(root.glob(place + name)) for place in ("", "tests/**/", "src/onward/"))
    ] == []


def test_the_way_of_data_is_where_it_is_said_to_be():
    text = (DOCS / "architecture.md").read_text()
    steps = re.findall(r"`(\w+)` \(`([\w/.]+\.py)`\)", text)
    assert len(steps) > 20
    for name, file in steps:
        tree = _parsed(DOCS.parent / "src/onward" / file)
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}, file


def test_the_layout_is_that_of_the_files():
    text = (DOCS / "architecture.md").read_text()
    there = {path.name for folder in ("src", "tests", "docs") for path in (DOCS.parent / folder).rglob("*.py")}
    assert set(re.findall(r"\w+\.py\b", text)) - there == set()
    rooms = {path.name + ("/" if path.is_dir() else "") for path in (DOCS.parent / "src/onward").glob("[a-z]*")}
    table = "".join(re.findall(r"^(\| `.*?) \|", text, re.MULTILINE))
    assert rooms - {"py.typed"} == {
        f"{room}.py" if room[-1] != "/" else room for room in re.findall(r"`(\w+/?)`", table)
    }


# ---- the reference of the Python interface ---------------------------------------------------------------------------

ROOMS = ("backend", "engines", "lora", "pipelines", "rules", "transform")
CONSTANTS = {
    *("engines.ENGINES", "engines.FRAMEWORKS", "rules.FAMILIES", "rules.RULES"),
    *("rules.NoGradient", "rules.Rewrite", "rules.Rule"),  # rows of that table
}


def _public_names():
    nested = {f"{room}.{name}" for room in ROOMS for name in getattr(onward, room).__all__}
    return ({*onward.__all__} - {*ROOMS} | nested) - CONSTANTS


def test_the_reference_has_every_public_name():
    pages = [page.read_text() for page in (DOCS / "api").glob("*.md") if page.name != "index.md"]
    listed = [name for page in pages for name in re.findall(r"^::: onward\.(\S+)$", page, re.MULTILINE)]
    assert sorted(listed) == sorted(_public_names() - {"Error"})  # which is among those of `onward.errors`
    index = (DOCS / "api/index.md").read_text()
    assert [name for name in listed if f"`{name}`" not in index] == []


FRAMEWORKS = re.compile("(from|to)_(torch|keras|jax|tensorflow)|.*Callback")  # which are slow to import


@pytest.mark.parametrize("name", sorted(name for name in _public_names() if not FRAMEWORKS.fullmatch(name)))
def test_docstrings_say_what_arguments_are(name):
    public = functools.reduce(getattr, name.split("."), onward)
    text = inspect.getdoc(public) or ""
    assert text and not text.startswith(f"{name}(")
    if inspect.isfunction(public):
        assert [each for each in inspect.signature(public).parameters if f"`{each}`" not in text] == []


# ---- the specification, clause by clause -----------------------------------------------------------------------------

SPECIFICATION = tomllib.loads((DOCS / "clauses.toml").read_text())
NAMED = sorted({test for part in SPECIFICATION["part"] for clause in part["clause"] for test in clause["tests"]})


@functools.cache
def _parsed(file):
    return ast.parse((TESTS / file).read_text())


def _functions(file):
    return {node.name for node in ast.walk(_parsed(file)) if isinstance(node, ast.FunctionDef)}


def _texts(file):
    return {node.value for node in ast.walk(_parsed(file)) if isinstance(node, ast.Constant)}


@pytest.mark.parametrize("test", NAMED)
def test_a_clause_names_a_test_that_there_is(test):
    file, name, case = re.fullmatch(r"([\w/]*test_\w+\.py)::(test_\w+)(?:\[(.+)\])?", test).groups()
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


def test_the_page_of_errors_quotes_messages_of_the_source():
    constants = [
        node.value
        for path in (ROOT / "src").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    source = "\0".join(constants)
    page = (ROOT / "docs" / "how-to" / "errors.md").read_text(encoding="utf-8")
    messages = re.findall(r"^\| (`+) ?(.+?) ?\1", page, re.MULTILINE)
    pieces = [piece.strip(" `") for _, message in messages for piece in message.split("...")]
    assert len(messages) > 10
    assert not [piece for piece in pieces if piece not in source]
