"""Rules about Adagrad, Momentum and Adam (OW501 to OW509, OW512), and their update count T (OW510,
OW511).
"""

from __future__ import annotations

from collections.abc import Iterator

from onnx import TensorProto

from onward.checker.codes import Finding, listing, make_finding, quote
from onward.checker.graphs import SLOTS, NodeView, attribute, count
from onward.checker.scope import Scope, upstream
from onward.model.core import TRAINING_DOMAIN

_LAYOUT = {
    "Adagrad": "R, T, X.., G.., H.. -> X.., H..",
    "Momentum": "R, T, X.., G.., V.. -> X.., V..",
    "Adam": "R, T, X.., G.., V.., H.. -> X.., V.., H..",
}
_SLOT_NAMES = {"Adagrad": "H", "Momentum": "V", "Adam": "VH"}
_NEEDED = {"Momentum": ("alpha", "beta", "mode", "norm_coefficient")}
_RATIO, _POSITIVE = (0.0, 1.0), (0.0, float("inf"))
_RANGES = {
    "Adam": {"alpha": _RATIO, "beta": _RATIO, "epsilon": _POSITIVE, "norm_coefficient_post": _RATIO},
    "Adagrad": {"epsilon": _POSITIVE, "decay_factor": _POSITIVE},
    "Momentum": {"alpha": _RATIO},
}


def optimizers(scope: Scope) -> Iterator[NodeView]:
    return (node for node in scope.own.nodes if node.is_training(*SLOTS))


def known_operators(scope: Scope) -> Iterator[Finding]:
    operators = (*SLOTS, "Gradient")
    for site in scope.own.sites:
        op = site.node.op_type
        if site.node.domain == TRAINING_DOMAIN and op not in operators and scope.subject.function(site.node) is None:
            hint = scope.subject.suggest(op, iter(operators))
            yield make_finding("OW501", site.place, f"{quote(TRAINING_DOMAIN)} has no operator {quote(op)}", hint)


def arity(scope: Scope) -> Iterator[Finding]:
    for node in optimizers(scope):
        group = 2 + SLOTS[node.op]
        number, rest = divmod(len(node.args) - 2, group)
        if number < 1 or rest:
            message = f"{len(node.args)} inputs; it takes 2, and {group} for each tensor that it updates"
            yield make_finding("OW502", node.place, message, f"the order is {_LAYOUT[node.op]}")
        elif not all(node.args):
            message = "an input is left out; all are needed"
            yield make_finding("OW502", node.place, message, f"the order is {_LAYOUT[node.op]}")
        elif len(node.outputs) != (expected := number * (group - 1)):
            message = f"{len(node.outputs)} outputs; for {number} tensors there are {expected}"
            yield make_finding("OW503", node.place, message, f"the order is {_LAYOUT[node.op]}")


def needed_attributes(scope: Scope) -> Iterator[Finding]:
    for node in optimizers(scope):
        if missing := [name for name in _NEEDED.get(node.op, ()) if attribute(node.proto, name) is None]:
            yield make_finding("OW504", node.place, f"the attribute {listing(missing)} is missing and has no default")


def mode(scope: Scope) -> Iterator[Finding]:
    for node in optimizers(scope):
        attr = attribute(node.proto, "mode") if node.op == "Momentum" else None
        if attr is not None and (value := attr.s.decode("utf-8", "replace")) not in ("standard", "nesterov"):
            yield make_finding("OW505", node.place, f"`mode` is {quote(value)}; it must be `standard` or `nesterov`")


def rate_and_count(scope: Scope) -> Iterator[Finding]:
    for node in optimizers(scope):
        rate, number = (scope.types.get(name) for name in (*node.args, "", "")[:2])
        if rate is not None and (rate.elem not in (TensorProto.FLOAT, TensorProto.DOUBLE) or rate.is_scalar is False):
            message = f"R, {quote(node.args[0])}, is {rate}; it must be a float or double scalar"
            yield make_finding("OW506", node.place, message)
        if number is not None and (number.elem != TensorProto.INT64 or number.is_scalar is False):
            message = f"T, {quote(node.args[1])}, is {number}; it must be an int64 scalar"
            yield make_finding("OW507", node.place, message)


def tuples_agree(scope: Scope) -> Iterator[Finding]:
    for node in optimizers(scope):
        number = node.tuples or 0
        for i in range(number):
            x, *others = node.args[2 + i :: number]
            expected = scope.types.get(x)
            if expected is None:
                continue
            if expected.elem not in (TensorProto.FLOAT, TensorProto.DOUBLE):
                message = f"{quote(x)} is {expected}; {node.op} updates float and double only"
                yield make_finding("OW508", node.place, message)
                continue
            for name, letter in zip(others, f"G{_SLOT_NAMES[node.op]}", strict=False):
                actual = scope.types.get(name)
                if actual is None or (actual.elem == expected.elem and actual.fits(expected)):
                    continue
                code = "OW508" if actual.elem != expected.elem else "OW509"
                message = f"{quote(x)} is {expected}, but its {letter}, {quote(name)}, is {actual}"
                yield make_finding(code, node.place, message, f"the order is {_LAYOUT[node.op]}")


def coefficients(scope: Scope) -> Iterator[Finding]:
    for node in optimizers(scope):
        for name, (low, high) in _RANGES[node.op].items():
            attr = attribute(node.proto, name)
            if attr is not None and not low <= attr.f < high:
                message = f"`{name}` is {attr.f:g}; it should be at least {low:g} and below {high:g}"
                yield make_finding("OW512", node.place, message)


SCOPE_RULES = (known_operators, arity, needed_attributes, mode, rate_and_count, tuples_agree, coefficients)


# ---- the count of updates --------------------------------------------------------------------------------------------


def adam_counts_from_one(step: Scope) -> Iterator[Finding]:
    for node in optimizers(step):
        if node.op != "Adam" or len(node.args) < 2:
            continue
        counter = node.args[1]
        seen = {counter}
        while (producer := step.producer(counter)) and producer[0].op == "Identity" and producer[0].args:
            step.budget.spend(1)
            counter = producer[0].args[0]
            if counter in seen:
                break
            seen.add(counter)
        if counter in step.updates and _initial(step, counter) == 0:
            message = f"T is {quote(counter)}, which starts at 0: the first steps lack their bias correction"
            yield make_finding("OW510", node.place, message, "give Adam the counter after it is increased")


def count_advances(step: Scope) -> Iterator[Finding]:
    for node in optimizers(step):
        if len(node.args) < 2 or not step.defines(node.args[1]) or not _depends_on_count(node):
            continue
        sources = upstream(step, [node.args[1]])
        if not any(name in step.updates or step.is_free_input(name) for name in sources):
            message = f"T, {quote(node.args[1])}, is the same in every step"
            hint = "compute it from a counter that an update binding increases"
            yield make_finding("OW511", node.place, message, hint)


def _depends_on_count(node: NodeView) -> bool:
    """True unless T has no effect: Adagrad without decay, and Momentum with beta 1."""
    attr = attribute(node.proto, {"Adagrad": "decay_factor", "Momentum": "beta"}.get(node.op, ""))
    value = attr.f if attr is not None else 0.0
    return node.op == "Adam" or value != (0.0 if node.op == "Adagrad" else 1.0)


def _initial(step: Scope, name: str) -> int | None:
    """Return the first value of a counter: from the initialization, else from the file."""
    graph, value = step.initialization.own, step.resets.get(name, "")
    if value in graph.initializers:
        return _integer(graph.initializers[value])
    if (producer := graph.producers.get(value)) and producer[0].op in ("Constant", "ConstantOfShape"):
        node = producer[0].proto
        tensor, number = attribute(node, "value"), attribute(node, "value_int")
        return _integer(tensor.t) if tensor is not None else number.i if number is not None else None
    stored = step.initializer(name)
    return _integer(stored) if stored is not None and not value else None


def _integer(tensor: TensorProto) -> int | None:
    if tensor.data_type != TensorProto.INT64 or tensor.data_location == TensorProto.EXTERNAL or count(tensor.dims) != 1:
        return None
    if len(tensor.int64_data) == 1:
        return tensor.int64_data[0]
    return int.from_bytes(tensor.raw_data, "little", signed=True) if len(tensor.raw_data) == 8 else None


SOUND_STEP_RULES = (adam_counts_from_one, count_advances)
