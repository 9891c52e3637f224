"""Dependencies in the combined graph of a step: on the batch, on gradients, on random numbers."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

import onnx_ir as ir

from onward.errors import InvalidModelError
from onward.model import Step
from onward.model.core import is_gradient, string, strings, values
from onward.model.state import State
from onward.model.walk import ancestors, descendants, source_of
from onward.transform.context import Context

_HINT = "`onward check MODEL` lists all faults"


class StepGraph:
    """Combined graph of a step, with the state as inputs; Gradients read the values that they name."""

    def __init__(self, context: Context, step: Step, state: Sequence[State]):
        self.context, self.graph = context, context.graph
        self.by_name = {value.name: value for value in values(self.graph)}
        self.opened = dict(self.by_name)
        """Values of the combined graph by name, before any change."""
        self.state = {s.name: self.by_name[s.name] for s in state}
        self._step = step
        self.random = {self.state[s.name] for s in state if s.role == "rng"}
        """State of random generators."""
        self.bindings = dict(step.update)
        """State -> its new value."""
        own = {output.name for node in step.gradients() for output in node.outputs if output.name}
        self._gradients = [n for n in self.graph if is_gradient(n) and any(v.name in own for v in n.outputs)]
        """Gradients of the training; others are results of the model."""
        losses = [string(node, "y") for node in self._gradients]
        new = set(self.bindings.values()) - set(losses)
        self.metrics = [v.name or "" for v in step.algorithm.outputs if v.name not in new]
        """Other outputs of the algorithm, and the loss, even if it is also a new state."""
        variables = [strings(node, "xs") for node in self._gradients]
        for name in itertools.chain(self.bindings.values(), self.metrics, losses, *variables):
            self.value(name)
        for name in self.bindings:
            if name not in self.state:
                raise InvalidModelError(f"the training updates `{name}`, which is not an initializer", hint=_HINT)
        self._copy_shared_outputs()
        self._added: str | None = None
        if self.last_gradients() and self.loss(self.metrics) is None:
            self._add_loss_metric()

    def _add_loss_metric(self) -> None:
        """Add the sum of the differentiated value as a metric: an algorithm need not return it."""
        op = self.context.builder()
        name = op.names.fresh("loss")
        loss = op.ReduceSum(self.value(string(self.last_gradients()[0], "y")), keepdims=0).value
        loss.name = name
        self.by_name[name] = loss
        self.metrics.append(name)
        self._added = name

    def _copy_shared_outputs(self) -> None:
        """Copy new values that are inputs, constants, metrics or the new value of another state.

        A runtime neither returns an input in memory of the caller, nor an output twice.
        """
        taken = {self.value(name) for name in self.metrics}
        for state, new in self.bindings.items():
            value = self.value(new)
            if value.producer() is None or value in taken:
                op = self.context.builder()
                value = op.Identity(value).like(value).value
                value.name = self.bindings[state] = op.names.fresh(f"{state}/new")
                self.by_name[value.name] = value
            taken.add(value)

    def value(self, name: str) -> ir.Value:
        if name not in self.by_name:
            raise InvalidModelError(f"the training names `{name}`, which does not exist", hint=_HINT)
        return self.by_name[name]

    # ---- gradients ---------------------------------------------------------------------------------------------------

    def last_gradients(self) -> list[ir.Node]:
        """Return the `Gradient` nodes of the training that no other one differentiates."""
        needed, _ = ancestors(self.value(string(node, "y")) for node in self._gradients)
        return [node for node in self._gradients if node not in needed]

    def results(self) -> list[tuple[str, ir.Value]]:
        """Return pairs of a variable and its gradient, which gets the same type."""
        nodes = self.last_gradients()
        pairs = [pair for node in nodes for pair in zip(strings(node, "xs"), node.outputs, strict=False)]
        for x, output in pairs:
            output.type, output.shape = self.value(x).type, self.value(x).shape
        return [(x, output) for x, output in pairs if output.name]

    def loss(self, metrics: Sequence[str]) -> str | None:
        """Return the metric that is minimized: the differentiated value, or the last before it."""
        targets = [self.value(string(node, "y")) for node in self.last_gradients()[:1]]
        _, needed = ancestors(targets)
        candidates = {value: name for name in metrics if (value := self.value(name)) in needed}
        added = self._added if self._added in metrics else None
        return next((candidates[value] for value in reversed(values(self.graph)) if value in candidates), added)

    # ---- results of each part ----------------------------------------------------------------------------------------

    def of_forward(self) -> tuple[dict[str, str], list[str]]:
        """Return the bindings and metrics of the forward pass, which depend on the batch and on no
        gradient.

        A random generator that the loss draws from belongs to it too.
        """
        nodes = self.last_gradients()
        derived, from_batch = self._derived(nodes), self.from_batch()
        parameters = {self.by_name.get(x) for node in nodes for x in strings(node, "xs")}
        _, needed = ancestors(self.value(string(node, "y")) for node in nodes)

        def is_forward(new: str, state: str | None = None) -> bool:
            value, old = self.value(new), self.state.get(state or "")
            used = (old in needed and old not in parameters) or (state is not None and source_of(value) in needed)
            return value not in derived and (value in from_batch or used)

        bindings = {state: new for state, new in self.bindings.items() if is_forward(new, state)}
        return bindings, [name for name in self.metrics if is_forward(name)]

    def of_evaluation(self) -> list[str]:
        """Return the metrics that depend on the batch, but not on gradients or random numbers."""
        derived, from_batch = self._derived(self.last_gradients()), self.from_batch()

        def is_deterministic(value: ir.Value) -> bool:
            return value in from_batch and value not in derived and self.random.isdisjoint(ancestors([value])[1])

        return [name for name in self.metrics if is_deterministic(self.value(name))]

    def predictions(self) -> list[str]:
        """Return the values that losses compare with targets: outputs, and inner values such as logits."""
        names = [fact.get("output") for fact in self._step.fact("train.loss") or [] if fact.get("inputs")]
        return [name for name in names if name in self.by_name]

    def _derived(self, nodes: Sequence[ir.Node]) -> Collection[ir.Value]:
        return descendants(self.graph, [output for node in nodes for output in node.outputs])

    def from_batch(self) -> Collection[ir.Value]:
        """Return all values that depend on the batch."""
        state = set(self.state.values())
        return descendants(self.graph, [value for value in self.graph.inputs if value not in state])

    # ---- inference ---------------------------------------------------------------------------------------------------

    def switch_to_inference(self) -> None:
        """Replace values of the forward pass in training mode by those of inference."""
        pairs = self._step.fact("train.forward")
        op = self.context.builder()
        self.graph.outputs.clear()  # others are set later
        for trained, plain in pairs.items() if isinstance(pairs, dict) else ():
            old, new = self.by_name.get(trained), self.by_name.get(str(plain))
            if old is None or new is None:
                continue
            if trained in self.metrics:  # which keep their names
                old.name = op.names.fresh(f"{trained}/trained")
                self.by_name[trained] = op.Identity(new).like(new).value
                self.by_name[trained].name = trained
            old.replace_all_uses_with(new)
