"""Operators that `onnx.reference` gets wrong or takes seconds for, for `ReferenceEvaluator(model, new_ops=OPERATORS)`.

There, MaxPool numbers its maxima wrongly without strides and in three dimensions, ConvTranspose mixes up groups, and
pools with ceil_mode put half of what hangs over the end before the beginning. GlobalMaxPool fails in three dimensions,
and GlobalLpPool is missing.
"""

import itertools
import math

import numpy as np
import onnx
from onnx.reference.op_run import OpRun
from onnx.reference.ops import op_loop, op_scan


def _same_begin(total, auto_pad):
    total = np.maximum(total, 0)
    return total // 2 if auto_pad == "SAME_UPPER" else total - total // 2


class ConvTranspose(OpRun):
    op_domain = ""

    def _run(self, x, w, b=None, auto_pad=None, dilations=None, group=1, kernel_shape=None,
             output_padding=None, output_shape=None, pads=None, strides=None):  # fmt: skip
        rank = x.ndim - 2
        kernel, sizes = np.array(w.shape[2:]), np.array(x.shape[2:])
        s, d = np.array(strides or [1] * rank), np.array(dilations or [1] * rank)
        extra, pads = np.array(output_padding or [0] * rank), np.array(pads or [0] * 2 * rank)
        full = (sizes - 1) * s + (kernel - 1) * d + 1
        begin, out = pads[:rank], full + extra - pads[:rank] - pads[rank:]
        if auto_pad in ("SAME_UPPER", "SAME_LOWER") or output_shape:
            out = np.array(output_shape) if output_shape else sizes * s
            begin = _same_begin(full + extra - out, auto_pad)
        count = x.shape[0]
        grouped = x.reshape(count, group, x.shape[1] // group, *sizes)
        weights = w.reshape(group, x.shape[1] // group, w.shape[1], *kernel)
        y = np.zeros((count, group, w.shape[1], *(np.maximum(full, begin + out))), x.dtype)
        for place in itertools.product(*map(range, kernel)):
            at = tuple(slice(p * e, p * e + (n - 1) * t + 1, t) for p, e, n, t in zip(place, d, sizes, s, strict=True))
            y[(..., *at)] += np.einsum("ngc...,gco->ngo...", grouped, weights[(..., *place)])
        y = y[(..., *(slice(b0, b0 + n) for b0, n in zip(begin, out, strict=True)))]
        y = y.reshape(count, -1, *out)
        return (y if b is None else y + b.reshape(-1, *[1] * rank),)


def _windows(x, fill, auto_pad, ceil_mode, dilations, kernel_shape, pads, strides):
    """The elements of each window on a last axis, `fill` outside; where they are; whether in image and padding."""
    rank = x.ndim - 2
    k, sizes = np.array(kernel_shape), np.array(x.shape[2:])
    s, d = np.array(strides or [1] * rank), np.array(dilations or [1] * rank)
    pads = np.array(pads or [0] * 2 * rank)
    extent = (k - 1) * d + 1
    begin, end = pads[:rank], pads[rank:]
    if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        count = -(-sizes // s)
        total = np.maximum((count - 1) * s + extent - sizes, 0)
        begin = _same_begin(total, auto_pad)
        end = total - begin
    else:
        begin, end = (0 * begin, 0 * end) if auto_pad == "VALID" else (begin, end)
        room = sizes + begin + end - extent
        count = (-(-room // s) if ceil_mode else room // s) + 1
        count -= (count - 1) * s >= sizes + begin if ceil_mode else 0
    index, padded = np.zeros((*count, *k), np.int64), np.ones((*count, *k), bool)
    inside = np.ones((*count, *k), bool)
    for axis in range(rank):
        at = np.arange(count[axis])[:, None] * s[axis] - begin[axis] + np.arange(k[axis]) * d[axis]
        shape = [1] * 2 * rank
        shape[axis], shape[rank + axis] = count[axis], k[axis]
        at = at.reshape(shape)
        inside &= (at >= 0) & (at < sizes[axis])
        padded &= at < sizes[axis] + end[axis]
        index = index * sizes[axis] + np.clip(at, 0, sizes[axis] - 1)
    index, inside, padded = (a.reshape(*count, -1) for a in (index, inside, padded))
    values = np.where(inside, x.reshape(*x.shape[:2], -1)[..., index], fill)
    return values, index, inside, padded


class MaxPool(OpRun):
    op_domain = ""

    def _run(self, x, auto_pad=None, ceil_mode=None, dilations=None, kernel_shape=None, pads=None,
             storage_order=None, strides=None):  # fmt: skip
        low = -np.inf if x.dtype.kind == "f" else np.iinfo(x.dtype).min
        values, index, _, _ = _windows(x, low, auto_pad, ceil_mode, dilations, kernel_shape, pads, strides)
        best = values.argmax(-1)[..., None]
        y = np.take_along_axis(values, best, -1)[..., 0].astype(x.dtype)
        place = np.take_along_axis(np.broadcast_to(index, values.shape), best, -1)[..., 0]
        if storage_order:
            at = np.unravel_index(place, x.shape[2:])
            place = np.ravel_multi_index(at, x.shape[2:], order="F")
        planes = np.arange(x.shape[0] * x.shape[1]).reshape(*x.shape[:2], *[1] * (x.ndim - 2))
        place = place + planes * np.prod(x.shape[2:])
        return (y, place)[: max(1, len(self.onnx_node.output))]


class AveragePool(OpRun):
    op_domain = ""

    def _run(self, x, auto_pad=None, ceil_mode=None, count_include_pad=None, dilations=None, kernel_shape=None,
             pads=None, strides=None):  # fmt: skip
        values, _, inside, padded = _windows(x, 0, auto_pad, ceil_mode, dilations, kernel_shape, pads, strides)
        return ((values.sum(-1) / (padded if count_include_pad else inside).sum(-1)).astype(x.dtype),)


class LpPool(OpRun):
    op_domain = ""

    def _run(self, x, auto_pad=None, ceil_mode=None, dilations=None, kernel_shape=None, p=2, pads=None,
             strides=None):  # fmt: skip
        values, *_ = _windows(x, 0, auto_pad, ceil_mode, dilations, kernel_shape, pads, strides)
        return (((np.abs(values) ** p).sum(-1) ** (1 / p)).astype(x.dtype),)


class GlobalMaxPool(OpRun):
    op_domain = ""

    def _run(self, x):
        return (x.max(axis=tuple(range(2, x.ndim)), keepdims=True),)


class GlobalLpPool(OpRun):
    op_domain = ""

    def _run(self, x, p=2):
        return ((np.abs(x) ** p).sum(axis=tuple(range(2, x.ndim)), keepdims=True) ** (1 / p),)


class Erf(OpRun):
    """The stock one computes in float32."""

    op_domain = ""

    def _run(self, x):
        return (np.vectorize(math.erf, otypes=[x.dtype])(x),)


class Gelu(OpRun):
    """The stock one multiplies by constants in float32."""

    op_domain = ""

    def _run(self, x, approximate=None):
        if approximate == "tanh":
            return (0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),)
        return (0.5 * x * (1 + np.vectorize(math.erf, otypes=[x.dtype])(x * math.sqrt(0.5))),)


class Scan(op_scan.Scan):
    """With axes and directions, which the stock one lacks."""

    op_domain = ""

    def __init__(self, onnx_node, run_params):
        given = {a.name: list(a.ints) for a in onnx_node.attribute if a.type == onnx.AttributeProto.INTS}
        plain = onnx.NodeProto.FromString(onnx_node.SerializeToString())
        for attribute in [a for a in plain.attribute if a.name in given]:
            plain.attribute.remove(attribute)
        super().__init__(plain, run_params)
        self.given = given

    def _run(self, *args, **options):
        states = len(args) - self.num_scan_inputs
        moved = self._turned(args[states:], "scan_input", lambda x, axis: np.moveaxis(x, axis, 0), first=True)
        results = super()._run(*args[:states], *moved, **options)
        stacks = self._turned(results[states:], "scan_output", lambda x, axis: np.moveaxis(x, 0, axis), first=False)
        return (*results[:states], *stacks)

    def _turned(self, arrays, kind, move, first):
        axes = self.given.get(f"{kind}_axes") or [0] * len(arrays)
        backwards = self.given.get(f"{kind}_directions") or [0] * len(arrays)
        for x, axis, turn in zip(arrays, axes, backwards, strict=True):
            x = move(x, axis) if first else x
            x = x[::-1] if turn else x
            yield x if first else move(x, axis)


class Loop(op_loop.Loop):
    """With an optional condition, scan outputs of any rank, and no trips; the stock one lacks these."""

    op_domain = ""

    def _run(self, trips, cond=None, *carried, context=None, attributes=None, bindings=None, **_):
        names = self.body.input_names
        stacks = [[] for _ in range(self.K)]
        done, going = 0, cond is None or bool(np.all(cond))
        while going and (trips is None or done < np.squeeze(trips)):
            ends = (np.array(done, np.int64), np.array(True))
            given = {**(context or {}), **dict(zip(names, (*ends, *carried), strict=True))}
            going, *results = self._run_body(given, attributes=attributes, bindings=bindings)
            carried = results[: self.N]
            for stack, item in zip(stacks, results[self.N :], strict=True):
                stack.append(item)
            done, going = done + 1, bool(np.all(going))
        return (*carried, *(np.stack(stack) if stack else np.zeros((0,)) for stack in stacks))


class SequenceMap(OpRun):
    """With values of the graph around the body, any number of sequences, and empty ones; the stock one lacks these."""

    op_domain = ""

    def need_context(self):
        return True

    def _run(self, *inputs, body=None, context=None, attributes=None):
        results = [[] for _ in body.output_names]
        for i in range(len(inputs[0])):
            items = [value[i] if isinstance(value, list) else value for value in inputs]
            feeds = {**context, **dict(zip(body.input_names, items, strict=True))}
            for result, item in zip(results, body.run(None, feeds, attributes=attributes or {}), strict=True):
                result.append(item)
        return tuple(results)


class SequenceInsert(OpRun):
    """The stock one inserts at the front where the position is the end."""

    op_domain = ""

    def _run(self, sequence, tensor, position=None):
        result = list(sequence)
        result.insert(len(result) if position is None else int(position), tensor)
        return (result,)


class Optional(OpRun):
    """The stock one makes a sequence of it."""

    op_domain = ""

    def _run(self, x=None, type=None):
        return (x,)


OPERATORS = [
    Loop,
    Scan,
    SequenceMap,
    SequenceInsert,
    Optional,
    Erf,
    Gelu,
    GlobalLpPool,
    GlobalMaxPool,
    AveragePool,
    ConvTranspose,
    LpPool,
    MaxPool,
]
