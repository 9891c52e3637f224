"""`onward check`: what is wrong with a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onward.cli import options
from onward.cli.app import LOOK, command
from onward.cli.console import print_json, print_rows, say
from onward.cli.failure import FAILED, Misuse
from onward.cli.work import working

if TYPE_CHECKING:
    from onward import Finding

_HEADINGS = {"error": ("errors", "bold red"), "warning": ("warnings", "bold yellow"), "info": ("remarks", "bold")}


@command(
    LOOK,
    "onward check training.onnx",
    "onward check training.onnx --for onnxruntime --strict",
    "onward check training.onnx --json | jq '.findings[].code'",
    usage="MODEL [OPTIONS]",
)
def check(
    model: options.OptionalModel = None,
    strict: Annotated[bool, typer.Option("--strict", help="Fail on warnings, too.")] = False,
    runtime: Annotated[
        str | None, typer.Option("--for", metavar="RUNTIME", help="Check also that this runtime loads the model.")
    ] = None,
    codes: Annotated[bool, typer.Option("--codes", help="List all codes of findings, and exit.")] = False,
    as_json: options.Json = False,
) -> None:
    """Find what is wrong with a file.

    It knows every rule about training models, and all that onnx.checker knows. It looks at the file as it is, so it can
    say what is wrong with one that nothing can read. Exits with 0 if there are no errors (with --strict, no warnings
    either), else with 1.
    """
    if codes:
        _print_codes(as_json)
        return
    if model is None:
        raise Misuse("missing argument `MODEL`", "see `onward check --help`")
    from onward.checker import check as find

    with working(f"checking {model}"):
        findings = find(str(model), target=runtime)
    counts = {severity: sum(finding.severity == severity for finding in findings) for severity in _HEADINGS}
    passed = not counts["error"] and not (strict and counts["warning"])
    if as_json:
        listed = [finding.to_json() for finding in findings]
        print_json({"file": str(model), "passed": passed, "counts": counts, "findings": listed})
    else:
        _print_findings(findings)
        _print_verdict(model, counts, passed)
    if not passed:
        raise typer.Exit(FAILED)


def _print_findings(findings: Sequence[Finding]) -> None:
    for severity, (heading, style) in _HEADINGS.items():
        chosen = [finding for finding in findings if finding.severity == severity]
        if not chosen:
            continue
        say(heading, style=style)
        for finding in chosen:
            _print_finding(finding)
        say()


def _print_finding(finding: Finding) -> None:
    say(f"  {finding.code}  {finding.place}", style="bold")
    lines = [(finding.message, ""), (f"rule: {finding.rule}", "dim")]
    if finding.hint:
        lines.append((f"hint: {finding.hint}", "cyan"))
    for text, style in lines:
        print_rows([["       ", text]], styles=("", style))


def _print_verdict(model: Path, counts: dict[str, int], passed: bool) -> None:
    from onward.inspect.formatting import quantity

    parts = [
        quantity(number, noun) for noun, number in zip(("error", "warning", "remark"), counts.values(), strict=True)
    ]
    found = ", ".join(part for part, number in zip(parts, counts.values(), strict=True) if number)
    say(f"{model}: {found or 'no findings'}", style="bold green" if passed else "bold red")


def _print_codes(as_json: bool) -> None:
    from onward.checker import CODES, FAMILIES

    if as_json:
        entries = {c: {"severity": str(k.severity), "meaning": k.meaning, "rule": k.rule} for c, k in CODES.items()}
        print_json(entries)
        return
    for family, subject in FAMILIES.items():
        say(subject, style="bold")
        rows = [[f"  {c}", str(k.severity), k.meaning] for c, k in CODES.items() if c.startswith(family)]
        print_rows(rows)
