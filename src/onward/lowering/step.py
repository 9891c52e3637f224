"""Parts of a training model as plain ONNX, which a loop of a few lines drives on any runtime."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import onnx_ir as ir

from onward.build import DOMAIN, Builder, Names
from onward.constants import add_initializer
from onward.differentiate.expand import replace_node
from onward.differentiate.gradients import check_gradients_of, lower_gradients
from onward.differentiate.recompute import Choice
from onward.differentiate.simplify import put_results_last, simplify
from onward.differentiate.sweep import RuleLookup
from onward.errors import InvalidModelError, UnknownNameError, UnsupportedError, suggest
from onward.lowering.contract import Contract
from onward.lowering.data_parallel import DataParallel, is_all_reduce, make_data_parallel
from onward.lowering.optimize import inline_typed_calls, optimize
from onward.lowering.rounds import OneStep, Steps, as_one_step, runs_per_step
from onward.lowering.standard_operators import OPTIMIZERS, add_channel_axes, expand, write_out_unsafe
from onward.lowering.step_graph import StepGraph
from onward.model import TRAINING_DOMAIN, Model, Source, Step, load
from onward.model.checks import check_signatures
from onward.model.core import as_input, link_gradients, require_tensor, tensor_of, unlink_gradients, values
from onward.model.state import carried_state, states
from onward.model.walk import nodes_of
from onward.rules import RULES
from onward.rules.registry import lookup, lookup_body
from onward.standard import IR_VERSION, KERNELS, ML_DOMAIN, OLDEST_OPSET, STANDARD
from onward.transform.context import Context
from onward.transform.inline import inline_calls
from onward.transform.opset import of_one_opset
from onward.transform.padding import write_padding
from onward.transform.training import drop_unused_definitions, remove_unused

_STANDARD = (*STANDARD, ML_DOMAIN)
"""The domains of the standard that runtimes have."""
_Types = dict[str, tuple[ir.TypeProtocol | None, ir.Shape | None]]


class Passes(NamedTuple):
    """Passes that an engine adds to the lowering of a step, for its own kernels."""

    suit: Callable[[Model], bool]
    """True if the passes can be used for the combined graph of a step."""
    before: Callable[[Context], None]
    """Change the forward pass before it is differentiated."""
    find: RuleLookup
    """Look up rules, also for the operators that `before` adds."""
    after: Callable[[Context], None]
    """Change the step after it became plain ONNX."""


class LoweringOptions(NamedTuple):
    """Options for the lowering of a part."""

    recompute: Choice = None
    differentiate: bool = True
    """False: keep training operators, for frameworks with their own derivatives."""
    data_parallel: DataParallel = DataParallel()
    """The process that it is for."""
    passes: Passes | None = None
    """The passes that an engine adds."""


class Lowering:
    """A training model whose parts are lowered; common work is done once.

        lowering = Lowering(model)
        step, evaluation = lowering.part("step"), lowering.part("evaluation")

    The model is checked and converted to one operator set once, a round is combined once, and types
    inferred for one part serve the next.
    """

    def __init__(self, source: Source, steps: Steps = None, options: LoweringOptions = LoweringOptions()):  # noqa: B008 (a constant)
        self.model = check_signatures(load(source))
        check_gradients_of(self.model)
        self._steps, self._options = steps, options
        self._of_one_opset: Model | None = None
        self._rounds: dict[bool, tuple[OneStep, _Types]] = {}

    def part(self, part: str | None = None) -> Model:
        """Return a part, in the operator set of the model. For the parts see `onward.lower`."""
        part = part or default_part(self.model)
        if part == "inference":
            model = self._trainable() if has_training_operators(self.model) else of_one_opset(self.model)
            one_step, types = OneStep(model, 0), _Types()
        else:
            if part == "apply" and sum(runs_per_step(self.model, self._steps).values()) > 1:
                raise UnsupportedError(
                    "the part `apply` works with one step: in a round, later gradients depend on earlier updates",
                    hint='lower the whole round, `part="step"`, or name one step: `steps="NAME"`',
                )
            one_step, types = self._one_step(together=part not in ("evaluation", "gradients", "forward"))
        model, contract = _OF_ENGINES[part](_Origin(one_step.model, one_step.index, self._options, types))
        for node in model.graph.all_nodes():
            node.device_configurations = ()  # a step runs on one device
        loss = one_step.loss if one_step.loss in contract.metrics else contract.loss
        contract = dataclasses.replace(contract, part=part, loss=loss)
        if part != "inference" and loss in contract.metrics and _minimizes_output(one_step.model.step(one_step.index)):
            contract = _rename_loss(model, contract)
        model.ir.ir_version = max(IR_VERSION, model.ir.ir_version or 0) if part == "inference" else IR_VERSION
        contract.write_to(model)
        return model

    def _trainable(self) -> Model:
        if self._of_one_opset is None:
            self._of_one_opset = of_one_opset(self.model, OLDEST_OPSET)
        return self._of_one_opset

    def _one_step(self, together: bool) -> tuple[OneStep, _Types]:
        if together not in self._rounds:
            one_step = as_one_step(self._trainable(), self._steps, together=together)
            types: _Types = {}
            if (not together) in self._rounds and self._rounds[not together][0].model is one_step.model:
                types = self._rounds[not together][1]  # a single step is the same in both cases
            self._rounds[together] = one_step, types
        return self._rounds[together]


def lower_for_engine(
    source: Source,
    step: Steps = None,
    part: str | None = None,
    options: LoweringOptions = LoweringOptions(),  # noqa: B008 (a constant)
) -> Model:
    """Return a part, in the operator set of the model, for any engine."""
    if part is not None and part not in _OF_ENGINES:
        parts = (*PARTS, RUN)
        raise UnknownNameError(f"unknown part `{part}`", hint=suggest(part, parts) or f"parts: {', '.join(parts)}")
    return Lowering(source, step, options).part(part)


def lower_for_framework(source: Source, step: Steps = None, part: str | None = None) -> Model:
    """Return a part that keeps training operators, for a framework with its own derivatives."""
    return lower_for_engine(source, step, part, LoweringOptions(differentiate=False))


def default_part(model: Model) -> str:
    """Return the part that is lowered by default."""
    return "step" if model.is_training_model else "inference"


# ---- the parts -------------------------------------------------------------------------------------------------------


class _Origin(NamedTuple):
    """Source of a part."""

    model: Model
    number: int
    """Index of the step."""
    options: LoweringOptions
    types: _Types
    """Types inferred for other parts, by name in the combined graph."""


_Part = tuple[Model, Contract]


def _step(origin: _Origin) -> _Part:
    step_graph = _open_step(origin)
    make_data_parallel(step_graph, origin.options.data_parallel)
    model, contract = _plain(origin, step_graph, step_graph.bindings, step_graph.metrics)
    inputs = model.graph.inputs
    names = {value.name for value in inputs}
    unread = [state.name for state in states(origin.model, origin.number) if state.name not in names]
    for value in (step_graph.state[name] for name in unread):  # a loop passes all state, also state that is not read
        inputs.append(ir.Value(name=value.name, type=value.type, shape=value.shape))
    return model, dataclasses.replace(contract, state=[*contract.state, *unread])


def _evaluation(origin: _Origin) -> _Part:
    step_graph = _open_step(origin)
    outputs = [value.name or "" for value in origin.model.graph.outputs if tensor_of(value) is value]
    loss = step_graph.loss(step_graph.metrics)
    step_graph.switch_to_inference()
    metrics = step_graph.of_evaluation()
    outputs += [name for name in step_graph.predictions() if name not in outputs]
    make_data_parallel(step_graph, origin.options.data_parallel._replace(gradients=False))
    model, contract = _plain(origin, step_graph, {}, metrics, outputs)
    return model, dataclasses.replace(contract, outputs=outputs, loss=loss if loss in metrics else None)


def _gradient_part(origin: _Origin) -> _Part:
    step_graph = _open_step(origin)
    gradients = {output.name or "": x for x, output in step_graph.results()}
    make_data_parallel(step_graph, origin.options.data_parallel)
    model, contract = _plain(origin, step_graph, *step_graph.of_forward(), list(gradients))
    return model, dataclasses.replace(contract, gradients=gradients)


def _forward(origin: _Origin) -> _Part:
    step_graph = _open_step(origin)
    make_data_parallel(step_graph, origin.options.data_parallel._replace(gradients=False))
    return _plain(origin, step_graph, *step_graph.of_forward())


def _apply(origin: _Origin) -> _Part:
    step_graph = _open_step(origin)
    forward, forward_metrics = step_graph.of_forward()
    parameters = {}
    step_graph.graph.outputs.clear()  # others are set later
    for x, output in step_graph.results():
        gradient = ir.Value(name=output.name, type=output.type, shape=output.shape)
        output.name = f"{output.name}/computed"
        output.replace_all_uses_with(gradient)
        step_graph.graph.inputs.append(gradient)
        step_graph.by_name[gradient.name] = gradient
        parameters[gradient.name] = x
    bindings = {name: new for name, new in step_graph.bindings.items() if name not in forward}
    metrics = [name for name in step_graph.metrics if name not in forward_metrics]
    model, contract = _plain(origin, step_graph, bindings, metrics)
    if other_inputs := [name for name in contract.batch if name not in parameters]:
        raise UnsupportedError(
            f"the update reads `{other_inputs[0]}`, which is neither a gradient nor state",
            hint='lower the whole step: `part="step"` (`--part step`)',
        )
    return model, dataclasses.replace(contract, batch=[], gradients={name: parameters[name] for name in contract.batch})


def _initialization(origin: _Origin) -> _Part:
    model, step = origin.model, origin.model.step(origin.number)
    if step.initialization is None:
        raise UnsupportedError(
            "the step has no initialization", hint='use the state in the file: `part="state"` (`--part state`)'
        )
    graph = step.initialization.clone()
    graph.opset_imports.update(model.ir.opset_imports)
    functions = [function.clone() for function in model.functions.values()]
    model_ = Model(ir.Model(graph, ir_version=IR_VERSION, functions=functions))
    inline_calls(model_)
    names = Names([*step.reset, *(name for value in values(graph) if (name := value.name))])
    by_name = {value.name: value for value in values(graph)}
    for value in by_name.values():  # outputs get the names of their state, which may be in use
        value.name = names.fresh(f"{value.name}/within")
    op = Builder(graph, opset=model_.opset, names=names)
    graph.outputs.clear()
    for state, output in step.reset.items():
        if output not in by_name:
            raise InvalidModelError(f"the initialization has no value `{output}` for `{state}`")
        value = by_name[output]
        if value.producer() is None or value.is_graph_output():
            value = op.Identity(value).like(value).value
        value.name = state
        graph.outputs.append(value)
    _finish(Context(model_))
    return model_, Contract(update={name: name for name in step.reset})


def _state(origin: _Origin) -> _Part:
    opset, stored = origin.model.opset, carried_state(origin.model, origin.number)
    graph = ir.Graph([], [], nodes=[], opset_imports={"": opset}, name="state")
    op = Builder(graph, opset=opset, names=Names(state.name for state in stored))
    for state in stored:
        constant = add_initializer(graph, op.names.fresh(f"{state.name}/stored"), require_tensor(state.value))
        value = op.Identity(constant).like(constant).value
        value.name = state.name
        graph.outputs.append(value)
    return Model(ir.Model(graph, ir_version=IR_VERSION)), Contract(update={state.name: state.name for state in stored})


def _inference(origin: _Origin) -> _Part:
    """Return the main graph without training operators and functions; inputs, outputs and weights
    stay.

    Training operators stay too for a framework with its own derivatives.
    """
    model = origin.model.copy(steps=False)
    write_padding(model)
    if origin.options.differentiate and has_training_operators(model):
        context = Context(model)
        model = lower_gradients(context, recompute=origin.options.recompute)
        expand(context, OPTIMIZERS)
        inline_typed_calls(context)
        inline_calls(model, names_in_use=context.names)
        _shorten(context)
        remaining = {
            f"`{node.domain}.{node.op_type}`" for node in model.graph.all_nodes() if node.domain == TRAINING_DOMAIN
        }
        if remaining:
            raise UnsupportedError(
                f"no plain operators can replace {', '.join(sorted(remaining))}",
                hint="the standard has Gradient, Adagrad, Adam and Momentum in this domain",
            )
        drop_unused_definitions(model)
    elif model.functions:
        inline_calls(model)
    batch, outputs = ([value.name or "" for value in values] for values in (model.inputs, model.outputs))
    return model, Contract(batch=batch, outputs=outputs)


def has_training_operators(model: Model) -> bool:
    """True if the main graph or a function has a node that no runtime knows: a Gradient or an optimizer."""
    return any(node.domain == TRAINING_DOMAIN for node in nodes_of(model))


PARTS: dict[str, Callable[[_Origin], _Part]] = {
    "step": _step,
    "evaluation": _evaluation,
    "gradients": _gradient_part,
    "apply": _apply,
    "initialization": _initialization,
    "state": _state,
    "inference": _inference,
}
RUN = "run"
"""The part with whole training: see run/."""
_OF_ENGINES = {**PARTS, "forward": _forward}
"""Parts for engines: `forward` is `gradients` without gradients."""


# ---- losses that the model computes ----------------------------------------------------------------------------------

_LOSS = "loss"


def _minimizes_output(step: Step) -> bool:
    """True if the output `loss` of the model is minimized, so that the metric got another name."""
    terms = step.fact("train.loss")
    term = terms[0] if isinstance(terms, list) and len(terms) == 1 else None
    of_output = {"name": "value", "output": _LOSS, "scale": 1.0}
    return isinstance(term, dict) and of_output.items() <= term.items() and not step.fact("train.distill")


def _rename_loss(model: Model, contract: Contract) -> Contract:
    """Give the metric that is minimized the name `loss`, in place, and return the contract with it."""
    old, graph = contract.loss, model.graph
    if old == _LOSS:
        return contract
    link_gradients(graph)
    metric = next(value for value in graph.outputs if value.name == old)
    if _LOSS in contract.outputs:  # inference computes the same
        graph.outputs.remove(metric)
        remove_unused(graph)
    else:
        by_name = {value.name or "": value for value in values(graph)}
        if _LOSS in by_name:
            by_name[_LOSS].name = Names(by_name).fresh(f"{_LOSS}/computed")
        metric.name = _LOSS
    unlink_gradients(graph)
    metrics = [_LOSS if name == old else name for name in contract.metrics]
    return dataclasses.replace(contract, metrics=metrics, loss=_LOSS)


# ---- what the parts share --------------------------------------------------------------------------------------------


def _open_step(origin: _Origin) -> StepGraph:
    """Return the combined graph with the state as inputs, so that no rule or pass folds it."""
    combined = Model(origin.model.combined(origin.number, share_functions=True))
    graph = combined.graph
    for value in values(graph) if origin.types else ():
        value.type, value.shape = origin.types.get(value.name or "", (value.type, value.shape))
    context = Context(combined)
    write_padding(combined)
    if origin.options.data_parallel.size > 1:  # sums over samples must be visible
        inline_calls(combined, [f"{domain}.{name}" for domain, name, _ in combined.functions if domain != DOMAIN])
    add_channel_axes(context)
    link_gradients(graph)
    graph.inputs[:] = [value for value in graph.inputs if not value.is_initializer()]
    state = carried_state(origin.model, origin.number)
    for name in (s.name for s in state):
        as_input(graph, name)
    return StepGraph(context, origin.model.step(origin.number), state)


def _plain(
    origin: _Origin,
    step_graph: StepGraph,
    bindings: Mapping[str, str],
    metrics: Sequence[str],
    more: Sequence[str] = (),
) -> _Part:
    """Keep the nodes for metrics, `more` outputs and new state, and lower them."""
    options, context, loss = origin.options, step_graph.context, step_graph.loss(metrics)
    graph = context.graph
    graph.outputs[:] = [step_graph.value(name) for name in dict.fromkeys((*metrics, *more, *bindings.values()))]
    remove_unused(graph)
    unlink_gradients(graph)
    if options.differentiate:
        _infer_types(origin, step_graph)
        passes = options.passes if options.passes is not None and options.passes.suit(context.model) else None
        if passes is not None:
            passes.before(context)
        model = lower_gradients(context, recompute=options.recompute, find=lookup if passes is None else passes.find)
        expand(context)
        inline_typed_calls(context)
        if model.functions:
            inline_calls(model, names_in_use=context.names)
        _finish(context)
        if passes is not None:
            passes.after(context)
    else:
        model = context.model
        # StopGradient's derivative is not that of its body, and frameworks have their own.
        plain = [f"{domain}.{name}" for domain, name, _ in model.functions if (domain, name) not in RULES]
        inline_calls(model, plain, context.names)
        _drop_unused_inputs(model.graph)
    model.graph.inputs[:] = sorted(model.graph.inputs, key=lambda value: value.name in step_graph.state)  # state last
    inputs = [value.name or "" for value in model.graph.inputs]
    return model, Contract(
        batch=[name for name in inputs if name not in step_graph.state],
        state=[name for name in inputs if name in step_graph.state],
        update=dict(bindings),
        metrics=list(metrics),
        loss=loss,
    )


def _infer_types(origin: _Origin, step_graph: StepGraph) -> None:
    """Infer types before any rewriting, and keep those of the combined graph for other parts."""
    context, types = step_graph.context, origin.types
    if types:
        context.note_types(value for name, value in step_graph.opened.items() if name in types)
    context.fill_in_types()
    for name, value in step_graph.opened.items():
        if name and value.type is not None and value.graph is context.graph:
            types[name] = value.type, value.shape


def _finish(context: Context) -> None:
    """Drop unused nodes, inputs, initializers and imports, and simplify the rest."""
    graph = context.graph
    for node in _foreign_nodes(graph):
        if (rule := lookup_body(node)) is not None:
            replace_node(context, node, rule)
    write_out_unsafe(context)
    _shorten(context)
    _drop_unused_inputs(graph)
    used = {*STANDARD, *(node.domain for node in graph.all_nodes())}
    for domain in [domain for domain in graph.opset_imports if domain not in used]:
        graph.opset_imports.pop(domain)
    foreign = {f"`{node.domain}.{node.op_type}`" for node in _foreign_nodes(graph)}
    if foreign:
        raise UnsupportedError(
            f"the step has operators that are not standard: {', '.join(sorted(foreign))}",
            hint="export the model without them",
        )


def _foreign_nodes(graph: ir.Graph) -> list[ir.Node]:
    """Return the nodes of operators that are not of the standard."""
    nodes = graph.all_nodes()
    return [node for node in nodes if node.domain not in (*_STANDARD, KERNELS) and not is_all_reduce(node)]


def _shorten(context: Context) -> None:
    """Drop unused nodes, and simplify the rest."""
    optimize(context)
    simplify(list(context.graph))
    remove_unused(context.graph)
    put_results_last(context.graph)


def _drop_unused_inputs(graph: ir.Graph) -> None:
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            graph.initializers.pop(name)
    graph.inputs[:] = [value for value in graph.inputs if value.uses() or value.is_graph_output()]
