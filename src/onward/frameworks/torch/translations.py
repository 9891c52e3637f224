"""Translations of PyTorch operators that differ from the exporter's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnxscript import opset20 as op
from onnxscript.function_libs.torch_lib.ops.core import aten_conv3d, aten_split
from onnxscript.function_libs.torch_lib.ops.nn import aten_scaled_dot_product_attention
from onnxscript.values import Op, Opset
from torch import ops
from torch.export import ExportedProgram
from torch.nn import functional as F

from onward.build import DOMAIN, DOMAIN_VERSION, Function
from onward.frameworks.torch import sequences
from onward.model import Model
from onward.recipe.losses import functions as losses
from onward.recipe.step_builder import in_training, stop_gradient

_SUM, _MEAN, _MAX = range(3)
"""Modes of EmbeddingBag."""
_REDUCTIONS = ("none", "mean", "sum")
"""Reductions of losses, by their number in ATen."""
_FUNCTIONS = (
    stop_gradient,
    in_training,
    losses.SmoothedCrossEntropy,
    losses.CrossEntropyWithProbabilities,
    losses.SmoothLabels,
    losses.WeightClasses,
    losses.ConnectionistTemporalClassification,
)
"""Functions that translations call."""
_FLOATS = [f"tensor({name})" for name in ("float", "double", "float16", "bfloat16")]


def _operator(function: Function, **attributes: onnx.defs.OpSchema.AttrType) -> Op:
    """Return a function as an operator with a schema, which the exporter requires."""
    schema = onnx.defs.OpSchema
    # Labels are integers and scalars doubles, whatever the type of a prediction: no inputs share a type.
    operator_schema = schema(
        function.name,
        DOMAIN,
        DOMAIN_VERSION,
        inputs=[schema.FormalParameter(name, f"T_{name}") for name in function.inputs],
        outputs=[schema.FormalParameter(name, f"T_{function.inputs[0]}") for name in function.outputs],
        attributes=[schema.Attribute(name, attribute_type) for name, attribute_type in attributes.items()],
        type_constraints=[(f"T_{name}", [*_FLOATS, "tensor(int64)"], "") for name in function.inputs],
    )
    return Op(Opset(DOMAIN, DOMAIN_VERSION), function.name, operator_schema)


_stop = _operator(stop_gradient)
_in_training = _operator(in_training)
_smoothed_cross_entropy = _operator(losses.SmoothedCrossEntropy, ignore_index=onnx.defs.OpSchema.AttrType.INT)
_cross_entropy_with_probabilities = _operator(losses.CrossEntropyWithProbabilities)
_smooth_labels = _operator(losses.SmoothLabels)
_weight_classes = _operator(losses.WeightClasses)
_ctc_of_rows = _operator(losses.ConnectionistTemporalClassification, blank=onnx.defs.OpSchema.AttrType.INT)


def _stop_gradient(x: Any) -> Any:
    return _stop(x) if x.dtype.is_floating_point() else op.Identity(x)


def _in_mode(inference: torch.Tensor, training: torch.Tensor) -> torch.Tensor:
    """Return what a layer computes in inference, or in training."""
    return training.clone()


IN_MODE = torch.library.custom_op("onward::in_mode", _in_mode, mutates_args=())
IN_MODE.register_fake(lambda inference, training: torch.empty_like(training))
CHANGE = torch.library.custom_op("onward::change", lambda x: x.clone(), mutates_args=(), schema="(Tensor x) -> Tensor")
"""Any gradient of a tensor. What is linear in it has a derivative that does not depend on it."""
CHANGE.register_fake(torch.empty_like)


def define_functions(model: Model) -> None:
    """Define the functions that translations call."""
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
    """Return the cross entropy. The exporter's own drops `label_smoothing`."""
    reduction_name, smoothing = _REDUCTIONS[reduction], op.Constant(value=_double(label_smoothing))
    if target.dtype.is_floating_point():
        target = _smooth_labels(target, smoothing) if label_smoothing else target
        target = target if weight is None else _weight_classes(target, weight)
        loss = _reduce(_cross_entropy_with_probabilities(scores, target), reduction_name)
    elif label_smoothing:
        weight = op.Constant(value=_double(1.0)) if weight is None else weight
        loss, counted = _smoothed_cross_entropy(scores, target, weight, smoothing, ignore_index=ignore_index)
        loss = (
            op.Div(_reduce(loss, "sum"), _reduce(counted, "sum"))
            if reduction_name == "mean"
            else _reduce(loss, reduction_name)
        )
    else:
        loss, _ = op.SoftmaxCrossEntropyLoss(
            scores, target, weight, reduction=reduction_name, ignore_index=ignore_index
        )
    return loss


def ctc_of_sequences(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int,
) -> torch.Tensor:
    """Return the loss of each sequence."""
    return F.ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, reduction="none")


CTC = torch.library.custom_op("onward::ctc_of_sequences", ctc_of_sequences, mutates_args=())
"""PyTorch's own operator, whose labels have a size that depends on lengths, cannot be traced."""
CTC.register_fake(lambda log_probs, *arguments: log_probs.new_empty(log_probs.shape[1]))


def _ctc(log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, blank: int) -> Any:
    targets, *lengths = (op.Cast(x, to=onnx.TensorProto.INT64) for x in (targets, input_lengths, target_lengths))
    return _ctc_of_rows(log_probs, targets, *lengths, blank=blank)


def _double(number: float) -> onnx.TensorProto:
    return onnx.helper.make_tensor("", onnx.TensorProto.DOUBLE, [], [number])


def _reduce(loss: Any, reduction: str) -> Any:
    if reduction == "none":
        return loss
    return (op.ReduceMean if reduction == "mean" else op.ReduceSum)(loss, keepdims=0)


# ---- embeddings ------------------------------------------------------------------------------------------------------


def _embedding(
    weight: Any, indices: Any, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Any:
    """Return rows of a table, without a gradient for the padding row."""
    rows = op.Gather(weight, indices)
    if padding_idx < 0:
        return rows
    return op.Where(op.Unsqueeze(_is(indices, padding_idx), op.Constant(value_ints=[-1])), _stop(rows), rows)


def _is(indices: Any, value: int) -> Any:
    return op.Equal(indices, op.CastLike(op.Constant(value_int=value), indices))


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
    """Return sums, means or maxima of rows per bag."""
    first, last, ones = (op.Constant(value_ints=[n]) for n in (0, -1, 1))
    if include_last_offset:
        offsets = op.Slice(offsets, first, last)
    index = op.Range(op.Constant(value_int=0), op.Size(indices), op.Constant(value_int=1))
    has_begun = op.LessOrEqual(op.Cast(offsets, to=onnx.TensorProto.INT64), op.Unsqueeze(index, ones))
    bag = op.Sub(op.ReduceSum(op.Cast(has_begun, to=onnx.TensorProto.INT64), ones), ones)  # [indices, 1]
    weights = op.CastLike(op.Constant(value_float=1.0), weight)
    weights = op.Expand(weights, op.Concat(op.Shape(indices), ones, axis=0))
    if padding_idx is not None and padding_idx >= 0:
        weights = op.Where(op.Unsqueeze(_is(indices, padding_idx), ones), op.Sub(weights, weights), weights)
    weighted = weights if per_sample_weights is None else op.Mul(weights, op.Unsqueeze(per_sample_weights, ones))
    if mode == _MAX:
        lowest = op.CastLike(op.Constant(value_float=float("-inf")), weight)
        rows = op.Where(op.Greater(weights, op.Sub(weights, weights)), op.Gather(weight, indices), lowest)
        empty = op.Expand(lowest, op.Concat(op.Shape(offsets), op.Shape(weight, start=1), axis=0))
        result = op.ScatterElements(empty, op.Expand(bag, op.Shape(rows)), rows, axis=0, reduction="max")
        result = op.Where(op.Equal(result, lowest), op.CastLike(op.Constant(value_float=0.0), weight), result)
        return result, offsets, offsets, op.Identity(offsets)  # the exporter gives it the shape of indices
    rows = op.Mul(op.Gather(weight, indices), weighted)
    result = _add_rows(rows, bag, op.Concat(op.Shape(offsets), op.Shape(weight, start=1), axis=0))
    if mode == _MEAN:
        count = _add_rows(weights, bag, op.Concat(op.Shape(offsets), ones, axis=0))
        result = op.Div(result, op.Max(count, op.CastLike(op.Constant(value_float=1.0), weight)))
    return result, offsets, offsets, offsets  # the others are for PyTorch's own derivative


def _add_rows(rows: Any, places: Any, shape: Any) -> Any:
    zeros = op.Expand(op.CastLike(op.Constant(value_float=0.0), rows), shape)
    return op.ScatterND(zeros, places, rows, reduction="add")


def _masked_select(x: Any, mask: Any) -> Any:
    shape = op.Shape(op.Where(mask, x, x))
    positions = op.Transpose(op.NonZero(op.Expand(mask, shape)), perm=[1, 0])
    return op.GatherND(op.Expand(x, shape), positions)


def _sort(x: Any, stable: bool | None = None, dim: int = -1, descending: bool = False) -> tuple[Any, Any]:
    """Return sorted values and their indices. Of equals, TopK returns the first first."""
    size = op.Gather(op.Shape(x), op.Constant(value_ints=[dim]))
    return op.TopK(x, size, axis=dim, largest=int(descending), sorted=1)


def _split(x: Any, split_size: Any, dim: int = 0) -> Any:
    """Return equal parts as outputs of one node where their number is known; the exporter's own is a sequence."""
    size = x.shape[dim]
    if isinstance(size, int) and isinstance(split_size, int) and size > split_size and size % split_size == 0:
        return op.Split(x, axis=dim, num_outputs=size // split_size)
    return aten_split(x, split_size, dim)


# ---- near zero -------------------------------------------------------------------------------------------------------


def _expm1(x: Any) -> Any:
    """Return exp(x) - 1, exact where exp(x) is near 1."""
    return op.Mul(op.Tanh(op.Mul(x, _constant(0.5, x))), op.Add(op.Exp(x), _constant(1.0, x)))


def _log1p(x: Any) -> Any:
    """Return log(1 + x), as 2 atanh(x / (x + 2)) where x is small. Each branch gets safe inputs."""
    is_small = op.Less(op.Abs(x), _constant(0.5, x))
    near = op.Where(is_small, x, _constant(0.0, x))
    far = op.Where(is_small, _constant(1.0, x), op.Add(x, _constant(1.0, x)))
    small = op.Mul(op.Atanh(op.Div(near, op.Add(near, _constant(2.0, x)))), _constant(2.0, x))
    return op.Where(is_small, small, op.Log(far))


# ---- logarithm of the gamma function ---------------------------------------------------------------------------------

_STIRLING = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680)
"""Coefficients of Stirling's series; from 8 on, four of them are exact in float32."""
_SHIFT = 8


def _lgamma(x: Any) -> Any:
    """Return log |gamma(x)|: Stirling's series from 8 on, the recurrence below, the reflection for negative numbers."""
    zero, half, one, shift, pi = (_constant(number, x) for number in (0.0, 0.5, 1.0, float(_SHIFT), math.pi))
    is_negative = op.Less(x, half)
    positive, negative = op.Where(is_negative, op.Sub(one, x), x), op.Where(is_negative, x, half)
    is_small = op.Less(positive, shift)
    z, factor = op.Where(is_small, op.Add(positive, shift), positive), op.Where(is_small, positive, one)
    product = factor
    for i in range(1, _SHIFT):
        product = op.Mul(product, op.Add(factor, _constant(float(i), x)))
    inverse = op.Div(one, z)
    square, series = op.Mul(inverse, inverse), _constant(_STIRLING[-1], x)
    for coefficient in reversed(_STIRLING[:-1]):
        series = op.Add(op.Mul(series, square), _constant(coefficient, x))
    stirling = op.Add(op.Sub(op.Mul(op.Sub(z, half), op.Log(z)), z), _constant(math.log(2 * math.pi) / 2, x))
    size = op.Sub(op.Add(stirling, op.Mul(series, inverse)), op.Where(is_small, op.Log(product), zero))
    sine = op.Abs(op.Sin(op.Mul(pi, op.Sub(negative, op.Floor(negative)))))
    return op.Where(is_negative, op.Sub(op.Log(op.Div(pi, sine)), size), size)


# ---- convolution -----------------------------------------------------------------------------------------------------


def _conv3d(x: Any, weight: Any, bias: Any = None, *settings: Any, **options: Any) -> Any:
    """Return a convolution. The exporter's own adds a bias of the wrong shape for none."""
    if bias is None:
        bias = op.Expand(_constant(0, weight), op.Shape(weight, start=0, end=1))
    return aten_conv3d(x, weight, bias, *settings, **options)


# ---- experts ---------------------------------------------------------------------------------------------------------


def _grouped_mm(x: Any, weight: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    """Return the product of each row with the matrix of its group; `offs` are the ends of the groups.

    Every group multiplies all rows, since the sizes of groups depend on the data.
    """
    if offs is None:
        return op.MatMul(x, weight)
    if len(x.shape) != 2 or len(weight.shape) != 3 or bias is not None:
        raise NotImplementedError("grouped_mm of other than rows and a matrix for each group")
    first, last = op.Constant(value_ints=[0]), op.Constant(value_ints=[1])
    row = op.Range(op.Constant(value_int=0), op.Squeeze(op.Shape(x, start=0, end=1)), op.Constant(value_int=1))
    has_ended = op.LessOrEqual(op.Unsqueeze(op.Cast(offs, to=onnx.TensorProto.INT64), first), op.Unsqueeze(row, last))
    group = op.ReduceSum(op.Cast(has_ended, to=onnx.TensorProto.INT64), last, keepdims=0)
    group = op.Min(group, op.Sub(op.Squeeze(op.Shape(weight, start=0, end=1)), op.Constant(value_int=1)))
    products = op.MatMul(op.Unsqueeze(x, first), weight)  # [groups, rows, columns]
    return op.GatherND(products, op.Concat(op.Unsqueeze(group, last), op.Unsqueeze(row, last), axis=1))


def _histc(x: Any, bins: int = 100, min: float = 0, max: float = 0) -> Any:
    """Return how many elements fall into each of the bins from `min` to `max`."""
    if min >= max:
        raise NotImplementedError("histc without bounds")
    low, high, last = (_constant(number, x) for number in (min, max, bins - 1))
    scaled = op.Mul(op.Sub(x, low), _constant(bins / (max - min), x))
    position = op.Min(op.Floor(scaled), last)  # the last bin has both bounds
    position = op.Where(op.And(op.GreaterOrEqual(x, low), op.LessOrEqual(x, high)), position, _constant(-1, x))
    position = op.Reshape(position, op.Constant(value_ints=[-1, 1]))
    counted = op.Equal(position, op.CastLike(op.Constant(value_ints=range(bins)), x))
    return op.ReduceSum(op.CastLike(counted, x), op.Constant(value_ints=[0]), keepdims=0)


# ---- random numbers --------------------------------------------------------------------------------------------------


def _bernoulli(p: Any) -> Any:
    return op.CastLike(op.Less(op.RandomUniformLike(p), p), p)


def _permutation(n: Any, *_: Any, **__: Any) -> Any:
    size = op.Reshape(n, op.Constant(value_ints=[1])) if isinstance(n, ir.Value) else op.Constant(value_ints=[n])
    return op.TopK(op.RandomUniformLike(op.ConstantOfShape(size)), size, largest=0)[1]


def _uniform(shape: Any, low: float, high: float, dtype: int, **_: Any) -> Any:
    sizes = [op.Reshape(n, op.Constant(value_ints=[1])) if isinstance(n, ir.Value) else n for n in shape]
    sizes = [n if isinstance(n, ir.Value) else op.Constant(value_ints=[n]) for n in sizes]
    size = op.Concat(*sizes, axis=0) if sizes else op.Constant(value=onnx.helper.make_tensor("", 7, [0], []))
    return op.RandomUniformLike(op.ConstantOfShape(size), low=low, high=high, dtype=dtype)


# ---- matrices --------------------------------------------------------------------------------------------------------

_TERMS = 18
"""Terms of the exponential series; for matrices of norm 1, the rest is less than 1e-17."""
_SQUARINGS = 12


def _matrix_exp(x: Any) -> Any:
    """Return the exponential of matrices, as squares of that of x / 2^n, whose norm is at most 1."""
    identity = op.CastLike(op.Constant(value=onnx.numpy_helper.from_array(np.eye(x.shape[-1], dtype=np.float32))), x)
    norm = op.ReduceMax(op.ReduceSum(op.Abs(_stop(x)), op.Constant(value_ints=[-1])), keepdims=0)
    two = _constant(2, x)
    halvings = op.Ceil(op.Div(op.Log(op.Max(norm, _constant(1, x))), op.Log(two)))
    small, result = op.Div(x, op.Pow(two, halvings)), identity
    for i in range(_TERMS, 0, -1):
        result = op.Add(op.MatMul(op.Div(small, _constant(i, x)), result), identity)
    for i in range(_SQUARINGS):
        result = op.Where(op.Less(_constant(i, x), halvings), op.MatMul(result, result), result)
    return result


def _householder_product(x: Any, factors: Any) -> Any:
    """Return the product of reflections by the columns below the diagonal of a matrix."""
    if len(x.shape) != 2:
        raise NotImplementedError("householder_product of several matrices")
    rows, columns = x.shape
    identity = np.eye(rows, dtype=np.float32)

    def constant(array: np.ndarray) -> Any:
        return op.CastLike(op.Constant(value=onnx.numpy_helper.from_array(array)), x)

    result, below = constant(identity[:, :columns]), np.tril(np.ones((rows, columns), np.float32), -1)
    for i in reversed(range(factors.shape[0])):
        column = op.MatMul(op.Mul(x, constant(below)), constant(np.eye(columns, dtype=np.float32)[:, i : i + 1]))
        column = op.Add(column, constant(identity[:, i : i + 1]))
        factor = op.Gather(factors, op.Constant(value_ints=[i]))
        product = op.MatMul(op.Transpose(column, perm=[1, 0]), result)
        result = op.Sub(result, op.Mul(op.MatMul(column, product), factor))
    return result


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

    The exporter's own is a mean of all values there, or NaN for a mask of numbers.
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
        mask = op.Where(attends, attn_mask, op.CastLike(zero, attn_mask))  # else NaN of a Softmax reaches gradients
        mask.dtype = attn_mask.dtype
    return op.Where(attends, aten_scaled_dot_product_attention(query, key, value, mask, *options), zero)


# ---- slopes at kinks ------------------------------------------------------------------------------------------------


def _constant(value: float, x: Any) -> Any:
    """Return a constant in the type of `x`, so that a Clip has constant bounds (see `is_relu6`)."""
    return op.Constant(value=onnx.helper.make_tensor("", int(x.dtype), [], [value]))


def _relu6(x: Any) -> Any:
    return op.Clip(x, _constant(0, x), _constant(6, x))


def _hardtanh(x: Any, min_val: float = -1.0, max_val: float = 1.0) -> Any:
    """Return a ReLU6, or a function with slope 0 at the bounds, where a Clip has slope 1."""
    if (min_val, max_val) == (0, 6):
        return _relu6(x)
    low, high = _constant(min_val, x), _constant(max_val, x)
    return op.Where(op.LessOrEqual(x, low), low, op.Where(op.GreaterOrEqual(x, high), high, x))


def _clamp(x: Any, min: float | None = None, max: float | None = None) -> Any:
    """Return a Clip, or two of them where one would be a ReLU6."""
    bounds = [None if bound is None else _constant(bound, x) for bound in (min, max)]
    if (min, max) == (0, 6):
        return op.Clip(op.Clip(x, bounds[0], None), None, bounds[1])
    return op.Clip(x, *bounds) if bounds != [None, None] else op.Identity(x)


def _clamp_tensor(x: Any, min: Any = None, max: Any = None) -> Any:
    """Return `x` between tensors, with slope 1 at a bound. Max and Min would divide it."""
    if min is not None:
        min = op.CastLike(min, x)
        x = op.Where(op.Less(x, min), min, x)
    if max is not None:
        max = op.CastLike(max, x)
        x = op.Where(op.Greater(x, max), max, x)
    return op.Identity(x)


def _chooser(position: Callable[..., Any]) -> Callable[..., Any]:
    """Return the translation of `max` or `min`, in which only the first of equals has a gradient."""

    def choose(x: Any, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
        if not x.shape:
            return op.Identity(x), op.Constant(value_int=0)
        index = position(x, axis=dim, keepdims=1)
        values, axes = op.GatherElements(x, index, axis=dim), op.Constant(value_ints=[dim])
        return (values, index) if keepdim else (op.Squeeze(values, axes), op.Squeeze(index, axes))

    return choose


def _cosine_similarity(a: Any, b: Any, dim: int = 1, eps: float = 1e-8) -> Any:
    """Return the cosine. The gradient is that of the norm also where `eps` replaces it."""
    if a.dtype != b.dtype:
        raise NotImplementedError("cosine_similarity of different types")
    least = _constant(eps, a)
    if tuple(a.shape) != tuple(b.shape):
        shape = op.Shape(op.Add(a, b))
        a, b = op.Expand(a, shape), op.Expand(b, shape)
    axes = op.Constant(value_ints=[dim])
    normalized = []
    for x in (a, b):
        norm = op.ReduceL2(x, axes, keepdims=1)
        fixed = _stop(norm)
        norm = op.Add(op.Max(fixed, least), op.Sub(norm, fixed))  # adds 0, and its slope
        normalized.append(op.Div(x, norm))
    return op.ReduceSum(op.Mul(*normalized), axes, keepdims=0)


def _distances(a: Any, b: Any, p: float, compute_mode: int | None = None) -> Any:
    """Return the distances of all pairs of rows. Of equal rows, the gradient is 0."""
    if p not in (1, 2):
        raise NotImplementedError(f"cdist(p={p:g})")
    last = op.Constant(value_ints=[-1])
    between = op.Sub(op.Unsqueeze(a, op.Constant(value_ints=[-2])), op.Unsqueeze(b, op.Constant(value_ints=[-3])))
    if p == 1:
        return op.ReduceSum(op.Abs(between), last, keepdims=0)
    squares = op.ReduceSum(op.Mul(between, between), last, keepdims=0)
    zero, one = _constant(0, a), _constant(1, a)
    is_equal = op.Equal(squares, zero)
    return op.Where(is_equal, zero, op.Sqrt(op.Where(is_equal, one, squares)))


TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    ops.aten._cdist_forward.default: _distances,
    **sequences.TRANSLATIONS,
    ops.aten.scaled_dot_product_attention.default: _attention,
    ops.aten.conv3d.default: _conv3d,
    ops.aten._grouped_mm.default: _grouped_mm,
    ops.aten.histc.default: _histc,
    ops.aten.bernoulli.default: _bernoulli,
    ops.aten.randperm.default: _permutation,
    ops.prims.uniform.default: _uniform,
    ops.aten.linalg_matrix_exp.default: _matrix_exp,
    ops.aten.linalg_householder_product.default: _householder_product,
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
    ops.aten.lgamma.default: _lgamma,
    ops.prims.lgamma.default: _lgamma,
    ops.aten.cross_entropy_loss.default: _cross_entropy,
    ops.aten.detach.default: _stop_gradient,
    ops.aten.masked_select.default: _masked_select,
    ops.aten.sort.stable: _sort,
    ops.aten.split.Tensor: _split,
    ops.onward.ctc_of_sequences.default: _ctc,
    ops.onward.in_mode.default: _in_training,
    ops.aten.embedding.default: _embedding,
    ops.aten._embedding_bag.default: _embedding_bag,
    ops.aten.embedding_bag.padding_idx: _embedding_bag,
}
"""Translation table for `torch.onnx.export`."""

_OF_LIBRARIES = {"transformers.grouped_mm_fallback.default": _grouped_mm}
"""Translations of operators that other libraries register, by name."""


def translations_for(program: ExportedProgram) -> dict[Any, Callable[..., Any]]:
    """Return the translation table with the operators of other libraries in a program."""
    targets = {node.target for node in program.graph.nodes if node.op == "call_function"}
    return TRANSLATIONS | {target: _OF_LIBRARIES[str(target)] for target in targets if str(target) in _OF_LIBRARIES}
