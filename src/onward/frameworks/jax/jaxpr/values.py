"""What the families share: types in which kernels are there, and small pieces of graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.build import Expr
from onward.frameworks.formulas.graph_building import cast

_WIDE = {ir.DataType.INT32, ir.DataType.INT64, ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16}


def widely(compute: Callable[..., Expr]) -> Callable[..., Expr]:
    """The same for all types: truth values and integers that ONNX Runtime has no such kernel for become int64."""

    def computed(op: Any, x: Expr, *rest: Any, **options: Any) -> Expr:
        if x.dtype in _WIDE or x.dtype is None or x.dtype.is_floating_point():
            return compute(op, x, *rest, **options)
        others = [cast(op, other, np.int64) if isinstance(other, Expr) else other for other in rest]
        return cast(op, compute(op, cast(op, x, np.int64), *others, **options), x.dtype)

    return computed


def where(op: Any, which: Expr, yes: Expr, no: Expr) -> Expr:
    """One of two, element by element."""
    if yes.dtype is ir.DataType.BOOL:
        return op.Or(op.And(which, yes), op.And(op.Not(which), no))
    return _where(op, yes, no, which=which)


@widely
def _where(op: Any, yes: Expr, no: Expr, *, which: Expr) -> Expr:
    return op.Where(which, yes, no)


def align_mask(op: Any, mask: Expr, rank: int, count: int) -> Expr:
    """A mask over the first axes, for what has more axes after them."""
    return op.Unsqueeze(mask, list(range(count, rank))) if rank > count else mask


def reshape_to(op: Any, x: Expr, sizes: Sequence[Any]) -> Expr:
    """`x` in another shape, in which one size may be a symbol that need not be computed."""
    unknown = [i for i, size in enumerate(sizes) if not isinstance(size, int)]
    if len(unknown) == 1 and 0 not in sizes:
        return op.Reshape(x, [-1 if i in unknown else size for i, size in enumerate(sizes)])
    return op.Reshape(x, op.shape(sizes), allowzero=1 if 0 in sizes else None)


def fill(op: Any, sizes: Sequence[Any], number: Any, dtype: Any) -> Expr:
    """A tensor that is the same number everywhere."""
    return op.ConstantOfShape(op.shape(sizes), value=ir.Tensor(np.full((1,), number, dtype)))


def extreme(dtype: Any, largest: bool) -> Any:
    """The largest or smallest number of a type."""
    kind = np.dtype(dtype)
    if kind.kind == "b":
        return largest
    if kind.kind in "iu":
        return np.iinfo(kind).max if largest else np.iinfo(kind).min
    return np.inf if largest else -np.inf
