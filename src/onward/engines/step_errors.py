"""Failing steps: bugs in Onward, lack of memory, and loops that never end."""

from __future__ import annotations

import contextlib
import os
import re
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import onnx_ir as ir

from onward.constants import constant_tensor
from onward.errors import OutOfMemoryError, UnsupportedError
from onward.model.walk import source_of
from onward.standard import is_standard

_OURS = (AssertionError, AttributeError, KeyError, NameError)
_OF_PYTHON = re.compile(
    r"missing \d+ required|takes (from )?\d+|unexpected keyword|multiple values|object is not|object has no"
    r"|unsupported operand|cannot unpack|^(list|tuple|string|range object) .*index out of range|from empty"
)
"""Messages of Python for wrong calls and indices. Frameworks raise the same classes."""


def is_ours(error: Exception) -> bool:
    """True if an error comes from a bug in Onward: a line of it raised the error, not a framework."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    if not str(frame.f_globals.get("__name__")).startswith("onward."):
        return False
    return isinstance(error, _OURS) or (
        type(error) in (TypeError, IndexError, ValueError) and _OF_PYTHON.search(str(error)) is not None
    )


# ---- steps that do not fit into memory -------------------------------------------------------------------------------


_OUT_OF_MEMORY = re.compile(
    r"out of memory|RESOURCE_EXHAUSTED|OOM when|(can't|unable to|failed to) allocate", re.IGNORECASE
)


@contextlib.contextmanager
def memory_of(engine: str) -> Iterator[None]:
    """Raise `OutOfMemoryError` in place of the memory errors of an engine."""
    try:
        yield
    except Exception as error:
        first = str(error).partition("\n")[0]
        if isinstance(error, OutOfMemoryError) or not (isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(first)):
            raise
        raise OutOfMemoryError(
            f"the step does not fit into the memory of {engine}: {first}",
            hint="make batches smaller, and `accumulate` their gradients; or compute in fewer bits: "
            "`precision=bfloat16`",
        ) from error


# ---- endless loops: refused if the graph shows it, stopped when they fill the memory ---------------------------------

_ENDLESS = 1 << 40
"""Iterations beyond any run: days even at a microsecond each."""
_COPIES = ("Identity",)
_LOOK_EVERY = 4096
"""Iterations between two checks of the size."""
_OVERHEAD = 200
"""Bytes of a tensor besides its elements."""


def refuse_endless_loops(graphs: Iterable[ir.Graph]) -> None:
    for graph in graphs:
        for node in graph.all_nodes():
            if node.op_type == "Loop" and is_standard(node) and _is_endless(node):
                raise UnsupportedError(
                    f"`Loop` (node `{node.name or node.outputs[0].name}`) never ends: its condition stays true",
                    hint="give it a number of iterations, or a condition that becomes false",
                )


def _is_endless(node: ir.Node) -> bool:
    trips, condition = [*node.inputs, None, None][:2]
    count = _constant_of(trips)
    if trips is not None and (count is None or count < _ENDLESS):
        return False
    body = node.attributes["body"].as_graph()
    next_condition = source_of(body.outputs[0], _COPIES)
    starts = condition is None or bool(_constant_of(condition))
    return starts and (next_condition is body.inputs[1] or bool(_constant_of(next_condition)))


def _constant_of(value: ir.Value | None) -> Any:
    """Return the number if a value is a constant scalar, else None."""
    value = source_of(value, _COPIES)
    if value is None or value.is_graph_input():
        return None
    tensor = constant_tensor(value)
    return tensor.numpy().item() if tensor is not None and tensor.size == 1 else None


def check_growth(rows: list[list[Any]]) -> None:
    """Raise if the collected outputs of a Loop, one row per iteration, exceed the memory."""
    if len(rows) % _LOOK_EVERY:
        return
    size = len(rows) * sum(_OVERHEAD + getattr(tensor, "nbytes", 0) for tensor in rows[-1])
    if size > _memory():
        raise OutOfMemoryError(
            f"a Loop has collected more than fits into memory, after {len(rows):,} iterations",
            hint="check that its condition becomes false",
        )


def _memory() -> int:
    """Return the memory of this machine in bytes, or the limit of this process's cgroup."""
    if not hasattr(os, "sysconf"):  # Windows
        return 1 << 36
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no limit
        return total
