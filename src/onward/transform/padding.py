"""SAME padding as explicit `pads` where ONNX Runtime deviates from the standard.

The standard pads until there are ceil(size / stride) windows, with (windows - 1) * stride + reach -
size elements in all, and never fewer than zero. The reference implementation and TensorFlow, the
origin of SAME, agree. If that number is negative, ONNX Runtime 1.31 crops the image. For dilated
windows, it refuses convolutions, and computes the padding of pools as if there were no dilation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import onnx_ir as ir

from onward.errors import UnsupportedError
from onward.model import Model
from onward.model.walk import attributes, nodes_of
from onward.standard import is_standard
from onward.transform.inline import inline_calls
from onward.transform.types import fill_in_types_before

_POOLS = ("AveragePool", "LpPool", "MaxPool")
_TRANSPOSED = "ConvTranspose"
_WEIGHTS = {"Conv": 1, "ConvInteger": 1, _TRANSPOSED: 1, "QLinearConv": 3}
"""Convolution -> the index of its kernel among the inputs."""
_CUT = 2
"""Smallest excess of a stride over a window for which ONNX Runtime crops the start of the image: it
rounds -1 / 2 to 0. A MaxPool fails for any crop."""


def write_padding(model: Model) -> list[str]:
    """Write out paddings that ONNX Runtime computes differently, in place; return the changed nodes.

    Raises:
        UnsupportedError: The padding depends on unknown sizes, or runtimes do not agree on it.
    """
    calls = [f"{f.domain}.{f.name}" for f in model.functions.values() if any(_affected(f.all_nodes(), model.opset))]
    if calls:
        inline_calls(model, calls)  # sizes are unknown in bodies of functions
    nodes = list(_affected(nodes_of(model), model.opset))
    if not nodes:
        return []
    fill_in_types_before(model, [value for node in nodes for value in node.inputs if value is not None])
    windows = [(node, _Windows.of(node, model.opset)) for node in nodes]
    for node, window in windows:
        if node.op_type == _TRANSPOSED:
            _refuse_gaps(node, window)
        else:
            _write(node, window)
    return [_name(node) for node in nodes if node.op_type != _TRANSPOSED]


def same_padding(size: int, reach: int, stride: int, auto_pad: str) -> tuple[int, int]:
    """Return the elements that SAME_UPPER or SAME_LOWER adds before and after an axis.

    `reach` is the size of a window on it.
    """
    total = max((math.ceil(size / stride) - 1) * stride + reach - size, 0)
    small, large = total // 2, total - total // 2
    return (small, large) if auto_pad == "SAME_UPPER" else (large, small)


class _Windows(NamedTuple):
    """Windows of a node, per spatial axis."""

    auto_pad: str
    kernel: Sequence[int] | None
    """None if it is unknown."""
    strides: Sequence[int]
    dilations: Sequence[int]
    reaches: list[int]
    more: Sequence[int]
    """The `output_padding` of a transposed convolution."""
    output: Sequence[int] | None
    """The `output_shape` of a transposed convolution."""

    @classmethod
    def of(cls, node: ir.Node, opset: int) -> _Windows:
        settings = attributes(node, opset)
        kernel = settings.get("kernel_shape") or _kernel(node)
        rank = len(kernel or settings.get("strides") or settings.get("dilations") or ())
        strides, dilations = (settings.get(name) or [1] * rank for name in ("strides", "dilations"))
        reaches = [(n - 1) * gap + 1 for n, gap in zip(kernel or [1] * rank, dilations, strict=True)]
        more, output = settings.get("output_padding") or [0] * rank, settings.get("output_shape")
        return cls(str(settings["auto_pad"]), kernel, strides, dilations, reaches, more, output)


def _affected(nodes: Iterable[ir.Node], opset: int) -> Iterator[ir.Node]:
    """Yield the nodes whose padding ONNX Runtime may compute differently."""
    for node in nodes:
        if is_standard(node) and node.op_type in (*_POOLS, *_WEIGHTS):
            window = _Windows.of(node, opset)
            if node.op_type == _TRANSPOSED:
                if window.output or window.auto_pad.startswith("SAME"):
                    yield node
            elif window.auto_pad.startswith("SAME"):
                most = 1 if node.op_type == "MaxPool" else _CUT
                cuts = any(s - n >= most for s, n in zip(window.strides, window.reaches, strict=True))
                if cuts or max(window.dilations, default=1) > 1:
                    yield node


def _kernel(node: ir.Node) -> list[int] | None:
    value = node.inputs[_WEIGHTS[node.op_type]] if node.op_type in _WEIGHTS else None
    if value is None:
        return None
    shape = value.shape if value.const_value is None else value.const_value.shape
    sizes = [n for n in list(shape or ())[2:] if isinstance(n, int)]
    return sizes if shape is not None and len(sizes) == len(shape) - 2 else None


def _sizes(node: ir.Node) -> list[int | None]:
    """Return the spatial sizes of the image that a node reads; None for unknown ones."""
    shape = node.inputs[0].shape if node.inputs[0] is not None else None
    return [n if isinstance(n, int) else None for n in list(shape or ())[2:]]


def _name(node: ir.Node) -> str:
    return node.name or node.outputs[0].name or ""


def _refuse_gaps(node: ir.Node, window: _Windows) -> None:
    """Raise if a transposed convolution pads its output: runtimes do so at different ends."""
    if window.kernel is None:
        return
    sizes = _sizes(node) if window.output else [1] * len(window.kernel)
    output = list(window.output or window.strides)[-len(window.kernel) :]
    most = -1 if window.output and window.auto_pad != "SAME_UPPER" else 0  # a single zero belongs to the end
    numbers = zip(sizes, window.strides, window.reaches, window.more, output, strict=False)
    for size, stride, reach, more, expected in numbers:
        if size is not None and (size - 1) * stride + reach + more - expected < most:
            raise UnsupportedError(
                f"the padding of `{_name(node)}` is negative, which runtimes read differently",
                hint="export it with `pads` and `output_padding` in place of `auto_pad` and `output_shape`",
            )


def _write(node: ir.Node, window: _Windows) -> None:
    described = f"{window.auto_pad} of `{_name(node)}`"
    sizes = _sizes(node) or [None] * len(window.strides)
    # With a stride of 1, or for windows of one element, the size does not matter.
    open_axes = [n is None and s > 1 and k > 1 for n, s, k in zip(sizes, window.strides, window.reaches, strict=True)]
    if window.kernel is None or any(open_axes):
        raise UnsupportedError(
            f"{described} depends on unknown sizes",
            hint="declare them: `onward set MODEL --shape INPUT=N,3,224,224`",
        )
    numbers = zip(sizes, window.reaches, window.strides, strict=True)
    pads = [same_padding(n or 1, reach, stride, window.auto_pad) for n, reach, stride in numbers]
    if node.op_type in _POOLS and any(max(both) >= n for both, n in zip(pads, window.kernel, strict=True)):
        raise UnsupportedError(
            f"{described} is as large as the kernel, which ONNX Runtime refuses",
            hint="export it with a `Pad` before it, and without `auto_pad`",
        )
    for name in ("auto_pad", "ceil_mode"):  # the number of windows is the same either way
        node.attributes.pop(name, None)
    node.attributes["pads"] = ir.AttrInt64s("pads", [n for side in zip(*pads, strict=True) for n in side])
