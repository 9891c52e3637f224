"""`verify`: the same steps on every engine."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, NamedTuple

import numpy as np
import onnx_ir as ir

from onward.agreement.inputs import GIVE, Given, fit_inputs, inputs_of_type
from onward.agreement.report import Difference, EngineReport, EngineRow
from onward.agreement.tolerance import Arrays, distance, distances_without_noise, farthest
from onward.arguments import Count, Range, Seed, checked
from onward.engines import ENGINES, FRAMEWORKS, Engine, check_engine, function, is_installed, start
from onward.errors import Error, UnsupportedError
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
    """Run the same steps of a training model on several engines and compare them.

    PyTorch, JAX and TensorFlow run it twice: with their autodiff and with Onward's gradient rules. The reference is the
    engine that is nearest to the others, so that an outlier is named even if it comes first. For an engine that
    differs, the step runs again with all values as outputs to find the first value that differs.

        print(onward.verify("training.onnx", engines=["onnxruntime", "torch"]))

    - `training`: a training model
    - `engines`: names of engines (default: all that are installed)
    - `updates`: number of steps
    - `inputs`: one batch for all steps: a dict of arrays or the path of an .npz file. Missing inputs are drawn
    - `tolerance`: relative to the largest element of a tensor (default: 1e-4; 1e-9 for float64 models)
    - `seed`: for missing inputs
    - `step`: index of the step in the training model
    - `compile`: compile the step in PyTorch, JAX and TensorFlow
    - `on_start`: called with the name of each engine before it runs
    """
    model = load(training)
    algorithm = model.step(step).algorithm
    for name in engines or ():
        check_engine(name)
    names = engines if engines is not None else [name for name in ENGINES if is_installed(name)]
    variants = [Variant(name, rules) for name in names for rules in ((False, True) if name in FRAMEWORKS else (True,))]
    arrays = fit_inputs(inputs, {value.name or "": value for value in (*model.inputs, *algorithm.inputs)})
    batches: list[Arrays] = []
    runs: dict[Variant, _Run] = {}
    refusals: dict[Variant, Error] = {}
    for variant in variants:
        on_start(str(variant))
        try:
            with _load(model, step, variant, compile) as engine:
                batches = batches or batches_made_up(model, step, engine, arrays, updates, seed)
                runs[variant] = _run(engine, batches)
        except Error as error:
            refusals[variant] = error
    if not runs:
        reasons = dict.fromkeys(error.message for error in refusals.values())
        hints = dict.fromkeys(error.hint for error in refusals.values() if error.hint)
        raise UnsupportedError("no engine runs this model:\n" + "\n".join(reasons), hint="; ".join(hints) or None)
    if tolerance is None:
        parameters = [s.value.dtype for s in states(model, step) if s.role == "parameter"]
        tolerance = 1e-9 if all(dtype is not None and dtype.bitwidth == 64 for dtype in parameters) else 1e-4
    reference = _nearest_to_all(runs)
    rows = [
        _compare(model, step, variant, reference, runs, batches, tolerance)
        if variant in runs
        else EngineRow(variant.engine, variant.derivative, "cannot", note=refusals[variant].message)
        for variant in variants
    ]
    return EngineReport(
        tuple(rows), str(reference), updates, tolerance, tuple(n for n in batches[0] if n not in arrays)
    )


class Variant(NamedTuple):
    """An engine with its own autodiff or with Onward's gradient rules."""

    engine: str
    rules: bool

    @property
    def derivative(self) -> str:
        return "rules" if self.rules else "own"

    def __str__(self) -> str:
        return f"{self.engine} ({self.derivative})"


def _load(model: Model, step: int, variant: Variant, compile: bool) -> Engine:
    options = {"rules": variant.rules, "compile": compile} if variant.engine in FRAMEWORKS else {}
    return start(model, step, engine=variant.engine, **options)


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
    states: list[Arrays] = [engine.state()]
    seconds = 0.0
    for batch in batches:
        start = time.perf_counter()
        metrics.append({name: np.array(value) for name, value in engine.step(batch).items()})
        seconds += time.perf_counter() - start
        states.append(engine.state())
    return _Run([float(step[engine.loss]) for step in metrics if engine.loss in step], metrics, states, seconds)


def batches_made_up(model: Model, step: int, engine: Engine, given: Arrays, steps: int, seed: int) -> list[Arrays]:
    """Return a batch for each step: the inputs given, and new random numbers for the rest."""
    own = {name: array for name, array in given.items() if name in engine.inputs}
    failure: Exception | None = None
    whole = lower_for_framework(model, step)
    can_evaluate = engine.inputs.keys() >= {value.name for value in model.inputs}
    for number, batch in enumerate(_candidates(whole, model, step, own, seed)):
        try:
            if not can_evaluate or np.isfinite(engine.evaluate(batch).get(engine.loss, 0.0)).all():
                others = (_candidates(whole, model, step, own, seed + i) for i in range(1, steps))
                return [batch, *(next(itertools.islice(other, number, None)) for other in others)]
        except Error as error:
            failure = error
    raise UnsupportedError("the model does not run on random inputs", hint=GIVE) from failure


def _candidates(whole: Model, model: Model, step: int, given: Arrays, seed: int) -> Iterator[Arrays]:
    """Yield batches of several shapes for the lowered step `whole`."""
    names = contract_of(whole).batch
    state = {s.name: s.value.const_value.numpy() for s in states(model, step) if s.value.const_value is not None}
    class_axes = {
        name: term["options"].get("axis", 1)
        for term in model.step(step).fact("train.loss") or ()
        if term["options"].get("target") == "probabilities"
        for name in term["inputs"]
    }
    for arrays in inputs_of_type(whole, {**given, **state}, seed):
        for name in class_axes.keys() & arrays.keys():
            # If the targets of a row do not sum to 1, frameworks have other gradients of the loss than Onward.
            weights = np.exp(arrays[name])
            arrays[name] = (weights / weights.sum(class_axes[name], keepdims=True)).astype(arrays[name].dtype)
        yield {name: {**given, **arrays}[name] for value in whole.graph.inputs if (name := value.name or "") in names}


# ---- the comparison --------------------------------------------------------------------------------------------------


def _nearest_to_all(runs: dict[Variant, _Run]) -> Variant:
    """Return the variant with finite losses that is nearest to the other engines, of which each has one vote."""
    sound = {variant: run for variant, run in runs.items() if np.isfinite(run.losses).all()} or runs

    def total_distance(variant: Variant) -> float:
        nearest: dict[str, float] = {}
        for other, run in sound.items():
            if other.engine != variant.engine:
                far = farthest(sound[variant].states[-1], run.states[-1])
                nearest[other.engine] = min(far, nearest.get(other.engine, far))
        return sum(nearest.values())

    return min(sound, key=total_distance)


def _compare(
    model: Model,
    index: int,
    variant: Variant,
    reference: Variant,
    runs: dict[Variant, _Run],
    batches: Sequence[Arrays],
    limit: float,
) -> EngineRow:
    run, other = runs[variant], runs[reference]
    metrics = [farthest(a, b) for a, b in zip(run.metrics, other.metrics, strict=True)]
    after = [farthest(a, b) for a, b in zip(run.states[1:], other.states[1:], strict=True)]
    if not max(after) <= limit:
        with _load(model, index, variant, False) as engine, _load(model, index, reference, False) as expected:
            after = distances_without_noise(engine, expected, other.states, batches)
    wrong = next((i for i, far in enumerate(zip(metrics, after, strict=True)) if not max(far) <= limit), None)
    difference = None
    if wrong is not None:
        inputs = {**other.states[wrong], **batches[wrong]}
        difference = _first_difference(model, index, variant, reference, wrong + 1, inputs, limit)
    verdict = "agrees" if wrong is None else "differs"
    numbers = (tuple(run.losses), max(metrics), after[-1], run.seconds)
    return EngineRow(variant.engine, variant.derivative, verdict, *numbers, difference=difference)


# ---- the first value that two engines compute differently ------------------------------------------------------------


def _first_difference(
    model: Model, index: int, variant: Variant, reference: Variant, step: int, inputs: Arrays, tolerance: float
) -> Difference | None:
    """Return the first value of the step that differs, in the order of the graph."""
    actual, expected = (_compute_all(model, index, which, inputs) for which in (variant, reference))
    for name in actual:
        if name in expected and (far := distance(actual[name], expected[name])) > tolerance:
            magnitude, other = (float(np.abs(x[name].astype(np.float64)).max(initial=0)) for x in (actual, expected))
            return Difference(name, step, variant.engine, reference.engine, magnitude, other, far)
    return None


def _compute_all(model: Model, index: int, variant: Variant, inputs: Arrays) -> dict[str, np.ndarray]:
    """Return all tensors of a step by name."""
    lowered = lower_for_engine(model, index, options=LoweringOptions(differentiate=variant.rules))
    graph = lowered.graph
    fill_in_types(lowered, values(graph))
    produced = (value for node in graph for value in node.outputs if value.name)
    tensors = (value for value in produced if isinstance(value.type, ir.TensorType))
    graph.outputs[:] = dict.fromkeys((*tensors, *graph.outputs))
    arrays = {value.name: inputs[value.name] for value in graph.inputs if value.name and value.name in inputs}
    results = function(lowered, engine=variant.engine)(arrays)
    return {name: value for name, value in results.items() if isinstance(value, np.ndarray)}
