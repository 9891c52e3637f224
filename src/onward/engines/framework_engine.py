"""Training on a framework: the interpreter executes a step with the framework's operators and its own derivative."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.differentiate.recompute import Choice
from onward.engines import FRAMEWORKS
from onward.engines.engine import Arrays, Engine, Results, no_result
from onward.engines.framework import ONLY_ON_HOST, Framework, Function, framework_of
from onward.engines.interpreter import Interpreter
from onward.engines.numpy import Numpy
from onward.engines.operator_forms import express
from onward.engines.plan import GraphPlan, plan
from onward.engines.step_errors import memory_of
from onward.errors import OutOfMemoryError, UnsupportedError
from onward.lowering.contract import Contract, contract_of
from onward.lowering.rounds import Steps
from onward.lowering.step import LoweringOptions, lower_for_engine
from onward.model import Model
from onward.model.core import as_input, is_gradient, string
from onward.model.state import carried_state
from onward.model.walk import ancestors
from onward.rules.quantization import rounds
from onward.standard import COMMON_OPSET, NEWEST_INTERPRETED, OLDEST_INTERPRETED
from onward.transform.inline import inline
from onward.transform.opset import convert_opset

Tensors = dict[str, Any]


def interpreter(model: Model, framework: Framework) -> Interpreter:
    """What executes the graph of a model on a framework. The model is changed: it must be the caller's own."""
    return Interpreter(make_plan(model, framework), framework)


def make_plan(model: Model, framework: Framework) -> GraphPlan:
    """The calls of operators that a model is: of a framework's, and on the host of others. The model is changed."""
    if not OLDEST_INTERPRETED <= model.opset <= NEWEST_INTERPRETED:
        model = convert_opset(model, min(max(model.opset, COMMON_OPSET), NEWEST_INTERPRETED))
    available = framework.operators.keys() | ONLY_ON_HOST
    model = express(model, available, framework.cannot, framework.name)
    host = Numpy.operators if framework.on_host is None else framework.on_host
    return plan(model.graph, framework.operators, host, model.opset, framework.fuses)


def array_function(engine: str, model: Model, **options: Any) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """The graph of a model as a function of arrays, lists of arrays and None, by name."""
    framework = framework_of(engine, **options)
    execute = interpreter(inline(model), framework)

    def run(inputs: Mapping[str, Any]) -> dict[str, Any]:
        results = execute({name: _map_arrays(framework.adopt, value) for name, value in inputs.items()})
        return Results({name: _map_arrays(framework.owned, value) for name, value in results.items()})

    return run


def _map_arrays(function: Callable[[Any], Any], value: Any) -> Any:
    """A function of arrays, on what may be a sequence of them, or nothing."""
    if isinstance(value, list):
        return [_map_arrays(function, item) for item in value]
    return None if value is None else function(value)


class Interpreted(Engine):
    """A step of a training model on a framework.

    With `rules` it executes the lowered step, whose gradients our rules have written, in place of the framework's own.
    """

    def __init__(
        self,
        model: Model,
        step: Steps,
        framework: Framework,
        *,
        compile: bool = True,
        rules: bool = False,
        recompute: Choice = None,
    ):
        super().__init__(model, step)
        self._refuse_state_unless(lambda dtype: framework.supports(dtype.numpy()), framework.name)
        self._framework = framework
        self._takes_tensors = framework.name in FRAMEWORKS
        self._compiled = compile
        self._rules = rules
        self._recompute = recompute
        self._state: Tensors = {
            s.name: framework.hold(s.name, s.array) for s in carried_state(self._one.model, self._one.index)
        }
        self._parts: dict[str, _StepPart] = {}
        part = self._part("step")
        self.inputs = {v.name: v for v in part.model.graph.inputs if v.name and v.name in part.contract.batch}
        self.loss = part.contract.loss or self.loss

    @classmethod
    def on(cls, engine: str, model: Model, step: Steps = None, *, rules: bool = False, **options: Any) -> Interpreted:
        """Start on the framework of that name. Options are those of this class, and of the framework."""
        own = {name: options.pop(name) for name in ("compile", "recompute") if name in options}
        rules = rules or engine not in FRAMEWORKS or rounds(model)
        if own.get("recompute") is not None and not rules:
            raise UnsupportedError(
                "what is computed twice is decided by our rules, not by the framework's own derivative",
                hint="do without `recompute`, or take our rules: `rules=True`",
            )
        made: Interpreted
        if engine in FRAMEWORKS:
            options = {"on_compile": lambda text: made.on_compile(text), **options}
        framework = cls.make_framework(engine, model, step, options)
        made = cls(model, step, framework, rules=rules, **own)
        return made

    @classmethod
    def make_framework(cls, engine: str, model: Model, step: Steps, options: dict[str, Any]) -> Framework:
        """The framework of that name, for a training model."""
        return framework_of(engine, **options)

    def step(self, batch: Arrays | Sequence[Arrays]) -> Mapping[str, np.ndarray]:
        part = self._part("step")
        new, results = part.run(self._state, self._fitting(batch, self.inputs))
        self._state = self._state | new
        return FetchedResults(self._framework, {name: results[name] for name in part.contract.metrics})

    def gradients(self, batch: Arrays) -> dict[str, np.ndarray]:
        part = self._part("gradients")
        _, results = part.run(self._state, self._fitting(batch, part.contract.batch))
        return Results({x: self._framework.owned(results[name]) for name, x in part.contract.gradients.items()})

    def evaluate(self, batch: Arrays) -> dict[str, np.ndarray]:
        part = self._part("evaluation")
        _, results = part.run(self._state, self._fitting(batch, part.contract.batch))
        names = (*part.contract.metrics, *part.contract.outputs)
        return Results({name: _map_arrays(self._framework.owned, results[name]) for name in names})

    def state(self) -> dict[str, np.ndarray]:
        return Results({name: self._framework.owned(tensor) for name, tensor in self._state.items()})

    def load_state(self, state: Mapping[str, Any]) -> None:
        given = self._fitting_state(state)
        self._state = self._state | {name: self._framework.hold(name, value) for name, value in given.items()}

    def close(self) -> None:
        self._state = {}
        self._parts.clear()

    def _part(self, name: str) -> _StepPart:
        if name not in self._parts:
            lowered = lower_for_engine(self.model, self._steps, name, LoweringOptions(self._recompute, self._rules))
            self._parts[name] = _StepPart(lowered, self._framework, self._compiled, self._runs_as_it_is(name))
        return self._parts[name]

    def _runs_as_it_is(self, part: str) -> Callable[[Arrays], bool]:
        """Whether a part is not compiled for a batch, where that can be had: gradients are looked at now and then."""
        if part == "gradients":
            return lambda batch: True
        return OddBatches(lambda: self.rows if part == "step" else None)


Computation = Callable[[Tensors], tuple[Tensors, Tensors]]


def computation(lowered: Model, framework: Framework) -> Computation:
    """A part of a training step: (state and batch) -> (what is new of the state, results to be shown)."""
    contract = contract_of(lowered)
    is_step = contract.part == "step"
    update: dict[str, str] = contract.update if is_step else {}
    is_chosen = is_step and contract.loss in {value.name for value in lowered.graph.outputs}
    if is_chosen:
        update = keep_unless_finite(lowered, contract)
    execute = interpreter(lowered, framework)
    shown = [*contract.metrics, *contract.outputs, *contract.gradients]

    def compute(given: Tensors) -> tuple[Tensors, Tensors]:
        results = execute(given)
        new = {name: framework.place(results[value]) for name, value in update.items()}
        if not is_chosen:
            new = {name: framework.copy(tensor) for name, tensor in new.items()}
        return new, {name: _apart(framework, results[name]) if is_step else results[name] for name in shown}

    return compute


def _apart(framework: Framework, value: Any) -> Any:
    """A metric in memory of its own: it is looked at later, when state and batch may have been written again."""
    return np.array(value) if isinstance(value, np.ndarray) else framework.copy(value)


class _StepPart:
    """One part of a training step: (state, constants, batch) -> (what is new of the state, results to be shown)."""

    def __init__(self, lowered: Model, framework: Framework, compiled: bool, as_it_is: Callable[[Arrays], bool]):
        self.model = lowered
        self.contract = contract_of(lowered)
        self._framework = framework
        self._constants = {name: framework.hold(name, array) for name, array in _large_constants(lowered).items()}
        of_all = computation(lowered, framework)

        def compute(state: Tensors, constants: Tensors, batch: Tensors) -> tuple[Tensors, Tensors]:
            return of_all(state | constants | batch)

        compile = framework.compile_step if self.contract.part == "step" else framework.compile
        compiled = compiled and self._can_be_compiled()
        self._plain = compute
        self._compute = compile(compute) if compiled else compute
        self._take = framework.feed if compiled else framework.adopt
        self._as_it_is = as_it_is if compiled and not framework.compiles_operators else lambda batch: False

    def _can_be_compiled(self) -> bool:
        """Whether it is worth the trouble, and possible: what is of a type that a framework lacks stays on the host."""
        if self._framework.name not in FRAMEWORKS:
            return True
        inputs = (value for value in self.model.graph.inputs if value.name in self.contract.batch)
        other = next((v for v in inputs if v.dtype is not None and not self._framework.supports(v.dtype.numpy())), None)
        if other is not None:
            reason = f"{self._framework.name} has no tensors of the type of `{other.name}`, {other.dtype}"
        elif (nodes := len(self.model.graph)) > self._framework.most_nodes and not self._framework.only_compiled:
            reason = f"to compile its {nodes:,} nodes would take longer than is won"
        else:
            return True
        if self._framework.only_compiled:
            raise UnsupportedError(
                f"the step cannot be compiled, as a mesh needs it: {reason}", hint="do without a mesh"
            )
        warnings.warn(f"the step is not compiled: {reason}", stacklevel=4)
        return False

    def run(self, state: Tensors, batch: Arrays) -> tuple[Tensors, Tensors]:
        given = {name: batch[name] for name in self.contract.batch}
        if self._as_it_is(given):
            with contextlib.suppress(OutOfMemoryError):  # what is compiled needs less
                return self._run(self._plain, self._framework.adopt, state, given)
        return self._run(self._compute, self._take, state, given)

    def _run(
        self, compute: Function, take: Callable[[Any], Any], state: Tensors, batch: Arrays
    ) -> tuple[Tensors, Tensors]:
        with memory_of(self._framework.name):
            new, results = compute(state, self._constants, {name: take(value) for name, value in batch.items()})
            return new, results


def if_finite(framework: Framework, loss: Any, new: Tensors, old: Tensors) -> Tensors:
    """The new state, or the old one where the loss is not a number: decided on the device, so that nothing waits."""
    op = framework.operators
    with framework.active():
        bad = op["Or"](op["IsNaN"](loss), op["IsInf"](loss, detect_negative=1, detect_positive=1))
        return {name: op["Where"](bad, old[name], tensor) for name, tensor in new.items()}


_LARGE = 1024


def _large_constants(model: Model) -> dict[str, np.ndarray]:
    """Frozen weights, which are made inputs of the graph: what is large is not to be built into compiled code."""
    graph = model.graph
    tensors = {name: value.const_value for name, value in graph.initializers.items()}
    large = [name for name, x in tensors.items() if x is not None and x.dtype.is_floating_point() and x.size >= _LARGE]
    return {name: as_input(graph, name).numpy() for name in large}


class FetchedResults(Mapping[str, np.ndarray]):
    """Metrics that are fetched from the device when they are looked at, so that a step need not wait for them."""

    def __init__(self, framework: Framework, tensors: Tensors):
        self._framework = framework
        self._tensors = tensors
        self._fetched: dict[str, np.ndarray] = {}

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._tensors:
            raise no_result(name, self)
        if name not in self._fetched:
            with memory_of(self._framework.name):  # a step that nobody has waited for may fail only now
                self._fetched[name] = self._framework.owned(self._tensors[name])
        return self._fetched[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


# ---- updates that are kept only if the loss is finite ----------------------------------------------------------------

# What is new of the state where the loss is a number, and the old state where it is not: as nodes of the step.
#
# What is computed of new state, as a parameter is of new moments, then reads the choice and not what was chosen from.
# Otherwise an engine that writes new state over the old would have to keep a copy of the old, to compute it again from.


def keep_unless_finite(model: Model, contract: Contract) -> dict[str, str]:
    """Write it into a step, and say which output replaces which state."""
    graph = model.graph
    outputs = {value.name: value for value in graph.outputs}
    loss = outputs[contract.loss]
    fixed = _leading_to(graph, (outputs[name] for name in (*contract.metrics, *contract.outputs)))
    truth = ir.TensorType(ir.DataType.BOOL)
    bad = _append(graph, "Or", [_append(graph, name, [loss], truth) for name in ("IsNaN", "IsInf")], truth)
    old = {value.name: value for value in graph.inputs}
    kept = {}
    for name, output in contract.update.items():
        value = outputs[output]
        users = [(user, index) for user, index in value.uses() if user.graph is graph and user not in fixed]
        made = _append(graph, "Where", [bad, old[name], value], value.type, value.shape)
        for user, index in users:
            user.replace_input_with(index, made)
        graph.outputs.append(made)
        kept[name] = made.name or ""
    graph.sort()
    return kept


def _leading_to(graph: ir.Graph, shown: Iterable[ir.Value]) -> set[ir.Node]:
    """The nodes that results are computed by, and what is differentiated: these stay as they are."""
    ends = set(shown)
    gradients = set(filter(is_gradient, graph))
    made = {value.name: value for node in graph for value in node.outputs}
    for node in gradients:
        ends.update(value for value in (*node.inputs, made.get(string(node, "y"))) if value is not None)
    return ancestors(ends)[0] | gradients


def _append(
    graph: ir.Graph, operator: str, inputs: list[ir.Value], type: ir.TypeProtocol | None, shape: ir.Shape | None = None
) -> ir.Value:
    node = ir.node(operator, inputs)
    graph.append(node)
    (made,) = node.outputs
    made.type, made.shape = type, shape
    return made


# ---- batches that a step is not compiled for -------------------------------------------------------------------------

# Batches that a step is not compiled for: the last one of an epoch is smaller than the others, and comes once in it.
#
# To compile takes as long for it as for all others together. It runs operator by operator, which gives the same numbers
# up to rounding.

Shapes = dict[str, tuple[int, ...]]
_IN_A_ROW = 3
"""So many of the same size are no rest: whoever trains has gone on to smaller batches."""


class OddBatches:
    """Says of each batch whether it is one. `rows` is how many a whole batch has, where that is known beforehand.

    Then what becomes of a batch depends on its size alone, as it must where a run goes on in another process. Else a
    batch is odd that is like an earlier one but for fewer rows.
    """

    def __init__(self, rows: Callable[[], int | None]):
        self._rows = rows
        self._whole: list[Shapes] = []
        self._last: Shapes | None = None
        self._count = 0

    def __call__(self, batch: Mapping[str, Any]) -> bool:
        shapes = {name: tuple(array.shape) for name, array in batch.items()}
        if (rows := self._rows()) is not None:
            return max((shape[0] for shape in shapes.values() if shape), default=rows) < rows
        self._count = self._count + 1 if shapes == self._last else 1
        self._last = shapes
        if shapes in self._whole:
            return False
        if self._count < _IN_A_ROW and any(_has_fewer_rows(shapes, whole) for whole in self._whole):
            return True
        self._whole.append(shapes)
        return False


def _has_fewer_rows(shapes: Shapes, whole: Shapes) -> bool:
    """Whether the first axes are smaller, where they differ, and the others are the same."""
    pairs = [(shape, whole[name]) for name, shape in shapes.items()]
    return any(shape != other for shape, other in pairs) and all(
        shape[1:] == other[1:] and shape[:1] <= other[:1] for shape, other in pairs
    )
