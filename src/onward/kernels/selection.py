"""Which parts of a step are computed by kernels: the last word on a graph before it is differentiated, and after it."""

from __future__ import annotations

from onward.kernels.activations import use_activations
from onward.kernels.attention import use_attention
from onward.kernels.channels_last import put_channels_last
from onward.kernels.library import DOMAIN
from onward.kernels.losses import use_cross_entropy
from onward.kernels.products import use_products
from onward.kernels.recurrent import use_recurrent
from onward.kernels.resizing import write_out_scales
from onward.kernels.updates import fuse_updates
from onward.model import Model
from onward.model.core import is_gradient, string
from onward.model.gradient_names import gradients_in, tie, untie, visible
from onward.model.walk import ancestors
from onward.transform.context import Context
from onward.transform.unused import remove_unused


def can_use_kernels(model: Model) -> bool:
    """Whether nothing is differentiated twice: kernels have first derivatives."""
    for node, scope in gradients_in(model.graph):
        before, _ = ancestors([visible(scope)[string(node, "y")]])
        if any(map(is_gradient, before)):
            return False
    return True


def use_kernels(context: Context) -> None:
    """Let kernels compute what they can of a forward pass, in place. `find_rule` has their derivatives."""
    graph = context.graph
    write_out_scales(context)
    context.fill_in_types()
    use_attention(context)
    use_recurrent(context)
    use_cross_entropy(context)
    put_channels_last(context)
    use_activations(context)
    tie(graph)  # a Gradient needs what it names
    remove_unused(graph)
    untie(graph)
    if any(node.domain == DOMAIN for node in graph):
        graph.opset_imports[DOMAIN] = 1


def finish_with_kernels(context: Context) -> None:
    """Let kernels compute what they can of a step that is lowered already, in place."""
    use_products(context)
    fuse_updates(context)
    remove_unused(context.graph)
