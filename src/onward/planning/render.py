"""A plan as text: the sizes of the model, a row per strategy, and the collectives."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from onward.inspect.formatting import quantity, size
from onward.planning.plan import Plan
from onward.planning.strategies import STRATEGIES, Estimate

_HEADINGS = ("", "parameters", "gradients", "state", "activations", "gathered", "total", "sent", "step", "samples/s")


def render(plan: Plan) -> str:
    sections = ["\n".join(f"{label:<12}{text}" for label, text in _facts(plan)), _table(plan)]
    if len(plan.estimates) == 1:
        sections.append(_collectives(next(iter(plan.estimates.values()))))
    return "\n\n".join(filter(None, [*sections, _verdict(plan)]))


def _facts(plan: Plan) -> list[tuple[str, str]]:
    model = plan.model
    keys = {"parameters": "bytes", "gradients": "gradient_bytes", "state": "state_bytes"}
    amounts = {noun: model[key] for noun, key in keys.items()}
    parts = ", ".join(f"{size(amount)} of {noun}" for noun, amount in amounts.items())
    frozen = f", {model['frozen']:,} frozen" if model["frozen"] else ""
    per_parameter = f" ({sum(amounts.values()) / model['parameters']:.1f} B each)" if model["parameters"] else ""
    inputs = ", ".join(f"{name} {list(shape)}" for name, shape in model["inputs"].items())
    rows = [
        ("trains", f"{model['parameters']:,} parameters{frozen}: {parts}{per_parameter}"),
        ("one device", f"{quantity(model['samples'], 'sample')} at a time: {inputs}"),
        ("computes", f"{_tera(model['forward_flops'])} TFLOP forward, {_tera(model['backward_flops'])} backward"),
        ("saves", f"{size(model['kept_bytes'])} for the backward pass, {size(model['peak_bytes'])} at the peak"),
    ]
    if model["blocks"]:
        again = [size(model[f"{key}_bytes_with_recompute"]) for key in ("kept", "peak")]
        flops = _tera(model["recompute_flops"])
        rows += [
            ("blocks", f"{model['blocks']}, the largest with {size(model['block_bytes'])} of parameters"),
            ("", f"recomputed: {again[0]} saved, {again[1]} at the peak, and {flops} TFLOP more"),
        ]
    return [*rows, ("on", ", ".join(_settings(plan))), *(("note", note) for note in model["notes"])]


def _settings(plan: Plan) -> Iterator[str]:
    model, machines = plan.model, plan.machines
    yield quantity(machines.devices, "device")
    if machines.memory:
        yield f"{size(int(machines.memory))} each"
    if machines.devices > machines.per_machine:
        yield f"{machines.per_machine} in a machine"
    if model["precision"]:
        yield f"matmuls in {model['precision']}"
    if model["recompute"]:
        yield "blocks recomputed"
    if model["accumulate"] > 1:
        yield f"{model['accumulate']} batches per update"


def _tera(flops: int) -> str:
    return f"{flops / 1e12:,.3g}"


def _table(plan: Plan) -> str:
    timed = any(estimate.step_seconds is not None for estimate in plan.estimates.values())
    headings = _HEADINGS if timed else _HEADINGS[:-2]
    rows = [headings, *(_row(estimate, timed) for estimate in plan.estimates.values())]
    first, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    cells = ([name.ljust(first), *map(str.rjust, numbers, widths)] for name, *numbers in rows)
    return "\n".join("  ".join(line).rstrip() for line in cells)


def _row(estimate: Estimate, timed: bool) -> Sequence[str]:
    fits = "" if estimate.fits is None else " fits" if estimate.fits else "   no"
    memory = map(size, dataclasses.astuple(estimate.memory))
    cells = [estimate.strategy, *memory, size(estimate.memory.total) + fits, size(estimate.sent)]
    if timed:
        rate = estimate.samples / estimate.step_seconds if estimate.step_seconds and estimate.samples else None
        cells += [f"{estimate.step_seconds:.3g} s" if estimate.step_seconds else "", f"{rate:,.4g}" if rate else ""]
    return cells


def _collectives(estimate: Estimate) -> str:
    lines = []
    for collective in estimate.communication:
        time = f", {collective.seconds:.3g} s" if collective.seconds is not None else ""
        what = f"{collective.kind} of {collective.of} among {collective.devices}"
        lines.append(f"  {what}: each device sends {size(collective.sent)}{time}")
    if estimate.largest_block:
        lines.append(f"  gathered at once: {size(estimate.largest_block)} of parameters")
    return "\n".join(["per update:", *lines]) if lines else ""


def _verdict(plan: Plan) -> str:
    lines = [f"{name}: {reason}" for name, reason in plan.refused.items()]
    best = plan.recommended
    if best is None:
        advice = [] if plan.model["recompute"] or not plan.model["blocks"] else ["recompute blocks"]
        advice += ["use smaller batches"] if plan.model["samples"] > 1 else []
        lines.append(f"nothing fits: {', or '.join([*advice, 'use more devices'])}")
    elif len(plan.estimates) > 1:
        lines.append(f"recommended: {best}, {STRATEGIES[best].title}")
    return "\n".join(lines)
