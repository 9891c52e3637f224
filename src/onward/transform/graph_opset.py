"""Conversion of one graph to another version of the standard operator set."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx
from onnx import GraphProto, ModelProto, TensorProto, ValueInfoProto, version_converter

from onward.build import Names
from onward.errors import UnsupportedError
from onward.model.protos import replace_entries, with_nested
from onward.standard import IR_VERSION, STANDARD
from onward.transform.types import check_equations

_NUMPY_BROADCAST = 7
_SCAN_WITHOUT_BATCHES = 9
_SCALES_OF_CHANNELS = 21


def convert_graph(
    graph: GraphProto,
    opsets: Sequence[onnx.OperatorSetIdProto],
    version: int,
    names: Names,
    captured: Iterable[ValueInfoProto] = (),
) -> None:
    """Convert one graph in place. Values from outside are declared as inputs during the conversion."""
    if _has_operators_of_both(graph, _standard_version(opsets), version):
        return
    before = GraphProto()
    before.CopyFrom(graph)
    elsewhere = [t for t in graph.initializer if t.data_location == TensorProto.EXTERNAL]
    declared = {value.name for value in graph.input}
    shell = ModelProto(ir_version=IR_VERSION, graph=graph, opset_import=opsets)
    for tensor in elsewhere:
        shell.graph.initializer.remove(tensor)
        if tensor.name not in declared:
            shell.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    for sparse in graph.sparse_initializer:
        data_type = sparse.values.data_type
        shell.graph.input.append(onnx.helper.make_tensor_value_info(sparse.values.name, data_type, sparse.dims))
    shell.graph.ClearField("sparse_initializer")
    shell.graph.input.extend(captured)
    if version >= _NUMPY_BROADCAST > _standard_version(shell.opset_import):
        _spread_slopes(shell)
    if version >= _SCALES_OF_CHANNELS > _standard_version(shell.opset_import):
        _spread_groups(shell.graph)
    has_batches = version >= _SCAN_WITHOUT_BATCHES > _standard_version(shell.opset_import)
    if has_batches:
        _refuse_sequence_lengths(shell.graph)
    _hide_foreign(shell)
    result = _convert(shell, version)
    _restore_foreign(result)
    if has_batches:
        _scan_batches(result)
    _rename_added(result, before, names)
    replace_entries(graph.node, result.node)
    _restore_notes(graph, before)
    names_in_graph = {tensor.name for tensor in graph.initializer}
    graph.initializer.extend(tensor for tensor in result.initializer if tensor.name not in names_in_graph)


def _standard_version(opsets: Iterable[onnx.OperatorSetIdProto]) -> int:
    return max((opset.version for opset in opsets if opset.domain in STANDARD), default=1)


def _has_operators_of_both(graph: GraphProto, *versions: int) -> bool:
    """True if each operator is the same in both operator sets."""
    if max(versions) > onnx.defs.onnx_opset_version():
        return False
    operators = {node.op_type for inner in with_nested(graph) for node in inner.node if node.domain in STANDARD}
    try:
        schemas = [[onnx.defs.get_schema(operator, version, "") for version in versions] for operator in operators]
    except onnx.defs.SchemaError:  # an operator that the standard does not have there
        return False
    return all(old.since_version == new.since_version and not new.deprecated for old, new in schemas)


def _spread_slopes(shell: ModelProto) -> None:
    """Give slopes of PRelu an axis per axis behind the channels, which the converter omits.

    Up to operator set 6, a slope of shape [C] has one number per channel; from 7 on it broadcasts
    to the last axis.
    """
    graph = shell.graph
    check_equations(shell)
    typed = onnx.shape_inference.infer_shapes(shell).graph
    ranks = {v.name: len(v.type.tensor_type.shape.dim) for v in (*typed.input, *typed.value_info, *typed.output)}
    ranks |= {tensor.name: len(tensor.dims) for tensor in graph.initializer}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        x, slope = (*node.input, "", "")[:2]
        if node.op_type == "PRelu" and ranks.get(slope) == 1 and ranks.get(x, 0) > 2:
            axes = range(1, ranks[x] - 1)
            nodes.append(onnx.helper.make_node("Unsqueeze", [slope], [f"{slope}/spread"], axes=list(axes)))
            node.input[1] = f"{slope}/spread"
        nodes.append(onnx.NodeProto.FromString(node.SerializeToString()))
    replace_entries(graph.node, nodes)


def _spread_groups(graph: GraphProto) -> None:
    """Give GroupNormalization scale and bias per channel; up to version 20 they are per group.

    The converter leaves them unchanged.
    """
    for inner in with_nested(graph):
        nodes: list[onnx.NodeProto] = []
        for node in inner.node:
            if node.op_type == "GroupNormalization" and node.domain in STANDARD:
                groups = next(attribute.i for attribute in node.attribute if attribute.name == "num_groups")
                for i in (1, 2):
                    nodes += _of_channels(node, groups, i, f"{node.output[0]}/{i}")
            nodes.append(onnx.NodeProto.FromString(node.SerializeToString()))
        replace_entries(inner.node, nodes)


def _of_channels(node: onnx.NodeProto, groups: int, i: int, name: str) -> list[onnx.NodeProto]:
    """Return nodes that repeat the i-th input of a GroupNormalization for each channel."""
    x, of_groups = node.input[0], node.input[i]
    groups_, channels, size, shape, axis, column, wide, node.input[i] = (f"{name}/{k}" for k in range(8))
    make = onnx.helper.make_node
    return [
        make("Constant", [], [groups_], value_ints=[groups]),
        make("Constant", [], [axis], value_ints=[1]),
        make("Shape", [x], [channels], start=1, end=2),
        make("Div", [channels, groups_], [size]),
        make("Concat", [groups_, size], [shape], axis=0),
        make("Unsqueeze", [of_groups, axis], [column]),
        make("Expand", [column, shape], [wide]),
        make("Reshape", [wide, channels], [node.input[i]]),
    ]


def _refuse_sequence_lengths(graph: GraphProto) -> None:
    for inner in with_nested(graph):
        for node in inner.node:
            if node.op_type == "Scan" and node.input[0]:
                raise UnsupportedError(f"`Scan` (node `{node.name}`) has sequence lengths, which later versions lack")


def _scan_batches(graph: GraphProto) -> None:
    """Put each Scan into another over the batch, which the converter omits.

    In operator set 8, all inputs and outputs of a Scan had a first axis of samples, each scanned by itself.
    """
    for scan in [node for inner in with_nested(graph) for node in inner.node if node.op_type == "Scan"]:
        inner_scan = onnx.NodeProto.FromString(scan.SerializeToString())
        inner_scan.input[:] = [f"{name}/sample" for name in scan.input]
        inner_scan.output[:] = [f"{name}/sample" for name in scan.output]
        settings = {attribute.name: attribute for attribute in scan.attribute}
        body, states = settings["body"].g, len(scan.input) - settings["num_scan_inputs"].i
        inputs, outputs = (
            [_sample(*pair, is_sequence=i >= states) for i, pair in enumerate(zip(names, values, strict=True))]
            for names, values in ((inner_scan.input, body.input), (inner_scan.output, body.output))
        )
        sample = onnx.helper.make_graph([inner_scan], f"{body.name}/sample", inputs, outputs)
        del scan.attribute[:]
        scan.attribute.append(onnx.helper.make_attribute("body", sample))
        scan.attribute.append(onnx.helper.make_attribute("num_scan_inputs", len(scan.input)))


def _sample(name: str, value: ValueInfoProto, is_sequence: bool) -> ValueInfoProto:
    """Return the type of one sample for a Scan whose body has this value, or of a sequence of it."""
    described = value.type.tensor_type
    result = onnx.helper.make_tensor_value_info(name, described.elem_type, None)
    if described.HasField("shape"):
        sizes = ([onnx.TensorShapeProto.Dimension()] if is_sequence else []) + [*described.shape.dim]
        result.type.tensor_type.shape.CopyFrom(onnx.TensorShapeProto(dim=sizes))
    return result


_FOREIGN = {"LayerNormalization": 17, "SimplifiedLayerNormalization": 1000}
"""Operator that ONNX Runtime puts into the standard domain -> the first operator set that has it."""
_ASIDE = "com.microsoft"


def _hide_foreign(shell: ModelProto) -> None:
    """Move foreign operators into another domain, since the converter refuses them."""
    version = _standard_version(shell.opset_import)
    for graph in with_nested(shell.graph):
        for node in graph.node:
            if node.domain == "" and version < _FOREIGN.get(node.op_type, 0):
                node.domain = _ASIDE
    if not any(opset.domain == _ASIDE for opset in shell.opset_import):
        shell.opset_import.append(onnx.helper.make_opsetid(_ASIDE, 1))


def _restore_foreign(result: GraphProto) -> None:
    for graph in with_nested(result):
        for node in graph.node:
            if node.domain == _ASIDE and node.op_type in _FOREIGN:
                node.domain = ""


def _convert(shell: ModelProto, version: int) -> GraphProto:
    try:
        return version_converter.convert_version(shell, version).graph
    except Exception as error:  # the converter raises whatever its C++ assertions become
        reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        reason = reason.rpartition("failed: ")[2]
        raise UnsupportedError(
            f"onnx cannot convert the model to operator set {version}: {reason}",
            hint="export it with a newer operator set, or convert it one version at a time to find the operator",
        ) from error


def _rename_added(result: GraphProto, before: GraphProto, names: Names) -> None:
    """Rename new values uniquely: the converter calls them `_v_4` in each graph."""
    old = {name for node in before.node for name in node.output} | {t.name for t in before.initializer}
    added = {name for node in result.node for name in node.output} | {t.name for t in result.initializer}
    fresh = {name: names.fresh(name.strip("_")) for name in sorted(added - old - {""})}
    if not fresh:
        return
    for graph in with_nested(result):
        for node in graph.node:
            node.input[:] = [fresh.get(name, name) for name in node.input]
            node.output[:] = [fresh.get(name, name) for name in node.output]
    for tensor in result.initializer:
        tensor.name = fresh.get(tensor.name, tensor.name)


def _restore_notes(graph: GraphProto, before: GraphProto) -> None:
    """Restore what the converter drops: names, notes, metadata, references to attributes."""
    notes = {tuple(node.output): node for node in before.node}
    for node in graph.node:
        original = notes.get(tuple(node.output))
        if original is None or original.op_type != node.op_type:
            continue
        node.name, node.doc_string = original.name, original.doc_string
        replace_entries(node.metadata_props, original.metadata_props)
        references = {attribute.name: attribute for attribute in original.attribute if attribute.ref_attr_name}
        for attribute in node.attribute:
            if attribute.name in references:
                attribute.CopyFrom(references[attribute.name])
