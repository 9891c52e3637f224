"""Checking the gradients of a user's model against differences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from onward.agreement.gradcheck.check import Settings, function_of, rows, settle
from onward.agreement.gradcheck.compare import TOLERANCE
from onward.agreement.gradcheck.inputs import Given, candidate_inputs, given_inputs
from onward.agreement.gradcheck.locate import culprit
from onward.agreement.gradcheck.report import Report
from onward.agreement.gradcheck.subject import subject
from onward.arguments import Count, Range, Seed, checked
from onward.model import Source


@checked()
def check_gradients(
    model: Source,
    y: str | None = None,
    xs: Sequence[str] | None = None,
    *,
    inputs: Given = None,
    directions: Count = 1,
    order: Annotated[int, Range(least=1, most=2)] = 1,
    seed: Seed = 0,
    tolerance: Annotated[float, Range(least=0)] | None = None,
    step: int = 0,
) -> Report:
    """Compare the gradient of `y` by each of `xs` with central differences, along random directions.

        print(onward.check_gradients("digits.onnx", "logits", ["fc1.weight"]))

    All is computed in float64, by the engine `numpy`. Where a gradient is wrong, each operator on the way is checked
    alone, and the report names the first that is.

    - `model`: any model
    - `y`, `xs`: without them, what the Gradient of a training model names; else the output that is a single number, or
      the first, by all parameters and floating-point inputs on which it depends. A `y` of several elements is weighed
      by random numbers
    - `inputs`: a dict of arrays or the path of an .npz file: where to look; what it lacks is made up
    - `directions`: how many are tried for each x
    - `order`: 2 checks the gradient of the gradient as well
    - `seed`: directions, and what is made up, are drawn from it
    - `tolerance`: relative to the size of a gradient
    - `step`: which one, of a training model with several
    """
    what = subject(model, y, xs, step)
    settings = Settings(directions, order, seed, tolerance)
    given = given_inputs(what, inputs)
    function = function_of(what)
    point = settle(function, ({**given, **rest} for rest in candidate_inputs(what.model, given, seed)))
    found = list(rows(what, function, point, settings))
    wrong = list(dict.fromkeys(row.x for row in found if row.verdict == "wrong"))
    blamed = culprit(what, wrong, point, settings) if wrong else None
    return Report(
        y=what.y,
        rows=tuple(found),
        tolerance=TOLERANCE if tolerance is None else tolerance,
        seed=seed,
        made_up=tuple(name for name in point if name not in given),
        culprit=blamed,
    )
