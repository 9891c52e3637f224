"""Training on a framework: the interpreter runs a step with its operators and derivative."""

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
    """Return an executor for the graph of a model. Changes the model."""
    return Interpreter(make_plan(model, framework), framework)


def make_plan(model: Model, framework: Framework) -> GraphPlan:
    """Return the graph of a model as calls of a framework's operators and of the host's. Changes the model."""
    if not OLDEST_INTERPRETED <= model.opset <= NEWEST_INTERPRETED:
        model = convert_opset(model, min(max(model.opset, COMMON_OPSET), NEWEST_INTERPRETED))
    available = framework.operators.keys() | ONLY_ON_HOST
    model = express(model, available, framework.cannot, framework.name)
    host = Numpy.operators if framework.on_host is None else framework.on_host
    return plan(model.graph, framework.operators, host, model.opset, framework.fuses)


def array_function(engine: str, model: Model, **options: Any) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return the graph of a model as a function of arrays, lists of arrays and None, by name."""
    framework = framework_of(engine, **options)
    execute = interpreter(inline(model), framework)

    def run(inputs: Mapping[str, Any]) -> dict[str, Any]:
        results = execute({name: _map_arrays(framework.adopt, value) for name, value in inputs.items()})
        return Results({name: _map_arrays(framework.owned, value) for name, value in results.items()})

    return run


def _map_arrays(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to an array, or to each item of a list. None stays None."""
    if isinstance(value, list):
        return [_map_arrays(function, item) for item in value]
    return None if value is None else function(value)


class Interpreted(Engine):
    """Engine on a framework. With `rules`, gradients come from Onward's rules, not from the framework."""

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
        self._programs: dict[str, _Program] = {}
        program = self._program("step")
        self.inputs = {v.name: v for v in program.model.graph.inputs if v.name and v.name in program.contract.batch}
        self.loss = program.contract.loss or self.loss

    @classmethod
    def on(cls, engine: str, model: Model, step: Steps = None, *, rules: bool = False, **options: Any) -> Interpreted:
        """Start an engine on a framework by name. Options are those of this class and of the framework."""
        own = {name: options.pop(name) for name in ("compile", "recompute") if name in options}
        rules = rules or engine not in FRAMEWORKS or rounds(model)
        if own.get("recompute") is not None and not rules:
            raise UnsupportedError(
                f"`recompute` has no effect on the derivative of {engine}",
                hint="use Onward's rules: `rules=True`; or leave out `recompute`",
            )
        running: Interpreted
        if engine in FRAMEWORKS:
            options = {"on_compile": lambda text: running.on_compile(text), **options}
        framework = cls.make_framework(engine, model, step, options)
        running = cls(model, step, framework, rules=rules, **own)
        return running

    @classmethod
    def make_framework(cls, engine: str, model: Model, step: Steps, options: dict[str, Any]) -> Framework:
        return framework_of(engine, **options)

    def step(self, batch: Arrays | Sequence[Arrays]) -> Mapping[str, np.ndarray]:
        program = self._program("step")
        new, results = program.run(self._state, self._fitting(batch, self.inputs))
        self._state = self._state | new
        return FetchedResults(self._framework, {name: results[name] for name in program.contract.metrics})

    def gradients(self, batch: Arrays) -> dict[str, np.ndarray]:
        program = self._program("gradients")
        _, results = program.run(self._state, self._fitting(batch, program.contract.batch))
        return Results({x: self._framework.owned(results[name]) for name, x in program.contract.gradients.items()})

    def evaluate(self, batch: Arrays) -> dict[str, np.ndarray]:
        program = self._program("evaluation")
        _, results = program.run(self._state, self._fitting(batch, program.contract.batch))
        names = (*program.contract.metrics, *program.contract.outputs)
        return Results({name: _map_arrays(self._framework.owned, results[name]) for name in names})

    def state(self) -> dict[str, np.ndarray]:
        return Results({name: self._framework.owned(tensor) for name, tensor in self._state.items()})

    def load_state(self, state: Mapping[str, Any]) -> None:
        arrays = self._fitting_state(state)
        self._state = self._state | {name: self._framework.hold(name, array) for name, array in arrays.items()}

    def close(self) -> None:
        self._state = {}
        self._programs.clear()

    def _program(self, part: str) -> _Program:
        if part not in self._programs:
            lowered = lower_for_engine(self.model, self._steps, part, LoweringOptions(self._recompute, self._rules))
            is_odd = OddBatches(lambda: self.rows if part == "step" else None)
            # Gradients are rarely requested, so compiling them does not pay.
            is_eager = (lambda batch: True) if part == "gradients" else is_odd
            self._programs[part] = _Program(lowered, self._framework, self._compiled, is_eager)
        return self._programs[part]


Computation = Callable[[Tensors], tuple[Tensors, Tensors]]


def computation(lowered: Model, framework: Framework) -> Computation:
    """Return a part of a step as a function: state and batch -> (new state, other results)."""
    contract = contract_of(lowered)
    is_step = contract.part == "step"
    update: dict[str, str] = contract.update if is_step else {}
    shows_loss = contract.loss in {value.name for value in lowered.graph.outputs}
    is_selected = is_step and shows_loss and not contract.skips_overflows
    if is_selected:
        update = select_finite(lowered, contract)
    execute = interpreter(lowered, framework)
    shown = [*contract.metrics, *contract.outputs, *contract.gradients]

    def separate(value: Any) -> Any:
        # Metrics are read later, when state and batch may have been overwritten.
        return np.array(value) if isinstance(value, np.ndarray) else framework.copy(value)

    def compute(inputs: Tensors) -> tuple[Tensors, Tensors]:
        results = execute(inputs)
        new = {name: framework.place(results[value]) for name, value in update.items()}
        if not is_selected:
            new = {name: framework.copy(tensor) for name, tensor in new.items()}
        return new, {name: separate(results[name]) if is_step else results[name] for name in shown}

    return compute


class _Program:
    """A part of a step: (state, constants, batch) -> (new state, other results)."""

    def __init__(self, lowered: Model, framework: Framework, compiled: bool, is_eager: Callable[[Arrays], bool]):
        self.model = lowered
        self.contract = contract_of(lowered)
        self._framework = framework
        self._constants = {name: framework.hold(name, array) for name, array in _large_constants(lowered).items()}
        compute_from = computation(lowered, framework)

        def compute(state: Tensors, constants: Tensors, batch: Tensors) -> tuple[Tensors, Tensors]:
            return compute_from(state | constants | batch)

        compile = framework.compile_step if self.contract.part == "step" else framework.compile
        compiled = compiled and self._can_be_compiled()
        self._plain = compute
        self._compute = compile(compute) if compiled else compute
        self._take = framework.feed if compiled else framework.adopt
        self._is_eager = is_eager if compiled and not framework.compiles_operators else lambda batch: False

    def _can_be_compiled(self) -> bool:
        """True if all inputs can be on the device, and the graph is small enough. Warn if not."""
        if self._framework.name not in FRAMEWORKS:
            return True
        inputs = (value for value in self.model.graph.inputs if value.name in self.contract.batch)
        other = next((v for v in inputs if v.dtype is not None and not self._framework.supports(v.dtype.numpy())), None)
        if other is not None:
            reason = f"{self._framework.name} has no tensors of the type of `{other.name}`, {other.dtype}"
        elif (nodes := len(self.model.graph)) > self._framework.most_nodes and not self._framework.only_compiled:
            reason = f"compiling its {nodes:,} nodes would take longer than it saves"
        else:
            return True
        if self._framework.only_compiled:
            raise UnsupportedError(
                f"the step cannot be compiled, which a mesh requires: {reason}", hint="leave out `mesh` (`--mesh`)"
            )
        warnings.warn(f"the step is not compiled: {reason}", stacklevel=4)
        return False

    def run(self, state: Tensors, batch: Arrays) -> tuple[Tensors, Tensors]:
        arrays = {name: batch[name] for name in self.contract.batch}
        if self._is_eager(arrays):
            with contextlib.suppress(OutOfMemoryError):  # compiled code needs less memory
                return self._run(self._plain, self._framework.adopt, state, arrays)
        return self._run(self._compute, self._take, state, arrays)

    def _run(
        self, compute: Function, take: Callable[[Any], Any], state: Tensors, batch: Arrays
    ) -> tuple[Tensors, Tensors]:
        with memory_of(self._framework.name):
            new, results = compute(state, self._constants, {name: take(value) for name, value in batch.items()})
            return new, results


def if_finite(framework: Framework, loss: Any, new: Tensors, old: Tensors) -> Tensors:
    """Return the new state, or the old one if the loss is not finite. Selects on the device, without a wait."""
    op = framework.operators
    with framework.active():
        bad = op["Or"](op["IsNaN"](loss), op["IsInf"](loss, detect_negative=1, detect_positive=1))
        return {name: op["Where"](bad, old[name], tensor) for name, tensor in new.items()}


_LARGE = 1024
"""Elements of a constant that becomes an input, so that compiled code does not contain it."""


def _large_constants(model: Model) -> dict[str, np.ndarray]:
    """Make large frozen weights inputs of the graph, and return their values."""
    graph = model.graph
    tensors = {name: value.const_value for name, value in graph.initializers.items()}
    large = [name for name, x in tensors.items() if x is not None and x.dtype.is_floating_point() and x.size >= _LARGE]
    return {name: as_input(graph, name).numpy() for name in large}


class FetchedResults(Mapping[str, np.ndarray]):
    """Metrics that are fetched from the device when they are read, so that a step does not wait."""

    def __init__(self, framework: Framework, tensors: Tensors):
        self._framework = framework
        self._tensors = tensors
        self._fetched: dict[str, np.ndarray] = {}

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._tensors:
            raise no_result(name, self)
        if name not in self._fetched:
            with memory_of(self._framework.name):  # the step runs asynchronously and may fail only now
                self._fetched[name] = self._framework.owned(self._tensors[name])
        return self._fetched[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


# ---- updates that are kept only if the loss is finite ----------------------------------------------------------------

# Where(loss is not finite, old state, new state), as nodes of the step.
#
# Nodes that read new state, as a parameter's update reads new moments, then read the selection. If
# they read the new state itself, an engine that writes it over the old state would need a copy of
# the old state.


def select_finite(model: Model, contract: Contract) -> dict[str, str]:
    """Add the selection to a step. Return state -> the output that replaces it."""
    graph = model.graph
    outputs = {value.name: value for value in graph.outputs}
    loss = outputs[contract.loss]
    fixed = _leading_to(graph, (outputs[name] for name in (*contract.metrics, *contract.outputs)))
    truth = ir.TensorType(ir.DataType.BOOL)
    bad = _append(graph, "Or", [_append(graph, name, [loss], truth) for name in ("IsNaN", "IsInf")], truth)
    old = {value.name: value for value in graph.inputs}
    update = {}
    for name, output in contract.update.items():
        value = outputs[output]
        users = [(user, index) for user, index in value.uses() if user.graph is graph and user not in fixed]
        selected = _append(graph, "Where", [bad, old[name], value], value.type, value.shape)
        for user, index in users:
            user.replace_input_with(index, selected)
        graph.outputs.append(selected)
        update[name] = selected.name or ""
    graph.sort()
    return update


def _leading_to(graph: ir.Graph, shown: Iterable[ir.Value]) -> set[ir.Node]:
    """Return nodes that keep reading new state: those of shown results and of gradients."""
    ends = set(shown)
    gradients = set(filter(is_gradient, graph))
    values = {value.name: value for node in graph for value in node.outputs}
    for node in gradients:
        ends.update(value for value in (*node.inputs, values.get(string(node, "y"))) if value is not None)
    return ancestors(ends)[0] | gradients


def _append(
    graph: ir.Graph, operator: str, inputs: list[ir.Value], type: ir.TypeProtocol | None, shape: ir.Shape | None = None
) -> ir.Value:
    node = ir.node(operator, inputs)
    graph.append(node)
    (output,) = node.outputs
    output.type, output.shape = type, shape
    return output


# ---- batches that a step is not compiled for -------------------------------------------------------------------------

# The last batch of an epoch is smaller than the others, and comes once per epoch. Compiling the
# step for it takes as long as for all others. It runs operator by operator, with the same numbers
# up to rounding.

Shapes = dict[str, tuple[int, ...]]
_IN_A_ROW = 3
"""Consecutive batches of one size that are not a remainder: the training has switched to that size."""


class OddBatches:
    """Predicate that is true for batches smaller than a full one.

    If `rows()` returns the rows of a full batch, the answer depends only on the size of the batch,
    so that a resumed run gets the same answers. Else a batch is odd if it differs from an earlier
    one only in having fewer rows.
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
    """True if shapes differ, and only in smaller first axes."""
    pairs = [(shape, whole[name]) for name, shape in shapes.items()]
    return any(shape != other for shape, other in pairs) and all(
        shape[1:] == other[1:] and shape[:1] <= other[:1] for shape, other in pairs
    )
