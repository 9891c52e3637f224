"""Operators of PyTorch that its exporter translates otherwise than training needs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx
import onnx_ir as ir
from onnxscript import opset20 as op
from onnxscript.function_libs.torch_lib.ops.core import aten_conv3d
from onnxscript.function_libs.torch_lib.ops.nn import aten_scaled_dot_product_attention
from onnxscript.values import Op, Opset
from torch import ops

from onward.build import DOMAIN, DOMAIN_VERSION, Function
from onward.model import Model
from onward.recipe.assembly import stop_gradient
from onward.recipe.losses import functions as losses

_SUM, _MEAN = range(2)
"""Modes of EmbeddingBag."""
_REDUCTIONS = ("none", "mean", "sum")
"""Names of the reductions of losses, which ATen numbers."""
_FUNCTIONS = (
    stop_gradient,
    losses.SmoothedCrossEntropy,
    losses.CrossEntropyWithProbabilities,
    losses.SmoothLabels,
    losses.WeightClasses,
)
"""Functions that translations call."""
_FLOATS = [f"tensor({name})" for name in ("float", "double", "float16", "bfloat16")]


def _operator(function: Function, **attributes: onnx.defs.OpSchema.AttrType) -> Op:
    """Return the call of a function as an operator with a schema, which is what the exporter asks for."""
    schema = onnx.defs.OpSchema
    # Labels are integers and numbers doubles, whatever the type of a prediction: no two inputs share a type.
    made = schema(
        function.name,
        DOMAIN,
        DOMAIN_VERSION,
        inputs=[schema.FormalParameter(name, f"T_{name}") for name in function.inputs],
        outputs=[schema.FormalParameter(name, f"T_{function.inputs[0]}") for name in function.outputs],
        attributes=[schema.Attribute(name, kind) for name, kind in attributes.items()],
        type_constraints=[(f"T_{name}", [*_FLOATS, "tensor(int64)"], "") for name in function.inputs],
    )
    return Op(Opset(DOMAIN, DOMAIN_VERSION), function.name, made)


_stop = _operator(stop_gradient)
_smoothed_cross_entropy = _operator(losses.SmoothedCrossEntropy, ignore_index=onnx.defs.OpSchema.AttrType.INT)
_cross_entropy_with_probabilities = _operator(losses.CrossEntropyWithProbabilities)
_smooth_labels = _operator(losses.SmoothLabels)
_weight_classes = _operator(losses.WeightClasses)


def _stop_gradient(x: Any) -> Any:
    return _stop(x) if x.dtype.is_floating_point() else op.Identity(x)


def define_functions(model: Model) -> None:
    """Add the functions that translations call."""
    called = {node.op_type for node in model.graph.all_nodes() if node.domain == DOMAIN}
    for function in _FUNCTIONS:
        if function.name in called:
            function.define(model.functions, model.opset)


# ---- losses ----------------------------------------------------------------------------------------------------------


def _cross_entropy(
    scores: Any,
    target: Any,
    weight: Any = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    """Cross entropy of class indices or class probabilities. The exporter's own drops `label_smoothing`."""
    kind, smoothing = _REDUCTIONS[reduction], op.Constant(value=_double(label_smoothing))
    if target.dtype.is_floating_point():
        target = _smooth_labels(target, smoothing) if label_smoothing else target
        target = target if weight is None else _weight_classes(target, weight)
        loss = _reduce(_cross_entropy_with_probabilities(scores, target), kind)
    elif label_smoothing:
        weight = op.Constant(value=_double(1.0)) if weight is None else weight
        loss, counted = _smoothed_cross_entropy(scores, target, weight, smoothing, ignore_index=ignore_index)
        loss = op.Div(_reduce(loss, "sum"), _reduce(counted, "sum")) if kind == "mean" else _reduce(loss, kind)
    else:
        loss, _ = op.SoftmaxCrossEntropyLoss(scores, target, weight, reduction=kind, ignore_index=ignore_index)
    return loss


def _double(number: float) -> onnx.TensorProto:
    return onnx.helper.make_tensor("", onnx.TensorProto.DOUBLE, [], [number])


def _reduce(loss: Any, kind: str) -> Any:
    if kind == "none":
        return loss
    return (op.ReduceMean if kind == "mean" else op.ReduceSum)(loss, keepdims=0)


# ---- embeddings ------------------------------------------------------------------------------------------------------


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


# ---- near zero -------------------------------------------------------------------------------------------------------


def _number(value: float, x: Any) -> Any:
    return op.CastLike(op.Constant(value_float=value), x)


def _expm1(x: Any) -> Any:
    """Return exp(x) - 1, exact where exp(x) is near 1."""
    return op.Mul(op.Tanh(op.Mul(x, _number(0.5, x))), op.Add(op.Exp(x), _number(1.0, x)))


def _log1p(x: Any) -> Any:
    """Return log(1 + x), as 2 atanh(x / (x + 2)) where x is small. Each branch computes its own elements only."""
    is_small = op.Less(op.Abs(x), _number(0.5, x))
    near = op.Where(is_small, x, _number(0.0, x))
    far = op.Where(is_small, _number(1.0, x), op.Add(x, _number(1.0, x)))
    small = op.Mul(op.Atanh(op.Div(near, op.Add(near, _number(2.0, x)))), _number(2.0, x))
    return op.Where(is_small, small, op.Log(far))


# ---- convolution -----------------------------------------------------------------------------------------------------


def _conv3d(x: Any, weight: Any, bias: Any = None, *settings: Any, **options: Any) -> Any:
    """Return a convolution. The exporter's own has zeros of the wrong shape in the place of a bias that is left out."""
    if bias is None:
        bias = op.Expand(_constant(0, weight), op.Shape(weight, start=0, end=1))
    return aten_conv3d(x, weight, bias, *settings, **options)


# ---- attention -------------------------------------------------------------------------------------------------------


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Return attention that is 0 in rows where all keys are masked, as in PyTorch.

    The exporter's own is a mean of all values there, or NaN where the mask is of numbers.
    """
    options = (dropout_p, is_causal, scale, enable_gqa)
    if attn_mask is None:
        return aten_scaled_dot_product_attention(query, key, value, None, *options)
    last, zero = op.Constant(value_ints=[-1]), _constant(0, query)
    if attn_mask.dtype == ir.DataType.BOOL:
        attends = op.Cast(op.ReduceMax(op.Cast(attn_mask, to=onnx.TensorProto.INT32), last), to=onnx.TensorProto.BOOL)
        mask = attn_mask
    else:
        lowest = op.CastLike(_constant(float("-inf"), query), attn_mask)
        attends = op.Greater(op.ReduceMax(attn_mask, last), lowest)
        mask = op.Where(attends, attn_mask, op.CastLike(zero, attn_mask))  # NaN of a Softmax would reach gradients
        mask.dtype = attn_mask.dtype
    return op.Where(attends, aten_scaled_dot_product_attention(query, key, value, mask, *options), zero)


# ---- slopes at kinks ------------------------------------------------------------------------------------------------


def _constant(value: float, x: Any) -> Any:
    """Return a number in the type of `x`, as a constant: a Clip between constants is known (see `is_relu6`)."""
    return op.Constant(value=onnx.helper.make_tensor("", int(x.dtype), [], [value]))


def _relu6(x: Any) -> Any:
    return op.Clip(x, _constant(0, x), _constant(6, x))


def _hardtanh(x: Any, min_val: float = -1.0, max_val: float = 1.0) -> Any:
    """Return a ReLU6, or what has the slope 0 at the bounds, too. That of a Clip is 1 there, as of `torch.clamp`."""
    if (min_val, max_val) == (0, 6):
        return _relu6(x)
    low, high = _constant(min_val, x), _constant(max_val, x)
    return op.Where(op.LessOrEqual(x, low), low, op.Where(op.GreaterOrEqual(x, high), high, x))


def _clamp(x: Any, min: float | None = None, max: float | None = None) -> Any:
    """Return a Clip; two of them where one would be a ReLU6."""
    bounds = [None if bound is None else _constant(bound, x) for bound in (min, max)]
    if (min, max) == (0, 6):
        return op.Clip(op.Clip(x, bounds[0], None), None, bounds[1])
    return op.Clip(x, *bounds) if bounds != [None, None] else op.Identity(x)


def _clamp_tensor(x: Any, min: Any = None, max: Any = None) -> Any:
    """Return `x` between tensors; where it is equal to one, its slope is 1. Max and Min would share it."""
    if min is not None:
        min = op.CastLike(min, x)
        x = op.Where(op.Less(x, min), min, x)
    if max is not None:
        max = op.CastLike(max, x)
        x = op.Where(op.Greater(x, max), max, x)
    return op.Identity(x)


def _chooser(position: Callable[..., Any]) -> Callable[..., Any]:
    """Return the translation of `max` or `min` along an axis: of elements that tie the first has the whole slope."""

    def choose(x: Any, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
        if not x.shape:
            return op.Identity(x), op.Constant(value_int=0)
        index = position(x, axis=dim, keepdims=1)
        values, axes = op.GatherElements(x, index, axis=dim), op.Constant(value_ints=[dim])
        return (values, index) if keepdim else (op.Squeeze(values, axes), op.Squeeze(index, axes))

    return choose


def _cosine_similarity(a: Any, b: Any, dim: int = 1, eps: float = 1e-8) -> Any:
    """Return the cosine. Where `eps` takes the place of a norm, the slope is still that of the norm."""
    if a.dtype != b.dtype:
        raise NotImplementedError("cosine_similarity of different types")
    least = _constant(eps, a)
    if tuple(a.shape) != tuple(b.shape):
        shape = op.Shape(op.Add(a, b))
        a, b = op.Expand(a, shape), op.Expand(b, shape)
    axes = op.Constant(value_ints=[dim])
    for_each = []
    for x in (a, b):
        norm = op.ReduceL2(x, axes, keepdims=1)
        fixed = _stop(norm)
        norm = op.Add(op.Max(fixed, least), op.Sub(norm, fixed))  # adds 0, and its slope
        for_each.append(op.Div(x, norm))
    return op.ReduceSum(op.Mul(*for_each), axes, keepdims=0)


TRANSLATIONS = {
    ops.aten.scaled_dot_product_attention.default: _attention,
    ops.aten.conv3d.default: _conv3d,
    ops.aten.cosine_similarity.default: _cosine_similarity,
    ops.aten.relu6.default: _relu6,
    ops.aten.hardtanh.default: _hardtanh,
    ops.aten.clamp.default: _clamp,
    ops.aten.clamp.Tensor: _clamp_tensor,
    ops.aten.clamp_min.Tensor: lambda x, min_: _clamp_tensor(x, min_),
    ops.aten.clamp_max.Tensor: lambda x, max_: _clamp_tensor(x, None, max_),
    ops.aten.max.dim: _chooser(op.ArgMax),
    ops.aten.min.dim: _chooser(op.ArgMin),
    ops.aten.expm1.default: _expm1,
    ops.aten.log1p.default: _log1p,
    ops.aten.cross_entropy_loss.default: _cross_entropy,
    ops.aten.detach.default: _stop_gradient,
    ops.aten.embedding.default: _embedding,
    ops.aten._embedding_bag.default: _embedding_bag,
    ops.aten.embedding_bag.padding_idx: _embedding_bag,
}
"""For `torch.onnx.export`."""
