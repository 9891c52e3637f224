"""Rules about what a named runtime will load: `--for onnxruntime` (OW650 to OW655)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

from onnx import IR_VERSION, TensorProto, defs, helper

from onward.checker.findings import Finding, found, listing, quote
from onward.checker.functions import standard_domains
from onward.checker.view.graphs import domain_of
from onward.checker.view.scope import Subject
from onward.errors import UnknownNameError, near
from onward.model.core import TRAINING_DOMAIN

NO_KERNEL = {
    **dict.fromkeys(("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"), 22),
    **dict.fromkeys(("Bernoulli", "Multinomial", "RoiAlign", "MaxRoiPool", "GlobalLpPool"), 22),
    "ImageDecoder": 20,
    "Swish": 25,
}
"""Standard operators that stock ONNX Runtime 1.31 cannot run on a CPU, from this operator set on. Tried, one by one:
the list of its kernels misleads, as a kernel matches only the version of an operator with which its range begins."""

_ITS_DOMAINS = {"", "ai.onnx.ml", "com.microsoft"}


class Limits(NamedTuple):
    opset: int
    ir: int
    runtime: str


@cache
def onnxruntime_limits() -> Limits:
    """The newest operator set and IR version that the installed ONNX Runtime loads: it is asked, with tiny models."""
    try:
        import onnxruntime
    except ImportError:
        return Limits(26, 13, "ONNX Runtime 1.31")
    quiet = onnxruntime.SessionOptions()
    quiet.log_severity_level = 4

    def loads(opset: int, ir: int) -> bool:
        values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
        graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "probe", values[:1], values[1:])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir)
        try:
            onnxruntime.InferenceSession(model.SerializeToString(), quiet, providers=["CPUExecutionProvider"])
        except Exception:  # its own exceptions have no common base
            return False
        return True

    opset = next((version for version in range(defs.onnx_opset_version(), 13, -1) if loads(version, 8)), 13)
    ir = next((version for version in range(IR_VERSION, 8, -1) if loads(13, version)), 8)
    return Limits(opset, ir, f"ONNX Runtime {onnxruntime.__version__}")


def versions(subject: Subject) -> Iterator[Finding]:
    limits = onnxruntime_limits()
    opset, ir = subject.opsets.get("", 0), subject.proto.ir_version
    if opset > limits.opset:
        message = f"{limits.runtime} loads operator sets up to {limits.opset}; the model uses {opset}"
        yield found("OW650", "model", message, f"convert the model to operator set {limits.opset} or older")
    if ir > limits.ir:
        message = f"{limits.runtime} loads IR versions up to {limits.ir}; the model has {ir}"
        yield found("OW651", "model", message, f"write the model with IR version {limits.ir} or older")


def kernels(subject: Subject) -> Iterator[Finding]:
    for call in subject.calls:
        since = NO_KERNEL.get(call.node.op_type)
        opset = call.opsets.get("", 0)
        if since is not None and opset >= since and domain_of(call.node) == "":
            message = f"ONNX Runtime has no CPU kernel for {quote(call.node.op_type)} of operator set {opset}"
            hint = f"use operator set {since - 1}" if since > 20 else None
            yield found("OW653", call.place, message, hint)


def domains(subject: Subject) -> Iterator[Finding]:
    for call in subject.calls:
        domain = domain_of(call.node)
        if domain not in standard_domains() | _ITS_DOMAINS and subject.function(call.node) is None:
            yield found("OW654", call.place, f"ONNX Runtime knows no domain {quote(domain)}")


def training_operators(subject: Subject) -> Iterator[Finding]:
    here = [node.place for node in subject.inference.own.nodes if node.domain == TRAINING_DOMAIN]
    for place in here:
        yield found("OW655", place, "ONNX Runtime knows no training operators", "move the node to an algorithm")
    lowered = [node.op for step in subject.steps for node in step.own.nodes if node.domain == TRAINING_DOMAIN]
    if lowered:
        operators = listing(dict.fromkeys(lowered))
        yield found(
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
