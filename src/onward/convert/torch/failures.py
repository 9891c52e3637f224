"""Failures of PyTorch's exporter, and of modules under it: what is wrong, and what the user can do about it."""

from __future__ import annotations

import copy
import re
import traceback
from collections.abc import Mapping

import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn.utils.rnn import PackedSequence

from onward.convert.torch.arguments import Flat
from onward.errors import DataError, UnsupportedError, first_line


def explained(error: Exception, what: str = "the module") -> UnsupportedError:
    """What the user can do about a failure of the exporter."""
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    if any(_has_packed(cause) for cause in causes):
        return UnsupportedError(
            "the module packs sequences of different lengths (`pack_padded_sequence`), and a graph cannot",
            hint="run over padded sequences, and leave out the padding after that, by a mask for example",
        )
    if any(isinstance(cause, GuardOnDataDependentSymNode) for cause in causes):
        return UnsupportedError(
            f"the forward pass decides by the values of tensors what to do ({_place(error)}), and a graph cannot",
            hint="choose by `torch.where`, or write both branches with `torch.cond`",
        )
    return UnsupportedError(
        f"PyTorch cannot export {what}: {first_line(causes[-1])}",
        hint="`torch.onnx.export(module, example_inputs, dynamo=True, optimize=False)` says more",
    )


def fault_of_example(flat: Flat) -> DataError | None:
    """How the module fails with the example by itself, if it does."""
    try:
        with torch.no_grad(), torch.random.fork_rng():
            copy.deepcopy(flat)(*flat.inputs.values())
    except Exception as error:
        return DataError(
            f"the module fails with the example: {first_line(error)}",
            hint=f"check shapes and types of the example: {_shown(flat.inputs)}",
        )
    return None


def _has_packed(error: BaseException) -> bool:
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(isinstance(value, PackedSequence) for frame in frames for value in frame.f_locals.values())


def _place(error: BaseException) -> str:
    """The last line of the user's own code on the way to an error."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not re.search(r"[/\\](torch|onward)[/\\]", f.filename)]
    return f"{own[-1].filename}, line {own[-1].lineno}" if own else first_line(error)


def _shown(inputs: Mapping[str, torch.Tensor]) -> str:
    return ", ".join(f"`{name}` {str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for name, x in inputs.items())
