"""Images with their channels last, from convolution to convolution.

Kernels read the channels of a pixel in one go. Convolutions are replaced by kernels that want this order, and it is
kept through what does not care about it, so that images are transposed where the model begins and ends and not between.
It is done before differentiation: gradients follow the order of what they are gradients of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir

from onward.build import Builder, Expr
from onward.constants import constant_ints
from onward.kernels.library import DOMAIN
from onward.kernels.rewriting import Rewriting
from onward.model import Model
from onward.model.walk import attributes
from onward.shapes import dims
from onward.standard import is_standard

TO_LAST, TO_FIRST = [0, 2, 3, 1], [0, 3, 1, 2]
RANK = 4

POINTWISE = {
    *("Abs", "Add", "Celu", "Clip", "Div", "Elu", "Erf", "Exp", "Gelu", "HardSigmoid", "HardSwish", "Identity"),
    *("LeakyRelu", "Log", "Max", "Min", "Mish", "Mul", "Neg", "Pow", "Reciprocal", "Relu", "Selu", "Sigmoid"),
    *("Softplus", "Softsign", "Sqrt", "Sub", "Sum", "Swish", "Tanh", "ThresholdedRelu"),
}
"""Operators that treat every element alike, whatever the order of axes."""
_ACTIVATIONS = {"Relu": 1, "HardSwish": 2}
"""What kernels of normalizations compute along with them, by number."""


def put_channels_last(model: Model) -> None:
    """Let kernels compute the convolutions of the outermost graph, in place."""
    _ChannelsLast(model).convert()


def _is_float_image(value: ir.Value | None) -> bool:
    sizes = dims(value) if value is not None else None
    return value is not None and value.dtype == ir.DataType.FLOAT and sizes is not None and len(sizes) == RANK


class _ChannelsLast:
    _op: Builder
    """What is built with it goes where the node is that is being converted."""

    def __init__(self, model: Model):
        self._graph, self._opset = model.graph, model.opset
        self._rewriting = Rewriting(model)
        self._last: dict[ir.Value, ir.Value] = {}
        """An image -> the same with channels last."""

    def convert(self) -> None:
        replaced: list[ir.Node] = []
        for node in list(self._graph):
            convert = _CONVERSIONS.get(node.op_type) if is_standard(node) else None
            if convert is None:
                continue
            with self._rewriting.before(node) as self._op:
                if convert(self, node):
                    replaced.append(node)
        for node in replaced:
            self._give_back_order(node)
        self._graph.remove(replaced, safe=True)

    def _give_back_order(self, node: ir.Node) -> None:
        """Transpose what others read, who do not know of the new order."""
        for output in node.outputs:
            last = self._last.get(output)
            if last is not None and (output.uses() or output.is_graph_output()):
                with self._rewriting.before(node) as op:
                    self._rewriting.replace(output, op.Transpose(last, perm=TO_FIRST))

    # ---- images ------------------------------------------------------------------------------------------------------

    def _image(self, value: ir.Value) -> Expr:
        if value in self._last:
            return self._op(self._last[value])
        self._made(value, self._kernel("ChannelsLast", value))
        return self._op(self._last[value])

    def _made(self, value: ir.Value, turned: Expr) -> None:
        """Say what an image is with channels last."""
        turned.value.type = value.type
        sizes = dims(value)
        turned.value.shape = None if sizes is None else ir.Shape([sizes[axis] for axis in TO_LAST])
        self._last[value] = turned.value

    def _kernel(self, name: str, *inputs: Any, **settings: Any) -> Any:
        return self._op.node(DOMAIN, name, *inputs, **settings)

    # ---- operators; each says whether it was converted ---------------------------------------------------------------

    def _convolution(self, node: ir.Node) -> bool:
        x, w = node.inputs[:2]
        sizes = dims(w) if w is not None else None
        given = attributes(node, self._opset)
        is_fixed = given["auto_pad"] in ("NOTSET", "VALID") and sizes is not None and len(sizes) == RANK
        if x is None or not (is_fixed and _is_float_image(x) and all(isinstance(n, int) for n in sizes or ())):
            return False
        assert sizes is not None
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        pads = given["pads"] if given["auto_pad"] == "NOTSET" else None
        y = self._kernel(
            "Conv",
            self._image(x),
            w,
            bias,
            kernel_shape=list(sizes[2:]),
            strides=_list(given["strides"], 2),
            dilations=_list(given["dilations"], 2),
            pads=_list(pads, 4, 0),
            group=given["group"],
        )
        self._made(node.outputs[0], y)
        return True

    def _batch_normalization(self, node: ir.Node) -> bool:
        given, values = attributes(node, self._opset), [value for value in node.inputs if value is not None]
        x, scale, bias, mean, var = values
        if x not in self._last or any(value.dtype != ir.DataType.FLOAT for value in values):
            return False
        if not given["training_mode"]:
            op = self._op
            slope = op(scale) / op.Sqrt(op(var) + given["epsilon"])
            self._made(node.outputs[0], op(self._last[x]) * slope + (op(bias) - op(mean) * slope))
            return True
        if given["momentum"] != 0:  # running statistics are averaged beside it, see recipe/forward.py
            return False
        made = self._kernel("BatchNormalization", self._last[x], scale, bias, epsilon=given["epsilon"], outputs=3)
        self._made(node.outputs[0], made[0])
        for old, new in zip(node.outputs[1:], made[1:], strict=False):
            self._rewriting.replace(old, new)
        return True

    def _max_pool(self, node: ir.Node) -> bool:
        x, given = node.inputs[0], attributes(node, self._opset)
        is_plain = len(node.outputs) == 1 and given["auto_pad"] in ("NOTSET", "VALID") and not given["ceil_mode"]
        if x not in self._last or not is_plain:
            return False
        y = self._kernel(
            "MaxPool",
            self._last[x],
            kernel_shape=list(given["kernel_shape"]),
            strides=_list(given["strides"], 2),
            dilations=_list(given["dilations"], 2),
            pads=_list(given["pads"] if given["auto_pad"] == "NOTSET" else None, 4, 0),
        )
        self._made(node.outputs[0], y)
        return True

    def _activation(self, node: ir.Node) -> bool:
        """What only follows a normalization is computed along with it."""
        x = node.inputs[0]
        before = self._last[x].producer() if x is not None and x in self._last else None
        is_normal = before is not None and before.op_type == "BatchNormalization" and before.domain == DOMAIN
        if x is None or before is None or not is_normal or "activation" in before.attributes:
            return self._pointwise(node)
        if len(x.uses()) > 1 or x.is_graph_output():
            return self._pointwise(node)
        before.attributes["activation"] = ir.AttrInt64("activation", _ACTIVATIONS[node.op_type])
        self._made(node.outputs[0], self._op(self._last.pop(x)))
        return True

    def _pointwise(self, node: ir.Node) -> bool:
        """Of several inputs, others than such images must be single numbers."""
        images = [value for value in node.inputs if value in self._last]
        output = node.outputs[0]
        if not images or len(node.outputs) != 1 or not _is_float_image(output):
            return False
        if not all(value is None or value in self._last or _is_number(value) for value in node.inputs):
            return False
        inputs = [self._last.get(value, value) if value is not None else None for value in node.inputs]
        settings = {name: attribute.value for name, attribute in node.attributes.items()}
        self._made(output, self._op.node("", node.op_type, *inputs, **settings))
        return True

    def _mean(self, node: ir.Node) -> bool:
        """The mean over height and width: what is left has no order to speak of."""
        x = node.inputs[0]
        if x not in self._last:
            return False
        keeps = True
        if node.op_type == "ReduceMean":
            axes = _constant_axes(node.inputs[1]) if len(node.inputs) > 1 else None
            if axes is None or sorted(axis % RANK for axis in axes) != [2, 3]:
                return False
            keeps = bool(attributes(node, self._opset)["keepdims"])
        mean = self._op.ReduceMean(self._last[x], [1, 2], keepdims=int(keeps))
        if keeps:
            self._made(node.outputs[0], mean)
        else:
            self._rewriting.replace(node.outputs[0], mean)
        return True

    def _concatenation(self, node: ir.Node) -> bool:
        axis = node.attributes["axis"].as_int() % RANK
        if not all(value in self._last for value in node.inputs):
            return False
        parts = [self._last[value] for value in node.inputs if value is not None]
        self._made(node.outputs[0], self._op.Concat(*parts, axis=TO_LAST.index(axis)))
        return True


def _list(values: Sequence[int] | None, count: int, usual: int = 1) -> list[int]:
    return list(values) if values else [usual] * count


def _constant_axes(value: ir.Value | None) -> Sequence[int] | None:
    """Axes that are known, also where an exporter shapes them at run time."""
    shaped = value.producer() if value is not None else None
    return constant_ints(shaped.inputs[0] if shaped is not None and shaped.op_type == "Reshape" else value)


def _is_number(value: ir.Value) -> bool:
    sizes = dims(value)
    return sizes is not None and all(n == 1 for n in sizes) and len(sizes) <= 1


_CONVERSIONS: dict[str, Callable[[_ChannelsLast, ir.Node], bool]] = {
    **dict.fromkeys(POINTWISE, _ChannelsLast._pointwise),
    **dict.fromkeys(_ACTIVATIONS, _ChannelsLast._activation),
    "Conv": _ChannelsLast._convolution,
    "BatchNormalization": _ChannelsLast._batch_normalization,
    "MaxPool": _ChannelsLast._max_pool,
    "GlobalAveragePool": _ChannelsLast._mean,
    "ReduceMean": _ChannelsLast._mean,
    "Concat": _ChannelsLast._concatenation,
}
