"""Insertion of fake quantization: QuantizeLinear followed by DequantizeLinear."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.build import Names
from onward.constants import add_initializer, constant_tensor
from onward.errors import RecipeError, UnsupportedError
from onward.model import Model, Source, load
from onward.model.checks import check_signatures
from onward.model.state import with_metadata, with_tags
from onward.recipe.constants import expose
from onward.recipe.exporter_notes import restore
from onward.recipe.head import refuse_training
from onward.recipe.lora.adapters import adapters
from onward.recipe.quantize.ranges import described, symmetric_scale, tag_scale
from onward.recipe.quantize.settings import MOVES, QuantizedNode, QuantizeSettings, middle, quantized_nodes, settings_of
from onward.standard import METADATA_IR, OLDEST_OPSET, is_standard
from onward.transform.opset import convert_opset, of_one_opset
from onward.transform.quantized import BIAS_KEY, EXACT, RANGE_KEY, STORED_KEY, can_be_trained, open_bias
from onward.transform.types import fill_in_types


def add(model: Source, spec: str | Mapping[str, Any]) -> Model:
    """Return a trainable copy that rounds weights and activations as integers would.

    A QDQ model is converted to this form: rounded values and types stay.
    """
    settings = settings_of(spec)
    source = check_signatures(load(model))
    refuse_training(source, "quantize it")
    if adapters(source):
        raise RecipeError("a model with adapters cannot be quantized", hint="merge them first: `onward.lora.merge`")
    changed = of_one_opset(source, OLDEST_OPSET)
    changed = (changed if changed.opset >= settings.opset else convert_opset(changed, settings.opset)).copy()
    changed.ir.ir_version = max(changed.ir.ir_version or 0, METADATA_IR)
    restore(changed)
    if any(node.op_type == "DequantizeLinear" for node in changed.graph):
        reopen(changed, settings)
        return changed
    fold_normalizations(changed)
    _Insertion(changed, settings).run()
    return changed


class _Insertion:
    def __init__(self, model: Model, settings: QuantizeSettings):
        self._model, self._graph, self._settings = model, model.graph, settings
        self._names: Names = model.names()
        self._parameters: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}
        """Output of a DequantizeLinear -> its scale and zero point."""
        self._pairs: dict[ir.Value, ir.Value] = {}
        """Value -> the rounded value."""

    def run(self) -> None:
        nodes = quantized_nodes(self._graph, self._settings)
        read = [quantized.node.inputs[i] for quantized in nodes for i in quantized.inputs]
        fill_in_types(
            self._model, [v for v in (*read, *(quantized.node.outputs[0] for quantized in nodes)) if v is not None]
        )
        for quantized in nodes:
            self._quantize(quantized)

    def _quantize(self, quantized: QuantizedNode) -> None:
        node = quantized.node
        if self._settings.activations is not None:
            for i in quantized.inputs:
                value = node.inputs[i]
                if value is not None and _is_float(value):
                    node.replace_input_with(i, self._rounded(value))
        if quantized.weight is not None:
            self._quantize_weight(quantized, quantized.weight)
            self._mark_bias(quantized)
        if self._settings.activations is not None and quantized.rounds_result and _is_float(node.outputs[0]):
            self._round_result(quantized.result)

    # ---- activations -------------------------------------------------------------------------------------------------

    def _rounded(self, value: ir.Value) -> ir.Value:
        """Return a value rounded. A value that was only moved keeps its scale."""
        if value in self._parameters:
            return value
        if value not in self._pairs:
            parameters = self._known_parameters(value)
            if parameters is not None and self._settings.activations == ir.DataType.INT8:
                # ONNX Runtime converts int8 to uint8, but not in the pairs that it adds around such operators.
                node = value.producer()
                assert node is not None and node.inputs[0] is not None
                node.replace_input_with(0, self._rounded(node.inputs[0]))
            self._pairs[value] = self._pair(value, parameters)
        return self._pairs[value]

    def _known_parameters(self, value: ir.Value) -> tuple[ir.Value, ir.Value] | None:
        source: ir.Value | None = value
        while source is not None and source not in self._parameters:
            node = source.producer()
            source = node.inputs[0] if node is not None and node.op_type in MOVES else None
        return self._parameters[source] if source is not None else None

    def _round_result(self, value: ir.Value) -> None:
        """Replace a result by its rounded value for all readers; a model output keeps its name."""
        if value in self._pairs:
            return
        uses, is_output = list(value.uses()), value.is_graph_output()
        rounded = self._pairs[value] = self._pair(value, None)
        for node, i in uses:
            node.replace_input_with(i, rounded)
        if is_output:
            at = list(self._graph.outputs).index(value)
            self._graph.outputs[at] = rounded
            name = value.name or ""
            value.name = self._names.fresh(f"{name}/exact")
            rounded.name = name

    def _pair(self, value: ir.Value, shared: tuple[ir.Value, ir.Value] | None) -> ir.Value:
        dtype = self._settings.activations
        assert dtype is not None and value.name is not None
        scale, zero = shared or self._new_parameters(value.name, dtype)
        nodes = self._rounding(value, scale, zero, dtype)
        if shared is None:
            nodes[0].metadata_props[RANGE_KEY] = described(self._settings)
        if (producer := value.producer()) is not None:
            self._graph.insert_after(producer, nodes)
        else:
            self._graph.insert_before(self._graph[0], nodes)
        self._parameters[nodes[1].outputs[0]] = scale, zero
        return nodes[1].outputs[0]

    def _new_parameters(self, name: str, dtype: ir.DataType) -> tuple[ir.Value, ir.Value]:
        zero = with_tags(ir.Tensor(np.zeros((), dtype.numpy()), dtype=dtype), role="statistics")
        scale = tag_scale(ir.Tensor(np.ones((), np.float32)), self._settings)
        return self._store(f"{name}/scale", scale), self._store(f"{name}/zero", zero)

    # ---- weights -----------------------------------------------------------------------------------------------------

    def _quantize_weight(self, quantized: QuantizedNode, weight: ir.Value) -> None:
        if weight in self._pairs:
            rounded = self._pairs[weight]
        else:
            stored = expose(self._graph, weight)
            assert stored.const_value is not None
            if stored.const_value.dtype != ir.DataType.FLOAT:
                raise UnsupportedError(
                    f"`{stored.name}` is {stored.const_value.dtype.name.lower()}, but only float32 is quantized",
                    hint="exclude it with `keep`, or convert the model to float32 first",
                )
            weight = stored
            rounded = self._pairs[weight] = self._weight_pair(weight, quantized.axis)
        index, reader = 1, quantized.node
        while (value := reader.inputs[index]) is not None and value is not weight and value is not rounded:
            step = value.producer()
            if step is None:
                return
            reader, index = step, 0
        reader.replace_input_with(index, rounded)

    def _weight_pair(self, weight: ir.Value, axis: int) -> ir.Value:
        dtype, name = self._settings.weights, weight.name or ""
        array = weight.const_value.numpy()  # type: ignore[union-attr]
        block = self._settings.block if array.ndim == 2 else None
        if block:
            axis = 1 - axis  # along what is summed up
        scale_numbers = symmetric_scale(array, dtype, axis, block)
        zeros = ir.Tensor(np.full(scale_numbers.shape, middle(dtype)).astype(dtype.numpy()), dtype=dtype)
        scale = self._store(f"{name}/scale", tag_scale(ir.Tensor(scale_numbers), self._settings, name))
        zero = self._store(f"{name}/zero", zeros)
        attributes = [ir.AttrInt64("axis", axis), *([ir.AttrInt64("block_size", block)] if block else [])]
        quantize, dequantize = nodes = self._rounding(weight, scale, zero, dtype, attributes)
        quantize.metadata_props[STORED_KEY] = quantize.outputs[0].name or ""
        quantize.metadata_props[RANGE_KEY] = described(self._settings)
        for use in [use for use in weight.uses() if use.node.op_type == "Shape"]:  # the shape is the same
            use.node.replace_input_with(0, dequantize.outputs[0])
        self._graph.insert_before(self._graph[0], nodes)
        return dequantize.outputs[0]

    def _mark_bias(self, quantized: QuantizedNode) -> None:
        """Tag a bias to be stored as 32-bit integers, as integer matmuls take it."""
        node, settings = quantized.node, self._settings
        whole = settings.weights in EXACT and settings.activations in EXACT and not settings.block
        bias = node.inputs[2] if node.op_type in ("Conv", "Gemm") and len(node.inputs) > 2 else None
        tensor = constant_tensor(bias)
        factors = [node.attributes.get_float(name, 1.0) for name in ("alpha", "beta")]
        if not whole or bias is None or tensor is None or factors != [1.0, 1.0]:
            return
        if len(bias.uses()) > 1 or len(tensor.shape) != 1 or tensor.dtype != ir.DataType.FLOAT:
            return
        bias = expose(self._graph, bias)
        name, size = bias.name or "", tensor.shape.numpy()
        facts = {
            "integers": self._names.fresh(f"{name}/quantized"),
            "scale": self._names.fresh(f"{name}/scale"),
            "zero": None,
            "node": self._names.fresh(f"{name}/DequantizeLinear"),
            "shape": list(size),
            "axis": 0,
        }
        node.metadata_props[BIAS_KEY] = json.dumps(facts)

    # ---- nodes and tensors -------------------------------------------------------------------------------------------

    def _rounding(
        self, x: ir.Value, scale: ir.Value, zero: ir.Value, dtype: ir.DataType, attributes: Sequence[ir.Attr] = ()
    ) -> list[ir.Node]:
        """Return a QuantizeLinear and the DequantizeLinear after it."""
        nodes, value, name = [], x, x.name
        rows = ("QuantizeLinear", dtype, "quantized"), ("DequantizeLinear", ir.DataType.FLOAT, "dequantized")
        for operator, output_type, suffix in rows:
            node = ir.Node("", operator, [value, scale, zero], list(attributes))
            value = node.outputs[0]
            value.name = self._names.fresh(f"{name}/{suffix}")
            node.name = self._names.fresh(f"{name}/{operator}")
            value.type, value.shape = ir.TensorType(output_type), x.shape
            nodes.append(node)
        return nodes

    def _store(self, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        tensor.name = self._names.fresh(name)
        return add_initializer(self._graph, tensor.name, tensor)


def _is_float(value: ir.Value) -> bool:
    return value.dtype == ir.DataType.FLOAT


# ---- normalizations behind convolutions ------------------------------------------------------------------------------


_OUTPUT_AXIS = {"Conv": 0, "ConvTranspose": 1}


def fold_normalizations(model: Model) -> None:
    """Fold each normalization into the convolution that only it reads, in place."""
    for node in [node for node in model.graph if node.op_type == "BatchNormalization" and is_standard(node)]:
        x = node.inputs[0]
        layer = x.producer() if x is not None else None
        if layer is not None and x is not None and _can_be_folded(layer, node, x):
            graph = model.graph
            scale, shift, mean, variance = (_numbers(value) for value in node.inputs[1:5])
            factor = scale / np.sqrt(variance + node.attributes.get_float("epsilon", 1e-5))
            weight = layer.inputs[1]
            assert weight is not None
            shape = [1] * len(constant_tensor(weight).shape)  # type: ignore[union-attr]
            shape[_OUTPUT_AXIS[layer.op_type]] = -1
            _put(expose(graph, weight), _numbers(weight) * factor.reshape(shape))
            bias = layer.inputs[2] if len(layer.inputs) > 2 else None
            if bias is not None:
                _put(expose(graph, bias), (_numbers(bias) - mean) * factor + shift)
            else:
                name = node.inputs[2].name if node.inputs[2] is not None else None
                fresh = model.names().fresh(f"{name or layer.name}/folded")
                added = add_initializer(graph, fresh, (shift - mean * factor).astype(np.float32))
                layer.resize_inputs(3)
                layer.replace_input_with(2, added)
            _take_place(graph, layer, node)


def _can_be_folded(layer: ir.Node, node: ir.Node, between: ir.Value) -> bool:
    if layer.op_type not in _OUTPUT_AXIS or layer.graph is not node.graph or len(between.uses()) > 1:
        return False
    if layer.op_type == "ConvTranspose" and layer.attributes.get_int("group", 1) > 1:
        return False  # a slice of its weight serves several channels
    weight, bias = layer.inputs[1], layer.inputs[2] if len(layer.inputs) > 2 else None
    stored = [constant_tensor(value) for value in (*layer.inputs[1:], *node.inputs[1:])]
    extra = any(output.uses() for output in node.outputs[1:])
    return (
        weight is not None
        and [use.node for use in weight.uses() if use.node.op_type != "Shape"] == [layer]
        and (bias is None or len(bias.uses()) == 1)
        and not extra
        and not between.is_graph_output()
        and not node.attributes.get_int("training_mode", 0)
        and all(tensor is not None and tensor.dtype == ir.DataType.FLOAT for tensor in stored)
    )


def _take_place(graph: ir.Graph, layer: ir.Node, node: ir.Node) -> None:
    """Replace the normalization behind a layer by the layer."""
    old, new = node.outputs[0], layer.outputs[0]
    name, type_, dims = old.name, old.type, old.shape
    read = [value for value in node.inputs[1:] if value is not None]
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    new.name, new.type, new.shape = name, type_, dims
    for value in read:
        if not value.uses() and value.is_initializer() and value not in graph.inputs:
            graph.initializers.pop(value.name or "")


def _numbers(value: ir.Value | None) -> np.ndarray:
    tensor = constant_tensor(value)
    assert tensor is not None
    return tensor.numpy().astype(np.float64)


def _put(value: ir.Value, numbers: np.ndarray) -> None:
    old = value.const_value
    assert old is not None
    value.const_value = with_metadata(ir.Tensor(numbers.astype(np.float32)), dict(old.metadata_props), like=old)


# ---- models that are quantized already -------------------------------------------------------------------------------


_SETTINGS = ("ranges", "percentile", "momentum", "calibrate")
"""Settings that apply to a quantized model; the model determines the others."""


def reopen(model: Model, settings: QuantizeSettings) -> None:
    """Convert a quantized model to trainable form: biases too, and scales if they are to change."""
    own = [name for name in settings.named if name not in _SETTINGS]
    if own:
        raise RecipeError(
            f"the model is already quantized, so `{own[0]}` of `quantize` has no effect",
            hint=f"leave it out; a quantized model takes {', '.join(_SETTINGS)}",
        )
    for node in list(model.graph):
        if node.op_type in ("Conv", "Gemm"):
            open_bias(model.graph, node)
        elif node.op_type == "DequantizeLinear":
            _open_weight(model.graph, node, settings)
    if settings.ranges == "fixed":
        return
    activations = [n for n in model.graph if n.op_type == "QuantizeLinear" and STORED_KEY not in n.metadata_props]
    for node in {node.inputs[1]: node for node in reversed(activations)}.values():  # one node per range, the first
        # Only an initializer can hold the range that training finds.
        scale, zero = (*node.inputs[1:], None)[:2]
        stored = all(value is not None and value.is_initializer() for value in (scale, zero))
        if not stored or any(len(constant_tensor(value).shape) for value in (scale, zero)):  # type: ignore[union-attr]
            raise UnsupportedError(
                f"the range of `{node.inputs[0].name}` cannot change: "  # type: ignore[union-attr]
                "scale and zero point are not single numbers in initializers",
                hint="write `ranges=fixed`",
            )
        _observe(node, settings)


def _open_weight(graph: ir.Graph, node: ir.Node, settings: QuantizeSettings) -> None:
    stored = constant_tensor(node.inputs[0])
    if stored is None or not can_be_trained(node, stored):
        return
    expose(graph, node.outputs[0])
    rounding = node.inputs[0].producer() if node.inputs[0] is not None else None
    if rounding is not None and _is_symmetric(rounding):
        _observe(rounding, settings)


def _observe(node: ir.Node, settings: QuantizeSettings) -> None:
    node.metadata_props[RANGE_KEY] = described(settings, fixed=True)
    x, scale, zero = node.inputs
    assert scale is not None and scale.const_value is not None and zero is not None and zero.const_value is not None
    is_weight = STORED_KEY in node.metadata_props
    scale.const_value = tag_scale(scale.const_value, settings, x.name if is_weight and x is not None else None)
    if not is_weight:
        zero.const_value = with_tags(zero.const_value, role="statistics")


def _is_symmetric(rounding: ir.Node) -> bool:
    """True if zero points of a weight are in the middle: then its scale can follow its numbers."""
    zero = constant_tensor(rounding.inputs[2])
    return zero is not None and bool((zero.numpy().astype(np.int64) == middle(zero.dtype)).all())
