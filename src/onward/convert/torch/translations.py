"""Operators of PyTorch that its exporter translates otherwise than training needs them."""

from __future__ import annotations

from typing import Any

import onnx
from onnxscript import opset20 as op
from onnxscript.values import Op, Opset
from torch import ops

from onward.build import DOMAIN, DOMAIN_VERSION
from onward.model import Model
from onward.recipe.stop_gradient import stop_gradient

_SUM, _MEAN = range(2)
"""Modes of EmbeddingBag."""


def _stopping() -> Op:
    """The call of our function, as an operator of which the exporter knows no more than that."""
    parameter = onnx.defs.OpSchema.FormalParameter
    schema = onnx.defs.OpSchema(
        stop_gradient.name,
        DOMAIN,
        DOMAIN_VERSION,
        inputs=[parameter("x", "T")],
        outputs=[parameter("y", "T")],
        type_constraints=[("T", [f"tensor({name})" for name in ("float", "double", "float16", "bfloat16")], "")],
    )
    return Op(Opset(DOMAIN, DOMAIN_VERSION), stop_gradient.name, schema)


_stop = _stopping()


def _stop_gradient(x: Any) -> Any:
    return _stop(x) if x.dtype.is_floating_point() else op.Identity(x)


def define_functions(model: Model) -> None:
    """Add what calls of translated operators refer to."""
    if any(node.domain == DOMAIN for node in model.graph.all_nodes()):
        stop_gradient.define(model.functions, model.opset)


def _embedding(
    weight: Any, indices: Any, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Any:
    """Rows of a table; that of the padding is not trained."""
    rows = op.Gather(weight, indices)
    if padding_idx < 0:
        return rows
    return op.Where(op.Unsqueeze(_is(indices, padding_idx), op.Constant(value_ints=[-1])), _stop(rows), rows)


def _is(indices: Any, place: int) -> Any:
    return op.Equal(indices, op.CastLike(op.Constant(value_int=place), indices))


def _embedding_bag(
    weight: Any,
    indices: Any,
    offsets: Any,
    scale_grad_by_freq: bool = False,
    mode: int = _SUM,
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """Sums or means of rows, each added where its bag is."""
    if mode not in (_SUM, _MEAN):
        raise NotImplementedError("EmbeddingBag(mode='max')")
    first, last, once = (op.Constant(value_ints=[n]) for n in (0, -1, 1))
    if include_last_offset:
        offsets = op.Slice(offsets, first, last)
    place = op.Range(op.Constant(value_int=0), op.Size(indices), op.Constant(value_int=1))
    begun = op.LessOrEqual(op.Cast(offsets, to=onnx.TensorProto.INT64), op.Unsqueeze(place, once))
    bag = op.Sub(op.ReduceSum(op.Cast(begun, to=onnx.TensorProto.INT64), once), once)  # [indices, 1]
    share = op.CastLike(op.Constant(value_float=1.0), weight)
    share = op.Expand(share, op.Concat(op.Shape(indices), once, axis=0))
    if padding_idx is not None and padding_idx >= 0:
        share = op.Where(op.Unsqueeze(_is(indices, padding_idx), once), op.Sub(share, share), share)
    weighted = share if per_sample_weights is None else op.Mul(share, op.Unsqueeze(per_sample_weights, once))
    rows = op.Mul(op.Gather(weight, indices), weighted)
    added = _add_rows(rows, bag, op.Concat(op.Shape(offsets), op.Shape(weight, start=1), axis=0))
    if mode == _MEAN:
        counted = _add_rows(share, bag, op.Concat(op.Shape(offsets), once, axis=0))
        added = op.Div(added, op.Max(counted, op.CastLike(op.Constant(value_float=1.0), weight)))
    return added, offsets, offsets, offsets  # the others are for PyTorch's own derivative


def _add_rows(rows: Any, places: Any, shape: Any) -> Any:
    zeros = op.Expand(op.CastLike(op.Constant(value_float=0.0), rows), shape)
    return op.ScatterND(zeros, places, rows, reduction="add")


TRANSLATIONS = {
    ops.aten.detach.default: _stop_gradient,
    ops.aten.embedding.default: _embedding,
    ops.aten._embedding_bag.default: _embedding_bag,
    ops.aten.embedding_bag.padding_idx: _embedding_bag,
}
"""For `torch.onnx.export`."""
