"""Rules about the file as a whole (OW101 to OW108, OW115, OW116)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from onnx import IR_VERSION, ModelProto

from onward.checker.findings import Finding, make_finding
from onward.checker.view.scope import Subject
from onward.errors import Error, InvalidModelError
from onward.model import older_forms, storage
from onward.model.serde import modernise


def graph_present(subject: Subject) -> Iterator[Finding]:
    if not subject.proto.HasField("graph"):
        yield make_finding("OW101", "model", "the model has no graph: there is nothing to run or train")


def ir_version(subject: Subject) -> Iterator[Finding]:
    version = subject.proto.ir_version
    if version < 1:
        yield make_finding("OW102", "model", "the field `ir_version` is not set", "set it; training needs 7 or newer")
    elif version > IR_VERSION:
        yield make_finding(
            "OW103",
            "model",
            f"IR version {version} is newer than {IR_VERSION}, the newest that the installed onnx knows",
            "install a newer onnx, or write the model for an older IR version",
        )


def graph_names(subject: Subject) -> Iterator[Finding]:
    for scope in subject.scopes:
        if not scope.own.proto.name and not scope.own.is_empty:
            yield make_finding("OW108", scope.own.place, "the graph has no name", "give it any name")


def checksums(path: Path) -> Iterator[Finding]:
    """Report a file that is not what its checksums say; one that is missing is a matter of the tensors in it."""
    try:
        storage.verify_checksums(path)
    except InvalidModelError as error:
        if not isinstance(error.__cause__, OSError):
            yield make_finding("OW116", "file", error.message, error.hint)


def of_older_form(proto: ModelProto) -> tuple[list[Finding], ModelProto]:
    """What is to say about training information of an older form, and the model with it in the present one."""
    if not older_forms.is_older(proto):
        return [], proto
    present = ModelProto()
    present.CopyFrom(proto)
    try:
        converted = modernise(present)
    except Error as error:
        return [make_finding("OW115", "model", error.message, error.hint)], proto
    hint = "all else that is said is of the converted model: `onward data old.onnx --to none -o new.onnx` writes that"
    return [
        make_finding("OW107" if "GraphCall" in what else "OW106", "model", what, hint) for what in converted
    ], present


MODEL_RULES = (graph_present, ir_version, graph_names)
