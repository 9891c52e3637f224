"""Calls, which are inlined, and control flow."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onward.engines.framework import Operators
from onward.frameworks.formulas.elementwise import log_add_exp, relu6
from onward.frameworks.formulas.graph_building import constant_of
from onward.frameworks.formulas.reduction import where
from onward.frameworks.jax.jaxpr.builder import add_last_axes, declare_value
from onward.frameworks.jax.jaxpr.movement import positions

primitives = Operators()


primitives(
    **dict.fromkeys(("jit", "remat2"), lambda op, *xs, jaxpr: op.inline(jaxpr, *xs)),
    **dict.fromkeys(("closed_call", "custom_vjp_call"), lambda op, *xs, call_jaxpr: op.inline(call_jaxpr, *xs)),
)


# Functions of JAX whose derivative at kinks is not that of their parts.
_OWN_SLOPES = {
    ("relu", "jax/_src/nn/functions.py"): lambda op, x: op.Relu(x),
    ("relu6", "jax/_src/nn/functions.py"): relu6,
    ("logaddexp", "jax/_src/lax/other.py"): log_add_exp,
}


@primitives.define("custom_jvp_call")
def custom_jvp_call(op, *xs, call_jaxpr):
    """Inline a function. A model does not contain its custom derivative."""
    name, _, source = call_jaxpr.jaxpr.debug_info.func_src_info.partition(" at ")
    for (function, file), compute in _OWN_SLOPES.items():
        if name == function and f"/{file}:" in source.replace("\\", "/") and xs[0].dtype.is_floating_point():
            return compute(op, *xs)
    return op.inline(call_jaxpr, *xs)


def _within(op, xs):
    """Return values of an outer graph for a nested one."""
    return [op(x.value) for x in xs]


def _scalar(name, dtype):
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(()))


@primitives.define("cond")
def cond(op, which, *xs, branches, outs):
    if (index := constant_of(which)) is not None:
        return op.inline(branches[int(np.clip(index, 0, len(branches) - 1))], *xs)
    return _branch(op, which, xs, branches, outs, 0)


@primitives.define("platform_index")
def platform_index(op, *, platforms):
    """Return the index of the code for a CPU, or of the default."""
    return op.constant(np.int32(next(i for i, names in enumerate(platforms) if names is None or "cpu" in names)))


def _branch(op, which, xs, branches, outs, first):
    """Write nested Ifs over branches, whose indices begin at `first`."""
    if len(branches) == 1:
        return op.inline(branches[0], *_within(op, xs))
    chosen = op.subgraph(lambda inner: inner.inline(branches[0], *_within(inner, xs)), name="branch")
    others = op.subgraph(
        lambda inner: _branch(inner, inner(which.value), xs, branches[1:], outs, first + 1), name="branch"
    )
    results = op.If(op.Equal(which, first), then_branch=chosen, else_branch=others, outputs=len(outs))
    results = results if len(outs) > 1 else (results,)
    return [expr.like(declare_value(out)) for expr, out in zip(results, outs, strict=True)]


@primitives.define("while")
def repeat(op, *xs, cond_jaxpr, body_jaxpr, cond_nconsts, body_nconsts, outs):
    """Write a Loop. A batch of loops (vmap) runs until the last one ends; the others keep their values."""
    of_condition, xs = xs[:cond_nconsts], xs[cond_nconsts:]
    of_body, start = xs[:body_nconsts], xs[body_nconsts:]
    many = len(cond_jaxpr.out_avals[0].shape)

    def continues(inner, carried):
        (conditions,) = inner.inline(cond_jaxpr, *_within(inner, of_condition), *carried)
        return conditions, inner.ReduceMax(conditions, keepdims=0) if many else conditions

    def step(inner, _number, _continues, *carried):
        after = inner.inline(body_jaxpr, *_within(inner, of_body), *carried)
        if many:
            conditions, _ = continues(inner, carried)
            after = [
                where(inner, add_last_axes(inner, conditions, len(out.shape), many), new, old)
                for new, old, out in zip(after, carried, outs, strict=True)
            ]
        return [continues(inner, after)[1], *after]

    carried = [declare_value(out, "carried") for out in outs]
    body = op.subgraph(
        step, [_scalar("iteration", ir.DataType.INT64), _scalar("continues", ir.DataType.BOOL), *carried]
    )
    return op.Loop(None, continues(op, start)[1], *start, body=body, outputs=len(outs))


@primitives.define("scan")
def scan(op, *xs, jaxpr, length, num_consts, num_carry, reverse, outs):
    """Write a Scan. ONNX requires an input to scan over: without one, the index of the step."""
    consts, start, items = xs[:num_consts], xs[num_consts : num_consts + num_carry], xs[num_consts + num_carry :]
    variables = jaxpr.jaxpr.invars[num_consts:]
    inputs = [declare_value(var.aval, "carried" if i < num_carry else "item") for i, var in enumerate(variables)]
    if not items:
        items = (positions(op, length),)
        inputs.append(_scalar("iteration", ir.DataType.INT64))
    step = lambda inner, *values: inner.inline(jaxpr, *_within(inner, consts), *values[: len(variables)])
    direction = int(reverse)
    return op.Scan(
        *start,
        *items,
        outputs=len(outs),
        body=op.subgraph(step, inputs),
        num_scan_inputs=len(items),
        scan_input_directions=[direction] * len(items),
        scan_output_directions=[direction] * (len(outs) - num_carry) or None,
    )
