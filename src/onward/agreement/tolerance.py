"""When two tensors count as equal, and the error that says where they differ.

Two tensors of the same shape agree if no two of their elements are further apart than the larger of

- `relative` times the scale: the largest element, at least 1e-3; or, for an update, the largest change;
- four roundings of the largest element, in its type or in a narrower one that was computed with.

`relative` is 1e-4 for results of sums, whose order differs between libraries, and 1e-5 for the elementwise update of an
optimizer. It does not grow with the number of steps: there are few, or each begins with the same state on both sides.
Elements whose gradient is a rounding error are not compared (see `noise_in`).
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
    """The allowed difference of two tensors."""

    relative: float = 1e-4
    epsilon: float = 0.0
    """Machine epsilon of the narrowest type in the computation."""
    least: float = 1e-3
    """Smallest scale, for sums of larger terms that cancel, such as a mean of zero. Does not apply to updates."""
    equal_nan: bool = False

    def limit(self, expected: np.ndarray, before: np.ndarray | None = None) -> tuple[float, float]:
        """Return the largest allowed difference, and the scale; `before` is the tensor before an update."""
        size = largest(expected)
        scale = max(size, self.least) if before is None else gap(expected, before)
        return max(self.relative * scale, _ROUNDINGS * max(self.epsilon, epsilon_of(expected.dtype)) * size), scale


@dataclasses.dataclass(frozen=True)
class Sides:
    """A comparison of tensors by name, with the words of its error."""

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
        """Raise an error that names the first tensor, in the order of `expected`, that differs.

        Tensors that are not in `found` are not compared, nor are elements that are True in `ignored`. With `before`,
        the scale is the change since then.
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
    """Return the largest difference of two elements that are not ignored; inf if only one of them is NaN."""
    if a.shape != b.shape:
        return np.inf
    if ignored is not None:
        a, b = a[~ignored], b[~ignored]
    return np.inf if not equal_nan and (a != a).any() else compare_elements(a, b).absolute


def distance(a: np.ndarray, b: np.ndarray, ignored: np.ndarray | None = None) -> float:
    """Return `gap` relative to the largest element."""
    apart = gap(a, b, ignored)
    return apart if apart in (0.0, np.inf) else apart / max(largest(a), largest(b))


def farthest(a: Arrays, b: Arrays, ignored: Arrays | None = None) -> float:
    """Return the largest `distance` of two tensors of the same name."""
    masks, names = ignored or {}, a.keys() & b.keys()
    return max((distance(np.asarray(a[n]), np.asarray(b[n]), masks.get(n)) for n in names), default=0.0)


def largest(array: np.ndarray) -> float:
    """Return the absolute value of the largest finite element."""
    sizes = np.abs(array.astype(np.float64))
    return float(sizes[np.isfinite(sizes)].max(initial=0))


def epsilon_of(dtype: np.dtype) -> float:
    """Return the machine epsilon of a type; 0 for integers."""
    return float(ml_dtypes.finfo(dtype).eps) if dtype.kind in "fV" else 0.0  # type: ignore[no-untyped-call]


# ---- elements, compared a chunk at a time ----------------------------------------------------------------------------

_CHUNK = 1 << 20
"""Elements that are compared at a time: eight megabytes of float64 per temporary array."""


class Distance(NamedTuple):
    """The difference of two tensors of the same shape."""

    differ: int = 0
    """Number of elements that differ by more than the tolerance."""
    absolute: float = 0.0
    """Largest difference."""
    relative: float = 0.0
    """Largest difference relative to the larger of the two numbers."""


def compare_elements(a: np.ndarray, b: np.ndarray, atol: float = 0.0, rtol: float = 0.0) -> Distance:
    """Compare elements; NaN equals NaN. A difference counts beyond `atol` plus `rtol` times the number in `b`."""
    a, b = a.reshape(-1), b.reshape(-1)
    chunks = [slice(at, at + _CHUNK) for at in range(0, a.size, _CHUNK)]
    distances = [_compare_chunk(a[chunk], b[chunk], atol, rtol) for chunk in chunks] or [Distance()]
    differ, absolute, relative = zip(*distances, strict=True)
    return Distance(sum(differ), max(absolute), max(relative))


def _compare_chunk(a: np.ndarray, b: np.ndarray, atol: float, rtol: float) -> Distance:
    if a.dtype == b.dtype and not a.dtype.hasobject and np.array_equal(_bits(a), _bits(b)):  # quick, and usual
        return Distance()
    if not (_is_numeric(a) and _is_numeric(b)):
        count = int(np.count_nonzero(a != b))
        return Distance(count, math.inf, math.inf) if count else Distance()
    if a.dtype == b.dtype:
        unequal = a != b
        a, b = a[unequal], b[unequal]
    if not a.size:
        return Distance()
    dtype = np.complex128 if "c" in (a.dtype.kind, b.dtype.kind) else np.float64
    with np.errstate(all="ignore"):
        x, y = a.astype(dtype), b.astype(dtype)
        same, apart = (np.isnan(x) & np.isnan(y)) | (x == y), np.abs(x - y)
        if a.dtype.kind in "iu" and b.dtype.kind in "iu":  # large integers are rounded to float64
            same, apart = a == b, np.maximum(apart, 1)
        apart = np.where(same, 0.0, apart)
        apart = np.where(np.isnan(apart), np.inf, apart)
        relative = np.where(apart == 0, 0.0, apart / np.maximum(np.abs(x), np.abs(y)))
        beyond = ~same & ~(apart <= atol + rtol * np.abs(y))
    return Distance(
        int(np.count_nonzero(beyond)), float(apart.max()), float(np.nan_to_num(relative, nan=math.inf).max())
    )


def _bits(array: np.ndarray) -> np.ndarray:
    """Return the bytes as integers, which compare quickly."""
    flat = np.ascontiguousarray(array).view(np.uint8)
    return flat.view(np.uint64) if flat.size % 8 == 0 else flat


def _is_numeric(array: np.ndarray) -> bool:
    """True if elements are numbers; types of `ml_dtypes` have the kind `V`."""
    return array.dtype.kind in "biufcV" and not array.dtype.hasobject and array.dtype.names is None


# ---- gradients that are rounding errors ------------------------------------------------------------------------------

# Some gradients are only rounding errors, such as that of a bias before a normalization. Adam divides a gradient by its
# size, so that such elements make full updates in directions that differ on every engine. The loss does not change.

ROUNDINGS = 32
"""Gradients below this many roundings of a step's largest gradient count as zero."""
_CANCELLED = Tolerance.relative / 10
"""Relative difference of gradients that an update may amplify beyond the tolerance."""


def distances_without_noise(
    engine: Engine, reference: Engine, expected: Sequence[Arrays], batches: Sequence[Arrays]
) -> list[float]:
    """Return the distance of an engine to the reference after each step, if both begin it with the same state.

    `expected` are the states of the reference before each step and after the last. Elements that follow rounding errors
    on both sides are not compared.
    """
    distances = []
    for before, after, batch in zip(expected[:-1], expected[1:], batches, strict=True):
        for side in (engine, reference):
            side.load_state(before)
        mine, theirs = (noise_in(gradients_of(side, batch)) for side in (engine, reference))
        both = {name: mine[name] & theirs[name] for name in mine.keys() & theirs.keys()}
        engine.step(batch)
        distances.append(farthest(engine.state(), after, _followers(engine, both)))
    return distances


def gradients_of(engine: Engine, batch: Arrays) -> Arrays:
    """Return the gradients of a step; none if it has no gradient of its own."""
    try:
        return engine.gradients(batch)
    except UnsupportedError:
        return {}


def noise_in(gradients: Arrays, others: Arrays | None = None) -> dict[str, np.ndarray]:
    """Return masks of the gradients that are rounding errors; gradients in 16 bits are sums in float32.

    With the gradients of the other side, those are noise, too, that agree as sums do, but differ by a large part of
    themselves: large terms cancelled, and Adam amplifies what is left.
    """
    top = max(map(largest, gradients.values()), default=0.0)
    noise = {}
    for name, gradient in gradients.items():
        rounding = ROUNDINGS * min(epsilon_of(gradient.dtype), epsilon_of(np.dtype(np.float32))) * top
        noise[name] = np.abs(gradient) <= rounding
        other = (others or {}).get(name)
        if other is not None and other.shape == gradient.shape:
            difference = np.abs(other - gradient)
            agree = difference <= max(rounding, Tolerance.relative * largest(gradient))
            noise[name] |= agree & (difference > _CANCELLED * np.abs(gradient))
    return noise


def _followers(engine: Engine, noise: Arrays) -> Arrays:
    """Return the masks of parameters for the parameters and for their optimizer state of the same shape."""
    masks = {}
    for state in engine.states():
        mask = noise.get(state.parameter or state.name)
        if mask is not None and mask.shape == state.array.shape:
            masks[state.name] = mask
    return masks
