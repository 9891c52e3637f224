"""`describe`: the inputs, outputs, weights and training of a model, by its file."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Sequence

import onnx_ir as ir

from onward.arguments import checked
from onward.build import DOMAIN
from onward.constants import constant_tensor
from onward.inspect.parameters import exporter_remarks, verdicts, weights
from onward.inspect.summary import (
    ROLES,
    Accumulation,
    Amount,
    Average,
    Clip,
    File,
    GroupSummary,
    LossScale,
    LossTerms,
    ProgressSummary,
    Quantization,
    QuantizedWeights,
    ScheduleSection,
    StateAmount,
    Summary,
    Training,
    Weight,
    dtype_name,
    port,
)
from onward.model import Model, Source, Step, load
from onward.model.serde import tensor_sites
from onward.model.state import hyperparameters, states
from onward.model.storage import is_external
from onward.model.walk import ancestors, read_by
from onward.recipe.exporter_notes import folding_remarks
from onward.recipe.optimizers.clip import clip_to_value, scale_to_norm, scale_to_norm_optax
from onward.recipe.schedules import SCHEDULES
from onward.recipe.spec import Spec
from onward.run_state.reading import (
    LossTerm,
    blame_model,
    computing_node,
    differentiated_values,
    is_statistics,
    last_update,
    plain,
    read_training,
    trained_parameters,
)
from onward.run_state.state import ParameterGroup, RunState
from onward.standard import is_standard, operator_name
from onward.transform.bodies import lift_from_bodies
from onward.transform.quantized import RANGE_KEY


@checked()
def describe(model: Source) -> Summary:
    """Return a summary of a model, by its file alone. It is not run, and external weights are not
    loaded.

        print(onward.describe("training.onnx"))

    - `model`: any model
    """
    model = load(model)
    with blame_model():
        opened = model.copy()
        lift_from_bodies(opened)
        judged = verdicts(opened)
        ungrouped = weights(opened, judged)
        steps = tuple(describe_step(model, index, ungrouped) for index in range(len(model.steps)))
        group = {name: group.name for step in reversed(steps) for group in step.groups for name in group.parameters}
        grouped = tuple(dataclasses.replace(weight, group=group.get(weight.name)) for weight in ungrouped)
        return Summary(
            name=model.path.name if model.path else model.graph.name or "model",
            file=_file(model),
            inputs=tuple(map(port, model.inputs)),
            outputs=tuple(map(port, model.outputs)),
            parameters={role: Amount.of(w for w in grouped if w.role == role) for role in ROLES},
            remarks=(
                *folding_remarks(model),
                *exporter_remarks(opened, judged),
                *_notes_on_augmentation(model),
            ),
            quantization=_quantization(model),
            weights=grouped,
            steps=steps,
        )


def _file(model: Model) -> File:
    tensors = (site.tensor for site in tensor_sites(model))
    external = {
        (t.location, t.offset, t.length): t for t in tensors if isinstance(t, ir.ExternalTensor) and is_external(t)
    }
    path = model.path
    return File(
        path=str(path) if path else None,
        bytes=path.stat().st_size if path and path.is_file() else None,
        external_bytes=sum(tensor.nbytes for tensor in external.values()),
        external_files=tuple(sorted({str(tensor.location) for tensor in external.values()})),
        ir_version=model.ir.ir_version,
        opset=model.opset,
        opsets={domain or "ai.onnx": version for domain, version in sorted(model.ir.opset_imports.items())},
        producer=" ".join(text for text in (model.ir.producer_name, model.ir.producer_version) if text),
        nodes=sum(1 for _ in model.graph.all_nodes()),
        functions=tuple(f"{domain}.{name}" for domain, name, _ in model.functions),
        says={
            key.removeprefix(f"{DOMAIN}."): text
            for key, text in sorted(model.metadata.items())
            if key.startswith(f"{DOMAIN}.")
        },
    )


# ---- a step ----------------------------------------------------------------------------------------------------------


def _notes_on_augmentation(model: Model) -> Iterator[str]:
    if model.steps:
        from onward.recipe.preprocessing.augment import notes_on_moves  # an inference model needs none of it

        yield from (note for step in model.steps for note in notes_on_moves(step))


def describe_step(model: Model, index: int, weights: Iterable[Weight]) -> Training:
    """Return the run of a step, with its graph's inputs, metrics, state and size."""
    run, step = read_training(model, index), model.step(index)
    recorded = {key: value for key, value in run.progress.items() if key != "step"}
    scaler = {key: value for key, value in run.scaler.items() if key not in ("scale", "dynamic")}
    parameters = {value.name for value in trained_parameters(model, step)}
    bound = set(step.update.values())
    return Training(
        name=step.algorithm.name or f"step {index}",
        inputs=tuple(port(v) for v in step.algorithm.inputs if v.name not in step.algorithm.initializers),
        metrics=tuple(port(v) for v in step.algorithm.outputs if v.name not in bound),
        loss=_loss(model, step, run.loss),
        groups=tuple(map(_group, run.groups)),
        trained=Amount.of(weight for weight in weights if weight.name in parameters),
        schedule=tuple(map(_section, run.schedule)),
        clip=_clip(run),
        accumulation=None if run.accumulate is None else Accumulation(run.accumulate, run.waiting),
        average=None if run.average_decay is None else Average(run.average_decay, run.average_updates),
        loss_scale=LossScale(run.scaler["scale"], run.scaler["dynamic"], scaler) if run.scaler else None,
        progress=ProgressSummary(run.progress["step"], last_update(run.schedule), recorded),
        state=_state_amounts(model, index),
        hyperparameters=plain(hyperparameters(model, index)),
        nodes=sum(1 for _ in step.algorithm.all_nodes()),
        initialization=all(name in step.reset for name in step.update),
    )


def _loss(model: Model, step: Step, terms: Sequence[LossTerm]) -> LossTerms:
    targets = differentiated_values(model, step)
    producers = [computing_node(value) for value in targets.values()]
    return LossTerms(
        differentiated=tuple(targets),
        operators=tuple(operator_name(producer[0]) if producer else "" for producer in producers),
        outputs=tuple(dict.fromkeys(t.output for t in terms)) or _outputs_below(model, targets.values()),
        terms=tuple(terms),
    )


def _outputs_below(model: Model, targets: Iterable[ir.Value | None]) -> tuple[str, ...]:
    """Return the outputs of the model that a loss depends on."""
    losses = [value for value in targets if value is not None]
    read = {value for node in ancestors(losses)[0] if node.graph is not model.graph for value in read_by(node)}
    return tuple(value.name or "" for value in model.outputs if value in read or value in losses)


def _group(group: ParameterGroup) -> GroupSummary:
    options = group.spec.options if group.optimizer is not None else {}
    return GroupSummary(
        name=group.name,
        optimizer=group.spec.name if group.optimizer is not None else None,
        operators=group.operators,
        hyper=dict(group.settings),
        lr_now=group.rate,
        options={key: value for key, value in options.items() if key not in group.settings},
        slots=group.slots,
        parameters=tuple(group.parameters),
        is_function=group.is_function,
    )


def _section(spec: Spec) -> ScheduleSection:
    schedule = SCHEDULES.get(spec.name)
    choices = {key: value for key, value in spec.options.items() if schedule is not None and key in schedule.choices}
    return ScheduleSection(spec.name, {k: v for k, v in spec.options.items() if k not in choices}, choices)


def _clip(run: RunState) -> Clip | None:
    for quantity in ("norm", "tensor_norm", "value"):
        if run.clip is not None and quantity in run.clip:
            by_norm = scale_to_norm_optax if run.clip.get("variant") == "optax" else scale_to_norm
            function = clip_to_value if quantity == "value" else by_norm
            return Clip(quantity, run.clip[quantity], f"{DOMAIN}.{function.name}")
    return None


def _state_amounts(model: Model, index: int) -> tuple[StateAmount, ...]:
    by_role: dict[str, list[int]] = {}
    for state in states(model, index):
        role = "statistics" if state.role == "state" and is_statistics(state.value) else state.role
        by_role.setdefault(role, []).append(state.nbytes)
    return tuple(StateAmount(role, len(sizes), sum(sizes)) for role, sizes in by_role.items())


# ---- quantization ----------------------------------------------------------------------------------------------------


def _quantization(model: Model) -> Quantization | None:
    """Return the types of quantized weights and activations; None if there are none."""
    nodes = [node for node in model.graph if is_standard(node)]
    weights: dict[tuple[str, str], list[int]] = {}
    activations: dict[str, int] = {}
    for node in nodes:
        if (shape := _weight_shape(node)) is not None:
            weights.setdefault((_type(node), _granularity(node)), []).append(math.prod(shape))
        if node.op_type == "QuantizeLinear" and constant_tensor(node.inputs[0]) is None:
            activations[_type(node)] = activations.get(_type(node), 0) + 1
    if not weights and not activations:
        return None
    ranges = [json.loads(text)["ranges"] for node in nodes if (text := node.metadata_props.get(RANGE_KEY))]
    return Quantization(
        tuple(QuantizedWeights(*form, len(sizes), sum(sizes)) for form, sizes in weights.items()),
        activations,
        tuple(dict.fromkeys(map(str, ranges))),
    )


def _weight_shape(node: ir.Node) -> tuple[int, ...] | None:
    """Return the shape of the stored or trained weight that a DequantizeLinear computes; None for
    biases.
    """
    if node.op_type != "DequantizeLinear" or not node.inputs:
        return None
    stored = constant_tensor(node.inputs[0])
    before = node.inputs[0].producer() if node.inputs[0] is not None else None
    if stored is None and before is not None and before.op_type == "QuantizeLinear":
        stored = constant_tensor(before.inputs[0])
    is_weight = stored is not None and stored.dtype != ir.DataType.INT32 and len(stored.shape) > 1
    return tuple(stored.shape.numpy()) if stored is not None and is_weight else None


def _type(node: ir.Node) -> str:
    zero = constant_tensor((*node.inputs, None, None)[2])
    first = node.inputs[0]
    rounded = node.outputs[0] if node.op_type == "QuantizeLinear" else first
    dtype = zero.dtype if zero is not None else rounded.dtype if rounded is not None else None
    return dtype_name(dtype or ir.DataType.UINT8)


def _granularity(node: ir.Node) -> str:
    """Return the unit that has one scale."""
    if block := node.attributes.get_int("block_size", 0):
        return f"block of {block}"
    scale = constant_tensor(node.inputs[1])
    return "channel" if scale is not None and scale.size > 1 else "tensor"
