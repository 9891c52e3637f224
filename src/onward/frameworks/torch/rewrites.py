"""Rewrites of exported programs into operators that PyTorch's ONNX exporter translates correctly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from onward.errors import UnsupportedError
from onward.run_state.problems import Problems

aten = torch.ops.aten
_MOVES = (aten.transpose.int, aten.permute.default, aten.contiguous.default)

_QUOTIENTS = (aten.div.Tensor, aten.div_.Tensor)
_BERNOULLI = (aten.bernoulli_.float, aten.bernoulli.p)
_DEFAULT_PROBABILITY = 0.5
"""Default probability of a one."""
_FLOORS = (aten.floor.default, aten.floor_.default)

_CHECKS = (aten._assert_scalar.default, aten._assert_async.msg, aten._assert_tensor_metadata.default)
"""Operators that raise an error and return nothing."""

_NO_REDUCTION = 0
"""Reduction "none" of a loss."""
_EMBEDDING = "leave it out, or write the sum as products with `F.one_hot`"
_WINDOWS = "multiply a pool of `divisor_override=None` by the size of a window and divide by the number"
_UNTRANSLATED = {
    aten.embedding.default: {"scale_grad_by_freq": _EMBEDDING, "sparse": _EMBEDDING},
    aten.embedding_bag.padding_idx: {"scale_grad_by_freq": _EMBEDDING, "sparse": _EMBEDDING},
    aten.embedding_bag.default: {"scale_grad_by_freq": _EMBEDDING, "sparse": _EMBEDDING},
    aten.embedding_renorm_.default: {"max_norm": _EMBEDDING},
    aten.avg_pool2d.default: {"divisor_override": _WINDOWS},
    aten.avg_pool3d.default: {"divisor_override": _WINDOWS},
}
"""Arguments that the exporter silently drops -> how to do without them."""
_ANTIALIASED = (aten._upsample_bilinear2d_aa.vec, aten._upsample_bicubic2d_aa.vec)


def rewrite(program: ExportedProgram) -> None:
    """Rewrite in place, or refuse, what the exporter does not translate."""
    graph = program.graph_module.graph
    _refuse_untranslated(program)
    for node in list(graph.nodes):
        if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled and node.args[0] is False:
            for result in list(node.users):
                _detach(result)
        elif node.target in _REWRITES:
            _REWRITES[node.target](node)
        elif node.target in _CHECKS:
            graph.erase_node(node)
    graph.eliminate_dead_code()
    graph.lint()
    program.graph_module.recompile()


def _refuse_untranslated(program: ExportedProgram) -> None:
    problems = Problems("the module")
    graphs = (module.graph for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule))
    for node in (node for graph in graphs for node in graph.nodes):
        arguments = _arguments(node)
        name = str(node.target).split(".")[-2].removesuffix("_renorm_") if arguments else ""
        for argument, hint in _UNTRANSLATED.get(node.target, {}).items():
            if arguments[argument]:
                problems.add(f"`{name}` has {argument}={arguments[argument]}", hint)
        if node.target is aten.multinomial.default:
            hint = "draw rows of equal weight by `torch.rand(n).argsort()[:k]`, or pass the rows as an input"
            problems.add("it draws random numbers by `multinomial`", hint)
        if node.target is aten.multilabel_margin_loss.default:
            problems.add("`multilabel_margin_loss` is exported with wrong values", "use `multilabel_soft_margin_loss`")
        scales = arguments["scale_factors"] if node.target in _ANTIALIASED else None
        if scales and not _fits_scale(node, scales):
            problems.add(
                "`interpolate` has antialias=True and a scale_factor that does not give whole sizes",
                "set `recompute_scale_factor=True`, or `size=...`",
            )
    problems.refuse()


def _arguments(node: Node) -> dict[str, Any]:
    """Return all arguments of a call of an ATen operator by name, defaults included."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return {}
    declared = node.target._schema.arguments
    passed = dict(zip((argument.name for argument in declared), node.args, strict=False))
    return {argument.name: argument.default_value for argument in declared} | passed | dict(node.kwargs)


def _fits_scale(node: Node, scales: Any) -> bool:
    """True if scales multiply the sizes of an image exactly. The exporter knows only sizes."""
    x = node.args[0]
    assert isinstance(x, Node)
    before, after = (tensor.meta["val"].shape[2:] for tensor in (x, node))
    return all(int(size) * scale == int(other) for size, scale, other in zip(before, scales, after, strict=True))


def _add_loss_axes(node: Node) -> None:
    """Add missing axes to a loss of classes: a first for one sample, a last for `reduction="none"`.

    Without the last, PyTorch's decompositions treat the losses of a vector of labels as a scalar,
    and drop the sum after it.
    """
    arguments, call = _arguments(node), node.graph.call_function
    scores, target = arguments["self"], arguments["target"]
    is_unreduced, rank = arguments["reduction"] == _NO_REDUCTION, scores.meta["val"].ndim
    is_soft = target.meta["val"].is_floating_point()
    axes = [0] * (rank == 1) + [-1] * (is_unreduced and rank < 3 and not is_soft)
    with node.graph.inserting_before(node):
        for axis in axes:
            scores, target = (call(aten.unsqueeze.default, (x, axis)) for x in (scores, target))
    node.args = (scores, target, *node.args[2:])
    if is_unreduced:
        for axis in axes:
            with node.graph.inserting_after(node):
                _insert_after(node, call(aten.squeeze.dim, (node, axis)))


def _insert_after(node: Node, result: Node) -> None:
    """Let all readers of a node read another one that is computed from it."""
    result.meta = dict(node.meta)
    node.replace_all_uses_with(result, delete_user_cb=lambda user: user is not result)


def _drop_channels(node: Node) -> None:
    """Replace a dropout of channels by a product with a dropout of ones."""
    x, rate, is_on = node.args
    assert isinstance(x, Node)
    call = node.graph.call_function
    with node.graph.inserting_before(node):
        sample = x
        for axis in range(2, x.meta["val"].ndim):
            sample = call(aten.slice.Tensor, (sample, axis, 0, 1))
        ones = call(aten.ones_like.default, (sample,))
        mask = call(aten.dropout.default, (ones, rate, is_on))
        product = call(aten.mul.Tensor, (x, mask))
    _replace(node, product)


def _drop_by_bernoulli(node: Node) -> None:
    """Replace `bernoulli(keep) / keep`, as in stochastic depth, by a dropout of ones."""
    drawn, keep = node.args
    is_drawn = isinstance(drawn, Node) and drawn.target in _BERNOULLI and len(drawn.users) == 1
    if is_drawn and (*drawn.args[1:], _DEFAULT_PROBABILITY)[0] == keep:
        with node.graph.inserting_before(node):
            ones = node.graph.call_function(aten.ones_like.default, drawn.args[:1])
            _replace(node, _dropout_node(ones, keep))
        node.graph.erase_node(drawn)


def _drop_by_rounding(node: Node) -> None:
    """Replace `floor(rand + keep)` times a quotient by `keep` by a dropout of ones."""
    quotient, mask = node.args
    if not (isinstance(mask, Node) and mask.target in _FLOORS and isinstance(quotient, Node)):
        return
    (shifted,) = mask.args
    assert isinstance(shifted, Node)
    drawn, keep = shifted.args[0], shifted.args[-1]
    is_drawn = isinstance(drawn, Node) and drawn.target is aten.rand.default and len(mask.users) == 1
    if is_drawn and quotient.target in _QUOTIENTS and quotient.args[1] == keep:
        with node.graph.inserting_before(node):
            ones = node.graph.call_function(aten.ones.default, drawn.args, dict(drawn.kwargs))
            mask_of_ones = _dropout_node(ones, keep)
            _replace(node, node.graph.call_function(aten.mul.Tensor, (quotient.args[0], mask_of_ones)))
        for unused in (mask, shifted, drawn):
            node.graph.erase_node(unused)


def _dropout_node(ones: Node, keep: Any) -> Node:
    return ones.graph.call_function(aten.dropout.default, (ones, 1 - keep, True))


def _add_to_number(node: Node) -> None:
    """Put the tensor of `number - x` first: the exporter widens integers, and then finds no overload."""
    number, x = node.args[:2] if node.target is not aten.rsub.Scalar else reversed(node.args[:2])
    if len(node.args) != 2 or not isinstance(x, Node) or isinstance(number, Node):
        return
    factor = node.kwargs.get("alpha", 1) if node.target is aten.add.Tensor else -node.kwargs.get("alpha", 1)
    with node.graph.inserting_before(node):
        product = node.graph.call_function(aten.mul.Tensor, (x, factor))
        _replace(node, node.graph.call_function(aten.add.Tensor, (product, number)))


def _unsqueeze_complex(node: Node) -> None:
    """Insert an axis into complex numbers by their parts."""
    x, axis = node.args
    assert isinstance(x, Node) and isinstance(axis, int)
    if x.meta["val"].is_complex():
        with node.graph.inserting_before(node):
            parts = node.graph.call_function(aten.view_as_real.default, (x,))
            parts = node.graph.call_function(aten.unsqueeze.default, (parts, axis if axis >= 0 else axis - 1))
            _replace(node, node.graph.call_function(aten.view_as_complex.default, (parts,)))


def _detach(result: Node) -> None:
    """Stop the gradient of a result. The exporter detaches no complex numbers, but their parts."""
    value = result.meta.get("val")
    is_complex = isinstance(value, torch.Tensor) and value.is_complex()
    call = result.graph.call_function
    with result.graph.inserting_after(result):
        parts = call(aten.view_as_real.default, (result,)) if is_complex else result
    with result.graph.inserting_after(parts):
        stopped = call(aten.detach.default, (parts,))
    if is_complex:
        with result.graph.inserting_after(stopped):
            whole = call(aten.view_as_complex.default, (stopped,))
        whole.meta = dict(result.meta)
        result.replace_all_uses_with(whole, delete_user_cb=lambda user: user is not parts)
    else:
        _insert_after(result, stopped)


def _replace(node: Node, other: Node) -> None:
    other.meta = dict(node.meta)
    node.replace_all_uses_with(other)
    node.graph.erase_node(node)


def _add_head_axis(node: Node) -> None:
    """Add an axis for one head to attention without heads."""
    tensors = [tensor for tensor in node.args[:4] if isinstance(tensor, Node)]
    if any(tensor.meta["val"].ndim > 3 for tensor in tensors):
        return
    call = node.graph.call_function
    with node.graph.inserting_before(node):
        for tensor in (tensor for tensor in tensors if tensor.meta["val"].ndim == 3):
            node.replace_input_with(tensor, call(aten.unsqueeze.default, (tensor, 1)))
    with node.graph.inserting_after(node):
        _insert_after(node, call(aten.squeeze.dim, (node, 1)))


def _make_contiguous(node: Node) -> None:
    """Make the input of a view contiguous: the translation of attention has another memory layout."""
    x, *_ = node.args
    assert isinstance(x, Node)
    if x.target in _MOVES:
        with node.graph.inserting_before(node):
            options = {"memory_format": torch.contiguous_format}
            node.replace_input_with(x, node.graph.call_function(aten.clone.default, (x,), options))


def _divide_by_count(node: Node) -> None:
    """Replace the mean of a `scatter_reduce`, which the exporter lacks, by a sum and a count."""
    arguments, call = _arguments(node), node.graph.call_function
    if arguments["reduce"] != "mean":
        return
    x, dim, index, source = (arguments[name] for name in ("self", "dim", "index", "src"))
    with node.graph.inserting_before(node):
        ones = call(aten.ones_like.default, (source,))
        begin = [x, call(aten.ones_like.default, (x,))] if arguments["include_self"] else [
            call(aten.zeros_like.default, (x,))] * 2  # fmt: skip
        total, count = (
            call(aten.scatter_add.default, (start, dim, index, added))
            for start, added in zip(begin, (source, ones), strict=True)
        )
        mean = call(aten.div.Tensor, (total, call(aten.clamp.default, (count, 1))))
        if not arguments["include_self"]:
            mean = call(aten.where.self, (call(aten.gt.Scalar, (count, 0)), mean, x))
    _replace(node, mean)


def _store_in_order(node: Node) -> None:
    """Permute the input of `as_strided` to its order in memory. The exporter takes it for contiguous."""
    x = node.args[0]
    assert isinstance(x, Node)
    sizes, strides = ([_example_size(n) for n in numbers] for numbers in (x.meta["val"].shape, x.meta["val"].stride()))
    order = sorted(range(len(sizes)), key=lambda axis: -strides[axis])
    expected = 1
    for axis in reversed(order):
        if sizes[axis] != 1 and strides[axis] != expected:
            raise UnsupportedError("`as_strided` reads a view that skips elements", hint="call `x.contiguous()` before")
        expected *= sizes[axis]
    if order != sorted(order):
        with node.graph.inserting_before(node):
            permuted = node.graph.call_function(aten.permute.default, (x, order))
            options = {"memory_format": torch.contiguous_format}
            node.replace_input_with(x, node.graph.call_function(aten.clone.default, (permuted,), options))


def _example_size(size: Any) -> int:
    return size if isinstance(size, int) else int(size.node.hint)


_REWRITES: dict[Any, Callable[[Node], None]] = {
    aten.feature_dropout.default: _drop_channels,
    aten.scatter_reduce.two: _divide_by_count,
    aten.as_strided.default: _store_in_order,
    aten.scaled_dot_product_attention.default: _add_head_axis,
    aten.unsqueeze.default: _unsqueeze_complex,
    **dict.fromkeys((aten.add.Tensor, aten.sub.Tensor, aten.rsub.Scalar), _add_to_number),
    **dict.fromkeys(_QUOTIENTS, _drop_by_bernoulli),
    **dict.fromkeys((aten.mul.Tensor, aten.mul_.Tensor), _drop_by_rounding),
    **dict.fromkeys((aten.view.default, aten.reshape.default), _make_contiguous),
    **dict.fromkeys((aten.cross_entropy_loss.default, aten.nll_loss_nd.default), _add_loss_axes),
}
