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
from onward.engines.torch.types import from_array, to_array
from onward.errors import Error, UnsupportedError
from onward.frameworks.program.child import try_out
from onward.frameworks.program.trial import StepTrial, step_trial
from onward.frameworks.torch.module import OnnxModule
from onward.frameworks.torch.schedulers import updates_per_step
from onward.frameworks.torch.source import child
from onward.frameworks.torch.source.program import LIVE
from onward.inspect import describe
from onward.model import Model
from onward.run_state.training_models import from_training_model


def try_files(program: Path, state: Path, live: OnnxModule, model: Model) -> None:
    """Let a process of its own load the files, compute outputs and make steps, and compare."""
    inputs, expected = _example(live)
    trial = _step_trial(model)
    with tempfile.TemporaryDirectory() as folder:
        given, results = Path(folder, "given.pt"), Path(folder, "results.pt")
        torch.save(inputs, given)
        batch = [] if trial is None else [trial.save(Path(folder), **_settings(model))]
        if not try_out(child.__file__, program, state, given, results, *batch):
            return
        found = torch.load(results, weights_only=True)
    _compare_state(found["state"], live)
    _compare(found["outputs"], expected, live)
    if trial is not None:
        trial.compare(found["losses"], same_random_numbers=False)


def _step_trial(model: Model) -> StepTrial | None:
    """Steps to repeat, if what they are fed is all that a module takes."""
    trial = step_trial(model)
    return trial if trial is not None and all(value.name in trial.batch for value in model.inputs) else None


def _settings(model: Model) -> dict[str, Any]:
    """Return what a training loop must know: see the heading of a program."""
    terms, run = describe(model).steps[0].loss.terms, from_training_model(model)
    return {
        "inputs": [value.name for value in model.inputs],
        "terms": [[term.output, list(term.inputs)] for term in terms],
        "is_own": len(terms) == 1 and terms[0].name == "value",
        "every": updates_per_step(run),
        "step": run.step,
    }


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
