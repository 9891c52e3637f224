"""The one rule by which two tensors count as the same, and what is said where they do not.

Two tensors of the same shape agree if no two of their elements are further apart than the larger of

- `relative` times the scale of the tensor: its largest element, but at least 1e-3; or, of an update, the largest
  change that it makes;
- four roundings of its largest element: in its own type, or in a narrower one that was computed with.

`relative` is 1e-4 for what is computed of data: sums, which everyone adds up in another order. It is 1e-5 for the
update of an optimizer, which is made element by element. It does not grow with the number of steps: few are made, or
each one begins with the same state on both sides. Elements whose gradient is nothing but rounding are not compared (see
`noise`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import ml_dtypes
import numpy as np

from onward.agreement.elements import compare_elements
from onward.errors import MismatchError

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
