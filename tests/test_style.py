"""Hold what can be counted of docs/style.md: words, names, spelling and the width of prose."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

import pytest
from paths import ROOT

SOURCE = ROOT / "src" / "onward"
TREES = {path.relative_to(SOURCE): ast.parse(path.read_text(encoding="utf-8")) for path in SOURCE.rglob("*.py")}
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(page for page in (ROOT / "docs").rglob("*.md") if page.name != "style.md"),  # which quotes what to avoid
]

QUESTION = re.compile(r"\W*(What|Whether|Which|How|Where|Those|Who|Whose)\b")
VAGUE = {
    *("found", "made", "given", "known", "kept", "wanted", "held", "told", "said"),
    *("each", "one", "place", "way", "part", "kind"),
}
BANNED = re.compile(
    r"unless given|\bso it is\b|\bwhoever\b|\bsomebody\b|\bof (one's|their) own\b|\bgoes on\b"
    r"|(?<!here )\bis no (?!longer)|\bthat is there\b|\bas they are\b",
    re.IGNORECASE,
)
BRITISH = re.compile(
    r"\b\w*(?:behaviour|colour|favour|honour|neighbour|catalogue|artefact|licence|centre[sd]?\b|modell(?:ed|ing)|labell(?:ed|ing)"
    r"|travell|(?:normal|optim|quant|real|initial|serial|general|parallel|token|regular|vector|organ|recogn"
    r"|orthogonal|minim|maxim|custom|summar|synchron|random|standard|categor|discret|symmetr|stabil)is(?:e|ed|es|ing|ation)\b"
    r"|analys(?:e|ed|ing)\b|\bgrey\b)",
    re.IGNORECASE,
)


def docstrings() -> Iterator[tuple[str, str]]:
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                yield f"{path}:{getattr(node, 'lineno', 1)}", text


def texts() -> Iterator[tuple[str, str]]:
    """Yield each string of the source, docstrings among them, and each line of the pages, with its place."""
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield f"{path}:{node.lineno}", node.value
    for page in PAGES:
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            yield f"{page.relative_to(ROOT)}:{number}", line


def stored_names() -> Iterator[tuple[str, str]]:
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield f"{path}:{node.lineno}", node.id


def test_docstrings_begin_with_verbs_and_nouns() -> None:
    lines = list(docstrings())
    questions = [place for place, text in lines if QUESTION.match(text)]
    assert len(questions) <= 0.01 * len(lines), questions


def test_names_say_what_they_hold() -> None:
    names = list(stored_names())
    vague = [f"{place} {name}" for place, name in names if name in VAGUE]
    assert len(vague) <= 0.005 * len(names), vague


@pytest.mark.parametrize("pattern", [BANNED, BRITISH], ids=["banned phrases", "British spelling"])
def test_texts_have_no(pattern: re.Pattern[str]) -> None:
    matches = [f"{place}: {match[0]}" for place, text in texts() for match in [pattern.search(text)] if match]
    assert not matches, "\n".join(matches)


# ---- one name, one thing ---------------------------------------------------------------------------------------------

SYMMETRIC = re.compile(r"(engines|frameworks)/(\w+)(?=/)|rules|vocabulary|frameworks/formulas")
"""Folders whose files have the same names on purpose: engines, frameworks and tables of operators."""


def test_a_class_name_means_one_thing() -> None:
    rooms = defaultdict(set)
    for path, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                rooms[node.name].add(path.parts[0])
    repeated = {name: sorted(places) for name, places in rooms.items() if len(places) > 1}
    assert not repeated, repeated


def test_a_file_name_is_rare() -> None:
    folders = defaultdict(list)
    for path in TREES:
        if not SYMMETRIC.match(path.as_posix()):
            folders[path.stem].append(path.as_posix())
    common = {name: paths for name, paths in folders.items() if name != "__init__" and len(paths) > 4}
    assert not common, common
