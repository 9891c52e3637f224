"""optax in words of a recipe: transformations, the chains that its optimizers are, and schedules.

`ROWS` is read in both directions. Writers instantiate `OptaxRow.calls`; readers look up a transformation in
`TRANSFORMATIONS` and the optimizer that it belongs to with `row_of`. Nothing here imports optax.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from onward.errors import UnsupportedError
from onward.recipe.optimizers.definition import ConfiguredOptimizer, Settings
from onward.recipe.spec import Spec
from onward.vocabulary.rows import Condition, OptimizerRow

# ---- transformations -------------------------------------------------------------------------------------------------


class TransformationRow(NamedTuple):
    """A function of optax that makes a transformation of gradients."""

    settings: Mapping[str, str] = {}
    """Argument -> setting of a recipe, "-" before it for its negative."""
    slots: Mapping[str, str] = {}
    """Field of its state -> slot."""
    counts: bool = False
    """True if its state counts updates."""
    fixed: Mapping[str, Any] = {}
    """Arguments that no recipe can set -> the value that all recipes mean."""


_BETAS = {"b1": "beta1", "b2": "beta2", "eps": "eps"}
_MOMENTS = {"mu": "exp_avg", "nu": "exp_avg_sq"}
_NO_ROOT = {"eps_root": 0.0, "mu_dtype": None}
_ROOT_MEAN_SQUARE = {"decay": "alpha", "eps": "eps"}

TRANSFORMATIONS = {
    "trace": TransformationRow(
        {"decay": "momentum", "nesterov": "nesterov"}, {"trace": "momentum_buffer"}, fixed={"accumulator_dtype": None}),
    "scale_by_adam": TransformationRow(_BETAS, _MOMENTS, True, _NO_ROOT),
    "scale_by_amsgrad": TransformationRow(
        _BETAS, {**_MOMENTS, "nu_max": "max_exp_avg_sq"}, True,
        {**_NO_ROOT, "bias_correction_mu": True, "bias_correction_nu": True}),
    "scale_by_adamax": TransformationRow(_BETAS, {"mu": "exp_avg", "nu": "exp_inf"}, True),
    "scale_by_radam": TransformationRow(
        _BETAS, _MOMENTS, True, {"threshold": 5.0, "nesterov": False, "eps_root": 0.0}),
    "scale_by_lion": TransformationRow(
        {"b1": "beta1", "b2": "beta2"}, {"mu": "exp_avg"}, True, {"mode": "hard", "mu_dtype": None}),
    "scale_by_rss": TransformationRow(
        {"initial_accumulator_value": "initial_accumulator_value", "eps": "eps"}, {"sum_of_squares": "sum"}),
    "scale_by_rms": TransformationRow(_ROOT_MEAN_SQUARE, {"nu": "square_avg"}, fixed={"bias_correction": False}),
    "scale_by_stddev": TransformationRow(
        _ROOT_MEAN_SQUARE, {"nu": "square_avg", "mu": "grad_avg"}, fixed={"bias_correction": False}),
    "scale_by_adadelta": TransformationRow({"rho": "rho", "eps": "eps"}, {"e_g": "square_avg", "e_x": "acc_delta"}),
    "scale_by_factored_rms": TransformationRow(
        {"decay_rate": "-beta2_decay", "epsilon": "eps1", "min_dim_size_to_factor": "min_dim_size_to_factor"},
        {"v_row": "row_var", "v_col": "col_var", "v": "variance"}, True, {"step_offset": 0}),
    "clip_by_block_rms": TransformationRow({"threshold": "d"}),
    "scale_by_param_block_rms": TransformationRow({"min_scale": "eps2"}),
    "scale_by_trust_ratio": TransformationRow(fixed={"min_norm": 0.0, "trust_coefficient": 1.0, "eps": 0.0}),
    "add_decayed_weights": TransformationRow({"weight_decay": "weight_decay"}),
    "scale_by_learning_rate": TransformationRow({"learning_rate": "lr"}),
    "scale": TransformationRow(),
    "identity": TransformationRow(),
}  # fmt: skip

SETTINGS = {"learning_rate": "lr", "b1": "beta1", "b2": "beta2", "decay": "alpha", "weight_decay_rate": "weight_decay"}
"""Arguments of optax's optimizers that a recipe calls otherwise."""

# ---- optimizers ------------------------------------------------------------------------------------------------------

EPSILON, MOMENTUM = "epsilon", "momentum"


class ChainStage(NamedTuple):
    """A transformation in the chain of an optimizer."""

    name: str
    fixed: Mapping[str, Any] = {}
    """Arguments that are the same for all settings."""
    when: Callable[[Settings], bool | None] = lambda s: True
    """Returns False where the chain is without it, and None where `optax.identity` stands in its place."""


OptaxCall = tuple[str, dict[str, Any]]
"""The name of a function of optax, and its arguments."""


@dataclasses.dataclass(frozen=True)
class OptaxRow(OptimizerRow):
    """An optimizer of optax as a chain of transformations, in the order in which `optax.<name>` has them."""

    stages: tuple[ChainStage, ...] = ()
    difference: str | None = None
    """What optax computes in another way; its state is the same nevertheless. None: the numbers are the same."""

    def fits(self, configured: ConfiguredOptimizer) -> bool:
        return not configured.options["maximize"] and super().fits(configured)

    def calls(self, configured: ConfiguredOptimizer, **replaced: Any) -> list[OptaxCall]:
        """Return the chain for these settings, some of which may be replaced: the rate by a schedule."""
        settings, calls = configured.settings, []
        settings.decoupled = settings.variant == "keras" or configured.kind.name == "sgdw"
        settings.decoupled |= getattr(settings, "decoupled_weight_decay", False)
        values = {**vars(settings), **replaced}
        for stage in self.stages:
            if there := stage.when(settings):
                arguments = {
                    theirs: -values[ours[1:]] if ours[0] == "-" else values[ours]
                    for theirs, ours in TRANSFORMATIONS[stage.name].settings.items()
                    if theirs not in stage.fixed
                }
                calls.append((stage.name, {**arguments, **stage.fixed}))
            elif there is None:
                calls.append(("identity", {}))
        return calls


_RATE, _DECAY = ChainStage("scale_by_learning_rate"), "add_decayed_weights"


def _with_decay(*direction: ChainStage, momentum: ChainStage | None = None) -> tuple[ChainStage, ...]:
    """A direction with weight decay in the gradient or beside it, the rate, and momentum that has the rate in it."""
    before = ChainStage(_DECAY, when=lambda s: bool(s.weight_decay) and not s.decoupled)
    after = ChainStage(_DECAY, when=lambda s: bool(s.weight_decay) and s.decoupled)
    return (before, *direction, after, _RATE, *([momentum] if momentum else []))


_DECAY_OR_IDENTITY = ChainStage(_DECAY, when=lambda s: True if s.weight_decay else None)
_SGD = _with_decay(ChainStage("trace", when=lambda s: True if s.momentum else None))
_SGDS = ("sgd", "momentum", "nesterov", "sgdw")
_NO_AMSGRAD = Condition("without amsgrad", lambda s: not s["amsgrad"])
_AMSGRAD = Condition("with amsgrad", lambda s: s["amsgrad"])
_NO_DAMPENING = Condition("without dampening", lambda s: not s["dampening"])
_NO_DECAY = Condition("without weight decay", lambda s: not s["weight_decay"])
_NO_LR_DECAY = Condition("without lr_decay", lambda s: not s["lr_decay"])


def _row(
    name: str,
    optimizers: tuple[str, ...],
    variants: tuple[str, ...],
    stages: tuple[ChainStage, ...],
    applies: Condition | None = None,
    difference: str | None = None,
) -> OptaxRow:
    known = [TRANSFORMATIONS[stage.name] for stage in stages]
    settings = {ours.removeprefix("-"): theirs for each in known for theirs, ours in each.settings.items()}
    slots = {slot: field for each in known for field, slot in each.slots.items()}
    return OptaxRow(f"optax.{name}", optimizers, variants, settings, slots, applies, stages, difference)


def _rmsprop(scale: str, is_centered: bool) -> list[OptaxRow]:
    """PyTorch has epsilon outside of the root and momentum before the rate; optax and Keras the other way around."""
    here = Condition(f"centered={is_centered}".lower(), lambda s: s["centered"] is is_centered)
    one_decay = Condition(
        f"{here.words}, for Keras without momentum or without weight decay",
        lambda s: here.holds(s) and not (s["variant"] == "keras" and s["momentum"] and s["weight_decay"]),
    )
    inner = ChainStage("trace", {"nesterov": False}, lambda s: bool(s.momentum))
    nothing = ChainStage("identity", when=lambda s: not s.momentum and not s.weight_decay)
    outer = ChainStage("trace", {"nesterov": False}, lambda s: bool(s.momentum) or (False if s.weight_decay else None))
    torch = _with_decay(ChainStage(scale, {"eps_in_sqrt": False}), inner, momentum=nothing)
    optax = _with_decay(ChainStage(scale, {"eps_in_sqrt": True}), momentum=outer)
    return [
        _row("rmsprop", ("rmsprop",), ("torch",), torch, here),
        _row("rmsprop", ("rmsprop",), ("optax", "keras"), optax, one_decay),
    ]


_ADAM, _AMS = ChainStage("scale_by_adam"), ChainStage("scale_by_amsgrad")
_RSS, _ADAMAX = _with_decay(ChainStage("scale_by_rss")), _with_decay(ChainStage("scale_by_adamax"))
_ADADELTA = ChainStage("scale_by_adadelta")
_LAMB = (_ADAM, ChainStage(_DECAY), ChainStage("scale_by_trust_ratio"), _RATE)
_ADAFACTOR = (
    ChainStage("scale_by_factored_rms"),
    ChainStage("clip_by_block_rms"),
    ChainStage("scale_by_learning_rate", {"flip_sign": False}),
    ChainStage("scale_by_param_block_rms"),
    ChainStage(_DECAY, when=lambda s: bool(s.weight_decay)),
    ChainStage("scale", {"step_size": -1}),
)
_WITH_EPSILON = Condition("with an epsilon, without lr_decay", lambda s: s["eps"] and not s["lr_decay"])

ROWS = [
    _row("sgd", _SGDS, ("optax", "torch", "keras"), _SGD, Condition("without momentum", lambda s: not s["momentum"])),
    _row("sgd", _SGDS, ("optax", "torch"), _SGD, _NO_DAMPENING),
    _row("sgd", _SGDS, ("keras",), _SGD, _NO_DAMPENING, MOMENTUM),
    _row("adam", ("adam", "amsgrad"), ("optax", "torch"), _with_decay(_ADAM), _NO_AMSGRAD),
    _row("adam", ("adam", "amsgrad"), ("keras",), _with_decay(_ADAM), _NO_AMSGRAD, EPSILON),
    _row("amsgrad", ("amsgrad", "adam"), ("optax",), _with_decay(_AMS), _AMSGRAD),
    _row("adamw", ("adamw",), ("optax", "torch"), (_ADAM, _DECAY_OR_IDENTITY, _RATE), _NO_AMSGRAD),
    _row("adamw", ("adamw",), ("keras", "transformers"), (_ADAM, _DECAY_OR_IDENTITY, _RATE), _NO_AMSGRAD, EPSILON),
    _row("amsgrad", ("adamw",), ("optax",), (_AMS, _DECAY_OR_IDENTITY, _RATE), _AMSGRAD),
    _row("adamax", ("adamax",), ("optax", "torch"), _ADAMAX),
    _row("adamax", ("adamax",), ("keras",), _ADAMAX, None, EPSILON),
    _row("nadam", ("nadam",), ("optax",), _with_decay(ChainStage("scale_by_adam", {"nesterov": True}))),
    _row("radam", ("radam",), ("optax",), _with_decay(ChainStage("scale_by_radam"))),
    _row("adagrad", ("adagrad",), ("optax", "keras"), _RSS, _WITH_EPSILON),
    _row("adagrad", ("adagrad",), ("optax", "keras", "torch"), _RSS, _NO_LR_DECAY, EPSILON),
    *_rmsprop("scale_by_rms", False),
    *_rmsprop("scale_by_stddev", True),
    _row("adadelta", ("adadelta",), ("optax", "torch"), (_DECAY_OR_IDENTITY, _ADADELTA, _RATE)),
    _row("adadelta", ("adadelta",), ("keras",), (_DECAY_OR_IDENTITY, _ADADELTA, _RATE), _NO_DECAY),
    _row("adadelta", ("adadelta",), ("keras",), (_ADADELTA, ChainStage(_DECAY), _RATE)),
    _row("adafactor", ("adafactor",), ("optax",), _ADAFACTOR),
    _row("lion", ("lion",), ("optax", "keras"), (ChainStage("scale_by_lion"), ChainStage(_DECAY), _RATE)),
    _row("lamb", ("lamb",), ("optax",), _LAMB),
    _row("lamb", ("lamb",), ("keras",), _LAMB, _NO_DECAY),
]  # fmt: skip
"""The first row that fits an optimizer of a recipe is the one to write; a transformation is read as the first row."""


def row_of(transformation: str, arguments: Mapping[str, Any]) -> OptaxRow:
    """Return the first row with a transformation of these arguments, some of which may be flags as numbers."""
    return next(
        row
        for row in ROWS
        for stage in row.stages
        if stage.name == transformation
        and all(bool(arguments.get(name)) == value for name, value in {"nesterov": False, **stage.fixed}.items())
    )


def reduced_axis(slot: str, shape: tuple[int, ...]) -> int:
    """Return the axis that a slot of Adafactor lacks; beyond the last for the one that lacks none."""
    if slot == "variance":
        return len(shape)
    return int(np.argsort(shape)[-1 if slot == "row_var" else -2])


# ---- schedules -------------------------------------------------------------------------------------------------------
#
# A recipe has one base rate, and schedules relative to it that follow one another. Lines can start and end anywhere;
# curves begin at the base rate. So a schedule of optax is first taken apart into lines and curves with their rates, and
# can be said in a recipe if all its curves begin at the same rate.


class RateLine(NamedTuple):
    """A schedule from one rate to another."""

    start: float
    end: float
    steps: float = 1


class RateCurve(NamedTuple):
    """A schedule that begins at `base`."""

    base: float
    spec: Spec


Pieces = list[tuple[RateLine | RateCurve, float]]
"""Schedules that follow one another, and the update before which each ends, counted from the first. The last has no
end."""

Free = Mapping[str, Any]
"""The arguments that the maker of a schedule was called with, as the function that it made has them."""


def words_of_pieces(pieces: Pieces) -> tuple[float, list[Spec]]:
    """Return the base rate and the schedules of a recipe."""
    bases = list(dict.fromkeys(piece.base for piece, _ in pieces if isinstance(piece, RateCurve)))
    if len(bases) > 1:
        listed = ", ".join(f"{abs(base):g}" for base in bases)
        raise UnsupportedError(
            f"the schedule has curves that begin at different rates ({listed}), and in a recipe they share one",
            hint="give them the same initial value",
        )
    rates = [rate for piece, _ in pieces if isinstance(piece, RateLine) for rate in (piece.start, piece.end)]
    base = bases[0] if bases else max(rates, key=abs)
    if len(pieces) == 1 and isinstance(piece := pieces[0][0], RateLine) and piece.start == piece.end:
        return base, []
    specs = []
    for piece, end in pieces:
        until = {"until": end} if math.isfinite(end) else {}
        if isinstance(piece, RateCurve):
            specs.append(Spec(piece.spec.name, {**piece.spec.options, **until}))
        elif not base or piece.start == piece.end == base:
            specs.append(Spec("constant", until))
        else:
            factors = {"start_factor": piece.start / base, "end_factor": piece.end / base}
            specs.append(Spec("linear", {"steps": piece.steps, **factors, **until}))
    return base, specs


def scale_rates(spec: Spec, factor: float) -> Spec:
    """Return a schedule for another base rate: two of its numbers are rates themselves."""
    options = {key: value * factor if key in ("min", "end") else value for key, value in spec.options.items()}
    return Spec(spec.name, options)


def clip_pieces(pieces: Pieces, length: float) -> Pieces:
    """Return the pieces that are within so many updates."""
    kept: Pieces = []
    start = 0.0
    for piece, end in pieces:
        if start < min(end, length):
            kept.append((piece, min(end, length)))
            start = min(end, length)
    return kept


def _constant(free: Free) -> Pieces:
    value = float(free.get("value", free.get("init_value", 0.0)))
    return [(RateLine(value, value), math.inf)]


def _polynomial(free: Free) -> Pieces:
    if "transition_steps" not in free:
        return _constant(free)
    start, end, steps, power = (float(free[n]) for n in ("init_value", "end_value", "transition_steps", "power"))
    curve = RateCurve(start, Spec("polynomial", {"steps": steps, "power": power, "end": end}))
    return _after(free, start, [(RateLine(start, end, steps) if power == 1 else curve, math.inf)])


def _exponential(free: Free) -> Pieces:
    if "transition_steps" not in free:
        return _constant(free)
    start, rate, steps = (float(free[name]) for name in ("init_value", "decay_rate", "transition_steps"))
    if free["staircase"]:
        curve = RateCurve(start, Spec("step", {"size": steps, "gamma": rate}))
    else:
        curve = RateCurve(start, Spec("exponential", {"gamma": rate ** (1 / steps)}))
    pieces: Pieces = [(curve, math.inf)]
    if free.get("end_value") is not None:
        pieces = _limit_curve(curve, float(free["end_value"]), rate, steps, bool(free["staircase"]))
    return _after(free, start, pieces)


def _limit_curve(curve: RateCurve, limit: float, rate: float, steps: float, staircase: bool) -> Pieces:
    """Return an exponential curve until it is at a limit, and that limit from then on."""

    def passed(n: int) -> bool:
        size = abs(curve.base) * rate ** (n // steps if staircase else n / steps)
        return size <= abs(limit) if rate < 1 else size >= abs(limit)

    last = RateLine(limit, limit)
    if passed(0):
        return [(last, math.inf)]
    if rate == 1 or not limit:
        return [(curve, math.inf)]
    end = max(math.floor(steps * math.log(limit / curve.base) / math.log(rate)) - 1, 1)
    while not passed(end):
        end += 1
    return [(curve, end), (last, math.inf)]


def _after(free: Free, value: float, pieces: Pieces) -> Pieces:
    """Return pieces after a time at a constant rate."""
    begin = float(free["transition_begin"])
    return [(RateLine(value, value), begin), *((piece, begin + end) for piece, end in pieces)] if begin else pieces


def _cosine(free: Free) -> Pieces:
    if float(free["exponent"]) != 1:
        raise UnsupportedError("cosine_decay_schedule with an exponent has no counterpart in a recipe")
    start = float(free["init_value"])
    numbers = {"steps": float(free["decay_steps"]), "min": start * float(free["alpha"])}
    return [(RateCurve(start, Spec("cosine", numbers)), math.inf)]


def _piecewise_constant(free: Free) -> Pieces:
    value = float(free["init_value"])
    changes = sorted((free["boundaries_and_scales"] or {}).items())
    scales = {float(scale) for _, scale in changes}
    if len(scales) == 1 and changes[0][0] >= 0:
        numbers = {"milestones": [float(boundary) for boundary, _ in changes], "gamma": scales.pop()}
        return [(RateCurve(value, Spec("multistep", numbers)), math.inf)]
    pieces: Pieces = []
    for boundary, scale in changes:
        pieces.append((RateLine(value, value), float(boundary)))
        value *= float(scale)
    return clip_pieces([*pieces, (RateLine(value, value), math.inf)], math.inf)


def _piecewise_interpolated(free: Free) -> Pieces:
    bounds, values = [0.0, *map(float, free["boundaries"])], [float(free["init_value"])]
    for scale in free["scales"]:
        values.append(values[-1] * float(scale))
    if free["interpolate_fn"].__name__ == "_linear_interpolate":
        spans = zip(pairwise(values), pairwise(bounds), strict=True)
        lines: Pieces = [(RateLine(*rates, end - start), end) for rates, (start, end) in spans]
        return clip_pieces([*lines, (RateLine(values[-1], values[-1]), math.inf)], math.inf)
    if len(bounds) == 2:
        return [(RateCurve(values[0], Spec("cosine", {"steps": bounds[1], "min": values[1]})), math.inf)]
    if len(bounds) == 3 and 0 < bounds[1] < bounds[2]:
        start, peak, end = values
        numbers = {
            "steps": bounds[2] + 1,
            "pct_start": (bounds[1] + 1) / (bounds[2] + 1),
            "div_factor": peak / start,
            "final_div_factor": start / end,
        }
        return [(RateCurve(peak, Spec("one_cycle", numbers)), math.inf)]
    raise UnsupportedError("a recipe has no chain of more than two cosine curves up and down")


SCHEDULES: dict[str, Callable[[Free], Pieces]] = {
    "constant_schedule": _constant,
    "polynomial_schedule": _polynomial,
    "exponential_decay": _exponential,
    "cosine_decay_schedule": _cosine,
    "piecewise_constant_schedule": _piecewise_constant,
    "piecewise_interpolate_schedule": _piecewise_interpolated,
}
"""Schedules of optax, but for `join_schedules` -> what they are in a recipe."""


Numbers = Mapping[str, Any]


def _multistep_call(lr: float, n: Numbers) -> OptaxCall | None:
    milestones = list(n["milestones"]) if isinstance(n["milestones"], Sequence) else [n["milestones"]]
    if len(set(milestones)) < len(milestones):
        return None
    scales = dict.fromkeys(milestones, n["gamma"])
    return "piecewise_constant_schedule", {"init_value": lr, "boundaries_and_scales": scales}


def _exponential_call(lr: float, steps: float, factor: float, **more: bool) -> OptaxCall:
    return "exponential_decay", {"init_value": lr, "transition_steps": steps, "decay_rate": factor, **more}


def _polynomial_call(lr: float, n: Numbers) -> OptaxCall:
    arguments = {"init_value": lr, "end_value": n["end"], "power": n["power"], "transition_steps": n["steps"]}
    return "polynomial_schedule", arguments


def _cosine_call(lr: float, n: Numbers) -> OptaxCall | None:
    if n["after"] != "floor" or not lr:
        return None
    return "cosine_decay_schedule", {"init_value": lr, "decay_steps": n["steps"], "alpha": n["min"] / lr}


def _one_cycle_call(lr: float, n: Numbers) -> OptaxCall | None:
    """optax has its peaks at whole updates."""
    peak, last, rise = n["pct_start"] * n["steps"] - 1, n["steps"] - 1, n["div_factor"]
    if n["three_phase"] or abs(peak - round(peak)) > 1e-9 or not 0 < round(peak) < last or last != int(last):
        return None
    scales = {round(peak): rise, int(last): 1 / (rise * n["final_div_factor"])}
    kind = "cosine" if n["anneal"] == "cos" else "linear"
    arguments = {"interpolate_type": kind, "init_value": lr / rise, "boundaries_and_scales": scales}
    return "piecewise_interpolate_schedule", arguments


def line_call(start: float, end: float, steps: float) -> OptaxCall:
    """Return the schedule of optax from one rate to another."""
    return "linear_schedule", {"init_value": start, "end_value": end, "transition_steps": steps}


SCHEDULE_CALLS: dict[str, Callable[[float, Numbers], OptaxCall | None]] = {
    "constant": lambda lr, n: ("constant_schedule", {"value": lr}),
    "step": lambda lr, n: _exponential_call(lr, n["size"], n["gamma"], staircase=True),
    "multistep": _multistep_call,
    "exponential": lambda lr, n: _exponential_call(lr, 1, n["gamma"]) if n["gamma"] else None,
    "linear": lambda lr, n: line_call(lr * n["start_factor"], lr * n["end_factor"], n["steps"]),
    "polynomial": _polynomial_call,
    "cosine": _cosine_call,
    "one_cycle": _one_cycle_call,
    "warmup": lambda lr, n: line_call(lr * n["start_factor"], lr, n["steps"]),
}
"""Schedules of a recipe, of a base rate and with all numbers and choices -> those of optax that compute the same."""
