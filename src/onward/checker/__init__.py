"""The checker: every rule of the specification about training models, and what else keeps one from working.

It looks at the file as it is, a `ModelProto`, and not at what Onward makes of it, so that files which Onward refuses to
read can still be diagnosed. Whatever a file holds, the answer is findings, in time that grows with its size.
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

_Seen = TypeVar("_Seen", CheckedModel, Scope)

# Rules about a file look at the CheckedModel, rules about a graph at its Scope: SCOPE_RULES at every graph that is
# executed, STEP_RULES at algorithms only, SOUND_* only where names mean something. The first group needs no types, and
# decides whether onnx is worth asking for them.
_FORM = (*file.MODEL_RULES, *functions.MODEL_RULES, *devices.MODEL_RULES)
_MEANING = (*bindings.MODEL_RULES, *gradients.MODEL_RULES, *metadata.MODEL_RULES)
_OF_GRAPHS = (*gradients.SCOPE_RULES, *optimizers.SCOPE_RULES, *devices.SCOPE_RULES)


def check_proto(
    proto: ModelProto, *, base_dir: str | os.PathLike[str] | None = None, target: str | None = None
) -> list[Finding]:
    """All findings about a model, the worst first; none for a model that is as it should be.

    base_dir: the folder of the model file; without it, files with external data are not looked at.
    target: a runtime that should load the model, one of `TARGETS`.
    """
    wanted = standard.rules_for(target)
    if unreadable := list(file.problems(proto)):
        return unreadable
    older, proto = file.of_older_form(proto)
    if older and (unreadable := list(file.problems(proto))):
        return unreadable
    subject = CheckedModel(proto, Path(base_dir) if base_dir is not None else None)
    findings = [*older, *_apply(_FORM, [subject])]
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
    # What depends on what is a question only where names mean something.
    sound = [scope for scope in subject.scopes if unsound.isdisjoint(scope.parts)]
    findings += _apply(gradients.SOUND_SCOPE_RULES, sound)
    findings += _apply(
        (*gradients.SOUND_STEP_RULES, *optimizers.SOUND_STEP_RULES), [scope for scope in sound if scope.outer]
    )
    # Data in other files is nothing that onnx would be asked about.
    errors = [f for f in findings if f.severity is Severity.ERROR and f.code not in ("OW131", "OW132", "OW133")]
    findings += standard.objections(subject, verdicts, errors)
    findings += _apply(wanted, [subject])
    return worst_first(findings)


@checked()
def check(model: Source, *, target: str | None = None) -> list[Finding]:
    """All that is wrong with a model, by the rules of the specification and of Onward; an empty list if nothing is.

        for finding in onward.check("training.onnx"):
            print(finding)

    - `model`: a model in a file, in bytes, in a `ModelProto` or in memory
    - `target`: also what would be in the way of a runtime, such as `"onnxruntime"`
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


def _apply(rules: Iterable[Callable[[_Seen], Iterator[Finding]]], seen: Iterable[_Seen]) -> Iterator[Finding]:
    for one in seen:
        for rule in rules:
            try:
                yield from rule(one)
            except OverBudget:
                place = one.own.place if isinstance(one, Scope) else "model"
                yield make_finding(
                    "OW109", place, f"the rule `{rule.__name__}` was given up: the graph is too entangled"
                )
