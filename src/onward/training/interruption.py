"""Ctrl-C as a wish and not as an accident: what is under way is finished first."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """Within it, the first Ctrl-C (or SIGTERM) only sets `wanted`; a second one ends the program as usual.

    Signals are heard in the main thread alone, so elsewhere this does nothing. One that is ignored stays so: a shell
    starts jobs in the background like that, for which Ctrl-C is not meant.
    """

    def __init__(self, say: Callable[[str], None]):
        self._say = say
        self._wanted = threading.Event()
        self._before: dict[int, Any] = {}

    @property
    def wanted(self) -> bool:
        return self._wanted.is_set()

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            heard = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._hear) for number in heard}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._restore()
        self._wanted.set()
        with contextlib.suppress(RuntimeError):  # it may come in the middle of printing something else
            self._say("finishing the step, then saving; Ctrl-C again to stop at once")

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}
