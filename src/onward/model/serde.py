"""Conversion between `onnx.ModelProto` and `Model`."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import onnx
import onnx_ir as ir
from onnx import ModelProto

from onward.arguments import OPENED
from onward.errors import Error, ExternalDataError, InvalidModelError, list_names, warn
from onward.model import older_forms, protos, storage
from onward.model.checks import callees_first, check_tensors
from onward.model.core import Model, Step
from onward.model.protos import all_nodes, replace_entries
from onward.model.storage.files import SENSELESS, blame_file, is_plain_name
from onward.model.storage.remote import fetched
from onward.model.walk import graphs_in
from onward.standard import KERNELS, domain_of

if TYPE_CHECKING:
    from onnx import AttributeProto, GraphProto, NodeProto, TypeProto


_ALGORITHMS = "onward.algorithms"


Source = str | os.PathLike[str] | bytes | ModelProto | Model
"""Types that a model can be read from."""
OPENED.add(Source)


def load(model: Source) -> Model:
    """Read a model from a path, bytes or a `ModelProto`. External weights are mapped when used.

        model = onward.load("training.onnx")

    - `model`: its path or bytes, or a folder of onnxruntime-genai; an `onward.Model` is returned as
      is
    """
    if isinstance(model, Model):
        return model
    if isinstance(model, ModelProto):
        proto = ModelProto()
        proto.CopyFrom(model)  # renaming a weight must not rename it in the caller's object
        return _from_nowhere(proto)
    if isinstance(model, bytes | bytearray | memoryview):
        return _from_nowhere(storage.parse_proto(bytes(model)))
    file = _file_of(fetched(model))
    opened, path = storage.open_model(file), Path(file)
    model = from_proto(opened.proto)
    _refuse_native_kernels(opened.proto)
    storage.hold_data(tensor_sites(model), opened.folder, opened.files)
    model.path = path
    return model


def _file_of(source: Any) -> Any:
    """Return the model of a folder of onnxruntime-genai; anything else as it is."""
    if not isinstance(source, str | os.PathLike) or not os.path.isdir(source):
        return source
    path = Path(source)
    configuration = path / "genai_config.json"
    if not configuration.is_file():
        return source
    with blame_file(f"`{configuration}` does not name a model", *SENSELESS, OSError):
        name = json.loads(configuration.read_text(encoding="utf-8"))["model"]["decoder"]["filename"]
        if not is_plain_name(name):
            raise ValueError("its `filename` is not in the folder")
        return path / name


def load_shapes(source: Source) -> Model:
    """Read a model for its shapes: unreadable external data are replaced. Do not save it."""
    try:
        return load(source)
    except ExternalDataError:
        model = load_references(source)
    for site in tensor_sites(model):
        if isinstance(site.tensor, ir.ExternalTensor) and storage.is_external(site.tensor):
            site.tensor = _stand_in(site.tensor)
    return model


def load_references(source: Source) -> Model:
    """Read a model whose external data are only named and may be missing."""
    if isinstance(source, Model):
        return source
    proto = ModelProto()
    if isinstance(source, ModelProto):
        proto.CopyFrom(source)
    elif isinstance(source, bytes | bytearray | memoryview):
        proto = storage.parse_proto(bytes(source))
    else:
        proto = storage.read_proto(source)
    return from_proto(proto)


def _stand_in(tensor: ir.TensorProtocol) -> ir.Tensor:
    """Return a tensor of one repeated number, which is neither a mask nor a setting."""
    number = np.asarray(0.5).astype(tensor.dtype.numpy())
    shape = tuple(tensor.shape.numpy())
    stand_in = ir.Tensor(
        np.broadcast_to(number, shape), dtype=tensor.dtype, name=tensor.name, doc_string=tensor.doc_string
    )
    stand_in.metadata_props.update(tensor.metadata_props)
    return stand_in


def _from_nowhere(proto: ModelProto) -> Model:
    """Raise if a model without a folder has external data: it would depend on the process."""
    storage.check_external(proto, None)
    model = from_proto(proto)
    _refuse_native_kernels(proto)
    return model


def _refuse_native_kernels(proto: ModelProto) -> None:
    """Raise for native kernels, which read addresses that only lowering may write."""
    steps = [graph for info in proto.training_info for graph in (info.algorithm, info.initialization)]
    containers: tuple[onnx.GraphProto | onnx.FunctionProto, ...] = (proto.graph, *steps, *proto.functions)
    for node in (node for container in containers for node in all_nodes(container.node)):
        if node.domain == KERNELS:
            raise InvalidModelError(
                f"node `{node.name or node.op_type}` calls a native kernel (`{KERNELS}`), which no file may",
                hint="use standard operators; `onward train` adds native kernels itself",
            )


def from_proto(proto: ModelProto) -> Model:
    """Make a `Model` of a proto, which is consumed. The caller has checked external data."""
    older, opened = modernise(proto), protos.open_sizes(proto)
    with _quiet(), _library_errors():
        check_tensors(proto)
        aside = protos.set_aside(proto)
        inference, algorithms = _deserialize(proto)
        callees_first(inference.functions)
        _type_function_inputs(proto, inference)
        protos.attach_model(aside, inference)
        protos.attach(aside, ("graph",), inference.graph)
        entries = enumerate(zip(proto.training_info, algorithms, strict=True))
        model = Model(inference, [_step(i, info, algorithm, aside) for i, (info, algorithm) in entries])
    if older:
        warn(f"the file is of an older form, and was converted: {'; '.join(older)}. Saving it writes the present form")
    if opened:
        warn(f"{list_names(opened, 3)}: negative sizes are taken as open, as by ONNX Runtime")
    return model


def modernise(proto: ModelProto) -> list[str]:
    """Convert older training information, in place; return the converted parts."""
    with _library_errors():
        return older_forms.convert(proto)


def _step(index: int, info: onnx.TrainingInfoProto, algorithm: ir.Graph, aside: protos.Residue) -> Step:
    protos.attach(aside, ("algorithm", index), algorithm)
    initialization = None
    if info.HasField("initialization"):
        initialization = ir.serde.deserialize_graph(info.initialization)
        protos.attach(aside, ("initialization", index), initialization)
    return Step(
        algorithm,
        initialization,
        _bindings(info.update_binding, index, "update_binding"),
        _bindings(info.initialization_binding, index, "initialization_binding"),
        protos.unknown_fields(info),
    )


def _deserialize(proto: ModelProto) -> tuple[ir.Model, list[ir.Graph]]:
    """Return the inference model and the algorithms, which read values of the inference graph.

    The graph library links only nested graphs to the values around them. So algorithms are read as
    graphs nested in a last node of the inference graph, and taken out afterwards.
    """
    if not proto.training_info:
        return ir.serde.deserialize_model(proto), []
    holder = proto.graph.node.add(op_type=_ALGORITHMS)
    attribute = holder.attribute.add(name="algorithms", type=onnx.AttributeProto.GRAPHS)
    attribute.graphs.extend(info.algorithm for info in proto.training_info)
    try:
        inference = ir.serde.deserialize_model(proto)
    finally:
        proto.graph.node.pop()
    node = inference.graph[-1]
    algorithms = list(node.attributes["algorithms"].as_graphs())
    inference.graph.remove(node)
    return inference, algorithms


def _type_function_inputs(proto: ModelProto, inference: ir.Model) -> None:
    """Read the types of function inputs, which the library writes but does not read."""
    for written, function in zip(proto.functions, inference.functions.values(), strict=True):
        types = {info.name: info for info in written.value_info}
        for value in function.inputs:
            if value.name in types:
                ir.serde.deserialize_value_info_proto(types[value.name], value)


def _bindings(entries: Any, step: int, field: str) -> dict[str, str]:
    bindings = {entry.key: entry.value for entry in entries}
    if len(bindings) != len(entries):
        raise InvalidModelError(
            f"training_info[{step}].{field} names a state variable twice", hint="`onward check MODEL` names it"
        )
    return bindings


def to_proto(model: Model) -> ModelProto:
    with _quiet(), _library_errors():
        proto = ir.serde.serialize_model(model.ir)
        protos.put_back(proto, model.ir)
        _tidy(proto.graph, model.graph)
        for step in model.steps:
            _write_step(proto.training_info.add(), step)
    return proto


def _write_step(info: onnx.TrainingInfoProto, step: Step) -> None:
    ir.serde.serialize_graph_into(info.algorithm, step.algorithm)
    protos.put_back(info.algorithm, step.algorithm)
    _tidy(info.algorithm, step.algorithm)
    if step.initialization is not None:
        ir.serde.serialize_graph_into(info.initialization, step.initialization)
        protos.put_back(info.initialization, step.initialization)
        _tidy(info.initialization, step.initialization)
    for key, value in step.reset.items():
        info.initialization_binding.add(key=key, value=value)
    for key, value in step.update.items():
        info.update_binding.add(key=key, value=value)
    if step.rest:
        info.MergeFromString(step.rest)


def _tidy(proto: onnx.GraphProto, graph: ir.Graph) -> None:
    """Undo additions of `onnx_ir`: type notes of initializers, copies of tensor metadata."""
    for tensor in proto.initializer:
        if len(tensor.metadata_props) > 1:
            unique = {entry.key: entry.value for entry in tensor.metadata_props}
            entries = (onnx.StringStringEntryProto(key=key, value=value) for key, value in unique.items())
            replace_entries(tensor.metadata_props, entries)
    plain = {
        name
        for name, value in graph.initializers.items()
        if not (value.metadata_props or value.doc_string or (value.type and value.type.denotation))
    }
    if plain:
        replace_entries(proto.value_info, (info for info in proto.value_info if info.name not in plain))
    for node_proto, node in zip(proto.node, graph, strict=True):
        for attribute in node_proto.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _tidy(attribute.g, node.attributes[attribute.name].as_graph())


def save(model: Model, path: str | os.PathLike[str], data: storage.External = "auto", **options: Any) -> Path:
    """Write a model, with the options of `storage.save`."""
    storage.save(path, lambda: to_proto(model), tensor_sites(model), external=data, **options)
    model.path = Path(path)
    return model.path


def tensor_sites(model: Model) -> list[storage.TensorSite]:
    """Return every site of a tensor in a model."""
    return storage.sites(*_containers(model))


def _containers(model: Model) -> Iterator[ir.Graph | ir.Function]:
    yield model.graph
    yield from model.functions.values()
    for step in model.steps:
        yield step.algorithm
        if step.initialization is not None:
            yield step.initialization


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the warnings of `onnx_ir`: `onward.check` reports the same faults with hints."""
    logger = logging.getLogger("onnx_ir")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _library_errors() -> Iterator[None]:
    try:
        yield
    except Error:
        raise
    except (ir.serde.SerdeError, ValueError, TypeError, KeyError, NotImplementedError, RecursionError) as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        message = f"the model is not valid ONNX: {cause}"
        raise InvalidModelError(message, hint="`onward check MODEL` locates the fault") from error


def stamp(model: Model) -> Model:
    """Record the fingerprint of the inference graph in each step that Onward made."""
    ours = [step for step in model.steps if FINGERPRINT in step.metadata or "train.recipe" in step.metadata]
    if ours:
        with without_data(model):
            mark = fingerprint(to_proto(Model(model.ir)).graph)  # without steps, which have no part in it
        for step in ours:
            step.metadata[FINGERPRINT] = mark
    return model


@contextmanager
def without_data(model: Model) -> Iterator[dict[int, ir.TensorProtocol]]:
    """Make `to_proto(model)` write a reference instead of the bytes of each large tensor.

    For tools that work on protobuf. `with_data` restores the data in the model that they return.
    """
    large = [(value, value.const_value) for value in _initializers(model) if _is_large(value.const_value)]
    by_offset: dict[int, ir.TensorProtocol] = {}
    end = 0
    for value, tensor in large:
        by_offset[end] = tensor
        location = (_ELSEWHERE, end, tensor.nbytes, tensor.dtype)
        value.const_value = ir.ExternalTensor(*location, base_dir="", **storage.describe_tensor(tensor))
        end += tensor.nbytes
    try:
        yield by_offset
    finally:
        for value, tensor in large:
            value.const_value = tensor


def with_data(model: Model, tensors: Mapping[int, ir.TensorProtocol]) -> Model:
    """Put back the data that `without_data` yielded."""
    for value in _initializers(model):
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor) and tensor.location == _ELSEWHERE:
            value.const_value = tensors[tensor.offset or 0]
    return model


def _initializers(model: Model) -> Iterator[ir.Value]:
    for container in _containers(model):
        for graph in graphs_in(container.graph if isinstance(container, ir.Function) else container):
            yield from graph.initializers.values()


_ELSEWHERE = "onward:elsewhere"
_LARGE = 1024
"""Bytes above which a tensor becomes a reference; shapes and axes, whose values tools read, are smaller."""


def _is_large(tensor: ir.TensorProtocol | None) -> TypeGuard[ir.TensorProtocol]:
    if tensor is None or isinstance(tensor, protos.SparseTensor) or tensor.dtype == ir.DataType.STRING:
        return False
    return isinstance(tensor, ir.ExternalTensor) or tensor.nbytes > _LARGE


# ---- the fingerprint of a model --------------------------------------------------------------------------------------

# A fingerprint of an inference graph: has a tool changed it since its training was written?
#
# It covers what training depends on: names, types and shapes of inputs, outputs and initializers,
# and how nodes connect them. It ignores what may change without harm: the values of tensors
# (training changes them), where they are stored, doc strings, metadata, the names of nodes, and the
# types of inner values, which shape inference adds.

FINGERPRINT = "train.fingerprint"
"""Metadata key of the fingerprint in an algorithm."""


def fingerprint(graph: GraphProto) -> str:
    """Return 64 hex digits, equal for graphs that an algorithm cannot tell apart."""
    digest = hashlib.sha256()
    for chunk in _graph(graph):
        data = chunk if isinstance(chunk, bytes) else str(chunk).encode()
        digest.update(b"%d:" % len(data))  # so that ("ab", "c") and ("a", "bc") differ
        digest.update(data)
    return digest.hexdigest()


def _graph(graph: GraphProto) -> Iterator[object]:
    for heading, values in (("input", graph.input), ("output", graph.output)):
        yield from (heading, len(values))
        for value in values:
            yield value.name
            yield from _type(value.type)
    yield from ("initializer", len(graph.initializer))
    for tensor in sorted(graph.initializer, key=lambda tensor: tensor.name):  # their order means nothing
        yield from (tensor.name, tensor.data_type, *_count_values(tensor.dims))
    yield from ("sparse_initializer", len(graph.sparse_initializer))
    for sparse in sorted(graph.sparse_initializer, key=lambda sparse: sparse.values.name):
        yield from (sparse.values.name, sparse.values.data_type, *_count_values(sparse.dims))
    yield from ("node", len(graph.node))
    for node in graph.node:
        yield from _node(node)


def _type(proto: TypeProto) -> Iterator[object]:
    if not proto.HasField("tensor_type"):
        yield proto.SerializeToString(deterministic=True)
        return
    yield proto.tensor_type.elem_type
    if proto.tensor_type.HasField("shape"):
        dims = proto.tensor_type.shape.dim
        yield from _count_values([dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in dims])


def _node(node: NodeProto) -> Iterator[object]:
    yield from (domain_of(node), node.op_type, node.overload)
    yield from _count_values(_without_trailing_gaps(node.input))
    yield from _count_values(_without_trailing_gaps(node.output))
    yield len(node.attribute)
    for attribute in sorted(node.attribute, key=lambda attribute: attribute.name):
        yield from _attribute(attribute)


def _attribute(attribute: AttributeProto) -> Iterator[object]:
    yield from (attribute.name, attribute.ref_attr_name, repr(attribute.f), attribute.i, attribute.s)
    for values in (attribute.floats, attribute.ints, attribute.strings):
        yield from _count_values(values)
    for tensor in (*((attribute.t,) if attribute.HasField("t") else ()), *attribute.tensors):
        yield from (tensor.data_type, *_count_values(tensor.dims))
    for graph in (*((attribute.g,) if attribute.HasField("g") else ()), *attribute.graphs):
        yield from _graph(graph)


def _count_values(values: Sequence[object]) -> tuple[object, ...]:
    return len(values), *values


def _without_trailing_gaps(names: Sequence[str]) -> Sequence[str]:
    """Drop empty names at the end: optional inputs and outputs may be written or left out."""
    end = len(names)
    while end and not names[end - 1]:
        end -= 1
    return names[:end]
