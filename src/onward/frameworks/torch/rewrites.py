"""What PyTorch's exporter would leave out, said in operators that it has: where gradients end, and what is dropped."""

from __future__ import annotations

from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from onward.run_state.problems import Problems

_MOVES = (torch.ops.aten.transpose.int, torch.ops.aten.permute.default, torch.ops.aten.contiguous.default)
_PRODUCTS = (torch.ops.aten.mul.Tensor, torch.ops.aten.mul_.Tensor)
_QUOTIENTS = (torch.ops.aten.div.Tensor, torch.ops.aten.div_.Tensor)
_BERNOULLI = (torch.ops.aten.bernoulli_.float, torch.ops.aten.bernoulli.p)
_BY_DEFAULT = 0.5
"""How often Bernoulli draws a one."""
_FLOORS = (torch.ops.aten.floor.default, torch.ops.aten.floor_.default)
_CLASS_LOSSES = (torch.ops.aten.cross_entropy_loss.default, torch.ops.aten.nll_loss_nd.default)
_NONE = 0
"""The reduction of a loss that stays as it is."""
_EMBEDDING = "leave it out, or write the sum as products with `F.one_hot`"
_WINDOWS = "multiply a pool of `divisor_override=None` by the size of a window and divide by the number"
_UNTRANSLATED = {
    torch.ops.aten.embedding.default: {"scale_grad_by_freq": _EMBEDDING, "sparse": _EMBEDDING},
    torch.ops.aten.embedding_bag.padding_idx: {"scale_grad_by_freq": _EMBEDDING, "sparse": _EMBEDDING},
    torch.ops.aten.embedding_bag.default: {"scale_grad_by_freq": _EMBEDDING, "sparse": _EMBEDDING},
    torch.ops.aten.embedding_renorm_.default: {"max_norm": _EMBEDDING},
    torch.ops.aten.avg_pool2d.default: {"divisor_override": _WINDOWS},
    torch.ops.aten.avg_pool3d.default: {"divisor_override": _WINDOWS},
}
"""Arguments that the exporter drops without a word -> what to do without them."""
_ANTIALIASED = (torch.ops.aten._upsample_bilinear2d_aa.vec, torch.ops.aten._upsample_bicubic2d_aa.vec)


def rewrite(program: ExportedProgram) -> None:
    """Say in plain operators, in place, what the exporter does not translate, or refuse it."""
    graph = program.graph_module.graph
    _refuse_untranslated(program)
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
        elif node.target in _CLASS_LOSSES:
            _give_axes(node)
    graph.lint()
    program.graph_module.recompile()


def _refuse_untranslated(program: ExportedProgram) -> None:
    problems = Problems("the module")
    graphs = (each.graph for each in program.graph_module.modules() if isinstance(each, torch.fx.GraphModule))
    for node in (node for graph in graphs for node in graph.nodes):
        given = _arguments(node)
        name = str(node.target).split(".")[-2].removesuffix("_renorm_") if given else ""
        for argument, hint in _UNTRANSLATED.get(node.target, {}).items():
            if given[argument]:
                problems.add(f"`{name}` has {argument}={given[argument]}", hint)
        if node.target is torch.ops.aten.multilabel_margin_loss.default:
            problems.add("`multilabel_margin_loss` is exported with other values", "use `multilabel_soft_margin_loss`")
        if node.target is torch.ops.aten.scatter_reduce.two and given["reduce"] == "mean":
            problems.add('`scatter_reduce` has reduce="mean"', "divide a sum by a sum of ones")
        if node.target in _ANTIALIASED and given["scale_factors"] and not _fits_scale(node, given["scale_factors"]):
            problems.add(
                "`interpolate` has antialias=True and a scale_factor that does not give whole sizes",
                "say `recompute_scale_factor=True`, or `size=...`",
            )
    problems.refuse()


def _arguments(node: Node) -> dict[str, Any]:
    """Return all arguments of a call of an ATen operator by their names, defaults included."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return {}
    declared = node.target._schema.arguments
    given = dict(zip((argument.name for argument in declared), node.args, strict=False))
    return {argument.name: argument.default_value for argument in declared} | given | dict(node.kwargs)


def _fits_scale(node: Node, scales: Any) -> bool:
    """True if the sizes of an image are exactly multiplied: the exporter knows sizes only."""
    x = node.args[0]
    assert isinstance(x, Node)
    before, after = (tensor.meta["val"].shape[2:] for tensor in (x, node))
    return all(int(size) * scale == int(other) for size, scale, other in zip(before, scales, after, strict=True))


def _give_axes(node: Node) -> None:
    """Add the axes to a loss of classes that one sample lacks, and a last one where each sample keeps its loss.

    Without the last, PyTorch's decompositions take `reduction="none"` of a vector of labels for a scalar, and leave
    out the sum that comes after it.
    """
    given, call = _arguments(node), node.graph.call_function
    scores, target = given["self"], given["target"]
    keeps, rank = given["reduction"] == _NONE, scores.meta["val"].ndim
    is_soft = target.meta["val"].is_floating_point()
    axes = [0] * (rank == 1) + [-1] * (keeps and rank < 3 and not is_soft)
    with node.graph.inserting_before(node):
        for axis in axes:
            scores, target = (call(torch.ops.aten.unsqueeze.default, (x, axis)) for x in (scores, target))
    node.args = (scores, target, *node.args[2:])
    if keeps:
        for axis in axes:
            with node.graph.inserting_after(node):
                _come_between(node, call(torch.ops.aten.squeeze.dim, (node, axis)))


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
