"""Calls, which are written out, and control flow."""

from __future__ import annotations

import onnx_ir as ir

from onward.engines.framework import Operators
from onward.frameworks.formulas.elementwise import log_add_exp, relu6
from onward.frameworks.formulas.reduction import where
from onward.frameworks.jax.jaxpr.builder import align_mask, declare_value
from onward.frameworks.jax.jaxpr.movement import positions

primitives = Operators()


@primitives.define("jit", "remat2")
def call(op, *xs, jaxpr):
    return op.inline(jaxpr, *xs)


@primitives.define("closed_call", "custom_vjp_call")
def custom_call(op, *xs, call_jaxpr):
    return op.inline(call_jaxpr, *xs)


_OWN_SLOPES = {
    ("relu", "jax/_src/nn/functions.py"): lambda op, x: op.Relu(x),
    ("relu6", "jax/_src/nn/functions.py"): relu6,
    ("logaddexp", "jax/_src/lax/other.py"): log_add_exp,
}
"""Functions whose derivative at kinks is not that of their parts -> the same with this derivative."""


@primitives.define("custom_jvp_call")
def custom_jvp_call(op, *xs, call_jaxpr):
    """Return the results of a function with a derivative of its own, that of its parts where it is not JAX's own."""
    name, _, source = call_jaxpr.jaxpr.debug_info.func_src_info.partition(" at ")
    for (function, file), compute in _OWN_SLOPES.items():
        if name == function and f"/{file}:" in source.replace("\\", "/") and xs[0].dtype.is_floating_point():
            return compute(op, *xs)
    return op.inline(call_jaxpr, *xs)


def _within(op, xs):
    """Values around a nested graph, as it sees them."""
    return [op(x.value) for x in xs]


def _scalar(name, dtype):
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(()))


def _results(outputs, count):
    return (outputs,) if count == 1 else outputs


# ---- If --------------------------------------------------------------------------------------------------------------


@primitives.define("cond")
def cond(op, which, *xs, branches, outs):
    return _branch(op, which, xs, branches, outs, 0)


def _branch(op, which, xs, branches, outs, first):
    """One of the branches, of which the first has this number."""
    if len(branches) == 1:
        return op.inline(branches[0], *_within(op, xs))
    chosen = op.subgraph(lambda inner: inner.inline(branches[0], *_within(inner, xs)), name="branch")
    others = op.subgraph(
        lambda inner: _branch(inner, inner(which.value), xs, branches[1:], outs, first + 1), name="branch"
    )
    results = op.If(op.Equal(which, first), then_branch=chosen, else_branch=others, outputs=len(outs))
    return [expr.like(declare_value(out)) for expr, out in zip(_results(results, len(outs)), outs, strict=True)]


# ---- Loop ------------------------------------------------------------------------------------------------------------


@primitives.define("while")
def repeat(op, *xs, cond_jaxpr, body_jaxpr, cond_nconsts, body_nconsts, outs):
    """Of many loops at once (vmap), each has a condition: all go on while one does, and those that ended stay."""
    of_condition, xs = xs[:cond_nconsts], xs[cond_nconsts:]
    of_body, start = xs[:body_nconsts], xs[body_nconsts:]
    many = len(cond_jaxpr.out_avals[0].shape)

    def goes_on(inner, carried):
        (each,) = inner.inline(cond_jaxpr, *_within(inner, of_condition), *carried)
        return each, inner.ReduceMax(each, keepdims=0) if many else each

    def step(inner, _number, _goes_on, *carried):
        after = inner.inline(body_jaxpr, *_within(inner, of_body), *carried)
        if many:
            each, _ = goes_on(inner, carried)
            after = [
                where(inner, align_mask(inner, each, len(out.shape), many), new, old)
                for new, old, out in zip(after, carried, outs, strict=True)
            ]
        return [goes_on(inner, after)[1], *after]

    carried = [declare_value(out, "carried") for out in outs]
    body = op.subgraph(step, [_scalar("iteration", ir.DataType.INT64), _scalar("goes_on", ir.DataType.BOOL), *carried])
    results = op.Loop(None, goes_on(op, start)[1], *start, body=body, outputs=len(outs))
    return _results(results, len(outs))


# ---- Scan ------------------------------------------------------------------------------------------------------------


@primitives.define("scan")
def scan(op, *xs, jaxpr, length, num_consts, num_carry, reverse, outs):
    """A Scan needs something to go along: where there is nothing, the numbers of the steps."""
    consts, start, items = xs[:num_consts], xs[num_consts : num_consts + num_carry], xs[num_consts + num_carry :]
    variables = jaxpr.jaxpr.invars[num_consts:]
    inputs = [declare_value(var.aval, "carried" if i < num_carry else "item") for i, var in enumerate(variables)]
    if not items:
        items = (positions(op, length),)
        inputs.append(_scalar("iteration", ir.DataType.INT64))
    step = lambda inner, *values: inner.inline(jaxpr, *_within(inner, consts), *values[: len(variables)])
    way = int(reverse)
    results = op.Scan(
        *start,
        *items,
        outputs=len(outs),
        body=op.subgraph(step, inputs),
        num_scan_inputs=len(items),
        scan_input_directions=[way] * len(items),
        scan_output_directions=[way] * (len(outs) - num_carry) or None,
    )
    return _results(results, len(outs))
