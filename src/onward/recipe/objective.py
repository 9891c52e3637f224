"""The loss of a recipe: named losses, a loss model or function, or a value of the model."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.build import Expr
from onward.errors import RecipeError, UnknownNameError, list_names, suggest
from onward.model import Model, load
from onward.model.core import all_names, tensor_of, values
from onward.recipe.interface import correct_shape
from onward.recipe.losses import LOSSES, Loss
from onward.recipe.losses import loss as named_loss
from onward.recipe.losses.definitions import reduce_loss
from onward.recipe.spec import Spec, check_options, checked_number, is_graph, one_of, parse, split_address
from onward.recipe.step_builder import StepBuilder, embed
from onward.recipe.trainable import training_ends
from onward.transform.merge import add_prefix
from onward.transform.opset import convert_opset
from onward.transform.training import INTERFACE_KEY
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
    if is_graph(loss):  # before lists: a function is a sequence of nodes
        return [Term(Spec("custom", {"file": os.path.basename(loss)} if isinstance(loss, str) else {}), custom=loss)]
    if isinstance(loss, Sequence) and not isinstance(loss, str):
        return [term for item in loss for term in terms(item)]
    output = None
    if isinstance(loss, str):
        output, loss = split_address(loss, {*LOSSES, _EXISTING})  # `logits=cross_entropy:label_smoothing=0.1`
    if isinstance(loss, str) and loss.startswith(f"{_EXISTING}:"):
        return [Term(Spec(_EXISTING, {"name": loss.partition(":")[2]}), output=loss.partition(":")[2])]
    spec = parse(loss)
    scale, constant = _number(spec, "scale"), _number(spec, "constant")
    return [Term(spec.without("scale", "constant"), output, 1.0 if scale is None else scale, constant)]


def with_option(loss: Any, name: str, option: str, value: Any) -> Any:
    """Return a loss as a recipe has it, with an option of all its losses `name`."""
    changed = []
    for term in terms(loss):
        is_named = term.spec.name in LOSSES and LOSSES[term.spec.name].name == name
        spec = Spec(term.spec.name, {**term.spec.options, **({option: value} if is_named else {})})
        changed.append(_written(dataclasses.replace(term, spec=spec)))
    return changed[0] if len(changed) == 1 else changed


def with_output(loss: Any, output: str) -> Any:
    """Return a loss as a recipe has it, with an output for terms that name none."""
    return [_written(dataclasses.replace(term, output=term.output or output)) for term in terms(loss)]


def _written(term: Term) -> Any:
    """Return a term as a recipe has it."""
    if term.spec.name == _EXISTING:
        return _EXISTING if term.output is None else f"{_EXISTING}:{term.output}"
    spec: Any = term.custom
    if term.custom is None:
        factors = {"scale": term.scale, **({} if term.constant is None else {"constant": term.constant})}
        spec = {"name": term.spec.name, **term.spec.options, **factors}
    return spec if term.output is None else {term.output: spec}


def _number(spec: Spec, option: str) -> float | None:
    number = spec.options.get(option)
    return None if number is None else checked_number(f"`{option}` of the loss `{spec.name}`", number)


def predictions(model: Model, summands: Sequence[Term]) -> list[ir.Value]:
    """Return the value of the inference graph that each summand reads."""
    by_name = {value.name: value for value in values(model.graph) if value.name}
    targets = [_prediction(model, term, by_name) for term in summands]
    if untyped := [value for value in targets if value.type is None or value.shape is None]:
        fill_in_types(model, untyped)
    for value in targets:
        maps = [node for node, _ in value.uses() if node.op_type == "ZipMap"]
        if value.shape is None and maps:  # onnx infers no shapes of `ai.onnx.ml`
            (labels,) = maps[0].attributes.values()
            value.shape = ir.Shape([None, len(labels.value)])
        correct_shape(model, value)
    return targets


def read_values(model: Model, summands: Sequence[Term]) -> list[ir.Value]:
    """Return the values of the inference graph that the loss reads: predictions, or outputs by name."""
    outputs = {value.name or "": value for value in model.outputs}
    read: list[ir.Value] = []
    for term, prediction in zip(summands, predictions(model, summands), strict=True):
        named = [tensor_of(outputs[name]) for name in _input_names(term.custom) if name in outputs]
        read += named or [prediction]
    return list(dict.fromkeys(read))


def _input_names(custom: Any) -> list[str]:
    """Return the inputs of a loss model or function."""
    if custom is None:
        return []
    if isinstance(custom, ir.Function):
        return [value.name or "" for value in custom.inputs]
    if type(custom).__name__ == "FunctionProto":
        return list(custom.input)
    return [value.name or "" for value in load(custom).inputs]


def with_samples_first(term: Term, prediction: ir.Value) -> Term:
    """Return the term for a prediction whose samples were moved to axis 0, where `ctc` has time by default."""
    node = prediction.producer()
    is_moved = node is not None and INTERFACE_KEY in node.metadata_props
    if not is_moved or term.spec.name not in LOSSES or LOSSES[term.spec.name].name != "ctc":
        return term
    return dataclasses.replace(term, spec=Spec(term.spec.name, {**term.spec.options, "batch_first": True}))


def _prediction(model: Model, term: Term, by_name: Mapping[str, ir.Value]) -> ir.Value:
    if term.output is not None:
        if term.output not in by_name:
            hint = suggest(term.output, by_name) or f"the outputs are {', '.join(v.name or '' for v in model.outputs)}"
            raise UnknownNameError(f"no value `{term.output}` for the loss `{term.spec.name}`", hint=hint)
        return _tensor(by_name[term.output], term)
    floating = [value for value in model.outputs if value.dtype is None or value.dtype.is_floating_point()]
    if not floating:
        ends = [f"`{end.name}={term.spec}`" for end in training_ends(model, model.outputs)]
        advice = f"name the last value with a gradient: {' or '.join(ends[:3])}" if ends else None
        raise RecipeError("the model has no floating-point output for a loss", hint=advice)
    if len(floating) > 1 and term.custom is None:
        outputs = list_names([value.name or "" for value in floating], 6)
        hint = f"write `{floating[0].name}={term.spec}`, or one loss for each output"
        raise RecipeError(f"the loss `{term.spec.name}` does not name one of several outputs: {outputs}", hint=hint)
    return _tensor(floating[0], term)


def _tensor(value: ir.Value, term: Term) -> ir.Value:
    """Return the tensor that a loss reads for a value; refuse sequences."""
    tensor = tensor_of(value)
    if isinstance(tensor.type, ir.SequenceType | ir.OptionalType):
        node = tensor.producer()
        is_list = node is not None and node.op_type == "SequenceConstruct"
        parts = [part.name for part in node.inputs if part is not None] if node is not None and is_list else []
        hint = f"name a tensor in it: `{parts[0]}={term.spec}`" if parts else "name a tensor before it"
        raise RecipeError(f"`{value.name}` is a sequence, which a loss cannot read", hint=hint)
    return tensor


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
                f"`sample_weight` cannot weight the loss `{term.spec.name}`, which has no value per sample",
                hint="choose a loss by name, or add an input for weights to yours",
            )
        if term.custom is not None:
            result, inputs = _custom(builder, term, prediction, trained)
        elif term.spec.name == _EXISTING:
            result, inputs = prediction, []
        else:
            result, inputs = _named(builder, term, prediction, value, weights)
        if result.value.shape is not None and len(result.value.shape) and any(d != 1 for d in result.value.shape):
            message = f"the loss `{term.spec.name}` has the shape {result.value.shape} and is not one number"
            raise RecipeError(message, hint="reduce it to a mean or a sum")
        facts.append(term.fact(value.name or "", inputs))
        if term.scale != 1.0:
            scale = builder.hyper(f"loss/{value.name}/scale", term.scale)
            result = result * result.op.CastLike(scale, result)
        total = result if total is None else total + result
    assert total is not None
    builder.fact("loss", facts)
    return total


def _named(
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
                f"the loss `{loss.name}` takes no `constant`: its targets are not like its output",
                hint="choose one such as `mse` or `bce_with_logits`",
            )
        inputs, names = [prediction.op.filled_like(prediction.value, term.constant)], []
    else:
        taken = {v.name for v in builder.step.algorithm.inputs}
        inputs = [
            builder.input(t.name if t.name not in taken else f"{value.name}_{t.name}", t.dtype, t.shape)
            for t in targets
        ]
        names = [x.name for x in inputs]
    if weights is not None:
        return weights.build(loss, prediction, inputs, options), names
    return loss.build(prediction.op, prediction, *inputs, **options), names


def _custom(
    builder: StepBuilder, term: Term, prediction: Expr, trained: Mapping[ir.Value, ir.Value]
) -> tuple[Expr, list[str]]:
    """Append a loss model or function.

    Its inputs are outputs of the model by name, other values as `value:NAME`, or new inputs.
    """
    outputs = {value.name: trained.get(value, value) for value in builder.model.outputs if value.name}
    outputs |= {f"{_EXISTING}:{v.name}": trained.get(v, v) for v in values(builder.model.graph) if v.name}
    added: list[str] = []

    def sources(names: Sequence[str], declared: Sequence[tuple[ir.DataType | None, ir.Shape | None]]) -> list[ir.Value]:
        arguments: list[ir.Value] = []
        has_names = any(name in outputs for name in names)
        for i, (name, (dtype, shape)) in enumerate(zip(names, declared, strict=True)):
            if name in outputs:
                arguments.append(outputs[name])
            elif i == 0 and not has_names:
                arguments.append(prediction.value)
            elif dtype is None:
                raise RecipeError(f"the input `{name}` of the loss model has no type")
            else:
                arguments.append(builder.input(name, dtype, shape).value)
                added.append(arguments[-1].name or "")
        return arguments

    custom = term.custom
    if not isinstance(custom, ir.Function) and type(custom).__name__ != "FunctionProto":
        loss = add_prefix(convert_opset(load(custom), builder.model.opset), "loss/")
        names = [(value.name or "").removeprefix("loss/") for value in loss.inputs]
        arguments = sources(names, [(value.dtype, value.shape) for value in loss.inputs])
        output = loss.outputs[0]
        embed(builder, loss, dict(zip(loss.inputs, arguments, strict=True)))
        if output.producer() is None:
            raise RecipeError("the loss model computes nothing")
        return prediction.op(output), added
    function = custom.clone() if isinstance(custom, ir.Function) else ir.from_proto(custom)
    usual = prediction.dtype or ir.DataType.FLOAT  # inputs of functions need no type
    arguments = sources(
        [value.name or f"input{i}" for i, value in enumerate(function.inputs)],
        [(v.dtype or usual, v.shape or (None if v.dtype else prediction.value.shape)) for v in function.inputs],
    )
    builder.model.functions[function.identifier()] = function
    builder.model.ir.opset_imports.setdefault(function.domain, 1)
    outcome = prediction.op.node(function.domain, function.name, *arguments, outputs=len(function.outputs))
    result = outcome if isinstance(outcome, Expr) else outcome[0]
    if result.dtype is None and prediction.dtype is not None:
        result.value.type = ir.TensorType(prediction.dtype)
    return result, added


def scalar(loss: Expr) -> Expr:
    """Reshape a loss of one element to a tensor without axes."""
    shape = loss.value.shape
    if shape is not None and len(shape) == 0:
        return loss
    reduced = loss.op.ReduceSum(loss, keepdims=0) if shape is None else loss.op.Reshape(loss, np.asarray([], np.int64))
    reduced.value.shape = ir.Shape([])
    return reduced


# ---- losses on unsuitable values -------------------------------------------------------------------------------------


_HANDED_ON = {"Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Cast", "Clip", "Normalizer"}
_NOT_FOR_PROBABILITIES = {
    ("cross_entropy", "Softmax"): "cross_entropy",
    ("cross_entropy", "Sigmoid"): "bce_with_logits",
    ("bce_with_logits", "Sigmoid"): "bce_with_logits",
    ("bce_with_logits", "Softmax"): "cross_entropy",
    ("nll", "Softmax"): "cross_entropy",
    ("ctc", "Softmax"): "ctc",
}
"""(loss, operator whose probabilities it is not for) -> the loss for the operator's input.

Cross-entropy of LogSoftmax is right: logarithms of probabilities are scores that give these.
"""
_GIVE_SCORES = {"Gemm", "MatMul", "Conv"}
_NOT_FOR_SCORES = {"binary_cross_entropy": "bce_with_logits", "nll": "cross_entropy", "ctc": "ctc"}
"""Loss that is not for scores -> the loss for them."""
_TAKES = {"binary_cross_entropy": "probabilities", "nll": "log-probabilities", "ctc": "log-probabilities"}


def source_of_scores(value: ir.Value) -> tuple[ir.Node | None, int]:
    """Return the node that computes an output, behind nodes that only hand it on, and the number of transposes."""
    node, turns = value.producer(), 0
    while node is not None and node.op_type in _HANDED_ON and node.inputs and node.inputs[0]:
        turns += node.op_type == "Transpose"
        node = node.inputs[0].producer()
    return node, turns


def is_of_scores(node: ir.Node | None) -> bool:
    """True if a node computes scores, which are no probabilities."""
    return node is not None and node.op_type in _GIVE_SCORES


def unsuitable(summands: Sequence[Term], predictions: Sequence[ir.Value]) -> Iterator[str]:
    """Yield a sentence for each loss that reads probabilities instead of scores, or the reverse."""
    for term, value in zip(summands, predictions, strict=True):
        loss = LOSSES.get(term.spec.name)
        node, turns = source_of_scores(value)
        if node is None or loss is None or term.custom is not None:
            continue
        is_ctc, options = loss.name == "ctc", dict(term.spec.options)
        if is_ctc and options.get("logits"):
            takes = "logits"
        else:
            takes = _TAKES.get(loss.name, "logits")
        instead = _NOT_FOR_PROBABILITIES.get((loss.name, node.op_type))
        scores = node.inputs[0] if node.inputs else None
        if instead is not None and scores is not None:
            given = "probabilities"
            if is_ctc and turns % 2:  # the scores before the Transpose
                options["batch_first"] = not options.get("batch_first", False)
            spec = f"{scores.name}={_instead(instead, options)}"
        elif loss.name in _NOT_FOR_SCORES and takes != "logits" and is_of_scores(node):
            given, spec = "logits", _instead(_NOT_FOR_SCORES[loss.name], options)
        else:
            continue
        yield (
            f"the loss `{loss.name}` is for {takes}, but `{value.name}` has {given} ({node.op_type}); "
            f'use `loss="{spec}"` (`--loss {spec}`)'
        )


def _instead(name: str, options: Mapping[str, Any]) -> str:
    kept = {option: value for option, value in options.items() if option in LOSSES[name].options}
    return str(Spec(name, {**kept, "logits": True} if name == "ctc" else kept))


_MAY_BE_NEGATIVE = {"kl_div", "poisson_nll", "gaussian_nll"}
_ROUNDING = {"mean": -1e-3, "sum": -1.0}
"""Losses below this, by reduction, are negative beyond rounding."""


def is_impossible(summands: Sequence[tuple[str, Mapping[str, Any], float]], value: float) -> str | None:
    """Return a hint if a loss is negative that cannot be; None if it can.

    Summands are names of losses with their options and scales.
    """
    names, least = [], 0.0
    for name, options, scale in summands:
        loss = LOSSES.get(name)
        if loss is None or loss.name in _MAY_BE_NEGATIVE or options.get("target") == "probabilities" or scale < 0:
            return None
        least += _ROUNDING.get({**loss.options, **options}["reduction"], -1.0) * scale
        names.append(loss.name)
    if not names or value >= least:
        return None
    for name in names:
        if name in _TAKES and name != "binary_cross_entropy":
            return f"`{name}` takes log-probabilities: for logits, use `--loss {_instead(_NOT_FOR_SCORES[name], {})}`"
    if {"binary_cross_entropy", "bce_with_logits"} & {*names}:
        return "give targets from 0 to 1, such as `target / 255` for masks"
    return "check the weights and targets of the loss for negative numbers"


# ---- weights of samples ----------------------------------------------------------------------------------------------

# As PyTorch's `(loss(x, y, reduction="none") * weight).mean()` and Keras's `sample_weight`; or divided
# by the sum of the weights, as Keras's `reduction="mean_with_sample_weight"`.

_NOT_OF_SAMPLES = ("ctc",)
"""Losses whose mean is not the mean of the losses per sample."""


@dataclasses.dataclass(frozen=True)
class SampleWeights:
    """The input of sample weights, and the divisor of their sum."""

    values: Expr
    by: str

    @classmethod
    def of(cls, sample_weight: Any, builder: StepBuilder) -> SampleWeights | None:
        """Add the input for `weight` or `weight:by=weights` to a step."""
        if sample_weight is None:
            return None
        spec = parse(sample_weight)
        check_options("`sample_weight`", spec.options, {"by": "count"})
        by = one_of("`by` of `sample_weight`", spec.options.get("by", "count"), "count", "weights")
        if spec.name in all_names(builder.model.graph):
            raise RecipeError(
                f"`sample_weight` is `{spec.name}`, which is a name in the model",
                hint=f"name it `w`, and its column with `--column w={spec.name}`",
            )
        batch = next(iter(next((v.shape for v in builder.model.inputs if v.shape is not None), ())), None)
        return cls(builder.input(spec.name, ir.DataType.FLOAT, ir.Shape([batch])), by)

    def build(self, loss: Loss, prediction: Expr, targets: list[Expr], options: dict[str, Any]) -> Expr:
        """Return a named loss with weighted samples."""
        reduction = {**loss.options, **options}["reduction"]
        if loss.name in _NOT_OF_SAMPLES:
            raise RecipeError(
                f"`sample_weight` cannot weight the loss `{loss.name}`: it weights its samples itself",
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
