"""Conversion of images to channels-last order, from convolution to convolution.

Kernels read the channels of a pixel at once. They replace convolutions, and operators that do not
depend on the order keep it, so that images are transposed only where the model begins and ends. The
pass runs before differentiation: gradients have the order of their values. Signals, [N, C, W], are
images of one line: [N, 1, W, C].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.build import Builder, Expr
from onward.constants import constant_ints
from onward.kernels.images import Table, of_two_axes, tables_of, window_of
from onward.kernels.library import DOMAIN
from onward.model.walk import attributes
from onward.shapes import Dims, dims
from onward.standard import is_standard
from onward.transform.context import Context

TO_LAST, TO_FIRST = [0, 2, 3, 1], [0, 3, 1, 2]
RANK = 4

POINTWISE = {
    *("Abs", "Add", "Celu", "Clip", "Div", "Elu", "Erf", "Exp", "Gelu", "HardSigmoid", "HardSwish", "Identity"),
    *("LeakyRelu", "Log", "Max", "Min", "Mish", "Mul", "Neg", "Pow", "Reciprocal", "Relu", "Selu", "Sigmoid"),
    *("Softplus", "Softsign", "Sqrt", "Sub", "Sum", "Swish", "Tanh", "ThresholdedRelu"),
}
"""Elementwise operators, independent of the order of axes."""
_ACTIVATIONS = {"Relu": 1, "HardSwish": 2}
"""Activation that a normalization kernel also computes -> its number."""


def put_channels_last(context: Context) -> None:
    """Let kernels compute the convolutions of the outermost graph, in place."""
    _ChannelsLast(context).convert()


def _image_sizes(value: ir.Value | None) -> Dims | None:
    """Return [N, C, H, W] of an image or [N, C, W] of a signal; else None."""
    sizes = dims(value)
    if value is None or value.dtype != ir.DataType.FLOAT or sizes is None:
        return None
    return sizes if len(sizes) in (RANK - 1, RANK) else None


def _rank(value: ir.Value | None) -> int:
    assert value is not None and value.shape is not None
    return value.shape.rank()


def _is_signal(value: ir.Value) -> bool:
    return _rank(value) == RANK - 1


class _ChannelsLast:
    _op: Builder
    """Builder that inserts before the node that is converted."""

    def __init__(self, context: Context):
        self._context, self._graph, self._opset = context, context.graph, context.model.opset
        self._last: dict[ir.Value, ir.Value] = {}
        """Image -> the image with channels last."""

    def convert(self) -> None:
        replaced: list[ir.Node] = []
        for node in list(self._graph):
            convert = _CONVERSIONS.get(node.op_type) if is_standard(node) else None
            if convert is None or node.outputs[0].shape is None:
                continue
            with self._context.before(node) as self._op:
                if convert(self, node):
                    replaced.append(node)
        for node in reversed(replaced):  # so that the readers of its results are gone
            self._restore_order(node)
            self._graph.remove(node, safe=True)

    def _restore_order(self, node: ir.Node) -> None:
        """Transpose outputs that other nodes read."""
        for output in node.outputs:
            last = self._last.get(output)
            if last is not None and (output.uses() or output.is_graph_output()):
                with self._context.before(node) as op:
                    image = op.Transpose(last, perm=TO_FIRST)
                    self._context.replace(output, op.Squeeze(image, [2]) if _is_signal(output) else image)

    # ---- images ------------------------------------------------------------------------------------------------------

    def _image(self, value: ir.Value) -> Expr:
        if value in self._last:
            return self._op(self._last[value])
        image = self._op.Unsqueeze(value, [2]) if _is_signal(value) else value
        self._record(value, self._kernel("ChannelsLast", image))
        return self._op(self._last[value])

    def _record(self, value: ir.Value, image: Expr) -> None:
        """Record the channels-last form of an image."""
        image.value.type = value.type
        sizes = dims(value)
        image.value.shape = None if sizes is None else ir.Shape([sizes[0], *of_two_axes(sizes[2:], 1), sizes[1]])
        self._last[value] = image.value

    def _kernel(self, name: str, *inputs: Any, **settings: Any) -> Any:
        return self._op.node(DOMAIN, name, *inputs, **settings)

    # ---- operators; each method returns True if it converted the node ------------------------------------------------

    def _convolution(self, node: ir.Node) -> bool:
        """Convert a Conv or ConvTranspose."""
        x, w = node.inputs[:2]
        sizes, weights, settings_of_node = _image_sizes(x), dims(w), attributes(node, self._opset)
        if x is None or w is None or sizes is None or weights is None or len(weights) != len(sizes):
            return False
        kernel = [n for n in weights[2:] if isinstance(n, int)]
        window = window_of(settings_of_node, kernel, sizes) if all(isinstance(n, int) for n in weights) else None
        if window is None:
            return False
        settings: dict[str, Any] = {"group": settings_of_node["group"]}
        if node.op_type == "ConvTranspose":
            settings["output_padding"] = of_two_axes(settings_of_node["output_padding"] or [0] * len(kernel), 0)
            is_long = any(n >= step for n, step in zip(settings["output_padding"], window["strides"], strict=True))
            if is_long or settings_of_node["output_shape"] or settings_of_node["auto_pad"] not in ("NOTSET", "VALID"):
                return False
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        kernels = self._op.Unsqueeze(w, [2]) if _is_signal(x) else w
        self._record(node.outputs[0], self._kernel(node.op_type, self._image(x), kernels, bias, **window, **settings))
        return True

    def _batch_normalization(self, node: ir.Node) -> bool:
        settings, values = attributes(node, self._opset), [value for value in node.inputs if value is not None]
        x, scale, bias, mean, var = values
        if x not in self._last or any(value.dtype != ir.DataType.FLOAT for value in values):
            return False
        if not settings["training_mode"]:
            op = self._op
            slope = op(scale) / op.Sqrt(op(var) + settings["epsilon"])
            self._record(node.outputs[0], op(self._last[x]) * slope + (op(bias) - op(mean) * slope))
            return True
        if settings["momentum"] != 0:  # running statistics are averaged beside it, see recipe/training_mode.py
            return False
        results = self._kernel("BatchNormalization", self._last[x], scale, bias, epsilon=settings["epsilon"], outputs=3)
        self._record(node.outputs[0], results[0])
        for old, new in zip(node.outputs[1:], results[1:], strict=False):
            self._context.replace(old, new)
        return True

    def _pool(self, node: ir.Node) -> bool:
        x, settings = node.inputs[0], attributes(node, self._opset)
        sizes = dims(x) if x in self._last and len(node.outputs) == 1 and not settings["ceil_mode"] else None
        window = window_of(settings, settings["kernel_shape"], sizes) if sizes is not None else None
        if x is None or window is None:
            return False
        counting = {"count_include_pad": settings["count_include_pad"]} if node.op_type == "AveragePool" else {}
        self._record(node.outputs[0], self._kernel(node.op_type, self._last[x], **window, **counting))
        return True

    def _resized(self, node: ir.Node) -> bool:
        x = node.inputs[0]
        tables = tables_of(node, self._opset) if x is not None and x in self._last else None
        if x is None or tables is None:
            return False
        whole = Table(np.zeros((1, 1), np.int64), np.ones((1, 1), np.float32))
        lines, columns = of_two_axes(tables, whole)
        self._record(node.outputs[0], self._kernel("Resize", self._last[x], *lines, *columns))
        return True

    def _activation(self, node: ir.Node) -> bool:
        """Let the kernel of a normalization compute the activation that is its only reader."""
        x = node.inputs[0]
        before = self._last[x].producer() if x is not None and x in self._last else None
        is_normal = before is not None and before.op_type == "BatchNormalization" and before.domain == DOMAIN
        if x is None or before is None or not is_normal or "activation" in before.attributes:
            return self._pointwise(node)
        if len(x.uses()) > 1 or x.is_graph_output():
            return self._pointwise(node)
        before.attributes["activation"] = ir.AttrInt64("activation", _ACTIVATIONS[node.op_type])
        self._record(node.outputs[0], self._op(self._last.pop(x)))
        return True

    def _pointwise(self, node: ir.Node) -> bool:
        """Convert an elementwise operator; inputs other than images must be scalars."""
        images = [value for value in node.inputs if value in self._last]
        output = node.outputs[0]
        if not images or len(node.outputs) != 1 or _image_sizes(output) is None:
            return False
        if any(_is_signal(value) != _is_signal(output) for value in images if value is not None):  # axes are other ones
            return False
        if not all(value is None or value in self._last or _is_number(value) for value in node.inputs):
            return False
        inputs = [self._last.get(value, value) if value is not None else None for value in node.inputs]
        settings = {name: attribute.value for name, attribute in node.attributes.items()}
        self._record(output, self._op.node("", node.op_type, *inputs, **settings))
        return True

    def _mean(self, node: ir.Node) -> bool:
        """Convert the mean over height and width, after which the order does not matter."""
        x = node.inputs[0]
        if x not in self._last:
            return False
        keeps = True
        if node.op_type == "ReduceMean":
            axes = _constant_axes(node.inputs[1]) if len(node.inputs) > 1 else None
            if axes is None or sorted(axis % _rank(x) for axis in axes) != list(range(2, _rank(x))):
                return False
            keeps = bool(attributes(node, self._opset)["keepdims"])
        mean = self._op.ReduceMean(self._last[x], [1, 2], keepdims=int(keeps))
        if keeps:
            self._record(node.outputs[0], mean)
        else:
            self._context.replace(node.outputs[0], mean)
        return True

    def _transposition(self, node: ir.Node) -> bool:
        """Drop a Transpose of the model that converts to or from channels last."""
        x, output, order = node.inputs[0], node.outputs[0], attributes(node, self._opset)["perm"]
        if x is None or _image_sizes(output) is None or order is None:
            return False
        to_last, to_first = ([0, 2, 1],) * 2 if _is_signal(output) else (TO_LAST, TO_FIRST)
        if x in self._last and list(order) == to_last:
            image = self._op(self._last[x])
            self._context.replace(
                output, self._op.Squeeze(image, [1]) if _is_signal(output) else self._op.Identity(image)
            )
            return True
        if x in self._last or list(order) != to_first or not self._feeds_kernels(output):
            return False
        self._record(output, self._op.Unsqueeze(x, [1]) if _is_signal(output) else self._op.Identity(x))
        return True

    def _feeds_kernels(self, value: ir.Value) -> bool:
        """True if kernels read an image, or the result of elementwise operators on it."""
        reached = [value]
        for image in reached:  # the list grows
            for node, index in image.uses():
                if node.op_type in ("Conv", "ConvTranspose") and index == 0:
                    return True
                if node.op_type in POINTWISE:
                    if any(other in self._last for other in node.inputs):
                        return True
                    reached += [output for output in node.outputs if output not in reached]
        return False

    def _concatenation(self, node: ir.Node) -> bool:
        if not all(value in self._last for value in node.inputs):
            return False
        axis = node.attributes["axis"].as_int() % _rank(node.inputs[0])
        axis += 1 if axis > 1 and _is_signal(node.outputs[0]) else 0
        parts = [self._last[value] for value in node.inputs if value is not None]
        self._record(node.outputs[0], self._op.Concat(*parts, axis=TO_LAST.index(axis)))
        return True


def _constant_axes(value: ir.Value | None) -> Sequence[int] | None:
    """Return constant axes, also if an exporter reshapes them at run time."""
    producer = value.producer() if value is not None else None
    return constant_ints(producer.inputs[0] if producer is not None and producer.op_type == "Reshape" else value)


def _is_number(value: ir.Value) -> bool:
    sizes = dims(value)
    return sizes is not None and all(n == 1 for n in sizes) and len(sizes) <= 1


_CONVERSIONS: dict[str, Callable[[_ChannelsLast, ir.Node], bool]] = {
    **dict.fromkeys(POINTWISE, _ChannelsLast._pointwise),
    **dict.fromkeys(_ACTIVATIONS, _ChannelsLast._activation),
    "Conv": _ChannelsLast._convolution,
    "ConvTranspose": _ChannelsLast._convolution,
    "BatchNormalization": _ChannelsLast._batch_normalization,
    "MaxPool": _ChannelsLast._pool,
    "AveragePool": _ChannelsLast._pool,
    "Resize": _ChannelsLast._resized,
    "GlobalAveragePool": _ChannelsLast._mean,
    "ReduceMean": _ChannelsLast._mean,
    "Concat": _ChannelsLast._concatenation,
    "Transpose": _ChannelsLast._transposition,
}
