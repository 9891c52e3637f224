"""What a model computes, without its training: the main graph may hold training operators too."""

from __future__ import annotations

from onward.differentiate.gradients import lower_gradients
from onward.differentiate.recompute import Choice
from onward.differentiate.simplify import put_results_last, simplify
from onward.errors import UnsupportedError
from onward.lowering.calls import write_calls
from onward.lowering.expand import expand
from onward.lowering.optimize import optimize
from onward.lowering.standard_operators import OPTIMIZERS
from onward.model import TRAINING_DOMAIN, Model
from onward.model.walk import nodes_of
from onward.transform.inline import inline_calls
from onward.transform.padding import write_padding
from onward.transform.training import drop_unused_definitions, remove_unused


def has_training_operators(model: Model) -> bool:
    """Whether the main graph, or a function, has a node that no runtime knows: a Gradient or an optimizer."""
    return any(node.domain == TRAINING_DOMAIN for node in nodes_of(model))


def plain_inference(model: Model, differentiate: bool = True, recompute: Choice = None) -> Model:
    """A copy of the main graph with no training operator and no function. Inputs, outputs and weights stay.

    Training operators stay too where an engine has derivatives of its own: without `differentiate`.
    """
    made = model.copy()
    made.steps = []
    write_padding(made)
    if differentiate and has_training_operators(made):
        made = lower_gradients(made, recompute=recompute)
        expand(made.ir, OPTIMIZERS)
        write_calls(made)
        inline_calls(made)
        _shorten(made)
    elif made.functions:
        inline_calls(made)
    return made


def _shorten(model: Model) -> None:
    graph = model.graph
    optimize(model)
    simplify(list(graph))
    remove_unused(graph)
    put_results_last(graph)
    left = {f"`{node.domain}.{node.op_type}`" for node in graph.all_nodes() if node.domain == TRAINING_DOMAIN}
    if left:
        raise UnsupportedError(
            f"there is no way to write {', '.join(sorted(left))} in plain operators",
            hint="of this domain the standard has Gradient, Adagrad, Adam and Momentum",
        )
    drop_unused_definitions(model)
