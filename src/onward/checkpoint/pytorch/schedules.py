"""Schedulers of PyTorch as they are saved, both ways. Their state names no class: its attributes tell which it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from onward.checkpoint.description import Schedule
from onward.checkpoint.pytorch.objects import Name, Object
from onward.recipe.schedules import schedule
from onward.recipe.spec import Spec

_EVERYWHERE = frozenset({
    "base_lrs", "last_epoch", "verbose", "_step_count", "_is_initial", "_get_lr_called_within_step", "_last_lr",
})  # fmt: skip
_FOREVER = math.inf


def is_schedule_state(tree: Any) -> bool:
    return isinstance(tree, Mapping) and "_last_lr" in tree and ("last_epoch" in tree or "_schedulers" in tree)


def schedule_of(state: Mapping[str, Any]) -> Schedule:
    """What the state of a scheduler says."""
    pieces = _pieces(state)
    words = None if pieces is None else _words(pieces)
    position = state.get("last_epoch")
    if position is None and isinstance(inner := state.get("_schedulers"), list) and inner:
        position = inner[0].get("last_epoch") if isinstance(inner[0], Mapping) else None
    return Schedule(state, words, position if isinstance(position, int) else None)


Pieces = list[tuple[Spec, float]]
"""Schedules that follow one another, and the steps before which they end."""


def _words(pieces: Pieces) -> tuple[Spec, ...]:
    ended = [Spec(s.name, {**s.options, **({} if end == _FOREVER else {"until": end})}) for s, end in pieces]
    return () if [spec for spec, _ in pieces] == [Spec("constant")] else tuple(ended)


def _pieces(state: Mapping[str, Any]) -> Pieces | None:
    own = state.keys() - _EVERYWHERE
    row = next((row for row in _ROWS if own == row.attributes), None)
    if row is not None:
        return row.read(state)
    if own == {"_milestones", "_schedulers"}:
        return _sequence(state["_milestones"], state["_schedulers"])
    return None


def _sequence(milestones: Any, inner: Any) -> Pieces | None:
    if not isinstance(milestones, list) or not isinstance(inner, list) or len(inner) != len(milestones) + 1:
        return None
    found: Pieces = []
    for state, start, end in zip(inner, [0, *milestones], [*milestones, _FOREVER], strict=True):
        pieces = _pieces(state) if isinstance(state, Mapping) else None
        if pieces is None or "total_steps" in state:
            return None
        for spec, until in pieces:
            if start < end:
                found.append((spec, min(start + until, end)))
            if start + until >= end:
                break
    return found


class _Row(NamedTuple):
    """A class of PyTorch."""

    attributes: frozenset[str]
    read: Callable[[Mapping[str, Any]], Pieces | None]
    name: str = ""
    write: Callable[[Mapping[str, Any], int], dict[str, Any] | None] | None = None
    """From the numbers of the schedule of that name, and the position; None where the class has no such numbers."""


def _one(name: str, **options: Any) -> Pieces:
    return [(Spec(name, options), _FOREVER)]


def _constant(s: Mapping[str, Any]) -> Pieces:
    if s["factor"] == 1 or s["total_iters"] < 1:
        return _one("constant")
    level = Spec("linear", {"steps": 1, "start_factor": s["factor"], "end_factor": s["factor"]})
    return [(level, s["total_iters"]), (Spec("constant"), _FOREVER)]


def _multistep(s: Mapping[str, Any]) -> Pieces:
    counts = s["milestones"]
    counts = counts.arguments[0] if not isinstance(counts, Mapping) else counts
    milestones = sorted(step for step, times in counts.items() for _ in range(times))
    return _one("multistep", milestones=milestones, gamma=s["gamma"]) if milestones else _one("constant")


def _one_cycle(s: Mapping[str, Any]) -> Pieces | None:
    """Its numbers are in the groups of the optimizer; `with_one_cycle` adds them."""
    if s["cycle_momentum"]:
        return None
    options = {
        "steps": s["total_steps"],
        "pct_start": (s["_schedule_phases"][0]["end_step"] + 1) / s["total_steps"],
        "anneal": s["_anneal_func_type"],
        "three_phase": len(s["_schedule_phases"]) == 3,
    }
    return _one("one_cycle", **options)


def _nemo_cosine(s: Mapping[str, Any]) -> Pieces | None:
    """NeMo's CosineAnnealing, whose first step has a rate already."""
    warmup, steps = s["warmup_steps"], s["max_steps"]
    if s["constant_steps"] or not (isinstance(warmup, int) and isinstance(steps, int) and 0 <= warmup < steps):
        return None
    rise = Spec("linear", {"steps": warmup, "start_factor": 1 / (warmup + 1), "end_factor": 1.0})
    fall = Spec("cosine", {"steps": steps - warmup, "min": s["min_lr"]})
    return [*([(rise, warmup)] if warmup else []), (fall, _FOREVER)]


def _restarts_state(n: Mapping[str, Any], position: int) -> dict[str, Any] | None:
    at, length = position, n["period"]
    while at >= length and n["mult"] > 1:
        at, length = at - length, length * n["mult"]
    return {"T_0": int(n["period"]), "T_i": int(length), "T_mult": int(n["mult"]), "eta_min": n["min"],
            "T_cur": at % int(length)}  # fmt: skip


def _line(n: Mapping[str, Any], start: float, end: float) -> dict[str, Any] | None:
    if not (0 < start <= 1 and 0 <= end <= 1):
        return None
    return {"start_factor": start, "end_factor": end, "total_iters": int(n["steps"])}


_ROWS = (
    _Row(frozenset({"step_size", "gamma"}), lambda s: _one("step", size=s["step_size"], gamma=s["gamma"]),
         "step", lambda n, _: {"step_size": int(n["size"]), "gamma": n["gamma"]}),
    _Row(frozenset({"milestones", "gamma"}), _multistep,
         "multistep", lambda n, _: {"milestones": _counter(n["milestones"]), "gamma": n["gamma"]}),
    _Row(frozenset({"gamma"}), lambda s: _one("exponential", gamma=s["gamma"]),
         "exponential", lambda n, _: {"gamma": n["gamma"]}),
    _Row(frozenset({"start_factor", "end_factor", "total_iters"}),
         lambda s: _one("linear", steps=s["total_iters"], start_factor=s["start_factor"], end_factor=s["end_factor"]),
         "linear", lambda n, _: _line(n, n["start_factor"], n["end_factor"])),
    _Row(frozenset({"factor", "total_iters"}), _constant, "constant", lambda n, _: {"factor": 1.0, "total_iters": 1}),
    _Row(frozenset({"total_iters", "power"}),
         lambda s: _one("polynomial", steps=s["total_iters"], power=s["power"]),
         "polynomial", lambda n, _: None if n["end"] else {"total_iters": int(n["steps"]), "power": n["power"]}),
    _Row(frozenset({"T_max", "eta_min"}),
         lambda s: _one("cosine", steps=s["T_max"], min=s["eta_min"], after="torch"),
         "cosine",
         lambda n, _: None if n["after"] == "floor" else {"T_max": int(n["steps"]), "eta_min": n["min"]}),
    _Row(frozenset({"T_0", "T_i", "T_mult", "eta_min", "T_cur"}),
         lambda s: _one("cosine_restarts", period=s["T_0"], mult=s["T_mult"], min=s["eta_min"]),
         "cosine_restarts", _restarts_state),
    _Row(frozenset({"total_steps", "_schedule_phases", "_anneal_func_type", "cycle_momentum"}), _one_cycle),
    _Row(frozenset({"max_steps", "warmup_steps", "constant_steps", "decay_steps", "min_lr"}), _nemo_cosine),
)  # fmt: skip


def _counter(milestones: Sequence[float]) -> Object:
    whole = [int(step) for step in milestones]
    return Object(Name("collections", "Counter"), ({step: whole.count(step) for step in whole},))


# ---- the other way ---------------------------------------------------------------------------------------------------


def state_of(words: Sequence[Spec], bases: Sequence[float], rates: Sequence[float], position: int) -> dict[str, Any]:
    """The state of a scheduler of PyTorch at a position: its own class where there is one, else that of LambdaLR.

    `bases` are the rates of the groups before the schedule, `rates` those at the position. What LambdaLR multiplies
    with is never stored: whoever loads the state has the function.
    """
    common = {
        "base_lrs": list(bases),
        "last_epoch": position,
        "_step_count": position + 1,
        "_is_initial": False,
        "_get_lr_called_within_step": False,
        "_last_lr": list(rates),
    }
    parts = [_attributes(spec, position) for spec in words]
    if len(parts) == 1 and parts[0] is not None:
        return {**parts[0], **common}
    return {**common, "lr_lambdas": [None] * len(bases)}


def _attributes(spec: Spec, position: int) -> dict[str, Any] | None:
    numbers, choices = schedule(spec.name).resolve(spec.without("until").options)
    every = {**numbers, **choices}
    if "until" in spec.options or every.get("warmup") or every.get("every", 1) != 1:
        return None
    row = next((row for row in _ROWS if row.name == spec.name and row.write is not None), None)
    return row.write(every, position) if row is not None and row.write is not None else None


def advanced(state: Mapping[str, Any], rates: Sequence[float], position: int) -> dict[str, Any]:
    """The state of a scheduler that is there, at another position; `rates` are those of the groups then."""
    if state.get("last_epoch") == position:
        return dict(state)
    moved = dict(state)
    if len(rates) == len(state.get("_last_lr", rates)):
        moved["_last_lr"] = list(rates)
    if isinstance(inner := state.get("_schedulers"), list):
        moved["_schedulers"] = [_inner(state, at, rates, position) for at in range(len(inner))]
    if "last_epoch" in state:
        moved["last_epoch"] = position
    if "_step_count" in state:
        moved["_step_count"] = position + 1
    if "T_cur" in state:
        at = _restarts_state({"period": state["T_0"], "mult": state["T_mult"], "min": state["eta_min"]}, position)
        moved |= at or {}
    return moved


def _inner(state: Mapping[str, Any], at: int, rates: Sequence[float], position: int) -> Any:
    """A scheduler inside another: each has its turn where there are milestones, else all move together."""
    milestones = state.get("_milestones")
    inner = state["_schedulers"][at]
    if milestones is None:
        return advanced(inner, rates, position)
    start = milestones[at - 1] if at else 0
    end = milestones[at] if at < len(milestones) else _FOREVER
    return advanced(inner, rates, position - start) if start <= position < end else inner
