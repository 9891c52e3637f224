"""Lowering: plain ONNX models of training models, which any runtime can execute.

    step = onward.lower("training.onnx")          # inputs: a batch and the state; outputs: metrics and the new state
    step.save("step.onnx")

The metadata of the file say, as JSON, which output replaces which input: see contract.py.
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
    """Return a plain ONNX model of one step of a training model: only standard operators.

        onward.lower("training.onnx").save("step.onnx")

    The parts:

    - `"step"`: (batch, state) -> (metrics, new state)
    - `"evaluation"`: (batch, state) -> (the metrics and outputs of the model, as inference computes them)
    - `"gradients"`: (batch, state) -> (metrics, a gradient per parameter, the state that the forward pass changes)
    - `"apply"`: (gradients, state) -> (metrics, the rest of the new state)
    - `"initialization"`: () -> the initial state
    - `"state"`: () -> the state in the file
    - `"inference"`: the main graph with its own inputs and weights
    - `"run"`: (data, epochs, seed, state) -> (metrics of all steps and epochs, new state, the best state): whole
      training, as a Loop over steps

    Operators outside the standard are refused, except in `"inference"`, where only training operators
    and functions are replaced.

    A model with several steps runs all of them by default, in order, as often as the file says.
    `steps` selects one by number or name, or gives counts: `"discriminator:2,generator"`. Several
    are lowered as one: later steps read the state that earlier ones changed. In `"evaluation"` and
    `"gradients"`, each reads the state of the call.

    The installed ONNX Runtime can load the result: bodies replace operators that it lacks.

    - `model`: a training model, or any other for `"inference"`
    - `steps`: see above
    - `recompute`: values to compute twice to save memory, as in `onward.gradient`
    - `part`: see above (default: `"step"`, or `"inference"` of a model without steps). The following options are for
      the part `"run"` only
    """
    if part == RUN:
        return for_onnxruntime(lower_run(load(model), steps, LoweringOptions(recompute), WholeRunOptions(**settled)))
    if settled:
        raise RecipeError(
            f"`{next(iter(settled))}` works with the part `{RUN}` only", hint=f'add `part="{RUN}"` (`--part {RUN}`)'
        )
    return for_onnxruntime(lower_for_engine(model, steps, part, LoweringOptions(recompute)))
