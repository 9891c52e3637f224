"""Failures of PyTorch's exporter, and of modules under it: what is wrong, and what the user can do about it."""

from __future__ import annotations

import copy
import sysconfig
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn.utils.rnn import PackedSequence

from onward.errors import DataError, UnsupportedError, first_line
from onward.frameworks.torch.arguments import Flat


def explain(error: Exception, what: str = "the module") -> UnsupportedError:
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
            f"the forward pass decides by the values of tensors what to do ({_place(causes)}), and a graph cannot",
            hint="choose by `torch.where`, or write both branches with `torch.cond`",
        )
    for cause in causes:
        if isinstance(cause, DynamicOutputShapeException) and "ctc_loss" in str(cause):
            return UnsupportedError(
                "PyTorch cannot trace `ctc_loss`",
                hint="let the module return its log-probabilities, and say the loss: `loss=nn.CTCLoss()`",
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
            hint=f"check shapes and types of the example: {_show_inputs(flat.inputs)}",
        )
    return None


def _has_packed(error: BaseException) -> bool:
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(isinstance(value, PackedSequence) for frame in frames for value in frame.f_locals.values())


def _place(causes: Sequence[BaseException]) -> str:
    """The last line of the user's own code on the way to an error, or to what caused it."""
    frames = [frame for cause in causes for frame in traceback.extract_tb(cause.__traceback__)]
    own = [frame for frame in frames if _is_users(frame.filename)]
    in_files = [frame for frame in own if not frame.filename.startswith("<")]  # `<string>`: what a library wrote itself
    for frame in (in_files or own)[-1:]:
        return f"{frame.filename}, line {frame.lineno}"
    return first_line(causes[0])


_HOMES = [Path(str(torch.__file__)).parent, Path(__file__).parents[2]]
"""The packages of PyTorch and Onward."""
_LIBRARY = Path(sysconfig.get_path("stdlib"))


def _is_users(filename: str) -> bool:
    """Whether a file is neither ours nor of PyTorch or Python, wherever these are installed."""
    path = Path(filename)
    of_python = path.is_relative_to(_LIBRARY) and "site-packages" not in path.relative_to(_LIBRARY).parts
    return not of_python and not any(path.is_relative_to(home) for home in _HOMES)


def _show_inputs(inputs: Mapping[str, torch.Tensor]) -> str:
    return ", ".join(f"`{name}` {str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for name, x in inputs.items())
