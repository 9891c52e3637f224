"""What PyTorch's exporter would leave out, said in operators that it has: where gradients end, and what is dropped."""

from __future__ import annotations

import torch
from torch.export import ExportedProgram
from torch.fx import Node

_MOVES = (torch.ops.aten.transpose.int, torch.ops.aten.permute.default, torch.ops.aten.contiguous.default)


def rewrite(program: ExportedProgram) -> None:
    """Say in plain operators, in place, what the exporter does not translate."""
    graph = program.graph_module.graph
    for node in list(graph.nodes):
        if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled and node.args[0] is False:
            for result in list(node.users):
                _detach(result)
        elif node.target is torch.ops.aten.feature_dropout.default:
            _drop_channels(node)
        elif node.target in (torch.ops.aten.view.default, torch.ops.aten.reshape.default):
            _lay_out(node)
    graph.lint()
    program.graph_module.recompile()


def _detach(node: Node) -> None:
    """What is computed under `torch.no_grad()` has no derivative."""
    with node.graph.inserting_after(node):
        detached = node.graph.call_function(torch.ops.aten.detach.default, (node,))
    detached.meta = dict(node.meta)
    node.replace_all_uses_with(detached, delete_user_cb=lambda user: user is not detached)


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
    product.meta = dict(node.meta)
    node.replace_all_uses_with(product)
    node.graph.erase_node(node)


def _lay_out(node: Node) -> None:
    """Let a view be one of contiguous memory: what attention returns is laid out otherwise when it is translated."""
    x, *_ = node.args
    assert isinstance(x, Node)
    if x.target in _MOVES:
        with node.graph.inserting_before(node):
            kind = {"memory_format": torch.contiguous_format}
            node.replace_input_with(x, node.graph.call_function(torch.ops.aten.clone.default, (x,), kind))
