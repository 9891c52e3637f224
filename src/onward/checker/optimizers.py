"""Rules about the operators Adagrad, Momentum and Adam (OW501 to OW509, OW512)."""

from __future__ import annotations

from collections.abc import Iterator

from onnx import TensorProto

from onward.checker.findings import Finding, listing, make_finding, quote
from onward.checker.view.graphs import SLOTS, Node, attribute
from onward.checker.view.scope import Scope
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


def optimizers(scope: Scope) -> Iterator[Node]:
    return (node for node in scope.own.nodes if node.is_training(*SLOTS))


def known_operators(scope: Scope) -> Iterator[Finding]:
    known = (*SLOTS, "Gradient")
    for site in scope.own.sites:
        op = site.node.op_type
        if site.node.domain == TRAINING_DOMAIN and op not in known and scope.subject.function(site.node) is None:
            hint = scope.subject.near(op, iter(known))
            yield make_finding("OW501", site.place, f"{quote(TRAINING_DOMAIN)} has no operator {quote(op)}", hint)


def arity(scope: Scope) -> Iterator[Finding]:
    for node in optimizers(scope):
        group = 2 + SLOTS[node.op]
        number, rest = divmod(len(node.args) - 2, group)
        if number < 1 or rest:
            message = f"{len(node.args)} inputs; it takes 2, and {group} for each tensor that it updates"
            yield make_finding("OW502", node.place, message, f"the order is {_LAYOUT[node.op]}")
        elif not all(node.args):
            yield make_finding(
                "OW502", node.place, "an input is left out; all are needed", f"the order is {_LAYOUT[node.op]}"
            )
        elif len(node.outputs) != (wanted := number * (group - 1)):
            message = f"{len(node.outputs)} outputs; for {number} tensors there are {wanted}"
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
            yield make_finding(
                "OW506", node.place, f"R, {quote(node.args[0])}, is {rate}; it must be a float or double scalar"
            )
        if number is not None and (number.elem != TensorProto.INT64 or number.is_scalar is False):
            yield make_finding(
                "OW507", node.place, f"T, {quote(node.args[1])}, is {number}; it must be an int64 scalar"
            )


def tuples_agree(scope: Scope) -> Iterator[Finding]:
    for node in optimizers(scope):
        number = node.tuples or 0
        for i in range(number):
            x, *others = node.args[2 + i :: number]
            wanted = scope.types.get(x)
            if wanted is None:
                continue
            if wanted.elem not in (TensorProto.FLOAT, TensorProto.DOUBLE):
                yield make_finding(
                    "OW508", node.place, f"{quote(x)} is {wanted}; {node.op} updates float and double only"
                )
                continue
            for name, letter in zip(others, f"G{_SLOT_NAMES[node.op]}", strict=False):
                given = scope.types.get(name)
                if given is None or (given.elem == wanted.elem and given.fits(wanted)):
                    continue
                code = "OW508" if given.elem != wanted.elem else "OW509"
                message = f"{quote(x)} is {wanted}, but its {letter}, {quote(name)}, is {given}"
                yield make_finding(code, node.place, message, f"the order is {_LAYOUT[node.op]}")


def coefficients(scope: Scope) -> Iterator[Finding]:
    for node in optimizers(scope):
        for name, (low, high) in _RANGES[node.op].items():
            attr = attribute(node.proto, name)
            if attr is not None and not low <= attr.f < high:
                yield make_finding(
                    "OW512", node.place, f"`{name}` is {attr.f:g}; it should be at least {low:g} and below {high:g}"
                )


SCOPE_RULES = (known_operators, arity, needed_attributes, mode, rate_and_count, tuples_agree, coefficients)
