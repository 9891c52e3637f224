"""From a training model back to inference: trained weights in the graph that was given."""

from __future__ import annotations

import onnx_ir as ir

from onward.constants import tensor_in
from onward.errors import UnsupportedError
from onward.model import Model
from onward.model.state import all_states, with_metadata
from onward.recipe import lora
from onward.recipe.exporter_notes import Restored
from onward.recipe.lora.adapters import adapters
from onward.transform.padding import write_padding
from onward.transform.quantized import stored_as_integers, stored_biases
from onward.transform.training import strip


def in_form_of(original: Model, training: Model) -> Model:
    """The inference model with the weights of a training model: moving averages of them, where it keeps such.

    They are put into `original`, which stays as it was in all else. Where it has no place for one of them, the result
    is the graph that was trained.
    """
    trained = strip(_put_averages(training))
    if any(Restored.from_fact(step.fact("train.exporter")).joined for step in training.steps):
        return trained  # the graph that was given has copies of what is trained
    stored = stored_as_integers(training)
    updated = dict.fromkeys(name for step in training.steps for name in step.update)
    biases = stored_biases(training)
    names = [stored.get(name, name) for name in updated if name in training.graph.initializers and name not in biases]
    names += [name for both in biases.values() for name in both]
    if (added := adapters(trained)) and not adapters(original):
        names = [name for name in names if name in original.graph.initializers] + [adapter.weight for adapter in added]
        try:
            trained = lora.merge(trained)
        except UnsupportedError:  # adapters of quantised weights stay beside them
            return trained
        if any(f"{adapter.weight}/merged" in trained.graph.initializers for adapter in added):
            return trained  # a weight that is tied to another place was merged beside it
    result = original.copy()
    write_padding(result)  # as it was trained
    return result if all(_put(result.graph, trained.graph.initializers.get(name)) for name in names) else trained


def _put_averages(training: Model) -> Model:
    averages = {s.parameter: s.value for s in all_states(training) if s.role == "ema" and s.parameter}
    if not averages:
        return training
    result = training.copy()
    for name, value in averages.items():
        assert value.const_value is not None
        result.set(name, value.const_value.numpy())
    return result


def _put(graph: ir.Graph, trained: ir.Value | None) -> bool:
    """Give the tensor of that name, wherever the graph has it, the trained value; whether it has it."""
    tensor = trained.const_value if trained is not None else None
    if tensor is None:
        return False
    place = graph.initializers.get(tensor.name or "")
    if place is not None and place.const_value is not None:
        old = place.const_value
        if not _is_alike(old, tensor):
            return False
        place.const_value = _describe_as(old, tensor)
        return True
    for node in graph:
        if node.outputs[0].name == tensor.name and (constant := tensor_in(node)) is not None:
            if not _is_alike(constant, tensor):
                return False
            node.attributes.clear()  # numbers may be written out under another name
            node.attributes["value"] = ir.AttrTensor("value", _describe_as(constant, tensor))
            return True
    return False


def _is_alike(a: ir.TensorProtocol, b: ir.TensorProtocol) -> bool:
    return a.dtype == b.dtype and a.shape.numpy() == b.shape.numpy()


def _describe_as(old: ir.TensorProtocol, new: ir.TensorProtocol) -> ir.TensorProtocol:
    """The new numbers under the old name, with what was said about the old ones."""
    return with_metadata(new, dict(old.metadata_props), like=old)
