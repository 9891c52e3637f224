"""The training of a step: what its graph computes, and what the file records about it.

Nothing is required of a model here: unknown values are None, empty or a word such as "computed".
`from_training_model` requires complete knowledge; `describe` shows all.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.build import DOMAIN, DOMAIN_VERSION, Builder
from onward.constants import constant_tensor
from onward.errors import Error, InvalidModelError
from onward.model import TRAINING_DOMAIN, Model, Step
from onward.model.core import string, values
from onward.model.state import GROUP_KEY, PARAMETER_KEY, ROLE_KEY, SLOT_KEY, STEP, states
from onward.model.walk import graphs_in, nested_graphs, source_of
from onward.recipe.optimizers.clip import clip_to_value, scale_to_norm, scale_to_norm_optax
from onward.recipe.schedules import SCHEDULES, SchedulePart, schedule, sequence
from onward.recipe.spec import Spec
from onward.run_state.state import ParameterGroup, RunState
from onward.runtime.sessions import evaluate
from onward.standard import COMMON_OPSET, IR_VERSION, operator_name

Setting = float | str | list[Any] | None
"""Number, list of numbers, or word; None if unknown."""


@dataclasses.dataclass(frozen=True)
class LossTerm:
    """Summand of a loss, as the file records it."""

    name: str
    output: str
    inputs: tuple[str, ...]
    options: dict[str, Any]
    scale: float


@contextmanager
def blame_model() -> Iterator[None]:
    """Turn errors that a broken model causes into an InvalidModelError."""
    try:
        yield
    except Error:
        raise
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        raise InvalidModelError(f"the model is invalid: {error}", hint="run `onward check`") from error


@blame_model()
def read_training(model: Model, index: int) -> RunState:
    """Return the run of a step without its state, as far as it is known."""
    step = model.step(index)
    schedule = _schedule(step)
    counters = {base_name(state.name): state for state in states(model, index) if state.role == "counter"}
    counter = counters.get(STEP) or (next(iter(counters.values())) if len(counters) == 1 else None)
    count = number(counter.value) if counter is not None else None
    updates = int(count) if isinstance(count, int | float) else None
    return RunState(
        model=model,
        loss=read_terms(step),
        groups=_groups(model, step, schedule, updates),
        step=updates or 0,
        schedule=schedule,
        clip=_clip(step),
        progress={**_recorded(step.fact("train.progress")), "step": updates},
        accumulate=current(step, "accumulate"),  # type: ignore[arg-type]
        waiting=current(step, "micro_step"),  # type: ignore[arg-type]
        average_decay=current(step, "ema/decay"),  # type: ignore[arg-type]
        average_updates=current(step, "ema/n_averaged"),  # type: ignore[arg-type]
        scaler=_scaler(step),
    )


def read_terms(step: Step) -> list[LossTerm]:
    """Return the summands of the loss; none if the file does not record them."""
    return [
        LossTerm(
            name=str(fact["name"]),
            output=str(fact.get("output", "")),
            inputs=texts(fact.get("inputs")),
            options=_recorded(fact.get("options")),
            scale=float(scale) if isinstance(scale := fact.get("scale"), int | float) else 1.0,
        )
        for fact in records(step.fact("train.loss"))
        if "name" in fact
    ]


def differentiated_values(model: Model, step: Step) -> dict[str, ir.Value | None]:
    """Return the `y` of each Gradient, by name; None for a missing value."""
    graphs = [model.graph, *graphs_in(step.algorithm)]
    named = {value.name: value for graph in graphs for value in values(graph)}
    return {name: named.get(name) for node in step.gradients() if (name := string(node, "y"))}


# ---- around the optimizer --------------------------------------------------------------------------------------------


def _schedule(step: Step) -> list[Spec]:
    """Return the recorded schedules with the current numbers of the graph."""
    facts = [fact for fact in records(step.fact("train.lr_scheduler")) if "name" in fact]
    schedules = []
    for i, fact in enumerate(facts):
        prefix = "schedule" if len(facts) == 1 else f"schedule/{i}"
        recorded = {key: plain(value) for key, value in fact.items() if key != "name"}
        definition = SCHEDULES.get(str(fact["name"]))
        choices = {key: value for key, value in recorded.items() if definition and key in definition.choices}
        names = dict.fromkeys([*recorded, *(definition.options if definition else ())])
        now = {key: current(step, f"{prefix}/{key}") for key in names if key not in choices}
        numbers = {key: recorded.get(key) if value is None else value for key, value in now.items()}
        if not numbers.get("warmup"):  # without warm-up, the graph has none of its numbers
            numbers = {key: value for key, value in numbers.items() if not key.startswith("warmup")}
        schedules.append(Spec(str(fact["name"]), {k: v for k, v in numbers.items() if v is not None} | choices))
    return schedules


def _clip(step: Step) -> dict[str, Any] | None:
    """Return the gradient clipping: by value, by global norm, or each gradient by its own norm."""
    calls = [node for node in step.algorithm.all_nodes() if node.domain == DOMAIN]
    by_value = [node for node in calls if node.op_type == clip_to_value.name]
    by_norm = [node for node in calls if node.op_type in (scale_to_norm.name, scale_to_norm_optax.name)]
    if by_value:
        return {"value": setting(by_value[0].inputs[-1])}
    if not by_norm:
        return None
    clip_by = "norm" if len({node.inputs[1] for node in by_norm}) == 1 else "tensor_norm"
    variant = "optax" if by_norm[0].op_type == scale_to_norm_optax.name else "torch"
    return {clip_by: setting(by_norm[0].inputs[-1]), "variant": variant}


def _scaler(step: Step) -> dict[str, Any]:
    dynamic = current(step, "scaler/scale")
    if dynamic is None:
        static = current(step, "loss_scale")
        return {} if static is None else {"scale": static, "dynamic": False}
    numbers = ("growth_factor", "backoff_factor", "growth_interval", "hysteresis", "min_scale", "cooldown")
    settings = {name: current(step, f"scaler/{name}") for name in (*numbers, "growth_tracker", "hysteresis_tracker")}
    return {"scale": dynamic, "dynamic": True, **{name: value for name, value in settings.items() if value is not None}}


def current(step: Step, name: str) -> Setting:
    """Return the number or numbers of an initializer by its name, or by that name made unique."""
    initializers = step.algorithm.initializers
    alike = (value for other, value in initializers.items() if other.startswith(name) and base_name(other) == name)
    return number(initializers[name] if name in initializers else next(alike, None), longest=math.inf)


# ---- groups of parameters --------------------------------------------------------------------------------------------

# Attributes of the standard's operators -> names in a recipe, and defaults.
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
_LISTED_IF_SET = ("mode", "weight_decay_post")
"""Settings that are listed only if they differ from the default."""


@dataclasses.dataclass(frozen=True)
class _Update:
    """Update of one parameter."""

    parameter: str
    optimizer: str | None
    operator: str
    hyper: dict[str, Setting]


def trained_parameters(model: Model, step: Step) -> list[ir.Value]:
    """Return the parameters of a step: named by its Gradients, or else updated weights."""
    initializers, has_gradients = model.graph.initializers, bool(step.gradients())
    candidates = step.differentiated() if has_gradients else list(initializers)
    trained = [initializers[name] for name in candidates if name in initializers and name in step.update]
    if has_gradients:
        return trained
    floating = [value for value in trained if value.dtype is not None and value.dtype.is_floating_point()]
    return [value for value in floating if not is_statistics(value)]


def is_statistics(value: ir.Value) -> bool:
    """True for a running mean or variance, or other values that a step measures."""
    tags = value.const_value.metadata_props if value.const_value is not None else {}
    if tags.get(ROLE_KEY) == "statistics":
        return True
    return any(use.node.op_type == "BatchNormalization" and use.idx in (3, 4) for use in value.uses())


def _groups(model: Model, step: Step, schedule: Sequence[Spec], count: int | None) -> list[ParameterGroup]:
    """Return the recorded groups; other parameters are grouped by settings."""
    computed = {value.name: value for value in values(step.algorithm)}
    updates = {p.name or "": _update(model, step, p, computed) for p in trained_parameters(model, step)}
    groups = []
    for fact in records(step.fact("train.optimizer")):
        members = [updates.pop(name) for name in texts(fact.get("params")) if name in updates]
        if members:
            groups.append(_group(step, members, fact, str(fact.get("group", "group0"))))
    alike: dict[str, list[_Update]] = {}
    for update in updates.values():
        alike.setdefault(json.dumps([update.operator, update.hyper]), []).append(update)
    for members in alike.values():
        groups.append(_group(step, members, {}, f"group{len(groups)}"))
    return [dataclasses.replace(group, rate=_rate(group, schedule, count)) for group in groups]


def _rate(group: ParameterGroup, schedule: Sequence[Spec], count: int | None) -> float | None:
    rate = group.settings.get("lr")
    if not isinstance(rate, int | float):
        return None
    if not schedule:
        return float(rate)
    return rate_now(schedule, float(rate), count) if count is not None else None


def _update(model: Model, step: Step, parameter: ir.Value, computed: dict[str | None, ir.Value]) -> _Update:
    name = parameter.name or ""
    match = computing_node(computed.get(step.update[name]))
    if match is None:
        return _Update(name, None, "", {})
    node = match[0]
    if node.domain == TRAINING_DOMAIN and node.op_type in _STANDARD:
        return _Update(name, node.op_type.lower(), operator_name(node), _standard_settings(node))
    if function := model.functions.get(node.op_identifier()):
        return _Update(name, node.op_type, operator_name(node), _call_settings(node, function, step))
    return _Update(name, None, operator_name(node), {})


def _standard_settings(node: ir.Node) -> dict[str, Setting]:
    """Return the rate and the attributes of a standard operator, by names of recipes."""
    settings: dict[str, Setting] = {"lr": setting(node.inputs[0]) if node.inputs else None}
    for attribute, (name, default) in _STANDARD[node.op_type].items():
        value = _attribute(node, attribute)
        value = default if value is None else value
        if name not in _LISTED_IF_SET or value != default:
            settings[name] = 1 - value if name == "dampening" and isinstance(value, float) else value
    return settings


def _call_settings(node: ir.Node, function: ir.Function, step: Step) -> dict[str, Setting]:
    """Return the constant numbers that a function is called with, by its inputs."""
    settings: dict[str, Setting] = {}
    for formal, actual in zip(function.inputs, node.inputs, strict=False):
        origin = source_of(actual)
        if origin is None or origin.name in step.update:
            continue
        is_known = origin.producer() is None or number(origin) is not None
        scalar = origin.shape is not None and origin.shape.rank() == 0
        if (is_known and scalar) or formal.name == "lr":
            settings[formal.name or ""] = setting(origin)
    attributes = {name: _attribute(node, name) for name in node.attributes}
    return {**settings, **{name: value for name, value in attributes.items() if value is not None}}


def _attribute(node: ir.Node, name: str) -> Setting:
    attribute = node.attributes.get(name)
    if attribute is None or attribute.is_ref():
        return None
    if attribute.type == ir.AttributeType.FLOAT:
        return plain(float(str(np.float32(attribute.as_float()))))  # 0.9, and not the nearest number in float32
    simple = (ir.AttributeType.INT, ir.AttributeType.STRING, ir.AttributeType.INTS, ir.AttributeType.STRINGS)
    return plain(attribute.value) if attribute.type in simple else None


def _group(step: Step, updates: Sequence[_Update], fact: dict[str, Any], name: str) -> ParameterGroup:
    """Return a group: the recorded settings, updated by those in the graph."""
    choices, hyper = _recorded(fact.get("options")), updates[0].hyper
    if "nesterov" in choices:
        hyper = {key: value for key, value in hyper.items() if key != "mode"}  # the same in other words
    if fact:
        numbers, is_standard = _recorded(fact.get("hyper")), updates[0].operator.startswith(TRAINING_DOMAIN)
        observed = {key: value for key, value in hyper.items() if key in numbers or is_standard}
        hyper = {**numbers, **observed, **_tagged_numbers(step, name)}
    name_of_optimizer = str(fact["name"]) if "name" in fact else updates[0].optimizer
    return ParameterGroup(
        optimizer=None if name_of_optimizer is None else Spec(name_of_optimizer, {**hyper, **choices}),
        parameters=tuple(update.parameter for update in updates),
        settings=hyper,
        name=name,
        operators=tuple(dict.fromkeys(update.operator for update in updates if update.operator)),
        slots=_slots(step, updates, name if fact else None),
    )


def _tagged_numbers(step: Step, group: str) -> dict[str, Setting]:
    """Return the hyper-parameters of a group: `group0/lr`, or `group0/lr_1`."""
    numbers = {}
    for name, value in step.algorithm.initializers.items():
        tags = value.const_value.metadata_props if value.const_value is not None else {}
        if tags.get(ROLE_KEY) == "hyper" and tags.get(GROUP_KEY) == group:
            numbers[base_name(name).removeprefix(f"{group}/")] = number(value)
    return numbers


def base_name(name: str) -> str:
    """Return a name without the number that made it unique."""
    return re.sub(r"_\d+$", "", name)


def _slots(step: Step, updates: Sequence[_Update], group: str | None = None) -> tuple[str, ...]:
    """Return the slot names of parameters or their group: tags, or the end of `<param>/<slot>`."""
    owners = {update.parameter for update in updates}
    slots: dict[str, None] = {}
    for name, value in step.algorithm.initializers.items():
        tags = value.const_value.metadata_props if value.const_value is not None else {}
        owner, _, slot = name.rpartition("/")
        is_owned = tags.get(PARAMETER_KEY) in owners or (PARAMETER_KEY not in tags and tags.get(GROUP_KEY) == group)
        if is_owned and tags.get(ROLE_KEY) == "optimizer_state":
            slots[tags.get(SLOT_KEY, slot)] = None
        elif ROLE_KEY not in tags and owner in owners and name in step.update:
            slots[slot] = None
    return tuple(slots)


# ---- the rate of the next update -------------------------------------------------------------------------------------


def rate_now(sections: Sequence[Spec], lr: float, step: int) -> float | None:
    """Return the rate after `step` updates; None for an unknown or incomplete schedule."""
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


def last_update(schedule: Sequence[Spec]) -> int | None:
    """Return the update at which the last schedule ends; None if unknown."""
    if not schedule:
        return None
    last = schedule[-1].options
    start = schedule[-2].options.get("until") if len(schedule) > 1 else 0
    numbers = [number for number in (start, last.get("steps"), last.get("every", 1)) if isinstance(number, int | float)]
    if len(numbers) < 3:
        return None
    begin, length, every = numbers
    return int(begin + length * every)


def _part(op: Builder, section: Spec) -> SchedulePart:
    definition = schedule(section.name)
    choices = {name: section.options.get(name, allowed[0]) for name, allowed in definition.choices.items()}
    numbers = {k: op.constant(np.asarray(v, np.float64)) for k, v in section.options.items() if k not in choices}
    until = numbers.pop("until", None)
    return SchedulePart(definition, numbers, choices, until)


# ---- single values ---------------------------------------------------------------------------------------------------

_LONGEST_LIST = 64


def number(value: ir.Value | None, longest: float = _LONGEST_LIST) -> Setting:
    """Return the number of a small initializer or constant; None for others."""
    tensor = constant_tensor(value)
    if tensor is None or tensor.size > longest or tensor.dtype in (ir.DataType.STRING, ir.DataType.UNDEFINED):
        return None
    array = np.asarray(tensor.numpy())
    return plain(array.reshape(-1)[0].item() if array.size == 1 else array.tolist())


def plain(item: Any) -> Any:
    """Return a value for JSON: infinities and NaN are strings."""
    if isinstance(item, list | tuple):
        return [plain(element) for element in item]
    if isinstance(item, Mapping):
        return {str(key): plain(element) for key, element in item.items()}
    if isinstance(item, float) and not math.isfinite(item):
        return str(item)
    return item if isinstance(item, str | int | float | bool) or item is None else str(item)


def _recorded(fact: Any) -> dict[str, Any]:
    return plain(fact) if isinstance(fact, dict) else {}


def setting(value: ir.Value | None) -> Setting:
    """Return the number in a value, "computed", or the name of the input that holds it."""
    origin = source_of(value)
    if origin is None:
        return None
    if origin.is_graph_input() and not origin.is_initializer():
        return f"input `{origin.name}`"
    constant = number(origin)
    return "computed" if constant is None else constant


def computing_node(value: ir.Value | None) -> tuple[ir.Node, int] | None:
    """Return the operator of a new state and its output index, also in an `If`."""
    seen: set[ir.Value] = set()
    while value is not None and value not in seen and (node := value.producer()) is not None:
        seen.add(value)
        index = value.index() or 0
        if (value := _passed_on(node, index)) is None:
            return node, index
    return None


def _passed_on(node: ir.Node, index: int) -> ir.Value | None:
    """Return the value that an operator only passes on or selects."""
    if node.op_type == "If":
        outputs = [graph.outputs[index] for graph in nested_graphs(node) if index < len(graph.outputs)]
        changing = [value for value in outputs if (origin := source_of(value)) and origin.producer()]
        return changing[0] if changing else None
    if node.op_type == "Where":
        changing = [value for value in node.inputs[1:] if value is not None and value.producer()]
        return changing[0] if len(changing) == 1 else None
    return node.inputs[0] if node.op_type in ("Identity", "Cast") and node.inputs else None


def records(fact: Any) -> list[dict[str, Any]]:
    """Return the objects in a JSON list of objects."""
    return [item for item in (fact if isinstance(fact, list) else [fact]) if isinstance(item, dict)]


def texts(fact: Any) -> tuple[str, ...]:
    """Return the strings in a JSON list of names."""
    return tuple(item for item in fact if isinstance(item, str)) if isinstance(fact, list) else ()
