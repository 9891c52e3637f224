"""Quantized models as float models: what they compute, without rounding.

Quantized tensors become the floats that they stand for. `QuantizeLinear` becomes a `Clip` to its range: quantizers
drop a Relu or Clip whose bounds are the ends of the range. `DynamicQuantizeLinear` becomes nothing, as its range is
that of its input.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from onward.build import Builder, Expr, copy_node
from onward.constants import add_initializer, constant_tensor
from onward.differentiate.expand import replace_node
from onward.errors import RecipeError, UnsupportedError, warn
from onward.model import Model
from onward.model.walk import nested_graphs
from onward.rules.quantization import MOVING
from onward.rules.registry import lookup_rewrite
from onward.standard import is_standard
from onward.transform.context import Context
from onward.transform.opset import convert_opset
from onward.transform.quantized import spread
from onward.transform.training import remove_unused

_MICROSOFT = "com.microsoft"
_ON_INTEGERS = ("QLinear", "QGemm", "QAttention", "QEmbed", "MatMulIntegerToFloat", "DynamicQuantizeMatMul")
"""Operators that a rewrite replaces by float ones between DequantizeLinear and QuantizeLinear."""
_PRODUCTS = {"MatMulInteger": "MatMul", "ConvInteger": "Conv"}
_LSTM = "DynamicQuantizeLSTM"
_MOVES = MOVING | {"DepthToSpace", "Pad", "Resize", "SpaceToDepth", "Upsample"}
_OPSET = 13
"""First operator set with scales per axis."""


def integer_weights(graph: ir.Graph) -> list[ir.Node]:
    """Return the operators that compute with weights stored as integers, except DequantizeLinear."""
    names = (*_ON_INTEGERS, *_PRODUCTS, _LSTM)
    operators = [node for node in graph.all_nodes() if node.op_type.startswith(names)]
    return [node for node in operators if any(map(_is_weight, node.inputs))]


def _is_weight(value: ir.Value | None) -> bool:
    tensor = constant_tensor(value)
    return tensor is not None and tensor.dtype.is_integer() and tensor.size > 1


def dequantize(model: Model) -> Model:
    """Return a float copy of a quantized model.

    Raises:
        RecipeError: The model is not quantized.
        UnsupportedError: A node computes with the integers of a quantized tensor in an unknown way.
    """
    changed = (model if model.opset >= _OPSET else convert_opset(model, _OPSET)).copy()
    count = _Dequantization(changed).run()
    if not count:
        raise RecipeError("the model is not quantized", hint="leave `dequantize` out")
    warn(f"the model is dequantized: {count} tensors of integers are float weights now, also in the result")
    return changed


@dataclasses.dataclass(frozen=True)
class _Floats:
    """The floats that a tensor of integers stands for: (integers - zero) * scale."""

    value: ir.Value
    scale: np.ndarray | None
    """None: measured in every call."""
    zero: np.ndarray | None

    def has(self, scale: np.ndarray, zero: np.ndarray) -> bool:
        if self.scale is None or self.zero is None:
            return False
        pairs = ((self.scale, scale), (self.zero, zero))
        return all(mine.size == other.size and (mine.ravel() == other.ravel()).all() for mine, other in pairs)


class _Dequantization:
    def __init__(self, model: Model):
        self._context = Context(model)
        self._floats: dict[ir.Value, _Floats | None] = {}
        self._weights: dict[ir.Value, list[ir.Value]] = {}
        """Integers -> the float weights in their place."""
        self._sums: dict[ir.Value, ir.Value] = {}
        """Product of integers -> the product of floats in its place."""

    def run(self) -> int:
        graph = self._context.graph
        while self._write_out(graph.all_nodes()):
            pass
        self._context.fill_in_types()
        for node in list(graph.all_nodes()):
            if node.op_type == "Mul" and any(map(_is_cast_constant, node.inputs)):
                bias, scaled = node.inputs[0], _factor(node.outputs[0])
                self._replace(node, None if scaled is None or bias is None else self._weight(bias, node, scaled))
            elif node.op_type == "DequantizeLinear" and is_standard(node):
                self._replace(node, self._dequantized(node))
            elif node.op_type == "Cast" and _is_int32(node.inputs[0]):
                self._replace(node, self._sum(node.inputs[0]))
            elif node.op_type == _LSTM and node.domain == _MICROSOFT:
                self._replace(node, *self._lstm(node))
        self._fold_scales()
        self._remove_unused(graph)
        for node in graph.all_nodes():
            if node.op_type == "DynamicQuantizeLinear" or (node.op_type in _PRODUCTS and node.outputs[0].uses()):
                raise _refused(node)
        return sum(map(len, self._weights.values()))

    def _write_out(self, nodes: Iterable[ir.Node]) -> bool:
        """Replace operators on integers by float ones between DequantizeLinear and QuantizeLinear."""
        chosen = [
            (node, rule)
            for node in nodes
            if node.op_type.startswith(_ON_INTEGERS) or (node.domain, node.op_type) in _FOREIGN
            if (rule := lookup_rewrite(node)) is not None
        ]
        if chosen:
            self._context.fill_in_types()
        replaced = [replace_node(self._context, node, rule) for node, rule in chosen]
        self._context.forget_types()
        return any(replaced)

    def _remove_unused(self, graph: ir.Graph) -> None:
        for node in graph:
            for inner in nested_graphs(node):
                self._remove_unused(inner)
        remove_unused(graph)
        for name in [n for n, v in graph.initializers.items() if not v.uses() and not v.is_graph_output()]:
            if graph.initializers[name] not in graph.inputs:
                del graph.initializers[name]

    # ---- the floats behind integers ----------------------------------------------------------------------------------

    def _floats_of(self, value: ir.Value) -> _Floats | None:
        """Return the floats that an integer value stands for; None if it does not stand for any."""
        if value not in self._floats:
            self._floats[value] = self._find(value)
        return self._floats[value]

    def _find(self, value: ir.Value) -> _Floats | None:
        node = value.producer()
        if node is None or not is_standard(node):
            return None
        if node.op_type == "DynamicQuantizeLinear" and node.inputs[0] is not None:
            return _Floats(node.inputs[0], None, None) if value is node.outputs[0] else None
        if node.op_type == "QuantizeLinear":
            return self._clipped(node)
        return self._moved(node, value) if node.op_type in _MOVES else None

    def _clipped(self, node: ir.Node) -> _Floats | None:
        x, scale, zero = node.inputs[0], _array(node, 1), _zero(node)
        if x is None or scale is None or zero is None or scale.size != 1:
            return None
        dtype, step = ir.DataType.from_numpy(zero.dtype), scale.astype(np.float64)
        ends = [(float(end) - zero.astype(np.float64)) * step for end in (dtype.min, dtype.max)]
        with self._context.before(node) as op:
            low, high = (op.constant(end.reshape(()).astype(scale.dtype)) for end in ends)
            return _Floats(op.Clip(op(x), low, high).value, scale, zero)

    def _moved(self, node: ir.Node, value: ir.Value) -> _Floats | None:
        """Return the floats behind integers that a node only moves."""
        count = len(node.inputs) if node.op_type == "Concat" else 1
        sources = [self._floats_of(v) if v is not None else None for v in node.inputs[:count]]
        first = sources[0]
        if first is None or (first.scale is None and count > 1):
            return None
        for source in sources[1:]:
            if source is None or first.scale is None or first.zero is None or not source.has(first.scale, first.zero):
                return None
        inputs = [*(source.value for source in sources if source is not None), *node.inputs[count:]]
        if node.op_type == "Pad" and len(inputs) > 2 and inputs[2] is not None:
            padding = _array(node, 2)
            is_zero = first.zero is None or (padding is not None and bool((padding == first.zero.ravel()).all()))
            if node.attributes.get_string("mode", "constant") == "constant" and not is_zero:
                return None
            inputs[2] = None
        copy = copy_node(node, inputs, self._context.names, "{}/float")
        node.prepend(copy)
        for old, new in zip(node.outputs, copy.outputs, strict=True):
            new.type, new.shape = inputs[0].type, old.shape  # type: ignore[union-attr]
            self._floats[old] = _Floats(new, first.scale, first.zero)
        return self._floats[value]

    def _dequantized(self, node: ir.Node) -> ir.Value | None:
        """Return the floats in place of the output of a DequantizeLinear; None to leave it."""
        integers, scale, zero = node.inputs[0], _array(node, 1), _zero(node)
        assert integers is not None
        floats = self._floats_of(integers)
        if floats is not None:
            if floats.scale is None:
                return floats.value if _measured_by(node, integers, 1) else None
            if scale is None or zero is None:
                return None
            if floats.has(scale, zero):
                return floats.value
            if scale.size == 1 and floats.scale.size == 1 and floats.zero is not None:
                shift = (floats.zero.astype(np.float64) - zero) * floats.scale
                with self._context.before(node) as op:
                    moved = (op(floats.value) + shift.astype(scale.dtype)) * (scale / floats.scale)
                    return moved.value
            return None
        tensor = constant_tensor(integers)
        if tensor is not None and scale is not None and zero is not None:
            levels = tensor.numpy().astype(np.float32) - spread(node, zero.astype(np.float32), tensor.numpy())
            return self._weight(integers, node, levels * spread(node, scale, tensor.numpy()))
        return self._table(node, integers, scale, zero)

    def _table(
        self, node: ir.Node, integers: ir.Value, scale: np.ndarray | None, zero: np.ndarray | None
    ) -> ir.Value | None:
        """Dequantize a stored tensor before it is moved, as rows of an embedding are."""
        mover = integers.producer()
        if mover is None or scale is None or zero is None or scale.size != 1 or mover.inputs[0] is None:
            return None
        if mover.op_type not in MOVING or len(mover.outputs) > 1 or mover.op_type == "Concat":
            return None
        source = mover.inputs[0]
        tensor = constant_tensor(source)
        if tensor is not None:
            levels = tensor.numpy().astype(np.float32) - zero.astype(np.float32)
            table = self._weight(source, node, levels * scale)
        elif (moved := self._table(node, source, scale, zero)) is not None:
            table = moved
        else:
            return None
        copy = copy_node(mover, [table, *mover.inputs[1:]], self._context.names, "{}/float")
        copy.outputs[0].type, copy.outputs[0].shape = table.type, integers.shape
        mover.prepend(copy)
        self._floats[integers] = _Floats(copy.outputs[0], scale, zero)
        return copy.outputs[0]

    def _weight(self, integers: ir.Value, reader: ir.Node, floats: np.ndarray) -> ir.Value:
        """Return an initializer with these floats, named after the integers; readers of the same integers share it."""
        source = integers.producer()
        if source is not None and source.op_type != "Constant":
            integers = source.inputs[0] or integers
        weights = self._weights.setdefault(integers, [])
        for value in weights:
            if np.array_equal(constant_tensor(value).numpy(), floats):  # type: ignore[union-attr]
                return value
        graph = integers.graph or reader.graph
        assert isinstance(graph, ir.Graph)
        name = (integers.name or "weight").removesuffix("_quantized")
        if (result := reader.outputs[0]).name == name and not result.is_graph_output():
            result.name = self._context.names.fresh(f"{name}/replaced")
        else:
            name = self._context.names.fresh(name)
        weights.append(add_initializer(graph, name, floats))
        return weights[-1]

    # ---- operators ---------------------------------------------------------------------------------------------------

    def _sum(self, value: ir.Value | None) -> ir.Value | None:
        """Return a product of integers as one of floats, perhaps with a bias; None for other integers.

        A measured scale counts as 1, since the floats already have it.
        """
        node = value.producer() if value is not None else None
        if node is None or not is_standard(node) or not node.inputs:
            return None
        assert value is not None
        if node.op_type in _PRODUCTS:
            if value not in self._sums:
                with self._context.before(node) as op:
                    a, b = (self._levels(op, node, index) for index in (0, 1))
                    if a is None or b is None:
                        return None
                    settings = {name: attribute.value for name, attribute in node.attributes.items()}
                    self._sums[value] = getattr(op, _PRODUCTS[node.op_type])(a, b, **settings).value
            return self._sums[value]
        first = node.inputs[0]
        if node.op_type == "Cast":  # a bias in units of the product
            rounding = first.producer() if first is not None else None
            is_rounded = rounding is not None and rounding.op_type in ("Floor", "Round")
            return rounding.inputs[0] if rounding is not None and is_rounded else None
        if node.op_type not in ("Add", "Reshape", "Unsqueeze"):
            return None
        operands = [self._sum(operand) for operand in (node.inputs if node.op_type == "Add" else node.inputs[:1])]
        if any(operand is None for operand in operands):
            return None
        copy = copy_node(node, [*operands, *node.inputs[len(operands) :]], self._context.names, "{}/float")
        copy.outputs[0].type = operands[0].type  # type: ignore[union-attr]
        node.prepend(copy)
        return copy.outputs[0]

    def _levels(self, op: Builder, node: ir.Node, index: int) -> Expr | None:
        """Return an input of a product of integers as floats: minus its zero point, and times a measured scale."""
        value = node.inputs[index]
        assert value is not None
        floats = self._floats_of(value)
        if floats is not None and floats.scale is None:
            if not _measured_by(node, value, index + 2, output=2):
                return None
            maker = _source(value)
            if maker.outputs[1].uses():
                with self._context.before(maker) as before:
                    one = before.constant(np.ones((), np.float32)).value
                maker.outputs[1].replace_all_uses_with(one)
            return op(floats.value)
        zero = _array(node, index + 2) if len(node.inputs) > index + 2 and node.inputs[index + 2] else np.zeros(())
        if zero is None:
            return None
        tensor = constant_tensor(value)
        if tensor is not None:
            if zero.size > 1 and node.op_type == "ConvInteger":  # per kernel; of a matrix per column
                zero = zero.reshape(-1, *[1] * (len(tensor.shape) - 1))
            levels = tensor.numpy().astype(np.float32) - zero.astype(np.float32)
            return op(self._weight(value, node, levels))
        if floats is None or floats.scale is None or floats.zero is None or zero.size > 1:
            return None
        shift = (floats.zero.astype(np.float32) - zero.astype(np.float32)).reshape(())
        return op(floats.value) / floats.scale.reshape(()) + shift

    def _lstm(self, node: ir.Node) -> list[ir.Value]:
        """Return the results of an LSTM in place of one that quantizes its inputs."""
        x, weight, recurrent, *others = node.inputs[:8]
        scales = [(_array(node, i), _array(node, i + 1)) for i in (8, 10)]
        matrices = []
        for value, (scale, zero) in zip((weight, recurrent), scales, strict=True):
            tensor = constant_tensor(value)
            if value is None or tensor is None or scale is None or zero is None:
                raise _refused(node)
            levels = tensor.numpy().astype(np.float32) - zero.astype(np.float32).reshape(zero.shape[0], 1, -1)
            floats = levels * scale.reshape(scale.shape[0], 1, -1)
            matrices.append(self._weight(value, node, np.ascontiguousarray(floats.transpose(0, 2, 1))))
        attributes, count = list(node.attributes.values()), len(node.outputs)
        copy = ir.Node("", "LSTM", [x, *matrices, *others], attributes, num_outputs=count, name=node.name)
        node.prepend(copy)
        for old, new in zip(node.outputs, copy.outputs, strict=True):
            new.name = self._context.names.fresh(f"{old.name}/float") if old.name else ""
            new.type, new.shape = old.type, old.shape
        return list(copy.outputs)

    def _replace(self, node: ir.Node, *results: ir.Value | None) -> None:
        """Let the readers of a node's outputs read other values."""
        for old, new in zip(node.outputs, results, strict=False):
            if new is None or not old.name:
                continue
            if old.is_graph_output():
                with self._context.before(node) as op:
                    result = op.Identity(op(new))
                self._context.replace(old, result)
            else:
                old.replace_all_uses_with(new)

    def _fold_scales(self) -> None:
        """Multiply weights by the scales that follow their products, perhaps behind a bias."""
        for y in self._sums.values():
            product = y.producer()
            assert product is not None
            weight, last = product.inputs[1], _only_reader(y)
            added = last if last is not None and last.op_type == "Add" else None
            last = last if added is None else _only_reader(added.outputs[0])
            result = y if added is None else added.outputs[0]
            if weight is None or last is None or last.op_type != "Mul" or len(weight.uses()) > 1:
                continue
            scale = _factor(last.inputs[0 if last.inputs[1] is result else 1])
            tensor = constant_tensor(weight)
            if tensor is None or scale is None or not (fitting := _fit(scale, tensor.numpy(), product.op_type)).size:
                continue
            weight.const_value = ir.Tensor((tensor.numpy() * fitting).astype(np.float32), name=weight.name)
            if added is not None:
                index = 0 if added.inputs[1] is y else 1
                with self._context.before(added) as op:
                    bias = op(added.inputs[index]) * scale  # type: ignore[arg-type]
                added.replace_input_with(index, bias.value)
            self._replace(last, result)


_FOREIGN = {(_MICROSOFT, "QuantizeLinear"), (_MICROSOFT, "DequantizeLinear")}


def _factor(value: ir.Value | None) -> np.ndarray | None:
    """Return a constant, or a product of constants."""
    node = value.producer() if value is not None else None
    if node is not None and node.op_type == "Mul":
        factors = [_factor(operand) for operand in node.inputs]
        return None if factors[0] is None or factors[1] is None else factors[0] * factors[1]
    if node is not None and _is_cast_constant(value):
        tensor = constant_tensor(node.inputs[0])
        return None if tensor is None else tensor.numpy().astype(np.float32)
    tensor = constant_tensor(value)
    return None if tensor is None else tensor.numpy()


def _is_cast_constant(value: ir.Value | None) -> bool:
    """True if a value is a stored tensor of integers as floats."""
    node = value.producer() if value is not None else None
    return node is not None and node.op_type in ("Cast", "CastLike") and _is_weight(node.inputs[0])


def _is_int32(value: ir.Value | None) -> bool:
    return value is not None and value.dtype == ir.DataType.INT32


def _only_reader(value: ir.Value) -> ir.Node | None:
    readers = list(value.uses())
    return readers[0].node if len(readers) == 1 and not value.is_graph_output() else None


def _fit(scale: np.ndarray, weight: np.ndarray, operator: str) -> np.ndarray:
    """Return a factor of the outputs in a shape that multiplies the weight; empty if it is of something else."""
    axis = weight.ndim - 1 if operator == "MatMul" else 0
    if scale.size == 1:
        return scale.reshape(())
    along = scale.ndim - 1 if operator == "MatMul" else scale.ndim - (weight.ndim - 1)
    if along < 0 or scale.shape[along] != scale.size or scale.size != weight.shape[axis]:
        return np.zeros(0)
    return scale.reshape([-1 if i == axis else 1 for i in range(weight.ndim)])


def _source(value: ir.Value) -> ir.Node:
    """Return the DynamicQuantizeLinear behind a value that was only moved since."""
    node = value.producer()
    while node is not None and node.op_type != "DynamicQuantizeLinear":
        assert node.inputs[0] is not None
        node = node.inputs[0].producer()
    assert node is not None
    return node


def _measured_by(node: ir.Node, value: ir.Value, index: int, output: int = 1) -> bool:
    """True if an input of a node is what the DynamicQuantizeLinear of a value has measured."""
    return len(node.inputs) > index and node.inputs[index] is _source(value).outputs[output]


def _array(node: ir.Node, index: int) -> np.ndarray | None:
    tensor = constant_tensor(node.inputs[index]) if len(node.inputs) > index else None
    return None if tensor is None else tensor.numpy()


def _zero(node: ir.Node) -> np.ndarray | None:
    """Return the zero point of a QuantizeLinear or DequantizeLinear; None if it is computed."""
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        return _array(node, 2)
    value = node.outputs[0] if node.op_type == "QuantizeLinear" else node.inputs[0]
    scale = _array(node, 1)
    dtype = value.dtype if value is not None and value.dtype is not None else ir.DataType.UINT8
    return None if scale is None else np.zeros(scale.shape, dtype.numpy())


def _refused(node: ir.Node) -> UnsupportedError:
    return UnsupportedError(
        f"`{node.op_type}` `{node.name}` cannot be dequantized", hint="train the model before quantization"
    )
