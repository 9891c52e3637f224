"""From a training model to plain ONNX: what any runtime can execute.

    step = onward.lower("training.onnx")          # inputs: a batch and the state; outputs: metrics and the new state
    step.save("step.onnx")

Which output replaces which input says the metadata of the file, as JSON: see contract.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from onward.differentiate.recompute import Choice
from onward.errors import RecipeError
from onward.lowering.rounds import Steps
from onward.lowering.run import lower_run
from onward.lowering.runtime import for_onnxruntime
from onward.lowering.step import RUN, LoweringOptions, lower_for_engine
from onward.model import Model, Source, load
from onward.options import WholeRunOptions, with_options


@dataclasses.dataclass(frozen=True)
class _Arguments(WholeRunOptions):
    model: Source
    steps: Steps = None
    _: dataclasses.KW_ONLY
    part: str | None = None
    recompute: Choice = None


@with_options(_Arguments, step="steps")
def lower(
    model: Source, steps: Steps = None, part: str | None = None, recompute: Choice = None, **settled: Any
) -> Model:
    """A plain ONNX model for one step of a training model: only operators of the standard, no training operator.

        onward.lower("training.onnx").save("step.onnx")

    The parts:

    - `"step"`: (batch, state) -> (metrics, new state)
    - `"evaluation"`: (batch, state) -> (the metrics and outputs of the model, as inference computes them)
    - `"gradients"`: (batch, state) -> (metrics, a gradient per parameter, the state that the forward pass changes)
    - `"apply"`: (gradients, state) -> (metrics, the rest of the new state)
    - `"initialization"`: () -> the state to start from
    - `"state"`: () -> the state as it is in the file
    - `"inference"`: what the main graph computes, from its own inputs and weights, which stay as they are
    - `"run"`: (data, epochs, seed, state) -> (metrics of all steps and epochs, new state, the best state): entire
      training, as a Loop over steps

    Unless one is named it is the step, or `"inference"` of a model without any. Operators that are not of the standard
    are refused, but in `"inference"`: there all stay but training operators and functions.

    Of a model with several steps, `steps` is the number or the name of one, or says how often each runs:
    `"discriminator:2,generator"`. Unless it is given, all run, in their order, as the specification has it, and as
    often as the file says. Several are lowered as one: later ones see what earlier ones have made of the state, but in
    `"evaluation"` and `"gradients"`, where each has the state as it is.

    `recompute` names what is computed twice to save memory, as in `onward.gradient`.

    It is for the ONNX Runtime that is installed: what its operator sets lack is replaced by what that stands for.

    - `model`: a training model, or any other for `"inference"`
    - `steps`, `recompute`: see above
    - `part`: what it computes. What follows is for the part `"run"` alone
    """
    if part == RUN:
        return for_onnxruntime(lower_run(load(model), steps, LoweringOptions(recompute), WholeRunOptions(**settled)))
    if settled:
        raise RecipeError(
            f"`{next(iter(settled))}` is for the part `{RUN}` alone", hint=f'add `part="{RUN}"` (`--part {RUN}`)'
        )
    return for_onnxruntime(lower_for_engine(model, steps, part, LoweringOptions(recompute)))
