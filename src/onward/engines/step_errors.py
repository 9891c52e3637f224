"""Steps that fail: whose fault it is, steps that do not fit into memory, and loops that never end."""

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
"""What Python says of calls and lists that are wrong; frameworks use the same classes, with words of their own."""


def is_ours(error: Exception) -> bool:
    """Whether an error was raised by a line of ours, as a mistake in it would be."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    if not str(frame.f_globals.get("__name__")).startswith("onward."):
        return False
    return isinstance(error, _OURS) or (
        type(error) in (TypeError, IndexError, ValueError) and _OF_PYTHON.search(str(error)) is not None
    )


# ---- steps that do not fit into memory -------------------------------------------------------------------------------


_SIGNS = re.compile(r"out of memory|RESOURCE_EXHAUSTED|OOM when|(can't|unable to|failed to) allocate", re.IGNORECASE)
_HINT = "make batches smaller, and `accumulate` their gradients; or compute in fewer bits: `precision=bfloat16`"


@contextlib.contextmanager
def memory_of(engine: str) -> Iterator[None]:
    """Say it in the same words for all engines if there is not enough."""
    try:
        yield
    except Exception as error:
        first = str(error).partition("\n")[0]
        if isinstance(error, OutOfMemoryError) or not (isinstance(error, MemoryError) or _SIGNS.search(first)):
            raise
        raise OutOfMemoryError(f"the step does not fit into the memory of {engine}: {first}", hint=_HINT) from error


# ---- loops that never end: refused where that shows, and stopped where they fill the memory --------------------------

_ENDLESS = 1 << 40
"""Iterations that nobody lives to see the end of."""
_COPIES = ("Identity",)
_LOOK_EVERY = 4096
_OVERHEAD = 200
"""Bytes that a tensor takes beside its elements."""


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
    goes_on = source_of(body.outputs[0], _COPIES)
    starts = condition is None or bool(_constant_of(condition))
    return starts and (goes_on is body.inputs[1] or bool(_constant_of(goes_on)))


def _constant_of(value: ir.Value | None) -> Any:
    """The number that a value always is, or None."""
    value = source_of(value, _COPIES)
    if value is None or value.is_graph_input():
        return None
    tensor = constant_tensor(value)
    return tensor.numpy().item() if tensor is not None and tensor.size == 1 else None


def check_growth(rows: list[list[Any]]) -> None:
    """Refuse to go on once what a Loop has collected, a row for each iteration, is more than there is memory."""
    if len(rows) % _LOOK_EVERY:
        return
    size = len(rows) * sum(_OVERHEAD + getattr(tensor, "nbytes", 0) for tensor in rows[-1])
    if size > _memory():
        raise OutOfMemoryError(
            f"a Loop has collected more than fits into memory, after {len(rows):,} iterations",
            hint="look whether its condition ever becomes false",
        )


def _memory() -> int:
    """The memory of this machine, or of the part of it that this process may use."""
    if not hasattr(os, "sysconf"):
        return 1 << 36
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(whole, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no such limit
        return whole
