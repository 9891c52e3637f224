"""Notes of PyTorch's exporters: the module tensor behind each tensor of a file.

`torch.onnx.export(dynamo=True)` folds what depends on parameters alone, stores equal tensors of up
to 1024 elements once, and drops zero biases. Its notes tell: the graph has the signature of the
exported program, and each node its original call with the names of arguments. The tracing exporter
leaves no notes, but stores only parameters and buffers under names of the module.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from onward.build import Builder, Names
from onward.constants import add_initializer, constant_tensor
from onward.errors import UnsupportedError, list_names
from onward.model import Model
from onward.recipe.constants import expose, is_uniform, under_name
from onward.recipe.layers import layers as find_layers
from onward.recipe.step_builder import stop_gradient

Origin = Literal["parameter", "buffer", "constant"]

_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
_FOLDED = "pkg.onnxscript.optimizer.folded_from"
_SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"
_CALL = "pkg.torch.onnx.fx_node"

_HELD = re.compile(r"^(\w+): (PARAMETER|BUFFER|CONSTANT_TENSOR) target='([^']*)'", re.MULTILINE)
_NAME = re.compile(r"'([^']*)'")
_ARGUMENT = re.compile(r"%(\w+)")
_EMBEDDING = re.compile(r"aten\.embedding\.default\]\(args = \(%\w+, %\w+, (?P<row>-?\d+)(?:, (?P<scales>True|False))?")
"""A call with a row for the padding, -1 for none."""
_INTERNAL = re.compile(r"val_\d+")
"""Names that the exporter generates, for transposed or reshaped parameters, too."""
_EXPORTER_NAME = re.compile(r"(.*[/.])?Constant(_\d+)?_output_0|(c_)?lifted_tensor_\d+")
"""Names of tensors computed in a module, in Constant nodes or in initializers."""
_TRACED_MATRIX = re.compile(r"onnx::MatMul_\d+")
"""Names of weights that the tracing exporter has transposed."""
_TRACED_WEIGHT = re.compile(r"onnx::(Gemm|GRU|LSTM|MatMul|RNN)_\d+")
"""Names of weights that the tracing exporter has computed."""
_USUAL_PARAMETER = re.compile(r"(weight|bias|gamma|beta)[^.]*$")
_MOVED = {
    "alias", "clone", "contiguous", "detach", "flatten", "getitem", "permute", "reshape", "select", "slice", "split",
    "squeeze", "t", "to", "_to_copy", "transpose", "unflatten", "unsqueeze", "view",
}  # fmt: skip
"""Calls that move the numbers of a parameter without changing them."""
_CONSTANTS = {"Constant", "ConstantOfShape"}
_WITH_BIAS, _BIAS = {"Conv", "ConvTranspose", "Gemm"}, 2
"""Layers from which the exporter drops a bias, and the index of that bias."""

_SCALES_AND_BIASES = {
    "BatchNormalization": (1, 2, 3, 4), "BiasGelu": (1,), "FusedConv": (2,), "GroupNormalization": (1, 2),
    "InstanceNormalization": (1, 2), "LayerNormalization": (1, 2), "RMSNormalization": (1,),
    "SimplifiedLayerNormalization": (1,), "SkipLayerNormalization": (2, 3, 4),
}  # fmt: skip
"""Inputs of operators that are scales and biases, by the operator."""
_PADS_ARE_INPUTS = 11
"""The version of the operator set since which Pad takes its sizes as an input."""
_ONLY_IN_OPTIMIZED = "com.microsoft.nchwc"
"""A domain of files that ONNX Runtime has optimized; exporters do not import it."""

EXPORTER_CONSTANT = "a constant of the exporter"
"""The reason that is reported for an untrained tensor of the exporter."""

Use = tuple[ir.Node, int]


@dataclasses.dataclass(frozen=True)
class ModuleTensor:
    """A tensor of the module."""

    name: str
    role: str
    """PARAMETER, BUFFER or CONSTANT_TENSOR, as the notes write it."""


@dataclasses.dataclass(frozen=True)
class Restored:
    """Changes that restored the module's parameters in a model."""

    separated: dict[str, str] = dataclasses.field(default_factory=dict)
    """Names of new tensors -> the stored tensor that the exporter used for them."""
    joined: dict[str, str] = dataclasses.field(default_factory=dict)
    """Copies of a parameter -> the parameter that replaces them."""
    biases: list[str] = dataclasses.field(default_factory=list)
    """Zero biases that the exporter dropped."""
    padding: dict[str, int] = dataclasses.field(default_factory=dict)
    """Tables of embeddings -> the row without gradient (`padding_idx`)."""

    @classmethod
    def from_fact(cls, fact: Any) -> Restored:
        """Parse the record of a training model, which may be malformed."""
        fields = fact if isinstance(fact, dict) else {}
        names = ("separated", "joined", "padding")
        separated, joined, padding = (x if isinstance(x := fields.get(name), dict) else {} for name in names)
        biases = fields.get("biases")
        return cls(
            {str(new): str(old) for new, old in separated.items()},
            {str(new): str(old) for new, old in joined.items()},
            [str(name) for name in biases] if isinstance(biases, list) else [],
            {str(name): row for name, row in padding.items() if isinstance(row, int)},
        )

    def remarks(self) -> Iterator[str]:
        if self.separated:
            stored = len({*self.separated.values()})
            yield (
                f"the exporter stored {len(self.separated) + stored} equal tensors of several layers as {stored}: they "
                f"are trained separately, as {list_names(list(self.separated), 4)}"
            )
        if self.biases:
            yield f"zero biases that the exporter dropped are trained: {list_names(self.biases, 4)}"
        for copy, parameter in self.joined.items():
            yield f"`{copy}` is a copy of `{parameter}` by the exporter: they are trained as one"
        for table, row in self.padding.items():
            yield f"row {row} of `{table}` is padding (`padding_idx`) and gets no gradient"


def origin(value: ir.Value) -> Origin | None:
    """Return the module tensor behind a value; None if the file does not record it."""
    if role := value.metadata_props.get(_KIND, ""):
        return "parameter" if "PARAMETER" in role else "buffer" if "BUFFER" in role else "constant"
    tensors = _held_by_name(value.graph)
    sources = _folded_from(value)
    if tensors and sources:
        roles = {tensors[name].role for name in sources if name in tensors}
        return "parameter" if "PARAMETER" in roles else "buffer" if "BUFFER" in roles else "constant"
    if tensors:
        node = value.producer()
        in_node = node is not None and node.op_type in _CONSTANTS
        is_internal = _INTERNAL.fullmatch(value.name or "") is not None and not _may_be_argument(value)
        return "constant" if in_node or (node is None and is_internal) else None
    if sources and not any("." in name for name in sources):  # the names of parameters have dots
        tensor = constant_tensor(value)
        return "constant" if tensor is not None and is_uniform(tensor.numpy()) else None
    return None


def _may_be_argument(value: ir.Value) -> bool:
    """True if a tensor may be a transposed parameter: one that a call names is stored elsewhere."""
    graph = value.graph
    if graph is None or value.const_value is None or value.const_value.size < 2:
        return False
    arguments = signature(graph)
    calls = {use.node.metadata_props.get(_CALL, "") for use in value.uses()}
    names = {arguments[name].name for call in calls for name in _ARGUMENT.findall(call) if name in arguments}
    stored_names = {
        *graph.initializers,
        *(name for other in graph.initializers.values() for name in _folded_from(other)),
    }
    return "" in calls or not names <= stored_names


def is_computed(value: ir.Value) -> bool:
    """True if the exporter computed a tensor from parameters, beyond moving their numbers."""
    name = value.name or ""
    sources = [source for source in _folded_from(value) if source in _held_by_name(value.graph)]
    is_moved = len(sources) == 1 and re.sub(r"_\d+$", "", name) in _MOVED
    return bool(sources_of(value)) and not is_moved and _INTERNAL.fullmatch(name) is None


def sources_of(value: ir.Value) -> list[str]:
    """Return the names of the parameters that the exporter computed a tensor from."""
    tensors = _held_by_name(value.graph)
    return [name for name in _folded_from(value) if name in tensors and tensors[name].role == "PARAMETER"]


def is_exporter_constant(value: ir.Value, model: Model) -> bool:
    """True if PyTorch's exporters created a tensor, judged by its node and name."""
    node, name = value.producer(), value.name or ""
    if _EXPORTER_NAME.fullmatch(name):
        return True
    if model.ir.producer_name != "pytorch":
        return False
    if node is not None:
        return node.op_type in _CONSTANTS
    is_unit = all(index in _SCALES_AND_BIASES.get(node.op_type, ()) for node, index in _readers(value))
    tensor = value.const_value if is_unit and _INTERNAL.fullmatch(name) else None
    return tensor is not None and is_uniform(tensor.numpy())


def _readers(value: ir.Value) -> Iterator[Use]:
    for use in value.uses():
        if use.node.op_type in ("Cast", "CastLike", "Expand", "Identity") and use.idx == 0:
            yield from _readers(use.node.outputs[0])
        else:
            yield use.node, use.idx


def is_traced(model: Model) -> bool:
    """True if PyTorch's tracing exporter wrote a file; the other one names nodes `node_...`."""
    return (
        model.ir.producer_name == "pytorch"
        and not any((node.name or "").startswith("node_") for node in model.graph)
        and not any(_KIND in value.metadata_props for value in model.graph.initializers.values())
    )


def is_held_in_trace(value: ir.Value) -> bool:
    """True if an initializer of a traced module has a module name, as parameters and buffers do."""
    name = value.name or ""
    is_own = name.isdigit() or name.startswith(("onnx::", "/")) or _EXPORTER_NAME.fullmatch(name) is not None
    return value.is_initializer() and not is_own


def is_named_as_parameter(value: ir.Value) -> bool:
    """True if a traced tensor is named like a parameter or computed for a layer."""
    name = value.name or ""
    if name.startswith("onnx::Conv"):  # with BatchNormalization folded into it, it has a bias
        return all(len(use.node.inputs) > _BIAS for use in value.uses() if use.node.op_type.startswith("Conv"))
    if name.startswith("onnx::"):
        return _TRACED_WEIGHT.fullmatch(name) is not None
    return name.isdigit() or _USUAL_PARAMETER.search(name) is not None


def restore(model: Model, join: bool = True, unfold: bool = False) -> Restored:
    """Give each parameter of the module its own tensor again, in place; return the changes.

    Args:
        join: use one tensor for copies of a parameter as well, which reads large tensors.
        unfold: store transposed or reshaped weights as the module does, under their names there.
    """
    restoration = _Restoration(model)
    if model.ir.producer_name == "tf2onnx" and not model.steps:
        restoration.leave_zeros_beside_biases()
    elif can_restore(model):
        if signature(model.graph) and any(_CALL in node.metadata_props for node in model.graph):
            restoration.separate_by_calls()
            join_copies = restoration.join_copies
        else:
            restoration.separate_behind_identities()
            if _may_be_merged(model):
                restoration.separate_by_layers()
            join_copies = restoration.join_transposed
        if join:
            join_copies()
        if unfold:
            restoration.unfold()
        restoration.end_gradients_of_padding()
    return restoration.changes


def can_restore(model: Model) -> bool:
    """True if tools that merge tensors have written a model that has no training step yet."""
    is_written = model.ir.producer_name == "pytorch" or _ONLY_IN_OPTIMIZED in model.ir.opset_imports
    return is_written and not model.steps


def signature(graph: ir.Graph | None) -> Mapping[str, ModuleTensor]:
    """Return a map from the names of call arguments to tensors of the module."""
    return _parse(graph.metadata_props.get(_SIGNATURE, ""))[0] if graph is not None else {}


def _held_by_name(graph: ir.Graph | None) -> Mapping[str, ModuleTensor]:
    return _parse(graph.metadata_props.get(_SIGNATURE, ""))[1] if graph is not None else {}


@functools.lru_cache(maxsize=4)
def _parse(text: str) -> tuple[dict[str, ModuleTensor], dict[str, ModuleTensor]]:
    """Return the tensors of a signature by argument, and by name in the module."""
    tensors = {argument: ModuleTensor(name, role) for argument, role, name in _HELD.findall(text)}
    return tensors, {tensor.name: tensor for tensor in tensors.values()}


def _folded_from(value: ir.Value) -> list[str]:
    return _NAME.findall(value.metadata_props.get(_FOLDED, ""))


# ---- changes ---------------------------------------------------------------------------------------------------------


class _Restoration:
    def __init__(self, model: Model):
        self.changes = Restored()
        self._model, self._graph = model, model.graph
        self._added: dict[tuple[str, str], ir.Value] = {}
        """(stored tensor, name in the module) -> new tensor, for repeated calls."""

    @functools.cached_property
    def _names(self) -> Names:  # slow for large models, and few need it
        return self._model.names()

    def separate_by_calls(self) -> None:
        """Separate tensors that were stored once, by the arguments of the calls in the notes."""
        tensors = signature(self._graph)
        calls: dict[str, list[ir.Node]] = {}
        for node in self._graph:
            if call := node.metadata_props.get(_CALL):
                calls.setdefault(call, []).append(node)
        for call, nodes in calls.items():
            arguments = [tensors[name] for name in dict.fromkeys(_ARGUMENT.findall(call)) if name in tensors]
            uses = [use for node in nodes for use in _uses(node, call)]
            waiting = [tensor for tensor in arguments if not any(tensor.name in _names(*use) for use in uses)]
            uses = [use for use in uses if not {tensor.name for tensor in arguments} & _names(*use)]
            assigned = _assign(waiting, uses, tensors) if waiting else []
            if assigned is None and (layer := _layer_without_bias(nodes)) is not None:
                if "batch_norm" in call:  # of BatchNormalization that was folded into it
                    self._restore_bias(layer, ModuleTensor(f"{layer.inputs[1].name}_bias", "PARAMETER"))  # type: ignore[union-attr]
                elif waiting[-1] is arguments[-1] and len(arguments) > 1 and waiting[-1].role == "PARAMETER":
                    assigned = _assign(waiting[:-1], uses, tensors)
                    self._restore_bias(layer, waiting[-1])
            for tensor, (node, index) in assigned or ():
                stored = node.inputs[index]
                assert stored is not None and stored.name is not None and stored.const_value is not None
                separate = self._added.get((stored.name, tensor.name))
                separate = separate or self._add(stored.name, tensor, stored.const_value)
                self.changes.separated[separate.name or ""] = stored.name
                node.replace_input_with(index, separate)

    def _restore_bias(self, layer: ir.Node, origin: ModuleTensor) -> None:
        weight = constant_tensor(layer.inputs[1])
        if weight is None:
            return
        bias = self._added.get(("", origin.name))
        if bias is None:
            bias = self._add("", origin, ir.Tensor(np.zeros(_units(layer, weight), weight.dtype.numpy())))
            self.changes.biases.append(bias.name or "")
        layer.resize_inputs(_BIAS + 1)
        layer.replace_input_with(_BIAS, bias)

    def _add(self, stored: str, origin: ModuleTensor, tensor: ir.TensorProtocol) -> ir.Value:
        """Add a tensor under its name in the module, with the exporter's note."""
        name = self._names.fresh(origin.name)
        value = add_initializer(self._graph, name, under_name(name, tensor))
        value.metadata_props[_KIND] = origin.role
        self._added[stored, origin.name] = value
        return value

    def separate_behind_identities(self) -> None:
        """Separate tensors that the tracing exporter stored once with an Identity for each name.

        Tied weights look the same. A uniform tensor is a fresh bias, scale or statistic.
        """
        for node in list(self._graph):
            stored = node.inputs[0] if node.op_type == "Identity" else None
            tensor = constant_tensor(stored)
            if tensor is not None and tensor.dtype.is_floating_point() and is_uniform(tensor.numpy()):
                self.changes.separated[node.outputs[0].name or ""] = stored.name or ""  # type: ignore[union-attr]
                expose(self._graph, node.outputs[0])

    def separate_by_layers(self) -> None:
        """Separate uniform scales and biases that layers share, if there are no notes.

        Tensors that are not uniform, or whose layers share a weight too, are tied.
        """
        for stored in list(self._graph.initializers.values()):
            tensor = stored.const_value
            layers = [(use.node, use.idx, _layer_of(use.node, use.idx)) for use in stored.uses()]
            if tensor is None or not tensor.dtype.is_floating_point() or len({id(layer) for *_, layer in layers}) < 2:
                continue
            if tensor.size < 2 or any(layer is None for *_, layer in layers) or not is_uniform(tensor.numpy()):
                continue
            if is_exporter_constant(stored, self._model):
                continue
            separate = {id(layers[0][2]): stored}
            for node, index, layer in layers[1:]:
                if id(layer) not in separate:
                    name = self._names.fresh(f"{node.name or node.op_type}/{stored.name}")
                    separate[id(layer)] = add_initializer(self._graph, name, under_name(name, tensor))
                    self.changes.separated[name] = stored.name or ""
                node.replace_input_with(index, separate[id(layer)])

    def leave_zeros_beside_biases(self) -> None:
        """Store the bias of a Keras LSTM without the zero bias that tf2onnx adds.

        With both trained, the bias would learn twice as fast.
        """
        for node in [node for node in self._graph if node.op_type == "LSTM" and len(node.inputs) > 3]:
            both = node.inputs[3]
            tensor = both.const_value if both is not None and both.is_initializer() else None
            if both is None or tensor is None or len(both.uses()) > 1 or self._model.opset < _PADS_ARE_INPUTS:
                continue
            first, second = np.split(tensor.numpy(), 2, axis=1)
            if second.any():
                continue
            self._graph.initializers.pop(both.name or "")
            bias = add_initializer(self._graph, both.name or "", first.copy())
            sizes = np.array([0, 0, 0, second.shape[1]], np.int64)
            pads = add_initializer(self._graph, self._names.fresh(f"{both.name}/pads"), sizes)
            self._put_first(ir.node("Pad", [bias, pads]), f"{both.name}/both", both)

    def join_copies(self) -> None:
        """Join copies of one parameter: a table read by rows and, transposed, as a factor."""
        first: dict[str, ir.Value] = {}
        for value in list(self._graph.initializers.values()):
            if len(_folded_from(value)) == 1 and (sources := sources_of(value)):
                parameter = self._graph.initializers.get(sources[0]) or first.setdefault(sources[0], value)
                if parameter is not value:
                    self._join(value, parameter)

    def join_transposed(self) -> None:
        """Join matrices with the tensor that they transpose, if there are no notes.

        Tensors that are equal and not uniform are one tensor.
        """
        stored = [value for value in self._graph.initializers.values() if value.const_value is not None]
        matrices = [value for value in stored if _TRACED_MATRIX.fullmatch(value.name or "")]
        tables: dict[tuple[int, ...], list[ir.Value]] = {}
        for value in stored:
            if value not in matrices:
                tables.setdefault(_sizes(value), []).append(value)
        for value in matrices:
            for table in tables.get(_sizes(value)[::-1], ()):
                if self._join(value, table):
                    break

    def end_gradients_of_padding(self) -> None:
        """Stop gradients at padding rows of embeddings, which only the notes record.

        Raises:
            UnsupportedError: an embedding scales gradients by how often a row is read.
        """
        for node in list(self._graph):
            call = _EMBEDDING.search(node.metadata_props.get(_CALL, "")) if node.op_type == "Gather" else None
            if call is None:
                continue
            table, indices, rows = node.inputs[0], node.inputs[1], node.outputs[0]
            assert table is not None and indices is not None
            if call["scales"] == "True":
                raise UnsupportedError(
                    f"the embedding `{table.name}` scales gradients by frequency",
                    hint="export the module without `scale_grad_by_freq`",
                )
            row = int(call["row"])
            if row < 0 or any(use.node.op_type == stop_gradient.name for use in rows.uses()):
                continue  # the latter is written by `from_torch`
            readers = list(rows.uses())
            branch = ir.Graph([], [], nodes=[], opset_imports=self._graph.opset_imports)
            op = Builder(branch, opset=self._model.opset, names=self._names, functions=self._model.functions)
            is_padding = op.Unsqueeze(op.Equal(indices, op.CastLike(np.int64(row), indices)), np.array([-1]))
            masked = op.Where(is_padding, op.call(stop_gradient, rows), rows).like(rows)
            for use in readers:
                use.node.replace_input_with(use.idx, masked.value)
            self._graph.outputs[:] = [masked.value if output is rows else output for output in self._graph.outputs]
            name = rows.name or ""
            rows.name = self._names.fresh(f"{name}/rows")
            masked.value.name = name
            nodes = list(branch)
            branch.remove(nodes)
            node.append(nodes)
            self.changes.padding[table.name or ""] = row

    def unfold(self) -> None:
        """Store weights of linear layers and of GroupNormalization as modules do."""
        parameters = {tensor.name for tensor in signature(self._graph).values() if tensor.role == "PARAMETER"}
        for node in list(self._graph):
            call = node.metadata_props.get(_CALL, "")
            is_linear = node.op_type == "MatMul" and "aten.linear." in call
            if not is_linear and not (node.op_type in ("Mul", "Add") and "aten.group_norm." in call):
                continue
            value = node.inputs[1]
            matrix = value.const_value if value is not None and value.is_initializer() else None
            if value is None or matrix is None or matrix.shape.rank() < 2:
                continue
            names = [name for name in dict.fromkeys([value.name or "", *_folded_from(value)]) if name in parameters]
            if len(names) == 1:
                self._unfold(value, names[0], matrix.numpy(), is_linear)

    def _unfold(self, value: ir.Value, name: str, array: np.ndarray, is_linear: bool) -> None:
        self._graph.initializers.pop(value.name or "")
        stored = array.T.copy() if is_linear else array.reshape(-1)
        parameter = add_initializer(self._graph, name, stored)
        parameter.metadata_props[_KIND] = "PARAMETER"
        if is_linear:
            node = ir.node("Transpose", [parameter], {"perm": [1, 0]})
        else:
            shape = add_initializer(self._graph, self._names.fresh(f"{name}/shape"), np.array(array.shape, np.int64))
            node = ir.node("Reshape", [parameter, shape])
        self._put_first(node, f"{name}/folded", value)

    def _put_first(self, node: ir.Node, name: str, value: ir.Value) -> None:
        node.outputs[0].name = self._names.fresh(name)
        node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
        self._graph.insert_before(next(iter(self._graph)), node)
        value.replace_all_uses_with(node.outputs[0])

    def _join(self, value: ir.Value, parameter: ir.Value) -> bool:
        """Replace a tensor by an equal, perhaps transposed parameter; True if equal."""
        here, there = value.const_value, parameter.const_value
        assert here is not None and there is not None and value.name is not None
        if here.dtype != there.dtype or value.is_graph_output() or is_uniform(here.numpy()):
            return False
        copy, array = here.numpy(), there.numpy()
        if np.array_equal(copy, array):
            value.replace_all_uses_with(parameter)
        elif copy.ndim == 2 and np.array_equal(copy, array.T):
            transpose = ir.node("Transpose", [parameter], {"perm": [1, 0]})
            self._put_first(transpose, f"{parameter.name}/folded", value)
        else:
            return False
        self._graph.initializers.pop(value.name)
        self.changes.joined[value.name] = parameter.name or ""
        return True


def _may_be_merged(model: Model) -> bool:
    """True if PyTorch's exporter without notes, or ONNX Runtime, may store equal tensors once.

    The tracing exporter leaves an Identity for each; without its optimizer none are merged.
    """
    if any(_KIND in value.metadata_props for value in model.graph.initializers.values()):
        return False
    return not is_traced(model) or _ONLY_IN_OPTIMIZED in model.ir.opset_imports


def _layer_of(node: ir.Node, index: int) -> ir.Value | ir.Node | None:
    if node.op_type in _WITH_BIAS and index == _BIAS:
        return node.inputs[1]
    if index in _SCALES_AND_BIASES.get(node.op_type, ()):
        return node
    if node.op_type not in ("Add", "Mul"):
        return None
    other = node.inputs[1 - index]
    while other is not None and (before := other.producer()) is not None:
        if before.op_type == "MatMul":
            return before.inputs[1] if node.op_type == "Add" else None
        if before.op_type.endswith("Normalization"):
            return node
        if before.op_type != "Reshape" and not (before.op_type == "Mul" and node.op_type == "Add"):
            return None
        other = before.inputs[0]
    return None


def _uses(node: ir.Node, call: str) -> Iterator[Use]:
    if node.op_type == "InstanceNormalization" and "aten.group_norm" in call:
        return  # its scale and bias are ones and zeros: those of the module follow, as Mul and Add
    for i, value in enumerate(node.inputs):
        tensor = value.const_value if value is not None and value.is_initializer() else None
        if tensor is not None and tensor.dtype.is_floating_point():
            yield node, i


def _names(node: ir.Node, index: int) -> set[str]:
    value = node.inputs[index]
    return {value.name or "", *_folded_from(value)} if value is not None else set()


def _assign(
    waiting: list[ModuleTensor], uses: list[Use], tensors: Mapping[str, ModuleTensor]
) -> list[tuple[ModuleTensor, Use]] | None:
    """Pair arguments of a call with the tensors that its nodes read; None if counts differ.

    A call may also read constants of the exporter: known module tensors come first, then larger
    ones.
    """
    names = {tensor.name for tensor in tensors.values()}
    of_module = [use for use in uses if names & _names(*use)]
    large = [(node, i) for node, i in uses if node.inputs[i].const_value.size > 1]  # type: ignore[union-attr]
    for candidates in (of_module, large, uses):
        if len(candidates) == len(waiting):
            return list(zip(waiting, candidates, strict=True))
    return None


def _layer_without_bias(nodes: list[ir.Node]) -> ir.Node | None:
    return next((node for node in nodes if node.op_type in _WITH_BIAS and not any(node.inputs[_BIAS:])), None)


def _units(node: ir.Node, weight: ir.TensorProtocol) -> int:
    sizes = weight.shape.numpy()
    if node.op_type == "ConvTranspose":
        return int(sizes[1] * node.attributes.get_int("group", 1))
    is_first = node.op_type == "Conv" or int(node.attributes.get_int("transB", 0)) == 1
    return int(sizes[0 if is_first else 1])


def _sizes(value: ir.Value) -> tuple[int, ...]:
    assert value.const_value is not None
    return tuple(value.const_value.shape.numpy())


# ---- layers that an exporter has folded away -------------------------------------------------------------------------


_BATCH_NORM = re.compile(r"batch_?norm", re.IGNORECASE)
"""A trace of the BatchNormalization behind a layer in names or notes."""
_NOTES = ("pkg.onnxscript.rewriter.rule_name", "pkg.torch.onnx.class_hierarchy")
_RENAMED = re.compile(r"onnx::Conv_\d+")
"""Names of convolution weights that the tracing exporter computed."""
_RESIDUAL_BLOCKS = 3
_AGAIN = (
    "export it again without the exporter's optimizations (PyTorch: `optimize=False`, or with `dynamo=False` "
    "`do_constant_folding=False`)"
)


def folding_remarks(model: Model) -> Iterator[str]:
    """Return a sentence for each layer that the export seems to have folded away."""
    nodes = list(model.graph)
    operators = {node.op_type for node in nodes}
    with_bias = [node for node in nodes if node.op_type in _WITH_BIAS and len(node.inputs) > _BIAS]
    layers = [node for node in with_bias if constant_tensor(node.inputs[_BIAS]) is not None]
    traces = [node for node in layers if _had_batch_norm(node)]
    normalizes = any(name.endswith("Normalization") or name == "Sqrt" for name in operators)
    is_quantized = "DequantizeLinear" in operators  # quantization folds BatchNormalization on purpose
    if not normalizes and not is_quantized and (traces or _is_residual(layers)):
        where = f", such as `{traces[0].name or traces[0].outputs[0].name}`" if traces else ""
        yield (
            f"BatchNormalization seems to be folded into {len(traces or layers)} of its layers{where}: they train with "
            f"a weight and a bias each, without batch statistics; to train BatchNormalization, {_AGAIN}"
        )
    if "Dropout" not in operators and any(_was_dropout(node) for node in nodes):
        yield f"Dropout seems to be removed: nothing is dropped in training; to restore it, {_AGAIN}"
    if model.ir.producer_name == "tf2onnx":
        without = [layer.names[0] for layer in find_layers(model.graph) if layer.bias() is None]
        if without:
            yield (
                f"{len(without)} layers have no bias, such as {list_names(without, 1)}: tf2onnx drops biases of zeros "
                "and scales of ones, as fresh models have them; if yours has them, convert it with `onward.from_keras`"
            )
    if integers := [node for node in nodes if node.op_type in _QUANTIZED]:
        yield (
            f"{len(integers)} nodes compute with integers, such as `{integers[0].op_type}`: their weights are not "
            "trained; train the model before quantization, or quantize it in the format QDQ"
        )


_QUANTIZED = {"QLinearConv", "QLinearMatMul", "MatMulInteger", "ConvInteger", "QGemm", "DynamicQuantizeMatMul"}


def _had_batch_norm(node: ir.Node) -> bool:
    names = [node.name or "", *(value.name or "" for value in (*node.inputs[1:], *node.outputs) if value is not None)]
    if any(_BATCH_NORM.search(text) for text in (*names, *(node.metadata_props.get(key, "") for key in _NOTES))):
        return True
    return node.op_type == "Conv" and any(_RENAMED.fullmatch(name) for name in names)


def _is_residual(layers: list[ir.Node]) -> bool:
    """True if sums of convolutions go into Relus: such networks have BatchNormalization."""
    sums = {
        reader
        for node in layers
        if node.op_type == "Conv"
        for reader in node.outputs[0].consumers()
        if reader.op_type in ("Add", "Sum") and [r.op_type for r in reader.outputs[0].consumers()][:1] == ["Relu"]
    }
    return len(sums) >= _RESIDUAL_BLOCKS


def _was_dropout(node: ir.Node) -> bool:
    names = (node.name or "", *(value.name or "" for value in node.outputs))
    return node.op_type == "Identity" and any("dropout" in name.lower() for name in names)
