"""Rules about bindings: which variable gets which value (OW201 to OW212, OW220, and OW304 to OW306)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from onnx import StringStringEntryProto

from onward.checker.findings import Finding, listing, make_finding, quote
from onward.checker.view.scope import Scope, Subject


class Kind(NamedTuple):
    """One of the two lists of bindings of an entry, and the scope whose outputs are its values."""

    field: str
    bindings: Iterable[StringStringEntryProto]
    source: Scope
    wrong_type: str
    wrong_shape: str

    def place(self, key: str) -> str:
        return self.source.binding(self.field, key)


def _kinds(step: Scope) -> tuple[Kind, Kind]:
    entry = step.entry
    return (
        Kind("initialization_binding", entry.initialization_binding, step.initialization, "OW305", "OW306"),
        Kind("update_binding", entry.update_binding, step, "OW207", "OW208"),
    )


def complete(step: Scope) -> Iterator[Finding]:
    for kind in _kinds(step):
        for binding in kind.bindings:
            if not binding.key or not binding.value:
                missing = "key" if not binding.key else "value"
                yield make_finding("OW220", kind.place(binding.key), f"the binding has no {missing}")


def keys_are_state(step: Scope) -> Iterator[Finding]:
    for kind in _kinds(step):
        for key in dict.fromkeys(binding.key for binding in kind.bindings if binding.key):
            if any(key in part.initializers for part in step.parts):
                continue
            place = kind.place(key)
            if any(key in part.sparse for part in step.parts):
                yield make_finding(
                    "OW209", place, f"{quote(key)} is a sparse initializer", "store it as a dense initializer"
                )
            else:
                message, hint = _not_state(step, key)
                yield make_finding("OW201", place, message, hint)


def _not_state(step: Scope, key: str) -> tuple[str, str | None]:
    if producer := step.producer(key):
        hint = "a variable is an initializer: turn the node that computes it into one"
        return f"{quote(key)} is no initializer but computed by {producer[0].place}", hint
    if step.is_free_input(key):
        return f"{quote(key)} is an input, not an initializer", "a variable needs a value in the file"
    if key in step.subject.homes:
        other = step.subject.homes[key]
        hint = "keep state that several steps share in `graph.initializer`"
        return f"{quote(key)} belongs to training_info[{other}].algorithm, which this step does not see", hint
    known = (name for part in step.parts for name in part.initializers)
    message = f"neither the inference graph nor this algorithm has an initializer {quote(key)}"
    return message, step.subject.near(key, known)


def keys_are_unique(step: Scope) -> Iterator[Finding]:
    for kind in _kinds(step):
        for key, number in Counter(binding.key for binding in kind.bindings).items():
            if number > 1:
                yield make_finding(
                    "OW202", kind.place(key), f"{quote(key)} is bound {number} times", "keep one of the bindings"
                )


def keys_are_not_inputs(step: Scope) -> Iterator[Finding]:
    for key in step.updates:
        if any(key in part.inputs and key in part.initializers for part in step.parts):
            yield make_finding(
                "OW210",
                step.binding("update_binding", key),
                f"{quote(key)} is also an input: a caller that feeds it hides what training has stored",
                "remove it from the list of inputs (IR version 4 and newer need it only in `initializer`)",
            )


def update_values(step: Scope) -> Iterator[Finding]:
    outputs, theirs = set(step.own.outputs), set(step.subject.inference.own.outputs)
    for key, value in step.updates.items():
        if not value or value in outputs:
            continue
        code, hint = "OW205", step.subject.near(value, iter(step.own.outputs))
        message = f"the algorithm has no output {quote(value)}"
        if value in theirs:
            code, hint = "OW206", "pass it through an `Identity` in the algorithm"
            message = f"{quote(value)} is an output of the inference graph only; IR.md wants one of the algorithm"
        elif step.defines(value):
            hint = "add it to the algorithm's outputs"
            message = f"{quote(value)} is computed, but no output of the algorithm"
        yield make_finding(code, step.binding("update_binding", key), message, hint)


def initial_values(step: Scope) -> Iterator[Finding]:
    kind = _kinds(step)[0]
    graph = kind.source.own
    if graph.is_empty:
        return  # there is a rule for bindings without a graph
    outputs = set(graph.outputs)
    for key, value in step.resets.items():
        if value and value not in outputs:
            computed = "is computed, but no output" if graph.defines(value) else "is not an output"
            hint = step.subject.near(value, iter(graph.outputs))
            yield make_finding("OW304", kind.place(key), f"{quote(value)} {computed} of the initialization graph", hint)


def types_agree(step: Scope) -> Iterator[Finding]:
    for kind, pairs in zip(_kinds(step), (step.resets, step.updates), strict=True):
        for key, value in pairs.items():
            variable = step.types.get(key) if step.initializer(key) is not None else None
            new = kind.source.types.get(value)
            if variable is None or new is None:
                continue
            if variable.elem != new.elem or not variable.fits(new):
                code = kind.wrong_type if variable.elem != new.elem else kind.wrong_shape
                yield make_finding(code, kind.place(key), f"the variable is {variable}, {quote(value)} is {new}")


def values_differ(step: Scope) -> Iterator[Finding]:
    """An output may start two slots, but two variables that are always equal are one, or a mistake."""
    keys: dict[str, list[str]] = {}
    for key, value in step.updates.items():
        if value:
            keys.setdefault(value, []).append(key)
    for value, several in keys.items():
        if len(several) > 1:
            place = step.binding("update_binding", several[1])
            yield make_finding(
                "OW211", place, f"{quote(value)} is assigned to {listing(several)}: they will always be equal"
            )


def updates_change(step: Scope) -> Iterator[Finding]:
    for key, value in step.updates.items():
        if key == value and step.initializer(key) is not None:
            yield make_finding(
                "OW212",
                step.binding("update_binding", key),
                f"{quote(key)} is assigned to itself",
                "remove the binding",
            )


def one_update_each(subject: Subject) -> Iterator[Finding]:
    yield from _shared_targets(subject, "OW203", "update_binding", "updated", [step.updates for step in subject.steps])


def one_reset_each(subject: Subject) -> Iterator[Finding]:
    yield from _shared_targets(
        subject, "OW204", "initialization_binding", "initialised", [s.resets for s in subject.steps]
    )


def _shared_targets(
    subject: Subject, code: str, field: str, done: str, maps: list[dict[str, str]]
) -> Iterator[Finding]:
    first: dict[str, int] = {}
    for i, pairs in enumerate(maps):
        for key in pairs:
            if key in subject.inference.own.initializers and first.setdefault(key, i) != i:
                yield make_finding(
                    code,
                    subject.steps[i].binding(field, key),
                    f"{quote(key)} is also {done} by training_info[{first[key]}]",
                    "correct only if both are meant to run in this order",
                )


MODEL_RULES = (one_update_each, one_reset_each)
STEP_RULES = (
    complete,
    keys_are_state,
    keys_are_unique,
    keys_are_not_inputs,
    update_values,
    initial_values,
    types_agree,
    values_differ,
    updates_change,
)
