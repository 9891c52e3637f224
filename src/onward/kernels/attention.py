"""Attention that an exporter has written out, or that is an operator of the standard: found, and given to a kernel.

    MatMul(Softmax(MatMul(q * a, kᵀ * b) * c + mask), v)

Heads are often made by transposing [N, T, H, D]. The kernel reads that as it is, and no Transpose is left.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from onward.build import Builder, Expr
from onward.kernels.library import DOMAIN
from onward.kernels.patterns import Known, made_by, only_made_by, with_gradient
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
            found = search.written_out(node) if node.op_type == "MatMul" else search.operator(node)
            if found is not None:
                _replace(context, node, found)


@dataclasses.dataclass
class _Found:
    """What attention is of; queries, keys and values by heads, or by position where `length_first`."""

    q: ir.Value
    k: ir.Value
    v: ir.Value
    mask: ir.Value | None = None
    factors: list[tuple[ir.Value, bool]] = dataclasses.field(default_factory=list)
    """What scores are multiplied by, or (True) divided by, and is not known before."""
    scale: float = 1.0
    causal: bool = False
    guarded: bool = False
    """Whether queries that see nothing get zeros."""
    fill: float | None = None
    """If the mask is made of truth values: what is added where it does not hold."""
    turned: bool = False
    """Whether keys, alone, are by position."""
    heads: int | None = None
    """If heads lie side by side in the last axis: how many there are."""


class _Search:
    def __init__(self, model: Model):
        self._opset, self._known = model.opset, Known()
        self._trained = with_gradient(model.graph)

    # ---- the operator ------------------------------------------------------------------------------------------------

    def operator(self, node: ir.Node) -> _Found | None:
        """The operator of the standard, as far as the kernel does the same."""
        given = attributes(node, self._opset)
        q, k, v, mask = (*node.inputs, None)[:4]
        more = any(value is not None for value in node.inputs[4:]) or any(value.name for value in node.outputs[1:])
        windows = {given.get(f"{side}_window_size") for side in ("left", "right")} - {None, -1}
        if more or windows or given["softcap"] or q is None or k is None or v is None:
            return None
        found = _Found(q, k, v, causal=bool(given["is_causal"]), guarded=mask is not None)
        sizes, key_sizes = dims(q) or (), dims(k) or ()
        width = sizes[-1] if sizes else None
        if len(sizes) == RANK - 1 and q.dtype == k.dtype == v.dtype == ir.DataType.FLOAT:
            heads = found.heads = given["q_num_heads"]
            width = width // heads if isinstance(width, int) and heads and heads == given["kv_num_heads"] else None
        elif not _go_together(q, k, v):
            return None
        if not isinstance(width, int):
            return None
        found.scale = width**-0.5 if given["scale"] is None else given["scale"]
        if mask is not None:
            shape = dims(mask)
            if not self._is_mask(mask) or not shape or shape[-1] != key_sizes[-2]:  # it may be shorter
                return None
            found.mask, found.fill = mask, -np.inf if mask.dtype == ir.DataType.BOOL else None
        return found

    # ---- written out -------------------------------------------------------------------------------------------------

    def written_out(self, last: ir.Node) -> _Found | None:
        """The attention that a product of weights and values ends."""
        weights, v = last.inputs
        softmax, guarded = self._softmax(weights)
        if softmax is None or v is None:
            return None
        found = _Found(v, v, v, guarded=guarded)
        scores = self._unmasked(softmax.inputs[0], found)
        if scores is not None:
            scores = self._unscaled(scores, found)
        product = only_made_by(scores, "MatMul")
        if product is None:
            return None
        q, turned = (self._unscaled(value, found) for value in product.inputs if value is not None)
        found.turned, k = _untransposed(turned)
        if k is None or not _go_together(q, k, v, found.turned):
            return None
        found.q, found.k = q, k
        return found

    def _softmax(self, weights: ir.Value | None) -> tuple[ir.Node | None, bool]:
        """The softmax over the last axis, behind `Where(IsNaN(weights), 0, weights)` if that is there."""
        guard = only_made_by(weights, "Where")
        if guard is None:
            node = only_made_by(weights, "Softmax")
        else:
            condition, zero, inner = guard.inputs
            test, node = only_made_by(condition, "IsNaN"), made_by(inner, "Softmax")
            if test is None or test.inputs[0] is not inner or self._known.number(zero) != 0 or inner is None:
                return None, False
            if inner.is_graph_output() or {use.node for use in inner.uses()} != {guard, test}:
                return None, False
        if node is None or node.attributes.get_int("axis", -1) not in (-1, RANK - 1):
            return None, False
        return node, guard is not None

    def _unmasked(self, value: ir.Value | None, found: _Found) -> ir.Value | None:
        """The scores before a mask is added, or takes the place of some."""
        if (node := only_made_by(value, "Add")) is not None:
            pairs = (node.inputs, node.inputs[::-1])
            way = next(((a, b) for a, b in pairs if only_made_by(a, "MatMul", "Mul", "Div") and self._is_mask(b)), None)
            if way is None:
                return None
            value, mask = way
            if self._is_causal(self._known.array(mask)):
                found.causal = True
            else:
                found.mask = mask
        elif (node := only_made_by(value, "Where")) is not None:
            return self._unhidden(node, found)
        return value

    def _unhidden(self, node: ir.Node, found: _Found) -> ir.Value | None:
        """The scores in `Where(mask, scores, fill)`, if what is hidden by the fill has no part in anything."""
        condition, scores, fill = node.inputs
        number, holds = self._known.number(fill), self._known.array(condition)
        if condition is None or number is None or number > -1e30 or not self._is_mask(condition):
            return None
        if holds is not None and self._is_causal(np.where(holds, 0, number)):
            found.causal = True
        elif number == -np.inf or (holds is not None and holds.any(-1).all()):
            found.mask, found.fill = condition, number
        else:
            return None
        return scores

    def _is_mask(self, value: ir.Value | None) -> bool:
        array = self._known.array(value)
        if value is None or value.dtype not in (ir.DataType.FLOAT, ir.DataType.BOOL):
            return False
        if array is None and value in self._trained:
            return False
        rank = array.ndim if array is not None else value.shape.rank() if value.shape is not None else None
        return rank is not None and rank <= RANK

    @staticmethod
    def _is_causal(mask: np.ndarray | None) -> bool:
        """Whether a query sees the keys up to its own position, and no others."""
        if mask is None or mask.ndim < 2 or mask.size != mask.shape[-1] * mask.shape[-2] or 1 in mask.shape[-2:]:
            return False
        seen = np.tri(*mask.shape[-2:], dtype=np.bool_)
        flat = mask.reshape(seen.shape)
        return bool((flat[seen] == 0).all() and (flat[~seen] <= np.finfo(np.float32).min).all())

    def _unscaled(self, value: ir.Value, found: _Found) -> ir.Value:
        """What is before factors that are single numbers."""
        while (node := only_made_by(value, "Mul", "Div")) is not None:
            source, factor = node.inputs
            if node.op_type == "Mul" and not _is_number(factor):
                source, factor = factor, source
            if source is None or factor is None or not _is_number(factor):
                break
            number = self._known.number(factor)
            if number is None:
                found.factors.append((factor, node.op_type == "Div"))
            else:
                found.scale = found.scale / number if node.op_type == "Div" else found.scale * number
            value = source
        return value


def _is_number(value: ir.Value | None) -> bool:
    shape = dims(value)
    return shape is not None and len(shape) <= RANK and all(n == 1 for n in shape)


def _untransposed(value: ir.Value) -> tuple[bool, ir.Value | None]:
    """What is transposed for the product with queries, by one node or between two Reshapes; whether by position."""
    node = made_by(value, "Transpose", "Reshape")
    if node is not None and node.op_type == "Transpose":
        perm = list(node.attributes.get_ints("perm", ()))
        return perm == [0, 2, 3, 1], node.inputs[0] if perm in ([0, 1, 3, 2], [0, 2, 3, 1]) else None
    turned = made_by(node.inputs[0], "Transpose") if node is not None else None
    before = made_by(turned.inputs[0], "Reshape") if turned is not None else None
    if turned is None or before is None or list(turned.attributes.get_ints("perm", ())) != [0, 2, 1]:
        return False, None
    sizes, between, after = dims(before.inputs[0]), dims(before.outputs[0]), dims(value)
    if sizes is None or between is None or len(sizes) != RANK:
        return False, None
    swaps = between[1:] == sizes[2:] and after == (*sizes[:2], sizes[3], sizes[2])
    return False, before.inputs[0] if swaps else None


def _go_together(q: ir.Value, k: ir.Value, v: ir.Value, turned: bool = False) -> bool:
    """Whether these are floats whose samples and heads are the same, none being broadcast."""
    shapes = [dims(value) or () for value in (q, k, v)]
    if any(len(shape) != RANK for shape in shapes) or any(value.dtype != ir.DataType.FLOAT for value in (q, k, v)):
        return False
    if turned:
        shapes[1] = tuple(shapes[1][axis] for axis in SWAP)
    return all(shape[:2] == shapes[0][:2] for shape in shapes)


# ---- what takes its place --------------------------------------------------------------------------------------------


def _replace(context: Context, last: ir.Node, found: _Found) -> None:
    with context.before(last) as op:
        length_first = found.heads is not None
        parts: list[Expr | ir.Value] = [found.q, found.k, found.v]
        unswapped = [_unswapped(found.q), found.k if found.turned else _unswapped(found.k), _unswapped(found.v)]
        if found.heads is not None:
            parts = [op.Reshape(value, [0, 0, found.heads, -1]) for value in parts]
        elif None not in unswapped:
            length_first, parts = True, [value for value in unswapped if value is not None]
        elif found.turned:
            parts[1] = op.Transpose(found.k, perm=SWAP)
        for factor, over in found.factors:
            parts[0] = op.Div(parts[0], factor) if over else op.Mul(parts[0], factor)
        mask: Expr | ir.Value | None = found.mask
        if found.fill is not None:
            mask = op.Where(found.mask, np.float32(0), np.float32(found.fill))
        y, sums = op.node(
            DOMAIN,
            "Attention",
            *parts,
            mask,
            scale=float(found.scale),
            causal=int(found.causal),
            guarded=int(found.guarded),
            length_first=int(length_first),
            outputs=2,
        )
        for made in (y, sums):
            made.value.type = ir.TensorType(ir.DataType.FLOAT)
        _hand_over(context, op, last.outputs[0], y, found.heads, length_first)


def _hand_over(context: Context, op: Builder, output: ir.Value, y: Expr, heads: int | None, length_first: bool) -> None:
    """Let others read what the kernel computes. What they would transpose is in the order that they want."""
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
    """What heads were made of by swapping two axes."""
    node = made_by(value, "Transpose")
    return node.inputs[0] if node is not None and list(node.attributes.get_ints("perm", ())) == SWAP else None
