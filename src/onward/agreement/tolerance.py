"""The one rule by which two tensors count as the same, and what is said where they do not.

Two tensors of the same shape agree if no two of their elements are further apart than the larger of

- `relative` times the scale of the tensor: its largest element, but at least 1e-3; or, of an update, the largest
  change that it makes;
- four roundings of its largest element: in its own type, or in a narrower one that was computed with.

`relative` is 1e-4 for what is computed of data: sums, which everyone adds up in another order. It is 1e-5 for the
update of an optimizer, which is made element by element. It does not grow with the number of steps: few are made, or
each one begins with the same state on both sides. Elements whose gradient is nothing but rounding are not compared (see
`noise_in`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import ml_dtypes
import numpy as np

from onward.engines import Engine
from onward.errors import MismatchError, UnsupportedError

Arrays = Mapping[str, np.ndarray]

_ROUNDINGS = 4


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """How far apart two tensors may be."""

    relative: float = 1e-4
    epsilon: float = 0.0
    """Of the narrowest type that is computed with."""
    least: float = 1e-3
    """What smaller scales count as: sums of larger terms that cancel, such as a mean that is zero. Not of updates."""
    equal_nan: bool = False
    """Whether what is no number on both sides agrees."""

    def limit(self, expected: np.ndarray, before: np.ndarray | None = None) -> tuple[float, float]:
        """The largest difference that is allowed, and the scale; `before` is what an update has changed."""
        size = largest(expected)
        scale = max(size, self.least) if before is None else gap(expected, before)
        return max(self.relative * scale, _ROUNDINGS * max(self.epsilon, epsilon_of(expected.dtype)) * size), scale


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What is compared with what, in words for those that differ."""

    reference: str
    hint: str
    tolerance: Tolerance = Tolerance()
    describe: Callable[[str], str] = "`{}`".format

    def __call__(
        self,
        found: Arrays,
        expected: Arrays,
        *,
        before: Arrays | None = None,
        ignored: Arrays | None = None,
        when: str = "",
    ) -> None:
        """Raise an error that names the first tensor, in the order of those expected, that is not as expected.

        What is not found is not compared, nor are elements that are `ignored`. An update is measured by what it has
        changed of what was `before`.
        """
        for name, theirs in expected.items():
            if name not in found:
                continue
            ours, theirs = np.asarray(found[name]), np.asarray(theirs)
            difference = gap(ours, theirs, (ignored or {}).get(name), equal_nan=self.tolerance.equal_nan)
            limit, scale = self.tolerance.limit(theirs, None if before is None else before[name])
            if not difference <= limit:
                raise MismatchError(
                    f"{when}{self.describe(name)} is off by {difference:.3g} from {self.reference}, "
                    f"where it is {scale:.3g} large",
                    hint=self.hint,
                )


def gap(a: np.ndarray, b: np.ndarray, ignored: np.ndarray | None = None, *, equal_nan: bool = True) -> float:
    """The largest difference of two elements, but for those ignored; inf where one is not a number alone."""
    if a.shape != b.shape:
        return np.inf
    if ignored is not None:
        a, b = a[~ignored], b[~ignored]
    return np.inf if not equal_nan and (a != a).any() else compare_elements(a, b).absolute


def distance(a: np.ndarray, b: np.ndarray, ignored: np.ndarray | None = None) -> float:
    """The same, relative to the largest element."""
    apart = gap(a, b, ignored)
    return apart if apart in (0.0, np.inf) else apart / max(largest(a), largest(b))


def farthest(a: Arrays, b: Arrays, ignored: Arrays | None = None) -> float:
    """The largest distance of two tensors of the same name."""
    masks, names = ignored or {}, a.keys() & b.keys()
    return max((distance(np.asarray(a[n]), np.asarray(b[n]), masks.get(n)) for n in names), default=0.0)


def largest(array: np.ndarray) -> float:
    """The size of the largest element that is a number."""
    sizes = np.abs(array.astype(np.float64))
    return float(sizes[np.isfinite(sizes)].max(initial=0))


def epsilon_of(dtype: np.dtype) -> float:
    """What the last digit of a type is worth; nothing, if it rounds nothing."""
    return float(ml_dtypes.finfo(dtype).eps) if dtype.kind in "fV" else 0.0  # type: ignore[no-untyped-call]


# ---- elements, compared a chunk at a time ----------------------------------------------------------------------------

_PART = 1 << 20
"""Elements that are compared at a time."""


class Distance(NamedTuple):
    """How far two tensors of the same shape are from each other."""

    differ: int = 0
    """Elements that are not equal, or further apart than is allowed."""
    absolute: float = 0.0
    """The largest difference."""
    relative: float = 0.0
    """The largest difference in proportion to the larger number of the two."""


def compare_elements(a: np.ndarray, b: np.ndarray, atol: float = 0.0, rtol: float = 0.0) -> Distance:
    """NaN is equal to NaN. Differences count beyond `atol`, and `rtol` times the number in `b`."""
    one, other = a.reshape(-1), b.reshape(-1)
    parts = [_of_part(one[at : at + _PART], other[at : at + _PART], atol, rtol) for at in range(0, one.size, _PART)]
    return Distance(
        sum(part.differ for part in parts),
        max((part.absolute for part in parts), default=0.0),
        max((part.relative for part in parts), default=0.0),
    )


def _of_part(a: np.ndarray, b: np.ndarray, atol: float, rtol: float) -> Distance:
    if a.dtype == b.dtype and not a.dtype.hasobject and np.array_equal(_bits(a), _bits(b)):
        return Distance()
    if not (_is_numeric(a) and _is_numeric(b)):
        count = int(np.count_nonzero(a != b))
        return Distance(count, math.inf, math.inf) if count else Distance()
    if a.dtype == b.dtype:
        unequal = a != b
        a, b = a[unequal], b[unequal]
    if not a.size:
        return Distance()
    kind = np.complex128 if "c" in (a.dtype.kind, b.dtype.kind) else np.float64
    with np.errstate(all="ignore"):
        x, y = a.astype(kind), b.astype(kind)
        same, apart = (np.isnan(x) & np.isnan(y)) | (x == y), np.abs(x - y)
        if a.dtype.kind in "iu" and b.dtype.kind in "iu":  # not all of them are numbers of float64
            same, apart = a == b, np.maximum(apart, 1)
        apart = np.where(same, 0.0, apart)
        apart = np.where(np.isnan(apart), np.inf, apart)
        relative = np.where(apart == 0, 0.0, apart / np.maximum(np.abs(x), np.abs(y)))
        beyond = ~same & ~(apart <= atol + rtol * np.abs(y))
    return Distance(
        int(np.count_nonzero(beyond)), float(apart.max()), float(np.nan_to_num(relative, nan=math.inf).max())
    )


def _bits(array: np.ndarray) -> np.ndarray:
    """The same bytes, in numbers that compare quickly."""
    flat = np.ascontiguousarray(array).view(np.uint8)
    return flat.view(np.uint64) if flat.size % 8 == 0 else flat


def _is_numeric(array: np.ndarray) -> bool:
    """Bfloat16 and its kin are kinds of their own."""
    return array.dtype.kind in "biufcV" and not array.dtype.hasobject and array.dtype.names is None


# ---- gradients that are rounding errors ------------------------------------------------------------------------------

# Gradients that are nothing but rounding errors, as that of a bias before a normalization is.
#
# Adam divides a gradient by its size, so such elements make whole steps into directions that differ on every engine.
# That changes no loss, and is no disagreement.

ROUNDINGS = 32
"""How many roundings of the largest gradient of a step no engine can tell from zero."""


def distances_without_noise(
    engine: Engine, reference: Engine, expected: Sequence[Arrays], batches: Sequence[Arrays]
) -> list[float]:
    """How far each step of an engine ends from that of the reference if both begin with the same state.

    `expected` is the reference's state before each step, and after the last. Elements that follow rounding errors on
    both sides are not compared.
    """
    found = []
    for before, after, batch in zip(expected[:-1], expected[1:], batches, strict=True):
        for each in (engine, reference):
            each.load_state(before)
        mine, theirs = (noise_in(gradients_of(each, batch)) for each in (engine, reference))
        both = {name: mine[name] & theirs[name] for name in mine.keys() & theirs.keys()}
        engine.step(batch)
        found.append(farthest(engine.state(), after, _followers(engine, both)))
    return found


def gradients_of(engine: Engine, batch: Arrays) -> Arrays:
    """Return the gradients of a step; none if it has no gradient of its own."""
    try:
        return engine.gradients(batch)
    except UnsupportedError:
        return {}


def noise_in(gradients: Arrays) -> dict[str, np.ndarray]:
    """Which elements of the gradients of a step are rounding errors; those of 16 bits are sums in float32."""
    top = max(map(largest, gradients.values()), default=0.0)
    epsilons = {name: min(epsilon_of(g.dtype), epsilon_of(np.dtype(np.float32))) for name, g in gradients.items()}
    return {name: np.abs(g) <= ROUNDINGS * epsilons[name] * top for name, g in gradients.items()}


def _followers(engine: Engine, noise: Arrays) -> Arrays:
    """The same elements of a parameter and of all state of its shape that belongs to it."""
    found = {}
    for state in engine.states():
        mask = noise.get(state.parameter or state.name)
        if mask is not None and mask.shape == state.array.shape:
            found[state.name] = mask
    return found
