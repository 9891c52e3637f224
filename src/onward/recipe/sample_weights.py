"""Samples that count more or less: an input of the step by which the loss of each is multiplied.

As in PyTorch, `(loss(x, y, reduction="none") * weight).mean()`, which is what Keras does with `sample_weight`; or
divided by the sum of the weights, as Keras does with `reduction="mean_with_sample_weight"`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import onnx_ir as ir

from onward.build import Expr
from onward.errors import RecipeError
from onward.model.core import all_names
from onward.recipe.assembly import Assembly
from onward.recipe.losses import Loss
from onward.recipe.losses.registry import one_of, reduce_loss
from onward.recipe.spec import check_options, parse

_NOT_OF_SAMPLES = ("ctc",)
"""Losses whose mean is not that of what they give for each sample."""


@dataclasses.dataclass(frozen=True)
class SampleWeights:
    """The input that holds weights, and what their sum is divided by."""

    values: Expr
    by: str

    @classmethod
    def of(cls, given: Any, assembly: Assembly) -> SampleWeights | None:
        """Add the input to a step: `weight`, or `weight:by=weights`."""
        if given is None:
            return None
        spec = parse(given)
        check_options("`sample_weight`", spec.options, {"by": "count"})
        by = one_of("`by` of `sample_weight`", spec.options.get("by", "count"), "count", "weights")
        if spec.name in all_names(assembly.model.graph):
            raise RecipeError(
                f"the model has something called `{spec.name}` already, so weights of samples cannot be",
                hint=f"call the input otherwise, and say which column it takes: `--column w={spec.name}`",
            )
        batch = next(iter(next((v.shape for v in assembly.model.inputs if v.shape is not None), ())), None)
        return cls(assembly.input(spec.name, ir.DataType.FLOAT, ir.Shape([batch])), by)

    def build(self, loss: Loss, prediction: Expr, targets: list[Expr], options: dict[str, Any]) -> Expr:
        """A loss by name, in which samples weigh what they should."""
        reduction = {**loss.options, **options}["reduction"]
        if loss.name in _NOT_OF_SAMPLES:
            raise RecipeError(
                f"the loss `{loss.name}` divides by more than the number of samples, so that these cannot be weighted",
                hint="leave `sample_weight` out",
            )
        op = prediction.op
        each = loss.build(op, prediction, *targets, **{**options, "reduction": "none"})
        weights = op.CastLike(self.values, each)
        each = op.Flatten(each, axis=1)  # a weight goes with all that a sample has
        if self.by == "count" and reduction != "batchmean":
            made = reduce_loss(op, each * op.Unsqueeze(weights, [1]), reduction)
        else:
            of_sample = (op.ReduceMean if reduction == "mean" else op.ReduceSum)(each, [1], keepdims=0)
            counted = weights if self.by == "weights" else op.filled_like(weights.value, 1.0)
            made = reduce_loss(op, of_sample * weights, "sum" if reduction == "sum" else "mean", weight=counted)
        made.value.shape = ir.Shape([])
        return made
