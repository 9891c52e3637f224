"""Artifacts of onnxruntime-training, read back: the model, its loss, and the optimizer.

The model is the evaluation graph, which ends in the loss. If only the training graph exists, its
forward pass is extracted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import onnx_ir as ir

from onward.checkpoint.format import Captured
from onward.constants import constant_tensor
from onward.errors import InvalidModelError, UnsupportedError, list_names
from onward.model import Model, load
from onward.model.core import values
from onward.model.walk import ancestors
from onward.recipe.losses import loss as named_loss
from onward.recipe.spec import Spec
from onward.recipe.training_mode import SWITCHED
from onward.run_state.tensors import StoredTensor
from onward.transform import extract
from onward.transform.types import fill_in_types

EVALUATION, TRAINING, OPTIMIZER = "eval_model", "training_model", "optimizer_model"
_DOMAIN = "com.microsoft"


def artifact(checkpoint: Path, suffix: str) -> Path | None:
    """Return the graph of a kind with the prefix of the checkpoint, or the only one."""
    paths = sorted(checkpoint.parent.glob(f"*{suffix}.onnx"))
    alike = [path for path in paths if checkpoint.name.startswith(path.name.removesuffix(f"{suffix}.onnx"))]
    longest = max(alike, key=lambda path: len(path.name), default=None)
    return longest or (paths[0] if len(paths) == 1 else None)


# ---- the optimizer ---------------------------------------------------------------------------------------------------


class OrtRule(NamedTuple):
    """Optimizer of an optimizer graph."""

    family: str
    settings: Mapping[str, Any]
    spec: Spec | None
    """Without the rate; None if no recipe has it."""
    clip: Mapping[str, Any] | None
    slots: tuple[str, ...]
    """Names in a recipe of `momentum0` and so on."""


def optimizer_of(path: Path) -> OrtRule | None:
    """Return the optimizer of a graph; None if it is unknown."""
    clip: Mapping[str, Any] | None = None
    rule: OrtRule | None = None
    for node in load(path).graph:
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        if (node.domain, node.op_type) == (_DOMAIN, "InplaceClipGradNorm"):
            clip = {"norm": float(attributes.get("max_norm", 1.0)), "variant": "torch"}
        elif (node.domain, node.op_type) in _OPTIMIZERS and rule is None:
            rule = _OPTIMIZERS[node.domain, node.op_type](attributes)
        else:
            return None
    return rule and rule._replace(clip=clip)


def _adamw(attributes: Mapping[str, Any]) -> OrtRule:
    defaults = {"alpha": 0.9, "beta": 0.999, "epsilon": 1e-8, "weight_decay": 1e-2, "adam_mode": 0, "correct_bias": 1}
    settings = {**defaults, **attributes}
    numbers = {"beta1": settings["alpha"], "beta2": settings["beta"], "eps": settings["epsilon"]}
    decay = settings["weight_decay"]
    spec = Spec("adam", {**numbers, "variant": "keras"})
    if decay or not settings["adam_mode"]:
        variant = "transformers" if settings["adam_mode"] else "torch"
        spec = Spec("adamw", {**numbers, "weight_decay": decay, "variant": variant})
    return OrtRule("adamw", settings, spec if settings["correct_bias"] else None, None, ("exp_avg", "exp_avg_sq"))


def _sgd(attributes: Mapping[str, Any]) -> OrtRule:
    return OrtRule("sgd", attributes, Spec("sgd", {"variant": "torch"}), None, ())  # it does not use its momentum


_OPTIMIZERS = {(_DOMAIN, "AdamWOptimizer"): _adamw, (_DOMAIN, "SGDOptimizerV2"): _sgd}


# ---- the model -------------------------------------------------------------------------------------------------------


def model_of(checkpoint: Path, trainable: Mapping[str, StoredTensor], frozen: Mapping[str, StoredTensor]) -> Captured:
    """Return the model with the parameters of a checkpoint, and its loss."""
    evaluation, training = artifact(checkpoint, EVALUATION), artifact(checkpoint, TRAINING)
    path = evaluation or training
    if path is None:
        raise UnsupportedError(
            f"`{checkpoint}` has no `{EVALUATION}.onnx` or `{TRAINING}.onnx` beside it",
            hint="copy one there, or give the model: `--like model.onnx`",
        )
    model = load(path)
    if not model.outputs:
        raise InvalidModelError(f"`{path}` has no output, which would be its loss")
    _hold(model, {**trainable, **frozen}, path)
    outputs = [value.name or "" for value in model.outputs if not (value.name or "").endswith(".accumulation.out")]
    if evaluation is None:
        model = extract(model, _inputs_of(model, outputs), outputs)
    for node in model.graph:
        _for_evaluation(node)
    if training is not None:
        _as_trained(model, load(training), trainable)
    loss, prediction = loss_of(model)
    if prediction is None:
        return Captured(model, loss)
    needed = list(dict.fromkeys([prediction, *outputs[1:]]))
    return Captured(extract(model, _inputs_of(model, needed), needed), {prediction: loss})


def _hold(model: Model, tensors: Mapping[str, StoredTensor], path: Path) -> None:
    """Turn the inputs that the checkpoint has tensors for into parameters."""
    inputs = {value.name: value for value in model.graph.inputs}
    if missing := [name for name in tensors if name not in inputs]:
        raise InvalidModelError(
            f"`{path}` has no input {list_names(missing, 6)}, which the checkpoint holds",
            hint="open the folder with the graphs of this checkpoint",
        )
    for name, tensor in tensors.items():
        value = inputs[name]
        dtype, shape = ir.DataType.from_numpy(tensor.dtype), ir.Shape(tensor.shape)
        if value.dtype not in (dtype, None) or value.shape not in (shape, None):
            raise InvalidModelError(
                f"`{name}` is {value.dtype} {value.shape} in `{path}`, and {dtype} {shape} in the checkpoint"
            )
        value.const_value = ir.ExternalTensor(
            tensor.path.name, tensor.offset, tensor.nbytes, dtype, shape=shape, name=name,
            base_dir=str(tensor.path.parent),
        )  # fmt: skip
        model.graph.inputs.remove(value)
        model.graph.register_initializer(value)


def _inputs_of(model: Model, outputs: list[str]) -> list[str]:
    """Return the inputs that outputs depend on."""
    _, needed = ancestors(value for value in values(model.graph) if value.name in outputs)
    return [value.name or "" for value in model.inputs if value in needed or value.name in outputs]


def _for_evaluation(node: ir.Node) -> None:
    """Replace an operator of the training mode by its inference form, which `prepare` can train."""
    form = _IN_TRAINING.get((node.domain, node.op_type))
    if form is None:
        return
    op_type, outputs, inputs = form
    if any(value.uses() or value.is_graph_output() for value in node.outputs[outputs:]):
        raise UnsupportedError(f"the forward pass reads an output that only `{node.op_type}` computes")
    if node.op_type == "SoftmaxCrossEntropyLossInternal" and len(node.inputs) > 3:
        node.attributes["ignore_index"] = ir.AttrInt64("ignore_index", _number(node.inputs[3]))
    node.domain, node.op_type = "", op_type
    node.resize_outputs(min(outputs, len(node.outputs)))
    node.resize_inputs(min(inputs, len(node.inputs)))
    for name in [name for name in node.attributes if name not in _KEPT]:
        del node.attributes[name]


def _as_trained(model: Model, training: Model, trainable: Collection[str]) -> None:
    """Keep only operators with a training mode that were trained in it."""
    makers = {value.name: node for node in training.graph for value in node.outputs}
    for node in list(model.graph):
        maker = makers.get(node.outputs[0].name) if node.op_type in SWITCHED and not node.domain else None
        if maker is None:
            continue
        if node.op_type == "Dropout" and not _is_in_training(maker):
            assert node.inputs[0] is not None
            node.outputs[0].replace_all_uses_with(node.inputs[0])
        elif node.op_type == "BatchNormalization":
            scale = node.inputs[1]
            learns = scale is not None and scale.name in trainable
            if learns != _is_in_training(maker):
                source = "running statistics, but its scale learns" if learns else "batches, but its scale is frozen"
                raise UnsupportedError(
                    f"`BatchNormalization` of `{node.outputs[0].name}` uses {source}",
                    hint="train its scale with statistics of batches, or freeze it with running statistics",
                )


def _is_in_training(node: ir.Node) -> bool:
    if node.op_type.startswith("BatchNorm"):
        mode = node.attributes.get("training_mode")
        return mode is not None and bool(mode.value)
    constant = constant_tensor(node.inputs[2]) if len(node.inputs) > 2 else None
    return constant is not None and bool(constant.numpy().item())


def _number(value: ir.Value | None) -> int:
    constant = constant_tensor(value)
    if constant is None or constant.size != 1:
        raise UnsupportedError("`ignore_index` of the loss is computed; it must be a constant")
    return int(constant.numpy().item())


_IN_TRAINING = {
    ("", "BatchNormalization"): ("BatchNormalization", 1, 5),
    (_DOMAIN, "BatchNormInternal"): ("BatchNormalization", 1, 5),
    ("", "Dropout"): ("Dropout", 1, 2),
    (_DOMAIN, "BitmaskDropout"): ("Dropout", 1, 2),
    (_DOMAIN, "ConcatTraining"): ("Concat", 1, 1 << 20),
    (_DOMAIN, "SoftmaxCrossEntropyLossInternal"): ("SoftmaxCrossEntropyLoss", 1, 3),
}
"""Operators for training -> operator for inference, its numbers of outputs and inputs."""
_KEPT = ("epsilon", "momentum", "seed", "axis", "reduction", "ignore_index")


# ---- losses ----------------------------------------------------------------------------------------------------------


_P, _T = "prediction", "target"
_PROBABILITY = ("Sigmoid", _P)
_CONVERSE = ("Mul", ("Log", ("Sub", 1.0, _PROBABILITY)), ("Sub", 1.0, _T))
_LOSSES: dict[str, Any] = {
    "mse": ("Pow", ("Sub", _P, _T), 2.0),
    "l1": ("Abs", ("Sub", _P, _T)),
    "bce_with_logits": ("Neg", ("Add", ("Mul", ("Log", _PROBABILITY), _T), _CONVERSE)),
}
"""Expressions of `onnxblock`, before reduction."""
_REDUCTIONS = {"ReduceMean": "mean", "ReduceSum": "sum"}


def loss_of(model: Model) -> tuple[Any, str | None]:
    """Return the loss as a recipe has it and its value; `value:...` and None if it has no name."""
    value = model.outputs[0]
    match = _cross_entropy(value) or _elementwise(value)
    unnamed = f"value:{value.name}", None
    if match is None:
        return unnamed
    spec, bound = match
    prediction, target = bound[_P], bound[_T]
    if not target.is_graph_input() or prediction.producer() is None:
        return unnamed
    fill_in_types(model, [prediction])
    expected = named_loss(spec.name).targets(prediction, **spec.options)[0]
    if target.dtype != expected.dtype or target.shape != expected.shape:
        return unnamed
    return spec, prediction.name


def _cross_entropy(value: ir.Value) -> tuple[Spec, dict[str, ir.Value]] | None:
    node = value.producer()
    if node is None or node.op_type != "SoftmaxCrossEntropyLoss" or node.domain or len(node.inputs) != 2:
        return None
    scores, labels = node.inputs
    if scores is None or labels is None or any(output.uses() for output in node.outputs[1:]):
        return None
    names = ("reduction", "ignore_index")
    options = {name: node.attributes[name].value for name in names if name in node.attributes}
    return Spec("cross_entropy", options), {_P: scores, _T: labels}


def _elementwise(value: ir.Value) -> tuple[Spec, dict[str, ir.Value]] | None:
    node = value.producer()
    reduction = _REDUCTIONS.get(node.op_type) if node is not None and not node.domain else None
    if node is None or reduction is None or len(node.inputs) != 1 or "axes" in node.attributes:
        return None
    for name, pattern in _LOSSES.items():
        bound: dict[str, ir.Value] = {}
        if _matches(node.inputs[0], pattern, bound):
            return Spec(name, {"reduction": reduction}), bound
    return None


def _matches(value: ir.Value | None, pattern: Any, bound: dict[str, ir.Value]) -> bool:
    if value is None:
        return False
    if isinstance(pattern, str):
        return bound.setdefault(pattern, value) is value
    if isinstance(pattern, float):
        constant = constant_tensor(value)
        return constant is not None and constant.size == 1 and float(constant.numpy().item()) == pattern
    node, (op_type, *operands) = value.producer(), pattern
    if node is None or node.domain or node.op_type != op_type or len(node.inputs) != len(operands):
        return False
    return all(_matches(operand, inner, bound) for operand, inner in zip(node.inputs, operands, strict=True))
