"""Packed sequences and projected LSTMs as the exporter can trace them.

A packed sequence becomes a padded one with its lengths, which the recurrent operators of ONNX take. An LSTM with
projections, which ONNX lacks, is written out step by step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import onnx
import onnx_ir as ir
import torch
from onnxscript import opset20 as op
from onnxscript.values import Op, Opset
from torch import nn
from torch.nn import functional as F

from onward.build import DOMAIN, DOMAIN_VERSION
from onward.errors import UnsupportedError
from onward.model import Model

_VF = torch._VF
_RECURRENT = {"LSTM", "GRU", "RNN"}
_LENGTHS = 4
"""Index of the lengths among the inputs of a recurrent operator."""


class _Lengths:
    """Lengths of a padded batch, in place of the `batch_sizes` of a packed one."""

    def __init__(self, lengths: torch.Tensor, time: Any, batch: Any):
        self.lengths, self.time, self.batch = lengths, time, batch
        self.device = torch.device("cpu")

    def size(self, axis: int) -> Any:
        return self.time

    def __getitem__(self, index: int) -> Any:
        return self.batch  # the batch size of the first step

    def padded(self, data: torch.Tensor) -> torch.Tensor:
        return data.unflatten(0, (self.time, self.batch))


def _mark(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return the input of a recurrent operator, which gets these lengths."""
    return x.clone()


_MARK = torch.library.custom_op("onward::mark_lengths", _mark, mutates_args=())
_MARK.register_fake(lambda x, lengths: torch.empty_like(x))
_MARKER = "MarkLengths"


def _marker() -> Op:
    schema = onnx.defs.OpSchema
    inputs = [schema.FormalParameter("x", "T"), schema.FormalParameter("lengths", "L")]
    types = [(name, [f"tensor({kind})"], "") for name, kind in (("T", "float"), ("L", "int32"))]
    outputs = [schema.FormalParameter("y", "T")]
    declared = schema(_MARKER, DOMAIN, DOMAIN_VERSION, inputs=inputs, outputs=outputs, type_constraints=types)
    return Op(Opset(DOMAIN, DOMAIN_VERSION), _MARKER, declared)


_mark_operator = _marker()
TRANSLATIONS = {
    torch.ops.onward.mark_lengths.default: lambda x, lengths: _mark_operator(
        x, op.Cast(lengths, to=onnx.TensorProto.INT32)
    )
}


def give_lengths(model: Model) -> None:
    """Move lengths from marks to the operators that read them."""
    for mark in [node for node in model.graph.all_nodes() if (node.domain, node.op_type) == (DOMAIN, _MARKER)]:
        x, lengths = mark.inputs
        for node, _ in list(mark.outputs[0].uses()):
            if node.op_type not in _RECURRENT:
                continue
            node.resize_inputs(max(len(node.inputs), _LENGTHS + 1))
            node.replace_input_with(_LENGTHS, lengths)
        assert x is not None and isinstance(mark.graph, ir.Graph)
        mark.outputs[0].replace_all_uses_with(x)
        mark.graph.remove(mark, safe=True)


@contextlib.contextmanager
def traceable_sequences() -> Iterator[None]:
    """Replace what PyTorch computes packed sequences and projections by."""
    layers = {name: getattr(_VF, name) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")}
    with contextlib.ExitStack() as stack:

        def replace(owner: Any, name: str, function: Any) -> None:
            stack.enter_context(patch.object(owner, name, function, create=True))

        replace(_VF, "_pack_padded_sequence", _pack)
        replace(_VF, "_pad_packed_sequence", _pad)
        for name, layer in layers.items():
            replace(_VF, name, _replacement(layer))
        for owner in (nn.RNNBase, nn.LSTM):  # they make the batch size a constant
            replace(owner, "check_forward_args", lambda self, input, hidden, batch_sizes: None)
        yield


def _pack(x: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> tuple[torch.Tensor, Any]:
    x = x.transpose(0, 1) if batch_first else x
    return x.flatten(0, 1), _Lengths(lengths, x.shape[0], x.shape[1])


def _pad(
    data: torch.Tensor, sizes: _Lengths, batch_first: bool, padding: float, total: int
) -> tuple[torch.Tensor, torch.Tensor]:
    x = sizes.padded(data)
    inside = torch.arange(sizes.time)[:, None] < sizes.lengths
    x = torch.where(inside[(...,) + (None,) * (x.ndim - 2)], x, padding)
    return x.transpose(0, 1) if batch_first else x, sizes.lengths


def _replacement(layer: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function for a recurrent layer of PyTorch: padded, with lengths if its input was packed."""
    is_lstm = layer.__name__ == "lstm"

    def call(x: torch.Tensor, *arguments: Any) -> Any:
        sizes: Any = arguments[0] if isinstance(arguments[0], _Lengths) else None
        settings = list(arguments if sizes is None else arguments[1:])
        hidden, weights, bias, depth, dropout, training, two_way, *rest = settings
        directions = 1 + two_way
        states: Sequence[Any] = hidden if is_lstm else (hidden,)
        has_projection = is_lstm and states[0].shape[-1] != states[1].shape[-1]
        if sizes is None and not has_projection:
            return layer(x, *arguments)
        batch_first = bool(rest and rest[0])
        x = sizes.padded(x) if sizes is not None else x.transpose(0, 1) if batch_first else x
        count = len(weights) // depth  # of a layer
        finals: list[tuple[torch.Tensor, ...]] = []
        for i in range(depth):
            own = weights[i * count : (i + 1) * count]
            begin = [state[i * directions : (i + 1) * directions] for state in states]
            if has_projection:
                x, *final = _projected(x, begin, own, directions, bias, sizes)
            else:
                marked = _MARK(x, sizes.lengths)
                first = tuple(begin) if is_lstm else begin[0]
                x, *final = layer(marked, first, own, bias, 1, 0.0, training, two_way, False)
            finals.append(tuple(final))
            x = F.dropout(x, dropout, training) if i + 1 < depth and dropout else x
        ends = tuple(torch.cat(parts) for parts in zip(*finals, strict=True))
        if sizes is not None:
            x = x.flatten(0, 1)
        return x.transpose(0, 1) if batch_first and sizes is None else x, *ends

    return call


def _projected(
    x: torch.Tensor,
    begin: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    directions: int,
    bias: bool,
    sizes: _Lengths | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return outputs and last states of a layer of an LSTM with projections."""
    steps = x.shape[0]
    if not isinstance(steps, int):
        raise UnsupportedError(
            "an LSTM with `proj_size` needs a fixed number of steps",
            hint="fix the axis of time: `dynamic_shapes={...}` without it, or `batch_first=True`",
        )
    count, results, finals = len(weights) // directions, [], []
    for direction in range(directions):
        w, r, *biases, projection = weights[direction * count : (direction + 1) * count]
        inputs = F.linear(x, w, sum(biases[1:], biases[0]) if bias else None)
        h, c = (state[direction] for state in begin)
        outputs = {}
        for t in range(steps) if direction == 0 else reversed(range(steps)):
            i, f, g, o = (inputs[t] + F.linear(h, r)).chunk(4, 1)
            cell = f.sigmoid() * c + i.sigmoid() * g.tanh()
            output = F.linear(o.sigmoid() * cell.tanh(), projection)
            if sizes is not None:
                inside = (t < sizes.lengths)[:, None]
                cell, output = torch.where(inside, cell, c), torch.where(inside, output, h)
            outputs[t], h, c = output, output, cell
        results.append(torch.stack([outputs[t] for t in range(steps)]))
        finals.append((h, c))
    return torch.cat(results, -1), *(torch.stack(parts) for parts in zip(*finals, strict=True))
