"""Checker of training models: every rule of the specification, and other faults.

It reads the file as a `ModelProto`, without converting it, so that files which Onward refuses to
read can still be diagnosed. The time grows with the size of the file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from onnx import ModelProto

from onward.arguments import checked
from onward.checker import bindings, devices, file, functions, gradients, metadata, optimizers, standard, structure
from onward.checker.codes import CODES, FAMILIES, Code, Finding, Severity, make_finding, worst_first
from onward.checker.scope import CheckedModel, OverBudget, Scope
from onward.checker.standard import TARGETS
from onward.model import Model, Source, storage
from onward.model.serde import without_data

__all__ = ["CODES", "FAMILIES", "TARGETS", "Code", "Finding", "Severity", "check", "check_proto"]

_Subject = TypeVar("_Subject", CheckedModel, Scope)

# Rules of a file take the CheckedModel, rules of a graph its Scope: SCOPE_RULES every graph that is executed,
# STEP_RULES algorithms only, SOUND_* only graphs with valid names. The first group needs no types, and decides
# whether onnx is asked for them.
_FORM = (*file.MODEL_RULES, *functions.MODEL_RULES, *devices.MODEL_RULES)
_MEANING = (*bindings.MODEL_RULES, *gradients.MODEL_RULES, *metadata.MODEL_RULES)
_OF_GRAPHS = (*gradients.SCOPE_RULES, *optimizers.SCOPE_RULES, *devices.SCOPE_RULES)


def check_proto(
    proto: ModelProto, *, base_dir: str | os.PathLike[str] | None = None, target: str | None = None
) -> list[Finding]:
    """Return all findings about a model, the worst first; empty for a valid model.

    base_dir: folder of the model file; without it, files with external data are not checked.
    target: runtime that should load the model, one of `TARGETS`.
    """
    target_rules = standard.rules_for(target)
    if unreadable := list(file.problems(proto)):
        return unreadable
    conversions, proto = file.of_older_form(proto)
    if conversions and (unreadable := list(file.problems(proto))):
        return unreadable
    subject = CheckedModel(proto, Path(base_dir) if base_dir is not None else None)
    findings = [*conversions, *_apply(_FORM, [subject])]
    unsound = set()
    for scope in subject.scopes:
        broken = list(_apply(structure.SCOPE_RULES, [scope]))
        findings += broken
        if any(finding.severity is Severity.ERROR for finding in broken):
            unsound.add(scope.own)
    verdicts = standard.study(subject)
    findings += _apply(_MEANING, [subject])
    findings += _apply(_OF_GRAPHS, subject.scopes)
    findings += _apply(bindings.STEP_RULES, subject.steps)
    # Dependencies are defined only where names are.
    sound = [scope for scope in subject.scopes if unsound.isdisjoint(scope.graphs)]
    findings += _apply(gradients.SOUND_SCOPE_RULES, sound)
    findings += _apply(
        (*gradients.SOUND_STEP_RULES, *optimizers.SOUND_STEP_RULES), [scope for scope in sound if scope.outer]
    )
    # onnx is not asked about data in other files.
    errors = [
        f for f in findings if f.severity is Severity.ERROR and f.code not in ("OW131", "OW132", "OW133", "OW134")
    ]
    findings += standard.objections(subject, verdicts, errors)
    findings += _apply(target_rules, [subject])
    return worst_first(findings)


@checked()
def check(model: Source, *, target: str | None = None) -> list[Finding]:
    """Return the faults of a model, by the rules of the specification and of Onward; empty if there
    are none.

        for finding in onward.check("training.onnx"):
            print(finding)

    - `model`: a model in a file, in bytes, in a `ModelProto` or in memory
    - `target`: a runtime that should load the model, such as `"onnxruntime"` (default: none)
    """
    if isinstance(model, ModelProto):
        return check_proto(model, target=target)
    if isinstance(model, Model):
        with without_data(model):
            return check_proto(model.to_proto(), target=target)
    if isinstance(model, bytes):
        return check_proto(storage.parse_proto(model), target=target)
    findings = check_proto(storage.read_proto(model), base_dir=storage.folder_of(model), target=target)
    return worst_first([*file.checksums(Path(model)), *findings])


def _apply(rules: Iterable[Callable[[_Subject], Iterator[Finding]]], subjects: Iterable[_Subject]) -> Iterator[Finding]:
    for subject in subjects:
        for rule in rules:
            try:
                yield from rule(subject)
            except OverBudget:
                location = subject.own.place if isinstance(subject, Scope) else "model"
                message = f"the rule `{rule.__name__}` was given up: the graph is too entangled"
                yield make_finding("OW109", location, message)
