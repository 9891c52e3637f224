"""`plan`: what each device stores and sends, from a model and a number of devices."""

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
from onward.recipe.prepare import prepare
from onward.transform import declare


@dataclasses.dataclass(frozen=True)
class Plan:
    """The cost of a training by strategy. The keys of `to_json` are the field names, without the sharding."""

    machines: Machines
    model: Mapping[str, Any]
    """Sizes of parameters, operations and memory of one pass on one device, and assumptions."""
    estimates: Mapping[str, Estimate]
    refused: Mapping[str, str]
    """Impossible strategies, with reasons."""

    @property
    def recommended(self) -> str | None:
        """The fastest strategy that fits, by samples per second; the simplest if times are unknown."""
        fitting = [estimate for estimate in self.estimates.values() if estimate.fits is not False]
        best = min(fitting, key=lambda estimate: (estimate.step_seconds or 0) / (estimate.samples or 1), default=None)
        return best.strategy if best is not None else None

    def sharding(self, strategy: str | None = None) -> Sharding:
        """Return the sharding of a strategy (default: the recommended one)."""
        least = min(self.estimates, key=lambda name: self.estimates[name].memory.total)
        name = OTHER_NAMES.get(strategy or "", strategy) or self.recommended or least
        if name not in self.estimates:
            raise UnknownNameError(f"no estimate for `{name}`", hint=f"available: {', '.join(self.estimates)}")
        return self.estimates[name].sharding

    def to_json(self) -> dict[str, Any]:
        return {
            "machines": dataclasses.asdict(self.machines),
            "model": dict(self.model),
            "estimates": [_plain(estimate) for estimate in self.estimates.values()],
            "refused": dict(self.refused),
            "recommended": self.recommended,
        }

    def __str__(self) -> str:
        from onward.planning.render import render

        return render(self)


def _plain(estimate: Estimate) -> dict[str, Any]:
    fields = {f.name: getattr(estimate, f.name) for f in dataclasses.fields(estimate) if f.name != "sharding"}
    communication = [dataclasses.asdict(collective) for collective in estimate.communication]
    memory = {**dataclasses.asdict(estimate.memory), "total": estimate.memory.total}
    return {**fields, "memory": memory, "communication": communication, "sent": estimate.sent}


@dataclasses.dataclass(frozen=True)
class _Arguments(PlanOptions):
    step: int = 0


@with_options(_Arguments)
def plan(model: Source | None = None, step: int = 0, **options: Any) -> Plan:
    """Estimate memory, communication and time of a training on several devices. Nothing is run.

        print(onward.plan("digits.onnx", loss="cross_entropy", devices=8, memory="16GB"))

    Saved activations are those that the gradient graph reads; the peak is taken node by node. Only shapes and types
    are read, so that the data of weights may be missing. Devices compute different samples, except those that divide
    matmuls.

    - `model`: a training model, or any model and a recipe, as in `onward.prepare` (default loss: cross_entropy)
    - `step`: index of the training step (default: 0)
    """
    if model is None:
        raise ArgumentError("`plan` needs `model`", hint='onward.plan("model.onnx", devices=8)')
    asked = PlanOptions(model=model, **options)
    names = list(STRATEGIES) if asked.strategy is None else [OTHER_NAMES.get(asked.strategy, asked.strategy)]
    machines = _machines(asked)
    training, notes = _training_model(load_shapes(model), {k: v for k, v in options.items() if k in _RECIPE})
    accumulate = accumulated_batches(training, training.steps.index(training.step(step)))
    if asked.shape:
        training = declare(training, {name: _sizes(sizes) for name, sizes in asked.shape.items()})
    workloads = _Workloads(training, step, asked)
    estimates: dict[str, Estimate] = {}
    refused: dict[str, str] = {}
    for name in names:
        try:
            samples = _samples_of_device(name, machines, asked.batch_size) or workloads.fixed or 1
            work = workloads.of(samples)
            estimates[name] = Estimator(name, work, machines, accumulate).estimate(asked.recompute_blocks, samples)
        except UnsupportedError as error:
            if asked.strategy is not None:
                raise
            refused[name] = error.message
    if not estimates:
        raise UnsupportedError(next(iter(refused.values())), hint="change `--batch-size` or `--devices`")
    if asked.strategy is None:  # on few devices, some strategies coincide: keep the first of them
        seen: dict[object, str] = {}
        for name, estimate in estimates.items():
            seen.setdefault((estimate.memory, estimate.communication, tuple(estimate.sharding.mesh.items())), name)
        estimates = {name: estimates[name] for name in seen.values()}
    return Plan(machines, _facts(workloads, accumulate, notes, asked), estimates, refused)


_RECIPE = {option.name for option in options_of(RecipeOptions)}


def _samples_of_device(name: str, machines: Machines, batch: int | None) -> int | None:
    replicas, shards, _ = degrees(name, machines)
    if batch is None:
        return None
    samples, rest = divmod(batch, replicas * shards)
    if rest:
        raise UnsupportedError(
            f"a batch of {batch} cannot be divided among {replicas * shards} devices",
            hint=f"`--batch-size {replicas * shards * max(samples, 1)}`",
        )
    return samples


class _Workloads:
    """Workloads by the number of samples per device."""

    def __init__(self, training: Model, step: int, asked: PlanOptions):
        self._training, self._step, self._asked = training, step, asked
        self._first = next((v for v in training.inputs if v.shape is not None and len(v.shape)), None)
        size = self._first.shape[0] if self._first is not None and self._first.shape is not None else None
        self.fixed = size if isinstance(size, int) else None
        """The batch size of the model, if it is static."""
        self.by_samples: dict[int, Workload] = {}

    def of(self, samples: int) -> Workload:
        if samples not in self.by_samples:
            model = self._with_samples(samples)
            self.by_samples[samples] = Workload(model, self._step, self._asked.engine, self._asked.precision)
        return self.by_samples[samples]

    def _with_samples(self, samples: int) -> Model:
        if self.fixed is None and self._first is not None and self._first.shape is not None:
            rest = [d if isinstance(d, int) else str(d) for d in self._first.shape[1:]]
            return declare(self._training, {self._first.name or "": [samples, *rest]})
        if self.fixed not in (None, samples):
            raise UnsupportedError(
                f"the model has batch size {self.fixed}, a device would get {samples}",
                hint="export it with a dynamic first axis",
            )
        return self._training


def _training_model(model: Model, recipe: Mapping[str, Any]) -> tuple[Model, list[str]]:
    """Return the training model, and what was assumed."""
    if model.is_training_model:
        if recipe:
            raise ArgumentError(
                f"a training model has its recipe already: `{next(iter(recipe))}`",
                hint="leave it out, or remove the recipe: `onward strip`",
            )
        return model, []
    notes = []
    if recipe.get("loss") is None and recipe.get("teacher") is None:
        output = model.outputs[0] if model.outputs else None
        is_wide = output is not None and output.shape is not None and len(output.shape) > 1
        recipe = {**recipe, "loss": "cross_entropy:axis=-1" if is_wide else "mse"}
        notes.append(f"the loss is {recipe['loss']} by default")
    if "optimizer" not in recipe:
        notes.append("the optimizer is adamw by default")
    return prepare(model, **recipe), notes


def _sizes(shape: str | Sequence[int | str]) -> list[int | str]:
    sizes = [size.strip() for size in shape.split(",")] if isinstance(shape, str) else shape
    return [int(size) if isinstance(size, str) and size.isdecimal() else size for size in sizes]


def _machines(asked: PlanOptions) -> Machines:
    amounts = {name: getattr(asked, name) for name in ("memory", "bandwidth", "network", "flops")}
    read = {name: read_amount(amount, f"`{name}`") for name, amount in amounts.items() if amount is not None}
    return Machines(asked.devices, per_machine=asked.per_machine, utilization=asked.utilization, **read)


_AMOUNT = re.compile(r"(\d+(?:\.\d*)?(?:e\d+)?)\s*([kMGTP]i?)?(?:B|FLOPS?|FLOP/s)?(?:/s)?", re.IGNORECASE)


def read_amount(text: str | float, what: str) -> float:
    """Return the number in `80GB`, `64GiB` or `989T`."""
    match = _AMOUNT.fullmatch(str(text).strip())
    if match is None or not float(match[1]):
        raise ArgumentError(f"{what} is not an amount: `{text}`", hint="`80GB`, `64GiB` or `989T`")
    prefix = (match[2] or "").lower()
    power = " kmgtp".index(prefix[0]) if prefix else 0
    return float(match[1]) * (1024 if prefix.endswith("i") else 1000) ** power


def _facts(workloads: _Workloads, accumulate: int, notes: Sequence[str], asked: PlanOptions) -> dict[str, Any]:
    samples, work = min(workloads.by_samples.items())
    weights = list(work.weights.values())
    usage, recomputed = (work.usage(recompute=recompute) for recompute in (False, True))
    return {
        "parameters": sum(w.elements for w in weights if w.gradient),
        "frozen": sum(w.elements for w in weights if not w.gradient),
        "bytes": sum(w.bytes for w in weights),
        "gradient_bytes": sum(w.gradient for w in weights),
        "state_bytes": sum(w.state for w in weights) + work.other_state,
        "samples": samples,
        "blocks": len(work.blocks),
        "block_bytes": max((sum(w.bytes for w in work.weights_of(block)) for block in work.blocks), default=0),
        "kept_bytes": usage.saved + work.copies,
        "kept_bytes_with_recompute": recomputed.saved + work.copies,
        "peak_bytes": int(usage.activations.max()) + work.copies,
        "peak_bytes_with_recompute": int(recomputed.activations.max()) + work.copies,
        "forward_flops": work.forward_flops,
        "backward_flops": work.backward_flops,
        "recompute_flops": work.flops_of_blocks,
        "inputs": {v.name: dims_of(v) for v in work.graph.inputs if v.name in work.contract.batch},
        "recompute": asked.recompute_blocks,
        "accumulate": accumulate,
        "precision": asked.precision,
        "engine": asked.engine,
        "notes": [*notes, *([f"{quantity(work.unknown, 'tensor')} of unknown size"] if work.unknown else [])],
    }


# ---- a model file with a plan in it ----------------------------------------------------------------------------------


def annotate(source: str | os.PathLike[str], sharding: Sharding, path: str | os.PathLike[str]) -> None:
    """Write a copy of a model with a sharding; tensors that only a recipe adds are left out."""
    try:
        model, is_whole = load(source), True
    except ExternalDataError:
        model, is_whole = load_references(source), False
    names = {value.name for value in model.initializers()}
    tensors = {name: axes for name, axes in sharding.tensors.items() if name in names}
    model = model.copy()
    dataclasses.replace(sharding, tensors=tensors).write_to(model)
    stamp(model)
    if is_whole:
        model.save(path)
    elif Path(path).resolve().parent == Path(source).resolve().parent:
        write_file(path, model.to_proto().SerializeToString())
    else:
        raise WriteError(
            f"cannot copy the missing data of `{source}` to `{Path(path).parent}`",
            hint=f"write next to the model: `-o {Path(source).with_name(Path(path).name)}`",
        )
