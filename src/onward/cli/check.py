"""`onward check`, `check-gradients`, `verify` and `engines`: whether a model is right, and what can run it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onward.cli import options
from onward.cli.app import FAILED, LOOK, Misuse, command
from onward.cli.console import print_json, print_rows, remark, say
from onward.cli.files import working
from onward.cli.options import floats_matching, option

if TYPE_CHECKING:
    from onward import Finding
    from onward.agreement.report import Report

_HEADINGS = {"error": ("errors", "bold red"), "warning": ("warnings", "bold yellow"), "info": ("remarks", "bold")}


@command(
    LOOK,
    "onward check training.onnx",
    "onward check training.onnx --for onnxruntime --strict",
    "onward check runs/digits-20260101-120000",
    "onward check training.onnx --json | jq '.findings[].code'",
    usage="MODEL|RUN [OPTIONS]",
)
def check(
    model: options.OptionalModel = None,
    strict: Annotated[bool, option("--strict", None, "Fail on warnings, too.")] = False,
    runtime: Annotated[str | None, option("--for", "RUNTIME", "Check also that this runtime loads the model.")] = None,
    codes: Annotated[bool, option("--codes", None, "List all codes of findings, and exit.")] = False,
    as_json: options.Json = False,
) -> None:
    """Find what is wrong with a file, or with the folder of a run.

    It knows every rule about training models, and all that onnx.checker knows. It looks at the file as it is, so it can
    say what is wrong with one that nothing can read. Of a run, it checks all models with their checksums, the progress,
    the configuration and the log. Exits with 0 if there are no errors (with --strict, no warnings
    either), else with 1.
    """
    if codes:
        _print_codes(as_json)
        return
    if model is None:
        raise Misuse("missing argument `MODEL`", "see `onward check --help`")
    from onward.checker import check as find

    with working(f"checking {model}"):
        if model.is_dir():
            from onward.training.run import Run

            findings = Run(model).check(target=runtime)
        else:
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
            say(f"  {finding.code}  {finding.place}", style="bold")
            lines = [(finding.message, ""), (f"rule: {finding.rule}", "dim")]
            for text, style in [*lines, *([(f"hint: {finding.hint}", "cyan")] if finding.hint else [])]:
                print_rows([["       ", text]], styles=("", style))
        say()


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


@command(
    LOOK,
    "onward check-gradients training.onnx",
    "onward check-gradients digits.onnx --of logits --wrt 'fc1.*' --wrt image --order 2",
    "onward check-gradients training.onnx --inputs batch.npz --json | jq .culprit",
    name="check-gradients",
)
def check_gradients(
    model: options.Model,
    of: Annotated[
        str | None, option("--of", "NAME", "The value that is differentiated; the loss, or the first output.")
    ] = None,
    wrt: Annotated[
        list[str] | None,
        option(
            "--wrt",
            "PATTERN",
            "Inputs, weights or values by which to differentiate; all parameters and inputs unless given. "
            "May be repeated.",
        ),
    ] = None,
    inputs: Annotated[
        Path | None, option("--inputs", "FILE", "An .npz file with inputs; made up unless given.")
    ] = None,
    directions: Annotated[int, option("--directions", "N", "How many random directions to try for each.", min=1)] = 1,
    order: Annotated[int, option("--order", "N", "2: check the gradient of the gradient, too.", min=1, max=2)] = 1,
    tolerance: Annotated[
        float | None, option("--tolerance", "X", "How far off a gradient may be, relative to its size.", min=0)
    ] = None,
    seed: Annotated[int, option("--seed", "N", "For directions and made-up inputs.", min=0)] = 0,
    step: options.Step = 0,
    as_json: options.Json = False,
) -> None:
    """Compare gradients with differences, along random directions.

    The gradient is ours; the differences need nothing but the model itself, which is computed in float64 wherever ONNX
    Runtime can. Where a gradient is wrong, the operator to blame is named. Exits with 1 if one is wrong or not finite.
    """
    import onward

    with working(f"checking the gradients of {model}", model):
        source = onward.load(str(model))
        report = onward.check_gradients(
            source,
            of,
            floats_matching(source, wrt) if wrt else None,
            inputs=inputs,
            directions=directions,
            order=order,
            seed=seed,
            tolerance=tolerance,
            step=step,
        )
    if as_json:
        print_json({"file": str(model), **report.to_json()})
    else:
        _print_report(report, style="bold red")
    if not report.ok:
        raise typer.Exit(FAILED)


@command(
    LOOK,
    "onward verify training.onnx",
    "onward verify training.onnx --engine onnxruntime --engine torch --updates 50",
    "onward verify training.onnx --inputs batch.npz --json | jq '.rows[] | {engine, verdict}'",
    formerly={"--steps": "--updates"},
)
def verify(
    model: options.Model,
    engine: Annotated[
        list[str] | None, option("--engine", "NAME", "An engine; all that are installed unless given. May be repeated.")
    ] = None,
    updates: Annotated[int, option("--updates", "N", "How many steps to run.", min=1)] = 5,
    inputs: Annotated[
        Path | None, option("--inputs", "FILE", "An .npz file with a batch; made up unless given.")
    ] = None,
    tolerance: Annotated[
        float | None, option("--tolerance", "X", "How far apart engines may be, relative to a tensor's size.", min=0)
    ] = None,
    seed: Annotated[int, option("--seed", "N", "For made-up inputs.", min=0)] = 0,
    compiled: Annotated[bool, option("--compile", None, "Compile the step where an engine can.")] = False,
    step: options.Step = 0,
    as_json: options.Json = False,
) -> None:
    """Run a few steps on every installed engine, and show where they agree and where not.

    PyTorch, JAX and TensorFlow take part twice, with their own derivative and with Onward's. Where an engine differs,
    the first value that does is named. Exits with 1 if one differs.
    """
    import onward

    with working(f"running {model}", model):
        report = onward.verify(
            str(model),
            engines=engine or None,
            updates=updates,
            inputs=inputs,
            tolerance=tolerance,
            seed=seed,
            step=step,
            compile=compiled,
            on_start=lambda name: remark(f"running {name}"),
        )
    if as_json:
        print_json(report.to_json())
    else:
        _print_report(report)
    if not report.ok:
        raise typer.Exit(FAILED)


def _print_report(report: Report, style: str | None = None) -> None:
    say(report.heading, style="bold")
    print_rows(report.table())
    for text in report.remarks:
        say(text, style=style)


@command(
    LOOK,
    "onward engines",
    "onward engines --devices",
    "onward engines --devices --json | jq '.[] | select(.name == \"jax\").cannot'",
)
def engines(
    devices: Annotated[
        bool, option("--devices", None, "Load PyTorch, JAX and TensorFlow to see their devices and operators.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """List engines: versions, devices, and how many operators of the standard each has.

    What only a framework itself can tell takes a while to load: `--devices` asks for it.
    """
    from onward.engines import availability

    with working("loading the engines") if devices else nullcontext():
        found = availability.engines(load=devices)
    if as_json:
        print_json([asdict(info) | {"install": info.install} for info in found])
        return
    total = len(availability.standard_operators())
    rows = [["engine", "version", "devices", "operators"]]
    for info in found:
        if info.version is None:
            rows.append([info.name, "not installed", "", info.install])
        else:
            own = f"its own; kernels: {info.kernels}" if info.kernels else "its own"
            covered = own if info.operators is None else f"{info.operators} of {total}"
            seen = [", ".join(info.devices), covered] if info.devices is not None else ["(--devices)", "(--devices)"]
            rows.append([info.name, info.version, *seen])
    print_rows(rows)
