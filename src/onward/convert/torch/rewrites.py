"""What PyTorch's exporter would leave out, said in operators that it has: where gradients end, and what is dropped."""

from __future__ import annotations

from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

_MOVES = (torch.ops.aten.transpose.int, torch.ops.aten.permute.default, torch.ops.aten.contiguous.default)
_PRODUCTS = (torch.ops.aten.mul.Tensor, torch.ops.aten.mul_.Tensor)
_QUOTIENTS = (torch.ops.aten.div.Tensor, torch.ops.aten.div_.Tensor)
_BERNOULLI = (torch.ops.aten.bernoulli_.float, torch.ops.aten.bernoulli.p)
_BY_DEFAULT = 0.5
"""How often Bernoulli draws a one."""
_FLOORS = (torch.ops.aten.floor.default, torch.ops.aten.floor_.default)


def rewrite(program: ExportedProgram) -> None:
    """Say in plain operators, in place, what the exporter does not translate."""
    graph = program.graph_module.graph
    for node in list(graph.nodes):
        if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled and node.args[0] is False:
            for result in list(node.users):
                _detach(result)
        elif node.target is torch.ops.aten.feature_dropout.default:
            _drop_channels(node)
        elif node.target is torch.ops.aten.scaled_dot_product_attention.default:
            _give_heads(node)
        elif node.target in _QUOTIENTS:
            _drop_by_bernoulli(node)
        elif node.target in _PRODUCTS:
            _drop_by_rounding(node)
        elif node.target in (torch.ops.aten.view.default, torch.ops.aten.reshape.default):
            _lay_out(node)
    graph.lint()
    program.graph_module.recompile()


def _detach(node: Node) -> None:
    """What is computed under `torch.no_grad()` has no derivative."""
    with node.graph.inserting_after(node):
        _come_between(node, node.graph.call_function(torch.ops.aten.detach.default, (node,)))


def _come_between(node: Node, result: Node) -> None:
    """Let all that reads a node read what is made of it."""
    result.meta = dict(node.meta)
    node.replace_all_uses_with(result, delete_user_cb=lambda user: user is not result)


def _drop_channels(node: Node) -> None:
    """Whole channels are dropped by a dropout of as many ones."""
    x, share, is_on = node.args
    assert isinstance(x, Node)
    call = node.graph.call_function
    with node.graph.inserting_before(node):
        one = x
        for axis in range(2, x.meta["val"].ndim):
            one = call(torch.ops.aten.slice.Tensor, (one, axis, 0, 1))
        ones = call(torch.ops.aten.ones_like.default, (one,))
        kept = call(torch.ops.aten.dropout.default, (ones, share, is_on))
        product = call(torch.ops.aten.mul.Tensor, (x, kept))
    _replace(node, product)


def _drop_by_bernoulli(node: Node) -> None:
    """`bernoulli(keep) / keep`, by which stochastic depth leaves out rows, is a dropout of ones."""
    drawn, keep = node.args
    is_drawn = isinstance(drawn, Node) and drawn.target in _BERNOULLI and len(drawn.users) == 1
    if is_drawn and (*drawn.args[1:], _BY_DEFAULT)[0] == keep:
        with node.graph.inserting_before(node):
            ones = node.graph.call_function(torch.ops.aten.ones_like.default, drawn.args[:1])
            _replace(node, _dropout_node(ones, keep))
        node.graph.erase_node(drawn)


def _drop_by_rounding(node: Node) -> None:
    """So is `floor(rand + keep)`, times something that is divided by `keep`."""
    quotient, mask = node.args
    if not (isinstance(mask, Node) and mask.target in _FLOORS and isinstance(quotient, Node)):
        return
    (shifted,) = mask.args
    assert isinstance(shifted, Node)
    drawn, keep = shifted.args[0], shifted.args[-1]
    is_drawn = isinstance(drawn, Node) and drawn.target is torch.ops.aten.rand.default and len(mask.users) == 1
    if is_drawn and quotient.target in _QUOTIENTS and quotient.args[1] == keep:
        with node.graph.inserting_before(node):
            ones = node.graph.call_function(torch.ops.aten.ones.default, drawn.args, dict(drawn.kwargs))
            kept = _dropout_node(ones, keep)
            _replace(node, node.graph.call_function(torch.ops.aten.mul.Tensor, (quotient.args[0], kept)))
        for unused in (mask, shifted, drawn):
            node.graph.erase_node(unused)


def _dropout_node(ones: Node, keep: Any) -> Node:
    return ones.graph.call_function(torch.ops.aten.dropout.default, (ones, 1 - keep, True))


def _replace(node: Node, other: Node) -> None:
    other.meta = dict(node.meta)
    node.replace_all_uses_with(other)
    node.graph.erase_node(node)


def _give_heads(node: Node) -> None:
    """Attention without heads is attention with one."""
    given = [argument for argument in node.args[:4] if isinstance(argument, Node)]
    if any(argument.meta["val"].ndim > 3 for argument in given):
        return
    call = node.graph.call_function
    with node.graph.inserting_before(node):
        for argument in (argument for argument in given if argument.meta["val"].ndim == 3):
            node.replace_input_with(argument, call(torch.ops.aten.unsqueeze.default, (argument, 1)))
    with node.graph.inserting_after(node):
        _come_between(node, call(torch.ops.aten.squeeze.dim, (node, 1)))


def _lay_out(node: Node) -> None:
    """Let a view be one of contiguous memory: what attention returns is laid out otherwise when it is translated."""
    x, *_ = node.args
    assert isinstance(x, Node)
    if x.target in _MOVES:
        with node.graph.inserting_before(node):
            kind = {"memory_format": torch.contiguous_format}
            node.replace_input_with(x, node.graph.call_function(torch.ops.aten.clone.default, (x,), kind))
