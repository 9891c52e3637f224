"""State: the initializers that bindings name. Names and tags describe their role, without Onward.

A slot of parameter `w` is `w/exp_avg`; hyper-parameters of a group are `group0/lr`. Tensors have
the metadata `train.role`, `train.param`, `train.slot` and `train.group`. Facts about the run are
JSON in the metadata of the algorithm.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.model.core import Model, Step, require_tensor
from onward.model.storage.tensor_sites import HeldTensor, describe_tensor

_TAG = "train."
ROLE_KEY = "train.role"
PARAMETER_KEY = "train.param"
SLOT_KEY = "train.slot"
GROUP_KEY = "train.group"
BODIES_KEY = "train.bodies"
PREPROCESSING = "preprocessing"
"""Role of constants of preprocessing."""

KEPT = "kept"
"""Role of checkpoint tensors without another role: `to_checkpoint` writes them back."""

STEP = "step"
"""The counter of updates."""

FACTS = {
    "train.optimizer": "list of groups: optimizer, variant, hyper-parameters as prepared, parameter names",
    "train.lr_scheduler": "the schedule by name, with its options",
    "train.loss": "list of losses: name, output, inputs, options",
    "train.distill": "distillation: list of distances to a teacher, with the values compared, options, weight",
    "train.forward": "values of the forward pass in training mode -> the values of inference that they replace",
    "train.augmentation": "inputs and targets that flips and crops move, and targets that stay",
    "train.progress": "step, epoch, samples",
    "train.times": "runs of the step while other steps run once",
    "train.selection": "trainable, frozen and constant parameters, and why",
    "train.exporter": "parameters that an exporter had merged, copied or dropped, and that are trained as before",
    "train.recipe": "the recipe, as passed to `prepare`",
    "train.checkpoint": "the checkpoint of the training model: facts, names of tensors, and all stored content",
}


@dataclasses.dataclass(frozen=True)
class State:
    """One state variable."""

    name: str
    role: str
    """parameter, optimizer_state, statistics, counter, rng, master, ema, accum, scaler or state."""
    value: ir.Value
    parameter: str | None = None
    slot: str | None = None

    @property
    def array(self) -> np.ndarray:
        return require_tensor(self.value).numpy()

    @property
    def nbytes(self) -> int:
        return self.value.const_value.nbytes if self.value.const_value is not None else 0


def states(model: Model, index: int = 0) -> list[State]:
    """Return the state of a step, in the order of the graph, then the algorithm."""
    step = model.step(index)
    bound = {**step.update, **step.reset}
    trained = set(step.differentiated())
    initializers = [*model.graph.initializers.values(), *step.algorithm.initializers.values()]
    return [_state(value, step, trained) for value in initializers if value.name in bound]


def all_states(model: Model) -> list[State]:
    """Return the state of all steps, without duplicates."""
    candidates = (state for index in range(len(model.steps)) for state in states(model, index))
    return list({state.value: state for state in candidates}.values())


def carried_state(model: Model, index: int = 0) -> list[State]:
    """Return the state of a step, and weights that other steps change or reset."""
    own = states(model, index)
    names = {state.name for state in own}
    others = {name for step in model.steps for name in (*step.update, *step.reset)} - names
    step = model.step(index)
    return own + [_state(value, step, set()) for name, value in model.graph.initializers.items() if name in others]


def _state(value: ir.Value, step: Step, trained: set[str]) -> State:
    name = value.name or ""
    tags = value.const_value.metadata_props if value.const_value is not None else {}
    parameter, slot = tags.get(PARAMETER_KEY), tags.get(SLOT_KEY)
    return State(name, tags.get(ROLE_KEY) or _guess(value, name in trained, step), value, parameter, slot)


def _guess(value: ir.Value, trained: bool, step: Step) -> str:
    """Return the role of untagged state, as in files of other tools."""
    if trained:
        return "parameter"
    if any(use.node.op_type == "BatchNormalization" and use.idx >= 3 for use in value.uses()):
        return "statistics"
    if value.dtype is not None and value.dtype.is_integer() and value.shape is not None and value.shape.rank() == 0:
        return "counter"
    owner, separator, _ = (value.name or "").rpartition("/")
    return "optimizer_state" if separator and owner in step.update else "state"


def hyperparameters(model: Model, index: int = 0) -> dict[str, float]:
    """Return the fixed numbers of training: learning rate, decay, schedule settings."""
    step = model.step(index)
    numbers: dict[str, float] = {}
    for name, value in step.algorithm.initializers.items():
        tensor = value.const_value
        if name not in step.update and tensor is not None and tensor.metadata_props.get(ROLE_KEY) == "hyper":
            number: Any = np.asarray(tensor.numpy())
            numbers[name] = number.item() if number.ndim == 0 else number.tolist()
    return numbers


def with_tags(tensor: ir.TensorProtocol, **tags: str | None) -> ir.TensorProtocol:
    """Return a copy of a tensor with `train.*` tags: role, param, slot, group."""
    added = {f"{_TAG}{key}": value for key, value in tags.items() if value is not None}
    return with_metadata(tensor, {**tensor.metadata_props, **added})


def without_tags(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    """Return the tensor without `train.*` tags, for copies that are not state."""
    tags = {key: value for key, value in tensor.metadata_props.items() if not key.startswith(_TAG)}
    return tensor if len(tags) == len(tensor.metadata_props) else with_metadata(tensor, tags)


def with_metadata(
    tensor: ir.TensorProtocol, metadata: dict[str, str], like: ir.TensorProtocol | None = None
) -> ir.TensorProtocol:
    """Return a tensor with other metadata, optionally under the name of another."""
    named = tensor if like is None else like
    fields = {"dtype": tensor.dtype, "name": named.name or "", "doc_string": named.doc_string}
    described: dict[str, Any] = {**describe_tensor(tensor), **fields, "metadata_props": metadata}
    if isinstance(tensor, HeldTensor):
        at = (tensor.location, tensor.offset, tensor.length)
        return HeldTensor(tensor.source, *at, base_dir=tensor.base_dir, **described)
    if type(tensor) is ir.ExternalTensor:  # a subclass may store its data elsewhere
        return ir.ExternalTensor(tensor.location, tensor.offset, tensor.length, base_dir=tensor.base_dir, **described)
    if isinstance(tensor, ir.LazyTensor):
        return ir.LazyTensor(tensor.raw, **described)
    return ir.Tensor(tensor.numpy(), **described)
