"""Rules about bindings (OW201 to OW212, OW220), state (OW213 to OW219) and initialization (OW301 to OW308)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from onnx import StringStringEntryProto

from onward.checker.codes import Finding, bare, listing, make_finding, quote
from onward.checker.graphs import SLOTS, attribute
from onward.checker.scope import CheckedModel, Scope
from onward.standard import domain_of


class BindingList(NamedTuple):
    """One of the two binding lists of an entry, and the scope whose outputs are its values."""

    field: str
    bindings: Iterable[StringStringEntryProto]
    source: Scope
    wrong_type: str
    wrong_shape: str

    def place(self, key: str) -> str:
        return self.source.binding(self.field, key)


def _binding_lists(step: Scope) -> tuple[BindingList, BindingList]:
    entry = step.entry
    return (
        BindingList("initialization_binding", entry.initialization_binding, step.initialization, "OW305", "OW306"),
        BindingList("update_binding", entry.update_binding, step, "OW207", "OW208"),
    )


def complete(step: Scope) -> Iterator[Finding]:
    for bindings in _binding_lists(step):
        for binding in bindings.bindings:
            if not binding.key or not binding.value:
                missing = "key" if not binding.key else "value"
                yield make_finding("OW220", bindings.place(binding.key), f"the binding has no {missing}")


def keys_are_state(step: Scope) -> Iterator[Finding]:
    for bindings in _binding_lists(step):
        for key in dict.fromkeys(binding.key for binding in bindings.bindings if binding.key):
            if any(key in graph.initializers for graph in step.graphs):
                continue
            location = bindings.place(key)
            if any(key in graph.sparse for graph in step.graphs):
                message = f"{quote(key)} is a sparse initializer"
                yield make_finding("OW209", location, message, "store it as a dense initializer")
            else:
                yield make_finding("OW201", location, *_not_state(step, key))


def _not_state(step: Scope, key: str) -> tuple[str, str | None]:
    if producer := step.producer(key):
        hint = "a variable is an initializer: turn the node that computes it into one"
        return f"{quote(key)} is not an initializer: {producer[0].place} computes it", hint
    if step.is_free_input(key):
        return f"{quote(key)} is an input, not an initializer", "a variable needs a value in the file"
    if key in step.subject.homes:
        other = step.subject.homes[key]
        hint = "keep state that several steps share in `graph.initializer`"
        return f"{quote(key)} belongs to training_info[{other}].algorithm, which this step does not see", hint
    names = (name for graph in step.graphs for name in graph.initializers)
    message = f"neither the inference graph nor this algorithm has an initializer {quote(key)}"
    return message, step.subject.suggest(key, names)


def keys_are_unique(step: Scope) -> Iterator[Finding]:
    for bindings in _binding_lists(step):
        for key, number in Counter(binding.key for binding in bindings.bindings).items():
            if number > 1:
                message = f"{quote(key)} is bound {number} times"
                yield make_finding("OW202", bindings.place(key), message, "keep one of the bindings")


def keys_are_not_inputs(step: Scope) -> Iterator[Finding]:
    for key in step.updates:
        if any(key in graph.inputs and key in graph.initializers for graph in step.graphs):
            message = f"{quote(key)} is also an input: a caller that feeds it overrides the trained value"
            hint = "remove it from the list of inputs (IR version 4 and newer need it only in `initializer`)"
            yield make_finding("OW210", step.binding("update_binding", key), message, hint)


def update_values(step: Scope) -> Iterator[Finding]:
    outputs, theirs = set(step.own.outputs), set(step.subject.inference.own.outputs)
    for key, value in step.updates.items():
        if not value or value in outputs:
            continue
        code, hint = "OW205", step.subject.suggest(value, iter(step.own.outputs))
        message = f"the algorithm has no output {quote(value)}"
        if value in theirs:
            code, hint = "OW206", "pass it through an `Identity` in the algorithm"
            message = f"{quote(value)} is an output of the inference graph only; IR.md requires one of the algorithm"
        elif step.defines(value):
            hint = "add it to the algorithm's outputs"
            message = f"{quote(value)} is computed, but not an output of the algorithm"
        yield make_finding(code, step.binding("update_binding", key), message, hint)


def initial_values(step: Scope) -> Iterator[Finding]:
    bindings = _binding_lists(step)[0]
    graph = bindings.source.own
    if graph.is_empty:
        return  # OW302 reports bindings without a graph
    outputs = set(graph.outputs)
    for key, value in step.resets.items():
        if value and value not in outputs:
            computed = "is computed, but not an output" if graph.defines(value) else "is not an output"
            hint = step.subject.suggest(value, iter(graph.outputs))
            message = f"{quote(value)} {computed} of the initialization graph"
            yield make_finding("OW304", bindings.place(key), message, hint)


def types_agree(step: Scope) -> Iterator[Finding]:
    for bindings, pairs in zip(_binding_lists(step), (step.resets, step.updates), strict=True):
        for key, value in pairs.items():
            variable = step.types.get(key) if step.initializer(key) is not None else None
            new = bindings.source.types.get(value)
            if variable is None or new is None:
                continue
            if variable.elem != new.elem or not variable.fits(new):
                code = bindings.wrong_type if variable.elem != new.elem else bindings.wrong_shape
                yield make_finding(code, bindings.place(key), f"the variable is {variable}, {quote(value)} is {new}")


def values_differ(step: Scope) -> Iterator[Finding]:
    """Report one output for two variables: these are always equal. Slots may start alike."""
    keys: dict[str, list[str]] = {}
    for key, value in step.updates.items():
        if value:
            keys.setdefault(value, []).append(key)
    for value, sharing in keys.items():
        if len(sharing) > 1:
            location = step.binding("update_binding", sharing[1])
            message = f"{quote(value)} is assigned to {listing(sharing)}: they will always be equal"
            yield make_finding("OW211", location, message)


def updates_change(step: Scope) -> Iterator[Finding]:
    for key, value in step.updates.items():
        if key == value and step.initializer(key) is not None:
            location = step.binding("update_binding", key)
            yield make_finding("OW212", location, f"{quote(key)} is assigned to itself", "remove the binding")


def bound_by_one_step(subject: CheckedModel) -> Iterator[Finding]:
    updates, resets = ([getattr(step, name) for step in subject.steps] for name in ("updates", "resets"))
    yield from _bound_again(subject, "OW203", "update_binding", "updated", updates)
    yield from _bound_again(subject, "OW204", "initialization_binding", "initialized", resets)


def _bound_again(
    subject: CheckedModel, code: str, field: str, done: str, maps: list[dict[str, str]]
) -> Iterator[Finding]:
    first: dict[str, int] = {}
    for i, pairs in enumerate(maps):
        for key in pairs:
            if key in subject.inference.own.initializers and first.setdefault(key, i) != i:
                message = f"{quote(key)} is also {done} by training_info[{first[key]}]"
                hint = "correct only if both are meant to run in this order"
                yield make_finding(code, subject.steps[i].binding(field, key), message, hint)


# ---- state -----------------------------------------------------------------------------------------------------------


def optimizer_results_are_bound(step: Scope) -> Iterator[Finding]:
    bound = set(step.updates.values())
    for node in step.own.nodes:
        if not node.is_training(*SLOTS):
            continue
        for i, name in enumerate(node.outputs):
            if name and name not in bound and not step.read_by(name):
                what = f"the new value of {quote(old)}" if (old := node.updates(i)) else "a new value"
                message = f"{quote(name)}, {what}, is assigned to nothing"
                yield make_finding("OW213", node.place, message, "bind it to its variable")


def variables_are_not_swapped(step: Scope) -> Iterator[Finding]:
    for key, value in step.updates.items():
        node, output = step.producer(value) or (None, 0)
        old = node.updates(output) if node else None
        if node and old and old != key and step.initializer(old) is not None:
            message = f"{quote(key)} is assigned {quote(value)}, which is the new value of {quote(old)} ({node.place})"
            yield make_finding("OW219", step.binding("update_binding", key), message)


def outputs_are_used(step: Scope) -> Iterator[Finding]:
    """Report larger unbound outputs: losses and metrics are scalars, others may lack a binding."""
    bound = set(step.updates.values())
    for name in dict.fromkeys(step.own.outputs):
        tensor_type = step.types.get(name)
        produced = step.own.producers.get(name)
        if name in bound or produced is None or produced[0].is_training(*SLOTS):
            continue
        if tensor_type is not None and tensor_type.has_one_element is False:
            location = f'{step.own.place}.output["{bare(name)}"]'
            yield make_finding("OW214", location, f"{tensor_type} is returned to the caller and bound to no variable")


def steps_do_something(step: Scope) -> Iterator[Finding]:
    location = f"training_info[{step.step}]"
    initialization = step.initialization
    if step.own.is_empty and initialization.own.is_empty and not step.updates and not step.resets:
        yield make_finding("OW217", location, "the entry is empty", "remove it")
    elif not step.updates:
        yield make_finding("OW218", location, "the step updates nothing: it evaluates, or only initializes")


def state_is_updated(subject: CheckedModel) -> Iterator[Finding]:
    for step in subject.steps:
        for key in step.resets:
            updated_names = step.updates if key in step.own.initializers else subject.updated
            if key not in updated_names and step.initializer(key) is not None:
                location = step.binding("initialization_binding", key)
                message = f"{quote(key)} is initialized, but no update binding changes it"
                yield make_finding("OW215", location, message, "bind its new value, or remove this binding")


def state_is_initialized(subject: CheckedModel) -> Iterator[Finding]:
    reset = {key for step in subject.steps for key in step.resets}
    for step in subject.steps:
        for key in step.updates:
            initialized_names = step.resets if key in step.own.initializers else reset
            if key not in initialized_names and step.initializer(key) is not None:
                location = step.binding("update_binding", key)
                message = f"{quote(key)} has no initialization binding: a reset leaves it at the value in the file"
                yield make_finding("OW216", location, message, "add an initialization binding")


# ---- initialization --------------------------------------------------------------------------------------------------


_RANDOM = {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial", "Bernoulli"}


def no_inputs(step: Scope) -> Iterator[Finding]:
    graph = step.initialization.own
    if graph.inputs:
        message = f"the graph has inputs: {listing(graph.inputs)}; an initialization takes none"
        hint = "turn them into initializers of the initialization graph"
        yield make_finding("OW301", f"{graph.place}.input", message, hint)


def not_omitted(step: Scope) -> Iterator[Finding]:
    graph = step.initialization.own
    if graph.is_empty and step.resets:
        location = f"training_info[{step.step}].initialization_binding"
        message = f"{listing(step.resets)} should be initialized, but the step has no initialization graph"
        yield make_finding("OW302", location, message)


def outputs_are_bound(step: Scope) -> Iterator[Finding]:
    graph = step.initialization.own
    bound = set(step.resets.values())
    for name in dict.fromkeys(graph.outputs):
        if name not in bound:
            location = f'{graph.place}.output["{bare(name)}"]'
            message = "no initialization binding assigns this output"
            yield make_finding("OW307", location, message, "bind it, or remove it")
    if graph.nodes and not graph.outputs:
        yield make_finding("OW307", graph.place, "the graph computes values, but returns none")


def check_seeds(step: Scope) -> Iterator[Finding]:
    for site in step.initialization.own.sites:
        node = site.node
        if domain_of(node) == "" and node.op_type in _RANDOM and attribute(node, "seed") is None:
            hint = "set the attribute `seed` to reproduce them"
            yield make_finding("OW308", site.place, "each reset draws other numbers", hint)


MODEL_RULES = (bound_by_one_step, state_is_updated, state_is_initialized)
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
    optimizer_results_are_bound,
    variables_are_not_swapped,
    outputs_are_used,
    steps_do_something,
    no_inputs,
    not_omitted,
    outputs_are_bound,
    check_seeds,
)
