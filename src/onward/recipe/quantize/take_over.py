"""Models that are quantised already, in the form QDQ: opened up to be trained, so that they come back in that form."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onward.constants import constant_tensor
from onward.errors import RecipeError, UnsupportedError
from onward.model import Model
from onward.model.state import with_tags
from onward.recipe.constants import expose
from onward.recipe.quantize.ranges import described, tag_scale
from onward.recipe.quantize.settings import Settings, middle
from onward.transform.quantised import RANGE_KEY, STORED_KEY, can_be_trained, open_bias_up

_SETTINGS = ("ranges", "percentile", "momentum", "calibrate")
"""Settings that such a model can be given: the others are what it is."""


def take_over(model: Model, settings: Settings) -> None:
    """Open up what is rounded already: biases too, and scales where they are to change."""
    own = [name for name in settings.named if name not in _SETTINGS]
    if own:
        raise RecipeError(
            f"the model is quantised already, so `{own[0]}` of `quantize` has no effect",
            hint=f"of a quantised model one can say {', '.join(_SETTINGS)}; others are for floating-point models",
        )
    for node in list(model.graph):
        if node.op_type in ("Conv", "Gemm"):
            open_bias_up(model.graph, node)
        elif node.op_type == "DequantizeLinear":
            _open_weight(model.graph, node, settings)
    if settings.ranges == "fixed":
        return
    activations = [n for n in model.graph if n.op_type == "QuantizeLinear" and STORED_KEY not in n.metadata_props]
    for node in {node.inputs[1]: node for node in reversed(activations)}.values():  # the first of those with one range
        _check_range(node)
        _observe(node, settings)


def _open_weight(graph: ir.Graph, node: ir.Node, settings: Settings) -> None:
    stored = constant_tensor(node.inputs[0])
    if stored is None or not can_be_trained(node, stored):
        return
    expose(graph, node.outputs[0])
    rounding = node.inputs[0].producer() if node.inputs[0] is not None else None
    if rounding is not None and _is_symmetric(rounding):
        _observe(rounding, settings)


def _check_range(node: ir.Node) -> None:
    """Refuse ranges that have no place in the file for what training finds."""
    scale, zero = (*node.inputs[1:], None)[:2]
    stored = all(value is not None and value.is_initializer() for value in (scale, zero))
    if not stored or any(len(constant_tensor(value).shape) for value in (scale, zero)):  # type: ignore[union-attr]
        raise UnsupportedError(
            f"the range of `{node.inputs[0].name}` cannot change: it is not a scale and a zero point "  # type: ignore[union-attr]
            "that are initializers, one number each",
            hint="take `ranges=fixed`",
        )


def _observe(node: ir.Node, settings: Settings) -> None:
    node.metadata_props[RANGE_KEY] = described(settings, known=True)
    x, scale, zero = node.inputs
    assert scale is not None and scale.const_value is not None and zero is not None and zero.const_value is not None
    is_weight = STORED_KEY in node.metadata_props
    scale.const_value = tag_scale(scale.const_value, settings, x.name if is_weight and x is not None else None)
    if not is_weight:
        zero.const_value = with_tags(zero.const_value, role="statistics")


def _is_symmetric(rounding: ir.Node) -> bool:
    """Whether the zero points of a weight are in the middle: then its scale can follow its numbers."""
    zero = constant_tensor(rounding.inputs[2])
    return zero is not None and bool((zero.numpy().astype(np.int64) == middle(zero.dtype)).all())
