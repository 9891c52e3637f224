"""Attention, as an operator of the standard or written out by an exporter, replaced by a kernel.

    MatMul(Softmax(MatMul(q * a, kᵀ * b) * c + mask), v)

Heads often come from a Transpose of [N, T, H, D]. The kernel reads that order, so no Transpose is
left.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from onward.build import Builder, Expr
from onward.kernels.library import DOMAIN
from onward.kernels.patterns import Constants, differentiable_values, producer_of, sole_producer
from onward.model import Model
from onward.model.walk import attributes
from onward.shapes import dims
from onward.standard import is_standard
from onward.transform.context import Context

SWAP = [0, 2, 1, 3]
RANK = 4


def use_attention(context: Context) -> None:
    """Let kernels compute the attention in the outermost graph, in place."""
    search = _Search(context.model)
    for node in list(context.graph):
        if is_standard(node) and node.op_type in ("MatMul", "Attention"):
            match = search.written_out(node) if node.op_type == "MatMul" else search.operator(node)
            if match is not None:
                _replace(context, node, match)


@dataclasses.dataclass
class _Match:
    """Inputs and settings of an attention; inputs are [N, H, T, D] or [N, T, H, D]."""

    q: ir.Value
    k: ir.Value
    v: ir.Value
    mask: ir.Value | None = None
    factors: list[tuple[ir.Value, bool]] = dataclasses.field(default_factory=list)
    """Factors of the scores that are not constant, with True for divisors."""
    scale: float = 1.0
    causal: bool = False
    guarded: bool = False
    """True if queries that see no key return zeros."""
    fill: float | None = None
    """Number added where a Boolean mask is false."""
    keys_by_position: bool = False
    """True if only the keys are [N, T, H, D]."""
    heads: int | None = None
    """Number of heads that the last axis holds; None if they have their own axis."""


class _Search:
    def __init__(self, model: Model):
        self._opset, self._constants = model.opset, Constants()
        self._trained = differentiable_values(model.graph)

    # ---- the operator ------------------------------------------------------------------------------------------------

    def operator(self, node: ir.Node) -> _Match | None:
        """Return the match of an Attention operator, if the kernel computes the same."""
        settings = attributes(node, self._opset)
        q, k, v, mask = (*node.inputs, None)[:4]
        has_others = any(value is not None for value in node.inputs[4:]) or any(
            value.name for value in node.outputs[1:]
        )
        windows = {settings.get(f"{side}_window_size") for side in ("left", "right")} - {None, -1}
        if has_others or windows or settings["softcap"] or q is None or k is None or v is None:
            return None
        match = _Match(q, k, v, causal=bool(settings["is_causal"]), guarded=mask is not None)
        sizes, key_sizes = dims(q) or (), dims(k) or ()
        width = sizes[-1] if sizes else None
        if len(sizes) == RANK - 1 and q.dtype == k.dtype == v.dtype == ir.DataType.FLOAT:
            heads = match.heads = settings["q_num_heads"]
            width = width // heads if isinstance(width, int) and heads and heads == settings["kv_num_heads"] else None
        elif not _are_compatible(q, k, v):
            return None
        if not isinstance(width, int):
            return None
        match.scale = width**-0.5 if settings["scale"] is None else settings["scale"]
        if mask is not None:
            shape = dims(mask)
            if not self._is_mask(mask) or not shape or shape[-1] != key_sizes[-2]:  # it may be shorter
                return None
            match.mask, match.fill = mask, -np.inf if mask.dtype == ir.DataType.BOOL else None
        return match

    # ---- written out -------------------------------------------------------------------------------------------------

    def written_out(self, last: ir.Node) -> _Match | None:
        """Return the attention that ends with this matmul of weights and values."""
        weights, v = last.inputs
        softmax, guarded = self._softmax(weights)
        if softmax is None or v is None:
            return None
        match = _Match(v, v, v, guarded=guarded)
        scores = self._without_mask(softmax.inputs[0], match)
        if scores is not None:
            scores = self._without_factors(scores, match)
        matmul = sole_producer(scores, "MatMul")
        if matmul is None:
            return None
        q, keys = (self._without_factors(value, match) for value in matmul.inputs if value is not None)
        match.keys_by_position, k = _untransposed(keys)
        if k is None or not _are_compatible(q, k, v, match.keys_by_position):
            return None
        match.q, match.k = q, k
        return match

    def _softmax(self, weights: ir.Value | None) -> tuple[ir.Node | None, bool]:
        """Return the softmax, and True if `Where(IsNaN(weights), 0, weights)` guards it."""
        guard = sole_producer(weights, "Where")
        if guard is None:
            node = sole_producer(weights, "Softmax")
        else:
            condition, zero, inner = guard.inputs
            test, node = sole_producer(condition, "IsNaN"), producer_of(inner, "Softmax")
            if test is None or test.inputs[0] is not inner or self._constants.number(zero) != 0 or inner is None:
                return None, False
            if inner.is_graph_output() or {use.node for use in inner.uses()} != {guard, test}:
                return None, False
        if node is None or node.attributes.get_int("axis", -1) not in (-1, RANK - 1):
            return None, False
        return node, guard is not None

    def _without_mask(self, value: ir.Value | None, match: _Match) -> ir.Value | None:
        """Return the scores before a mask is added or selects."""
        if (node := sole_producer(value, "Add")) is not None:
            pairs = (node.inputs, node.inputs[::-1])
            pair = next(
                ((a, b) for a, b in pairs if sole_producer(a, "MatMul", "Mul", "Div") and self._is_mask(b)), None
            )
            if pair is None:
                return None
            value, mask = pair
            if self._is_causal(self._constants.array(mask)):
                match.causal = True
            else:
                match.mask = mask
        elif (node := sole_producer(value, "Where")) is not None:
            return self._scores_in_where(node, match)
        return value

    def _scores_in_where(self, node: ir.Node, match: _Match) -> ir.Value | None:
        """Return the scores in `Where(mask, scores, fill)`, if the fill removes masked scores."""
        condition, scores, fill = node.inputs
        fill_number, mask = self._constants.number(fill), self._constants.array(condition)
        if condition is None or fill_number is None or fill_number > -1e30 or not self._is_mask(condition):
            return None
        if mask is not None and self._is_causal(np.where(mask, 0, fill_number)):
            match.causal = True
        elif fill_number == -np.inf or (mask is not None and mask.any(-1).all()):
            match.mask, match.fill = condition, fill_number
        else:
            return None
        return scores

    def _is_mask(self, value: ir.Value | None) -> bool:
        array = self._constants.array(value)
        if value is None or value.dtype not in (ir.DataType.FLOAT, ir.DataType.BOOL):
            return False
        if array is None and value in self._trained:
            return False
        rank = array.ndim if array is not None else value.shape.rank() if value.shape is not None else None
        return rank is not None and rank <= RANK

    @staticmethod
    def _is_causal(mask: np.ndarray | None) -> bool:
        """True if a query sees exactly the keys up to its own position."""
        if mask is None or mask.ndim < 2 or mask.size != mask.shape[-1] * mask.shape[-2] or 1 in mask.shape[-2:]:
            return False
        seen = np.tri(*mask.shape[-2:], dtype=np.bool_)
        flat = mask.reshape(seen.shape)
        return bool((flat[seen] == 0).all() and (flat[~seen] <= np.finfo(np.float32).min).all())

    def _without_factors(self, value: ir.Value, match: _Match) -> ir.Value:
        """Return the value before scalar factors."""
        while (node := sole_producer(value, "Mul", "Div")) is not None:
            source, factor = node.inputs
            if node.op_type == "Mul" and not _is_number(factor):
                source, factor = factor, source
            if source is None or factor is None or not _is_number(factor):
                break
            number = self._constants.number(factor)
            if number is None:
                match.factors.append((factor, node.op_type == "Div"))
            else:
                match.scale = match.scale / number if node.op_type == "Div" else match.scale * number
            value = source
        return value


def _is_number(value: ir.Value | None) -> bool:
    shape = dims(value)
    return shape is not None and len(shape) <= RANK and all(n == 1 for n in shape)


def _untransposed(value: ir.Value) -> tuple[bool, ir.Value | None]:
    """Return the keys before their transpose, and True if they are [N, T, H, D]."""
    node = producer_of(value, "Transpose", "Reshape")
    if node is not None and node.op_type == "Transpose":
        perm = list(node.attributes.get_ints("perm", ()))
        return perm == [0, 2, 3, 1], node.inputs[0] if perm in ([0, 1, 3, 2], [0, 2, 3, 1]) else None
    transpose = producer_of(node.inputs[0], "Transpose") if node is not None else None
    before = producer_of(transpose.inputs[0], "Reshape") if transpose is not None else None
    if transpose is None or before is None or list(transpose.attributes.get_ints("perm", ())) != [0, 2, 1]:
        return False, None
    sizes, between, after = dims(before.inputs[0]), dims(before.outputs[0]), dims(value)
    if sizes is None or between is None or len(sizes) != RANK:
        return False, None
    swaps = between[1:] == sizes[2:] and after == (*sizes[:2], sizes[3], sizes[2])
    return False, before.inputs[0] if swaps else None


def _are_compatible(q: ir.Value, k: ir.Value, v: ir.Value, keys_by_position: bool = False) -> bool:
    """True for floats with the same samples and heads, none of them broadcast."""
    shapes = [dims(value) or () for value in (q, k, v)]
    if any(len(shape) != RANK for shape in shapes) or any(value.dtype != ir.DataType.FLOAT for value in (q, k, v)):
        return False
    if keys_by_position:
        shapes[1] = tuple(shapes[1][axis] for axis in SWAP)
    return all(shape[:2] == shapes[0][:2] for shape in shapes)


# ---- what takes its place --------------------------------------------------------------------------------------------


def _replace(context: Context, last: ir.Node, match: _Match) -> None:
    with context.before(last) as op:
        length_first = match.heads is not None
        parts: list[Expr | ir.Value] = [match.q, match.k, match.v]
        unswapped = [
            _unswapped(match.q),
            match.k if match.keys_by_position else _unswapped(match.k),
            _unswapped(match.v),
        ]
        if match.heads is not None:
            parts = [op.Reshape(value, [0, 0, match.heads, -1]) for value in parts]
        elif None not in unswapped:
            length_first, parts = True, [value for value in unswapped if value is not None]
        elif match.keys_by_position:
            parts[1] = op.Transpose(match.k, perm=SWAP)
        for factor, over in match.factors:
            parts[0] = op.Div(parts[0], factor) if over else op.Mul(parts[0], factor)
        mask: Expr | ir.Value | None = match.mask
        if match.fill is not None:
            mask = op.Where(match.mask, np.float32(0), np.float32(match.fill))
        y, sums = op.node(
            DOMAIN,
            "Attention",
            *parts,
            mask,
            scale=float(match.scale),
            causal=int(match.causal),
            guarded=int(match.guarded),
            length_first=int(length_first),
            outputs=2,
        )
        y.value.type = sums.value.type = ir.TensorType(ir.DataType.FLOAT)
        _replace_output(context, op, last.outputs[0], y, match.heads, length_first)


def _replace_output(
    context: Context, op: Builder, output: ir.Value, y: Expr, heads: int | None, length_first: bool
) -> None:
    """Replace the output by the result of the kernel, and drop Transposes after it."""
    if heads is not None:
        context.replace(output, op.Reshape(y, [0, 0, -1]))
        return
    if not length_first:
        context.replace(output, y)
        return
    sizes = dims(output)
    y.value.shape = None if sizes is None else ir.Shape([sizes[axis] for axis in SWAP])
    for node in [use.node for use in output.uses()]:
        if _unswapped(node.outputs[0]) is output and not node.outputs[0].is_graph_output():
            node.outputs[0].replace_all_uses_with(y.value)
    context.replace(output, op.Transpose(y, perm=SWAP))


def _unswapped(value: ir.Value) -> ir.Value | None:
    """Return the value whose two middle axes were swapped."""
    node = producer_of(value, "Transpose")
    return node.inputs[0] if node is not None and list(node.attributes.get_ints("perm", ())) == SWAP else None
