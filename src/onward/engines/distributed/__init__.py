"""Groups of processes that train together."""

from __future__ import annotations

import importlib.util
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.errors import UnsupportedError


class ProcessGroup(ABC):
    """This process and those that it trains with. All must call the same methods in the same order."""

    rank: int
    size: int
    copies: int = 1
    """Number of processes that have the same samples in the current batch."""

    @abstractmethod
    def sum(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the sum of each array over all processes."""

    @abstractmethod
    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes, by rank."""

    def for_thread(self) -> ProcessGroup:
        """Return a group of the same processes for another thread. All processes must call this."""
        return self

    def wait(self) -> None:
        """Wait for all processes."""
        self.gather(None)

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """Return, for each flag, True if it is set in any process."""
        if self.size == 1:
            return flags
        (counts,) = self.sum([np.array(flags, np.float32)])
        return tuple(bool(count) for count in counts)

    @property
    def threads(self) -> int | None:
        """This process's share of the machine's cores; None if it has all of them."""
        here = int(os.environ.get("LOCAL_WORLD_SIZE", self.size))
        return max((os.cpu_count() or 1) // here, 1) if here > 1 else None

    @property
    def is_first(self) -> bool:
        """True for rank 0, which writes files and prints."""
        return self.rank == 0

    def part(self, batch: Mapping[str, np.ndarray]) -> Portion:
        """Return this process's share of a global batch, for `engine.step`."""
        whole = max((len(array) for array in batch.values() if array.ndim), default=1)
        own = self.share(whole)
        return Portion({name: array[own] if array.ndim else array for name, array in batch.items()}, whole)

    def share(self, count: int, rank: int | None = None) -> slice:
        """Return the samples of a rank (default: this one): equal shares, the first ones with one sample more.

        If there are fewer samples than processes, each process gets all of them.
        """
        if count < self.size:
            return slice(0, count)
        rank = self.rank if rank is None else rank
        least, more = divmod(count, self.size)
        start = rank * least + min(rank, more)
        return slice(start, start + least + (rank < more))


class Portion(dict[str, np.ndarray]):
    """A process's share of a global batch."""

    def __init__(self, arrays: Mapping[str, np.ndarray], whole: int):
        super().__init__(arrays)
        self.whole = whole
        """Number of samples in the global batch."""


def copies_of(batch: object, group: ProcessGroup) -> int:
    """Return how many processes have the same samples: all if there are fewer samples than processes, else 1."""
    return group.size if isinstance(batch, Portion) and batch.whole < group.size else 1


def refuse_fixed_batches(inputs: Mapping[str, ir.Value]) -> None:
    """Raise if an input has a fixed batch size."""
    fixed = [name for name, value in inputs.items() if value.shape and isinstance(value.shape[0], int)]
    if fixed:
        raise UnsupportedError(
            f"the batch size of `{fixed[0]}` is fixed, so processes cannot share it",
            hint="export the model with a dynamic batch size, or train in one process",
        )


class Alone(ProcessGroup):
    """A single process."""

    rank, size = 0, 1

    def sum(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        return list(arrays)

    def gather(self, value: Any) -> list[Any]:
        return [value]


RESTARTED = "ONWARD_RESTARTED"
"""Environment variable that marks restarted processes, for launchers other than torchrun."""


def is_restarted() -> bool:
    """True if this process replaces a failed one."""
    return RESTARTED in os.environ or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


_joined: dict[str, ProcessGroup] = {}
"""Groups of this process by the library that connects them."""


def join_group(device: str = "cpu", engine: str = "onnxruntime") -> ProcessGroup:
    """Return the group of the processes started with this one, by torchrun or a launcher like it, such as Ray Train.

    JAX connects processes by itself, and also recognizes other launchers.
    """
    library = "jax" if engine == "jax" else "torch"
    if library not in _joined:
        _joined[library] = _connect_by_jax(device) if library == "jax" else _connect_by_torch(device)
    return _joined[library]


def current_group() -> ProcessGroup:
    """Return the group that this process has joined; else this process alone."""
    return next((group for group in _joined.values() if group.size > 1), Alone())


def _connect_by_torch(device: str) -> ProcessGroup:
    distributed = sys.modules.get("torch.distributed")
    is_connected = distributed is not None and distributed.is_available() and distributed.is_initialized()
    if not is_connected and int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Alone()
    from onward.engines.distributed.torch_group import TorchProcessGroup

    return TorchProcessGroup(device)


def _connect_by_jax(device: str) -> ProcessGroup:
    """Return the group of JAX; without JAX one process, so that the engine reports that JAX is missing."""
    jax = sys.modules.get("jax")
    has_peers = int(os.environ.get("WORLD_SIZE", "1")) > 1 or "JAX_COORDINATOR_ADDRESS" in os.environ
    is_connected = jax is not None and jax.distributed.is_initialized()
    if not (has_peers or is_connected) or importlib.util.find_spec("jax") is None:
        return Alone()
    from onward.engines.distributed.jax_mesh import JaxProcessGroup

    return JaxProcessGroup(device)
