"""Gradients of models: plain ONNX in, plain ONNX out."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onward.arguments import checked
from onward.build import Builder, Expr
from onward.differentiate.expand import expand
from onward.differentiate.functions import FunctionRules
from onward.differentiate.gradients import lower_gradients
from onward.differentiate.recompute import Choice, recomputation
from onward.differentiate.simplify import tidy
from onward.differentiate.sweep import Find, pull_back, way
from onward.errors import UnknownNameError, UnsupportedError, near_or_first
from onward.model import Model, Source, load
from onward.model.checks import check_signatures
from onward.model.core import values
from onward.model.walk import nodes_after
from onward.rules.registry import lookup
from onward.shapes import content_type, is_optional, is_sequence
from onward.standard import OLDEST_OPSET
from onward.transform.context import Context
from onward.transform.opset import of_one_opset
from onward.transform.padding import write_padding
from onward.transform.training import drop_unused_definitions


@checked()
def gradient(
    model: Source, y: str, xs: Sequence[str], *, recompute: Choice = None, keep_functions: bool = False
) -> Model:
    """The model with one more output for each of `xs`: the derivative of `y` (of its sum, if it has several elements).

        onward.gradient("digits.onnx", "logits", ["image", "fc1.weight"]).save("gradient.onnx")

    A derivative is called `<x>/grad` and has the type and shape of its x.

    - `model`: any model
    - `y`, `xs`: inputs, initializers or values in between, by name
    - `recompute`: the way back reads many of the values in between, which takes memory. Those named here are computed a
      second time instead: nodes by patterns (`"*gelu*"`), or all, keeping only the result of every n-th layer (`2`)
    - `keep_functions`: functions of the model on the way are replaced by their bodies. With this they stay: each gets a
      twin that hands out what its gradient needs, `<Function>_forward`, and a gradient of its own,
      `<Function>_backward`
    """
    model, target, sources = _open_model(model, y, xs, keep_functions)
    op, last = _builder(model)
    find = FunctionRules(model) if keep_functions else lookup
    grads = _pulled_back(op, target, op.filled_like(target, 1), sources, recompute, find)
    return _finish(op, last, model, sources, grads, list(model.graph.outputs))


@checked()
def vjp(model: Source, y: str, xs: Sequence[str], *, recompute: Choice = None, keep_functions: bool = False) -> Model:
    """A model with one more input `dy`, of the type and shape of `y`, whose outputs are the gradients of `xs`.

        backward = onward.vjp("digits.onnx", "logits", ["image"])

    - `model`, `y`, `xs`, `recompute`, `keep_functions`: as for `gradient`
    """
    model, target, sources = _open_model(model, y, xs, keep_functions)
    op, last = _builder(model)
    dy = ir.Value(name=op.names.fresh("dy"), type=content_type(target), shape=target.shape)
    model.graph.inputs.append(dy)
    find = FunctionRules(model) if keep_functions else lookup
    grads = _pulled_back(op, target, op(dy), sources, recompute, find)
    return _finish(op, last, model, sources, grads, [])


@checked()
def jvp(model: Source, y: str, xs: Sequence[str]) -> Model:
    """A model with one more input `d<x>` for each x, a direction; its output `d<y>` is how y changes along them.

        forward = onward.jvp("digits.onnx", "logits", ["image"])

    - `model`, `y`, `xs`: as for `gradient`

    Forward mode out of reverse mode: the gradients are linear in `dy`, so the derivative with respect to `dy` of their
    product with the directions is the derivative of y along the directions. Of `dy` itself only the shape may be left.
    """
    model, target, sources = _open_model(model, y, xs)
    graph, (op, last) = model.graph, _builder(model)
    dy = ir.Value(name=op.names.fresh("dy"), type=content_type(target), shape=target.shape)
    grads = _pulled_back(op, target, op(dy), sources)
    products = []
    for x, grad in zip(sources, grads, strict=True):
        direction = ir.Value(name=op.names.fresh(f"d{x.name}"), type=content_type(x), shape=x.shape)
        graph.inputs.append(direction)
        products.append(_inner_product(op, grad, op(direction)))
    along = (products[0] if len(products) == 1 else op.Sum(*products)).value
    (tangent,) = _pulled_back(op, along, op.filled_like(along, 1), [dy])
    dy.replace_all_uses_with(op.filled_like(target, 0).value)
    graph.outputs.clear()
    graph.outputs.append(op.Identity(tangent).named(f"d{y}").like(target).value)
    graph.sort()
    tidy(graph, nodes_after(last, graph))
    return model


def _open_model(
    source: Source, y: str, xs: Sequence[str], keep_functions: bool = False
) -> tuple[Model, ir.Value, list[ir.Value]]:
    model = of_one_opset(check_signatures(load(source)), OLDEST_OPSET).copy(steps=False)
    write_padding(model)
    known = {value.name: value for value in values(model.graph) if value.name}
    missing = [name for name in (y, *xs) if name not in known]
    if missing:
        listed = ", ".join(f"`{name}`" for name in missing)
        raise UnknownNameError(f"there is no value {listed}", hint=near_or_first(missing[0], known))
    context = Context(model)
    lower_gradients(context)
    expand(context, y, xs, keep_functions=keep_functions)
    model = context.model
    known = {value.name: value for value in values(model.graph) if value.name}
    context.fill_in_types(known.values())
    if known[y].type is None:
        raise UnsupportedError(
            f"the type of `{y}` is not known", hint="state it in the file, among its outputs or in its `value_info`"
        )
    return model, known[y], [known[x] for x in xs]


def _builder(model: Model) -> tuple[Builder, ir.Node | None]:
    """A builder for the graph of a model, and the last node that is there already."""
    graph = model.graph
    op = Builder(graph, opset=model.opset, names=model.names(), functions=model.functions, share=True)
    return op, graph[-1] if len(graph) else None


def _pulled_back(
    op: Builder, y: ir.Value, dy: Expr, xs: Sequence[ir.Value], recompute: Choice = None, find: Find = lookup
) -> list[Expr]:
    nodes = way(y, xs, find)
    found = pull_back(op, nodes, {y: dy}, xs, recomputation=recomputation(recompute, nodes, xs), find=find)
    return [found[x] if x in found else op.filled_like(x, 0) for x in xs]


def _finish(
    op: Builder,
    last: ir.Node | None,
    model: Model,
    xs: Sequence[ir.Value],
    grads: Sequence[Expr],
    kept: Sequence[ir.Value],
) -> Model:
    """Make the gradients outputs, under names of their own, and drop what nothing reads."""
    graph, made = model.graph, nodes_after(last, model.graph)
    new = set(made)
    graph.outputs.clear()
    graph.outputs.extend(kept)
    for x, grad in zip(xs, grads, strict=True):
        is_free = grad.value.producer() in new and not grad.value.is_graph_output()
        output = grad if is_free else op.Identity(grad)
        output = _wrap_optional(op, output, x) if is_optional(x) else output.like(x)
        graph.outputs.append(output.named(f"{x.name}/grad").value)
    tidy(graph, nodes_after(last, graph))
    drop_unused_definitions(model)
    return model


def _inner_product(op: Builder, a: Expr, b: Expr) -> Expr:
    """The sum of the products of all elements: of two tensors, of all tensors in two sequences."""
    if not is_sequence(a.value):
        product: Expr = op.ReduceSum(a * b, keepdims=0)
        return product
    products = op.each(_inner_product, a, b)
    some = op.SequenceInsert(products, op.scalar(0, a))  # so that it is not empty
    return _inner_product(op, op.ConcatFromSequence(some, axis=0, new_axis=1), op.scalar(1, a))


def _wrap_optional(op: Builder, grad: Expr, x: ir.Value) -> Expr:
    """The gradient of what an Optional holds as an Optional: an empty one has an empty one."""
    some = op.subgraph(lambda inner: inner.Optional(grad))
    none = op.subgraph(lambda inner: inner.Identity(x))
    wrapped: Expr = op.If(op.OptionalHasElement(x), then_branch=some, else_branch=none)
    wrapped.value.type, wrapped.value.shape = x.type, x.shape
    return wrapped
