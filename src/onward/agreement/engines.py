"""Running the same steps on every engine."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated

import numpy as np

from onward.agreement.data import inputs_of_type
from onward.agreement.divergence import Way, first_difference
from onward.agreement.gradcheck.inputs import GIVE, Given, fit_inputs
from onward.agreement.noise import distances_without_noise
from onward.agreement.report import Report, Row
from onward.agreement.tolerance import Arrays, farthest
from onward.arguments import Count, Range, Seed, checked
from onward.engines import ENGINES, FRAMEWORKS, Engine, is_installed, start
from onward.errors import Error, UnknownNameError, UnsupportedError, near_or_first
from onward.lowering.contract import contract_of
from onward.lowering.step import lower_for_framework
from onward.model import Model, Source, load
from onward.model.state import states


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
) -> Report:
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
            raise UnknownNameError(f"there is no engine `{name}`", hint=near_or_first(name, ENGINES))
    names = engines if engines is not None else [name for name in ENGINES if is_installed(name)]
    ways = [Way(name, rules) for name in names for rules in _rules(name)]
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
    limit = _default_tolerance(model, step) if tolerance is None else tolerance
    reference = _nearest_to_all(runs)
    rows = [
        _compare(model, step, way, reference, runs, batches, limit)
        if way in runs
        else Row(way.engine, way.derivative, "cannot", note=refusals[way].message)
        for way in ways
    ]
    unknown = tuple(name for name in batches[0] if name not in given)
    return Report(tuple(rows), f"{reference.engine} ({reference.derivative})", updates, limit, unknown)


def _rules(engine: str) -> tuple[bool, ...]:
    return (False, True) if engine in FRAMEWORKS else (True,)


def _load(model: Model, step: int, way: Way, compile: bool) -> Engine:
    if way.engine in FRAMEWORKS:
        return start(model, step, engine=way.engine, rules=way.rules, compile=compile)
    return start(model, step, engine=way.engine)


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
    for found in inputs_of_type(whole, {**given, **state}, seed):
        yield {name: {**given, **found}[name] for value in whole.graph.inputs if (name := value.name or "") in names}


# ---- the comparison --------------------------------------------------------------------------------------------------


def _default_tolerance(model: Model, step: int) -> float:
    parameters = [s.value.dtype for s in states(model, step) if s.role == "parameter"]
    return 1e-9 if all(dtype is not None and dtype.bitwidth == 64 for dtype in parameters) else 1e-4


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
) -> Row:
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
    return Row(
        way.engine,
        way.derivative,
        "agrees" if wrong is None else "differs",
        tuple(run.losses),
        max(metrics),
        after[-1],
        run.seconds,
        difference=difference,
    )
