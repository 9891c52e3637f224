"""Rules about the data of tensors, in the file and beside it (OW130 to OW133)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from onnx import GraphProto, TensorProto

from onward.checker.findings import Finding, bare, make_finding
from onward.checker.view.graphs import Site, subgraphs
from onward.checker.view.scope import Subject
from onward.checker.view.shapes import count, of_tensor
from onward.model.checks import DATA_FIELDS, field_of
from onward.model.storage import bits_of, external_faults

_PAIRS = (TensorProto.COMPLEX64, TensorProto.COMPLEX128)  # two numbers for one element
_FAULTS = {
    "place": ("OW131", "keep external data in plain files in the model's own folder"),
    "size": ("OW132", "the file is cut off, or belongs to another model"),
    "overlap": ("OW133", "writing one tensor would change the other: give each its own bytes"),
}


class Located(NamedTuple):
    """A tensor and where it is. The place is spelt out only for those that are reported."""

    holder: str | Site
    part: str
    tensor: TensorProto

    @property
    def place(self) -> str:
        if isinstance(self.holder, Site):
            return f"{self.holder.place}/{bare(self.part)}"
        return f'{self.holder}.{self.part}["{bare(self.tensor.name)}"]'


def all_tensors(subject: Subject) -> Iterator[Located]:
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


# ---- in the file


def data_fits(subject: Subject) -> Iterator[Finding]:
    for located in all_tensors(subject):
        tensor = located.tensor
        if tensor.data_location != TensorProto.EXTERNAL and (problem := _misfit(tensor)):
            yield make_finding(
                "OW130", located.place, f"{of_tensor(tensor)}: {problem}", "the file is damaged, or wrongly written"
            )


def _misfit(tensor: TensorProto) -> str | None:
    elements = count(tensor.dims)
    if elements < 0:
        return "a dimension is negative"
    filled = [field for field in (*DATA_FIELDS, "raw_data") if len(getattr(tensor, field))]
    if len(filled) > 1:
        return f"the data stands in {' and in '.join(filled)}"
    bits = bits_of(tensor)
    if tensor.HasField("raw_data") and bits is not None:
        needed, there = (elements * bits + 7) // 8, len(tensor.raw_data)
        return None if needed == there else f"needs {needed} bytes, has {there}"
    if tensor.data_type == TensorProto.UNDEFINED or (bits or 8) < 8:
        return None  # how many to a number differs between writers; onnx.checker looks at it
    field = field_of(tensor.data_type)
    needed, there = elements * (2 if tensor.data_type in _PAIRS else 1), len(getattr(tensor, field))
    return None if needed == there else f"needs {needed} numbers in `{field}`, has {there}"


# ---- beside the file


def external_data(subject: Subject) -> Iterator[Finding]:
    outside = (each for each in all_tensors(subject) if each.tensor.data_location == TensorProto.EXTERNAL)
    for place, fault in external_faults(((each.place, each.tensor) for each in outside), subject.base_dir):
        code, hint = _FAULTS[fault.about]
        yield make_finding(code, place, f"the tensor {fault}", hint)


MODEL_RULES = (data_fits, external_data)
