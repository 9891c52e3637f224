"""Processes that torch.distributed connects."""

from __future__ import annotations

import atexit
import contextlib
import copy
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from onward.engines.distributed import ProcessGroup
from onward.errors import TrainingError, first_line


class TorchProcessGroup(ProcessGroup):
    """The processes of torchrun, Ray Train or anything else that sets the variables which torch.distributed reads."""

    def __init__(self, device: str = "cpu"):
        if not dist.is_initialized():
            store, rank, size = open_store()
            backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
            dist.init_process_group(backend, store=store, rank=rank, world_size=size)
            atexit.register(dist.destroy_process_group)  # whose threads would outlive the interpreter
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._on_host = dist.new_group(backend="gloo") if "gloo" not in dist.get_backend() else None

    def for_thread(self) -> TorchProcessGroup:
        other = copy.copy(self)
        other._on_host = dist.new_group(backend="gloo")
        return other

    def sum(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """All arrays of a type travel as one."""
        results = list(arrays)
        for dtype in {array.dtype for array in arrays}:
            places = [i for i, array in enumerate(arrays) if array.dtype == dtype]
            flat = np.concatenate([arrays[i].reshape(-1) for i in places])
            with _explain_failures():
                dist.all_reduce(torch.from_numpy(flat), group=self._on_host)
            ends = np.cumsum([arrays[i].size for i in places])
            for i, part in zip(places, np.split(flat, ends[:-1]), strict=True):
                results[i] = part.reshape(arrays[i].shape)
        return results

    def gather(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        with _explain_failures():
            dist.all_gather_object(found, value, group=self._on_host)
        return found


@contextlib.contextmanager
def _explain_failures() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise TrainingError(
            f"a process that trains with this one does not answer: {first_line(error)}",
            hint="what it said itself tells why; with `--restarts N` a run goes on after such failures",
        ) from error


def open_store() -> tuple[Any, int, int]:
    """Where processes of this attempt leave word for each other; the rank of this one, and how many there are."""
    store, rank, size = next(dist.rendezvous("env://"))
    # torchrun keeps its store over restarts, and addresses of processes that are gone with it.
    return dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store), rank, size
