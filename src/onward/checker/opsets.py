"""Rules about operator sets and the versions of the format (OW601 to OW605, OW616 to OW618)."""

from __future__ import annotations

from collections.abc import Iterator

from onnx import defs

from onward.checker.findings import Finding, make_finding, quote
from onward.checker.view.scope import Subject, function_place, versions
from onward.model.core import TRAINING_DOMAIN
from onward.standard import FUNCTIONS_IR, TRAINING_IR, domain_of, schema_domain
from onward.transform.function_opset import is_same


def check_imports(subject: Subject) -> Iterator[Finding]:
    """A domain that is not imported is reported where it is first used, once in the model and once in each function."""
    reported: set[tuple[int, str]] = set()
    for call in subject.calls:
        domain, where = domain_of(call.node), id(call.opsets)
        if domain in call.opsets or (where, domain) in reported:
            continue
        reported.add((where, domain))
        importer = f"the function {quote(call.function.name)}" if call.function else "the model"
        code = "OW601" if domain == TRAINING_DOMAIN else "OW605"
        hint = f"add {quote(domain or 'ai.onnx')} to `opset_import`{', version 1' if domain == TRAINING_DOMAIN else ''}"
        yield make_finding(
            code, call.place, f"{importer} does not import the domain {quote(domain or 'ai.onnx')}", hint
        )


def training_version(subject: Subject) -> Iterator[Finding]:
    version = subject.opsets.get(TRAINING_DOMAIN, 1)
    if version != 1:
        yield make_finding(
            "OW602", "model", f"version {version} of {quote(TRAINING_DOMAIN)} is imported; there is only version 1"
        )


def imported_once(subject: Subject) -> Iterator[Finding]:
    imports = [("model", subject.proto.opset_import)]
    imports += [(function_place(function), function.opset_import) for function in subject.proto.functions]
    for place, opsets in imports:
        last = versions(opsets)
        for opset in opsets:
            domain = schema_domain(opset.domain)
            if opset.version != last[domain]:
                numbers = f"as version {opset.version} and as version {last[domain]}"
                yield make_finding("OW616", place, f"the domain {quote(domain or 'ai.onnx')} is imported {numbers}")


def known_version(subject: Subject) -> Iterator[Finding]:
    version, newest = subject.opsets.get("", 0), defs.onnx_opset_version()
    if version > newest:
        message = f"operator set {version} is newer than {newest}, the newest that the installed onnx knows"
        yield make_finding(
            "OW617", "model", message, "install a newer onnx, or convert the model to an older operator set"
        )


def same_operators(subject: Subject) -> Iterator[Finding]:
    """Functions may import other versions than the model if their operators are the same; reported once for each."""
    shared, reported = dict(subject.opsets), set()
    for call in subject.calls:
        domain, operator = domain_of(call.node), call.node.op_type
        version = call.opsets.get(domain)
        if version is None or subject.function(call.node) is not None or (key := (id(call.opsets), domain)) in reported:
            continue
        wanted = shared.setdefault(domain, version)
        if version != wanted and not is_same(operator, domain, version, wanted):
            reported.add(key)
            message = (
                f"{quote(operator)} is of version {version} of {quote(domain or 'ai.onnx')}, not {wanted}, the model's"
            )
            hint = f"`onward opset MODEL {max(version, wanted)}` brings all to one version"
            yield make_finding("OW618", call.place, message, "write all with the same version" if domain else hint)


def new_enough(subject: Subject) -> Iterator[Finding]:
    version = subject.proto.ir_version
    if version < 1:
        return  # there is a rule for a missing version
    if subject.proto.training_info and version < TRAINING_IR:
        yield make_finding(
            "OW603", "model", f"training information came with IR version {TRAINING_IR}; this file says {version}"
        )
    if subject.proto.functions and version < FUNCTIONS_IR:
        yield make_finding(
            "OW604", "model", f"model-local functions came with IR version {FUNCTIONS_IR}; this file says {version}"
        )


MODEL_RULES = (check_imports, training_version, imported_once, known_version, same_operators, new_enough)
