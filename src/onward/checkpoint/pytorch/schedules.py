"""Schedulers of PyTorch as they are saved, both ways. Their state names no class: its attributes tell which it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onward.checkpoint.pytorch.objects import Name, Object
from onward.recipe.spec import Spec
from onward.run_state.state import SchedulerState
from onward.vocabulary.rate_formulas import FOREVER, Pieces, complete, in_words
from onward.vocabulary.torch_schedules import ROWS, Attributes, class_of, in_sequence, one_cycle, restart_position

_EVERYWHERE = frozenset({
    "base_lrs", "last_epoch", "verbose", "_step_count", "_is_initial", "_get_lr_called_within_step", "_last_lr",
})  # fmt: skip
_MOVING = {"T_i", "T_cur"}
_ONE_CYCLE = {"total_steps", "_schedule_phases", "_anneal_func_type", "cycle_momentum"}
_NEMO = {"max_steps", "warmup_steps", "constant_steps", "decay_steps", "min_lr"}


def is_schedule_state(tree: Any) -> bool:
    return isinstance(tree, Mapping) and "_last_lr" in tree and ("last_epoch" in tree or "_schedulers" in tree)


def schedule_of(state: Attributes, group: Attributes | None = None) -> SchedulerState:
    """What the state of a scheduler says; the rates of one cycle are in a group of its optimizer."""
    pieces = _pieces(state, group or {})
    words = None if pieces is None else tuple(in_words(pieces))
    position = state.get("last_epoch")
    if position is None and isinstance(inner := state.get("_schedulers"), list) and inner:
        position = inner[0].get("last_epoch") if isinstance(inner[0], Mapping) else None
    return SchedulerState(state, words, position if isinstance(position, int) else None)


def _pieces(state: Attributes, group: Attributes) -> Pieces | None:
    own = state.keys() - _EVERYWHERE
    if own == {"_milestones", "_schedulers"}:
        return _sequence(state["_milestones"], state["_schedulers"])
    if isinstance(counts := state.get("milestones"), Object):
        state = {**state, "milestones": counts.arguments[0]}
    if own == _ONE_CYCLE:
        numbers = [state["total_steps"], *(group.get(key) for key in ("max_lr", "initial_lr", "min_lr"))]
        knows = all(isinstance(number, int | float) and number > 0 for number in numbers)
        return one_cycle(state, group) if knows and not state["cycle_momentum"] else None
    if own == _NEMO:
        return _nemo_cosine(state)
    row = next((row for row in ROWS.values() if own - _MOVING == {*row.arguments}), None)
    return row.read(state) if row is not None else None


def _sequence(milestones: Any, inner: Any) -> Pieces | None:
    if not isinstance(milestones, list) or not isinstance(inner, list) or len(inner) != len(milestones) + 1:
        return None
    parts = [_pieces(state, {}) if isinstance(state, Mapping) else None for state in inner]
    known = [part for part in parts if part is not None]
    return in_sequence(known, milestones) if len(known) == len(parts) else None


def _nemo_cosine(s: Attributes) -> Pieces | None:
    """NeMo's CosineAnnealing, whose first step has a rate already."""
    warmup, steps = s["warmup_steps"], s["max_steps"]
    if s["constant_steps"] or not (isinstance(warmup, int) and isinstance(steps, int) and 0 <= warmup < steps):
        return None
    rise = Spec("linear", {"steps": warmup, "start_factor": 1 / (warmup + 1), "end_factor": 1.0})
    fall = Spec("cosine", {"steps": steps - warmup, "min": s["min_lr"]})
    return [*([(rise, warmup)] if warmup else []), (fall, FOREVER)]


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
    single = [(spec, FOREVER) for spec in words if len(words) == 1 and "until" not in spec.options]
    found = class_of(complete(single)[0]) if single else None
    if found is None:
        return {**common, "lr_lambdas": [None] * len(bases)}
    state = found[1]
    if "milestones" in state:
        counts = {step: state["milestones"].count(step) for step in state["milestones"]}
        state["milestones"] = Object(Name("collections", "Counter"), (counts,))
    if "T_0" in state:
        state |= restart_position(state["T_0"], state["T_mult"], position)
    return {**state, **common}


def advance_state(state: Mapping[str, Any], rates: Sequence[float], position: int) -> dict[str, Any]:
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
        moved |= restart_position(state["T_0"], state["T_mult"], position)
    return moved


def _inner(state: Mapping[str, Any], at: int, rates: Sequence[float], position: int) -> Any:
    """A scheduler inside another: each has its turn where there are milestones, else all move together."""
    milestones = state.get("_milestones")
    inner = state["_schedulers"][at]
    if milestones is None:
        return advance_state(inner, rates, position)
    start = milestones[at - 1] if at else 0
    end = milestones[at] if at < len(milestones) else FOREVER
    return advance_state(inner, rates, position - start) if start <= position < end else inner
