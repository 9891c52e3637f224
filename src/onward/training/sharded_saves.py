"""Saving what several processes hold: each writes its parts into one data file, while steps go on.

What is saved is a whole training model, whoever wrote which bytes of it. See docs/decisions/0044-sharded-saves.md.
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
from onward.model.storage.data import DividedTensor, Parts, Writers, write_parts
from onward.model.storage.files import reason
from onward.model.storage.tensor_places import inside
from onward.training.folder import Folder
from onward.training.run import Place

_SMALL = 1024
"""Bytes. Smaller tensors are in the model file itself, for which the first process needs all of them."""


class Background:
    """Something that goes on while steps are made. It does not outlive the program."""

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
        """Wait for its end; what went wrong in it goes wrong here."""
        self._thread.join()
        if self._error is not None:
            raise self._error


class ShardedSaves:
    """Saves of a run by all of its processes together, one after the other."""

    def __init__(self, folder: Folder, engine: Engine):
        self._folder, self._engine = folder, engine
        self._group = engine.group.for_thread()

    def begin(self, parts: Mapping[str, StateShard], at: Place) -> Background:
        """Write the state of which these are this process's parts, and where the run stands with it."""
        small = {name: part for name, part in parts.items() if part.size * part.numbers.itemsize < _SMALL}
        gathered = self._engine.group.gather(small)
        large = {name: (part.start, part.numbers) for name, part in parts.items() if name not in small}
        if not self._group.is_first:
            return Background(lambda: _follow(self._group, large))
        model, place = self._divided_model(gathered, large), dataclasses.replace(at)
        return Background(lambda: _lead(self._group, lambda others: self._folder.save(model, place, others)))

    def _divided_model(self, gathered: Sequence[Mapping[str, StateShard]], large: Parts) -> Model:
        def hold(name: str, tensor: ir.TensorProtocol) -> ir.TensorProtocol:
            if tensor.nbytes >= _SMALL:
                return DividedTensor(name, large.get(name), tensor)
            whole = np.empty(tensor.size, tensor.dtype.numpy())
            for part in (parts[name] for parts in gathered if name in parts):
                whole[part.start : part.start + part.numbers.size] = part.numbers.reshape(-1)
            return inside(tensor, whole.reshape(tensor.shape.numpy()))

        return self._engine.with_state(hold)


def _lead(group: ProcessGroup, save: Callable[[Writers], None]) -> None:
    others = _Others(group)
    try:
        save(others)
    finally:
        others.release()


def _follow(group: ProcessGroup, parts: Parts) -> None:
    """Write what the first process asks for, and tell it what came of that."""
    if (asked := group.gather(None)[0]) is None:
        return
    file, offsets = asked
    problem, ranges = None, []
    try:
        ranges = write_parts(file, offsets, parts)
    except Exception as error:
        problem = f"{reason(error)} (process {group.rank})"
    group.gather((problem, ranges))


class _Others:
    """The other processes, for the first one: they are asked to write, and then whether they have."""

    def __init__(self, group: ProcessGroup):
        self._group = group
        self._file: Path | None = None
        self._asked = 0

    def start(self, file: Path, offsets: Mapping[str, int]) -> None:
        self._file = file
        self._ask((file, dict(offsets)))

    def finish(self) -> Ranges:
        if self._file is None:  # there was nothing to write
            return {}
        answers = list(filter(None, self._ask(None)))  # the first process has none
        if problem := next((problem for problem, _ in answers if problem), None):
            raise WriteError(
                f"could not write `{self._file}`: {problem}", hint="all processes must reach the folder of the run"
            )

        return {self._file.name: [one for _, ranges in answers for one in ranges]}

    def release(self) -> None:
        """Let nobody wait for a question that will not come."""
        if self._asked < 2:
            with contextlib.suppress(TrainingError):  # they may not be there any more
                self._ask(None)

    def _ask(self, question: Any) -> list[Any]:
        self._asked += 1
        return self._group.gather(question)
