"""Rules about the file as a whole (OW101 to OW108)."""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.unknown_fields import UnknownFieldSet
from onnx import IR_VERSION

from onward.checker.findings import Finding, found
from onward.checker.view.scope import Subject

_PROTOTYPE_FIELD = 21  # where the 2019 prototype kept training_info


def graph_present(subject: Subject) -> Iterator[Finding]:
    if not subject.proto.HasField("graph"):
        yield found("OW101", "model", "the model has no graph: there is nothing to run or train")


def ir_version(subject: Subject) -> Iterator[Finding]:
    version = subject.proto.ir_version
    if version < 1:
        yield found("OW102", "model", "the field `ir_version` is not set", "set it; training needs 7 or newer")
    elif version > IR_VERSION:
        yield found(
            "OW103",
            "model",
            f"IR version {version} is newer than {IR_VERSION}, the newest that the installed onnx knows",
            "install a newer onnx, or write the model for an older IR version",
        )


def graph_names(subject: Subject) -> Iterator[Finding]:
    for scope in subject.scopes:
        if not scope.own.proto.name and not scope.own.is_empty:
            yield found("OW108", scope.own.place, "the graph has no name", "give it any name")


def prototype(subject: Subject) -> Iterator[Finding]:
    unknown = UnknownFieldSet(subject.proto)
    if any(unknown[i].field_number == _PROTOTYPE_FIELD for i in range(len(unknown))):
        yield found(
            "OW106",
            "model",
            f"the unknown field {_PROTOTYPE_FIELD} looks like training information of the 2019 prototype",
            "read and save the model with Onward, which converts it where its meaning is clear",
        )


def graph_call(subject: Subject) -> Iterator[Finding]:
    for scope in subject.scopes:
        for site in scope.own.sites:
            if site.node.op_type == "GraphCall" and subject.function(site.node) is None:
                yield found(
                    "OW107",
                    site.place,
                    "`GraphCall` existed only in onnx 1.7.0; since 1.8 an algorithm reads inference values directly",
                    "read and save the model with Onward, which converts it where its meaning is clear",
                )


MODEL_RULES = (graph_present, ir_version, graph_names, prototype, graph_call)
