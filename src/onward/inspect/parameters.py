"""Roles of the constant tensors of an inference graph (trained, frozen, constant, statistics), with reasons."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np
import onnx_ir as ir

from onward.constants import constant_tensor
from onward.errors import list_names
from onward.inspect.formatting import quantity
from onward.inspect.summary import Role, Weight, dtype_name
from onward.model import Model
from onward.model.walk import read_by
from onward.recipe.exporter_notes import (
    EXPORTER_CONSTANT,
    Restored,
    can_restore,
    is_computed,
    is_named_as_parameter,
    is_traced,
    restore,
    sources_of,
)
from onward.recipe.fixed_transforms import FIXED_TRANSFORM
from onward.recipe.trainable import is_norm, judge
from onward.run_state.reading import differentiated_values, is_statistics, number, texts, trained_parameters
from onward.standard import is_standard

_HIDING = {"Constant", "ConstantOfShape", "DequantizeLinear"}
_ROLES: dict[str, Role] = {"parameter": "trainable", "frozen": "frozen", "statistics": "statistics"}

Verdict = tuple[Role, str]


def weights(model: Model, verdicts: dict[str, Verdict]) -> tuple[Weight, ...]:
    """Return initializers and parameters that are stored in nodes, in the order of the graph.

    `verdicts` are the roles of constants, as the function of that name returns them.
    """
    trained_by: dict[str, list[int]] = {}
    for i, step in enumerate(model.steps):
        for parameter in trained_parameters(model, step):
            trained_by.setdefault(parameter.name or "", []).append(i)
    differentiated = {name for step in model.steps for name in step.differentiated()}
    described = []
    for value in _in_order(model.graph, verdicts):
        name = value.name or ""
        verdict = verdicts.get(name) or _verdict_by_type(value)
        if name in trained_by:
            # Parameters that a step updates are trained, whatever role was recorded.
            observed = "differentiated by a Gradient" if name in differentiated else "updated without a Gradient"
            verdict = "trained", verdict[1] if verdict[0] == "trainable" else observed
        elif model.steps and verdict[0] == "trainable":
            verdict = ("frozen", "no step trains it")
        dtype, shape = _form(value)
        numbers = math.prod(shape or ())
        tensor = value.const_value
        size = tensor.nbytes if tensor is not None else math.ceil(numbers * dtype.bitwidth / 8)
        steps = tuple(trained_by.get(name, ()))
        described.append(Weight(name, dtype_name(dtype), shape, numbers, size, *verdict, steps=steps))
    return tuple(described)


def _form(value: ir.Value) -> tuple[ir.DataType, tuple[int, ...] | None]:
    """Return the type and shape of a constant, also of one that a node computes."""
    node = value.producer()
    first = node.inputs[0] if node is not None and node.inputs else None
    if node is not None and node.op_type == "ConstantOfShape":
        axes = number(first)
        sizes = axes if isinstance(axes, list) else [axes]
        return value.dtype or ir.DataType.FLOAT, tuple(sizes) if all(isinstance(n, int) for n in sizes) else None
    tensor = constant_tensor(value)
    if tensor is not None:
        return tensor.dtype, tuple(tensor.shape.numpy())
    tensor = constant_tensor(first)
    return value.dtype or ir.DataType.FLOAT, tuple(tensor.shape.numpy()) if tensor is not None else None


def _in_order(graph: ir.Graph, verdicts: dict[str, Verdict]) -> Iterator[ir.Value]:
    waiting = dict.fromkeys(graph.initializers.values())
    for node in graph:
        for value in dict.fromkeys(read_by(node)):
            if value in waiting:
                del waiting[value]
                yield value
        if node.op_type in _HIDING and node.outputs:
            role, _ = verdicts.get(node.outputs[0].name or "", ("constant", ""))
            if role != "constant":
                yield node.outputs[0]
    yield from waiting


# ---- roles and reasons -----------------------------------------------------------------------------------------------


def _verdict_by_type(value: ir.Value) -> Verdict:
    if value.dtype is not None and not value.dtype.is_floating_point():
        return "constant", "not a floating-point tensor"
    return ("statistics", "running statistics") if is_statistics(value) else ("constant", "not a parameter of any step")


def verdicts(model: Model) -> dict[str, Verdict]:
    """Return the recorded role of each tensor (default: the role that `prepare` would assign)."""
    recorded: dict[str, Verdict] = {}
    for step in model.steps:
        selection = step.fact("train.selection")
        for role, reasons in selection.items() if isinstance(selection, dict) else ():
            for reason, names in reasons.items() if isinstance(reasons, dict) else ():
                for name in texts(names):
                    if name not in recorded or recorded[name][0] != "trainable":
                        recorded[name] = (_ROLES.get(role, "constant"), reason)
    if recorded:
        return recorded
    model = _without_external_data(model)
    if model.steps:
        targets = [value for step in model.steps for value in differentiated_values(model, step).values() if value]
    else:
        targets = [value for value in model.outputs if value.dtype is None or value.dtype.is_floating_point()]
    return {choice.name: (_ROLES.get(choice.role, "constant"), choice.reason) for choice in judge(model, targets)}


def _without_external_data(model: Model) -> Model:
    """Return a copy in which external tensors have a type and a shape but cannot be loaded."""
    if not any(isinstance(value.const_value, ir.ExternalTensor) for value in model.initializers()):
        return model
    copy = model.copy()
    for value in copy.initializers():
        if isinstance(value.const_value, ir.ExternalTensor):
            external = value.const_value
            nothing = partial(ir.Tensor, np.zeros(0, external.dtype.numpy()), dtype=external.dtype)
            shape = ir.Shape(external.shape.numpy())
            value.const_value = ir.LazyTensor(nothing, dtype=external.dtype, shape=shape, name=external.name)
    return copy


# ---- what exporters did to parameters --------------------------------------------------------------------------------


def _is_in_training(node: ir.Node) -> bool:
    """True for a Dropout that drops, and a normalization by the batch, in an inference graph."""
    if not is_standard(node):
        return False
    if node.op_type == "Dropout" and len(node.inputs) > 2 and node.inputs[2] is not None:
        mode = constant_tensor(node.inputs[2])
        return mode is not None and bool(mode.numpy().any())
    return node.op_type == "BatchNormalization" and node.attributes.get_int("training_mode", 0) == 1


def exporter_remarks(model: Model, judged: Mapping[str, Verdict]) -> Iterator[str]:
    """Yield a sentence for each difference between trained tensors and the exporter's constants."""
    if model.steps:
        restored = Restored.from_fact(model.steps[0].fact("train.exporter"))
    elif can_restore(model):
        restored = restore(_without_external_data(model).copy(), join=False)
    else:
        restored = Restored()
    yield from restored.remarks()
    if noisy := [node.name or node.outputs[0].name or "" for node in model.graph.all_nodes() if _is_in_training(node)]:
        yield f"in training mode whenever the model runs: {list_names(noisy, 3)}; export it after `module.eval()`"
    left_out = [name for name, (_, reason) in judged.items() if reason == EXPORTER_CONSTANT]
    if left_out:
        yield (
            f"left out: {quantity(len(left_out), 'constant')} of the exporter, such as {list_names(left_out, 2)}; "
            "`trainable` (`--trainable`) can name them"
        )
    if fixed := {name: reason for name, (_, reason) in judged.items() if reason.startswith(FIXED_TRANSFORM)}:
        kinds = ", ".join(dict.fromkeys(reason.partition(": ")[2] for reason in fixed.values()))
        yield f"left out as fixed: {list_names(list(fixed), 3)} ({kinds}); `trainable` (`--trainable`) can name them"
    trained = [name for name, (role, _) in judged.items() if role in ("trainable", "trained")]
    stored = [model.graph.initializers[name] for name in trained if name in model.graph.initializers]
    computed = {value.name or "": sources_of(value) for value in stored if is_computed(value)}
    if computed:
        sources = list(dict.fromkeys(name for names in computed.values() for name in names))
        yield (
            f"the exporter computed {list_names(list(computed), 3)} from {list_names(sources, 3)}: the results are "
            "trained; to train what they were computed from, export with `optimize=False`"
        )
    unknown = [value.name or "" for value in stored if _may_be_buffer(value)] if is_traced(model) else []
    if unknown:
        yield (
            "trained, though PyTorch's tracing exporter does not say whether they are buffers: "
            f"{list_names(unknown, 4)}; `freeze` (`--freeze`) leaves them out"
        )


def _may_be_buffer(value: ir.Value) -> bool:
    """True if neither the name of a tensor in a traced module nor its use says that it is a parameter."""
    uses = [use for use in value.uses() if use.node.graph is value.graph]  # training reads it as well
    is_of_norm = all(use.node.op_type == "Identity" or is_norm(use.node, use.idx) for use in uses)
    return not is_of_norm and not is_named_as_parameter(value)
