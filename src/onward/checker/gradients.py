"""Rules about the form of Gradient nodes: names, numbers, types (OW401 to OW407, OW413, OW414, OW416, OW417)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from onnx import AttributeProto

from onward.checker.findings import Finding, listing, make_finding, quote
from onward.checker.view.graphs import attribute
from onward.checker.view.scope import Scope, Subject
from onward.model.core import TRAINING_DOMAIN


def attributes(scope: Scope) -> Iterator[Finding]:
    for gradient in scope.gradients:
        node = gradient.node.proto
        if not gradient.xs:
            yield make_finding(
                "OW401", gradient.node.place, _missing(attribute(node, "xs"), "xs", "the names to differentiate by")
            )
        if not gradient.y:
            yield make_finding(
                "OW402", gradient.node.place, _missing(attribute(node, "y"), "y", "the name to differentiate")
            )


def _missing(there: AttributeProto | None, name: str, what: str) -> str:
    return f"the attribute `{name}`, {what}, is {'missing' if there is None else 'empty or of the wrong type'}"


def names_exist(scope: Scope) -> Iterator[Finding]:
    for gradient in scope.gradients:
        lists = (("xs", gradient.xs), ("zs", gradient.zs), ("y", (gradient.y,) if gradient.y else ()))
        for attr, names in lists:
            for name in dict.fromkeys(names):
                if not scope.defines(name):
                    hint = scope.near(name) or "if another tool has changed the graph, refresh the training information"
                    message = f"`{attr}` names {quote(name)}, which is not in the graph"
                    yield make_finding("OW403", gradient.node.place, message, hint)


def one_input_each(scope: Scope) -> Iterator[Finding]:
    for gradient in scope.gradients:
        args, wanted = gradient.node.args, (*gradient.xs, *gradient.zs)
        if gradient.xs and len(args) != len(wanted):
            yield make_finding(
                "OW404",
                gradient.node.place,
                f"{len(args)} inputs for {len(gradient.xs)} names in `xs` and {len(gradient.zs)} in `zs`",
                "the inputs are the values of `xs`, then those of `zs`, in order",
            )
        elif gradient.xs and (skipped := [name for arg, name in zip(args, wanted, strict=True) if not arg]):
            yield make_finding("OW404", gradient.node.place, f"no value is given for {listing(skipped)}")


def few_enough_outputs(scope: Scope) -> Iterator[Finding]:
    for gradient in scope.gradients:
        if gradient.xs and len(gradient.node.outputs) > len(gradient.xs):
            yield make_finding(
                "OW405",
                gradient.node.place,
                f"{len(gradient.node.outputs)} outputs for {len(gradient.xs)} names in `xs`",
                "there is one output for each name in `xs`, and none for `zs`",
            )


def names_once(scope: Scope) -> Iterator[Finding]:
    for gradient in scope.gradients:
        for attr, names in (("xs", gradient.xs), ("zs", gradient.zs)):
            if twice := [name for name, number in Counter(names).items() if number > 1]:
                yield make_finding("OW406", gradient.node.place, f"`{attr}` names {listing(twice)} more than once")
        given = set(gradient.zs)
        if both := [name for name in dict.fromkeys(gradient.xs) if name in given]:
            message = f"{listing(both)} cannot be differentiated by (`xs`) and held constant (`zs`) at once"
            yield make_finding("OW407", gradient.node.place, message)


def floating_point(scope: Scope) -> Iterator[Finding]:
    for gradient in scope.gradients:
        for x in dict.fromkeys(gradient.xs):
            known = scope.types.get(x)
            if known is not None and not known.is_floating:
                yield make_finding(
                    "OW413", gradient.node.place, f"{quote(x)} in `xs` is {known}: there is no derivative by it"
                )
        known = scope.types.get(gradient.y)
        if known is not None and not known.is_floating:
            yield make_finding(
                "OW414", gradient.node.place, f"`y`, {quote(gradient.y)}, is {known}: it has no derivative"
            )


def inputs_fit_names(scope: Scope) -> Iterator[Finding]:
    """An input may differ from the tensor that it replaces, but not in type."""
    for gradient in scope.gradients:
        names = (*gradient.xs, *gradient.zs)
        if not gradient.xs or len(gradient.node.args) != len(names):
            continue  # nobody knows which stands for which
        for arg, name in zip(gradient.node.args, names, strict=True):
            given, named = scope.types.get(arg), scope.types.get(name)
            if given is not None and named is not None and given.elem != named.elem:
                message = f"{quote(arg)} is {given} and stands for {quote(name)}, which is {named}"
                yield make_finding(
                    "OW417", gradient.node.place, message, "are the inputs in the order of `xs`, then `zs`?"
                )


def on_top_level(subject: Subject) -> Iterator[Finding]:
    for call in subject.calls:
        hidden = "a function" if call.function else "a subgraph" if call.site.depth else None
        if hidden and call.node.op_type == "Gradient" and call.node.domain == TRAINING_DOMAIN:
            yield make_finding(
                "OW416",
                call.place,
                f"Gradient stands inside {hidden}; the standard does not say what its names mean there",
                "Onward reads them as any node would there; differentiate in the outermost graph to be sure",
            )


MODEL_RULES = (on_top_level,)
SCOPE_RULES = (
    attributes,
    names_exist,
    one_input_each,
    few_enough_outputs,
    names_once,
    floating_point,
    inputs_fit_names,
)
