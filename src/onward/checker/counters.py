"""Rules about T, the count of updates that an optimizer operator is given (OW510, OW511)."""

from __future__ import annotations

from collections.abc import Iterator

from onnx import TensorProto

from onward.checker.findings import Finding, make_finding, quote
from onward.checker.optimizers import optimizers
from onward.checker.view.flow import upstream
from onward.checker.view.graphs import Node, attribute
from onward.checker.view.scope import Scope
from onward.checker.view.shapes import count


def adam_counts_from_one(step: Scope) -> Iterator[Finding]:
    for node in optimizers(step):
        if node.op != "Adam" or len(node.args) < 2:
            continue
        counter = _behind_identity(step, node.args[1])
        if counter in step.updates and _initial(step, counter) == 0:
            yield make_finding(
                "OW510",
                node.place,
                f"T is {quote(counter)}, which starts at 0: the first steps lack their bias correction",
                "give Adam the counter after it is increased",
            )


def count_advances(step: Scope) -> Iterator[Finding]:
    for node in optimizers(step):
        if len(node.args) < 2 or not step.defines(node.args[1]) or not _depends_on_count(node):
            continue
        sources = upstream(step, [node.args[1]])
        if not any(name in step.updates or step.is_free_input(name) for name in sources):
            message = f"T, {quote(node.args[1])}, is the same in every step"
            yield make_finding(
                "OW511", node.place, message, "compute it from a counter that an update binding increases"
            )


def _depends_on_count(node: Node) -> bool:
    """Adagrad without decay, and Momentum with beta 1, do the same for every T."""
    attr = attribute(node.proto, {"Adagrad": "decay_factor", "Momentum": "beta"}.get(node.op, ""))
    value = attr.f if attr is not None else 0.0
    return node.op == "Adam" or value != (0.0 if node.op == "Adagrad" else 1.0)


def _behind_identity(scope: Scope, name: str) -> str:
    seen = {name}
    while (producer := scope.producer(name)) and producer[0].op == "Identity" and producer[0].args:
        scope.budget.spend(1)
        name = producer[0].args[0]
        if name in seen:
            break
        seen.add(name)
    return name


def _initial(step: Scope, name: str) -> int | None:
    """The value with which a counter starts: what the initialization gives it, else what the file holds."""
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


STEP_RULES = (adam_counts_from_one, count_advances)
