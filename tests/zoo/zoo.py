"""A suite of models that nobody wrote for it: each trains in its own framework, and on every route from its capture.

A row is a `Case`. The module `side_<framework>.py` makes a `Run` of the objects that a case builds: three steps of the
framework itself, and the training model that `from_*` captured before them. `tried` makes the same steps on each route
and compares losses and weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import importlib.util
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import onward
from onward.agreement.steps import with_fixed_draws, without_dropout
from onward.agreement.tolerance import ROUNDINGS, gap, largest
from onward.errors import Error
from onward.inspect import describe
from onward.model import Model
from onward.run_state.training_models import from_training_model, to_training_model

Arrays = Mapping[str, np.ndarray]

RECORD = Path(__file__).with_name("outcomes.json")
FRAMEWORKS = {"torch": "PyTorch", "keras": "Keras", "jax": "JAX"}
ROUTES = {
    "onnxruntime": "ONNX Runtime",
    "torch": "PyTorch",
    "keras": "Keras",
    "jax": "JAX",
    "tensorflow": "TensorFlow",
}
ROWS = {
    "rows_torch": "torch",
    "rows_transformers": "torch",
    "rows_timm": "torch",
    "rows_keras": "keras",
    "rows_jax": "jax",
}
"""Modules with `CASES`, and the framework that they import."""
EXACT, REFUSED, WRONG, RAW = "exact", "refused", "wrong", "raw"
STEPS = 3
NUDGES = 4
"""Runs of the framework from other last digits; two of them cannot tell how far rounding moves a deep network."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, its loss, optimizer and batch."""

    family: str
    name: str
    framework: str
    build: Callable[[], Any]
    """Function that builds objects of the framework, for its `side_<framework>.run`. Numbers are seeded before."""
    needs: tuple[str, ...] = ()
    """Modules beside the framework."""
    quick: bool = False
    """True if `make test` runs the case."""

    def __str__(self) -> str:
        return f"{self.framework}/{self.family}/{self.name}"

    @property
    def missing(self) -> list[str]:
        return [name for name in (self.framework, *self.needs) if importlib.util.find_spec(name) is None]


@dataclasses.dataclass
class Run:
    """Three steps of a framework, and the training model that was captured before them."""

    training: Model
    batch: Arrays
    """A batch by the names of the training model, for every step."""
    losses: Sequence[float]
    weights: Arrays
    """Parameters and statistics after the steps, by the names of the training model."""
    moved: Sequence[tuple[Sequence[float], Arrays]] = ()
    """Losses and weights of the same steps from weights that differ in the last digit."""
    further: Callable[[], Sequence[tuple[Sequence[float], Arrays]]] | None = None
    """More of `moved`, for networks that only some perturbations move: a ReLU that rounding switches."""
    gradients: Arrays = dataclasses.field(default_factory=dict)
    """Gradients of the first step, to find those that are rounding errors."""


def cases() -> list[Case]:
    """Return all rows of the frameworks that are installed, in the order of the table."""
    installed = [name for name, framework in ROWS.items() if importlib.util.find_spec(framework)]
    modules = [name for name in installed if Path(__file__).with_name(f"{name}.py").exists()]
    return [case for name in modules for case in importlib.import_module(name).CASES]


def targets_of(training: Model) -> list[str]:
    """Return the inputs that the loss adds, in the order of its terms."""
    return [name for term in describe(training).steps[0].loss.terms for name in term.inputs]


def without_draws(training: Model) -> Model:
    """Return a training model with fixed numbers in place of random ones, as the framework computes its steps here."""
    run = from_training_model(training)
    if "rng" not in run.state:
        return training
    state = {name: array for name, array in run.state.items() if name != "rng"}
    return to_training_model(dataclasses.replace(run, model=without_dropout(with_fixed_draws(run.model)), state=state))


def nudged(weights: Arrays, seed: int) -> dict[str, np.ndarray]:
    """Return weights that differ in the last digit; for later seeds by 1e-6, as the rounding of sums of many terms."""
    rng = np.random.default_rng(seed)
    if seed > 2:
        return {
            name: np.asarray(x * (1 + 1e-6 * rng.uniform(-1, 1, x.shape)), x.dtype) if x.dtype.kind == "f" else x
            for name, x in weights.items()
        }
    return {
        name: np.asarray(np.nextafter(x, np.where(rng.random(x.shape) < 0.5, np.inf, -np.inf).astype(x.dtype)))
        if x.dtype.kind == "f"
        else x
        for name, x in weights.items()
    }


# ---- trying ----------------------------------------------------------------------------------------------------------


def tried(case: Case, routes: Sequence[str] = tuple(ROUTES)) -> dict[str, tuple[str, str]]:
    """Return what came of a case: route -> (outcome, reason). `capture` is there if the capture itself failed."""
    side = importlib.import_module(f"side_{case.framework}")
    return compare_routes(lambda: side.run(_built(case)), routes)


def compare_routes(make: Callable[[], Run], routes: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return what came of a run: route -> (outcome, reason)."""
    with _quiet():
        run, outcome = _outcome(make)
    if run is None:
        return {"capture": outcome}
    outcomes = {}
    for route in routes:
        with _quiet():
            _, outcomes[route] = _outcome(lambda route=route: compare(run, *_ROUTES[route](run)))  # type: ignore[misc]
        gc.collect()
    return outcomes


def _built(case: Case) -> Any:
    np.random.seed(0)
    return case.build()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _outcome(attempt: Callable[[], Any]) -> tuple[Any, tuple[str, str]]:
    try:
        return attempt(), (EXACT, "")
    except onward.errors.MismatchError as error:
        return None, (WRONG, error.message)
    except Error as error:
        return None, (REFUSED if error.hint else RAW, re.sub(r"[^ (]*/(site-packages|zoo)/", "", error.message))
    except WrongError as error:
        return None, (WRONG, str(error))
    except Exception as error:
        return None, (RAW, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300])


class WrongError(Exception):
    """Losses or weights differ."""


_RELATIVE = 1e-4
_OF_LOGARITHMS = 4 * float(np.finfo(np.float32).eps)
"""Rounding of a loss near 0, such as a cross entropy: a difference of numbers that are not small."""
_CHANGE = 1e-3
"""Of the largest change of a tensor."""
_LEAST = 1e-8
"""A difference that no weight is too small for."""
_SURE = 10
"""A difference counts beyond so many times what the framework moves when its weights change in the last digit."""


def compare(run: Run, losses: Sequence[float], weights: Arrays) -> None:
    """Raise if losses, or weights after the steps, differ from the framework's."""
    try:
        _compare(run, losses, weights)
    except WrongError:
        if run.further is None:
            raise
        run.moved, run.further = [*run.moved, *run.further()], None
        _compare(run, losses, weights)


def _compare(run: Run, losses: Sequence[float], weights: Arrays) -> None:
    for step, (ours, theirs) in enumerate(zip(losses, run.losses, strict=True)):
        moved = max((abs(other[step] - theirs) for other, _ in run.moved), default=0.0)
        if not abs(ours - theirs) <= max(_RELATIVE * abs(theirs), _OF_LOGARITHMS, _SURE * moved):
            raise WrongError(f"the loss of step {step + 1} is {ours:.7g}, not {theirs:.7g}")
    top = max(map(largest, run.gradients.values()), default=0.0)
    for name, theirs in run.weights.items():
        start = run.training.array(name)
        size = np.abs(run.gradients.get(name, np.zeros(())))
        # As in onward.agreement: such a gradient is a sum that is 0, such as that of a bias before a normalization.
        is_rounding = (size > 0) & (size < ROUNDINGS * np.finfo(np.float32).eps * top)
        change = gap(theirs, start.astype(theirs.dtype))
        moved = max((gap(others[name], theirs) for _, others in run.moved), default=0.0)
        limit = max(_LEAST, _CHANGE * change, 4 * np.finfo(np.float32).eps * largest(theirs), _SURE * moved)
        ours = np.asarray(weights.get(name, start))  # constants are not among the weights
        difference = gap(np.where(is_rounding, theirs, ours), theirs)
        if not difference <= limit:
            raise WrongError(f"`{name}` is off by {difference:.3g} after a change of {change:.3g}")


# ---- routes ----------------------------------------------------------------------------------------------------------

Result = tuple[list[float], Arrays]


def _onnxruntime(run: Run) -> Result:
    with onward.engines.start(run.training, threads=1) as engine:
        batch = {name: run.batch[name] for name in engine.inputs}
        losses = [float(engine.step(batch)[engine.loss]) for _ in range(STEPS)]
        return losses, engine.state()


def _torch(run: Run) -> Result:
    import torch

    from onward.frameworks.torch.loss import takes_all

    module, optimizer, scheduler, loss = onward.to_torch(run.training, probe=False)
    inputs = [torch.from_numpy(run.batch[value.name]) for value in run.training.inputs]
    targets = [torch.from_numpy(run.batch[name]) for name in targets_of(run.training)]
    terms, losses = describe(run.training).steps[0].loss.terms, []
    for _ in range(STEPS):
        optimizer.zero_grad()
        result = module(*inputs)
        if isinstance(result, dict) and len(terms) == 1 and not takes_all(terms):
            result = result[terms[0].output]
        value = loss(result, *targets)
        value.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(float(value.detach()))
    return losses, module.arrays()


def _keras(run: Run) -> Result:
    model = onward.to_keras(run.training)
    inputs = {value.name: run.batch[value.name] for value in run.training.inputs}
    targets = [run.batch[name] for name in targets_of(run.training)]
    losses = []
    for _ in range(STEPS):
        model.reset_metrics()
        losses.append(float(model.train_on_batch(inputs, targets or None, return_dict=True)["loss"]))
    return losses, model.state()


def _jax(run: Run) -> Result:
    import jax

    carried = onward.to_jax(run.training, probe=False)
    step, state, losses = jax.jit(carried.step), carried.state, []
    for _ in range(STEPS):
        state, metrics = step(state, dict(run.batch))
        losses.append(float(metrics["loss"]))
    after = carried.training(state)
    return losses, {name: after.array(name) for name in run.weights}


def _tensorflow(run: Run) -> Result:
    import tensorflow as tf

    module = onward.to_tensorflow(run.training)
    names = {re.sub(r"\W", "_", name): name for name in run.batch}
    batch = [tf.constant(run.batch[names[spec.name]]) for spec in module.train_step.input_signature]
    losses = [float(module.train_step(*batch)["loss"]) for _ in range(STEPS)]
    return losses, {name: variable.numpy() for name, variable in module.state.items()}


_ROUTES = {"onnxruntime": _onnxruntime, "torch": _torch, "keras": _keras, "jax": _jax, "tensorflow": _tensorflow}


# ---- the record ------------------------------------------------------------------------------------------------------


def recorded() -> dict[str, dict[str, list[str]]]:
    """Return case -> route -> (outcome, reason) as tried last."""
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}


def record(outcomes: Mapping[str, Mapping[str, Sequence[str]]]) -> None:
    """Write outcomes, in the order of the rows; those of other rows stay."""
    both = {**recorded(), **outcomes}
    order = {str(case): number for number, case in enumerate(cases())}
    lines = [f"{json.dumps(key)}: {json.dumps(both[key])}" for key in sorted(both, key=lambda k: order.get(k, 0))]
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


# ---- tables ----------------------------------------------------------------------------------------------------------


def counts() -> list[tuple[str, ...]]:
    """Return framework, family, number of models and, for each route, how many are exact, of those tried."""
    families: dict[tuple[str, str], list[Mapping[str, Sequence[str]]]] = {}
    for key, outcomes in recorded().items():
        framework, family, _ = key.split("/", 2)
        families.setdefault((framework, family), []).append(outcomes)
    lines = []
    for (framework, family), of_family in families.items():
        cells = []
        for route in ROUTES:
            tries = sum(route in outcomes or "capture" in outcomes for outcomes in of_family)
            exact = str(sum(outcomes.get(route, ("",))[0] == EXACT for outcomes in of_family))
            cells.append(exact if tries == len(of_family) else f"{exact} of {tries}")
        lines.append((FRAMEWORKS[framework], family, str(len(of_family)), *cells))
    return lines


def refusals() -> list[tuple[str, ...]]:
    """Return model, routes and reason for what is not exact."""
    lines = []
    for key, outcomes in recorded().items():
        reasons: dict[str, list[str]] = {}
        for route, (way, reason) in outcomes.items():
            if way != EXACT:
                reasons.setdefault(" ".join(f"{way}: {reason}".split()), []).append(ROUTES.get(route, "all"))
        _, family, name = key.split("/", 2)
        lines += [(f"{name} ({family})", ", ".join(routes), reason) for reason, routes in reasons.items()]
    return lines
