"""Rules about what a named runtime will load: `--for onnxruntime` (OW650 to OW655)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from onward.checker.findings import Finding, listing, make_finding, quote
from onward.checker.functions import standard_domains
from onward.checker.view.scope import Subject
from onward.errors import UnknownNameError, near
from onward.model.core import TRAINING_DOMAIN
from onward.runtime.sessions import NO_KERNEL, onnxruntime_limits
from onward.standard import domain_of

_ITS_DOMAINS = {"", "ai.onnx.ml", "com.microsoft"}


def versions(subject: Subject) -> Iterator[Finding]:
    limits = onnxruntime_limits()
    opset, ir = subject.opsets.get("", 0), subject.proto.ir_version
    if opset > limits.opset:
        message = f"{limits.runtime} loads operator sets up to {limits.opset}; the model uses {opset}"
        yield make_finding("OW650", "model", message, f"convert the model to operator set {limits.opset} or older")
    if ir > limits.ir:
        message = f"{limits.runtime} loads IR versions up to {limits.ir}; the model has {ir}"
        yield make_finding("OW651", "model", message, f"write the model with IR version {limits.ir} or older")


def kernels(subject: Subject) -> Iterator[Finding]:
    for call in subject.calls:
        since = NO_KERNEL.get(call.node.op_type)
        opset = call.opsets.get("", 0)
        if since is not None and opset >= since and domain_of(call.node) == "":
            message = f"ONNX Runtime has no CPU kernel for {quote(call.node.op_type)} of operator set {opset}"
            hint = f"use operator set {since - 1}" if since > 20 else None
            yield make_finding("OW653", call.place, message, hint)


def domains(subject: Subject) -> Iterator[Finding]:
    for call in subject.calls:
        domain = domain_of(call.node)
        if domain not in standard_domains() | _ITS_DOMAINS and subject.function(call.node) is None:
            yield make_finding("OW654", call.place, f"ONNX Runtime knows no domain {quote(domain)}")


def training_operators(subject: Subject) -> Iterator[Finding]:
    here = [node.place for node in subject.inference.own.nodes if node.domain == TRAINING_DOMAIN]
    for place in here:
        yield make_finding("OW655", place, "ONNX Runtime knows no training operators", "move the node to an algorithm")
    lowered = [node.op for step in subject.steps for node in step.own.nodes if node.domain == TRAINING_DOMAIN]
    if lowered:
        operators = listing(dict.fromkeys(lowered))
        yield make_finding(
            "OW652", "training_info", f"ONNX Runtime has no {operators}: Onward lowers such nodes before it runs a step"
        )


_RULES: dict[str, tuple[Callable[[Subject], Iterator[Finding]], ...]] = {
    "onnxruntime": (versions, kernels, domains, training_operators),
}
TARGETS = tuple(_RULES)


def rules_for(target: str | None) -> tuple[Callable[[Subject], Iterator[Finding]], ...]:
    if target is None:
        return ()
    if target not in _RULES:
        hint = near(target, _RULES) or f"known runtimes: {', '.join(_RULES)}"
        raise UnknownNameError(f"nothing is known about the runtime `{target}`", hint=hint)
    return _RULES[target]
