"""The loss of a recipe: named losses, a loss model or function, or a value of the model."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.build import Expr
from onward.errors import RecipeError, UnknownNameError, suggest
from onward.model import Model, load
from onward.model.core import all_names, tensor_of, values
from onward.recipe.losses import LOSSES, Loss
from onward.recipe.losses import loss as named_loss
from onward.recipe.losses.definitions import one_of, reduce_loss
from onward.recipe.spec import Spec, check_options, parse, split_address
from onward.recipe.step_builder import StepBuilder, embed
from onward.transform.merge import add_prefix
from onward.transform.opset import convert_opset
from onward.transform.types import fill_in_types

_EXISTING = "value"


@dataclasses.dataclass(frozen=True)
class Term:
    """A loss on an output, times `scale`. `custom` is a loss model or function."""

    spec: Spec
    output: str | None = None
    scale: float = 1.0
    constant: float | None = None
    """A constant target for the whole output, instead of data."""
    custom: Any = None

    def fact(self, output: str, inputs: Sequence[str]) -> dict[str, Any]:
        return {
            "name": self.spec.name,
            "output": output,
            "inputs": list(inputs),
            "options": dict(self.spec.options),
            "scale": self.scale,
        } | ({} if self.constant is None else {"constant": self.constant})


def terms(loss: Any) -> list[Term]:
    """Parse a loss: a spec, a model or function, a list, or a map from output names."""
    if isinstance(loss, Mapping) and "name" not in loss:
        return [dataclasses.replace(term, output=output) for output, spec in loss.items() for term in terms(spec)]
    if isinstance(loss, Model | ir.Function | os.PathLike | bytes) or hasattr(loss, "SerializeToString"):
        return [Term(Spec("custom"), custom=loss)]
    if isinstance(loss, Sequence) and not isinstance(loss, str):  # which a function is, too: of nodes
        return [term for item in loss for term in terms(item)]
    if isinstance(loss, str) and loss.endswith(".onnx"):
        return [Term(Spec("custom", {"file": os.path.basename(loss)}), custom=loss)]
    output = None
    if isinstance(loss, str):
        output, loss = split_address(loss, {*LOSSES, _EXISTING})  # `logits=cross_entropy:label_smoothing=0.1`
    if isinstance(loss, str) and loss.startswith(f"{_EXISTING}:"):
        return [Term(Spec(_EXISTING, {"name": loss.partition(":")[2]}), output=loss.partition(":")[2])]
    spec = parse(loss)
    scale, constant = _number(spec, "scale"), _number(spec, "constant")
    return [Term(spec.without("scale").without("constant"), output, 1.0 if scale is None else scale, constant)]


def _number(spec: Spec, option: str) -> float | None:
    number = spec.options.get(option)
    if number is not None and not isinstance(number, int | float):
        raise RecipeError(
            f"the {option} of the loss `{spec.name}` is `{number}`, not a number",
            hint=f"write `{spec.name}:{option}=0.5`",
        )
    return None if number is None else float(number)


def predictions(model: Model, summands: Sequence[Term]) -> list[ir.Value]:
    """Return the value of the inference graph that each summand reads."""
    by_name = {value.name: value for value in values(model.graph) if value.name}
    targets = [_prediction(model, term, by_name) for term in summands]
    if untyped := [value for value in targets if value.type is None or value.shape is None]:
        fill_in_types(model, untyped)
    return targets


def _prediction(model: Model, term: Term, by_name: Mapping[str, ir.Value]) -> ir.Value:
    if term.output is not None:
        if term.output not in by_name:
            hint = suggest(term.output, by_name) or f"the outputs are {', '.join(v.name or '' for v in model.outputs)}"
            raise UnknownNameError(f"there is no value `{term.output}` for the loss `{term.spec.name}`", hint=hint)
        return tensor_of(by_name[term.output])
    floating = [value for value in model.outputs if value.dtype is None or value.dtype.is_floating_point()]
    if not floating:
        raise RecipeError("the model has no floating-point output that a loss could look at")
    if len(floating) > 1 and term.custom is None:
        listed = ", ".join(f"`{value.name}`" for value in floating)
        name = floating[0].name
        raise RecipeError(
            f"the model has several outputs: {listed}; the loss must say which one it is for",
            hint=f"write `{name}={term.spec}`, or give one loss for each",
        )
    return tensor_of(floating[0])


def build(
    builder: StepBuilder,
    summands: Sequence[Term],
    inference: Sequence[ir.Value],
    trained: Mapping[ir.Value, ir.Value],
    sample_weight: Any = None,
) -> Expr:
    """Append the sum of all terms, a scalar. `trained` maps inference to training values."""
    total: Expr | None = None
    facts = []
    weights = SampleWeights.of(sample_weight, builder)
    for term, value in zip(summands, inference, strict=True):
        prediction = builder.op.scoped("loss")(trained.get(value, value))
        if weights is not None and (term.custom is not None or term.spec.name == _EXISTING):
            raise RecipeError(
                f"the loss `{term.spec.name}` does not say what each sample adds, so that they cannot be weighted",
                hint="take a loss by name, or let yours have an input for weights",
            )
        if term.custom is not None:
            result, inputs = _custom(builder, term, prediction, trained)
        elif term.spec.name == _EXISTING:
            result, inputs = prediction, []
        else:
            result, inputs = _add_named_loss(builder, term, prediction, value, weights)
        if result.value.shape is not None and len(result.value.shape) and any(d != 1 for d in result.value.shape):
            raise RecipeError(
                f"the loss `{term.spec.name}` gives a tensor of shape {result.value.shape}, not one number",
                hint="reduce it to a mean or a sum",
            )
        facts.append(term.fact(value.name or "", inputs))
        if term.scale != 1.0:
            scale = builder.hyper(f"loss/{value.name}/scale", term.scale)
            result = result * result.op.CastLike(scale, result)
        total = result if total is None else total + result
    assert total is not None
    builder.fact("loss", facts)
    return total


def _add_named_loss(
    builder: StepBuilder, term: Term, prediction: Expr, value: ir.Value, weights: SampleWeights | None
) -> tuple[Expr, list[str]]:
    loss = named_loss(term.spec.name)
    options = dict(term.spec.options)
    if options.get("reduction", "") in (None, "none"):
        raise RecipeError(f"the loss `{loss.name}` with `reduction=none` is not one number", hint="use `mean` or `sum`")
    targets = loss.targets(value, **options)
    if term.constant is not None:
        if [target.shape for target in targets] != [value.shape] or targets[0].dtype != value.dtype:
            raise RecipeError(
                f"the loss `{loss.name}` does not compare its output with numbers, so it takes no `constant`",
                hint="take one such as `mse` or `bce_with_logits`",
            )
        constant = prediction.op.filled_like(prediction.value, term.constant)
        return _named(loss, prediction, [constant], options, weights), []
    taken = {v.name for v in builder.step.algorithm.inputs}
    inputs = [
        builder.input(t.name if t.name not in taken else f"{value.name}_{t.name}", t.dtype, t.shape) for t in targets
    ]
    return _named(loss, prediction, inputs, options, weights), [x.name for x in inputs]


def _named(
    loss: Loss, prediction: Expr, targets: list[Expr], options: dict[str, Any], weights: SampleWeights | None
) -> Expr:
    if weights is not None:
        return weights.build(loss, prediction, targets, options)
    return loss.build(prediction.op, prediction, *targets, **options)


def _custom(
    builder: StepBuilder, term: Term, prediction: Expr, trained: Mapping[ir.Value, ir.Value]
) -> tuple[Expr, list[str]]:
    custom = term.custom
    if isinstance(custom, ir.Function) or type(custom).__name__ == "FunctionProto":
        function = custom.clone() if isinstance(custom, ir.Function) else ir.from_proto(custom)
        outputs = _outputs_by_name(builder, trained)
        names = [value.name or f"input{i}" for i, value in enumerate(function.inputs)]
        matched = any(name in outputs for name in names)
        arguments: list[ir.Value] = []
        added: list[str] = []
        for i, name in enumerate(names):
            if name in outputs:
                arguments.append(outputs[name])
            elif i == 0 and not matched:
                arguments.append(prediction.value)
            else:
                declared = function.inputs[i]
                dtype = declared.dtype or prediction.dtype or ir.DataType.FLOAT
                shape = declared.shape or (None if declared.dtype else prediction.value.shape)
                extra = builder.input(name, dtype, shape)
                arguments.append(extra.value)
                added.append(extra.name)
        builder.model.functions[function.identifier()] = function
        builder.model.ir.opset_imports.setdefault(function.domain, 1)
        outcome = prediction.op.node(function.domain, function.name, *arguments, outputs=len(function.outputs))
        result = outcome if isinstance(outcome, Expr) else outcome[0]
        if result.dtype is None and prediction.dtype is not None:
            result.value.type = ir.TensorType(prediction.dtype)
        return result, added
    return _loss_model(builder, load(custom), prediction, trained)


def _outputs_by_name(builder: StepBuilder, trained: Mapping[ir.Value, ir.Value]) -> dict[str, ir.Value]:
    return {value.name: trained.get(value, value) for value in builder.model.outputs if value.name}


def _loss_model(
    builder: StepBuilder, loss: Model, prediction: Expr, trained: Mapping[ir.Value, ir.Value]
) -> tuple[Expr, list[str]]:
    """Embed a loss model; its inputs are outputs of the model by name, or new inputs."""
    loss = add_prefix(convert_opset(loss, builder.model.opset), "loss/")
    outputs = _outputs_by_name(builder, trained)
    input_names = {value: (value.name or "").removeprefix("loss/") for value in loss.inputs}
    matched = any(name in outputs for name in input_names.values())
    added: list[str] = []
    sources: dict[ir.Value, ir.Value] = {}
    for i, (value, name) in enumerate(input_names.items()):
        if name in outputs:
            source = outputs[name]
        elif i == 0 and not matched:
            source = prediction.value
        else:
            if value.dtype is None:
                raise RecipeError(f"the input `{name}` of the loss model has no type")
            source = builder.input(name, value.dtype, value.shape).value
            added.append(source.name or "")
        sources[value] = source
    result = loss.outputs[0]
    embed(builder, loss, sources)
    if result.producer() is None:
        raise RecipeError("the loss model computes nothing")
    return prediction.op(result), added


def scalar(loss: Expr) -> Expr:
    """Reshape a loss of one element to a tensor without axes."""
    shape = loss.value.shape
    if shape is not None and len(shape) == 0:
        return loss
    reduced = loss.op.ReduceSum(loss, keepdims=0) if shape is None else loss.op.Reshape(loss, np.asarray([], np.int64))
    reduced.value.shape = ir.Shape([])
    return reduced


# ---- losses on values that they are not for --------------------------------------------------------------------------


_HANDED_ON = {"Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Cast", "Normalizer"}
_NOT_FOR_PROBABILITIES = {
    ("cross_entropy", "Softmax"): "cross_entropy",
    ("cross_entropy", "Sigmoid"): "bce_with_logits",
    ("bce_with_logits", "Sigmoid"): "bce_with_logits",
    ("bce_with_logits", "Softmax"): "cross_entropy",
    ("nll", "Softmax"): "cross_entropy",
}
"""(loss, operator whose probabilities it is not for) -> the loss for the operator's input.

Cross-entropy of LogSoftmax is right: logarithms of probabilities are scores that give these.
"""
_GIVE_SCORES = {"Gemm", "MatMul", "Conv"}


def unsuitable(summands: Sequence[Term], predictions: Sequence[ir.Value]) -> Iterator[str]:
    """Yield a sentence for each loss that reads probabilities instead of scores, or the reverse."""
    for term, value in zip(summands, predictions, strict=True):
        loss = LOSSES.get(term.spec.name)
        made_by = value.producer()
        while made_by is not None and made_by.op_type in _HANDED_ON and made_by.inputs and made_by.inputs[0]:
            made_by = made_by.inputs[0].producer()
        if made_by is None or loss is None or term.custom is not None:
            continue
        instead = _NOT_FOR_PROBABILITIES.get((loss.name, made_by.op_type))
        if instead is not None and made_by.inputs and made_by.inputs[0] is not None:
            way_out = f"{made_by.inputs[0].name}={instead}"
            yield (
                f"the loss `{loss.name}` is not for probabilities, and `{value.name}` comes out of a "
                f'{made_by.op_type}; look at what goes in: `loss="{way_out}"` (`--loss {way_out}`)'
            )
        elif loss.name == "binary_cross_entropy" and made_by.op_type in _GIVE_SCORES:
            yield (
                f"the loss `{loss.name}` is for probabilities, and `{value.name}` comes out of a {made_by.op_type}; "
                'for scores there is `loss="bce_with_logits"` (`--loss bce_with_logits`)'
            )


# ---- weights of samples ----------------------------------------------------------------------------------------------

# As in PyTorch, `(loss(x, y, reduction="none") * weight).mean()`, which is what Keras does with
# `sample_weight`; or divided by the sum of the weights, as Keras does with
# `reduction="mean_with_sample_weight"`.


_NOT_OF_SAMPLES = ("ctc",)
"""Losses whose mean is not the mean of the losses per sample."""


@dataclasses.dataclass(frozen=True)
class SampleWeights:
    """The input of sample weights, and the divisor of their sum."""

    values: Expr
    by: str

    @classmethod
    def of(cls, given: Any, builder: StepBuilder) -> SampleWeights | None:
        """Add the input for `weight` or `weight:by=weights` to a step."""
        if given is None:
            return None
        spec = parse(given)
        check_options("`sample_weight`", spec.options, {"by": "count"})
        by = one_of("`by` of `sample_weight`", spec.options.get("by", "count"), "count", "weights")
        if spec.name in all_names(builder.model.graph):
            raise RecipeError(
                f"the model has something called `{spec.name}` already, so weights of samples cannot be",
                hint=f"call the input otherwise, and say which column it takes: `--column w={spec.name}`",
            )
        batch = next(iter(next((v.shape for v in builder.model.inputs if v.shape is not None), ())), None)
        return cls(builder.input(spec.name, ir.DataType.FLOAT, ir.Shape([batch])), by)

    def build(self, loss: Loss, prediction: Expr, targets: list[Expr], options: dict[str, Any]) -> Expr:
        """Return a named loss with weighted samples."""
        reduction = {**loss.options, **options}["reduction"]
        if loss.name in _NOT_OF_SAMPLES:
            raise RecipeError(
                f"the loss `{loss.name}` divides by more than the number of samples, so that these cannot be weighted",
                hint="leave `sample_weight` out",
            )
        op = prediction.op
        losses = loss.build(op, prediction, *targets, **{**options, "reduction": "none"})
        weights = op.CastLike(self.values, losses)
        losses = op.Flatten(losses, axis=1)  # a weight goes with all that a sample has
        if self.by == "count" and reduction != "batchmean":
            total = reduce_loss(op, losses * op.Unsqueeze(weights, [1]), reduction)
        else:
            of_sample = (op.ReduceMean if reduction == "mean" else op.ReduceSum)(losses, [1], keepdims=0)
            counted = weights if self.by == "weights" else op.filled_like(weights.value, 1.0)
            total = reduce_loss(op, of_sample * weights, "sum" if reduction == "sum" else "mean", weight=counted)
        total.value.shape = ir.Shape([])
        return total
