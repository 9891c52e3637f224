"""Arguments at which formulas lose digits, overflow or have no value, and comparison at all of them."""

from __future__ import annotations

from typing import Any

import numpy as np

_SIZES = (0.0, 1e-30, 1e-8, 3e-6, 1e-4, 0.3, 0.49999997, 0.5, 1, 1.5, 2.5, 3.7, 9, 20, 88, 105, 8388609, 1e20, np.inf)
NUMBERS = np.array([*_SIZES, *(-size for size in _SIZES), np.nan], np.float32)

_FIRST = (0.0, 1e-8, 0.5, 1, 3, 7.5, 1e20, 3e38, np.inf)
_SECOND = (0.0, 0.5, 1, 2, 3.5, 1e20, np.inf)


def pairs() -> tuple[np.ndarray, np.ndarray]:
    first, second = (np.array([*sizes, *(-x for x in sizes), np.nan], np.float32) for sizes in (_FIRST, _SECOND))
    a, b = np.meshgrid(first, second)
    return a.ravel(), b.ravel()


def assert_equal_everywhere(found: Any, expected: Any, arguments: Any, name: str, rtol: float = 4e-6) -> None:
    """Compare relative to each element. Below the smallest normal number frameworks write 0, and so may we."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), name
    with np.errstate(all="ignore"):
        close = np.abs(found.astype(np.float64) - expected) <= rtol * np.abs(expected.astype(np.float64)) + 1.2e-38
    wrong = ~((found == expected) | (np.isnan(found) & np.isnan(expected)) | close)
    places = [(*(x[i] for x in arguments), found[i], expected[i]) for i in np.flatnonzero(wrong)[:5]]
    assert not places, f"{name}: {places}"
