"""Running the same steps on every engine."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, NamedTuple

import numpy as np
import onnx_ir as ir

from onward.agreement.inputs import GIVE, Given, fit_inputs, inputs_of_type
from onward.agreement.report import Difference, EngineReport, EngineRow
from onward.agreement.tolerance import Arrays, distance, distances_without_noise, farthest
from onward.arguments import Count, Range, Seed, checked
from onward.engines import ENGINES, FRAMEWORKS, Engine, function, is_installed, start
from onward.errors import Error, UnknownNameError, UnsupportedError, suggest_or_list
from onward.lowering.contract import contract_of
from onward.lowering.step import LoweringOptions, lower_for_engine, lower_for_framework
from onward.model import Model, Source, load
from onward.model.core import values
from onward.model.state import states
from onward.transform.types import fill_in_types


@checked(steps="updates")
def verify(
    training: Source,
    *,
    engines: Sequence[str] | None = None,
    updates: Count = 5,
    inputs: Given = None,
    tolerance: Annotated[float, Range(least=0)] | None = None,
    seed: Seed = 0,
    step: int = 0,
    compile: bool = False,
    on_start: Callable[[str], None] = lambda name: None,
) -> EngineReport:
    """Run the same steps of a training model on all engines that are installed, or on those named, and compare.

    PyTorch, JAX and TensorFlow run it twice: with their own derivative and with ours. The reference is the engine that
    is nearest to the others, so that the odd one out is named, whichever it is. Where an engine differs, the first
    value that does is found by running the step again with all values as outputs.

        print(onward.verify("training.onnx", engines=["onnxruntime", "torch"]))

    - `training`: a training model
    - `engines`: those that are compared; all that are installed unless given
    - `updates`: how many steps are made
    - `inputs`: a dict of arrays or the path of an .npz file: one batch, used in each step; what it lacks is made up
    - `tolerance`: relative to the largest element of a tensor; 1e-4 unless given, 1e-9 for models in float64
    - `seed`: what is made up is drawn from it
    - `step`: which one, of a training model with several
    - `compile`: whether frameworks compile the step
    - `on_start`: told the name of each engine before it runs
    """
    model = load(training)
    model.step(step)  # which refuses a model without training
    for name in engines or ():
        if name not in ENGINES:
            raise UnknownNameError(f"there is no engine `{name}`", hint=suggest_or_list(name, ENGINES))
    names = engines if engines is not None else [name for name in ENGINES if is_installed(name)]
    ways = [Way(name, rules) for name in names for rules in ((False, True) if name in FRAMEWORKS else (True,))]
    known = [*model.inputs, *(value for one in model.steps[step:][:1] for value in one.algorithm.inputs)]
    given = fit_inputs(inputs, {value.name or "": value for value in known})
    batches: list[Arrays] = []
    runs: dict[Way, _Run] = {}
    refusals: dict[Way, Error] = {}
    for way in ways:
        on_start(f"{way.engine} ({way.derivative})")
        try:
            with _load(model, step, way, compile) as engine:
                batches = batches or batches_made_up(model, step, engine, given, updates, seed)
                runs[way] = _run(engine, batches)
        except Error as error:
            refusals[way] = error
    if not runs:
        reasons = dict.fromkeys(error.message for error in refusals.values())
        hints = dict.fromkeys(error.hint for error in refusals.values() if error.hint)
        raise UnsupportedError("no engine can run this model:\n" + "\n".join(reasons), hint="; ".join(hints) or None)
    if tolerance is None:
        parameters = [s.value.dtype for s in states(model, step) if s.role == "parameter"]
        tolerance = 1e-9 if all(dtype is not None and dtype.bitwidth == 64 for dtype in parameters) else 1e-4
    reference = _nearest_to_all(runs)
    rows = [
        _compare(model, step, way, reference, runs, batches, tolerance)
        if way in runs
        else EngineRow(way.engine, way.derivative, "cannot", note=refusals[way].message)
        for way in ways
    ]
    unknown = tuple(name for name in batches[0] if name not in given)
    return EngineReport(tuple(rows), f"{reference.engine} ({reference.derivative})", updates, tolerance, unknown)


def _load(model: Model, step: int, way: Way, compile: bool) -> Engine:
    options = {"rules": way.rules, "compile": compile} if way.engine in FRAMEWORKS else {}
    return start(model, step, engine=way.engine, **options)


# ---- the steps -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Run:
    losses: list[float]
    metrics: list[Arrays]
    states: list[Arrays]
    """Before each step, and after the last."""
    seconds: float


def _run(engine: Engine, batches: Sequence[Arrays]) -> _Run:
    metrics: list[Arrays] = []
    found: list[Arrays] = [engine.state()]
    seconds = 0.0
    for batch in batches:
        start = time.perf_counter()
        metrics.append({name: np.array(value) for name, value in engine.step(batch).items()})
        seconds += time.perf_counter() - start
        found.append(engine.state())
    return _Run([float(step[engine.loss]) for step in metrics if engine.loss in step], metrics, found, seconds)


def batches_made_up(model: Model, step: int, engine: Engine, given: Arrays, steps: int, seed: int) -> list[Arrays]:
    """Return a batch for each step: what is given, and for the rest other numbers each time, of shapes that work."""
    kept = {name: array for name, array in given.items() if name in engine.inputs}
    failure: Exception | None = None
    whole = lower_for_framework(model, step)
    can_evaluate = engine.inputs.keys() >= {value.name for value in model.inputs}
    for number, batch in enumerate(_candidates(whole, model, step, kept, seed)):
        try:
            if not can_evaluate or np.isfinite(engine.evaluate(batch).get(engine.loss, 0.0)).all():
                others = (_candidates(whole, model, step, kept, seed + i) for i in range(1, steps))
                return [batch, *(next(itertools.islice(other, number, None)) for other in others)]
        except Error as error:
            failure = error
    raise UnsupportedError("the model does not run on inputs that are made up", hint=GIVE) from failure


def _candidates(whole: Model, model: Model, step: int, given: Arrays, seed: int) -> Iterator[Arrays]:
    """Batches for the step as a whole, of other shapes each."""
    names = contract_of(whole).batch
    state = {s.name: s.value.const_value.numpy() for s in states(model, step) if s.value.const_value is not None}
    class_axes = {
        name: term["options"].get("axis", 1)
        for term in model.step(step).fact("train.loss") or ()
        if term["options"].get("target") == "probabilities"
        for name in term["inputs"]
    }
    for found in inputs_of_type(whole, {**given, **state}, seed):
        for name in class_axes.keys() & found.keys():
            # Losses of frameworks have another gradient where the targets of a row do not sum to 1.
            weights = np.exp(found[name])
            found[name] = (weights / weights.sum(class_axes[name], keepdims=True)).astype(found[name].dtype)
        yield {name: {**given, **found}[name] for value in whole.graph.inputs if (name := value.name or "") in names}


# ---- the comparison --------------------------------------------------------------------------------------------------


def _nearest_to_all(runs: dict[Way, _Run]) -> Way:
    """Of those with losses that are numbers. Each engine has one vote, however it derives."""
    sound = {way: run for way, run in runs.items() if np.isfinite(run.losses).all()} or runs

    def distance(way: Way) -> float:
        nearest: dict[str, float] = {}
        for other, run in sound.items():
            if other.engine != way.engine:
                far = farthest(sound[way].states[-1], run.states[-1])
                nearest[other.engine] = min(far, nearest.get(other.engine, far))
        return sum(nearest.values())

    return min(sound, key=distance)


def _compare(
    model: Model, index: int, way: Way, reference: Way, runs: dict[Way, _Run], batches: Sequence[Arrays], limit: float
) -> EngineRow:
    run, other = runs[way], runs[reference]
    metrics = [farthest(a, b) for a, b in zip(run.metrics, other.metrics, strict=True)]
    after = [farthest(a, b) for a, b in zip(run.states[1:], other.states[1:], strict=True)]
    if not max(after) <= limit:
        with _load(model, index, way, False) as engine, _load(model, index, reference, False) as expected:
            after = distances_without_noise(engine, expected, other.states, batches)
    wrong = next((i for i, far in enumerate(zip(metrics, after, strict=True)) if not max(far) <= limit), None)
    difference = None
    if wrong is not None:
        inputs = {**other.states[wrong], **batches[wrong]}
        difference = first_difference(model, index, way, reference, wrong + 1, inputs, limit)
    return EngineRow(
        way.engine,
        way.derivative,
        "agrees" if wrong is None else "differs",
        tuple(run.losses),
        max(metrics),
        after[-1],
        run.seconds,
        difference=difference,
    )


# ---- the first value that two engines compute differently ------------------------------------------------------------


class Way(NamedTuple):
    """An engine, and whether it takes our rules for the derivative."""

    engine: str
    rules: bool

    @property
    def derivative(self) -> str:
        return "rules" if self.rules else "own"


def first_difference(
    model: Model, index: int, way: Way, reference: Way, step: int, inputs: Arrays, tolerance: float
) -> Difference | None:
    """The first value of the step, from the same state and batch, in the order of the graph."""
    found, expected = (_values(model, index, which, inputs) for which in (way, reference))
    for name in found:
        if name in expected and (far := distance(found[name], expected[name])) > tolerance:
            magnitude, other = (float(np.abs(x[name].astype(np.float64)).max(initial=0)) for x in (found, expected))
            return Difference(name, step, way.engine, reference.engine, magnitude, other, far)
    return None


def _values(model: Model, index: int, way: Way, inputs: Arrays) -> dict[str, np.ndarray]:
    lowered = lower_for_engine(model, index, options=LoweringOptions(differentiate=way.rules))
    graph = lowered.graph
    fill_in_types(lowered, values(graph))
    graph.outputs[:] = dict.fromkeys((*_tensors(graph), *graph.outputs))
    given = {value.name: inputs[value.name] for value in graph.inputs if value.name and value.name in inputs}
    results = function(lowered, engine=way.engine)(given)
    return {name: value for name, value in results.items() if isinstance(value, np.ndarray)}


def _tensors(graph: ir.Graph) -> Iterable[ir.Value]:
    produced = (value for node in graph for value in node.outputs if value.name)
    return (value for value in produced if isinstance(value.type, ir.TensorType))
