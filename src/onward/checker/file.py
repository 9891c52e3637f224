"""Rules about the file: form (OW101 to OW108, OW115, OW116), operator sets (OW601 to OW605, OW616
to OW618) and data of tensors (OW130 to OW134).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from onnx import IR_VERSION, GraphProto, ModelProto, TensorProto, defs

from onward.checker.codes import Finding, bare, listing, make_finding, quote
from onward.checker.graphs import Site, count, of_tensor, subgraphs
from onward.checker.scope import CheckedModel, function_place, versions
from onward.errors import Error, InvalidModelError
from onward.model import older_forms, storage
from onward.model.checks import DATA_FIELDS, field_of
from onward.model.core import TRAINING_DOMAIN
from onward.model.protos import open_sizes
from onward.model.serde import modernise
from onward.model.storage import bits_of, external_faults
from onward.standard import FUNCTIONS_IR, TRAINING_IR, domain_of, schema_domain
from onward.transform.opset import is_same


def graph_present(subject: CheckedModel) -> Iterator[Finding]:
    if not subject.proto.HasField("graph"):
        yield make_finding("OW101", "model", "the model has no graph")


def ir_version(subject: CheckedModel) -> Iterator[Finding]:
    version = subject.proto.ir_version
    if version < 1:
        yield make_finding("OW102", "model", "the field `ir_version` is not set", "set it; training needs 7 or newer")
    elif version > IR_VERSION:
        message = f"IR version {version} is newer than {IR_VERSION}, the newest that the installed onnx supports"
        hint = "install a newer onnx, or write the model for an older IR version"
        yield make_finding("OW103", "model", message, hint)


def graph_names(subject: CheckedModel) -> Iterator[Finding]:
    for scope in subject.scopes:
        if not scope.own.proto.name and not scope.own.is_empty:
            yield make_finding("OW108", scope.own.place, "the graph has no name", "give it any name")


def sizes(subject: CheckedModel) -> Iterator[Finding]:
    if names := open_sizes(subject.proto, change=False):
        hint = "write it with open sizes: `onward data MODEL --to none -o new.onnx`"
        yield make_finding("OW118", "graph", f"{listing(names)}: negative sizes, which are taken as open", hint)


def checksums(path: Path) -> Iterator[Finding]:
    """Report a file whose checksum differs; rules about tensors report a missing file."""
    try:
        storage.verify_checksums(path)
    except InvalidModelError as error:
        if not isinstance(error.__cause__, OSError):
            yield make_finding("OW116", "file", error.message, error.hint)


def of_older_form(proto: ModelProto) -> tuple[list[Finding], ModelProto]:
    """Return findings about training information of an older form, and the converted model."""
    if not older_forms.is_older(proto):
        return [], proto
    present = ModelProto()
    present.CopyFrom(proto)
    try:
        converted = modernise(present)
    except Error as error:
        return [make_finding("OW115", "model", error.message, error.hint)], proto
    hint = "the other findings are about the converted model; write it: `onward data old.onnx --to none -o new.onnx`"
    return [
        make_finding("OW107" if "GraphCall" in conversion else "OW106", "model", conversion, hint)
        for conversion in converted
    ], present


# ---- operator sets ---------------------------------------------------------------------------------------------------


def check_imports(subject: CheckedModel) -> Iterator[Finding]:
    """Report a missing import at its first use, once in the model and once per function."""
    reported: set[tuple[int, str]] = set()
    for call in subject.calls:
        domain, where = domain_of(call.node), id(call.opsets)
        if domain in call.opsets or (where, domain) in reported:
            continue
        reported.add((where, domain))
        importer = f"the function {quote(call.function.name)}" if call.function else "the model"
        code = "OW601" if domain == TRAINING_DOMAIN else "OW605"
        hint = f"add {quote(domain or 'ai.onnx')} to `opset_import`{', version 1' if domain == TRAINING_DOMAIN else ''}"
        message = f"{importer} does not import the domain {quote(domain or 'ai.onnx')}"
        yield make_finding(code, call.place, message, hint)


def training_version(subject: CheckedModel) -> Iterator[Finding]:
    version = subject.opsets.get(TRAINING_DOMAIN, 1)
    if version != 1:
        message = f"version {version} of {quote(TRAINING_DOMAIN)} is imported; version 1 is the only one"
        yield make_finding("OW602", "model", message)


def imported_once(subject: CheckedModel) -> Iterator[Finding]:
    imports = [("model", subject.proto.opset_import)]
    imports += [(function_place(function), function.opset_import) for function in subject.proto.functions]
    for location, opsets in imports:
        last = versions(opsets)
        for opset in opsets:
            domain = schema_domain(opset.domain)
            if opset.version != last[domain]:
                numbers = f"as version {opset.version} and as version {last[domain]}"
                yield make_finding("OW616", location, f"the domain {quote(domain or 'ai.onnx')} is imported {numbers}")


def known_version(subject: CheckedModel) -> Iterator[Finding]:
    version, newest = subject.opsets.get("", 0), defs.onnx_opset_version()
    if version > newest:
        message = f"operator set {version} is newer than {newest}, the newest that the installed onnx supports"
        hint = "install a newer onnx, or convert the model to an older operator set"
        yield make_finding("OW617", "model", message, hint)


def same_operators(subject: CheckedModel) -> Iterator[Finding]:
    """Report operators of functions in other versions than the model's, once per function."""
    shared, reported = dict(subject.opsets), set()
    for call in subject.calls:
        domain, operator = domain_of(call.node), call.node.op_type
        version = call.opsets.get(domain)
        if version is None or subject.function(call.node) is not None or (key := (id(call.opsets), domain)) in reported:
            continue
        expected = shared.setdefault(domain, version)
        if version != expected and not is_same(operator, domain, version, expected):
            reported.add(key)
            domain_name = quote(domain or "ai.onnx")
            message = f"{quote(operator)} has version {version} of {domain_name}; the model has {expected}"
            hint = f"`onward opset MODEL {max(version, expected)}` brings all to one version"
            yield make_finding("OW618", call.place, message, "write all with the same version" if domain else hint)


def new_enough(subject: CheckedModel) -> Iterator[Finding]:
    version = subject.proto.ir_version
    if version < 1:
        return  # OW102 reports a missing version
    for code, what, needed, is_used in (
        ("OW603", "training information", TRAINING_IR, subject.proto.training_info),
        ("OW604", "model-local functions", FUNCTIONS_IR, subject.proto.functions),
    ):
        if is_used and version < needed:
            yield make_finding(code, "model", f"{what} came with IR version {needed}; the file has {version}")


# ---- data of tensors -------------------------------------------------------------------------------------------------


_PAIRS = (TensorProto.COMPLEX64, TensorProto.COMPLEX128)  # two numbers for one element
_FAULTS = {
    "place": ("OW131", "keep external data in plain files in the model's own folder"),
    "size": ("OW132", "the file is cut off, or belongs to another model"),
    "change": ("OW134", "make the model again from the new file, or restore the old one"),
    "overlap": ("OW133", "writing one tensor would change the other: give each its own bytes"),
}


class Located(NamedTuple):
    """A tensor and its holder. The path is written out only if it is reported."""

    holder: str | Site
    field: str
    tensor: TensorProto

    @property
    def place(self) -> str:
        if isinstance(self.holder, Site):
            return f"{self.holder.place}/{bare(self.field)}"
        return f'{self.holder}.{self.field}["{bare(self.tensor.name)}"]'


def all_tensors(subject: CheckedModel) -> Iterator[Located]:
    for scope in subject.scopes:
        yield from _in_graph(scope.own.proto, scope.own.place)
    for call in subject.calls:
        for attr in call.node.attribute:
            if attr.HasField("t"):
                yield Located(call.site, attr.name, attr.t)
            yield from (Located(call.site, attr.name, tensor) for tensor in attr.tensors)
        for name, graph in subgraphs(call.node):
            yield from _in_graph(graph, f"{call.place}/{name}")


def _in_graph(graph: GraphProto, holder: str) -> Iterator[Located]:
    yield from (Located(holder, "initializer", tensor) for tensor in graph.initializer)
    for sparse in graph.sparse_initializer:
        yield Located(holder, "sparse_initializer", sparse.values)
        yield Located(holder, "sparse_initializer", sparse.indices)


def data_fits(subject: CheckedModel) -> Iterator[Finding]:
    for located in all_tensors(subject):
        tensor = located.tensor
        if tensor.data_location != TensorProto.EXTERNAL and (problem := _misfit(tensor)):
            message = f"{of_tensor(tensor)}: {problem}"
            yield make_finding("OW130", located.place, message, "export it again: the file is damaged")


def _misfit(tensor: TensorProto) -> str | None:
    elements = count(tensor.dims)
    if elements < 0:
        return "a dimension is negative"
    filled = [field for field in (*DATA_FIELDS, "raw_data") if len(getattr(tensor, field))]
    if len(filled) > 1:
        return f"the data stands in {' and in '.join(filled)}"
    bits = bits_of(tensor)
    if tensor.HasField("raw_data") and bits is not None:
        needed, actual = (elements * bits + 7) // 8, len(tensor.raw_data)
        return None if needed == actual else f"needs {needed} bytes, has {actual}"
    if tensor.data_type == TensorProto.UNDEFINED or (bits or 8) < 8:
        return None  # writers pack them differently; onnx.checker checks them
    field = field_of(tensor.data_type)
    needed, actual = elements * (2 if tensor.data_type in _PAIRS else 1), len(getattr(tensor, field))
    return None if needed == actual else f"needs {needed} numbers in `{field}`, has {actual}"


def external_data(subject: CheckedModel) -> Iterator[Finding]:
    outside = (located for located in all_tensors(subject) if located.tensor.data_location == TensorProto.EXTERNAL)
    for location, fault in external_faults(((located.place, located.tensor) for located in outside), subject.base_dir):
        code, hint = _FAULTS[fault.about]
        yield make_finding(code, location, f"the tensor {fault}", hint)


# ---- conditions of all rules -----------------------------------------------------------------------------------------


# protobuf does not check strings when it parses: it returns the bytes of one that is not UTF-8. It also lets a program
# nest messages deeper than any reader accepts. Reported here, both need no care in the other rules.

DEEPEST = 100  # messages; the limit of protobuf's own parsers
_MOST = 20


class _Field(NamedTuple):
    name: str
    is_message: bool
    is_repeated: bool


@cache
def _fields(descriptor: Descriptor) -> list[_Field]:
    """Return the fields that hold strings, directly or further down; without tensor data."""
    types = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_MESSAGE)
    fields = [_Field(f.name, f.type == types[1], bool(f.is_repeated)) for f in descriptor.fields if f.type in types]
    return sorted(fields, key=lambda field: field[1:])


def problems(proto: Message) -> Iterator[Finding]:
    """Yield the reasons why the model cannot be read at all."""
    number = 0
    todo: list[tuple[Message, Any, int]] = [(proto, None, 1)]
    while todo:
        message, path, depth = todo.pop()
        if depth > DEEPEST:
            yield make_finding("OW105", "model", f"messages are nested more than {DEEPEST} levels deep")
            return
        for name, is_message, is_repeated in _fields(message.DESCRIPTOR):
            if is_message and not is_repeated and not message.HasField(name):
                continue
            value = getattr(message, name)
            items = value if is_repeated else [value]
            if is_message:
                todo += [(item, (path, (name, i) if is_repeated else name), depth + 1) for i, item in enumerate(items)]
            elif bytes in map(type, items):
                yield make_finding("OW104", _path_text((path, name)), f"`{name}` holds bytes that are not UTF-8 text")
                number += 1
                if number == _MOST:
                    return


def _path_text(path: Any) -> str:
    """Return `graph.node[3].name` for the links of the walk."""
    parts: list[str] = []
    while path is not None:
        path, last = path
        parts.append(last if isinstance(last, str) else f"{last[0]}[{last[1]}]")
    return ".".join(reversed(parts))


MODEL_RULES = (
    *(graph_present, ir_version, graph_names, check_imports, training_version, imported_once, known_version),
    *(same_operators, new_enough, sizes, data_fits, external_data),
)
