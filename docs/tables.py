"""Writes the tables in these pages from those in the code: `python docs/tables.py`. A test checks that they agree."""

from __future__ import annotations

import importlib
import itertools
import re
import sys
import tempfile
import textwrap
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from onnx import defs

from onward.checker import CODES, FAMILIES
from onward.checkpoint import Checkpoint, open_checkpoint, to_checkpoint
from onward.checkpoint.formats import FORMATS
from onward.cli.commands import build
from onward.options import ModelAndData, StepOptions, TrainConfig, options_of
from onward.rules import RULES, NoGradient, Rewrite, Rule
from onward.vocabulary.optimizers import OPTAX_ROWS, TORCH_ROWS
from onward.vocabulary.rows import OptimizerRow

HERE = Path(__file__).parent
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def rows(header: str, lines: Iterable[tuple[str, ...]]) -> str:
    columns = header.split("|")
    head = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join([*head, *("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)])


def options(given: Mapping[str, Any]) -> str:
    return ", ".join(f"`{name}`" if value is None else f"`{name}={_word(value)}`" for name, value in given.items())


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def losses() -> str:
    return _catalog("losses", "loss|what it is|options")


def optimizers() -> str:
    found = build.entries("optimizers")
    lines = []
    for name, entry in found.items():
        numbers = {k: v for k, v in entry.options.items() if k not in entry.choices}
        choices = {k: v for k, v in entry.choices.items() if k not in _COMMON}
        words = "; ".join(f"`{k}`: {', '.join(map(_word, v))}" for k, v in choices.items())
        lines.append((f"`{name}`", entry.summary, options(numbers), words))
    return rows("optimizer|what it is|numbers|choices", lines)


def schedules() -> str:
    return _catalog("schedules", "schedule|the learning rate|options")


def initializers() -> str:
    return _catalog("initializers", "initializer|values|options")


def preprocessing() -> str:
    return _catalog("preprocessing", "operation|what it does|options")


def augmentations() -> str:
    return _catalog("augmentations", "augmentation|what it does|options")


_COMMON = ("warmup", "warmup_start", "every", "scale", "maximize", "standard")
"""Options that all entries of a catalog have, and texts beside the tables explain."""


def _catalog(kind: build.Catalog, header: str) -> str:
    """What a recipe can name, as `onward prepare --list` shows it."""
    return rows(
        header,
        (
            (
                ", ".join(f"`{each}`" for each in (name, *entry.short_names)),
                entry.summary,
                options({k: v for k, v in entry.options.items() if k not in _COMMON}),
            )
            for name, entry in build.entries(kind).items()
        ),
    )


def recipe_options() -> str:
    return _declared(StepOptions)


def run_options() -> str:
    return _declared(ModelAndData, TrainConfig)


def _declared(*kinds: type) -> str:
    """Options as they are typed, as arguments and keys of files are called, and what they say."""
    lines = []
    for one in itertools.chain.from_iterable(map(options_of, kinds)):
        flags = ", ".join(sorted(one.flags, key=len))
        lines.append((f"`{' '.join(filter(None, (flags, one.metavar)))}`", f"`{one.name}`", one.help))
    return rows("option|argument, key|what it says", lines)


def codes() -> str:
    parts = []
    for prefix, title in FAMILIES.items():
        of_family = [(code, entry) for code, entry in CODES.items() if code.startswith(prefix)]
        lines = ((f"`{code}`", str(entry.severity), entry.meaning, entry.rule) for code, entry in of_family)
        parts.append(f"### {title[:1].upper()}{title[1:]}\n\n" + rows("code|severity|what it means|rule", lines))
    return "\n\n".join(parts)


def gradients() -> str:
    """Every operator of the standard, from the table of rules itself."""
    newest: dict[str, Any] = {}
    for schema in defs.get_all_schemas():
        if schema.domain == "" and not schema.deprecated:
            newest[schema.name] = schema
    return rows("operator|gradient", ((f"`{name}`", _how(newest[name])) for name in sorted(newest)))


def classical() -> str:
    """Every operator of `ai.onnx.ml`."""
    return _of_domain("ai.onnx.ml")


def microsoft() -> str:
    """The operators of ONNX Runtime that are known."""
    return _of_domain("com.microsoft")


def _of_domain(domain: str) -> str:
    known = sorted(name for of, name in RULES if of == domain)
    return rows("operator|gradient", ((f"`{name}`", _kind(RULES[domain, name])) for name in known))


def _how(schema: Any) -> str:
    rule = RULES.get(("", schema.name))
    if rule is not None:
        return _kind(rule)
    return "through its body" if schema.has_function or schema.has_context_dependent_function else "not yet"


def _kind(rule: Rule | Rewrite | NoGradient) -> str:
    if isinstance(rule, NoGradient):
        return f"none: {rule.reason}"
    return "rewritten" if isinstance(rule, Rewrite) else "rule"


# ---- engines on the standard's own tests -----------------------------------------------------------------------------


def _conformity() -> Any:
    """The tests know which cases there are, and which an engine does not pass."""
    return _from_tests("conformity")


def _from_tests(name: str) -> Any:
    sys.path.insert(0, str(HERE.parent / "tests" / "support"))
    return importlib.import_module(name)


def conformance() -> str:
    tests = _conformity()
    of_kind: dict[str, list[str]] = {}
    for case, kind in tests.kinds().items():
        of_kind.setdefault(kind, []).append(case)
    lines = []
    for engine in tests.ENGINES:
        passed = {kind: sum(tests.listed(case, engine) is None for case in cases) for kind, cases in of_kind.items()}
        counts = [f"{passed[kind]:,} of {len(of_kind[kind]):,}" for kind in tests.KINDS]
        lines.append((f"`{engine}`", *counts, f"{sum(passed.values()) / len(tests.kinds()):.2%}"))
    return rows("|".join(["engine", *tests.KINDS.values(), "share"]), lines)


def exceptions() -> str:
    tests = _conformity()
    engines: dict[tuple[str, str], list[str]] = {}
    for engine in tests.ENGINES:
        for entry in tests.exceptions(engine).items():
            engines.setdefault(entry, []).append(f"`{engine}`")
    words = {entry: "all" if len(of) == len(tests.ENGINES) else ", ".join(of) for entry, of in engines.items()}
    return rows("cases|engines|why", ((f"`{case}`", words[case, why], why) for case, why in words))


def scoreboard() -> str:
    tests = _conformity()
    operators: dict[str, list[str]] = {}
    for case in tests.onnx_node_tests().values():
        operators.setdefault(tests.operator_of(case), []).append(case.name)
    lines = []
    for operator, cases in sorted(operators.items()):
        passed = [sum(tests.listed(case, engine) is None for case in cases) for engine in tests.ENGINES]
        counts = (f"{count} of {len(cases)}" if count < len(cases) else f"{count}" for count in passed)
        lines.append((f"`{operator}`", *counts))
    return rows("operator|" + "|".join(tests.ENGINES), lines)


def training_models() -> str:
    """Training models of the standard's operators: tests hold every engine to each."""
    cases, engines = _from_tests("standard_training").CASES, _conformity().ENGINES
    lines = ((name, case.summary, *("yes" for _ in engines)) for name, case in cases.items())
    return rows("training with|what is special|" + "|".join(engines), lines)


# ---- what frameworks make of optimizers, losses and schedules --------------------------------------------------------


def _read(kind: str) -> str:
    """What users of a framework write, and what a training model has for it."""
    grid = _from_tests("grid.record")
    found = {title: list(grid.read(kind, framework)) for framework, title in grid.FRAMEWORKS.items()}
    return "\n\n".join(f"**{title}**\n\n" + rows(f"{kind}|", lines) for title, lines in found.items() if lines)


def _made(kind: str) -> str:
    """What a recipe says, and what frameworks have for it."""
    grid = _from_tests("grid.record")
    lines, reasons = grid.made(kind)
    first = f"{kind}|as in" if kind == "optimizers" else kind
    notes = [f"{number}. {reason}" for number, reason in enumerate(reasons, 1)]
    return "\n".join([rows("|".join([first, *grid.FRAMEWORKS.values()]), lines), *(["", *notes] if notes else [])])


def optimizers_read() -> str:
    return _read("optimizers")


def optimizers_made() -> str:
    return _made("optimizers")


def losses_read() -> str:
    return _read("losses")


def losses_made() -> str:
    return _made("losses")


def schedules_read() -> str:
    return _read("schedules")


def schedules_made() -> str:
    return _made("schedules")


RECORDED = {
    "deepspeed": "deepspeed/zero3",
    "flax": "flax.msgpack",
    "hf": "trainer",
    "keras": "keras/model.keras",
    "lightning": "lightning.ckpt",
    "nemo": "nemo/model.nemo",
    "ort": "ort/entropy",
    "safetensors": "trainer/model.safetensors",
    "torch": "plain.pt",
}
"""Checkpoints that the tests have of the real frameworks, by format; others are called as it is."""
INFORMATION: dict[str, Callable[[Checkpoint], Any]] = {
    "parameters": lambda c: c.tensors,
    "optimizer": lambda c: any(each.slots for each in c.optimizers),
    "names of its state": lambda c: c.optimizers and all(each.has_names for each in c.optimizers),
    "class, numbers": lambda c: c.optimizers and all(g.optimizer for each in c.optimizers for g in each.groups),
    "schedule": lambda c: any(each.words is not None for each in c.schedules),
    "step": lambda c: c.step is not None,
    "random": lambda c: c.randomness,
    "data": lambda c: c.data,
    "scaler": lambda c: c.scaler,
    "averages": lambda c: c.averages,
    "loss": lambda c: c.loss,
    "configuration": lambda c: c.configuration or c.arguments,
    "layout": lambda c: c.layout,
}


def checkpoints() -> str:
    """What is read from the recorded checkpoint of each format, and what is there after it was written again."""
    lines = []
    for format in FORMATS:
        place = HERE.parent / "tests" / "recorded" / RECORDED.get(format.name, format.name)
        if not place.exists():
            continue
        found, again = open_checkpoint(place), None
        if format.write is not None:
            with tempfile.TemporaryDirectory() as folder:
                again = open_checkpoint(to_checkpoint(found, Path(folder) / f"x{format.ending}", format=format.name))
        cells = [_cell(has(found), again is not None and has(again)) for has in INFORMATION.values()]
        lines.append((f"`{format.name}`", format.title, *cells))
    return rows("|".join(["format", "of", *INFORMATION]), lines)


def _cell(is_read: Any, is_written: Any) -> str:
    return "yes" if is_read and is_written else "read" if is_read else ""


def _specification() -> dict[str, Any]:
    return tomllib.loads((HERE / "clauses.toml").read_text())


def clauses() -> str:
    """What the standard says on training, and what comes of it."""
    parts = []
    for part in _specification()["part"]:
        lines = (
            (c["where"], c["force"], c["says"], c["does"], "<br>".join(_by_function(c["tests"])))
            for c in part["clause"]
        )
        parts.append(f"## {part['title']}\n\n" + rows("where||the standard|Onward|shown by", lines))
    return "\n\n".join(parts)


def _by_function(tests: Iterable[str]) -> Iterable[str]:
    """Tests as pytest names them, the name of a function once for all its cases."""
    last = ""
    for test in tests:
        function, bracket, case = test.partition("[")
        yield f"`[{case}`" if bracket and function == last else f"`{test}`"
        last = function


def questions() -> str:
    """What it leaves open."""
    return "\n\n".join(
        f"### {number}. {q['title']}\n\n{_wrapped(q['text'])}\n\n"
        f"{_wrapped('Possible readings: ' + q['readings'])}\n\n{_wrapped('Ours: ' + q['ours'])}"
        for number, q in enumerate(_specification()["question"], 1)
    )


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def torch_optimizers() -> str:
    lines = [(*_row_cells(row), "native" if row.is_native else "exact subclass") for row in TORCH_ROWS]
    return rows("optimizer|variant|class|", lines)


def optax_optimizers() -> str:
    return rows("optimizer|variant|optax", [_row_cells(row) for row in OPTAX_ROWS if not row.difference])


def _row_cells(row: OptimizerRow) -> tuple[str, str, str]:
    condition = f", {row.applies.words}" if row.applies else ""
    return ", ".join(f"`{name}`" for name in row.optimizers), ", ".join(row.variants) + condition, f"`{row.name}`"


TABLES = {
    function.__name__: function
    for function in (
        losses,
        optimizers,
        schedules,
        initializers,
        preprocessing,
        augmentations,
        recipe_options,
        run_options,
        codes,
        gradients,
        classical,
        microsoft,
        conformance,
        exceptions,
        scoreboard,
        training_models,
        optimizers_read,
        optimizers_made,
        torch_optimizers,
        optax_optimizers,
        losses_read,
        losses_made,
        schedules_read,
        schedules_made,
        checkpoints,
        clauses,
        questions,
    )
}


def refreshed(text: str) -> str:
    return MARKED.sub(lambda match: f"{match[1]}\n{TABLES[match[2]]()}\n\n{match[3]}", text)


if __name__ == "__main__":
    for page in sorted(HERE.rglob("*.md")):
        page.write_text(refreshed(page.read_text()))
