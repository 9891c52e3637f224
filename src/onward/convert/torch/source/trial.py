"""Whether a program is the live module over again: the same state, and the same outputs."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onward.agreement.data import example_inputs
from onward.agreement.steps import epsilon_in, types_in
from onward.agreement.tolerance import Comparison, Tolerance
from onward.convert.program.child import try_out
from onward.convert.torch.module import OnnxModule
from onward.convert.torch.source import child
from onward.convert.torch.source.program import LIVE
from onward.engines.torch.types import from_array, to_array
from onward.errors import Error, UnsupportedError


def try_files(program: Path, state: Path, live: OnnxModule) -> None:
    """Let a process of its own load the files and compute outputs, and compare."""
    inputs, expected = _example(live)
    with tempfile.TemporaryDirectory() as folder:
        given, results = Path(folder, "given.pt"), Path(folder, "results.pt")
        torch.save(inputs, given)
        if not try_out(child.__file__, program, state, given, results):
            return
        found = torch.load(results, weights_only=True)
    _compare_state(found["state"], live)
    _compare(found["outputs"], expected, live)


def try_module(made: nn.Module, live: OnnxModule) -> None:
    """The same for what a program has made here."""
    _compare_state({name: list(x.shape) for name, x in made.state_dict().items()}, live)
    inputs, expected = _example(live)
    if inputs is not None:
        _compare(_outputs(made, inputs), expected, live)


def _example(live: OnnxModule) -> tuple[list[torch.Tensor] | None, dict[str, Any]]:
    """Inputs that are made up, and what the live module makes of them; None if it takes none."""
    for named in example_inputs(live.to_model()):
        inputs = [from_array(array) for array in named.values()]
        try:
            return inputs, _outputs(live, inputs)
        except (Error, RuntimeError, IndexError):
            continue
    return None, {}


def _outputs(module: nn.Module, inputs: list[torch.Tensor]) -> dict[str, Any]:
    with torch.no_grad():
        made = copy.deepcopy(module).eval()(*inputs)
    return made if isinstance(made, dict) else {"": made}


def _compare_state(found: Mapping[str, list[int]], live: OnnxModule) -> None:
    if list(found.items()) != [(name, list(x.shape)) for name, x in live.state_dict().items()]:
        raise UnsupportedError("names of parameters are none of Python's", hint=LIVE)


def _compare(found: Mapping[str, Any], expected: Mapping[str, Any], live: OnnxModule) -> None:
    ours, theirs = ({name: to_array(x) for name, x in outputs.items()} for outputs in (found, expected))
    tolerance = Tolerance(epsilon=epsilon_in(types_in(live.to_model())), least=0.0, equal_nan=True)
    hint = "please report the model; the live module is `onward.to_torch(training)`"
    Comparison("that of the live module", hint, tolerance, _describe)(ours, theirs)


def _describe(output: str) -> str:
    return f"`{output or 'the output'}` of the program"
