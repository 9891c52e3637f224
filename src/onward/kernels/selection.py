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
from onward.model.core import gradients_in, is_gradient, string, tie, untie, values, visible
from onward.model.walk import ancestors
from onward.transform.training import remove_unused
from onward.transform.types import fill_in_types


def can_use_kernels(model: Model) -> bool:
    """Whether nothing is differentiated twice: kernels have first derivatives."""
    for node, scope in gradients_in(model.graph):
        before, _ = ancestors([visible(scope)[string(node, "y")]])
        if any(map(is_gradient, before)):
            return False
    return True


def use_kernels(model: Model) -> None:
    """Let kernels compute what they can of a forward pass, in place. `find_rule` has their derivatives."""
    write_out_scales(model)
    fill_in_types(model, values(model.graph))
    use_attention(model)
    use_recurrent(model)
    use_cross_entropy(model)
    put_channels_last(model)
    use_activations(model)
    _remove_replaced(model)
    if any(node.domain == DOMAIN for node in model.graph):
        model.graph.opset_imports[DOMAIN] = 1


def finish_with_kernels(model: Model) -> None:
    """Let kernels compute what they can of a step that is lowered already, in place."""
    use_products(model)
    fuse_updates(model)
    remove_unused(model.graph)


def _remove_replaced(model: Model) -> None:
    """Remove nodes that nothing reads any more, but not what a Gradient names."""
    tie(model.graph)
    remove_unused(model.graph)
    untie(model.graph)
