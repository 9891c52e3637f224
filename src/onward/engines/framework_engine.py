"""Training on a framework: the interpreter executes a step with the framework's operators and its own derivative."""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from onward.differentiate.recompute import Choice
from onward.engines import FRAMEWORKS
from onward.engines.engine import Arrays, Engine, Results, check_options, no_result
from onward.engines.expression import express
from onward.engines.failures import memory_of
from onward.engines.finite_updates import keep_unless_finite
from onward.engines.framework import Framework, Function
from onward.engines.host import ONLY_ON_HOST
from onward.engines.interpreter import Interpreter
from onward.engines.numpy import Numpy
from onward.engines.odd_batches import OddBatches
from onward.engines.plan import Plan, plan
from onward.errors import OutOfMemoryError, UnsupportedError
from onward.lowering.contract import contract_of
from onward.lowering.rounds import Steps
from onward.lowering.step import Manner, lower_for_engine
from onward.model import Model
from onward.model.core import as_input
from onward.model.state import carried_state
from onward.rules.quantization import rounds
from onward.standard import COMMON_OPSET, NEWEST_INTERPRETED, OLDEST_INTERPRETED
from onward.transform.inline import inline
from onward.transform.opset import convert_opset

Tensors = dict[str, Any]


def interpreter(model: Model, framework: Framework) -> Interpreter:
    """What executes the graph of a model on a framework. The model is changed: it must be the caller's own."""
    return Interpreter(make_plan(model, framework), framework)


def make_plan(model: Model, framework: Framework) -> Plan:
    """The calls of operators that a model is: of a framework's, and on the host of others. The model is changed."""
    if not OLDEST_INTERPRETED <= model.opset <= NEWEST_INTERPRETED:
        model = convert_opset(model, min(max(model.opset, COMMON_OPSET), NEWEST_INTERPRETED))
    available = framework.operators.keys() | ONLY_ON_HOST
    model = express(model, available, framework.cannot, framework.name)
    host = Numpy.operators if framework.on_host is None else framework.on_host
    return plan(model.graph, framework.operators, host, model.opset, framework.fuses)


def framework_of(engine: str, **options: Any) -> Framework:
    """The framework of that name; options are its own."""
    made = framework_class(engine)
    check_options(engine, options, made)
    return made(**options)


def framework_class(engine: str) -> type[Framework]:
    module, name = _FRAMEWORKS[engine]
    try:
        found: type[Framework] = getattr(importlib.import_module(module), name)
        return found
    except ModuleNotFoundError as error:
        if str(error.name).startswith("onward"):
            raise
        raise UnsupportedError(f"{engine} is not installed", hint=f"pip install 'onward[{engine}]'") from error


_FRAMEWORKS = {
    "numpy": ("onward.engines.numpy", "Numpy"),
    "torch": ("onward.engines.torch", "Torch"),
    "jax": ("onward.engines.jax", "Jax"),
    "tensorflow": ("onward.engines.tensorflow", "TensorFlow"),
    "keras": ("onward.engines.keras", "Keras"),
}


def array_function(engine: str, model: Model, **options: Any) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """The graph of a model as a function of arrays, lists of arrays and None, by name."""
    framework = framework_of(engine, **options)
    execute = interpreter(inline(model), framework)

    def run(inputs: Mapping[str, Any]) -> dict[str, Any]:
        results = execute({name: _map_arrays(_placing(framework), value) for name, value in inputs.items()})
        return Results({name: _map_arrays(framework.owned, value) for name, value in results.items()})

    return run


def _placing(framework: Framework) -> Callable[[Any], Any]:
    return lambda array: framework.tensor(array) if framework.supports(array.dtype) else array


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
        compiled: bool = True,
        rules: bool = False,
        recompute: Choice = None,
    ):
        super().__init__(model, step)
        self._refuse_state_unless(lambda dtype: framework.supports(dtype.numpy()), framework.name)
        self._framework = framework
        self._takes_tensors = framework.name in FRAMEWORKS
        self._compiled = compiled
        self._rules = rules
        self._recompute = recompute
        self._state: Tensors = {
            s.name: framework.hold(s.name, s.array) for s in carried_state(self._one.model, self._one.index)
        }
        self._parts: dict[str, _Part] = {}
        part = self._part("step")
        self.inputs = {v.name: v for v in part.model.graph.inputs if v.name and v.name in part.contract.batch}
        self.loss = part.contract.loss or self.loss

    @classmethod
    def on(
        cls,
        engine: str,
        model: Model,
        step: Steps = None,
        *,
        compile: bool = True,
        rules: bool = False,
        recompute: Choice = None,
        **options: Any,
    ) -> Interpreted:
        """On the framework of that name; further options are its own."""
        rules = rules or engine not in FRAMEWORKS or rounds(model)
        if recompute is not None and not rules:
            raise UnsupportedError(
                "what is computed twice is decided by our rules, not by the framework's own derivative",
                hint="do without `recompute`, or take our rules: `rules=True`",
            )
        made: Interpreted
        if engine in FRAMEWORKS:
            options = {"on_compile": lambda text: made.on_compile(text), **options}
        framework = cls.make_framework(engine, model, step, options)
        made = cls(model, step, framework, compiled=compile, rules=rules, recompute=recompute)
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

    def _part(self, name: str) -> _Part:
        if name not in self._parts:
            lowered = lower_for_engine(self.model, self._steps, name, Manner(self._recompute, self._rules))
            self._parts[name] = _Part(lowered, self._framework, self._compiled, self._runs_as_it_is(name))
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


class _Part:
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
