"""`onward check`, `check-gradients`, `verify` and `engines`: validate models, and list engines."""

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
from onward.cli.options import floats_matching, option
from onward.cli.output_files import working

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
    strict: Annotated[bool, option("--strict", None, "Fail on warnings too.")] = False,
    runtime: Annotated[str | None, option("--for", "RUNTIME", "Also check that this runtime loads the model.")] = None,
    codes: Annotated[bool, option("--codes", None, "List all codes of findings and exit.")] = False,
    as_json: options.Json = False,
) -> None:
    """Check a model file or a run folder.

    Checks every rule about training models and everything that onnx.checker checks. It reads the
    file itself, so it explains files that nothing can load. Of a run, it checks all models and
    their checksums, the progress, the configuration and the log. The exit code is 0 without errors
    (with --strict, without errors and warnings), else 1.
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
        from onward.inspect.formatting import quantity

        _print_findings(findings)
        nouns = zip(("error", "warning", "remark"), counts.values(), strict=True)
        verdict = ", ".join(quantity(number, noun) for noun, number in nouns if number) or "no findings"
        say(f"{model}: {verdict}", style="bold green" if passed else "bold red")
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
        str | None, option("--of", "NAME", "Value to differentiate (default: the loss, or the first output).")
    ] = None,
    wrt: Annotated[
        list[str] | None,
        option(
            "--wrt",
            "PATTERN",
            "Differentiate with respect to inputs, weights or values (default: all parameters and inputs). "
            "May be repeated.",
        ),
    ] = None,
    inputs: Annotated[
        Path | None, option("--inputs", "FILE", "An .npz file of inputs (default: random inputs).")
    ] = None,
    directions: Annotated[int, option("--directions", "N", "Number of random directions per tensor.", min=1)] = 1,
    order: Annotated[int, option("--order", "N", "2: also check the gradient of the gradient.", min=1, max=2)] = 1,
    tolerance: Annotated[
        float | None, option("--tolerance", "X", "Largest error of a gradient, relative to its size.", min=0)
    ] = None,
    seed: Annotated[int, option("--seed", "N", "Random seed of directions and inputs.", min=0)] = 0,
    step: options.Step = 0,
    as_json: options.Json = False,
) -> None:
    """Compare gradients with finite differences along random directions.

    The gradient is Onward's. The differences need only the model, computed in float64 wherever ONNX
    Runtime can. For a wrong gradient, the operator that causes it is named. The exit code is 1 if a
    gradient is wrong or not finite.
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
        list[str] | None, option("--engine", "NAME", "Engine to run (default: all installed). May be repeated.")
    ] = None,
    updates: Annotated[int, option("--updates", "N", "Number of steps to run.", min=1)] = 5,
    inputs: Annotated[
        Path | None, option("--inputs", "FILE", "An .npz file of a batch (default: random inputs).")
    ] = None,
    tolerance: Annotated[
        float | None,
        option("--tolerance", "X", "Largest difference between engines, relative to a tensor's size.", min=0),
    ] = None,
    seed: Annotated[int, option("--seed", "N", "Random seed of inputs.", min=0)] = 0,
    compiled: Annotated[bool, option("--compile", None, "Compile the step if the engine can.")] = False,
    step: options.Step = 0,
    as_json: options.Json = False,
) -> None:
    """Run a few steps on every installed engine and compare the results.

    PyTorch, JAX and TensorFlow run twice: with their own autodiff and with Onward's gradients.
    Where an engine differs, the first value that differs is named. The exit code is 1 if an engine
    differs.
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
    """List engines: versions, devices, and the number of standard operators of each.

    `--devices` loads the frameworks, which takes a while, to list their devices and operators.
    """
    from onward.engines import availability

    with working("loading the engines") if devices else nullcontext():
        infos = availability.engines(load=devices)
    if as_json:
        print_json([asdict(info) | {"install": info.install} for info in infos])
        return
    total = len(availability.standard_operators())
    rows = [["engine", "version", "devices", "operators"]]
    for info in infos:
        if info.version is None:
            rows.append([info.name, "not installed", "", info.install])
        else:
            own = f"its own; kernels: {info.kernels}" if info.kernels else "its own"
            covered = own if info.operators is None else f"{info.operators} of {total}"
            seen = [", ".join(info.devices), covered] if info.devices is not None else ["(--devices)", "(--devices)"]
            rows.append([info.name, info.version, *seen])
    print_rows(rows)
