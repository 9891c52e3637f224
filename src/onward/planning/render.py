"""A plan as people read it: what the model takes, a row for each strategy, and what is said among devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from onward.inspect.formatting import quantity, size
from onward.planning.plan import Plan
from onward.planning.strategies import STRATEGIES, Estimate

_HEADINGS = ("", "parameters", "gradients", "state", "activations", "gathered", "total", "sent", "step", "samples/s")


def render(plan: Plan) -> str:
    """The whole plan as text."""
    parts = ["\n".join(f"{label:<12}{text}" for label, text in _facts(plan)), _table(plan)]
    if len(plan.estimates) == 1:
        parts.append(_collectives(next(iter(plan.estimates.values()))))
    parts.append(_verdict(plan))
    return "\n\n".join(part for part in parts if part)


def _facts(plan: Plan) -> list[tuple[str, str]]:
    model = plan.model
    keys = {"parameters": "bytes", "gradients": "gradient_bytes", "state": "state_bytes"}
    amounts = {kind: model[key] for kind, key in keys.items()}
    parts = ", ".join(f"{size(amount)} of {kind}" for kind, amount in amounts.items())
    frozen = f", {model['frozen']:,} frozen" if model["frozen"] else ""
    each = f" ({sum(amounts.values()) / model['parameters']:.1f} B each)" if model["parameters"] else ""
    inputs = ", ".join(f"{name} {list(shape)}" for name, shape in model["inputs"].items())
    rows = [
        ("trains", f"{model['parameters']:,} parameters{frozen}: {parts}{each}"),
        ("one device", f"{quantity(model['samples'], 'sample')} at a time: {inputs}"),
        ("computes", f"{_tera(model['forward_flops'])} TFLOP forward, {_tera(model['backward_flops'])} back"),
        ("keeps", f"{size(model['kept_bytes'])} for the way back, {size(model['peak_bytes'])} at the peak"),
    ]
    if model["blocks"]:
        again = [size(model[f"{key}_bytes_with_recompute"]) for key in ("kept", "peak")]
        more = f"{again[0]} for the way back, {again[1]} at the peak, and {_tera(model['recompute_flops'])} TFLOP more"
        rows += [
            ("blocks", f"{model['blocks']}, the largest with {size(model['block_bytes'])} of parameters"),
            ("", f"computed twice: {more}"),
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
        yield f"products in {model['precision']}"
    if model["recompute"]:
        yield "blocks computed twice"
    if model["accumulate"] > 1:
        yield f"{model['accumulate']} batches an update"


def _tera(flops: int) -> str:
    return f"{flops / 1e12:,.3g}"


def _table(plan: Plan) -> str:
    timed = any(each.step_seconds is not None for each in plan.estimates.values())
    headings = _HEADINGS if timed else _HEADINGS[:-2]
    rows = [headings, *(_row(each, timed) for each in plan.estimates.values())]
    first, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    cells = ([name.ljust(first), *map(str.rjust, numbers, widths)] for name, *numbers in rows)
    return "\n".join("  ".join(line).rstrip() for line in cells)


def _row(each: Estimate, timed: bool) -> Sequence[str]:
    fits = "" if each.fits is None else " fits" if each.fits else "   no"
    memory = map(size, dataclasses.astuple(each.memory))
    cells = [each.strategy, *memory, size(each.memory.total) + fits, size(each.sent)]
    if timed:
        rate = each.samples / each.step_seconds if each.step_seconds and each.samples else None
        cells += [f"{each.step_seconds:.3g} s" if each.step_seconds else "", f"{rate:,.4g}" if rate else ""]
    return cells


def _collectives(each: Estimate) -> str:
    lines = []
    for one in each.communication:
        time = f", {one.seconds:.3g} s" if one.seconds is not None else ""
        lines.append(f"  {one.kind} of {one.of} among {one.devices}: each device sends {size(one.sent)}{time}")
    if each.largest_block:
        lines.append(f"  at once, {size(each.largest_block)} of parameters are gathered")
    return "\n".join(["in an update:", *lines]) if lines else ""


def _verdict(plan: Plan) -> str:
    lines = [f"{name}: {reason}" for name, reason in plan.refused.items()]
    best = plan.recommended
    if best is None:
        ways = [] if plan.model["recompute"] or not plan.model["blocks"] else ["recompute blocks"]
        ways += ["take fewer samples at a time"] if plan.model["samples"] > 1 else []
        lines.append(f"nothing fits: {', or '.join([*ways, 'take more devices'])}")
    elif len(plan.estimates) > 1:
        lines.append(f"recommended: {best}, {STRATEGIES[best].title}")
    return "\n".join(lines)
