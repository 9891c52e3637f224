"""The processes that train together, and what they say to each other."""

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
    """This process among those that train together. All call the same methods in the same order."""

    rank: int
    """Its number, from 0 on."""
    size: int
    """How many there are."""
    copies: int = 1
    """How many of them have the same samples now."""

    @abstractmethod
    def sum(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The sum of each array over all processes."""

    @abstractmethod
    def gather(self, value: Any) -> list[Any]:
        """What each process has to say, in their order."""

    def for_thread(self) -> ProcessGroup:
        """The same processes, to whom another thread talks meanwhile. All must ask for it."""
        return self

    def wait(self) -> None:
        """Go on when all are here."""
        self.gather(None)

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """Whether each flag is set in some process."""
        if self.size == 1:
            return flags
        (counts,) = self.sum([np.array(flags, np.float32)])
        return tuple(bool(count) for count in counts)

    @property
    def threads(self) -> int | None:
        """This process's part of the processors of its machine; None where they are its own."""
        here = int(os.environ.get("LOCAL_WORLD_SIZE", self.size))
        return max((os.cpu_count() or 1) // here, 1) if here > 1 else None

    @property
    def is_first(self) -> bool:
        """Whether this is the one that writes and speaks for all."""
        return self.rank == 0

    def part(self, batch: Mapping[str, np.ndarray]) -> Portion:
        """This process's part of a batch, for `engine.step`."""
        whole = max((len(array) for array in batch.values() if array.ndim), default=1)
        own = self.share(whole)
        return Portion({name: array[own] if array.ndim else array for name, array in batch.items()}, whole)

    def share(self, count: int, rank: int | None = None) -> slice:
        """Which of so many samples are this process's, or that of another rank: as many as the others', or one more.

        Fewer samples than processes are everybody's.
        """
        if count < self.size:
            return slice(0, count)
        rank = self.rank if rank is None else rank
        least, more = divmod(count, self.size)
        start = rank * least + min(rank, more)
        return slice(start, start + least + (rank < more))


class Portion(dict[str, np.ndarray]):
    """A process's part of a batch."""

    def __init__(self, arrays: Mapping[str, np.ndarray], whole: int):
        super().__init__(arrays)
        self.whole = whole
        """How many samples the whole batch has."""


def copies_of(batch: object, group: ProcessGroup) -> int:
    """How many processes have the same samples of a batch: one, or all if it has fewer samples than there are."""
    return group.size if isinstance(batch, Portion) and batch.whole < group.size else 1


def refuse_fixed_batches(inputs: Mapping[str, ir.Value]) -> None:
    """Raise if an input has a fixed batch size."""
    fixed = [name for name, value in inputs.items() if value.shape and isinstance(value.shape[0], int)]
    if fixed:
        raise UnsupportedError(
            f"`{fixed[0]}` takes batches of one size, of which processes cannot have parts",
            hint="export the model with a batch size that may vary, or train in one process",
        )


class Alone(ProcessGroup):
    """One process that trains by itself."""

    rank, size = 0, 1

    def sum(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        return list(arrays)

    def gather(self, value: Any) -> list[Any]:
        return [value]


RESTARTED = "ONWARD_RESTARTED"
"""The variable of the environment by which those who start processes say so, where torchrun does not."""


def is_restarted() -> bool:
    """Whether this process takes the place of one that has failed."""
    return RESTARTED in os.environ or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


_joined: dict[str, ProcessGroup] = {}
"""Groups that this process is in, by what connects them."""


def join_group(device: str = "cpu", engine: str = "onnxruntime") -> ProcessGroup:
    """The processes that were started together with this one, by torchrun or what does as it does, Ray Train for one.

    JAX connects its own, and knows more ways to be started.
    """
    kind = "jax" if engine == "jax" else "torch"
    if kind not in _joined:
        _joined[kind] = _connect_by_jax(device) if kind == "jax" else _connect_by_torch(device)
    return _joined[kind]


def current_group() -> ProcessGroup:
    """The processes that this one has joined, if any."""
    return next((group for group in _joined.values() if group.size > 1), Alone())


def _connect_by_torch(device: str) -> ProcessGroup:
    distributed = sys.modules.get("torch.distributed")
    is_connected = distributed is not None and distributed.is_available() and distributed.is_initialized()
    if not is_connected and int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Alone()
    from onward.engines.distributed.torch_group import TorchProcessGroup

    return TorchProcessGroup(device)


def _connect_by_jax(device: str) -> ProcessGroup:
    """Without JAX the process is alone, and the engine says what is missing."""
    jax = sys.modules.get("jax")
    has_peers = int(os.environ.get("WORLD_SIZE", "1")) > 1 or "JAX_COORDINATOR_ADDRESS" in os.environ
    is_connected = jax is not None and jax.distributed.is_initialized()
    if not (has_peers or is_connected) or importlib.util.find_spec("jax") is None:
        return Alone()
    from onward.engines.distributed.jax_mesh import JaxProcessGroup

    return JaxProcessGroup(device)
