"""The next items are made in another thread while the current one is used."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

_PATIENCE = 0.1  # seconds until a thread that waits looks whether it is still needed
_END = object()


class _Failure:
    def __init__(self, error: BaseException):
        self.error = error


def prefetch(items: Iterable[T], depth: int) -> Iterator[T]:
    """The items, `depth` of them ahead. Errors come out where their item would; leaving early ends the thread."""
    ready: queue.Queue[Any] = queue.Queue(depth)
    is_over = threading.Event()

    def put(item: Any) -> bool:
        while not is_over.is_set():
            try:
                ready.put(item, timeout=_PATIENCE)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for item in items:
                if not put(item):
                    return
            put(_END)
        except BaseException as error:  # whatever it is belongs to the one who asked
            put(_Failure(error))

    thread = threading.Thread(target=work, name="onward-data", daemon=True)
    thread.start()
    try:
        while True:
            item = _get(ready)
            if item is _END:
                return
            if isinstance(item, _Failure):
                raise item.error
            yield item
    finally:
        is_over.set()
        thread.join(timeout=2)  # a stream that waits for something may stay; it is a daemon, and ends with the process


def _get(ready: queue.Queue[Any]) -> Any:
    while True:
        try:
            return ready.get(timeout=1)  # not for ever: some systems hear no Ctrl-C in a wait without an end
        except queue.Empty:
            continue
