"""Rules about state: that what should change does, and that what changes can start over (OW213 to OW219)."""

from __future__ import annotations

from collections.abc import Iterator

from onward.checker.findings import Finding, bare, make_finding, quote
from onward.checker.view.graphs import SLOTS
from onward.checker.view.scope import Scope, Subject


def optimizers_are_heard(step: Scope) -> Iterator[Finding]:
    bound = set(step.updates.values())
    for node in step.own.nodes:
        if not node.is_training(*SLOTS):
            continue
        for i, name in enumerate(node.outputs):
            if name and name not in bound and not step.read_by(name):
                what = f"the new value of {quote(old)}" if (old := node.updates(i)) else "a new value"
                yield make_finding(
                    "OW213", node.place, f"{quote(name)}, {what}, is assigned to nothing", "bind it to its variable"
                )


def variables_get_their_own(step: Scope) -> Iterator[Finding]:
    for key, value in step.updates.items():
        node, output = step.producer(value) or (None, 0)
        old = node.updates(output) if node else None
        if node and old and old != key and step.initializer(old) is not None:
            yield make_finding(
                "OW219",
                step.binding("update_binding", key),
                f"{quote(key)} is assigned {quote(value)}, which is the new value of {quote(old)} ({node.place})",
            )


def outputs_are_used(step: Scope) -> Iterator[Finding]:
    """Losses and metrics are scalars and meant for the caller; anything larger may be a binding that was forgotten."""
    bound = set(step.updates.values())
    for name in dict.fromkeys(step.own.outputs):
        known = step.types.get(name)
        produced = step.own.producers.get(name)
        if name in bound or produced is None or produced[0].is_training(*SLOTS):
            continue
        if known is not None and known.has_one_element is False:
            place = f'{step.own.place}.output["{bare(name)}"]'
            yield make_finding("OW214", place, f"{known} is returned to the caller and bound to no variable")


def steps_do_something(step: Scope) -> Iterator[Finding]:
    place = f"training_info[{step.step}]"
    initialization = step.initialization
    if step.own.is_empty and initialization.own.is_empty and not step.updates and not step.resets:
        yield make_finding("OW217", place, "the entry is empty", "remove it")
    elif not step.updates:
        yield make_finding("OW218", place, "the step updates nothing: it evaluates, or only initialises")


def state_is_updated(subject: Subject) -> Iterator[Finding]:
    for step in subject.steps:
        for key in step.resets:
            known = step.updates if key in step.own.initializers else subject.updated
            if key not in known and step.initializer(key) is not None:
                yield make_finding(
                    "OW215",
                    step.binding("initialization_binding", key),
                    f"{quote(key)} is initialised, but no update binding changes it",
                    "bind its new value, or remove the binding and let the file hold its value",
                )


def state_is_initialised(subject: Subject) -> Iterator[Finding]:
    reset = {key for step in subject.steps for key in step.resets}
    for step in subject.steps:
        for key in step.updates:
            known = step.resets if key in step.own.initializers else reset
            if key not in known and step.initializer(key) is not None:
                yield make_finding(
                    "OW216",
                    step.binding("update_binding", key),
                    f"{quote(key)} has no initialization binding: a reset gives it whatever value the file holds",
                    "give it an initialization binding",
                )


MODEL_RULES = (state_is_updated, state_is_initialised)
STEP_RULES = (optimizers_are_heard, variables_get_their_own, outputs_are_used, steps_do_something)
