"""Processes that are threads of one, to try quickly what several compute together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import pytest

from onward.engines.distributed import ProcessGroup

_T = TypeVar("_T")


class ThreadGroup(ProcessGroup):
    def __init__(self, rank: int, size: int, barrier: threading.Barrier, said: list[Any]):
        self.rank, self.size = rank, size
        self._barrier, self._said = barrier, said

    def sum(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [np.asarray(sum(parts[1:], start=parts[0])) for parts in zip(*self.gather(list(arrays)), strict=True)]

    def gather(self, value: Any) -> list[Any]:
        self._said[self.rank] = value
        self._barrier.wait(60)
        said = list(self._said)
        self._barrier.wait(60)
        return said


def run_together(size: int, monkeypatch: pytest.MonkeyPatch, function: Callable[[ProcessGroup], _T]) -> list[_T]:
    """What a function returns in each of so many threads, which engines take for processes."""
    barrier, said = threading.Barrier(size), [None] * size
    current = threading.local()
    monkeypatch.setattr("onward.engines.onnxruntime.join_group", lambda device="cpu": current.group)

    def run(rank: int) -> _T:
        current.group = ThreadGroup(rank, size, barrier, said)
        try:
            return function(current.group)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return [future.result() for future in [pool.submit(run, rank) for rank in range(size)]]
