"""Passes that shorten recorded calls: merged movements of elements, and fused attention."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from onward.frameworks.program.calls import ProgramStep, Value, count_uses, in_order, replace_values, without_unused
from onward.frameworks.torch.program.layers import F_
from onward.frameworks.torch.program.operators import ForwardCalls
from onward.frameworks.torch.program.recording import WhileTraining, compute, hint, numbered_tensor

_MOVES = {
    f"torch.Tensor.{name}": getattr(torch.Tensor, name)
    for name in ("reshape", "permute", "unsqueeze", "squeeze", "flatten", "transpose", "unflatten")
}


def _merge_moves(steps: list[ProgramStep], outputs: list[Value]) -> None:
    """Shorten chains of calls that only move elements."""
    readers: dict[Value, list[ProgramStep]] = {}
    for step in steps:
        for value in step.values():
            readers.setdefault(value, []).append(step)
    moved: set[ProgramStep] = set()
    output_values = set(outputs)
    for step in steps:
        if step.function in _MOVES and step not in moved:
            chain = [step]  # each result has one reader, the next call
            while (result := chain[-1].results[0]) not in output_values:
                following = readers.get(result, [])
                if len(following) != 1 or following[0].function not in _MOVES:
                    break
                chain += following
            moved.update(chain)
            _shorten(chain)


Call = tuple[str, list[Any]]
"""Method and its arguments."""


def _shorten(chain: list[ProgramStep]) -> None:
    """Replace parts of a chain by fewer calls, the longest parts first."""
    for length in range(len(chain), 1, -1):
        for start in range(len(chain) - length + 1):
            old = chain[start : start + length]
            calls = _shortest_calls(old[0].arguments[0], old[-1].results[0])
            if calls is not None and len(calls) < length:
                value: Value = old[0].arguments[0]
                for step, (method, arguments) in zip(old[-len(calls) :], calls, strict=True):
                    step.function = f"torch.Tensor.{method}"
                    step.arguments, step.named, step.call = [value, *arguments], {}, _MOVES[step.function]
                    source, value = value, step.results[0]
                    value.tensor = step.call(source.tensor, *arguments)
                _shorten(chain[:start])
                _shorten(chain[start + length :])
                return


def _shortest_calls(source: Value, result: Value) -> list[Call] | None:
    """Return one or two calls that move the elements of one value to their positions in another."""
    before = numbered_tensor(source.tensor.shape)
    after = compute(result, {source: before})
    sizes = list(result.tensor.shape)
    if torch.equal(before.flatten(), after.flatten()):
        is_flat = after.ndim == 2 and before.ndim > 2 and after.shape[0] == before.shape[0]
        return [("flatten", [1])] if is_flat else [("reshape", [sizes])]
    orders = list(itertools.permutations(range(before.ndim))) if before.ndim <= _MOST_AXES else []
    for axes in orders if before.ndim == after.ndim else ():
        if _agree(before.permute(axes), after):
            return [("permute", [list(axes)])]
    for axes in itertools.permutations(range(after.ndim)) if after.ndim <= _MOST_AXES else ():
        split = [size for _, size in sorted(zip(axes, sizes, strict=True), key=lambda pair: pair[0])]
        if _agree(before.reshape([hint(size) for size in split]).permute(axes), after):
            return [("reshape", [split]), ("permute", [list(axes)])]
    for axes in orders:
        if _agree(before.permute(axes).reshape(after.shape), after):
            return [("permute", [list(axes)]), ("reshape", [sizes])]
    return None


_MOST_AXES = 5  # 120 orders


def _agree(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if two tensors are equal. A few elements are compared first, which is fast."""
    if a.shape != b.shape or not a.numel():
        return a.shape == b.shape
    positions = [tuple((i * 7919 + axis) % size for axis, size in enumerate(a.shape)) for i in range(1, 6)]
    return all(a[position] == b[position] for position in positions) and torch.equal(a, b)


def _is_identity(step: ProgramStep) -> bool:
    """True if a call returns its input unchanged."""
    source = step.arguments[0] if step.arguments else None
    if not isinstance(source, Value):
        return False
    if [str(size) for size in source.tensor.shape] != [str(size) for size in step.results[0].tensor.shape]:
        return False
    name = step.function.removeprefix("torch.Tensor.")
    if name in ("add", "sub") and step.arguments[1:] == [0]:
        return source.tensor.dtype == step.results[0].tensor.dtype
    return name in ("reshape", "expand") or (name == "permute" and list(step.arguments[1]) == sorted(step.arguments[1]))


def shorten(program: ForwardCalls) -> ForwardCalls:
    """Return the program with fewer calls."""
    outputs = list(program.outputs.values())
    _merge_moves(program.steps, outputs)
    steps = without_unused(program.steps, outputs)
    for step in steps:
        if _is_identity(step):
            new = {step.results[0]: step.arguments[0]}
            for other in steps:
                other.arguments, other.named = replace_values((other.arguments, other.named), new)
            program.outputs = replace_values(program.outputs, new)
    steps = without_unused(steps, list(program.outputs.values()))
    uses = count_uses(steps, program.outputs.values())
    for step in steps:
        _fuse_attention(step, uses)
        _merge_squeeze(step, uses)
    program.steps = in_order(program.outputs.values())
    return program


def _merge_squeeze(squeeze: ProgramStep, uses: dict[Value, int]) -> None:
    """Merge a squeeze into the reduction before it that keeps the same axes."""
    source = squeeze.arguments[0] if squeeze.function == "torch.Tensor.squeeze" else None
    reduction = _only(source, uses, *_REDUCTIONS)
    if reduction is None or not reduction.named.get("keepdim") or len(squeeze.arguments) != 2:
        return
    rank = reduction.arguments[0].tensor.ndim
    reduced, squeezed = (
        sorted(axis % rank for axis in tree_leaves(step.arguments[1])) for step in (reduction, squeeze)
    )
    if reduced == squeezed:
        squeeze.function, squeeze.call = reduction.function, reduction.call
        squeeze.arguments = reduction.arguments
        squeeze.named = {key: value for key, value in reduction.named.items() if key != "keepdim"}


_REDUCTIONS = ("torch.Tensor.sum", "torch.Tensor.mean", "torch.amax", "torch.amin")


# ---- attention -------------------------------------------------------------------------------------------------------


def _fuse_attention(last: ProgramStep, uses: dict[Value, int]) -> None:
    """Replace softmax(q · c · (k · c)ᵀ + mask) · v, with optional dropout, by PyTorch's attention."""
    if last.function != "torch.Tensor.matmul":
        return
    weights, v = last.arguments
    dropout = _only(weights, uses, "nn.Dropout")
    softmax = _only(dropout.arguments[0] if dropout else weights, uses, "torch.softmax")
    if softmax is None or softmax.arguments[1] not in (-1, v.tensor.ndim - 1):
        return
    scores, mask = softmax.arguments[0], None
    added = _only(scores, uses, "torch.Tensor.add")
    if added is not None:
        is_first = _only(added.arguments[0], uses, "torch.Tensor.matmul", *_SCALES) is not None
        scores, mask = added.arguments if is_first else added.arguments[::-1]
    scores, scale = _factor_of(scores, uses)
    product = _only(scores, uses, "torch.Tensor.matmul")
    if product is None or not all(isinstance(x, Value) and x.tensor.ndim == 4 for x in (*product.arguments, v)):
        return
    (q, of_q), (transposed, of_k) = (_factor_of(value, uses) for value in product.arguments)
    permute = _only(transposed, uses, "torch.Tensor.permute")
    if permute is None:
        return
    if mask is not None and not isinstance(mask, Value):
        return
    scale *= of_q * of_k
    named: dict[str, Any] = {} if mask is None else {"attn_mask": mask}
    if dropout is not None:
        named["dropout_p"] = WhileTraining(dropout.arguments[1])
    if not math.isclose(scale, q.tensor.shape[-1] ** -0.5, rel_tol=1e-6):
        named["scale"] = scale
    last.function, last.call = f"{F_}scaled_dot_product_attention", None
    last.arguments, last.named = [q, _swap_source(permute), v], named


def _swap_source(permute: ProgramStep) -> Value:
    """Return the source of a permutation with its last two axes exchanged."""
    source, (*axes, row, column) = permute.arguments
    if [*axes, column, row] == list(range(len(axes) + 2)):
        return source
    permute.arguments = [source, [*axes, column, row]]
    permute.results[0].tensor = source.tensor.permute(permute.arguments[1])
    return permute.results[0]


_SCALES = ("torch.Tensor.mul", "torch.Tensor.div")


def _only(value: Any, uses: dict[Value, int], *functions: str) -> ProgramStep | None:
    """Return the call that computes a value with a single reader, if it is one of these functions."""
    step = value.step if isinstance(value, Value) and uses[value] == 1 else None
    return step if step is not None and step.function in functions else None


def _factor_of(value: Value, uses: dict[Value, int]) -> tuple[Value, float]:
    """Split a scaled value into the value and its factor."""
    step = _only(value, uses, *_SCALES)
    if step is None:
        return value, 1.0
    source, factor = step.arguments
    if isinstance(factor, Value):
        if factor.array is None or factor.array.size != 1:
            return value, 1.0
        factor = factor.array.item()
    if not isinstance(factor, int | float) or not isinstance(source, Value):
        return value, 1.0
    return source, factor if step.function.endswith("mul") else 1 / factor
