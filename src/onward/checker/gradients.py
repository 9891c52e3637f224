"""Rules about Gradient nodes: names, numbers and types (OW401 to OW407, OW413, OW414, OW416, OW417), and dependencies
(OW408 to OW412, OW415, OW418 to OW420).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from onnx import AttributeProto

from onward.checker.codes import Finding, listing, make_finding, quote
from onward.checker.graphs import FLOATING, NodeView, attribute
from onward.checker.scope import CheckedModel, Gradient, Inputs, Scope, leaves, upstream
from onward.model.core import TRAINING_DOMAIN
from onward.rules.quantization import MOVING, makes_rounded
from onward.rules.registry import has_gradient


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
                    stale = "if another tool has changed the graph, refresh the training information"
                    hint = scope.suggest(name) or stale
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


def on_top_level(subject: CheckedModel) -> Iterator[Finding]:
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


# ---- paths to derivatives --------------------------------------------------------------------------------------------


def _flow(scope: Scope) -> tuple[Inputs, Callable[[str], bool]]:
    """Where gradients flow, by the table of derivatives: into which inputs of a node, and through which values."""
    rounded: set[str] = set()  # integers that have a gradient
    for node in (node for part in scope.parts for node in part.nodes):
        moved = node.domain == "" and node.op in MOVING and not rounded.isdisjoint(node.args)
        if moved or makes_rounded(node.domain, node.op):
            rounded.update(node.outputs)

    def flows(name: str) -> bool:
        """Not if it is known to be an integer, a truth value or a text, unless it stands for what was rounded."""
        known = scope.types.get(name)
        return known is None or known.is_floating or name in rounded

    def inputs(node: NodeView, output: int) -> Iterable[str]:
        if node.domain == "" and node.op == "Cast" and _is_cast_to_index(node) and node.args[0] not in rounded:
            return ()
        reached = {name for i, name in enumerate(node.args) if has_gradient(node.domain, node.op, i)}
        return (name for name in node.behind(output) if name in reached or name not in node.args)

    return inputs, flows


def _is_cast_to_index(node: NodeView) -> bool:
    to = attribute(node.proto, "to")
    return bool(node.args) and to is not None and to.i not in FLOATING


def _is_sound(scope: Scope, gradient: Gradient) -> bool:
    """Whether there is a graph to look at; if not, other rules have said so."""
    return bool(gradient.xs) and scope.defines(gradient.y)


def _inputs_of_gradient(gradient: Gradient) -> set[str]:
    return {*gradient.xs, *gradient.zs}


def paths(scope: Scope) -> Iterator[Finding]:
    inputs, flows = _flow(scope)
    for gradient in scope.gradients:
        if not _is_sound(scope, gradient):
            continue
        given, y = _inputs_of_gradient(gradient), gradient.y
        reached = upstream(scope, [y], stop=given)
        if any(name in reached for name in gradient.node.outputs if name):
            message = f"`y`, {quote(y)}, is computed from the gradient itself"
            yield make_finding(
                "OW415", gradient.node.place, message, "differentiate the loss, not what follows from its gradient"
            )
            continue
        if not flows(y):
            continue  # there is a rule for a y without derivative
        alive = upstream(scope, [y], stop=given, inputs=inputs, passes=flows)
        for x in dict.fromkeys(gradient.xs):
            if not scope.defines(x) or not flows(x):
                continue  # other rules say so
            if x not in reached:
                message = f"{quote(y)} does not depend on {quote(x)}: the gradient is zero"
                yield make_finding("OW408", gradient.node.place, message, f"take {quote(x)} out of `xs`, or connect it")
            elif x not in alive:
                yield _zero(scope, gradient, x, set(reached), set(alive))
        if strangers := [name for name in leaves(scope, reached) if name not in given and scope.is_free_input(name)]:
            yield make_finding(
                "OW412",
                gradient.node.place,
                f"{quote(y)} also depends on the input {listing(strangers)}, which is neither in `xs` nor in `zs`",
                "name it in `zs`, with its value as an input",
            )


def _zero(scope: Scope, gradient: Gradient, x: str, reached: set[str], alive: set[str]) -> Finding:
    """Name the operators at which the way from x to y ends."""
    ends: dict[str, None] = {}
    seen, todo = {x}, [x]
    while todo:
        for node in scope.read_by(todo.pop()):
            scope.budget.spend(1)
            on_the_way = [name for name in node.outputs if name in reached]
            if any(name in alive for name in on_the_way):
                ends[node.op] = None
            for name in on_the_way:
                if name not in seen and name not in alive:
                    seen.add(name)
                    todo.append(name)
    return make_finding(
        "OW409",
        gradient.node.place,
        f"every way from {quote(x)} to {quote(gradient.y)} passes {listing(ends)}, where the derivative is zero",
        f"take {quote(x)} out of `xs`, or replace the operator",
    )


def independent(scope: Scope) -> Iterator[Finding]:
    for gradient in scope.gradients:
        given = _inputs_of_gradient(gradient)
        origins = [name for name in dict.fromkeys((*gradient.xs, *gradient.zs)) if scope.producer(name)]
        for name in origins:
            node, output = scope.producer(name) or (gradient.node, 0)
            # Stopping at the nearest is enough: what lies behind them is looked at when their turn comes.
            behind = upstream(scope, [read for read in node.behind(output) if read != name], stop=given)
            if others := [other for other in behind if other in given and other != name]:
                yield make_finding(
                    "OW410",
                    gradient.node.place,
                    f"{quote(name)} is computed from {listing(others)}: the variables are not independent",
                    "leave out the one that follows from the others, or differentiate in two Gradient nodes",
                )


def scalar(scope: Scope) -> Iterator[Finding]:
    for gradient in scope.gradients:
        known = scope.types.get(gradient.y)
        if known is not None and known.is_floating and known.has_one_element is False:
            message = (
                f"`y`, {quote(gradient.y)}, is {known}, not a scalar: this is the gradient of the sum of its elements"
            )
            yield make_finding("OW411", gradient.node.place, message, "reduce the loss to a scalar in the graph")


def results_are_used(scope: Scope) -> Iterator[Finding]:
    """A gradient serves a node, the caller, or another Gradient, which names it in an attribute."""
    wanted = {name for part in scope.parts for name in part.outputs}
    if scope is scope.subject.inference:  # an algorithm may use what inference computes
        wanted.update(name for step in scope.subject.steps for name in step.own.readers)
    wanted.update(name for gradient in scope.gradients for name in (*gradient.xs, *gradient.zs, gradient.y))
    for gradient in scope.gradients:
        if unused := [x for x, name in gradient.results if name not in wanted and not scope.read_by(name)]:
            hint = "leave the name of that output empty"
            yield make_finding("OW418", gradient.node.place, f"the gradient of {listing(unused)} is not used", hint)


def gradients_serve_variables(step: Scope) -> Iterator[Finding]:
    for gradient in step.gradients:
        for x, name in gradient.results:
            if step.initializer(x) is not None and x not in step.subject.updated and step.read_by(name):
                yield make_finding(
                    "OW420",
                    gradient.node.place,
                    f"the gradient of {quote(x)} is used, but no binding updates {quote(x)}",
                    "bind its new value, or take it out of `xs` to freeze it",
                )


def parameters_get_gradients(step: Scope) -> Iterator[Finding]:
    """A variable on which the loss depends should be updated by its gradient, or by data, as running statistics are."""
    sound = [gradient for gradient in step.gradients if _is_sound(step, gradient)]
    trained = {x for gradient in sound for x in gradient.xs}
    matters = upstream(step, [gradient.y for gradient in sound])
    results = {name: x for gradient in step.gradients for x, name in gradient.results}
    for key, value in step.updates.items():
        known = step.types.get(key)
        if key not in matters or known is None or not known.is_floating or not step.defines(value):
            continue

        def serves(name: str, key: str = key) -> bool:
            if key in trained:
                return results.get(name) == key
            return name in results or step.is_free_input(name)

        if not any(map(serves, upstream(step, [value], stop=results, until=serves, through_time=True))):
            reason = "not from its gradient" if key in trained else "neither from a gradient nor from data"
            yield make_finding(
                "OW419",
                step.binding("update_binding", key),
                f"the loss depends on {quote(key)}, but its new value {quote(value)} is computed {reason}",
            )


SOUND_SCOPE_RULES = (paths, independent, scalar, results_are_used)
SOUND_STEP_RULES = (gradients_serve_variables, parameters_get_gradients)
