"""Saves of sharded state: each process writes its shards into one data file while steps continue.

The result is a whole training model. See docs/decisions/0044-sharded-saves.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.engines import Engine
from onward.engines.distributed import ProcessGroup
from onward.engines.engine import StateShard
from onward.errors import TrainingError, WriteError
from onward.model import Model
from onward.model.storage.checksums import Ranges
from onward.model.storage.data import DividedTensor, Parts, write_parts
from onward.model.storage.files import reason
from onward.model.storage.tensor_sites import inside
from onward.training.folder import Folder
from onward.training.run import Position

_SMALL = 1024
"""Bytes. Smaller tensors are in the model file itself, so the first process gathers them."""


class BackgroundTask:
    """A thread that runs a function while steps continue. It ends with the program."""

    def __init__(self, work: Callable[[], None]):
        self._work = work
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = error

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def finish(self) -> None:
        """Wait for the end, and raise the exception of the function, if any."""
        self._thread.join()
        if self._error is not None:
            raise self._error


class ShardedSaves:
    """Saves of a run by all its processes, one after the other."""

    def __init__(self, folder: Folder, engine: Engine):
        self._folder, self._engine = folder, engine
        self._group = engine.group.for_thread()

    def begin(self, parts: Mapping[str, StateShard], position: Position) -> BackgroundTask:
        """Start to write the position and the state. `parts` are the shards of this process."""
        small = {name: shard for name, shard in parts.items() if shard.size * shard.numbers.itemsize < _SMALL}
        gathered = self._engine.group.gather(small)
        large = {name: (shard.start, shard.numbers) for name, shard in parts.items() if name not in small}
        if not self._group.is_first:
            return BackgroundTask(lambda: _follow(self._group, large))
        model, snapshot = self._divided_model(gathered, large), dataclasses.replace(position)

        def save() -> None:
            others = _OtherProcesses(self._group)
            try:
                self._folder.save(model, snapshot, others)
            finally:
                others.release()

        return BackgroundTask(save)

    def _divided_model(self, gathered: Sequence[Mapping[str, StateShard]], large: Parts) -> Model:
        def assemble(name: str, tensor: ir.TensorProtocol) -> ir.TensorProtocol:
            if tensor.nbytes >= _SMALL:
                return DividedTensor(name, large.get(name), tensor)
            whole = np.empty(tensor.size, tensor.dtype.numpy())
            for shard in (parts[name] for parts in gathered if name in parts):
                whole[shard.start : shard.start + shard.numbers.size] = shard.numbers.reshape(-1)
            return inside(tensor, whole.reshape(tensor.shape.numpy()))

        return self._engine.with_state(assemble)


def _follow(group: ProcessGroup, parts: Parts) -> None:
    """Write the shards that the first process requests, and report the result to it."""
    if (request := group.gather(None)[0]) is None:
        return
    file, offsets = request
    problem, ranges = None, []
    try:
        ranges = write_parts(file, offsets, parts)
    except Exception as error:
        problem = f"{reason(error)} (process {group.rank})"
    group.gather((problem, ranges))


class _OtherProcesses:
    """The other processes, as seen by the first: asked to write, and then for their results."""

    def __init__(self, group: ProcessGroup):
        self._group = group
        self._file: Path | None = None
        self._asked = 0

    def start(self, file: Path, offsets: Mapping[str, int]) -> None:
        self._file = file
        self._ask((file, dict(offsets)))

    def finish(self) -> Ranges:
        if self._file is None:  # nothing to write
            return {}
        answers = list(filter(None, self._ask(None)))  # the first process does not answer
        if problem := next((problem for problem, _ in answers if problem), None):
            raise WriteError(
                f"could not write `{self._file}`: {problem}", hint="put the run folder where all processes can write"
            )

        return {self._file.name: [piece for _, ranges in answers for piece in ranges]}

    def release(self) -> None:
        """Answer processes that still wait for a question."""
        if self._asked < 2:
            with contextlib.suppress(TrainingError):  # they may have ended
                self._ask(None)

    def _ask(self, question: Any) -> list[Any]:
        self._asked += 1
        return self._group.gather(question)
