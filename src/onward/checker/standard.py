"""What onnx.checker and shape inference say, on inference, on combined graphs, on initializations (OW110 to OW114).

Theirs is the last word: on a graph in which the rules here have found an error, they are not heard, as they would say
the same less precisely. The types that they infer are used by all rules that compare types.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from google.protobuf.message import EncodeError
from onnx import GraphProto, ModelProto, TensorProto, ValueInfoProto

from onward.checker.findings import Finding, make_finding
from onward.checker.functions import can_expand
from onward.checker.tensors import all_tensors
from onward.checker.view.combine import model_of
from onward.checker.view.graphs import Site
from onward.checker.view.sandbox import Verdict, examine
from onward.checker.view.scope import Scope, Subject
from onward.checker.view.shapes import of_values
from onward.transform.declare import way_out

MOST_STEPS = 64
"""How many steps are combined with the inference graph; each costs as much as the inference graph is large."""

_GRAPH = re.compile(r"model|functions|graph|training_info\[\d+\]\.\w+")  # the part of a file that a place is in
_PREFIX = re.compile(r"^(\[ShapeInferenceError\]|\[TypeInferenceError\]|\s)+")


def study(subject: Subject) -> dict[Scope, Verdict]:
    """Ask onnx about every graph; keep what it says, and give the scopes the types that it infers."""
    if not can_expand(subject) or (subject.base_dir is None and _has_inner_external_data(subject)):
        return {}
    verdicts = {}
    for scope in subject.scopes:
        if scope.own.is_empty or (scope.step or 0) >= MOST_STEPS:
            continue
        verdicts[scope] = verdict = _examine(scope)
        if verdict.died:  # the other graphs of such a file will do no better
            break
        if verdict.inferred:
            _add_types(scope, ModelProto.FromString(verdict.inferred).graph)
    return verdicts


def _add_types(scope: Scope, inferred: GraphProto) -> None:
    for values in (inferred.value_info, inferred.output):
        for name, known in of_values(values).items():
            if name not in scope.types:
                scope.types[name] = known
    for gradient in scope.gradients:  # those of inner values, whose types were not known before
        for x, name in gradient.results:
            if x in scope.types:
                scope.types.setdefault(name, scope.types[x])


def _examine(scope: Scope) -> Verdict:
    try:
        model = model_of(scope).SerializeToString()
    except (EncodeError, ValueError) as error:  # larger than 2 GiB even without its initializers
        return Verdict(died=f"cannot be asked: {error}")
    return examine(model, scope.subject.base_dir)


def _has_inner_external_data(subject: Subject) -> bool:
    """Tensors in attributes cannot be left behind, and onnx.checker would look for their files who knows where."""
    top = {scope.own.place for scope in subject.scopes}
    located = (one for one in all_tensors(subject) if one.tensor.data_location == TensorProto.EXTERNAL)
    return any(isinstance(one.holder, Site) or one.holder not in top for one in located)


def objections(subject: Subject, verdicts: dict[Scope, Verdict], errors: Iterable[Finding]) -> Iterator[Finding]:
    """What onnx objects to, in graphs where nothing else is wrong."""
    blamed = {graph[0] for finding in errors if (graph := _GRAPH.match(finding.place))}
    for scope, verdict in verdicts.items():
        if not blamed.isdisjoint(("model", "functions", *(part.place for part in scope.parts))):
            continue
        for finding in _objections(scope, verdict):
            blamed.add(scope.own.place)
            yield finding
    if len(subject.steps) > MOST_STEPS:
        asked = f"the first {MOST_STEPS} of {len(subject.steps)} steps"
        yield make_finding("OW109", "model", f"onnx.checker was asked about {asked} only")


def _objections(scope: Scope, verdict: Verdict) -> Iterator[Finding]:
    place = scope.own.place
    if verdict.died:
        yield make_finding("OW114", place, f"onnx.checker {verdict.died}", "do not use files like this one")
    elif verdict.invalid:
        code = "OW110" if scope is scope.subject.inference else "OW111" if scope.outer else "OW112"
        yield make_finding(code, place, *_words(scope, verdict.invalid))
    elif verdict.contradiction:
        yield make_finding("OW113", place, _sentence(verdict.contradiction))


def _words(scope: Scope, message: str) -> tuple[str, str | None]:
    """The message, which of a missing shape does not say where it is missing, and a hint."""
    graph = scope.own.proto
    without = [v.name for v in (*graph.input, *graph.output) if _lacks_shape(v)] if "'shape'" in message else []
    if not without:
        return _sentence(message), None
    return f"{', '.join(f'`{name}`' for name in without)}: no shape is declared", way_out(without[0])


def _lacks_shape(value: ValueInfoProto) -> bool:
    return value.type.HasField("tensor_type") and not value.type.tensor_type.HasField("shape")


def _sentence(message: str, most: int = 400) -> str:
    """A message from C++ on one line, cut where it goes on to print the node."""
    message = " ".join(_PREFIX.sub("", message).split())
    return message if len(message) <= most else f"{message[: most - 1]}…"
