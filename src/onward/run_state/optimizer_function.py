"""An optimizer that a training model has as a function, found again: a graph that any framework can execute."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onward.engines.framework_engine import array_function
from onward.inspect.summary_fields import Group
from onward.inspect.values import computing_node
from onward.lowering import lower
from onward.model import Model, Step
from onward.model.core import values
from onward.model.state import PARAMETER_KEY, SLOT_KEY
from onward.model.walk import source_of
from onward.recipe.optimizers.graph_optimizer import COUNT, RATE, FunctionOptimizer, gradient_of
from onward.standard import IR_VERSION
from onward.transform.training import drop_unused_definitions

_SCALARS = {RATE: ir.DataType.DOUBLE, COUNT: ir.DataType.INT64}


def function_of(model: Model, index: int, group: Group) -> FunctionOptimizer:
    """The optimizer of a group that is a function; its inputs have the names that parameters and state have now."""
    step = model.step(index)
    call = _call(step, group.parameters[0])
    functions = {key: function.clone() for key, function in model.functions.items()}
    graph = functions.pop(call.op_identifier()).graph
    given = [source_of(value) for value in call.inputs]
    names = _names([value.name or "" for value in graph.inputs], given, group.parameters)
    for formal, actual, name in zip(graph.inputs, call.inputs, names, strict=True):
        assert actual is not None
        dtype = _SCALARS.get(name, actual.dtype) if formal.dtype is None else formal.dtype
        formal.type = None if dtype is None else ir.TensorType(dtype)
        formal.shape = ir.Shape([]) if name in _SCALARS else actual.shape
        formal.name = name
    update = Model(ir.Model(graph, ir_version=model.ir.ir_version or IR_VERSION, functions=list(functions.values())))
    drop_unused_definitions(update)
    first = array_function("numpy", lower(model, index, part="initialization"))({}) if step.initialization else {}
    begins = {
        name: first[value.name] for name, value in zip(names, given, strict=True) if value and value.name in first
    }
    lr = float(str(group.hyper[RATE]))
    found = FunctionOptimizer(str(group.optimizer), update, lr, {})
    return FunctionOptimizer(found.name, update, lr, {v.name: begins[v.name] for v in found.state if v.name in begins})


def _call(step: Step, parameter: str) -> ir.Node:
    computed = {value.name: value for value in values(step.algorithm)}
    found = computing_node(computed[step.update[parameter]])
    assert found is not None
    return found[0]


def _names(formals: Sequence[str], given: Sequence[ir.Value | None], parameters: Sequence[str]) -> list[str]:
    names: dict[str, str] = {}
    for formal, value in zip(formals, given, strict=True):
        tags = value.const_value.metadata_props if value is not None and value.const_value is not None else {}
        owner, slot = tags.get(PARAMETER_KEY), tags.get(SLOT_KEY)
        if formal in _SCALARS:
            names[formal] = formal
        elif value is not None and (name := value.name or "") in parameters:
            names[formal] = name
        elif slot is not None:  # state of a parameter or the group, or the copy of a parameter that is updated
            names[formal] = slot if owner is None else owner if slot == "master" else f"{owner}/{slot}"
    gradients = {gradient_of(formal): gradient_of(name) for formal, name in names.items()}
    return [names.get(formal) or gradients[formal] for formal in formals]
