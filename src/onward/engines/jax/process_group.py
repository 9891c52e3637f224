"""Processes that JAX connects."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from onward.engines.distributed import Group

_ROOM = 1024
"""Bytes that go in one message; what is longer takes another."""


class JaxGroup(Group):
    """Processes of torchrun, those that JAX's own variables or the cluster tell of, or those that are connected."""

    def __init__(self, device: str = "cpu"):
        if not jax.distributed.is_initialized():
            _connect(device)
        self.rank, self.size = jax.process_index(), jax.process_count()
        with _stdout_to_stderr():
            self.wait()

    def sum(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [np.asarray(sum(parts[1:], start=parts[0])) for parts in zip(*self.gather(list(arrays)), strict=True)]

    def gather(self, value: Any) -> list[Any]:
        if self.size == 1:
            return [value]
        data = np.frombuffer(pickle.dumps(value), np.uint8)
        first = _exchange(np.concatenate([np.array([data.size], np.int64).view(np.uint8), data[:_ROOM]]), _ROOM + 8)
        lengths = [int(part[:8].view(np.int64)[0]) for part in first]
        if max(lengths) <= _ROOM:
            return [pickle.loads(part[8 : 8 + n].tobytes()) for part, n in zip(first, lengths, strict=True)]
        room = 1 << max(lengths).bit_length()  # few sizes, since each is compiled
        parts = _exchange(data, room)
        return [pickle.loads(part[:n].tobytes()) for part, n in zip(parts, lengths, strict=True)]


def _exchange(data: np.ndarray, room: int) -> np.ndarray:
    padded = np.zeros(room, np.uint8)
    padded[: data.size] = data
    return np.asarray(multihost_utils.process_allgather(padded))


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Send what libraries print elsewhere: gloo tells of its connections, and the output of a command may be JSON."""
    sys.stdout.flush()
    own = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(own, 1)
        os.close(own)


def _connect(device: str) -> None:
    environment = os.environ
    jax.config.update("jax_enable_preemption_service", False)  # which would keep SIGTERM from us, and from torchrun
    if "JAX_COORDINATOR_ADDRESS" in environment:
        numbers = (environment.get(name) for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"))
        size, rank = (None if number is None else int(number) for number in numbers)
        jax.distributed.initialize(environment["JAX_COORDINATOR_ADDRESS"], size, rank)
        return
    rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    own = None if device == "cpu" else int(environment["LOCAL_RANK"])
    jax.distributed.initialize(_meeting_point(rank), size, rank, local_device_ids=own)


def _meeting_point(rank: int) -> str:
    """Where processes of torchrun find each other: at a port that is free, which the first one tells the others."""
    from onward.engines.distributed.torch_group import open_store

    store, _, _ = open_store()
    if rank == 0:
        with socket.socket() as one:
            one.bind(("", 0))
            store.set("jax coordinator", f"{os.environ['MASTER_ADDR']}:{one.getsockname()[1]}")
    address: bytes = store.get("jax coordinator")
    return address.decode()
