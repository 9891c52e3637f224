"""One derivative along one direction, by the gradient and by differences; and what to think of it."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import numpy as np

from onward.agreement.gradcheck.evaluate import Arrays, Function
from onward.agreement.gradcheck.report import Row

TOLERANCE = 1e-5
"""How far derivatives may differ, relative to the size of the gradient."""
_STEPS = (1e-6, 1e-5, 1e-7, 1e-4)
"""How far to go, as parts of the size of x. The first is the best mostly; a smaller one is away from a kink nearby, a
larger one above the rounding."""
_BESIDE = 1e-3
"""How far off to look beside a kink: much further than a step, and so near that what is smooth is the same there."""


@dataclasses.dataclass(frozen=True)
class _Slope:
    """A derivative along a direction, both ways."""

    ours: float
    numeric: float
    difference: float
    agrees: bool
    certain: bool = True
    """Whether the differences are exact enough to say that it does not agree."""
    sides: tuple[float, float] = (0.0, 0.0)

    @property
    def finite(self) -> bool:
        return bool(np.isfinite(self.ours) and np.isfinite(self.numeric))

    @property
    def has_sides(self) -> bool:
        """Whether the slopes to the left and to the right differ."""
        left, right = self.sides
        return abs(right - left) > 0.1 * max(abs(left), abs(right))

    @property
    def is_between(self) -> bool:
        return self.has_sides and min(self.sides) <= self.ours <= max(self.sides)


def compare(
    function: Function, x: str, dy: np.ndarray, gradient: np.ndarray, tolerance: float, rng: np.random.Generator
) -> Row:
    """The derivative of <dy, y> along a random direction of x, whose gradient is given."""
    line = _Line(function, x, function.random_step(x, rng), dy, tolerance)
    here = line.slope(gradient, {})
    row = Row(x, 1, here.ours, here.numeric, here.difference, "ok")
    if not here.finite:
        good = np.isfinite(here.numeric) and np.all(np.isfinite(function.y))
        return dataclasses.replace(row, verdict="not finite", note="the gradient" if good else "y")
    if here.agrees:
        return row
    if not here.certain:
        return dataclasses.replace(row, verdict="unclear", note="rounding, or kinks and jumps nearby, hide it")
    if _is_kink(line, here, rng):
        left, right = here.sides
        sides = f"{left:.4g} from the left, {right:.4g} from the right"
        return dataclasses.replace(row, verdict="kink", note=sides if here.has_sides else "right beside this point")
    return dataclasses.replace(row, verdict="wrong")


def _is_kink(line: _Line, here: _Slope, rng: np.random.Generator) -> bool:
    """Whether the gradient is right beside this point, or, where kinks are everywhere, between the two sides."""
    function = line.function
    beside = {name: _BESIDE * function.random_step(name, rng) for name in function.movable}
    there = line.slope(function.gradients(line.dy, beside)[line.x], beside)
    agrees = there.agrees and there.difference < 0.1 * here.difference  # what is a bit wrong here, may pass there
    return there.finite and (agrees or (here.is_between and there.is_between))


@dataclasses.dataclass(frozen=True)
class _Line:
    """<dy, y> as a function of how far x has moved along a direction."""

    function: Function
    x: str
    direction: np.ndarray
    dy: np.ndarray
    tolerance: float

    def change(self, start: float, end: float, at: Arrays) -> float:
        """How much it grows from `start` to `end`, everything else having moved by `at`."""
        before, after = (
            self.function.value({**at, self.x: at.get(self.x, 0.0) + far * self.direction}) for far in (start, end)
        )
        return float(np.sum(self.dy * (after - before)))

    def slope(self, gradient: np.ndarray, at: Arrays) -> _Slope:
        """Try steps until one agrees. If none does, the two most alike say what the derivative is, and how surely."""
        ours = float(np.sum(gradient * self.direction))
        size = float(np.linalg.norm(gradient * self.direction))
        tried: dict[float, float] = {}
        for step in _STEPS:
            numeric = self.change(-step, step, at) / (2 * step)
            if not np.isfinite(numeric):
                continue
            if size <= 10 * self._rounding and abs(numeric) <= self._rounding / step:  # both are zero
                return _Slope(ours, numeric, 0.0, agrees=True)
            difference = _relative(ours, numeric, size)
            if difference <= self.tolerance:
                return _Slope(ours, numeric, difference, agrees=True)
            tried[step] = numeric
        if not tried:
            return _Slope(ours, np.nan, np.nan, agrees=False)
        step, numeric, error = _most_alike(tried)
        certain = abs(ours - numeric) > max(4 * error, self._rounding / step)
        sides = (self.change(-step, 0, at) / step, self.change(0, step, at) / step)
        return _Slope(ours, numeric, _relative(ours, numeric, size), False, certain, sides)

    @property
    def _rounding(self) -> float:
        """The least by which a result may be off."""
        return 8 * float(np.finfo(np.float64).eps) * float(np.sum(np.abs(self.dy * self.function.y)))


def _relative(ours: float, numeric: float, size: float) -> float:
    scale = max(abs(ours), abs(numeric), size)
    return abs(ours - numeric) / scale if scale else 0.0


def _most_alike(tried: dict[float, float]) -> tuple[float, float, float]:
    """Of steps next to each other, the pair with the same result: the smaller step, its result, how far they differ."""
    ordered = sorted(tried.items())
    if len(ordered) == 1:
        return *ordered[0], np.inf
    return min(((step, a, abs(a - b)) for (step, a), (_, b) in pairwise(ordered)), key=lambda found: found[2])
