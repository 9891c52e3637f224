"""Verdicts of onnx.checker and shape inference (OW110 to OW114), and limits of runtimes (OW650 to
OW655).

On graphs where a rule here reports an error, their verdicts are ignored: they would say the same
less precisely. All rules that compare types use the inferred types.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from google.protobuf.message import EncodeError
from onnx import ModelProto, TensorProto

from onward.checker.codes import Finding, listing, make_finding, quote
from onward.checker.file import all_tensors
from onward.checker.functions import can_expand, standard_domains
from onward.checker.graphs import Site, of_values
from onward.checker.sandbox import Verdict, examine
from onward.checker.scope import CheckedModel, Scope, model_of
from onward.errors import UnknownNameError, suggest
from onward.model.core import TRAINING_DOMAIN
from onward.runtime.sessions import NO_KERNEL, onnxruntime_limits
from onward.standard import domain_of
from onward.transform.declare import declare_hint

MOST_STEPS = 64
"""Largest number of steps that are combined with the inference graph; each costs as much as inference."""

_GRAPH = re.compile(r"model|functions|graph|training_info\[\d+\]\.\w+")  # beginning of a finding's path
_PREFIX = re.compile(r"^(\[ShapeInferenceError\]|\[TypeInferenceError\]|\s)+")


def study(subject: CheckedModel) -> dict[Scope, Verdict]:
    """Return the verdicts of onnx on every graph, and give the scopes its inferred types."""
    if not can_expand(subject) or (subject.base_dir is None and _has_inner_external_data(subject)):
        return {}
    verdicts = {}
    for scope in subject.scopes:
        if scope.own.is_empty or (scope.step or 0) >= MOST_STEPS:
            continue
        verdicts[scope] = verdict = _examine(scope)
        if verdict.died:  # the other graphs of such a file would fail too
            break
        if verdict.inferred:
            inferred = ModelProto.FromString(verdict.inferred).graph
            for values in (inferred.value_info, inferred.output):
                for name, tensor_type in of_values(values).items():
                    if name not in scope.types:
                        scope.types[name] = tensor_type
            for gradient in scope.gradients:  # gradients of inner values, whose types were unknown before
                for x, name in gradient.results:
                    if x in scope.types:
                        scope.types.setdefault(name, scope.types[x])
    return verdicts


def _examine(scope: Scope) -> Verdict:
    try:
        model = model_of(scope).SerializeToString()
    except (EncodeError, ValueError) as error:  # larger than 2 GiB even without its initializers
        return Verdict(died=f"cannot be asked: {error}")
    return examine(model, scope.subject.base_dir)


def _has_inner_external_data(subject: CheckedModel) -> bool:
    """True if attributes have external data, which onnx.checker would search in the wrong folder."""
    top = {scope.own.place for scope in subject.scopes}
    located = (tensor for tensor in all_tensors(subject) if tensor.tensor.data_location == TensorProto.EXTERNAL)
    return any(isinstance(tensor.holder, Site) or tensor.holder not in top for tensor in located)


def objections(subject: CheckedModel, verdicts: dict[Scope, Verdict], errors: Iterable[Finding]) -> Iterator[Finding]:
    """Yield the objections of onnx to graphs without other errors."""
    blamed = {match[0] for finding in errors if (match := _GRAPH.match(finding.place))}
    for scope, verdict in verdicts.items():
        if not blamed.isdisjoint(("model", "functions", *(graph.place for graph in scope.graphs))):
            continue
        for finding in _objections(scope, verdict):
            blamed.add(scope.own.place)
            yield finding
    if len(subject.steps) > MOST_STEPS:
        asked = f"the first {MOST_STEPS} of {len(subject.steps)} steps"
        yield make_finding("OW109", "model", f"onnx.checker was asked about {asked} only")


def _objections(scope: Scope, verdict: Verdict) -> Iterator[Finding]:
    location = scope.own.place
    if verdict.died:
        hint = "use the file only if you trust its source"
        yield make_finding("OW114", location, f"onnx.checker {verdict.died}", hint)
    elif verdict.loads and scope is scope.subject.inference:
        invalid, contradiction = verdict.invalid, verdict.contradiction or ""
        objection = _message_and_hint(scope, invalid) if invalid else (_sentence(contradiction),)
        yield make_finding("OW117", location, *objection)
    elif verdict.invalid:
        code = "OW110" if scope is scope.subject.inference else "OW111" if scope.outer else "OW112"
        yield make_finding(code, location, *_message_and_hint(scope, verdict.invalid))
    elif verdict.contradiction:
        yield make_finding("OW113", location, _sentence(verdict.contradiction))


def _message_and_hint(scope: Scope, message: str) -> tuple[str, str | None]:
    """Return the message, with the name of a value without shape, and a hint."""
    tensors = [v for v in (*scope.own.proto.input, *scope.own.proto.output) if v.type.HasField("tensor_type")]
    without = [value.name for value in tensors if not value.type.tensor_type.HasField("shape")]
    if not without or "'shape'" not in message:
        return _sentence(message), None
    return f"{', '.join(f'`{name}`' for name in without)}: no shape is declared", declare_hint(without[0])


def _sentence(message: str, most: int = 400) -> str:
    """Return a message from C++ on one line, cut before it prints the node."""
    message = " ".join(_PREFIX.sub("", message).split())
    return message if len(message) <= most else f"{message[: most - 1]}…"


# ---- runtimes --------------------------------------------------------------------------------------------------------


_ITS_DOMAINS = {"", "ai.onnx.ml", "com.microsoft"}
"""Domains with operators of ONNX Runtime."""


def versions(subject: CheckedModel) -> Iterator[Finding]:
    limits = onnxruntime_limits()
    opset, ir = subject.opsets.get("", 0), subject.proto.ir_version
    if opset > limits.opset:
        message = f"{limits.runtime} loads operator sets up to {limits.opset}; the model uses {opset}"
        yield make_finding("OW650", "model", message, f"convert the model to operator set {limits.opset} or older")
    if ir > limits.ir:
        message = f"{limits.runtime} loads IR versions up to {limits.ir}; the model has {ir}"
        yield make_finding("OW651", "model", message, f"write the model with IR version {limits.ir} or older")


def kernels(subject: CheckedModel) -> Iterator[Finding]:
    for call in subject.calls:
        since = NO_KERNEL.get(call.node.op_type)
        opset = call.opsets.get("", 0)
        if since is not None and opset >= since and domain_of(call.node) == "":
            message = f"ONNX Runtime has no CPU kernel for {quote(call.node.op_type)} of operator set {opset}"
            hint = f"use operator set {since - 1}" if since > 20 else None
            yield make_finding("OW653", call.place, message, hint)


def domains(subject: CheckedModel) -> Iterator[Finding]:
    for call in subject.calls:
        domain = domain_of(call.node)
        if domain not in standard_domains() | _ITS_DOMAINS and subject.function(call.node) is None:
            yield make_finding("OW654", call.place, f"ONNX Runtime has no operators of the domain {quote(domain)}")


def training_operators(subject: CheckedModel) -> Iterator[Finding]:
    for node in subject.inference.own.nodes:
        if node.domain == TRAINING_DOMAIN:
            message = "ONNX Runtime has no training operators"
            yield make_finding("OW655", node.place, message, "move the node to an algorithm")
    lowered = [node.op for step in subject.steps for node in step.own.nodes if node.domain == TRAINING_DOMAIN]
    if lowered:
        operators = listing(dict.fromkeys(lowered))
        message = f"ONNX Runtime has no {operators}: Onward lowers such nodes before it runs a step"
        yield make_finding("OW652", "training_info", message)


_RULES: dict[str, tuple[Callable[[CheckedModel], Iterator[Finding]], ...]] = {
    "onnxruntime": (versions, kernels, domains, training_operators),
}
TARGETS = tuple(_RULES)


def rules_for(target: str | None) -> tuple[Callable[[CheckedModel], Iterator[Finding]], ...]:
    if target is None:
        return ()
    if target not in _RULES:
        hint = suggest(target, _RULES) or f"runtimes: {', '.join(_RULES)}"
        raise UnknownNameError(f"unknown runtime `{target}`", hint=hint)
    return _RULES[target]
