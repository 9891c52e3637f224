"""Process groups of `torch.distributed`."""

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
    """Processes of torchrun, Ray Train or another launcher that sets the environment variables of torch.distributed."""

    def __init__(self, device: str = "cpu"):
        if not dist.is_initialized():
            store, rank, size = open_store()
            backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
            dist.init_process_group(backend, store=store, rank=rank, world_size=size)
            atexit.register(dist.destroy_process_group)  # its threads would outlive the interpreter
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._on_host = dist.new_group(backend="gloo") if "gloo" not in dist.get_backend() else None

    def for_thread(self) -> TorchProcessGroup:
        other = copy.copy(self)
        other._on_host = dist.new_group(backend="gloo")
        return other

    def sum(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the sums, with one all-reduce per type."""
        results = list(arrays)
        for dtype in {array.dtype for array in arrays}:
            indices = [i for i, array in enumerate(arrays) if array.dtype == dtype]
            flat = np.concatenate([arrays[i].reshape(-1) for i in indices])
            with _explain_failures():
                dist.all_reduce(torch.from_numpy(flat), group=self._on_host)
            ends = np.cumsum([arrays[i].size for i in indices])
            for i, total in zip(indices, np.split(flat, ends[:-1]), strict=True):
                results[i] = total.reshape(arrays[i].shape)
        return results

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        with _explain_failures():
            dist.all_gather_object(values, value, group=self._on_host)
        return values


@contextlib.contextmanager
def _explain_failures() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise TrainingError(
            f"another process does not answer: {first_line(error)}",
            hint="see its own output for the reason; restart automatically with `--restarts 3`",
        ) from error


def open_store() -> tuple[Any, int, int]:
    """Return the key-value store of this attempt, the rank and the number of processes."""
    store, rank, size = next(dist.rendezvous("env://"))
    # torchrun keeps its store across restarts, with the addresses of dead processes: each attempt needs own keys.
    return dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store), rank, size
