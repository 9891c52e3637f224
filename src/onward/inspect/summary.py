"""A summary of a model, and its JSON form: the names of fields are its keys, and stable."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import onnx_ir as ir

from onward.run_state.reading import LossTerm, Setting, plain

Shape = tuple[int | str | None, ...]
"""Numbers, names, and None where nothing is known about an axis."""

Role = Literal["trained", "frozen", "trainable", "statistics", "constant"]
"""`trainable` is what `prepare` would train, in a model that nobody trains yet."""

ROLES: tuple[Role, ...] = ("trained", "frozen", "trainable", "statistics", "constant")


@dataclass(frozen=True)
class Port:
    """Something that goes in or comes out."""

    name: str
    type: str
    shape: Shape | None


@dataclass(frozen=True)
class File:
    """The file as such."""

    path: str | None
    bytes: int | None
    """Its size, without external data; None for a model that is not on disk."""
    external_bytes: int
    external_files: tuple[str, ...]
    ir_version: int | None
    opset: int
    opsets: dict[str, int]
    producer: str
    nodes: int
    """Nodes of the inference graph, nested ones included."""
    functions: tuple[str, ...]


@dataclass(frozen=True)
class Weight:
    """A constant tensor of the inference graph: what it is to training, and why."""

    name: str
    type: str
    shape: Shape | None
    numbers: int
    bytes: int
    role: Role
    reason: str
    group: str | None = None
    """The optimizer group that updates it."""
    steps: tuple[int, ...] = ()
    """The steps that train it."""


@dataclass(frozen=True)
class Amount:
    tensors: int
    numbers: int
    bytes: int

    @staticmethod
    def of(weights: Iterable[Weight]) -> Amount:
        weights = list(weights)
        return Amount(len(weights), sum(w.numbers for w in weights), sum(w.bytes for w in weights))


@dataclass(frozen=True)
class QuantizedWeights:
    """Weights that are rounded in the same way."""

    type: str
    per: str
    """What has a scale of its own: a tensor, a channel, or a block."""
    tensors: int
    numbers: int


@dataclass(frozen=True)
class Quantization:
    """What is rounded to integers."""

    weights: tuple[QuantizedWeights, ...]
    activations: dict[str, int]
    """How many, by type."""
    ranges: tuple[str, ...]
    """How training comes by scales: `moving`, `lsq` or `fixed`."""


@dataclass(frozen=True)
class Loss:
    differentiated: tuple[str, ...]
    """The values that Gradient operators differentiate: their `y`."""
    operators: tuple[str, ...]
    """The operator that computes each of them."""
    outputs: tuple[str, ...]
    """The outputs of the model that the loss looks at."""
    terms: tuple[LossTerm, ...]
    """Empty where the file does not record them."""


@dataclass(frozen=True)
class GroupSummary:
    """Parameters that one optimizer updates with the same settings."""

    name: str
    optimizer: str | None
    """By the name that a recipe gives it, or the operator's; None where an update is written out in plain operators."""
    operators: tuple[str, ...]
    hyper: dict[str, Setting]
    """Every hyper-parameter at its current value, `lr` first."""
    lr_now: float | None
    """The learning rate of the next update, by the schedule."""
    options: dict[str, Any]
    slots: tuple[str, ...]
    parameters: tuple[str, ...]
    is_function: bool = False
    """Whether the optimizer is none of a recipe's by name, but a function that updates all parameters at once."""


@dataclass(frozen=True)
class ScheduleSection:
    """One schedule of a sequence, with its numbers at their current values."""

    name: str
    numbers: dict[str, Setting]
    choices: dict[str, Any]


@dataclass(frozen=True)
class Clip:
    kind: Literal["norm", "tensor_norm", "value"]
    limit: Setting
    operator: str


@dataclass(frozen=True)
class Accumulation:
    batches: Setting
    seen: Setting
    """Batches since the last update."""


@dataclass(frozen=True)
class Average:
    """The exponential moving average of the parameters."""

    decay: Setting
    updates: Setting


@dataclass(frozen=True)
class LossScale:
    scale: Setting
    dynamic: bool
    settings: dict[str, Setting]


@dataclass(frozen=True)
class Progress:
    step: int | None
    """Updates made so far; None where no counter can be told."""
    steps: int | None
    """Where the schedule ends; None where it does not say, or does not end."""
    recorded: dict[str, Any]
    """What the file records beside it: epochs, samples, ..."""


@dataclass(frozen=True)
class StateAmount:
    role: str
    tensors: int
    bytes: int


@dataclass(frozen=True)
class Training:
    """One step."""

    name: str
    inputs: tuple[Port, ...]
    """What training needs beside the inputs of the model."""
    metrics: tuple[Port, ...]
    loss: Loss
    groups: tuple[GroupSummary, ...]
    trained: Amount
    schedule: tuple[ScheduleSection, ...]
    clip: Clip | None
    accumulation: Accumulation | None
    average: Average | None
    loss_scale: LossScale | None
    progress: Progress
    state: tuple[StateAmount, ...]
    hyperparameters: dict[str, Setting]
    """Every number that can be edited in the file, by the name of its initializer."""
    nodes: int
    initialization: bool
    """Whether every state variable can be reset."""


FORMAT = 1
"""The version of the JSON form. New keys may come without a new one; none goes or changes its meaning."""


@dataclass(frozen=True)
class Summary:
    """What is in a model. `to_json` has the names of the fields as keys, at every level:

    - `format`: 1
    - `name`; `file`: path, bytes, external_bytes, external_files, ir_version, opset, opsets, producer, nodes, functions
    - `inputs`, `outputs` of the inference graph: lists of name, type, shape (numbers, names and null; null if unknown)
    - `parameters`: trained, frozen, trainable, statistics, constant; each with tensors, numbers, bytes
    - `remarks`: sentences about what an exporter seems to have folded away, merged or added; what augmentation moves
    - `quantization`: null, or weights (list of type, per, tensors, numbers), activations (numbers by type), ranges
    - `weights`: list of name, type, shape, numbers, bytes, role (one of these five), reason, group, steps
    - `steps`: none for an inference model, else a list of
        - `name`, `nodes`, `initialization`; `inputs` and `metrics` that inference does not have
        - `loss`: differentiated, operators, outputs, and terms: list of name, output, inputs, options, scale
        - `groups`: list of name, optimizer, operators, hyper, lr_now, options, slots, parameters, is_function
        - `trained`: tensors, numbers, bytes
        - `schedule`: list of name, numbers, choices
        - `clip`: null, or kind, limit, operator; `accumulation`: null, or batches, seen; `average`: null, or decay,
          updates; `loss_scale`: null, or scale, dynamic, settings
        - `progress`: step, steps, recorded
        - `state`: list of role, tensors, bytes
        - `hyperparameters`: every number that can be edited in the file, by the name of its initializer
    """

    name: str
    file: File
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    parameters: dict[Role, Amount]
    remarks: tuple[str, ...]
    quantization: Quantization | None
    weights: tuple[Weight, ...]
    steps: tuple[Training, ...]

    @property
    def is_training_model(self) -> bool:
        return bool(self.steps)

    def with_role(self, *roles: Role) -> list[Weight]:
        return [weight for weight in self.weights if weight.role in roles]

    def to_json(self) -> dict[str, Any]:
        """The same as plain data: dictionaries, lists, texts, numbers and None."""
        return {"format": FORMAT, **plain(asdict(self))}


# ---- ports -----------------------------------------------------------------------------------------------------------


_TYPE_NAMES = {"FLOAT": "float32", "DOUBLE": "float64"}


def port(value: ir.Value) -> Port:
    return Port(value.name or "", type_name(value.type), shape_of(value))


def type_name(kind: ir.TypeProtocol | None) -> str:
    """`float32`, `sequence(int64)`, or `?`."""
    if kind is None:
        return "?"
    if isinstance(kind, ir.TensorType):
        return dtype_name(kind.dtype)
    inner = getattr(kind, "elem_type", None)
    words = {ir.SequenceType: "sequence", ir.OptionalType: "optional", ir.SparseTensorType: "sparse"}
    word = next((word for cls, word in words.items() if isinstance(kind, cls)), type(kind).__name__)
    return f"{word}({dtype_name(inner) if isinstance(inner, ir.DataType) else type_name(inner)})"


def dtype_name(dtype: ir.DataType | None) -> str:
    if dtype is None or dtype == ir.DataType.UNDEFINED:
        return "?"
    return _TYPE_NAMES.get(dtype.name, dtype.name.lower())


def shape_of(value: ir.Value) -> Shape | None:
    if value.shape is None:
        return None
    return tuple(axis if isinstance(axis, int) else axis.value for axis in value.shape)
