"""Rules about model-local functions and their calls (OW606 to OW615)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

from onnx import FunctionProto, defs

from onward.checker.codes import Finding, bare, listing, make_finding, quote
from onward.checker.graphs import walk
from onward.checker.scope import CheckedModel, FunctionCall, FunctionKey, function_place
from onward.standard import domain_of

OWN_DOMAIN = "onward"  # holds functions only: an operator there without a body is always a mistake
MOST_NODES, MOST_CYCLES = 1_000_000, 10


@cache
def standard_domains() -> frozenset[str]:
    return frozenset(schema.domain for schema in defs.get_all_schemas())


def key_of(function: FunctionProto) -> FunctionKey:
    return function.domain, function.name, function.overload


def _calls(subject: CheckedModel) -> Iterator[tuple[FunctionCall, FunctionProto]]:
    for call in subject.calls:
        function = subject.function(call.node)
        if function is not None:
            yield call, function


def check_calls(subject: CheckedModel) -> Iterator[Finding]:
    own = {OWN_DOMAIN, *(domain for domain, _, _ in subject.functions)}
    for call in subject.calls:
        domain, op = domain_of(call.node), call.node.op_type
        if domain in standard_domains() or domain not in call.opsets or subject.function(call.node) is not None:
            continue
        if domain in own:
            hint = subject.suggest(op, (name for other, name, _ in subject.functions if other == domain))
            hint = hint or "a tool that inlines or drops functions may have removed it"
            message = f"the model has no function {quote(op)} in the domain {quote(domain)}"
            yield make_finding("OW607", call.place, message, hint)
        else:
            message = f"{quote(op)} of the domain {quote(domain)} is neither standard nor a function of the model"
            hint = "only a runtime that brings this operator can run the model"
            yield make_finding("OW606", call.place, message, hint)


def calls_fit(subject: CheckedModel) -> Iterator[Finding]:
    for call, function in _calls(subject):
        name = quote(f"{function.domain}.{function.name}")
        for what, actual, declared in (
            ("inputs", len(call.node.input), len(function.input)),
            ("outputs", len(call.node.output), len(function.output)),
        ):
            if actual > declared:
                yield make_finding("OW609", call.place, f"the call has {actual} {what}, {name} has {declared}")
        if len(call.node.input) < len(function.input):
            missing = listing(function.input[len(call.node.input) :])
            yield make_finding("OW610", call.place, f"the call gives no value for {missing} of {name}")


def attributes_fit(subject: CheckedModel) -> Iterator[Finding]:
    for call, function in _calls(subject):
        stated = {attr.name for attr in call.node.attribute}
        needed, optional = dict.fromkeys(function.attribute), {attr.name for attr in function.attribute_proto}
        if missing := [name for name in needed if name not in stated]:
            message = f"the call lacks {listing(missing)}, which `{bare(function.name)}` needs"
            yield make_finding("OW611", call.place, message)
        if unknown := [
            attr.name for attr in call.node.attribute if attr.name not in needed and attr.name not in optional
        ]:
            message = f"`{bare(function.name)}` has no attribute {listing(unknown)}: it is ignored"
            yield make_finding("OW612", call.place, message)


def defined_once(subject: CheckedModel) -> Iterator[Finding]:
    seen: set[FunctionKey] = set()
    for function in subject.proto.functions:
        if key_of(function) in seen:
            yield make_finding("OW613", function_place(function), "the model defines this function more than once")
        seen.add(key_of(function))


def not_recursive(subject: CheckedModel) -> Iterator[Finding]:
    for path in _expansion(subject).cycles:
        names = " -> ".join(quote(f"{domain}.{name}") for domain, name, _ in path[:6])
        yield make_finding("OW608", function_place(subject.functions[path[0]]), f"the function calls itself: {names}")


def small_enough(subject: CheckedModel) -> Iterator[Finding]:
    """Report huge expansions: functions that call functions twice double with each level."""
    huge = (key for key, size in _expansion(subject).sizes.items() if size > MOST_NODES)
    if key := next(huge, None):  # its callers are huge too
        message = f"expanded, the function has more than {MOST_NODES:,} nodes"
        yield make_finding("OW614", function_place(subject.functions[key]), message)


def check_use(subject: CheckedModel) -> Iterator[Finding]:
    called = {key_of(function) for _, function in _calls(subject)}
    for key, function in subject.functions.items():
        if key not in called:
            message = "nothing calls this function"
            yield make_finding("OW615", function_place(function), message, "remove it, unless tools need it")


class _Expansion(NamedTuple):
    cycles: list[list[FunctionKey]]
    sizes: dict[FunctionKey, int]
    """Number of nodes of each function with all calls expanded; bounded."""


def _expansion(subject: CheckedModel) -> _Expansion:
    """Return cycles and sizes of the call graph, callees first; each cycle loses a call."""
    calls = {}
    for key, function in subject.functions.items():
        called = (subject.function(site.node) for site in walk(function.node, ""))
        calls[key] = [key_of(function) for function in called if function is not None]
    result, waiting = _Expansion([], {}), {key: set(called) for key, called in calls.items()}
    order: list[FunctionKey] = []
    while not order and waiting and len(result.cycles) < MOST_CYCLES:
        try:
            order = [*TopologicalSorter(waiting).static_order()]
        except CycleError as error:
            *_, callee, caller = circle = error.args[1]
            result.cycles.append([caller, *reversed(circle[1:-1])])
            waiting[caller].discard(callee)
    for key in order:
        inner = sum(1 + result.sizes.get(callee, 0) for callee in calls[key])
        result.sizes[key] = min(inner + len(subject.functions[key].node), 2 * MOST_NODES)
    return result


def can_expand(subject: CheckedModel) -> bool:
    """True if shape inference, which expands functions, ends."""
    expansion = _expansion(subject)
    return not expansion.cycles and all(size <= MOST_NODES for size in expansion.sizes.values())


MODEL_RULES = (check_calls, calls_fit, attributes_fit, defined_once, not_recursive, small_enough, check_use)
