"""Write the tables of the documentation from those in the code: `python docs/tables.py`. A test compares them."""

from __future__ import annotations

import importlib
import itertools
import json
import re
import sys
import tempfile
import textwrap
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from onnx import defs

from onward.checker import CODES, FAMILIES
from onward.checkpoint.exporting import to_checkpoint
from onward.checkpoint.format import Checkpoint
from onward.checkpoint.formats import FORMATS, open_checkpoint
from onward.cli.commands import build
from onward.options import EvaluateOptions, ModelAndData, StepOptions, TrainConfig, options_of
from onward.rules import RULES, NoGradient, Rewrite, Rule
from onward.vocabulary.optimizers import OPTAX_ROWS, TORCH_ROWS
from onward.vocabulary.rows import OptimizerRow

HERE = Path(__file__).parent
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def rows(header: str, lines: Iterable[tuple[str, ...]]) -> str:
    columns = header.split("|")
    head = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join([*head, *("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)])


def options(values: Mapping[str, Any]) -> str:
    return ", ".join(f"`{name}`" if value is None else f"`{name}={_word(value)}`" for name, value in values.items())


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def losses() -> str:
    return _catalog("losses", "loss|what it is|options")


def optimizers() -> str:
    lines = []
    for name, entry in build.entries("optimizers").items():
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
"""Options that all entries of a catalog have. The text around the tables explains them."""


def _catalog(kind: build.Catalog, header: str) -> str:
    """Return a table of the names in a recipe, as `onward prepare --list` prints them."""
    return rows(
        header,
        (
            (
                ", ".join(f"`{alias}`" for alias in (name, *entry.short_names)),
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


def evaluate_options() -> str:
    return _declared(EvaluateOptions)


def _declared(*classes: type) -> str:
    """Return a table of options: flags, names of arguments and keys, help."""
    lines = []
    for option in itertools.chain.from_iterable(map(options_of, classes)):
        flags = ", ".join(sorted(option.flags, key=len))
        lines.append((f"`{' '.join(filter(None, (flags, option.metavar)))}`", f"`{option.name}`", option.help))
    return rows("option|argument, key|what it says", lines)


def codes() -> str:
    sections = []
    for prefix, title in FAMILIES.items():
        of_family = [(code, entry) for code, entry in CODES.items() if code.startswith(prefix)]
        lines = ((f"`{code}`", str(entry.severity), entry.meaning, entry.rule) for code, entry in of_family)
        sections.append(f"### {title[:1].upper()}{title[1:]}\n\n" + rows("code|severity|what it means|rule", lines))
    return "\n\n".join(sections)


def gradients() -> str:
    """Return a table of the operators of the standard and their rules."""
    newest: dict[str, Any] = {}
    for schema in defs.get_all_schemas():
        if schema.domain == "" and not schema.deprecated:
            newest[schema.name] = schema
    return rows("operator|gradient", ((f"`{name}`", _gradient_of(newest[name])) for name in sorted(newest)))


def classical() -> str:
    """Return a table of the operators of `ai.onnx.ml` and their rules."""
    return _of_domain("ai.onnx.ml")


def microsoft() -> str:
    """Return a table of the operators of ONNX Runtime with a rule."""
    return _of_domain("com.microsoft")


def _of_domain(domain: str) -> str:
    names = sorted(name for of, name in RULES if of == domain)
    return rows("operator|gradient", ((f"`{name}`", _gradient(RULES[domain, name])) for name in names))


def _gradient_of(schema: Any) -> str:
    rule = RULES.get(("", schema.name))
    if rule is not None:
        return _gradient(rule)
    return "through its body" if schema.has_function or schema.has_context_dependent_function else "not yet"


def _gradient(rule: Rule | Rewrite | NoGradient) -> str:
    if isinstance(rule, NoGradient):
        return f"none: {rule.reason}"
    return "rewritten" if isinstance(rule, Rewrite) else "rule"


# ---- engines on the tests of the standard ----------------------------------------------------------------------------


def _conformity() -> Any:
    """Return the module of the tests with all cases, and those that an engine fails."""
    return _from_tests("conformity")


def _from_tests(name: str, folder: str = "support") -> Any:
    sys.path.insert(0, str(HERE.parent / "tests" / folder))
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
    """Return a table of training models of the standard's operators, which the tests run on all engines."""
    cases, engines = _from_tests("standard_training").CASES, _conformity().ENGINES
    lines = ((name, case.summary, *("yes" for _ in engines)) for name, case in cases.items())
    return rows("training with|what is special|" + "|".join(engines), lines)


# ---- optimizers, losses and schedules in frameworks ------------------------------------------------------------------


def _read(kind: str) -> str:
    """Return tables of names in a framework, and what a training model has for each."""
    grid = _from_tests("grid.record")
    tables = {title: list(grid.read(kind, framework)) for framework, title in grid.FRAMEWORKS.items()}
    return "\n\n".join(f"**{title}**\n\n" + rows(f"{kind}|", lines) for title, lines in tables.items() if lines)


def _made(kind: str) -> str:
    """Return a table of names in a recipe, and what frameworks have for each."""
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


def models() -> str:
    """Return how many models of each family are exact on each route."""
    zoo = _from_tests("zoo", "zoo")
    return rows("|".join(["from", "family", "models", *zoo.ROUTES.values()]), zoo.counts())


def models_refused() -> str:
    return rows("model|to|reason", _from_tests("zoo", "zoo").refusals())


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
"""Format -> recorded checkpoint of a framework in the tests, if it has another name than the format."""
INFORMATION: dict[str, Callable[[Checkpoint], Any]] = {
    "parameters": lambda c: c.tensors,
    "optimizer": lambda c: any(o.slots for o in c.optimizers),
    "names of its state": lambda c: c.optimizers and all(o.has_names for o in c.optimizers),
    "class, numbers": lambda c: c.optimizers and all(g.optimizer for o in c.optimizers for g in o.groups),
    "schedule": lambda c: any(s.words is not None for s in c.schedules),
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
    """Return a table of what is read from the recorded checkpoint of each format, and what remains after writing."""
    lines = []
    for format in FORMATS:
        path = HERE.parent / "tests" / "recorded" / RECORDED.get(format.name, format.name)
        if not path.exists():
            continue
        checkpoint, again = open_checkpoint(path), None
        if format.write is not None:
            with tempfile.TemporaryDirectory() as folder:
                again = open_checkpoint(
                    to_checkpoint(checkpoint, Path(folder) / f"x{format.ending}", format=format.name)
                )
        cells = [_cell(has(checkpoint), again is not None and has(again)) for has in INFORMATION.values()]
        lines.append((f"`{format.name}`", format.title, *cells))
    return rows("|".join(["format", "of", *INFORMATION]), lines)


def _cell(is_read: Any, is_written: Any) -> str:
    return "yes" if is_read and is_written else "read" if is_read else ""


def _specification() -> dict[str, Any]:
    return tomllib.loads((HERE / "clauses.toml").read_text())


def clauses() -> str:
    """Return tables of the clauses of the standard on training, and what Onward does."""
    sections = []
    for section in _specification()["part"]:
        lines = (
            (c["where"], c["force"], c["says"], c["does"], "<br>".join(_by_function(c["tests"])))
            for c in section["clause"]
        )
        sections.append(f"## {section['title']}\n\n" + rows("where||the standard|Onward|shown by", lines))
    return "\n\n".join(sections)


def _by_function(tests: Iterable[str]) -> Iterable[str]:
    """Yield tests with their names in pytest; the cases of a function after the first as `[case]`."""
    last = ""
    for test in tests:
        function, bracket, case = test.partition("[")
        yield f"`[{case}`" if bracket and function == last else f"`{test}`"
        last = function


def questions() -> str:
    """Return the questions that the standard leaves open."""
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


# ---- files of public packages ----------------------------------------------------------------------------------------


WILD = HERE.parent / "benchmarks" / "wild"
OUTCOMES = {
    "trained": "trained",
    "nothing": "nothing to train",
    "refused": "refused",
    "wrong": "wrong",
    "raw error": "raw error",
    "timeout": "too slow",
    "not run": "not run by ONNX Runtime",
}


def _wild() -> dict[str, dict[str, Any]]:
    return json.loads((WILD / "outcomes.json").read_text())


def wild() -> str:
    """Return a table of the .onnx files of public packages and what became of them."""
    listed = tomllib.loads((WILD / "packages.toml").read_text())["package"]
    versions = {package["name"]: f"{package['name']} {package['version']}" for package in listed}
    lines = []
    for name, report in _wild().items():
        package, _, file = name.partition(" ")
        losses = " → ".join(f"{loss:.4g}" for loss in report.get("losses", []))
        said = [f"`{option}`" for option in report.get("options", [])]
        said += [report[key] for key in ("message", "hint") if report.get(key)]
        cells = (file, OUTCOMES[report["outcome"]], f"{report.get('loss', '')} {losses}".strip(), "; ".join(said))
        lines.append((versions.get(package, package), *cells))
    return rows("package|file|outcome|loss, in the first and the last step|", lines)


def wild_counts() -> str:
    counted = Counter(report["outcome"] for report in _wild().values())
    return rows("outcome|files", ((words, str(counted[key])) for key, words in OUTCOMES.items() if counted[key]))


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
        evaluate_options,
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
        models,
        models_refused,
        checkpoints,
        clauses,
        questions,
        wild,
        wild_counts,
    )
}


def refreshed(text: str) -> str:
    return MARKED.sub(lambda match: f"{match[1]}\n{TABLES[match[2]]()}\n\n{match[3]}", text)


if __name__ == "__main__":
    for page in sorted(HERE.rglob("*.md")):
        page.write_text(refreshed(page.read_text()))
