"""Types and shapes that a file does not state, and faults of single nodes, according to `onnx`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import suppress
from typing import Any

import onnx
import onnx_ir as ir
from onnx import AttributeProto, GraphProto, ModelProto, ValueInfoProto, defs

from onward.errors import InvalidModelError, UnsupportedError, first_line, list_names
from onward.model import Model
from onward.model.checks import check_expansion
from onward.model.protos import all_nodes
from onward.model.serde import to_proto, without_data
from onward.model.walk import ancestors, nested_graphs, read_by
from onward.runtime.sessions import open_session
from onward.shapes import dims
from onward.standard import IR_VERSION, KERNELS, domain_of

_HINT = "run `onward check MODEL`"


def value_types(proto: ModelProto, *added: GraphProto) -> dict[str, ValueInfoProto]:
    """Return the types of values of the inference graph, and of graphs added to it."""
    inference = ModelProto(ir_version=proto.ir_version, opset_import=proto.opset_import, functions=proto.functions)
    inference.graph.CopyFrom(proto.graph)
    for graph in added:
        inference.graph.MergeFrom(graph)  # appends the repeated fields
    return _infer_types(inference)


def _infer_types(proto: ModelProto) -> dict[str, ValueInfoProto]:
    check_equations(proto)
    try:
        graph = onnx.shape_inference.infer_shapes(proto, data_prop=_is_cheap_to_follow(proto)).graph
    except onnx.shape_inference.InferenceError as error:
        reason = str(error).splitlines()[0]
        raise InvalidModelError(f"the types of the model conflict: {reason}", hint=_HINT) from error
    except onnx.checker.ValidationError as error:  # from the inliner inside: more than 100 functions deep
        raise UnsupportedError(
            f"the functions of the model are nested too deep for onnx: {first_line(error)}",
            hint="inline them first: `onward inline MODEL -o plain.onnx` (`onward.transform.inline(model)`)",
        ) from error
    types = {value.name: value for value in (*graph.value_info, *graph.output, *graph.input)}
    for tensor in graph.initializer:
        types[tensor.name] = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
    return types


def is_static(value: ir.Value) -> bool:
    """True if the type and all sizes of a value are known."""
    return value.type is not None and value.shape is not None and value.shape.is_static()


def is_symbolic(value: ir.Value, symbols: Container[str | None] | None = None) -> bool:
    """True if a value is typed up to symbols (default: any symbols), or onnx has no inference for its operator."""
    node = value.producer()
    if node is not None and node.domain == KERNELS:
        return True
    sizes = dims(value)
    if value.type is None or sizes is None:
        return False
    return symbols is None or all(isinstance(size, int) or size.value in symbols for size in sizes)


def fill_in_types(model: Model, values: Iterable[ir.Value], is_known: Callable[[ir.Value], bool] = is_static) -> None:
    """Infer unknown types and shapes of `values`, in place; nested graphs are left out."""
    values = list(values)
    untyped = [value for value in values if value.graph is model.graph and not is_known(value)]
    if untyped:
        _infer(model, untyped)
    for value in values:
        shape = value.shape or ()
        if math.prod(abs(dim) for dim in shape if isinstance(dim, int)) > _MOST_ELEMENTS:
            sizes = ", ".join(map(str, shape))
            raise InvalidModelError(
                f"`{value.name}` would be a tensor of [{sizes}], which no machine can hold",
                hint="check the sizes, pads and shapes before it",
            )


def _infer(model: Model, untyped: list[ir.Value]) -> None:
    submodel = _before(model, untyped)
    check_expansion(submodel)
    with without_data(model):
        types = _infer_types(to_proto(submodel))
    for value in untyped:
        if value.name in types and not (value.is_initializer() or value.is_graph_input()):
            with suppress(ir.serde.SerdeError):  # a type that the graph library cannot hold remains unknown
                ir.serde.deserialize_value_info_proto(types[value.name], value)


_MOST_ELEMENTS = 2**48
"""More elements than any machine holds; sizes computed from larger ones may overflow 64 bits."""


def fill_in_types_before(model: Model, ends: Iterable[ir.Value]) -> None:
    """Infer unknown types and shapes of `ends` and of all values before them, in place."""
    nodes, values_read = ancestors(ends)
    fill_in_types(model, values_read.union(*(node.outputs for node in nodes)))


def _before(model: Model, untyped: Iterable[ir.Value]) -> Model:
    """Return the nodes from which the types follow, back to values with known types.

    Functions are included only if called: with functions, inference does not follow the integers of shapes.
    """
    graph = model.graph
    pending = [node for value in untyped if (node := value.producer()) is not None]
    needed = set(pending)
    values_read: dict[ir.Value, None] = {}
    while pending:
        fresh = {value: None for value in read_by(pending.pop()) if value not in values_read and value.graph is graph}
        values_read.update(fresh)
        before = {node for value in fresh if not _is_border(value) and (node := value.producer()) is not None}
        pending += before - needed
        needed |= before
    view: Any = ir.GraphView(
        [value for value in values_read if value.producer() not in needed and not value.is_initializer()],
        [value for value in graph.outputs if value.producer() in needed],
        nodes=[node for node in graph if node in needed],
        initializers=[value for value in values_read if value.is_initializer()],
        opset_imports=graph.opset_imports,
        name=graph.name,
    )
    calls = any(node.op_identifier() in model.functions for node in ir.traversal.RecursiveGraphIterator(view))
    functions = list(model.functions.values()) if calls else []
    return Model(ir.Model(view, ir_version=model.ir.ir_version, functions=functions))


def _is_border(value: ir.Value) -> bool:
    """True if the type is fully known, and shapes are not computed from the value."""
    if not is_static(value):
        return False
    node, shape = value.producer(), value.shape
    is_list = value.dtype is not None and value.dtype.is_integer() and shape is not None and len(shape) < 2
    return not is_list and node is not None and node.op_type != "Constant"


_LONGEST = 10_000


def _is_cheap_to_follow(proto: ModelProto) -> bool:
    """True if inference may follow the integers of shapes: only Concat makes longer ones.

    A few dozen nodes that append a list to itself would keep the inference busy forever.
    """
    return not proto.functions and _longest(proto.graph, {}) < _LONGEST


def _longest(graph: GraphProto, lengths: dict[str, int]) -> int:
    """Return a bound of the number of integers in any value of a graph and of its nested graphs."""
    lengths |= {tensor.name: tensor.dims[0] if len(tensor.dims) == 1 else 1 for tensor in graph.initializer}
    longest = 1
    for node in graph.node:
        input_lengths = [lengths.get(name, 1) for name in node.input]
        length = sum(input_lengths) if node.op_type == "Concat" else max(input_lengths, default=1)
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                length = max(length, _longest(attribute.g, dict(lengths)))
        longest = max(longest, length)
        lengths.update(dict.fromkeys(node.output, length))
    return longest


# ---- words and equations in attributes -------------------------------------------------------------------------------


_PADDING = ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")
_REDUCTION = ("none", "sum", "mean")
_SCATTER = ("none", "add", "mul", "max", "min")
_DIRECTION = ("forward", "reverse", "bidirectional")
_ACTIVATIONS = ("Affine", "Elu", "HardSigmoid", "LeakyRelu", "Relu", "ScaledTanh", "Sigmoid", "Softplus", "Softsign",
                "Tanh", "ThresholdedRelu")  # fmt: skip
_RESIZE = {
    "mode": ("nearest", "linear", "cubic"),
    "coordinate_transformation_mode": (
        "half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric", "tf_crop_and_resize",
        "tf_half_pixel_for_nn",
    ),
    "nearest_mode": ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil"),
    "keep_aspect_ratio_policy": ("stretch", "not_larger", "not_smaller"),
}  # fmt: skip

_SAME: dict[tuple[str, ...], dict[str, tuple[str, ...]]] = {
    ("Conv", "ConvInteger", "ConvTranspose", "QLinearConv", "AveragePool", "LpPool", "MaxPool"): {"auto_pad": _PADDING},
    ("LSTM", "GRU", "RNN"): {"direction": _DIRECTION, "activations": _ACTIVATIONS},
    ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"): {"reduction": _REDUCTION},
    ("ScatterElements", "ScatterND"): {"reduction": _SCATTER},
    ("Cast", "CastLike"): {"round_mode": ("up", "down", "nearest")},
    ("DepthToSpace", "SpaceToDepth"): {"mode": ("DCR", "CRD")},
    ("BitShift",): {"direction": ("LEFT", "RIGHT")},
    ("Gelu",): {"approximate": ("none", "tanh")},
    ("GridSample",): {"mode": ("linear", "nearest", "cubic"), "padding_mode": ("zeros", "border", "reflection")},
    ("Pad",): {"mode": ("constant", "reflect", "edge", "wrap")},
    ("Resize",): _RESIZE,
    ("RoiAlign",): {"mode": ("avg", "max"), "coordinate_transformation_mode": ("half_pixel", "output_half_pixel")},
    ("TensorScatter",): {"mode": ("linear", "circular")},
}
WORDS: Mapping[str, Mapping[str, tuple[str, ...]]] = {name: words for names, words in _SAME.items() for name in names}
"""Operator -> attribute -> words."""
_EQUATION = re.compile(r"[A-Za-z ,.]*(->[A-Za-z ,.]*)?")


def check_words(operator: str, attributes: Mapping[str, Any], described: str) -> None:
    """Raise if string attributes of a node have values outside the standard."""
    for name, allowed in WORDS.get(operator, {}).items():
        value = attributes.get(name)
        for word in value if isinstance(value, list) else [] if value is None else [value]:
            if word not in allowed:
                raise InvalidModelError(
                    f"`{name}` of {described} is {word!r}", hint=f"it is one of {list_names(allowed, len(allowed))}"
                )
    if operator == "Einsum":
        _check_equation(attributes["equation"], described)


def check_equations(proto: ModelProto) -> None:
    """Raise for equations on which shape inference of `onnx` would not end."""
    for node in all_nodes([*proto.graph.node, *(node for function in proto.functions for node in function.node)]):
        if node.op_type == "Einsum":
            for attribute in node.attribute:
                if attribute.name == "equation":
                    _check_equation(attribute.s.decode("utf-8", "replace"), f"`Einsum` (node `{node.name}`)")


def _check_equation(equation: str, described: str) -> None:
    if not _EQUATION.fullmatch(equation):
        raise InvalidModelError(
            f"`equation` of {described} is {equation!r}", hint="use letters, commas and dots, as in `ij,jk->ik`"
        )


# ---- what is wrong with a single node --------------------------------------------------------------------------------


_MICROSOFT = "com.microsoft"
_LARGEST = 64
"""Largest number of elements of a constant from which shapes may follow."""


def fault_of(node: ir.Node, imports: Mapping[str, int]) -> str | None:
    """Return why a node is an invalid use of its operator, as far as is known; else None."""
    if node.domain == _MICROSOFT:
        return _refusal_of_onnxruntime(_alone(node, imports))
    if not defs.has(node.op_type, domain_of(node)):
        return None
    proto = _alone(node, imports)
    context: Any = onnx.checker.C.CheckerContext()
    context.ir_version, context.opset_imports = proto.ir_version, dict(imports)
    try:
        onnx.checker.check_node(proto.graph.node[0], context)
        if not any(nested_graphs(node)):  # they read values that are unknown here
            onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True, data_prop=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        return first_line(error)
    return None


def _refusal_of_onnxruntime(proto: ModelProto) -> str | None:
    declared = {value.name for value in proto.graph.input} | {tensor.name for tensor in proto.graph.initializer}
    if any(name and name not in declared for name in proto.graph.node[0].input):
        return None
    try:
        open_session(proto)
    except UnsupportedError as error:
        return error.message
    return None


def _alone(node: ir.Node, imports: Mapping[str, int]) -> ModelProto:
    """Return a model of one node; small constants stay constants."""
    inputs = dict.fromkeys(value for value in node.inputs if value is not None)
    typed = [value for value in inputs if value.type is not None]
    constants = [v for v in typed if v.const_value is not None and v.const_value.size <= _LARGEST]
    view: Any = ir.GraphView(
        [value for value in typed if value not in constants],
        node.outputs if node.domain == _MICROSOFT else [],
        nodes=[node],
        initializers=constants,
        opset_imports=dict(imports),
        name="node",
    )
    return ir.serde.serialize_model(ir.Model(view, ir_version=IR_VERSION))
