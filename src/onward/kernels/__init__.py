"""Native kernels for ONNX Runtime on the CPU, and the passes that put them into a step.

Kernels are chosen when an engine starts and are never written into a file. Without the library, the
plain graph runs. See docs/decisions/0045-native-kernels.md.
"""

from __future__ import annotations

from onward.kernels.attention import use_attention
from onward.kernels.channels_last import put_channels_last
from onward.kernels.fused_updates import fuse_updates, update_in_place
from onward.kernels.images import write_out_scales
from onward.kernels.layers import use_activations, use_cross_entropy, use_recurrent
from onward.kernels.library import DOMAIN, library
from onward.kernels.matmuls import use_matmuls
from onward.kernels.rules import find_rule
from onward.lowering.step import Passes
from onward.model import Model
from onward.model.core import gradients_in, is_gradient, link_gradients, string, unlink_gradients, visible
from onward.model.walk import ancestors
from onward.rules.recurrent import FUNCTIONS
from onward.transform.context import Context
from onward.transform.training import remove_unused

__all__ = ["DOMAIN", "PASSES", "find_rule", "finish_with_kernels", "library", "update_in_place", "use_kernels"]


def _differentiates_once(model: Model) -> bool:
    """True if nothing is differentiated twice: kernels have first derivatives."""
    for node, scope in gradients_in(model.graph):
        before, _ = ancestors([visible(scope)[string(node, "y")]])
        if any(map(is_gradient, before)):
            return False
    return True


def use_kernels(context: Context) -> None:
    """Let kernels compute parts of a forward pass, in place. `find_rule` has their derivatives."""
    graph = context.graph
    operators = {node.op_type for node in graph}
    if "Resize" in operators:
        write_out_scales(context)
    context.fill_in_types()
    if operators & {"MatMul", "Attention"}:
        use_attention(context)
    if operators & FUNCTIONS.keys():
        use_recurrent(context)
    if "SoftmaxCrossEntropyLoss" in operators:
        use_cross_entropy(context)
    # ONNX Runtime moves transpositions past a cubic Resize, which it then does not compute (1.31).
    is_cubic = any(node.op_type == "Resize" and string(node, "mode") == "cubic" for node in graph)
    if operators & {"Conv", "ConvTranspose"} and not is_cubic:
        put_channels_last(context)
    if operators & {"Sigmoid", "Erf", "Tanh"}:
        use_activations(context)
    link_gradients(graph)  # a Gradient needs what it names
    remove_unused(graph)
    unlink_gradients(graph)
    if any(node.domain == DOMAIN for node in graph):
        graph.opset_imports[DOMAIN] = 1


def finish_with_kernels(context: Context) -> None:
    """Let kernels compute parts of a lowered step, in place."""
    use_matmuls(context)
    fuse_updates(context)
    remove_unused(context.graph)


PASSES = Passes(_differentiates_once, use_kernels, find_rule, finish_with_kernels)
"""Passes that the ONNX Runtime engine adds to the lowering of a step."""
