"""Rounds: several steps as one, in which each runs as often as given, on the state that the runs
before it left.

    one = as_one_step(model, "discriminator:2,generator")

The algorithm of a round holds those of its runs, one after the other. Nodes of the inference graph
are copied for a run if an earlier run changed the state that they depend on; all others are shared.
The first runs of all steps take the same batch, the second ones another, and so on.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import onnx_ir as ir

from onward.build import Builder, Expr, Names
from onward.errors import InvalidModelError, RecipeError, UnknownNameError, UnsupportedError, suggest
from onward.lowering.step_graph import StepGraph
from onward.model import Model, Step
from onward.model.core import (
    all_names,
    append_inputs,
    is_gradient,
    link_gradients,
    rename_in_gradients,
    require_tensor,
    string,
    strings,
    unlink_gradients,
    values,
)
from onward.model.state import carried_state, with_metadata
from onward.model.walk import ancestors, descendants, read_by
from onward.transform.context import Context

T = TypeVar("T")

Steps = int | str | Mapping[str, int] | None
"""A step by number or name; several with counts, such as `"discriminator:2,generator"`; or None: all
steps, with the counts in the file."""

LOSS = "loss"
"""The sum of the losses of all steps."""


@dataclasses.dataclass(frozen=True)
class OneStep:
    """A model and the index of one of its steps, which may be a round."""

    model: Model
    index: int
    batches: int = 1
    """Number of batches that it takes."""
    loss: str | None = None
    """The metric that is minimized; None if the step itself has it."""
    origins: Mapping[str, tuple[int, str]] = dataclasses.field(default_factory=dict)
    """State of a round -> its step and its name there, for state of a single step."""


def as_one_step(model: Model, steps: Steps = None, *, together: bool = True) -> OneStep:
    """Return the selected step or round; not `together`, each step runs once on the initial state."""
    times = runs_per_step(model, steps)
    if list(times.values()) == [1]:
        return OneStep(model, next(iter(times)))
    if not together:
        times = dict.fromkeys(times, 1)
    round_ = _Round(model, together)
    for index, count in times.items():
        for number in range(count):
            round_.run(index, number)
    return round_.finish(times)


def runs_per_step(model: Model, steps: Steps) -> dict[int, int]:
    """Return the selected steps by index, in order, with the number of runs of each."""
    if steps is None:
        if not model.steps:
            model.step()  # raises, with a hint
        return {index: _times(step) for index, step in enumerate(model.steps)}
    if isinstance(steps, int):
        model.step(steps)
        return {steps % len(model.steps): 1}
    counts = steps if isinstance(steps, Mapping) else dict(map(_named_times, steps.split(",")))
    runs = {_index(model, name): count for name, count in counts.items()}
    if len(runs) < len(counts) or not runs or any(not isinstance(n, int) or n < 1 for n in runs.values()):
        raise RecipeError(
            f"`{steps}` does not name each step once, with a count from 1", hint='write `"discriminator:2,generator"`'
        )
    return runs


def step_names(model: Model) -> list[str]:
    """Return the names of steps: those of their algorithms, or numbers where these are not unique."""
    names = [step.algorithm.name or "" for step in model.steps]
    return [name if name and names.count(name) == 1 else str(index) for index, name in enumerate(names)]


def input_of_run(name: str, number: int) -> str:
    """Return the name of an input in a run of a step: runs after the first have their own."""
    return name if number == 0 else f"{name}/{number + 1}"


def join_batches(batches: Iterable[Mapping[str, T]]) -> dict[str, T]:
    """Return the batches of a round as one, with the names of its inputs."""
    return {input_of_run(name, number): value for number, batch in enumerate(batches) for name, value in batch.items()}


def _times(step: Step) -> int:
    times = step.fact("train.times")
    return times if isinstance(times, int) and times > 0 else 1


def _named_times(text: str) -> tuple[str, int]:
    name, colon, times = text.strip().rpartition(":")
    return (name, int(times)) if colon and times.isdecimal() else (text.strip(), 1)


def _index(model: Model, name: str) -> int:
    names = step_names(model)
    if name in names:
        return names.index(name)
    if name.isdecimal() and int(name) < len(names):
        return int(name)
    raise UnknownNameError(
        f"the model has no step `{name}`",
        hint=suggest(name, names)
        or f"the steps are {', '.join(names)}{'; for the length of a run: `--epochs`' * name.isdecimal()}",
    )


class _Round:
    """A round under construction, on a copy of `model`."""

    def __init__(self, model: Model, together: bool):
        self._together = together
        self._labels = step_names(model)
        self._losses = [_loss_of(model, index) for index in range(len(model.steps))]
        self._model = model.copy()
        self._steps, self._model.steps = self._model.steps, []
        self._graph = self._model.graph
        link_gradients(self._graph)
        self._names = Names(all_names(self._graph))
        self._algorithm = ir.Graph([], [], nodes=[], name="round")
        self._inputs: dict[str, ir.Value] = {}
        self._shared = dict(self._graph.initializers)
        """Initializer of the inference graph -> its current value."""
        self._first: dict[int, dict[str, ir.Value]] = {}
        """Step -> its own initializers -> their values before the round."""
        self._own: dict[int, dict[str, ir.Value]] = {}
        """Step -> its own initializers -> their current values."""
        self._metrics: dict[int, dict[str, list[ir.Value]]] = {}
        self._forward: dict[str, str] = {}

    def run(self, index: int, number: int) -> None:
        """Append a run of a step."""
        step = self._steps[index]
        if index not in self._own:
            self._first[index] = {name: self._register(v) for name, v in step.algorithm.initializers.items()}
            self._own[index] = dict(self._first[index])
        copies = self._copy_nodes(index, number)
        metrics = self._metrics.setdefault(index, {})
        for name in (output.name or "" for output in step.algorithm.outputs):
            if name not in step.update.values():
                metrics.setdefault(name, []).append(copies[name])
        forward = step.fact("train.forward")
        for trained, plain in forward.items() if isinstance(forward, dict) else ():
            if trained in copies:
                self._forward[copies[trained].name or ""] = plain
        if self._together:
            new = {state: copies[name] for state, name in step.update.items()}
            for state, value in new.items():
                (self._shared if state in self._shared else self._own[index])[state] = value

    def finish(self, times: Mapping[int, int]) -> OneStep:
        unlink_gradients(self._graph)
        op = Builder(self._algorithm, opset=self._model.opset, names=self._names)
        loss = self._output_metrics(op)
        step = Step(self._algorithm)
        origins = {v.name or "": (i, name) for i, own in self._first.items() for name, v in own.items()}
        pairs = [(first, self._shared[name]) for name, first in self._graph.initializers.items()]
        pairs += [(first, self._own[i][name]) for i, own in self._first.items() for name, first in own.items()]
        for first, current in pairs:
            if current is not first:
                new = op.Identity(current).like(first).named(f"{first.name}/new")
                self._algorithm.outputs.append(new.value)
                step.update[first.name or ""] = new.name
        step.metadata["train.forward"] = json.dumps(self._forward)
        self._initialize(step, times, {origin: name for name, origin in origins.items()})
        self._model.steps = [step]
        return OneStep(self._model, 0, max(times.values()), loss, origins)

    # ---- a run ---------------------------------------------------------------------------------------------------

    def _copy_nodes(self, index: int, number: int) -> dict[str, ir.Value]:
        """Append the nodes of a run; return its values, by their names in the model."""
        step, label = self._steps[index], f"{self._labels[index]}.{number + 1}"
        replaced = self._replacements(index, number)
        changed = descendants(self._graph, replaced)
        nodes = [node for node in self._graph if any(output in changed for output in node.outputs)] + [*step.algorithm]
        inside = {output for node in nodes for output in node.outputs}
        by_name = {value.name or "": value for g in (self._graph, step.algorithm) for value in values(g)}
        outside = {v for node in nodes for v in read_by(node) if v not in inside and by_name.get(v.name or "") is v}
        view = ir.GraphView(list(outside), [], nodes=nodes)
        copy = view.clone()
        for old, new in zip(view.inputs, copy.inputs, strict=True):
            new.replace_all_uses_with(replaced.get(old, old))
        for node, copied in zip(nodes, copy, strict=True):
            copied.name = self._names.fresh(f"{label}/{node.name or node.op_type}")
            for old, output in zip(node.outputs, copied.outputs, strict=True):
                output.name = self._names.fresh(f"{label}/{old.name}") if old.name else ""
                replaced[old] = output
        current = {name: replaced.get(value, value) for name, value in by_name.items()}
        unlink_gradients(copy)
        self._differentiate(copy, current)
        copies = list(copy)
        copy.remove(copies)
        self._algorithm.extend(copies)
        return current

    def _replacements(self, index: int, number: int) -> dict[ir.Value, ir.Value]:
        """Return the values that a run reads in place of inputs and of state."""
        step = self._steps[index]
        replaced = {
            v: self._shared[name] for name, v in self._graph.initializers.items() if self._shared[name] is not v
        }
        replaced |= {value: self._own[index][name] for name, value in step.algorithm.initializers.items()}
        inputs = [value for value in self._graph.inputs if not value.is_initializer()] if number else []
        return replaced | {value: self._input(value, number) for value in (*inputs, *step.algorithm.inputs)}

    def _differentiate(self, run: ir.Graph, current: Mapping[str, ir.Value]) -> None:
        """Let the Gradients of a run name its own values.

        State that earlier runs changed becomes an input of them: gradients do not flow through
        other updates.
        """
        rename_in_gradients(run, {name: value.name or "" for name, value in current.items()})
        by_name = {value.name: value for value in current.values()}
        state = [v for of in (self._shared, *self._own.values()) for v in of.values() if v.producer() is not None]
        for node in filter(is_gradient, run.all_nodes()):
            xs, zs, y = strings(node, "xs"), strings(node, "zs"), by_name.get(string(node, "y"))
            _, needed = ancestors([y] if y is not None else [])
            constants = [v for v in dict.fromkeys(state) if v in needed and v.name not in (*xs, *zs)]
            node.attributes["zs"] = ir.AttrStrings("zs", [*zs, *(value.name or "" for value in constants)])
            append_inputs(node, constants)

    # ---- inputs, state and metrics -----------------------------------------------------------------------------------

    def _input(self, value: ir.Value, number: int) -> ir.Value:
        """Return an input of a run, shared with the other steps that read one of that name."""
        name = input_of_run(value.name or "", number)
        if name not in self._inputs:
            if self._names.fresh(name) != name:
                raise UnsupportedError(
                    f"`{name}`, the name of the input `{value.name}` in a round, is the name of another value",
                    hint=f"rename the value: `onward rename MODEL {name}=NEW`",
                )
            self._inputs[name] = ir.Value(name=name, type=value.type, shape=value.shape)
            self._algorithm.inputs.append(self._inputs[name])
        elif self._inputs[name].type != value.type:
            raise InvalidModelError(
                f"the input `{value.name}` has different types in several steps", hint="rename it in one of them"
            )
        return self._inputs[name]

    def _register(self, value: ir.Value) -> ir.Value:
        """Add an initializer of a single step to those of the round."""
        tensor = require_tensor(value)
        name = self._names.fresh(value.name or "")
        if name != value.name:
            tensor = with_metadata(tensor, dict(tensor.metadata_props))
            tensor.name = name
        initializer = ir.Value(name=name, type=value.type, shape=value.shape, const_value=tensor)
        self._algorithm.register_initializer(initializer)
        return initializer

    def _output_metrics(self, op: Builder) -> str | None:
        """Output the metrics of the last run of each step, and the sum of all losses; return the
        name of the sum.

        The loss of a step is the mean over its runs.
        """
        total: Expr | None = None
        for index, metrics in self._metrics.items():
            for name, per_run in metrics.items():
                metric = op.Identity(per_run[-1]).like(per_run[-1])
                if name == self._losses[index]:
                    metric = _mean(op, per_run)
                    loss = op.ReduceSum(metric, keepdims=0)
                    total = loss if total is None else total + op.CastLike(loss, total)
                self._algorithm.outputs.append(metric.named(f"{self._labels[index]}/{name}").value)
        if total is None:
            return None
        self._algorithm.outputs.append(op.Identity(total).named(LOSS).value)
        return self._algorithm.outputs[-1].name

    def _initialize(self, step: Step, times: Mapping[int, int], state_names: Mapping[tuple[int, str], str]) -> None:
        """Join the initializations of all steps."""
        names, graph = Names(), ir.Graph([], [], nodes=[], name="initialization")
        for index in times:
            source = self._steps[index]
            if source.initialization is None:
                continue
            copy = source.initialization.clone()
            by_name = {value.name: value for value in values(copy)}
            for value in by_name.values():
                value.name = names.fresh(f"{self._labels[index]}/{value.name}")
            nodes = list(copy)
            copy.remove(nodes)
            graph.extend(nodes)
            for name in list(copy.initializers):
                graph.register_initializer(copy.initializers.pop(name))
            for state, output in source.reset.items():
                if output in by_name:
                    step.reset[state_names.get((index, state), state)] = by_name[output].name or ""
        step.initialization = graph if step.reset else None


def _mean(op: Builder, terms: Sequence[ir.Value]) -> Expr:
    total = op(terms[0])
    for value in terms[1:]:
        total = total + op(value)
    return (total / len(terms) if len(terms) > 1 else op.Identity(total)).like(terms[0])


def _loss_of(model: Model, index: int) -> str | None:
    step_graph = StepGraph(Context(Model(model.combined(index))), model.step(index), carried_state(model, index))
    return step_graph.loss(step_graph.metrics)
