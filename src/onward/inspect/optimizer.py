"""Which optimizer updates which parameter, with which numbers, by what the graph computes and what the file records."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.build import DOMAIN, DOMAIN_VERSION, Builder
from onward.errors import Error
from onward.inspect.summary_fields import Group, ScheduleSection, Setting
from onward.inspect.values import computing_node, number, plain, records, setting, texts
from onward.model import TRAINING_DOMAIN, Model, Step
from onward.model.core import values
from onward.model.state import GROUP_KEY, PARAMETER_KEY, ROLE_KEY, SLOT_KEY
from onward.model.walk import source_of
from onward.recipe.schedules import SchedulePart, schedule, sequence
from onward.runtime.sessions import evaluate
from onward.standard import COMMON_OPSET, IR_VERSION, operator_name

# The words of recipes for the attributes of the standard's operators, and what an attribute is where it is absent.
_STANDARD: dict[str, dict[str, tuple[str, float | str]]] = {
    "Momentum": {
        "alpha": ("momentum", 0.0),
        "beta": ("dampening", 1.0),
        "norm_coefficient": ("weight_decay", 0.0),
        "mode": ("mode", "standard"),
    },
    "Adagrad": {
        "decay_factor": ("lr_decay", 0.0),
        "epsilon": ("eps", 1e-6),
        "norm_coefficient": ("weight_decay", 0.0),
    },
    "Adam": {
        "alpha": ("beta1", 0.9),
        "beta": ("beta2", 0.999),
        "epsilon": ("eps", 1e-6),
        "norm_coefficient": ("weight_decay", 0.0),
        "norm_coefficient_post": ("weight_decay_post", 0.0),
    },
}
_SELDOM = ("mode", "weight_decay_post")
"""What is mentioned only where it is not as usual."""


@dataclasses.dataclass(frozen=True)
class _Update:
    """How one parameter gets its new value."""

    parameter: str
    optimizer: str | None
    operator: str
    hyper: dict[str, Setting]


def trained_parameters(model: Model, step: Step) -> list[ir.Value]:
    """The parameters of a step: state that its Gradients name; without any Gradient, the weights that it updates."""
    known, has_gradients = model.graph.initializers, bool(step.gradients())
    wanted = step.differentiated() if has_gradients else list(known)
    found = [known[name] for name in wanted if name in known and name in step.update]
    if has_gradients:
        return found
    floating = [value for value in found if value.dtype is not None and value.dtype.is_floating_point()]
    return [value for value in floating if not is_statistics(value)]


def is_statistics(value: ir.Value) -> bool:
    """Whether it is a running mean or variance, or else what a step measures."""
    tags = value.const_value.metadata_props if value.const_value is not None else {}
    if tags.get(ROLE_KEY) == "statistics":
        return True
    return any(use.node.op_type == "BatchNormalization" and use.idx in (3, 4) for use in value.uses())


def groups(model: Model, step: Step, schedule: Sequence[ScheduleSection], count: int | None) -> tuple[Group, ...]:
    """The optimizer groups as the file records them; parameters that it does not mention are grouped by settings."""
    computed = {value.name: value for value in values(step.algorithm)}
    updates = {p.name or "": _update(model, step, p, computed) for p in trained_parameters(model, step)}
    found = []
    for fact in records(step.fact("train.optimizer")):
        chosen = [updates.pop(name) for name in texts(fact.get("params")) if name in updates]
        if chosen:
            found.append(_group(step, chosen, fact, str(fact.get("group", "group0"))))
    alike: dict[str, list[_Update]] = {}
    for update in updates.values():
        alike.setdefault(json.dumps([update.operator, update.hyper]), []).append(update)
    for chosen in alike.values():
        found.append(_group(step, chosen, {}, f"group{len(found)}"))
    return tuple(dataclasses.replace(group, lr_now=_lr_now(group, schedule, count)) for group in found)


def _update(model: Model, step: Step, parameter: ir.Value, computed: dict[str | None, ir.Value]) -> _Update:
    name = parameter.name or ""
    found = computing_node(computed.get(step.update[name]))
    if found is None:
        return _Update(name, None, "", {})
    node = found[0]
    if node.domain == TRAINING_DOMAIN and node.op_type in _STANDARD:
        return _Update(name, node.op_type.lower(), operator_name(node), _standard_settings(node))
    if function := model.functions.get(node.op_identifier()):
        return _Update(name, node.op_type, operator_name(node), _call_settings(node, function, step))
    return _Update(name, None, operator_name(node), {})


def _standard_settings(node: ir.Node) -> dict[str, Setting]:
    """The rate and the attributes of an operator of the standard, in the words of recipes."""
    found: dict[str, Setting] = {"lr": setting(node.inputs[0]) if node.inputs else None}
    for attribute, (word, default) in _STANDARD[node.op_type].items():
        value = _attribute(node, attribute)
        value = default if value is None else value
        if word not in _SELDOM or value != default:
            found[word] = 1 - value if word == "dampening" and isinstance(value, float) else value
    return found


def _call_settings(node: ir.Node, function: ir.Function, step: Step) -> dict[str, Setting]:
    """The single numbers that a function is called with, and that no update changes, by the names of its inputs."""
    found: dict[str, Setting] = {}
    for formal, actual in zip(function.inputs, node.inputs, strict=False):
        origin = source_of(actual)
        if origin is None or origin.name in step.update:
            continue
        known = origin.producer() is None or number(origin) is not None
        scalar = origin.shape is not None and origin.shape.rank() == 0
        if (known and scalar) or formal.name == "lr":
            found[formal.name or ""] = setting(origin)
    attributes = {name: _attribute(node, name) for name in node.attributes}
    return {**found, **{name: value for name, value in attributes.items() if value is not None}}


def _attribute(node: ir.Node, name: str) -> Setting:
    attribute = node.attributes.get(name)
    if attribute is None or attribute.is_ref():
        return None
    if attribute.type == ir.AttributeType.FLOAT:
        return plain(float(str(np.float32(attribute.as_float()))))  # 0.9, and not the nearest number in float32
    simple = (ir.AttributeType.INT, ir.AttributeType.STRING, ir.AttributeType.INTS, ir.AttributeType.STRINGS)
    return plain(attribute.value) if attribute.type in simple else None


def _group(step: Step, updates: Sequence[_Update], fact: dict[str, Any], name: str) -> Group:
    """A group: what the graph computes, and over what a recipe has recorded about it what the graph holds now."""
    recorded, options, hyper = fact.get("hyper"), fact.get("options"), updates[0].hyper
    if isinstance(options, dict) and "nesterov" in options:
        hyper = {key: value for key, value in hyper.items() if key != "mode"}  # the same in other words
    if fact:
        known = plain(recorded) if isinstance(recorded, dict) else {}
        is_standard = updates[0].operator.startswith(TRAINING_DOMAIN)
        observed = {key: value for key, value in hyper.items() if key in known or is_standard}
        hyper = {**known, **observed, **_tagged_numbers(step, name)}
    return Group(
        name=name,
        optimizer=str(fact["name"]) if "name" in fact else updates[0].optimizer,
        operators=tuple(dict.fromkeys(update.operator for update in updates if update.operator)),
        hyper=hyper,
        lr_now=None,
        options=plain(options) if isinstance(options, dict) else {},
        slots=_slots(step, updates, name if fact else None),
        parameters=tuple(update.parameter for update in updates),
        is_function=fact.get("is_function") is True,
    )


def _tagged_numbers(step: Step, group: str) -> dict[str, Setting]:
    """The hyper-parameters of a group: `group0/lr`, or `group0/lr_1` where the first name was taken."""
    found = {}
    for name, value in step.algorithm.initializers.items():
        tags = value.const_value.metadata_props if value.const_value is not None else {}
        if tags.get(ROLE_KEY) == "hyper" and tags.get(GROUP_KEY) == group:
            found[wanted_name(name).removeprefix(f"{group}/")] = number(value)
    return found


def wanted_name(name: str) -> str:
    """A name without the number that made it unique."""
    return re.sub(r"_\d+$", "", name)


def _slots(step: Step, updates: Sequence[_Update], group: str | None = None) -> tuple[str, ...]:
    """The names of the slots that parameters or their group have: as tagged, or as the end of `<param>/<slot>`."""
    owners = {update.parameter for update in updates}
    found: dict[str, None] = {}
    for name, value in step.algorithm.initializers.items():
        tags = value.const_value.metadata_props if value.const_value is not None else {}
        owner, _, slot = name.rpartition("/")
        is_owned = tags.get(PARAMETER_KEY) in owners or (PARAMETER_KEY not in tags and tags.get(GROUP_KEY) == group)
        if is_owned and tags.get(ROLE_KEY) == "optimizer_state":
            found[tags.get(SLOT_KEY, slot)] = None
        elif ROLE_KEY not in tags and owner in owners and name in step.update:
            found[slot] = None
    return tuple(found)


def _lr_now(group: Group, schedule: Sequence[ScheduleSection], count: int | None) -> float | None:
    rate = group.hyper.get("lr")
    if not isinstance(rate, int | float):
        return None
    if not schedule:
        return float(rate)
    return rate_now(schedule, float(rate), count) if count is not None else None


# ---- the rate of the next update -------------------------------------------------------------------------------------


def rate_now(sections: Sequence[ScheduleSection], lr: float, step: int) -> float | None:
    """The rate after `step` updates; None for a schedule that is not ours, or not complete."""
    imports = {"": COMMON_OPSET, DOMAIN: DOMAIN_VERSION}
    graph = ir.Graph([], [], nodes=[], opset_imports=imports, name="rate")
    functions: dict[ir.OperatorIdentifier, ir.Function] = {}
    op = Builder(graph, opset=COMMON_OPSET, functions=functions)
    try:
        parts = [_part(op, section) for section in sections]
        rate = sequence(op, op.constant(np.float64(lr)), op.constant(np.int64(step)), parts)
    except (Error, KeyError, TypeError, ValueError, AttributeError):
        return None
    graph.outputs.append(rate.value)
    (result,) = evaluate(Model(ir.Model(graph, ir_version=IR_VERSION, functions=list(functions.values()))))
    return float(result) if math.isfinite(result) else None


def _part(op: Builder, section: ScheduleSection) -> SchedulePart:
    numbers = {name: op.constant(np.asarray(number, np.float64)) for name, number in section.numbers.items()}
    until = numbers.pop("until", None)
    kind = schedule(section.name)
    choices = {name: section.choices.get(name, allowed[0]) for name, allowed in kind.choices.items()}
    return SchedulePart(kind, numbers, choices, until)
