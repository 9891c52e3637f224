"""Rules about Gradient nodes: names, counts and types (OW401 to OW407, OW413, OW414, OW416, OW417),
and dependencies (OW408 to OW412, OW415, OW418 to OW420).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from onnx import AttributeProto

from onward.checker.codes import REFRESH, Finding, listing, make_finding, quote
from onward.checker.graphs import FLOATING, NodeView, attribute
from onward.checker.scope import CheckedModel, Gradient, Inputs, Scope, leaves, upstream
from onward.model.core import TRAINING_DOMAIN
from onward.rules.quantization import MOVING, makes_rounded
from onward.rules.registry import has_gradient


def attributes(scope: Scope) -> Iterator[Finding]:
    for gradient in scope.gradients:
        node = gradient.node.proto
        if not gradient.xs:
            message = _missing(attribute(node, "xs"), "xs", "the names to differentiate by")
            yield make_finding("OW401", gradient.place, message)
        if not gradient.y:
            message = _missing(attribute(node, "y"), "y", "the name to differentiate")
            yield make_finding("OW402", gradient.place, message)


def _missing(attr: AttributeProto | None, name: str, what: str) -> str:
    return f"the attribute `{name}`, {what}, is {'missing' if attr is None else 'empty or of the wrong type'}"


def names_exist(scope: Scope) -> Iterator[Finding]:
    for gradient in scope.gradients:
        lists = (("xs", gradient.xs), ("zs", gradient.zs), ("y", (gradient.y,) if gradient.y else ()))
        for attr, names in lists:
            for name in dict.fromkeys(names):
                if not scope.defines(name):
                    hint = scope.suggest(name) or REFRESH
                    message = f"`{attr}` names {quote(name)}, which is not in the graph"
                    yield make_finding("OW403", gradient.place, message, hint)


def one_input_each(scope: Scope) -> Iterator[Finding]:
    for gradient in scope.gradients:
        args, names = gradient.node.args, (*gradient.xs, *gradient.zs)
        if gradient.xs and len(args) != len(names):
            message = f"{len(args)} inputs for {len(gradient.xs)} names in `xs` and {len(gradient.zs)} in `zs`"
            hint = "the inputs are the values of `xs`, then those of `zs`, in order"
            yield make_finding("OW404", gradient.place, message, hint)
        elif gradient.xs and (skipped := [name for arg, name in zip(args, names, strict=True) if not arg]):
            yield make_finding("OW404", gradient.place, f"the inputs for {listing(skipped)} are empty")


def few_enough_outputs(scope: Scope) -> Iterator[Finding]:
    for gradient in scope.gradients:
        if gradient.xs and len(gradient.node.outputs) > len(gradient.xs):
            message = f"{len(gradient.node.outputs)} outputs for {len(gradient.xs)} names in `xs`"
            hint = "there is one output for each name in `xs`, and none for `zs`"
            yield make_finding("OW405", gradient.place, message, hint)


def names_once(scope: Scope) -> Iterator[Finding]:
    for gradient in scope.gradients:
        for attr, names in (("xs", gradient.xs), ("zs", gradient.zs)):
            if twice := [name for name, number in Counter(names).items() if number > 1]:
                yield make_finding("OW406", gradient.place, f"`{attr}` names {listing(twice)} more than once")
        constants = set(gradient.zs)
        if both := [name for name in dict.fromkeys(gradient.xs) if name in constants]:
            message = f"{listing(both)} cannot be variable (`xs`) and constant (`zs`) at once"
            yield make_finding("OW407", gradient.place, message)


def floating_point(scope: Scope) -> Iterator[Finding]:
    for gradient in scope.gradients:
        for x in dict.fromkeys(gradient.xs):
            tensor_type = scope.types.get(x)
            if tensor_type is not None and not tensor_type.is_floating:
                message = f"{quote(x)} in `xs` is {tensor_type}, not floating-point"
                yield make_finding("OW413", gradient.place, message)
        tensor_type = scope.types.get(gradient.y)
        if tensor_type is not None and not tensor_type.is_floating:
            message = f"`y`, {quote(gradient.y)}, is {tensor_type}, not floating-point"
            yield make_finding("OW414", gradient.place, message)


def inputs_fit_names(scope: Scope) -> Iterator[Finding]:
    """Report an input whose type differs from that of the tensor that it replaces."""
    for gradient in scope.gradients:
        names = (*gradient.xs, *gradient.zs)
        if not gradient.xs or len(gradient.node.args) != len(names):
            continue  # OW404 reports the counts
        for arg, name in zip(gradient.node.args, names, strict=True):
            input_type, name_type = scope.types.get(arg), scope.types.get(name)
            if input_type is not None and name_type is not None and input_type.elem != name_type.elem:
                message = f"{quote(arg)} is {input_type} and stands for {quote(name)}, which is {name_type}"
                yield make_finding("OW417", gradient.place, message, "are the inputs in the order of `xs`, then `zs`?")


def on_top_level(subject: CheckedModel) -> Iterator[Finding]:
    for call in subject.calls:
        hidden = "a function" if call.function else "a subgraph" if call.site.depth else None
        if hidden and call.node.op_type == "Gradient" and call.node.domain == TRAINING_DOMAIN:
            message = f"Gradient inside {hidden}: the standard does not say what its names mean there"
            hint = "differentiate in the outermost graph; Onward takes the names that a node there can read"
            yield make_finding("OW416", call.place, message, hint)


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
    """Return the inputs of a node that gradients flow into, and the predicate for values."""
    rounded: set[str] = set()  # integers that have a gradient
    for node in (node for graph in scope.graphs for node in graph.nodes):
        moved = node.domain == "" and node.op in MOVING and not rounded.isdisjoint(node.args)
        if moved or makes_rounded(node.domain, node.op):
            rounded.update(node.outputs)

    def flows(name: str) -> bool:
        """True unless the type is an integer, Boolean or string that was not rounded from floats."""
        tensor_type = scope.types.get(name)
        return tensor_type is None or tensor_type.is_floating or name in rounded

    def inputs(node: NodeView, output: int) -> Iterable[str]:
        if node.domain == "" and node.op == "Cast" and node.args and node.args[0] not in rounded:
            to = attribute(node.proto, "to")
            if to is not None and to.i not in FLOATING:
                return ()
        reached = {name for i, name in enumerate(node.args) if has_gradient(node.domain, node.op, i)}
        return (name for name in node.behind(output) if name in reached or name not in node.args)

    return inputs, flows


def _is_sound(scope: Scope, gradient: Gradient) -> bool:
    """True if names of the Gradient can be followed; otherwise other rules report it."""
    return bool(gradient.xs) and scope.defines(gradient.y)


def _inputs_of_gradient(gradient: Gradient) -> set[str]:
    return {*gradient.xs, *gradient.zs}


def paths(scope: Scope) -> Iterator[Finding]:
    inputs, flows = _flow(scope)
    for gradient in scope.gradients:
        if not _is_sound(scope, gradient):
            continue
        variables, y = _inputs_of_gradient(gradient), gradient.y
        reached = upstream(scope, [y], stop=variables)
        if any(name in reached for name in gradient.node.outputs if name):
            message = f"`y`, {quote(y)}, is computed from the gradient itself"
            hint = "differentiate the loss, not what follows from its gradient"
            yield make_finding("OW415", gradient.place, message, hint)
            continue
        if not flows(y):
            continue  # OW414 reports it
        alive = upstream(scope, [y], stop=variables, inputs=inputs, passes=flows)
        for x in dict.fromkeys(gradient.xs):
            if not scope.defines(x) or not flows(x):
                continue  # OW403 or OW413 reports it
            if x not in reached:
                message = f"{quote(y)} does not depend on {quote(x)}: the gradient is zero"
                yield make_finding("OW408", gradient.place, message, f"take {quote(x)} out of `xs`, or connect it")
            elif x not in alive:
                yield _zero_derivative(scope, gradient, x, set(reached), set(alive))
        others = [name for name in leaves(scope, reached) if name not in variables and scope.is_free_input(name)]
        if others:
            message = f"{quote(y)} also depends on the input {listing(others)}, which is neither in `xs` nor in `zs`"
            yield make_finding("OW412", gradient.place, message, "name it in `zs`, with its value as an input")


def _zero_derivative(scope: Scope, gradient: Gradient, x: str, reached: set[str], alive: set[str]) -> Finding:
    """Return a finding with the operators at which all paths from x to y end."""
    ends: dict[str, None] = {}
    seen, todo = {x}, [x]
    while todo:
        for node in scope.read_by(todo.pop()):
            scope.budget.spend(1)
            on_path = [name for name in node.outputs if name in reached]
            if any(name in alive for name in on_path):
                ends[node.op] = None
            for name in on_path:
                if name not in seen and name not in alive:
                    seen.add(name)
                    todo.append(name)
    message = f"every path from {quote(x)} to {quote(gradient.y)} passes {listing(ends)}, where the derivative is zero"
    return make_finding("OW409", gradient.place, message, f"take {quote(x)} out of `xs`, or replace the operator")


def independent(scope: Scope) -> Iterator[Finding]:
    for gradient in scope.gradients:
        variables = _inputs_of_gradient(gradient)
        origins = [name for name in dict.fromkeys((*gradient.xs, *gradient.zs)) if scope.producer(name)]
        for name in origins:
            node, output = scope.producer(name) or (gradient.node, 0)
            # The nearest variables are enough: the loop reaches those behind them later.
            behind = upstream(scope, [read for read in node.behind(output) if read != name], stop=variables)
            if others := [other for other in behind if other in variables and other != name]:
                message = f"{quote(name)} is computed from {listing(others)}: the variables are not independent"
                hint = "leave out the one that follows from the others, or differentiate in two Gradient nodes"
                yield make_finding("OW410", gradient.place, message, hint)


def scalar(scope: Scope) -> Iterator[Finding]:
    for gradient in scope.gradients:
        y_type = scope.types.get(gradient.y)
        if y_type is not None and y_type.is_floating and y_type.has_one_element is False:
            message = f"`y`, {quote(gradient.y)}, is {y_type}, not a scalar: the gradient is that of its sum"
            yield make_finding("OW411", gradient.place, message, "reduce the loss to a scalar in the graph")


def results_are_used(scope: Scope) -> Iterator[Finding]:
    """Report unused gradients. A node, the caller, or another Gradient, by name, may use one."""
    used = {name for graph in scope.graphs for name in graph.outputs}
    if scope is scope.subject.inference:  # an algorithm may use what inference computes
        used.update(name for step in scope.subject.steps for name in step.own.readers)
    used.update(name for gradient in scope.gradients for name in (*gradient.xs, *gradient.zs, gradient.y))
    for gradient in scope.gradients:
        if unused := [x for x, name in gradient.results if name not in used and not scope.read_by(name)]:
            hint = "leave the name of that output empty"
            yield make_finding("OW418", gradient.place, f"the gradient of {listing(unused)} is not used", hint)


def gradients_serve_variables(step: Scope) -> Iterator[Finding]:
    for gradient in step.gradients:
        for x, name in gradient.results:
            if step.initializer(x) is not None and x not in step.subject.updated and step.read_by(name):
                message = f"the gradient of {quote(x)} is used, but no binding updates {quote(x)}"
                hint = "bind its new value, or take it out of `xs` to freeze it"
                yield make_finding("OW420", gradient.place, message, hint)


def parameters_get_gradients(step: Scope) -> Iterator[Finding]:
    """Report variables before the loss whose new value needs neither their gradient nor data."""
    sound = [gradient for gradient in step.gradients if _is_sound(step, gradient)]
    trained = {x for gradient in sound for x in gradient.xs}
    matters = upstream(step, [gradient.y for gradient in sound])
    results = {name: x for gradient in step.gradients for x, name in gradient.results}
    for key, value in step.updates.items():
        tensor_type = step.types.get(key)
        if key not in matters or tensor_type is None or not tensor_type.is_floating or not step.defines(value):
            continue

        def serves(name: str, key: str = key) -> bool:
            if key in trained:
                return results.get(name) == key
            return name in results or step.is_free_input(name)

        if not any(map(serves, upstream(step, [value], stop=results, until=serves, through_time=True))):
            reason = "not from its gradient" if key in trained else "neither from a gradient nor from data"
            message = f"the loss depends on {quote(key)}, but its new value {quote(value)} is computed {reason}"
            yield make_finding("OW419", step.binding("update_binding", key), message)


SOUND_SCOPE_RULES = (paths, independent, scalar, results_are_used)
SOUND_STEP_RULES = (gradients_serve_variables, parameters_get_gradients)
