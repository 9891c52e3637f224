"""`plan`: from a model and a number of devices to what each of them holds, and what they tell each other."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onward.engines.distributed.deepspeed_config import accumulated_batches
from onward.errors import ArgumentError, ExternalDataError, UnknownNameError, UnsupportedError, WriteError
from onward.inspect.formatting import quantity
from onward.model import Model, Source, load
from onward.model.serde import load_references, load_shapes, stamp
from onward.model.sharding import Sharding
from onward.model.storage import write_file
from onward.options import PlanOptions, RecipeOptions, options_of, with_options
from onward.planning.strategies import OTHER_NAMES, STRATEGIES, Estimate, Estimator, Machines, degrees
from onward.planning.workload import Workload, dims_of
from onward.recipe import prepare
from onward.transform import declare


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a training takes, strategy by strategy.

    `to_json` has the names of the fields as keys, at every level, but for the sharding.
    """

    machines: Machines
    model: Mapping[str, Any]
    """Parameters and what they take, what a pass of one device computes and keeps, and what was taken for granted."""
    estimates: Mapping[str, Estimate]
    refused: Mapping[str, str]
    """Strategies that cannot be, and why."""

    @property
    def recommended(self) -> str | None:
        """The quickest of those that fit, by samples in a second; if times are not known, the simplest."""
        fitting = [each for each in self.estimates.values() if each.fits is not False]
        best = min(fitting, key=lambda each: (each.step_seconds or 0) / (each.samples or 1), default=None)
        return best.strategy if best is not None else None

    def sharding(self, strategy: str | None = None) -> Sharding:
        """How tensors are divided; by the strategy that is recommended unless one is named."""
        least = min(self.estimates, key=lambda name: self.estimates[name].memory.total)
        name = OTHER_NAMES.get(strategy or "", strategy) or self.recommended or least
        if name not in self.estimates:
            raise UnknownNameError(f"there is no plan for `{name}`", hint=f"there are {', '.join(self.estimates)}")
        return self.estimates[name].sharding

    def to_json(self) -> dict[str, Any]:
        """The same as plain data."""
        estimates = [_plain(each) for each in self.estimates.values()]
        machines = dataclasses.asdict(self.machines)
        return {
            "machines": machines,
            "model": dict(self.model),
            "estimates": estimates,
            "refused": dict(self.refused),
            "recommended": self.recommended,
        }

    def __str__(self) -> str:
        from onward.planning.render import render

        return render(self)


def _plain(each: Estimate) -> dict[str, Any]:
    found = {f.name: getattr(each, f.name) for f in dataclasses.fields(each) if f.name != "sharding"}
    communication = [dataclasses.asdict(one) for one in each.communication]
    memory = {**dataclasses.asdict(each.memory), "total": each.memory.total}
    return {**found, "memory": memory, "communication": communication, "sent": each.sent}


@dataclasses.dataclass(frozen=True)
class _Arguments(PlanOptions):
    step: int = 0


@with_options(_Arguments)
def plan(model: Source | None = None, step: int = 0, **given: Any) -> Plan:
    """Say what a training would take on so many devices: memory, communication, time. Nothing is run.

        print(onward.plan("digits.onnx", loss="cross_entropy", devices=8, memory="16GB"))

    What the way back keeps is what the gradients of the model read, and the peak is that of the graph, node by node.
    Weights of the model need not be there. Devices compute different samples, but for those that divide products.

    - `model`: a training model, or any model and a recipe, as in `onward.prepare`; a classifier unless a loss is given
    - `step`: which training step, where a model has several
    """
    if model is None:
        raise ArgumentError("`plan` needs `model`", hint="`help(onward.plan)` says what that is")
    asked = PlanOptions(model=model, **given)
    names = list(STRATEGIES) if asked.strategy is None else [OTHER_NAMES.get(asked.strategy, asked.strategy)]
    machines = _machines(asked)
    training, notes = _training_model(load_shapes(model), {k: v for k, v in given.items() if k in _RECIPE})
    accumulate = accumulated_batches(training, training.steps.index(training.step(step)))
    if asked.shape:
        training = declare(training, {name: _sizes(sizes) for name, sizes in asked.shape.items()})
    works = _Works(training, step, asked)
    estimates: dict[str, Estimate] = {}
    refused: dict[str, str] = {}
    for name in names:
        try:
            samples = _samples_of_device(name, machines, asked.batch_size) or works.fixed or 1
            work = works.of(samples)
            estimates[name] = Estimator(name, work, machines, accumulate).estimate(asked.recompute_blocks, samples)
        except UnsupportedError as error:
            if asked.strategy is not None:
                raise
            refused[name] = error.message
    if not estimates:
        raise UnsupportedError(next(iter(refused.values())), hint="take another batch, or another number of devices")
    if asked.strategy is None:
        estimates = _without_repetition(estimates)
    return Plan(machines, _facts(works.first, works.samples, accumulate, notes, asked), estimates, refused)


_RECIPE = {one.name for one in options_of(RecipeOptions)}


def _without_repetition(estimates: Mapping[str, Estimate]) -> dict[str, Estimate]:
    """On few devices, several strategies are the same: the first of them is enough."""
    seen: dict[object, str] = {}
    for name, each in estimates.items():
        seen.setdefault((each.memory, each.communication, tuple(each.sharding.mesh.items())), name)
    return {name: estimates[name] for name in seen.values()}


def _samples_of_device(name: str, machines: Machines, batch: int | None) -> int | None:
    replicas, shards, _ = degrees(name, machines)
    if batch is None:
        return None
    if batch % (replicas * shards):
        raise UnsupportedError(
            f"a batch of {batch} cannot be divided among {replicas * shards} devices",
            hint="give a multiple of their number",
        )
    return batch // (replicas * shards)


class _Works:
    """What a pass takes, by the samples of a device."""

    def __init__(self, training: Model, step: int, asked: PlanOptions):
        self._training, self._step, self._asked = training, step, asked
        self._first = next((v for v in training.inputs if v.shape is not None and len(v.shape)), None)
        size = self._first.shape[0] if self._first is not None and self._first.shape is not None else None
        self.fixed = size if isinstance(size, int) else None
        """The size of batches, where the model says it."""
        self._made: dict[int, Workload] = {}
        self.samples = 1

    def of(self, samples: int) -> Workload:
        if samples not in self._made:
            self._made[samples] = Workload(
                self._with_samples(samples), self._step, self._asked.engine, self._asked.precision
            )
            self.samples = min(self._made)
        return self._made[samples]

    def _with_samples(self, samples: int) -> Model:
        """The model for that many, where the first axis of inputs is open."""
        if self.fixed is None and self._first is not None and self._first.shape is not None:
            rest = [d if isinstance(d, int) else str(d) for d in self._first.shape[1:]]
            return declare(self._training, {self._first.name or "": [samples, *rest]})
        if self.fixed not in (None, samples):
            raise UnsupportedError(
                f"the model is for batches of {self.fixed}, and a device would get {samples}",
                hint="export it with a first axis that is open",
            )
        return self._training

    @property
    def first(self) -> Workload:
        return self._made[min(self._made)]


def _training_model(model: Model, recipe: Mapping[str, Any]) -> tuple[Model, list[str]]:
    """The model as it is trained; and what was taken for granted."""
    if model.is_training_model:
        if recipe:
            raise ArgumentError(
                f"the model carries its training, which `{next(iter(recipe))}` would change",
                hint="leave that out, or plan for the model without it (`onward strip`)",
            )
        return model, []
    notes = []
    if recipe.get("loss") is None and recipe.get("teacher") is None:
        output = model.outputs[0] if model.outputs else None
        is_wide = output is not None and output.shape is not None and len(output.shape) > 1
        recipe = {**recipe, "loss": "cross_entropy:axis=-1" if is_wide else "mse"}
        notes.append(f"the loss is {recipe['loss']}, since none is given")
    if "optimizer" not in recipe:
        notes.append("the optimizer is adamw, since none is given")
    return prepare(model, **recipe), notes


def _sizes(given: str | Sequence[int | str]) -> list[int | str]:
    parts = [part.strip() for part in given.split(",")] if isinstance(given, str) else given
    return [int(part) if isinstance(part, str) and part.isdecimal() else part for part in parts]


def _machines(asked: PlanOptions) -> Machines:
    def read(name: str) -> float | None:
        return None if (value := getattr(asked, name)) is None else read_amount(value, f"`{name}`")

    amounts = {name: read(name) for name in ("memory", "bandwidth", "network", "flops")}
    return Machines(asked.devices, per_machine=asked.per_machine, utilization=asked.utilization, **amounts)


_AMOUNT = re.compile(r"(\d+(?:\.\d*)?(?:e\d+)?)\s*([kMGTP]i?)?(?:B|FLOPS?|FLOP/s)?(?:/s)?", re.IGNORECASE)


def read_amount(text: str | float, what: str) -> float:
    """`80GB`, `64GiB`, `989T`: a number and its unit."""
    found = _AMOUNT.fullmatch(str(text).strip())
    if found is None or not float(found[1]):
        raise ArgumentError(
            f"{what} is `{text}`, which is no amount", hint="write for example `80GB`, `64GiB` or `989T`"
        )
    prefix = (found[2] or "").lower()
    power = " kmgtp".index(prefix[0]) if prefix else 0
    return float(found[1]) * (1024 if prefix.endswith("i") else 1000) ** power


def _facts(work: Workload, samples: int, accumulate: int, notes: Sequence[str], asked: PlanOptions) -> dict[str, Any]:
    weights = list(work.weights.values())
    kept = {again: work.usage(recompute=again) for again in (False, True)}
    return {
        "parameters": sum(w.elements for w in weights if w.gradient),
        "frozen": sum(w.elements for w in weights if not w.gradient),
        "bytes": sum(w.bytes for w in weights),
        "gradient_bytes": sum(w.gradient for w in weights),
        "state_bytes": sum(w.state for w in weights) + work.other_state,
        "samples": samples,
        "blocks": len(work.blocks),
        "block_bytes": max((sum(w.bytes for w in work.weights_of(block)) for block in work.blocks), default=0),
        "kept_bytes": kept[False].kept + work.copies,
        "kept_bytes_with_recompute": kept[True].kept + work.copies,
        "peak_bytes": int(kept[False].activations.max()) + work.copies,
        "peak_bytes_with_recompute": int(kept[True].activations.max()) + work.copies,
        "forward_flops": work.forward_flops,
        "backward_flops": work.backward_flops,
        "recompute_flops": work.flops_of_blocks,
        "inputs": {v.name: dims_of(v) for v in work.graph.inputs if v.name in work.contract.batch},
        "recompute": asked.recompute_blocks,
        "accumulate": accumulate,
        "precision": asked.precision,
        "engine": asked.engine,
        "notes": [*notes, *([f"of {quantity(work.unknown, 'tensor')} nothing tells the size"] if work.unknown else [])],
    }


# ---- a model file with a plan in it ----------------------------------------------------------------------------------


def annotate(source: str | os.PathLike[str], sharding: Sharding, path: str | os.PathLike[str]) -> None:
    """Write a copy of a model that says how it is divided; what a recipe would add to it is not in it."""
    try:
        model, is_whole = load(source), True
    except ExternalDataError:
        model, is_whole = load_references(source), False
    there = {value.name for value in model.initializers()}
    own = {name: axes for name, axes in sharding.tensors.items() if name in there}
    model = model.copy()
    dataclasses.replace(sharding, tensors=own).write_to(model)
    stamp(model)
    if is_whole:
        model.save(path)
    elif Path(path).resolve().parent == Path(source).resolve().parent:
        write_file(path, model.to_proto().SerializeToString())
    else:
        raise WriteError(
            f"the data of `{source}` are not there, so that they cannot be copied to `{Path(path).parent}`",
            hint="write beside the model",
        )
