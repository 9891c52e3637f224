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
from onward.differentiate.sweep import RuleLookup, nodes_to_differentiate, pull_back, renamable
from onward.errors import UnsupportedError
from onward.model import Model, Source, load
from onward.model.checks import check_signatures
from onward.model.walk import nodes_after
from onward.rules.registry import lookup
from onward.shapes import content_type, is_optional, is_sequence
from onward.standard import OLDEST_OPSET
from onward.transform.context import Context, values_by_name
from onward.transform.opset import of_one_opset
from onward.transform.padding import write_padding
from onward.transform.training import drop_unused_definitions


@checked()
def gradient(
    model: Source, y: str, xs: Sequence[str], *, recompute: Choice = None, keep_functions: bool = False
) -> Model:
    """Return the model with an output for the derivative of `y`, or of its sum, by each of `xs`.

        onward.gradient("digits.onnx", "logits", ["image", "fc1.weight"]).save("gradient.onnx")

    A derivative is called `<x>/grad` and has the type and shape of its x.

    - `model`: any model
    - `y`, `xs`: names of inputs, initializers or intermediate values
    - `recompute`: intermediate values to compute a second time in the backward pass, to save
      memory: patterns of node names (`"*gelu*"`), or n to keep the result of every n-th layer
    - `keep_functions`: differentiate functions of the model as functions, `<Function>_forward` and
      `<Function>_backward` (default: replace them by their bodies)
    """
    model, target, sources = _open_model(model, y, xs, keep_functions)
    op, last = _builder(model)
    find = FunctionRules(model) if keep_functions else lookup
    grads = _pulled_back(op, target, op.filled_like(target, 1), sources, recompute, find)
    return _finish(op, last, model, sources, grads, list(model.graph.outputs))


@checked()
def vjp(model: Source, y: str, xs: Sequence[str], *, recompute: Choice = None, keep_functions: bool = False) -> Model:
    """Return a model with one more input `dy`, like `y`, whose outputs are the gradients of `xs`.

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
    """Return a model with an input `d<x>` for each x, a direction, and an output `d<y>`, the derivative along them.

        forward = onward.jvp("digits.onnx", "logits", ["image"])

    - `model`, `y`, `xs`: as for `gradient`

    Forward mode from reverse mode: the gradients are linear in `dy`. The derivative by `dy` of
    their inner product with the directions is the derivative of y along the directions.
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
    inner_product = (products[0] if len(products) == 1 else op.Sum(*products)).value
    (tangent,) = _pulled_back(op, inner_product, op.filled_like(inner_product, 1), [dy])
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
    values_by_name([model.graph], (y, *xs))
    context = Context(model)
    lower_gradients(context)
    expand(context, y, xs, keep_functions=keep_functions)
    model = context.model
    known_values = values_by_name([model.graph], ())
    context.fill_in_types(known_values.values())
    if known_values[y].type is None:
        raise UnsupportedError(
            f"the type of `{y}` is not known", hint="add it to the outputs or `value_info` of the file"
        )
    return model, known_values[y], [known_values[x] for x in xs]


def _builder(model: Model) -> tuple[Builder, ir.Node | None]:
    """Return a builder for the graph of a model, and its last node."""
    graph = model.graph
    op = Builder(graph, opset=model.opset, names=model.names(), functions=model.functions, share=True)
    return op, graph[-1] if len(graph) else None


def _pulled_back(
    op: Builder, y: ir.Value, dy: Expr, xs: Sequence[ir.Value], recompute: Choice = None, find: RuleLookup = lookup
) -> list[Expr]:
    nodes = nodes_to_differentiate(y, xs, find)
    gradients = pull_back(op, nodes, {y: dy}, xs, recomputation=recomputation(recompute, nodes, xs), find=find)
    return [gradients[x] if x in gradients else op.filled_like(x, 0) for x in xs]


def _finish(
    op: Builder,
    last: ir.Node | None,
    model: Model,
    xs: Sequence[ir.Value],
    grads: Sequence[Expr],
    outputs: Sequence[ir.Value],
) -> Model:
    """Make the gradients outputs with new names, and drop unused nodes."""
    graph, added = model.graph, set(nodes_after(last, model.graph))
    graph.outputs.clear()
    graph.outputs.extend(outputs)
    for x, grad in zip(xs, grads, strict=True):
        output = renamable(op, grad, added)
        output = _wrap_optional(op, output, x) if is_optional(x) else output.like(x)
        graph.outputs.append(output.named(f"{x.name}/grad").value)
    tidy(graph, nodes_after(last, graph))
    drop_unused_definitions(model)
    return model


def _inner_product(op: Builder, a: Expr, b: Expr) -> Expr:
    """Return the sum of the products of all elements, of two tensors or two sequences."""
    if not is_sequence(a.value):
        return op.ReduceSum(a * b, keepdims=0)
    products = op.each(_inner_product, a, b)
    some = op.SequenceInsert(products, op.scalar(0, a))  # so that it is not empty
    return _inner_product(op, op.ConcatFromSequence(some, axis=0, new_axis=1), op.scalar(1, a))


def _wrap_optional(op: Builder, grad: Expr, x: ir.Value) -> Expr:
    """Wrap the gradient of the content of an Optional `x` in an Optional, empty if `x` is."""
    some = op.subgraph(lambda inner: inner.Optional(grad))
    none = op.subgraph(lambda inner: inner.Identity(x))
    wrapped: Expr = op.If(op.OptionalHasElement(x), then_branch=some, else_branch=none)
    wrapped.value.type, wrapped.value.shape = x.type, x.shape
    return wrapped
